"""Launches without Triton's binding of arguments, once a kernel has been launched with the same sizes.

A call of a JIT function binds and classifies every argument and compares every global: 20 to 40 µs on the host. What it
finds depends on the sizes, the dtypes and whether pointers are multiples of 16 bytes, which are looked up here instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

_KNOWN = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 6)  # constants are passed to the launcher
_LIMIT = 4096
_ready: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """kernel[grid](*args, **named): args are tensors, integers or tuples of them; named are constants and options."""
    if not _KNOWN or not isinstance(kernel, JITFunction):  # the interpreter's functions
        kernel[grid](*args, **named)
        return
    key = (kernel.fn, torch.cuda.current_device(), _kinds(args), *named.items())
    found = _ready.get(key)
    if found is None:
        compiled = kernel[grid](*args, **named)
        if len(_ready) >= _LIMIT:
            _ready.clear()
        if compiled is not None:  # a hook may have kept it
            _ready[key] = compiled, tuple(named[name] for name in kernel.arg_names[len(args) :])
        return
    compiled, constants = found
    compiled[(*grid, 1, 1)[:3]](*args, *constants)


def _kinds(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles for: integers, and tensors' dtypes and alignment."""
    return tuple([
        (x.dtype, x.data_ptr() & 15) if isinstance(x, Tensor) else _kinds(x) if type(x) is tuple else x for x in args
    ])  # fmt: skip
