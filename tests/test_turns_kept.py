"""Turned declarations and previous values as what a process keeps, names, copies, packs and validates."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from test_turns import EVERY, LINES, ellipses, sample, spiral, turned_kda, two_tokens

import dsf
from dsf import InputError, Key, Pair, Param, Scalar, System, Value, diag, mixers, prev, turn
from dsf.language.derived import by_digest, digest
from dsf.mixers import Layer

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@dsf.recurrence
def bare(q: Key, k: Key, v: Value, a: Scalar, t: Pair) -> System:
    return System(A=a * turn(t), B=k * v, C=q)


@dsf.recurrence
def shared(q: Key, k: Key, v: Value, a: Scalar) -> System:
    """Two tokens' gates may sum to 1."""
    return System(A=a + prev(a), B=k * v, C=q)


def declared(angle="t", sign=1.0, lag=1, b=None):
    @dsf.recurrence(name="one")
    def one(q: Key, k: Key, v: Value, a: Scalar, t: Pair, u: Pair) -> System:
        write = k * v
        for _ in range(lag):
            write = prev(write)
        turned = turn(sign * (t if angle == "t" else u))
        return System(A=dsf.sigmoid(a) * turned, B=k * v + write, C=q, D=dsf.sum_key(t * u))

    return one


# Content


def test_turns_and_previous_values_tell_declarations_apart():
    assert declared().spec is declared().spec
    others = [declared(angle="u"), declared(sign=-1.0), declared(lag=2), declared(lag=0)]
    found = {digest(r.spec) for r in [declared(), *others]}
    assert len(found) == 5
    kept = {digest(r.spec.inner) for r in [declared(), *others]}
    assert kept.isdisjoint(found)


def test_pairs_are_no_keys_in_content():
    @dsf.recurrence(name="kinds")
    def paired(q: Key, k: Key, v: Value, a: Pair) -> System:
        return System(A=diag(dsf.sigmoid(a)), B=k * v, C=q)

    @dsf.recurrence(name="kinds")
    def single(q: Key, k: Key, v: Value, a: Key) -> System:
        return System(A=diag(dsf.sigmoid(a)), B=k * v, C=q)

    @dsf.recurrence(name="kinds")
    def learnt(q: Key, k: Key, v: Value, a: Param[Pair]) -> System:
        return System(A=diag(dsf.sigmoid(a)), B=k * v, C=q)

    assert len({digest(r.spec) for r in (paired, single, learnt)}) == 3


@EVERY
def test_plain_systems_are_known_by_their_content_too(r):
    """A saved graph holds programs of the plain system by its digest."""
    assert by_digest(digest(r.spec.inner)) is r.spec.inner
    assert digest(r.spec.inner) != digest(r.spec)


def test_a_system_with_its_turns_left_is_not_the_declaration():
    left = ellipses.spec.frame.spec
    assert left.made and digest(left) != digest(ellipses.spec)
    assert pickle.loads(pickle.dumps(left)) is left


# Copies


@EVERY
def test_copies_share_what_was_worked_out_and_agree(r):
    x = sample(r)
    y, state = r(**x, return_state=True)
    for other in (copy.copy(r), copy.deepcopy(r), pickle.loads(pickle.dumps(r)), dsf.Recurrence(r.spec)):
        assert other.spec is r.spec and other.spec.inner is r.spec.inner
        again, final = other(**x, return_state=True)
        assert torch.equal(again, y) and torch.equal(final, state)


def test_a_dropped_declaration_is_freed_with_its_plain_systems():
    r = declared(lag=2)
    x = {n: t.requires_grad_() for n, t in sample(r).items()}
    for form in r.forms:
        r(**x, form=form).sum().backward()
    r(**{n: t[:1] for n, t in x.items()}, cu_seqlens=torch.tensor([0, 4, 9]))
    r.trajectory(**{n: t.detach() for n, t in x.items()})
    assert r.plan(**x, backend="auto")
    alive = [weakref.ref(s) for s in (r.spec, r.spec.inner, r.spec.oracle.spec, r.spec.turning.spec)]
    del r
    gc.collect()
    assert not any(ref() for ref in alive)


# Packed sequences, empty ones among them


