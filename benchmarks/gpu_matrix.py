"""Times the matrix families on a CUDA GPU beside every peer present, on the same inputs in the same process.

python benchmarks/gpu_matrix.py [--only gla kda] [--sides ours fla] --json benchmarks/results/gpu_matrix.json [--merge]
python benchmarks/gpu_matrix.py --page benchmarks/results/gpu_matrix.json --into docs/performance.md   # its table

Public calls in bfloat16 (rows named so: in float32, ours alone), B·T = 32,768 tokens; medians of CUDA-event timings
with a cold L2 (tiny rows: the host's clock over calls in a row, where launching costs). Peers (dsf.analysis.peers):
fla-core, flash-qla, mlstm-kernels, mamba-ssm, torch SDPA, each where it is on the path, for at most --limit seconds a
row with its autotuner, which times a candidate for 8 ms instead of 100. --compile fills Triton's cache on all cores
first. --merge keeps the rows of the JSON that are not measured now; every row names its run.
Outputs and gradients of ours are compared with float64 by tests/test_gpu_matrix.py; a peer's y with ours here.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import torch
from declared import OWN
from gpu_compile import compile_all, limit, tune_quickly
from gpu_page import add_options, page, shows

import dsf
from dsf import I, Key, Scalar, System, Value, diag, exp, outer, sigmoid
from dsf.analysis.peers import Unfit, operator, peers_of
from dsf.mixers import get


@dataclass(frozen=True)
class Row:
    """shapes: (heads, N, P); lengths: of sequences; shared: inputs with one head for all; form: what is asked for.

    dtype: of all inputs.
    """

    recurrence: str
    shapes: tuple[tuple[int, int, int], ...] = ((16, 128, 128),)
    lengths: tuple[int, ...] = (8192,)
    shared: tuple[str, ...] = ()
    batch: int = 0  # 0: 32,768 tokens in all
    form: str = "auto"
    dtype: str = "bfloat16"


BOTH, TINY = ((16, 128, 128), (32, 64, 64)), {"shapes": ((8, 64, 64),), "lengths": (1024,), "batch": 8}
ROWS = {
    "identity": Row("unnormalized_linear_attention", BOTH, (2048, 8192, 32768)),
    "delta": Row("deltanet", BOTH),
    "gated_delta": Row("gated_deltanet", BOTH),
    "scalar": Row("scalar_decay"),
    "retnet": Row("retnet"),
    "mlstm": Row("mlstm"),
    "ssd": Row("ssd", ((64, 128, 64),), (2048, 8192, 32768), shared=("b", "c")),
    "softmax": Row("softmax_attention", lengths=(2048, 8192)),
    "tiny_identity": Row("unnormalized_linear_attention", **TINY),
    "tiny_delta": Row("deltanet", **TINY),
    "tiny_gated_delta": Row("gated_deltanet", **TINY),
    "gla": Row("gla", BOTH),
    "value_decay": Row("fading_channels", ((16, 64, 64), (16, 128, 128)), form="chunk"),
    "value_decay_scan": Row("fading_channels", ((16, 64, 64), (16, 128, 128)), form="scan"),
    "kda": Row("kda", BOTH),
    "rwkv7": Row("rwkv7", BOTH),
    "comba": Row("comba", BOTH),
    "gated_deltanet2": Row("gated_deltanet2", BOTH),
    "mesanet": Row("mesanet", BOTH),
    "two_summed": Row("two_summed", BOTH),
    "two_composed": Row("two_composed", BOTH),
    "rows_summed": Row("rows_summed", BOTH),
    "rows_composed": Row("rows_composed", BOTH),
}
IN_FLOAT32 = ("identity", "delta", "gated_delta", "scalar", "retnet", "mlstm", "ssd", "gla", "kda", "rwkv7")
ROWS |= {f"{name}_float32": replace(ROWS[name], lengths=(8192,), dtype="float32") for name in IN_FLOAT32}
IN_LOGARITHMS = ("kda", "comba", "gated_deltanet2", "scalar_decay")  # their g are logarithms of decays
OURS, GRAPH = "ours", "ours, CUDA graph"
SHARES = {  # workers a peer's row, else 2
    "kda": 12, "gated_deltanet2": 12, "rwkv7": 10, "gla": 8, "gated_delta": 6, "comba": 6, "delta": 5, "ssd": 5,
    "mesanet": 6,
}  # fmt: skip


def recurrence_of(name):
    return OWN[name] if name in OWN else get(name).recurrence


def draw(recurrence, batch, tokens, heads, n, p, shared=(), device="cuda", dtype="bfloat16"):
    """Inputs in the ranges of a trained model, keys of unit length; leaves."""
    out = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n // (1 + i.kind.pair), "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        mine = 1 if i.name in shared else heads
        x = torch.randn([batch, tokens, mine, *sizes] if i.kind.time else [mine, *sizes], device=device)
        if i.name in ("k", "l", "b", "kappa") and sizes:
            x = torch.nn.functional.normalize(x, dim=-1)
        if i.name in ("alpha", "beta", "gamma"):
            x = torch.sigmoid(x + (3.0 if i.name == "alpha" else 0.0))
        if i.name in ("g", "f"):
            x = -torch.nn.functional.softplus(x) if recurrence.name in IN_LOGARITHMS else x + 3.0
        if i.name == "slope":
            x = torch.nn.functional.softplus(x) / 16
        if i.name == "u":
            x = torch.zeros_like(x)
        out[i.name] = x.to(getattr(torch, dtype)).requires_grad_()
    return out


def median(f, rep=200):
    """Median milliseconds on the GPU's clock."""
    from triton.testing import do_bench

    return float(do_bench(f, warmup=50, rep=rep, return_mode="median"))


