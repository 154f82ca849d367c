"""The chunkwise matrix families on the GPU: a Spec recognised as their operands, and its tensors handed over.

A bare input stays as it is: its dtype, its strides, its own number of heads. Scales without a Key or Value axis are
taken out of keys, values and readouts and travel as float32 scalars a token; the rest of an expression (feature maps,
normalised keys) is evaluated by a printed kernel (dsf.triton.print_chunk) in float32 and rounded once to the
inputs' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dsf.call.bind import Bound, Sizes
from dsf.language.bounds import bounds
from dsf.language.derived import derived
from dsf.language.errors import InputError
from dsf.language.expr import KEY, VALUE, Expr, children_first, const
from dsf.language.operator import I, factors_of, normal_form, split_factors, split_scale, times
from dsf.language.spec import Row, Spec, summands
from dsf.language.system import System
from dsf.triton.names import name_of
from dsf.triton.source import Source

LARGEST = 256  # entries of the Key axis, or columns of the state, that the kernels hold
GRID = 65_535  # programs along the second and third axis of a CUDA grid: heads of a batch, and packed sequences
ZERO, UNIT = const(0), const(1)
Timed = Mapping[str, Tensor]


@dataclass(frozen=True)
class Operands:
    """S = a S + key eᵀ, e = source · value - erase · key'(a S), y = gate · read · query' S: expressions by micro-step.

    Where lefts are given: S = (a + left right') S + key value', and y may have a row's own value beside what it reads:
    y = query' S + own · value. decays are logarithms when `log`, none of them further from zero than floor; ones: value
    of the column driven by ones; gains: exponents of a running maximum.
    """

    query: Expr
    read: Expr
    keys: tuple[Expr, ...]
    values: tuple[Expr, ...]
    sources: tuple[Expr, ...]
    erases: tuple[Expr, ...] | None
    decays: tuple[Expr, ...] | None
    log: bool
    keywise: bool
    ones: tuple[Expr, ...] | None
    gains: tuple[Expr, ...] | None
    gate: Expr = UNIT
    lefts: tuple[Expr, ...] | None = None
    rights: tuple[Expr, ...] | None = None
    floor: float = -math.inf
    own: Expr | None = None

    @property
    def column(self) -> bool:
        """True where a normaliser is a column beside the values; with one decay a head the kernels compute it apart."""
        return self.ones is not None and (self.erases is not None or self.keywise)

    @property
    def all(self) -> list[Expr]:
        """Every expression among them."""
        found: list[Expr] = []
        for entry in fields(self):
            x = getattr(self, entry.name)
            found += [x] if isinstance(x, Expr) else list(x) if isinstance(x, tuple) else []
        return found


class _Unfit(Exception):
    """Why a spec is not of these families."""


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the matrix kernels cannot run this, in the user's words; None when they can."""
    if dtype == torch.float64:
        return "GPU kernels compute in float32; float64 inputs run on the torch backend"
    try:
        ops = operands_of(spec)
    except _Unfit as reason:
        return str(reason)
    for name, size in (("N", sizes.n), ("P", sizes.p + ops.column)):
        if size > LARGEST and not (name == "P" and has_channels_apart(spec)):
            return f"the matrix kernels hold at most {name} = {LARGEST}, got {size}"
    if sizes.heads > GRID:
        return f"the matrix kernels take at most {GRID:,} heads, got {sizes.heads:,}"
    return None


@derived
def has_channels_apart(spec: Spec) -> bool:
    """True where no channel knows of another, so that a call may run some of them at a time."""
    nodes = children_first(spec.readout, spec.system.D, *operands_of(spec).all)
    between = any(x.op == "sum_value" or (x.op == "size" and x.attrs[0] == VALUE) for x in nodes)
    return spec.rule is None and not between


def channels(spec: Spec, p: int) -> int:
    """How many of P channels run at a time: all, or equal parts, in whole cache lines, of more than kernels hold."""
    if p <= LARGEST or not has_channels_apart(spec):
        return p
    parts = -(-p // LARGEST)
    return -(-p // (parts * 16)) * 16


def fits(spec: Spec) -> bool:
    """True for a spec of these families, whatever its sizes."""
    try:
        operands_of(spec)
    except _Unfit:
        return False
    return True


def kernel_of(spec: Spec, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[str, int]:
    """Name of the kernels with their tiles, and tokens a chunk."""
    from dsf.kernels.triton.chunk.table import tiles

    ops, spec = operands_of(spec), written_apart(spec)
    kind = "none" if ops.decays is None else ("key" if ops.keywise else "scalar")
    kind = "rank_one" if ops.lefts else kind
    t = tiles(sizes.n, channels(spec, sizes.p) + ops.column, dtype, kind, bool(ops.erases or ops.lefts), device)
    name = "WY transform and chunk walk" if ops.erases else "chunk walk"
    name = "generalised WY transform and chunk walk" if ops.lefts else name
    return f"{name} ({t.keys} keys x {t.piece} channels, {t.walk_warps} warps)", max(1, t.chunk // spec.micro)


@derived
def operands_of(spec: Spec) -> Operands:
    """The operands of `spec`. Raises _Unfit with the reason where it has none."""
    spec = written_apart(spec)
    if spec.is_attention or spec.is_elementwise or VALUE in spec.decay_axes:
        raise _Unfit(f"the matrix kernels take scalar or key-diagonal decays and delta rules, this is {spec.structure}")
    if spec.is_stabilised and (spec.rank or spec.gain_axes or spec.system.D is not ZERO or _gains_differ(spec)):
        raise _Unfit("the matrix kernels take exponential gains of one number a head, without corrections or D")
    if spec.is_stabilised and spec.micro > 1:
        raise _Unfit("the matrix kernels take exponential gains of one micro-step a token")
    logs = spec.log_decays
    decays = logs if logs is not None else tuple(r.normal.decay for r in spec.rows)
    keywise = KEY in spec.decay_axes
    if keywise and logs is None:
        raise _Unfit("the matrix kernels take key-diagonal decays made of exp and sigmoid, whose logarithm is derived")
    plain = all(r.normal.decay is UNIT for r in spec.rows) and not spec.is_stabilised
    general = spec.rank == 1 and not all(is_delta(r) for r in spec.rows)
    rows = [_row(r, general) for r in spec.rows]
    keys, sources, values, erases = (tuple(x) for x in zip(*rows, strict=True))
    gate, core = spec.gated_read
    read, query = split_scale(core)
    ones = None
    if spec.ones is not None:
        ones = tuple(r.terms[0].value if r.terms else ZERO for r in spec.ones.rows)
        if spec.den_has_channels:
            raise _Unfit("the matrix kernels take a normaliser of one number a head")
        if any(one is not source for one, source in zip(ones, sources, strict=True)):
            values = tuple(times(s, v) for s, v in zip(sources, values, strict=True))
            sources = (UNIT,) * len(sources)
        else:
            ones = (UNIT,) * len(sources)
    gains = None
    if spec.is_stabilised:
        gains = tuple(_gain(r) for r in spec.rows)
    found = Operands(
        query, read, keys, values, sources, erases if spec.rank else None, None if plain else decays,
        logs is not None, keywise, ones, gains, gate,
    )  # fmt: skip
    if general:
        found = _rank_one(spec, found)
    _check_printable(spec, found)
    return found


@derived
def written_apart(spec: Spec) -> Spec:
    """The same with a micro-step for each product of B: the first with A, the others added to what it leaves.

    The first is the one that a delta rule's correction erases. A spec whose rows write one product is itself.
    """
    if spec.is_attention or spec.mixes_pairs or all(len(r.terms) < 2 and r.dense is None for r in spec.rows):
        return spec
    if any(r.dense is not None for r in spec.rows):
        return spec
    steps: list[System] = []
    for step in spec.system.micro_steps:
        parts = [sign * part if sign < 0 else part for sign, part in summands(step.B)]
        erased = [c.left for c in normal_form(step.A)[-1].corrections]
        parts.sort(key=lambda part: not any(f is x for x in erased for f, _ in factors_of(part)))
        steps.append(System(A=step.A, B=parts[0]))
        steps += [System(A=I, B=part) for part in parts[1:]]
    last = replace(spec.system, A=steps[-1].A, B=steps[-1].B, earlier=tuple(steps[:-1]), drive=spec.drives or None)
    return replace(spec, system=last)


def _check_printable(spec: Spec, found: Operands) -> None:
    """Raise _Unfit for expressions that no printed kernel evaluates."""
    for node in children_first(*found.all, spec.system.D, *([] if spec.rule is None else [spec.rule])):
        if node.op == "taylor_features":
            raise _Unfit("no printed kernel evaluates Taylor features")
        if node.axes == {KEY, VALUE}:
            raise _Unfit(f"the printed kernels hold vectors of a token, and `{node}` is a matrix")


def _gains_differ(spec: Spec) -> bool:
    return any(_gain(r).axes for r in spec.rows)


def _gain(row: Row) -> Expr:
    gain = row.terms[0].gain if row.terms else None
    return ZERO if gain is None else gain


def _row(row: Row, general: bool) -> tuple[Expr, Expr, Expr, Expr]:
    """(key, source, value, erase) of one micro-step; erase is nothing where corrections are `general`."""
    if row.dense is not None or len(row.terms) > 1:
        raise _Unfit("the matrix kernels take a B of one product, a Key times a Value expression")
    if len(row.normal.corrections) > 1:
        raise _Unfit("the matrix kernels take one correction a micro-step")
    scale, key, source, value = UNIT, UNIT, ZERO, UNIT
    if row.terms:
        scale, key = split_scale(row.terms[0].key)
        source, value = split_value(row.terms[0].value)
        source = times(scale, source)
    for c in row.normal.corrections:
        if VALUE in c.scale.axes | c.left.axes | c.right.axes:
            raise _Unfit("the matrix kernels erase alike in all channels")
    if general or not row.normal.corrections:
        return key, source, value, ZERO
    erase = _erase(row)
    assert erase is not None
    return row.normal.corrections[0].left, source, value, erase


def is_delta(row: Row) -> bool:
    """True where the state decays, then the key that is written is erased, if anything is."""
    return not row.normal.corrections or _erase(row) is not None


def _rank_one(spec: Spec, found: Operands) -> Operands:
    """Operands of a transition that is diagonal plus rank one. Scales are left in the vectors, decays differ by key."""
    if spec.log_decays is None:
        raise _Unfit("beside a correction the matrix kernels take decays made of exp and sigmoid, whose log is derived")
    corrections = [r.normal.corrections[0] if r.normal.corrections else None for r in spec.rows]
    lefts = tuple(ZERO if c is None else times(c.scale, c.left) for c in corrections)
    rights = tuple(ZERO if c is None else c.right for c in corrections)
    keys = tuple(times(s, k) for s, k in zip(found.sources, found.keys, strict=True))
    own, core = split_value(spec.system.D)
    alone = core is found.values[-1] and not own.axes and spec.micro == 1 and spec.system.read == "after"
    bare = spec.rule is None and found.gate is UNIT
    return replace(
        found, query=times(found.read, found.query), read=UNIT, keys=keys, sources=(UNIT,) * len(keys), erases=None,
        decays=spec.log_decays, log=True, keywise=True, lefts=lefts, rights=rights,
        floor=min(min(low, -high) for low, high in map(bounds, spec.log_decays)), own=own if alone and bare else None,
    )  # fmt: skip


def _erase(row: Row) -> Expr | None:
    """erase of A = decay (I - erase · key keyᵀ), or of (I - erase · key keyᵀ) diag(decay); None if A is neither."""
    decay, (c, *more) = row.normal.decay, row.normal.corrections
    decayed = KEY in decay.axes and c.right is decay * c.left
    if more or not (decayed or (c.left is c.right and KEY not in decay.axes)):
        return None
    if row.terms and c.left is not split_scale(row.terms[0].key)[1]:
        return None
    left = factors_of(c.scale)
    for wanted in factors_of(decay) if decay is not UNIT and not decayed else []:
        if wanted not in left:
            return None
        left.remove(wanted)
    out: Expr = const(-1)
    for factor, inverse in left:
        out = out / factor if inverse else times(out, factor)
    return out


def split_value(x: Expr) -> tuple[Expr, Expr]:
    """x = scale · core: factors without a Value axis on the left, the others on the right."""
    core, scale = split_factors(x, lambda factor: VALUE in factor.axes)
    return scale, core


@derived
def program_of(spec: Spec) -> tuple[Source, str]:
    """The printed kernels of a spec, and the name under which the operator knows them; once a process."""
    from dsf.kernels.triton.pointwise.programs import PROGRAMS
    from dsf.triton.print_chunk import emit_matrix

    source, program = emit_matrix(written_apart(spec), operands_of(spec))
    name = name_of(spec, source, program)
    PROGRAMS[name] = replace(program, functions=source.module())
    return source, name


def run_matrix(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the final state [B, H, N, columns]; arguments as the torch forms have them.

    bounds: of packed sequences, [S + 1]; they have a state each. A batch with more heads than a grid has programs runs
    in parts, and so do more channels than kernels hold. Raises InputError for more packed sequences than that.
    """
    if channels(spec, bound.sizes.p) < bound.sizes.p:
        return _by_channels(spec, bound, timed, state, bounds)
    from dsf.kernels.triton.chunk.operator import matrix_mixer

    _, name = program_of(spec)
    if bounds is not None and bounds.shape[0] > GRID + 1:
        raise InputError(
            f"{spec.name}: cu_seqlens of {bounds.shape[0] - 1:,} packed sequences; the matrix kernels take at most "
            f"{GRID:,} a call: pack fewer, or ask for backend='torch'"
        )
    batch = next(iter(timed.values())).shape[0]
    together = max(GRID // bound.sizes.heads, 1)
    outputs, finals = [], []
    for first in range(0, batch, together):
        part = slice(first, first + together)
        rows = timed if together >= batch else {entry: x[part] for entry, x in timed.items()}
        start = state if state is None or together >= batch else state[part]
        operands = [rows[i.name] if i.name in rows else bound.tensors[i.name] for i in spec.inputs]
        y, final, _ = matrix_mixer(operands, start, name, False, bounds)
        outputs.append(y)
        finals.append(final)
    return (outputs[0], finals[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(finals))


def _by_channels(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, bounds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`run_matrix` of some channels after the others; what has no channels is read by every part."""
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


def step_refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the decode kernel cannot step this, in the user's words; None when it can."""
    from dsf.kernels.triton.pointwise.step_ops import STEPS
    from dsf.triton.print_step import step_refusal

    if dtype == torch.float64:
        return "GPU kernels compute in float32; float64 inputs run on the torch backend"
    refused = step_refusal(spec)
    if refused is not None:
        return refused
    program = STEPS[step_of(spec)[1]]
    for name, size, held in (("N", sizes.n, True), ("P", sizes.p, program.whole or program.ones)):
        if held and size > LARGEST:
            return f"the decode kernel holds at most {name} = {LARGEST}, got {size}"
    return None


@derived
def step_of(spec: Spec) -> tuple[Source, str]:
    """The printed decode kernel of a spec, and the name under which the operators know it; once a process."""
    from dsf.kernels.triton.pointwise.step_ops import STEPS
    from dsf.triton.print_step import emit_step

    source, program = emit_step(spec)
    name = name_of(spec, source, program)
    STEPS[name] = replace(program, functions=source.module())
    return source, name


def names(spec: Spec) -> list[str]:
    """Names of the programs that are printed for a spec, which are there then."""
    return [program_of(spec)[1]] if fits(spec) else []


def step_names(spec: Spec) -> list[str]:
    """The same of its decode step."""
    from dsf.triton.print_step import step_refusal

    return [step_of(spec)[1]] if step_refusal(spec) is None else []


def step_kernel_of(spec: Spec, sizes: Sizes) -> str:
    """Name of the decode kernel with its tile."""
    from dsf.kernels.triton.pointwise.step_ops import STEPS, tile

    keys, channels, warps = tile(sizes.n, sizes.p, STEPS[step_of(spec)[1]])
    return f"decode step ({keys} keys x {channels} channels, {warps} warps)"


def run_step(spec: Spec, bound: Bound, state: Tensor | None, in_place: bool) -> tuple[Tensor, Tensor]:
    """y [B, 1, H, P] and the new state, which is the old one where in_place."""
    from dsf.kernels.triton.pointwise.step_ops import matrix_step, matrix_step_in_place

    _, name = step_of(spec)
    operands = list(bound.tensors.values())
    if in_place and state is not None:
        return matrix_step_in_place(operands, state, name), state
    y, new = matrix_step(operands, state, name)
    return y, new
