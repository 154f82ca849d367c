"""Packed sequences: boundaries for the kernels that take them, batches of similar length for all other forms."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dsf.kernels.operators import listed
from dsf.language.errors import InputError

Made = TypeVar("Made")
_KEPT = 16  # packings that are kept in each cache
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Bounds = tuple[int, ...]
_checked: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
_places: dict[tuple[Callable[..., Any], Bounds, torch.device, int], Any] = {}
_replayed: dict[tuple[Callable[..., Any], Bounds, torch.device], Any] = {}  # for CUDA graphs; never dropped


class Packing:
    """The boundaries of S packed sequences, read once, to be shared by all calls of a model.

    cu_seqlens: [S + 1] integers, a tensor or numbers, that begin with 0, never decrease and end with T.

    Calls and layers take a Packing in place of cu_seqlens. A sequence may be empty: its two boundaries are equal. Where
    the host needs the numbers of a tensor on a GPU, it waits for the GPU: with a Packing once, when it is made; with a
    bare tensor in every such call. A Packing holds a copy, so later writes to cu_seqlens do not change it. A CUDA graph
    replays the boundaries that it was captured with.

    Raises InputError for another tensor and for boundaries that do not begin with 0 or that decrease, TypeError for
    numbers that are not integers.
    """

    __slots__ = ("_backwards", "_bounds", "_placed", "_words")

    def __init__(self, cu_seqlens: Tensor | Iterable[int]) -> None:
        if isinstance(cu_seqlens, Tensor):
            if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in INTEGERS:
                raise InputError(f"Packing: cu_seqlens must be a one-dimensional integer tensor, got {cu_seqlens!r}")
            found = listed(cu_seqlens)
        else:
            found = [operator.index(x) for x in cu_seqlens]
        check_bounds("Packing", found, found[-1] if found else 0)
        self._bounds, self._words = tuple(found), repr(found)
        self._placed: dict[torch.device, Tensor] = {}
        self._backwards: Packing | None = None
        if isinstance(cu_seqlens, Tensor):
            self.on(cu_seqlens.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return Packing, (self.bounds,)

    @property
    def bounds(self) -> Bounds:
        """The boundaries, S + 1 numbers."""
        if torch.compiler.is_dynamo_compiling():  # which makes symbols of numbers that change, but not of words
            return tuple(int(word) for word in self._words[1:-1].split(", "))
        return self._bounds

    def __len__(self) -> int:
        """S, the number of sequences."""
        return len(self.bounds) - 1

    def __repr__(self) -> str:
        return f"Packing({list(self.bounds)})"

    @property
    def backwards(self) -> Packing:
        """The boundaries of the row in reverse order, on the same devices; made once."""
        if self._backwards is None:
            found = Packing(self.bounds[-1] - place for place in reversed(self.bounds))
            for device in self._placed:
                found.on(device)
            self._backwards = found
        return self._backwards

    def on(self, device: torch.device) -> Tensor:
        """The boundaries as an int32 tensor [S + 1] on a device, which any stream may read. Do not write to it.

        Raises InputError where they would have to be copied while a CUDA graph is captured.
        """
        found = self._placed.get(device)
        if torch.compiler.is_compiling() and (found is None or not torch.compiler.is_dynamo_compiling()):
            return torch.tensor(self.bounds, dtype=torch.int32, device=device)  # the graph's, or inside a node of it
        if found is None and is_captured(device):
            raise InputError(
                f"Packing: its boundaries are not on {device} yet, and nothing can be copied there while a CUDA graph "
                "is captured: make it of a tensor on that device, or run the call once before"
            )
        if found is None:
            with torch.inference_mode(False):
                found = torch.tensor(self.bounds, dtype=torch.int32).to(device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # once: any stream may read it then
            found = self._placed.setdefault(device, found)
        return found


def check_bounds(name: str, bounds: Sequence[int], tokens: int) -> None:
    """Raise InputError unless the boundaries go from 0 to `tokens` and never decrease."""
    shown = list(bounds)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens:
        raise InputError(f"{name}: cu_seqlens must begin with 0 and end with T = {tokens}, got {shown}")
    if any(later < earlier for earlier, later in pairwise(bounds)):
        raise InputError(f"{name}: cu_seqlens must not decrease, got {shown}")


def check_row(name: str, cu_seqlens: Any, rows: int, tokens: int | None = None) -> None:
    """Raise InputError unless cu_seqlens can be the boundaries of a batch of `rows` rows, which must be 1. tokens: T,
    or None to leave the values unread, as reading them may wait for the GPU."""
    tensor = isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 and cu_seqlens.dtype in INTEGERS
    if not tensor and not isinstance(cu_seqlens, Packing):
        raise InputError(
            f"{name}: cu_seqlens must be a one-dimensional integer tensor or a dsf.Packing, got {cu_seqlens!r}"
        )
    if rows != 1:
        raise InputError(f"{name}: cu_seqlens packs sequences into one row, expected B = 1, got B = {rows}")
    if tokens is not None and isinstance(cu_seqlens, Packing):
        check_bounds(name, cu_seqlens.bounds, tokens)
    elif tokens is not None:
        check_once(name, cu_seqlens, tokens)


@dataclass(frozen=True)
class Batch:
    """S' sequences of similar length as a padded batch of T' tokens each.

    rows: the numbers of these sequences in the packed row. chosen: the same as a tensor.
    index: [S', T'], the position of each token in the packed row; padding repeats the sequence's last token.
    valid: bool [S', T'], True for tokens; None without padding.
    lengths: the number of tokens of each sequence. counts: the same as a tensor.
    without: the numbers of all sequences without tokens, which are in no batch; None if there are none.
    order: [S], the position of each sequence in the list of all batches' rows followed by `without`.
    """

    rows: list[int]
    index: Tensor
    valid: Tensor | None
    lengths: list[int]
    chosen: Tensor
    counts: Tensor
    order: Tensor
    without: Tensor | None

    def take(self, timed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per-token tensors [1, T, ...] -> [S', T', ...]."""
        return {name: x[0][self.index] for name, x in timed.items()}


