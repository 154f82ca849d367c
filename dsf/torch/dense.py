"""The naive form: A evaluated into dense matrices as the user wrote it, without the normal form."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.oracle import naive
from dsf.language.expr import Expr
from dsf.language.operator import Operator
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator

Shape = tuple[int, int, int, int]  # B, T, H, N


def dense_operator(a: Operator, values: Evaluator, n: int) -> Tensor:
    """The matrix of A for every token and channel: [B|1, T|1, H|1, p, N, N], where p is 1 or the number of channels."""
    if a.kind == "identity":
        return torch.eye(n, dtype=values.dtype, device=values.device).expand(1, 1, 1, 1, n, n)
    if a.kind == "diag":
        x = values(a.exprs[0])
        return torch.diag_embed(x.expand(*x.shape[:-2], n, x.shape[-1]).transpose(-1, -2))
    if a.kind == "outer":
        left, right = (values(e).transpose(-1, -2) for e in a.exprs)  # [..., p, N]
        return left.unsqueeze(-1) * right.unsqueeze(-2)
    if a.kind == "turn":
        return _dense_turn(values(a.exprs[0]), n)
    parts = [dense_operator(p, values, n) for p in a.parts]
    if a.kind == "scale":
        return values(a.exprs[0]).squeeze(-2)[..., None, None] * parts[0]
    total = parts[0]
    for part in parts[1:]:
        total = total + part if a.kind == "sum" else total @ part
    return total


def _dense_turn(angle: Tensor, n: int) -> Tensor:
    """angle [..., 1 or N, 1], equal within pairs -> [..., 1, N, N] with diagonal blocks [[cos, -sin], [sin, cos]]."""
    angle = angle.squeeze(-1).expand(*angle.shape[:-2], n)[..., 0::2]
    dense = angle.new_zeros(*angle.shape[:-1], n, n)
    first = torch.arange(0, n, 2, device=angle.device)
    places = (first, first), (first, first + 1), (first + 1, first), (first + 1, first + 1)
    for (row, column), entry in zip(places, (angle.cos(), -angle.sin(), angle.sin(), angle.cos()), strict=True):
        dense[..., row, column] = entry
    return dense.unsqueeze(-3)


def run_naive(
    spec: Spec, values: Evaluator, shape: Shape, state: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The naive form of a Spec without its normaliser: y [B, T, H, P] and the last state [B, H, N, P].

    shape: (B, T, H, N). valid: [B, T] bool, False for padding, or None.
    """
    batch, tokens, heads, n = shape
    p = state.shape[-1]
    d = values(spec.system.D).squeeze(-2).expand(batch, tokens, heads, p)
    across = spec.acts_on_values
    if across:
        n, p, values, state = p, n, _Transposed(values), state.transpose(-1, -2)
    a, b = [], []
    for step in spec.system.micro_steps:
        dense = dense_operator(step.A, values, n).expand(batch, tokens, heads, -1, n, n)
        written = values(step.B).expand(batch, tokens, heads, n, p)
        if valid is not None:
            eye = torch.eye(n, dtype=values.dtype, device=values.device)
            dense = torch.where(valid[:, :, None, None, None, None], dense, eye)
            written = torch.where(valid[:, :, None, None, None], written, 0.0)
        a.append(dense)
        b.append(written)
    c = values(spec.readout).expand(batch, tokens, heads, n, p)
    y, last = naive(a, b, c, d, state, spec.system.read == "before", -1 if across else -2)
    return y, last.transpose(-1, -2) if across else last


class _Transposed(Evaluator):
    """Evaluates expressions for the transposed state: [B, T, H, p, n]."""

    def __init__(self, values: Evaluator) -> None:
        self.plain, self.dtype, self.device = values, values.dtype, values.device

    def __call__(self, root: Expr) -> Tensor:
        return self.plain(root).transpose(-1, -2)
