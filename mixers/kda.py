"""Kimi delta attention: the delta rule with a decay for each key dimension."""

import dsf
from dsf import I, Key, Scalar, System, Value, diag, exp, outer


@dsf.recurrence
def kda(q: Key, k: Key, v: Value, g: Key, beta: Scalar) -> System:
    """KDA: decay the rows first, then erase along k, then write v.

    Source: Kimi Linear (arXiv 2510.26692), equation 1. Symbols: g <= 0 is the log of the decay alpha, k has
    unit length, beta in (0, 1) is the writing strength. Decay and erasure do not commute here.
    Objective: one gradient step of 1/2 |S'k_t - v_t|^2 with rate beta_t, from S with its rows decayed.
    """
    return System(A=(I - beta * outer(k, k)) @ diag(exp(g)), B=k * (beta * v), C=q)
