"""The operator `dsf::attention` and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.attention.kernel import attention_columns, attention_forward, attention_rows
from dsf.kernels.triton.attention.sums import SIZE, attention_sums, attention_sums_gradient
from dsf.kernels.triton.attention.tiles import Attended, Tiles
from dsf.kernels.triton.launch import constant, launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import padded

WAY_OUT = "the attention kernels; ask for form='recurrent' or 'kernel', which have them"
PASSES = "forward", "rows", "columns"


def tiles(n: int, p: int, dtype: torch.dtype, of: str) -> dict[str, int]:
    """Rows and columns of a tile, warps and stages of one of PASSES.

    float32 products are not on tensor cores and need small tiles.
    """
    wide, most, backward = dtype == torch.float32, max(n, p), of != "forward"
    if wide:
        found = 32, 32, 4, 1
    elif most > 128:
        found = (32 if backward else 64), 32, 4, 2
    elif most > 64:
        found = {"forward": (128, 64, 8, 3), "rows": (64, 32, 4, 3), "columns": (32, 64, 4, 2)}[of]
    else:
        found = {"forward": (64, 64, 4, 3), "rows": (128, 32, 4, 3), "columns": (64, 64, 4, 2)}[of]
    return dict(zip(("R", "C", "num_warps", "num_stages"), found, strict=True))


def _laid(x: Tensor) -> tuple[Tensor, int]:
    """(x [B, T, H, ·], or a copy where the kernels cannot read it as it lies; the stride of its tokens)."""
    batch, step, head, entry = x.stride()
    beside = entry == 1 and (head == x.shape[3] or x.shape[2] == 1)
    if beside and (batch == x.shape[1] * step or x.shape[0] == 1):
        return x, step
    return x.contiguous(), x.shape[2] * x.shape[3]  # torch calls one token contiguous whatever its stride


def _given(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, scale: float, window: int, biased: bool, *passes: str
) -> tuple[Attended, list[dict[str, Any]]]:
    """The kernels' common arguments, and the compile-time options of each pass. c: not read if not biased.

    q and k are rounded to the dtype of v here, not in every program. They are float32 where they were turned: what the
    gradient of an angle takes from rows and from columns cancels if both round the same numbers.
    """
    n, p, last = q.shape[3], v.shape[3], q.shape[1] < k.shape[1]
    wide = v.dtype == torch.float32
    twice = wide or q.dtype != v.dtype
    (q, q_step), (k, k_step), (v, v_step) = map(_laid, (q.to(v.dtype), k.to(v.dtype), v))
    # constants, so that addresses of a tile's rows need no registers
    heads, shared, values = (constant(y.shape[2]) for y in (q, k, v))
    x = Attended(q, k, v, c, scale, heads, shared, values, constant(q_step), constant(k_step), constant(v_step))
    found: list[dict[str, Any]] = []
    for of in passes:
        how = tiles(n, p, v.dtype, of)
        sizes = how.pop("R"), how.pop("C"), n, p, padded(n), padded(p)
        found.append({**how, "tile": Tiles(window, biased, wide, twice and of != "forward", last, *sizes)})
    return x, found


def _programs(q: Tensor, tokens: int, size: int, before: int = 0) -> tuple[int]:
    """The grid of programs for `size` tokens of a head each, of the blocks that have some behind the first `before`."""
    return ((-(-tokens // size) - before // size) * q.shape[0] * q.shape[2],)


def _stretches(x: Tensor) -> tuple[int, int]:
    """The grid of programs for sums over the tokens of x [B, H, T]."""
    return x.shape[0] * x.shape[1], -(-x.shape[2] // SIZE.value)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, Q, H, P] in the dtype of v, lse [B, H, Q] in float32, and c.

    q: [B, Q, H, N], the last Q of T tokens, k: [B, T, HK, N], v: [B, T, HV, P], HK and HV dividing H. log: [B, H, T],
    log decays, or None: the sum of those after a key up to the query is added to their score. scale: of scores. window:
    how many tokens a query sees, 0 for all. lse: the logarithm of the sum of the exponentials of each row's scores. c:
    [B, H, 3, T] float32, the running sums of log in parts; without log [B, H, 0, T].
    """
    batch, queries, heads, _ = q.shape
    tokens = k.shape[1]
    y = v.new_empty(batch, queries, heads, v.shape[3])
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    c = q.new_empty(batch, heads, 0 if log is None else 3, tokens, dtype=torch.float32)
    if log is not None:
        along, every = log.stride()[:2], log.stride(2)
        launch(attention_sums, _stretches(log), log, c, tokens, heads, *along, every, num_warps=4)
    x, (how,) = _given(q, k, v, lse if log is None else c, scale, window, log is not None, "forward")
    grid = _programs(q, tokens, int(how["tile"].R), tokens - queries)
    launch(attention_forward, grid, x, y, lse, tokens, queries, **how)
    return y, lse, c


