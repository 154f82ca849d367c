"""Readouts that read the state in several ways, y = Σ gate_m · (q_mᵀ S): the same system read in one way each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dsf.language.derived import derived, interned
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.language.frame import roots_of
from dsf.language.operator import factors_of, split_factors, summands, times

if TYPE_CHECKING:
    from dsf.language.spec import Spec


@derived
def apart(spec: Spec) -> tuple[Spec, ...]:
    """Systems whose outputs add up to y, each with one Key readout times gates of channels; empty where C is one.

    Of systems whose chunks are matrix products then: what reads keys and channels at once would leave it to a scan.
    """
    plain = spec.rule is None and spec.system.solve is None and not spec.is_attention
    dense = any(r.dense is not None for r in spec.rows)
    if not (plain and spec.has_key) or dense or VALUE not in spec.gated_read[1].axes:
        return ()
    if spec.decay_axes == {KEY, VALUE} or spec.mixes_pairs:
        return ()
    found: dict[Expr, Expr] = {}  # readout -> gate
    for part in expanded(spec.readout):
        gate, read = split_factors(part, lambda factor: KEY not in factor.axes)
        if read.axes != {KEY}:
            return ()
        found[read] = found[read] + gate if read in found else gate
    return tuple(_read_by(spec, times(gate, read), number == 0) for number, (read, gate) in enumerate(found.items()))


def _read_by(spec: Spec, c: Expr, first: bool) -> Spec:
    """The system with another readout, the first of them with the skip, and the inputs that it uses."""
    system = replace(spec.system, C=c, D=spec.system.D if first else const(0))
    used = {n.attrs[0] for n in inputs_of(*roots_of(system))}
    return interned(replace(spec, inputs=tuple(i for i in spec.inputs if i.name in used), system=system))


def expanded(x: Expr) -> list[Expr]:
    """The products that x is a sum of, sums inside its products multiplied out."""
    out: list[Expr] = []
    for sign, part in summands(x):
        factors = factors_of(part)
        wide = next((f for f, inverse in factors if not inverse and f.op in ("add", "sub") and len(f.axes) == 2), None)
        if wide is None:
            out.append(-part if sign < 0 else part)
            continue
        rest = const(sign)
        for factor, inverse in factors:
            if factor is not wide:
                rest = rest / factor if inverse else times(rest, factor)
        out += [y for term in expanded(wide) for y in expanded(times(rest, term))]
    return out
