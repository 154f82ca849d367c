"""Launches without Triton's binding of arguments, once a kernel has been launched with the same sizes.

A call of a JIT function binds and classifies every argument and compares every global: 20 to 40 µs on the host. What it
finds depends on the sizes, the dtypes and whether pointers are multiples of 16 bytes, which are looked up here instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from dsf.kernels.triton.ahead import waiting
from dsf.kernels.triton.launcher import launcher, proven
from dsf.kernels.triton.tape import recording

_LIMIT = 4096
_ready: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def at_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """function, run with the GPU of its first tensor as the current one, to which kernels and their stream belong."""

    @functools.wraps(function)
    def guarded(first: Tensor | Sequence[Tensor], *rest: Any, **named: Any) -> Any:
        x = first if isinstance(first, Tensor) else first[0]
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(first, *rest, **named)
        with torch.cuda.device(x.device):
            return function(first, *rest, **named)

    return guarded


def constant(number: int) -> Any:
    """A number that a kernel is compiled for: addresses made of it are part of instructions, and take no registers."""
    return number if triton.knobs.runtime.interpret else tl.constexpr(number)


def row_strides(x: Tensor) -> tuple[Any, Any]:
    """The strides of batch and time of x [B, T, ...].

    Where sequences follow each other as tokens do they are None and a constant, which no length or batch changes.
    """
    step = x.stride(1)
    return (None, constant(step)) if x.stride(0) == x.shape[1] * step else (x.stride(0), step)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """kernel[grid](*args, **named): args are tensors, numbers or tuples of them; named are constants and options."""
    key = _key(kernel, args, named)
    found = None if key is None else _ready.get(key)
    if waiting():
        if found is None:
            kernel.warmup(*args, grid=grid, **named)
        return
    run: Callable[..., Any]
    if found is None:
        run = functools.partial(kernel[grid], **named)
    else:
        compiled, constants = found
        run, args = launcher(compiled, (*grid, 1, 1)[:3]), (*args, *constants)
    tape = recording()
    if tape is not None:
        tape.launch(run, args, found is not None)
        with tape.paused():
            run(*args)
        return
    compiled = run(*args)
    if key is not None and compiled is not None:  # a hook may have kept it
        if len(_ready) >= _LIMIT:
            _ready.clear()
        _ready[key] = compiled, tuple(named[name] for name in kernel.arg_names[len(args) :])


def _key(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What Triton compiles a kernel for; None where Triton itself is to launch."""
    if not proven() or not isinstance(kernel, JITFunction):
        return None
    return kernel.fn, torch.cuda.current_device(), _kinds(args), *named.items()


def _kinds(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles for: integers, and tensors' dtypes and alignment."""
    return tuple([
        (x.dtype, x.data_ptr() & 15) if isinstance(x, Tensor) else _kinds(x) if type(x) is tuple else x for x in args
    ])  # fmt: skip
