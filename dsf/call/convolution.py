"""A call in the convolution form: one operator on a GPU where it takes the call, else torch's operators."""

from __future__ import annotations

from torch import Tensor

from dsf.call.bind import Bound
from dsf.call.frame import run_framed
from dsf.call.plan import Plan
from dsf.call.run import run, run_packed
from dsf.language.spec import Spec
from dsf.triton import convolve


def run_convolution(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor | None, state: Tensor | None, plan: Plan, wanted: bool
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the final state, which is an empty tensor, or misses columns, where it is not wanted.

    bounds: boundaries of packed sequences, or None.
    """
    if bounds is None:
        found = convolve.run(spec, bound, state, wanted, lambda b: _by_torch(spec, b, None, None, plan, wanted))
        if found is not None:
            return found
    return _by_torch(spec, bound, bounds, state, plan, wanted)


def _by_torch(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor | None, state: Tensor | None, plan: Plan, wanted: bool
) -> tuple[Tensor, Tensor]:
    if spec.is_framed:
        return run_framed(spec, bound, bounds, state, plan, wanted)
    if bounds is None:
        return run(spec, bound, state, plan, wanted)
    return run_packed(spec, bound, bounds, state, plan)
