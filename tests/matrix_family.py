"""Matrix-family recurrences that are in no library, for the tests of the chunk kernels."""

import dsf
from dsf import (
    I,
    Key,
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
    sigmoid,
    softplus,
    sum_value,
    tanh,
)


@dsf.recurrence
def swinging(q: Key, k: Key, v: Value, a: Scalar, w: Param[Scalar]) -> System:
    """A decay of either sign, features as keys, a parameter on the values, a gated readout."""
    return System(A=tanh(a), B=softplus(k) * (exp(w) * v), C=q * sigmoid(a))


@dsf.recurrence
def turning(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, w: Param[Scalar]) -> System:
    """A decay of either sign, values and readouts of any strength, and a skip."""
    return System(A=tanh(a), B=k * (b * v), C=q * sigmoid(a), D=sigmoid(w) * v)


@dsf.recurrence
def forgetful_delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, s: Scalar) -> System:
    """A delta rule that erases with another strength than it writes with, and a skip."""
    erase = 2 * sigmoid(b)
    return System(A=exp(-softplus(a)) * (I - erase * outer(l2norm(k), l2norm(k))), B=l2norm(k) * (s * v), C=q, D=s * v)


@dsf.recurrence
def early_delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, w: Param[Scalar]) -> System:
    """A delta rule that erases before a decay of two factors, one of them a parameter's, and a skip."""
    return System(A=sigmoid(a) * exp(-exp(w)) * I - sigmoid(b) * outer(k, k), B=k * (b * v), C=q, D=sigmoid(a) * v)


@dsf.recurrence
def late_ratio(q: Key, k: Key, v: Value, a: Scalar) -> System:
    """Normalised by its own rule, and read before the update."""
    return System(A=sigmoid(a), B=elu1(k) * v, C=softplus(q), read="before", normalize=lambda n, d: n / (d + 1))


@dsf.recurrence
def driven_ratio(q: Key, k: Key, v: Value, a: Scalar, u: Scalar) -> System:
    """Decays of either sign, and a normaliser that something else than one drives."""
    rule = lambda n, d: n / (1 + d * d)  # noqa: E731
    return System(A=tanh(a), B=softplus(k) * (v + sigmoid(u)), C=q * sigmoid(a), normalize=rule, drive=v)


