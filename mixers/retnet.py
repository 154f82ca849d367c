"""RetNet and Lightning attention: linear attention with a fixed decay a head."""

import dsf
from dsf import Key, Param, Scalar, System, Value, exp


@dsf.recurrence
def retnet(q: Key, k: Key, v: Value, slope: Param[Scalar]) -> System:
    """Retention: every head forgets at its own constant rate.

    Source: Sun et al. (arXiv 2307.08621), equation 6; Lightning attention (arXiv 2401.04658) is the same
    system.
    Symbols: gamma = exp(-slope); RetNet has gamma_h = 1 - 2^(-5-h) and rotates q and k before.
    Objective: one gradient step of -<S'k_t, v_t>, with weight decay on S.
    """
    return System(A=exp(-slope), B=k * v, C=q)
