"""The range of an expression over all possible inputs."""

from __future__ import annotations

import math

from dsf.language.expr import Expr

INF = math.inf
RANGES = {
    "sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "complement": (0.0, 1.0), "tanh_slope": (0.0, 1.0),
    "logsigmoid": (-INF, 0.0), **dict.fromkeys(("exp", "softplus", "abs", "sqrt", "rsqrt"), (0.0, INF)),
}  # fmt: skip


def bounds(x: Expr) -> tuple[float, float]:
    """(low, high) with low ≤ x ≤ high, by interval arithmetic on its functions; infinite where unknown."""
    if x.is_constant:
        return x.value, x.value
    if x.op in RANGES:
        return RANGES[x.op]
    if x.op in ("add", "sub", "mul", "minimum", "maximum"):
        (a, b), (c, d) = map(bounds, x.args)
        if x.op == "add":
            return a + c, b + d
        if x.op == "sub":
            return a - d, b - c
        if x.op == "mul":
            corners = [0.0 if 0.0 in (s, t) else s * t for s in (a, b) for t in (c, d)]
            return min(corners), max(corners)
        chosen = min if x.op == "minimum" else max
        return chosen(a, c), chosen(b, d)
    return -INF, INF
