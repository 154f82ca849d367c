"""A whole call of the matrix families as one custom operator: printed pointwise kernels around the chunk kernels.

Forward: running maximum, prologue (it computes the operands that are not bare inputs), chunk kernels, readout. The
backward pass runs their adjoints in reverse order. The operator takes the name of a registered Program, so that
torch.compile, autocast, checkpointing and graph capture see one operator on tensors. There are no chains of elementwise
torch operations.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.chunk import matrix, rank_one_ops
from dsf.kernels.triton.chunk.call import ChunkCall
from dsf.kernels.triton.chunk.cross import Border
from dsf.kernels.triton.chunk.normaliser import Normaliser
from dsf.kernels.triton.chunk.reads import by_row, count_reads, pull_first, read_first, read_gradient
from dsf.kernels.triton.chunk.row_gradients import Skip
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.programs import PROGRAMS, gathered


class Turned(NamedTuple):
    """What a backward pass computes for operands that were turned: the gradient of turning the states between chunks,
    and, by role, which inputs' gradients are in float32."""

    border: Border | None = None
    fine: frozenset[str] = frozenset()


def starting(call: ChunkCall, state: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(S_0 [B or sequences, H, N, columns], m_0 of the running maximum, the factor by which S_0 was rescaled)."""
    if state is None:
        return None, None, None
    used = call.p + call.program.ones
    start, scale, first = state[..., :used], None, None
    if call.program.stabilised:
        own = state[..., -1]
        first = own.amax(-1)
        scale = (own - first.unsqueeze(-1)).exp().unsqueeze(-1)
        start = start * scale
    if call.program.column:
        start = call.beside_values(start)
    return start.contiguous(), first, scale


def _forward(
    operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool, bounds: Tensor | None = None,
    held: Sequence[Tensor] | None = None, border: Tensor | None = None, marks: Sequence[Tensor] | None = None,
    marked: Sequence[int] = (),
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """y [B, T, H, P], the final state [B, H, N, columns], and with `keep` what the backward pass needs.

    bounds: boundaries [S + 1] of packed sequences, which then have states [S, H, N, columns]. held: what
    dsf::matrix_shard returned, or nothing. border, marks and marked are for gradients alone (`_Differentiable`).
    """
    known = PROGRAMS[program]
    call = ChunkCall(known, operands, bounds)
    start, first, _ = starting(call, state)
    saved = []
    if known.stabilised:
        level, last, _ = call.level(first)
        call.keep_level(level)
        saved.append(level)
    held, split = held or (), len(held or ()) - len(known.made)  # what the prologue made stands last
    made = held[split:] if held else call.make()
    if held:
        call.keep(made)
    saved += made
    wide = "readout" in known.accesses and (keep or "finish" not in known.accesses)
    more = call.empty(call.batch, call.tokens, call.heads, call.p, dtype=torch.int8) if keep and call.refined else None
    call.tensors[".more"] = more
    y, ends, kept, den = _chunks(call, start, wide, keep, held[:split] if held else ())
    if known.micro > 1:
        last_of_token = slice(known.micro - 1, None, known.micro)
        y = y.unflatten(1, (call.tokens, known.micro)) if known.reads > 1 else y[:, last_of_token]
        den = None if den is None else den[:, last_of_token]
    if known.before:
        first_read = read_first(call, start, y)
        y = call.later(y, first_read[..., : y.shape[-1]])
        if den is not None:
            den = call.later(den, first_read[..., -1])
    saved += kept
    if wide:
        call.keep_output(y, den)
        if known.ones or known.gated:  # for a quotient the backward pass needs y, not num
            saved += ([] if known.quotient else [y]) + ([] if den is None else [den])
        y = call.empty(call.batch, call.tokens, call.heads, call.p, dtype=call.dtype)
        call.tensors[".y"] = y
        call.launch("readout")
    elif den is not None:  # a quotient, divided by the chunk kernels
        saved.append(den)
    saved += [] if more is None else [more]
    if known.column:
        ends[0] = ends[0][..., : call.p + 1]
    if known.stabilised:
        ends.append(last[..., None, None].expand(*ends[0].shape[:-1], 1))
    final = ends[0] if len(ends) == 1 else torch.cat(ends, dim=-1)
    return y.contiguous(), final.contiguous(), saved if keep else []


def _chunks(
    call: ChunkCall, start: Tensor | None, wide: bool, keep: bool, held: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor | None]:
    """The chunk kernels: y (float32 when `wide`), S_T's columns, what the backward pass needs, the normaliser."""
    arguments = call.chunk_arguments(start)
    if call.program.floor is not None:
        y, final, kept = rank_one_ops.forward(**arguments, wide=wide, keep=keep, held=held[2:])
        return y, [final], kept, None
    finish = None
    if not wide and "finish" in call.program.accesses:
        f = call.program.functions
        finish = f.finish_loads, f.finish, call.arguments(call.program.accesses["finish"]), call.tensors[".more"]
    rows: list[Tensor] | None = [] if keep else None
    y, final, solve = matrix._chunk_matrix(**arguments, final=True, wide=wide, finish=finish, kept=rows, held=held)
    normal: Normaliser | None = arguments["normal"]
    if normal is None:
        return y, [final], [solve, *(rows or ())], None
    assert normal.states is not None and normal.final is not None
    return y, [final, normal.final.unsqueeze(-1)], [solve, normal.states, *(rows or ())], normal.read


def _chunk_gradients(
    call: ChunkCall, dy: Tensor, slope: Tensor | None, dfinal: Tensor | None, start: Tensor | None, kept: list[Tensor],
    held: Sequence[Tensor], turned: Turned,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """Gradients of the operands [B, T, (n), H, ·] with all H heads, and of S_0."""
    known, micro = call.program, call.program.micro
    d_first, dy, slope, dfinal = by_row(call, dy, slope, dfinal)
    found, first = _unchunk(call, dy, slope, dfinal, start, kept, held, turned)
    token = {name: x for name, x in found.items() if name == "read" or (name == "query" and known.reads == 1)}
    sums = {"skip": found.pop("skip")} if "skip" in found else {}
    rows = {name: x for name, x in found.items() if name not in token}
    if micro > 1:
        token = {name: x[:, micro - 1 :: micro] for name, x in token.items()}
        rows = {name: x.unflatten(1, (call.tokens, micro)) for name, x in rows.items()}
    if known.before:
        token = pull_first(call, d_first, start, token)
        if "state" in token:
            first = first + token.pop("state")
    if known.column:
        rows["ones"], rows["value"] = call.of_ones(rows["value"]), rows["value"][..., : call.p]
    return token | rows | sums, first


def _unchunk(
    call: ChunkCall, dy: Tensor, slope: Tensor | None, dfinal: Tensor | None, start: Tensor | None, kept: list[Tensor],
    held: Sequence[Tensor], turned: Turned,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """The chunk kernels' gradients of the operands by rows, and of S_0."""
    arguments = call.chunk_arguments(start)
    if call.program.floor is not None:
        pull = call.printed_with("vectors_adjoint")
        return rank_one_ops.backward(**arguments, dy=dy, final_gradient=dfinal, saved=kept, pull=pull)
    normal: Normaliser | None = arguments["normal"]
    if normal is not None:
        normal.slope, normal.states = slope, kept[1]
        dfinal, normal.final_gradient = call.split(dfinal)
    skip = None
    if call.program.skip is not None:
        f = call.program.functions
        skip = Skip(f.finish_loads, f.skip_adjoint, call.arguments(call.program.accesses["finish"]))
    of_erase = "fresh" if "fresh" in call.program.roles else "erase"
    names = ("query", "key", "value", "decay", "source", of_erase, "read", "right")
    direct = {*call.program.direct.values()}
    summed = {"query", "key"} <= direct and not call.program.before
    fine = {call.program.direct.get(role) for role in turned.fine}
    exact = tuple(name not in direct or name in fine for name in (*names[:3], "right"))
    wanted = matrix.Wanted("read" in call.varying, summed, exact, turned.border)
    *found, first = matrix._chunk_matrix_backward(
        **arguments, dy=dy, final_gradient=dfinal, solve=kept[0], skip=skip,
        kept=kept[1 if normal is None else 2 :], wanted=wanted, held=held,
    )  # fmt: skip
    by_name = {name: x for name, x in zip(names, found, strict=True) if name in call.varying}
    if skip is not None and skip.sums is not None:
        by_name["skip"] = skip.sums
    if normal is not None:
        if normal.d_ones is not None:
            by_name["ones"] = normal.d_ones
        if normal.first is not None:
            first = torch.cat([first, normal.first.unsqueeze(-1)], dim=-1)
    return by_name, first


def resumed(
    call: ChunkCall, state: Tensor | None, saved: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
    """S_0 and its factor (`starting`), and what the chunk kernels kept; registers the rest of `saved` by name."""
    known = call.program
    start, _, scale = starting(call, state)
    rest = list(saved)
    if known.stabilised:
        call.keep_level(rest.pop(0))
    call.keep([rest.pop(0) for _ in known.made])
    outputs = 2 if call.inside else int(known.ones or known.gated)
    if known.quotient:
        outputs += call.refined
        call.tensors |= {".den": rest[-outputs], ".more": rest[-2] if call.refined else None, ".y": rest[-1]}
    elif outputs:
        call.keep_output(rest[-outputs], rest[-1])
    return start, scale, rest[: len(rest) - outputs]


def _backward(
    dy: Tensor, dfinal: Tensor | None, operands: Sequence[Tensor], state: Tensor | None,
    saved: Sequence[Tensor], program: str, needs: Sequence[bool], bounds: Tensor | None = None,
    held: Sequence[Tensor] = (), bordered: bool = False, fine: Sequence[int] = (),
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradients of the operands that need one, in order, and of the state (empty without one). bordered: behind the
    others that of turning the states between chunks (`Border`). fine: operands whose gradients are in float32."""
    known = PROGRAMS[program]
    call = ChunkCall(known, operands, bounds)
    start, scale, kept = resumed(call, state, saved)
    wanted = {a.role: x for a, x, need in zip(known.inputs, operands, needs, strict=True) if need}
    for a in known.inputs:
        own = a.role in wanted and a.role in known.vectors
        call.tensors[f".grad_{a.role}"] = call.room(a, wanted[a.role]) if own else None
    turned = Turned(Border() if bordered else None, frozenset(known.inputs[i].role for i in fine))
    reads, held = held[: count_reads(call)], held[count_reads(call) :]
    found, first = _chunk_gradients(call, *read_gradient(call, dy, reads), dfinal, start, kept, held, turned)
    out = pulled_back(call, wanted, found, turned.fine)
    if turned.border is not None:
        assert turned.border.slopes is not None
        out.append(turned.border.slopes)
    if state is None:
        return out, call.empty(0)
    if known.column:
        first = torch.cat([first[..., : call.p], call.of_ones(first).unsqueeze(-1)], dim=-1)
    if scale is not None:
        first = torch.nn.functional.pad(first * scale, (0, 1))
    return out, first.contiguous()


def pulled_back(
    call: ChunkCall, wanted: dict[str, Tensor], found: dict[str, Tensor], fine: Container[str] = ()
) -> list[Tensor]:
    """Gradients of the inputs `wanted`, by role and in order, from those of the operands, by name. fine: the roles of
    those in float32."""
    known = call.program
    call.tensors |= {f".d{name}": x for name, x in found.items()}
    made = {*known.direct, known.skip, *known.vectors}
    pulled = [a for a in known.inputs if a.role in wanted and a.role not in made]
    for a in known.inputs:  # the printed adjoint stores those that have room
        call.tensors.setdefault(f".grad_{a.role}", None)
    for a in pulled:
        call.tensors[f".grad_{a.role}"] = call.room(a, wanted[a.role], a.role in fine)
    if pulled:
        call.launch("adjoint")
    out = []
    for a in known.inputs:
        if a.role not in wanted:
            continue
        like = wanted[a.role]
        operand = "skip" if a.role == known.skip else known.direct.get(a.role)
        x = call.need(f".grad_{a.role}") if operand is None else found[operand]
        if operand is not None and a.step == 1:  # the kernels' rows are micro-steps, without an axis for them
            x = x.unsqueeze(2)
        out.append(gathered(a, x, like, a.role in fine))
    return out


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient; faster on the host than the wrapper of torch.library.

    marks: tensors of zeros that stand for operands, whose numbers are `marked`, where a gradient is passed on: it is
    in float32 then, whatever the operand's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, program: str, bounds: Tensor | None, state: Tensor | None, border: Tensor | None,
        marked: tuple[int, ...], *given: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        operands = given[len(marked) :]
        with torch._C._AutoDispatchBelowAutograd():
            y, final, saved = matrix_mixer(list(operands), state, program, True, bounds, None, border, None, marked)
        ctx.save_for_backward(bounds, state, *operands, *saved, *([y] if PROGRAMS[program].quotient else []))
        ctx.program, ctx.count, ctx.marked = program, len(operands), marked
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        refuse_second_order()
        bounds, state, *rest = ctx.saved_tensors
        operands, saved = rest[: ctx.count], rest[ctx.count :]
        if dy is None:
            call = ChunkCall(PROGRAMS[ctx.program], operands)
            dy = operands[0].new_zeros(call.batch, call.tokens, call.heads, call.p, dtype=call.dtype)
        bordered, _, *needs = ctx.needs_input_grad[3:]
        marked, needs = ctx.marked, needs[len(ctx.marked) :]
        wanted = [need or i in marked for i, need in enumerate(needs)]
        how: tuple[Any, ...] = (ctx.program, wanted, bounds, [], bordered, list(marked))
        found, first = matrix_mixer_backward(dy, dfinal, operands, state, saved, *how)
        border, given = found.pop() if bordered else None, iter(found)
        grads = [next(given) if want else None for want in wanted]
        own = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
        return None, None, None if state is None else first, border, None, *(grads[i] for i in marked), *own


def _differentiable(
    operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool, bounds: Tensor | None = None,
    held: Sequence[Tensor] | None = None, border: Tensor | None = None, marks: Sequence[Tensor] = (),
    marked: Sequence[int] = (),
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    return *_Differentiable.apply(program, bounds, state, border, tuple(marked), *marks, *operands), []


def _behind(
    made: Any, operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool, bounds: Tensor | None = None,
    held: Any = None, border: Tensor | None = None, marks: Any = None, marked: Sequence[int] = (),
) -> tuple[Any, ...] | None:  # fmt: skip
    """The likeliest call of gradients: of a dy like y, and of the last state where the first has one. None where none
    are wanted."""
    if not keep:
        return None
    y, final, saved = made
    dfinal = final if state is not None and state.requires_grad else None
    saved = [*saved, y] if PROGRAMS[program].quotient else saved
    wanted = [x.requires_grad or i in marked for i, x in enumerate(operands)]
    turned = border is not None and border.requires_grad, list(marked)
    return matrix_mixer_backward, y, dfinal, operands, state, saved, program, wanted, bounds, [], *turned


matrix_mixer = operator(
    "matrix_mixer(Tensor[] operands, Tensor? state, str program, bool keep, Tensor? bounds=None, "
    "Tensor[]? held=None, Tensor? border=None, Tensor[]? marks=None, int[] marked=[]) -> (Tensor, Tensor, Tensor[])",
    _forward, _differentiable, _behind,
)  # fmt: skip
matrix_mixer_backward = operator(
    "matrix_mixer_backward(Tensor dy, Tensor? dfinal, Tensor[] operands, Tensor? state, Tensor[] saved, str program, "
    "bool[] needs, Tensor? bounds=None, Tensor[]? held=None, bool bordered=False, int[] fine=[]) -> (Tensor[], Tensor)",
    _backward,
)
