"""The operator `dsf::attention` and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.attention.kernel import (
    Attended,
    Tiles,
    attention_columns,
    attention_deltas,
    attention_forward,
    attention_rows,
)
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import LIBRARY, operator

WAY_OUT = "the attention kernels; ask for form='recurrent' or 'kernel', which have them"


def tiles(n: int, p: int, dtype: torch.dtype, backward: bool) -> dict[str, int]:
    """Rows and columns of a tile, warps and stages. float32 products are not on tensor cores and need small tiles.

    Where neither N nor P is a multiple of 16 and v is padded to fewer channels than k, Triton 3.6 on an H100 sums 64
    values at a time wrongly, 32 correctly; the products of the gradients are correct (test_uneven_heads_on_a_gpu).
    """
    wide, large = dtype == torch.float32, max(n, p) > 128
    uneven = not backward and n % 16 > 0 and p % 16 > 0
    rows = 32 if wide or (large and backward) else 64 if backward or large else 128
    columns = 32 if wide or large or uneven else 64
    warps = 4 if wide or rows < 128 or max(n, p) <= 64 else 8
    return {"R": rows, "C": columns, "num_warps": warps, "num_stages": 1 if wide else 2}


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _given(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, spare: Tensor, scale: float, window: int, backward: bool
) -> tuple[Attended, int, int, dict[str, Any]]:
    """The kernels' common arguments, rows and columns of a tile, and compile-time options. spare: used where c is None.

    q and k are rounded to the dtype of v here, since Triton 3.6 compiles some kernels wrongly that load float32 and
    round it, where P is small.
    """
    (heads, n), p = q.shape[2:], v.shape[3]
    q, k = q.to(v.dtype), k.to(v.dtype)
    bias = spare if c is None else c.contiguous()
    x = Attended(q.contiguous(), k.contiguous(), v.contiguous(), bias, scale, heads, k.shape[2], v.shape[2], n, p)
    options: dict[str, Any] = tiles(n, p, v.dtype, backward)
    rows, columns = options.pop("R"), options.pop("C")
    options["tile"] = Tiles(window, c is not None, v.dtype == torch.float32, rows, columns, _padded(n), _padded(p))
    return x, rows, columns, options


def _forward(q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] in the dtype of v and lse [B, H, T] in float32.

    q: [B, T, H, N], k: [B, T, HK, N], v: [B, T, HV, P], HK and HV dividing H. c: [B, H, 2, T] float32, two parts of a
    number whose difference between query and key is added to their score, or None. scale: of scores. window: how many
    tokens a query sees, 0 for all. lse: the logarithm of the sum of the exponentials of each row's scores.
    """
    batch, tokens, heads, _ = q.shape
    y = v.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, heads, tokens, dtype=torch.float32)
    x, rows, _, options = _given(q, k, v, c, lse, scale, window, False)
    launch(attention_forward, (batch * heads, -(-tokens // rows)), x, y, lse, tokens, **options)
    return y, lse


def _adjoint(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor, scale: float,
    window: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v and, where there is c, of the number that its parts add up to, [B, H, T].

    That one is in float64 for float32 inputs: the gradient of a decay sums it over tokens, where most of it cancels.
    """
    batch, tokens, heads, _ = q.shape
    own = dlse.float().contiguous()
    about = ((dy.float() * y.float()).sum(-1).transpose(1, 2) - own).contiguous()
    delta = torch.empty_like(about)
    alone = k.shape[2] == heads == v.shape[2]  # else one gradient for each head, to be summed in float32
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_empty(batch, tokens, heads, x.shape[3], dtype=x.dtype if alone else torch.float32) for x in (k, v))
    dc = lse.new_empty(batch, heads, tokens, dtype=torch.float64 if v.dtype == torch.float32 else torch.float32)
    x, rows, columns, options = _given(q, k, v, c, lse, scale, window, True)
    given, grid = (x, dy.contiguous(), lse), (batch * heads, -(-tokens // rows))
    launch(attention_deltas, grid, *given, about, own, delta, tokens, **options)
    launch(attention_rows, grid, *given, delta, dq, dc, tokens, **options)
    launch(attention_columns, (batch * heads, -(-tokens // columns)), *given, delta, dk, dv, dc, tokens, **options)
    if not alone:
        dk, dv = (g.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype) for g, x in ((dk, k), (dv, v)))
    return [dq, dk, dv] if c is None else [dq, dk, dv, dc]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, c, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, c, *output)


def _backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_order(WAY_OUT)
    q, k, v, c, y, lse = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    dq, dk, dv, *dc = attention_adjoint(q, k, v, c, y, lse, dy, dlse, ctx.scale, ctx.window)
    both = torch.stack([dc[0].float(), (dc[0] - dc[0].float()).float()], dim=2) if dc else None
    return dq, dk, dv, both, None, None


_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? c"
attention = operator(f"attention({_GIVEN}, float scale, int window) -> (Tensor, Tensor)", _forward)
attention_adjoint = operator(
    f"attention_adjoint({_GIVEN}, Tensor y, Tensor lse, Tensor dy, Tensor dlse, float scale, int window) -> Tensor[]",
    _adjoint,
)
torch.library.register_autograd("dsf::attention", _backward, setup_context=_setup, lib=LIBRARY)