@dsf.recurrence
def erasing_ratio(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """A delta rule with a normaliser, that is erased as the values are."""
    decay = sigmoid(a) * (I - sigmoid(b) * outer(k, k))
    return System(A=decay, B=k * (sigmoid(b) * v), C=q, normalize=lambda n, d: n / (1 + d * d))


@dsf.recurrence
def momentary_ratio(q: Key, k: Key, v: Value, i: Scalar) -> System:
    """A decay of the number 0, whose logarithm no expression has, beside a running maximum."""
    return System(A=0, B=exp(i) * k * v, C=q, normalize=lambda n, d, one: n / (dsf.abs(d) + one))


@dsf.recurrence
def fading_rows(q: Key, k: Key, v: Value, g: Key, a: Scalar, s: Scalar) -> System:
    """A decay for each key, one for all, a strength of writing and a gated readout."""
    return System(A=diag(exp(g) * sigmoid(a)), B=k * (s * v), C=q * sigmoid(s))


@dsf.recurrence
def fading_delta(q: Key, k: Key, v: Value, g: Key, b: Scalar, s: Scalar) -> System:
    """Rows that decay, then a delta rule that erases with another strength than it writes with, and a gated readout."""
    return System(A=(I - sigmoid(b) * outer(k, k)) @ diag(exp(g)), B=k * (s * v), C=q * sigmoid(s))


@dsf.recurrence
def apart_delta(q: Key, k: Key, r: Key, v: Value, g: Key, b: Scalar, s: Scalar) -> System:
    """Rows that decay, then what one key reads is erased along another one, at which is written."""
    return System(A=(I - sigmoid(b) * outer(k, r)) @ diag(exp(g)), B=k * (s * v), C=q * sigmoid(s))


@dsf.recurrence
def leaning_rows(q: Key, k: Key, v: Value, g: Key, a: Key, b: Key, s: Scalar) -> System:
    """Rows that decay without bound, what is read along one key written at another, a read before the update."""
    return System(A=diag(exp(g)) + sigmoid(s) * outer(a, b), B=k * (s * v), C=q * sigmoid(s), read="before")


@dsf.recurrence
def moving_rows(q: Key, k: Key, v: Value, a: Key, b: Key, s: Scalar) -> System:
    """No decay: what lies along one key is moved to another, with a strength."""
    return System(A=I + sigmoid(s) * outer(l2norm(a) - l2norm(b), l2norm(b)), B=k * v, C=q)


@dsf.recurrence
def plain_rows(q: Key, k: Key, v: Value, a: Key, b: Key, g: Key) -> System:
    """Transitions made of bare inputs, a decay for each key among them."""
    return System(A=diag(exp(g)) + outer(a, b), B=k * v, C=q)


@dsf.recurrence
def sure_rows(q: Key, k: Key, v: Value, a: Key, b: Key, g: Key, s: Scalar, d: Scalar) -> System:
    """What lies along one key is moved to another, and a row's own value has a scale of its own."""
    return System(A=diag(sigmoid(g)) + sigmoid(s) * outer(a, b), B=k * v, C=q, D=d * v)


@dsf.recurrence
def skipping_rows(q: Key, k: Key, v: Value, a: Key, b: Key, g: Key, d: Scalar) -> System:
    """Rows that decay without bound, what is erased differs by key, and a gate for a row's own value."""
    return System(A=diag(exp(-softplus(g))) - outer(sigmoid(a) * b, b), B=k * v, C=q, D=sigmoid(d) * v)


@dsf.recurrence
def gated(q: Key, k: Key, v: Value, a: Scalar, o: Value, w: Param[Value]) -> System:
    """Channels read with gates of their own, and a skip beside them."""
    return System(A=sigmoid(a), B=k * v, C=q * (sigmoid(a) * sigmoid(o)), D=w * v)


@dsf.recurrence
def late_gate(q: Key, k: Key, v: Value, g: Key, b: Scalar, o: Value, w: Param[Value]) -> System:
    """Rows that decay under a delta rule, read before the update through gates that are an input and a parameter."""
    return System(A=(I - sigmoid(b) * outer(k, k)) @ diag(exp(g)), B=k * v, C=q * (o * exp(w)), read="before")


@dsf.recurrence
def single_steps(q: Steps[Key, 1], k: Steps[Key, 1], v: Steps[Value, 1], beta: Steps[Scalar, 1], a: Scalar) -> System:
    """A delta rule of one micro-step that is declared as a list of one: every input but one has an axis of size 1."""
    return System(A=sigmoid(a) * (I - beta[0] * outer(k[0], k[0])), B=k[0] * (beta[0] * v[0]), C=q[0])


@dsf.recurrence
def twice_erased(q: Key, k: Key, l: Key, v: Value, x: Value, a: Scalar, b: Scalar, c: Scalar) -> System:
    """Two keys are erased at once, in a decay of either sign, and both are written."""
    erased = sigmoid(b) * outer(l2norm(k), l2norm(k)) + sigmoid(c) * outer(l, l)
    return System(A=tanh(a) * (I - erased), B=l2norm(k) * (sigmoid(b) * v) + l * (sigmoid(c) * x), C=q, D=a * v)


@dsf.recurrence
def thrice_erased(q: Key, k: Steps[Key, 3], v: Value, g: Key, b: Scalar) -> System:
    """Rows that decay, then three keys that are erased at once, of which the last is written; read before."""
    erased = sigmoid(b) * outer(k[0], k[0]) + 0.5 * outer(k[1], k[1]) + b**2 * outer(k[2], k[2])
    return System(A=(I - erased) @ diag(exp(g)), B=k[2] * v, C=q, read="before")


@dsf.recurrence
def decayed_apart(q: Key, k: Key, l: Key, v: Value, a: Scalar, b: Scalar, c: Scalar) -> System:
    """Of two corrections one is decayed with the state; a quotient."""
    decay = sigmoid(a) * (I - sigmoid(b) * outer(k, k)) - sigmoid(c) * outer(l, l)
    return System(A=decay, B=k * (sigmoid(b) * v), C=q, normalize=lambda n, d: n / (1 + d * d))


@dsf.recurrence
def early_in_steps(q: Key, k: Steps[Key, 2], l: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """Two keys are erased before the decay, then one after another decay; read before."""
    first = sigmoid(a) * I - sigmoid(b) * outer(k[0], k[0]) - 0.5 * outer(l, l)
    second = exp(-sigmoid(b)) * (I - sigmoid(a) * outer(k[1], k[1]))
    return compose(System(A=first, B=k[0] * v), System(A=second, B=k[1] * (b * v), C=q, read="before"))


@dsf.recurrence
def apart_in_steps(q: Key, k: Steps[Key, 2], l: Key, r: Key, v: Value, g: Key, b: Scalar) -> System:
    """Rows that decay, then two erasures at once, of which one reads along a gated key; then a delta rule."""
    first = (I - sigmoid(b) * outer(k[0], sigmoid(r) * k[0]) - 0.5 * outer(l, r)) @ diag(exp(g))
    return compose(System(A=first, B=k[0] * v), System(A=I - b * outer(k[1], k[1]), B=k[1] * v, C=q))


@dsf.recurrence
def twice_moved(q: Key, k: Key, u: Key, w: Key, v: Value, x: Value, g: Key, s: Scalar) -> System:
    """Rows that decay without bound; what lies along two keys is moved at once, and three products are written."""
    moved = outer(u, w) - sigmoid(s) * outer(k, u)
    return System(A=diag(exp(g)) + 0.5 * moved, B=k * v + u * x - w * (s * v), C=q * sigmoid(s))


@dsf.recurrence
def moved_in_steps(q: Key, k: Steps[Key, 2], u: Key, v: Value, g: Key, s: Scalar) -> System:
    """A sum of corrections whose decay is bounded, then a single one, in micro-steps."""
    first = diag(exp(-0.5 * sigmoid(g))) + sigmoid(s) * outer(u, k[0]) - 0.5 * outer(k[0], u)
    return dsf.compose(System(A=first, B=k[0] * v), System(A=I - outer(k[1], u), B=u * v, C=q))


SUMMED = [twice_erased, thrice_erased, decayed_apart, twice_moved, moved_in_steps, early_in_steps, apart_in_steps]
UNSEEN = [swinging, turning, forgetful_delta, late_ratio, driven_ratio, erasing_ratio, fading_rows, fading_delta]
UNSEEN += [leaning_rows, moving_rows, sure_rows, skipping_rows, gated, late_gate, single_steps]
UNSEEN += [early_delta, apart_delta, momentary_ratio]


@dsf.recurrence
def fading_channels(q: Key, k: Key, v: Value, a: Value) -> System:
    """One decay a channel."""
    return System(A=sigmoid(a), B=k * v, C=q)


@dsf.recurrence
def given_channels(q: Key, k: Key, v: Value, g: Value, s: Scalar, o: Value, d: Param[Value]) -> System:
    """Given logarithms, a strength of either sign, gated channels and a skip."""
    return System(A=exp(g), B=k * (s * v), C=q * sigmoid(o), D=d * v)


@dsf.recurrence
def late_channels(q: Key, k: Key, v: Value, a: Value, w: Param[Key]) -> System:
    """A read before the update, with computed keys and readouts, under decays without bound."""
    return System(A=exp(-softplus(a)), B=sigmoid(k) * v, C=w * q, read="before")


@dsf.recurrence
def twice_written(q: Key, k: Key, l: Key, v: Value, x: Value, a: Value) -> System:
    """Two products in B: micro-steps of the kernels."""
    return System(A=sigmoid(a), B=k * v + l * x, C=q)


@dsf.recurrence
def channels_in_steps(q: Key, k: Key, v: Value, a: Value, b: Scalar) -> System:
    """Two micro-steps, a decay by channel and one of all, read before the update; a readout of two gated parts."""
    first = System(A=sigmoid(a) * sigmoid(b), B=k * v)
    return compose(first, System(A=sigmoid(b), B=q * v, C=q + sigmoid(a) * k, read="before"))


@dsf.recurrence
def less_all_channels(q: Key, k: Key, v: Value, a: Value) -> System:
    """A sum over channels, for which the fused scan has no room."""
    return System(A=sigmoid(a), B=k * (v - 0.3 * sum_value(v)), C=q)


# decays by channel
ACROSS = [fading_channels, given_channels, late_channels, twice_written, channels_in_steps, less_all_channels]
