"""The trajectory of one call: A_t, B_t, C_t and D_t as tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsf.call.attention import attention_of, no_matrix
from dsf.call.bind import Bound, environment
from dsf.call.frame import materialised
from dsf.call.plan import make_plan
from dsf.call.run import timed_inputs
from dsf.call.solve import reading, solutions
from dsf.drive import Drive, drive_of
from dsf.kernels.problem import Problem
from dsf.language.errors import FormError
from dsf.language.expr import Expr
from dsf.language.spec import Spec
from dsf.torch.columns import columns
from dsf.torch.evaluate import Evaluator
from dsf.torch.lower import Lowered, lower, side_by_side, true_state
from dsf.trajectory import Attention, Trajectory


def record(spec: Spec, bound: Bound, initial_state: Tensor | None = None) -> Trajectory:
    """The trajectory of `spec` on one call's inputs. initial_state: [B, H, N, columns], as in a call.

    Where the readout is a solve, C_t is its solution, which depends on all tokens so far. Turns stay in A, so that
    matrices and states are the declaration's; previous values are inputs. Raises FormError where A acts on values.
    """
    if spec.turning is not None:
        plain = materialised(spec, spec.turning, bound, initial_state)
        start = None if initial_state is None else initial_state[..., : columns(spec.turning.spec, plain.sizes.p).total]
        return record(spec.turning.spec, plain, start)
    if spec.system.solve is not None:
        plan = make_plan(spec, bound.sizes, bound.dtype, "recurrent", "torch", bound.device)
        query, _ = solutions(spec, bound, None, initial_state, plan)
        start = None if initial_state is None else initial_state[..., : bound.sizes.p]
        return record(*reading(spec, bound, query), start)
    why = no_trajectory(spec)
    if why is not None:
        raise FormError(f"{spec.name}: {why}")
    timed = timed_inputs(spec, bound)
    if spec.is_attention:
        return Trajectory(spec, None, None, Attention(**attention_of(spec, bound, timed)))
    sizes = bound.sizes
    values = Evaluator(environment(spec, bound), sizes.keys, sizes.p)
    shape = (sizes.batch, sizes.tokens, sizes.heads, sizes.n)
    problem = lower(spec.unnormalised, values, shape, None, None).whole
    gauge = None
    if spec.system.gauge is not None:
        gauge = values(spec.system.gauge).squeeze(-1).squeeze(-1).expand(shape[:3])
    start = None if initial_state is None else true_state(spec, initial_state, sizes.p)[..., : sizes.p]
    found = drive_of(spec)
    if found is None:
        return Trajectory(spec, problem, gauge, initial_state=start)
    drive = _driving(found, values, shape)
    if spec.rule is None:
        return Trajectory(spec, problem, gauge, None, drive, _unit(found, values, problem, shape), initial_state=start)
    lowered = lower(spec, values, shape, None, None)
    scale = _den(lowered.rescale, lowered), lowered.one
    return Trajectory(spec, problem, gauge, None, drive, _quotient_unit(lowered), scale, start)


def no_trajectory(spec: Spec) -> str | None:
    """Why no call of the recurrence has a trajectory, or None."""
    if spec.turning is not None:
        return no_trajectory(spec.turning.spec)
    if spec.acts_on_values:
        return (
            "trajectories hold operators on the Key axis, and A acts on the Value axis; declare the transposed system "
            "(keys where values are) for its matrices"
        )
    return no_matrix(spec) if spec.is_attention and not spec.is_plain_softmax else None


def decays(spec: Spec, bound: Bound) -> list[Tensor]:
    """The decay in every row of A, [B|1, T|1, H|1, n, p] each, also of a system that has no trajectory."""
    if spec.turning is not None:
        return decays(spec.turning.spec, materialised(spec, spec.turning, bound, None))
    values = Evaluator(environment(spec, bound), bound.sizes.keys, bound.sizes.p)
    return [values(r.normal.decay) for r in spec.rows]


def _driving(found: Drive, values: Evaluator, shape: tuple[int, int, int, int]) -> Tensor:
    """The driving input u [B, rows, H, P]; zero in rows that write nothing."""
    rows = [values.full(0.0) if node is None else values(node) for node in found.inputs]
    spread = [x.squeeze(-2).expand(*shape[:3], values.p) for x in rows]
    return torch.stack(spread, dim=2).flatten(1, 2)


def _unit(found: Drive, values: Evaluator, problem: Problem, shape: tuple[int, int, int, int]) -> Problem:
    """The system with u = 1."""
    if problem.dense is not None:
        rows = []
        for gain, keys in zip(found.dense, found.gains, strict=True):
            assert gain is not None or not keys
            rows.append(values.full(0.0) if gain is None else values(gain))
        dense = torch.stack([x.expand(*shape, values.p) for x in rows], dim=2).flatten(1, 2)
        changed = replace(problem, dense=dense)
    else:
        assert problem.key is not None
        groups = problem.key.shape[3]
        rows = [
            side_by_side([_gain(found.gains[r], g, values, shape) for g in range(groups)])
            for r in range(len(found.gains))
        ]
        value = torch.stack(torch.broadcast_tensors(*rows), dim=2).flatten(1, 2)
        changed = replace(problem, value=value, p=value.shape[-1])
    if problem.skip is None:
        return changed
    own = values(found.skip).squeeze(-2)
    return replace(changed, skip=own.expand(*shape[:3], own.shape[-1]))


def _gain(gains: tuple[Expr, ...], group: int, values: Evaluator, shape: tuple[int, int, int, int]) -> Tensor:
    """A term's value [B, T, H, P or 1] with u = 1; zero for a term that the row lacks."""
    x = values(gains[group]) if group < len(gains) else values.full(0.0)
    x = x.squeeze(-2)
    return x.expand(*shape[:3], x.shape[-1])


PARTS = ("decay", "readout", "left", "right", "dense", "cross")


def _quotient_unit(lowered: Lowered) -> Problem:
    """The normaliser's columns of the lowered system: num with u = 1, divided by e^m of the running maximum."""
    problem = lowered.problem
    skip = problem.skip if lowered.skip is None else lowered.skip
    changes = {name: _den(getattr(problem, name), lowered) for name in PARTS}
    value = None if problem.value is None else problem.value[..., lowered.columns.p :]
    own = None if skip is None else skip.expand(*problem.readout.shape[:3], -1)[..., lowered.columns.p :]
    return replace(problem, p=lowered.columns.den, value=value, skip=own, **changes)  # type: ignore[arg-type]


def _den(x: Tensor | None, lowered: Lowered) -> Tensor | None:
    """The normaliser's columns of a tensor with columns of num and den, or with one column for both."""
    if x is None or x.shape[-1] == 1:
        return x
    return x[..., lowered.columns.p :]
