"""Lowering of systems whose A acts on the Value axis: a Problem of the transposed state.

S_t = S_{t-1} Aᵀ + Σ k vᵀ is S_tᵀ = A S_{t-1}ᵀ + Σ v kᵀ: keys and values are exchanged, and outputs are read along the
other axis (`across` in Problem).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.problem import Problem
from dsf.language.expr import VALUE, const
from dsf.language.operator import split_scale
from dsf.language.spec import Spec, Term
from dsf.torch.columns import columns, skip_columns
from dsf.torch.evaluate import Evaluator, stack_rows
from dsf.torch.lower import Lowered, decays_of, mask, side_by_side, whole_injection

Shape = tuple[int, int, int, int]


def lower_on_values(spec: Spec, values: Evaluator, shape: Shape, state: Tensor | None, valid: Tensor | None) -> Lowered:
    """dsf.torch.lower.lower for a spec that acts_on_values. The Lowered's state is transposed, [B, H, P, N]."""
    batch, tokens, heads, n = shape
    p = values.p
    gate, core = spec.gated_read if spec.has_key else (spec.readout, const(1))
    readout = values(core).expand(batch, tokens, heads, n, 1).transpose(-1, -2)
    decay, log = decays_of(spec, values, tokens)
    tied = spec.is_delta_on_values
    groups = max(max(len(r.terms) for r in spec.rows), spec.rank if tied else 1, 1)
    written: dict[str, Tensor | None] = {}
    if any(r.dense is not None for r in spec.rows):
        dense = [values(whole_injection(r)).expand(batch, tokens, heads, n, p) for r in spec.rows]
        written["dense"] = stack_rows(dense).transpose(-1, -2)
    else:
        terms = [(*r.terms, *[Term(const(1), const(0))] * (groups - len(r.terms))) for r in spec.rows]
        split = [[(t.key, *split_scale(t.value, VALUE)) for t in row] for row in terms]
        written["key"] = stack_rows([
            side_by_side([values(core).squeeze(-2).expand(batch, tokens, heads, p) for _, _, core in row])
            for row in split
        ])  # fmt: skip
        written["value"] = stack_rows([
            side_by_side([
                (values(key) * values(scale)).squeeze(-1).expand(batch, tokens, heads, n) for key, scale, _ in row
            ])
            for row in split
        ])  # fmt: skip
    problem = Problem(
        decay=decay.transpose(-1, -2), log=log, readout=readout, n=p, p=n, across=True, micro=spec.micro,
        before=spec.system.read == "before", **written, **_corrections(spec, values, shape, groups if tied else None),
    )  # fmt: skip
    if valid is not None:
        problem = mask(problem, valid)
    layout = columns(spec, p)
    skip = skip_columns(values, spec.system.D, None, layout)
    rescale = None if gate is const(1) else values(gate).squeeze(-2)
    return Lowered(problem, None if state is None else state.transpose(-1, -2), layout, rescale, skip)


def _corrections(spec: Spec, values: Evaluator, shape: Shape, tied: int | None) -> dict[str, Tensor | None]:
    """right [B, rows, H, R, P, 1], and tie [B, rows, H, R] with R = `tied`, or left [B, rows, H, R, P, 1] if None."""
    count, rights, lefts = spec.rank if tied is None else tied, [], []

    def vector(x: Tensor) -> Tensor:
        return x.expand(*shape[:3], 1, values.p).transpose(-1, -2)

    for row in spec.rows:
        own = row.normal.corrections
        none = [values.full(0.0)] * (count - len(own))
        scales = [values(c.scale) for c in own]
        rights.append(side_by_side([vector(x) for x in [*(values(c.right) for c in own), *none]]))
        if tied is not None:
            lefts.append(torch.stack([x.expand(*shape[:3], 1, 1)[..., 0, 0] for x in [*scales, *none]], dim=3))
        else:
            whole = [s * values(c.left) for s, c in zip(scales, own, strict=True)]
            lefts.append(side_by_side([vector(x) for x in [*whole, *none]]))
    return {"right": stack_rows(rights), "left" if tied is None else "tie": stack_rows(lefts)}
