"""Shards of a sequence as affine maps of the state: S -> M S + F. Composing them, applying them, and their transposes.

For every recurrence the effect of a shard on its entering state is affine: M is the product of its transitions, F the
final state from a zero state. States with a running maximum are stored as pairs (e^{-m} S, m): the columns of S and of
the normaliser, then m. m is only a scale (a gauge), so one state may be stored in different ways. Here
m = max(m_F, m_in + log |M|) for diagonal M, as in the forms, and max(m_F, m_in) for dense M, whose norm is about one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

EMPTY = -1e30  # running maximum before anything was written


@dataclass(frozen=True)
class Frame:
    """Shapes of one head's state and of its maps.

    n: rows of the state; plain: columns of S and of the normaliser; gain: columns of the running maximum after them.
    kind: "identity" (M = I); "scale": M multiplies entries, [rows, columns], 1 along axes where it is constant (scalar
    decay 1 x 1, key N x 1, value 1 x P, Hadamard N x P, vector 1 x P); "dense": one [N, N] a head; "channel": an [N, N]
    for every channel, which is never stored. With a running maximum, a "scale" is stored as log |M| and, if signed, the
    sign of M after it: [2, rows, columns].
    """

    n: int
    plain: int
    gain: int = 0
    kind: str = "identity"
    rows: int = 1
    columns: int = 1
    signed: bool = False

    @property
    def total(self) -> int:
        """The number of columns of a stored state."""
        return self.plain + self.gain

    @functools.cached_property
    def move_shape(self) -> tuple[int, ...]:
        """Shape of one head's stored M; (0,) where M is not stored."""
        if self.kind == "scale":
            return (2, self.rows, self.columns) if self.gain and self.signed else (self.rows, self.columns)
        return (self.n, self.n) if self.kind == "dense" else (0,)

    @property
    def state_numbers(self) -> int:
        """Numbers of one head's stored state."""
        return self.n * self.total

    @functools.cached_property
    def move_numbers(self) -> int:
        """Numbers of one head's M."""
        return int(torch.Size(self.move_shape).numel())

    @functools.cached_property
    def without_moves(self) -> Frame:
        """The Frame for maps of which only F is sent."""
        return replace(self, kind="identity")

    # -- states

    def empty(self, like: Tensor, *lead: int) -> Tensor:
        """The state before the first token: [*lead, N, columns]."""
        state = like.new_zeros(*lead, self.n, self.total)
        if self.gain:
            state[..., self.plain :] = EMPTY
        return state

    def split(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A stored state [..., N, total] as (S and the normaliser's columns, m)."""
        plain, gain = state.split([self.plain, self.gain], dim=-1)
        return plain, gain

    def _even(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A stored state rescaled so that its rows share m, where M mixes rows."""
        plain, gain = self.split(state)
        if self.kind != "dense":
            return plain, gain
        top = gain.amax(-2, keepdim=True).expand_as(gain)
        return plain * self.wide((gain - top).exp()), top

    def gain_of(self, state: Tensor) -> Tensor:
        """m of a stored state."""
        return state[..., self.plain :]

    def wide(self, x: Tensor) -> Tensor:
        """Columns of m, or of M, repeated for num and den."""
        return torch.cat([x, x], dim=-1) if 1 < x.shape[-1] < self.plain else x

    # -- maps

    def neutral(self, like: Tensor, *lead: int) -> Tensor | None:
        """M of a shard without tokens; None where M is not stored."""
        if self.kind == "dense":
            return torch.eye(self.n, dtype=like.dtype, device=like.device).expand(*lead, -1, -1)
        if self.kind != "scale":
            return None
        if not self.gain:
            return like.new_ones(*lead, *self.move_shape)
        log = like.new_zeros(*lead, self.rows, self.columns)
        return torch.stack([log, torch.ones_like(log)], dim=-3) if self.signed else log

    def logarithm(self, move: Tensor) -> tuple[Tensor, Tensor | None]:
        """(log |M|, the sign or None for positive ones) of a stored "scale" of a system with a running maximum."""
        if not self.signed:
            return move, None
        log, sign = move.unbind(-3)
        return log, self.wide(sign)

    def into(self, move: Tensor | None, written: Tensor, state: Tensor) -> Tensor:
        """M S + F of stored states [..., N, total]. written: F as stored."""
        if not self.gain:
            if self.kind == "scale" and move is not None:
                return torch.addcmul(written, state, self.wide(move))
            return self.act(move, state) + written
        (plain, gain), (added, own) = self._even(state), self._even(written)
        if self.kind == "scale":  # exponents are added first, since M alone may underflow
            assert move is not None
            log, sign = self.logarithm(move)
            carried = gain + log
            after = torch.maximum(own, carried)
            kept = self.signed_by(sign, plain) * self.wide((carried - after).exp())
        else:
            after = torch.maximum(own, gain)
            kept = self.act(move, plain) * self.wide((gain - after).exp())
        return torch.cat([torch.addcmul(kept, added, self.wide((own - after).exp())), after], dim=-1)

    @staticmethod
    def signed_by(sign: Tensor | None, x: Tensor) -> Tensor:
        """x times the sign, if any."""
        return x if sign is None else x * sign

    def act(self, move: Tensor | None, state: Tensor) -> Tensor:
        """M S on plain columns, M not in logarithms."""
        if move is None:
            return state
        return exact_product(move, state) if self.kind == "dense" else state * self.wide(move)

    def back(self, move: Tensor | None, g: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Mᵀ G: from the gradient of the stored state after a shard to that of the one before it; plain columns.

        before, after: m of those two states (no columns where there is no running maximum).
        """
        if self.kind == "dense":
            assert move is not None
            g = exact_product(move.transpose(-1, -2), g)
        elif self.kind == "scale":
            assert move is not None
            if self.gain:
                log, sign = self.logarithm(move)
                return self.signed_by(sign, g) * self.wide((log + before - after).exp())
            g = g * self.wide(move)
        return g * self.wide((before - after).exp()) if self.gain else g

    def after(self, later: Tensor | None, earlier: Tensor | None) -> Tensor | None:
        """M of two shards, `earlier` before `later`."""
        if later is None or earlier is None:
            return None
        if self.kind == "dense":
            return exact_product(later, earlier)
        if not self.gain:
            return later * earlier
        if not self.signed:
            return later + earlier
        (log, sign), (log_1, sign_1) = later.unbind(-3), earlier.unbind(-3)
        return torch.stack([log + log_1, sign * sign_1], dim=-3)

    # -- as rows of numbers

    def pack(self, written: Tensor, move: Tensor | None) -> Tensor:
        """F [..., N, total] and M as one row a head: [..., numbers]."""
        flat = written.flatten(-2)
        if move is None or not self.move_numbers:
            return flat
        return torch.cat([flat, move.flatten(-len(self.move_shape))], dim=-1)

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inverse of pack."""
        written = row[..., : self.state_numbers].unflatten(-1, (self.n, self.total))
        if not self.move_numbers:
            return written, None
        return written, row[..., self.state_numbers :].unflatten(-1, self.move_shape)


def in_tf32(x: Tensor) -> bool:
    """Whether torch may multiply such matrices in tf32, which has 10 bits."""
    return x.is_cuda and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of float32 maps, which are folded without losing digits also where torch may multiply in tf32."""
    return (a.double() @ b.double()).float() if in_tf32(a) else a @ b


Moves = Sequence[Tensor | None]


def entered(
    frame: Frame, written: Sequence[Tensor], moves: Moves, fresh: Sequence[bool], first: Tensor
) -> list[Tensor]:
    """The entering state of every shard, and then the final state of the last one.

    first: the entering state of the first shard. fresh: shards whose last sequence also begins in them, so that their
    final states do not depend on the entering ones.
    """
    states = [first]
    for f, m, new in zip(written, moves, fresh, strict=True):
        states.append(f if new else frame.into(m, f, states[-1]))
    return states


def left(
    frame: Frame, own: Sequence[Tensor], moves: Moves, fresh: Sequence[bool], gains: Sequence[Tensor], last: Tensor
) -> list[Tensor]:
    """The gradient of the first shard's entering state, and then those of every shard's final state.

    own: the gradient of each shard's entering state through its own outputs. gains: m of the states between shards,
    first and last included. last: the gradient of the last shard's final state. Plain columns.
    """
    found = [last]
    for j in range(len(own) - 1, -1, -1):
        before = own[j] if fresh[j] else own[j] + frame.back(moves[j], found[0], gains[j], gains[j + 1])
        found.insert(0, before)
    return found


def composed(
    frame: Frame, written: Sequence[Tensor], moves: Moves, fresh: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    """(F, M) of two neighbouring shards together. M is meaningless where one of them is fresh."""
    f, m = written[0], moves[0]
    for f_1, m_1, new in zip(written[1:], moves[1:], fresh[1:], strict=True):
        f = f_1 if new else frame.into(m_1, f_1, f)
        m = frame.after(m_1, m)
    return f, m
