"""Calls of declarations whose readout is a solve (dsf.language.solve): x = (H + Λ)⁻¹ C, then y = Gᵀ x.

A state has the columns of G and then those of H, of which only the symmetric part is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, stack

from dsf.call.bind import Bound, environment, unrounded
from dsf.call.digits import widened
from dsf.call.plan import Plan, make_plan
from dsf.call.run import run
from dsf.kernels.solve import Implicit, by_cholesky, by_elimination, conjugate_gradients, solved_in_turn
from dsf.language.expr import Expr, const
from dsf.language.solve import Decay, Solve, diagonal, products, reads_of
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator
from dsf.triton import solve as gpu_solve

IN_TURN = ("naive", "recurrent", "kernel")  # forms that solve token by token
Bounds = list[int] | Tensor | None


@dataclass(frozen=True)
class Parts:
    """The operands of H_t = a_t H_{t-1} + Σ weighted keysᵀ and of the solve, in the computing dtype.

    decay: a_t [B, T, H], its logarithm where kind is "log"; keys, weighted: [B, T, H, N] each; ridge (the diagonal of
    Λ), query: [B, T, H, N]; state: H before the first token [B or sequences, H, N, N], or None for 0.
    """

    kind: Decay
    decay: Tensor
    keys: tuple[Tensor, ...]
    weighted: tuple[Tensor, ...]
    ridge: Tensor
    query: Tensor
    state: Tensor | None


def run_solved(
    spec: Spec, bound: Bound, bounds: Bounds, state: Tensor | None, plan: Plan, wanted: bool = True
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] in the computing dtype and the final state, P columns of G and, if `wanted`, N of H."""
    if plan.form == "naive" and bound.compute != torch.float64:
        wide = widened(bound, torch.float64)
        y, final = run_solved(spec, wide, bounds, None if state is None else state.double(), plan, wanted)
        return y.to(bound.compute), final.to(bound.compute)
    if plan.backend == "torch":  # both systems take keys and gates, whose gradients are added up
        bound = unrounded(bound)
    if plan.backend == "triton" and gpu_solve.takes(spec, bound.sizes, bound.dtype, bound.device):
        y, final, last = gpu_solve.run(spec, bound, bounds, state)
    else:
        query, last = solutions(spec, bound, bounds, state, plan)
        own = None if state is None else state[..., : bound.sizes.p]
        plain, given = reading(spec, bound, query if plan.backend == "torch" else query.to(bound.dtype))
        y, final = run(plain, given, bounds, own, plan)
    if not wanted:
        return y, final
    if bounds is not None and state is not None:  # sequences without tokens keep their H
        at = bounds if isinstance(bounds, Tensor) else torch.tensor(bounds, device=bound.device)
        last = torch.where((at[1:] > at[:-1]).view(-1, 1, 1, 1), last, state[..., bound.sizes.p :])
    return y, torch.cat([final, last], dim=-1)


def reading(spec: Spec, bound: Bound, query: Tensor) -> tuple[Spec, Bound]:
    """The system of G, with the solutions as an input that reads it, and its call."""
    plain, name = reads_of(spec)
    tensors = {i.name: query if i.name == name else bound.tensors[i.name] for i in plain.inputs}
    groups = {name: count for name, count in bound.sizes.groups.items() if name in tensors}
    return plain, replace(bound, tensors=tensors, sizes=replace(bound.sizes, groups=groups))


def solutions(spec: Spec, bound: Bound, bounds: Bounds, state: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor]:
    """The solution x [B, T, H, N] of every token, and the last H of every sequence."""
    solve = spec.system.solve
    assert solve is not None
    parts = _parts(spec, solve, bound, plan, state)
    if plan.form not in IN_TURN:
        return _Products(spec, solve, bound, bounds, plan, parts).solutions()
    assert not isinstance(bounds, Tensor)
    pieces = [(0, bound.sizes.tokens)] if bounds is None else list(pairwise(bounds))
    start = parts.state
    if start is None:
        rows = bound.sizes.batch if bounds is None else len(pieces)
        start = parts.query.new_zeros(rows, bound.sizes.heads, bound.sizes.n, bound.sizes.n)
    found, lasts = [], []
    for row, (begin, end) in enumerate(pieces):
        before = start if bounds is None else start[row : row + 1]
        if begin == end:
            lasts.append(before)
            continue
        decay, keys, weighted, ridge, query = (
            x[:, begin:end]
            for x in (parts.decay, stack(parts.keys, 3), stack(parts.weighted, 3), parts.ridge, parts.query)
        )
        solver = by_elimination if plan.form == "naive" else by_cholesky
        x, last = solved_in_turn(decay, keys, weighted, ridge, query, before, spec.system.read == "before", solver)
        found.append(x)
        lasts.append(last)
    return torch.cat(found, dim=1), torch.cat(lasts)


