"""RWKV-6's WKV: gated linear attention that reads before it writes."""

import dsf
from dsf import Key, Param, System, Value, diag, dot, exp


@dsf.recurrence
def rwkv6(r: Key, k: Key, v: Value, w: Key, u: Param[Key]) -> System:
    """RWKV-6: a data-dependent decay for each key dimension; the newest token enters with a bonus u.

    Source: Peng et al. (arXiv 2404.05892), Section 4. Symbols: exp(-exp(w_t)) is the decay; r the receptance.
    Objective: one gradient step of -<S'k_t, v_t>, with a weight decay for each row of S.
    """
    return System(A=diag(exp(-exp(w))), B=k * v, C=r, D=dot(r, u * k) * v, read="before")
