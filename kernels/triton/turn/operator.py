"""The turned vectors of a call as an operator, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.launch import constant, launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.packed import Sequences, slots
from dsf.kernels.triton.sizes import power
from dsf.kernels.triton.turn.kernel import Angles, Places, Turn, carry_angles, sum_angles, turn_rows, turn_rows_back

WIDEST = 32  # pairs of a program
NARROW = 16  # pairs of a program of gradients, which hold twice as many numbers of a pair
REGISTERS = 96  # of a thread for gradients, so that five programs fit on a processor


@dataclass(frozen=True)
class How:
    """What a call does.

    chunk: tokens of a chunk; heads: of the turned vectors; delayed, biased: bits of the vectors that are stored at the
    next token, and to which a vector of each head is added; dot: the vector whose dot product with the first one is
    wanted, 0 for none; started: sequences begin with a state; rows: so many consecutive vectors, none of them delayed,
    are stored side by side, as rows of a token; dtype: of the turned vectors.
    """

    chunk: int
    heads: int
    delayed: int
    biased: int
    dot: int
    started: bool
    rows: int
    dtype: torch.dtype

    @property
    def options(self) -> tuple[Any, ...]:
        """The fields, as an operator takes them."""
        return self.chunk, self.heads, self.delayed, self.biased, self.dot, self.started, self.rows, self.dtype


def by_vector(xs: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The tensors [B, T, H, ·] of every vector, of which `rows` are in one tensor [B, T, rows, H, ·]."""
    return list(xs) if rows == 1 else [row for x in xs for row in x.unbind(2)]


