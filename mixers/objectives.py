"""The zoo's objectives, executable: the loss in a mixer's docstring, as `dsf.learn` takes it.

`LEARNT[name]` is a recurrence of the entry's inputs that equals the entry's system (tests/test_learn.py). `OTHERWISE`
gives the reason for the other mixers that state an objective.
"""

from typing import Any

import dsf
from dsf import (
    Key,
    Memory,
    N,
    Param,
    Recurrence,
    Scalar,
    Steps,
    System,
    Value,
    abs,
    compose,
    dot,
    elu1,
    exp,
    inner,
    learn,
    maximum,
    norm2,
    sigmoid,
    softplus,
)

S = Memory()


@dsf.recurrence
def linear_attention(q: Key, k: Key, v: Value) -> System:
    """Hebb's rule on positive features, read as a quotient."""
    return learn(-inner(S.T @ elu1(k), v), by="hebb", C=elu1(q), normalize=dsf.ratio)


@dsf.recurrence
def unnormalized_linear_attention(q: Key, k: Key, v: Value) -> System:
    """Hebb's rule."""
    return learn(-inner(S.T @ k, v), by="gradient", C=q)


@dsf.recurrence
def generalized_linear_attention(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Hebb's rule in another gauge."""
    return learn(-inner(S.T @ k, v), by="gradient", C=q / eta, gauge=eta)


@dsf.recurrence
def normalized_attention_exp(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Hebb's rule in another gauge."""
    return learn(-inner(S.T @ k, v), by="gradient", C=q * exp(-eta), gauge=exp(eta))


@dsf.recurrence
def normalized_attention_softplus(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Hebb's rule in another gauge."""
    return learn(-inner(S.T @ k, v), by="gradient", C=q / softplus(eta), gauge=softplus(eta))


@dsf.recurrence
def normalized_attention_sigmoid(q: Key, k: Key, v: Value, eta: Scalar) -> System:
    """Hebb's rule in another gauge."""
    return learn(-inner(S.T @ k, v), by="gradient", C=q / sigmoid(eta), gauge=sigmoid(eta))


@dsf.recurrence
def ssd(x: Value, dt: Scalar, b: Key, c: Key, A_log: Param[Scalar], D: Param[Scalar], dt_bias: Param[Scalar]) -> System:
    """Hebb's rule from a decayed memory, the rate that of the decay."""
    delta = softplus(dt + dt_bias)
    return learn(-inner(S.T @ b, x), by="gradient", rate=delta, decay=exp(-exp(A_log) * delta), C=c, D=D * x)


@dsf.recurrence
def retnet(q: Key, k: Key, v: Value, slope: Param[Scalar]) -> System:
    """Hebb's rule from a decayed memory."""
    return learn(-inner(S.T @ k, v), by="gradient", decay=exp(-slope), C=q)


@dsf.recurrence
def gla(q: Key, k: Key, v: Value, g: Key) -> System:
    """Hebb's rule, every row decayed at its own rate."""
    return learn(-inner(S.T @ k, v), by="gradient", decay=sigmoid(g) ** (1 / 16), C=q)


@dsf.recurrence
def rwkv6(r: Key, k: Key, v: Value, w: Key, u: Param[Key]) -> System:
    """Hebb's rule, every row decayed, read before it writes."""
    decay = exp(-exp(w))
    return learn(-inner(S.T @ k, v), by="gradient", decay=decay, C=r, D=dot(r, u * k) * v, read="before")


@dsf.recurrence
def mlstm(q: Key, k: Key, v: Value, i: Scalar, f: Scalar) -> System:
    """Hebb's rule at an exponential rate from a decayed memory, read as a bounded quotient."""
    return learn(
        -inner(S.T @ k, v), by="gradient", rate=exp(i), decay=sigmoid(f), C=q * N**-0.5,
        normalize=lambda num, den, one: num / maximum(abs(den), one),
    )  # fmt: skip


@dsf.recurrence
def deltanet(q: Key, k: Key, v: Value, beta: Scalar) -> System:
    """One gradient step of the square."""
    return learn(0.5 * norm2(S.T @ k - v), by="gradient", rate=beta, C=q)


@dsf.recurrence
def gated_deltanet(q: Key, k: Key, v: Value, alpha: Scalar, beta: Scalar) -> System:
    """The same from a decayed memory."""
    return learn(0.5 * norm2(S.T @ k - v), by="gradient", rate=beta, decay=alpha, C=q)


@dsf.recurrence
def kda(q: Key, k: Key, v: Value, g: Key, beta: Scalar) -> System:
    """The same, every row decayed at its own rate."""
    return learn(0.5 * norm2(S.T @ k - v), by="gradient", rate=beta, decay=exp(g), C=q)


@dsf.recurrence
def efla(q: Key, k: Key, v: Value, beta: Scalar) -> System:
    """The square's flow."""
    return learn(0.5 * norm2(S.T @ k - v), by="flow", rate=beta, C=q)


@dsf.recurrence
def longhorn_exact(q: Key, k: Key, x: Value, beta: Value, D: Param[Value]) -> System:
    """The square's exact minimum near the last memory, a weight a channel."""
    error = S.T @ k - x
    return learn(0.5 * inner(beta * error, error), by="implicit", C=q, D=D * x)


@dsf.recurrence
def mesanet(q: Key, k: Key, v: Value, f: Scalar, beta: Scalar, lam: Param[Key]) -> System:
    """All tokens' squares, decayed, and a ridge, at their least."""
    error = S.T @ k - v
    return learn(0.5 * inner(beta * error, error), by="exact", decay=sigmoid(f), ridge=0.25 + softplus(lam), C=q)


def _two(q: Any, k: Any, v: Any, beta: Any, decay: Any = None) -> System:
    """Two gradient steps of two squares, the first from a decayed memory."""
    first = learn(0.5 * norm2(S.T @ k[0] - v[0]), by="gradient", rate=beta[0], decay=decay)
    return compose(first, learn(0.5 * norm2(S.T @ k[1] - v[1]), by="gradient", rate=beta[1], C=q))


@dsf.recurrence
def delta_product(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], beta: Steps[Scalar, 2]) -> System:
    """Two gradient steps of two squares."""
    return _two(q, k, v, beta)


@dsf.recurrence
def gated_delta_product(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], beta: Steps[Scalar, 2], alpha: Scalar) -> System:
    """The same from a decayed memory."""
    return _two(q, k, v, beta, alpha)


LEARNT: dict[str, Recurrence] = {
    r.name: r
    for r in (
        linear_attention, unnormalized_linear_attention, generalized_linear_attention, normalized_attention_exp,
        normalized_attention_softplus, normalized_attention_sigmoid, ssd, retnet, gla, rwkv6, mlstm, deltanet,
        gated_deltanet, kda, efla, longhorn_exact, mesanet, delta_product, gated_delta_product,
    )
}  # fmt: skip

# Mixers whose objective is not one step of a rule on a loss; softmax attention's is over all tokens.
OTHERWISE: dict[str, str] = {
    "longhorn": "the diagonal of longhorn_exact's transition, which no loss has as its step",
    "rwkv7": "its square has a rate of its own for every row, and the decay stands beside the step, not before it",
}
