"""reverse=True: every sequence from its last token to its first, in calls, plans, graphs, layers and over ranks."""

import pytest
import torch
from structures import ALL, FINITE, gated_delta, sample, softmax

import dsf
from dsf import Key, Scalar, System, Value, mixers
from dsf.checking.examples import Example
from dsf.checking.laws import LAWS
from dsf.checking.measure import Subject
from dsf.checking.ranges import ranges_of
from dsf.kernels.attention import KVCache
from dsf.parallel import Simulated
from dsf.parallel.collectives import Gather, Hop, Swap, mirrored, together

PACKED = Example(tokens=13, heads=2, n=4, p=2, initial=True, cuts=(4, 4, 9), seed=1)
PIECES = Example(batch=2, tokens=12, heads=2, n=4, p=2, initial=True, cuts=(5, 6), seed=2)


def turned(inputs, recurrence):
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {n: x.flip(1) if n in timed else x for n, x in inputs.items()}


@pytest.mark.parametrize("recurrence", ALL, ids=lambda r: r.name)
def test_every_structure_in_every_form(recurrence):
    subject = Subject(recurrence, ranges_of(recurrence.spec))
    for form in recurrence.forms[1:]:
        for example in (PACKED, PIECES):
            broken = [m for m in LAWS["reverse"].measure(subject, form, example) if not m.ok]
            assert not broken, (form, broken)


def test_the_law_notices_a_call_that_runs_forward(monkeypatch):
    monkeypatch.setattr(
        dsf.Recurrence, "_run_backwards", lambda self, *given: dsf.Recurrence._run(self, *given), raising=True
    )
    for example in (PACKED, PIECES):
        found = LAWS["reverse"].measure(Subject(gated_delta, ranges_of(gated_delta.spec)), "chunk", example)
        assert not all(m.ok for m in found)


def test_a_state_comes_from_behind_the_last_token():
    """S_t = A_t S_{t+1} + B_t, written out."""
    torch.manual_seed(0)

    @dsf.recurrence
    def decayed(q: Key, k: Key, v: Value, a: Scalar) -> System:
        return System(A=a, B=k * v, C=q, read="before")

    q, k, v = torch.randn(3, 2, 9, 1, 3, dtype=torch.float64)
    a = torch.rand(2, 9, 1, dtype=torch.float64)
    start = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    y, final = decayed(q, k, v, a, initial_state=start, return_state=True, reverse=True)
    S = start[:, 0]
    for t in range(8, -1, -1):
        torch.testing.assert_close(y[:, t, 0], (q[:, t, 0, None] @ S)[:, 0])
        S = a[:, t, 0, None, None] * S + k[:, t, 0, :, None] * v[:, t, 0, None]
    torch.testing.assert_close(final[:, 0], S)


def test_softmax_attention_sees_what_comes_later():
    q, k, v = torch.randn(3, 1, 11, 2, 4, dtype=torch.float64)
    bounds = torch.tensor([0, 4, 4, 11])
    y, cache = mixers.softmax_attention(q, k, v, reverse=True, return_state=True, cu_seqlens=bounds)
    for row, (a, b) in enumerate(((0, 4), (4, 4), (4, 11))):
        assert int(cache.lengths[row]) == b - a
        scores = torch.einsum("thn,jhn->htj", q[0, a:b], k[0, a:b]) * 4**-0.5
        later = torch.ones(b - a, b - a, dtype=torch.bool).triu()
        expected = torch.einsum("htj,jhp->thp", scores.masked_fill(~later, -torch.inf).softmax(-1), v[0, a:b])
        torch.testing.assert_close(y[0, a:b], expected)
    more, _ = mixers.softmax_attention(q, k, v, reverse=True, initial_state=cache, cu_seqlens=bounds, return_state=True)
    assert isinstance(cache, KVCache) and not torch.allclose(more, y)


def test_packings_and_bounds_of_any_kind():
    inputs = sample(gated_delta, B=1, T=12)
    state = gated_delta(**sample(gated_delta, B=4, T=3), return_state=True)[1]
    found = [
        gated_delta(**inputs, reverse=True, cu_seqlens=c, initial_state=state, return_state=True)
        for c in (dsf.Packing([0, 2, 2, 9, 12]), torch.tensor([0, 2, 2, 9, 12], dtype=torch.int16))
    ]
    for y, last in found[1:]:
        assert torch.equal(y, found[0][0]) and torch.equal(last, found[0][1])
    assert torch.equal(found[0][1][1], state[1]), "the state of a sequence without tokens"
    packing = dsf.Packing([0, 2, 2, 9, 12])
    assert packing.backwards.bounds == (0, 3, 10, 10, 12) and packing.backwards is packing.backwards
    with pytest.raises(dsf.InputError, match=r"end with T = 12, got \[0, 2, 11\]"):
        gated_delta(**inputs, reverse=True, cu_seqlens=torch.tensor([0, 2, 11]))