class _Call:
    """What the launches of one call share. angles: (scale, pair), one of them None."""

    def __init__(
        self, angles: tuple[Tensor | None, Tensor | None], xs: Sequence[Tensor], bounds: Tensor | None, how: How,
        widest: int = WIDEST,
    ) -> None:  # fmt: skip
        scale, pair = angles
        like = scale if scale is not None else pair
        assert like is not None
        self.like, self.how, self.count = like, how, len(xs)
        self.batch, self.tokens = like.shape[:2]
        self.heads, self.width = how.heads, xs[0].shape[-1]
        self.lanes, self.pairs = self.batch * how.heads, xs[0].shape[-1] // 2
        self.slots, self.sequences = -(-self.tokens // how.chunk), 1
        self.table = self.of_sequences = None
        if bounds is not None:
            packed = Sequences(bounds.contiguous())
            self.sequences = packed.count
            self.slots = slots(self.tokens, packed.count, how.chunk)
            self.table, _, self.of_sequences = packed.tables(self.tokens, how.chunk)
        self.ends = self.batch * self.sequences
        self.angles = Angles(*self._factor(scale), *self._factor(pair))
        self.places = Places(self.tokens, self.slots, constant(how.heads), self.lanes, self.table)
        self.block = min(widest, power(self.pairs))
        self.slices = -(-self.pairs // self.block)
        self.config = Turn(
            PAIRS=self.pairs, W=self.block, SLICES=self.slices, K=how.chunk, FINE=how.dtype == torch.float32,
            COUNT=len(xs), DELAYED=how.delayed, BIASED=how.biased, DOT=how.dot, STARTED=how.started, ROWS=how.rows,
        )  # fmt: skip
        self.warps = max(1, min(4, how.chunk * self.block // 256))

    def _factor(self, x: Tensor | None) -> tuple[Any, ...]:
        """A factor's address, strides of batch, token and head, and how many heads share one of it."""
        if x is None:
            return None, 0, 0, 0, 1
        x = x if x.dim() == 3 or x.stride(-1) == 1 else x.contiguous()
        return (x, *x.stride()[:3], self.heads // x.shape[2])

    def flat(self, xs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Tensors [B, T, H', ·] as one tuple of addresses and strides."""
        found: list[Any] = []
        for x in xs:
            x = x if x.stride(-1) == 1 else x.contiguous()
            found += [x, *x.stride()[:3], self.heads // x.shape[2]]
        return tuple(found)

    def spread(self, some: Sequence[Tensor], bits: int) -> tuple[Any, ...] | None:
        """The tensors of the vectors in `bits`, in a tuple of all vectors; the others' are not read."""
        if not some:
            return None
        given = iter([x.contiguous() for x in some])
        return tuple(next(given) if bits >> i & 1 else some[0] for i in range(self.count))

    def room(self, bits: int, *shape: int) -> list[Tensor]:
        """Memory for a gradient of each vector in `bits`."""
        return [self.like.new_empty(*shape) for i in range(self.count) if bits >> i & 1]

    @property
    def grid(self) -> tuple[int]:
        """A program for every chunk, lane and slice of the pairs."""
        return (self.slots * self.lanes * self.slices,)


def _forward(
    scale: Tensor | None, pair: Tensor | None, xs: Sequence[Tensor], biases: Sequence[Tensor],
    firsts: Sequence[Tensor], bounds: Tensor | None, *options: Any,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:  # fmt: skip
    how = How(*options)
    call = _Call((scale, pair), xs, bounds, how)
    like = call.like
    sums = like.new_empty(call.lanes, call.slots, call.pairs, dtype=torch.float64)
    carry = like.new_empty(call.lanes, call.slots, call.pairs)
    final = like.new_empty(call.ends, call.heads, call.pairs)
    rows = (how.rows,) if how.rows > 1 else ()
    shape = (call.batch, call.tokens, *rows, call.heads, call.width)
    outs = [like.new_empty(*shape, dtype=how.dtype) for _ in range(len(xs) // how.rows)]
    dots = like.new_empty(call.slices, call.batch, call.heads, call.tokens if how.dot else 0)
    launch(sum_angles, call.grid, call.angles, sums, call.places, C=call.config, num_warps=call.warps)
    launch(
        carry_angles, (call.lanes, call.sequences, call.slices), sums, carry, final, call.of_sequences, call.slots,
        C=call.config, num_warps=4,
    )  # fmt: skip
    launch(
        turn_rows, call.grid, call.angles, carry, call.flat(xs), call.spread(biases, how.biased),
        call.spread(firsts, how.delayed), tuple(by_vector(outs, how.rows)), dots, call.places,
        C=call.config, num_warps=call.warps,
    )  # fmt: skip
    return outs, final, dots.sum(0).movedim(1, 2), carry


def _backward(
    scale: Tensor | None, pair: Tensor | None, carry: Tensor, xs: Sequence[Tensor], biases: Sequence[Tensor],
    outs: Sequence[Tensor], given: Sequence[Tensor], border: Tensor, d_final: Tensor | None, d_dots: Tensor | None,
    bounds: Tensor | None, *options: Any,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Gradients of the vectors [B, T, H, ·], of the biases [chunks, B, H, ·], to be summed, of `firsts`, and of the
    factors of angles that there are, of all H heads."""
    how = How(*options)
    call = _Call((scale, pair), xs, bounds, how, NARROW)
    like = call.like
    dxs = [like.new_empty(call.batch, call.tokens, call.heads, call.width, dtype=x.dtype) for x in xs]
    d_biases = call.room(how.biased, call.slots, call.batch, call.heads, call.width)
    d_firsts = call.room(how.delayed if how.started else 0, call.ends, call.heads, call.width)
    for x in d_firsts:
        x.zero_()  # of sequences without tokens
    d_scale = None if scale is None else like.new_empty(call.slices, call.batch, call.heads, call.tokens)
    d_pair = None if pair is None else like.new_empty(call.batch, call.tokens, call.heads, call.pairs)
    launch(
        turn_rows_back, call.grid, call.angles, carry, call.flat(xs), call.spread(biases, how.biased),
        call.flat(by_vector(outs, how.rows)), call.flat(by_vector(given, how.rows)), border.contiguous(),
        None if d_final is None else d_final.contiguous(),
        None if d_dots is None else d_dots.movedim(1, 2).contiguous(), tuple(dxs),
        call.spread(d_biases, how.biased), call.spread(d_firsts, how.delayed), d_scale, d_pair,
        call.places, C=call.config, num_warps=call.warps,
        maxnreg=None if how.dtype == torch.float32 else REGISTERS,
    )  # fmt: skip
    d_angles = [] if d_scale is None else [d_scale.sum(0).movedim(1, 2)]
    return dxs, d_biases, d_firsts, d_angles + ([] if d_pair is None else [d_pair])


OPTIONS = "int chunk, int heads, int delayed, int biased, int dot, bool started, int rows, ScalarType dtype"
turn_gauge = operator(
    "turn_gauge(Tensor? scale, Tensor? pair, Tensor[] xs, Tensor[] biases, Tensor[] firsts, Tensor? bounds, "
    f"{OPTIONS}) -> (Tensor[], Tensor, Tensor, Tensor)",
    _forward,
)  # fmt: skip
turn_gauge_backward = operator(
    "turn_gauge_backward(Tensor? scale, Tensor? pair, Tensor carry, Tensor[] xs, Tensor[] biases, Tensor[] outs, "
    f"Tensor[] given, Tensor border, Tensor? d_final, Tensor? d_dots, Tensor? bounds, {OPTIONS}) -> "
    "(Tensor[], Tensor[], Tensor[], Tensor[])",
    _backward,
)  # fmt: skip


class Turned(torch.autograd.Function):
    """(border, final, dots, *marks, *turned vectors) of a call's vectors.

    Arguments of apply: scale, pair, bounds, how, count, *vectors, *biases, *firsts.
    scale [B, T, H'], pair [B, T, H', pairs]: float32, the factors of the angles, one of them None for 1. vectors
    [B, T, H', N], how many: count; biases [H, N]; firsts: what vectors that are delayed have at first tokens
    [B or sequences, H, N], float32, or none for 0. Turned vectors: [B, T, H, N]; final: the sum of every sequence's
    angles modulo whole turns [B or sequences, H, pairs]; dots [B, T, H]; `How.rows` of the vectors stand
    in one tensor [B, T, rows, H, N]. border: zeros [B, H, chunks, pairs], whose
    gradient is that of turning the states behind the chunks by as much. marks: zeros of the turned vectors' sizes,
    which have their gradients, in float32, as what cancels in those of angles takes more digits than bfloat16 has.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor | None, pair: Tensor | None, bounds: Tensor | None, how: How, count: int,
        *given: Tensor,
    ) -> Any:  # fmt: skip
        """Kept for the backward pass: the vectors, as given and turned."""
        biased = count + how.biased.bit_count()
        xs, biases, firsts = list(given[:count]), list(given[count:biased]), list(given[biased:])
        with torch._C._AutoDispatchBelowAutograd():
            outs, final, dots, carry = turn_gauge(scale, pair, xs, biases, firsts, bounds, *how.options)
        ctx.save_for_backward(scale, pair, bounds, carry, *xs, *biases, *outs)
        ctx.how, ctx.count = how, count
        border = carry.new_zeros(()).expand(xs[0].shape[0], how.heads, *carry.shape[1:])
        ctx.mark_non_differentiable(*outs, *(() if how.dot else (dots,)))
        marks = [carry.new_zeros(()).expand(out.shape) for out in outs]
        return border, final, dots, *marks, *outs

    @staticmethod
    def backward(ctx: Any, border: Tensor, d_final: Tensor, d_dots: Tensor | None, *given: Tensor) -> Any:
        """Gradients of the factors of angles, the vectors, the biases and `firsts`."""
        refuse_second_order()
        scale, pair, bounds, carry, *rest = ctx.saved_tensors
        count, how = ctx.count, ctx.how
        biased = count + how.biased.bit_count()
        xs, biases, outs = rest[:count], rest[count:biased], rest[biased:]
        d_dots = d_dots if how.dot else None
        dxs, d_biases, d_firsts, d_angles = turn_gauge_backward(
            scale, pair, carry, xs, biases, outs, list(given[: len(outs)]), border, d_final, d_dots, bounds,
            *how.options,
        )  # fmt: skip
        factors = iter(d_angles)
        of_angles = [None if x is None else _summed(next(factors), x.shape[2]) for x in (scale, pair)]
        dxs = [_summed(dx, x.shape[2]) for dx, x in zip(dxs, xs, strict=True)]
        d_biases = [dx.sum((0, 1)).to(x.dtype) for dx, x in zip(d_biases, biases, strict=True)]
        return *of_angles, None, None, None, *dxs, *d_biases, *d_firsts


def _summed(x: Tensor, heads: int) -> Tensor:
    """x [B, T, H, ...] summed in float32 over the heads that share one of `heads`."""
    return x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3, dtype=torch.float32).to(x.dtype)
