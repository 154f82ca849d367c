"""Measures a row of the matrix kernels' tile table (kernels/triton/chunk/table.py) again, beside its neighbours.

python benchmarks/gpu_tiles.py [--only scalar+delta] [--sizes 128x128 64x64] [--dtype bfloat16] [--json tiles.json]

A neighbour differs from the row in one entry; what makes the row faster is then tried together. Each runs in a process
of its own, since one that faults takes its process along: first all on all cores against float64, which compiles them,
then those that were right one after another, forward and forward+backward. Printed: every one's error and times,
and the row that the table should have.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from gpu_matrix import draw, measure, median, recurrence_of

from dsf.kernels.triton.chunk import matrix, table
from dsf.kernels.triton.chunk.precision import Precision

# (decay, delta rule) of the table: a recurrence that has nothing else
STRUCTURES = {
    "none": ("none", False, "unnormalized_linear_attention"), "scalar": ("scalar", False, "scalar_decay"),
    "key": ("key", False, "gla"), "none+delta": ("none", True, "deltanet"),
    "scalar+delta": ("scalar", True, "gated_deltanet"), "key+delta": ("key", True, "kda"),
    "rank_one": ("rank_one", True, "rwkv7"),
}  # fmt: skip
NEIGHBOURS = {
    "chunk": (16, 32, 64, 128), "piece": (32, 64, 128), "walk_warps": (4, 8), "walk_stages": (2, 3, 4),
    "reverse_stages": (2, 3), "gradient_piece": (32, 64, 128), "gradient_warps": (4, 8), "gradient_roles": (1, 2),
    "gradient_keys": (32, 64), "transform_warps": (2, 4, 8), "prepare_warps": (4, 8), "stretches": (1, 4, 6),
    "entry_warps": (4, 8),
}  # fmt: skip
LIMIT = {torch.bfloat16: 1.5e-2, torch.float16: 5e-3, torch.float32: 1e-4}
TOKENS, HEADS = 32768, {128: 16, 64: 32}


def neighbours(row):
    """Every change of one entry to one that stands beside it."""
    for name, values in NEIGHBOURS.items():
        mine = getattr(row, name)
        below, above = [v for v in values if v < mine], [v for v in values if v > mine]
        yield from ({name: v} for v in (*below[-1:], *above[:1]))


def worst(found, expected):
    """Largest relative error of any head and any block of 64 tokens."""
    batch, tokens, heads = found.shape[:3]
    a, b = (x.detach().double().reshape(batch, tokens // 64, 64, heads, -1) for x in (found, expected))
    error, size = ((x.pow(2).sum((2, 4))).sqrt() for x in (a - b, b))
    return (error / size.clamp(min=0.05 * size.max())).max().item()


def check(recurrence, n, p, dtype):
    """The worst error of y and the gradients of per-token inputs against float64."""
    x = {name: t.detach().to(dtype) for name, t in draw(recurrence, 2, 192, 2, n, p).items()}
    dy = torch.randn(2, 192, 2, p, device=x[recurrence.spec.inputs[0].name].device).to(dtype)

    def run(kind, **how):
        leaves = {name: t.to(kind).requires_grad_() for name, t in x.items()}
        y = recurrence(**leaves, **how)
        timed = [leaves[i.name] for i in recurrence.spec.inputs if i.kind.time]
        return [y, *torch.autograd.grad(y, timed, dy.to(kind))]

    pairs = zip(run(dtype, backend="triton"), run(torch.float64, form="chunk", backend="torch"), strict=True)
    return max(worst(a, b) for a, b in pairs)


def row_of(job):
    """The row of a job that was JSON."""
    return table.Tiles(**job["row"] | {"precision": Precision(*job["row"]["precision"])})


def child(job):
    """One process's work: the error, or the times, of one row."""
    decay, delta, name = STRUCTURES[job["structure"]]
    n, p, dtype = job["n"], job["p"], getattr(torch, job["dtype"])
    row, recurrence = row_of(job), recurrence_of(name)
    matrix.tiles = lambda *_: row
    if job["check"]:
        return {"error": check(recurrence, n, p, dtype)}
    heads = HEADS.get(n, 16)
    x = {k: t.detach().to(dtype).requires_grad_() for k, t in draw(recurrence, 4, TOKENS // 4, heads, n, p).items()}
    found = {}
    measure(found, lambda: recurrence(**x, backend="triton"), list(x.values()), lambda f: median(f, 60))
    return found


def ask(job, seconds):
    """What a process answers; why it did not, under `failed`."""
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        lines = done.stdout.strip().splitlines()
        return json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": done.stderr.strip()[-200:]}
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds} s"}


def try_rows(structure, n, p, dtype, rows, seconds):
    """[(row, answer)]: checked together, then timed one by one."""

    def job(row, checked):
        return {"structure": structure, "n": n, "p": p, "dtype": dtype, "row": asdict(row), "check": not checked}

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        answers = list(pool.map(lambda row: ask(job(row, False), seconds), rows))
    limit = LIMIT[getattr(torch, dtype)]
    for row, answer in zip(rows, answers, strict=True):
        if answer.get("error", limit) < limit:
            answer |= ask(job(row, True), seconds)
    return list(zip(rows, answers, strict=True))


def cost(answer):
    """Forward and forward+backward weigh alike; nothing that failed is chosen."""
    return answer["forward"] + answer["both"] if "both" in answer else float("inf")


def changes(row, base):
    """The entries in which a row differs from the table's."""
    return {k: v for k, v in asdict(row).items() if v != getattr(base, k)}


def tune(structure, n, p, dtype, seconds):
    """Every row tried, and the best."""
    decay, delta, _ = STRUCTURES[structure]
    base = table.tiles(n, p, getattr(torch, dtype), decay, delta, torch.device("cuda"))
    tried = try_rows(structure, n, p, dtype, [base, *(replace(base, **c) for c in neighbours(base))], seconds)
    best = {}
    for row, answer in sorted(tried[1:], key=lambda t: -cost(t[1])):
        if cost(answer) < 0.98 * cost(tried[0][1]):  # less is noise
            best |= changes(row, base)
    if len(best) > 1:
        tried += try_rows(structure, n, p, dtype, [replace(base, **best)], seconds)
    chosen = min(tried, key=lambda t: cost(t[1]))
    if cost(chosen[1]) > 0.98 * cost(tried[0][1]):
        chosen = tried[0]
    return base, tried, chosen[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(STRUCTURES))
    parser.add_argument("--sizes", nargs="*", default=["128x128", "64x64"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    record = []
    for structure in options.only:
        for size in options.sizes:
            n, p = map(int, size.split("x"))
            base, tried, chosen = tune(structure, n, p, options.dtype, options.limit)
            print(f"{structure} {size} {options.dtype}")
            for row, answer in sorted(tried, key=lambda t: cost(t[1])):
                told = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in answer.items())
                print(f"  {changes(row, base) or 'the table'}: {told}")
            print(f"  chosen: {chosen}", flush=True)
            record.append({"structure": structure, "n": n, "p": p, "dtype": options.dtype, "chosen": asdict(chosen)})
            record[-1]["tried"] = [changes(row, base) | answer for row, answer in tried]
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
