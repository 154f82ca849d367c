"""Times the fused scan on a CUDA GPU beside mamba-ssm's CUDA kernel and accelerated_scan, after checking it.

python benchmarks/gpu_scan.py [--only s6 given] [--peers] [--json benchmarks/results/gpu_scan.json]
python benchmarks/gpu_scan.py --page benchmarks/results/gpu_scan.json --into docs/performance.md   # its table

Public calls in bfloat16 (peers: their own operators, in their own layout), B·T = 32,768 tokens, 4096 channels; medians
of CUDA-event timings with a cold L2. Peers need `selective_scan_cuda` (built from mamba-ssm's csrc/selective_scan) and
`accelerated_scan` on the path, and run in the same process.
"""

import argparse
import gc
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_page import add_options, shows

import dsf
from dsf import System, Value
from dsf.mixers.longhorn import longhorn
from dsf.mixers.qlstm import qlstm
from dsf.mixers.rg_lru import rg_lru
from dsf.mixers.s6 import s6

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from scan_family import aligned, gated, leaky_peak, swinging  # in no library: written for the tests

TOTAL, CHANNELS, LENGTHS = 32_768, 4096, (2048, 8192, 32768)


@dsf.recurrence
def given(a: Value, b: Value) -> System:
    """A vector scan of given a, b."""
    return System(A=a, B=b, C=1)


# name: recurrence, N, the peer it is measured beside
ROWS = {
    "s6": (s6, 16, None), "s6_gated": (gated, 16, "mamba"), "longhorn": (longhorn, 16, None),
    "s6_64": (gated, 64, "mamba"), "s6_128": (gated, 128, "mamba"),
    "rg_lru": (rg_lru, 1, "accelerated_scan"), "qlstm": (qlstm, 1, "accelerated_scan"),
    "given": (given, 1, "accelerated_scan"), "s6_1": (s6, 1, None), "leaky_peak": (leaky_peak, 1, None),
    "aligned": (aligned, 16, None), "swinging": (swinging, 16, None),
}  # fmt: skip


def draw(recurrence, batch, tokens, n, p, dtype=torch.bfloat16, device="cuda"):
    """Inputs in the ranges of a trained model."""
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        x = torch.randn([batch, tokens, 1, *sizes] if i.kind.time else [1, *sizes], device=device)
        if i.name == "A_log":
            x = torch.arange(1.0, n + 1, device=device).log()[None, :, None].expand(1, n, p).contiguous()
        if i.name == "dt":
            x = x - 3.0
        if i.name in ("beta", "a"):
            x = x.sigmoid()
        if i.name in ("reset", "stop"):
            x = (x > 3.0).float()
        found[i.name] = x.to(dtype if i.kind.time else torch.float32).requires_grad_()
    return found


