"""Recording of converted layers: a structured Trajectory for each run, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsf.analysis.convert import Converted, Layer, Run
from dsf.kernels.attention import KVCache
from dsf.language.errors import DsfError
from dsf.trajectory import Trajectory

GIB = 1 << 30


class RecordingError(DsfError):
    """A recording would exceed its limit, cannot be made, or does not hold what was asked for."""


@dataclass(frozen=True)
class Entry:
    """One run of one layer's recurrence.

    call: the number of the layer's call, from 0. part: the number of the run within the call (Zamba has several), from
    0. backward: whether the tokens are in reversed order.
    """

    layer: Layer
    call: int
    part: int
    trajectory: Trajectory
    backward: bool = False


@dataclass
class Recording:
    """The trajectories of forward passes, in the order in which the layers ran.

    bytes: what the recording holds in memory. limit: the most bytes that it may hold. `trajectory(layer)` finds one
    trajectory; iteration yields all entries.
    """

    limit: int
    entries: list[Entry] = field(default_factory=list)
    bytes: int = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers, each once."""
        return tuple(dict.fromkeys(e.layer.name for e in self.entries))

    def trajectory(self, layer: str, call: int = 0, part: int = 0) -> Trajectory:
        """The trajectory of a layer's call. Raises RecordingError, with the recorded names, if there is none."""
        for entry in self.entries:
            if (entry.layer.name, entry.call, entry.part) == (layer, call, part):
                return entry.trajectory
        what = ", ".join(self.layers) or "nothing; was the model called inside the block?"
        raise RecordingError(f"no recording of {layer!r}, call {call}, part {part}; recorded: {what}")


@contextmanager
def record(
    converted: Converted,
    layers: Iterable[str] | Callable[[Layer], bool] | None = None,
    heads: slice | None = None,
    tokens: int | None = None,
    batch: slice | None = None,
    limit: int = 4 * GIB,
    dtype: torch.dtype | None = None,
    visit: Callable[[Entry], None] | None = None,
) -> Iterator[Recording]:
    """Record the trajectories of a converted model's layers inside a `with` block.

        with dsf.analysis.record(converted) as rec:
            converted.model(ids)
        dsf.analysis.measures.half_life(rec.trajectory("model.layers.0.linear_attn"))

    layers: names, or a function of a Layer that says whether to record it; None: all.
    heads, batch: slices of heads and of sequences; None: all.
    tokens: record at most so many tokens of each call, from its first; None: all.
    limit: the most bytes of the recording.
    dtype: what inputs are converted to before the trajectory is computed (float64 for precise measures).
    visit: a function that gets every entry. Entries are then not kept, so that memory for one run is enough.

    A trajectory holds A in parts, never as a dense matrix, and has no gradients. Raises RecordingError for unknown
    layers, for `tokens` below 1, for packed sequences or padding in what is recorded of a recurrence, for attention
    layers of dsf.mixers that go on from a cache, and, before any memory is allocated, for a recording that would exceed
    the limit.
    """
    if tokens is not None and tokens < 1:
        raise RecordingError(f"record: tokens is {tokens}, expected at least 1")
    known = {layer.name: layer for layer in converted.layers}
    if layers is None:
        chosen = list(known.values())
    elif callable(layers):
        chosen = [layer for layer in known.values() if layers(layer)]
    else:
        names = list(layers)
        unknown = [n for n in names if n not in known]
        if unknown:
            raise RecordingError(f"no converted layer is called {unknown[0]!r}; they are {', '.join(known)}")
        chosen = [known[n] for n in names]
    recording, calls = Recording(limit), dict.fromkeys(known, -1)

    def listen(layer: Layer, run: Run) -> None:
        if run.packed:
            raise RecordingError(
                f"{layer.name} ran packed sequences, and a trajectory holds one that begins at its first token; record "
                "them in calls of their own"
            )
        if run.padding is not None and bool(run.padding[batch or slice(None), :tokens].any()):
            raise RecordingError(
                f"{layer.name} read padding, which a trajectory would hold as tokens that forget nothing, so that its "
                "half-lives and means would be too long; record sequences of one length, or each in a call of its own"
            )
        if isinstance(run.state, KVCache) and bool(run.state.lengths.any()):
            raise RecordingError(
                f"{layer.name} went on from a cache of keys, which its trajectory would leave out; record the whole "
                "sequence in one call"
            )
        calls[layer.name] += run.part == 0
        part = _bounded(run, batch, tokens)
        part = part if dtype is None else _cast(part, dtype)
        _check_size(recording, layer, part, heads)
        trajectory = _owned(part.trajectory().select(heads=heads))
        entry = Entry(layer, calls[layer.name], run.part, trajectory, run.backward)
        if visit is not None:
            visit(entry)
            return
        recording.bytes += size_of(trajectory)
        recording.entries.append(entry)

    # A compiled model calls it as it is: torch cannot trace it. Without torch._dynamo nothing is compiled.
    listener = torch.compiler.disable(listen) if "torch._dynamo" in sys.modules else listen
    for layer in chosen:
        layer.listeners.append(listener)
    try:
        yield recording
    finally:
        for layer in chosen:
            layer.listeners.remove(listener)