@pytest.mark.parametrize("exchange", ["gather", "transpose", "relay", "two-level"])
@pytest.mark.parametrize("recurrence", FINITE[::3], ids=lambda r: r.name)
def test_over_ranks(recurrence, exchange):
    """All shards uneven, one empty; nodes in the other order, too. The world counts ranks from the last."""
    inputs = {n: x.requires_grad_() for n, x in sample(recurrence, B=1, T=14).items()}
    state = recurrence(**sample(recurrence, B=3, T=3), return_state=True)[1].detach().requires_grad_()
    leaves = [*inputs.values(), state]

    def run(world):
        y, last = recurrence(
            **inputs, initial_state=state, return_state=True, reverse=True, parallel=world,
            cu_seqlens=torch.tensor([0, 6, 6, 14]),
        )  # fmt: skip
        true = recurrence.true_state(last, y.shape[-1])
        grads = torch.autograd.grad(y.sin().sum() + true.cos().sum(), leaves, allow_unused=True)
        return [y, true, *(torch.zeros(()) if g is None else g for g in grads)]

    try:
        world = Simulated(4, sizes=(5, 0, 7, 2), nodes=2, exchange=exchange)
        found = run(world)
    except dsf.InputError as error:  # maps of single channels are relayed alone
        assert "exchange" in str(error)
        return
    world.backwards().backwards()
    for got, expected in zip(found, run(None), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_softmax_over_ranks_and_head_and_tail():
    inputs = sample(softmax, T=12)
    whole = softmax(**inputs, reverse=True)
    for world in (Simulated(5), Simulated(3, sizes=(1, 9, 2)), Simulated(3, "headtail")):
        torch.testing.assert_close(softmax(**inputs, reverse=True, parallel=world), whole, rtol=1e-9, atol=1e-10)
    assert Simulated(3, "headtail").backwards().layout.slots == 2


def test_ranks_counted_from_the_last_ask_for_what_the_others_do():
    def asks(rank):
        every = yield Gather(torch.tensor([float(rank)]))
        swapped = yield Swap(torch.arange(3.0) + 10 * rank)
        hopped = yield Hop(torch.tensor([rank + 1.0]), "all", 0, 2)
        return every[:, 0].tolist(), swapped.tolist(), float(hopped)

    plain = together([asks(r) for r in range(3)])
    sizes = {"all": 3, "inner": 3, "outer": 1}
    assert together([mirrored(asks(2 - place), sizes) for place in range(3)])[::-1] == plain


@pytest.mark.parametrize("name", ["gated_deltanet", "retnet", "rwkv6", "s6", "mamba3", "rg_lru", "softmax_attention"])
def test_layers_turn_their_convolution_too(name):
    torch.manual_seed(1)
    layer = mixers.get(name).module(d_model=32).double()
    x = torch.randn(1, 14, 32, dtype=torch.float64)
    bounds = torch.tensor([0, 5, 5, 14])
    y, state = layer(x, cu_seqlens=bounds, reverse=True)
    again, after = layer(x, state, bounds, reverse=True)
    for row, (a, b) in enumerate(((0, 5), (5, 5), (5, 14))):
        if a < b:
            own = [None if s is None else s.rows(torch.tensor([row])) if isinstance(s, KVCache)
                   else s[row : row + 1] for s in state]  # fmt: skip
            one, _ = layer(x[:, a:b].flip(1))
            torch.testing.assert_close(y[:, a:b], one.flip(1))
            more, _ = layer(x[:, a:b].flip(1), type(state)(*own))
            torch.testing.assert_close(again[:, a:b], more.flip(1))
    assert layer(x, reverse=True, use_cache=False)[1] is None
    for world in (Simulated(3), Simulated(3, sizes=(2, 0, 12))):
        torch.testing.assert_close(layer(x, cu_seqlens=bounds, reverse=True, parallel=world)[0], y)


def test_the_plan_counts_what_is_flipped():
    sizes = {"B": 2, "T": 100, "H": 4, "N": 16, "P": 32}
    plain, back = gated_delta.plan(**sizes), gated_delta.plan(**sizes, reverse=True)
    assert back.form == plain.form and "flipped" in back.reason and "flipped" not in plain.reason
    assert back.bytes == 3 * plain.bytes  # it has no Params: everything is read, written and read
    assert "flipped" in gated_delta.plan(**sample(gated_delta, T=8), reverse=True).reason


def test_bad_input_is_refused_in_words():
    inputs = sample(gated_delta, T=4)
    with pytest.raises(dsf.InputError, match=r"gated_delta: step has no reverse=True: .* gated_delta\(\.\.\., reverse"):
        gated_delta.step(None, **{n: x[:, 0] for n, x in inputs.items()}, reverse=True)
    with pytest.raises(dsf.InputError, match=r"trajectory has no reverse=True: .* x\.flip\(1\)"):
        gated_delta.trajectory(**inputs, reverse=True)
    with pytest.raises(dsf.InputError, match="GatedDeltaNet: step has no reverse=True"):
        mixers.GatedDeltaNet(16).step(torch.randn(2, 16), reverse=True)
    with pytest.raises(dsf.InputError, match=r"GatedDeltaNet: cu_seqlens must not decrease, got \[0, 6, 3, 9\]"):
        mixers.GatedDeltaNet(16)(torch.randn(1, 9, 16), cu_seqlens=torch.tensor([0, 6, 3, 9]), reverse=True)
    with pytest.raises(dsf.InputError, match=r"initial_state has shape \[1, 1\], expected"):
        gated_delta(**inputs, initial_state=torch.zeros(1, 1, dtype=torch.float64), reverse=True)
    with pytest.raises(dsf.InputError, match=r"sizes=\(9, 2, 3\) hold 14 tokens, but the sequence has 4"):
        gated_delta(**inputs, reverse=True, parallel=Simulated(3, sizes=(9, 2, 3)), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(dsf.TraceError, match="reverse"):

        @dsf.recurrence
        def takes_the_name(q: Key, k: Key, v: Value, reverse: Scalar) -> System:
            return System(A=reverse, B=k * v, C=q)


def test_turned_inputs_are_the_definition():
    inputs = sample(mixers.mamba3, T=9)
    torch.testing.assert_close(
        mixers.mamba3(**inputs, reverse=True), mixers.mamba3(**turned(inputs, mixers.mamba3)).flip(1)
    )
