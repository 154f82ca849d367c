"""The decode kernel in Triton's interpreter: token by token it is the recurrence, for every matrix mixer."""

import pytest
import torch
from interpreted import interpreted
from matrix_family import UNSEEN
from mixer_inputs import sample
from scan_family import bounded, weighted
from step_family import FRAMED, assert_same, decode, skipping, tokens_of
from structures import normalised, normalised_product, stabilised_delta

import dsf
from dsf import Key, System, Value, exp, mixers
from dsf.triton.print_step import step_refusal

pytestmark = interpreted
ONE_LEVEL = [normalised, normalised_product, stabilised_delta]  # gains or decays by key, one running maximum a head
BY_CHANNEL = [bounded, weighted, skipping]  # of normalisers, running maxima and gains of D
DECODED = [e.recurrence for e in mixers.ZOO if step_refusal(e.recurrence.spec) is None]


@dsf.recurrence
def channels_forget(q: Key, k: Key, v: Value, g: Value) -> System:
    """In no library: a decay a channel, and a second thing that is written."""
    return System(A=exp(-(g**2)), B=k * v + q * g, C=q)


@dsf.recurrence
def turned_by_a_number(q: Key, k: Key, v: Value, g: Key) -> System:
    """An angle of no input, whose sine and cosine are those of a number."""
    return System(A=dsf.diag(dsf.sigmoid(g)) @ dsf.turn(0.5), B=k * v, C=q)


EVERY = [turned_by_a_number, *UNSEEN, *DECODED, channels_forget, *FRAMED, *ONE_LEVEL, *BY_CHANNEL]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recurrence", EVERY, ids=lambda r: r.name)
def test_token_by_token_is_the_recurrence(recurrence, in_place):
    given = {n: x.float() for n, x in sample(recurrence, tokens=5).items()}
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    first = {n: x[:, :1] if n in timed else x for n, x in given.items()}
    assert "decode step" in recurrence.plan(**first, backend="triton").kernel
    y, state = decode(recurrence, given, in_place=in_place)
    wide = {n: x.double() for n, x in given.items()}
    expected, last = recurrence(**wide, return_state=True, form="naive")
    assert_same(y.double(), expected)
    if not recurrence.spec.inner.is_stabilised:
        assert_same(state.double(), last)
    elif recurrence not in ONE_LEVEL:  # whose other rows' maxima are that of the head
        assert_same(recurrence.true_state(state.double(), 4), recurrence.true_state(last, 4))


@pytest.mark.parametrize("few", [0, 128])
@pytest.mark.parametrize("recurrence", [mixers.mlstm, *FRAMED, *BY_CHANNEL], ids=lambda r: r.name)
def test_sizes_that_are_no_powers_of_two_in_several_blocks(recurrence, few, monkeypatch):
    """In place, a program walks all blocks of a head; for few heads blocks have a program each."""
    from dsf.kernels.triton.pointwise import step_ops

    monkeypatch.setattr(step_ops, "FEW_HEADS", few)
    monkeypatch.setattr(step_ops, "MANY_BLOCKS", 2)
    monkeypatch.setattr(step_ops, "tile", lambda n, *_: (1 if n == 1 else 4, 2, 1))
    wide = {i.name for i in recurrence.spec.inputs if "P" in i.kind.layout()}
    given = {n: x.float() for n, x in sample(recurrence, tokens=4).items()}
    given |= {n: torch.cat([given[n]] * 2, -1)[..., :7] for n in wide}
    apart, new = decode(recurrence, given)
    together, state = decode(recurrence, given, in_place=True)
    assert apart.shape[-1] == 7
    assert_same(apart, recurrence(**given, form="naive"))
    assert_same(apart, together)
    assert torch.equal(new, state)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recurrence", [*DECODED, *FRAMED], ids=lambda r: r.name)
def test_several_heads_of_a_program(recurrence, in_place, monkeypatch):
    """Of five, so that the last program has fewer than it could take."""
    from dsf.kernels.triton.pointwise import step_ops

    monkeypatch.setattr(step_ops, "_heads_of", lambda *_: 4)
    given = {n: x.float() for n, x in sample(recurrence, tokens=3, heads=5).items()}
    y, _ = decode(recurrence, given, in_place=in_place)
    assert_same(y.double(), recurrence(**{n: x.double() for n, x in given.items()}, form="naive"))


ALONE = [mixers.mamba3, mixers.mamba3_mimo, mixers.s5, mixers.rwkv4, *FRAMED, *BY_CHANNEL]


@pytest.mark.parametrize("bounds", [[0, 1], [0, 0, 1], [0, 1, 1]], ids=str)
@pytest.mark.parametrize("recurrence", ALONE, ids=lambda r: r.name)
def test_one_packed_token(recurrence, bounds):
    """Beside sequences that have none."""
    rows = [{n: x.float() for n, x in sample(recurrence, batch=b, tokens=3).items()} for b in (1, len(bounds) - 1)]
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    token = {n: x[:, :1] if n in timed else x for n, x in rows[0].items()}
    before = recurrence(**rows[1], return_state=True, form="naive")[1].contiguous()
    how = {"initial_state": before, "return_state": True, "cu_seqlens": torch.tensor(bounds)}
    with torch.no_grad():
        found = recurrence(**token, **how, backend="triton")
    wide = {n: x.double() for n, x in token.items()}
    y, last = recurrence(**wide, **how | {"initial_state": before.double()}, form="naive")
    torch.testing.assert_close(found[0].double(), y, rtol=1e-5, atol=1e-5)
    scaled = recurrence.spec.inner.is_stabilised
    got, want = (recurrence.true_state(x, 4) if scaled else x for x in (found[1].double(), last))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recurrence", [mixers.mamba3, *FRAMED], ids=lambda r: r.name)
