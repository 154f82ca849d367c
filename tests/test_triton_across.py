"""Decays along the Value axis by chunks of the transposed state, in Triton's interpreter, beside the float64 oracle."""

import re
from dataclasses import replace

import mixer_inputs
import pytest
import torch
from interpreted import interpreted
from matrix_family import ACROSS, channels_in_steps, fading_channels, given_channels, less_all_channels, twice_written
from mixer_inputs import sample
from test_triton_rounding import TIMES, ratios
from test_triton_sums import blocks, outcome

from dsf.fuzz import Case, attempt
from dsf.kernels.triton.chunk import matrix as matrix_kernels
from dsf.kernels.triton.chunk.across_ops import across_mixer, across_mixer_backward
from dsf.mixers import get
from dsf.parallel import Simulated
from dsf.triton import across, choose, chunk

pytestmark = interpreted
CHUNK = 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 16 rows and blocks of 16 keys, so that a few tokens cross several; bfloat16 keeps its tiles."""
    table = matrix_kernels.tiles
    small = {"chunk": CHUNK, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}
    monkeypatch.setattr(
        matrix_kernels, "tiles",
        lambda *key: table(*key) if torch.bfloat16 in key else replace(table(*key), **small),
    )  # fmt: skip


def assert_same(found, expected, tolerance=2e-5, block=8):
    """By head and block of tokens; a block of little counts as if it had a tenth of the largest."""
    for name, b in expected.items():
        error, size = (found[name].double() - b).detach(), b.detach()
        if name not in ("final", "state") and b.dim() > 2 and b.shape[1] > block:  # [B, T, H, ·]
            error, size = (blocks(x, block, b.dim() > 3) for x in (error, size))
        elif b.dim() > 3:
            error, size = (x.flatten(2).norm(dim=-1) for x in (error, size))
        else:
            error, size = error.abs(), size.abs()
        worst = float((error / size.clamp(min=0.1 * float(size.max()) + 1e-3)).max())
        assert worst < tolerance, (name, worst)


def state_of(rows=2, n=3, p=4):
    return torch.randn(rows, 2, n, p, dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("recurrence", ACROSS, ids=lambda r: r.name)
def test_decays_by_channel_equal_the_oracle(recurrence, tokens):
    given = sample(recurrence, tokens=tokens)
    state = state_of()
    found = outcome(recurrence, given, state, torch.float32, form="chunk", backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", ACROSS, ids=lambda r: r.name)
def test_inputs_that_need_no_gradient_get_none_and_change_no_other(recurrence):
    """Each input in turn; the state never has one."""
    given = {n: x.float() for n, x in sample(recurrence, tokens=3).items()}

    def grads(names):
        x = {n: v.clone().requires_grad_(n in names) for n, v in given.items()}
        recurrence(**x, form="chunk", backend="triton").square().sum().backward()
        return {n: v.grad for n, v in x.items()}

    every = grads(given)
    for name in given:
        found = grads(given.keys() - {name})
        assert found.pop(name) is None
        for n, g in found.items():
            torch.testing.assert_close(g, every[n])


CHOSEN = (
    {},
    {"N": 32},
    {"P": 32},
    {"N": 32, "P": 256},
    {"form": "chunk", "N": 3},
    {"form": "chunk", "dtype": torch.half},
)
SCANNED = ({"N": 16}, {"P": 16}, {"N": 32, "P": 32}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"P": 300},
           {"P": 300, "form": "chunk"}, {"form": "scan"}, {"form": "recurrent"})  # fmt: skip


@pytest.mark.parametrize(("calls", "kernel"), [(CHOSEN, "chunk walk .* of the transposed"), (SCANNED, "fused scan")])
def test_chunks_are_asked_for_or_chosen_where_they_pay(calls, kernel):
    """bfloat16 from 32 entries of one axis and 64 of the other on; the scan walks others, and if it is asked."""
    with choose.elsewhere():
        for call in calls:
            how = {"T": 100, "N": 64, "P": 64, "dtype": torch.bfloat16, "device": "cuda"} | call
            assert re.match(kernel, fading_channels.plan(**how).kernel), call


@pytest.mark.parametrize("scale", [0.02, 1.0, 3.0, 30.0])
def test_decays_of_any_strength(scale):
    """Chunks that one product holds, chunks beyond its range in some channels, and decays that leave nothing."""
    given = sample(given_channels, tokens=37)
    given["g"] = scale * 4 * given["g"] * torch.tensor([1.0, 0.01, 1.0, 0.0], dtype=torch.float64)
    state = state_of()
    found = outcome(given_channels, given, state, torch.float32, form="chunk", backend="triton")
    assert_same(found, outcome(given_channels, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_large_and_small_numbers_under_strong_decays(size):
    """Of a chunk's 16 rows, whose decays multiply to 2^-105: products stay within float32's range."""
    given = sample(fading_channels, tokens=37)
    given |= {name: size * given[name] for name in "qkv"} | {"a": given["a"] / 8 - 4.5}
    found = fading_channels(**{n: x.float() for n, x in given.items()}, form="chunk", backend="triton") / size**3
    expected = fading_channels(**given, form="naive") / size**3
    assert_same({"y": found}, {"y": expected})


def test_decays_that_are_zero():
    """Gates that close for a token, or for all tokens of a channel."""
    given = sample(fading_channels, tokens=37)
    given["a"][:, 5::7] = -200.0
    given["a"][:, :, 0, 1] = -1e4
    found = outcome(fading_channels, given, None, torch.float32, form="chunk", backend="triton")
    assert_same(found, outcome(fading_channels, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("recurrence", [given_channels, channels_in_steps], ids=lambda r: r.name)
def test_packed_sequences_are_separate_sequences(recurrence, stateful):
    """Of no token, of one, and of as many as a chunk has rows for, less one and more one."""
    bounds = torch.tensor([0, 0, 1, 16, 16, 33, 41, 41])
    given = sample(recurrence, batch=1, tokens=41)
    state = state_of(len(bounds) - 1) if stateful else None
    found = outcome(recurrence, given, state, torch.float32, form="chunk", backend="triton", cu_seqlens=bounds)
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive", cu_seqlens=bounds))


@pytest.mark.parametrize("packed", [False, True])
def test_segments_of_t(monkeypatch, packed):
    """Sequences that are walked in parallel parts, of more channels and keys than a block has."""
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: 3)
    for axis, size in (("key", 36), ("value", 24)):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, size)
    given = sample(given_channels, batch=1, tokens=90)
    how = {"cu_seqlens": torch.tensor([0, 70, 71, 90])} if packed else {}
    state = state_of(3 if packed else 1, 36, 24)
    found = outcome(given_channels, given, state, torch.float32, form="chunk", backend="triton", **how)
    assert_same(found, outcome(given_channels, given, state, torch.float64, form="naive", **how))


@pytest.mark.parametrize("recurrence", [fading_channels, get("gla").recurrence], ids=lambda r: r.name)
def test_walks_of_packed_segments_read_what_there_is(monkeypatch, recurrence):
    """bfloat16 walks load a chunk's rows one chunk early, also those of segments that have no chunk."""
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: 3)
    for axis, size in (("key", 32), ("value", 64)):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, size)
    given = {name: x.bfloat16() for name, x in sample(recurrence, batch=1, tokens=290).items()}
    bounds = torch.tensor([0, 200, 201, 290])
    y = recurrence(**given, cu_seqlens=bounds, backend="triton")
    expected = recurrence(**{name: x.double() for name, x in given.items()}, cu_seqlens=bounds)
    assert (y - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("recurrence", [fading_channels, less_all_channels], ids=lambda r: r.name)
def test_ranks_equal_the_whole(recurrence):
    """By the fused scan or, where it has no room, by calls of their own."""
    given, state, world = sample(recurrence, batch=1, tokens=18), state_of(1), Simulated(3, sizes=(9, 1, 8))
    found = outcome(recurrence, given, state, torch.float32, form="chunk", backend="triton", parallel=world)
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_later_tokens_change_no_bit(scale):
    """Of y, also where a chunk's decays leave float32's range only later."""
    given = {n: x.float() for n, x in sample(given_channels, tokens=40).items()}
    given["g"] = scale * given["g"]
    y = given_channels(**given, form="chunk", backend="triton")
    for cut in (5, 16, 27):
        other = {n: x.clone() for n, x in given.items()}
        for n in "qkvgso":
            other[n][:, cut:] = sample(given_channels, tokens=40, seed=cut)[n][:, cut:].float()
        other["g"][:, cut:] *= 40
        changed = given_channels(**other, form="chunk", backend="triton")
        assert torch.equal(changed[:, :cut], y[:, :cut]) and not torch.equal(changed[:, cut:], y[:, cut:])


@pytest.mark.parametrize(("shift", "limit"), [(3.0, TIMES), (0.0, TIMES), (-2.0, 2.0)])
def test_bfloat16_errs_about_as_one_rounding(monkeypatch, shift, limit):
    """With gates as trained models have them, that halve the state, and that leave little of it: dq and dk then consist
    of few products, each of which the kernels round."""
    for axis in ("key", "value"):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, 64)
    given = sample(fading_channels, batch=1, tokens=128)
    given["a"] = given["a"] + shift
    times = ratios(fading_channels, {name: x.bfloat16() for name, x in given.items()})
    assert max(times.values()) < limit and times["y"] < 1.05, times


