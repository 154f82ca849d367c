"""DeltaProduct: several delta rules a token."""

from functools import lru_cache
from typing import Any

import dsf
from dsf import Expr, I, Key, Recurrence, Scalar, Steps, System, Value, compose, outer

Exprs = Any  # a tuple of expressions; type checkers take Steps[...] for one of them


@lru_cache
def delta_product_of(n: int, gated: bool = False) -> Recurrence:
    """DeltaProduct with n Householder-like steps a token; gated adds a decay `alpha` before the first."""

    def steps(q: Expr, k: Exprs, v: Exprs, beta: Exprs, decay: Expr | None = None) -> System:
        """The composition of n delta rules; only the last one is read."""
        transitions = [I - b * outer(key, key) for key, b in zip(k, beta, strict=True)]
        if decay is not None:
            transitions[0] = decay * transitions[0]
        writes = [key * (b * value) for key, value, b in zip(k, v, beta, strict=True)]
        *rest, last = zip(transitions, writes, strict=True)
        return compose(*(System(A=a, B=b) for a, b in rest), System(A=last[0], B=last[1], C=q))

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
