"""Recurrences of papers that are not in the zoo, and what one step may consist of, each declared in at most ten lines.

Every formula is written again from its paper as a loop over tokens of one head.
"""

import inspect
import math

import mixer_inputs
import pytest
import torch
from torch import eye, zeros

import dsf
from dsf import (
    I,
    Key,
    Pair,
    Param,
    Scalar,
    System,
    Value,
    atan2,
    diag,
    dot,
    exp,
    mixers,
    outer,
    pair,
    ratio,
    sigmoid,
    sqrt,
    taylor_features,
    turn,
)


@dsf.recurrence
def metala(q: Key, a: Key, v: Value, w: Param[Key]) -> System:
    """MetaLA (Chou et al., arXiv 2411.10741): keys are what the decay leaves, and a token sees itself once more."""
    return System(A=diag(sigmoid(a)), B=sigmoid(-a) * v, C=q, D=sigmoid(dot(q, w * sigmoid(-a))) * v)


@dsf.recurrence
def based(q: Key, k: Key, v: Value) -> System:
    """Based (Arora et al., arXiv 2402.18668): the Taylor polynomial of exp(q'k / sqrt N), of degree 2."""
    return System(A=I, B=taylor_features(k, 2) * v, C=taylor_features(q * dsf.N**-0.5, 2), normalize=ratio)


@dsf.recurrence
def slots_of_keys(q: Key, k: Key, s: Value, g: Value) -> System:
    """What GSA, ABC and Raven keep of keys: a sum a slot, slots forget by themselves."""
    return System(A=exp(g), B=k * s, C=q * dsf.N**-0.5)


@dsf.recurrence
def slots_of_values(p: Key, s: Key, v: Value, g: Key) -> System:
    """What they keep of values, read by the softmax over the slots."""
    return System(A=diag(exp(g)), B=s * v, C=p)


@dsf.recurrence
def linoss(u: Pair, w: Param[Pair], step: Param[Pair], c: Param[Key, Value]) -> System:
    """LinOSS-IM (Rusch and Rus, arXiv 2410.03943): oscillators (z, w y / step) turn by atan w and shrink."""
    shrink = 1 / (1 + w * w)
    return System(A=diag(sqrt(shrink)) @ turn(atan2(w, 1.0)), B=shrink * step * u * pair(1.0, w), C=c)


@dsf.recurrence
def gated_oja(q: Key, k: Key, v: Value, g: Value, beta: Scalar) -> System:
    """The gated Oja rule of flash-linear-attention: the delta rule with keys and values exchanged, read by keys."""
    return System(A=(I - beta * outer(v, v)) @ diag(exp(g)), B=beta * k * v, C=q)


@dsf.recurrence
def oja_of_parts(q: Key, k: Key, v: Value, b: Value, c: Key, g: Value, o: Value) -> System:
    """The same with what is erased, written and read gated by entry."""
    return System(A=diag(exp(g)) - outer(v, b * v), B=c * k * v, C=q * sigmoid(o))


@dsf.recurrence
def two_writes(q: Key, k1: Key, k2: Key, v1: Value, v2: Value, g: Key) -> System:
    """Two products enter in one step."""
    return System(A=diag(exp(g)), B=k1 * v1 + k2 * v2, C=q)


@dsf.recurrence
def two_reads(q: Key, p: Key, k: Key, v: Value, a: Scalar, g: Value) -> System:
    """The state is read twice, once through a gate of the channels."""
    return System(A=sigmoid(a), B=k * v, C=(q + sigmoid(g) * p) * dsf.N**-0.5, D=v)


@dsf.recurrence
def corrected_reads(q: Key, p: Key, k: Key, v: Value, beta: Scalar, g: Value) -> System:
    """The same of a delta rule, before it writes."""
    return System(A=I - beta * outer(k, k), B=beta * k * v, C=q - g * (q * p), read="before")


@dsf.recurrence
def two_corrections(q: Key, k1: Key, k2: Key, v: Value, b1: Scalar, b2: Scalar) -> System:
    """Both erasures see the state of the last token."""
    return System(A=I - b1 * outer(k1, k1) - b2 * outer(k2, k2), B=b1 * k1 * v, C=q)


def metala_loop(q, a, v, w):
    state = zeros(a.shape[1], v.shape[1])
    for t in range(len(q)):
        alpha = torch.sigmoid(a[t])
        state = alpha[:, None] * state + torch.outer(1 - alpha, v[t])
        yield q[t] @ state + torch.sigmoid(q[t] @ (w * (1 - alpha))) * v[t]


