"""CPU speed and memory beside the pure-torch paths that exist today: transformers 5.23 and mambapy 1.2.0.

    python benchmarks/cpu.py [--out benchmarks/results/cpu.json] [--threads 2] [--case NAME ...]

Every case runs forward and backward of ours and of each peer on the same float32 inputs, in turns, in this process: one
run each, so that both find caches and allocator as the other left them. The first turn does not count; the median of
the others does, and docs/cpu.md is made from it. Outputs are compared with the float64 oracle first:
a fast wrong answer is no result. Peak memory is the tensors alive at once above the inputs, allocation by allocation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from cpu_page import PAGE, RESULTS, page
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dsf
from dsf import Key, System, Value, mixers, sigmoid

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison: inputs (leaves), ours, peers and the ratio that the project promises.

    once: the peers take minutes, so they run once and their memory is not followed.
    """

    name: str
    shape: str
    inputs: Callable[[], dict[str, Tensor]]
    ours: Run
    peers: dict[str, Run]
    target: dict[str, float]
    repeats: int = 7
    once: bool = False


def gated_deltanet() -> Case:
    """B=1, H=8, N=P=64, T=2048."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    rule = mixers.get("gated_deltanet").recurrence
    B, T, H, N, P = 1, 2048, 8, 64, 64

    def inputs() -> dict[str, Tensor]:
        k = torch.nn.functional.normalize(torch.randn(B, T, H, N), dim=-1)
        g = -0.5 * torch.rand(B, T, H)
        return {
            "q": torch.randn(B, T, H, N), "k": k, "v": torch.randn(B, T, H, P), "g": g, "beta": torch.rand(B, T, H),
        }  # fmt: skip

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, form: str = "auto") -> Tensor:
        return rule(q * N**-0.5, k, v, g.exp(), beta, form=form)

    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(q, k, v, g, beta)[0]

    shape = f"B={B} T={T} H={H} N={N} P={P}"
    return Case("gated_deltanet", shape, inputs, ours, {"transformers": theirs}, {"transformers": 2.0})


def ssd() -> Case:
    """H=16, P=64, N=64, one group, T=2048."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    rule = mixers.get("ssd").recurrence
    B, T, H, N, P = 1, 2048, 16, 64, 64

    def inputs() -> dict[str, Tensor]:
        return {
            "x": torch.randn(B, T, H, P), "dt": torch.randn(B, T, H), "A_log": torch.rand(H),
            "b": torch.randn(B, T, 1, N), "c": torch.randn(B, T, 1, N), "D": torch.ones(H), "bias": torch.zeros(H),
        }  # fmt: skip

    def theirs(x: Tensor, dt: Tensor, A_log: Tensor, b: Tensor, c: Tensor, D: Tensor, bias: Tensor) -> Tensor:
        out = mamba2_chunk_scan(x, dt, -A_log.exp(), b, c, 64, D=D, dt_bias=bias, dt_softplus=True)
        return out[0] if isinstance(out, tuple) else out

    def ours(
        x: Tensor, dt: Tensor, A_log: Tensor, b: Tensor, c: Tensor, D: Tensor, bias: Tensor, form: str = "auto"
    ) -> Tensor:
        return rule(x=x, dt=dt, b=b, c=c, A_log=A_log, D=D, dt_bias=bias, form=form)

    shape = f"B={B} T={T} H={H} N={N} P={P} G=1"
    return Case("ssd", shape, inputs, ours, {"transformers": theirs}, {"transformers": 2.0})


