"""DSS, the first diagonal state space model, with its exponential parametrisation."""

from functools import partial

from torch import Tensor

import dsf
from dsf import Key, Pair, Param, Scalar, System, Value, exp, zoh
from dsf.mixers._module import Side, Span
from dsf.mixers._own import normal
from dsf.mixers._state_space import StateSpace, paired


@dsf.recurrence
def dss(x: Value, dt: Param[Scalar], A_log: Param[Pair], A_imag: Param[Pair], W: Param[Key], D: Param[Value]) -> System:
    """DSS-EXP: a kernel of N / 2 complex exponentials a channel, of which the real part is taken.

    Source: Gupta et al. (arXiv 2203.14343), Proposition 1(a) and Section 3.2 (DSS-EXP). Symbols: Delta = exp(dt),
    Lambda = -exp(A_log) + i A_imag; W holds (Re w, -Im w) in pairs, w the product of the paper's B and C.
    """
    step = zoh((-exp(A_log), A_imag), 1, exp(dt))
    return System(A=step.A, B=step.B * x, C=W, D=D * x)


class DSS(StateSpace):
    """The DSS block (DSS-EXP): as S4D's. At start its rates are those of the normal part of HiPPO-LegS, W is normal.

    Source: Gupta et al. (arXiv 2203.14343), Section 3. DSS-SOFTMAX, whose kernel is divided by a sum over all T
    positions, is no recurrence: its first tokens depend on T. bare: one linear map in place of GELU and gated unit.
    """

    recurrence = dss
    W: Tensor

    def own_more(self, d_model: int, bare: bool) -> None:
        self.own_rates("legs")
        self.own("W", partial(normal, std=1.0), d_model, self.dims[1] // 2, 2)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        return {"x": u.unsqueeze(-1), "W": paired(self.W), **self.rate_inputs()}
