"""The kernel-matrix form: y_i = Σ_j Phi[i, j] applied to what token j wrote. For analysis and small T."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.operators import Transition
from dsf.kernels.problem import Problem, read


def weights(problem: Problem) -> tuple[Tensor, Tensor]:
    """What every row's write is worth in every output.

    Returns Phi [B, H, T, rows·G, p] (p = 1 when channels agree; DSF eq. 12, without D) such that
    y[i] = Σ_j Phi[i, j] value_j, and the final weights [B, H, N, rows·G, p] of the writes in the last state.
    A dense injection counts as its N key rows: G = N.
    """
    problem = problem.factored()
    keys = problem.key  # [B, rows, H, G, N]
    assert keys is not None
    whole = problem.transition()
    rows, groups = keys.shape[1], keys.shape[3]
    channels = problem.p if whole.is_per_channel or problem.readout.shape[-1] > 1 else 1
    batch, heads = problem.leading
    live = keys.new_zeros(batch, heads, problem.n, 0, channels)  # A_i … A_{j+1} key_j for all j so far
    out = []
    for t in range(problem.tokens):
        if problem.before:
            out.append(_read(problem.readout[:, t], live, rows * groups))
        for row in range(t * problem.micro, (t + 1) * problem.micro):
            fresh = keys[:, row].transpose(-1, -2).unsqueeze(-1).expand(-1, -1, problem.n, -1, channels)
            live = torch.cat([_advance(_row(whole, row), live), fresh], dim=-2)
        if not problem.before:
            out.append(_read(problem.readout[:, t], live, rows * groups))
    return torch.stack(out, dim=2), live


def kernel_matrix(problem: Problem, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the recurrence as one lower-triangular matrix. Returns y [B, T, H, P] and the final state."""
    initial = problem.zero_state() if state is None else state
    problem = problem.factored()
    phi, last = weights(problem)
    assert problem.value is not None
    values = problem.value.movedim(2, 1).flatten(2, 3)  # [B, H, rows·G, P]
    if phi.shape[-1] == 1:
        y = phi.squeeze(-1) @ values
        final = last.squeeze(-1) @ values
    else:
        y = torch.einsum("bhijp,bhjp->bhip", phi, values)
        final = torch.einsum("bhnjp,bhjp->bhnp", last, values)
    from_state, moved = _initial_part(problem, initial)
    return problem.add_skip(y.transpose(1, 2) + from_state), final + moved


def _initial_part(problem: Problem, state: Tensor) -> tuple[Tensor, Tensor]:
    """C_t A_t … A_1 S_0 for every t, and A_T … A_1 S_0."""
    whole, out = problem.transition(), []
    for t in range(problem.tokens):
        previous = state
        for row in range(t * problem.micro, (t + 1) * problem.micro):
            state = _row(whole, row).apply(state)
        out.append(read(problem.readout[:, t], previous if problem.before else state))
    return torch.stack(out, dim=1), state


def _row(whole: Transition, row: int) -> Transition:
    def at(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, row if x.shape[1] > 1 else 0]

    decay = at(whole.decay)
    assert decay is not None
    return Transition(decay, at(whole.left), at(whole.right))


def _advance(a: Transition, live: Tensor) -> Tensor:
    """A applied to the columns live [B, H, N, J, p]: columns take the place of a batch axis, p of the channels."""
    if live.shape[-2] == 0:
        return live

    def lift(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.unsqueeze(2)

    decay = lift(a.decay)
    assert decay is not None
    moved = Transition(decay, lift(a.left), lift(a.right)).apply(live.movedim(3, 2))
    return moved.movedim(2, 3)


def _read(readout: Tensor, live: Tensor, columns: int) -> Tensor:
    """Σ_n C[n] live[n, j]: [B, H, columns, p], zero for writes still to come."""
    row = (readout.unsqueeze(-2) * live).sum(2)
    return torch.nn.functional.pad(row, (0, 0, 0, columns - row.shape[2]))
