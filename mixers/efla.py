"""EFLA: the delta rule's flow, followed for as long as one step of it."""

from typing import Any

import torch

import dsf
from dsf import I, Key, Scalar, System, Value, dot, outer, phi1
from dsf.mixers.deltanet import DeltaNet


@dsf.recurrence
def efla(q: Key, k: Key, v: Value, beta: Scalar) -> System:
    """EFLA: what the delta rule's gradient, followed without a step's error, comes to in time beta.

    Source: Lei et al. (arXiv 2512.12602). Symbols: alpha = (1 - exp(-beta lambda)) / lambda with lambda = k'k, here
    beta phi1(-beta lambda), which is beta at k = 0; k of any length, beta >= 0.
    Objective: the flow of 1/2 |S'k_t - v_t|^2 for the time beta_t.
    """
    alpha = beta * phi1(-(beta * dot(k, k)))
    return System(A=I - alpha * outer(k, k), B=k * (alpha * v), C=q)


class EFLA(DeltaNet):
    """DeltaNet's layer around `efla`. Keys are not normalised: their length decides how much is erased.

    Arguments as `DeltaNet` without allow_neg_eigval, since a flow's eigenvalues lie in (0, 1].
    """

    recurrence = efla
    key_length = None

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_key_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int = 4,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        sizes: dict[str, Any] = {"n_key_heads": n_key_heads, "d_state": d_state, "headdim": headdim, "d_conv": d_conv}
        super().__init__(d_model, n_heads, **sizes, bare=bare, layer_idx=layer_idx, device=device, dtype=dtype)
