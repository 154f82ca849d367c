"""Launches: how host code records them, how their kernels are compiled in parallel, and how they run.

A call of a JIT function binds and classifies every argument and compares every global, which takes 20 to 40 µs on the
host. The result depends only on sizes, dtypes and whether pointers are multiples of 16 bytes, which a schedule knows.
A call has up to a dozen kernels, each of which takes 0.3 to 3 s to compile, mostly in LLVM, ptxas and (for the
launcher) a C compiler, which release the GIL.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

import dsf.kernels.triton.interpreter  # noqa: F401  # mends it before a kernel runs
from dsf.kernels.recent import Recent
from dsf.kernels.triton.assembler import choose_assembler, hold, is_sound
from dsf.kernels.triton.launcher import hash_compiler, hurried, launcher, mend_loading, proven, proving
from dsf.kernels.triton.player import function
from dsf.kernels.triton.schedule import Launch, Ref, Schedule, book_of, mapped
from dsf.kernels.triton.symbolic import Size

Behind = Callable[[], Iterable[Launch]]
THREADS = min(8, os.cpu_count() or 1)
BESIDE = THREADS == 8  # whether there are processors for the kernels of gradients while those of a call are compiled
_Mode: Any = getattr(triton, "AsyncCompileMode", None)  # since Triton 3.5
if not triton.knobs.runtime.interpret:
    choose_assembler()
    hash_compiler()
_apart = mend_loading()  # whether threads may load launchers
_promised: dict[Any, Any] = {}  # kernels that a thread compiles, which others then wait for
_asking = threading.Lock()
_ready: Recent[tuple[Any, tuple[Any, ...]]] = Recent(4096)  # compiled kernels, and the constants behind arguments


def constant(x: Any) -> Any:
    """x as a compile-time constant of a kernel; addresses computed from it become part of instructions."""
    x = int(x) if isinstance(x, Size) else x
    return x if triton.knobs.runtime.interpret else tl.constexpr(x)


def row_strides(x: Tensor) -> tuple[Any, Any]:
    """The strides of batch and time of x [B, T, ...].

    They are (None, a constant) where sequences are contiguous, so that neither changes with lengths or batches.
    """
    step = x.stride(1)
    return (None, constant(step)) if x.stride(0) == x.shape[1] * step else (x.stride(0), step)


def strided(x: Tensor) -> tuple[Any, ...]:
    """x with a contiguous last axis, and the strides of the others."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return (x, *x.stride()[:-1])


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """Record kernel[grid](*args, **named). args: slots, numbers or structs of these; named: constants.

    Raises TypeError for a compile-time constant among args: of numbers there, `_key` has only what Triton specialises,
    so that a kernel that was compiled for one value would be launched for another.
    """
    if len(args) > _plain(kernel.fn):
        raise TypeError(f"{kernel.__name__}: compile-time constants must be given by name")
    book_of(args).launch(kernel, grid, args, named)


@functools.cache
def _plain(function: Callable[..., Any]) -> int:
    """How many parameters of a kernel may be given by position: those before its first compile-time constant."""
    kinds = [str(x.annotation) for x in inspect.signature(function).parameters.values()]
    return next((i for i, x in enumerate(kinds) if "constexpr" in x), len(kinds))


def runnable(
    schedule: Schedule, behind: Behind | None = None, first: bool = False
) -> tuple[Callable[..., Any], bool]:  # fmt: skip
    """(the schedule as a function of its tensors, with its kernels compiled; whether to keep that function).

    behind: what the call's gradients will launch. Another thread compiles that where kernels of this call are missing,
    and where `first`: at the first call with gradients, as one without them may have compiled the call's own kernels.
    While a CUDA graph is captured the private launcher cannot be tested, and kernels are compiled at their launch.
    """
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if not capturing:
        with proving():
            _compile(schedule.launches, behind, first)
    return function(schedule, functools.partial(runner, capturing=capturing)), not capturing


def runner(x: Launch, capturing: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...] | None]:
    """(grid -> function that launches x; the constants that it takes after addresses, None if it takes tensors).

    Raises RuntimeError for a kernel that the assembler made wrong (`assembler.hold`).
    """
    if isinstance(x.kernel, JITFunction) and not (capturing or is_sound()):
        hold(_compiled(x))
    if proven() and isinstance(x.kernel, JITFunction):
        key = _key(x)
        found = _ready.get(key)
        if found is None and not capturing:
            compiled = _compiled(x)
            if compiled is not None:  # None if a hook prevented it
                found = compiled, tuple(x.named[name] for name in x.kernel.arg_names[len(x.args) :])
                _ready.put(key, found)
        if found is not None:
            return functools.partial(launcher, found[0]), found[1]
    return lambda grid: functools.partial(x.kernel[grid], **x.named), None


def _compiled(x: Launch) -> Any:
    """The kernel of a launch, which Triton compiles if it has not; None if a hook prevents that."""
    return _kept(_warm(x))


