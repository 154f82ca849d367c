"""`dsf bench`: times and memory of a recurrence or its layer on this machine, a lower bound, and installed peers."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dsf.analysis.measures.state import step_bytes
from dsf.analysis.records import File, Record, schema_field
from dsf.analysis.subjects import Subject
from dsf.language.errors import DsfError, InputError
from dsf.mixers.layer import Layer
from dsf.mixers.ranges import random_inputs

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Sizes(Record):
    """Sizes of one call: sequences, tokens, heads, entries of the Key and the Value axis (n, p); dtype and device."""

    batch: int = 1
    tokens: int = 2048
    heads: int = 4
    n: int = 64
    p: int = 64
    dtype: str = "float32"
    device: str = "cpu"


class Row(Record):
    """The cost of one implementation. Times in ms, medians of repeated calls; first: the first call, with compilation.

    kept: MiB that forward keeps for backward. peak: the most MiB that forward and backward allocate in addition,
    None on a CPU. failed: the reason for missing numbers.
    """

    who: str
    forward: float | None = None
    both: float | None = None
    decode: float | None = None
    first: float | None = None
    kept: float | None = None
    peak: float | None = None
    failed: str = ""


class Bench(File):
    """The result of one `dsf bench`. copy_rate: GB/s; product_rate: TFLOP/s; floor, floor_decode: the least ms of
    forward and of a step, from bytes and operations at these rates.
    """

    schema_: Literal["dsf.bench/1"] = schema_field("dsf.bench/1")
    recurrence: str
    sizes: Sizes
    plan: str
    copy_rate: float
    product_rate: float
    floor: float
    floor_decode: float
    limited_by: str
    rows: list[Row]
    missing: list[str]


def bench(subject: Subject, sizes: Sizes, layer: bool = False, seconds: float = 1.0) -> Bench:
    """Time a recurrence on random inputs within their ranges, beside the installed peers.

    layer: also time the `Layer` made of the declaration and the paper's layer, of width heads · P. seconds: for each
    timing. Raises InputError for a missing device, an unknown dtype, and an odd n where keys are taken in pairs.
    """
    if sizes.dtype not in DTYPES:
        raise InputError(f"--dtype {sizes.dtype!r} is unknown; dtypes are {', '.join(DTYPES)}")
    if sizes.device != "cpu" and not torch.cuda.is_available():
        raise InputError(f"--device {sizes.device}: there is no CUDA GPU here; `dsf doctor` says what there is")
    recurrence: Any = subject.recurrence
    if recurrence.spec.has_key and recurrence.spec.keys_of(sizes.n) != sizes.n:
        raise InputError(f"--n {sizes.n}: {recurrence.name} takes the Key axis in pairs, so it must be even")
    inputs = inputs_of(subject, sizes)
    plan = recurrence.plan(**inputs)
    copy, product = rates(sizes)
    moved, worked = plan.bytes / copy / 1e6, plan.flops / product / 1e9
    decoded = (step_bytes(plan, sizes.tokens) + plan.bytes / sizes.tokens) / copy / 1e6
    rows = [side("dsf", lambda: recurrence(**inputs), list(inputs.values()), sizes, seconds, step_of(subject, sizes))]
    if layer:
        rows += [layer_row(name, make, sizes, seconds) for name, make in layers_of(subject)]
    peers, missing = peers_of(subject, sizes)
    rows += [peer_row(name, subject, sizes, seconds) for name in peers]
    return Bench(
        recurrence=recurrence.name,
        sizes=sizes,
        plan=str(plan),
        copy_rate=copy,
        product_rate=product,
        floor=max(moved, worked),
        floor_decode=decoded,
        limited_by="bytes" if moved >= worked else "operations",
        rows=rows,
        missing=missing,
    )


def inputs_of(subject: Subject, sizes: Sizes) -> dict[str, Tensor]:
    """Random inputs of these sizes, by name; they require gradients."""
    one = random_inputs(subject.recurrence, tokens=sizes.tokens, heads=sizes.heads, N=sizes.n, P=sizes.p)
    timed = {i.name for i in subject.recurrence.spec.inputs if i.kind.time}
    found = {}
    for name, x in one.items():
        x = x.expand(sizes.batch, *x.shape[1:]) if name in timed else x
        found[name] = x.to(sizes.device, DTYPES[sizes.dtype]).contiguous().requires_grad_()
    return found


def step_of(subject: Subject, sizes: Sizes) -> Callable[[], Any]:
    """A function that decodes one token after a sequence of `tokens` tokens."""
    recurrence: Any = subject.recurrence
    inputs = inputs_of(subject, sizes)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    token = {k: (x[:, 0] if k in timed else x).detach() for k, x in inputs.items()}
    state: list[Any] = [None]

    def play() -> None:
        with torch.no_grad():
            if state[0] is None:
                _, state[0] = recurrence(**{k: x.detach() for k, x in inputs.items()}, return_state=True)
            recurrence.step(state[0], **token)

    return play


def layers_of(subject: Subject) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, constructor) of the `Layer` made of the declaration, and of the paper's layer if there is one."""
    yield "Layer", partial(Layer, subject.recurrence)
    if subject.has_module:
        yield f"{getattr(subject.make, '__name__', 'Layer')} (paper)", subject.make


