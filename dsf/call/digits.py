"""The dtype of calls whose sums cancel: one rule for plain calls and calls over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsf.call.bind import Bound, unrounded
from dsf.call.cost import CONVOLUTION
from dsf.call.plan import Plan
from dsf.language.derived import derived
from dsf.language.expr import inputs_of, substitute
from dsf.language.spec import Spec


def of_enough_digits(spec: Spec, bound: Bound, plan: Plan, spread: bool = False, turned: bool = False) -> Bound:
    """The call in the dtype that it needs; `bound` itself where that is the inputs' dtype.

    Float64 where torch has to find the gradient of Params in an angle; float32 on kernels, which round what they
    multiply as matrices, where keys and queries are Params, or a gradient of an angle's inputs is wanted; float32 where
    torch runs a frame, which takes an input several times and remembers previous values in its state. spread: of tokens
    over ranks, of which each may have few or none: then it does not depend on how many.
    turned: kernels turn keys and queries and add up what turns change (dsf.call.turned), which needs no more digits.
    """
    if sums_angles(spec, bound, plan):
        return widened(bound, torch.float64)
    if spec.is_framed and plan.backend == "torch" and plan.form != CONVOLUTION:
        return unrounded(bound)
    kernels = spread or (plan.backend == "triton" and not plan.one_step)
    angles = not turned and _learns(bound, _in_angles(spec))
    if kernels and (spec.has_still_keys or angles):
        return unrounded(bound)
    return bound


def widened(bound: Bound, dtype: torch.dtype) -> Bound:
    """The call with inputs and states in a wider dtype."""
    tensors = {name: x.to(dtype) for name, x in bound.tensors.items()}
    return replace(bound, tensors=tensors, dtype=dtype, compute=dtype)


def sums_angles(spec: Spec, bound: Bound, plan: Plan) -> bool:
    """True where torch has to find, in the gauge or in attention, the gradient of Params in an angle.

    Such a Param turns every token. In the gauge its gradient adds up, with weights up to T, differences of what
    queries and keys ask for, most of which cancel: float32 leaves 6e-8 T^1.5 of one such number. Of one token, too,
    where what the angle is made of multiplies that (a step of S4D of 1e5 radians).
    """
    if plan.form == CONVOLUTION or plan.backend != "torch" or bound.compute == torch.float64:
        return False
    return _learns(bound, _in_angles(spec, False))


def _learns(bound: Bound, names: frozenset[str]) -> bool:
    """True where one of these inputs needs a gradient.

    The gradient of an angle's input is a small difference between gradients of turned keys and queries. Half precisions
    have too few digits for it, wherever they round, so kernels then get float32.
    """
    return bool(names) and torch.is_grad_enabled() and any(bound.tensors[name].requires_grad for name in names)


@derived
def _in_angles(spec: Spec, timed: bool = True) -> frozenset[str]:
    """The names of the inputs of all angles that are a gauge, or of attention. timed: also of those of tokens."""
    frame = spec.frame
    if spec.is_attention:
        angles = [r.normal.angle for r in spec.rows]
    elif frame is None or frame.angles is None:
        return frozenset()
    else:
        angles = [substitute(x, frame.words) for x in frame.angles]
    names = frozenset(i.attrs[0] for i in inputs_of(*angles))
    return names if timed else names - {i.name for i in spec.inputs if i.kind.time}