def on_the_host(f, calls=50):
    """Milliseconds a call of many in a row, on the host's clock: what is larger of launching and running."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            f()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return sorted(times)[2]


def measure(found, forward, leaves, clock, graph=False):
    """Into `found`: forward without and with backward in ms, and peak MiB over inputs and dy."""

    def alone():
        with torch.no_grad():
            forward()

    def both():
        torch.autograd.grad(forward(), leaves, dy, allow_unused=True)

    with torch.no_grad():
        dy = torch.randn_like(forward())
    if graph:
        alone, both = captured(alone), captured(both)
    alone()
    found["forward"] = clock(alone)
    both()
    torch.cuda.synchronize()
    if not graph:
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        torch.cuda.synchronize()
        found["peak"] = (torch.cuda.max_memory_allocated() - base) / 2**20
    found["both"] = clock(both)
    return found


def captured(f):
    """The replay of f's CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        f()
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def ceilings():
    """GB/s of a large copy (read and written), TFLOP/s of a large bf16 product."""
    a = torch.randn(2**30, device="cuda")
    b = torch.empty_like(a)
    copy = 8 * a.numel() / median(lambda: b.copy_(a)) / 1e6
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {"copy GB/s": copy, "matmul TFLOP/s": 2 * 8192**3 / median(lambda: m @ m) / 1e9}


def machine(commit=""):
    """This run: where and from what commit."""
    import triton

    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found = {"commit": commit or done.stdout.strip() or "unknown", "time": time.strftime("%Y-%m-%d %H:%M")}
    found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    return found | {"python": platform.python_version()} | ceilings()


def traffic(recurrence, x):
    """Bytes that have to move forward and forward+backward, and the forward pass's multiplications and additions.

    Backward: the inputs and dy read again, the inputs' gradients written.
    """
    plan = recurrence.plan(**x)
    inputs = sum(t.numel() * t.element_size() for t in x.values())
    return {"bytes": plan.bytes, "bytes both": 2 * plan.bytes + inputs, "flops": plan.flops}


def sides_of(row, wanted):
    """Who computes a row: the peers present, then ours, of those that are wanted (all if empty)."""
    ours = [OURS, GRAPH] if row.batch else [OURS]
    peers = peers_of(row.recurrence) if row.dtype == "bfloat16" else []
    return [who for who in [*ours, *peers] if not wanted or who in wanted]


def side(who, row, x):
    """(call, leaves) of a side on the inputs of a row."""
    recurrence = recurrence_of(row.recurrence)
    if who in (OURS, GRAPH):
        return lambda: recurrence(**x, form=row.form), list(x.values())
    return operator(who, recurrence.name, x)


