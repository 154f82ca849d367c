"""What operators know of printed files, and one call of their functions: sizes, tensors by name, pointwise launches.

A `Program` is registered for every file of the matrix families (dsf.triton.print_chunk).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dsf.kernels.triton.launch import launch, row_strides
from dsf.kernels.triton.pointwise.kernel import no_finish, no_sums, pointwise
from dsf.kernels.triton.registry import Registry
from dsf.kernels.triton.sizes import power

PADDING = 16  # columns beside a normalised system's values, the first two of them driven by ones: rows stay aligned
LARGEST = 256
EMPTY = -1e30  # the running maximum of no tokens
MANY = 12  # vectors that a printed function loads and stores, beyond which its tiles are smaller
VECTORS = ("query", "key", "value", "left", "right")
MADE_THERE = ("left", "decay", "own")  # what the chunk kernels can make themselves: `made_` functions


@dataclass(frozen=True)
class Access:
    """A tile of a tensor: [B, T, (n), H, (N), (P)] a token, [H, (N), (P)] for a Param, by its name.

    step: micro-step (of an input: how many it has). stored: fewer heads than the launch are written once. tail: the
    columns beside the values, the first two of them driven alike; again: the second holds the first again, else what
    the first one's dtype has no room for. summed: the sums over a program's tokens, one row a program. column: of the
    state [B, H, N, COLUMNS], contiguous: the first that is meant.
    """

    role: str
    step: int | None
    time: bool
    key: bool
    value: bool
    stored: bool = False
    tail: bool = False
    again: bool = False
    summed: bool = False
    column: str | None = None

    @property
    def width(self) -> int:
        """How many places of `args` it takes."""
        if self.summed or self.column is not None:
            return 1
        return 1 + (2 if self.time else 0) + 2 + self.key + self.value + self.tail

    def heads(self, x: Tensor) -> int:
        """Heads of an input."""
        return x.shape[-1 - self.key - self.value]


@dataclass(frozen=True)
class Role:
    """Where an operand of the chunk kernels comes from: the input of that name as given, or None: it is made.

    varies: it has inputs, and so a gradient. positive: it is never negative.
    """

    bare: str | None
    varies: bool
    positive: bool = False


@dataclass(frozen=True)
class Made:
    """An operand that the prologue makes, from the inputs named in `of`; rows: micro-steps a token."""

    name: str
    key: bool
    value: bool
    rows: int
    of: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What the operator knows of a spec. accesses: of each printed function; direct: input -> operand whose gradient
    is its own; ones: there is a normaliser, column: as a column beside the values, where the chunk kernels have none;
    gated: channels are read with gains of their own, whose gradients need what was read;
    quotient: y is what was read times a factor that the normaliser makes; skip: the Param in what is added to it, where
    the chunk kernels make its gradient; floor: what no log decay is further from
    zero than, given where transitions are diagonal plus rank one; vectors: inputs whose gradients the chunk kernels
    make there, of those of left, right and decay; the rest is as the declaration has it."""

    inputs: tuple[Access, ...]
    roles: Mapping[str, Role]
    made: tuple[Made, ...]
    direct: Mapping[str, str]
    micro: int
    before: bool
    log: bool
    keywise: bool
    ones: bool
    column: bool
    gated: bool
    quotient: bool
    skip: str | None
    stabilised: bool
    floor: float | None
    vectors: tuple[str, ...]
    accesses: Mapping[str, tuple[Access, ...]]
    functions: Any = field(default=None, compare=False)


PROGRAMS: Registry[Program] = Registry("program")


