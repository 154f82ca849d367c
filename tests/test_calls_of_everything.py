"""Every kind of call of what the language grew by: each equals the naive form of its sequences, one by one.

A call is drawn: T odd or 1, packed with empty sequences, in reverse, in groups of heads, from a state and on from the
final one. The truth is put together from naive calls of single sequences whose heads are repeated and tokens turned
round by hand, so that packing, reversal and grouping are no part of it.
"""

import pytest
import structures
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsf
from dsf import (
    I,
    Key,
    Memory,
    Pair,
    Param,
    Scalar,
    System,
    Value,
    diag,
    exp,
    exp_features,
    inner,
    learn,
    norm2,
    outer,
    prev,
    ratio,
    sigmoid,
    softplus,
    taylor_features,
    turn,
)

S = Memory()


@dsf.recurrence
def based(q: Key, k: Key, v: Value):
    """2.5 + x'y + (x'y)^2 / 2 is above 0."""
    features = [taylor_features(x, 2) for x in (k, q)]
    return System(A=I, B=features[0] * v, C=features[1], normalize=ratio)


@dsf.recurrence
def decayed_features(q: Key, k: Key, v: Value, a: Scalar, w: Param[Value]):
    return System(A=sigmoid(a), B=taylor_features(k, 2) * v, C=taylor_features(q, 2), D=w * v)


@dsf.recurrence
def slots(q: Key, k: Key, s: Value, g: Value):
    """The keys of GSA, ABC, Raven."""
    return System(A=exp(-softplus(g)), B=k * s, C=q)


@dsf.recurrence
def oja(q: Key, k: Key, v: Value, g: Value, b: Scalar):
    v = v * dsf.rsqrt(dsf.sum_value(v * v) + 1)
    return System(A=(I - sigmoid(b) * outer(v, v)) @ diag(sigmoid(g)), B=sigmoid(b) * k * v, C=q)


@dsf.recurrence
def two_writes(q: Key, k: Key, l: Key, v: Value, u: Value, g: Key):
    return System(A=diag(sigmoid(g)), B=k * v - sigmoid(g) * l * u, C=q)


@dsf.recurrence
def two_reads(q: Key, p: Key, k: Key, v: Value, b: Scalar, g: Value):
    return System(A=I - sigmoid(b) * outer(k, k), B=sigmoid(b) * k * v, C=q + sigmoid(g) * p)


@dsf.recurrence
def two_corrections(q: Key, k: Key, l: Key, v: Value, a: Scalar):
    n = dsf.l2norm(l)
    return System(A=sigmoid(a) * (I - 0.9 * outer(k, k) - 0.5 * outer(n, n)), B=k * v, C=q)


@dsf.recurrence
def reads_before(q: Key, k: Key, v: Value, a: Key, t: Scalar):
    return System(A=diag(sigmoid(a)) @ turn(t), B=k * prev(v) + prev(prev(k)) * v, C=q + prev(q), read="before")


@dsf.recurrence
def gauged(q: Key, k: Key, v: Value, a: Scalar, t: Pair, w: Param[Pair]):
    return System(A=sigmoid(a) * turn(t + w), B=k * v + 0.5 * prev(k * v), C=q)


@dsf.recurrence
def gauged_reads(q: Key, p: Key, k: Key, v: Value, b: Scalar, t: Scalar, g: Value):
    write = sigmoid(b) * k * v
    return System(A=(I - sigmoid(b) * outer(k, k)) @ turn(t), B=write, C=q + sigmoid(g) * p)


@dsf.recurrence
def windowed(q: Key, k: Key, v: Value, a: Scalar, t: Scalar, w: Param[Value]):
    return System(A=sigmoid(a) * turn(t), B=k * v, C=q, D=w * v, window=5)


@dsf.recurrence
def windowed_ratio(q: Key, k: Key, v: Value):
    return System(A=0.9, B=softplus(k) * v, C=softplus(q), normalize=ratio, window=1)


@dsf.recurrence
def forgetting(q: Key, k: Key, v: Value, f: Scalar, t: Pair):
    return System(A=sigmoid(f) * turn(t), B=exp_features(k) * v, C=exp_features(q), normalize=ratio)


@dsf.recurrence
def sunk(q: Key, k: Key, v: Value, s: Param[Scalar]):
    def rule(num, den, one):
        return num / (den + exp(s) * one)

    return System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=rule, window=6)


@dsf.recurrence
def hebb(q: Key, k: Key, v: Value, a: Scalar, r: Value):
    return learn(-inner(S.T @ k, v), by="hebb", rate=sigmoid(r), decay=sigmoid(a), C=q)


@dsf.recurrence
def gradient(q: Key, k: Key, v: Value, a: Key, w: Param[Scalar]):
    return learn(0.5 * norm2(S.T @ k - v) + 0.05 * norm2(S), by="gradient", rate=sigmoid(w), decay=sigmoid(a), C=q)


@dsf.recurrence
def implicit(q: Key, k: Key, l: Key, v: Value, b: Scalar):
    loss = 0.5 * norm2(S.T @ k - v) + 0.5 * softplus(b) * norm2(S.T @ l)
    return learn(loss, by="implicit", rate=softplus(b), C=q)


