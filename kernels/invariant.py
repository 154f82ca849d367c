"""Time-invariant recurrences as convolutions: S_t = A S_{t-1} + Σ_g b_g x_{g,t}, y_t = cᵀ S_t with A, b and c fixed.

The output is the input convolved with the impulse response h_l = cᵀ A^l b, by FFT (S4, arXiv 2111.00396, Section 2.3).
h itself is one product of two small tables, with l = i m + j: h_l = ((Aᵀ)^{i m} c)ᵀ (A^j b), each of about √T powers;
initial and final states use the same tables. The total is O(T log T) plus matrix products of T N.

An FFT mixes the rounding errors of all tokens: an output's error is relative to the largest numbers of its sequence,
later ones included. In the other forms it is relative to earlier tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from einops import rearrange
from torch import Tensor

from dsf.kernels.convolution import TRITON
from dsf.kernels.powers import Dense
from dsf.kernels.turns import turn_pairs

LOWEST = -1e4  # lower bound of logarithms: e^LOWEST is 0 in every dtype, and 0 · LOWEST is not NaN


class Step(Protocol):
    """A, the transition of one token."""

    def power(self, x: Tensor, count: int, adjoint: bool = False) -> Tensor:
        """A^count x, or (Aᵀ)^count x. x: [..., H, N, p]."""

    def table(self, x: Tensor, count: int, stride: int, adjoint: bool) -> Tensor:
        """x, A^stride x, A^{2 stride} x, … for x [H, N, p]: [count, H, N, P or p]."""


@dataclass(frozen=True)
class Diagonal:
    """A that turns pairs of entries and then scales entries.

    decay: [H, n, p], its logarithm when `log` is true, n in {1, N}, p in {1, P}; equal within pairs where there is an
    angle. angle: [H, 1 or N / 2, 1], float64, or None.
    """

    decay: Tensor
    log: bool
    angle: Tensor | None = None

    @property
    def factor(self) -> Tensor:
        """The decay itself."""
        return self.decay.exp() if self.log else self.decay

    def power(self, x: Tensor, count: int, adjoint: bool = False) -> Tensor:
        """As Step has it."""
        decay = (count * self.decay.clamp(min=LOWEST)).exp() if self.log else self.decay**count
        if self.angle is not None:
            angle = torch.remainder(count * self.angle, 2 * math.pi).to(x.dtype)
            x = turn_pairs(x, -angle if adjoint else angle)
        return decay.to(x.dtype) * x

    def table(self, x: Tensor, count: int, stride: int, adjoint: bool) -> Tensor:
        """x, A^stride x, A^{2 stride} x, … for x [H, N, p]: [count, H, N, P or p], at once."""
        power = stride * torch.arange(count, device=x.device, dtype=torch.float64)[:, None, None, None]
        decay = self.decay.double()
        decay = (power * decay.clamp(min=LOWEST)).exp() if self.log else decay**power
        if self.angle is not None:
            angle = torch.remainder(power * self.angle, 2 * math.pi).to(x.dtype)
            x = turn_pairs(x, -angle if adjoint else angle)
        return decay.to(x.dtype) * x


@dataclass(frozen=True)
class Invariant:
    """A time-invariant recurrence as tensors, float32 or float64.

    step: A. read: c [H, N, p]. writes: b_g, each [H, N, p], p in {1, P}. before: whether S_{t-1} is read. torch_alone:
    whether impulse responses are torch's also where a kernel computes them.
    """

    step: Step
    read: Tensor
    writes: tuple[Tensor, ...]
    before: bool = False
    torch_alone: bool = False
    tables: dict[tuple[int, int, int, bool], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def powers(self, x: Tensor, count: int, stride: int = 1, adjoint: bool = False) -> Tensor:
        """`columns` of `read` or one of `writes`, which outputs, initial and final states share."""
        key = id(x), count, stride, adjoint
        if key not in self.tables:
            self.tables[key] = x, self.columns(x, count, stride, adjoint)  # beside x, which its id is of
        return self.tables[key][1]

    def columns(self, x: Tensor, count: int, stride: int = 1, adjoint: bool = False) -> Tensor:
        """x, A^stride x, A^{2 stride} x, …: [count, ..., H, N, p], by doubling where A is no diagonal."""
        if isinstance(self.step, Dense) or x.dim() == 3:
            return self.step.table(x, count, stride, adjoint)
        found = x.unsqueeze(0)
        while found.shape[0] < count:
            more = found if 2 * found.shape[0] <= count else found[: count - found.shape[0]]
            more = self.step.power(more, stride * found.shape[0], adjoint)
            found = torch.cat([found.expand(-1, *more.shape[1:]), more])
        return found

    def impulses(self, length: int, dtype: torch.dtype) -> list[Tensor]:
        """h_0 … h_{length-1} of every write, [H, p, length]; read before the update, h_0 is 0."""
        found = []
        for write in self.writes:
            launched = not self.torch_alone and _has_kernel(write, length, dtype)
            if launched and isinstance(self.step, Diagonal) and self.step.log:
                products = by_kernel(self.step, self.read, write, length)
            else:
                products = self.products(write, length, dtype)
            h = torch.nn.functional.pad(products, (1, 0)) if self.before else products
            found.append(h[..., :length])
        return found

    def products(self, write: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """cᵀ A^l b, [H, p, length or more]."""
        fine = fine_of(length)
        rows = self.powers(self.read, -(-length // fine), fine, adjoint=True).to(dtype)
        return _products(rows, self.powers(write, fine).to(dtype)).flatten(-2)


def fine_of(length: int) -> int:
    """Number of powers in the finer table: about the square root of length."""
    return 1 << math.ceil(math.log2(max(length, 1)) / 2)


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """Σ_n rows[i] columns[j]: [I, H, N, p] and [J, H, N, p] -> [H, p, I, J]."""
    p = max(rows.shape[-1], columns.shape[-1])
    rows, columns = (rearrange(x, "i h n p -> h p i n").expand(-1, p, -1, -1) for x in (rows, columns))
    rows, columns = (rearrange(x, "h p i n -> (h p) i n").contiguous() for x in (rows, columns))
    return rearrange(torch.bmm(rows, columns.mT), "(h p) i j -> h p i j", p=p)


def _has_kernel(x: Tensor, length: int, dtype: torch.dtype) -> bool:
    """Whether an impulse response is one launch: in float32 on a GPU, outside of torch.func."""
    plain = not torch._C._are_functorch_transforms_active()
    return x.is_cuda and TRITON and plain and length > 0 and dtype == torch.float32 and x.dtype == torch.float64


def by_kernel(step: Diagonal, read: Tensor, write: Tensor, length: int) -> Tensor:
    """cᵀ A^l b, [H, p, length]."""
    (heads, n, _), p = read.shape, max(x.shape[-1] for x in (read, write, step.decay))
    log, angle = step.decay, step.angle
    if angle is not None:  # one of each pair
        log = log[:, ::2] if log.shape[1] == n else log
        angle = angle.expand(heads, n // 2, p)
    log = log.expand(heads, n if angle is None else n // 2, p)
    return _Impulse.apply(read.expand(heads, n, p), write.expand(heads, n, p), log, angle, length)


class _Impulse(torch.autograd.Function):
    """The impulse response by kernels (dsf.kernels.triton.impulse); its second derivative by torch."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, b: Tensor, log: Tensor, angle: Tensor | None, length: int) -> Tensor:
        from dsf.kernels.triton.impulse import impulse_response

        ctx.save_for_backward(c, b, log, angle)
        ctx.length = length
        return impulse_response(c, b, log, angle, length, fine_of(length))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        from dsf.kernels.triton.impulse import impulse_response_backward

        (dh,), (c, b, log, angle), length = given, ctx.saved_tensors, ctx.length
        if not torch.is_grad_enabled():
            dc, db, dlog, *dangle = impulse_response_backward(dh, c, b, log, angle, length, fine_of(length))
            return dc, db, dlog, *(dangle or [None]), None
        leaves = [x for x in (c, b, log, angle) if x is not None]
        wide = log if angle is None else log.repeat_interleave(2, dim=1)
        again = Invariant(Diagonal(wide, True, angle), c, (b,)).products(b, length, dh.dtype)[..., :length]
        found = torch.autograd.grad(again, leaves, dh, create_graph=True)
        return *found, *([None] if angle is None else []), None


