"""Products of spectra. A spectrum is [..., F, 2], real and imaginary parts side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.schedule import book_of

BLOCK = 512  # frequencies of a program


def _forth(x: Tensor, norm: str) -> Tensor:
    """The spectra of rows [R, points]: [R, points // 2 + 1, 2]."""
    return torch.view_as_real(torch.fft.rfft(x, norm=norm))


def _back(x: Tensor, points: int, norm: str) -> Tensor:
    """The rows of spectra [R, F, 2]."""
    return torch.fft.irfft(torch.view_as_complex(x), points, norm=norm)


def spectra_of(x: Tensor, divided: bool = False) -> Tensor:
    """The spectra [R, F, 2] of rows [R, points], if asked divided by points; one operation of a schedule."""
    found: Tensor = book_of((x,)).apply(_forth, x, "forward" if divided else "backward")
    return found


def rows_of(x: Tensor, points: int, divided: bool = False) -> Tensor:
    """The rows of spectra as sums that nothing divides, if asked divided by points; one operation of a schedule."""
    found: Tensor = book_of((x,)).apply(_back, x, points, "backward" if divided else "forward")
    return found


@triton.jit
def _places(x, row, f, F):
    """The addresses of both parts of a row's frequencies [BF, 2], so that one instruction loads or stores both."""
    return x + row * (2 * F) + 2 * f[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
def _load(x, row, f, F):
    """The real and the imaginary part of a row."""
    return tl.split(tl.load(_places(x, row, f, F), mask=(f < F)[:, None], other=0.0))


@triton.jit
def _store(x, row, f, F, real, imaginary):
    """Store both parts of a row."""
    tl.store(_places(x, row, f, F), tl.join(real, imaginary), mask=(f < F)[:, None])


@triton.jit(do_not_specialize=["heads", "F"])
def mixed(
    x, m, out, heads, F, across, down,
    I: tl.constexpr, J: tl.constexpr, CONJUGATE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """out [B, H, I, F] = Σ_j x [B, H, J, F] times m [H, rows i · down + j · across, F], or its conjugate. Grid (B · H · I, blocks)."""  # noqa: E501
    row = tl.program_id(0).to(tl.int64)
    i, both = row % I, row // I
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    first = both % heads * (I * J) + i * down
    real, imaginary = tl.zeros([BF], tl.float32), tl.zeros([BF], tl.float32)
    for j in range(J):
        a, b = _load(x, both * J + j, f, F)
        c, d = _load(m, first + j * across, f, F)
        if CONJUGATE:
            d = -d
        real += a * c - b * d
        imaginary += a * d + b * c
    _store(out, row, f, F, real, imaginary)


@triton.jit(do_not_specialize=["batch", "heads", "F"])
def paired(
    g, x, m, dm, dx, batch, heads, F, E: tl.constexpr, P: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    """dm [H, E, P, F] = Σ_b g [B, H, P, F] times x [B, H, E, F]'s conjugate; where E = P = 1 also dx = g m's conjugate.

    dx: [B, H, F], or None. Grid (H · E · P, blocks).
    """
    row = tl.program_id(0).to(tl.int64)
    p, e, head = row % P, row // P % E, row // P // E
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    real, imaginary = tl.zeros([BF], tl.float32), tl.zeros([BF], tl.float32)
    if dx is not None:
        mc, md = _load(m, row, f, F)
    for i in range(batch):
        both = i * heads + head
        a, b = _load(g, both * P + p, f, F)
        c, d = _load(x, both * E + e, f, F)
        real += a * c + b * d
        imaginary += b * c - a * d
        if dx is not None:
            _store(dx, both, f, F, a * mc + b * md, b * mc - a * md)
    _store(dm, row, f, F, real, imaginary)


def product(x: Tensor, m: Tensor, sizes: tuple[int, int, int], back: bool = False) -> Tensor:
    """Of inputs' spectra x [B·H·E, F, 2] and responses' m [H·E·P, F, 2]: [B·H·P, F, 2]. sizes: (H, E, P).

    back: of outputs' gradients [B·H·P, F, 2] with m's conjugate: [B·H·E, F, 2].
    """
    heads, entries, p = sizes
    made, summed = (entries, p) if back else (p, entries)
    rows, f = x.shape[0] // summed * made, x.shape[1]
    out = x.new_empty(rows, f, 2)
    down, across = (p, 1) if back else (1, p)
    launch(
        mixed, (rows, -(-f // BLOCK)), x, m, out, heads, f, across, down, I=made, J=summed, CONJUGATE=back, BF=BLOCK,
        num_warps=4,
    )  # fmt: skip
    return out


def pull_product(
    g: Tensor, x: Tensor, m: Tensor, sizes: tuple[int, int, int], wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of m and, if wanted, of x in `product` from that of its result."""
    heads, entries, p = sizes
    dm, single = torch.empty_like(m), entries == p == 1
    dx = torch.empty_like(x) if wanted and single else None
    f = m.shape[1]
    launch(
        paired, (m.shape[0], -(-f // BLOCK)), g, x, m, dm, dx, x.shape[0] // (heads * entries), heads, f, E=entries,
        P=p, BF=BLOCK, num_warps=4,
    )  # fmt: skip
    return dm, product(g, m, sizes, back=True) if wanted and not single else dx