def test_one_tensor_for_several_inputs(recurrence):
    """In two ways of calling that differ only in which inputs are one tensor; the third call is a remembered one."""
    kinds = {i.name: i.kind for i in recurrence.spec.inputs}
    given = {n: x.float() for n, x in sample(recurrence, tokens=3).items()}
    same = {n: next(m for m in given if kinds[m] == kinds[n]) for n in given}
    for names in ({n: n for n in given}, same):
        now = {n: given[m] for n, m in names.items()}
        y, _ = decode(recurrence, now, in_place=True)
        assert_same(y.double(), recurrence(**{n: x.double() for n, x in now.items()}, form="naive"))


@pytest.mark.parametrize("recurrence", [mixers.deltanet, mixers.s6, mixers.dss], ids=lambda r: r.name)
def test_the_first_call_takes_inputs_by_name_in_any_order(recurrence):
    """Later calls of these shapes find them in order."""
    given = {n: x.float() for n, x in reversed(sample(recurrence, tokens=1, batch=3, heads=5).items())}
    found = [recurrence(**given, backend="triton") for _ in range(2)]
    assert_same(found[0].double(), recurrence(**{n: x.double() for n, x in given.items()}, form="naive"))
    assert torch.equal(*found)


def test_programs_take_several_heads_where_these_are_small():
    from dsf.kernels.triton.pointwise.step_ops import _heads_of

    assert [_heads_of(4, 1024, batch) for batch in (1, 16, 128, 1024)] == [1, 16, 128, 128]
    assert _heads_of(64, 1024, 128) == 8 and _heads_of(4096, 1024, 128) == _heads_of(4, 1, 4096) == 1
    assert _heads_of(4, 3, 4096) == 4


def test_grouped_heads_and_strided_states():
    gated = mixers.gated_deltanet
    given = {n: x.float() for n, x in sample(gated, tokens=3, heads=4).items()}
    given["k"] = given["k"][:, :, ::2]
    shared = given | {"k": given["k"].repeat_interleave(2, 2)}
    state = torch.randn(2, 4, 4, 3).transpose(-1, -2)
    first = {n: x[:, 0] for n, x in given.items()}
    y, new = gated.step(state, **first, backend="triton")
    expected, last = gated.step(state.contiguous(), **{n: x[:, 0] for n, x in shared.items()}, backend="triton")
    assert_same(y, expected)
    assert_same(new, last)


def test_overwriting_is_refused_where_it_would_lose_something():
    gated = mixers.gated_deltanet
    first = {n: x[:, 0].float() for n, x in sample(gated, tokens=1).items()}
    state = torch.zeros(2, 2, 3, 4)
    with pytest.raises(dsf.InputError, match="contiguous"):
        gated.step(torch.zeros(2, 2, 4, 3).transpose(-1, -2), **first, in_place=True)
    with pytest.raises(dsf.InputError, match="gradient"):
        gated.step(state.requires_grad_(), **first, in_place=True)


def test_elementwise_systems_take_many_channels_and_overwrite_their_state():
    for name, n in (("s6", 3), ("rg_lru", 1)):
        recurrence = mixers.get(name).recurrence
        given = {i: x.float()[..., :1].expand(*x.shape[:-1], 1500) if x.shape[-1] == 4 else x.float()
                 for i, x in sample(recurrence, tokens=1, batch=1).items()}  # fmt: skip
        first, state = tokens_of(recurrence, given, 0), torch.randn(1, 2, n, 1500)
        expected, new = recurrence.step(state, **first, backend="torch")
        y, same = recurrence.step(state, **first, in_place=True, backend="triton")
        assert same is state
        assert_same(y, expected)
        assert_same(state, new)


@pytest.mark.parametrize("name", ["mlstm", "gated_delta_product"])
def test_operators_pass_opcheck(name):
    from dsf.kernels.triton.pointwise.step_ops import matrix_step, matrix_step_in_place
    from dsf.triton.step import program_of as step_of

    recurrence = mixers.get(name).recurrence
    given = sample(recurrence, tokens=1)
    operands = [given[i.name].float() for i in recurrence.spec.inputs]
    state = torch.zeros(2, 2, *recurrence.state_shape(N=3, P=4))
    torch.library.opcheck(matrix_step, (operands, state, step_of(recurrence.spec)[1]))
    torch.library.opcheck(matrix_step_in_place, (operands, state, step_of(recurrence.spec)[1]))


def test_angles_that_are_numbers_in_calls():
    given = {n: x.float().requires_grad_() for n, x in sample(turned_by_a_number, tokens=3).items()}
    wide = {n: x.detach().double().requires_grad_() for n, x in given.items()}
    y, expected = turned_by_a_number(**given, backend="triton"), turned_by_a_number(**wide, form="naive")
    assert_same(y.double(), expected)
    for a, b in zip(
        *(torch.autograd.grad(x.sum(), [*of.values()]) for x, of in ((y, given), (expected, wide))), strict=True
    ):
        assert_same(a.double(), b)
