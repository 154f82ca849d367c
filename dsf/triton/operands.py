"""The operands of the chunk kernels from a Spec, or the reason why it has none.

An operand that is a bare input keeps its dtype, strides and number of heads. Scales without a Key or Value axis are
factored out of keys, values and readouts and become float32 scalars a token. Other expressions (feature maps,
normalised keys) are evaluated in float32 by a printed kernel (dsf.triton.print_chunk) and rounded once to the inputs'
dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from dsf.language.bounds import bounds
from dsf.language.derived import derived
from dsf.language.expr import KEY, VALUE, Expr, children_first, const, inputs_of, substitute
from dsf.language.functions import maximum, where
from dsf.language.operator import I, factors_of, normal_form, product_of, quotient, split_scale, summands, times
from dsf.language.primitives import derivatives
from dsf.language.reads import apart
from dsf.language.spec import Row, Spec
from dsf.language.system import System
from dsf.triton.lines import MOST, lines_of, paid
from dsf.triton.printer import symbol

ZERO, UNIT = const(0), const(1)
TINY = 1e-24  # of dsf.kernels.triton.chunk.tiles: the kernels take smaller decays for this one
WRITTEN = symbol(".num", frozenset({VALUE}))  # the read of a token
GONE = -20.0  # a decay below e^-20 = 2e-9 passes on less than the rounding error of its gradient in float32


@dataclass(frozen=True)
class Operands:
    """S = a S + key eᵀ, e = source · value - erase · key'(a S), y = gate · read · query' S: expressions by micro-step.

    With rights: e = source · value - erase · right'(a S). With lefts: S = (a + left right') S + key value', and
    y = query' S + own · value, where own is the bonus. decays:
    when `log`, logarithms between floor and -floor; keywise: one for each key entry. ones: what drives the normaliser
    in place of values; gains: exponents of exponential gates; group: rows that act at once, as one micro-step does
    whose A sums several corrections (dsf.triton.lines), else 1. divisors: of the erases, where rows erase before
    their decay. queries: of several readouts, one for each of a token's rows, whose gates are `gates`; query and gate
    are then unused. fresh: the write strengths that a token's own readouts see, where these are not `sources`.
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
    group: int = 1
    divisors: tuple[Expr, ...] | None = None
    queries: tuple[Expr, ...] = ()
    gates: tuple[Expr, ...] = ()
    fresh: tuple[Expr, ...] = ()

    @property
    def reads(self) -> tuple[Expr, ...]:
        """Symbols of a token's reads: one, or one for each of its rows."""
        return tuple(Expr("input", (), (".num", row), WRITTEN.axes) for row in range(len(self.queries))) or (WRITTEN,)

    @property
    def read_out(self) -> Expr:
        """The sum of the reads, each times its gate."""
        gates = self.gates or (self.gate,)
        first, *more = (times(x, gate) for x, gate in zip(self.reads, gates, strict=True) if gate is not ZERO)
        return sum(more, first)

    @property
    def gated(self) -> bool:
        """True where C has a factor of single channels, whose gradient needs the read."""
        return self.gate is not UNIT or bool(self.gates)

    @property
    def divided(self) -> tuple[Expr, ...]:
        """The erases as the kernels take them."""
        if self.erases is None or self.divisors is None:
            return self.erases or ()
        return tuple(x if y is UNIT else x / y for x, y in zip(self.erases, self.divisors, strict=True))

    @property
    def rows(self) -> int:
        """The rows of a token in the kernels."""
        return len(self.keys)

    @property
    def constants(self) -> dict[Expr, Expr]:
        """The inverse of each row's divisor, by the symbol that stands for it in `pair`."""
        return {_inverse(step): UNIT / x for step, x in enumerate(self.divisors or ())}

    def pair(self, name: str, step: int | None, x: Expr, given: Expr) -> tuple[Expr, Expr]:
        """(operand, its gradient) for the printed adjoint, from the gradient `given` by the kernels for operand x.

        Of an erase that is divided by a decay the erase alone is differentiated: what the divisor would add to the
        decay's gradient cancels with a part that the kernels leave out.
        """
        if name == "erase" and self.divisors is not None:
            assert self.erases is not None
            return self.erases[step or 0], given * _inverse(step or 0)
        return x, self.settled(name, x, given)

    @property
    def column(self) -> bool:
        """True where the normaliser is one more column of values; with scalar decays the kernels compute it apart."""
        return self.ones is not None and (self.erases is not None or self.keywise)

    @property
    def all(self) -> list[Expr]:
        """All expressions of the operands."""
        found: list[Expr] = []
        for entry in fields(self):
            x = getattr(self, entry.name)
            found += [x] if isinstance(x, Expr) else list(x) if isinstance(x, tuple) else []
        return found

    def settled(self, name: str, x: Expr, given: Expr) -> Expr:
        """The gradient `given` by the kernels for operand x, or 0 where it is only rounding error.

        The gradient of a log decay along the Key axis is a difference of nearly equal sums. Where the decay has
        vanished (below GONE) and its derivative by an input is unbounded, that would amplify the rounding error.
        """
        if name == "decay" and self.keywise and self.log:
            slopes = derivatives(x, UNIT, inputs_of(x))
            if any(math.isinf(end) for slope in slopes for end in bounds(slope)):
                return where(x < GONE, 0.0, given)
        return given


