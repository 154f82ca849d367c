"""What kernels take: operands as NamedTuples of pointers and strides, and all that they are compiled for as one Config.

In a kernel a struct is read by its fields' names and handed on whole; one whose pointer has moved is a new struct.
Triton specialises the numbers in it (to 1, to multiples of 16) whatever `do_not_specialize` says, so counts that change
from call to call are parameters of their own. A struct's strides of tokens and counts of heads are constants.
What is not there is a field that is None, not a struct: Triton 3.6 cannot ask whether a struct with such a field is
None, nor return one, and in structs of structs it mistakes constants; so kernels' structs are flat.
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
    """x [B, T, H', ·], whose last axis is contiguous: where it begins, the strides of B, T and H', and how many heads
    share one of H'."""

    at: Any
    batch: Any
    token: Any
    head: Any
    group: Any


class Numbers(NamedTuple):
    """x [B, T, H], if there is one: where it begins, and its strides."""

    at: Any = None
    batch: Any = None
    token: Any = None
    head: Any = None


class Sizes(NamedTuple):
    """T; H, a constant; length: rows of a head's chunks, the last one filled up; plane: those of all B · H heads."""

    tokens: Any
    heads: Any
    length: Any
    plane: Any


class Config:
    """What a kernel is compiled for: frozen dataclasses of such a class, whose fields kernels read as constants.

    Fields may be functions that the kernel calls. Triton knows compiled kernels by the text of what they were compiled
    for, in memory by __repr__ and on disk by cache_key, so these hold such functions' sources, not only their names.
    Configs are equal where these texts are, which are made once: a launch asks for hashes of all that it is given.
    """

    def __init_subclass__(cls) -> None:
        for name in ("__eq__", "__hash__", "__repr__"):  # or dataclasses make others
            setattr(cls, name, getattr(Config, name))

    def __post_init__(self) -> None:
        for x in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, x.name, constant(getattr(self, x.name)))

    @functools.cached_property
    def cache_key(self) -> str:
        """All that it holds."""
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
    """A property of a Config that kernels read as they read its fields."""
    return property(lambda self: constant(method(self)))


@triton.jit
def of_head(x, batch, head):
    """Rows of one sequence and head: `x` moved to their first token."""
    return Rows(x.at + batch * x.batch + head // x.group * x.head, x.batch, x.token, x.head, x.group)


@triton.jit
def alike(at, x):
    """Rows at another place, of x's strides."""
    return Rows(at, x.batch, x.token, x.head, x.group)
