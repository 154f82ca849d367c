"""The short convolution as custom operators: one launch forward, two backward, one for a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import check_convolution, refuse_second_order
from dsf.kernels.triton.early import early_and_fetching
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.convolution import convolve, convolve_step
from dsf.kernels.triton.layer.convolution_gradient import pull, sum_rows
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import bits

WAY_OUT = "the fused short convolution; ask for backend='torch', which has them"
# SiLU; widths, heads and scales of pieces; how many later tokens an output reads
Options = tuple[bool, tuple[int, ...], tuple[int, ...], tuple[float, ...], int]


def _options(
    silu: bool, widths: Sequence[int], heads: Sequence[int], scales: Sequence[float], ahead: int = 0
) -> Options:
    return silu, tuple(widths), tuple(heads), tuple(scales), ahead


def _about(x: Tensor, options: Options, channels: int) -> tuple[Any, ...]:
    """The compile-time options of the kernels. channels: of a program."""
    silu, widths, heads, scales, ahead = options
    blocks = accumulate((-(-w // channels) for w in widths[:-1]), initial=0)
    firsts = accumulate(widths[:-1], initial=0)
    return widths, heads, scales, silu, max(heads), x.shape[-1], tuple(blocks), tuple(firsts), ahead


def _tile(x: Tensor, taps: int, options: Options, backward: bool) -> table.Tile:
    _, widths, heads, *_ = options
    tile = table.convolution(widths, x.shape[1], x.shape[0], x.element_size(), taps, backward)
    if tile.channels < max(heads):
        tile = table.Tile(max(heads), tile.rows, tile.block, max(tile.warps, max(heads) // 256))
    return tile


def _blocks(channels: int, widths: Sequence[int]) -> int:
    return sum(-(-w // channels) for w in widths)


def _pieces(xs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The tensors [B, T, width] with their strides of batch and time."""
    return tuple(y for x in xs for y in (x, x.stride(0), x.stride(1)))


def _sequences(x: Tensor, bounds: Tensor | None) -> int:
    return x.shape[0] if bounds is None else bounds.shape[0] - 1


def _rows(x: Tensor) -> Tensor:
    """x with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(*given: Tensor | None) -> list[Any]:
    """Contiguous tensors, of which the kernels take no strides."""
    return [None if y is None else y.contiguous() for y in given]


def _outputs(x: Tensor, weight: Tensor, bounds: Tensor | None, options: Options) -> tuple[list[Tensor], Tensor]:
    ys = [x.new_empty(*x.shape[:2], w) for w in options[1]]
    ends = 0 if options[4] else _sequences(x, bounds)  # what reads later tokens has no state
    return ys, x.new_empty(ends, x.shape[-1], weight.shape[-1] - 1)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, bounds: Tensor | None, *rest: Any
) -> tuple[list[Tensor], Tensor]:
    options = _options(*rest)
    check_convolution(x, weight, bias, state, bounds)
    x, (weight, bias, state, bounds) = _rows(x), _dense(weight, bias, state, bounds)
    ys, final = _outputs(x, weight, bounds, options)
    taps, tokens = weight.shape[-1], x.shape[1]
    tile = _tile(x, taps, options, False)
    runs = -(-(tokens + options[4]) // tile.rows)
    blocks, count = _blocks(tile.channels, options[1]), final.shape[0]
    launch(
        convolve, (blocks * (runs * x.shape[0] + count),),
        x, x.stride(0), x.stride(1), weight, bias, state, bounds, _pieces(ys), final, tokens, runs, count,
        bits(count), about=_about(x, options, tile.channels), K=taps, SPAN=tile.rows, L=tile.block, BC=tile.channels,
        BLOCKS=blocks, num_warps=tile.warps,
    )  # fmt: skip
    return ys, final


def _gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Room for those of x, weight, bias and state."""
    dbias, dstate = (None if y is None else y.new_empty(y.shape) for y in (bias, state))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, dstate


