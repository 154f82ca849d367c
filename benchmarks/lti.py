"""Time-invariant systems on a GPU: the convolution form beside torch.fft alone, and beside the scan.

    python benchmarks/lti.py [--seconds 240] [--commit HASH] [--out benchmarks/results/lti.json] [--device cuda]
    python benchmarks/lti.py --profile s4d                                                      # its kernels' times
    python benchmarks/lti.py --page benchmarks/results/lti.json --into docs/performance.md     # its table

Rows: S4D with real and complex rates, LRU and S4, forward, and forward and backward, float32. "fft" is what no
convolution by FFT can leave out: the transforms of the inputs and of a given impulse response, their product, and its
transform back, on contiguous [B, C, T], with torch's own gradient. "scan" is the fastest other form (form="chunk").
Every row is written as JSON when it is measured; a budget of seconds ends the run between rows; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_page import add_page_options, pair, shows
from torch import Tensor

from dsf import Recurrence, mixers
from dsf.kernels.invariant import fast_length

RESULTS = Path(__file__).parent / "results" / "lti.json"
TARGET = 1.2  # of torch.fft's own time
# name: recurrence, batch, heads, N, P, tokens, channels that are transformed
CASES: dict[str, tuple[Recurrence, int, int, int, int, int]] = {
    "s4d_real": (mixers.s4d_real, 8, 1, 32, 1024, 2048),
    "s4d": (mixers.s4d, 8, 1024, 64, 1, 2048),
    "s4d T=16384": (mixers.s4d, 1, 1024, 64, 1, 16384),
    "s4d one sequence": (mixers.s4d, 1, 1024, 64, 1, 2048),
    "lru": (mixers.lru, 8, 512, 2, 2, 2048),
    "s4": (mixers.s4, 8, 512, 64, 1, 2048),
}
SCANNED = ("s4d_real", "s4d one sequence")  # whose other forms fit beside their states


def inputs_of(r: Recurrence, batch: int, heads: int, n: int, p: int, tokens: int, device: str) -> dict[str, Tensor]:
    """Inputs with rates as at a layer's start, as leaves."""
    torch.manual_seed(0)
    sizes = {"B": batch, "T": tokens, "H": heads, "N": n, "N/2": n // 2, "P": p}
    found = {i.name: torch.randn([sizes[a] for a in i.kind.layout()]) for i in r.spec.inputs}
    rates = {"dt": (-7.0, -2.3), "A_log": (-0.8, -0.6), "nu_log": (-6.0, -2.0), "theta_log": (-3.0, 1.0)}
    for name, (low, high) in rates.items():
        if name in found:
            found[name].uniform_(low, high)
    if "gamma_log" in found:
        found["gamma_log"].zero_()
    return {name: x.to(device).requires_grad_() for name, x in found.items()}


def median(work: Callable[[], Any], device: str, runs: int = 20) -> float:
    """Milliseconds, the median of runs that follow three others."""
    times = []
    for turn in range(runs + 3):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            took = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            work()
            took = 1e3 * (time.perf_counter() - start)
        if turn > 2:
            times.append(took)
    return statistics.median(times)


def ways(run: Callable[..., Tensor], inputs: dict[str, Tensor], device: str) -> dict[str, float]:
    """forward (without a graph) and both, in milliseconds."""
    leaves = list(inputs.values())
    with torch.no_grad():
        cotangent = torch.randn_like(run(**inputs))

    def forward() -> None:
        with torch.no_grad():
            run(**inputs)

    def both() -> None:
        torch.autograd.grad((run(**inputs) * cotangent).sum(), leaves, allow_unused=True)

    return {"forward": median(forward, device), "both": median(both, device)}


def plain(x: Tensor, h: Tensor) -> Tensor:
    """x convolved with h along the last axis, as torch has it."""
    points = fast_length(2 * x.shape[-1] - 1)
    return torch.fft.irfft(torch.fft.rfft(x, points) * torch.fft.rfft(h, points), points)[..., : x.shape[-1]]


def measure(name: str, device: str) -> dict[str, Any]:
    """One row."""
    r, batch, heads, n, p, tokens = CASES[name]
    inputs = inputs_of(r, batch, heads, n, p, tokens, device)
    channels = heads * p
    x = torch.randn(batch, channels, tokens, device=device).requires_grad_()
    h = (torch.randn(channels, tokens, device=device) / math.sqrt(tokens)).requires_grad_()
    row: dict[str, Any] = {"case": name, "shape": f"B={batch} T={tokens} H={heads} N={n} P={p}"}
    row["convolution"] = ways(lambda **given: r(**given, form="convolution"), inputs, device)
    row["fft"] = ways(plain, {"x": x, "h": h}, device)
    row["ratio"] = {key: row["convolution"][key] / row["fft"][key] for key in ("forward", "both")}
    if name in SCANNED:
        row["scan"] = ways(lambda **given: r(**given, form="chunk"), inputs, device)
    with torch.no_grad():
        few = {k: (v[:1, :256] if v.dim() > 2 and v.shape[1] == tokens else v).detach() for k, v in inputs.items()}
        truth = r(**{k: v.double() for k, v in few.items()}, form="recurrent")
        row["error"] = float((r(**few, form="convolution") - truth).norm() / truth.norm())
    return row


def profile(name: str, device: str) -> str:
    """What the kernels of a call, forward and backward, take on the GPU: torch.profiler's table of ten calls."""
    r, batch, heads, n, p, tokens = CASES[name]
    inputs = inputs_of(r, batch, heads, n, p, tokens, device)
    kinds = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * (device == "cuda")]

    def both() -> None:
        torch.autograd.grad(r(**inputs, form="convolution").sum(), list(inputs.values()), allow_unused=True)

    both()
    with torch.profiler.profile(activities=kinds) as found:
        for _ in range(10):
            both()
        if device == "cuda":
            torch.cuda.synchronize()
    by = f"self_{device}_time_total"
    return str(found.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=60))


