"""RWKV-7's WKV: a generalised delta rule."""

import math

import dsf
from dsf import Key, Param, System, Value, diag, dot, exp, outer, sigmoid


@dsf.recurrence
def rwkv7(r: Key, w: Key, k: Key, v: Value, kappa: Key, a: Key, u: Param[Key]) -> System:
    """RWKV-7: decay each row, erase along kappa at a rate for each row, write v at k.

    Source: Peng et al. (arXiv 2503.14456). Symbols: the decay is exp(-e^(-1/2) sigmoid(w)); kappa, of unit
    length, is the removal key; sigmoid(a) the in-context learning rate; u the bonus, which the released layer
    adds after its group norm (pass zeros there).
    Objective: one gradient step of 1/2 |S'kappa_t|^2 - <S'k_t, v_t>, the first term with a rate and S with a
    weight decay for each row.
    """
    decay = exp(-math.exp(-0.5) * sigmoid(w))
    return System(A=diag(decay) - outer(sigmoid(a) * kappa, kappa), B=k * v, C=r, D=dot(r, u * k) * v)
