"""H3, two state space models between gates: a shift of the keys, and a bank that remembers their products."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Key, Pair, Param, Scalar, System, Value, exp, zoh
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Side, Span
from dsf.mixers._own import normal
from dsf.mixers._state_space import StateSpace, paired

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def h3(
    q: Value, k: Value, v: Value, dt: Param[Scalar], A_log: Param[Pair], A_imag: Param[Pair], C: Param[Key],
    D: Param[Value],
) -> System:  # fmt: skip
    """H3: what keys and values make together is remembered by a diagonal system, and read where queries ask.

    Source: Fu et al. (arXiv 2212.14052), Section 3.1 and Algorithm 1, heads of one channel. Symbols: k has passed the
    shift system; the diagonal system is s4d's.
    """
    step = zoh((-exp(A_log), A_imag), 1, exp(dt))
    return System(A=step.A, B=step.B * (k * v), C=C * q, D=D * (q * k * v))


class H3(StateSpace):
    """The H3 layer: three projections, the shift system on keys, the diagonal one on k v, gate q, out_proj.

    Source: Fu et al. (arXiv 2212.14052), Section 3 and Algorithm 1. d_conv: states of the shift system, whose A moves
    every input on by one place and whose C is learnt: a convolution of as many taps. Rates as S4D-Lin's at start.
    bare: no shift system.
    """

    recurrence = h3
    beside = ("qkv_proj",)
    C: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 64,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, d_state, dt_min, dt_max, True, layer_idx)
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.conv1d = None if bare or not d_conv else ShortConv(d_model, d_conv, bias=False, activation=None)
        self.own_rates("lin")
        self.own("C", partial(normal, std=0.5**0.5), d_model, d_state // 2, 2)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.qkv_proj, *[self.dims[0]] * 3)
        to.conv(self.conv1d)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        q, k, v = self.first_map(x, self.qkv_proj).chunk(3, dim=-1)
        return k, (q, v)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        q, k, v = (x.unsqueeze(-1) for x in (side[0], u, side[1]))
        return {"q": q, "k": k, "v": v, "C": paired(self.C, 2.0), **self.rate_inputs()}