def page(data: dict[str, Any]) -> str:
    """The table of a record."""
    lines = ["| recurrence | B, T, H, N, P | convolution ms | FFT alone ms | ÷ FFT | fused scan ms | error |"]
    lines.append("|---" * 7 + "|")
    for row in data["rows"]:
        shape = re.sub(r"[A-Z]=", "", row["shape"]).replace(" ", ", ")
        cells = [pair(row[k].values()) if k in row else "" for k in ("convolution", "fft", "ratio", "scan")]
        name = row["case"].split()[0]
        lines.append(f"| `{name}` | {shape} | {' | '.join(cells)} | {row['error']:.0e} |")
    return "\n".join([*lines, "", f"{data['device']}, torch {data['torch']}, commit {data['commit']}, float32."])


def commit() -> str:
    """What git says runs here."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip()


def main() -> None:
    """Measure the rows, write them one by one, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--commit", help="of the tree that runs, where git does not know it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", choices=CASES, nargs="+")
    parser.add_argument("--profile", choices=CASES)
    add_page_options(parser)
    given = parser.parse_args()
    if shows(given, page):
        return
    if given.profile:
        print(profile(given.profile, given.device))
        return
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    where = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.case or CASES:
        if time.perf_counter() - begin > given.seconds:
            break
        rows.append(measure(name, given.device))
        data = {"device": where, "torch": torch.__version__, "commit": given.commit or commit(), "rows": rows}
        given.out.write_text(json.dumps(data, indent=1) + "\n")
    print(
        f"{'case':18}{'shape':34}{'conv ms':>16}{'fft ms':>16}{f'ratio (<= {TARGET})':>16}{'scan ms':>16}{'error':>9}"
    )
    for row in rows:
        cells = [
            f"{row[k]['forward']:.2f} / {row[k]['both']:.2f}" if k in row else ""
            for k in ("convolution", "fft", "ratio", "scan")
        ]
        print(f"{row['case']:18}{row['shape']:34}{''.join(c.rjust(16) for c in cells)}{row['error']:9.0e}")


if __name__ == "__main__":
    main()