def s6(tokens: int, peer: str) -> Case:
    """512 channels, N=16. The backward of transformers' sequential path is quadratic in T: minutes at T=2048."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    rule = mixers.get("s6").recurrence
    B, T, N, P = 1, tokens, 16, 512

    def inputs() -> dict[str, Tensor]:
        A_log = torch.arange(1, N + 1).float().log()[:, None].expand(N, P)[None].contiguous()
        return {
            "x": torch.randn(B, T, 1, P), "dt": torch.randn(B, T, 1, P) - 4, "b": torch.randn(B, T, 1, N),
            "c": torch.randn(B, T, 1, N), "A_log": A_log, "D": torch.ones(1, P),
        }  # fmt: skip

    def ours(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, A_log: Tensor, D: Tensor, form: str = "auto") -> Tensor:
        return rule(x=x, dt=dt, b=b, c=c, A_log=A_log, D=D, form=form)

    def sequential(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, A_log: Tensor, D: Tensor) -> Tensor:
        flat = (t.squeeze(2).transpose(1, 2) for t in (x, dt, b, c))
        x_, dt_, b_, c_ = flat
        A = -A_log[0].T.exp()
        out = mamba_selective_scan(x_, dt_, A, b_, c_, D=D[0], delta_softplus=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2).unsqueeze(2)

    def mambapy(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, A_log: Tensor, D: Tensor) -> Tensor:
        from mambapy.pscan import pscan

        x_, b_, c_ = (t.squeeze(2) for t in (x, b, c))
        delta = torch.nn.functional.softplus(dt.squeeze(2)).unsqueeze(-1)
        states = pscan(torch.exp(delta * -A_log[0].T.exp()), delta * b_.unsqueeze(2) * x_.unsqueeze(-1))
        return ((states @ c_.unsqueeze(-1)).squeeze(-1) + D[0] * x_).unsqueeze(2)

    shape = f"B={B} T={T} channels={P} N={N}"
    if peer == "transformers":
        name, peers, target = f"s6_T{T}_sequential", {"transformers": sequential}, {"transformers": 100.0}
        return Case(name, shape, inputs, ours, peers, target, once=T > 512)
    return Case(f"s6_T{T}", shape, inputs, ours, {"mambapy": mambapy}, {"mambapy": 1.5})


def s4d() -> Case:
    """64 channels, each a head with N=32; the scan of the same declaration is the peer."""
    rule = mixers.get("s4d").recurrence
    B, T, H, N = 1, 2048, 64, 32

    def inputs() -> dict[str, Tensor]:
        return {
            "x": torch.randn(B, T, H, 1), "dt": torch.empty(H).uniform_(-7.0, -2.3),
            "A_log": torch.full((H, N // 2), -0.7), "A_imag": torch.pi * torch.arange(N // 2).repeat(H, 1),
            "C": torch.randn(H, N), "D": torch.randn(H, 1),
        }  # fmt: skip

    def scan(**given: Tensor) -> Tensor:
        return rule(**given, form="scan")

    return Case("s4d", f"B={B} T={T} H={H} N={N} P=1", inputs, rule, {"dsf, scan": scan}, {"dsf, scan": 3.0}, repeats=5)


def s4d_real() -> Case:
    """512 channels, N=16; the scan of the same declaration is the peer."""
    rule = mixers.get("s4d_real").recurrence
    B, T, N, P = 1, 2048, 16, 512

    def inputs() -> dict[str, Tensor]:
        A_log = torch.arange(1, N + 1).float().log()[:, None].expand(N, P)[None].contiguous()
        return {
            "x": torch.randn(B, T, 1, P), "dt": torch.empty(1, P).uniform_(-7.0, -2.3), "A_log": A_log,
            "C": torch.randn(1, N, P), "D": torch.randn(1, P),
        }  # fmt: skip

    def scan(**given: Tensor) -> Tensor:
        return rule(**given, form="scan")

    return Case("s4d_real", f"B={B} T={T} channels={P} N={N}", inputs, rule, {"dsf, scan": scan}, {"dsf, scan": 3.0})


@dsf.recurrence
def value_decay(q: Key, k: Key, v: Value, g: Value) -> System:
    """Each channel of a state with a key axis forgets for itself."""
    return System(A=sigmoid(g), B=k * v, C=q)


def value_decays() -> Case:
    """B=1, H=4, N=P=64, T=2048; the scan of the same declaration is the peer."""
    B, T, H, N = 1, 2048, 4, 64

    def inputs() -> dict[str, Tensor]:
        return {name: torch.randn(B, T, H, N) for name in "qkvg"}

    def scan(**given: Tensor) -> Tensor:
        return value_decay(**given, form="scan")

    shape = f"B={B} T={T} H={H} N={N} P={N}"
    return Case("value_decay", shape, inputs, value_decay, {"dsf, scan": scan}, {"dsf, scan": 5.0})


CASES: dict[str, Callable[[], Case]] = {
    "gated_deltanet": gated_deltanet,
    "ssd": ssd,
    "s6_T2048": lambda: s6(2048, "mambapy"),
    "s6_T512_sequential": lambda: s6(512, "transformers"),
    "s6_T2048_sequential": lambda: s6(2048, "transformers"),
    "s4d": s4d,
    "s4d_real": s4d_real,
    "value_decay": value_decays,
}


def fresh(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The case's inputs as leaves."""
    torch.manual_seed(0)
    return {name: x.to(dtype).requires_grad_() for name, x in case.inputs().items()}


