"""The decode step as custom operators: one launch a token, with a new or an overwritten state.

They take the name of a registered StepProgram, which dsf.triton.print_step makes with the kernel's source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.early import early_and_fetching
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.kernel import step
from dsf.kernels.triton.pointwise.programs import EMPTY, PAIRED, Access, arguments_of
from dsf.kernels.triton.registry import Registry
from dsf.kernels.triton.sizes import power


@dataclass(frozen=True)
class StepProgram:
    """What the operators know of a spec.

    ones, level: the state's columns of the normaliser and of the running maximum, "P" or "1", None without them.
    shared: it has columns that belong to no channel. whole: a sum over channels needs all of them in one program.
    corrected: A has corrections; general: that are no delta rules; plain: A is the identity; keyed: it decays by key;
    micro: rows a token. before: of every previous value that the state keeps, whether it has Key and Value axes.
    """

    inputs: tuple[Access, ...]
    accesses: tuple[Access, ...]
    ones: str | None
    level: str | None
    shared: bool
    whole: bool
    corrected: bool
    general: bool
    plain: bool
    keyed: bool
    micro: int
    before: tuple[tuple[bool, bool], ...] = ()
    functions: Any = field(default=None, compare=False)

    def beside(self, p: int) -> tuple[int, int]:
        """The numbers of columns of the normaliser and of the running maximum, beside p of S."""
        columns = {None: 0, "1": 1, "P": p}
        return columns[self.ones], columns[self.level]


STEPS: Registry[StepProgram] = Registry("step")
FEW_HEADS = 128  # heads of all sequences, up to which a program each leaves most of a GPU idle
SMALL, PROGRAMS = 512, 1024  # numbers of a program below which it takes several heads where so many programs are left
MANY_BLOCKS = 8  # blocks of channels from which walking them takes longer than a copy behind the launch


def _sizes(program: StepProgram, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
    """(B, H, N, P) of a call."""
    batch = heads = n = p = 1
    for a, x in zip(program.inputs, operands, strict=True):
        if a.time:
            batch, heads = x.shape[0], max(heads, int(a.heads(x)))
        n = int(x.shape[-1 - a.value]) * (1 + (a.entry == PAIRED)) if a.key else n
        p = int(x.shape[-1]) if a.value else p
    return batch, heads, n, p


def tile(n: int, p: int, program: StepProgram, heads: int) -> tuple[int, int, int]:
    """(padded N, channels at a time, warps) of a program. heads: of all sequences.

    By measurements on an H200 (docs/kernels/decode.md). With columns that belong to no channel a program walks several
    blocks of channels, with as many loads in flight as registers allow. Few heads have more programs.
    """
    keys, channels, few = power(n), power(p), heads <= FEW_HEADS
    numbers, own = 4096, 1024  # of a program's tile, of a warp
    if keys == 1:
        numbers, own = 1024, 256
    elif keys <= 16:
        numbers = 1024
    elif few and keys >= 128 and not program.shared:
        numbers, own = 2048, 2 * keys
    elif keys >= 128 and program.corrected:
        numbers, own = (4096, 512) if program.micro == 1 else (2048, 2048)
    elif program.shared and program.micro > 2:  # several Key vectors of every write and read in registers
        numbers, own = 2048, 256
    elif keys >= 128 and program.shared:
        numbers, own = 8192, 2048
    elif few and keys >= 64 and not program.shared:
        numbers, own = 2048, 512
    elif keys == 64 and program.general:
        numbers, own = (2048 if program.corrected else 8192), 2048
    elif keys >= 128 and (program.plain or program.keyed):
        own = 512
    if not program.whole:
        channels = max(min(channels, 16), min(channels, numbers // keys))
    return keys, channels, max(1, min(16, keys * channels // own))


def _heads_of(numbers: int, heads: int, others: int) -> int:
    """How many heads a program takes: several where one has few numbers and there are many. others: programs for each
    head."""
    found = 1
    while found < heads and numbers * found < SMALL and others * heads >= 2 * found * PROGRAMS:
        found *= 2
    return found


def _launch(program: StepProgram, operands: Sequence[Tensor], state: Tensor, new: Tensor) -> Tensor:
    """Write the new state into `new`, which may be `state`, and return y [B, 1, H, P]."""
    batch, heads, n, p = _sizes(program, operands)
    first = next(x for a, x in zip(program.inputs, operands, strict=True) if a.time)
    y = first.new_empty(batch, 1, heads, p)
    tensors: dict[str, Tensor | None] = {a.role: x for a, x in zip(program.inputs, operands, strict=True)}
    keys, channels, warps = tile(n, p, program, batch * heads)
    parts = -(-p // channels)
    held = program.shared and new is state  # columns that all programs of a head read and one overwrites
    apart = held and parts >= MANY_BLOCKS and batch * heads <= FEW_HEADS
    blocks = parts if held and not apart else 1
    after = torch.empty_like(state) if apart else new
    tensors |= {".y": y, ".state": state, ".new_state": new, ".new_shared": after}
    args = arguments_of(program.accesses, tensors, heads, False)  # one token has no stride
    run = _heads_of(keys * channels, heads, batch * parts)
    warps = warps if run == 1 else max(1, min(4, keys * channels * run // 256))
    programs = parts // blocks * -(-heads // run) * batch
    launch(
        step, (programs,), args, state, heads, p, body=program.functions.step,
        shared=program.functions.shared if program.shared else None, N=n, COLUMNS=state.shape[-1], NB=keys, BP=channels,
        BLOCKS=blocks, HEADS=run, num_warps=warps, **early_and_fetching(y.device, programs),
    )  # fmt: skip
    if apart:
        for rows, columns in _shared(program, n, p):
            state[..., rows, columns].copy_(after[..., rows, columns])
    return y


def _shared(program: StepProgram, n: int, p: int) -> list[tuple[slice, slice]]:
    """The rows and columns of a state that belong to no channel."""
    found, place = [], p
    for kind, count in zip((program.ones, program.level), program.beside(p), strict=True):
        if kind == "1":
            found.append((slice(n), slice(place, place + 1)))
        place += count
    for key, value in program.before:
        if not value:
            found.append((slice(n if key else 1), slice(place, place + 1)))
        place += _width(n, p, key, value)
    return found


def _width(n: int, p: int, key: bool, value: bool) -> int:
    """Columns of n rows that a previous value fills."""
    return -(-(n if key else 1) * (p if value else 1) // n)


def _start(program: StepProgram, operands: Sequence[Tensor]) -> Tensor:
    """The state before the first token."""
    batch, heads, n, p = _sizes(program, operands)
    ones, level = program.beside(p)
    before = sum(_width(n, p, *axes) for axes in program.before)
    state = operands[0].new_zeros(batch, heads, n, p + ones + level + before, dtype=torch.float32)
    if level:
        state[..., p + ones : p + ones + level] = EMPTY
    return state


def _step(operands: Sequence[Tensor], state: Tensor | None, program: str) -> tuple[Tensor, Tensor]:
    known = STEPS[program]
    old = _start(known, operands) if state is None else state.contiguous()
    new = torch.zeros_like(old) if known.before else torch.empty_like(old)  # previous values may end inside a column
    return _launch(known, operands, old, new), new


def _step_in_place(operands: Sequence[Tensor], state: Tensor, program: str) -> Tensor:
    return _launch(STEPS[program], operands, state, state)


matrix_step = operator("matrix_step(Tensor[] operands, Tensor? state, str program) -> (Tensor, Tensor)", _step)
matrix_step_in_place = operator(
    "matrix_step_(Tensor[] operands, Tensor(a!) state, str program) -> Tensor", _step_in_place
)
