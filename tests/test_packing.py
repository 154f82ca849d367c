"""Packed sequences (cu_seqlens) are separate sequences: outputs, states and gradients, for every structure and form."""

from itertools import pairwise

import pytest
import structures
import torch

from dsf import KVCache
from dsf.call.packing import batches

LENGTHS = (1, 9, 2, 3, 17, 1)
BOUNDS = [0, 1, 10, 12, 15, 32, 33]
EACH = pytest.mark.parametrize("recurrence", structures.ALL, ids=lambda r: r.name)


def packed(recurrence, **sizes):
    return structures.sample(recurrence, B=1, T=sum(LENGTHS), **sizes)


def separately(recurrence, inputs, states, form):
    """Every sequence in a call of its own."""
    found = []
    for row, (start, end) in enumerate(pairwise(BOUNDS)):
        piece = structures.tokens_of(recurrence, inputs, slice(start, end))
        state = None if states is None else states[row : row + 1]
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