def fast_length(least: int) -> int:
    """The smallest 2^a 3^b 5^c of at least `least`, for which FFTs are fast."""
    found = 1 << max(least - 1, 0).bit_length()
    for five in (1, 5, 25):
        for three in (1, 3, 9, 27):
            odd = five * three
            found = min(found, odd << max(-(-least // odd) - 1, 0).bit_length())
    return found


def causal(x: Tensor, h: Tensor) -> Tensor:
    """Σ_{s ≤ t} h[t - s] x[s] along the last axis, T long, by FFT. The other axes broadcast."""
    if torch._C._are_functorch_transforms_active():
        return _causal(x, h)
    return _Causal.apply(x, h)


def _causal(x: Tensor, h: Tensor) -> Tensor:
    tokens = x.shape[-1]
    points = fast_length(2 * tokens - 1)
    return _back(torch.fft.rfft(x, points) * _divided(h, points), points)[..., :tokens]


def _divided(h: Tensor, points: int) -> Tensor:
    """The spectrum of an impulse response, divided by points: `_back` need not pass over all rows again to do it."""
    return torch.fft.rfft(h, points, norm="forward")


def _back(x: Tensor, points: int) -> Tensor:
    return torch.fft.irfft(x, points, norm="forward")


class _Causal(torch.autograd.Function):
    """`causal` with a gradient by real FFTs, which reuses the spectra; torch's own gradient takes complex FFTs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor) -> Tensor:
        tokens = x.shape[-1]
        points = fast_length(2 * tokens - 1)
        spectra = torch.fft.rfft(x, points), _divided(h, points)
        ctx.save_for_backward(x, h, *spectra)
        return _back(spectra[0] * spectra[1], points)[..., :tokens]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, h, *spectra = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives: the same convolution in reverse time
            late = given[0].flip(-1)
            return causal(late, h).flip(-1).sum_to_size(x.shape), causal(late, x).flip(-1).sum_to_size(h.shape)
        tokens = x.shape[-1]
        points = fast_length(2 * tokens - 1)
        spectrum = torch.fft.rfft(given[0], points)

        def part(other: Tensor, shape: torch.Size, norm: str) -> Tensor:
            product = (spectrum * other.conj()).sum_to_size(*shape[:-1], spectrum.shape[-1])
            return torch.fft.irfft(product, points, norm=norm)[..., :tokens]

        dx = part(spectra[1], x.shape, "forward") if ctx.needs_input_grad[0] else None
        return dx, part(spectra[0], h.shape, "backward") if ctx.needs_input_grad[1] else None


def in_time(x: Tensor, h: Tensor) -> Tensor:
    """x [B, T, H, p] convolved along T with h [H, p, T], p in {1, P}, by torch: [B, T, H, P or 1]."""
    return rearrange(causal(rearrange(x, "b t h p -> b h p t"), h), "b h p t -> b t h p")


def convolution(
    system: Invariant,
    drives: Sequence[Tensor],
    state: Tensor | None,
    lengths: Tensor | None = None,
    convolve: Callable[[Tensor, Tensor], Tensor] = in_time,
) -> Tensor:
    """y [B, T, H, P or 1].

    drives: x_g [B, T, H, p] for every write, p in {1, P}. state: [B, H, N, P] or None. lengths: [B] tokens of each row,
    the rest being padding, or None for T. convolve: as `in_time`.
    """
    tokens, dtype = drives[0].shape[1], drives[0].dtype
    each = system.impulses(tokens, dtype)
    if lengths is not None:
        inside = (torch.arange(tokens, device=lengths.device) < lengths[:, None])[:, :, None, None]
        drives = [torch.where(inside, x, 0.0) for x in drives]
    parts = [convolve(x, h) for h, x in zip(each, drives, strict=True)]
    y = sum(parts[1:], parts[0])
    return y if state is None else y + _from_state(system, state, tokens)


def _from_state(system: Invariant, state: Tensor, tokens: int) -> Tensor:
    """The part of y from an initial state, cᵀ A^{t+1} S_0: [B, T, H, P]."""
    fine = fine_of(tokens)
    rows = system.powers(system.read, -(-tokens // fine), fine, adjoint=True).to(state.dtype)
    first = state if system.before else system.step.power(state, 1)
    columns = system.columns(first, fine)  # [J, B, H, N, P]
    found = rearrange(rows, "i h n p -> h p i n") @ rearrange(columns, "j b h n p -> b h p n j")
    return rearrange(found, "b h p i j -> b (i j) h p")[:, :tokens]


def final_state(
    system: Invariant, drives: Sequence[Tensor], state: Tensor | None, lengths: Tensor | None = None
) -> Tensor:
    """The state after the last token, A^T S_0 + Σ_t A^{T-1-t} b x_t with each row's own T: [B, H, N, P or 1].

    drives, state, lengths: as `convolution` has them.
    """
    tokens = drives[0].shape[1]
    fine = fine_of(tokens)
    pad = -tokens % fine
    total: Tensor | None = None
    for write, x in zip(system.writes, drives, strict=True):
        columns = system.powers(write, fine).to(x.dtype)  # A^j b
        late = _at_the_end(x, lengths).flip(1)
        late = torch.nn.functional.pad(late, (0, 0, 0, 0, 0, pad))
        p = max(columns.shape[-1], late.shape[-1])
        late = rearrange(late, "b (i j) h p -> h p b i j", j=fine).expand(-1, p, -1, -1, -1)
        table = rearrange(columns, "j h n p -> h p 1 j n").expand(-1, p, -1, -1, -1)
        part = rearrange(late @ table, "h p b i n -> i b h n p")
        total = part if total is None else total + part
    assert total is not None
    stride = fine
    while total.shape[0] > 1:  # pairs of blocks, then pairs of pairs
        if total.shape[0] % 2:
            total = torch.cat([total, torch.zeros_like(total[:1])])
        total = total[::2] + system.step.power(total[1::2], stride)
        stride *= 2
    found = total[0]
    if state is None:
        return found
    return found + (system.step.power(state, tokens) if lengths is None else _advanced(system, state, lengths, tokens))


def _at_the_end(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Rows shifted so that each ends with its last token, with zeros before the first."""
    if lengths is None:
        return x
    tokens = x.shape[1]
    place = torch.arange(tokens, device=x.device) - (tokens - lengths)[:, None]
    index = place.clamp(min=0)[:, :, None, None].expand(-1, -1, *x.shape[2:])
    return torch.where((place >= 0)[:, :, None, None], x.gather(1, index), 0.0)


def _advanced(system: Invariant, state: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """A^{lengths} S_0, row by row."""
    for place in range(tokens.bit_length()):
        odd = (lengths >> place & 1).bool()[:, None, None, None]
        state = torch.where(odd, system.step.power(state, 1 << place), state)
    return state
