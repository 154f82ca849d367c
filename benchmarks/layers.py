"""Layers on a CUDA GPU, and the fused parts around their recurrences: checked against float64, then timed.

python benchmarks/layers.py [--only check convolution norm mixing deltanet s6] [--compile] [--json FILE]

check: their kernels against float64 (layers_check.py). convolution, norm, mixing (rotary positions and RWKV's mixtures
of tokens): alone, beside their byte floors at the measured copy rate and beside torch's. The others are layers of the
zoo by name (all of them, unless named) at B = 4, T = 8192, d_model 2048, 16 heads of 128, bfloat16, eager, beside the
floor of each: its matrix products at the measured rate and its recurrence called on the same inputs. Layers are called
as in training, without their final state, which is also what fla's do unless asked. fla's layers, where fla is on the
path, with its autotuner cut to --candidates a kernel.
--seconds: how long a row may take. --profile: kernels of one forward and backward, by what they are, longest first.
--tiles: other tile sizes for the convolution, each with its times.
"""

import argparse
import contextlib
import importlib
import inspect
import itertools
import json
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_compile import few_candidates, limit, tune_quickly
from gpu_matrix import machine, median
from layers_check import UNIT, check, draw
from torch.utils._python_dispatch import TorchDispatchMode

from dsf import mixers
from dsf.kernels.convolution import Piece, short_convolution
from dsf.kernels.mixture import token_mixtures
from dsf.kernels.norm import gated, gated_rms_norm
from dsf.kernels.rotary import angles, rotary
from dsf.mixers.bidirectional import BothWays

BATCH, TOKENS, WIDTH, HEADS, HEAD = 4, 8192, 2048, 16, 128
# d_state and headdim as their papers have them
OWN_SIZES = ("s6", "s6_negative", "s6_complex", "ssd", "longhorn", "longhorn_exact", "hydra", "vision_mamba")
CONVOLUTIONS = {  # channels, bias, pieces
    "conv 6144": (6144, False, None),
    "conv 6144, unit q k": (6144, False, UNIT),
    "conv 4352, bias": (4352, True, (Piece(4096), Piece(128), Piece(128))),
    "conv 4096, bias": (4096, True, None),
}
NORMS = {  # shape, gate, gate first, norm
    "norm 16x128": ((BATCH, TOKENS, HEADS, HEAD), False, False, True),
    "norm 16x128, gate": ((BATCH, TOKENS, HEADS, HEAD), True, False, True),
    "gate, norm 4096": ((BATCH, TOKENS, 4096), True, True, True),
    "gate 4096": ((BATCH, TOKENS, 4096), True, False, False),
    "norm 2048": ((BATCH, TOKENS, 2048), False, False, True),
}
PEERS = {
    "deltanet": ("DeltaNet", {"hidden_size": WIDTH, "num_heads": HEADS}),
    "gated_deltanet": ("GatedDeltaNet", {"hidden_size": WIDTH, "num_heads": HEADS, "head_dim": HEAD, "expand_v": 1}),
    "gla": ("GatedLinearAttention", {"hidden_size": WIDTH, "num_heads": HEADS, "expand_k": 1, "expand_v": 1}),
    "comba": ("Comba", {"hidden_size": WIDTH, "num_heads": HEADS, "head_dim": HEAD, "expand_v": 1}),
    "gated_deltanet2": ("GatedDeltaNet2", {"hidden_size": WIDTH, "num_heads": HEADS, "head_dim": HEAD}),
    "mesanet": ("MesaNet", {"hidden_size": WIDTH, "num_heads": HEADS, "head_dim": HEAD}),
    "kda": ("KimiDeltaAttention", {"hidden_size": WIDTH, "num_heads": HEADS, "head_dim": HEAD}),
}


# Parts alone


def timed(run, leaves):
    """Median ms of run(), a tuple of tensors, forward without and with backward, and peak MiB over inputs and dy."""
    with torch.no_grad():
        slopes = [torch.randn_like(y) for y in run()]

    def alone():
        with torch.no_grad():
            run()

    def both():
        torch.autograd.grad(run(), leaves, slopes, allow_unused=True)

    both()
    both()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**20
    return {"forward": median(alone), "both": median(both), "peak": peak}


def times_of(run, leaves, floors, copy):
    """The same beside the floors of so many bytes."""
    return timed(run, leaves) | {"floor forward": floors[0] / copy / 1e6, "floor both": floors[1] / copy / 1e6}


