"""The chunk kernels of the matrix families: which specs and sizes they can run, and their calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.bind import Bound, Sizes, unrounded
from dsf.language.derived import derived
from dsf.language.errors import InputError
from dsf.language.expr import VALUE, children_first
from dsf.language.reads import apart
from dsf.language.spec import Spec
from dsf.triton.operands import Unfit, operands_of, written_apart
from dsf.triton.source import Source, name_of

FEWEST = 16  # keys; with fewer, rounding errors of half precisions do not average out, and kernels pad to as many
LARGEST = 256  # entries of the Key axis, or columns of the state, that the kernels can hold
GRID = 65_535  # programs along the second and third axis of a CUDA grid: heads of a batch, and packed sequences
Timed = Mapping[str, Tensor]


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the matrix kernels cannot run this, in the user's words; None when they can."""
    if dtype == torch.float64:
        return "GPU kernels compute in float32; float64 inputs run on the torch backend"
    try:
        ops = operands_of(spec)
    except Unfit as reason:
        return str(reason)
    for name, size in (("N", sizes.n), ("P", sizes.p + ops.column)):
        if size > LARGEST and not (name == "P" and has_channels_apart(spec)):
            return f"the matrix kernels hold at most {name} = {LARGEST}, got {size}"
    if sizes.heads > GRID:
        return f"the matrix kernels take at most {GRID:,} heads, got {sizes.heads:,}"
    return None


@derived
def has_channels_apart(spec: Spec) -> bool:
    """True where no channel depends on another, so that a call may run some channels at a time."""
    nodes = children_first(spec.readout, spec.system.D, *operands_of(spec).all)
    between = any(x.op == "sum_value" or (x.op == "size" and x.attrs[0] == VALUE) for x in nodes)
    return spec.rule is None and not between


def channels(spec: Spec, p: int) -> int:
    """How many of P channels run at a time: all, or where the kernels cannot hold them equal parts, multiples of 16."""
    if p <= LARGEST or not has_channels_apart(spec):
        return p
    parts = -(-p // LARGEST)
    return -(-p // (parts * 16)) * 16


@derived
def reads_together(spec: Spec) -> bool:
    """True for a spec of several readouts that one run of the kernels computes, in place of a run for each."""
    return bool(apart(spec)) and fits(spec)


def fits(spec: Spec) -> bool:
    """True for a spec that the kernels can run at some size."""
    try:
        operands_of(spec)
    except Unfit:
        return False
    return True


def kernel_of(spec: Spec, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[str, int]:
    """Name of the kernels with their tiles, and tokens a chunk."""
    from dsf.kernels.triton.chunk.table import tiles

    dtype = torch.float32 if sizes.n < FEWEST else dtype
    ops = operands_of(spec)
    kind = "none" if ops.decays is None else ("key" if ops.keywise else "scalar")
    kind = "rank_one" if ops.lefts else kind
    t = tiles(sizes.n, channels(spec, sizes.p) + ops.column, dtype, kind, bool(ops.erases or ops.lefts), device)
    name = "WY transform and chunk walk" if ops.erases else "chunk walk"
    name = "generalised WY transform and chunk walk" if ops.lefts else name
    name += " of sums of corrections" * (ops.group > 1)
    return f"{name} ({t.keys} keys x {t.piece} channels, {t.walk_warps} warps)", max(1, t.chunk // ops.rows)


@derived
def program_of(spec: Spec, precise: bool = False) -> tuple[Source, str]:
    """The printed kernels of a spec and their name in the operator's registry; printed once a process.

    precise: as Program has it.
    """
    from dsf.kernels.triton.pointwise.programs import PROGRAMS
    from dsf.triton.print_chunk import emit_matrix

    source, program = emit_matrix(written_apart(spec), operands_of(spec))
    name = name_of(spec, source, (program, "precise") if precise else program)
    PROGRAMS[name] = replace(program, functions=source.module(), precise=precise)
    return source, name


def run_matrix(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the final state [B, H, N, columns]; arguments as those of the torch forms.

    bounds: boundaries [S + 1] of packed sequences, each of which has a state. Batches with more heads than a grid has
    programs, and more channels than kernels hold, run in parts. States of fewer than 16 keys are computed in float32.
    Raises InputError for more packed sequences than a grid has programs.
    """
    if bound.sizes.n < FEWEST and bound.dtype.itemsize == 2:
        return run_matrix(spec, unrounded(bound), {name: x.float() for name, x in timed.items()}, state, bounds)
    if channels(spec, bound.sizes.p) < bound.sizes.p:
        return _by_channels(spec, bound, timed, state, bounds)
    from dsf.kernels.triton.chunk.operator import matrix_mixer
    from dsf.kernels.triton.sizes import bases

    _, name = program_of(spec)
    check_packed(spec, bounds)
    batch = next(iter(timed.values())).shape[0]
    together = max(GRID // bound.sizes.heads, 1)
    outputs, finals, turns = [], [], list[Any]()
    if bound.turns is not None:  # of batches that run in one part (dsf.call.turned)
        names = [i.name for i in spec.inputs]
        marks = {name: x for name, x in bound.turns.marks.items() if name in names}  # a readout's run takes its own
        turns = [None, bound.turns.border, list(marks.values()), [names.index(x) for x in marks]]
    for first in bases(0, batch, together):
        part = slice(first, first + together)
        rows = timed if together >= batch else {entry: x[part] for entry, x in timed.items()}
        start = state if state is None or together >= batch else state[part]
        operands = [rows[i.name] if i.name in rows else bound.tensors[i.name] for i in spec.inputs]
        y, final, _ = matrix_mixer(operands, start, name, False, bounds, *turns)
        outputs.append(y)
        finals.append(final)
    return (outputs[0], finals[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(finals))


def check_packed(spec: Spec, bounds: Tensor | None) -> None:
    """Raise InputError for boundaries of more packed sequences than a grid has programs."""
    if bounds is not None and bounds.shape[0] > GRID + 1:
        raise InputError(
            f"{spec.name}: cu_seqlens of {bounds.shape[0] - 1:,} packed sequences; the matrix kernels take at most "
            f"{GRID:,} a call: pack fewer, or ask for backend='torch'"
        )


def _by_channels(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, bounds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`run_matrix` for one part of the channels after the other; inputs without channels are read by every part."""
    valued = {i.name for i in spec.inputs if VALUE in i.kind.axes}
    size = channels(spec, bound.sizes.p)
    outputs, finals = [], []
    for first in range(0, bound.sizes.p, size):
        part = slice(first, first + size)

        def cut(tensors: Timed, part: slice = part) -> dict[str, Tensor]:
            return {name: x[..., part] if name in valued else x for name, x in tensors.items()}

        sizes = replace(bound.sizes, p=min(size, bound.sizes.p - first))
        mine = replace(bound, tensors=cut(bound.tensors), sizes=sizes)
        y, final = run_matrix(spec, mine, cut(timed), None if state is None else state[..., part], bounds)
        outputs.append(y)
        finals.append(final)
    return torch.cat(outputs, dim=-1), torch.cat(finals, dim=-1)


def names(spec: Spec) -> list[str]:
    """Names of the programs of a spec, which this call prints and registers."""
    return [program_of(spec, precise)[1] for precise in (False, True)] if fits(spec) else []
