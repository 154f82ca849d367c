"""The frame of every mixer module: project, short convolution, recurrence, read out; all state is carried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dsf import Recurrence
from dsf.mixers._conv import ShortConv

if TYPE_CHECKING:
    from dsf.parallel import World

Side = tuple[Tensor, ...]


class MixerState(NamedTuple):
    """What a mixer remembers of the past; immutable, one row a sequence.

    conv: the last K-1 inputs of the short convolution, [B, C, K-1], or None without one.
    recurrent: the state of the recurrence, [B, H, N, P'] (a `KVCache` for softmax attention).
    """

    conv: Tensor | None
    recurrent: Any


class Span(NamedTuple):
    """Where sequences begin in one call. fresh: no state was given, so every sequence begins here.

    begins: the places among this rank's tokens at which sequences begin, where the tokens are spread over ranks.
    """

    fresh: bool
    cu_seqlens: Tensor | None
    begins: Tensor | None = None

    def starts(self, like: Tensor) -> Tensor:
        """Mask [B, T] of the first tokens of fresh sequences, in the dtype of like [B, T, ...]."""
        batch, tokens = like.shape[:2]
        mask = like.new_zeros(batch, tokens + 1)  # one spare column: an empty last sequence begins at T
        if not self.fresh:
            return mask[:, :tokens]
        if self.begins is not None:
            first = self.begins
        else:
            first = mask.new_zeros(1, dtype=torch.long) if self.cu_seqlens is None else self.cu_seqlens[:-1]
        return mask.index_fill(1, first.to(like.device, torch.long), 1.0)[:, :tokens]


class Mixer(nn.Module):
    """Base of the zoo's modules. A subclass sets `recurrence` and `dims` and states three maps.

    project(x) -> (u, side): u [B, T, C] passes the short convolution, the tensors of `side` go around it.
    arguments(u, side, span) -> dict: the tensors of the recurrence, by input name.
    readout(y, side) -> [B, T, d_model]: norm, gate and output projection, from y [B, T, H, P].

    Law: running a sequence whole, in pieces, token by token (`step`), or packed with others gives the same
    outputs.
    """

    recurrence: Recurrence
    dims: tuple[int, int, int]  # heads H, key axis N, value axis P of the recurrence
    conv1d: ShortConv | None
    parallel: World | None  # the ranks that share the tokens (dsf.parallel.attach), or None

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = None
        self.parallel = None

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        """x [B, T, d_model] -> (u [B, T, C], side)."""
        return x, ()

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        """Inputs of `recurrence` by name."""
        raise NotImplementedError

    def readout(self, y: Tensor, side: Side) -> Tensor:
        """y [B, T, H, P] -> [B, T, d_model]."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        cu_seqlens: Tensor | None = None,
        parallel: World | None = None,
        **tokens: Tensor,
    ) -> tuple[Tensor, MixerState]:
        """Mix a sequence.

        x: [B, T, d_model]. state: what an earlier call returned, or None at the start of the sequences.
        cu_seqlens: int [S+1], boundaries of sequences packed along T; then B is 1 and the state has S rows.
        parallel: a dsf.parallel.Sequence whose ranks hold the tokens between them (the attached one unless given): x
        are this rank's, states and cu_seqlens those of the global sequences.
        tokens: further per-token tensors, where the mixer's `arguments` names any. Returns (y [B, T,
        d_model], state).
        """
        world = self.parallel if parallel is None else parallel
        inputs, side, conv = self._prepare(x, state, cu_seqlens, tokens, world)
        before = None if state is None else state.recurrent
        y, after = self.recurrence(
            **inputs, initial_state=before, cu_seqlens=cu_seqlens, return_state=True, parallel=world
        )
        return self.readout(y, side), MixerState(conv, after)

    def step(self, x: Tensor, state: MixerState | None = None, **tokens: Tensor) -> tuple[Tensor, MixerState]:
        """Decode one token. x: [B, d_model] -> (y [B, d_model], state)."""
        tokens = {name: value.unsqueeze(1) for name, value in tokens.items()}
        inputs, side, conv = self._prepare(x.unsqueeze(1), state, None, tokens)
        inputs = {
            i.name: inputs[i.name].squeeze(1) if i.kind.time else inputs[i.name] for i in self.recurrence.spec.inputs
        }
        y, after = self.recurrence.step(None if state is None else state.recurrent, **inputs)
        return self.readout(y.unsqueeze(1), side).squeeze(1), MixerState(conv, after)

    def inputs(
        self, x: Tensor, state: MixerState | None = None, cu_seqlens: Tensor | None = None, **tokens: Tensor
    ) -> dict[str, Tensor]:
        """The very tensors `forward` feeds to `recurrence`: `m.recurrence.trajectory(**m.inputs(x))`."""
        return self._prepare(x, state, cu_seqlens, tokens, self.parallel)[0]

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """Numbers one sequence keeps after `context` tokens; those of its convolution too, unless conv=False.

        Only the cache of softmax attention depends on `context`.
        """
        heads, n, p = self.dims
        rows, columns = self.recurrence.state_shape(N=n, P=p)
        window = self.conv1d.state_size if conv and self.conv1d is not None else 0
        return heads * rows * columns + window

    def _prepare(
        self,
        x: Tensor,
        state: MixerState | None,
        cu_seqlens: Tensor | None,
        tokens: dict[str, Tensor],
        world: World | None = None,
    ) -> tuple[dict[str, Any], Side, Tensor | None]:
        """(inputs of the recurrence, side, new state of the convolution)."""
        u, side = self.project(x)
        window, before = None, None if state is None else state.conv
        span = Span(state is None, cu_seqlens)
        if world is not None:
            from dsf.parallel.halo import beginnings, convolve

            span = span._replace(begins=beginnings(world, x.shape[1], cu_seqlens))
            if self.conv1d is not None:
                u, window = convolve(self.conv1d, self.conv1d.kernel_size[0] - 1, u, before, cu_seqlens, world)
        elif self.conv1d is not None:
            u, window = self.conv1d(u, before, cu_seqlens)
        return self.arguments(u, side, span, **tokens), side, window