def _adjoint(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor, scale: float,
    window: int, wide: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v and, where there are log decays, of these [B, H, T], in float64 if wide.

    What the gradient of c is summed over cancels for the most part, so float32 inputs have it in float64.
    """
    batch, queries, heads, _ = q.shape
    tokens, biased = k.shape[1], c.shape[2] > 0
    marks = lse.new_empty(batch, heads, 2, queries)
    alone = k.shape[2] == heads == v.shape[2]  # else one gradient for each head, to be summed in float32
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_empty(batch, tokens, heads, x.shape[3], dtype=x.dtype if alone else torch.float32) for x in (k, v))
    dc = lse.new_empty(batch, heads, tokens, dtype=torch.float64 if v.dtype == torch.float32 else torch.float32)
    x, (by_rows, by_columns) = _given(q, k, v, c if biased else lse, scale, window, biased, *PASSES[1:])
    rows = _programs(q, tokens, int(by_rows["tile"].R), tokens - queries)
    columns = _programs(q, tokens, int(by_columns["tile"].C))
    dy = dy.contiguous()
    launch(attention_rows, rows, x, dy, y, lse, dlse.float().contiguous(), marks, dq, dc, tokens, queries, **by_rows)
    launch(attention_columns, columns, x, dy, lse, marks, dk, dv, dc, tokens, queries, **by_columns)
    if not alone:
        dk, dv = (g.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype) for g, x in ((dk, k), (dv, v)))
    if not biased:
        return [dq, dk, dv]
    dlog = lse.new_empty(batch, heads, tokens, dtype=torch.float64 if wide else torch.float32)
    launch(attention_sums_gradient, _stretches(dc), dc, dlog, tokens, num_warps=4)
    return [dq, dk, dv, dlog]


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient; faster on the host than the wrapper of torch.library."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log: Tensor | None, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, lse, c = attention(q, k, v, log, scale, window)
        ctx.scale, ctx.window = scale, window
        ctx.wide = log is not None and log.dtype == torch.float64
        ctx.mark_non_differentiable(c)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, c, y, lse)
        return y, lse, c

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order(WAY_OUT)
        q, k, v, c, y, lse = ctx.saved_tensors
        dy = torch.zeros_like(y) if dy is None else dy
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        found = attention_adjoint(q, k, v, c, y, lse, dy, dlse, ctx.scale, ctx.window, ctx.wide)
        dq, dk, dv, *dlog = found
        return dq, dk, dv, dlog[0] if dlog else None, None, None


def _behind(
    made: Any, q: Tensor, k: Tensor, v: Tensor, log: Tensor | None, scale: float, window: int
) -> tuple[Any, ...] | None:  # fmt: skip
    y, lse, c = made
    wide = log is not None and log.dtype == torch.float64
    return (attention_adjoint, q, k, v, c, y, lse, y, lse, scale, window, wide) if q.requires_grad else None


attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? log, float scale, int window) -> (Tensor, Tensor, Tensor)",
    _forward,
    _Differentiable.apply,
    _behind,
)
attention_adjoint = operator(
    "attention_adjoint(Tensor q, Tensor k, Tensor v, Tensor c, Tensor y, Tensor lse, Tensor dy, Tensor dlse, "
    "float scale, int window, bool wide) -> Tensor[]",
    _adjoint,
)