def cases(row):
    """(heads, N, P, T, sequences) of a row."""
    return [(*s, t, row.batch or 32768 // t) for s in row.shapes for t in row.lengths]


def time_case(name, case, options, dead):
    """Every side's record of one case."""
    row = ROWS[name]
    heads, n, p, tokens, batch = case
    recurrence, clock = recurrence_of(row.recurrence), on_the_host if row.batch else median
    x = draw(recurrence, batch, tokens, heads, n, p, row.shared, dtype=row.dtype)
    with torch.no_grad():
        expected = recurrence(**x)
    for who in sides_of(row, options.sides):
        record = {"who": who, "heads": heads, "N": n, "P": p, "T": tokens, "B": batch} | traffic(recurrence, x)
        begin = time.perf_counter()
        try:
            with limit(options.limit):
                if f"{name} {who}" in dead:
                    raise RuntimeError("its compiler aborts")
                call, leaves = side(who, row, x)
                with torch.no_grad():
                    y = call().float()
                record["difference"] = ((y - expected).norm() / expected.float().norm()).item()
                record["first s"] = time.perf_counter() - begin
                del y
                measure(record, call, leaves, clock, who == GRAPH)
        except Unfit:
            continue
        except Exception as error:  # a peer that does not run here is a result too
            record["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        record["seconds"] = time.perf_counter() - begin
        call = leaves = None
        torch.cuda.empty_cache()
        yield record


def compile_rows(names, wanted, seconds):
    """Compile what the rows will run, on all cores, the longest first; "row who" of those that abort."""
    jobs = []
    for name in names:
        for who in sides_of(ROWS[name], wanted):
            shares = SHARES.get(name, 2) if who in ("fla", "mamba_ssm") else 0
            jobs.append((f"{name} {who}", lambda row=ROWS[name], who=who: run_once(row, who), shares))
    jobs.sort(key=lambda job: ("FlashQLA" not in job[0], -job[2]))  # its kernels one after another take a minute
    return compile_all(jobs, seconds)


def run_once(row, who):
    """A forward and a backward call of a side, for every case; a peer's kernels do not depend on the length."""
    seen = set()
    for heads, n, p, tokens, batch in cases(row):
        if who == GRAPH or (who != OURS and n in seen):
            continue
        seen.add(n)
        recurrence = recurrence_of(row.recurrence)
        x = draw(recurrence, batch, tokens, heads, n, p, row.shared, dtype=row.dtype)
        with contextlib.suppress(Unfit):
            call, leaves = side(who, row, x)
            with torch.no_grad():
                call()
            y = call()
            torch.autograd.grad(y, leaves, torch.randn_like(y), allow_unused=True)


# ---- the first call of a recurrence that nothing was compiled for


@dsf.recurrence
def new_decay(q: Key, k: Key, v: Value, a: Scalar, s: Scalar) -> System:
    """A decay, a strength of writing and a gated readout."""
    return System(A=sigmoid(a), B=k * (exp(s) * v), C=q * sigmoid(s))


@dsf.recurrence
def new_rows(q: Key, k: Key, v: Value, g: Key, s: Scalar) -> System:
    """A decay for every key."""
    return System(A=diag(sigmoid(g)), B=k * (s * v), C=q * sigmoid(s))


@dsf.recurrence
def new_delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, s: Scalar) -> System:
    """A gated delta rule that erases with another strength than it writes with."""
    return System(A=exp(-exp(a)) * (I - sigmoid(b) * outer(k, k)), B=k * (s * v), C=q)


@dsf.recurrence
def new_delta_rows(q: Key, k: Key, v: Value, g: Key, b: Scalar) -> System:
    """Rows that decay, then a delta rule."""
    return System(A=(I - sigmoid(b) * outer(k, k)) @ diag(sigmoid(g)), B=k * (sigmoid(b) * v), C=q)


NEW = {r.name: r for r in (new_decay, new_delta, new_rows, new_delta_rows)}


def first_call(name):
    """Seconds of the first forward+backward call in this process, from the declaration's trace on."""
    x = draw(NEW[name], 4, 8192, 16, 128, 128)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    NEW[name](**x).float().sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def first_calls():
    """first_call of each family in a process with an empty cache, one after the other."""
    found = []
    for name in NEW:
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"TRITON_CACHE_DIR": folder, "DSF_CACHE_DIR": folder}
            command = [sys.executable, __file__, "--first", name]
            text = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        found.append({"name": name, "seconds": float(text.split()[-1])})
    return found


def put(rows, record):
    """Add a record in the place of an older one, but never a failure in the place of a measurement."""
    same = [r for r in rows if all(r[x] == record[x] for x in ("row", "who", "heads", "N", "P", "T"))]
    if same and "both" in same[0] and "both" not in record:
        return
    if same:
        rows[rows.index(same[0])] = record
    else:
        rows.append(record)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["first", *ROWS], help="rows; `first`: first calls")
    parser.add_argument("--sides", nargs="*", default=[], help="ours and peers; all present unless named")
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--compile", nargs="*", help="sides to compile on all cores first; all unless named")
    parser.add_argument("--limit", type=int, default=120)
    add_options(parser)
    parser.add_argument("--first")
    options = parser.parse_args()
    if shows(options, page):
        return
    if options.first:
        print(first_call(options.first))
        return
    names = [name for name in options.only if name != "first"]
    dead = set()
    if options.compile is not None:
        dead = compile_rows(names, options.compile or options.sides, options.limit)
    data = {"runs": {}, "rows": [], "first": []}
    if options.merge and options.json.exists():
        data = json.loads(options.json.read_text())
    tune_quickly()
    run = str(max(map(int, data["runs"]), default=0) + 1)
    data["runs"][run] = machine(options.commit)
    print(data["runs"][run], flush=True)

    def save():
        if options.json:
            kept = {r["run"] for r in [*data["rows"], *data["first"]]} | {run}
            data["runs"] = {name: r for name, r in data["runs"].items() if name in kept}
            options.json.write_text(json.dumps(data, indent=1) + "\n")

    if "first" in options.only:
        data["first"] = [r | {"run": run} for r in first_calls()]
        print(data["first"], flush=True)
    for name in names:
        for case in cases(ROWS[name]):
            for record in time_case(name, case, options, dead):
                told = [ROWS[name].recurrence, ROWS[name].form, ROWS[name].dtype]
                said = ", ".join(x for x in told if x not in ("auto", "bfloat16"))
                record = {"row": name, "name": said, "run": run} | record
                put(data["rows"], record)
                print({k: round(x, 3) if isinstance(x, float) else x for k, x in record.items()}, flush=True)
                save()
                torch.cuda.synchronize()  # a fault ends the run here, with what was measured saved
    save()


if __name__ == "__main__":
    main()