def _kept(kernel: Any) -> Any:
    """The kernel, which another thread may still compile."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def _key(x: Launch) -> Any:
    """What a compiled kernel depends on: for numbers what Triton specialises, for other arguments their values."""
    plain = [x.do_not_specialize for x in getattr(x.kernel, "params", ())]
    kinds = [_kinds(y, free) for y, free in zip(x.args, [*plain, *[False] * len(x.args)], strict=False)]
    return x.kernel.fn, torch.cuda.current_device(), *kinds, *x.named.items()


def _kinds(x: Any, free: bool = False) -> Any:
    def kind(y: Any) -> Any:
        if isinstance(y, Ref):
            return y.dtype, y.align
        return specialised(y, free) if type(y) is int or isinstance(y, Size) else y

    return mapped(kind, x)


def specialised(x: Any, free: bool = False) -> tuple[bool, ...]:
    """What Triton specialises a number for: 32 bits; unless `free` also being 1, and being a multiple of 16."""
    small = bool(-(1 << 31) <= x < 1 << 31)
    return (small,) if free else (small, bool(x == 1), bool(x % 16 == 0))


class Pointer:
    """Stands for a tensor where Triton specialises a kernel."""

    __slots__ = ("align", "dtype")

    def __init__(self, x: Ref) -> None:
        self.dtype, self.align = x.dtype, x.align

    def data_ptr(self) -> int:
        """An address with the tensor's alignment."""
        return self.align


def _pointers(args: tuple[Any, ...]) -> Any:
    return mapped(lambda x: Pointer(x) if isinstance(x, Ref) else x, args)


class _Ahead(_Mode or object):  # type: ignore[misc]
    """Triton's mode for compiling on other threads. load: whether they also load the kernels on the current GPU."""

    def __init__(self, threads: ThreadPoolExecutor, load: bool) -> None:
        super().__init__(threads, ignore_errors=True)
        self.load = load

    def submit(self, key: Any, compile_fn: Any, *after: Any) -> Any:
        """after: what Triton does with a kernel, and since 3.9 without one that does not compile."""
        make = hurried(compile_fn)
        if self.load:
            make = functools.partial(_loaded, make, torch.cuda.current_device())
        return super().submit(key, make, *after)


def _loaded(make: Callable[[], Any], device: int) -> Any:
    """The compiled kernel that `make` returns, loaded on a GPU, with its launcher."""
    kernel = make()
    if _apart:
        with torch.cuda.device(device):
            assert kernel.run
    return kernel


def _compile(launches: Iterable[Launch], behind: Behind | None = None, first: bool = False) -> None:
    """Compile missing kernels on several threads. Errors appear at the first launch. behind, first: as in `runnable`.

    Does nothing where the caller already uses Triton's mode for that.
    """
    if _Mode is None or triton.knobs.runtime.interpret or not torch.cuda.is_initialized():
        return
    missing, device = _missing(launches), torch.cuda.current_device()
    if behind is not None and BESIDE and (missing or first):
        threading.Thread(target=_compile_behind, args=(behind, device), name="dsf gradients").start()
    if not missing:
        return
    found = _asked(missing, load=True)
    with ThreadPoolExecutor(THREADS) as threads:
        for kernel in found:  # those that `_compile_behind` compiled are not loaded
            threads.submit(_loaded, functools.partial(_kept, kernel), device)


def _compile_behind(behind: Behind, device: int) -> None:
    """Compile what gradients will launch while the forward pass compiles and runs.

    Nothing is loaded on the GPU, since another thread may capture a graph. A call that needs one of these kernels waits
    for that one. What goes wrong here goes wrong there, too.
    """
    with torch.cuda.device(device), suppress(Exception):
        _asked(_missing(behind()), load=False)


def _missing(launches: Iterable[Launch]) -> dict[Any, Launch]:
    return {key: x for key, x in ((_key(x), x) for x in launches) if _ready.get(key) is None}


def _asked(missing: dict[Any, Launch], load: bool) -> list[Any]:
    """The kernels, compiled on several threads, or promises of those that another thread already compiles.

    All others are compiled when it returns, so that no two threads wait for each other. Those that take longest begin
    first: the more arguments a kernel has, the longer it takes.
    """
    found, own = [], []
    longest = sorted(missing.items(), key=lambda item: -_count(item[1].args))
    try:
        with ThreadPoolExecutor(THREADS) as threads, suppress(RuntimeError), _Ahead(threads, load):
            for key, x in longest:
                with _asking:
                    if key not in _promised:
                        own.append(key)
                        _promised[key] = _warm(x)
                    found.append(_promised[key])
    finally:
        for key in own:
            _promised.pop(key, None)
    return found


def _count(args: tuple[Any, ...]) -> int:
    """The number of arguments, those within structs counted one by one."""
    found: list[Any] = []
    mapped(found.append, args)
    return len(found)


def _warm(x: Launch) -> Any:
    """The kernel of a launch, or its promise within Triton's mode; None if a hook prevents that."""
    return x.kernel.warmup(*_pointers(x.args), grid=x.grid, **x.named)
