"""Packed sequences of the matrix families in Triton's interpreter: read where they lie, against float64 one by one."""

import traceback
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import triton_private as private
from interpreted import interpreted
from matrix_family import UNSEEN, driven_ratio, fading_delta, fading_rows, forgetful_delta, late_ratio, swinging
from mixer_inputs import sample
from not_finite import BOUNDS as OTHER_BOUNDS
from not_finite import assert_alone, first_states

from dsf.fuzz import Case, attempt
from dsf.kernels.triton.chunk import matrix as matrix_kernels
from dsf.kernels.triton.chunk.precision import Precision
from dsf.language.errors import FormError
from dsf.mixers import ZOO, get

pytestmark = interpreted

NAMES = ["unnormalized_linear_attention", "linear_attention", "ssd", "mlstm", "deltanet", "gated_delta_product"]
NAMES += ["gla", "rwkv6", "rwkv7"]
ALL = UNSEEN + [get(name).recurrence for name in NAMES]
# one token, chunks of 16 less one and more one, none of them where chunks would lie
BOUNDS = (0, 1, 16, 33, 34, 49, 64)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 16 rows, so that a few dozen tokens cross several."""
    table, small = matrix_kernels.tiles, {"chunk": 16, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}
    monkeypatch.setattr(matrix_kernels, "tiles", lambda *key: replace(table(*key), **small))


def states(recurrence, count, heads=2):
    return torch.randn(count, heads, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)


def outcome(recurrence, given, state, dtype, run, parts=None):
    """y, the states and the gradients of a fixed functional of both. run(leaves, start) -> y, states."""
    leaves = {n: x.to(dtype).requires_grad_() for n, x in given.items()}
    start = None if state is None else state.to(dtype).requires_grad_()
    y, final = run(leaves, start)
    g = torch.Generator().manual_seed(1)
    loss = (y * torch.randn(y.shape, generator=g, dtype=torch.float64)).sum()
    true = recurrence.true_state(final, y.shape[-1])
    if not recurrence.spec.is_stabilised:  # its state is relative to the running maximum: the law is on outputs
        loss = loss + (true * torch.randn(true.shape, generator=g, dtype=torch.float64)).sum()
    return [y, true, *torch.autograd.grad(loss, [*leaves.values()] + ([] if start is None else [start]))]


def one_by_one(recurrence, bounds):
    """The sequences in turn, in float64 by the definition."""
    timed = [i.name for i in recurrence.spec.inputs if i.kind.time]

    def run(leaves, start):
        found = []
        for row, (low, high) in enumerate(pairwise(bounds)):
            if low == high:  # its state stays, or is nothing yet
                found.append((None, None if start is None else start[row : row + 1]))
                continue
            mine = {n: x[:, low:high] if n in timed else x for n, x in leaves.items()}
            first = None if start is None else start[row : row + 1]
            found.append(recurrence(**mine, initial_state=first, return_state=True, form="naive"))
        y, final = zip(*found, strict=True)
        like = next(x for x in final if x is not None)
        final = [torch.zeros_like(like) if x is None else x for x in final]
        return torch.cat([x for x in y if x is not None], dim=1), torch.cat(final)

    return run


def assert_packed_is_one_by_one(recurrence, given, state, bounds=BOUNDS, tolerance=2e-5):
    def packed(leaves, start):
        how = {"cu_seqlens": torch.tensor(bounds), "return_state": True, "backend": "triton"}
        return recurrence(**leaves, initial_state=start, **how)

    found = outcome(recurrence, given, state, torch.float32, packed)
    expected = outcome(recurrence, given, state, torch.float64, one_by_one(recurrence, bounds))
    for a, b in zip(found, expected, strict=True):
        scale = b.abs().max().clamp(min=1e-3)
        assert ((a.double() - b).abs().max() / scale).item() < tolerance


@pytest.mark.parametrize("recurrence", ALL, ids=lambda r: r.name)
def test_packed_is_one_by_one(recurrence):
    given = sample(recurrence, batch=1, tokens=BOUNDS[-1])
    assert_packed_is_one_by_one(recurrence, given, states(recurrence, len(BOUNDS) - 1))


@pytest.mark.parametrize("name", [entry.name for entry in ZOO if entry.recurrence is not None])
def test_a_sequence_that_is_not_finite_reaches_no_other(name):
    """MesaNet's kernels are its sums' and solves of one token each; they take long here."""
    recurrence = get(name).recurrence
    if name == "mesanet":
        pytest.skip("it takes long")
    given = {n: x.float() for n, x in sample(recurrence, batch=1, tokens=OTHER_BOUNDS[-1]).items()}
    drawn = {n: x.float() for n, x in sample(recurrence, batch=len(OTHER_BOUNDS) - 1, tokens=3).items()}
    try:
        assert_alone(recurrence, given, first_states(recurrence, given, drawn), float("nan"), backend="triton")
    except FormError:
        pytest.skip("no kernel takes it")


EMPTY = ((0, 0, 1, 16, 16, 16, 33, 49, 49), (0, 0, 0, 40, 40))


@pytest.mark.parametrize("bounds", EMPTY, ids=["some", "all but one"])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("name", ["linear_attention", "mlstm", "deltanet", "gla", "rwkv7", "s6", "rwkv4", "qlstm"])
def test_empty_sequences_are_as_they_were(name, stateful, bounds):
    recurrence = get(name).recurrence
    given = sample(recurrence, batch=1, tokens=bounds[-1])
    state = None
    if stateful:
        timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
        before = sample(recurrence, batch=len(bounds) - 1, tokens=3)
        before = {n: x if n in timed else given[n] for n, x in before.items()}
        state = recurrence(**before, return_state=True)[1].double()
    assert_packed_is_one_by_one(recurrence, given, state, bounds)


@pytest.mark.parametrize("recurrence", [get("mlstm").recurrence, late_ratio, get("rwkv7").recurrence])
def test_packed_from_no_state(recurrence):
    assert_packed_is_one_by_one(recurrence, sample(recurrence, batch=1, tokens=BOUNDS[-1]), None)


@pytest.mark.parametrize("recurrence", [swinging, forgetful_delta, fading_rows, fading_delta, driven_ratio])
def test_sequences_cut_into_segments(recurrence, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: 4)
    bounds = (0, 50, 51, 100)
    given = sample(recurrence, batch=1, tokens=bounds[-1])
    assert_packed_is_one_by_one(recurrence, given, states(recurrence, 3), bounds)


@pytest.mark.parametrize("cut", [1, 4])
def test_delta_rules_in_two_terms(cut, monkeypatch):
    table = matrix_kernels.tiles
    monkeypatch.setattr(matrix_kernels, "tiles", lambda *key: replace(table(*key), precision=Precision(pairs="two")))
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: cut)
    given = sample(forgetful_delta, batch=1, tokens=BOUNDS[-1])
    assert_packed_is_one_by_one(forgetful_delta, given, states(forgetful_delta, len(BOUNDS) - 1), tolerance=2e-4)


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("recurrence", [swinging, get("ssd").recurrence, get("mlstm").recurrence], ids=lambda r: r.name)
def test_outputs_stored_a_chunk_late(recurrence, segments, monkeypatch):
    table = matrix_kernels.tiles
    monkeypatch.setattr(matrix_kernels, "tiles", lambda *key: replace(table(*key), late=True))
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: segments)
    given = sample(recurrence, batch=1, tokens=BOUNDS[-1])
    assert_packed_is_one_by_one(recurrence, given, states(recurrence, len(BOUNDS) - 1))


@pytest.mark.parametrize("recurrence", [swinging, forgetful_delta, fading_delta, driven_ratio])
def test_stretches_that_end_inside_sequences(recurrence, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: 3)
    given = sample(recurrence, batch=1, tokens=BOUNDS[-1])
    assert_packed_is_one_by_one(recurrence, given, states(recurrence, len(BOUNDS) - 1))


@pytest.mark.parametrize("name", ["ssd", "gated_deltanet", "rwkv7"])
def test_heads_that_share_keys(name):
    recurrence = get(name).recurrence
    given = sample(recurrence, batch=1, tokens=BOUNDS[-1], heads=4)
    for entry in recurrence.spec.inputs:
        if entry.kind.time and entry.kind.axes == {"key"}:
            given[entry.name] = given[entry.name][:, :, :2]
    assert_packed_is_one_by_one(recurrence, given, states(recurrence, len(BOUNDS) - 1, heads=4))


@pytest.mark.parametrize("recurrence", [late_ratio, fading_delta, get("mlstm").recurrence, get("rwkv7").recurrence])
def test_sequences_without_tokens_keep_their_states(recurrence):
    from dsf.kernels.triton.chunk.operator import matrix_mixer
    from dsf.triton.chunk import program_of

    filled, gaps = torch.tensor([0, 5, 40]), torch.tensor([0, 0, 5, 5, 40, 40])
    given = {n: x.float() for n, x in sample(recurrence, batch=1, tokens=40).items()}
    wide, weight = states(recurrence, 5).float(), torch.randn(5, 2, *recurrence.state_shape(N=3, P=4))
    if recurrence.spec.is_stabilised:
        wide[..., -1:] = wide[..., :1, -1:]
    found = []
    for bounds, rows in ((filled, [1, 3]), (gaps, [0, 1, 2, 3, 4])):
        leaves = [given[i.name].clone().requires_grad_() for i in recurrence.spec.inputs]
        start = wide[rows].requires_grad_()
        y, final, _ = matrix_mixer(leaves, start, program_of(recurrence.spec)[1], True, bounds)
        loss = (final * weight[rows]).sum() + y.square().sum()
        found.append((y, final, *torch.autograd.grad(loss, [*leaves, start])))
    y, final, *gradients, d_start = found[1]
    for a, b in zip((y, *gradients), (found[0][0], *found[0][2:-1]), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(final[[1, 3]], found[0][1])
    torch.testing.assert_close(d_start[[1, 3]], found[0][-1])
    torch.testing.assert_close(final[[0, 2, 4]], wide[[0, 2, 4]])
    if not recurrence.spec.is_stabilised:
        torch.testing.assert_close(d_start[[0, 2, 4]], weight[[0, 2, 4]])


@pytest.mark.parametrize("name", ["ssd", "rwkv6", "mlstm", "rwkv7"])
def test_operator_passes_opcheck(name):
    from dsf.kernels.triton.chunk.operator import matrix_mixer
    from dsf.triton.chunk import program_of

    recurrence = get(name).recurrence
    given = {n: x.float().requires_grad_() for n, x in sample(recurrence, batch=1, tokens=5, heads=1).items()}
    state = torch.zeros(2, 1, *recurrence.state_shape(N=3, P=4), requires_grad=True)
    operands = [given[i.name] for i in recurrence.spec.inputs]
    bounds = torch.tensor([0, 2, 5])
    torch.library.opcheck(matrix_mixer, (operands, state, program_of(recurrence.spec)[1], True, bounds))


def tables(bounds, tokens, chunk, span=None):
    from dsf.kernels.triton.operators import Scheduled
    from dsf.kernels.triton.packed import Sequences

    return Scheduled(lambda x: list(Sequences(x).tables(tokens, chunk, span)))(bounds)


def test_more_sequences_than_one_program_counts_at_a_time():

    lengths = torch.randint(0, 40, (600,))
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    chunks, segments, sequences = tables(bounds, int(bounds[-1]), 16, 2)
    first = [(low + 16 * i, high, s) for s, (low, high) in enumerate(pairwise(bounds.tolist()))
             for i in range(-(-(high - low) // 16))]  # fmt: skip
    assert chunks[: len(first), :3].tolist() == [list(x) for x in first] and not chunks[len(first) :, :2].any()
    assert (sequences[1:, [0, 2]] == sequences[:-1, [1, 3]]).all()
    for s, (low, high, begin, end) in enumerate(sequences.tolist()):
        mine = segments[begin:end]
        assert len(mine) == max(1, -(-(high - low) // 2)) and (mine[:, 3] == bounds[s + 1]).all()
        assert mine[0, 0] == low and mine[-1, 1] == high and (mine[:, 4] == (len(mine) == 1)).all()


def test_wrong_boundaries_write_nothing_outside():
    for wrong in ([0, 90, -5, 64], [0, 2**20, 3, 64], [-9, 64, 0, 64, 10]):
        chunks, segments, sequences = tables(torch.tensor(wrong), 64, 16)
        assert int(sequences.min()) >= 0 and int(sequences[:, :2].max()) <= len(chunks)
        assert int(sequences[:, 2:].max()) <= len(segments) and int(segments[:, 1].max()) <= len(chunks)
        assert int(chunks[:, :2].min()) >= 0 and int(chunks[:, :2].max()) <= 64


@pytest.mark.parametrize("name", ["ssd", "gla", "gated_deltanet", "kda", "rwkv7", "mlstm"])
def test_no_kernel_reads_unwritten_memory_in_packed_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to drop it: a tool that watches memory would say so. Of the slots for chunks some are left unfilled."""
    load, found = getattr(*private.LOAD), []

    def watched(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        x = load(self, pointers, mask, *rest)
        if x.data.dtype == np.float32 and np.isnan(x.data[mask.data.astype(bool)]).any():
            found.append(next(f.name for f in traceback.extract_stack()[::-1] if "/kernels/triton/" in f.filename))
        return x

    monkeypatch.setattr(*private.LOAD, watched)
    case = Case(tokens=37, heads=2, n=8, p=8, dtype="float32", lengths=(5, 1, 31), initial=True)
    verdict = attempt(get(name).recurrence, case)
    assert verdict.status == "right" and not found, (verdict, set(found))
