"""A call in the convolution form: one operator on a GPU where it takes the call, else torch's operators."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dsf.call import packing
from dsf.call.bind import Bound
from dsf.call.framed import run_framed
from dsf.call.plan import Plan
from dsf.call.run import run, timed_inputs
from dsf.language.spec import Spec
from dsf.triton import convolve


def run_convolution(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor | None, state: Tensor | None, plan: Plan, wanted: bool
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the final state, which is an empty tensor, or misses columns, where it is not wanted.

    bounds: boundaries of packed sequences, or None.
    """
    if plan.torch_alone:
        return _by_torch(spec, bound, bounds, state, plan, wanted)
    if bounds is None:
        found = convolve.run(spec, bound, state, wanted, lambda b: _by_torch(spec, b, None, None, plan, wanted))
        if found is not None:
            return found
    elif not wanted:
        y = _packed(spec, bound, bounds, state, plan)
        if y is not None:
            return y, y.new_empty(0)
    return _by_torch(spec, bound, bounds, state, plan, wanted)


def _packed(spec: Spec, bound: Bound, bounds: list[int] | Tensor, state: Tensor | None, plan: Plan) -> Tensor | None:
    """y of packed sequences, as batches of similar lengths; None where the operator does not take them.

    Padding is behind a sequence's tokens, so that no y depends on it.
    """
    if isinstance(bounds, Tensor) or not convolve.takes(spec, bound, state):
        return None
    timed, outputs = timed_inputs(spec, bound), []
    for batch in packing.batches(bounds, bound.device):
        tensors = {**bound.tensors, **batch.take(timed)}
        sizes = replace(bound.sizes, batch=batch.index.shape[0], tokens=batch.index.shape[1])
        start = None if state is None else state.index_select(0, batch.chosen)
        part = replace(bound, tensors=tensors, sizes=sizes)
        found = convolve.run(spec, part, start, False, lambda b: _by_torch(spec, b, None, None, plan, False))
        assert found is not None
        outputs.append((batch, found[0]))
    return packing.unpack(outputs)


def _by_torch(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor | None, state: Tensor | None, plan: Plan, wanted: bool
) -> tuple[Tensor, Tensor]:
    return (run_framed if spec.is_framed else run)(spec, bound, bounds, state, plan, wanted)
