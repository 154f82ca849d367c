"""Triton's private launcher, called directly, without Triton's binding of arguments.

Its arguments are not a public interface, and wrong ones would pass wrong addresses. So it is used only with releases of
Triton that were tested, and only after it has launched a small kernel with the same result as the public way. All other
launches are public, and 20 to 40 µs slower.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import build

TRIED = frozenset({(3, 6)})  # (major, minor) of Triton that were run on a GPU
LOADER = "_load_module_from_path"  # in triton.runtime.build
_proof: bool | None = None
_translating = threading.Lock()  # held while a kernel's source is translated


class _Factor(NamedTuple):
    at: Any
    times: Any


@triton.jit
def _probe(out, factor, count, nothing, SCALE: tl.constexpr):
    """A kernel with every kind of argument: a pointer, a struct with a pointer, a number, None, a constant."""
    i = tl.program_id(0) + tl.program_id(1) * 2
    tl.store(out + i, (tl.load(factor.at + i) * factor.times + count * (nothing is None)) * SCALE)


def mend_loading() -> bool:
    """Let every module that Triton has a C compiler make be one of its own. False where Triton has no such function.

    A launcher is such a module, all of one name. Python keeps one module object for a name and fills it anew each time,
    so that a kernel whose launcher is loaded while another thread loads one can be launched by that one: with as many
    arguments as another kernel has, or with addresses for numbers. Does nothing the second time.
    """
    load = getattr(build, LOADER, None)
    if load is None or hasattr(load, "mended"):
        return load is not None
    lock = threading.Lock()

    @functools.wraps(load)
    def apart(name: str, path: str) -> ModuleType:
        with lock:
            found = load(name, path)
            own = ModuleType(name)
            own.__dict__.update(vars(found))
        return own

    apart.mended = True  # type: ignore[attr-defined]
    setattr(build, LOADER, apart)
    return True


class _Unknown:
    """Stands for what Triton knows of a kernel once it is compiled; a launcher's C code needs none of it."""

    def __getattr__(self, name: str) -> int:
        return 0


def hurried(compiling: Callable[[], Any]) -> Callable[[], Any]:
    """A function that compiles as `compiling` does, which Triton wants called on another thread, and lets several such
    threads end sooner.

    Triton translates a kernel's source in Python. Threads that do so at the same time all end late, since one waits for
    the other at every step. So one does at a time, and the first are soon in LLVM. The C compiler needs nothing but the
    types of a kernel's arguments: it makes the launcher in the meantime.
    """
    source = inspect.getclosurevars(compiling).nonlocals.get("src")
    make = getattr(source, "make_ir", None)
    if make is None:  # a release that asks otherwise
        return compiling

    @functools.wraps(make)
    def in_turn(*args: Any, **named: Any) -> Any:
        with _translating:
            return make(*args, **named)

    def both() -> Any:
        with ThreadPoolExecutor(1) as thread:  # what goes wrong there does when the kernel is loaded, too
            thread.submit(lambda: triton.runtime.driver.active.launcher_cls(source, _Unknown()))
            return compiling()

    source.make_ir = in_turn  # type: ignore[union-attr]
    return both if _is_tried() else compiling


def hash_compiler() -> None:
    """Have another thread hash Triton's files, which every kernel is named by and which takes a third of a second."""
    ahead = getattr(triton.runtime.cache, "triton_key", None)
    if ahead is not None and torch.cuda.is_initialized():
        threading.Thread(target=ahead, name="dsf hash", daemon=True).start()


def launcher(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """compiled[grid], without the preparation for profilers' hooks where there are none."""
    grid = (*grid, 1, 1)[:3]
    told, run, hooks, driver = compiled[grid], compiled.run, triton.knobs.runtime, triton.runtime.driver.active
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(*args: Any) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            told(*args)
        else:
            stream = driver.get_current_stream(driver.get_current_device())
            run(*grid, stream, function, metadata, None, None, None, *args)

    return launch


def prove() -> bool:
    """Whether `launcher` launches as Triton itself does, tested once a process on the current GPU.

    False and not yet tested while a CUDA graph is captured, since results cannot be read then.
    """
    global _proof
    if _proof is None:
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return False
        _proof = _is_tried() and _launches_alike()
    return _proof


@contextmanager
def proving() -> Iterator[None]:
    """Runs `prove` on another thread beside the block, if it has not been run."""
    if _proof is not None or not torch.cuda.is_initialized():
        yield
        return
    device = torch.cuda.current_device()

    def on_device() -> None:
        with torch.cuda.device(device):
            prove()

    with ThreadPoolExecutor(1) as thread:
        tested = thread.submit(on_device)
        yield
        tested.result()


def proven() -> bool:
    """The result of `prove`, False before its first call."""
    return _proof is True


def _is_tried() -> bool:
    return tuple(int(x) for x in triton.__version__.split(".")[:2]) in TRIED


def _launches_alike() -> bool:
    """Launch _probe both ways, with other values and addresses than it was compiled with, and compare."""
    with _disable_current_modes():
        first, second = (torch.tensor(x, device="cuda") for x in ([1.5, -2.0, 7.0, 0.25], [3.0, 9.0, -4.0, 0.5]))
        expected, found, other = (torch.full((4,), -1.0, device="cuda") for _ in range(3))
        compiled = _probe[(2, 2)](other, _Factor(first, 5), 7, None, SCALE=2)
        _probe[(2, 2)](expected, _Factor(second, 5), 7, None, SCALE=2)
        try:
            launcher(compiled, (2, 2, 1))(found, (second, 5), 7, None, 2)
        except (TypeError, AttributeError, RuntimeError):
            return False
        return torch.equal(found, expected) and not torch.equal(found, other)
