"""S5, one state space model for all channels: dense maps into and out of a diagonal complex state."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dsf
from dsf import Key, Param, Scalar, System, Value, exp, zoh
from dsf.language.errors import InputError
from dsf.mixers._module import Side, Span
from dsf.mixers._own import full, normal
from dsf.mixers._state_space import legs_in_pairs, log_steps
from dsf.mixers.lru import ComplexUnits

SLOWEST = -1e-4  # no rate is above it


@dsf.recurrence
def s5(
    u: Key, log_step: Param[Scalar], Lambda_re: Param[Scalar], Lambda_im: Param[Scalar], C: Param[Key, Value]
) -> System:
    """S5: a complex number a head with a rate and a step of its own, held at zero order.

    Source: Smith et al. (arXiv 2208.04933), equation 6 and Section 3.2. Symbols: Delta = exp(log_step),
    Lambda = Lambda_re + i Lambda_im, Lambda_re < 0; u is the real and the imaginary part of the paper's B u, N = 2; C
    reads both, P = 2.
    """
    step = zoh((Lambda_re, Lambda_im), u, exp(log_step))
    return System(A=step.A, B=step.B, C=C)


class S5(ComplexUnits):
    """The S5 block: y = 2 Re(C x) + D u of a diagonal complex system x with the input B u, GELU, a gated linear unit.

    Source: Smith et al. (arXiv 2208.04933), Section 3 and Appendix B. The state has d_state / 2 complex numbers; the
    paper's others are their conjugates, which the factor 2 stands for. The rates begin as the normal part of
    HiPPO-LegS, in `blocks` equal blocks. Lambda_re is held below -1e-4 (the released code's clip_eigs). exp(log_step)
    is log-uniform in [dt_min, dt_max] at start; B and C are normal, of variance 1/d_model and 1/d_state. bare: no GELU
    and no gated linear unit. Raises InputError for a d_state that is no multiple of 2 · blocks.
    """

    recurrence = s5
    log_step: Tensor
    Lambda_re: Tensor
    Lambda_im: Tensor
    B: Tensor
    C: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        blocks: int = 1,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        if blocks < 1 or d_state % (2 * blocks):
            raise InputError(f"S5: d_state {d_state} must be even in each of {blocks} blocks")
        half = d_state // 2
        super().__init__(d_model, half, bare, layer_idx)
        self.own("log_step", partial(log_steps, low=dt_min, high=dt_max), half, kind="rate")
        self.own("Lambda_re", partial(full, value=-0.5), half, kind="rate")
        self.own("Lambda_im", partial(_legs, blocks=blocks), half, kind="rate")
        self.own("B", partial(normal, std=d_model**-0.5), half, 2, d_model)
        self.own("C", partial(normal, std=d_state**-0.5), d_model, half, 2)
        self.place(device, dtype)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        driven = F.linear(u, self.B.flatten(0, 1)).unflatten(-1, (-1, 2))
        rates = {"log_step": self.log_step, "Lambda_re": self.Lambda_re.clamp(max=SLOWEST), "Lambda_im": self.Lambda_im}
        return {"u": driven, "C": self.parts, **rates}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return self.mix(y, side, self.C, 2.0)


def _legs(half: int, blocks: int) -> Tensor:
    """Frequencies of HiPPO-LegS's normal part, block after block."""
    return legs_in_pairs(2 * half // blocks)[0].to(torch.get_default_dtype()).repeat(blocks)