def size_of(trajectory: Trajectory) -> int:
    """The bytes of a trajectory. Tensors that share memory count once."""
    return sum(x.nbytes for x in {x.data_ptr(): _stored(x) for x in _tensors(trajectory)}.values())


def _bounded(run: Run, batch: slice | None, tokens: int | None) -> Run:
    """The run cut to these sequences and tokens, as views."""
    rows, first = batch or slice(None), slice(0, tokens)
    if run.attention is not None:
        t = run.attention
        keep = first if tokens is not None else slice(None)
        whole = Trajectory(run.recurrence.spec, None, None, t)
        return replace(run, attention=whole.select(batch=rows, tokens=keep).attention)
    timed = {i.name for i in run.recurrence.spec.inputs if i.kind.time}
    inputs = {n: x[rows, first] if n in timed else x for n, x in run.inputs.items()}
    state = run.state[rows] if isinstance(run.state, Tensor) else None
    return replace(run, inputs=inputs, state=state)


def _check_size(recording: Recording, layer: Layer, run: Run, heads: slice | None) -> None:
    """Raise RecordingError before anything is computed: a trajectory on the meta device has the size of the real
    one.
    """
    shapes = _mapped(run, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
    need = sum(_stored(x).nbytes for x in _tensors(shapes.trajectory().select(heads=heads)))
    if recording.bytes + need > recording.limit:
        raise RecordingError(
            f"recording {layer.name} needs {need / GIB:.2f} GiB on top of {recording.bytes / GIB:.2f} GiB, more than "
            f"the limit of {recording.limit / GIB:.2f} GiB; record fewer layers, heads or tokens, or raise limit="
        )


def _cast(run: Run, dtype: torch.dtype) -> Run:
    def to(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    attention = None
    if run.attention is not None:
        attention = type(run.attention)(**{k: to(v) for k, v in vars(run.attention).items()})
    inputs = {n: to(x) for n, x in run.inputs.items()}
    return replace(run, inputs=inputs, state=to(run.state), attention=attention)


def _owned(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its own memory, not views of larger tensors or of the model's."""
    seen: dict[tuple[Any, ...], Tensor] = {}  # the system and its unit-driven twin share most tensors

    def own(x: Tensor) -> Tensor:
        key = (x.data_ptr(), x.shape, x.stride())
        if key not in seen:
            seen[key] = _compact(x)
        return seen[key]

    return _mapped(trajectory, own)


def _compact(x: Tensor) -> Tensor:
    """A detached copy that stores axes of stride zero (broadcast ones) once."""
    x = x.detach()
    return _stored(x).clone().expand(x.shape)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """value with function applied to every tensor in its dataclasses, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_mapped(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, function) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and type(value).__name__ != "Spec":
        changes = {f.name: _mapped(getattr(value, f.name), function) for f in fields(value)}
        return replace(value, **changes)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def _stored(x: Tensor) -> Tensor:
    """x with broadcast axes narrowed to length one."""
    for axis in range(x.dim()):
        if x.stride(axis) == 0 and x.shape[axis] > 1:
            x = x.narrow(axis, 0, 1)
    return x