def _backward(
    dys: Sequence[Tensor], dfinal: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    state: Tensor | None, bounds: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    options = _options(*rest)
    x, (weight, bias, state, bounds, dfinal) = _rows(x), _dense(weight, bias, state, bounds, dfinal)
    dys = [_rows(dy) for dy in dys]
    dx, dweight, dbias, dstate = _gradients(x, weight, bias, state)
    (batch, tokens, channels), taps = x.shape, weight.shape[-1]
    tile = _tile(x, taps, options, True)
    blocks = _blocks(tile.channels, options[1])
    runs = -(-(tokens + options[4]) // (tile.rows - taps + 1))
    sums = x.new_empty(batch * runs, taps + 1, channels, dtype=torch.float32)
    count = _sequences(x, bounds)
    launch(
        pull, (blocks * (runs * batch + (0 if dstate is None else count)),),
        x, x.stride(0), x.stride(1), weight, bias, state, bounds, _pieces(dys), dfinal, (dx, dstate, sums), tokens,
        runs, count, bits(count), about=_about(x, options, tile.channels), K=taps, ROWS=tile.rows, L=tile.block,
        BC=tile.channels, BLOCKS=blocks, num_warps=tile.warps,
    )  # fmt: skip
    launch(
        sum_rows, (-(-channels // 64), taps + (bias is not None)),
        sums, dweight, dbias, batch * runs, C=channels, K=taps, BR=32, BC=64, num_warps=4,
    )  # fmt: skip
    return [x for x in (dx, dweight, dbias, dstate) if x is not None]


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient; faster on the host than the wrapper of torch.library."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
        bounds: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            ys, final = short_convolution(x, weight, bias, state, bounds, *options)
        ctx.save_for_backward(x, weight, bias, state, bounds)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return *ys, final

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        x, weight, bias, state, bounds = ctx.saved_tensors
        *slopes, dfinal = given
        pairs = zip(slopes, ctx.options[1], strict=True)
        dys = [x.new_zeros(*x.shape[:2], w) if dy is None else dy for dy, w in pairs]
        found = iter(short_convolution_backward(dys, dfinal, x, weight, bias, state, bounds, *ctx.options))
        of_x, of_weight = next(found), next(found)
        return None, of_x, of_weight, *(None if y is None else next(found) for y in (bias, state)), None


def _differentiable(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, bounds: Tensor | None, *options: Any
) -> tuple[list[Tensor], Tensor]:
    *ys, final = _Differentiable.apply(_options(*options), x, weight, bias, state, bounds)
    return ys, final


def _behind(made: Any, x: Tensor, *rest: Any) -> tuple[Any, ...] | None:
    """The likeliest call of gradients: of dys like ys, without one of the last state. None where x has none."""
    return (short_convolution_backward, made[0], None, x, *rest) if x.requires_grad else None


def _step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, new: Tensor, options: Options
) -> Tensor:
    """y [B, 1, C] of one token x, with all pieces; writes the new state into `new`, which may be the old one."""
    check_convolution(x, weight, bias, state, None)
    if x.shape[1] != 1:
        raise ValueError(f"a step of a short convolution takes one token, x [B, 1, C], got {list(x.shape)}")
    x, (weight, bias) = _rows(x), _dense(weight, bias)
    y = x.new_empty(x.shape)
    channels, warps = table.convolution_step(tuple(options[1]), tuple(options[2]))
    blocks = _blocks(channels, options[1])
    launch(
        convolve_step, (blocks * x.shape[0],),
        x, x.stride(0), weight, bias, state, _pieces(y.split(options[1], -1)), new,
        about=_about(x, options, channels), K=weight.shape[-1], BC=channels, BLOCKS=blocks, num_warps=warps,
        **early_and_fetching(x.device, blocks * x.shape[0]),
    )  # fmt: skip
    return y


def _step_new(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    new = x.new_empty(x.shape[0], x.shape[-1], weight.shape[-1] - 1)
    return _step(x, weight, bias, None if state is None else state.contiguous(), new, _options(*rest)), new


def _step_in_place(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *rest: Any) -> Tensor:
    return _step(x, weight, bias, state, state, _options(*rest))


_PIECES = "bool silu, int[] widths, int[] heads, float[] scales"
_ALL = f"{_PIECES}, int ahead"
_GIVEN = "Tensor x, Tensor weight, Tensor? bias"
short_convolution = operator(
    f"short_convolution({_GIVEN}, Tensor? state, Tensor? bounds, {_ALL}) -> (Tensor[], Tensor)",
    _forward,
    _differentiable,
    _behind,
)
short_convolution_backward = operator(
    f"short_convolution_backward(Tensor[] dys, Tensor? dfinal, {_GIVEN}, Tensor? state, Tensor? bounds, {_ALL}) -> "
    "Tensor[]",
    _backward,
)
short_convolution_step = operator(
    f"short_convolution_step({_GIVEN}, Tensor? state, {_PIECES}) -> (Tensor, Tensor)", _step_new
)
short_convolution_step_in_place = operator(
    f"short_convolution_step_({_GIVEN}, Tensor(a!) state, {_PIECES}) -> Tensor", _step_in_place
)
