"""`Problem`: one linear recurrence as tensors, the input of every form in torch.

S_r = A_r S_{r-1} + Σ_g key_g value_gᵀ over rows r = 0 … T·M-1, where row t·M + m is micro-step m of token t, and
y_t = C_tᵀ S + D_t read after the last (or before the first) micro-step of token t. Leading axes are [B, rows, H].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import Transition


@dataclass(frozen=True)
class Problem:
    """Tensors of one recurrence; all float32 or all float64.

    decay: [B, rows, H, n, p]; its logarithm when `log` is true. n in {1, N}, p in {1, P}.
    The scan and the chunks without corrections also take a key or a readout with one head for all.
    factor: a factor of the logarithm, for the scan alone, which multiplies by it one segment at a time.
    left, right: [B, rows, H, R, N, p] corrections, or None.
    tie: [B, rows, H, R]: the delta family, where left_r = tie_r · key_r is not stored; right is None if it is key too.
    cross: [B, rows, H, N, p], the factor of the other entry of each pair (dsf.kernels.operators), or None.
    key, value: [B, rows, H, G, n], [B, rows, H, G, P]: injection Σ_g key_g value_gᵀ (n = N, or 1 without a Key axis).
    dense: [B, rows, H, N, P] instead of key and value when the injection does not factor.
    readout: [B, T, H, n, p]: y[p] = Σ_n C[n, p] S[n, p]; [B, T, H, 1, P] where `across`: y[n] = Σ_p C[p] S[n, p].
    skip: [B, T, H, P] or None.
    """

    decay: Tensor
    log: bool
    readout: Tensor
    n: int
    p: int
    key: Tensor | None = None
    value: Tensor | None = None
    dense: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    tie: Tensor | None = None
    cross: Tensor | None = None
    skip: Tensor | None = None
    factor: Tensor | None = None
    before: bool = False
    micro: int = 1
    across: bool = False

    @property
    def tokens(self) -> int:
        """T."""
        return self.readout.shape[1]

    @property
    def rank(self) -> int:
        """Number of corrections R a row."""
        vectors = self.right if self.right is not None else self.tie
        return 0 if vectors is None else vectors.shape[3]

    @property
    def leading(self) -> tuple[int, int]:
        """(B, H)."""
        written = self.value if self.dense is None else self.dense
        assert written is not None
        key = written if self.key is None else self.key
        return self.readout.shape[0], max(self.readout.shape[2], written.shape[2], key.shape[2])

    def transition(self) -> Transition:
        """The structured A of every row, leading axes [B, rows, H]."""
        decay = self.decay.exp() if self.log else self.decay
        if not self.rank:
            return Transition(decay, cross=self.cross)
        return Transition(decay, self.full_left(), self.full_right(), self.cross)

    def transitions(self) -> list[Transition]:
        """The A of every row, one by one, leading axes [B, H]."""
        return self.transition().each_row(self.tokens * self.micro)

    def full_left(self) -> Tensor:
        """left, also when it is tied to key: [B, rows, H, R, N, p]."""
        if self.tie is None:
            assert self.left is not None
            return self.left
        assert self.key is not None
        return (self.tie.unsqueeze(-1) * self.key).unsqueeze(-1)

    def full_right(self) -> Tensor:
        """right, also when it is key: [B, rows, H, R, N, p]."""
        if self.right is not None:
            return self.right
        assert self.key is not None
        return self.key.unsqueeze(-1)

    def injection(self) -> Tensor:
        """B of every row, dense: [B, rows, H, N, P]."""
        if self.dense is not None:
            return self.dense
        assert self.key is not None and self.value is not None
        if self.key.shape[3] == 1:
            return self.key.transpose(-1, -2) * self.value
        return self.key.transpose(-1, -2) @ self.value

    def factored(self) -> Problem:
        """The Problem with key and value: a dense injection becomes N unit keys with its rows as values."""
        if self.dense is None:
            return self
        eye = torch.eye(self.n, dtype=self.dense.dtype, device=self.dense.device)
        return replace(self, key=eye.expand(*self.dense.shape[:3], -1, -1), value=self.dense, dense=None)

    def zero_state(self) -> Tensor:
        """S_0 = 0: [B, H, N, P]."""
        batch, heads = self.leading
        return self.readout.new_zeros(batch, heads, self.n, self.p)

    def read(self, states: Tensor) -> Tensor:
        """C S + D for states [B, T, H, N, P] -> [B, T, H, P], or N where it is read across."""
        return self.add_skip(self.seen(self.readout, states))

    def seen(self, readout: Tensor, states: Tensor) -> Tensor:
        """The product of a readout [..., n, p] with states [..., N, P]: [..., P], or [..., N] if `across`."""
        return (states @ readout.transpose(-1, -2)).squeeze(-1) if self.across else read(readout, states)

    def add_skip(self, y: Tensor) -> Tensor:
        """y + D."""
        return y if self.skip is None else y + self.skip

    def transposed(self) -> Problem:
        """The recurrence of Sᵀ, keys and values exchanged; its readout [B, T, H, 1, P] is read along the other axis."""
        return replace(
            self, n=self.p, p=self.n, decay=self.decay.transpose(-1, -2), readout=self.readout.transpose(-1, -2),
            key=self.value, value=self.key, across=not self.across,
        )  # fmt: skip

    def fold_channels(self) -> Problem:
        """The same recurrence with each channel a head of its own (P = 1), for operators that differ by channel."""
        heads = self.leading[1]

        def fold(x: Tensor | None, has_channels: bool = True) -> Any:
            if x is None:
                return None
            if not has_channels:
                x = x.unsqueeze(-1)
            x = x.expand(*x.shape[:2], heads, *x.shape[3:-1], self.p).movedim(-1, 3)  # [B, rows, H, P, ...]
            x = x.flatten(2, 3)
            return x.unsqueeze(-1) if has_channels else x

        return replace(
            self,
            p=1,
            decay=fold(self.decay),
            readout=fold(self.readout),
            key=fold(self.key, False),
            value=fold(self.value),
            dense=fold(self.dense),
            left=fold(self.left),
            right=fold(self.right),
            tie=fold(self.tie, False),
            cross=fold(self.cross),
            skip=fold(self.skip),
        )


def read(readout: Tensor, states: Tensor) -> Tensor:
    """Σ_n C[n, p] S[n, p]: readout [..., n, p], states [..., N, P] -> [..., P]."""
    if readout.shape[-1] == 1 and readout.shape[-2] == states.shape[-2]:
        return (readout.transpose(-1, -2) @ states).squeeze(-2)
    return (readout * states).sum(-2)


def fold_state(state: Tensor) -> Tensor:
    """[B, H, N, P] -> [B, H·P, N, 1], as Problem.fold_channels orders heads."""
    return state.movedim(-1, 2).flatten(1, 2).unsqueeze(-1)


def unfold_state(state: Tensor, p: int) -> Tensor:
    """Inverse of fold_state."""
    return state.squeeze(-1).unflatten(1, (-1, p)).movedim(2, -1)


def unfold_output(y: Tensor, p: int) -> Tensor:
    """[B, T, H·P, 1] -> [B, T, H, P]."""
    return y.squeeze(-1).unflatten(2, (-1, p))
