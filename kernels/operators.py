"""The operator algebra on tensors: A = decay ⊙ · + Σ_r left_r right_rᵀ.

Every transition of the library is one `Transition`: a decay that scales the state, plus R rank-one corrections.
Its kind is known from its shapes alone (n, p are the sizes along the Key and the Value axis):

    decay [..., 1, 1]  identity, constant or scalar      decay [..., N, 1]  key-diagonal
    decay [..., 1, P]  value-diagonal                    decay [..., N, P]  Hadamard
    left, right [..., R, N, 1]  corrections shared by the channels; [..., R, N, P] one operator a channel

The laws (tests/test_operators.py states each as a line of code): apply = dense product, apply_transpose is its
adjoint, compose is the operator product, bilinear_derivative is the gradient of ⟨G, A S⟩.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

# Asked once: torch.compile cannot trace the question before torch 2.13.
CASTING = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def is_cast(kind: str) -> bool:
    """Whether autocast is on for a type of device."""
    return kind in CASTING and torch.is_autocast_enabled(kind)


def reduce_to(x: Tensor, shape: torch.Size) -> Tensor:
    """Sum x over every axis along which `shape` has size one (the adjoint of broadcasting)."""
    axes = [i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1]
    return x.sum(axes, keepdim=True) if axes else x


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which these are broadcast, which must be possible. Not torch.broadcast_shapes: it takes 0.1 ms, and
    the first time it imports sympy, which takes longer than all else in a first call."""
    length = max(map(len, shapes))
    whole = ((1,) * (length - len(shape)) + tuple(shape) for shape in shapes)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*whole, strict=True))


RECURRENT = (
    "this form; ask for form='recurrent', backend='torch', which has them for every recurrence, or take both "
    "derivatives by torch.func, which layers, too, then compute in that form"
)


def refuse_second_order(where: str = RECURRENT) -> None:
    """Raise RuntimeError in a backward pass with create_graph=True that has no second derivatives.

    where: for the message, what lacks second derivatives, and what has them.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivatives (create_graph=True) do not pass through {where}")


def listed(numbers: Tensor) -> list[int]:
    """The integers of a tensor [n]. Inside torch.func, torch 2.8 reads them one at a time alone."""
    return [int(n) for n in numbers] if torch._C._are_functorch_transforms_active() else numbers.tolist()


def returned(x: Tensor) -> Tensor:
    """What an autograd.Function returns where its last operator there made no new tensor: it wrote in place, or
    converted x to the type that x had. What torch 2.11's compiler follows has gradients of zero then; elsewhere this is
    x itself."""
    return x.view_as(x) if torch.compiler.is_dynamo_compiling() else x


def check_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise ValueError for what does not fit a short convolution of x [B, T, C], beside which kernels would read."""
    (rows, _, channels), taps = x.shape, weight.shape[-1]
    sequences = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    fits = weight.shape == (channels, taps) and (bias is None or bias.shape == (channels,))
    fits = fits and (cu_seqlens is None or rows == 1)
    if not fits or (state is not None and state.shape != (sequences, channels, taps - 1)):
        given = [None if y is None else list(y.shape) for y in (x, weight, bias, state, cu_seqlens)]
        raise ValueError(
            f"a short convolution of x, weight, bias, state, cu_seqlens of shapes {given}: sizes do not fit; expected "
            "[B, T, C], [C, K], [C], [B or S, C, K - 1], and [S + 1] with B = 1"
        )


