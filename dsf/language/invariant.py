"""Time-invariant declarations, and their split into parts of Params (fixed) and parts of tokens (moving).

A and C's part along the Key axis depend on Params only; B is a sum of products of a fixed and a moving part. So y is a
sum of moving parts, each convolved with an impulse response that depends on Params only.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsf.language.derived import derived
from dsf.language.expr import KEY, Expr, const, inputs_of, is_paired
from dsf.language.operator import Normal, normal_form, split_factors, summands
from dsf.language.spec import Spec


@dataclass(frozen=True)
class Drive:
    """One summand of an injection: fixed (of Params) times moving (of tokens)."""

    fixed: Expr
    moving: Expr


@dataclass(frozen=True)
class Still:
    """A time-invariant declaration; its expressions use the inputs of the spec `of`.

    steps: for every micro-step the factors of A, the first to act first, and its injections. C = gate · read: a moving
    factor of y, and the fixed readout. diagonal: whether A acts entry by entry, or on pairs as complex numbers.
    """

    of: Spec
    steps: tuple[tuple[tuple[Normal, ...], tuple[Drive, ...]], ...]
    gate: Expr
    read: Expr
    diagonal: bool


def is_invariant(spec: Spec) -> bool:
    """True for declarations that have the convolution form."""
    return isinstance(invariant(spec), Still)


@derived
def invariant(spec: Spec) -> Still | str:
    """The split of a time-invariant declaration; for any other the reason, in words."""
    if spec.is_softmax:
        return "exponential features have no state of fixed size"
    if spec.system.window is not None:
        return "a window forgets what leaves it"
    if spec.system.solve is not None:
        return "the readout is solved for with what other tokens wrote"
    if spec.acts_on_values:
        return "A mixes the channels that would be convolved one by one"
    if spec.rule is not None:
        return "normalize divides by a second system"
    of = spec
    if spec.is_framed:
        assert spec.turning is not None
        of = spec.turning.spec
    timed = {i.name for i in of.inputs if i.kind.time}

    def moving(x: Expr) -> list[str]:
        return sorted({i.attrs[0] for i in inputs_of(x) if i.attrs[0] in timed})

    steps = []
    for step in of.system.micro_steps:
        factors = normal_form(step.A)
        for n in factors:
            parts = [n.decay, n.angle, *(e for c in n.corrections for e in (c.scale, c.left, c.right))]
            named = sorted({name for x in parts for name in moving(x)})
            if named:
                return f"A changes from token to token with {', '.join(f'`{name}`' for name in named)}"
        drives = []
        for sign, part in summands(step.B):
            if part is const(0):
                continue
            moves, fixed = split_factors(part, lambda x: bool(moving(x)))
            drives.append(Drive(-fixed if sign < 0 else fixed, moves))
        steps.append((factors, tuple(drives)))
    gate, read = split_factors(of.readout, lambda x: bool(moving(x)) and KEY not in x.axes)
    if moving(read):
        return f"C changes from token to token with {', '.join(f'`{name}`' for name in moving(read))}"
    rows = [n for step in spec.system.micro_steps for n in normal_form(step.A)]
    turned = any(n.angle is not const(0) for n in rows)
    diagonal = all(not n.corrections and (not turned or is_paired(n.decay)) for n in rows)
    return Still(of, tuple(steps), gate, read, diagonal)
