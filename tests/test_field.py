"""Recurrences of the field beside the zoo's: declared in at most ten lines, every form the naive one, on what they say.

Their papers' formulas are not written again here (tests/test_declarations.py does that for some): that the language has
the words for them, and that what it makes of them is of the structure that runs fast, is what is held.
"""

import inspect

import pytest

import dsf
from dsf import (
    I,
    Key,
    Memory,
    N,
    Pair,
    Param,
    Scalar,
    Steps,
    System,
    Value,
    bilinear,
    compose,
    diag,
    dot,
    elu1,
    exp,
    exp_features,
    l2norm,
    learn,
    minimum,
    norm2,
    outer,
    prev,
    ratio,
    relu,
    sigmoid,
    softplus,
    sqrt,
    taylor_features,
    turn,
    zoh,
)
from dsf.testing import Example, errors

S = Memory()
DECLARED = []


def declared(structure):
    """Into the table of what is tried."""
    return lambda function: DECLARED.append((function, structure))


@declared("scalar decay")
def mamba3_as_a_sum(q: Key, k: Key, v: Value, dt: Scalar, a: Scalar, lam: Scalar):
    delta, share = softplus(dt), sigmoid(lam)
    decay = exp(-softplus(a) * delta)
    return System(A=decay, B=share * delta * k * v + (1 - share) * decay * prev(delta * k * v), C=q)


@declared("scalar decay")
def mamba3_of_four_writes(q: Key, k: Steps[Key, 4], v: Steps[Value, 4], a: Scalar):
    return System(A=sigmoid(a), B=k[0] * v[0] + k[1] * v[1] + k[2] * v[2] + k[3] * v[3], C=q)


@declared("scalar decay")
def mamba3_of_two_reads(q: Steps[Key, 2], k: Key, v: Value, a: Scalar, o: Steps[Value, 2]):
    return System(A=exp(-minimum(softplus(a), 5.0)), B=k * v, C=q[0] * sigmoid(o[0]) + q[1] * sigmoid(o[1]))


@declared("turned key-diagonal decay")
def complex_mamba(x: Value, dt: Scalar, A_log: Param[Pair], A_imag: Param[Pair], b: Key, c: Key):
    step = zoh((-exp(A_log), A_imag), b, softplus(dt))
    return System(A=step.A, B=step.B * x, C=c)


@declared("turned constant decay")
def retnet_with_rope(q: Key, k: Key, v: Value, g: Param[Scalar], w: Param[Pair]):
    return System(A=sigmoid(g) * turn(w), B=k * v, C=q)


@declared("turned exponential features (N = ∞)")
def rope(q: Key, k: Key, v: Value, w: Param[Pair]):
    return System(A=turn(w), B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=ratio)


@declared("Hadamard")
def s6_bilinear(x: Value, dt: Value, b: Key, c: Key, A_log: Param[Key, Value]):
    step = bilinear(-exp(A_log), b, softplus(dt))
    return System(A=step.A, B=step.B * x, C=c)


@declared("key-diagonal decay + delta")
def kda_of_bounded_gates(q: Key, k: Key, v: Value, f: Key, b: Scalar, A_log: Param[Scalar]):
    k, b = l2norm(k), sigmoid(b)
    return System(A=(I - b * outer(k, k)) @ diag(exp(-5 * sigmoid(exp(A_log) * f))), B=b * k * v, C=l2norm(q))


@declared("scalar decay + delta")
def preconditioned(q: Key, k: Key, v: Value, p: Key, a: Scalar, b: Scalar):
    k, written = l2norm(k), l2norm(k) * sigmoid(p)
    return System(A=sigmoid(a) * (I - sigmoid(b) * outer(written, k)), B=sigmoid(b) * written * v, C=q)


@declared("key-diagonal decay + product")
def kda_product(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], b: Steps[Scalar, 2], g: Key):
    k, b = [l2norm(x) for x in k], [sigmoid(x) for x in b]
    first = System(A=(I - b[0] * outer(k[0], k[0])) @ diag(exp(-softplus(g))), B=b[0] * k[0] * v[0])
    return compose(first, System(A=I - b[1] * outer(k[1], k[1]), B=b[1] * k[1] * v[1], C=q))