class Unfit(Exception):
    """Why the chunk kernels cannot run a spec."""


@derived
def operands_of(spec: Spec) -> Operands:
    """The operands of `spec`. Raises Unfit with the reason where it has none."""
    spec = written_apart(spec)
    if spec.is_attention or spec.is_elementwise or VALUE in spec.decay_axes:
        raise Unfit(f"the matrix kernels take scalar or key-diagonal decays and delta rules, this is {spec.structure}")
    if spec.is_stabilised and (
        spec.rank or spec.gain_axes or spec.system.D is not ZERO or any(_gain(r).axes for r in spec.rows)
    ):
        raise Unfit("the matrix kernels take exponential gains of one number a head, without corrections or D")
    if spec.is_stabilised and spec.micro > 1:
        raise Unfit("the matrix kernels take exponential gains of one micro-step a token")
    group, lines, ones_lines = lines_of(spec)
    if group > MOST:
        raise Unfit(f"the matrix kernels take a step of at most {MOST} corrections, and products in B, that are summed")
    logs, steps = spec.log_decays, tuple(r.normal.decay for r in spec.rows)
    decays = paid(steps, group, UNIT) if logs is None else paid(logs, group, ZERO)
    keywise = KEY in spec.decay_axes
    if keywise and logs is None:
        raise Unfit("the matrix kernels take key-diagonal decays made of exp and sigmoid, whose logarithm is derived")
    plain = all(r.normal.decay is UNIT for r in spec.rows) and not spec.is_stabilised
    of_steps = [decay for decay in steps for _ in range(group)]
    erased, divisors, rights = _erasing(lines, of_steps, logs is not None, keywise)
    general = erased is None
    rows = [_row(line, x) for line, x in zip(lines, erased or [ZERO] * len(lines), strict=True)]
    keys, sources, values, erases = (tuple(x) for x in zip(*rows, strict=True))
    gate, core = spec.gated_read
    read, query = split_scale(core)
    several = [part.gated_read for part in apart(spec)]
    if several:
        gate, read, query = UNIT, UNIT, ZERO
    ones = None
    if spec.ones is not None:
        ones = tuple(line.terms[0].value if line.terms else ZERO for line in ones_lines)
        if spec.den_has_channels:
            raise Unfit("the matrix kernels take a normaliser of one number a head")
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
        logs is not None, keywise, ones, gains, gate, rights=rights, group=group, divisors=divisors,
    )  # fmt: skip
    if several or spec.system.unseen:
        found = _read_together(spec, found, several)
    if general:
        found = _rank_one(spec, found, lines)
    _check_printable(spec, found)
    return found


