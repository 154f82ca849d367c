"""Packed sequences (cu_seqlens) are separate sequences: outputs, states and gradients, for every structure and form."""

import copy
import pickle
from itertools import pairwise

import pytest
import structures
import torch

from dsf import InputError, KVCache, Packing, mixers
from dsf.call import packing
from dsf.call.packing import batches

LENGTHS = (1, 9, 2, 3, 17, 1)
BOUNDS = [0, 1, 10, 12, 15, 32, 33]
# First, in the middle, several in a row, last; and all but one, alone in the middle.
EMPTY = {"some": [0, 0, 1, 10, 12, 12, 12, 32, 33, 33], "one": [0, 0, 0, 33, 33]}
EACH = pytest.mark.parametrize("recurrence", structures.ALL, ids=lambda r: r.name)


def packed(recurrence, **sizes):
    return structures.sample(recurrence, B=1, T=sum(LENGTHS), **sizes)


def separately(recurrence, inputs, states, form, bounds=BOUNDS):
    """Every sequence in a call of its own; an empty one leaves its state as it was, or nothing."""
    found = []
    for row, (start, end) in enumerate(pairwise(bounds)):
        piece = structures.tokens_of(recurrence, inputs, slice(start, end))
        state = None if states is None else states[row : row + 1]
        if start == end:
            found.append((None, state))
            continue
        found.append(recurrence(**piece, initial_state=state, return_state=True, form=form))
    return found


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@EACH
def test_packed_is_separate_in_every_form(recurrence):
    inputs, bounds = packed(recurrence), torch.tensor(BOUNDS)
    for form in recurrence.forms:
        y, final = recurrence(**inputs, cu_seqlens=bounds, return_state=True, form=form)
        alone = separately(recurrence, inputs, None, form)
        assert_same(y, torch.cat([part for part, _ in alone], dim=1))
        for row, (_, state) in enumerate(alone):
            if isinstance(state, KVCache):
                n = LENGTHS[row]
                assert final.lengths[row] == state.lengths[0] == n
                assert_same(final.k[row, :, :n], state.k[0])
                assert_same(final.v[row, :, :n], state.v[0])
            else:
                assert_same(recurrence.true_state(final[row : row + 1], 2), recurrence.true_state(state, 2))


