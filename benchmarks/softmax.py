"""Softmax with a transition on a GPU: fox beside torch's attention and fla's, a window beside FlexAttention.

python benchmarks/softmax.py --seconds 240 --commit HASH --out benchmarks/results/softmax.json
python benchmarks/softmax.py --page benchmarks/results/softmax.json --into docs/performance.md     # its table

Every row: forward, and forward and backward, median milliseconds of CUDA events, of single calls and of replays of
one CUDA graph, in which the host takes no part; the largest error of y and of gradients in the same run (by head and
block of 64 tokens, over the norm of the typical block, against float64 on some heads), and the same of every peer that
can be imported, fla's autotuner cut to --candidates a kernel. Results are written after every row; the table comes
last.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_compile import few_candidates, tune_quickly
from gpu_matrix import captured
from gpu_page import add_page_options, pair, ratios, shows
from torch import Tensor

import dsf
from dsf import I, Key, N, System, Value, exp_features, mixers, ratio

BLOCK, EXACT = 64, 4096  # tokens of a block; the longest sequence that float64 matrices are made of


@dsf.recurrence
def window_1024(q: Key, k: Key, v: Value) -> System:
    """Softmax attention over the last 1,024 tokens."""
    return System(A=I, B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=ratio, window=1024)


def milliseconds(call: Callable[[], Any], device: torch.device, runs: int = 20) -> float:
    """Median of single calls."""
    for _ in range(3):
        call()
    found = []
    for _ in range(runs):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def both(call: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """y and all gradients."""
    y = call(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def replays(call: Callable[[], Any], device: torch.device) -> float | None:
    """Median of replays of a CUDA graph of the call; None on a CPU."""
    return milliseconds(captured(call), device) if device.type == "cuda" else None


def timed(call: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> dict[str, float | None]:
    """Milliseconds of the forward pass alone, and with the backward pass."""
    found: dict[str, float | None] = {}
    ways = {"forward": lambda: call(*inputs), "both": lambda: both(call, inputs, dy)}
    for name, way in ways.items():
        with torch.set_grad_enabled(name == "both"):
            found |= {f"{name}_ms": milliseconds(way, dy.device), f"{name}_graph_ms": replays(way, dy.device)}
    return found


def exact(inputs: list[Tensor], dy: Tensor, window: int | None) -> list[Tensor]:
    """y and gradients in float64 by definition."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if len(leaves) > 3:
        c = F.logsigmoid(leaves[3]).transpose(1, 2).cumsum(-1)
        scores = scores + c.unsqueeze(-1) - c.unsqueeze(-2)
    age = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(q.shape[2], device=q.device)
    hidden = (age < 0) | (age >= (window or q.shape[2]))
    y = (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def errors(call: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor, window: int | None) -> dict[str, float]:
    """The largest error of a block of a head over the norm of the typical one, of the first EXACT tokens."""
    few = [x[:1, :EXACT].detach().requires_grad_() for x in inputs]
    up = dy[:1, :EXACT]
    found = {}
    names = ("y", "q", "k", "v", "f")
    got = both(call, few, up)
    for head in range(0, up.shape[2], max(1, up.shape[2] // 2)):
        expected = exact([x[:, :, head : head + 1] for x in few], up[:, :, head : head + 1], window)
        for name, a, b in zip(names, got, expected, strict=False):
            off = (a[:, :, head : head + 1].double() - b)[0, :, 0].reshape(b.shape[1], -1)
            size = b[0, :, 0].reshape(b.shape[1], -1).square().mean().sqrt()
            worst = max(float(x.square().mean().sqrt() / size) for x in off.split(BLOCK))
            found[name] = max(found.get(name, 0.0), worst)
    return found


def sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """torch's causal attention, without any gate."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def flash_linear() -> Callable[..., Tensor] | None:
    """fla's forgetting attention, or None where it cannot be imported."""
    try:
        from fla.ops.forgetting_attn import parallel_forgetting_attn
    except Exception as error:
        print("fla:", error)
        return None

    def call(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        found: Tensor = parallel_forgetting_attn(q, k, v, F.logsigmoid(f.float()))
        return found

    return call


def flex(window: int, tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """torch's FlexAttention, compiled, with a block mask of the window."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    masks = functools.cache(lambda t: create_block_mask(seen, None, None, t, t, device=str(device)))
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found: Tensor = compiled(q, k, v, block_mask=masks(q.shape[2])).transpose(1, 2)
        return found

    return call


def drawn(shape: tuple[int, ...], gated: bool, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k, v [B, T, H, N], f [B, T, H] with gates from 0.7 to 0.999 if gated, and dy."""
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    if gated:
        inputs.append((1 + 6 * torch.rand(shape[:3], device=device)).to(dtype).requires_grad_())
    return inputs, torch.randn(shape, device=device, dtype=dtype)


def rows(quick: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes [B, T, H, N]."""
    if quick:
        return [("fox", (1, 200, 2, 16)), ("window_1024", (1, 1500, 1, 16))]
    return [
        ("fox", (4, 2048, 16, 128)), ("fox", (4, 8192, 16, 128)), ("fox", (8, 2048, 32, 64)),
        ("fox", (1, 32768, 16, 128)),
        ("window_1024", (1, 32768, 16, 128)), ("window_1024", (1, 32768, 32, 64)),
    ]  # fmt: skip


def measured(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """One row: ours and every peer."""
    torch.manual_seed(0)
    ours, window = (mixers.fox, None) if name == "fox" else (window_1024, 1024)
    inputs, dy = drawn(shape, name == "fox", device, dtype)
    calls: dict[str, Callable[..., Tensor] | None] = {"dsf": ours}
    if name == "fox":
        calls |= {"sdpa": sdpa, "fla": flash_linear()}
    elif device.type == "cuda":
        calls["flex"] = flex(1024, shape[1], device)
    plan = ours.plan(*inputs)
    row: dict[str, Any] = {"name": name, "shape": list(shape), "dtype": str(dtype), "kernel": plan.kernel}
    for who, call in calls.items():
        if call is None:
            continue
        given = inputs[:3] if who == "sdpa" else inputs
        try:
            start = time.perf_counter()
            call(*given).sum().backward()
            found: dict[str, Any] = {"first_s": time.perf_counter() - start}
            found |= timed(call, given, dy)
            if who != "sdpa":
                found["errors"] = errors(call, inputs, dy, window)
        except Exception as error:  # a peer that cannot is no reason to lose the others
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        row[who] = found
    return row


WAYS = "ms", "graph_ms"
PEERS = {"sdpa": "torch SDPA, without gates", "fla": "fla", "flex": "FlexAttention"}


def times(one: dict[str, Any], way: str) -> list[float | None]:
    """Forward, and with the backward pass; None where not measured."""
    return [one.get(f"{name}_{way}") for name in ("forward", "both")]


def page(data: dict[str, Any]) -> str:
    """The table of a record."""
    lines = [
        "| recurrence | B, T, H, N | ours ms | as a graph | worst error of y, of gradients | peer | peer ms "
        "| as a graph | ours ÷ peer | as graphs |"
    ]
    lines.append("|---" * 10 + "|")
    for row in data["rows"]:
        off = row["dsf"].get("errors", {})
        errors = f"{off['y']:.1e}, {max(v for k, v in off.items() if k != 'y'):.1e}" if off else "–"
        shape, mine = ", ".join(map(str, row["shape"])), [times(row["dsf"], way) for way in WAYS]
        lead = [f"`{row['name']}`", shape, *map(pair, mine), errors]
        for who, title in PEERS.items():
            if who in row:
                failed = f" ({row[who]['failed'].split(':')[0]})" if "failed" in row[who] else ""
                theirs = [times(row[who], way) for way in WAYS]
                over = [pair(ratios(*both)) for both in zip(mine, theirs, strict=True)]
                lines.append(f"| {' | '.join([*lead, title + failed, *map(pair, theirs), *over])} |")
                lead = [""] * len(lead)
    cut = f", fla's autotuner cut to {data['candidates']} candidates a kernel" if data.get("candidates") else ""
    return "\n".join([*lines, "", f"{data['device']}, torch {data['torch']}, commit {data['commit']}, bfloat16{cut}."])


def main() -> None:
    """Measure what the seconds allow, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("softmax.json"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, on a CPU too")
    parser.add_argument("--candidates", type=int, default=4)
    add_page_options(parser)
    options = parser.parse_args()
    if shows(options, page):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    about: dict[str, Any] = {"commit": options.commit, "torch": torch.__version__, "device": str(device)}
    about["candidates"] = options.candidates
    if device.type == "cuda":
        about["device"] = torch.cuda.get_device_name()
        few_candidates(options.candidates)
        tune_quickly()
    begin, found = time.perf_counter(), []
    for name, shape in rows(options.quick):
        if time.perf_counter() - begin > options.seconds:
            print("out of time before", name, shape)
            break
        found.append(measured(name, shape, device, dtype))
        options.out.write_text(json.dumps({**about, "rows": found}, indent=1))
    for row in found:
        print(row["name"], row["shape"], row["kernel"])
        for who in ("dsf", "sdpa", "fla", "flex"):
            one = row.get(who)
            if one is None or "failed" in one:
                print(f"  {who:5} {'' if one is None else one['failed']}") if one else None
                continue
            over = [f"{one[k] / row['dsf'][k]:.2f}" for k in ("forward_ms", "both_ms") if "failed" not in row["dsf"]]
            off = " ".join(f"{k} {v:.0e}" for k, v in one.get("errors", {}).items())
            print(f"  {who:5} {one['forward_ms']:8.3f} {one['both_ms']:8.3f} ms, over ours {'/'.join(over)}  {off}")


if __name__ == "__main__":
    main()
