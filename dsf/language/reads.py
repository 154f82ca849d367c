"""Readouts that are sums, y = Σ gate_m · (q_mᵀ S), split into systems that differ only in their readout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dsf.language.derived import derived, interned
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.language.frame import roots_of
from dsf.language.operator import factors_of, product_of, split_factors, summands, times

if TYPE_CHECKING:
    from dsf.language.spec import Spec


@derived
def apart(spec: Spec) -> tuple[Spec, ...]:
    """Systems whose outputs sum to y, each with C = gate (Value) · readout (Key); empty where C needs no split.

    Each can run by matrix products in chunks; a C that varies over keys and channels at once would need a scan.
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
    """The system with the readout c, only the inputs that it uses, and the skip D only if first."""
    system = replace(spec.system, C=c, D=spec.system.D if first else const(0))
    used = {n.attrs[0] for n in inputs_of(*roots_of(system))}
    return interned(replace(spec, inputs=tuple(i for i in spec.inputs if i.name in used), system=system))


def expanded(x: Expr) -> list[Expr]:
    """The products whose sum is x; sums over Key and Value inside products are multiplied out."""
    out: list[Expr] = []
    for sign, part in summands(x):
        factors = factors_of(part)
        wide = next((f for f, inverse in factors if not inverse and f.op in ("add", "sub") and len(f.axes) == 2), None)
        if wide is None:
            out.append(-part if sign < 0 else part)
            continue
        rest = product_of([factor for factor in factors if factor[0] is not wide], sign)
        out += [y for term in expanded(wide) for y in expanded(times(rest, term))]
    return out
