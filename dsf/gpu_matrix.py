"""The chunkwise matrix families on the GPU: a Spec recognised as their operands, and its tensors handed over.

A bare input stays as it is: its dtype, its strides, its own number of heads. Scales without a Key or Value axis are
taken out of keys, values and readouts and travel as float32 scalars a token; the rest of an expression (feature maps,
normalised keys) is evaluated by torch in float32 and rounded once to the inputs' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsf.bind import Bound, Sizes, named_axes
from dsf.evaluate import Evaluator
from dsf.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.lower import EMPTY, FLOOR, columns
from dsf.operator import Correction, factors_of, split_scale, times
from dsf.spec import Row, Spec
from dsf.system import DEN, NUM, ONE

LARGEST = 256  # entries of the Key axis, or columns of the state, that the kernels hold
ZERO, UNIT = const(0), const(1)
Timed = Mapping[str, Tensor]


@dataclass(frozen=True)
class Operands:
    """S = a S + key eᵀ, e = source · value - erase · key'(a S), y = read · query' S: expressions, one a micro-step.

    decays are logarithms when `log`; ones: value of the column driven by ones; gains: exponents of a running maximum.
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


class _Unfit(Exception):
    """Why a spec is not of these families."""


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the matrix kernels cannot run this, in the user's words; None when they can."""
    if dtype == torch.float64:
        return "GPU kernels compute in float32; float64 inputs run on the torch backend"
    try:
        operands_of(spec)
    except _Unfit as reason:
        return str(reason)
    wide = columns(spec, sizes.p)
    for name, size in (("N", sizes.n), ("P", wide.p + wide.den)):
        if size > LARGEST:
            return f"the matrix kernels hold at most {name} = {LARGEST}, got {size}"
    return None