@dataclass(frozen=True)
class Transition:
    """A structured linear operator on states S [..., N, P].

    decay: [..., n, p] with n in {1, N} and p in {1, P}.
    left, right: [..., R, N, p] or both None (no correction); the operator adds Σ_r left_r (right_rᵀ S).
    cross: [..., N, p] or None; the operator adds cross ⊙ (S with the entries of each pair (2i, 2i + 1) exchanged). A
    turn by θ is a decay of cos θ with a cross of (-sin θ, sin θ).
    """

    decay: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    cross: Tensor | None = None

    @property
    def rank(self) -> int:
        """Number of rank-one corrections R."""
        return 0 if self.left is None else self.left.shape[-3]

    @property
    def is_elementwise(self) -> bool:
        """True when A S is decay ⊙ S."""
        return self.left is None and self.cross is None

    @property
    def is_per_channel(self) -> bool:
        """True when channels (Value axis) see different operators."""
        parts = (self.decay, self.left, self.cross)
        return any(x is not None and x.shape[-1] > 1 for x in parts)

    def rows(self, begin: int, count: int) -> Transition:
        """The operators of `count` rows from `begin` on, for leading axes [B, rows, H]; a single row serves all."""
        return self._each(lambda x: x[:, begin : begin + count] if x.shape[1] > 1 else x)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Transition:
        """The operator with `change` applied to every tensor."""
        left, right, cross = (None if x is None else change(x) for x in (self.left, self.right, self.cross))
        return Transition(change(self.decay), left, right, cross)

    def merged(self, batch: int, heads: int) -> Transition:
        """The operators with leading axes [B|1, rows, H|1] as [B·H, rows]."""
        return self._each(lambda x: merged(x, batch, heads))

    def each_row(self, rows: int) -> list[Transition]:
        """The operators of all rows, for leading axes [B, rows, ...]; a single row serves all.

        By unbind, not by indexing: its backward is one stack, not one zero tensor a row.
        """
        none = (None,) * rows
        parts = [
            none if x is None else x.expand(x.shape[0], rows, *x.shape[2:]).unbind(1)
            for x in (self.decay, self.left, self.right, self.cross)
        ]
        return [Transition(*part) for part in zip(*parts, strict=True)]

    def apply(self, state: Tensor) -> Tensor:
        """A S. state: [..., N, P] -> [..., N, P]."""
        out = self.decay * state
        if self.cross is not None:
            out = out + self.cross * swap_pairs(state)
        if self.left is None or self.right is None:
            return out
        return out + _spread(self.left, _project(self.right, state))

    def apply_transpose(self, cotangent: Tensor) -> Tensor:
        """Aᵀ G, per channel. cotangent: [..., N, P] -> [..., N, P]."""
        cross = None if self.cross is None else swap_pairs(self.cross)
        return Transition(self.decay, self.right, self.left, cross).apply(cotangent)

    def compose(self, earlier: Transition) -> Transition:
        """The operator self @ earlier (earlier acts first); ranks add."""
        decay, cross = _mixed(self, earlier)
        if self.left is None or self.right is None:
            if earlier.left is None:
                return Transition(decay, cross=cross)
            return Transition(decay, self._moved(earlier.left), earlier.right, cross)
        pushed = _columns(earlier, self.right)
        if earlier.left is None or earlier.right is None:
            return Transition(decay, self.left, pushed, cross)
        return Transition(decay, _stack(self._moved(earlier.left), self.left), _stack(earlier.right, pushed), cross)

    def _moved(self, left: Tensor) -> Tensor:
        """The operator without its corrections applied to each of the vectors [..., R, N, p]."""
        out = self.decay.unsqueeze(-3) * left
        return out if self.cross is None else out + self.cross.unsqueeze(-3) * swap_pairs(left)

    def pair_blocks(self, n: int) -> Tensor:
        """The matrices of an operator without corrections, pair by pair: [..., p, N/2, 2, 2]."""
        p = max(self.decay.shape[-1], 1 if self.cross is None else self.cross.shape[-1])
        cross = torch.zeros_like(self.decay) if self.cross is None else self.cross
        decay, cross = (x.expand(*x.shape[:-2], n, p) for x in (self.decay, cross))
        decay, cross = (rearrange(x, "... (n two) p -> ... p n two", two=2) for x in (decay, cross))
        (a, d), (b, c) = decay.unbind(-1), cross.unbind(-1)
        rows = [torch.stack(torch.broadcast_tensors(*row), dim=-1) for row in ((a, b), (c, d))]
        return torch.stack(rows, dim=-2)

    def to_dense(self, n: int) -> Tensor:
        """The matrix of A, [..., p, N, N] with p = P if channels differ, else 1. n: size of the Key axis."""
        decay = self.decay.expand(*self.decay.shape[:-2], n, self.decay.shape[-1])
        dense = torch.diag_embed(decay.movedim(-1, -2))
        if self.cross is not None:
            columns = swap_pairs(torch.eye(n, dtype=dense.dtype, device=dense.device))
            dense = dense + self.cross.movedim(-1, -2).unsqueeze(-1) * columns
        if self.left is None or self.right is None:
            return dense
        return dense + torch.einsum("...rnp,...rmp->...pnm", *torch.broadcast_tensors(self.left, self.right))

    def bilinear_derivative(self, cotangent: Tensor, state: Tensor) -> Transition:
        """Gradient of ⟨G, A S⟩ in (decay, left, right, cross), each in the shape of its argument.

        cotangent G, state S: [..., N, P]. It is dA_t of the adjoint recurrence, with S = S_{t-1}.
        """
        decay = reduce_to(cotangent * state, self.decay.shape)
        cross = None if self.cross is None else reduce_to(cotangent * swap_pairs(state), self.cross.shape)
        if self.left is None or self.right is None:
            return Transition(decay, cross=cross)
        written = _project(self.right, state).unsqueeze(-2)  # [..., R, 1, P]
        erased = _project(self.left, cotangent).unsqueeze(-2)
        left = reduce_to(cotangent.unsqueeze(-3) * written, self.left.shape)
        right = reduce_to(state.unsqueeze(-3) * erased, self.right.shape)
        return Transition(decay, left, right, cross)


