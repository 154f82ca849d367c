"""mLSTM, the matrix memory of xLSTM."""

import dsf
from dsf import Key, N, Scalar, System, Value, abs, exp, maximum, sigmoid


@dsf.recurrence
def mlstm(q: Key, k: Key, v: Value, i: Scalar, f: Scalar) -> System:
    """mLSTM: a scalar forget gate, an exponential input gate, and a quotient bounded from below.

    Source: Beck et al. (arXiv 2405.04517), equations 19-27; of its two forget gates, the sigmoid. The running
    maximum that keeps e^i finite is part of the computation, not of the system. Symbols: i, f are
    pre-activations.
    Objective: one gradient step of -<S'k_t, v_t> with rate e^i, with weight decay on S.
    """
    return System(
        A=sigmoid(f),
        B=exp(i) * k * v,
        C=q * N**-0.5,
        normalize=lambda num, den, one: num / maximum(abs(den), one),
    )
