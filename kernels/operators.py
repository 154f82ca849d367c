"""The operator algebra on tensors: A = decay ⊙ · + Σ_r left_r right_rᵀ.

Every transition of the library is one `Transition`: a decay that scales the state, plus R rank-one corrections.
Which mixer it belongs to is told by its shapes alone (n, p are the sizes along the Key and the Value axis):

    decay [..., 1, 1]  identity, constant or scalar      decay [..., N, 1]  key-diagonal
    decay [..., 1, P]  value-diagonal                    decay [..., N, P]  Hadamard
    left, right [..., R, N, 1]  corrections shared by the channels; [..., R, N, P] one operator a channel

The laws (tests/test_operators.py states each as a line of code): apply = dense product, apply_transpose is its
adjoint, compose is the operator product, bilinear_derivative is the gradient of ⟨G, A S⟩.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def reduce_to(x: Tensor, shape: torch.Size) -> Tensor:
    """Sum x over every axis along which `shape` has size one (the adjoint of broadcasting)."""
    axes = [i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1]
    return x.sum(axes, keepdim=True) if axes else x


RECURRENT = "this form; ask for form='recurrent', backend='torch', which has them for every recurrence"


def refuse_second_order(where: str = RECURRENT) -> None:
    """For backward passes that cannot be differentiated again: RuntimeError when create_graph=True asks for it.

    where: what second derivatives do not pass through, and what has them instead.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivatives (create_graph=True) do not pass through {where}")


@dataclass(frozen=True)
class Transition:
    """A structured linear operator on states S [..., N, P].

    decay: [..., n, p] with n in {1, N} and p in {1, P}.
    left, right: [..., R, N, p] or both None (no correction); the operator adds Σ_r left_r (right_rᵀ S).
    """

    decay: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    @property
    def rank(self) -> int:
        """Number of rank-one corrections R."""
        return 0 if self.left is None else self.left.shape[-3]

    @property
    def is_elementwise(self) -> bool:
        """True when A S is decay ⊙ S."""
        return self.left is None

    @property
    def is_per_channel(self) -> bool:
        """True when channels (Value axis) see different operators."""
        return self.decay.shape[-1] > 1 or (self.left is not None and self.left.shape[-1] > 1)

    def row(self, row: int) -> Transition:
        """The operator of one row, of those with leading axes [B, rows, H]; a single row stands for all."""

        def at(x: Tensor) -> Tensor:
            return x[:, row if x.shape[1] > 1 else 0]

        if self.left is None or self.right is None:
            return Transition(at(self.decay))
        return Transition(at(self.decay), at(self.left), at(self.right))

    def apply(self, state: Tensor) -> Tensor:
        """A S. state: [..., N, P] -> [..., N, P]."""
        out = self.decay * state
        if self.left is None or self.right is None:
            return out
        return out + _spread(self.left, _project(self.right, state))

    def apply_transpose(self, cotangent: Tensor) -> Tensor:
        """Aᵀ G, per channel. cotangent: [..., N, P] -> [..., N, P]."""
        return Transition(self.decay, self.right, self.left).apply(cotangent)

    def compose(self, earlier: Transition) -> Transition:
        """The operator self @ earlier (earlier acts first); ranks add."""
        decay = self.decay * earlier.decay
        if self.left is None or self.right is None:
            if earlier.left is None:
                return Transition(decay)
            return Transition(decay, self.decay.unsqueeze(-3) * earlier.left, earlier.right)
        pushed = _columns(earlier, self.right)
        if earlier.left is None or earlier.right is None:
            return Transition(decay, self.left, pushed)
        first = self.decay.unsqueeze(-3) * earlier.left
        return Transition(decay, _stack(first, self.left), _stack(earlier.right, pushed))

    def to_dense(self, n: int) -> Tensor:
        """The matrix of A, [..., p, N, N] with p = P if channels differ, else 1. n: size of the Key axis."""
        decay = self.decay.expand(*self.decay.shape[:-2], n, self.decay.shape[-1])
        dense = torch.diag_embed(decay.movedim(-1, -2))
        if self.left is None or self.right is None:
            return dense
        return dense + torch.einsum("...rnp,...rmp->...pnm", *torch.broadcast_tensors(self.left, self.right))

    def bilinear_derivative(self, cotangent: Tensor, state: Tensor) -> Transition:
        """Gradient of ⟨G, A S⟩ in (decay, left, right), each in the shape of its argument.

        cotangent G, state S: [..., N, P]. It is dA_t of the adjoint recurrence, with S = S_{t-1}.
        """
        decay = reduce_to(cotangent * state, self.decay.shape)
        if self.left is None or self.right is None:
            return Transition(decay)
        written = _project(self.right, state).unsqueeze(-2)  # [..., R, 1, P]
        erased = _project(self.left, cotangent).unsqueeze(-2)
        left = reduce_to(cotangent.unsqueeze(-3) * written, self.left.shape)
        right = reduce_to(state.unsqueeze(-3) * erased, self.right.shape)
        return Transition(decay, left, right)


def _project(vectors: Tensor, state: Tensor) -> Tensor:
    """vectors_rᵀ S: [..., R, N, p] x [..., N, P] -> [..., R, P]."""
    if vectors.shape[-1] == 1:
        return vectors.squeeze(-1) @ state
    return (vectors * state.unsqueeze(-3)).sum(-2)


def _spread(vectors: Tensor, values: Tensor) -> Tensor:
    """Σ_r vectors_r values_rᵀ: [..., R, N, p] x [..., R, P] -> [..., N, P]."""
    if vectors.shape[-1] == 1:
        return vectors.squeeze(-1).transpose(-1, -2) @ values
    return (vectors * values.unsqueeze(-2)).sum(-3)


def _columns(operator: Transition, vectors: Tensor) -> Tensor:
    """Aᵀ right_r for each r: the vectors [..., R, N, p] are put where states have their channels."""
    columns = vectors.movedim(-3, -1)  # [..., N, p, R]
    wide = 1 if operator.left is None else operator.left.shape[-1]
    channels = max(columns.shape[-2], operator.decay.shape[-1], wide)
    columns = columns.expand(*columns.shape[:-2], channels, columns.shape[-1]).movedim(-1, 0)
    return operator.apply_transpose(columns).movedim(0, -3)


def _stack(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate along R, broadcasting the channel axis."""
    channels = max(a.shape[-1], b.shape[-1])
    return torch.cat([x.expand(*x.shape[:-1], channels) for x in (a, b)], dim=-3)
