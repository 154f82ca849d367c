"""Normalised attention: linear attention divided by a function of the newest input."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import I, Key, Scalar, System, Value, exp, sigmoid, softplus
from dsf.language.errors import InputError
from dsf.mixers._module import Side, Span
from dsf.mixers.linear_attention import LinearAttention

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def generalized_linear_attention(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Generalised linear attention: divide by any positive eta(u_t).

    Source: DSF (arXiv 2405.15731), equation 17. Its transition eta_{t-1}/eta_t is a gauge of this system.
    Objective: one gradient step of -<S' k_t, v_t>.
    """
    return System(A=I, B=k * v, C=q / eta, gauge=eta)


@dsf.recurrence
def normalized_attention_exp(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Normalised attention: divide by exp(eta_t), learnt per head.

    Source: DSF (arXiv 2405.15731), equation 22. eta_t = W u_t + b is the pre-activation. Queries are not
    scaled.
    Objective: one gradient step of -<S' k_t, v_t>.
    """
    return System(A=I, B=k * v, C=q * exp(-eta), gauge=exp(eta))


@dsf.recurrence
def normalized_attention_softplus(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Normalised attention: divide by softplus(eta_t).

    Source: DSF (arXiv 2405.15731), equation 29.
    Objective: one gradient step of -<S' k_t, v_t>.
    """
    return System(A=I, B=k * v, C=q / softplus(eta), gauge=softplus(eta))


@dsf.recurrence
def normalized_attention_sigmoid(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Normalised attention: divide by sigmoid(eta_t).

    Source: DSF (arXiv 2405.15731), equation 30.
    Objective: one gradient step of -<S' k_t, v_t>.
    """
    return System(A=I, B=k * v, C=q / sigmoid(eta), gauge=sigmoid(eta))


class GeneralizedLinearAttention(LinearAttention):
    """Multi-head generalised linear attention. Arguments as `LinearAttention`, but `eta` in place of `normalized`.

    eta: a module [B, T, d_model] -> [B, T, n_heads] with positive outputs; None: a small network, then softplus.
    """

    recurrence = generalized_linear_attention

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        eta: nn.Module | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        bias: bool = True,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, n_heads, d_state, headdim, bias=bias, layer_idx=layer_idx)
        self.recurrence = generalized_linear_attention
        layers = nn.Linear(d_model, d_model), nn.SiLU(), nn.Linear(d_model, self.dims[0]), nn.Softplus()
        self.eta = eta if eta is not None else nn.Sequential(*layers)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.sliced(self.eta, self.dims[0])  # any module, so every rank runs it whole

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        given = super().arguments(u, side, span)
        return {**given, "eta": self.eta(u).to(given["v"].dtype)}  # CUDA's autocast has softplus in float32


NORMALIZERS = {
    "exp": normalized_attention_exp,
    "softplus": normalized_attention_softplus,
    "sigmoid": normalized_attention_sigmoid,
}


class NormalizedAttention(LinearAttention):
    """Multi-head normalised attention. Arguments as `LinearAttention`, but `eta` in place of `normalized`.

    eta: "exp", "softplus" or "sigmoid", the function of a linear map of x, with a number for each head. As in the DSF
    authors' code, queries are not scaled by 1/sqrt(N), there is no feature map, and bias is also that of eta's map.
    Raises InputError for another eta.
    """

    recurrence = normalized_attention_exp

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        eta: str = "exp",
        d_state: int | None = None,
        headdim: int | None = None,
        bias: bool = True,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, n_heads, d_state, headdim, bias=bias, layer_idx=layer_idx)
        if eta not in NORMALIZERS:
            raise InputError(f"NormalizedAttention: eta is {eta!r}; it is one of {', '.join(NORMALIZERS)}")
        self.recurrence = NORMALIZERS[eta]
        self.eta_proj = nn.Linear(d_model, self.dims[0], bias=bias)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.eta_proj)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        return {**super().arguments(u, side, span), "eta": self.eta_proj(u)}