def sequence_of(bounds: Tensor, places: Tensor) -> Tensor:
    """The number of the sequence that each place belongs to, from boundaries [S + 1]. All of these are searched, since
    torch 2.11's Inductor cannot search a part (bounds[1:]) of boundaries that its graph computes."""
    return torch.searchsorted(bounds, places, right=True) - 1


def is_hidden(cu_seqlens: Tensor) -> bool:
    """True where the values cannot be read: under torch.compile, for tensor subclasses, and while a CUDA graph is
    captured, whose replays may have other boundaries."""
    if type(cu_seqlens) is not Tensor or torch.compiler.is_compiling():
        return True
    return is_captured(cu_seqlens.device)


def is_captured(device: torch.device) -> bool:
    """True while a CUDA graph is captured; nothing can be copied from the host then."""
    if torch.compiler.is_compiling():  # a graph of torch.compile cannot ask
        return False
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def values(cu_seqlens: Tensor | Packing) -> list[int]:
    """The boundaries as numbers. For a tensor on a GPU this waits for the GPU every time: earlier values cannot be
    reused, because the host does not see every write to a tensor."""
    return list(cu_seqlens.bounds) if isinstance(cu_seqlens, Packing) else listed(cu_seqlens)


def check_once(name: str, cu_seqlens: Tensor, tokens: int) -> None:
    """check_bounds for a tensor that kernels read; done again only after a write that torch has recorded.

    A write that torch does not see can therefore miss an error, but never change a result.
    """
    if is_hidden(cu_seqlens):
        return
    if cu_seqlens.is_inference():
        return check_bounds(name, listed(cu_seqlens), tokens)
    state = cu_seqlens._version, tokens
    found = _checked.get(id(cu_seqlens))
    if found is None or found[0]() is not cu_seqlens or found[1:] != state:
        check_bounds(name, listed(cu_seqlens), tokens)
        _drop_oldest(_checked)
        _checked[id(cu_seqlens)] = weakref.ref(cu_seqlens), *state
    return None


def on_device(cu_seqlens: Tensor | Packing, bounds: Sequence[int], device: torch.device) -> Tensor:
    """The boundaries as a tensor on a device; bounds: their values."""
    if isinstance(cu_seqlens, Packing):
        return cu_seqlens.on(device)
    if cu_seqlens.device == device:
        return cu_seqlens
    return _remembered(_placed, tuple(bounds), device, lambda x: [x])


def tensor_of(cu_seqlens: Tensor | Packing | None, device: torch.device) -> Tensor | None:
    """The boundaries as a tensor, or None."""
    return cu_seqlens.on(device) if isinstance(cu_seqlens, Packing) else cu_seqlens


def _placed(bounds: Bounds, device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32).to(device)


def batches(bounds: list[int], device: torch.device) -> list[Batch]:
    """The sequences in batches by ⌈log2 length⌉: at most about log2 T batches, with fewer than twice the tokens."""
    return _remembered(_batches, tuple(bounds), device, lambda found: [x for b in found for x in (b.index, b.order)])