def kernel_of(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> tuple[str, int]:
    """Name of the kernels with their tiles, and tokens a chunk."""
    from dsf.kernels.triton.table import tiles

    ops = operands_of(spec)
    p = columns(spec, sizes.p)
    kind = "none" if ops.decays is None else ("key" if ops.keywise else "scalar")
    t = tiles(sizes.n, p.p + p.den, dtype, kind, ops.erases is not None)
    name = "WY transform and chunk walk" if ops.erases else "chunk walk"
    return f"{name} ({t.keys} keys x {t.piece} channels, {t.walk_warps} warps)", max(1, t.chunk // spec.micro)


@functools.cache
def operands_of(spec: Spec) -> Operands:
    """The operands of `spec`. Raises _Unfit with the reason where it has none."""
    if spec.is_softmax or spec.is_elementwise or VALUE in spec.decay_axes:
        raise _Unfit(f"the matrix kernels take scalar or key-diagonal decays and delta rules, this is {spec.structure}")
    if spec.is_stabilised and (spec.rank or spec.gain_axes or spec.system.D is not ZERO or _gains_differ(spec)):
        raise _Unfit("the matrix kernels take exponential gains of one number a head, without corrections or D")
    logs = spec.log_decays
    decays = logs if logs is not None else tuple(r.normal.decay for r in spec.rows)
    keywise = KEY in spec.decay_axes
    if keywise and logs is None:
        raise _Unfit("the matrix kernels take key-diagonal decays made of exp and sigmoid, whose logarithm is derived")
    plain = all(r.normal.decay is UNIT for r in spec.rows) and not spec.is_stabilised
    rows = [_row(r) for r in spec.rows]
    keys, sources, values, erases = (tuple(x) for x in zip(*rows, strict=True))
    read, query = split_scale(spec.readout)
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
    return Operands(
        query, read, keys, values, sources, erases if spec.rank else None, None if plain else decays,
        logs is not None, keywise, ones, gains,
    )  # fmt: skip


def _gains_differ(spec: Spec) -> bool:
    return any(_gain(r).axes for r in spec.rows)


def _gain(row: Row) -> Expr:
    gain = row.terms[0].gain if row.terms else None
    return ZERO if gain is None else gain


def _row(row: Row) -> tuple[Expr, Expr, Expr, Expr]:
    """(key, source, value, erase) of one micro-step."""
    if row.dense is not None or len(row.terms) > 1:
        raise _Unfit("the matrix kernels take a B of one product, a Key times a Value expression")
    if len(row.normal.corrections) > 1:
        raise _Unfit("the matrix kernels take one correction a micro-step")
    scale, key, source, value = UNIT, UNIT, ZERO, UNIT
    if row.terms:
        scale, key = split_scale(row.terms[0].key)
        source, value = split_value(row.terms[0].value)
        source = times(scale, source)
    erase = ZERO
    for c in row.normal.corrections:
        if VALUE in c.scale.axes | c.left.axes | c.right.axes:
            raise _Unfit("the matrix kernels erase alike in all channels")
        decay = row.normal.decay
        decayed = KEY in decay.axes and c.right is decay * c.left
        if not (decayed or (c.left is c.right and KEY not in decay.axes)) or (row.terms and c.left is not key):
            raise _Unfit(
                "the matrix kernels take delta rules: the state decays, then the key that is written is erased"
            )
        key, erase = c.left, _erase(c, UNIT if decayed else decay)
    return key, source, value, erase


def _erase(c: Correction, decay: Expr) -> Expr:
    """erase of A = decay (I - erase · key keyᵀ). Raises _Unfit when the decay is not a factor of the correction."""
    left = factors_of(c.scale)
    for wanted in factors_of(decay) if decay is not UNIT else []:
        if wanted not in left:
            raise _Unfit("the matrix kernels decay before they erase: A = decay * (I - beta * outer(k, k))")
        left.remove(wanted)
    out: Expr = const(-1)
    for factor, inverse in left:
        out = out / factor if inverse else times(out, factor)
    return out


def split_value(x: Expr) -> tuple[Expr, Expr]:
    """x = scale · core: factors without a Value axis on the left, the others on the right."""
    parts: dict[bool, Expr] = {False: UNIT, True: UNIT}
    for factor, inverse in factors_of(x):
        has = VALUE in factor.axes
        parts[has] = parts[has] / factor if inverse else times(parts[has], factor)
    return parts[False], parts[True]


@dataclass(frozen=True)
class _Tensors:
    """Evaluates operands of one call: B sequences of T tokens of M micro-steps."""

    spec: Spec
    bound: Bound
    timed: Timed
    batch: int
    tokens: int

    def evaluator(self, *exprs: Expr) -> Evaluator:
        """Of exactly the inputs that exprs need, with as many heads as the most that any of these has."""
        names = {i.attrs[0] for i in inputs_of(*exprs)}
        used = [i for i in self.spec.inputs if i.name in names]
        given = {i.name: self.timed.get(i.name, self.bound.tensors[i.name]) for i in used}
        heads = max((given[i.name].shape[-1 - len(i.kind.axes)] for i in used), default=1)
        env = {ZERO: torch.zeros((1, 1, 1, 1, 1), dtype=torch.float32, device=self.bound.device)}
        for entry in used:
            x = given[entry.name].float()
            for step, piece in enumerate(x.unbind(2) if entry.kind.steps is not None else (x,)):
                place = None if entry.kind.steps is None else step
                node = Expr("input", (), (entry.name, place), entry.kind.axes)
                env[node] = named_axes(entry.kind, piece, heads)
        return Evaluator(env, self.bound.sizes.keys, self.bound.sizes.p)

    def scalars(self, exprs: Sequence[Expr]) -> Tensor | None:
        """One number a row [B, rows, H], float32; None when all are 1."""
        if all(e is UNIT for e in exprs):
            return None
        heads, parts = self.bound.sizes.heads, []
        for e in exprs:
            x = self.evaluator(e)(e).flatten(2)
            x = x if x.shape[2] in (1, heads) else x.repeat_interleave(heads // x.shape[2], dim=2)
            parts.append(x.expand(self.batch, self.tokens, heads))
        return self.interleave(parts)

    def filled(self, exprs: Sequence[Expr]) -> Tensor:
        """The same, ones written out."""
        x = self.scalars(exprs)
        if x is not None:
            return x
        shape = (self.batch, self.tokens * self.spec.micro, self.bound.sizes.heads)
        return torch.ones((), device=self.bound.device).expand(shape)

    def vectors(self, exprs: Sequence[Expr], axis: str) -> Tensor:
        """Key or Value vectors of the rows [B, rows, some heads, size] in the inputs' dtype, contiguous along size."""
        bare = self._bare(exprs)
        if bare is None:
            size = self.bound.sizes.n if axis == KEY else self.bound.sizes.p
            parts = [self.evaluator(e)(e).squeeze(-1 if axis == KEY else -2) for e in exprs]
            heads = max(x.shape[2] for x in parts)
            parts = [x.expand(self.batch, self.tokens, heads, size).to(self.bound.dtype) for x in parts]
            bare = self.interleave(parts)
        return bare if bare.stride(-1) == 1 else bare.contiguous()

    def key_decays(self, exprs: Sequence[Expr]) -> Tensor:
        """Log decays of the rows [B, rows, some heads, N], float32."""
        parts = [self.evaluator(e)(e).squeeze(-1) for e in exprs]
        heads = max(x.shape[2] for x in parts)
        parts = [x.expand(self.batch, self.tokens, heads, self.bound.sizes.n) for x in parts]
        rows = self.interleave(parts)
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def _bare(self, exprs: Sequence[Expr]) -> Tensor | None:
        """The one per-token input that exprs are, as the user gave it."""
        names = {e.attrs[0] if e.op == "input" else None for e in exprs}
        name = names.pop()
        if names or name is None or name not in self.timed:
            return None
        x, places = self.timed[name], [e.attrs[1] for e in exprs]
        if places == [None]:
            return x
        return x.flatten(1, 2) if places == list(range(x.shape[2])) else None

    def interleave(self, parts: list[Tensor]) -> Tensor:
        """One tensor a micro-step [B, T, ...] -> [B, rows, ...]."""
        return parts[0] if len(parts) == 1 else torch.stack(torch.broadcast_tensors(*parts), dim=2).flatten(1, 2)


def run_matrix(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the final state [B, H, N, columns]; arguments as the torch forms have them."""
    from dsf.kernels.triton.matrix import chunk_matrix

    ops, micro, heads = operands_of(spec), spec.micro, bound.sizes.heads
    first = next(iter(timed.values()))
    tensors = _Tensors(spec, bound, timed, first.shape[0], first.shape[1])
    layout = columns(spec, bound.sizes.p)
    query, read = tensors.vectors([ops.query], KEY), tensors.scalars([ops.read])
    key, value = tensors.vectors(ops.keys, KEY), tensors.vectors(ops.values, VALUE)
    if ops.ones is not None:
        value = _with_ones(tensors, value, ops.ones)
    source = tensors.scalars(ops.sources)
    erase = None if ops.erases is None else tensors.filled(ops.erases)
    decay = None
    if ops.decays is not None:
        decay = tensors.key_decays(ops.decays) if ops.keywise else tensors.filled(ops.decays)
    start = None if state is None else state[..., : layout.p + layout.den]
    keep = None if valid is None else valid.repeat_interleave(micro, dim=1).unsqueeze(-1)
    level = after = None
    if ops.gains is not None:
        gain = tensors.filled(ops.gains)
        assert decay is not None
        decay, source, start, level, after = _stabilise(ops, decay, source, gain, start, state, keep, spec)
    if keep is not None:
        if decay is not None:
            decay = torch.where(keep.unsqueeze(-1) if ops.keywise else keep, decay, 0.0 if ops.log else 1.0)
        source = torch.where(keep, 1.0 if source is None else source, 0.0).expand(-1, -1, heads)
        erase = None if erase is None else torch.where(keep, erase, 0.0)
    before = spec.system.read == "before"
    asked = (query, read)
    if before:
        query, read = _next(query), None if read is None else _next(read)
    if micro > 1:
        query, read = _last_rows(query, micro), None if read is None else _last_rows(read, micro)
    wide = spec.rule is not None or spec.system.D is not ZERO
    y, final, _ = chunk_matrix(
        query, key, value, decay, source, erase, read, None if start is None else start.contiguous(), heads, ops.log,
        True, wide,
    )  # fmt: skip
    if micro > 1:
        y = y[:, micro - 1 :: micro]
    if before:
        y = torch.cat([_read_first(asked[0], asked[1], start, y), y[:, :-1]], dim=1)
    return _finish(spec, tensors, y, final, level, after)


def _with_ones(tensors: _Tensors, value: Tensor, ones: Sequence[Expr]) -> Tensor:
    """The column driven by ones beside the values."""
    column = tensors.scalars(ones)
    if column is None:
        return torch.nn.functional.pad(value, (0, 1), value=1.0)
    heads = column.shape[2]
    if value.shape[2] != heads:
        value = value.repeat_interleave(heads // value.shape[2], dim=2)
    return torch.cat([value, column.unsqueeze(-1).to(value.dtype)], dim=-1)


def _next(x: Tensor) -> Tensor:
    """Reading S_{t-1} at t is reading S_t with the next token's readout."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _last_rows(x: Tensor, micro: int) -> Tensor:
    """Readouts [B, T, ...] at the last micro-step of every token, zeros at the others."""
    empty = x.new_zeros(x.shape[0], x.shape[1], micro - 1, *x.shape[2:])
    return torch.cat([empty, x.unsqueeze(2)], dim=2).flatten(1, 2)


def _read_first(query: Tensor, read: Tensor | None, start: Tensor | None, y: Tensor) -> Tensor:
    """What the first token reads of S_0: [B, 1, H, columns]."""
    if start is None:
        return torch.zeros_like(y[:, :1])
    q = query[:, 0].float().repeat_interleave(start.shape[1] // query.shape[2], dim=1)
    seen = (q.unsqueeze(-2) @ start).squeeze(-2)
    return (seen if read is None else seen * read[:, 0].unsqueeze(-1)).unsqueeze(1).to(y.dtype)


def _stabilise(
    ops: Operands, decay: Tensor, source: Tensor | None, gain: Tensor, start: Tensor | None, state: Tensor | None,
    keep: Tensor | None, spec: Spec,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Change of gauge S → e^{-m} S with m_r = max(m_{r-1} + log decay_r, gain_r), as dsf.lower has it for one m a head.

    Returns decay, source, S_0 in the new gauge, the m that each token's read sees, and the last m [B, H].
    """
    gain = gain if keep is None else torch.where(keep, gain, EMPTY)
    log = (decay if ops.log else decay.abs().log()).detach().clamp(min=FLOOR)
    if keep is not None:
        log = torch.where(keep, log, 0.0)
    drift, own = log.cumsum(1), gain.detach()
    first = torch.full_like(own[:, 0], EMPTY)
    if state is not None and start is not None:
        levels = state[..., -1].detach()  # [B, H, N]
        first = levels.amax(-1)
        start = start * (levels - first.unsqueeze(-1)).exp().unsqueeze(-1)
    after = drift + torch.maximum(torch.cummax(own - drift, dim=1).values, first.unsqueeze(1))
    before = torch.cat([first.unsqueeze(1), after[:, :-1]], dim=1)
    moved = before - after
    decay = decay + moved if ops.log else decay * moved.exp()
    weight = (gain - after).exp()
    source = weight if source is None else source * weight
    seen = before[:, :: spec.micro] if spec.system.read == "before" else after[:, spec.micro - 1 :: spec.micro]
    return decay, source, start, seen, after[:, -1]


def _finish(
    spec: Spec, tensors: _Tensors, y: Tensor, final: Tensor, level: Tensor | None, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Skip, normaliser, and the running maximum as the state's last column."""
    skip, p = spec.system.D, tensors.bound.sizes.p
    if skip is not ZERO and spec.rule is None:
        return y + _skip(tensors, skip), final
    if spec.rule is None:
        return y, final
    num, den = y[..., :p], y[..., p:]
    if skip is not ZERO:
        assert spec.ones is not None
        num, den = num + _skip(tensors, skip), den + _skip(tensors, spec.ones.system.D)
    values = tensors.evaluator(*(x for x in inputs_of(spec.rule) if x not in (NUM, DEN, ONE)))
    one = torch.ones((), device=y.device) if level is None else (-level).clamp(max=80.0).exp()[..., None, None]
    env = values.values | {NUM: num.unsqueeze(-2), DEN: den.unsqueeze(-2), ONE: one}
    y = Evaluator(env, values.keys, p)(spec.rule).squeeze(-2)
    if after is not None:
        final = torch.cat([final, after[..., None, None].expand(*final.shape[:-1], 1)], dim=-1)
    return y, final


def _skip(tensors: _Tensors, skip: Expr) -> Tensor:
    """D [B|1, T|1, H, P or 1]."""
    x, heads = tensors.evaluator(skip)(skip).squeeze(-2), tensors.bound.sizes.heads
    return x if x.shape[2] in (1, heads) else x.repeat_interleave(heads // x.shape[2], dim=2)
