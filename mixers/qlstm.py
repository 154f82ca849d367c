"""qLSTM: the LSTM without its tanh's, whose gates depend on the input alone."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dsf
from dsf import Param, Scalar, System, Value, relu, sigmoid
from dsf.mixers._beside import product_of
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._own import StartLinear, normal

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def qlstm(x: Value, f: Value, i: Value, o: Value) -> System:
    """Quasi-LSTM: one number a channel, with forget, input and output gates.

    Source: DSF (arXiv 2405.15731), equation 20; both tanh of the LSTM are dropped so that it is linear in its
    state.
    Symbols: f, i, o are gate pre-activations, x is u_t.
    """
    return System(A=sigmoid(f), B=sigmoid(i) * x, C=sigmoid(o))


@dsf.recurrence
def modified_qlstm(x: Value, f: Value, i: Value, o: Value, a: Param[Scalar]) -> System:
    """qLSTM with the reversed sigmoid to a learnt power as forget gate, the form of an SSM's decay.

    Source: DSF (arXiv 2405.15731), equations 23 and 33. The power is relu(a), as in the authors' code.
    """
    return System(A=sigmoid(-f) ** relu(a), B=sigmoid(i) * x, C=sigmoid(o))


class QLSTM(Mixer):
    """The qLSTM block: in_proj to (z, x), plain convolution, gates, recurrence, gate gelu(z), out_proj.

    One head of expand · d_model channels. modified: take `modified_qlstm`, with one power a for the layer, which begins
    at 1. The convolution has no activation. Weights are normal with standard deviation fan_in^-0.5, as in the DSF
    authors' code. bare: neither convolution nor z.
    """

    recurrence = qlstm
    beside = ("in_proj",)
    a: Tensor | None

    def __init__(
        self,
        d_model: int,
        d_conv: int = 4,
        expand: int = 2,
        modified: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        self.recurrence = modified_qlstm if modified else qlstm
        self.dims = (1, 1, d_inner)
        start = partial(normal, std=d_model**-0.5), partial(normal, std=d_inner**-0.5)
        self.in_proj = StartLinear(d_model, d_inner if bare else 2 * d_inner, start[0])
        self.conv1d = None if bare or not d_conv else ShortConv(d_inner, d_conv, activation=None)
        self.gates = StartLinear(d_inner, 3 * d_inner, start[1], bias=True)
        self.out_proj = StartLinear(d_inner, d_model, start[1])
        if modified:
            self.own("a", torch.ones, 1, kind="rate")
        else:
            self.a = None
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its channels (`dsf.parallel.HeadShard`)."""
        channels = to.over_channels()
        to.rows(self.in_proj, *[channels] * (self.in_proj.out_features // channels))
        to.conv(self.conv1d)
        to.rows(self.gates, channels, channels, channels, gathered=True)  # every gate sees every channel
        to.summed(self.out_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        *side, u = self.first_map(x, self.in_proj).split(self.dims[2], dim=-1)
        return u, tuple(side)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        f, i, o = self.gates(u).unsqueeze(2).chunk(3, dim=-1)
        inputs = {"x": u.unsqueeze(2), "f": f, "i": i, "o": o}
        return inputs if self.a is None else {**inputs, "a": self.a}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        for z in side:
            y = y * F.gelu(z)
        return product_of(y, self.out_proj)
