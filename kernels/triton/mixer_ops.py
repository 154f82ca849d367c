"""A whole call of the matrix families as one custom operator: printed pointwise kernels around the chunk kernels.

prologue (operands that are no bare inputs), running maximum, chunk kernels, readout; backwards the same in reverse. A
registered Program says which tensor is which; the operator takes its name, so that torch.compile, autocast,
checkpointing and graph capture see one operator on tensors. Nothing is computed by chains of elementwise torch ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton import matrix
from dsf.kernels.triton.pointwise import level_blocks, levels, no_finish, no_sums, pointwise

PADDING = 16  # columns beside a normalised system's values, the first of them driven by ones: rows stay aligned
LEVEL_TOKENS = 1024  # tokens a program of the running maximum
LARGEST = 256
EMPTY = -1e30


@dataclass(frozen=True)
class Access:
    """A tile of a tensor: [B, T, (n), H, (N), (P)] a token, [H, (N), (P)] for a Param, by its name.

    step: micro-step (of an input: how many it has). stored: fewer heads than the launch are written once. tail: the
    columns beside the values. summed: the sums over a program's tokens, one row a program.
    """

    role: str
    step: int | None
    time: bool
    key: bool
    value: bool
    stored: bool = False
    tail: bool = False
    summed: bool = False

    @property
    def width(self) -> int:
        """How many places of `args` it takes."""
        if self.summed:
            return 1
        return 1 + (2 if self.time else 0) + 2 + self.key + self.value + self.tail

    def heads(self, x: Tensor) -> int:
        """Heads of an input."""
        return x.shape[-1 - self.key - self.value]


@dataclass(frozen=True)
class Role:
    """Where an operand of the chunk kernels comes from: the input of that name as given, or None: it is made."""

    bare: str | None


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
    is its own; the rest is as the declaration has it."""

    inputs: tuple[Access, ...]
    roles: Mapping[str, Role]
    made: tuple[Made, ...]
    direct: Mapping[str, str]
    micro: int
    before: bool
    log: bool
    keywise: bool
    ones: bool
    stabilised: bool
    accesses: Mapping[str, tuple[Access, ...]]
    functions: Any = field(default=None, compare=False)


PROGRAMS: dict[str, Program] = {}


