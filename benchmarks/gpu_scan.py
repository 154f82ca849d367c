"""Times the fused scan on a CUDA GPU beside the machine's copy ceiling, after checking it against float64.

python benchmarks/gpu_scan.py [--only s6] [--tokens 8192] [--sweep] [--json out.json]
B·T = 32,768 tokens; median of CUDA-event timings. --sweep also tries the tiles of SWEEP.
"""

import argparse
import json
import platform
import subprocess
import time

import torch
import triton

import dsf
from dsf import Key, Param, System, Value, exp, silu, softplus
from dsf.kernels.triton import scan_table
from dsf.mixers.longhorn import longhorn
from dsf.mixers.qlstm import qlstm
from dsf.mixers.rg_lru import rg_lru
from dsf.mixers.s6 import s6

TOTAL, CHANNELS = 32_768, 4096


@dsf.recurrence
def s6_gated(x: Value, dt: Value, z: Value, b: Key, c: Key, A_log: Param[Key, Value], D: Param[Value]) -> System:
    """S6 and the output gate silu(z) of its block, in one scan."""
    delta, gate = softplus(dt), silu(z)
    return System(A=exp(-exp(A_log) * delta), B=b * (delta * x), C=c * gate, D=D * x * gate)


@dsf.recurrence
def given(a: Value, b: Value) -> System:
    """A vector scan of given a, b."""
    return System(A=a, B=b, C=1)


ROWS = {
    "s6": (s6, 16), "s6_gated": (s6_gated, 16), "longhorn": (longhorn, 16), "s6_64": (s6, 64), "s6_128": (s6, 128),
    "rg_lru": (rg_lru, 1), "qlstm": (qlstm, 1), "given": (given, 1),
}  # fmt: skip
# (K, BP, V, warps, M, span, busy) to try, by row
SWEEP = {
    "s6": [(1, 64, 1, 4, 32, 128, 6), (1, 32, 1, 4, 32, 128, 6), (1, 32, 1, 2, 32, 128, 6), (1, 128, 1, 8, 32, 128, 6)],
    "s6_64": [(1, 32, 1, 1, 32, 128, 8), (1, 32, 1, 2, 32, 128, 8), (1, 64, 1, 8, 32, 128, 12)],
    "rg_lru": [(K, BP, V, 4, 64, 64, 16) for K, BP, V in ((1, 512, 4), (2, 512, 4), (4, 512, 4), (2, 1024, 8))],
}  # fmt: skip


def draw(recurrence, batch, tokens, n, p, dtype=torch.bfloat16, device="cuda"):
    """Inputs in the ranges of a trained model."""
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        x = torch.randn([batch, tokens, 1, *sizes] if i.kind.time else [1, *sizes], device=device)
        if i.name == "A_log":
            x = torch.arange(1.0, n + 1, device=device).log()[None, :, None].expand(1, n, p).contiguous()
        if i.name in ("dt",):
            x = x - 3.0
        if i.name in ("beta", "a"):
            x = x.sigmoid()
        if i.name == "reset":
            x = (x > 3.0).float()
        found[i.name] = x.to(dtype if i.kind.time else torch.float32).requires_grad_()
    return found


def median(f, seconds=0.25):
    """Median milliseconds."""
    return triton.testing.do_bench(f, warmup=25, rep=int(seconds * 1000), return_mode="median")


def errors(recurrence, n):
    """Worst error against float64 of y and every gradient, over blocks of tokens: max |error| / max |reference|."""
    x = draw(recurrence, 2, 333, n, 160, torch.float32)  # neither tokens nor channels fill their tiles
    wide = {k: v.detach().double().requires_grad_() for k, v in x.items()}
    y, s = recurrence(**x, return_state=True, backend="triton")
    y2, s2 = recurrence(**wide, return_state=True, form="recurrent", backend="torch")
    w, ws = torch.randn_like(y), torch.randn_like(s)
    g = torch.autograd.grad((y * w).sum() + (s * ws).sum(), list(x.values()))
    g2 = torch.autograd.grad(
        (y2 * w).sum() + (s2 * ws).sum(), list(wide.values()), allow_unused=True, materialize_grads=True
    )
    worst = [block_error(a, b) for a, b in zip([y, *g], [y2, *g2], strict=True)]
    again = torch.autograd.grad((recurrence(**x, backend="triton") * w).sum(), list(x.values()))
    more = torch.autograd.grad((recurrence(**x, backend="triton") * w).sum(), list(x.values()))
    return worst[0], max(worst[1:]), all(torch.equal(a, b) for a, b in zip(again, more, strict=True))


def block_error(a, b):
    scale = b.abs().max().clamp(min=1e-12)
    return float((a - b).detach().abs().max() / scale.detach()) if bool(torch.isfinite(a).all()) else float("inf")


def time_row(recurrence, n, tokens):
    """Forward, forward+backward milliseconds, peak MiB over the inputs."""
    x = draw(recurrence, TOTAL // tokens, tokens, n, CHANNELS)
    plain = {k: v.detach() for k, v in x.items()}
    dy = torch.randn_like(
        plain[recurrence.spec.inputs[0].name if "value" in recurrence.spec.inputs[0].kind.axes else "x"]
    )
    leaves = list(x.values())

    def both():
        return torch.autograd.grad(recurrence(**x, backend="triton"), leaves, dy)

    start = time.perf_counter()
    both()
    torch.cuda.synchronize()
    cold = time.perf_counter() - start
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**20
    return median(lambda: recurrence(**plain, backend="triton")), median(both), peak, cold


def copy_rate():
    """Bytes a second of a device copy, read and written."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / (median(lambda: b.copy_(a)) * 1e-3)


def measure(name, tokens):
    """One row: correctness at a small odd size, then times at B·T = 32,768."""
    recurrence, n = ROWS[name]
    forward_error, gradient_error, repeatable = errors(recurrence, n)
    for t in tokens:
        forward, both, peak, cold = time_row(recurrence, n, t)
        plan = recurrence.plan(B=TOTAL // t, T=t, H=1, N=n, P=CHANNELS, dtype=torch.bfloat16)
        row = {"row": name, "N": n, "channels": CHANNELS, "T": t, "forward_ms": forward, "both_ms": both}
        row |= {"peak_MiB": peak, "first_call_s": cold, "bytes": plan.bytes}
        row |= {"error_y": forward_error, "error_gradients": gradient_error, "repeatable": repeatable}
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        yield row


def sweep(names, tokens):
    """The same for every tile of SWEEP, forward and adjoint alike."""
    for name in names:
        for config in SWEEP.get(name, ()):
            for table in (scan_table.FORWARD, scan_table.ADJOINT):
                table.clear()
                table.update({256: config})
            print(config)
            list(measure(name, tokens))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--tokens", default="2048,8192,32768")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    names, tokens = options.only.split(","), [int(t) for t in options.tokens.split(",")]
    if options.sweep:
        sweep(names, tokens)
        return
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    machine = {"gpu": torch.cuda.get_device_name(), **versions, "commit": options.commit}
    machine["copy_bytes_per_second"] = copy_rate()
    print(machine)
    found = [row for name in names for row in measure(name, tokens)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": found}, file, indent=1)


def commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
