"""The recurrent form: one structured step a token."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.problem import Problem


def recurrent(problem: Problem, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the recurrence row by row.

    state: [B, H, N, P] or None. Returns y [B, T, H, P] and the final state [B, H, N, P].
    """
    current = problem.zero_state() if state is None else state
    rows = list(zip(problem.transitions(), problem.injection().unbind(1), strict=True))
    readouts = problem.readout.unbind(1)
    outputs = []
    for t, readout in enumerate(readouts):
        previous = current
        for transition, injection in rows[t * problem.micro : (t + 1) * problem.micro]:
            current = transition.apply(current) + injection
        outputs.append(problem.seen(readout, previous if problem.before else current))
    return problem.add_skip(torch.stack(outputs, dim=1)), current
