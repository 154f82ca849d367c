"""Recurrences with turns and previous values that are in no library, for the tests of the decode kernel."""

import torch

import dsf
from dsf import (
    I,
    Key,
    Pair,
    Param,
    Scalar,
    Steps,
    System,
    Value,
    compose,
    diag,
    elu1,
    exp,
    l2norm,
    outer,
    pair,
    prev,
    quarter_turn,
    sigmoid,
    softplus,
    tanh,
    turn,
)


@dsf.recurrence
def remembering(q: Key, k: Key, v: Value, s: Scalar, a: Scalar) -> System:
    """Previous values of a scalar, of keys two tokens ago, of a product and of its sum with a value."""
    earlier = prev(prev(k)) * (prev(sigmoid(s)) * v) + q * prev(v + prev(v))
    return System(A=sigmoid(a), B=k * v + 0.5 * earlier, C=q, D=prev(v))


@dsf.recurrence
def remembering_entries(q: Key, k: Key, v: Value, a: Scalar) -> System:
    """A previous value with a number for each entry and channel."""
    return System(A=sigmoid(a), B=prev(tanh(k * v)), C=q)


@dsf.recurrence
def turned_entries(q: Key, k: Key, v: Value, a: Scalar, t: Pair) -> System:
    """The same, which turns with the state."""
    before = System(A=I, B=prev(tanh(k * v)))
    return compose(before, System(A=sigmoid(a) * turn(t), B=k * v, C=q))


@dsf.recurrence
def remembering_channels(v: Value, g: Value) -> System:
    """A vector state, driven by the token before."""
    return System(A=sigmoid(g), B=prev(v) * g, C=1)


@dsf.recurrence
def turned_twice(q: Key, k: Key, v: Value, a: Steps[Pair, 2], b: Scalar, w: Param[Pair], g: Key) -> System:
    """Two turns with a delta rule between them, decays that differ within a pair, and a write of pairs."""
    first = System(A=(I - sigmoid(b) * outer(l2norm(k), l2norm(k))) @ turn(a[0]), B=k * v)
    return compose(
        first, System(A=diag(sigmoid(g)) @ turn(tanh(a[1]) + 40 * w), B=quarter_turn(k) * v, C=pair(0.5, b) * q)
    )


@dsf.recurrence
def turned_ratio(q: Key, k: Key, v: Value, a: Scalar, t: Scalar) -> System:
    """A normaliser that turns, too, and a previous key beside it."""
    rule = lambda n, d: n / (1 + d * d)  # noqa: E731
    return System(A=sigmoid(a) * turn(t), B=softplus(k) * v + prev(k) * v, C=q, normalize=rule, drive=v)


@dsf.recurrence
def level_before(q: Key, k: Key, v: Value, i: Scalar, f: Scalar) -> System:
    """A running maximum with columns of previous values after it."""
    return System(A=sigmoid(f), B=exp(i) * (elu1(k) + prev(elu1(k))) * v, C=elu1(q), normalize=dsf.ratio, drive=v)


@dsf.recurrence
def levels_before(q: Key, k: Key, v: Value, i: Value, f: Value) -> System:
    """A normaliser and a running maximum for each channel, with columns of previous values after them."""
    written = exp(i) * (elu1(k) + prev(elu1(k))) * v
    return System(A=sigmoid(f), B=written, C=elu1(q), read="before", D=exp(i + 1) * v, normalize=dsf.ratio, drive=v)


@dsf.recurrence
def skipping(q: Key, k: Key, v: Value, i: Scalar, f: Scalar, u: Param[Value]) -> System:
    """One running maximum a head, and a gain for each channel of what is added to y."""
    rule = lambda num, den, one: num / dsf.maximum(dsf.abs(den), one)  # noqa: E731
    return System(A=sigmoid(f), B=exp(i) * k * v, C=q, D=exp(u + i) * v, normalize=rule, drive=v)


FRAMED = [
    remembering,
    remembering_entries,
    turned_entries,
    remembering_channels,
    turned_twice,
    turned_ratio,
    level_before,
    levels_before,
]


def tokens_of(recurrence, given, t):
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {name: x[:, t] if name in timed else x for name, x in given.items()}


def decode(recurrence, given, **how):
    """Outputs of every token and the last state."""
    state, outputs = None, []
    tokens = next(given[i.name].shape[1] for i in recurrence.spec.inputs if i.kind.time)
    for t in range(tokens):
        y, state = recurrence.step(state, **tokens_of(recurrence, given, t), backend="triton", **how)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def assert_same(a, b, tolerance=2e-5):
    assert ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() < tolerance