def median(f, seconds=0.2):
    """Median milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(f, warmup=25, rep=int(seconds * 1000), return_mode="median"))


def errors(recurrence, n):
    """Worst error against float64 of y and every gradient, over all entries: max |error| / max |reference|."""
    x = draw(recurrence, 2, 333, n, 160, torch.float32)  # neither tokens nor channels fill their tiles
    wide = {k: v.detach().double().requires_grad_() for k, v in x.items()}
    y, s = recurrence(**x, return_state=True, backend="triton")
    y2, s2 = recurrence(**wide, return_state=True, form="recurrent", backend="torch")
    w, ws = torch.randn_like(y), torch.randn_like(s)
    g = torch.autograd.grad((y * w).sum() + (s * ws).sum(), list(x.values()))
    g2 = torch.autograd.grad(
        (y2 * w).sum() + (s2 * ws).sum(), list(wide.values()), allow_unused=True, materialize_grads=True
    )
    worst = [relative_error(a, b) for a, b in zip([y, *g], [y2, *g2], strict=True)]
    runs = [torch.autograd.grad((recurrence(**x, backend="triton") * w).sum(), list(x.values())) for _ in range(2)]
    return worst[0], max(worst[1:]), all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def relative_error(a, b):
    scale = b.abs().max().clamp(min=1e-12)
    return float((a - b).detach().abs().max() / scale.detach()) if bool(torch.isfinite(a).all()) else float("inf")


def measure(forward, both):
    """Forward and forward+backward ms, peak MiB over the inputs, seconds of the first call."""
    start = time.perf_counter()
    both()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    gc.collect()  # what an earlier row left must not be freed while this one's peak is watched
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**20
    return {"forward": median(forward), "both": median(both), "peak": peak, "first_call_s": first}


def ours(recurrence, n, tokens):
    x = draw(recurrence, TOTAL // tokens, tokens, n, CHANNELS)
    plain = {k: v.detach() for k, v in x.items()}
    dy = torch.randn(TOTAL // tokens, tokens, 1, CHANNELS, device="cuda", dtype=torch.bfloat16)
    leaves = list(x.values())
    found = measure(
        lambda: recurrence(**plain, backend="triton"),
        lambda: torch.autograd.grad(recurrence(**x, backend="triton"), leaves, dy),
    )
    plan = recurrence.plan(B=TOTAL // tokens, T=tokens, H=1, N=n, P=CHANNELS, dtype=torch.bfloat16)
    return found | {"bytes": plan.bytes}


def mamba(n, tokens):
    """mamba-ssm's CUDA selective scan with skip, softplus and gate: its two operators, called directly."""
    scan = importlib.import_module("selective_scan_cuda")
    batch = TOTAL // tokens
    u, dt, z, dy = (torch.randn(batch, CHANNELS, tokens, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    b, c = (torch.randn(batch, 1, n, tokens, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dt -= 3.0
    a, d = -torch.arange(1.0, n + 1, device="cuda").repeat(CHANNELS, 1), torch.randn(CHANNELS, device="cuda")

    def forward():
        return scan.fwd(u, dt, a, b, c, d, z, None, True)

    def both():
        out, states, _ = forward()
        scan.bwd(u, dt, a, b, c, d, z, None, dy, states, out, None, True, False)

    return measure(forward, both)


def accelerated_scan(n, tokens):
    """accelerated_scan of given a, b, [B, channels, T]."""
    scan = importlib.import_module("accelerated_scan.scalar").scan
    shape = (TOTAL // tokens, CHANNELS, tokens)
    a = torch.rand(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    b, dy = torch.randn_like(a).requires_grad_(), torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return measure(lambda: scan(a.detach(), b.detach()), lambda: torch.autograd.grad(scan(a, b), [a, b], dy))


PEERS = {"mamba": mamba, "accelerated_scan": accelerated_scan}


def copy_rate():
    """Bytes a second of a device copy, read and written."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / (median(lambda: b.copy_(a)) * 1e-3)


def commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--merge", action="store_true", help="keep the JSON's rows that are not measured now")
    add_options(parser)
    options = parser.parse_args()
    if shows(options, page):
        return
    import triton

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    machine |= {"python": platform.python_version(), "commit": options.commit or commit()}
    data = {"checks": {}, "rows": []}
    if options.merge and options.json and options.json.exists():
        data = json.loads(options.json.read_text())
    data["machine"] = machine | {"copy_bytes_per_second": copy_rate()}
    print(data["machine"], flush=True)
    sys.setdlopenflags(os.RTLD_LAZY)  # a selective_scan_cuda built for bfloat16 alone lacks the other types' symbols
    work = [(name, *ROWS[name]) for name in options.only]
    for name, recurrence, n, _ in work:
        data["checks"][name] = dict(zip(("y", "gradients", "repeatable"), errors(recurrence, n), strict=True))
        print(name, data["checks"][name], flush=True)
    sides = [(name, n, "ours", lambda t, r=r, n=n: ours(r, n, t)) for name, r, n, _ in work]
    if options.peers:
        found = {(who, n): (who, n, who, lambda t, who=who, n=n: PEERS[who](n, t)) for _, _, n, who in work if who}
        sides = [*found.values(), *sides]
    for name, n, who, run in sides:
        for tokens in LENGTHS:
            row = {"name": name, "who": who, "N": n, "T": tokens, "commit": machine["commit"]}
            try:
                row |= run(tokens)
            except Exception as error:  # a peer that does not run here is a result too
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            same = [r for r in data["rows"] if all(r[x] == row[x] for x in ("name", "who", "N", "T"))]
            data["rows"] = [r for r in data["rows"] if r not in same] + [row]
            print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(data, indent=1) + "\n")


def page(data):
    """The rows as a Markdown table, each beside its byte floor, its exponentials' floor and its peer.

    An asterisk: what a figure is compared with was measured in another run.
    """
    rate, exponentials = data["machine"]["copy_bytes_per_second"], 132 * 16 * 1.98e9
    head = ["row", "N", "T", "forward ms", "forward+backward ms", "peak MiB", "first call s", "byte floor ms"]
    head += ["exponentials' floor ms", "ps a state entry", "÷ S6", "peer", "peer ms", "peer peak MiB", "ours ÷ peer"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    mine = [r for r in data["rows"] if r["who"] == "ours" and "both" in r]
    peers = {(r["who"], r["N"], r["T"]): r for r in data["rows"] if r["who"] != "ours" and "both" in r}
    plain = {(r["N"], r["T"]): r for r in data["rows"] if r["name"] in ("s6", "s6_1") and "both" in r}
    for r in sorted(mine, key=lambda r: (list(ROWS).index(r["name"]), r["T"])):
        who = ROWS[r["name"]][2]
        other = peers.get((who, r["N"], r["T"]))
        beside = [who or "", "", "", ""]
        if other:
            ratios = f"{r['forward'] / other['forward']:.2f} / {r['both'] / other['both']:.2f}"
            ratios += "" if r["commit"] == other["commit"] else "*"
            beside = [who, f"{other['forward']:.2f} / {other['both']:.2f}", f"{other['peak']:.0f}", ratios]
        entries = TOTAL * CHANNELS * r["N"]
        floor = entries / exponentials * 1e3
        each = [r[x] / entries * 1e9 for x in ("forward", "both")]
        like = plain.get((r["N"], r["T"]))
        to_s6 = " / ".join(f"{r[x] / like[x]:.2f}" for x in ("forward", "both")) if like else ""
        to_s6 += "*" if like and r["commit"] != like["commit"] else ""
        cells = [r["name"], r["N"], r["T"], f"{r['forward']:.2f}", f"{r['both']:.2f}", f"{r['peak']:.0f}"]
        cells += [f"{r['first_call_s']:.1f}", f"{r['bytes'] / rate * 1e3:.2f}", f"{floor:.2f}"]
        cells += [" / ".join(f"{x:.2f}" for x in each), to_s6, *beside]
        lines.append(f"| {' | '.join(str(c) for c in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
