"""RWKV-7's WKV: a generalised delta rule."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import dsf
from dsf import Expr, Key, Param, System, Value, diag, dot, exp, maximum, outer, rsqrt, sigmoid
from dsf.language.errors import InputError
from dsf.mixers._module import Side, Span
from dsf.mixers._own import StartLinear, full, orthogonal, uniform
from dsf.mixers._rwkv import TimeMix, group_norm, group_norm_by_torch, ramp

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def rwkv7(r: Key, w: Key, k: Key, v: Value, kappa: Key, a: Key, u: Param[Key]) -> System:
    """RWKV-7: decay each row, erase along kappa at a rate for each row, write v at k.

    Source: Peng et al. (arXiv 2503.14456). Symbols: the decay is exp(-e^(-1/2) sigmoid(w)); kappa, of unit
    length, is the removal key; sigmoid(a) the in-context learning rate; u the bonus, which the released layer
    adds after its group norm (pass zeros there).
    Objective: one gradient step of 1/2 |S'kappa_t|^2 - <S'k_t, v_t>, the first term with a rate and S with a
    weight decay for each row.
    """
    decay = exp(-math.exp(-0.5) * sigmoid(w))
    return System(A=diag(decay) - outer(sigmoid(a) * kappa, kappa), B=k * v, C=r, D=dot(r, u * k) * v)


def _replaced(k: Expr, a: Expr, a0: Expr, k_a: Expr) -> tuple[Expr, Expr]:
    """(the learning rate, the key that is written: k moved towards rate · k by k_a)."""
    rate = sigmoid(a0 + a)
    return rate, k * (1 + (rate - 1) * k_a)


@dsf.recurrence
def rwkv7_layer(
    r: Key, w: Key, k: Key, v: Value, a: Key, w0: Param[Key], a0: Param[Key], k_k: Param[Key], k_a: Param[Key]
) -> System:
    """RWKV-7 without the bonus, with what its layer makes of k: what runs there.

    The removal key kappa is k · k_k at unit length; v is written at k (1 + (rate - 1) k_a), where rate is the learning
    rate. w0, a0: the constant parts of decay and learning rate.
    """
    rate, key = _replaced(k, a, a0, k_a)
    along = k * k_k
    kappa = along * rsqrt(maximum(dot(along, along), 1e-24))
    decay = exp(-math.exp(-0.5) * sigmoid(w0 + w))
    return System(A=diag(decay) - outer(rate * kappa, kappa), B=key * v, C=r)


def _read(
    y: Expr, r: Expr, k: Expr, v: Expr, a: Expr, a0: Expr, k_a: Expr, r_k: Expr, weight: Expr, bias: Expr
) -> Expr:
    key = _replaced(k, a, a0, k_a)[1]
    return group_norm(y, weight, bias) + dot(r, r_k * key) * v


def _read_by_torch(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, a: Tensor, a0: Tensor, k_a: Tensor, r_k: Tensor, weight: Tensor,
    bias: Tensor,
) -> Tensor:  # fmt: skip
    rate = (a0.to(a.dtype) + a).sigmoid()
    key = k * (1 + (rate - 1) * k_a)
    return group_norm_by_torch(y, weight, bias) + (r * key * r_k).sum(-1, keepdim=True) * v


@dsf.tokenwise(by_torch=_read_by_torch)
def read(
    y: Key, r: Key, k: Key, v: Key, a: Key, a0: Param[Key], k_a: Param[Key], r_k: Param[Key], weight: Param[Key],
    bias: Param[Key],
) -> Expr:  # fmt: skip
    """What the layer makes of y without a gate: its norm and the bonus."""
    return _read(y, r, k, v, a, a0, k_a, r_k, weight, bias)


@dsf.tokenwise(by_torch=lambda *given: _read_by_torch(*given[:-1]) * given[-1])
def gated_read(
    y: Key, r: Key, k: Key, v: Key, a: Key, a0: Param[Key], k_a: Param[Key], r_k: Param[Key], weight: Param[Key],
    bias: Param[Key], gate: Key,
) -> Expr:  # fmt: skip
    """The same, times the gate."""
    return _read(y, r, k, v, a, a0, k_a, r_k, weight, bias) * gate


class RWKV7(TimeMix):
    """The time-mixing block of RWKV-7 (Goose): token shift, low-rank decay, learning rate and gate, bonus, output.

    Source: Peng et al. (arXiv 2503.14456), Section 4; names and start values as in the released training code. Heads of
    d_model / n_heads channels (64 in the released models). Mixtures with the token before are constants, as there.
    ranks: of the maps to decay, learning rate, value residual and gate; None: the released code's formula of d_model.
    value_residual: v is moved towards v_first, which `forward` takes as [B, T, d_model] and `step` as [B, d_model]: the
      values of the model's first layer, its `inputs(x)["v"].flatten(2)`. Raises InputError without it.
    n_layers: of the model; with layer_idx it sets initial values.
    Left out: the channel-mixing block. bare: no token shift, no gate.
    """

    recurrence = rwkv7_layer
    x_r: Tensor
    w0: Tensor
    w1: Tensor
    w2: Tensor
    a0: Tensor
    a1: Tensor
    a2: Tensor
    v0: Tensor
    v1: Tensor
    v2: Tensor
    g1: Tensor
    g2: Tensor
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    ln_weight: Tensor
    ln_bias: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_layers: int | None = None,
        ranks: tuple[int, int, int, int] | None = None,
        value_residual: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, n_layers, bare, layer_idx)
        n_heads, n = self.heads(d_model, n_heads, d_model=(d_model, None))
        self.dims = (n_heads, n, n)
        self.value_residual, self.gated = value_residual, not bare
        self.needs = "v_first" * value_residual
        self.mixed = ("x_r", "x_w", "x_k", "x_v", "x_a", *(() if bare else ("x_g",)))
        for name, power, more in (
            ("r", 0.2, 0.0), ("w", 0.9, 0.0), ("k", 0.9, 0.4), ("v", 0.4, 0.6), ("a", 0.9, 0.0),
            *([] if bare else [("g", 0.2, 0.0)]),
        ):  # fmt: skip
            self.mix(f"x_{name}", d_model, power * self.height, more * self.depth)
        w_rank, a_rank, v_rank, g_rank = default_ranks(d_model) if ranks is None else _four(ranks)
        decay = partial(ramp, low=-6.5, range_=5.0, power=0.85 + self.depth**0.5)
        self.own("w0", decay, n_heads, n, kind="rate")
        self._low_rank("w", d_model, w_rank)
        self.own("a0", torch.zeros, n_heads, n, kind="rate")
        self._low_rank("a", d_model, a_rank)
        if value_residual:
            self.own("v0", torch.ones, d_model, kind="vector")
            self._low_rank("v", d_model, v_rank)
        if not bare:
            self._low_rank("g", d_model, g_rank)
        self.own("k_k", partial(full, value=0.85), d_model, kind="vector")
        self.own("k_a", torch.ones, d_model, kind="vector")
        self.own("r_k", torch.zeros, n_heads, n, kind="vector")
        self.own("ln_weight", torch.ones, d_model, kind="vector")
        self.own("ln_bias", torch.zeros, d_model, kind="vector")
        bound = 0.5 * d_model**-0.5
        self.receptance = StartLinear(d_model, d_model, partial(uniform, bound=bound))
        self.key = StartLinear(d_model, d_model, partial(uniform, bound=0.1 * bound))
        self.value = StartLinear(d_model, d_model, partial(uniform, bound=bound))
        self.output = StartLinear(d_model, d_model, torch.zeros)
        self.place(device, dtype)

    def _low_rank(self, name: str, d_model: int, rank: int) -> None:
        self.own(f"{name}1", torch.zeros, d_model, rank)
        self.own(f"{name}2", partial(orthogonal, gain=0.1), rank, d_model)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`).

        v_first is then that of the same heads: [B, T, d_model / ranks].
        """
        to.over_heads()
        for linear in (self.receptance, self.key, self.value):
            to.rows(linear)
        to.own(self, "w2", "a2", "v2", "g2", axis=1)
        to.own(self, "w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_weight", "ln_bias")
        to.summed(self.output)

    def arguments(self, u: Tensor, side: Side, span: Span, v_first: Tensor | None = None) -> dict[str, Tensor]:
        x_r, x_w, x_k, x_v, x_a, *x_g = self.mixtures(self.mixed, side[0], u)
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        w = torch.tanh(x_w @ self.w1) @ self.w2
        a = self._heads(x_a @ self.a1 @ self.a2)
        if self.value_residual:
            if v_first is None:
                raise InputError("RWKV7: value_residual needs v_first= [B, T, d_model], the first layer's values")
            v = v + (v_first - v) * (self.v0 + x_v @ self.v1 @ self.v2).sigmoid()
        # under autocast the maps gave a shorter type, and what was multiplied by parameters since is float32
        inputs = {
            "r": self._heads(r),
            "w": self._heads(w),
            "k": self._heads(k),
            "v": self._heads(v.to(r.dtype)),
            "a": a,
        }
        for x in x_g:
            inputs["gate"] = (x @ self.g1).sigmoid() @ self.g2
        return {**inputs, "w0": self.w0, "a0": self.a0, "k_k": self._heads(self.k_k), "k_a": self._heads(self.k_a)}

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.dims[0], -1))

    def seen(self, u: Tensor, side: Side, inputs: dict[str, Tensor]) -> Side:
        gate = (inputs.pop("gate"),) if self.gated else ()
        return (*(inputs[name] for name in ("r", "k", "v", "a", "a0")), *gate)  # FSDP frees rates before `readout`

    def readout(self, y: Tensor, side: Side) -> Tensor:
        fixed = self._heads(self.k_a), self.r_k, self._heads(self.ln_weight), self._heads(self.ln_bias)
        known = y, *side[:5], *fixed
        y = gated_read(*known, self._heads(side[5])) if self.gated else read(*known)
        return self.output(y.flatten(2))


def default_ranks(d_model: int) -> tuple[int, int, int, int]:
    """Ranks of decay, learning rate, value residual and gate in the released code, multiples of 32."""

    def near(size: float) -> int:
        return max(32, round(size / 32) * 32)

    root = d_model**0.5
    return near(1.8 * root), near(1.8 * root), near(1.3 * root), near(0.6 * d_model**0.8)


def _four(ranks: Any) -> tuple[int, ...]:
    """Those of decay, a, v and gate. Raises InputError."""
    known = isinstance(ranks, tuple | list) and len(ranks) == 4
    if not known or not all(isinstance(r, int) and not isinstance(r, bool) and r > 0 for r in ranks):
        raise InputError(f"RWKV7: ranks is {ranks!r}, expected four of at least 1: of decay, a, v and gate")
    return tuple(ranks)