def once(run: Run, inputs: dict[str, Tensor], weight: Tensor) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    torch.autograd.grad((run(**inputs) * weight).sum(), list(inputs.values()), allow_unused=True)
    return time.perf_counter() - start


def error(case: Case, run: Run) -> float:
    """Worst error over heads and blocks of 64 tokens, relative to the block, against the float64 oracle (T ≤ 512)."""
    inputs = {
        n: x.detach()[:, :512] if x.dim() > 2 and x.shape[1] > 512 else x.detach() for n, x in fresh(case).items()
    }
    with torch.no_grad():
        truth = case.ours(**{n: x.double() for n, x in inputs.items()}, form="recurrent")
        got = run(**inputs).double()
    blocks = [
        (g - t).norm(dim=(1, 3)) / t.norm(dim=(1, 3)) for g, t in zip(got.split(64, 1), truth.split(64, 1), strict=True)
    ]
    return float(torch.stack(blocks).max())


def measure(case: Case) -> dict[str, object]:
    """Times, errors and memory of every side of one case."""
    sides = {"dsf": case.ours, **case.peers}
    errors = {name: error(case, run) for name, run in sides.items()}
    inputs = fresh(case)
    with torch.no_grad():
        weight = torch.randn_like(case.ours(**inputs))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(case.repeats + 1):
        for name, run in sides.items():
            if case.once and turn and name != "dsf":
                continue
            took = once(run, inputs, weight)
            if turn or (case.once and name != "dsf"):
                times[name].append(took)
    seconds = {name: statistics.median(t) for name, t in times.items()}
    followed = {name: run for name, run in sides.items() if name == "dsf" or not case.once}
    memory = {name: peak_memory(run, inputs, weight) for name, run in followed.items()}
    ratio = {name: seconds[name] / seconds["dsf"] for name in case.peers}
    return {
        "case": case.name, "shape": case.shape, "seconds": seconds, "peak_mib": memory, "error": errors,
        "speedup": ratio, "target": case.target, "commit": commit(),
    }  # fmt: skip


def peak_memory(run: Run, inputs: dict[str, Tensor], weight: Tensor) -> float:
    """MiB of tensors alive at once during forward and backward, above the inputs: every allocation is followed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        once(run, inputs, weight)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    alive = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(alive) / 2**20


def commit() -> str:
    """What was measured."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip()


def machine() -> dict[str, object]:
    """Where and with what this was measured."""
    names = ("torch", "transformers", "mambapy", "dsf-zoo")
    return {
        "processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "python": platform.python_version(), "versions": {n: importlib.metadata.version(n) for n in names},
    }  # fmt: skip


def main() -> None:
    """Run the cases, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=CASES, nargs="+", help="measure these again and keep the other rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = [measure(CASES[name]()) for name in (args.case or CASES)]
    for r in results:
        print(f"{r['case']:16} {r['shape']}")
        for side, seconds in r["seconds"].items():  # type: ignore[attr-defined]
            ratio = f"{r['speedup'][side]:8.2f}x (target {r['target'][side]}x)" if side != "dsf" else ""  # type: ignore[index]
            peak = r["peak_mib"].get(side, float("nan"))  # type: ignore[attr-defined]
            line = f"  {side:14} {seconds * 1e3:10.1f} ms  peak {peak:8.1f} MiB"
            print(f"{line}  error {r['error'][side]:.1e} {ratio}")  # type: ignore[index]
    old = json.loads(args.out.read_text())["results"] if args.case and args.out.exists() else []
    found = {r["case"]: r for r in [*old, *results]}  # a case measured alone takes the place of its old row
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [found[name] for name in CASES if name in found]
    args.out.write_text(json.dumps({"machine": machine(), "results": rows}, indent=1) + "\n")
    if args.out == RESULTS:
        PAGE.write_text(page(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