@pytest.mark.parametrize("recurrence", structures.FINITE, ids=lambda r: r.name)
@pytest.mark.parametrize("form", ["auto", "recurrent", "scan"])
def test_gradients_and_initial_states_of_packed_sequences(recurrence, form):
    inputs = packed(recurrence)
    _, states = recurrence(**structures.sample(recurrence, B=len(LENGTHS), T=3), return_state=True)
    leaves = [x.requires_grad_() for x in [*inputs.values(), states.detach()]]
    states = leaves[-1]
    y, final = recurrence(**inputs, initial_state=states, cu_seqlens=torch.tensor(BOUNDS), return_state=True, form=form)
    alone = separately(recurrence, inputs, states, form)
    expected_y = torch.cat([part for part, _ in alone], dim=1)
    expected_final = torch.cat([recurrence.true_state(state, 2) for _, state in alone])
    true = recurrence.true_state(final, 2)
    assert_same(y, expected_y)
    assert_same(true, expected_final)
    dy, dfinal = torch.randn_like(y), torch.randn_like(true)
    found = torch.autograd.grad((y * dy).sum() + (true * dfinal).sum(), leaves)
    expected = torch.autograd.grad((expected_y * dy).sum() + (expected_final * dfinal).sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


def test_continuing_packed_sequences_is_the_whole():
    r = structures.gated_delta
    inputs = packed(r)
    whole, last = r(**inputs, return_state=True)
    cut = structures.tokens_of(r, inputs, slice(0, 20)), structures.tokens_of(r, inputs, slice(20, None))
    first, state = r(**cut[0], cu_seqlens=torch.tensor([0, 20]), return_state=True)
    second, final = r(**cut[1], cu_seqlens=torch.tensor([0, 13]), initial_state=state, return_state=True)
    assert_same(torch.cat([first, second], dim=1), whole)
    assert_same(final, last)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_any_integer_type_of_boundaries(dtype):
    inputs = packed(structures.scalar)
    assert_same(structures.scalar(**inputs, cu_seqlens=torch.tensor(BOUNDS, dtype=dtype)),
                structures.scalar(**inputs, cu_seqlens=torch.tensor(BOUNDS)))  # fmt: skip


def test_batches_are_few_and_padding_never_doubles_the_tokens():
    lengths = torch.randint(1, 500, (60,)).tolist()
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = batches(bounds, torch.device("cpu"))
    assert len(found) <= 9
    assert sorted(row for batch in found for row in batch.rows) == list(range(60))
    assert sum(batch.index.numel() for batch in found) < 2 * sum(lengths)


def test_future_sequences_never_change_earlier_ones():
    r = structures.gated_delta
    inputs = packed(r, dtype=torch.float32)
    y = r(**inputs, cu_seqlens=torch.tensor(BOUNDS))
    changed = {name: torch.cat([x[:, :15], torch.randn_like(x[:, 15:])], dim=1) for name, x in inputs.items()}
    assert torch.equal(r(**changed, cu_seqlens=torch.tensor(BOUNDS))[:, :15], y[:, :15])


def true_of(recurrence, state):
    """A state as it may be compared; None: before a first token."""
    return recurrence.true_state(state, 2) if state is not None else torch.zeros((), dtype=torch.float64)


@EACH
@pytest.mark.parametrize("bounds", EMPTY.values(), ids=EMPTY)
def test_empty_sequences_are_as_they_were_in_every_form(recurrence, bounds):
    inputs = packed(recurrence)
    given = None if recurrence.spec.is_softmax else structures.sample(recurrence, B=len(bounds) - 1, T=3)
    _, states = recurrence(**given, return_state=True) if given else (None, None)
    for form in recurrence.forms:
        for start in (None, states) if states is not None else (None,):
            how = {"cu_seqlens": torch.tensor(bounds), "initial_state": start, "return_state": True, "form": form}
            y, final = recurrence(**inputs, **how)
            alone = separately(recurrence, inputs, start, form, bounds)
            assert_same(y, torch.cat([part for part, _ in alone if part is not None], dim=1))
            for row, (_, state) in enumerate(alone):
                if isinstance(final, KVCache):
                    n = bounds[row + 1] - bounds[row]
                    assert final.lengths[row] == n and (state is None or n == state.lengths[0])
                    if state is not None:
                        assert_same(final.k[row, :, :n], state.k[0])
                        assert_same(final.v[row, :, :n], state.v[0])
                else:
                    found, expected = recurrence.true_state(final[row : row + 1], 2), true_of(recurrence, state)
                    assert_same(found, expected.expand_as(found))


@pytest.mark.parametrize("recurrence", structures.FINITE, ids=lambda r: r.name)
@pytest.mark.parametrize("bounds", EMPTY.values(), ids=EMPTY)
def test_gradients_of_empty_sequences(recurrence, bounds):
    inputs = packed(recurrence)
    _, states = recurrence(**structures.sample(recurrence, B=len(bounds) - 1, T=3), return_state=True)
    leaves = [x.requires_grad_() for x in [*inputs.values(), states.detach()]]
    y, final = recurrence(**inputs, initial_state=leaves[-1], cu_seqlens=torch.tensor(bounds), return_state=True)
    alone = separately(recurrence, inputs, leaves[-1], "auto", bounds)
    expected_y = torch.cat([part for part, _ in alone if part is not None], dim=1)
    expected = torch.cat([recurrence.true_state(state, 2) for _, state in alone])
    true = recurrence.true_state(final, 2)
    dy, dfinal = torch.randn_like(y), torch.randn_like(true)
    found = torch.autograd.grad((y * dy).sum() + (true * dfinal).sum(), leaves)
    wanted = torch.autograd.grad((expected_y * dy).sum() + (expected * dfinal).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)


@EACH
def test_a_state_before_any_token_goes_on_as_nothing(recurrence):
    """The state that an empty sequence leaves, its running maximum too, begins the next call as no state does."""
    inputs, bounds = packed(recurrence), torch.tensor([0, 0, 33, 33])
    _, state = recurrence(**inputs, cu_seqlens=bounds, return_state=True)
    first = state.rows(torch.tensor([0])) if isinstance(state, KVCache) else state[:1]
    y, final = recurrence(**inputs, initial_state=first, return_state=True)
    expected, last = recurrence(**inputs, return_state=True)
    assert_same(y, expected)
    if not isinstance(final, KVCache):
        assert_same(recurrence.true_state(final, 2), recurrence.true_state(last, 2))


@pytest.mark.parametrize("form", ["recurrent", "scan", "chunk", "kernel"])
def test_running_maxima_begin_below_gains_of_any_size(form):
    """A common factor of all gains cancels, however small, also where an empty sequence goes on."""
    r, w, u = mixers.rwkv4, -torch.rand(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    states: list = [None, None]
    for bounds in ([0, 2, 2, 5, 9], [0, 1, 4, 4, 9]):
        k, v = torch.randn(2, 1, 9, 2, 3, dtype=torch.float64)
        how, found = {"cu_seqlens": torch.tensor(bounds), "return_state": True, "form": form}, []
        for place, less in enumerate((0.0, 1000.0)):
            y, states[place] = r(k - less, v, w, u, initial_state=states[place], **how)
            found.append(y)
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_what_was_packed_first_in_inference_mode_has_gradients_later():
    layer, x = mixers.GatedDeltaNet(8, 2), torch.randn(1, 11, 8)
    with torch.inference_mode():
        expected, _ = layer(x, cu_seqlens=torch.tensor([0, 3, 3, 6, 11]))
    y, _ = layer(x, cu_seqlens=torch.tensor([0, 3, 3, 6, 11]))
    torch.testing.assert_close(y, expected)
    y.sum().backward()


def test_the_cache_of_an_empty_sequence_stays():
    softmax = next(r for r in structures.ALL if r.spec.is_softmax)
    _, cache = softmax(**structures.sample(softmax, B=3, T=4), return_state=True)
    inputs = structures.sample(softmax, B=1, T=5)
    _, final = softmax(**inputs, initial_state=cache, cu_seqlens=torch.tensor([0, 0, 5, 5]), return_state=True)
    assert final.lengths.tolist() == [4, 9, 4]
    for row in (0, 2):
        assert_same(final.k[row, :, :4], cache.k[row])
        assert_same(final.v[row, :, :4], cache.v[row])


def test_writes_that_torch_does_not_see_change_the_boundaries():
    r = structures.gated_delta
    inputs, bounds = packed(r), torch.tensor(BOUNDS)
    r(**inputs, cu_seqlens=bounds)
    other = [0, 5, 6, 12, 15, 32, 33]
    bounds.data[:] = torch.tensor(other)  # no version is counted
    assert_same(r(**inputs, cu_seqlens=bounds), r(**inputs, cu_seqlens=torch.tensor(other)))
    bounds.data[1] = 40
    with pytest.raises(InputError, match="must not decrease"):
        r(**inputs, cu_seqlens=bounds)


def test_a_packing_is_what_it_was_made_of_whatever_is_written_later():
    r = structures.gated_delta
    inputs, bounds = packed(r), torch.tensor(BOUNDS)
    packing, expected = Packing(bounds), r(**inputs, cu_seqlens=bounds)
    bounds.data[1] = 5
    for shared in (packing, copy.deepcopy(packing), pickle.loads(pickle.dumps(packing)), Packing(BOUNDS)):
        assert_same(r(**inputs, cu_seqlens=shared), expected)
        assert len(shared) == 6 and shared.on(torch.device("cpu")).tolist() == BOUNDS
    assert repr(packing) == f"Packing({BOUNDS})"
    with pytest.raises(InputError, match="must begin with 0 and end with T = 32"):
        r(**structures.tokens_of(r, inputs, slice(0, 32)), cu_seqlens=packing)


@pytest.mark.parametrize("wrong", [[1, 2], [0, 3, 2], [0], [], torch.tensor([[0, 1]]), torch.tensor([0.0, 1.0])])
def test_packings_that_are_none_are_refused(wrong):
    with pytest.raises(InputError, match=r"^Packing: cu_seqlens must"):
        Packing(wrong)


def test_layers_share_a_packing():
    layer = mixers.GatedDeltaNet(d_model=16, n_heads=2)
    x, bounds = torch.randn(1, 9, 16), torch.tensor([0, 0, 4, 4, 9])
    for a, b in zip(layer(x, cu_seqlens=Packing(bounds))[1], layer(x, cu_seqlens=bounds)[1], strict=True):
        assert a is b is None or torch.equal(a, b)


def test_what_a_captured_graph_reads_is_made_before_and_kept_for_good(monkeypatch):
    device, bounds = torch.device("cpu"), torch.tensor([0, 3, 7, 19])
    monkeypatch.setattr(packing, "_places", {})
    monkeypatch.setattr(packing, "_replayed", {})
    made = packing.marks(bounds.tolist(), device)
    with monkeypatch.context() as capture:
        capture.setattr(packing, "is_captured", lambda device: True)
        assert packing.marks(bounds.tolist(), device) is made
        with pytest.raises(InputError, match="run the call once before"):
            packing.marks([0, 4, 19], device)
    for length in range(1, 2 * packing._KEPT):  # others take its place
        packing.marks([0, length], device)
    assert packing.marks(bounds.tolist(), device) is not made
    monkeypatch.setattr(packing, "is_captured", lambda device: True)
    assert packing.marks(bounds.tolist(), device) is made
