"""Gated linear attention: a decay for every key dimension."""

import dsf
from dsf import Key, System, Value, diag, sigmoid


@dsf.recurrence
def gla(q: Key, k: Key, v: Value, g: Key) -> System:
    """GLA: each row of the state has a data-dependent decay.

    Source: Yang et al. (arXiv 2312.06635), Section 4. Symbols: alpha = sigmoid(g)^(1/16), g from a low-rank
    map.
    Objective: one gradient step of -<S'k_t, v_t>, with a weight decay for each row of S.
    """
    return System(A=diag(sigmoid(g) ** (1 / 16)), B=k * v, C=q)