@dsf.recurrence
def flow(q: Key, k: Key, v: Value, a: Key, b: Scalar):
    return learn(0.5 * norm2(S.T @ k - v), by="flow", rate=softplus(b), decay=sigmoid(a), C=q)


@dsf.recurrence
def exact(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, w: Param[Key]):
    error = S.T @ k - v
    return learn(0.5 * norm2(error), by="exact", rate=sigmoid(b), decay=sigmoid(a), ridge=1 + softplus(w), C=q)


EVERYTHING = [
    based, decayed_features, slots, oja, two_writes, two_reads, two_corrections, reads_before, gauged, gauged_reads,
    windowed, windowed_ratio, forgetting, sunk, hebb, gradient, implicit, flow, exact,
]  # fmt: skip
H = 4


@st.composite
def calls(draw):
    """Boundaries (None: a batch of two), an odd T, whether it is turned round, the tokens of its state, a seed."""
    tokens = draw(st.sampled_from([1, 3, 9, 17, 21]))
    cuts = draw(st.none() | st.lists(st.integers(0, tokens), max_size=3))
    bounds = None if cuts is None else [0, *sorted(cuts), tokens]
    return bounds, tokens, draw(st.booleans()), draw(st.sampled_from([0, 1, 7])), draw(st.integers(0, 10**6))


def drawn(r, call):
    """Inputs of the tokens that make the state, of the call, and of two tokens after it; Params are one for all three.

    Heads of an input of tokens: some of 1, 2 and all 4, but for one that has all.
    """
    bounds, tokens, _, before, seed = call
    torch.manual_seed(seed)
    timed = [i.name for i in r.spec.inputs if i.kind.time]
    heads = dict(zip(timed, [H] + [(1, 2, H)[(seed + j) % 3] for j in range(len(timed))], strict=False))
    rows = 2 if bounds is None else len(bounds) - 1
    parts = []
    for length, batch in ((before, rows), (tokens, 2 if bounds is None else 1), (2, rows)):
        x = structures.sample(r, B=batch, T=max(length, 1), H=H, N=4, P=2)
        x = {n: x[n][:, :length, : heads[n]] for n in timed}
        parts.append({n: y.contiguous().requires_grad_() for n, y in x.items()})
    params = {n: y.requires_grad_() for n, y in structures.sample(r, T=1, H=H, N=4, P=2).items() if n not in timed}
    return parts, params, rows


def together(r, form, call, parts, params):
    """y of the call, y of the two tokens after it."""
    bounds, _, reverse, before, _ = call
    state = r(**parts[0], **params, form=form, return_state=True)[1] if before else None
    packing = None if bounds is None else torch.tensor(bounds)
    y, state = r(
        **parts[1], **params, initial_state=state, cu_seqlens=packing, reverse=reverse, form=form, return_state=True
    )
    return y, r(**parts[2], **params, initial_state=state, form=form)


def apart(r, call, parts, params, rows):
    """The same of naive calls of one sequence each, with all heads written out."""
    bounds, tokens, reverse, before, _ = call
    parts = [{n: x.repeat_interleave(H // x.shape[2], dim=2) for n, x in part.items()} for part in parts]
    y, after = [], []
    for row in range(rows):
        state = None
        if before:
            first = {n: x[row : row + 1] for n, x in parts[0].items()}
            state = r(**first, **params, form="naive", return_state=True)[1]
        begin, end = (0, tokens) if bounds is None else bounds[row : row + 2]
        if begin < end:
            lead = slice(row, row + 1) if bounds is None else slice(None)
            one = {n: x[lead, begin:end] for n, x in parts[1].items()}
            one = {n: x.flip(1) for n, x in one.items()} if reverse else one
            found, state = r(**one, **params, initial_state=state, form="naive", return_state=True)
            y.append(found.flip(1) if reverse else found)
        last = {n: x[row : row + 1] for n, x in parts[2].items()}
        after.append(r(**last, **params, initial_state=state, form="naive"))
    return torch.cat(y, dim=0 if bounds is None else 1), torch.cat(after)


@pytest.mark.parametrize("r", EVERYTHING, ids=lambda r: r.name)
@settings(max_examples=3)
@given(call=calls())
def test_every_call_is_that_of_its_sequences(r, call):
    parts, params, rows = drawn(r, call)
    leaves = {f"{n} {place}": x for place, part in enumerate(parts) for n, x in part.items()} | params

    def outcome(y, after):
        weights = [torch.sin(1 + torch.arange(x.numel(), dtype=x.dtype)).view_as(x) for x in (y, after)]
        loss = (y * weights[0]).sum() + (after * weights[1]).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return {"y": y.detach(), "after": after.detach()} | dict(zip(leaves, grads, strict=True))

    expected = outcome(*apart(r, call, parts, params, rows))
    for form in r.forms:
        for name, got in outcome(*together(r, form, call, parts, params)).items():
            size = max(1.0, float(expected[name].abs().max())) if got.numel() else 1.0
            error = float((got - expected[name]).abs().max()) / size if got.numel() else 0.0
            assert error < 1e-9, f"{form}, {name}: {error}, {call}"
