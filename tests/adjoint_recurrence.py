"""The adjoint recurrence, derived: what every backward pass has to compute, one structured step a row.

With G_r the gradient of S_r:   G += C_t dy_tᵀ where y_t reads;   dB_r = G;   dA_r = bilinear(G, S_{r-1});   G ← A_rᵀ G.
The reference that chunked and fused backward passes are compared with, for every structure.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from dsf.kernels.operators import Transition, reduce_to
from dsf.kernels.problem import Problem


def states_of(problem: Problem, initial: Tensor) -> Tensor:
    """S_0 … S_R of every row: [B, rows + 1, H, N, P]. initial: [B, H, N, P]."""
    states = [initial]
    for move, written in zip(problem.transitions(), problem.injection().unbind(1), strict=True):
        states.append(move.apply(states[-1]) + written)
    return torch.stack(states, dim=1)


def adjoint(problem: Problem, states: Tensor, dy: Tensor, dfinal: Tensor | None = None) -> tuple[Problem, Tensor]:
    """Gradients of ⟨dy, y⟩ + ⟨dfinal, S_R⟩ in the tensors of `problem`, each in the place of its tensor, and in S_0.

    states: [B, rows + 1, H, N, P] from states_of. dy: [B, T, H, P]. dfinal: [B, H, N, P] or None.
    """
    whole, micro, moves = problem.transition(), problem.micro, problem.transitions()
    seen = states[:, :-1:micro] if problem.before else states[:, micro::micro]  # [B, T, H, N, P], what y_t reads
    read = problem.readout * dy.unsqueeze(-2)  # C_t dy_tᵀ
    cotangent = torch.zeros_like(states[:, 0]) if dfinal is None else dfinal
    cotangents = []  # G_r, the last row first
    for row in reversed(range(problem.tokens * micro)):
        token, step = divmod(row, micro)
        if not problem.before and step == micro - 1:
            cotangent = cotangent + read[:, token]
        cotangents.append(cotangent)
        cotangent = moves[row].apply_transpose(cotangent)
        if problem.before and step == 0:
            cotangent = cotangent + read[:, token]
    written = torch.stack(cotangents[::-1], dim=1)  # dB of every row [B, rows, H, N, P]
    found = _of_transition(problem, whole.bilinear_derivative(written, states[:, :-1]))
    _add(found, _of_injection(problem, written))
    found["readout"] = reduce_to(seen * dy.unsqueeze(-2), problem.readout.shape)
    if problem.skip is not None:
        found["skip"] = reduce_to(dy, problem.skip.shape)
    missing = {f.name: None for f in fields(problem) if isinstance(getattr(problem, f.name), Tensor)}
    return replace(problem, **(missing | found)), cotangent  # type: ignore[arg-type]


def _of_transition(problem: Problem, da: Transition) -> dict[str, Tensor]:
    """From (decay, left, right) to the tensors that made them: a logarithm, a tie, the key."""
    found = {"decay": da.decay * problem.decay.exp() if problem.log else da.decay}
    if da.cross is not None:
        found["cross"] = da.cross
    if da.left is None or da.right is None:
        return found
    if problem.right is not None:
        found["right"] = da.right
    else:
        _add(found, {"key": da.right.squeeze(-1)})
    if problem.tie is None:
        return found | {"left": da.left}
    assert problem.key is not None
    left = da.left.squeeze(-1)  # tie_r · key_r
    found["tie"] = (left * problem.key).sum(-1)
    _add(found, {"key": reduce_to(left * problem.tie.unsqueeze(-1), problem.key.shape)})
    return found


def _of_injection(problem: Problem, written: Tensor) -> dict[str, Tensor]:
    """B = Σ_g key_g value_gᵀ, or the dense B itself."""
    if problem.dense is not None:
        return {"dense": written}
    assert problem.key is not None and problem.value is not None
    key = reduce_to(problem.value @ written.transpose(-1, -2), problem.key.shape)
    value = problem.key.expand(*problem.key.shape[:-1], problem.n) @ written
    return {"key": key, "value": reduce_to(value, problem.value.shape)}


def _add(found: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, x in more.items():
        found[name] = found[name] + x if name in found else x