def convolution_row(name, copy):
    """Ours; torch's conv1d with the transposes that it needs and SiLU; fla's and causal-conv1d's where they are."""
    channels, bias, pieces = CONVOLUTIONS[name]
    x, weight = draw(BATCH, TOKENS, channels), draw(channels, 4)
    added = draw(channels) if bias else None
    leaves = [y for y in (x, weight, added) if y is not None]
    one = x.numel() * x.element_size()

    def ours():
        return short_convolution(x, weight, added, pieces=pieces)[0]

    def with_torch():
        y = F.conv1d(x.mT, weight.unsqueeze(1), added, padding=3, groups=channels)[..., :TOKENS]
        return (F.silu(y).mT,)

    yield "ours", times_of(ours, leaves, (2 * one, 5 * one), copy)
    if pieces is None:
        yield "torch conv1d", times_of(with_torch, leaves, (2 * one, 5 * one), copy)
        for who, path in (
            ("fla", "fla.modules.convolution"),
            ("fla", "fla.modules.conv"),
            ("causal-conv1d", "causal_conv1d"),
        ):
            with contextlib.suppress(ImportError, AttributeError):
                module = importlib.import_module(path)
                peer = module.causal_conv1d if who == "fla" else module.causal_conv1d_fn

                def theirs(peer=peer, who=who):
                    if who == "fla":
                        y = peer(x, weight, added, activation="silu")
                        return (y[0] if isinstance(y, tuple) else y,)
                    return (peer(x.mT, weight, added, activation="silu").mT,)

                yield who, times_of(theirs, leaves, (2 * one, 5 * one), copy)


def norm_row(name, copy):
    shape, with_gate, first, norm = NORMS[name]
    x, weight = draw(*shape), draw(shape[-1]) if norm else None
    gate = draw(*shape) if with_gate else None
    leaves = [y for y in (x, weight, gate) if y is not None]
    one = x.numel() * x.element_size()

    def run(backend="auto"):
        if not norm:
            return (gated(x, gate, backend=backend),)
        return (gated_rms_norm(x, weight, gate, 1, first, backend=backend),)

    floors = (2 + with_gate) * one, (5 + 3 * with_gate) * one
    yield "ours", times_of(run, leaves, floors, copy)
    yield "torch", times_of(lambda: run("torch"), leaves, floors, copy)


def mixing_rows(copy):
    """Rotary positions of q and k, and six mixtures of a token and the one before."""
    q, k = (draw(BATCH, TOKENS, HEADS, HEAD) for _ in range(2))
    cos, sin = angles(torch.arange(TOKENS, device="cuda")[None], HEAD, 10000.0)
    x, other, shares = draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, WIDTH), [draw(WIDTH) for _ in range(6)]
    one = x.numel() * x.element_size()
    for backend, who in (("auto", "ours"), ("torch", "torch")):
        turned = partial(rotary, q, k, cos, sin, 0.3, backend)
        yield "rotary 16x128", who, times_of(turned, [q, k], (4 * one, 8 * one), copy)
        mixed = partial(token_mixtures, x, other, shares, backend=backend)
        yield "6 mixtures 2048", who, times_of(mixed, [x, other, *shares], (8 * one, 18 * one), copy)


def tile_rows(copy):
    """Times of the convolution with other tile sizes."""
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.layer import table

    known = table.convolution
    for name, backward in itertools.product(("conv 6144", "conv 6144, unit q k"), (False, True)):
        for channels, rows, warps in itertools.product((256, 512, 1024), (32, 64, 128, 256), (2, 4, 8)):
            for block in (4, 8, 16):
                if not 2 <= channels // (32 * warps) <= 16 or (backward and rows < 64):
                    continue

                tile = table.Tile(channels, rows, block, warps)

                def other(*key, tile=tile, backward=backward):
                    return tile if key[-1] == backward else known(*key)

                table.convolution = other
                operators.forget()
                for _, found in itertools.islice(convolution_row(name, copy), 1):
                    label = f"{name} {'both' if backward else 'forward'} {channels} {rows} {block} {warps}"
                    yield label, "ours", found
    table.convolution = known
    operators.forget()


# Layers


def layer_of(name):
    module = mixers.LAYERS[name] if name in mixers.LAYERS else mixers.get(name).module
    known = set(inspect.signature(inspect.unwrap(module).__init__).parameters)
    sizes = {"n_heads": HEADS} | ({} if name in OWN_SIZES else {"d_state": HEAD, "headdim": HEAD})
    sizes |= {"expand": 1} if name in ("mlstm", "vision_lstm") else {}  # heads of 128
    torch.manual_seed(0)
    return module(WIDTH, **{k: v for k, v in sizes.items() if k in known}, device="cuda", dtype=torch.bfloat16)