@declared("key-diagonal decay")
def rwkv5(r: Key, k: Key, v: Value, w: Param[Key], u: Param[Key]):
    return System(A=diag(exp(-exp(w))), B=k * v, C=r, D=dot(r, u * k) * v, read="before")


@declared("key-diagonal decay")
def rodimus(q: Key, k: Key, v: Value, g: Key, t: Key):
    return System(A=diag(exp(-softplus(g) * sigmoid(t))), B=sqrt(softplus(g)) * l2norm(k) * v, C=q)


@declared("Hadamard")
def fast_weights_of_rank_one_decay(q: Key, k: Key, v: Value, z: Key, f: Value):
    return System(A=sigmoid(z) * sigmoid(f), B=k * v, C=q)


@declared("identity")
def abc_values(p: Key, s: Key, v: Value):
    return System(A=I, B=exp(s) * v, C=sigmoid(p), normalize=ratio)


@declared("value-diagonal decay")
def raven_keys(q: Key, k: Key, r: Value, g: Scalar):
    return System(A=1 - sigmoid(g) * sigmoid(r), B=k * (sigmoid(g) * sigmoid(r)), C=q)


@declared("exponential features (N = ∞), scalar decay in a window of 8")
def forgetting_window_with_a_sink(q: Key, k: Key, v: Value, f: Scalar, s: Param[Scalar]):
    def rule(num, den, one):
        return num / (den + exp(s) * one)

    return System(A=sigmoid(f), B=exp_features(k) * v, C=exp_features(q), window=8, normalize=rule)


@declared("identity in a window of 5")
def linear_window(q: Key, k: Key, v: Value):
    return System(A=I, B=elu1(k) * v, C=elu1(q), normalize=ratio, window=5)


@declared("identity + delta")
def deltaformer_of_taylor(q: Key, k: Key, v: Value, b: Scalar):
    k = taylor_features(l2norm(k), 2)
    return System(A=I - 0.3 * sigmoid(b) * outer(k, k), B=k * v, C=taylor_features(q, 2))


@declared("scalar decay")
def forgetting_taylor(q: Key, k: Key, v: Value, f: Scalar):
    return System(A=sigmoid(f), B=taylor_features(k, 2) * v, C=taylor_features(q, 2), normalize=ratio)


@declared("identity")
def rebased(q: Key, k: Key, v: Value, g: Param[Key], b: Param[Key]):
    return System(A=I, B=(g * k + b) ** 2 * v, C=(g * q + b) ** 2, normalize=lambda num, den: num / (den + 1e-5))


@declared("identity")
def performer(q: Key, k: Key, v: Value):
    return System(A=I, B=(relu(k) + 1e-3) * v, C=relu(q) + 1e-3, normalize=ratio)


@declared("vector (N = 1)")
def aft(q: Value, k: Value, v: Value):
    return System(A=1, B=exp(k) * v, C=sigmoid(q), normalize=ratio, drive=v)


@declared("vector (N = 1)")
def short_convolution(x: Value, w: Param[Value], u: Param[Value], z: Param[Value]):
    return System(A=0, B=w * x + u * prev(x) + z * prev(prev(x)), C=1)


@declared("identity + low-rank")
def write_and_forget(q: Key, k: Key, l: Key, v: Value, b: Scalar):
    loss = 0.5 * norm2(S.T @ k - v) + 0.5 * norm2(S.T @ l)
    return learn(loss, by="gradient", rate=0.2 * sigmoid(b), C=q)


@declared("turned key-diagonal decay (2 x 2 blocks)")
def gateloop(q: Key, k: Key, v: Value, a: Key, t: Pair):
    return System(A=diag(sigmoid(a)) @ turn(t), B=k * v, C=q)


@pytest.mark.parametrize("function, structure", DECLARED, ids=lambda x: getattr(x, "__name__", ""))
def test_the_fields_recurrences_are_declared_in_ten_lines_and_agree_in_every_form(function, structure):
    lines = [x for x in inspect.getsource(function).splitlines() if x.strip() and not x.startswith("@")]
    r = dsf.recurrence(function)
    assert len(lines) <= 10 and r.spec.structure == structure
    example = Example(batch=2, tokens=19, heads=2, n=3, p=2, initial=True, seed=5)
    for form in r.forms[1:]:
        found = errors(r, "forms", form, example)
        assert "y" in found and max(found.values()) < 1e-9, (form, found)
