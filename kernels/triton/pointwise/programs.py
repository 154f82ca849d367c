"""What the matrix families' operator knows of a spec, and one call of it: sizes, tensors by name, pointwise launches.

A `Program` is registered for every printed file (dsf.triton.print_chunk); `Call` binds one call's tensors to its names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.normaliser import Normaliser
from dsf.kernels.triton.launch import launch, row_strides
from dsf.kernels.triton.packed import Sequences, slots
from dsf.kernels.triton.pointwise.kernel import level_blocks, levels, no_finish, no_sums, pointwise
from dsf.kernels.triton.registry import Registry
from dsf.kernels.triton.sizes import power

PADDING = 16  # columns beside a normalised system's values, the first two of them driven by ones: rows stay aligned
LEVEL_TOKENS = 1024  # tokens a program of the running maximum
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


class Call(Pointwise):
    """One call of the matrix families."""

    def __init__(self, program: Program, operands: Sequence[Tensor], bounds: Tensor | None = None) -> None:
        super().__init__(program, operands)
        self.program = program
        self.packed = None if bounds is None else Sequences(bounds.contiguous(), program.micro)
        self.beside = min(PADDING + -self.p % PADDING, LARGEST - self.p) if program.column else 0
        self.columns = self.p + self.beside

    def beside_values(self, start: Tensor) -> Tensor:
        """A state [..., P + 1] with all columns: the normaliser's twice, as it is driven twice."""
        twice = torch.cat([start, start[..., self.p :]], dim=-1)[..., : self.columns]
        return torch.nn.functional.pad(twice, (0, self.columns - twice.shape[-1]))

    def of_ones(self, x: Tensor) -> Tensor:
        """The normaliser's [...] of a gradient [..., COLUMNS]: its column's, and what that one has no room for."""
        return x[..., self.p : self.p + 2].sum(-1, dtype=torch.float32)

    def make(self) -> list[Tensor]:
        """Run the prologue: every operand that is no bare input, in order."""
        made = []
        for m in self.program.made:
            rows = (m.rows,) if self.program.micro > 1 and m.name not in ("query", "read") else ()
            if m.key or m.value:
                size = self.n if m.key else self.columns
                kind = torch.float32 if m.name in ("decay", "left") else self.dtype
                x = self.empty(self.batch, self.tokens, *rows, self.heads_of(m.of), size, dtype=kind)
            else:  # contiguous in time, as the chunk kernels read them
                x = self.empty(self.batch, self.heads, self.tokens, *rows)
                x = x.movedim(1, -1)
            made.append(x)
        self.keep(made)
        if made:
            self.launch("prologue")
        return made

    def keep(self, made: Sequence[Tensor]) -> None:
        """Name what the prologue makes or made."""
        for m, x in zip(self.program.made, made, strict=True):
            self.tensors[f".{m.name}"] = x
            if m.name == "value" and self.program.column:
                self.tensors[".value"], self.tensors[".ones"] = x[..., : self.p], x[..., self.p :]
                self.tensors[".values"] = x

    def operand(self, name: str) -> Tensor | None:
        """An operand of the chunk kernels, [B, rows, H, ·]; query and read still one row a token."""
        role = self.program.roles.get(name)
        if name == "read" and ".factor" in self.tensors:
            return self.tensors[".factor"]
        if role is None or f"made_{name}" in self.program.accesses:
            return None
        if role.bare is not None:
            x = self.need(role.bare)
            a = self.inputs[role.bare]
            if (a.key or a.value) and x.stride(-1) != 1:
                x = x.contiguous()
            if not (a.key or a.value) and a.heads(x) != self.heads:
                x = x.repeat_interleave(self.heads // a.heads(x), dim=-1)
        else:
            x = self.need(".values" if name == "value" and self.program.column else f".{name}")
        wide = name in VECTORS or (name == "decay" and self.program.keywise)
        return x.flatten(1, 2) if x.dim() > 3 + wide else x

    def reading(self, name: str) -> Tensor | None:
        """query or read as the chunk kernels take them: of the row that is read, of the next token for "before"."""
        x = self.operand(name)
        if x is None:
            return None
        if self.program.before:  # the last rows of packed sequences get others' queries: what they read nobody takes
            x = torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)
        if self.program.micro > 1:
            x = last_rows(x, self.program.micro)
        return x

    def level(self, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The running maximum before and after every token [2, B, H, T], and the last; it begins with `first` [B, H].

        Of packed sequences the first and the last are [S, H].
        """
        out = self.empty(2, self.batch, self.heads, self.tokens)
        last = self.empty(self.ends, self.heads) if first is None else first.clone()
        if self.packed is not None and first is None:  # some may have no tokens
            last.fill_(EMPTY)
        block = min(LEVEL_TOKENS, max(16, power(self.tokens)))
        blocks, lanes, table = -(-self.tokens // block), self.batch * self.heads, None
        if self.packed is not None:
            blocks = slots(self.tokens, self.packed.count, block)
            table = self.packed.tables(self.tokens, block).chunks
        maps = self.empty(lanes, blocks, 2)
        args, body = self.arguments(self.program.accesses["levels"]), self.program.functions.levels
        sizes = (self.tokens, self.heads, blocks)
        if blocks > 1:
            launch(level_blocks, (blocks, lanes), args, maps, table, *sizes, body=body, K=block)
        launch(levels, (blocks, lanes), args, maps, first, out, last, table, *sizes, body=body, K=block)
        return out, last

    def keep_level(self, level: Tensor) -> None:
        """Name the running maximum before, after and as seen by the readout of every token."""
        before, after = level.movedim(2, 3)
        self.tensors[".level_before"], self.tensors[".level_after"] = before, after
        self.tensors[".level_read"] = before if self.program.before else after

    def keep_output(self, num: Tensor, den: Tensor | None) -> None:
        """Name what was read: of the values, and of the normaliser."""
        if self.program.column:
            num, den = num[..., : self.p], num[..., self.p]
        self.tensors[".num"], self.tensors[".den"] = num, den

    def chunk_arguments(self, start: Tensor | None) -> dict[str, Any]:
        """The chunk kernels' arguments, by name. start: with the normaliser's column, if there is one."""
        found: dict[str, Any] = {"q": self.reading("query"), "k": self.operand("key"), "v": self.operand("value")}
        found["packed"] = self.packed
        if self.program.floor is not None:
            found |= {name: self.operand(name) for name in ("decay", "left", "right", "own")}
            found["made"] = {name: self.printed_with(f"made_{name}") for name in MADE_THERE}
            return found | {"state": start, "heads": self.heads, "floor": self.program.floor}
        found |= {name: self.operand(name) for name in ("decay", "source", "erase")}
        found |= {"read": self.reading("read"), "heads": self.heads, "log": self.program.log}
        found["positive"] = "source" in self.program.roles and self.program.roles["source"].positive
        normal = None
        if self.inside:
            start, column = self.split(start)
            normal = Normaliser(self.operand("ones"), column)
        return found | {"state": start, "normal": normal}

    def printed_with(self, name: str) -> tuple[Any, tuple[Any, ...]] | None:
        """A printed function that chunk kernels call, and its pointers and strides; None where there is none."""
        accesses = self.program.accesses.get(name)
        return None if accesses is None else (getattr(self.program.functions, name), self.arguments(accesses))

    @property
    def ends(self) -> int:
        """How many sequences have a state."""
        return self.batch if self.packed is None else self.packed.count

    @property
    def firsts(self) -> Tensor:
        """The first tokens of packed sequences [S]; T for those that have none."""
        assert self.packed is not None
        bounds = self.packed.bounds.long()
        return torch.where(bounds[1:] > bounds[:-1], bounds[:-1], self.tokens)

    def first(self, x: Tensor) -> Tensor:
        """Rows [B or sequences, ...] of x [B, T, ...] at first tokens, zeros where there are none."""
        if self.packed is None:
            return x[:, 0]
        at = self.firsts
        rows = x[0, at.clamp(max=self.tokens - 1)]
        return rows.masked_fill((at == self.tokens).view(-1, *[1] * (rows.dim() - 1)), 0)

    def later(self, x: Tensor, first: Tensor) -> Tensor:
        """x [B, T, ...] a token later, with `first` [B or sequences, ...] at first tokens."""
        if self.packed is None:
            return torch.cat([first.unsqueeze(1), x[:, :-1]], dim=1)
        moved = torch.cat([x[0, :1], x[0]])
        return moved.index_copy_(0, self.firsts, first.to(x.dtype))[None, : self.tokens]

    def earlier(self, x: Tensor) -> Tensor:
        """x [B, T, ...] of the token after each, zeros at last tokens."""
        whole = torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)
        if self.packed is not None:
            whole[0].index_fill_(0, self.firsts, 0)
        return whole[:, 1:]

    @property
    def varying(self) -> set[str]:
        """The operands that have gradients."""
        return {name for name, role in self.program.roles.items() if role.varies}

    @property
    def inside(self) -> bool:
        """True where the chunk kernels compute a normaliser."""
        return self.program.ones and not self.program.column

    @property
    def refined(self) -> bool:
        """True where the backward pass reads y with more digits than it is given in."""
        return self.program.quotient and self.dtype in (torch.bfloat16, torch.float16)

    def split(self, state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """A state [B, H, N, P + 1] as that of the values and the normaliser [B, H, N]."""
        if state is None:
            return None, None
        return state[..., : self.p].contiguous(), state[..., self.p].contiguous()


def last_rows(x: Tensor, micro: int) -> Tensor:
    """[B, T, ...] at the last micro-step of every token, zeros at the others: [B, T · micro, ...]."""
    empty = x.new_zeros(x.shape[0], x.shape[1], micro - 1, *x.shape[2:])
    return torch.cat([empty, x.unsqueeze(2)], dim=2).flatten(1, 2)
