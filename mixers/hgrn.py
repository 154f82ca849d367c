"""HGRN and HGRN2: gated recurrences whose input gate is what the forget gate leaves."""

import dsf
from dsf import Key, System, Value, diag, sigmoid


@dsf.recurrence
def hgrn(f: Value, i: Value) -> System:
    """HGRN, its real form: one number a channel.

    Source: Qin et al. (arXiv 2311.04823), Section 3. Symbols: f is the pre-activation of the forget gate, i
    the input; the layer's lower bound on the gate and its output gate stay outside.
    """
    return System(A=sigmoid(f), B=sigmoid(-f) * i, C=1)


@dsf.recurrence
def hgrn2(q: Key, f: Key, i: Value) -> System:
    """HGRN2: HGRN with an outer-product state; the key is 1 - forget gate.

    Source: Qin et al. (arXiv 2404.07904), Section 3. Symbols: f is the pre-activation of the forget gate, q
    the output gate, i the input.
    """
    return System(A=diag(sigmoid(f)), B=sigmoid(-f) * i, C=q)
