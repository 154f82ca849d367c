"""Times context parallelism on the GPUs of one host: efficiency, its pieces, the link, and a projection.

torchrun --nproc-per-node 2 benchmarks/parallel.py --json benchmarks/results/parallel.json [--seconds 420]
torchrun --nproc-per-node 2 benchmarks/parallel.py --device cpu --lengths 256 --heads 2 --json /tmp/parallel.json

Public calls of one sequence, bfloat16 on CUDA, decays as of a trained model. For every recurrence and length a rank:
  t1(T)   one GPU, the whole sequence (W times a rank's tokens), where it fits
  t1(T/W) one GPU, a rank's tokens
  tW      all ranks, the whole sequence
  strong = t1(T) / (W tW), weak = t1(T/W) / tW; forward, and forward + backward; medians of all ranks' maxima, a barrier
  before each. pieces: summary (F and M), exchange, fold, adjoint (C), each alone.
First every recurrence is compared with one GPU on a short sequence, in float32 (1e-4 of the largest number). The link:
all-gathers of 2^10 to 2^26 bytes, fitted as latency + bytes / bandwidth, which then choose the exchanges.
Peer: fla's context parallel, where fla is importable and has it. Rows that --seconds leave no time for are named.
The projection to 64 and 1,024 ranks is a model (dsf.parallel.cost with 8 GPUs a node), marked as such, no measurement.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsf
from dsf.mixers import get
from dsf.parallel import Link, Sequence, Simulated
from dsf.parallel.collectives import Gather
from dsf.parallel.derive import frame_of
from dsf.parallel.exchange import AllGather, _payload
from dsf.parallel.rank import Rank
from dsf.parallel.summary import summary_of

# name: heads, N, P; heads of one sequence as in issue and papers
ROWS = {
    "gated_deltanet": (16, 128, 128), "kda": (16, 128, 128), "ssd": (64, 128, 64), "s6": (1, 16, 4096),
    "mlstm": (16, 128, 128), "rg_lru": (1, 1, 4096),
}  # fmt: skip
LENGTHS = (8192, 32768, 131072)
FAR = Link(30e-6, 45e9)  # between nodes: assumed, not measured


def draw(recurrence, tokens, heads, n, p, device, dtype, seed=0):
    """Inputs on every rank alike, in the ranges of a trained model: unit keys, decays near one."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        x = torch.randn([1, tokens, heads, *sizes] if i.kind.time else [heads, *sizes], generator=generator)
        if i.name == "k":
            x = torch.nn.functional.normalize(x, dim=-1)
        near_one = {"alpha": 0.97 + 0.03 * torch.sigmoid(x), "beta": torch.sigmoid(x), "g": -0.05 * x.abs()}
        x = near_one.get(i.name, x)
        if i.name in ("f", "i"):
            x = x + (4.0 if i.name == "f" else 0.0)
        if i.name in ("dt", "r", "z"):
            x = x - 4.0
        if i.name == "reset":
            x = torch.zeros_like(x)
        if i.name == "A_log":
            x = torch.linspace(0.0, 1.0, x.numel()).view(x.shape)
        found[i.name] = x.to(device, dtype if i.kind.time else torch.float32 if dtype != torch.float64 else dtype)
    return found


class Clock:
    """Medians of what the slowest rank took, in milliseconds."""

    def __init__(self, device, repeats):
        self.device, self.repeats = device, repeats

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def __call__(self, call, together=True):
        """together: on all ranks at once, after a barrier; else on rank 0 alone, and told to the others."""
        times = []
        for turn in range(self.repeats + 3):
            self.wait()
            dist.barrier()
            begin = time.perf_counter()
            if together or not dist.get_rank():
                call()
                self.wait()
            took = torch.tensor([time.perf_counter() - begin], device=self.device, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX) if together else dist.broadcast(took, 0)
            if turn >= 3:
                times.append(1e3 * float(took))
        return statistics.median(times)