def merged(x: Tensor, batch: int, heads: int) -> Tensor:
    """x [B|1, rows, H|1, ...] -> [B·H, rows, ...]: of one leading axis torch multiplies matrices without views."""
    return x.expand(batch, -1, heads, *(-1,) * (x.dim() - 3)).transpose(1, 2).flatten(0, 1)


def swap_pairs(x: Tensor) -> Tensor:
    """x [..., N, p] with entries 2i and 2i + 1 of axis -2 exchanged; unchanged if that axis has size one."""
    return x if x.shape[-2] == 1 else x.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2)


def _mixed(later: Transition, earlier: Transition) -> tuple[Tensor, Tensor | None]:
    """decay and cross of later @ earlier, corrections left out: with σ the exchange, σ x = swap(x) σ and σ σ = I."""
    decay = later.decay * earlier.decay
    if later.cross is None and earlier.cross is None:
        return decay, None
    cross = None
    if earlier.cross is not None:
        cross = later.decay * earlier.cross
    if later.cross is not None:
        moved = later.cross * swap_pairs(earlier.decay)
        cross = moved if cross is None else cross + moved
        if earlier.cross is not None:
            decay = decay + later.cross * swap_pairs(earlier.cross)
    return decay, cross


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
    """Aᵀ right_r for each r; the vectors [..., R, N, p] take the place of a state's channels."""
    columns = vectors.movedim(-3, -1)  # [..., N, p, R]
    wide = [1 if x is None else x.shape[-1] for x in (operator.left, operator.cross)]
    channels = max(columns.shape[-2], operator.decay.shape[-1], *wide)
    columns = columns.expand(*columns.shape[:-2], channels, columns.shape[-1]).movedim(-1, 0)
    return operator.apply_transpose(columns).movedim(0, -3)


def _stack(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate along R, broadcasting the channel axis."""
    channels = max(a.shape[-1], b.shape[-1])
    return torch.cat([x.expand(*x.shape[:-1], channels) for x in (a, b)], dim=-3)
