"""What operators need to know of printed files (`Program`), and a call of the printed functions (`Pointwise`).

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

PADDING = 16  # columns added to a normalised system's values, so that rows stay aligned; ones drive the first two
PAIRED = "(n // 2)"  # the entry of an input that has one for every pair of places
LARGEST = 256
EMPTY = -1e30  # running maximum before the first token
MANY = 12  # a printed function that loads and stores more vectors has smaller tiles
VECTORS = ("query", "key", "value", "left", "right")
MADE_THERE = ("left", "decay", "own")  # operands that the chunk kernels can compute, by `made_` functions


@dataclass(frozen=True)
class Access:
    """A tensor of a printed function: [B, T, (n), H, (N), (P)] per token, [H, (N), (P)] for a Param. role: its name.

    step: which micro-step (in Program.inputs: how many). stored: it is written, by one head of those that share a head
    of it. tail: the PADDING columns after the values, whose first two hold the normaliser; again: the second repeats
    the first, else it holds the first one's rounding error. summed: sums over a program's tokens, one row a program.
    column: for the contiguous state [B, H, N, COLUMNS], the first column. entry: the printed index on the Key axis, or
    the row of the state.
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
    entry: str = "n"

    @property
    def width(self) -> int:
        """How many entries of `args` it takes."""
        if self.summed or self.column is not None:
            return 1
        return 1 + (2 if self.time else 0) + 2 + self.key + self.value + self.tail

    def heads(self, x: Tensor) -> int:
        """Heads of an input."""
        return x.shape[-1 - self.key - self.value]


@dataclass(frozen=True)
class Role:
    """An operand of the chunk kernels. bare: the input that it is, or None where it is computed.

    varies: it depends on inputs, and so has a gradient. positive: it is never negative.
    """

    bare: str | None
    varies: bool
    positive: bool = False


@dataclass(frozen=True)
class Made:
    """An operand that the prologue computes from the inputs `of`. key, value: its axes; rows: micro-steps a token."""

    name: str
    key: bool
    value: bool
    rows: int
    of: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What the operator knows of a spec.

    roles: of the operands, by name; made: those that the prologue computes; direct: {input: operand with the same
    gradient}; micro: rows a token, of all its micro-steps; before: y reads the state before the update; log: decays
    are logarithms; keywise: one for each key entry; ones: there is a normaliser, column: as a column of the values;
    gated: C has a factor of single channels; quotient: y is the read times a factor of the denominator; skip: the Param
    of a skip whose gradient the chunk kernels compute; stabilised: there is a running maximum; floor: log decays are
    between it and -floor (transitions that are diagonal plus rank one, else None); vectors: inputs of left, right and
    decay whose gradients the chunk kernels compute; accesses: the tensors of each printed function; group: rows of one
    micro-step, several where it sums corrections; undecayed: rows erase before their decay, which divides the erases;
    precise: bfloat16 products of decays by head have two terms, where sums of several systems' gradients cancel; reads:
    a token's readouts, several of which stand in its rows.
    """

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
    group: int = 1
    undecayed: bool = False
    reads: int = 1
    precise: bool = field(default=False, repr=False)
    functions: Any = field(default=None, compare=False)

    @property
    def together(self) -> int:
        """Rows that see what all of them write: a token's where it has several readouts, else 1."""
        return self.micro if self.reads > 1 or "fresh" in self.roles else 1


PROGRAMS: Registry[Program] = Registry("program")


def arguments_of(
    accesses: Sequence[Access], tensors: Mapping[str, Tensor | None], heads: int, fixed: bool
) -> tuple[Any, ...]:
    """Pointers and strides of tensors, in the order in which a printed function reads them.

    fixed: strides of time are compile-time constants where possible, which the host then checks in every call.
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
    """What the launches of a printed file need. accesses: the tensors of each function."""

    @property
    def inputs(self) -> tuple[Access, ...]: ...  # noqa: D102
    @property
    def accesses(self) -> Mapping[str, tuple[Access, ...]]: ...  # noqa: D102
    @property
    def functions(self) -> Any: ...  # noqa: D102


class Pointwise:
    """One call of printed functions. heads, n, p, batch, tokens: sizes from the operands; tensors: by role."""

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
        """Uninitialised memory on the call's device."""
        return self.like.new_empty(shape, dtype=dtype)

    def need(self, role: str) -> Tensor:
        """The tensor of a role, which must exist."""
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
            self.arguments(accesses), self.tokens, span, segments,
            body=getattr(f, name), zeros=getattr(f, f"{name}_zeros") if sums else no_sums,
            finish=getattr(f, f"{name}_finish") if sums else no_finish,
            H=self.heads, N=self.n, P=self.p, K=block, NB=key, BP=value, num_warps=4,
        )  # fmt: skip

    def tile(self, accesses: Sequence[Access]) -> tuple[int, int, int]:
        """(key entries, channels, tokens) of a tile."""
        key = power(self.n) if any(a.key for a in accesses) else 1
        value = power(self.p) if any(a.value and not a.tail for a in accesses) else 1
        held = sum((a.key or a.value) and not a.summed for a in accesses)
        room = 4096 if held <= MANY else 1024  # entries of a tile, so that it fits the registers
        return key, value, max(4, min(128, room // max(key, value)))

    def span(self, name: str) -> int:
        """Tokens of one program: several tiles where each program stores a row of sums over its tokens."""
        accesses = self.printed.accesses[name]
        return self.tile(accesses)[2] * (8 if any(a.summed for a in accesses) else 1)

    def arguments(self, accesses: Sequence[Access]) -> tuple[Any, ...]:
        """`arguments_of` for tensors of this call, with constant strides of time."""
        return arguments_of(accesses, self.tensors, self.heads, True)

    def room(self, a: Access, like: Tensor, fine: bool = False) -> Tensor:
        """Memory for an input's gradient with all H heads; for a Param one row for each program of `adjoint`. fine: in
        float32.

        Zeros where printed functions do not store the gradient of every micro-step.
        """
        last = like.shape[like.dim() - a.key - a.value :]
        if not a.time:
            segments = -(-self.tokens // self.span("adjoint"))
            return self.empty(self.batch * segments, self.heads, *last)
        alone = a.heads(like) == self.heads
        shape = (*like.shape[: like.dim() - 1 - len(last)], self.heads, *last)
        found = self.empty(*shape, dtype=like.dtype if alone and not fine else torch.float32)
        stored = {x.step for x in self._stored if x.role == f".grad_{a.role}"}
        return found if stored >= ({None} if a.step is None else set(range(a.step))) else found.zero_()

    @property
    def _stored(self) -> Iterator[Access]:
        """The accesses of the functions that store gradients of inputs."""
        return (x for name in ("adjoint", "vectors_adjoint") for x in self.printed.accesses.get(name, ()))

    def heads_of(self, names: Sequence[str]) -> int:
        """How many heads an expression of these inputs has."""
        return math.lcm(*(self.inputs[name].heads(self.need(name)) for name in names), 1)


def gathered(a: Access, x: Tensor, like: Tensor, fine: bool = False) -> Tensor:
    """An input's gradient from `room`, summed over shared heads (over programs, for a Param), in dtype of `like`, or in
    float32 if fine."""
    if not a.time:
        x = x.sum(0)
    axis = like.dim() - 1 - a.key - a.value
    fewer = like.shape[axis]
    if x.shape[axis] != fewer:
        x = x.unflatten(axis, (fewer, -1)).sum(axis + 1, dtype=torch.float32)
    return x.to(torch.float32 if fine else like.dtype)
