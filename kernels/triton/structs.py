"""The arguments of kernels: operands as NamedTuples of pointers and strides, compile-time constants as one Config.

Kernels read a struct's fields by name and pass it on whole; moving its pointer makes a new struct. Triton specialises
the numbers in a struct (for 1, for multiples of 16) despite `do_not_specialize`, so counts that change from call to
call are separate parameters. Strides of tokens and counts of heads in structs are constants.
A missing operand is a field that is None, not a struct that is None: Triton 3.6 cannot compare a struct that has a None
field with None, nor return one. It also confuses constants in nested structs, so kernels' structs are flat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dsf.kernels.triton.launch import constant


class Rows(NamedTuple):
    """x [B, T, H', ·], whose last axis is contiguous, or None: its address, the strides of B, T and H', and how many
    heads share one of H'."""

    at: Any = None
    batch: Any = None
    token: Any = None
    head: Any = None
    group: Any = None


class Numbers(NamedTuple):
    """x [B, T, H] or None: its address and strides."""

    at: Any = None
    batch: Any = None
    token: Any = None
    head: Any = None


class Sizes(NamedTuple):
    """T; H, a constant; length: rows of a head padded to whole chunks; plane: rows of all B · H heads."""

    tokens: Any
    heads: Any
    length: Any
    plane: Any


class Config:
    """Base of frozen dataclasses whose fields are a kernel's compile-time constants.

    Fields may be functions that the kernel calls. Triton identifies compiled kernels by the text of their constants, in
    memory by __repr__ and on disk by cache_key, so these texts contain such functions' sources, not only their names.
    Configs are equal if their texts are. The texts are made once, since every launch hashes its arguments.
    """

    def __init_subclass__(cls) -> None:
        for name in ("__eq__", "__hash__", "__repr__"):  # else dataclasses would replace them
            setattr(cls, name, getattr(Config, name))

    def __post_init__(self) -> None:
        for x in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, x.name, constant(getattr(self, x.name)))

    @functools.cached_property
    def cache_key(self) -> str:
        """The text of all fields, with the sources of functions."""
        return self._text(lambda x: x.cache_key if isinstance(x, JITFunction) else repr(x))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.cache_key == other.cache_key

    def __hash__(self) -> int:
        return hash(self.cache_key)

    def __repr__(self) -> str:
        return self.cache_key

    def __str__(self) -> str:
        return self._text(lambda x: getattr(x, "__name__", None) or str(x))

    def _text(self, show: Callable[[Any], str]) -> str:
        plain = ((x.name, getattr(self, x.name)) for x in fields(self))  # type: ignore[arg-type]
        values = (f"{name}={show(x.value if isinstance(x, tl.constexpr) else x)}" for name, x in plain)
        return f"{type(self).__name__}({', '.join(values)})"


def derived(method: Callable[[Any], Any]) -> Any:
    """A property of a Config that kernels can read like a field."""
    return property(lambda self: constant(method(self)))


@triton.jit
def of_head(x, batch, head):
    """Rows of one sequence and head: `x` moved to their first token."""
    return Rows(x.at + batch * x.batch + head // x.group * x.head, x.batch, x.token, x.head, x.group)


@triton.jit
def alike(at, x):
    """Rows at another address, with the strides of x."""
    return Rows(at, x.batch, x.token, x.head, x.group)
