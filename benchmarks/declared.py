"""Recurrences that are timed and compiled beside those of the zoo."""

import dsf
from dsf import I, Key, Scalar, System, Value, compose, diag, exp, outer, sigmoid


@dsf.recurrence
def scalar_decay(q: Key, k: Key, v: Value, g: Scalar) -> System:
    """One decay a head and token, given as its logarithm."""
    return System(A=exp(g), B=k * v, C=q)


@dsf.recurrence
def fading_channels(q: Key, k: Key, v: Value, f: Value) -> System:
    """A forget gate for each channel of a state with keys."""
    return System(A=sigmoid(f), B=k * v, C=q)


@dsf.recurrence
def two_summed(
    q: Key, k: Key, l: Key, v: Value, x: Value, alpha: Scalar, beta: Scalar, gamma: Scalar
) -> System:  # fmt: skip
    """Two delta rules that act at once: a sum of two corrections."""
    erased = beta * outer(k, k) + gamma * outer(l, l)
    return System(A=alpha * (I - erased), B=k * (beta * v) + l * (gamma * x), C=q)


@dsf.recurrence
def two_composed(
    q: Key, k: Key, l: Key, v: Value, x: Value, alpha: Scalar, beta: Scalar, gamma: Scalar
) -> System:  # fmt: skip
    """The same two delta rules one after the other, as in Gated DeltaProduct."""
    first = System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v))
    return compose(first, System(A=I - gamma * outer(l, l), B=l * (gamma * x), C=q))


@dsf.recurrence
def rows_summed(q: Key, k: Key, l: Key, b: Key, v: Value, beta: Scalar, w: Key) -> System:
    """Two corrections of any vectors that act at once, on rows that decay as RWKV-7's do."""
    return System(A=diag(exp(-0.6 * sigmoid(w))) - beta * outer(k, k) + 0.5 * outer(l, b), B=k * (beta * v), C=q)


@dsf.recurrence
def rows_composed(q: Key, k: Key, l: Key, b: Key, v: Value, beta: Scalar, w: Key) -> System:
    """The same two corrections one after the other."""
    first = System(A=diag(exp(-0.6 * sigmoid(w))) - beta * outer(k, k), B=k * (beta * v))
    return compose(first, System(A=I + 0.5 * outer(l, b), B=0.0, C=q))


OWN = {r.name: r for r in (scalar_decay, fading_channels, two_summed, two_composed, rows_summed, rows_composed)}
