"""RWKV-6's WKV: gated linear attention that reads before it writes."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsf
from dsf import Expr, Key, Param, System, Value, diag, dot, exp, silu
from dsf.mixers._module import Side, Span
from dsf.mixers._own import uniform
from dsf.mixers._rwkv import TimeMix, group_norm, group_norm_by_torch, ramp, zigzag

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def rwkv6(r: Key, k: Key, v: Value, w: Key, u: Param[Key]) -> System:
    """RWKV-6: a data-dependent decay for each key dimension; the newest token enters with a bonus u.

    Source: Peng et al. (arXiv 2404.05892), Section 4. Symbols: exp(-exp(w_t)) is the decay; r the receptance.
    Objective: one gradient step of -<S'k_t, v_t>, with a weight decay for each row of S.
    """
    return System(A=diag(exp(-exp(w))), B=k * v, C=r, D=dot(r, u * k) * v, read="before")


@dsf.recurrence
def rwkv6_rate(r: Key, k: Key, v: Value, w: Key, u: Param[Key], w0: Param[Key]) -> System:
    """RWKV-6 with the decay's constant part w0 apart: exp(-exp(w0 + w)), what the layer runs."""
    return System(A=diag(exp(-exp(w0 + w))), B=k * v, C=r, D=dot(r, u * k) * v, read="before")


def _gated_by_torch(y: Tensor, weight: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    return group_norm_by_torch(y, weight, bias) * F.silu(gate)


@dsf.tokenwise(by_torch=group_norm_by_torch)
def normed(y: Key, weight: Param[Key], bias: Param[Key]) -> Expr:
    """LayerNorm of each head of y, then weight and bias: what the layer computes from y without a gate."""
    return group_norm(y, weight, bias)


@dsf.tokenwise(by_torch=_gated_by_torch)
def gated_norm(y: Key, weight: Param[Key], bias: Param[Key], gate: Key) -> Expr:
    """The same, times silu(gate)."""
    return group_norm(y, weight, bias) * silu(gate)


class RWKV6(TimeMix):
    """The time-mixing block of RWKV-6 (Finch): data-dependent token shift and decay, norm a head, gate silu(g).

    Source: Peng et al. (arXiv 2404.05892), Section 4.2; names and start values as in the released training code. Heads
    of d_model / n_heads channels (64 in the released models). The maps to r, k, v, w and g get a token mixed with the
    one before; the coefficients are time_maa_* plus a map of both tokens through mix_rank numbers. The decay is a map
    through decay_rank numbers. n_layers: of the model; with layer_idx it sets initial values. Left out: the
    channel-mixing block. bare: no token shift, no gate.
    """

    recurrence = rwkv6_rate
    time_decay: Tensor
    time_faaaa: Tensor
    ln_weight: Tensor
    ln_bias: Tensor
    time_maa_w1: Tensor
    time_maa_w2: Tensor
    time_decay_w1: Tensor
    time_decay_w2: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_layers: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, n_layers, bare, layer_idx)
        n_heads, n = self.heads(d_model, n_heads, d_model=(d_model, None))
        self.dims = (n_heads, n, n)
        self.mixed = ("w", "k", "v", "r") if bare else ("w", "k", "v", "r", "g")
        if not bare:
            for name, power, more in (
                ("x", 1.0, 0.0), ("w", 1.0, 0.0), ("k", 1.0, 0.0), ("v", 1.0, 0.3), ("r", 0.5, 0.0), ("g", 0.5, 0.0),
            ):  # fmt: skip
                self.mix(f"time_maa_{name}", d_model, power * self.height, more * self.depth)
            self.own("time_maa_w1", torch.zeros, d_model, len(self.mixed) * mix_rank)
            self.own("time_maa_w2", partial(uniform, bound=0.01), len(self.mixed), mix_rank, d_model)
        decay = partial(ramp, low=-6.0, range_=5.0, power=0.7 + 1.3 * self.depth)
        self.own("time_decay", decay, n_heads, n, kind="rate")
        self.own("time_decay_w1", torch.zeros, d_model, decay_rank)
        self.own("time_decay_w2", partial(uniform, bound=0.01), decay_rank, d_model)
        self.own("time_faaaa", partial(_bonus, depth=self.depth), n_heads, n, kind="rate")
        self.receptance = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.gate = None if bare else nn.Linear(d_model, d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)
        self.own("ln_weight", torch.ones, d_model, kind="vector")
        self.own("ln_bias", torch.zeros, d_model, kind="vector")
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        to.over_heads()
        for linear in (self.receptance, self.key, self.value, self.gate):
            to.rows(linear)
        to.own(self, "time_decay_w2", axis=1)
        to.own(self, "time_decay", "time_faaaa", "ln_weight", "ln_bias")
        to.summed(self.output)

    def _seen(self, x: Tensor, last: Tensor) -> dict[str, Tensor]:
        """What each map sees of a token and the one before."""
        if self.conv1d is None:
            return dict.fromkeys(self.mixed, x)
        low = torch.tanh(self.mixtures(("time_maa_x",), x, last)[0] @ self.time_maa_w1)
        moved = torch.einsum("btir,irc->ibtc", low.unflatten(-1, (len(self.mixed), -1)), self.time_maa_w2)
        seen = self.mixtures([f"time_maa_{name}" for name in self.mixed], x, last, moved)
        return dict(zip(self.mixed, seen, strict=True))

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        seen = self._seen(side[0], u)
        w = torch.tanh(seen["w"] @ self.time_decay_w1) @ self.time_decay_w2
        maps = {"r": self.receptance(seen["r"]), "k": self.key(seen["k"]), "v": self.value(seen["v"]), "w": w}
        inputs = {name: x.unflatten(-1, (self.dims[0], -1)) for name, x in maps.items()}
        if self.gate is not None:
            inputs["gate"] = self.gate(seen["g"])
        return {**inputs, "u": self.time_faaaa, "w0": self.time_decay}

    def seen(self, u: Tensor, side: Side, inputs: dict[str, Tensor]) -> Side:
        return () if self.gate is None else (inputs.pop("gate"),)

    def readout(self, y: Tensor, side: Side) -> Tensor:
        known = y, *(w.view(y.shape[2:]) for w in (self.ln_weight, self.ln_bias))
        y = normed(*known) if self.gate is None else gated_norm(*known, *(gate.view_as(y) for gate in side))
        return self.output(y.flatten(2))


def _bonus(heads: int, n: int, depth: float) -> Tensor:
    size = heads * n
    return (depth * (1 - torch.arange(size) / max(size - 1, 1)) + 0.1 * zigzag(size)).reshape(heads, n)
