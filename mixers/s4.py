"""S4, the structured state space model: diagonal plus rank one, HiPPO's memory at start."""

from functools import partial

import torch
from torch import Tensor

import dsf
from dsf import Key, Pair, Param, Scalar, System, Value, bilinear, exp
from dsf.mixers._module import Side, Span
from dsf.mixers._own import normal
from dsf.mixers._state_space import StateSpace, legs_in_pairs, paired


@dsf.recurrence
def s4(
    x: Value, dt: Param[Scalar], A_log: Param[Pair], A_imag: Param[Pair], p: Param[Key], B: Param[Key], C: Param[Key],
    D: Param[Value],
) -> System:  # fmt: skip
    """S4: N / 2 complex rates a channel and a correction of rank one, by the bilinear transform, exactly.

    Source: Gu et al. (arXiv 2111.00396), equations 3 and 4 and Theorem 1, p tied as in SaShiMi (arXiv 2202.09729).
    Symbols: Delta = exp(dt), A = Lambda - p pᵀ with Lambda = -exp(A_log) + i A_imag; p and B hold complex numbers in
    pairs, C (2 Re c, -2 Im c).
    """
    step = bilinear((-exp(A_log), A_imag), B, exp(dt), minus=(p, p))
    return System(A=step.A, B=step.B * x, C=C, D=D * x)


def _legs(channels: int, n: int, part: int) -> Tensor:
    """p (part 1) or B (part 2) of HiPPO-LegS for every channel."""
    return legs_in_pairs(n)[part].to(torch.get_default_dtype()).repeat(channels, 1)


class S4(StateSpace):
    """The S4 block: as S4D's, with a rank-one correction. At start every channel is HiPPO-LegS.

    Source: Gu et al. (arXiv 2111.00396), Section 3 and Appendix D. A_log, A_imag and p are such that A is HiPPO-LegS in
    another basis; so is B. C is normal. bare: one linear map in place of GELU and gated linear unit.
    """

    recurrence = s4
    p: Tensor
    B: Tensor
    C: Tensor

    def own_more(self, d_model: int, bare: bool) -> None:
        n = self.dims[1]
        self.own_rates("legs")
        self.own("p", partial(_legs, part=1), d_model, n, kind="rate")
        self.own("B", partial(_legs, part=2), d_model, n, kind="rate")
        self.own("C", partial(normal, std=0.5**0.5), d_model, n // 2, 2)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        return {"x": u.unsqueeze(-1), "p": self.p, "B": self.B, "C": paired(self.C, 2.0), **self.rate_inputs()}
