"""Running calls of declarations with `turn`, `prev` and Pair inputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsf.call.bind import Bound
from dsf.call.digits import of_enough_digits, widened
from dsf.call.frame import Framed, Places, frame_for
from dsf.call.plan import Plan
from dsf.call.run import run
from dsf.call.turned import TurnedByKernels, by_kernels
from dsf.kernels.oracle import oracle_dtype
from dsf.language.spec import Spec
from dsf.torch.columns import columns
from dsf.torch.lower import true_state
from dsf.triton import step as gpu_step


def run_framed(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor | None, state: Tensor | None, plan: Plan, wanted: bool = True
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] in the computing dtype and the final state. wanted: whether that needs all its columns."""
    if bounds is None and plan.one_step and gpu_step.takes(spec, bound.sizes, bound.dtype):
        return gpu_step.run(spec, bound, state)
    if plan.one_step and isinstance(bounds, Tensor):  # which only the chunk kernels read, on the frame of their form
        plan = replace(plan, form="chunk", one_step=False)
    frame = frame_for(spec, plan)
    turned = by_kernels(spec, bound, plan, isinstance(bounds, list))
    naive = plan.form == "naive"
    wide = widened(bound, oracle_dtype.get()) if naive else of_enough_digits(spec, bound, plan, turned=turned)
    if wide.compute != bound.compute:
        y, final = run_framed(spec, wide, bounds, None if state is None else state.to(wide.compute), plan, wanted)
        return y.to(bound.compute), final.to(bound.compute)
    bound = wide
    places = None if bounds is None else Places.of(bounds, bound.sizes.tokens, bound.device)
    kind = TurnedByKernels if turned else Framed
    framed = kind(spec, frame, bound, places, state, None if isinstance(bounds, list) else bounds)
    framed.make(wanted)
    start = framed.start(state)
    if naive:
        start = _without_maximum(spec, frame.spec, start, bound.sizes.p)
    inner = framed.inner(plan.backend == "triton")
    y, final = run(frame.spec, inner, bounds, start, plan, wanted, spec)
    if naive:
        layout = columns(spec.inner, bound.sizes.p)
        final = torch.nn.functional.pad(final[..., : layout.p + layout.den], (0, layout.gain))
    return y, framed.finish(final) if wanted else final


def _without_maximum(spec: Spec, oracle: Spec, state: Tensor | None, p: int) -> Tensor | None:
    """A state of the plain system for the oracle, which may have no running maximum where the plain system has one."""
    if state is None:
        return None
    layout = columns(spec.inner, p)
    own = true_state(spec.inner, state, p)[..., : layout.p + layout.den]
    return torch.nn.functional.pad(own, (0, columns(oracle, p).gain))
