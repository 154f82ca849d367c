"""Elementwise recurrences written for the tests of the fused scan alone: none is in any library."""

import dsf
from dsf import (
    Key,
    Pair,
    Param,
    Scalar,
    Steps,
    System,
    Value,
    compose,
    diag,
    dot,
    exp,
    l2norm,
    maximum,
    outer,
    sigmoid,
    silu,
    softplus,
    tanh,
    turn,
    where,
)


@dsf.recurrence
def leaky_peak(x: Value, g: Value, floor: Param[Value]) -> System:
    """In no library, N = 1: a leak bounded from below, and a bounded write."""
    return System(A=maximum(sigmoid(g), 0.2 * sigmoid(floor)), B=tanh(x) * sigmoid(-g), C=exp(-g), read="before")


@dsf.recurrence
def aligned(q: Key, k: Key, v: Value, r: Value, w: Param[Key]) -> System:
    """In no library, Hadamard with a dot: forget more where the key is aligned with the query."""
    unit = l2norm(k)
    return System(A=exp(-softplus(r + dot(q, unit)) * softplus(w)), B=unit * v, C=q * sigmoid(r))


@dsf.recurrence
def swinging(q: Key, k: Key, v: Value, s: Key, stop: Scalar, D: Param[Value]) -> System:
    """In no library, eigenvalues in [-1, 1], with resets: state entries may turn over at every token."""
    return System(A=where(stop > 0.5, 0, tanh(s * v)), B=k**2 * v, C=q, D=D * v)


@dsf.recurrence
def late_swing(q: Key, k: Key, v: Value, s: Value, w: Param[Key, Value], u: Param[Key]) -> System:
    """In no library: a state that Params turn over, read before it is written."""
    return System(A=tanh(s * (w + u)), B=k * v, C=q, read="before")


@dsf.recurrence
def before(q: Key, k: Key, v: Value, g: Key) -> System:
    """A state read before it is written, with an output gate and a skip."""
    return System(A=exp(-softplus(g) * sigmoid(v)), B=k * v, C=q * sigmoid(v), D=v, read="before")


@dsf.recurrence
def erasing(q: Key, k: Key, v: Value, g: Value, w: Param[Key, Value]) -> System:
    """In no library: the delta rule entry by entry, at a rate for every one of them."""
    rate = sigmoid(g + w)
    return System(A=1 - rate * k**2, B=rate * k * v, C=q, read="before")


@dsf.recurrence
def channels(q: Key, k: Key, v: Value, g: Value) -> System:
    """In no library: a leak a channel, the same for all its entries."""
    return System(A=sigmoid(g), B=k * v, C=q)


@dsf.recurrence
def twice(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], g: Steps[Value, 2]) -> System:
    """In no library: two writes a token, each with a leak of its own for every entry."""
    first = System(A=sigmoid(g[0] * k[0]), B=k[0] * v[0])
    return compose(first, System(A=tanh(g[1] * k[1]), B=k[1] * v[1], C=q))


@dsf.recurrence
def weighted(q: Key, k: Key, v: Value, a: Value, w: Param[Key]) -> System:
    """In no library: a weighted mean for every entry, weights that decay at rates of their own."""
    return System(A=exp(-softplus(w) * sigmoid(a)), B=sigmoid(k) * v, C=sigmoid(q), D=v / 3, normalize=dsf.ratio)


@dsf.recurrence
def bounded(q: Key, k: Key, v: Value, f: Value, i: Scalar) -> System:
    """In no library: mLSTM's gates with a forget gate a channel, read before the write, values that forget too."""

    def rule(num: dsf.Expr, den: dsf.Expr, one: dsf.Expr) -> dsf.Expr:
        return num / maximum(dsf.abs(den), one)

    return System(A=sigmoid(f + v), B=exp(i) * k * v, C=q, read="before", normalize=rule)


@dsf.recurrence
def crowded(q: Key, k: Steps[Key, 2], v: Value, s: Scalar, w: Param[Key]) -> System:
    """In no library: much that all channels share: micro-steps, numbers, a Param; read before the write."""
    near = dot(q, tanh(k[0]) * softplus(w))
    return System(
        A=exp(-softplus(near) * sigmoid(v)),
        B=softplus(s) * l2norm(k[1]) * v,
        C=q / (1 + softplus(s)) * sigmoid(v),
        D=dot(q, k[1]) * v,
        read="before",
    )


@dsf.recurrence
def gated(x: Value, dt: Value, z: Value, b: Key, c: Key, A_log: Param[Key, Value], D: Param[Value]) -> System:
    """S6 and the output gate silu(z) of its block, in one scan."""
    delta, gate = softplus(dt), silu(z)
    return System(A=exp(-exp(A_log) * delta), B=b * (delta * x), C=c * gate, D=D * x * gate)


UNSEEN = [leaky_peak, aligned, swinging, channels, twice, before, crowded]


@dsf.recurrence
def turning_unequally(q: Key, k: Key, v: Value, g: Key, th: Pair) -> System:
    """In no library: pairs that turn while their two entries decay by themselves, which no gauge removes."""
    return System(A=diag(sigmoid(g)) @ turn(th), B=k * v, C=q)


@dsf.recurrence
def leaning_channels(q: Key, k: Key, l: Key, v: Value, r: Value, g: Value, w: Param[Value]) -> System:
    """In no library: two corrections of which one differs by channel, beside a decay by channel; read before."""
    a = diag(sigmoid(g)) - sigmoid(r + w) * outer(l2norm(k), l2norm(l)) - 0.1 * outer(sigmoid(l), l2norm(q))
    return System(A=a, B=k * v, C=q, D=v * dot(q, k), read="before")


@dsf.recurrence
def erasing_while_turning(q: Key, k: Key, v: Value, r: Value, g: Key, th: Scalar, w: Param[Pair]) -> System:
    """In no library: turned pairs, entries that decay by themselves, and channels that each erase in their own way."""
    unit = l2norm(k)
    return System(A=(diag(sigmoid(g)) - sigmoid(r) * outer(unit, unit)) @ turn(th * w), B=unit * v, C=q)


@dsf.recurrence
def signed_keys(q: Key, k: Key, v: Value, g: Key) -> System:
    """In no library: key entries that may turn over, whose decays have no logarithm for chunks to add up."""
    return System(A=diag(tanh(g)), B=k * v, C=q)


MIXING = [turning_unequally, leaning_channels, erasing_while_turning]
