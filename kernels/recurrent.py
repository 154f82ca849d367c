"""The recurrent form: one structured step a token."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.operators import Transition
from dsf.kernels.problem import Problem


def recurrent(problem: Problem, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the recurrence row by row.

    state: [B, H, N, P] or None. Returns y [B, T, H, P] and the final state [B, H, N, P].
    """
    current = problem.zero_state() if state is None else state
    rows = _rows(problem)
    readouts = problem.readout.unbind(1)
    outputs = []
    for t, readout in enumerate(readouts):
        previous = current
        for transition, injection in rows[t * problem.micro : (t + 1) * problem.micro]:
            current = transition.apply(current) + injection
        outputs.append(problem.seen(readout, previous if problem.before else current))
    return problem.add_skip(torch.stack(outputs, dim=1)), current


def _rows(problem: Problem) -> list[tuple[Transition, Tensor]]:
    """(A, B) of every row. unbind, not indexing: its backward is one stack, not one zero tensor a row."""
    rows = problem.tokens * problem.micro
    whole = problem.transition()
    injections = problem.injection().unbind(1)
    none = (None,) * rows
    parts = [none if x is None else _unbind(x, rows) for x in (whole.decay, whole.left, whole.right, whole.cross)]
    return [(Transition(*part), b) for *part, b in zip(*parts, injections, strict=True)]


def _unbind(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    return x.expand(x.shape[0], rows, *x.shape[2:]).unbind(1)