def arguments_of(
    accesses: Sequence[Access], tensors: Mapping[str, Tensor | None], heads: int, fixed: bool
) -> tuple[Any, ...]:
    """Pointers and strides of tensors in the order that a printed function reads them.

    fixed: strides of time are constants where they can be, which the host has to look at in every call.
    """
    found: list[Any] = []
    for a in accesses:
        x = tensors[a.role]
        if x is None or a.width == 1:
            found += [x, *[0] * (a.width - 1)]
            continue
        if a.step is not None:
            x = x.select(2, a.step)
        lead: tuple[Any, ...] = (x.stride(0), row_strides(x)[1] if fixed else x.stride(1)) if a.time else ()
        head, *rest = x.stride()[len(lead) :]
        found += [x, *lead, head, heads // x.shape[len(lead)], *rest]
        if a.tail:
            found.append(x.shape[-1])
    return tuple(found)


class Printed(Protocol):
    """What a printed file's launches need to know. accesses: of each of its functions."""

    @property
    def inputs(self) -> tuple[Access, ...]: ...  # noqa: D102
    @property
    def accesses(self) -> Mapping[str, tuple[Access, ...]]: ...  # noqa: D102
    @property
    def functions(self) -> Any: ...  # noqa: D102


class Pointwise:
    """One call of printed functions: sizes, tensors by role, and launches."""

    def __init__(self, printed: Printed, operands: Sequence[Tensor]) -> None:
        self.printed = printed
        self.tensors: dict[str, Tensor | None] = {}
        self.heads = 1
        self.n = self.p = 1
        for a, x in zip(printed.inputs, operands, strict=True):
            self.tensors[a.role] = x
            self.heads = max(self.heads, int(a.heads(x)))
            if a.time:
                self.batch, self.tokens = x.shape[0], x.shape[1]
            if a.key:
                self.n = int(x.shape[-1 - a.value])
            if a.value:
                self.p = int(x.shape[-1])
        self.inputs = {a.role: a for a in printed.inputs}
        first = next(x for a, x in zip(printed.inputs, operands, strict=True) if a.time)
        self.like, self.dtype = first, first.dtype

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory of the call's device."""
        return self.like.new_empty(shape, dtype=dtype)

    def need(self, role: str) -> Tensor:
        """A tensor that is there."""
        x = self.tensors[role]
        assert x is not None
        return x

    def launch(self, name: str) -> None:
        """Run one printed function over all tokens and heads."""
        accesses = self.printed.accesses[name]
        sums = any(a.summed for a in accesses)
        key, value, block = self.tile(accesses)
        span = self.span(name)
        segments = -(-self.tokens // span)
        f = self.printed.functions
        launch(
            pointwise, (self.heads * segments * self.batch,),
            self.arguments(accesses), self.tokens, self.heads, self.p, span, segments,
            body=getattr(f, name), zeros=getattr(f, f"{name}_zeros") if sums else no_sums,
            finish=getattr(f, f"{name}_finish") if sums else no_finish,
            N=self.n, K=block, NB=key, BP=value, num_warps=4,
        )  # fmt: skip

    def tile(self, accesses: Sequence[Access]) -> tuple[int, int, int]:
        """Key entries, channels and tokens of a tile."""
        key = power(self.n) if any(a.key for a in accesses) else 1
        value = power(self.p) if any(a.value and not a.tail for a in accesses) else 1
        held = sum((a.key or a.value) and not a.summed for a in accesses)
        room = 4096 if held <= MANY else 1024  # entries of a tile: what is loaded stays in registers
        return key, value, max(4, min(128, room // max(key, value)))

    def span(self, name: str) -> int:
        """Tokens of one program: several tiles where sums over tokens leave a row a program."""
        accesses = self.printed.accesses[name]
        return self.tile(accesses)[2] * (8 if any(a.summed for a in accesses) else 1)

    def arguments(self, accesses: Sequence[Access]) -> tuple[Any, ...]:
        """Pointers and strides in the order that a printed function reads them."""
        return arguments_of(accesses, self.tensors, self.heads, True)

    def room(self, a: Access, like: Tensor) -> Tensor:
        """Room for an input's gradient: all heads apart, one row a program of `adjoint` for a Param.

        Zeros where printed functions store no gradient of one of its steps, which nothing reads.
        """
        last = like.shape[like.dim() - a.key - a.value :]
        if not a.time:
            segments = -(-self.tokens // self.span("adjoint"))
            return self.empty(self.batch * segments, self.heads, *last)
        alone = a.heads(like) == self.heads
        shape = (*like.shape[: like.dim() - 1 - len(last)], self.heads, *last)
        found = self.empty(*shape, dtype=like.dtype if alone else torch.float32)
        stored = {x.step for x in self._stored if x.role == f".grad_{a.role}"}
        return found if stored >= ({None} if a.step is None else set(range(a.step))) else found.zero_()

    @property
    def _stored(self) -> Iterator[Access]:
        """The accesses of what stores gradients of inputs."""
        return (x for name in ("adjoint", "vectors_adjoint") for x in self.printed.accesses.get(name, ()))

    def heads_of(self, names: Sequence[str]) -> int:
        """Heads of what is made of these inputs."""
        return math.lcm(*(self.inputs[name].heads(self.need(name)) for name in names), 1)


def gathered(a: Access, x: Tensor, like: Tensor) -> Tensor:
    """An input's gradient of all heads apart (of all programs, for a Param) as that of `like`, in its dtype."""
    if not a.time:
        x = x.sum(0)
    axis = like.dim() - 1 - a.key - a.value
    fewer = like.shape[axis]
    if x.shape[axis] != fewer:
        x = x.unflatten(axis, (fewer, -1)).sum(axis + 1, dtype=torch.float32)
    return x.to(like.dtype)
