"""One rank's part of one call: the tensors that exchanges read, the main pass, final states and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import is_cast
from dsf.parallel.collectives import tied
from dsf.parallel.layout import Fragment, Layout, Packing, Piece, plain_fragments, rows_of_slots, tokens_of_rows
from dsf.parallel.summary import Summary, hollow


@dataclass
class Rank:
    """One rank's part of one call.

    packing: of packed sequences, or None. initial: the state of the global sequences, or None. In the backward pass
    also: starts, the slots' initial states; dy; dfinal, the gradient of the global final states, summed over ranks, or
    None.
    """

    rank: int
    layout: Layout
    summary: Summary
    packing: Packing | None
    initial: Tensor | None
    starts: list[Tensor] = field(default_factory=list)
    dy: Tensor | None = None
    dfinal: Tensor | None = None

    def __post_init__(self) -> None:
        self.frame = self.summary.frame
        tokens = self.summary.sizes.tokens
        if self.packing is None:
            self.fresh: Several[bool] = [n == 0 for n in range(self.layout.fragments)]
            kept = plain_fragments if type(tokens) is int else plain_fragments.__wrapped__  # traced: uncached
            self.parts: Several[Fragment] = kept(self.layout, self.rank, tokens)
            self.pieces: Several[Piece] = ()
        else:
            self.fresh = [self.packing.is_fresh(n) for n in range(self.layout.fragments)]
            self.parts = [self.packing.fragment(self.rank, s) for s in range(self.layout.slots)]
            self.pieces = self.packing.pieces(self.rank)

    def hollow(self) -> Rank:
        """This rank without tensors: what later calls of the kind, and the backward pass, begin with."""
        return self._again(hollow(self.summary), None)

    def begun(self, tensors: Several[Tensor], initial: Tensor | None = None) -> Rank:
        """A rank of another call of the kind, with these inputs, in the order of the declaration."""
        return self._again(self.summary_of(tensors), initial)

    def summary_of(self, tensors: Several[Tensor]) -> Summary:
        """The summary of a call with these inputs."""
        bound = self.summary.bound
        given = dict(zip(bound.tensors, tensors, strict=True))
        return replace(self.summary, bound=replace(bound, tensors=given))

    def _again(self, summary: Summary, initial: Tensor | None) -> Rank:
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__, summary=summary, initial=initial, starts=[], dy=None, dfinal=None)
        return found

    # -- what an exchange reads

    @property
    def complete(self) -> bool:
        """Whether F and C are at hand of all fragments: here they are computed where another rank needs them."""
        return False

    @property
    def mapped(self) -> bool:
        """Whether M is at hand of all fragments."""
        return False

    def fragment(self, slot: int) -> Fragment:
        """The fragment in a slot."""
        return self.parts[slot]

    def empty(self) -> Tensor:
        """A state before anything was written [B, H, N, columns]."""
        return self.summary.empty(self.summary.sizes.batch)

    def nothing(self) -> Tensor:
        """A gradient of zero [B, H, N, plain], tied to dy: a traced graph would move it out of the backward pass."""
        zero = self.empty()[..., : self.frame.plain]
        return zero if self.dy is None else tied(zero, [self.dy])

    def _first(self, sequence: int) -> Tensor | None:
        """The given initial state of a sequence, or None."""
        if self.initial is None or self.packing is None:
            return self.initial
        return self.initial[sequence : sequence + 1]

    def written(self, slot: int) -> Tensor:
        """F; where the sequence begins in the fragment, with its initial state already applied."""
        part = self.parts[slot]
        first = self._first(part.leaving) if part.fresh else None
        return self.summary.written(part.end - part.leaves, part.end, first)

    def move(self, slot: int) -> Tensor | None:
        """M."""
        return self.summary.move(self.parts[slot].begin, self.parts[slot].end)

    def through(self, slot: int, state: Tensor) -> Tensor:
        """The fragment's final state from its initial state, by running the recurrence."""
        part = self.parts[slot]
        return self.summary.written(part.end - part.leaves, part.end, state)

    def adjoint(self, slot: int, last: Tensor | None) -> Tensor:
        """C; with `last`, the gradient of the final state, the whole gradient of the fragment's initial state."""
        part, plain = self.parts[slot], self.frame.plain
        ends = not part.goes_on or part.fresh
        if ends and self.dfinal is not None:
            rows = slice(None) if self.packing is None else slice(part.entering, part.entering + 1)
            last = self.dfinal[rows, ..., :plain].contiguous()
        assert self.dy is not None
        end = part.begin + part.enters
        return self.summary.adjoint(part.begin, end, self.starts[slot], self.dy[:, part.begin : end], last)

    # -- the main pass

    def main(self, starts: Several[Tensor]) -> tuple[Tensor, Tensor]:
        """y of this rank's tokens, and the final state of each of its rows: B times slots, or pieces of sequences."""
        summary, sizes = self.summary, self.summary.sizes
        if self.packing is not None:
            return self._main_packed(starts)
        begin = self._row_state(starts)
        if not sizes.tokens:
            y = torch.zeros(sizes.batch, 0, sizes.heads, sizes.p, dtype=summary.bound.dtype, device=begin.device)
            return y, begin
        rows: dict[str, Any] = {n: self._rows(n, x) for n, x in summary.bound.tensors.items()}
        alone = self.parts[0].number == 0 and self.initial is None and self.layout.slots == 1
        state = None if alone and type(begin) is Tensor else begin  # in a traced graph the exchange must be used
        how: dict[str, Any] = {"form": summary.form, "backend": summary.backend}
        y, last = summary.recurrence(**rows, initial_state=state, return_state=True, **how)
        return tokens_of_rows(y, self.layout.slots), last

    def _rows(self, name: str, x: Tensor) -> Tensor:
        """[B, slots L, ...] -> [B slots, L, ...]; Params unchanged."""
        timed = {i.name for i in self.summary.recurrence.spec.inputs if i.kind.time}
        return rows_of_slots(x, self.layout.slots) if name in timed else x

    def _row_state(self, starts: Several[Tensor]) -> Tensor:
        """The initial state of every row [B slots, H, N, columns]."""
        found = []
        for part, start in zip(self.parts, starts, strict=True):
            found.append(self._begun(start) if part.number == 0 else start)
        return found[0] if len(found) == 1 else torch.stack(found, dim=1).flatten(0, 1)

    def _begun(self, start: Tensor) -> Tensor:
        """The call's initial state; a traced graph adds start, whose state is zero, so that it keeps the exchange."""
        if self.initial is None:
            return start
        (plain, gain), (nothing, _) = self.frame.split(self.initial), self.frame.split(start)
        return torch.cat([plain + nothing, gain], dim=-1) if type(start) is not Tensor else self.initial

    def _main_packed(self, starts: Several[Tensor]) -> tuple[Tensor, Tensor]:
        summary, sizes = self.summary, self.summary.sizes
        none = self.empty()
        rows = []
        for piece in self.pieces:
            first = starts[piece.slot] if piece.continued else self._first(piece.sequence)
            rows.append(none if first is None else first)
        spare = [none if (x := self._first(s)) is None else x for s in self._without_tokens()]
        if not self.pieces:
            y = torch.zeros(1, 0, sizes.heads, sizes.p, dtype=summary.bound.dtype, device=none.device)
            return y, torch.cat(spare) if spare else none[:0]
        assert self.packing is not None
        cu_seqlens = self.packing.own(self.rank)
        how: dict[str, Any] = {"form": summary.form, "backend": summary.backend}
        call: dict[str, Any] = {**summary.bound.tensors, "initial_state": torch.cat(rows), "return_state": True}
        y, last = summary.recurrence(**call, cu_seqlens=cu_seqlens, **how)
        return y, torch.cat([last, *spare])

    def _without_tokens(self) -> list[int]:
        assert self.packing is not None
        return self.packing.without_tokens() if self.rank == 0 else []

    # -- final states and their gradients

    def ended(self, last: Tensor) -> Tensor:
        """The final states of the sequences that end here, zeros for the others: [B or sequences, H, N, columns]."""
        if self.packing is None:
            rows = last.unflatten(0, (-1, self.layout.slots))
            for slot, part in enumerate(self.parts):
                if part.number == self.layout.fragments - 1:
                    return rows[:, slot].clone()
            return torch.zeros_like(rows[:, 0])
        whole = last.new_zeros(self.packing.sequences, *last.shape[1:])
        keep = [row for row, piece in enumerate(self.pieces) if not piece.goes_on]
        keep += range(len(self.pieces), last.shape[0])
        if not keep:
            return whole
        places = torch.tensor(self.packing.ends(self.rank), device=last.device)
        return whole.index_copy(0, places, last[keep])

    def of_rows(self, g: Several[Tensor], after: Several[Tensor], gain: Tensor) -> Tensor:
        """The gradient of the second result of `main`, the rows' final states `last`.

        g: the gradients of the fragments' final states, in the scale m = `after` of the exchange. gain: m of `last`,
        the scale of the result; neither is read where there is no running maximum.
        """
        found = []
        if self.packing is None:
            for slot, part in enumerate(self.parts):
                own = gain[slot :: self.layout.slots] if self.frame.gain else gain
                found.append(self._row_gradient(part.goes_on, slot, g, after, own, self.dfinal))
            return found[0] if len(found) == 1 else torch.stack(found, dim=1).flatten(0, 1)
        for row, piece in enumerate(self.pieces):
            final = None if self.dfinal is None else self.dfinal[piece.sequence : piece.sequence + 1]
            own = gain[row : row + 1]
            found.append(self._row_gradient(piece.goes_on, piece.slot, g, after, own, final))
        for s in self._without_tokens():
            found.append(torch.zeros_like(self.empty()) if self.dfinal is None else self.dfinal[s : s + 1])
        return torch.cat(found) if found else self.empty()[:0]

    def _row_gradient(
        self, goes_on: bool, slot: int, g: Several[Tensor], after: Several[Tensor], own: Tensor,
        final: Tensor | None,
    ) -> Tensor:  # fmt: skip
        frame = self.frame
        if not goes_on:
            if self.packing is None:  # zeros from the exchange, so that a traced graph keeps it
                nothing = torch.cat([g[slot], torch.zeros_like(own)], dim=-1) if frame.gain else g[slot]
            else:
                nothing = torch.zeros_like(self.empty())
            return nothing if final is None else nothing + final
        found = g[slot] * frame.wide((own - after[slot]).exp()) if frame.gain else g[slot]
        return torch.cat([found, torch.zeros_like(own)], dim=-1) if frame.gain else found


def differentiable(leaves: Several[Tensor]) -> bool:
    """Whether gradients are on and any of the tensors requires one."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in leaves)


def no_autocast(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context that turns autocast off on a tensor's device."""
    device = like.device.type
    if is_cast(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
