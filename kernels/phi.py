"""The kernel-matrix form: y_i = Σ_j Phi[i, j] applied to what token j wrote. For analysis and small T."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from dsf.kernels.operators import Transition, merged
from dsf.kernels.problem import Problem


def weights(problem: Problem) -> tuple[Tensor, Tensor]:
    """The weight of every row's write in every output.

    Returns Phi [B, H, T, rows·G, p] (p = 1 when channels agree; DSF eq. 12, without D) such that
    y[i] = Σ_j Phi[i, j] value_j, and the final weights [B, H, N, rows·G, p] of the writes in the last state.
    A dense injection counts as its N key rows: G = N.
    """
    problem = problem.factored()
    channels = problem.p if _by_channel(problem) else 1
    return _columns(problem, problem.readout.new_zeros(*problem.leading, problem.n, 0, channels))


def _by_channel(problem: Problem) -> bool:
    """Whether channels see different weights."""
    return problem.transition().is_per_channel or problem.readout.shape[-1] > 1


def _columns(problem: Problem, first: Tensor) -> tuple[Tensor, Tensor]:
    """What `weights` returns, behind J columns more, which are `first` [B, H, N, J, p] before the first row.

    problem: factored.
    """
    lanes, keys = problem.leading, problem.key  # [B, rows, H, G, N]
    assert keys is not None
    width, channels = first.shape[-2] + keys.shape[1] * keys.shape[3], first.shape[-1]
    moves = problem.transition().merged(*lanes).each_row(keys.shape[1])
    fresh, readouts = _fresh(merged(keys, *lanes), channels), merged(problem.readout, *lanes).unbind(1)
    live = first.flatten(0, 1)  # A_i … A_{j+1} key_j for all j so far, [B·H, N, J, p]
    out = []
    for t, readout in enumerate(readouts):
        if problem.before:
            out.append(_read(readout, live, width))
        for row in range(t * problem.micro, (t + 1) * problem.micro):
            live = torch.cat([_advance(moves[row], live), fresh[row]], dim=-2)
        if not problem.before:
            out.append(_read(readout, live, width))
    return torch.stack(out, dim=1).unflatten(0, lanes), live.unflatten(0, lanes)


def _fresh(keys: Tensor, channels: int) -> tuple[Tensor, ...]:
    """What every row adds to the live columns: keys [B·H, rows, G, N] -> [B·H, N, G, channels] each."""
    return keys.transpose(-1, -2).unsqueeze(-1).expand(*(-1,) * 4, channels).unbind(1)


def response(problem: Problem) -> Tensor:
    """Phi [B, H, T, rows, p]: output i of a system whose row j alone writes its injection B_j. D is left out.

    problem: the system driven by ones, p channels (1 where they agree); then Phi · u is its output for an input u.
    """
    whole = problem.transition()
    rows = problem.tokens * problem.micro
    channels = problem.p if problem.readout.shape[-1] == 1 else max(problem.p, problem.readout.shape[-1])
    channels = max(channels, *(1 if x is None else x.shape[-1] for x in (whole.decay, whole.left, whole.cross)))
    batch, heads = problem.leading
    moves = whole.each_row(rows)
    live = problem.readout.new_zeros(batch, heads, problem.n, rows, channels)  # A_i … A_{j+1} B_j, columns j
    phi = problem.readout.new_zeros(batch, heads, problem.tokens, rows, channels)
    for t in range(problem.tokens):
        if problem.before:
            phi[:, :, t] = (problem.readout[:, t].unsqueeze(-2) * live).sum(2)
        for row in range(t * problem.micro, (t + 1) * problem.micro):
            live[..., :row, :] = _advance(moves[row], live[..., :row, :])
            live[..., row, :] = injection_row(problem, row)
        if not problem.before:
            seen = live[..., : row + 1, :]
            phi[:, :, t, : row + 1] = (problem.readout[:, t].unsqueeze(-2) * seen).sum(2)
    return phi


def injection_row(problem: Problem, row: int) -> Tensor:
    """B of one row, dense [B, H, N, P], without forming that of the others."""
    if problem.dense is not None:
        return problem.dense[:, row]
    assert problem.key is not None and problem.value is not None
    return problem.key[:, row].transpose(-1, -2) @ problem.value[:, row]


def attention_scores(a: Tensor, k: Tensor, seen: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Scores [B, H, T, S] before the softmax, -inf where not seen. Arguments as attention_matrix."""
    scores = a @ k.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    if seen is None:
        tokens, places = scores.shape[-2:]
        seen = torch.ones(tokens, places, dtype=torch.bool, device=a.device).tril(places - tokens)
    return scores.masked_fill(~seen, float("-inf"))


