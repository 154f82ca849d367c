"""One recurrence for every structure of the compiler's table, and random inputs for them."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
    dot,
    exp,
    maximum,
    outer,
    prev,
    sigmoid,
    turn,
    where,
)  # fmt: skip

SIZES = {"N": 3, "P": 2}


@dsf.recurrence
def identity(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q)


@dsf.recurrence
def constant(q: Key, k: Key, v: Value, g: Param[Scalar]):
    return System(A=sigmoid(g), B=k * v, C=q)


@dsf.recurrence
def scalar(q: Key, k: Key, v: Value, a: Scalar, D: Param[Value]):
    return System(A=sigmoid(a), B=k * v, C=q, D=D * v)


@dsf.recurrence
def gated(q: Key, k: Key, v: Value, a: Scalar, o: Value, D: Param[Value]):
    return System(A=sigmoid(a), B=k * v, C=q * (sigmoid(a) * sigmoid(o)), D=D * v)


@dsf.recurrence
def signed(q: Key, k: Key, v: Value, a: Scalar):
    """Negative decays, and decays of exactly zero."""
    return System(A=where(a > 0.5, 0.0, 1.5 * sigmoid(a) - 0.5), B=k * v, C=q)


@dsf.recurrence
def key_diagonal(q: Key, k: Key, v: Value, a: Key):
    return System(A=diag(sigmoid(a)), B=k * v, C=q)


@dsf.recurrence
def read_before(q: Key, k: Key, v: Value, a: Key, u: Param[Key]):
    return System(A=sigmoid(a), B=k * v, C=q, D=dot(q, u * k) * v, read="before")


@dsf.recurrence
def value_diagonal(q: Key, k: Key, v: Value, a: Value):
    return System(A=sigmoid(a), B=k * v, C=q)


@dsf.recurrence
def hadamard(x: Value, dt: Value, b: Key, c: Key, A_log: Param[Key, Value]):
    delta = dsf.softplus(dt)
    return System(A=exp(-exp(A_log) * delta), B=b * (delta * x), C=c)


@dsf.recurrence
def dense_write(q: Key, k: Key, v: Value, w: Param[Key, Value], a: Scalar):
    """An injection that is no product of a key and a value."""
    return System(A=sigmoid(a), B=sigmoid(k * v + w) * v, C=q)


@dsf.recurrence
def two_writes(q: Key, k: Key, v: Value, l: Key, a: Key):
    return System(A=sigmoid(a), B=k * v - l, C=q)


@dsf.recurrence
def vector(x: Value, f: Value, o: Value):
    return System(A=sigmoid(f), B=sigmoid(-f) * x, C=sigmoid(o))


@dsf.recurrence
def delta(q: Key, k: Key, v: Value, b: Scalar):
    return System(A=I - sigmoid(b) * outer(k, k), B=k * (sigmoid(b) * v), C=q)


@dsf.recurrence
def gated_delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar):
    return System(A=sigmoid(a) * (I - sigmoid(b) * outer(k, k)), B=k * (sigmoid(b) * v), C=q)


@dsf.recurrence
def key_delta(q: Key, k: Key, v: Value, a: Key, b: Scalar):
    return System(A=(I - sigmoid(b) * outer(k, k)) @ diag(sigmoid(a)), B=k * (sigmoid(b) * v), C=q)


@dsf.recurrence
def rank_one(q: Key, k: Key, v: Value, w: Key, a: Key, b: Key):
    return System(A=diag(sigmoid(w)) + outer(a, b), B=k * v, C=q)


@dsf.recurrence
def channel_delta(q: Key, k: Key, v: Value, b: Value):
    """One Householder-like operator a channel."""
    return System(A=I - sigmoid(b) * outer(k, k), B=k * (sigmoid(b) * v), C=q)


@dsf.recurrence
def product(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], b: Steps[Scalar, 2], a: Scalar):
    first, last = (System(A=I - sigmoid(b[j]) * outer(k[j], k[j]), B=k[j] * (sigmoid(b[j]) * v[j])) for j in (0, 1))
    return compose(System(sigmoid(a) * first.A, first.B), System(last.A, last.B, C=q, read="before"))


@dsf.recurrence
def normalised(q: Key, k: Key, v: Value):
    return System(A=I, B=exp(k) * v, C=exp(q), normalize=dsf.ratio)


@dsf.recurrence
def stabilised(q: Key, k: Key, v: Value, i: Scalar, f: Scalar):
    return System(A=sigmoid(f), B=exp(i) * k * v, C=q, normalize=lambda n, d, one: n / maximum(dsf.abs(d), one))


@dsf.recurrence
def stabilised_delta(q: Key, k: Key, v: Value, i: Scalar, f: Key, b: Scalar):
    return System(
        A=(I - sigmoid(b) * outer(k, k)) @ diag(sigmoid(f)),
        B=exp(i) * k * v,
        C=q,
        normalize=lambda n, d, one: n / maximum(dsf.abs(d), one),
    )


@dsf.recurrence
def normalised_product(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], b: Steps[Scalar, 2]):
    erase = [I - sigmoid(b[j]) * outer(k[j], k[j]) for j in (0, 1)]
    return compose(
        System(erase[0], exp(k[0]) * v[0]), System(erase[1], exp(k[1]) * v[1], C=exp(q), normalize=dsf.ratio, drive=v)
    )


@dsf.recurrence
def softmax(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.exp_features(k) * v, C=dsf.exp_features(q), normalize=dsf.ratio)


@dsf.recurrence
def turned(q: Key, k: Key, v: Value, a: Scalar, t: Pair, D: Param[Value]):
    """A gauge: one decay, an angle a pair."""
    return System(A=sigmoid(a) * turn(t), B=k * v, C=q * sigmoid(a), D=D * v, read="before")


@dsf.recurrence
def turned_delta(q: Key, k: Key, v: Value, b: Scalar, t: Scalar, w: Param[Pair]):
    return System(A=(I - sigmoid(b) * outer(k, k)) @ turn(t + w), B=k * (sigmoid(b) * v), C=q)


@dsf.recurrence
def turned_blocks(q: Key, k: Key, v: Value, a: Key, t: Pair):
    """No gauge: the decay differs within a pair."""
    return System(A=diag(sigmoid(a)) @ turn(t), B=k * v, C=q)


@dsf.recurrence
def trapezoid(q: Key, k: Key, v: Value, a: Scalar, l: Scalar, t: Scalar):
    """Mamba-3's step: the last token's write turns and decays with the state."""
    before = System(A=I, B=sigmoid(-l) * prev(k * v))
    return compose(before, System(A=sigmoid(a) * turn(t), B=sigmoid(l) * k * v, C=q))


@dsf.recurrence
def remembered(q: Key, k: Key, v: Value, a: Scalar):
    """Values of one and two tokens ago, within functions and in every part of the system."""
    write = (k + 0.5 * prev(prev(k))) * prev(v) + prev(exp(prev(a)) * k) * v
    return System(A=sigmoid(a + prev(a)), B=write, C=prev(q) + q, D=prev(v))


FINITE = [
    identity, constant, scalar, gated, signed, key_diagonal, read_before, value_diagonal, hadamard, dense_write,
    two_writes, vector, delta, gated_delta, key_delta, rank_one, channel_delta, product, normalised, stabilised,
    stabilised_delta, normalised_product, turned, turned_delta, turned_blocks, trapezoid, remembered,
]  # fmt: skip
ALL = [*FINITE, softmax]


def sample(
    recurrence: dsf.Recurrence, B: int = 2, T: int = 6, H: int = 2, dtype: torch.dtype = torch.float64, **sizes: int
) -> dict[str, Tensor]:
    """Random inputs by name; k of unit length, so that corrections neither explode nor vanish."""
    known = {"B": B, "T": T, "H": H} | SIZES | sizes
    known["N"] = recurrence.spec.keys_of(known["N"])
    known["N/2"] = known["N"] // 2
    inputs = {}
    for i in recurrence.spec.inputs:
        x = torch.randn([known.get(axis, i.kind.steps) for axis in i.kind.layout()], dtype=torch.float64)
        inputs[i.name] = (F.normalize(x, dim=-1) if i.name == "k" else x).to(dtype)
    return inputs


def tokens_of(recurrence: dsf.Recurrence, inputs: dict[str, Tensor], cut: slice) -> dict[str, Tensor]:
    """The inputs of some tokens; Params as they are."""
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {name: x[:, cut] if name in timed else x for name, x in inputs.items()}
