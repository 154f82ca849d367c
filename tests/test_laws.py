"""The law of forms, structure by structure: naive == recurrent == scan == chunk == kernel, forward and backward.

One recurrence for each row of the compiler's table and each way the rows can be combined. The laws are those of
dsf.check; here they also meet extreme decays over thousands of tokens.
"""

import dataclasses

import pytest
import torch

import dsf
from dsf import (
    I,
    Key,
    Param,
    Scalar,
    Steps,
    System,
    Value,
    abs,
    compose,
    diag,
    dot,
    elu1,
    exp,
    exp_features,
    l2norm,
    logsigmoid,
    maximum,
    mixers,
    outer,
    ratio,
    sigmoid,
    silu,
    softplus,
    taylor_features,
)  # fmt: skip
from dsf.checking.examples import Example
from dsf.checking.laws import LAWS
from dsf.checking.measure import Subject
from dsf.checking.ranges import ranges_of

# ---- one recurrence a structure --------------------------------------------------------------------------------


@dsf.recurrence
def identity(q: Key, k: Key, v: Value) -> System:
    return System(A=I, B=k * v, C=q)


@dsf.recurrence
def constant(q: Key, k: Key, v: Value, slope: Param[Scalar]) -> System:
    return System(A=exp(-slope), B=k * v, C=q)


@dsf.recurrence
def scalar(q: Key, k: Key, v: Value, alpha: Scalar) -> System:
    return System(A=alpha, B=k * v, C=q)


@dsf.recurrence
def scalar_log(q: Key, k: Key, v: Value, g: Scalar) -> System:
    return System(A=exp(g), B=k * v, C=q)


@dsf.recurrence
def negative_scalar(q: Key, k: Key, v: Value, a: Scalar) -> System:
    return System(A=2 * sigmoid(a) - 1, B=k * v, C=q)


@dsf.recurrence
def key_diagonal(q: Key, k: Key, v: Value, alpha: Key) -> System:
    return System(A=diag(alpha), B=k * v, C=q)


@dsf.recurrence
def key_diagonal_log(q: Key, k: Key, v: Value, g: Key) -> System:
    return System(A=diag(exp(g)), B=k * v, C=q)


@dsf.recurrence
def value_diagonal(q: Key, k: Key, v: Value, alpha: Value) -> System:
    return System(A=alpha, B=k * v, C=q)


@dsf.recurrence
def value_diagonal_log(q: Key, k: Key, v: Value, g: Value) -> System:
    return System(A=exp(g), B=k * v, C=q)


@dsf.recurrence
def hadamard(q: Key, k: Key, v: Value, dt: Value, rate: Param[Key, Value], D: Param[Value]) -> System:
    delta = softplus(dt)
    return System(A=exp(-exp(rate) * delta), B=k * (delta * v), C=q, D=D * v)


@dsf.recurrence
def hadamard_rank_one_gate(q: Key, k: Key, v: Value, beta: Value) -> System:
    eps = beta / (1 + beta * dot(k, k))
    return System(A=1 - eps * k**2, B=k * (eps * v), C=q)


@dsf.recurrence
def vector(v: Value, f: Value, o: Value) -> System:
    return System(A=sigmoid(f), B=sigmoid(-f) * v, C=silu(o))


@dsf.recurrence
def vector_scalar_gate(v: Value, alpha: Scalar) -> System:
    return System(A=alpha, B=(1 - alpha) * v, C=1)


@dsf.recurrence
def dense_injection(q: Key, k: Key, v: Value, alpha: Scalar) -> System:
    return System(A=alpha, B=dsf.tanh(k * v), C=q)


@dsf.recurrence
def dense_injection_key_decay(q: Key, k: Key, v: Value, alpha: Key) -> System:
    return System(A=diag(alpha), B=maximum(k, v), C=q)


@dsf.recurrence
def channel_readout(q: Key, o: Value, k: Key, v: Value, alpha: Scalar) -> System:
    return System(A=alpha, B=k * v, C=q * o)


@dsf.recurrence
def two_terms(q: Key, k: Key, v: Value, u: Key, w: Value, alpha: Scalar) -> System:
    return System(A=alpha, B=k * v - u * w, C=q)


@dsf.recurrence
def delta(q: Key, k: Key, v: Value, beta: Scalar) -> System:
    return System(A=I - beta * outer(k, k), B=k * (beta * v), C=q)


@dsf.recurrence
def scalar_delta(q: Key, k: Key, v: Value, alpha: Scalar, beta: Scalar) -> System:
    return System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v), C=q)


@dsf.recurrence
def delta_normalised_inside(q: Key, k: Key, v: Value, g: Scalar, b: Scalar) -> System:
    key = l2norm(k)
    return System(A=exp(logsigmoid(g)) * (I - sigmoid(b) * outer(key, key)), B=key * (sigmoid(b) * v), C=q)


@dsf.recurrence
def key_decay_before_delta(q: Key, k: Key, v: Value, alpha: Key, beta: Scalar) -> System:
    return System(A=(I - beta * outer(k, k)) @ diag(alpha), B=k * (beta * v), C=q)


