"""DeltaProduct: several delta rules a token."""

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import dsf
from dsf import Expr, I, Key, Param, Recurrence, Scalar, Steps, System, Value, compose, exp, outer, softplus
from dsf.language.errors import InputError
from dsf.mixers._heads import Heads
from dsf.mixers._module import Side, Span
from dsf.mixers._own import log_uniform, time_step

if TYPE_CHECKING:
    from dsf.parallel import Cuts

Exprs = Any  # a tuple of expressions; type checkers take Steps[...] for one of them


@lru_cache
def delta_product_of(n: int, gated: bool | Literal["rate"] = False) -> Recurrence:
    """DeltaProduct with n Householder-like steps a token; gated adds a decay `alpha` before the first.

    gated="rate" computes alpha = exp(-exp(A_log) softplus(a + dt_bias)) inside, as the layer's recurrence does.
    """

    def steps(q: Expr, k: Exprs, v: Exprs, beta: Exprs, decay: Expr | None = None) -> System:
        """The composition of n delta rules; only the last one is read."""
        transitions = [I - b * outer(key, key) for key, b in zip(k, beta, strict=True)]
        if decay is not None:
            transitions[0] = decay * transitions[0]
        writes = [key * (b * value) for key, value, b in zip(k, v, beta, strict=True)]
        *rest, last = zip(transitions, writes, strict=True)
        return compose(*(System(A=a, B=b) for a, b in rest), System(A=last[0], B=last[1], C=q))

    if gated == "rate":

        @dsf.recurrence
        def gated_delta_product_rate(
            q: Key,
            k: Steps[Key, n],
            v: Steps[Value, n],
            beta: Steps[Scalar, n],
            a: Scalar,
            A_log: Param[Scalar],
            dt_bias: Param[Scalar],
        ) -> System:
            """Gated DeltaProduct with its decay computed inside."""
            return steps(q, k, v, beta, exp(-exp(A_log) * softplus(a + dt_bias)))

        return gated_delta_product_rate

    if gated:

        @dsf.recurrence
        def gated_delta_product(
            q: Key, k: Steps[Key, n], v: Steps[Value, n], beta: Steps[Scalar, n], alpha: Scalar
        ) -> System:
            """Gated DeltaProduct: decay once, then n delta rules a token.

            Source: Siems et al. (arXiv 2502.10297), Section 3. Inputs as `delta_product`; alpha in (0, 1).
            """
            return steps(q, k, v, beta, alpha)

        return gated_delta_product

    @dsf.recurrence
    def delta_product(q: Key, k: Steps[Key, n], v: Steps[Value, n], beta: Steps[Scalar, n]) -> System:
        """DeltaProduct: n delta rules a token, whose product of Householder matrices can rotate.

        Source: Siems et al. (arXiv 2502.10297), Section 3. Symbols: k of unit length, beta in (0, 2).
        Objective: n gradient steps of 1/2 |S'k_{t,j} - v_{t,j}|^2 with rates beta_{t,j}.
        """
        return steps(q, k, v, beta)

    return delta_product


delta_product = delta_product_of(2)
gated_delta_product = delta_product_of(2, gated=True)


class DeltaProduct(Heads):
    """The DeltaProduct layer: DeltaNet's with n_steps keys, values and betas a token and head.

    Source: Siems et al. (arXiv 2502.10297), Section 3. Convolution and SiLU on q and all k and v; q and k to unit
    length, queries scaled by d_state^-0.5; beta in (0, 2), or (0, 1) with allow_neg_eigval=False; RMSNorm of each head;
    o_proj. d_state: width of a head of q and k; headdim: of v. None: d_model / n_heads. Linear maps keep torch's
    default init. bare: neither convolution nor SiLU.
    """

    recurrence = delta_product
    beside = ("in_proj", "g_proj", "b_proj", "a_proj")
    sigmoid = "b_proj"
    blur = 0.3  # as DeltaNet's
    gated = False

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        n_steps: int = 2,
        d_conv: int = 4,
        allow_neg_eigval: bool = True,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        n_heads, n, p = self.heads(d_model, n_heads, d_state=(d_model, d_state), headdim=(d_model, headdim))
        if n_steps < 1:
            raise InputError(f"{type(self).__name__}: n_steps is {n_steps}; at least 1 is needed")
        gate = nn.Linear(d_model, n_heads * p, bias=False) if self.gated and not bare else None
        sections = (n_heads, n, n_steps * n_heads, n, n_steps * n_heads, p)
        lengths = (n**-0.5, 1.0, None)
        super().__init__(d_model, (n_heads, n, p), sections, 0 if bare else d_conv, gate, False, layer_idx, lengths)
        self.recurrence = delta_product_of(n_steps, "rate" if self.gated else False)
        self.steps, self.beta_max = (n_steps, n_heads), 2.0 if allow_neg_eigval else 1.0
        self.b_proj = nn.Linear(d_model, n_steps * n_heads, bias=False)
        self.own_more(d_model, bare)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        steps, heads = self.steps
        to.rows(self.b_proj, *[heads] * steps)
        to.set(steps=(steps, to.share(heads)))

    def steps_apart(self, *sections: int) -> tuple[int, ...]:
        queries, *rest = sections
        steps = self.steps[0]
        return queries, *(size // steps for size in rest for _ in range(steps))

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        q, k, v = self.split(u)
        return {
            "q": q,
            "k": k.unflatten(2, self.steps),
            "v": v.unflatten(2, self.steps),
            "beta": self.beta_max * self.made(side, "b_proj").unflatten(-1, self.steps),
        }


class GatedDeltaProduct(DeltaProduct):
    """The gated DeltaProduct layer: `DeltaProduct` (same arguments), a Mamba-2 decay, a gate silu(g) after the norm.

    Source: Siems et al. (arXiv 2502.10297), Section 3. exp(A_log) uniform in (0, 16), softplus(dt_bias) log-uniform in
    [1e-3, 0.1] at start. bare: neither convolution nor output gate.
    """

    gated = True
    A_log: Tensor
    dt_bias: Tensor

    def own_more(self, d_model: int, bare: bool) -> None:
        n_heads = self.dims[0]
        self.a_proj = nn.Linear(d_model, n_heads, bias=False)
        self.own("A_log", partial(log_uniform, low=1e-3, high=16.0), n_heads, kind="rate")
        self.own("dt_bias", time_step, n_heads, kind="rate")

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.a_proj)
        to.own(self, "A_log", "dt_bias")

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        inputs = super().arguments(u, side, span)
        return {**inputs, "a": self.made(side, "a_proj"), "A_log": self.A_log, "dt_bias": self.dt_bias}
