"""Times the decode step on a CUDA GPU: one token of every sequence, the state read and written once.

python benchmarks/gpu_decode.py [--only mlstm] [--batch 1 128 1024] [--json benchmarks/results/gpu_decode.json]
python benchmarks/gpu_decode.py --page benchmarks/results/gpu_decode.json   # the table of docs/performance.md

bfloat16 inputs, float32 states overwritten in place and rotated over more memory than the L2 holds. "kernel" is the
launch alone (a CUDA graph of steps), "call" a public call on the host's clock.
Steps are compared with float64 by tests/test_gpu_calls.py.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from gpu_matrix import ceilings, draw

from dsf.mixers import get

SHAPES = {
    "unnormalized_linear_attention": (16, 128, 128), "retnet": (16, 128, 128), "ssd": (64, 128, 64),
    "mlstm": (16, 128, 128), "gla": (16, 128, 128), "gated_deltanet": (16, 128, 128), "kda": (16, 128, 128),
    "rwkv7": (32, 64, 64), "delta_product": (16, 128, 128),
}  # fmt: skip
L2 = 200 << 20


def measure(name, batch):
    """ms of the kernel and of a call, and the state bytes that it reads and writes."""
    heads, n, p = SHAPES[name]
    recurrence = get(name).recurrence
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    given = draw_token(recurrence, batch, heads, n, p, timed)
    size = (batch, heads, *recurrence.state_shape(N=n, P=p))
    bytes_ = 8 * torch.Size(size).numel()
    count = max(2, -(-L2 // (bytes_ // 2)))
    states = [torch.zeros(size, device="cuda") for _ in range(min(count, 64))]

    def round_():
        for state in states:
            recurrence.step(state, **given, in_place=True)

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


def draw_token(recurrence, batch, heads, n, p, timed):
    """One token's inputs, in the ranges of a trained model."""
    given = {k: x.detach() for k, x in draw(recurrence, batch, 1, heads, n, p).items()}
    for i in recurrence.spec.inputs:
        if i.kind.steps:
            given[i.name] = (
                given[i.name].unsqueeze(2).expand(-1, -1, i.kind.steps, *given[i.name].shape[2:]).contiguous()
            )
    return {k: x[:, 0] if k in timed else x for k, x in given.items()}


def page(data):
    """The rows as a Markdown table."""
    rate = data["machine"]["copy GB/s"]
    lines = [
        "| recurrence | heads x N x P | batch | kernel ms | share of the copy ceiling | call ms |",
        "|---" * 6 + "|",
    ]
    for r in data["rows"]:
        share = r["bytes"] / r["kernel"] / 1e6 / rate
        lines.append(
            f"| {r['name']} | {r['heads']} x {r['N']} x {r['P']} | {r['batch']} | {r['kernel']:.4f} | {share:.0%} | "
            f"{r['call']:.3f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 128, 1024])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page:
        print(page(json.loads(options.page.read_text())))
        return
    import triton

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    data = {"machine": machine | ceilings(), "rows": []}
    for name in options.only:
        for batch in options.batch:
            heads, n, p = SHAPES[name]
            row = {"name": name, "heads": heads, "N": n, "P": p, "batch": batch} | measure(name, batch)
            data["rows"].append(row)
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(page(data))


if __name__ == "__main__":
    main()