def based_loop(q, k, v):
    x = q @ k.T / math.sqrt(q.shape[1])
    weights = (1 + x + x**2 / 2).tril()
    return weights @ v / weights.sum(1, keepdim=True)


def linoss_loop(u, w, step, c):
    """The implicit step of y'' = -A y + u, A = (w / step)^2, as the paper solves it; c reads z and w y / step."""
    rate, z, y = (w / step) ** 2, zeros(len(w)), zeros(len(w))
    for t in range(len(u)):
        y = (y + step * z + step**2 * u[t]) / (1 + step**2 * rate)
        z = z + step * (u[t] - rate * y)
        yield torch.stack([z, torch.sqrt(rate) * y], -1).flatten() @ c


def gated_oja_loop(q, k, v, g, beta):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        state = state * torch.exp(g[t])
        state = state + beta[t] * torch.outer(k[t] - state @ v[t], v[t])
        yield q[t] @ state


def oja_of_parts_loop(q, k, v, b, c, g, o):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        state = state * torch.exp(g[t]) - torch.outer(state @ (b[t] * v[t]), v[t]) + torch.outer(c[t] * k[t], v[t])
        yield torch.sigmoid(o[t]) * (q[t] @ state)


def two_writes_loop(q, k1, k2, v1, v2, g):
    state = zeros(k1.shape[1], v1.shape[1])
    for t in range(len(q)):
        state = torch.exp(g[t])[:, None] * state + torch.outer(k1[t], v1[t]) + torch.outer(k2[t], v2[t])
        yield q[t] @ state


def two_reads_loop(q, p, k, v, a, g):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        state = torch.sigmoid(a[t]) * state + torch.outer(k[t], v[t])
        yield (q[t] @ state + torch.sigmoid(g[t]) * (p[t] @ state)) / math.sqrt(len(k[t])) + v[t]


def corrected_reads_loop(q, p, k, v, beta, g):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        yield q[t] @ state - g[t] * ((q[t] * p[t]) @ state)
        state = state + beta[t] * torch.outer(k[t], v[t] - k[t] @ state)


def two_corrections_loop(q, k1, k2, v, b1, b2):
    state = zeros(k1.shape[1], v.shape[1])
    for t in range(len(q)):
        move = eye(k1.shape[1]) - b1[t] * torch.outer(k1[t], k1[t]) - b2[t] * torch.outer(k2[t], k2[t])
        state = move @ state + b1[t] * torch.outer(k1[t], v[t])
        yield q[t] @ state


LOOPS = {
    metala: metala_loop,
    based: based_loop,
    linoss: linoss_loop,
    gated_oja: gated_oja_loop,
    oja_of_parts: oja_of_parts_loop,
    two_writes: two_writes_loop,
    two_reads: two_reads_loop,
    corrected_reads: corrected_reads_loop,
    two_corrections: two_corrections_loop,
}
DRAWN = {
    "k": lambda x: x / x.norm(dim=-1, keepdim=True),
    "g": lambda x: -x.abs(),
    "beta": torch.sigmoid,
    "b": torch.sigmoid,
    "w": lambda x: x.abs() + 0.1,
    "step": lambda x: torch.sigmoid(x) + 0.1,
}
DRAWN |= {name: DRAWN["k"] for name in ("k1", "k2")} | {name: torch.sigmoid for name in ("b1", "b2")}
EACH = pytest.mark.parametrize("r", LOOPS, ids=lambda r: r.name)


@pytest.fixture(autouse=True)
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(r, tokens):
    inputs = mixer_inputs.sample(r, tokens=tokens)
    if r in (gated_oja, oja_of_parts):
        inputs["v"] = DRAWN["k"](inputs["v"])
    return {name: DRAWN[name](x) if name in DRAWN else x for name, x in inputs.items()}


@EACH
def test_a_declaration_is_at_most_ten_lines(r):
    made = inspect.getsource(inspect.getmodule(test_a_declaration_is_at_most_ten_lines))
    body = made.split(f"def {r.name}(")[1].split("@dsf.recurrence")[0].split("\n\n\n")[0]
    assert len(body.splitlines()) <= 9


@EACH
@pytest.mark.parametrize("tokens", [1, 19, 67])
def test_every_form_is_the_papers_loop(r, tokens):
    inputs = drawn(r, tokens)
    expected = []
    for b in range(2):
        for h in range(2):
            one = {i.name: inputs[i.name][b, :, h] if i.kind.time else inputs[i.name][h] for i in r.spec.inputs}
            expected.append(torch.stack(list(LOOPS[r](**one))))
    expected = torch.stack(expected).unflatten(0, (2, 2)).movedim(1, 2)
    for form in r.forms:
        torch.testing.assert_close(
            r(**inputs, form=form), expected, rtol=1e-9, atol=1e-9, msg=lambda m, form=form: f"{form}: {m}"
        )


