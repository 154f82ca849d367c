"""RG-LRU, the real-gated linear recurrent unit of Griffin."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Expr, Param, Scalar, System, Value, exp, expm1, maximum, sigmoid, softplus, sqrt, where
from dsf.kernels.norm import gated
from dsf.mixers._beside import loaded, product_of
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._own import Owner, inverse_softplus, normal

if TYPE_CHECKING:
    from dsf.parallel import Cuts

POWER = 8.0  # the paper's c
KNEE = 2.5e-7  # below it the slope of sqrt would pass 1000


def bounded_sqrt(x: Expr) -> Expr:
    """sqrt(x) with slope at most 1000: below KNEE its tangent there (off by 2.5e-4 at most, at x = 0)."""
    return where(x < KNEE, 1000 * x + 1000 * KNEE, sqrt(maximum(x, KNEE)))


def _system(x: Expr, r: Expr, i: Expr, reset: Expr, Lambda: Expr) -> System:
    log_a = -POWER * softplus(Lambda) * sigmoid(r)
    decay = where(reset > 0.5, 0, exp(log_a))
    scale = where(reset > 0.5, 1, bounded_sqrt(-expm1(2 * log_a)))
    return System(A=decay, B=scale * (sigmoid(i) * x), C=1)


@dsf.recurrence
def rg_lru(x: Value, r: Value, i: Value, reset: Scalar, Lambda: Param[Value]) -> System:
    """RG-LRU (Griffin): one number a channel, decayed by a gated power, at constant variance.

    Source: De et al. (arXiv 2402.19427), equations 1-4; the slope bound of the square root and the reset as
    in the authors' code.
    Symbols: r, i are gate pre-activations; log a = -softplus(Lambda) and a_t = a^(8 sigmoid(r)). reset is 1
    where a sequence begins (there A = 0 and the input enters with factor 1), else 0.
    """
    return _system(x, r, i, reset, Lambda)


@dsf.recurrence
def rg_lru_biased(
    x: Value, r: Value, i: Value, reset: Scalar, Lambda: Param[Value], r0: Param[Value], i0: Param[Value]
) -> System:
    """RG-LRU with the constant parts of its gates apart: what the layer runs."""
    return _system(x, r + r0, i + i0, reset, Lambda)


class BlockLinear(Owner):
    """A linear map, block-diagonal over heads. weight: [H, P, P], variance 1/P; bias: [H, P], zeros, which the layer's
    recurrence adds."""

    weight: Tensor
    bias: Tensor

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.own("weight", partial(normal, std=width**-0.5), heads, width, width)
        self.own("bias", torch.zeros, heads, width, kind="vector")

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, H, P] -> [B, T, H, P], without the bias."""
        rows = x.flatten(0, 1).transpose(0, 1)  # [H, B T, P]
        return torch.bmm(rows, self.weight).transpose(0, 1).unflatten(0, x.shape[:2])


def _slow_decays(*shape: int) -> Tensor:
    """Lambda with a^8 uniform in [0.9, 0.999]."""
    return inverse_softplus(-torch.empty(shape).uniform_(0.9, 0.999).log() / POWER)


class RGLRU(Mixer):
    """Griffin's recurrent block: a branch with convolution and RG-LRU, times a branch with GELU.

    n_heads: blocks in the gates' block-diagonal matrices, of expand · d_model channels. The convolution has no
    activation. Lambda begins as in the paper, with a^8 uniform in [0.9, 0.999] (recurrentgemma draws a itself there,
    then raises it to the power 8). bare: neither convolution nor GELU branch.

    reset, of `forward` [B, T] and `step` [B]: nonzero where a sequence begins. The first token of a sequence in a call
    without a state begins one anyway.
    """

    recurrence = rg_lru_biased
    resets = True
    Lambda: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_conv: int = 4,
        expand: float = 1,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        n_heads, width = self.heads(d_model, n_heads, expand=(d_inner, None))
        self.dims = (n_heads, 1, width)
        self.linear_x = nn.Linear(d_model, d_inner)
        self.linear_y = None if bare else nn.Linear(d_model, d_inner)
        self.conv1d = None if bare or not d_conv else ShortConv(d_inner, d_conv, activation=None)
        self.input_gate = BlockLinear(n_heads, width)
        self.recurrence_gate = BlockLinear(n_heads, width)
        self.own("Lambda", _slow_decays, n_heads, width, kind="rate")
        self.out_proj = nn.Linear(d_inner, d_model)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        to.over_heads()
        to.rows(self.linear_x)
        to.rows(self.linear_y)
        to.conv(self.conv1d)
        for gate in (self.input_gate, self.recurrence_gate):
            to.own(gate, "weight", "bias")
        to.own(self, "Lambda")
        to.summed(self.out_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return self.linear_x(x), () if self.linear_y is None else (self.linear_y(x),)

    def arguments(self, u: Tensor, side: Side, span: Span, reset: Tensor | None = None) -> dict[str, Tensor]:
        x = u.unflatten(-1, (self.dims[0], -1))
        starts = span.starts(u)
        if reset is not None:
            starts = torch.maximum(starts, (reset != 0).to(u.dtype))
        gates = {"r": self.recurrence_gate(x), "i": self.input_gate(x)}
        with loaded(self.recurrence_gate, self.input_gate):
            biases = {"r0": self.recurrence_gate.bias, "i0": self.input_gate.bias}
        return {"x": x, **gates, "reset": starts.unsqueeze(2), "Lambda": self.Lambda, **biases}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        for branch in side:
            y = gated(y, branch, "gelu")
        return product_of(y, self.out_proj)
