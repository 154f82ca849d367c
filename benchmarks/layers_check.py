"""The fused parts of layers on a CUDA GPU against float64: forward and all gradients, odd lengths, packed."""

import torch

from dsf.kernels.convolution import Piece, short_convolution
from dsf.kernels.mixture import token_mixtures
from dsf.kernels.norm import gated, gated_rms_norm
from dsf.kernels.rotary import angles, rotary

DEVICE = "cuda"
UNIT = (Piece(2048, 128, 128**-0.5), Piece(2048, 128), Piece(2048))


def draw(*size, dtype=torch.bfloat16):
    """Normal numbers, a leaf."""
    return torch.randn(*size, device=DEVICE).to(dtype).requires_grad_()


def outcome(run, leaves, dtype):
    """Outputs and the gradients of a fixed functional of all of them."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in leaves]
    out = [x for x in run(*leaves) if x is not None]
    g = torch.Generator(DEVICE).manual_seed(1)
    slopes = [torch.randn(y.shape, generator=g, device=DEVICE).bfloat16().to(dtype) for y in out]
    return [*out, *torch.autograd.grad(out, [x for x in leaves if x is not None], slopes)]


def error(found, wanted, dtype):
    """The largest difference of any tensor, in parts of its largest number; with bfloat16, in roundings on average."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if not b.numel():
            continue
        off = (a.double() - b).abs()
        if dtype == torch.bfloat16:
            worst = max(worst, (off.mean() / (b.to(dtype).double() - b).abs().mean().clamp(min=1e-12)).item())
        else:
            worst = max(worst, (off.max() / b.abs().max().clamp(min=1e-12)).item())
    return worst


def conv_cases():
    """(name, batch, tokens, channels, taps, bias, state, bounds, pieces)."""
    small = (Piece(256, 128, 0.5), Piece(256, 128), Piece(96))
    for tokens in (1, 2, 3, 63, 64, 65, 1021):
        yield f"T {tokens}", 2, tokens, 96, 4, True, True, None, None
    for taps in (2, 3, 5, 8):
        yield f"K {taps}", 2, 257, 200, taps, True, True, None, None
    yield "pieces", 2, 515, 608, 4, False, True, None, small
    bounds = (0, 0, 1, 3, 3, 70, 71, 200, 511, 515, 515)
    yield "packed", 1, 515, 608, 4, True, True, bounds, small
    yield "packed, fresh", 1, 515, 96, 4, False, False, bounds, None
    for channels, pieces in ((6144, None), (6144, UNIT), (4352, (Piece(4096), Piece(128), Piece(128)))):
        yield f"whole tiles {channels}", 4, 2049, channels, 4, True, False, None, pieces


def check_convolution(dtype):
    for name, batch, tokens, channels, taps, bias, state, bounds, pieces in conv_cases():
        cuts = None if bounds is None else torch.tensor(bounds, device=DEVICE, dtype=torch.int32)
        rows = batch if bounds is None else len(bounds) - 1
        leaves = [
            draw(batch, tokens, channels + 16, dtype=dtype),
            draw(channels, taps, dtype=dtype),
            draw(channels, dtype=dtype) if bias else None,
            draw(rows, channels, taps - 1, dtype=dtype) if state else None,
        ]

        def run(x, weight, bias, state, backend="auto", cuts=cuts, pieces=pieces):
            ys, final = short_convolution(x[..., 16:], weight, bias, state, cuts, "silu", pieces, backend)
            return *ys, final

        def exact(*leaves, run=run):
            return run(*leaves, backend="torch")

        yield f"convolution {name}", error(outcome(run, leaves, dtype), outcome(exact, leaves, torch.float64), dtype)


def check_norm(dtype):
    cases = [((2, 513, 3, 128), True, False, True, 1), ((1, 1, 2, 64), True, False, True, 1)]
    cases += [((2, 257, 4096), True, True, True, g) for g in (1, 8)]
    cases += [((2, 33, 200), False, False, True, 1), ((3, 129, 4096), True, False, False, 1)]
    cases += [((4, 2048, 16, 128), True, False, True, 1), ((4, 2048, 4096), True, True, True, 1)]
    for shape, with_gate, first, norm, groups in cases:
        leaves = [draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype) if norm else None]
        leaves.append(draw(*shape, dtype=dtype) if with_gate else None)

        def run(x, weight, gate, backend="auto", first=first, norm=norm, groups=groups):
            if not norm:
                return (gated(x, gate, backend=backend),)
            return (gated_rms_norm(x, weight, gate, groups, first, backend=backend),)

        def exact(*leaves, run=run):
            return run(*leaves, backend="torch")

        yield f"norm {shape}", error(outcome(run, leaves, dtype), outcome(exact, leaves, torch.float64), dtype)


def check_rotary(dtype):
    for batch, tokens, heads, fewer, width in (
        (2, 513, 3, 3, 128),
        (1, 1, 8, 2, 64),
        (3, 77, 5, 1, 24),
        (4, 2048, 16, 16, 128),
    ):
        cos, sin = angles(torch.arange(tokens, device=DEVICE)[None], width, 10000.0)
        leaves = [draw(batch, tokens, (heads + fewer) * width + 8, dtype=dtype)]

        def run(u, backend="auto", cos=cos, sin=sin, cut=heads * width, width=width):
            q, k = u[..., :cut].unflatten(-1, (-1, width)), u[..., cut:-8].unflatten(-1, (-1, width))
            return rotary(q, k, cos, sin, 0.3, backend)

        def exact(u, run=run):
            return run(u, backend="torch")

        yield f"rotary {tokens}", error(outcome(run, leaves, dtype), outcome(exact, leaves, torch.float64), dtype)


def check_mixture(dtype):
    for batch, tokens, channels, count, added in (
        (2, 513, 200, 3, False), (1, 1, 64, 1, False), (4, 2048, 2048, 6, False), (2, 257, 200, 5, True),
    ):  # fmt: skip
        leaves = [draw(batch, tokens, channels, dtype=dtype), draw(batch, tokens + 1, channels, dtype=dtype)]
        leaves += [draw(channels, dtype=dtype) for _ in range(count)]
        leaves += [draw(count, batch, tokens, channels, dtype=dtype) if added else None]

        def run(x, longer, *rest, backend="auto"):
            return token_mixtures(x, longer[:, :-1], rest[:-1], rest[-1], backend)

        def exact(*leaves, run=run):
            return run(*leaves, backend="torch")

        yield f"mixtures {tokens}", error(outcome(run, leaves, dtype), outcome(exact, leaves, torch.float64), dtype)


def check():
    """All errors; raises AssertionError where one is too large. bfloat16: 1.5 roundings on average of any tensor."""
    worst = {}
    for dtype, allowed in ((torch.float32, 3e-5), (torch.bfloat16, 1.5)):
        found = dict([*check_convolution(dtype), *check_norm(dtype), *check_rotary(dtype), *check_mixture(dtype)])
        wrong = {name: e for name, e in found.items() if not e <= allowed}
        assert not wrong, f"{dtype}: {wrong}"
        worst[str(dtype)] = max(found.values())
    leaves = draw(4, 2048, 6144), draw(6144, 4)
    first, second = (outcome(_repeated, leaves, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "not bit for bit the same twice"
    return worst


def _repeated(x, weight):
    return short_convolution(x, weight, pieces=UNIT)[0]
