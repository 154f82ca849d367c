"""Special cases in the zoo: the inputs for which a general mixer computes the same as another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dsf.analysis.measures.kernel import special_case
from dsf.mixers import get
from dsf.mixers.layer import random_inputs

Inputs = Mapping[str, Tensor]

OPEN = torch.inf  # sigmoid(OPEN) = 1
UNIT_STEP = math.log(math.e - 1)  # softplus(UNIT_STEP) = 1


@dataclass(frozen=True)
class Case:
    """The claim that `general` with translated inputs is `special`. where: the values to set, in the letters of
    general.
    """

    general: str
    special: str
    where: str
    translate: Callable[[Inputs], Inputs]

    def error(self, tokens: int = 32) -> float:
        """`special_case` on random inputs within their ranges, in float64: about 1e-15 where the claim holds."""
        general, special = (get(name).recurrence for name in (self.general, self.special))
        inputs = random_inputs(special, tokens=tokens, heads=2, N=4, P=4)
        return special_case(general, special, inputs, self.translate)


def _all_ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def _ssd(x: Inputs, slope: Tensor) -> Inputs:
    """The inputs of SSD from q, k, v: time steps of 1, which makes the decay exp(-slope)."""
    step = torch.full_like(x["v"][..., 0], UNIT_STEP)
    none = torch.zeros_like(slope)
    names = {"x": x["v"], "b": x["k"], "c": x["q"], "dt": step}
    return {**names, "A_log": slope.log(), "D": none, "dt_bias": none}


def _s6(x: Inputs) -> Inputs:
    """The inputs of S6 from SSD's: a single time step and decay for all channels of a head."""
    channels = x["x"].shape[-1]
    n = x["b"].shape[-1]
    dt = (x["dt"] + x["dt_bias"]).unsqueeze(-1).expand_as(x["x"])
    rates = x["A_log"][:, None, None].expand(-1, n, channels)
    return {"x": x["x"], "dt": dt, "b": x["b"], "c": x["c"], "A_log": rates, "D": x["D"][:, None].expand(-1, channels)}


def _two_steps(x: Inputs) -> Inputs:
    """The inputs of DeltaProduct from DeltaNet's: the second micro-step has β = 0."""
    steps = {name: torch.stack([x[name], x[name]], dim=2) for name in ("k", "v")}
    return {**x, **steps, "beta": torch.stack([x["beta"], torch.zeros_like(x["beta"])], dim=2)}


def _rwkv7(x: Inputs) -> Inputs:
    """The inputs of RWKV-7 from DeltaNet's: no decay, no bonus, erasure in the direction written, β up to 2."""
    beta = x["beta"].unsqueeze(-1)
    keep, rate = torch.full_like(x["k"], -OPEN), (beta / 2).logit().expand_as(x["k"])
    heads, n = x["k"].shape[-2:]
    u = x["k"].new_zeros(heads, n)
    return {"r": x["q"], "k": beta * x["k"], "v": x["v"], "w": keep, "kappa": 2**0.5 * x["k"], "a": rate, "u": u}


CASES: tuple[Case, ...] = (
    Case("gated_deltanet", "deltanet", "alpha = 1", lambda x: {**x, "alpha": _all_ones(x["beta"])}),
    Case(
        "kda", "gated_deltanet", "g = log alpha in every row",
        lambda x: {
            "q": x["q"], "k": x["k"], "v": x["v"], "beta": x["beta"],
            "g": x["alpha"].log().unsqueeze(-1).expand_as(x["k"]),
        },
    ),
    Case("delta_product", "deltanet", "beta = 0 in the second step", _two_steps),
    Case(
        "gated_delta_product", "delta_product", "alpha = 1", lambda x: {**x, "alpha": _all_ones(x["beta"][:, :, 0])}
    ),
    Case("rwkv7", "deltanet", "w = -inf, kappa = √2 k, sigmoid(a) = beta / 2, beta k for k, u = 0", _rwkv7),
    Case(
        "longhorn_exact", "deltanet", "keys of length 1, beta / (1 - beta) for beta, D = 0",
        lambda x: {
            "q": x["q"], "k": x["k"], "x": x["v"],
            "beta": (x["beta"] / (1 - x["beta"])).unsqueeze(-1).expand_as(x["v"]),
            "D": x["v"].new_zeros(x["v"].shape[-2:]),
        },
    ),
    Case("s6", "ssd", "one dt and one A_log for all channels and rows", _s6),
    Case("ssd", "retnet", "softplus(dt) = 1, A_log = log slope, D = 0", lambda x: _ssd(x, x["slope"])),
    Case(
        "ssd", "unnormalized_linear_attention", "softplus(dt) = 1, A_log = -inf, D = 0",
        lambda x: _ssd(x, x["v"].new_zeros(x["v"].shape[2])),
    ),
    Case(
        "gla", "retnet", "sigmoid(g) = exp(-16 slope)",
        lambda x: {
            "q": x["q"], "k": x["k"], "v": x["v"],
            "g": (-16 * x["slope"]).exp().logit()[:, None].expand_as(x["k"]),
        },
    ),
    Case(
        "gla", "hgrn2", "sigmoid(g) = f^16, k = 1 - f",
        lambda x: {
            "q": x["q"], "k": (-x["f"]).sigmoid(), "v": x["i"],
            "g": -((16 * softplus(-x["f"])).expm1()).log(),
        },
    ),
    Case(
        "generalized_linear_attention", "normalized_attention_exp", "eta = exp(eta)",
        lambda x: {**x, "eta": x["eta"].exp()},
    ),
    Case(
        "generalized_linear_attention", "normalized_attention_softplus", "eta = softplus(eta)",
        lambda x: {**x, "eta": softplus(x["eta"])},
    ),
    Case(
        "generalized_linear_attention", "unnormalized_linear_attention", "eta = 1",
        lambda x: {**x, "eta": _all_ones(x["v"][..., 0])},
    ),
    Case(
        "modified_qlstm", "qlstm", "-f for f, a = 1",
        lambda x: {**x, "f": -x["f"], "a": x["f"].new_ones(x["f"].shape[2])},
    ),
    Case(
        "qlstm", "hgrn", "i = -f, x = i, o = inf",
        lambda x: {"x": x["i"], "f": x["f"], "i": -x["f"], "o": torch.full_like(x["f"], OPEN)},
    ),
    Case(
        "qlstm", "mingru", "f = -z, i = z, x = h, o = inf",
        lambda x: {"x": x["h"], "f": -x["z"], "i": x["z"], "o": torch.full_like(x["z"], OPEN)},
    ),
)  # fmt: skip