def both_ways(recurrence, inputs, **options):
    """(forward, forward + backward) of a call."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}

    def forward():
        with torch.no_grad():
            return recurrence(**inputs, **options)

    def backward():
        y = recurrence(**leaves, **options)
        torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y), allow_unused=True)

    return forward, backward


def shard(recurrence, inputs, cp):
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {n: cp.shard(x).contiguous() if n in timed else x for n, x in inputs.items()}


def check(recurrence, sizes, cp, device):
    """The largest difference between ranks and one GPU, relative to the largest number: y and every gradient."""
    heads, n, p = sizes
    inputs = draw(recurrence, 64 * cp.ranks + 5, max(1, heads // 4), min(n, 64), min(p, 64), device, torch.float32)
    kinds = {i.name: i.kind for i in recurrence.spec.inputs}
    results = []
    for world in (None, cp):
        given = inputs if world is None else shard(recurrence, inputs, cp)
        leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
        y = recurrence(**leaves, **({} if world is None else {"parallel": cp}))
        grads = torch.autograd.grad(y.sin().sum(), list(leaves.values()), allow_unused=True)
        results.append((y, dict(zip(leaves, grads, strict=True))))
    (y, grads), (got, found) = results
    pairs = [(got, cp.shard(y))]
    for name, g in grads.items():
        if g is None:
            continue
        mine = found[name]
        if not kinds[name].time:
            mine = mine.clone()
            dist.all_reduce(mine)
        pairs.append((mine, cp.shard(g) if kinds[name].time else g))
    worst = max(float((a - b).detach().abs().max() / b.abs().max().clamp(min=1e-20)) for a, b in pairs if b.numel())
    told = torch.tensor([worst], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def link(cp, clock, device, most):
    """Latency and bandwidth of an all-gather, least squares over sizes, and the sizes with their times."""
    points = []
    for power in range(10, most + 1, 2):
        x = torch.zeros(2**power // 4, device=device)
        points.append(((cp.ranks - 1) * 2**power, clock(lambda x=x: cp._answer(Gather(x))) * 1e-3))
    sizes, times = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    weights = 1 / times
    design = torch.stack([torch.ones_like(sizes), sizes], dim=1) * weights[:, None]
    latency, per_byte = torch.linalg.lstsq(design, (times * weights)[:, None]).solution.flatten().tolist()
    return Link(max(latency, 1e-7), 1 / max(per_byte, 1e-13)), points


def pieces(recurrence, given, cp, clock):
    """Milliseconds of the summary, the exchange of maps, the fold, and C, each alone."""
    bound = recurrence._calls.prepare(recurrence.spec, (), given, None, "auto", "auto")[0]
    rank = Rank(cp.rank, cp.layout, summary_of(recurrence, bound, "auto", "auto"), None, None)
    tokens, found = bound.sizes.tokens, {}
    with torch.no_grad():
        found["F"] = clock(lambda: rank.summary.written(0, tokens, None))
        found["M"] = clock(lambda: rank.summary.move(0, tokens))
        frame = rank.frame if cp.ranks > 2 else rank.frame.without_moves()
        x = _payload(rank, frame)
        found["exchange"] = clock(lambda: cp._answer(Gather(x)))
        rows = cp._answer(Gather(x))
        found["fold"] = clock(lambda: AllGather._fold(rank).forward(rows))
        rank.starts = [rank.empty()]
        dy = torch.ones(*next(iter(bound.tensors.values())).shape[:2], bound.sizes.heads, bound.sizes.p)
        dy = dy.to(bound.device, bound.dtype)
    found["C"] = clock(lambda: rank.summary.adjoint(0, tokens, rank.empty(), dy, None))
    return found


def peer(name, inputs, cp, clock):
    """(forward, forward + backward) of fla's context parallel on the same shards, or why not."""
    try:
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        return f"fla: {error}"
    if name not in ("gated_deltanet", "kda"):
        return "fla has none"
    total = next(iter(inputs.values())).shape[1] * cp.ranks
    bounds = torch.tensor([0, total], device=inputs["q"].device, dtype=torch.int32)
    context = build_cp_context(cu_seqlens=bounds, group=dist.group.WORLD)
    decay = inputs["alpha"].float().log() if name == "gated_deltanet" else inputs["g"].float()
    operator = chunk_gated_delta_rule if name == "gated_deltanet" else chunk_kda
    leaves = [x.detach().clone().requires_grad_() for x in (inputs["q"], inputs["k"], inputs["v"], decay)]
    beta = inputs["beta"].detach().clone().requires_grad_()

    def forward():
        return operator(*leaves, beta, scale=1.0, cp_context=context)[0]

    def backward():
        y = forward()
        torch.autograd.grad(y, [*leaves, beta], torch.ones_like(y))

    with torch.no_grad():
        alone = clock(forward)
    return {"forward": alone, "both": clock(backward)}


