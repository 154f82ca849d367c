"""All kernels of a call compiled at once, on several threads, before any of them is needed.

A first call runs up to a dozen kernels, and to compile one takes 0.3 to 3 s. Most of that is spent in LLVM, ptxas and,
for the launcher, a C compiler, which leave Python to other threads.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

META = torch.device("meta")
THREADS = min(8, os.cpu_count() or 1)
_Mode: Any = getattr(triton, "AsyncCompileMode", None)  # since Triton 3.5
_this_thread = threading.local()


class _Ahead(_Mode or object):  # type: ignore[misc]
    """Triton's mode for compiling on other threads, in which a launch that waits for its kernel launches nothing."""

    unwritten: Unwritten | None = None

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> None:
        super().submit(key, functools.partial(_loaded, compile_fn, torch.cuda.current_device()), finalize_fn)
        if self.unwritten is None:
            self.unwritten = Unwritten()
            self.unwritten.__enter__()


def _loaded(compile_fn: Callable[[], Any], device: int) -> Any:
    """The compiled kernel, on this GPU, with its launcher, for which Triton runs a C compiler."""
    kernel = compile_fn()
    with torch.cuda.device(device):
        assert kernel.run
    return kernel


class Unwritten(TorchDispatchMode):
    """Torch's operators find sizes and memory, and compute nothing: what they would read has not been written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        aliases = [x.alias_info for x in func._schema.returns]
        if device is None or any(x is not None and not x.is_write for x in aliases):  # made of numbers, or a view
            return func(*args, **kwargs)
        if any(x is not None for x in aliases):
            return kwargs.get("out", args[0] if args else None)
        found = func(*tree_map_only(Tensor, _on(META), args), **tree_map_only(Tensor, _on(META), kwargs))
        return tree_map_only(Tensor, _on(device), found)


def _on(device: torch.device) -> Callable[[Tensor], Tensor]:
    """What makes memory like a tensor's on this device."""
    return lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), which launches kernels and does nothing that depends on what tensors hold.

    From the first kernel on that Triton has yet to compile nothing is launched, and torch computes nothing; function
    runs again when all are ready.
    """
    if _Mode is None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return function(*args)
    with ThreadPoolExecutor(THREADS) as threads, ExitStack() as modes:
        mode = _Ahead(threads, ignore_errors=True)
        try:
            modes.enter_context(mode)
        except RuntimeError:  # the caller is in such a mode
            return function(*args)
        found = _rehearsed(mode, function, args)
    if mode.raw_futures:
        del found  # memory that nobody has written
        found = function(*args)
    return found


def _rehearsed(mode: _Ahead, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """function(*args), with what is missing handed to `mode`, and then nothing launched or computed any more."""
    _this_thread.mode = mode
    try:
        return function(*args)
    except Exception:  # left to the second run, whose errors are those of a plain launch
        if not mode.raw_futures:
            raise
    finally:
        _this_thread.mode = None
        if mode.unwritten is not None:
            mode.unwritten.__exit__(None, None, None)


def waiting() -> bool:
    """Whether this thread's call waits for a kernel, so that what it launches is to be compiled and no more."""
    mode = getattr(_this_thread, "mode", None)
    return mode is not None and bool(mode.raw_futures)
