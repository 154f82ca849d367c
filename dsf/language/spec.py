"""`Spec`: a traced recurrence, and its normal form. Immutable; the compiler's first stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dsf.language import words
from dsf.language.annotations import Input
from dsf.language.derived import interned
from dsf.language.errors import TraceError
from dsf.language.expr import IN_PAIRS, KEY, VALUE, Expr, children_first, const, inputs_of, substitute
from dsf.language.frame import Frame, frame_of, needs_frame, roots_of, turns
from dsf.language.operator import Normal, factors_of, normal_form, split_factors, split_scale, summands, times
from dsf.language.primitives import log_of
from dsf.language.reads import apart
from dsf.language.system import DEN, NUM, System, rule_of


@dataclass(frozen=True)
class Term:
    """One separable term of an injection, e^gain · key valueᵀ. gain: None unless a running maximum scales the state."""

    key: Expr
    value: Expr
    gain: Expr | None = None


@dataclass(frozen=True)
class Row:
    """One micro-step in normal form: A = decay ⊙ · + corrections, B = Σ terms, or `dense` when B does not factor."""

    normal: Normal
    terms: tuple[Term, ...]
    dense: Expr | None = None


@dataclass(frozen=True, eq=False)
class Spec:
    """A recurrence as data: the traced system, its normal form (rows) and derived properties (structure, ...).

    name, doc: the function's. inputs: in the order of its parameters. made: whether this is the plain system of a frame
    (dsf.language.frame); forms then run what turns are left in it.
    """

    name: str
    doc: str
    inputs: tuple[Input, ...]
    system: System
    made: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the declaration. Loading returns the living Spec with this content, if there is one."""
        return restored, (self.name, self.doc, self.inputs, self.system, self.made)

    def __copy__(self) -> Spec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self

    @cached_property
    def readout(self) -> Expr:
        """The readout C."""
        assert self.system.C is not None
        return self.system.C

    @cached_property
    def frame(self) -> Frame | None:
        """The plain system that the forms run instead of this one, if it has turns, previous values or Pair inputs."""
        return frame_of(self, "gauge") if self.is_framed else None

    @cached_property
    def turning(self) -> Frame | None:
        """The frame with the turns left in A, whose matrices and states are those of the declaration."""
        return frame_of(self, "turning") if self.is_framed else None

    @cached_property
    def oracle(self) -> Frame | None:
        """The frame for the naive form."""
        return frame_of(self, "oracle") if self.is_framed else None

    @cached_property
    def is_framed(self) -> bool:
        """True for declarations with turns, previous values or Pair inputs, but attention, which handles them."""
        return not (self.made or self.is_attention) and needs_frame(self)

    @property
    def inner(self) -> Spec:
        """The system that the forms run: this one, or its frame's."""
        return self if self.frame is None else self.frame.spec

    @cached_property
    def turns(self) -> bool:
        """True where A contains a turn."""
        return turns(self.system)

    @cached_property
    def in_pairs(self) -> bool:
        """True where the Key axis holds pairs, for turns or complex numbers."""
        return self.turns or any(x.op in IN_PAIRS for x in children_first(*roots_of(self.system)))

    def keys_of(self, n: int) -> int:
        """n, or n + 1 where the Key axis holds pairs and n is odd."""
        return n + n % 2 if self.in_pairs or any(i.kind.pair for i in self.inputs) else n

    @cached_property
    def mixes_pairs(self) -> bool:
        """True where A keeps turns, as 2 x 2 blocks, since the decay differs within a pair."""
        return not self.is_attention and any(r.normal.angle is not const(0) for r in self.rows)

    @cached_property
    def gated_read(self) -> tuple[Expr, Expr]:
        """(gate, read) with C = gate · read. gate: the factors with the Value axis alone, which can multiply y instead.

        gate is 1 where `read` would still vary over channels, where there is no Key axis, and in normalised systems,
        whose rule is not linear in y.
        """
        gate, read = split_factors(self.readout, lambda factor: factor.axes == {VALUE})
        plain = self.rule is not None or VALUE in read.axes or not self.has_key or gate is const(1)
        return (const(1), self.readout) if plain else (gate, read)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The micro-steps in normal form."""
        rows: list[Row] = []
        for step in self.system.micro_steps:
            *first, last = normal_form(step.A)
            rows += [Row(n, ()) for n in first]
            terms = self._terms(step.B)
            rows.append(Row(last, terms) if terms is not None else Row(last, (), step.B))
        return tuple(rows)

    def _terms(self, injection: Expr) -> tuple[Term, ...] | None:
        if injection.is_constant and injection.value == 0:
            return ()
        parts = [self._term(sign, part) for sign, part in summands(injection)]
        return None if None in parts else tuple(p for p in parts if p is not None)

    def _term(self, sign: float, part: Expr) -> Term | None:
        key, value, gain = const(1), const(sign), None
        for factor, inverse in factors_of(part):
            if factor.op == "exp" and self.system.normalize is not None and not self.is_softmax:
                power = -factor.args[0] if inverse else factor.args[0]
                gain = power if gain is None else gain + power
            elif factor.axes == {KEY, VALUE}:
                return None
            elif KEY in factor.axes:
                key = key / factor if inverse else times(key, factor)
            else:
                value = value / factor if inverse else times(value, factor)
        return Term(key, value, gain)

    @cached_property
    def is_softmax(self) -> bool:
        """True when readout and injection are infinite exponential features."""
        return self.readout.features == "exp"

    @cached_property
    def is_attention(self) -> bool:
        """True where the state is the keys and values of tokens: exponential features, and systems with a window."""
        return self.is_softmax or self.system.window is not None

    @property
    def is_linear(self) -> bool:
        """True where y = C'S + D of one finite state: no normalize, solve, features or window."""
        return self.rule is None and self.system.solve is None and self.features is None and not self.is_attention

    @cached_property
    def is_plain_softmax(self) -> bool:
        """True where torch's fused attention computes it: num / den of exponential features, no window, no decay."""
        whole = self.is_softmax and self.system.window is None and self.rule is NUM / DEN
        return whole and self.decay_kind == "identity"

    @cached_property
    def decay_axes(self) -> frozenset[str]:
        """Axes any micro-step's decay varies over."""
        return frozenset[str]().union(*(r.normal.decay.axes for r in self.rows))

    @cached_property
    def log_decays(self) -> tuple[Expr, ...] | None:
        """The logarithm of every row's decay, if the table of primitives gives all without the decays; else None."""
        logs = tuple(log_of(r.normal.decay) for r in self.rows)
        return None if None in logs else tuple(x for x in logs if x is not None)

    @cached_property
    def rank(self) -> int:
        """The largest number of corrections of a row."""
        return max(len(r.normal.corrections) for r in self.rows)

    @cached_property
    def has_key(self) -> bool:
        """True when the state has a Key axis (N entries); else it is a vector over channels (N = 1)."""
        return KEY in self.readout.axes or self.state_has_key

    @cached_property
    def state_has_key(self) -> bool:
        """True when A or B gives the state a Key axis, whatever C reads."""
        exprs = [r.normal.decay for r in self.rows] + [r.dense for r in self.rows if r.dense is not None]
        exprs += [x for r in self.rows for t in r.terms for x in (t.key, t.gain) if x is not None]
        return (self.rank > 0 and not self.acts_on_values) or any(KEY in x.axes for x in exprs)

    @cached_property
    def acts_on_values(self) -> bool:
        """True where corrections act on the Value axis: A is an operator on the columns of Sᵀ."""
        return any(c.axis == VALUE for r in self.rows for c in r.normal.corrections)

    @cached_property
    def features(self) -> str | None:
        """The features on the state's Key axis: None for N entries, "exp", or "taylor<order>"."""
        return self.readout.features

    @cached_property
    def is_delta(self) -> bool:
        """True when every correction's left vector is a key that the same row writes at, and B factors."""
        if any(r.dense is not None for r in self.rows) or self.acts_on_values:
            return False
        return self.rank > 0 and all(
            not r.normal.corrections
            or (
                len(r.terms) == len(r.normal.corrections)
                and all(c.left is split_scale(t.key)[1] for c, t in zip(r.normal.corrections, r.terms, strict=True))
            )
            for r in self.rows
        )

    @cached_property
    def is_delta_on_values(self) -> bool:
        """True when every correction on the Value axis has the value that its row writes as its left vector."""
        pairs = [(c, t) for r in self.rows for c, t in zip(r.normal.corrections, r.terms, strict=False)]
        counts = {len(r.terms) - len(r.normal.corrections) for r in self.rows if r.normal.corrections}
        tied = all(c.left is split_scale(t.value, VALUE)[1] and not c.scale.axes for c, t in pairs)
        return self.acts_on_values and counts == {0} and tied and all(r.dense is None for r in self.rows)

    @cached_property
    def is_elementwise(self) -> bool:
        """True when chunks cannot use matrix products: A is elementwise, and B, C or the decay is not low-rank."""
        if self.rank or self.is_attention or self.mixes_pairs:
            return False
        wide = self.decay_axes == {KEY, VALUE} or any(r.dense is not None for r in self.rows)
        return wide or not self.has_key or (VALUE in self.gated_read[1].axes and not apart(self))

    @cached_property
    def has_still_keys(self) -> bool:
        """True where all inputs with a Key axis are Params and chunks use matrix products: these products of float32
        numbers may cancel more than those of tokens do (in S4D, for example)."""
        kinds = [i.kind for i in self.inputs if KEY in i.kind.axes]
        plain = self.is_attention or self.mixes_pairs or self.inner.is_elementwise
        return bool(kinds) and not plain and not any(k.time for k in kinds)

    @cached_property
    def is_constant_decay(self) -> bool:
        """True when no decay depends on the token."""
        timed = {i.name for i in self.inputs if i.kind.time}
        return not any(i.attrs[0] in timed for r in self.rows for i in inputs_of(r.normal.decay))

    @cached_property
    def drives(self) -> tuple[Expr, ...]:
        """The input that den replaces by ones, for every micro-step; empty without normalize. Raises TraceError."""
        if self.system.normalize is None:
            return ()
        if self.system.drive is not None:
            return self.system.drive if isinstance(self.system.drive, tuple) else (self.system.drive,)
        bare = {
            f.attrs[0]
            for r in self.rows
            for t in r.terms
            for f, inverse in factors_of(t.value)
            if f.op == "input" and VALUE in f.axes and not inverse
        }
        if len(bare) != 1:
            given = ", ".join(sorted(bare)) or "none"
            raise TraceError(
                "normalize divides by the same system driven by ones, but which input drives it is not clear: "
                f"expected one bare Value factor in B, found {given}; "
                + ("" if bare else "give what is written as an input of its own, or ")
                + "pass System(..., drive=v)"
            )
        return tuple(x for x in inputs_of(*(s.B for s in self.system.micro_steps)) if x.attrs[0] in bare)

    @cached_property
    def ones(self) -> Spec | None:
        """The system driven by ones, whose output is den."""
        if not self.drives:
            return None
        driven = self._driven_by_ones
        steps = [System(A=s.A, B=driven(s.B), C=s.C, D=driven(s.D), read=s.read) for s in self.system.micro_steps]
        system = replace(steps[-1], earlier=tuple(steps[:-1]), normalize=self.system.normalize, drive=self.drives)
        return Spec(f"{self.name} (den)", "", self.inputs, system)

    def _driven_by_ones(self, x: Expr) -> Expr:
        return substitute(x, dict.fromkeys(self.drives, const(1)))

    @cached_property
    def ones_rows(self) -> tuple[Row, ...]:
        """The rows of `ones`, term for term those of this system, whose keys and gains den shares."""
        driven = self._driven_by_ones
        return tuple(
            replace(
                row, terms=tuple(replace(t, value=driven(t.value)) for t in row.terms),
                dense=None if row.dense is None else driven(row.dense),
            )
            for row in self.rows
        )  # fmt: skip

    @cached_property
    def unnormalised(self) -> Spec:
        """The system without normalize, whose output is num."""
        if self.system.normalize is None:
            return self
        return replace(self, system=replace(self.system, normalize=None, drive=None))

    @cached_property
    def rule(self) -> Expr | None:
        """normalize as an expression of the inputs num, den, one."""
        return None if self.system.normalize is None else rule_of(self.system.normalize)

    @cached_property
    def is_stabilised(self) -> bool:
        """True when a running maximum keeps exponential gains of B in range; B has to factor for that."""
        return all(r.dense is None for r in self.rows) and any(t.gain is not None for r in self.rows for t in r.terms)

    @cached_property
    def gain_axes(self) -> frozenset[str]:
        """The axes of the running maximum: the decay's, so that scaling the state does not change the structure.

        Corrections mix the entries of the Key axis, which therefore share one maximum.
        """
        if not self.is_elementwise:
            return self.decay_axes - {KEY} if self.rank else self.decay_axes
        gains = [t.gain.axes for r in self.rows for t in r.terms if t.gain is not None]
        return self.decay_axes.union(*gains)

    @cached_property
    def skip_term(self) -> Term:
        """D; for a stabilised system with its exponential factors split off as the gain, 0 for none."""
        if not self.is_stabilised or self.system.D is const(0):
            return Term(const(1), self.system.D)
        term = None if self.system.D.op in ("add", "sub") else self._term(1.0, self.system.D)
        return term if term is not None and term.gain is not None else Term(const(1), self.system.D, const(0))

    @cached_property
    def skip_ones(self) -> Term:
        """The skip of the system driven by ones, without its gain, which equals `skip_term`'s."""
        return Term(const(1), self._driven_by_ones(self.skip_term.value))

    @cached_property
    def den_has_channels(self) -> bool:
        """True when den differs by channel, so that its state needs P columns instead of one."""
        if self.ones is None:
            return False
        terms = [x for r in self.ones_rows for t in r.terms for x in (t.value, t.gain) if x is not None]
        dense = [r.dense for r in self.ones_rows if r.dense is not None]
        return (
            any(VALUE in x.axes for x in [*terms, *dense, self.readout, self.ones.system.D])
            or VALUE in self.decay_axes | (self.gain_axes if self.is_stabilised else frozenset())
            or any(VALUE in c.scale.axes | c.left.axes | c.right.axes for r in self.rows for c in r.normal.corrections)
        )

    @property
    def micro(self) -> int:
        """The number of rows, micro-steps in normal form, of a token."""
        return len(self.rows)

    @property
    def decay_kind(self) -> str:
        """identity, constant, scalar, key, value or hadamard."""
        one = const(1)
        if all(r.normal.decay is one for r in self.rows):
            return "identity"
        kinds = {frozenset[str](): "scalar", frozenset({KEY}): "key", frozenset({VALUE}): "value"}
        kind = kinds.get(self.decay_axes, "hadamard")
        return "constant" if kind == "scalar" and self.is_constant_decay else kind

    @property
    def correction_kind(self) -> str:
        """none, delta (erases where it writes), rank-one, low-rank, or product (of several micro-steps)."""
        if not self.rank:
            return "none"
        if self.micro > 1:
            return "product"
        return "delta" if self.is_delta or self.is_delta_on_values else ("rank-one" if self.rank == 1 else "low-rank")

    @property
    def structure(self) -> str:
        """The row of the compiler's table this recurrence belongs to, in words."""
        return words.structure(self)

    def __str__(self) -> str:
        return words.text(self)


def restored(*declared: Any) -> Spec:
    """The Spec of a pickle."""
    return interned(Spec(*declared))
