"""Times the chunk kernels on a CUDA GPU beside flash-linear-attention where it is installed.

python benchmarks/gpu_matrix.py [--only gla] [--peers linear delta] [--json benchmarks/results/gpu_matrix.json]
python benchmarks/gpu_matrix.py --page benchmarks/results/gpu_matrix.json   # the table of docs/performance.md

Public calls on the same inputs in one process, bfloat16, B·T = 32,768 tokens unless the row says otherwise; median of
CUDA-event timings with a cold L2. Outputs and gradients are compared with float64 by tests/test_gpu_matrix.py.
"""

import argparse
import importlib.util
import json
import os
import platform
from pathlib import Path

import torch

from dsf.mixers import get

LONG, SHORT_ROWS = (2048, 8192, 32768), (8192,)
# name: recurrence, [(heads, N, P)], tokens a sequence, peer in fla.ops (path, function, arguments by ours)
ROWS = {
    "linear": ("unnormalized_linear_attention", [(16, 128, 128), (32, 64, 64)], LONG, "linear_attn.chunk_linear_attn"),
    "scalar": ("retnet", [(16, 128, 128)], SHORT_ROWS, None),
    "ssd": ("ssd", [(64, 128, 64)], SHORT_ROWS, None),
    "mlstm": ("mlstm", [(16, 128, 128)], SHORT_ROWS, None),
    "delta": ("deltanet", [(16, 128, 128), (32, 64, 64)], SHORT_ROWS, "delta_rule.chunk_delta_rule"),
    "gated_delta": (
        "gated_deltanet", [(16, 128, 128), (32, 64, 64)], SHORT_ROWS, "gated_delta_rule.chunk_gated_delta_rule",
    ),
    "gla": ("gla", [(16, 128, 128), (32, 64, 64)], SHORT_ROWS, "gla.chunk_gla"),
    "kda": ("kda", [(16, 128, 128)], SHORT_ROWS, "kda.chunk_kda"),
}  # fmt: skip


def draw(recurrence, batch, tokens, heads, n, p):
    """Inputs in the ranges of a trained model, keys of unit length."""
    out = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        x = torch.randn([batch, tokens, heads, *sizes] if i.kind.time else [heads, *sizes], device="cuda")
        if i.name in ("k", "b") and sizes:
            x = torch.nn.functional.normalize(x, dim=-1)
        if i.name in ("alpha", "beta"):
            x = torch.sigmoid(x + (3.0 if i.name == "alpha" else 0.0))
        if i.name in ("g", "f"):
            x = -torch.nn.functional.softplus(x) if recurrence.name == "kda" else x + 3.0
        if i.name == "slope":
            x = torch.nn.functional.softplus(x) / 16
        out[i.name] = x.to(torch.bfloat16).requires_grad_()
    return out


def median(f):
    from triton.testing import do_bench

    return float(do_bench(f, warmup=50, rep=200, return_mode="median"))


def measure(forward, leaves):
    """Forward and forward+backward in ms, peak MiB over the inputs, and what the host spends on a call."""
    y = forward()
    dy = torch.randn_like(y)

    def both():
        torch.autograd.grad(forward(), leaves, dy)

    both()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**20
    return {"forward": median(forward), "both": median(both), "peak": peak}


def peer(path, recurrence, x):
    """The same computation by fla, from the same inputs."""
    module, name = path.split(".")
    function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    q, k, v = x["q"], x["k"], x["v"]
    extra = {"linear_attn": lambda: {"normalize": False}, "delta_rule": lambda: {"beta": x["beta"]},
             "gated_delta_rule": lambda: {"g": x["alpha"].log(), "beta": x["beta"]},
             "gla": lambda: {"g": torch.nn.functional.logsigmoid(x["g"]) / 16},
             "kda": lambda: {"g": x["g"], "beta": x["beta"]}}[module]  # fmt: skip
    return lambda: function(q, k, v, scale=1.0, **extra())[0]


def backend(path, n):
    """What computes fla's row: it hands gated delta rules of 128 keys to FlashQLA where that is installed."""
    given = path.startswith("gated_delta_rule") and n == 128 and importlib.util.find_spec("flash_qla")
    return "FlashQLA" if given and not os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") else "fla"


def ceilings():
    """GB/s of a large copy (read and written), TFLOP/s of a large bf16 product."""
    a = torch.randn(2**30, device="cuda")
    b = torch.empty_like(a)
    copy = 8 * a.numel() / median(lambda: b.copy_(a)) / 1e6
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {"copy GB/s": copy, "matmul TFLOP/s": 2 * 8192**3 / median(lambda: m @ m) / 1e9}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if options.page:
        print(page(json.loads(options.page.read_text())))
        return
    import triton

    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "commit": options.commit,
    }  # fmt: skip
    data = {"machine": machine | ceilings(), "rows": []}
    print(data["machine"], flush=True)
    work = [(name, "ours") for name in options.only] + [(name, "fla") for name in options.peers]
    for name, who in work:
        recurrence_name, shapes, lengths, path = ROWS[name]
        recurrence = get(recurrence_name).recurrence
        for heads, n, p in shapes:
            for tokens in lengths:
                given = draw(recurrence, 32768 // tokens, tokens, heads, n, p)
                row = {"name": recurrence_name, "who": who, "heads": heads, "N": n, "P": p, "T": tokens}
                try:
                    run = peer(path, recurrence, given) if who == "fla" else lambda r=recurrence, x=given: r(**x)
                    row |= measure(run, list(given.values()))
                    row |= {"backend": backend(path, n)} if who == "fla" else {}
                    row["bytes"] = recurrence.plan(**given).bytes
                except Exception as error:  # a peer that does not run here is a result too
                    row["error"] = f"{type(error).__name__}: {error}"[:200]
                data["rows"].append(row)
                print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(data, indent=1) + "\n")
                del given
                torch.cuda.empty_cache()


def page(data):
    """The rows as a Markdown table: ours, the byte floor at the measured copy rate, and the peer where it ran."""
    rate = data["machine"]["copy GB/s"]
    head = [
        "recurrence",
        "heads x N x P",
        "T",
        "forward ms",
        "forward+backward ms",
        "peak MiB",
        "byte floor ms",
        "fla ms",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    key = ("name", "heads", "N", "P", "T")
    peers = {tuple(r[x] for x in key): r for r in data["rows"] if r["who"] == "fla" and "both" in r}
    for r in data["rows"]:
        if r["who"] != "ours" or "both" not in r:
            continue
        other = peers.get(tuple(r[x] for x in key))
        beside = f"{other['forward']:.2f} / {other['both']:.2f}" if other else "not run"
        beside += f" ({other['backend']})" if other and other.get("backend", "fla") != "fla" else ""
        lines.append(
            f"| {r['name']} | {r['heads']} x {r['N']} x {r['P']} | {r['T']} | {r['forward']:.2f} | {r['both']:.2f} | "
            f"{r['peak']:.0f} | {r['bytes'] / rate / 1e6:.2f} | {beside} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