@dsf.recurrence
def key_decay_after_delta(q: Key, k: Key, v: Value, g: Key, beta: Scalar) -> System:
    return System(A=diag(exp(g)) @ (I - beta * outer(k, k)), B=k * (beta * v), C=q)


@dsf.recurrence
def value_decay_delta(q: Key, k: Key, v: Value, alpha: Value, beta: Scalar) -> System:
    return System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v), C=q)


@dsf.recurrence
def delta_by_channel(q: Key, k: Key, v: Value, beta: Value) -> System:
    return System(A=I - beta * outer(k, k), B=k * (beta * v), C=q)


@dsf.recurrence
def rank_one(q: Key, w: Key, k: Key, v: Value, kappa: Key, a: Key) -> System:
    return System(A=diag(exp(-0.6 * sigmoid(w))) - outer(sigmoid(a) * kappa, kappa), B=k * v, C=q)


@dsf.recurrence
def low_rank(q: Key, k: Key, u: Key, v: Value, beta: Scalar, gamma: Scalar) -> System:
    return System(A=I - beta * outer(k, k) - gamma * outer(u, u), B=k * (beta * v), C=q)


@dsf.recurrence
def product(q: Key, k: Key, u: Key, v: Value, beta: Scalar, gamma: Scalar) -> System:
    return System(A=(I - gamma * outer(u, u)) @ (I - beta * outer(k, k)), B=k * (beta * v), C=q)


@dsf.recurrence
def micro_steps(q: Key, k: Steps[Key, 3], v: Steps[Value, 3], beta: Steps[Scalar, 3], alpha: Scalar) -> System:
    first, *rest = (System(A=I - b * outer(x, x), B=x * (b * y), C=q) for x, y, b in zip(k, v, beta, strict=True))
    *middle, last = rest
    first = System(A=alpha * (I - beta[0] * outer(k[0], k[0])), B=first.B)
    return compose(first, *(System(A=s.A, B=s.B) for s in middle), last)


@dsf.recurrence
def micro_steps_decay(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], alpha: Steps[Scalar, 2]) -> System:
    return compose(System(A=alpha[0], B=k[0] * v[0]), System(A=alpha[1], B=k[1] * v[1], C=q))


@dsf.recurrence
def read_before(q: Key, k: Key, v: Value, w: Key, u: Param[Key]) -> System:
    return System(A=diag(exp(-exp(w))), B=k * v, C=q, D=dot(q, u * k) * v, read="before")


@dsf.recurrence
def read_before_delta(q: Key, k: Key, v: Value, alpha: Scalar, beta: Scalar) -> System:
    return System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v), C=q, read="before")


@dsf.recurrence
def normalised(q: Key, k: Key, v: Value) -> System:
    return System(A=I, B=elu1(k) * v, C=elu1(q), normalize=ratio)


@dsf.recurrence
def normalised_by_channel(q: Key, k: Key, v: Value, alpha: Value) -> System:
    return System(A=alpha, B=k * v, C=q, normalize=ratio)


@dsf.recurrence
def stabilised(q: Key, k: Key, v: Value, i: Scalar, f: Scalar) -> System:
    rule = lambda num, den, one: num / maximum(abs(den), one)  # noqa: E731
    return System(A=sigmoid(f), B=exp(i) * k * v, C=q, normalize=rule)


@dsf.recurrence
def stabilised_log(q: Key, k: Key, v: Value, i: Scalar, g: Scalar) -> System:
    rule = lambda num, den, one: num / maximum(abs(den), one)  # noqa: E731
    return System(A=exp(g), B=exp(i) * k * v, C=q, normalize=rule)


@dsf.recurrence
def stabilised_vector(k: Value, v: Value, w: Param[Value], u: Param[Value]) -> System:
    decay = exp(-exp(w))
    return System(A=decay, B=exp(k) * v, C=1, D=exp(u + k) * v, read="before", normalize=ratio, drive=v)


@dsf.recurrence
def softmax(q: Key, k: Key, v: Value) -> System:
    return System(A=I, B=exp_features(k) * v, C=exp_features(q * dsf.N**-0.5), normalize=ratio)


@dsf.recurrence
def taylor(q: Key, k: Key, v: Value) -> System:
    return System(A=I, B=taylor_features(k, 2) * v, C=taylor_features(q, 2), normalize=ratio)


STRUCTURES = [x for x in globals().values() if isinstance(x, dsf.Recurrence)]
LONG = [r for r in STRUCTURES if r not in (softmax, taylor)]

ALL = pytest.mark.parametrize("r", STRUCTURES, ids=lambda r: r.name)


def holds(r, law, example, forms=None):
    """Every measure of a law on one example, in every form, is within its tolerance."""
    subject = Subject(r, ranges_of(r.spec))
    for form in forms or r.forms:
        broken = [m for m in LAWS[law].measure(subject, form, example) if not m.ok]
        assert not broken, f"{form}: {broken}"