def _parts(spec: Spec, solve: Solve, bound: Bound, plan: Plan, state: Tensor | None) -> Parts:
    sizes = bound.sizes
    values = Evaluator(environment(spec, bound), sizes.keys, sizes.p)
    lead = sizes.batch, sizes.tokens, sizes.heads

    def vector(x: Expr) -> Tensor:
        return values(x).squeeze(-1).expand(*lead, sizes.n)

    decay = spec.rows[0].normal.decay
    kind: Decay = "one" if decay is const(1) else ("plain" if spec.log_decays is None else "log")
    if kind == "log" and plan.form not in IN_TURN:
        assert spec.log_decays is not None
        (decay,) = spec.log_decays
    keys = tuple(vector(key) for key, _ in solve.squares)
    weighted = tuple(values(weight).squeeze(-1) * k for (_, weight), k in zip(solve.squares, keys, strict=True))
    hessian = None if state is None else state[..., sizes.p :]
    return Parts(
        kind, values(decay)[..., 0, 0].expand(lead), keys, weighted, vector(solve.ridge), vector(spec.readout),
        None if hessian is None else 0.5 * (hessian + hessian.mT),
    )  # fmt: skip


class _Products:
    """Solves by conjugate gradients for all tokens at once; H x of all tokens is a call of a plain system."""

    def __init__(self, spec: Spec, solve: Solve, bound: Bound, bounds: Bounds, plan: Plan, parts: Parts) -> None:
        self.solve, self.bound, self.bounds, self.plan, self.parts = solve, bound, bounds, plan, parts
        self.read = spec.system.read
        self.names = [f"{x}{i}" for i in range(len(parts.keys)) for x in "kw"] + ["a"] * (parts.kind != "one")
        tensors = [x for pair in zip(parts.keys, parts.weighted, strict=True) for x in pair]
        self.tensors = [parts.ridge, parts.state, *tensors, *([parts.decay] if parts.kind != "one" else [])]

    def solutions(self) -> tuple[Tensor, Tensor]:
        """x and the last H. x is solved without gradients, which then follow from the equation that it solves."""
        query, fixed = self.parts.query, [None if x is None else x.detach() for x in self.tensors]
        with torch.no_grad():
            across = self._diagonal()
            x = self._solved(query.detach(), across, *fixed)
        found, last = self._product(x, *self.tensors)
        rest = query - found
        if torch.is_grad_enabled() and rest.requires_grad:
            x = x + Implicit.apply(rest, self._solved, across, *fixed)
        return x, last

    def _solved(self, query: Tensor, across: Tensor, *tensors: Tensor | None) -> Tensor:
        steps, hidden = self.solve.steps, type(query) is not Tensor or torch.compiler.is_compiling()
        exactly = query.dtype == torch.float64
        if exactly and hidden:  # convergence cannot be checked under tracing
            steps = max(steps, 2 * query.shape[-1])
        with torch.no_grad():
            return conjugate_gradients(
                lambda x: self._product(x, *tensors)[0], across, query, steps, exactly and not hidden
            )

    def _product(
        self, x: Tensor, ridge: Tensor | None, state: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(H + Λ) x, and the last H."""
        assert ridge is not None
        spec = products(len(self.parts.keys), self.parts.kind, self.read)
        given = {name: t for name, t in zip(self.names, tensors, strict=True) if t is not None}
        found, last = self._call(spec, {**given, "x": x}, state)
        return found + ridge * x, last

    def _diagonal(self) -> Tensor:
        """The diagonal of H + Λ."""
        parts = self.parts
        written = stack([k * w for k, w in zip(parts.keys, parts.weighted, strict=True)]).sum(0)
        given = {"w": written} | ({} if parts.kind == "one" else {"a": parts.decay})
        start = None if parts.state is None else parts.state.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        return self._call(diagonal(parts.kind, self.read), given, start)[0] + parts.ridge

    def _call(self, spec: Spec, tensors: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        n = self.bound.sizes.n
        rows = n if spec.has_key else 1
        sizes = replace(self.bound.sizes, keys=rows, n=rows, p=n, groups={})
        compute = self.bound.compute
        ordered = {i.name: tensors[i.name] for i in spec.inputs}
        bound = Bound(ordered, sizes, compute, compute, self.bound.device)
        plan = make_plan(spec, sizes, compute, self.plan.form, self.plan.backend, self.bound.device)
        return run(spec, bound, self.bounds, state, plan)
