"""Times the decode step on a CUDA GPU, and the peers': one token of every sequence, the state read and written once.

python benchmarks/gpu_decode.py [--only mlstm] [--batch 1 128 1024] [--json benchmarks/results/gpu_decode.json]
python benchmarks/gpu_decode.py --page benchmarks/results/gpu_decode.json --into docs/performance.md   # its table

bfloat16 inputs, float32 states overwritten in place and rotated over more memory than the L2 holds. "kernel" is the
launch alone (a CUDA graph of steps), "call" a public call on the host's clock. Peers (dsf.analysis.peers) do what
they do on the same inputs: fla and mlstm-kernels write a new state, mamba-ssm overwrites.
Steps are compared with float64 by tests/test_gpu_calls.py.
"""

import argparse
import json
import time

import torch
from gpu_matrix import draw, machine
from gpu_page import add_options, shows

from dsf.analysis.peers import step_of
from dsf.mixers import get

SHAPES = {
    "unnormalized_linear_attention": (16, 128, 128), "linear_attention": (16, 128, 128), "retnet": (16, 128, 128),
    "ssd": (64, 128, 64),
    "mlstm": (16, 128, 128), "gla": (16, 128, 128), "gated_deltanet": (16, 128, 128), "kda": (16, 128, 128),
    "rwkv7": (32, 64, 64), "delta_product": (16, 128, 128), "s6": (1, 16, 4096), "longhorn": (1, 16, 4096),
    "rg_lru": (1, 1, 4096), "qlstm": (1, 1, 4096), "rwkv4": (1, 1, 4096), "mamba3": (32, 128, 64),
    "mamba3_mimo": (32, 128, 64), "lru": (1024, 2, 2),
}  # fmt: skip
SHARED = {"ssd": ("b", "c"), "mamba3": ("b", "c", "angle"), "mamba3_mimo": ("b", "c", "angle")}
L2 = 200 << 20


def measure(step, size):
    """ms of the kernel and of a call, and the state bytes that it reads and writes."""
    bytes_ = 8 * torch.Size(size).numel()
    count = max(2, -(-L2 // (bytes_ // 2)))
    states = [torch.zeros(size, device="cuda") for _ in range(min(count, 64))]

    def round_():
        for state in states:
            step(state)

    with torch.no_grad():
        round_()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            round_()
        host = (time.perf_counter() - begin) / 5 / len(states) * 1e3
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            round_()
        times = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(states))
    return {"kernel": sorted(times)[len(times) // 2], "call": host, "bytes": bytes_}


def draw_token(recurrence, batch, heads, n, p, shared):
    """One token's inputs, in the ranges of a trained model."""
    given = {k: x.detach() for k, x in draw(recurrence, batch, 1, heads, n, p, shared).items()}
    for i in recurrence.spec.inputs:
        if i.kind.steps:
            given[i.name] = (
                given[i.name].unsqueeze(2).expand(-1, -1, i.kind.steps, *given[i.name].shape[2:]).contiguous()
            )
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {k: x[:, 0] if k in timed else x for k, x in given.items()}


def sides(name, batch):
    """(who, record) of ours and of the peer that is present."""
    heads, n, p = SHAPES[name]
    recurrence = get(name).recurrence
    given = draw_token(recurrence, batch, heads, n, p, SHARED.get(name, ()))
    size = (batch, heads, *recurrence.state_shape(N=n, P=p))
    yield "ours", measure(lambda state: recurrence.step(state, **given, in_place=True), size)
    who, make = step_of(name)
    if make is None:
        return
    try:
        yield who, measure(make(given), (batch, heads, n, p))
    except Exception as error:  # a peer that does not run here is a result too
        yield who, {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def page(data):
    """The rows as a Markdown table. An asterisk: a peer that was measured in an earlier run."""
    rate = data["machine"]["copy GB/s"]
    head = "| recurrence | heads x N x P | batch | kernel ms | share of the copy ceiling | call ms |"
    lines = [f"{head} peer | its kernels ms | ours ÷ peer |", "|---" * 9 + "|"]
    peers = {(r["name"], r["batch"]): r for r in data["rows"] if r.get("who", "ours") != "ours"}
    for r in [r for r in data["rows"] if r.get("who", "ours") == "ours"]:
        share = r["bytes"] / r["kernel"] / 1e6 / rate
        other, beside = peers.get((r["name"], r["batch"])), ["", "", ""]
        if other:
            known = "kernel" in other
            beside = [
                other["who"] + "*" * ("commit" in other),
                f"{other['kernel']:.4f}" if known else other["error"].split(":")[0],
            ]
            beside.append(f"{r['kernel'] / other['kernel']:.2f}" if known else "")
        lines.append(
            f"| {r['name']} | {r['heads']} x {r['N']} x {r['P']} | {r['batch']} | {r['kernel']:.4f} | {share:.0%} | "
            f"{r['call']:.3f} | {' | '.join(beside)} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 128, 1024])
    add_options(parser)
    options = parser.parse_args()
    if shows(options, page):
        return
    data = {"machine": machine(options.commit), "rows": []}
    for name in options.only:
        for batch in options.batch:
            heads, n, p = SHAPES[name]
            for who, record in sides(name, batch):
                data["rows"].append({"name": name, "who": who, "heads": heads, "N": n, "P": p, "batch": batch} | record)
                torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(page(data))


if __name__ == "__main__":
    main()
