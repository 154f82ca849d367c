"""RWKV-4's WKV: an exponentially weighted mean with a bonus for the newest token."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import dsf
from dsf import Param, System, Value, exp
from dsf.kernels.norm import gated
from dsf.mixers._module import Side, Span
from dsf.mixers._own import Start, StartLinear, orthogonal
from dsf.mixers._rwkv import TimeMix, ramp, zigzag

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def rwkv4(k: Value, v: Value, w: Param[Value], u: Param[Value]) -> System:
    """RWKV-4: the mean of past values weighted by e^k and age, and of the present one by e^(u+k).

    Source: Peng et al. (arXiv 2305.13048), the WKV operator of Section 3. Symbols: exp(-exp(w)) is the decay
    of a channel (w is the released `time_decay`), u the released `time_first`; the state before the token is
    read.
    """
    return System(A=exp(-exp(w)), B=exp(k) * v, C=1, D=exp(u + k) * v, read="before", normalize=dsf.ratio, drive=v)


class RWKV4(TimeMix):
    """The time-mixing block of RWKV-4: token shift, WKV, gate sigmoid(r), output.

    Source: Peng et al. (arXiv 2305.13048), Section 3.1 and Appendix E; names and start values as in the released
    training code (keys, receptance and output begin at zero, values orthogonal). One head of d_model channels. The maps
    to r, k and v get a token mixed with the one before, by the coefficients time_mix_r, time_mix_k and time_mix_v.
    n_layers: of the model; with layer_idx it sets where time_decay, time_first and the coefficients begin. Left out:
    the channel-mixing block. bare: no token shift, no gate.
    """

    recurrence = rwkv4
    time_decay: Tensor
    time_first: Tensor

    def __init__(
        self,
        d_model: int,
        n_layers: int | None = None,
        bias: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, n_layers, bare, layer_idx)
        self.dims = (1, 1, d_model)
        decay = partial(ramp, low=-5.0, range_=8.0, power=0.7 + 1.3 * self.depth)
        self.own("time_decay", decay, d_model, kind="rate")
        self.own("time_first", _bonus, d_model, kind="rate")
        self.mix("time_mix_k", d_model, self.height, rest=False)
        self.mix("time_mix_v", d_model, self.height, 0.3 * self.depth, rest=False)
        if not bare:
            self.mix("time_mix_r", d_model, 0.5 * self.height, rest=False)
        zeros: Start = torch.zeros
        self.key = StartLinear(d_model, d_model, zeros, bias=bias)
        self.value = StartLinear(d_model, d_model, orthogonal, bias=bias)
        self.receptance = None if bare else StartLinear(d_model, d_model, zeros, bias=bias)
        self.output = StartLinear(d_model, d_model, zeros, bias=bias)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its channels (`dsf.parallel.HeadShard`)."""
        to.over_channels()
        for linear in (self.key, self.value, self.receptance):
            to.rows(linear)
        to.own(self, "time_decay", "time_first")
        to.summed(self.output)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        # Released coefficients weigh the token itself: mix · x + (1 - mix) · last = last + mix · (x - last).
        names = ("time_mix_k", "time_mix_v", *(() if self.receptance is None else ("time_mix_r",)))
        x_k, x_v, *x_r = self.mixtures(names, u, side[0])
        k, v = self.key(x_k).unsqueeze(2), self.value(x_v).unsqueeze(2)
        inputs = {"k": k, "v": v, "w": self.time_decay[None], "u": self.time_first[None]}
        if self.receptance is not None:
            inputs["gate"] = self.receptance(*x_r)
        return inputs

    def seen(self, u: Tensor, side: Side, inputs: dict[str, Tensor]) -> Side:
        return () if self.receptance is None else (inputs.pop("gate"),)

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        for gate in side:
            y = gated(y, gate, "sigmoid")
        return self.output(y)


def _bonus(size: int) -> Tensor:
    return torch.full((size,), 0.3).log() + 0.5 * zigzag(size)