@derived
def written_apart(spec: Spec) -> Spec:
    """The same system with one micro-step for each product in B: the first has A, the others A = I.

    The first product is the one whose key a delta rule erases. Unchanged are specs whose rows write one product, and
    those that sum corrections, whose rows (dsf.triton.lines) have room for several products.
    """
    if spec.is_attention or spec.mixes_pairs or all(len(r.terms) < 2 and r.dense is None for r in spec.rows):
        return spec
    if spec.rank > 1:
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


def _read_together(spec: Spec, found: Operands, several: list[tuple[Expr, Expr]]) -> Operands:
    """The operands of tokens whose readouts, one in each row, see what all their rows write. several: (gate, key) of
    every readout where there are several."""
    system, still = spec.system, ZERO if found.log else UNIT
    plain = found.erases is None and not (found.keywise or spec.rank) and system.read == "after"
    if not plain or any(x is not still for x in (found.decays or ())[1:]):
        raise Unfit("the matrix kernels take several readouts of tokens that decay alike for all keys, and then write")
    if len(several) > found.rows or (system.unseen and not found.log):
        raise Unfit(f"the matrix kernels take at most one readout for each write, got {len(several)} for {found.rows}")
    rows = 1 << (found.rows - 1).bit_length()  # of a token; chunks then hold whole tokens

    def filled(x: tuple[Expr, ...], rest: Expr) -> tuple[Expr, ...]:
        return (*x, *[rest] * (rows - len(x)))

    queries, gates = ((), ()) if not several else (filled(tuple(x[i] for x in several), ZERO) for i in (1, 0))
    sources = filled(found.sources, ZERO)
    nothing = dict.fromkeys(system.unseen, ZERO)
    return replace(
        found, queries=queries, gates=gates, keys=filled(found.keys, ZERO), values=filled(found.values, ZERO),
        sources=sources, decays=None if found.decays is None else filled(found.decays, still),
        fresh=tuple(substitute(x, nothing) for x in sources) if nothing else (),
    )  # fmt: skip


def _check_printable(spec: Spec, found: Operands) -> None:
    """Raise Unfit for expressions that no printed kernel evaluates."""
    for node in children_first(*found.all, spec.system.D, *([] if spec.rule is None else [spec.rule])):
        if node.op == "taylor_features":
            raise Unfit("no printed kernel evaluates Taylor features")
        if node.axes == {KEY, VALUE}:
            raise Unfit(f"the printed kernels hold vectors of a token, and `{node}` is a matrix")


def _gain(row: Row) -> Expr:
    gain = row.terms[0].gain if row.terms else None
    return ZERO if gain is None else gain


def _row(row: Row, erase: Expr) -> tuple[Expr, Expr, Expr, Expr]:
    """(key, source, value, erase) of a row; its key is the erased one, if there is one. erase: zero for corrections
    that are no delta rule."""
    if row.dense is not None or len(row.terms) > 1:
        raise Unfit("the matrix kernels take a B of one product, a Key times a Value expression")
    scale, key, source, value = UNIT, UNIT, ZERO, UNIT
    if row.terms:
        scale, key = split_scale(row.terms[0].key)
        source, value = split_scale(row.terms[0].value, VALUE)
        source = times(scale, source)
    for c in row.normal.corrections:
        if VALUE in c.scale.axes | c.left.axes | c.right.axes:
            raise Unfit("the matrix kernels erase alike in all channels")
    if erase is ZERO:
        return key, source, value, ZERO
    return row.normal.corrections[0].left, source, value, erase


def is_delta(row: Row, decay: Expr) -> bool:
    """True for a row without correction, or one that erases at the key it writes (a delta rule), after the decay."""
    return _erase(row, decay) is not None