def projection(recurrence, sizes, weak, measured, near):
    """Milliseconds and efficiency by the model for many ranks: what one rank computes, and an exchange each way."""
    heads, n, p = sizes
    frame = frame_of(recurrence.spec, n, p)
    extra = sum(measured[x] for x in ("F", "M", "fold")), measured["C"]
    found = {}
    for ranks in (64, 1024):
        choice = Simulated(ranks, nodes=ranks // 8, links=(near, FAR)).choice(frame, heads, 4)
        out = weak["forward"] + extra[0] + 1e3 * choice.seconds
        both = weak["both"] + sum(extra) + 2e3 * choice.seconds
        found[str(ranks)] = {
            "exchange": choice.name, "bytes": choice.bytes, "forward_ms": out, "both_ms": both,
            "forward": weak["forward"] / out, "both": weak["both"] / both, "projection": True,
        }  # fmt: skip
    return found


def time_row(name, sizes, tokens, cp, clock, device, dtype, near):
    """One record."""
    recurrence = get(name).recurrence
    heads, n, p = sizes
    record = {"name": name, "heads": heads, "n": n, "p": p, "tokens_a_rank": tokens}
    whole = draw(recurrence, tokens * cp.ranks, heads, n, p, device, dtype)
    given = shard(recurrence, whole, cp)
    record["plan"] = recurrence.plan(**given, parallel=cp).exchange
    times = {}
    for label, call in zip(("forward", "both"), both_ways(recurrence, given, parallel=cp), strict=True):
        times[label] = clock(call)
    record["ranks_ms"] = times
    record["part_ms"] = dict(
        zip(("forward", "both"), (clock(c, together=False) for c in both_ways(recurrence, given)), strict=True)
    )
    with contextlib.suppress(torch.OutOfMemoryError):
        alone = [clock(c, together=False) for c in both_ways(recurrence, whole)]
        record["whole_ms"] = dict(zip(("forward", "both"), alone, strict=True))
        record["strong"] = {k: record["whole_ms"][k] / (cp.ranks * times[k]) for k in times}
    record["weak"] = {k: record["part_ms"][k] / times[k] for k in times}
    record["pieces_ms"] = pieces(recurrence, given, cp, clock)
    record["fla_ms"] = peer(name, given, cp, clock)
    record["projection"] = projection(recurrence, sizes, record["part_ms"], record["pieces_ms"], near)
    return record


def machine(device, cp):
    """Where and of what this was measured."""
    here = Path(__file__).resolve().parent
    said = subprocess.run(["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found = {"commit": said.stdout.strip(), "torch": torch.__version__, "python": platform.python_version()}
    found |= {"ranks": cp.ranks, "backend": dist.get_backend(), "dsf": dsf.__version__}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS, help="tokens a rank")
    parser.add_argument("--heads", type=int, help="instead of each row's own, with N, P of at most 64")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=420.0)
    return parser.parse_args()


def main():
    asked, begin = options(), time.monotonic()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(asked.device, local) if asked.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    clock, cp = Clock(device, asked.repeats), Sequence(mesh["cp"])
    near, points = link(cp, clock, device, 26 if device.type == "cuda" else 20)
    cp = Sequence(mesh["cp"], links=(near, FAR))
    record = {"machine": machine(device, cp), "link": near._asdict(), "gathers": points, "errors": {}, "rows": []}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def save():
        if not cp.rank:
            asked.json.write_text(json.dumps(record, indent=1) + "\n")

    def late():  # one answer for all ranks
        spent = torch.tensor([time.monotonic() - begin], device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent) > asked.seconds

    for name in asked.only:
        error = record["errors"][name] = check(get(name).recurrence, ROWS[name], cp, device)
        if error > (1e-3 if device.type == "cuda" else 1e-4):
            raise SystemExit(f"{name}: ranks and one GPU differ by {error:.1e}; nothing was timed")
        save()
    record["left_out"] = []
    for tokens in asked.lengths:
        for name in asked.only:
            heads, n, p = ROWS[name]
            sizes = (heads, n, p) if asked.heads is None else (asked.heads, min(n, 64), min(p, 64))
            if late():
                record["left_out"].append([name, tokens])
                continue
            row = time_row(name, sizes, tokens, cp, clock, device, dtype, near)
            record["rows"].append(row)
            save()
            if not cp.rank:
                strong, weak = row.get("strong", {}), row["weak"]
                print(f"{name:16} {tokens:7} a rank: strong {strong}, weak {weak}, {row['ranks_ms']} ms", flush=True)
    save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