@EACH
def test_every_law_holds(r):
    assert dsf.check(r, examples=1, dtypes=(torch.float64,)).ok


def slots_of_one_head(q, k, v, s, g):
    """GSA (Zhang et al., arXiv 2409.07146), two sums a slot of which the softmax of the first reads the second."""
    keys, values = zeros(s.shape[1], k.shape[1]), zeros(s.shape[1], v.shape[1])
    for t in range(len(q)):
        keys = torch.exp(g[t])[:, None] * keys + torch.outer(s[t], k[t])
        values = torch.exp(g[t])[:, None] * values + torch.outer(s[t], v[t])
        yield torch.softmax(keys @ q[t] / math.sqrt(q.shape[1]), 0) @ values


def slots(q, k, v, s, g):
    read = slots_of_keys(q, k, s, g)
    return slots_of_values(read.softmax(-1), s, v, g)


@pytest.mark.parametrize("law", ["gsa", "abc"])
def test_slot_attention_is_two_recurrences(law):
    q, k = torch.randn(2, 1, 37, 2, 5)
    v, s = torch.randn(1, 37, 2, 7), torch.randn(1, 37, 2, 3)
    if law == "gsa":
        g = torch.nn.functional.logsigmoid(torch.randn(1, 37, 2, 3))
        written = 1 - g.exp()
    else:  # ABC (Peng et al., arXiv 2110.02488): a slot is the average of tokens, weighed by exp(s)
        total = s.logcumsumexp(1)
        g = torch.cat([total[:, :1], total[:, :-1]], 1) - total
        written = (s - total).exp()
    inputs = [x.requires_grad_() for x in (q, k, v, written.detach(), g.detach())]
    found = slots(*inputs)
    heads = [torch.stack(list(slots_of_one_head(*(x[0, :, h] for x in inputs)))) for h in range(2)]
    expected = torch.stack(heads, 1)[None]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    mine, theirs = (torch.autograd.grad(y.sin().sum(), inputs) for y in (found, expected))
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "r", [slots_of_keys, slots_of_values, mixers.comba, mixers.gated_deltanet2], ids=lambda r: r.name
)
def test_every_law_holds_of_slots_and_of_new_members(r):
    assert dsf.check(r, examples=1, dtypes=(torch.float64,)).ok


@pytest.mark.parametrize("r", [two_writes, two_reads], ids=lambda r: r.name)
def test_two_writes_and_two_reads_run_on_the_chunk_kernels(r):
    plan = r.plan(T=256, N=64, P=64, dtype=torch.bfloat16, device="cuda", backend="triton")
    assert plan.form == "chunk" and plan.kernel.startswith("chunk walk")


@dsf.recurrence
def added(q: Key, k: Key, v: Value, a: Param[Scalar], b: Param[Scalar]) -> System:
    return System(A=sigmoid(a + b) * I, B=k * v, C=q)


@pytest.mark.parametrize("form", ["naive", "recurrent", "scan", "chunk", "kernel"])
def test_params_that_are_added_have_gradients_of_their_own(form):
    """An optimizer's clipping of one changes no other."""
    q, k, v = (torch.randn(1, 20, 2, 4, dtype=torch.float64) for _ in range(3))
    a, b = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    added(q, k, v, a, b, form=form).square().sum().backward()
    expected = b.grad.clone()
    a.grad.mul_(2)
    assert torch.equal(b.grad, expected)


@dsf.recurrence
def both(q: Key, r: Key, k: Key, l: Key, v: Value, w: Value, a: Scalar, b: Scalar, d: Value) -> System:
    return System(A=sigmoid(a + b) * I, B=(k + l) * (v + w), C=q + r, D=w + d)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("form", ["naive", "recurrent", "scan", "chunk", "kernel"])
def test_inputs_of_tokens_that_are_added_have_gradients_of_their_own(form, tokens):
    """A second backward pass adds to each of them once."""
    shapes = {i.name: (1, tokens, 2, *(4 for _ in i.kind.axes)) for i in both.spec.inputs}
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values()]
    loss = both(*leaves, form=form).square().sum()
    loss.backward(retain_graph=True)
    expected = [2 * x.grad for x in leaves]
    loss.backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, expected, strict=True))