@pytest.mark.parametrize("bounds", [[0, 0, 4, 4, 9, 9], [0, 9, 9, 9], [0, 0, 0, 9]], ids=str)
@pytest.mark.parametrize("r", LINES, ids=lambda r: r.name)
def test_empty_sequences_keep_their_state(r, bounds):
    x, rows = sample(r, B=1), len(bounds) - 1
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    start = r(**sample(r, B=rows, seed=1), return_state=True)[1]
    for initial, form in itertools.product((None, start), r.forms):
        for packing in (torch.tensor(bounds), dsf.Packing(bounds)):
            y, state = r(**x, initial_state=initial, cu_seqlens=packing, return_state=True, form=form)
            for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
                own = None if initial is None else initial[row : row + 1]
                if begin == end:
                    want = torch.zeros_like(start[:1]) if own is None else own
                    torch.testing.assert_close(state[row : row + 1], want, **CLOSE)
                    continue
                part = {n: t[:, begin:end] if n in timed else t for n, t in x.items()}
                alone, want = r(**part, initial_state=own, return_state=True, form=form)
                torch.testing.assert_close(y[:, begin:end], alone, **CLOSE)
                torch.testing.assert_close(state[row : row + 1], want, **CLOSE)


# dsf.validate


def refused(text, r, x, **options):
    with dsf.validate(), pytest.raises(InputError) as caught:
        r(**x, **options)
    assert text in str(caught.value), str(caught.value)


@EVERY
def test_validated_calls_pass_and_are_the_same(r):
    x = sample(r)
    y, state = r(**x, return_state=True)
    with dsf.validate():
        watched, final = r(**x, return_state=True)
        r(**x, initial_state=state)
        r(**{n: t[:1] if r.spec.inputs[i].kind.time else t for i, (n, t) in enumerate(x.items())},
          cu_seqlens=torch.tensor([0, 4, 4, 9]))  # fmt: skip
    assert torch.equal(watched, y) and torch.equal(final, state)


def test_what_is_out_of_range_is_named_in_the_declarations_words():
    x = sample(bare)
    x["a"] = x["a"].sigmoid()
    with dsf.validate():
        bare(**x)
    x["a"][1, 3, 0] = 1.5
    refused("bare: `a` is 1.5 at batch row 1, token 3, head 0", bare, x)
    x = sample(spiral)
    x["t"][0, 2, 1, 2] = float("nan")
    refused("spiral: `t` is nan at batch row 0, token 2, head 1, pair 2", spiral, x)
    x = sample(turned_kda)
    x["k"][0, 4, 1] *= 3
    refused("turned_kda: `k` has length 3 at batch row 0, token 4, head 1", turned_kda, x)
    x, state = sample(two_tokens), torch.zeros(2, 2, *two_tokens.state_shape(6, 4))
    state[1, 0, 2, 4] = float("inf")  # of what is remembered
    refused("two_tokens: initial_state is inf at row 1, head 0, entry 2, column 4", two_tokens, x, initial_state=state)


def test_demands_that_two_tokens_share_are_held_with_what_came_before():
    x = sample(shared, B=1)
    x["a"] = torch.full_like(x["a"], 0.5)
    x["a"][0, ::2] = 0.2
    with dsf.validate():
        shared(**x)
    x["a"][0, 4] = 0.7  # beside 0.5 of tokens 3 and 5
    refused("shared: `a`: the decay a + prev(a) is 1.2 at batch row 0, token 4, head 0", shared, x)
    refused("is 1.2 at token 5 (sequence 1, its token 1), head 0", shared, x, cu_seqlens=torch.tensor([0, 4, 9]))
    with dsf.validate():  # every sequence begins anew
        shared(**x, cu_seqlens=torch.tensor([0, 4, 5, 9]))
    start = shared(**{n: t[:, 3:4] for n, t in x.items()}, return_state=True)[1]
    refused("is 1.2 at batch row 0, head 0", shared, {n: t[:, 4:5] for n, t in x.items()}, initial_state=start)


# Layers


def test_layers_round_up_to_pairs_and_refuse_what_is_odd():
    layer = Layer(spiral, 12, 4)
    assert layer.dims[1] == 4 and layer.inputs(torch.randn(1, 3, 12))["t"].shape == (1, 3, 4, 2)
    with pytest.raises(InputError, match="spiral takes the Key axis in pairs, so N must be even, got 3"):
        Layer(spiral, 12, 4, d_state=3)


def test_layers_of_turns_begin_without_a_turn_of_their_own_and_copy():
    layer = Layer(mixers.mamba3, 8, 2).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    assert not layer.inputs(torch.zeros_like(x))["angle"].any()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.recurrence.spec is layer.recurrence.spec
        assert torch.equal(other(x)[0], layer(x)[0])
