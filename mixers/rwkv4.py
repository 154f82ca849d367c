"""RWKV-4's WKV: an exponentially weighted mean with a bonus for the newest token."""

import dsf
from dsf import Param, System, Value, exp


@dsf.recurrence
def rwkv4(k: Value, v: Value, w: Param[Value], u: Param[Value]) -> System:
    """RWKV-4: the mean of past values weighted by e^k and age, and of the present one by e^(u+k).

    Source: Peng et al. (arXiv 2305.13048), the WKV operator of Section 3. Symbols: exp(-exp(w)) is the decay
    of a channel (w is the released `time_decay`), u the released `time_first`; the state before the token is
    read.
    """
    return System(A=exp(-exp(w)), B=exp(k) * v, C=1, D=exp(u + k) * v, read="before", normalize=dsf.ratio, drive=v)
