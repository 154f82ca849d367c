"""Spectra of real rows, and products of them, by complex FFTs of half a row's length.

A row x of 2F numbers is, as it lies in memory, a row of F complex ones x[2j] + i x[2j + 1]. Z, the FFT of these, is
E + iO with the FFTs E and O of the even and of the odd numbers: E = (Z + Z̃) / 2, O = (Z - Z̃) / 2i, where Z̃[f] is the
conjugate of Z[-f]. A circular convolution y of x and m is, in even and odd numbers,

    E_y = E_x E_m + w O_x O_m,  O_y = E_x O_m + O_x E_m,  so  Z_y = Z_x Z_m + (1 + w) O_x O_m,

with w[f] = e^{-2πi f / F}, a delay by one. A correlation of g with m, its adjoint, is Z_g Z_m* + i (1 + w*) E_g O_m*.
Real FFTs of 2F numbers take no less time, and torch copies all spectra before it makes rows of them again.

Z is [rows, F, 2], real and imaginary parts side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.schedule import book_of

BLOCK = 256  # frequencies of a program, each together with its negative
PI = tl.constexpr(3.141592653589793)


def _forth(x: Tensor, norm: str) -> Tensor:
    """The spectra [R, F, 2] of rows [R, 2F]."""
    return torch.view_as_real(torch.fft.fft(torch.view_as_complex(x.unflatten(-1, (-1, 2))), norm=norm))


def _back(x: Tensor, norm: str) -> Tensor:
    """The rows [R, 2F] of spectra [R, F, 2]."""
    return torch.view_as_real(torch.fft.ifft(torch.view_as_complex(x), norm=norm)).flatten(-2)


def spectra_of(x: Tensor, divided: bool = False) -> Tensor:
    """The spectra [R, F, 2] of rows [R, 2F], if asked divided by F; one operation of a schedule."""
    return book_of((x,)).apply(_forth, x, "forward" if divided else "backward")


def rows_of(x: Tensor, divided: bool = False) -> Tensor:
    """The rows of spectra as sums that nothing divides, if asked divided by F; one operation of a schedule."""
    return book_of((x,)).apply(_back, x, "backward" if divided else "forward")


@triton.jit
def _places(x, row, f, F):
    """The addresses of both parts of a row's frequencies [BF, 2], so that one instruction loads or stores both."""
    return x + row * (2 * F) + 2 * f[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
def _load(x, row, f, F):
    """Z at the frequencies f = (those of a program, their negatives), each as (real, imaginary)."""
    here = tl.load(_places(x, row, f[0], F), mask=(f[0] < F)[:, None], other=0.0)
    there = tl.load(_places(x, row, f[1], F), mask=(f[1] < F)[:, None], other=0.0)
    return tl.split(here), tl.split(there)


@triton.jit
def _add(out, a, b, CONJUGATE: tl.constexpr):
    """out + a b, or out + a b*, of complex numbers."""
    imaginary = -b[1] if CONJUGATE else b[1]
    return out[0] + (a[0] * b[0] - a[1] * imaginary), out[1] + (a[0] * imaginary + a[1] * b[0])


@triton.jit
def _even(z):
    """E at f."""
    return 0.5 * (z[0][0] + z[1][0]), 0.5 * (z[0][1] - z[1][1])


@triton.jit
def _odd(z):
    """O at f."""
    return 0.5 * (z[0][1] + z[1][1]), 0.5 * (z[1][0] - z[0][0])


@triton.jit
def _none(BF: tl.constexpr):
    """Sums to begin with: of products at f, at -f and of what the delay multiplies."""
    none = tl.zeros([BF], tl.float32)
    return (none, none), (none, none), (none, none)


@triton.jit
def _multiply(sums, x, m, CONJUGATE: tl.constexpr):
    """sums and the products of x and m: of a convolution, or CONJUGATE of a correlation."""
    part = _even(x) if CONJUGATE else _odd(x)
    late = _add(sums[2], part, _odd(m), CONJUGATE)
    return _add(sums[0], x[0], m[0], CONJUGATE), _add(sums[1], x[1], m[1], CONJUGATE), late


@triton.jit
def _store(x, row, f, F, sums, CONJUGATE: tl.constexpr):
    """Z at f and at -f: the products, and (1 + w) or i (1 + w*) times the rest, whose values at -f are conjugate."""
    angle = PI * (f[0].to(tl.float32) / F)  # 1 + e^{-2ia} = 2 cos a e^{-ia}, without a difference of near numbers
    cosine, sine = tl.cos(angle), tl.sin(angle)
    none, twice = tl.zeros_like(angle), 2.0 * cosine
    a, b = _add((none, none), sums[2], (twice * cosine, twice * sine), not CONJUGATE)
    if CONJUGATE:
        here, there = (sums[0][0] - b, sums[0][1] + a), (sums[1][0] + b, sums[1][1] + a)
    else:
        here, there = (sums[0][0] + a, sums[0][1] + b), (sums[1][0] + a, sums[1][1] - b)
    low = 2 * f[0] <= F
    tl.store(_places(x, row, f[0], F), tl.join(here[0], here[1]), mask=low[:, None])
    two = low & (f[0] != f[1])  # 0 and F / 2 are their own negatives
    tl.store(_places(x, row, f[1], F), tl.join(there[0], there[1]), mask=two[:, None])


@triton.jit
def _frequencies(F, BF: tl.constexpr):
    """This program's f of 0 to F / 2, and their negatives F - f."""
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    return f, tl.where((f > 0) & (2 * f <= F), F - f, f)


@triton.jit(do_not_specialize=["heads", "F"])
def mixed(
    x, m, out, heads, F, across, down,
    I: tl.constexpr, J: tl.constexpr, CONJUGATE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """out [B, H, I] = Σ_j x [B, H, J] convolved, or CONJUGATE correlated, with m [H, rows i · down + j · across].

    Grid (B · H · I, blocks).
    """
    row = tl.program_id(0).to(tl.int64)
    i, both = row % I, row // I
    f = _frequencies(F, BF)
    first = both % heads * (I * J) + i * down
    sums = _none(BF)
    for j in range(J):
        sums = _multiply(sums, _load(x, both * J + j, f, F), _load(m, first + j * across, f, F), CONJUGATE)
    _store(out, row, f, F, sums, CONJUGATE)


@triton.jit(do_not_specialize=["batch", "heads", "F"])
def paired(
    g, x, m, dm, dx, batch, heads, F, E: tl.constexpr, P: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    """dm [H, E, P] = Σ_b g [B, H, P] correlated with x [B, H, E]; where E = P = 1 also dx = g correlated with m.

    dx: [B, H], or None. Grid (H · E · P, blocks).
    """
    row = tl.program_id(0).to(tl.int64)
    p, e, head = row % P, row // P % E, row // P // E
    f = _frequencies(F, BF)
    sums = _none(BF)
    if dx is not None:
        known = _load(m, row, f, F)
    for i in range(batch):
        both = i * heads + head
        up = _load(g, both * P + p, f, F)
        sums = _multiply(sums, up, _load(x, both * E + e, f, F), True)
        if dx is not None:
            _store(dx, both, f, F, _multiply(_none(BF), up, known, True), True)
    _store(dm, row, f, F, sums, True)


def product(x: Tensor, m: Tensor, sizes: tuple[int, int, int], back: bool = False) -> Tensor:
    """Of inputs' spectra x [B·H·E, F, 2] and responses' m [H·E·P, F, 2]: [B·H·P, F, 2]. sizes: (H, E, P).

    back: of outputs' gradients [B·H·P, F, 2] the inputs' [B·H·E, F, 2].
    """
    heads, entries, p = sizes
    made, summed = (entries, p) if back else (p, entries)
    rows, f = x.shape[0] // summed * made, x.shape[1]
    out = x.new_empty(rows, f, 2)
    down, across = (p, 1) if back else (1, p)
    launch(
        mixed, (rows, -(-(f // 2 + 1) // BLOCK)), x, m, out, heads, f, across, down, I=made, J=summed, CONJUGATE=back,
        BF=BLOCK, num_warps=4,
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
        paired, (m.shape[0], -(-(f // 2 + 1) // BLOCK)), g, x, m, dm, dx, x.shape[0] // (heads * entries), heads, f,
        E=entries, P=p, BF=BLOCK, num_warps=4,
    )  # fmt: skip
    return dm, product(g, m, sizes, back=True) if wanted and not single else dx