class Products(TorchDispatchMode):
    """Counts multiplications and additions of matrix products."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.flops += (
                2 * out.numel() * args[1 if name.startswith("add") or name.startswith("badd") else 0].shape[-1]
            )
        return out


def products(forward, leaves):
    """Operations of the matrix products forward, and with backward."""
    with Products() as alone, torch.no_grad():
        forward()
    with Products() as both:
        (y,) = forward()
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    return alone.flops, both.flops


def kernels_of(forward, leaves):
    """Launched kernels of one forward and backward: {name: [count, ms]}."""
    forward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        (y,) = forward()
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
        torch.cuda.synchronize()
    found, spent = Counter(), Counter()
    for event in run.events():
        found[event.name] += 1
        spent[event.name] += event.device_time / 1e3
    return {name: [found[name], spent[name]] for name, _ in spent.most_common()}


def recurrences_of(layer, x):
    """The calls of recurrences that a layer makes, one for each direction."""
    if not isinstance(layer, BothWays):
        return [(layer.recurrence, layer.inputs(x))]
    if hasattr(layer, "ways"):
        return [(layer.recurrence, given) for given in layer.ways(x)]
    ways = (layer.ahead, layer.ahead_norm, x), (layer.back, layer.back_norm, x.flip(1))
    return [(way.recurrence, way.inputs(norm(y))) for way, norm, y in ways]


def layer_row(name, options, run):
    layer = layer_of(name)
    x = draw(BATCH, TOKENS, WIDTH)
    leaves = [x, *layer.parameters()]

    def forward(call=layer):
        return call(x, use_cache=False)[:1]

    found = timed(forward, leaves)
    with torch.no_grad():
        calls = [(f, {n: v.detach().requires_grad_(v.is_floating_point()) for n, v in given.items()})
                 for f, given in recurrences_of(layer, x)]  # fmt: skip
    wanted = [v for _, given in calls for v in given.values() if v.requires_grad]
    of_recurrence = timed(lambda: tuple(f(**given) for f, given in calls), wanted)
    for part, flops in zip(("forward", "both"), products(forward, leaves), strict=True):
        found[f"products {part}"] = flops / run["matmul TFLOP/s"] / 1e9
        found[f"recurrence {part}"] = of_recurrence[part]
        found[f"floor {part}"] = found[f"products {part}"] + found[f"recurrence {part}"]
    if options.profile:
        found["kernels"] = kernels_of(forward, leaves)
        for kernel, (count, ms) in list(found["kernels"].items())[:40]:
            print(f"    {ms:8.3f} ms  {count:3d} x  {kernel[:110]}")
    yield "ours", found
    if options.compile:
        compiled = torch.compile(lambda x: layer(x, use_cache=False)[0], fullgraph=True)
        yield "ours, torch.compile", timed(lambda: (compiled(x),), leaves)
    if name in PEERS:
        yield from peer_row(name, x)


def peer_row(name, x):
    kind, sizes = PEERS[name]
    try:
        peer = getattr(importlib.import_module("fla.layers"), kind)(**sizes).cuda().bfloat16()
    except (ImportError, AttributeError):
        return
    yield "fla", timed(lambda: peer(x)[:1], [x, *peer.parameters()])


# The record


def table(rows):
    """A short table: ms and, where there is a floor, times it."""
    lines = [f"{'':34}{'':22}{'forward':>9}{'both':>9}{'MiB':>8}{'x floor':>9}{'both':>7}"]
    for r in rows:
        if "both" not in r:
            lines.append(f"{r['row']:34}{r['who']:22} {r['failed']}")
            continue
        over = [f"{r[p] / r[f'floor {p}']:.2f}" if f"floor {p}" in r else "" for p in ("forward", "both")]
        times = f"{r['forward']:9.3f}{r['both']:9.3f}{r['peak']:8.0f}"
        lines.append(f"{r['row']:34}{r['who']:22}{times}{over[0]:>9}{over[1]:>7}")
    return "\n".join(lines)


def records(name, options, run):
    """(row, who, measurements) of one name."""
    copy = run["copy GB/s"]
    if name == "convolution":
        return ((row, *r) for row in CONVOLUTIONS for r in convolution_row(row, copy))
    if name == "norm":
        return ((row, *r) for row in NORMS for r in norm_row(row, copy))
    if name == "mixing":
        return mixing_rows(copy)
    if name == "tiles":
        return tile_rows(copy)
    return ((name, *r) for r in layer_row(name, options, run))


def main():
    layers = [*(e.name for e in mixers.ZOO if e.module), "hydra", "vision_mamba", "vision_lstm"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["check", "convolution", "norm", "mixing", *layers])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tune_quickly()
    few_candidates(options.candidates)
    run = machine(options.commit)
    print(run, flush=True)
    data = {"runs": {"1": run}, "rows": []}
    for name in [*options.only, *(["tiles"] if options.tiles else [])]:
        try:
            with limit(options.seconds * (20 if name in ("tiles", "check") else 1)):
                if name == "check":
                    run["errors"] = check()
                    print("checked:", run["errors"], flush=True)
                    continue
                for row, who, found in records(name, options, run):
                    record = {"row": row, "who": who, "run": "1", "B": BATCH, "T": TOKENS, "d_model": WIDTH} | found
                    data["rows"].append(record)
                    shown = {k: round(x, 3) for k, x in found.items() if isinstance(x, float)}
                    print(row, who, shown, flush=True)
        except Exception as reason:
            traceback.print_exc()
            data["rows"].append(
                {"row": name, "who": "", "run": "1", "failed": f"{type(reason).__name__}: {reason}"[:160]}
            )
            torch.cuda.synchronize()  # a fault of the GPU ends the run here, with what was measured saved
        finally:
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(table(data["rows"]))


if __name__ == "__main__":
    main()