def layer_row(name: str, make: Callable[..., Any], sizes: Sizes, seconds: float) -> Row:
    """The Row of a layer of width heads · P."""
    from dsf.analysis.training import accepted

    options = {"n_heads": sizes.heads, "d_state": sizes.n, "headdim": sizes.p}
    width = sizes.heads * sizes.p
    try:
        layer = make(width, **{k: v for k, v in options.items() if k in accepted(make)})
        layer.to(sizes.device, DTYPES[sizes.dtype])
        x = torch.randn(sizes.batch, sizes.tokens, width).to(sizes.device, DTYPES[sizes.dtype]).requires_grad_()
        kept: list[Any] = []

        def step() -> None:
            with torch.no_grad():
                if not kept:
                    kept.append(layer(x)[1])
                layer.step(x[:, 0], kept[0])

        return side(name, lambda: layer(x)[0], [x, *layer.parameters()], sizes, seconds, step)
    except (DsfError, RuntimeError) as error:
        return Row(who=name, failed=" ".join(str(error).split())[:200])


def peers_of(subject: Subject, sizes: Sizes) -> tuple[list[str], list[str]]:
    """(peers of this recurrence that run here, peers that need an installation or a GPU)."""
    from dsf.analysis.peers import PEERS

    known = [who for who, (_, table) in PEERS.items() if subject.entry is not None and subject.name in table]
    here = [
        who
        for who in known
        if importlib.util.find_spec(PEERS[who][0]) is not None and (sizes.device != "cpu" or who == "torch SDPA")
    ]
    return here, [who for who in known if who not in here]


def peer_row(who: str, subject: Subject, sizes: Sizes, seconds: float) -> Row:
    """The Row of a peer's operator on the same inputs."""
    from dsf.analysis.peers import operator

    try:
        call, leaves = operator(who, subject.name, inputs_of(subject, sizes))
        return side(who, call, leaves, sizes, seconds, None)
    except Exception as error:  # other projects' code may raise anything
        return Row(who=who, failed=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])


def side(
    who: str,
    call: Callable[[], Any],
    leaves: Sequence[Tensor],
    sizes: Sizes,
    seconds: float,
    step: Callable[[], Any] | None,
) -> Row:
    """Time the first call, forward, forward with backward and a decode step; measure the memory that forward keeps."""
    with clock(sizes.device) as now:
        begin = now()
        with torch.no_grad():
            call()
        first = now() - begin
    kept = Kept(leaves)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x):
        y = first_of(call())
    slope = torch.randn_like(y)
    wanted = [x for x in leaves if x.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        torch.autograd.grad(first_of(call()), wanted, slope, allow_unused=True)

    del y, kept.held
    both()
    peak = None
    if sizes.device != "cpu":
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - base) / 2**20
    return Row(
        who=who,
        forward=median(forward, sizes.device, seconds),
        both=median(both, sizes.device, seconds),
        decode=None if step is None else median(step, sizes.device, seconds),
        first=first,
        kept=kept.bytes / 2**20,
        peak=peak,
    )


class Kept:
    """Counter of the memory that a forward pass keeps for its backward pass: each storage once, without `leaves`."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.bytes = 0
        self.held: list[Tensor] = []  # so that no memory is reused meanwhile
        self.known = {x.untyped_storage().data_ptr() for x in leaves}

    def pack(self, x: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known.add(storage.data_ptr())
            self.held.append(x)
            self.bytes += storage.nbytes()
        return x


def first_of(found: Any) -> Tensor:
    """The output of a call that returns it alone, or with its state."""
    return found[0] if isinstance(found, tuple) else found


def rates(sizes: Sizes) -> tuple[float, float]:
    """(GB/s of a large copy, read and written; TFLOP/s of a large product) of this device and dtype.

    On a CPU the product is in float32 where that is faster: many have no products of 16 bits, and no call is so slow.
    """
    dtype, cpu = DTYPES[sizes.dtype], sizes.device == "cpu"
    x = torch.zeros(2**24 if cpu else 2**28, device=sizes.device)
    y = torch.zeros_like(x)
    copy = 2 * x.nbytes / median(lambda: y.copy_(x), sizes.device, 0.2) / 1e6
    side_ = 512 if cpu else 8192
    kinds = {dtype, torch.promote_types(dtype, torch.float32)} if cpu else {dtype}
    whole = [torch.randn(side_, side_, device=sizes.device, dtype=kind) for kind in kinds]
    product = min(median(partial(torch.matmul, m, m), sizes.device, 0.2) for m in whole)
    return copy, 2 * side_**3 / product / 1e9


@contextmanager
def clock(device: str) -> Iterator[Callable[[], float]]:
    """A clock in ms, which waits for the GPU's work before it is read."""

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    yield now


def median(call: Callable[[], Any], device: str, seconds: float) -> float:
    """Median ms of a call, repeated for `seconds` and at least three times, after one warm-up."""
    call()
    with clock(device) as now:
        times: list[float] = []
        end = now() + seconds * 1e3
        while len(times) < 3 or (now() < end and len(times) < 1000):
            begin = now()
            call()
            times.append(now() - begin)
    return statistics.median(times)