def _rank_one(spec: Spec, found: Operands, lines: list[Row]) -> Operands:
    """Operands of a transition that is diagonal plus rank one. Vectors keep their scales, decays are by key entry."""
    if spec.log_decays is None:
        raise Unfit("beside a correction the matrix kernels take decays made of exp and sigmoid, whose log is derived")
    corrections = [x.normal.corrections[0] if x.normal.corrections else None for x in lines]
    lefts = tuple(ZERO if c is None else times(c.scale, c.left) for c in corrections)
    rights = tuple(ZERO if c is None else c.right for c in corrections)
    keys = tuple(times(s, k) for s, k in zip(found.sources, found.keys, strict=True))
    own, core = split_scale(spec.system.D, VALUE)
    alone = core is found.values[-1] and not own.axes and found.rows == 1 and spec.system.read == "after"
    bare = spec.rule is None and found.gate is UNIT
    return replace(
        found, query=times(found.read, found.query), read=UNIT, keys=keys, sources=(UNIT,) * len(keys), erases=None,
        decays=paid(spec.log_decays, found.group, ZERO), log=True, keywise=True, lefts=lefts, rights=rights,
        floor=min(min(low, -high) for low, high in map(bounds, spec.log_decays)), own=own if alone and bare else None,
    )  # fmt: skip


def _erasing(
    lines: list[Row], decays: list[Expr], log: bool, keywise: bool
) -> tuple[list[Expr] | None, tuple[Expr, ...] | None, tuple[Expr, ...] | None]:
    """(erases of all rows, their divisors if rows erase before their decay, the Keys along which they erase if these
    are not those that they write at). No erases: the corrections are no delta rules.

    decays: of each row's micro-step. log: they have logarithms.
    """
    erases = [x for line, decay in zip(lines, decays, strict=True) if (x := _erase(line, decay)) is not None]
    if len(erases) == len(lines):
        return erases, None, None
    rights = [x for line, decay in zip(lines, decays, strict=True) if (x := _right(line, decay)) is not None]
    erases = [x for line in lines if (x := _strength(line, not keywise)) is not None]
    if not log or len(erases) < len(lines) or (keywise and len(rights) < len(lines)):
        return None, None, None
    if keywise:
        return erases, None, tuple(rights)
    return erases, tuple(x if x is UNIT else maximum(x, TINY) for x in decays), None


def _erase(row: Row, decay: Expr) -> Expr | None:
    """erase of A = decay (I - erase · key keyᵀ), or of (I - erase · key keyᵀ) diag(decay); zero without a correction;
    None if A is neither."""
    if not row.normal.corrections:
        return ZERO
    c = row.normal.corrections[0]
    decayed = KEY in decay.axes and c.right is decay * c.left
    if not _is_tied(row) or not (decayed or (c.left is c.right and KEY not in decay.axes)):
        return None
    return quotient(c.scale, UNIT if decayed else decay, -1)


def _strength(row: Row, alike: bool) -> Expr | None:
    """strength of A = decay I - strength · key rightᵀ; zero without a correction; None if A is no such matrix. alike:
    right is key.

    Where it erases before a decay of one number, strength / decay is an erase, which the kernels multiply by the decay
    again. It is finite, as they never run a decay below TINY.
    """
    if not row.normal.corrections:
        return ZERO
    c = row.normal.corrections[0]
    return product_of(factors_of(c.scale), -1) if _is_tied(row) and (c.left is c.right or not alike) else None


def _right(row: Row, decay: Expr) -> Expr | None:
    """right of A = (I - strength · key rightᵀ) diag(decay), any without a correction; None if A is no such matrix."""
    if not row.normal.corrections:
        return row.terms[0].key if row.terms else UNIT
    return quotient(row.normal.corrections[0].right, decay) if _is_tied(row) else None


def _is_tied(row: Row) -> bool:
    """True for a row of one correction that writes nothing, or at the key where the correction writes."""
    left = row.normal.corrections[0].left
    return len(row.normal.corrections) == 1 and (not row.terms or left is split_scale(row.terms[0].key)[1])


def _inverse(step: int) -> Expr:
    """A symbol, which derivatives take for a constant."""
    return symbol(f".inverse_{step}", frozenset())