class _Call:
    """One call: sizes, tensors by role, and launches (none of which happen for fake tensors)."""

    def __init__(self, program: Program, operands: Sequence[Tensor], real: bool) -> None:
        self.program, self.real = program, real
        self.tensors: dict[str, Tensor | None] = {}
        self.heads = 1
        self.n = self.p = 1
        for a, x in zip(program.inputs, operands, strict=True):
            self.tensors[a.role] = x
            if a.time:
                self.batch, self.tokens = x.shape[0], x.shape[1]
                self.heads = max(self.heads, int(a.heads(x)))
            if a.key:
                self.n = int(x.shape[-1 - a.value])
            if a.value:
                self.p = int(x.shape[-1])
        self.inputs = {a.role: a for a in program.inputs}
        first = next(x for a, x in zip(program.inputs, operands, strict=True) if a.time)
        self.dtype, self.device = first.dtype, first.device
        self.beside = min(PADDING + -self.p % PADDING, LARGEST - self.p) if program.ones else 0
        self.columns = self.p + self.beside

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory of the call's device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def need(self, role: str) -> Tensor:
        """A tensor that is there."""
        x = self.tensors[role]
        assert x is not None
        return x

    def launch(self, name: str) -> None:
        """Run one printed function over all tokens and heads."""
        if not self.real:
            return
        accesses = self.program.accesses[name]
        sums = any(a.summed for a in accesses)
        key, value, block = self.tile(accesses)
        span = self.span(name)
        segments = -(-self.tokens // span)
        f = self.program.functions
        pointwise[(self.heads * segments * self.batch,)](
            self.arguments(accesses), self.tokens, self.heads, self.p, span, segments,
            body=getattr(f, name), zeros=getattr(f, f"{name}_zeros") if sums else no_sums,
            finish=getattr(f, f"{name}_finish") if sums else no_finish,
            N=self.n, K=block, NB=key, BP=value, num_warps=4,
        )  # fmt: skip

    def tile(self, accesses: Sequence[Access]) -> tuple[int, int, int]:
        """Key entries, channels and tokens of a tile."""
        key = _power(self.n) if any(a.key for a in accesses) else 1
        value = _power(self.p) if any(a.value and not a.tail for a in accesses) else 1
        return key, value, max(4, min(128, 4096 // max(key, value)))

    def span(self, name: str) -> int:
        """Tokens of one program: several tiles where sums over tokens leave a row a program."""
        accesses = self.program.accesses[name]
        return self.tile(accesses)[2] * (8 if any(a.summed for a in accesses) else 1)

    def arguments(self, accesses: Sequence[Access]) -> tuple[Any, ...]:
        """Pointers and strides in the order that a printed function reads them."""
        found: list[Any] = []
        for a in accesses:
            x = self.tensors[a.role]
            if x is None:
                found += [None, *[0] * (a.width - 1)]
                continue
            if a.summed:
                found.append(x)
                continue
            if a.step is not None:
                x = x.select(2, a.step)
            lead = 2 if a.time else 0
            found += [x, *x.stride()[:lead], x.stride(lead), self.heads // x.shape[lead], *x.stride()[lead + 1 :]]
            if a.tail:
                found.append(x.shape[-1])
        return tuple(found)

    def make(self) -> list[Tensor]:
        """Run the prologue: every operand that is no bare input, in order."""
        made = []
        for m in self.program.made:
            rows = (m.rows,) if self.program.micro > 1 and m.name not in ("query", "read") else ()
            if m.key or m.value:
                size = self.n if m.key else self.columns
                kind = torch.float32 if m.name == "decay" else self.dtype
                x = self.empty(self.batch, self.tokens, *rows, self._heads_of(m), size, dtype=kind)
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
            if m.name == "value" and self.program.ones:
                self.tensors[".value"], self.tensors[".ones"] = x[..., : self.p], x[..., self.p :]
                self.tensors[".values"] = x

    def _heads_of(self, m: Made) -> int:
        return math.lcm(*(self.inputs[name].heads(self.need(name)) for name in m.of), 1)

    def operand(self, name: str) -> Tensor | None:
        """An operand of the chunk kernels, [B, rows, H, ·]; query and read still one row a token."""
        role = self.program.roles.get(name)
        if role is None:
            return None
        if role.bare is not None:
            x = self.need(role.bare)
            a = self.inputs[role.bare]
            if (a.key or a.value) and x.stride(-1) != 1:
                x = x.contiguous()
            if not (a.key or a.value) and a.heads(x) != self.heads:
                x = x.repeat_interleave(self.heads // a.heads(x), dim=-1)
        else:
            x = self.need(".values" if name == "value" and self.program.ones else f".{name}")
        wide = name in ("query", "key", "value") or (name == "decay" and self.program.keywise)
        return x.flatten(1, 2) if x.dim() > 3 + wide else x

    def reading(self, name: str) -> Tensor | None:
        """query or read as the chunk kernels take them: of the row that is read, of the next token for "before"."""
        x = self.operand(name)
        if x is None:
            return None
        if self.program.before:
            x = torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)
        if self.program.micro > 1:
            x = _last_rows(x, self.program.micro)
        return x

    def level(self, first: Tensor | None) -> Tensor:
        """The running maximum [B, H, T + 1], beginning with `first` [B, H]."""
        out = self.empty(self.batch, self.heads, self.tokens + 1)
        if self.real:
            block = min(LEVEL_TOKENS, max(16, _power(self.tokens)))
            blocks, lanes = -(-self.tokens // block), self.batch * self.heads
            maps = self.empty(lanes, blocks, 2)
            args, body = self.arguments(self.program.accesses["levels"]), self.program.functions.levels
            if blocks > 1:
                level_blocks[(blocks, lanes)](args, maps, self.tokens, self.heads, blocks, body=body, K=block)
            levels[(blocks, lanes)](args, maps, first, out, self.tokens, self.heads, blocks, body=body, K=block)
        return out

    def keep_level(self, level: Tensor) -> None:
        """Name the running maximum before, after and as seen by the readout of every token."""
        before, after = (x.movedim(1, 2) for x in (level[..., :-1], level[..., 1:]))
        self.tensors[".level_before"], self.tensors[".level_after"] = before, after
        self.tensors[".level_read"] = before if self.program.before else after

    def keep_output(self, y: Tensor) -> None:
        """Name what was read: the values' columns and the one driven by ones."""
        self.tensors[".num"], self.tensors[".den"] = y[..., : self.p], y[..., self.p] if self.program.ones else None

    def chunk_arguments(self, start: Tensor | None) -> dict[str, Any]:
        """The chunk kernels' arguments, by name."""
        names = ("decay", "source", "erase")
        found = {"q": self.reading("query"), "k": self.operand("key"), "v": self.operand("value")}
        found |= {name: self.operand(name) for name in names}
        return found | {"read": self.reading("read"), "state": start, "heads": self.heads, "log": self.program.log}


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _last_rows(x: Tensor, micro: int) -> Tensor:
    """[B, T, ...] at the last micro-step of every token, zeros at the others: [B, T · micro, ...]."""
    empty = x.new_zeros(x.shape[0], x.shape[1], micro - 1, *x.shape[2:])
    return torch.cat([empty, x.unsqueeze(2)], dim=2).flatten(1, 2)


def _start(call: _Call, state: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The chunk kernels' S_0 with the columns they hold, the first running maximum [B, H], and S_0's rescaling."""
    if state is None:
        return None, None, None
    used = call.p + call.program.ones
    start, scale, first = state[..., :used], None, None
    if call.program.stabilised:
        own = state[..., -1]
        first = own.amax(-1)
        scale = (own - first.unsqueeze(-1)).exp().unsqueeze(-1)
        start = start * scale
    if call.columns > used:
        start = torch.nn.functional.pad(start, (0, call.columns - used))
    return start.contiguous(), first, scale


def _read_first(call: _Call, start: Tensor | None, y: Tensor) -> Tensor:
    """What the first token reads of S_0, for read="before": [B, 1, H, columns]."""
    if start is None:
        return torch.zeros_like(y[:, :1])
    query, read = call.operand("query"), call.operand("read")
    assert query is not None
    q = query[:, 0].float().repeat_interleave(call.heads // query.shape[2], dim=1)
    seen = (q.unsqueeze(-2) @ start).squeeze(-2)
    return (seen if read is None else seen * read[:, 0].unsqueeze(-1)).unsqueeze(1).to(y.dtype)


def _run(
    operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool, real: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y [B, T, H, P], the final state [B, H, N, columns], and with `keep` what the backward pass needs."""
    known = PROGRAMS[program]
    call = _Call(known, operands, real)
    start, first, _ = _start(call, state)
    saved = []
    if known.stabilised:
        level = call.level(first)
        call.keep_level(level)
        saved.append(level)
    saved += call.make()
    kernels: Callable[..., Any] = matrix._chunk_matrix if real else matrix._chunk_matrix_shapes
    wide = "readout" in known.accesses
    y, final, solve = kernels(**call.chunk_arguments(start), final=True, wide=wide)
    if known.micro > 1:
        y = y[:, known.micro - 1 :: known.micro]
    if known.before:
        y = torch.cat([_read_first(call, start, y), y[:, :-1]], dim=1)
    saved.append(solve)
    if wide:
        call.keep_output(y)
        if known.ones:
            saved.append(y)
        y = call.empty(call.batch, call.tokens, call.heads, call.p, dtype=call.dtype)
        call.tensors[".y"] = y
        call.launch("readout")
    if known.ones:
        final = final[..., : call.p + 1]
    if known.stabilised:
        last = saved[0][..., -1, None, None].expand(*final.shape[:-1], 1)
        final = torch.cat([final, last], dim=-1)
    return y.contiguous(), final.contiguous(), saved if keep else []


def _forward(
    operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _run(operands, state, program, keep, True)


def _forward_shapes(
    operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _run(operands, state, program, keep, False)


def _read_gradient(call: _Call, dy: Tensor) -> Tensor:
    """The gradient of what the chunk kernels read, [B, T, H, columns], from y's."""
    call.tensors[".dy"] = dy
    if "readout_adjoint" not in call.program.accesses:
        return dy
    out = call.empty(call.batch, call.tokens, call.heads, call.columns, dtype=call.dtype)
    call.tensors[".dnum"], call.tensors[".dtail"] = out[..., : call.p], out[..., call.p :]
    call.launch("readout_adjoint")
    return out


def _pull_first(call: _Call, d_first: Tensor, start: Tensor | None, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the next token's query (and read scale) back at their own token; what the first one reads of S_0."""
    found = {}
    query, read = call.operand("query"), call.operand("read")
    for name, x in gradients.items():
        found[name] = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    if start is None or query is None:
        return found
    q = query[:, 0].float().repeat_interleave(call.heads // query.shape[2], dim=1)
    d = d_first[:, 0].float()
    if read is not None:
        found["read"][:, 0] = ((q.unsqueeze(-2) @ start).squeeze(-2) * d).sum(-1)
        d = d * read[:, 0].unsqueeze(-1)
    found["query"][:, 0] = (start @ d.unsqueeze(-1)).squeeze(-1).to(found["query"].dtype)
    found["state"] = q.unsqueeze(-1) * d.unsqueeze(-2)
    return found


def _chunk_gradients(
    call: _Call, dy: Tensor, dfinal: Tensor | None, start: Tensor | None, solve: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the operands, [B, T, (n), H, ·] as the prologue stores them, all heads apart; and of S_0."""
    known, micro = call.program, call.program.micro
    d_first = dy[:, :1]
    if known.before:
        dy = torch.cat([dy[:, 1:], torch.zeros_like(dy[:, :1])], dim=1)
    if micro > 1:
        dy = _last_rows(dy, micro)
    if dfinal is not None:
        used = call.p + known.ones
        dfinal = torch.nn.functional.pad(dfinal[..., :used], (0, call.columns - used)).contiguous()
    kernels: Callable[..., Any] = matrix._chunk_matrix_backward if call.real else matrix._chunk_matrix_backward_shapes
    arguments = call.chunk_arguments(start)
    dq, dk, dv, ddecay, dsource, derase, dread, first = kernels(dy=dy, final_gradient=dfinal, solve=solve, **arguments)
    token = {"query": dq, "read": dread}
    rows = {"key": dk, "value": dv, "decay": ddecay, "source": dsource, "erase": derase}
    token = {name: x for name, x in token.items() if name in known.roles}
    rows = {name: x for name, x in rows.items() if name in known.roles}
    if micro > 1:
        token = {name: x[:, micro - 1 :: micro] for name, x in token.items()}
        rows = {name: x.unflatten(1, (call.tokens, micro)) for name, x in rows.items()}
    if known.before:
        token = _pull_first(call, d_first, start, token)
        if "state" in token:
            first = first + token.pop("state")
    if known.ones:
        rows["ones"], rows["value"] = rows["value"][..., call.p], rows["value"][..., : call.p]
    return token | rows, first


def _sum_heads(x: Tensor, like: Tensor, axis: int) -> Tensor:
    """Sum over the heads that share one of `like`'s; in its dtype."""
    fewer = like.shape[axis]
    if x.shape[axis] != fewer:
        x = x.unflatten(axis, (fewer, -1)).sum(axis + 1, dtype=torch.float32)
    return x.to(like.dtype)


def _backward(
    real: bool, dy: Tensor, dfinal: Tensor | None, operands: Sequence[Tensor], state: Tensor | None,
    saved: Sequence[Tensor], program: str, needs: Sequence[bool],
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradients of the operands that need one, in order, and of the state (empty without one)."""
    known = PROGRAMS[program]
    call = _Call(known, operands, real)
    start, _, scale = _start(call, state)
    rest = list(saved)
    if known.stabilised:
        call.keep_level(rest.pop(0))
    call.keep([rest.pop(0) for _ in known.made])
    solve = rest.pop(0)
    if rest:
        call.keep_output(rest.pop(0))
    found, first = _chunk_gradients(call, _read_gradient(call, dy), dfinal, start, solve)
    call.tensors |= {f".d{name}": x for name, x in found.items()}
    wanted = {a.role: x for a, x, need in zip(known.inputs, operands, needs, strict=True) if need}
    pulled = [a for a in known.inputs if a.role in wanted and a.role not in known.direct]
    for a in known.inputs:
        call.tensors[f".grad_{a.role}"] = _room(call, a, wanted[a.role]) if a in pulled else None
    if pulled:
        call.launch("adjoint")
    out = []
    for a in known.inputs:
        if a.role not in wanted:
            continue
        like = wanted[a.role]
        x = found[known.direct[a.role]] if a.role in known.direct else call.need(f".grad_{a.role}")
        if a.time:
            out.append(_sum_heads(x, like, like.dim() - 1 - a.key - a.value))
        else:
            out.append(x.sum(0).to(like.dtype))
    if state is None:
        return out, call.empty(0)
    first = first[..., : call.p + known.ones]
    if scale is not None:
        first = torch.nn.functional.pad(first * scale, (0, 1))
    return out, first.contiguous()


def _room(call: _Call, a: Access, like: Tensor) -> Tensor:
    """Room for an input's gradient: all heads apart, one row a program for a Param."""
    last = like.shape[like.dim() - a.key - a.value :]
    if not a.time:
        segments = -(-call.tokens // call.span("adjoint"))
        return call.empty(call.batch * segments, call.heads, *last)
    alone = a.heads(like) == call.heads
    shape = (*like.shape[: like.dim() - 1 - len(last)], call.heads, *last)
    return call.empty(*shape, dtype=like.dtype if alone else torch.float32)


def _backward_real(*args: Any) -> tuple[list[Tensor], Tensor]:
    return _backward(True, *args)


def _backward_shapes(*args: Any) -> tuple[list[Tensor], Tensor]:
    return _backward(False, *args)


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient, cheaper on the host than what torch.library builds."""

    @staticmethod
    def forward(ctx: Any, program: str, state: Tensor | None, *operands: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            y, final, saved = matrix_mixer(list(operands), state, program, True)
        ctx.save_for_backward(state, *operands, *saved)
        ctx.program, ctx.count = program, len(operands)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*saved)
        return y, final, *saved

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, *_: Any) -> tuple[Any, ...]:
        state, *rest = ctx.saved_tensors
        operands, saved = rest[: ctx.count], rest[ctx.count :]
        if dy is None:
            call = _Call(PROGRAMS[ctx.program], operands, False)
            dy = operands[0].new_zeros(call.batch, call.tokens, call.heads, call.p, dtype=call.dtype)
        needs = list(ctx.needs_input_grad[2:])
        found, first = matrix_mixer_backward(dy, dfinal, operands, state, saved, ctx.program, needs)
        given = iter(found)
        return None, None if state is None else first, *(next(given) if need else None for need in needs)


def _autograd(
    operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The operator at the Autograd key."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*operands, state)):
        y, final, *saved = _Differentiable.apply(program, state, *operands)
        return y, final, saved
    with torch._C._AutoDispatchBelowAutograd():
        return matrix_mixer(operands, state, program, keep)


_LIBRARY = torch.library.Library("dsf", "FRAGMENT")
_LIBRARY.define("matrix_mixer(Tensor[] operands, Tensor? state, str program, bool keep) -> (Tensor, Tensor, Tensor[])")
_LIBRARY.define(
    "matrix_mixer_backward(Tensor dy, Tensor? dfinal, Tensor[] operands, Tensor? state, Tensor[] saved, str program, "
    "bool[] needs) -> (Tensor[], Tensor)"
)
_LIBRARY.impl("matrix_mixer", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("matrix_mixer_backward", _backward_real, "CompositeExplicitAutograd")
torch.library.register_fake("dsf::matrix_mixer", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("dsf::matrix_mixer_backward", _backward_shapes, lib=_LIBRARY)
_LIBRARY.impl("matrix_mixer", _autograd, "Autograd")
matrix_mixer = torch.ops.dsf.matrix_mixer.default
matrix_mixer_backward = torch.ops.dsf.matrix_mixer_backward.default