def test_operators_pass_opcheck():
    given = {name: x.float() for name, x in sample(given_channels, tokens=9).items()}
    of, state = across.transposed(given_channels.spec), state_of(n=4, p=3).float()
    operands, name = [given[i.name] for i in of.inputs[:-1]], chunk.program_of(of)[1]
    kinds = "test_schema", "test_faketensor"
    torch.library.opcheck(across_mixer, (operands, given["q"], state, name, True), test_utils=kinds)
    y, final, saved = across_mixer(operands, given["q"], state, name, True)
    call = torch.ones_like(y), torch.ones_like(final), operands, given["q"], state, saved, name, [True] * len(operands)
    torch.library.opcheck(across_mixer_backward, call, test_utils=kinds)


CASES = {
    "one tensor as two inputs, third calls": Case(tokens=35, batch=2, heads=2, n=33, p=40, dtype="bfloat16", calls=3,
                                                  initial=True, alias=("k", "q"), alias_calls=(1, 3)),
    "bfloat16, strides, one token": Case(tokens=1, heads=3, n=36, p=40, dtype="bfloat16", initial=True,
                                         layouts={"dy": "expanded-tokens", "k": "late", "v": "transposed"}),
    "float16, shared heads, reversed": Case(tokens=19, heads=2, n=48, p=32, dtype="float16",
                                            groups={"k": 1, "v": 1, "q": 1}, reverse=True, lengths=(9, 0, 10)),
    "few channels, no gradient of the output": Case(tokens=23, heads=2, n=40, p=5, dtype="bfloat16", loss="state"),
    "more keys than the scan holds": Case(tokens=5, n=260, p=4, dtype="float32", lengths=(3, 2), initial=True),
    "few keys, more channels than a block": Case(tokens=23, batch=2, n=2, p=100, dtype="float32",
                                                 layouts={"q": "late"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("recurrence", [fading_channels, twice_written], ids=lambda r: r.name)
def test_calls_of_every_kind(recurrence, case, monkeypatch):
    monkeypatch.setattr(across, "pays", lambda sizes, dtype: True)
    verdict = attempt(recurrence, case)
    assert verdict.status == "right", str(verdict)