def test_the_table_names_every_structure():
    found = {r.spec.structure for r in STRUCTURES}
    for part in ("identity", "constant decay", "scalar decay", "key-diagonal decay", "value-diagonal decay", "Hadamard",
                 "vector (N = 1)", "+ delta", "+ rank-one", "+ low-rank", "+ product", "exponential features (N = ∞)",
                 "identity + delta", "scalar decay + delta", "key-diagonal decay + delta"):  # fmt: skip
        assert any(part in s for s in found), f"{part} is in none of {sorted(found)}"


@ALL
@pytest.mark.parametrize("tokens", [1, 37, 65])
def test_every_form_and_gradient_equals_the_naive_one(r, tokens):
    timed = [i.name for i in r.spec.inputs if i.kind.time]
    example = Example(
        batch=2, tokens=tokens, heads=2, n=3, p=2, groups={timed[1]: 1}, initial=tokens != 37, seed=tokens
    )
    holds(r, "forms", example)
    holds(r, "finite", example)


@ALL
def test_no_form_sees_the_future(r):
    holds(r, "causality", Example(batch=2, tokens=35, heads=2, n=3, p=2, initial=True, cuts=(20,), seed=3))


@ALL
def test_a_sequence_in_pieces_or_packed_is_the_whole(r):
    example = Example(batch=2, tokens=38, heads=2, n=3, p=2, initial=True, cuts=(1, 18, 21), seed=4)
    holds(r, "split", example)
    holds(r, "packed", example)
    holds(r, "step", dataclasses.replace(example, tokens=6, cuts=()), forms=["recurrent"])


@ALL
def test_gradients_are_finite_differences(r):
    holds(r, "gradcheck", Example(tokens=2, heads=2, n=2, p=2, initial=True, seed=5))


@pytest.mark.parametrize("r", [mixers.fox, mixers.alibi], ids=lambda r: r.name)
def test_gradients_of_caches_with_a_bias_are_finite_differences(r):
    holds(r, "gradcheck", Example(tokens=2, heads=2, n=2, p=3, initial=True, seed=5))


# ---- extremes ----------------------------------------------------------------------------------------------------


def extreme_decays(shape: list[int]) -> torch.Tensor:
    """Decays [B, T, H = 3, ...] of one kind a head: next to 0, next to 1, and runs of zeros, ones and both.

    Head 0: down to 1e-30 and exactly 0. Head 1: up to 1 - 1e-16 and exactly 1.
    """
    u = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tiny = torch.where(u < 0.05, 0.0, 10 ** (-30 * u))
    near = torch.where(u < 0.05, 1.0, 1 - 10 ** (-16 * u))
    runs = torch.stack([torch.where(u < 0.9, 1.0, tiny), near, torch.where(u < 0.5, 0.0, u), tiny])
    turn = torch.arange(shape[1]) // 97 % len(runs)
    mixed = runs[turn, :, torch.arange(shape[1])].movedim(0, 1)
    return torch.stack([tiny[:, :, 0], near[:, :, 1], mixed[:, :, 2]], dim=2)


class Extreme(Subject):
    """A subject whose decays are extreme."""

    def inputs(self, example):
        found = super().inputs(example)
        if "g" in found:  # a log decay, of which exp underflows to an exact 0
            found["g"] = extreme_decays(list(found["g"].shape)).log().clamp(min=-1e4).to(found["g"].dtype)
        else:
            found["alpha"] = extreme_decays(list(found["alpha"].shape)).to(found["alpha"].dtype)
        return found


SINGLE = [
    scalar, key_diagonal, value_diagonal, scalar_log, key_diagonal_log, value_diagonal_log, vector_scalar_gate,
    scalar_delta, key_decay_before_delta, key_decay_after_delta, normalised_by_channel, stabilised_log,
]  # fmt: skip
DOUBLE = [scalar_log, key_diagonal, value_diagonal, key_decay_before_delta]  # float32 is the harder
EXTREME = [(r, "float32") for r in SINGLE] + [(r, "float64") for r in DOUBLE]
# The oracle takes one token after the other: 4096 of them for one of each way to sum decays, for the others several
# segments of the scan and many chunks.
LONG = [scalar_log, value_diagonal, key_decay_before_delta, stabilised_log]


@pytest.mark.parametrize(("r", "dtype"), EXTREME, ids=lambda x: getattr(x, "name", x))
def test_extreme_decays_over_many_tokens_stay_finite_and_exact(r, dtype):
    subject = Extreme(r, ranges_of(r.spec))
    regimes = {"k": "repeated"} if "beta" in {i.name for i in r.spec.inputs} else {}
    tokens = 4096 if r in LONG and dtype == "float32" else 1055
    example = Example(tokens=tokens, heads=3, n=2, p=2, dtype=dtype, regimes=regimes, initial=True, seed=6)
    for form in ("recurrent", "scan", "chunk") if r in DOUBLE else ("scan", "chunk"):
        broken = [m for law in ("finite", "forms") for m in LAWS[law].measure(subject, form, example) if not m.ok]
        assert not broken, f"{form}: {broken}"