def attention_matrix(
    a: Tensor, k: Tensor, seen: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None
) -> Tensor:
    """Softmax weights [B, H, T, S]. a: [B, H, T, N] scaled queries, k: [B, H, S, N].

    seen: bool [B|1, H|1, T, S], None for causal attention. bias: added to the scores. sink: [H], the score of a key
    without a value, which takes its share of every row (gpt-oss). A row that sees nothing is zero.
    """
    scores = attention_scores(a, k, seen, bias)
    top = scores.amax(-1, keepdim=True)
    own = None if sink is None else sink[:, None, None].to(scores.dtype)
    if own is not None:
        top = torch.maximum(top, own)
    weights = (scores - top.clamp(min=torch.finfo(scores.dtype).min)).exp()
    total = weights.sum(-1, keepdim=True)
    if own is not None:
        total = total + (own - top).exp()
    return weights / torch.where(total == 0, 1.0, total)


def window_matrix(a: Tensor, k: Tensor, seen: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Weights [B, H, T, S] of a finite state in a window, ⟨a_i, k_j⟩ e^bias where seen; as attention_matrix."""
    scores = a @ k.transpose(-1, -2)
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=a.device).tril()
    return (scores if bias is None else scores * bias.exp()).masked_fill(~seen, 0.0)


def kernel_matrix(problem: Problem, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the recurrence as one lower-triangular matrix. Returns y [B, T, H, P] and the final state."""
    initial = problem.zero_state() if state is None else state
    problem = problem.factored()
    if problem.across:
        return _kernel_across(problem, initial)
    assert problem.value is not None
    values = rearrange(problem.value, "b rows h g p -> b h (rows g) p")
    if _by_channel(problem):
        phi, last = _columns(problem, initial.unsqueeze(-2))  # one column more, which has a number for each channel
        y = torch.einsum("bhijp,bhjp->bhip", phi[..., 1:, :], values) + phi[..., 0, :]
        final = torch.einsum("bhnjp,bhjp->bhnp", last[..., 1:, :], values) + last[..., 0, :]
    else:
        phi, last = (x.squeeze(-1) for x in _columns(problem, initial.unsqueeze(-1)))  # P columns more
        y, final = (x[..., problem.p :] @ values + x[..., : problem.p] for x in (phi, last))
    return problem.add_skip(y.transpose(1, 2)), final


def _kernel_across(problem: Problem, initial: Tensor) -> tuple[Tensor, Tensor]:
    """`kernel_matrix` where the readout is along the value axis: y_i = Σ_j (A_i … A_{j+1} key_j) (value_j · C_i).

    S_0's columns are keys of a row before the first, whose values are the unit vectors.
    """
    assert problem.key is not None and problem.value is not None
    lanes, out = problem.leading, []
    moves = problem.transition().merged(*lanes).each_row(problem.key.shape[1])
    fresh, readouts = _fresh(merged(problem.key, *lanes), 1), merged(problem.readout, *lanes).unbind(1)
    live, unit = initial.flatten(0, 1).unsqueeze(-1), torch.eye(problem.p, dtype=initial.dtype, device=initial.device)
    values = torch.cat([unit.expand(live.shape[0], -1, -1), merged(problem.value, *lanes).flatten(1, 2)], dim=1)

    def read_live(readout: Tensor) -> Tensor:
        taken = values[:, : live.shape[-2]] @ readout.transpose(-1, -2)
        return (live.squeeze(-1) @ taken).squeeze(-1)

    for t, readout in enumerate(readouts):
        before = read_live(readout) if problem.before else None
        for row in range(t * problem.micro, (t + 1) * problem.micro):
            live = torch.cat([_advance(moves[row], live), fresh[row]], dim=-2)
        out.append(read_live(readout) if before is None else before)
    y = torch.stack(out, dim=1).unflatten(0, lanes).transpose(1, 2)
    return problem.add_skip(y), (live.squeeze(-1) @ values).unflatten(0, lanes)


def _advance(a: Transition, live: Tensor) -> Tensor:
    """A applied to the columns live [..., N, J, p]; J takes the place of a batch axis, p that of the channels.

    Where channels agree, J takes their place.
    """
    if live.shape[-2] == 0:
        return live
    if live.shape[-1] == 1:
        return a.apply(live.squeeze(-1)).unsqueeze(-1)

    def lift(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.unsqueeze(leading)

    leading = live.dim() - 3
    decay = lift(a.decay)
    assert decay is not None
    moved = Transition(decay, lift(a.left), lift(a.right), lift(a.cross)).apply(live.movedim(-2, leading))
    return moved.movedim(leading, -2)


def _read(readout: Tensor, live: Tensor, columns: int) -> Tensor:
    """Σ_n C[n] live[n, j]: [B·H, columns, p], zero for writes still to come."""
    row = (readout.unsqueeze(-2) * live).sum(1)
    return torch.nn.functional.pad(row, (0, 0, 0, columns - row.shape[1]))