def marks(bounds: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """(starts [1, T, 1], ends [T], filled [S] or None).

    starts, ends: int32; sequence number s, counted from 1, stands at its first and at its last token, 0 elsewhere.
    filled: bool, True for sequences with tokens; None if all have some.
    """
    return _remembered(_marks, tuple(bounds), device, lambda found: [x for x in found if x is not None])


def hidden_marks(bounds: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """`marks`, computed on the device without reading the boundaries; filled is never None."""
    bounds = bounds.long()
    filled = bounds[1:] > bounds[:-1]
    numbers = torch.arange(1, bounds.shape[0], dtype=torch.int32, device=bounds.device)
    none = torch.zeros(tokens + 1, dtype=torch.int32, device=bounds.device)  # one more, for sequences without tokens
    starts = none.index_copy(0, torch.where(filled, bounds[:-1], tokens), numbers)[:tokens]
    ends = none.index_copy(0, torch.where(filled, bounds[1:] - 1, tokens), numbers)[:tokens]
    return starts[None, :, None], ends, filled


def _remembered(
    make: Callable[..., Made], bounds: Bounds, device: torch.device, tensors: Callable[[Made], list[Tensor]]
) -> Made:
    """make(bounds, device), cached for each packing and stream, since streams do not wait for each other's tensors.

    While a CUDA graph is captured nothing can be copied from the host. Then a result of any stream is used, as the
    capture has waited for the device, and it is kept for good, as replays read it. Raises InputError if there is none.
    """
    if torch.compiler.is_compiling():
        return make(bounds, device)
    if is_captured(device):
        if (make, bounds, device) not in _replayed:
            made = [x for key, x in list(_places.items()) if key[:3] == (make, bounds, device)]
            if not made:
                raise InputError(
                    "cu_seqlens: its places are not on the GPU yet, and nothing can be copied there while a CUDA graph "
                    "is captured: run the call once before, or hand over a dsf.Packing or a tensor on that device"
                )
            _replayed[make, bounds, device] = made[0]
        return cast(Made, _replayed[make, bounds, device])
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (make, bounds, device, stream)
    kept = _places.get(key)
    if kept is None:
        with torch.inference_mode(False):
            found = make(bounds, device)
        if any(type(x) is not Tensor for x in tensors(found)):
            return found
        _drop_oldest(_places)
        kept = _places[key] = found
    return cast(Made, kept)


def _drop_oldest(kept: dict[Any, Any]) -> None:
    """Drop the oldest entries, to make room for one more."""
    for oldest in list(kept)[: len(kept) + 1 - _KEPT]:
        kept.pop(oldest, None)


def _marks(bounds: Bounds, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    starts, ends = torch.zeros(2, bounds[-1], dtype=torch.int32)
    filled = [row for row in range(len(bounds) - 1) if bounds[row + 1] > bounds[row]]
    numbers = torch.tensor(filled, dtype=torch.int32) + 1
    starts[[bounds[row] for row in filled]] = numbers
    ends[[bounds[row + 1] - 1 for row in filled]] = numbers
    some = torch.tensor([b > a for a, b in pairwise(bounds)]) if len(filled) < len(bounds) - 1 else None
    return starts.to(device)[None, :, None], ends.to(device), None if some is None else some.to(device)


def _batches(bounds: Bounds, device: torch.device) -> list[Batch]:
    groups: dict[int, list[int]] = {}
    without = []
    for row in range(len(bounds) - 1):
        length = bounds[row + 1] - bounds[row]
        if length:
            groups.setdefault((length - 1).bit_length(), []).append(row)
        else:
            without.append(row)
    packed = [rows for _, rows in sorted(groups.items())]
    rows = [row for part in (*packed, without) for row in part]
    order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=device)
    left = torch.tensor(without, device=device) if without else None
    return [_batch(bounds, part, order, left, device) for part in packed]


def _batch(bounds: Bounds, rows: list[int], order: Tensor, without: Tensor | None, device: torch.device) -> Batch:
    starts = torch.tensor([bounds[r] for r in rows], device=device)
    lengths = [bounds[r + 1] - bounds[r] for r in rows]
    counts = torch.tensor(lengths, device=device)
    places = torch.arange(max(lengths), device=device)
    index = starts[:, None] + torch.minimum(places, counts[:, None] - 1)
    valid = None if min(lengths) == max(lengths) else places < counts[:, None]
    return Batch(rows, index, valid, lengths, torch.tensor(rows, device=device), counts, order, without)


def unpack(parts: list[tuple[Batch, Tensor]]) -> Tensor:
    """The packed row [1, T, ...] of outputs [S, T', ...] of every batch."""
    pieces: dict[int, Tensor] = {}
    for batch, y in parts:
        for place, row in enumerate(batch.rows):
            pieces[row] = y[place, : batch.lengths[place]]
    return torch.cat([pieces[row] for row in sorted(pieces)], dim=0).unsqueeze(0)


def reorder(parts: list[tuple[Batch, Tensor]], rest: Tensor | None = None) -> Tensor:
    """The states of all batches [S', ...], and of sequences without tokens (rest), in the order of the sequences."""
    states = [state for _, state in parts] + ([] if rest is None else [rest])
    return torch.cat(states, dim=0).index_select(0, parts[0][0].order)
