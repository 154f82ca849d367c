"""The tile table by the GPU's limits, and the benchmark that measures its rows again."""

import importlib.util
import itertools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from dsf.call.bind import Sizes
from dsf.mixers import get
from dsf.triton.chunk import kernel_of

pytest.importorskip("triton")
from dsf.kernels.triton.chunk import precision, table
from dsf.kernels.triton.scan import launches as scan_ops
from dsf.kernels.triton.scan import table as scan_table

CPU, BF16 = torch.device("cpu"), torch.bfloat16
FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def small(monkeypatch):
    """A GPU with 99 KiB of shared memory a program and 40 processors."""
    monkeypatch.setattr(table, "limits", lambda device: (99 * 1024, 40))
    table.tiles.cache_clear()
    yield
    table.tiles.cache_clear()


def test_the_rows_are_those_of_the_gpu_they_were_measured_on():
    assert table.limits(CPU) == (table.SHARED, table.PROCESSORS)
    assert table.tiles(128, 128, BF16, "scalar", True).chunk == 64


def test_less_shared_memory_means_shorter_chunks(small):
    for decay in ("none", "scalar", "key", "rank_one"):
        row = table.tiles(128, 128, BF16, decay, True)
        assert row.chunk == 32 and row.walk_stages == row.reverse_stages == 2 and row.gradient_piece <= 64
    assert table.tiles(256, 256, torch.float32, "scalar", True).chunk == 16


def rows(dtype=BF16):
    """(decay, delta rule, row) of the families, with a normaliser and without, over sizes of states."""
    for decay, delta, normal in itertools.product(("none", "scalar", "key", "rank_one"), (False, True), (False, True)):
        if delta or decay != "rank_one":
            for n, p in itertools.product((16, 64, 128, 256), (64, 128)):
                yield decay, delta, table.tiles(n, p, dtype, decay, delta, CPU, normal)


def test_rows_choose_their_precision_by_name_and_every_name_is_used():
    names = {field: set(get_args(kind)) for field, kind in get_type_hints(precision.Precision).items()}
    found = [row.precision._asdict() for _, _, row in rows()]
    assert len(names) <= 3
    assert names == {field: {choice[field] for choice in found} for field in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_of_more_digits_than_bfloat16_have_one_term(dtype):
    for decay, delta, row in rows(dtype):
        found = precision.terms(row.precision, dtype, decay, delta, True)
        assert set(found) == {1, torch.float32}


def test_no_more_terms_are_kept_than_made():
    for (decay, delta, row), back in itertools.product(rows(), (False, True)):
        found = precision.terms(row.precision, BF16, decay, delta, back)
        assert found.kept_adjoints <= found.kept and found.read <= found.scores
        assert decay in ("key", "rank_one") or found.keys == 1  # walks read states in two terms by it


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("programs", [1, 8, 32, 100, 132, 500])
@pytest.mark.parametrize("chunks", [1, 5, 64, 512, 4096])
def test_segments_fill_idle_processors_and_no_more(chunks, programs, delta):
    least = table.DELTA_SEGMENT_CHUNKS if delta else table.SEGMENT_CHUNKS
    counts = [table.segments(chunks, programs, delta, processors) for processors in (40, 132, 400)]
    assert counts == sorted(counts)  # more processors are never filled by fewer segments
    for count, processors in zip(counts, (40, 132, 400), strict=True):
        assert count == 1 or (count * least <= chunks and count * programs <= 2 * processors)
        assert count == 1 or programs < processors


def test_long_segments_are_summed_up_in_more_pieces_none_of_them_short():
    pieces = [table.finer(span) for span in range(1, 200)]
    assert pieces[0] == 1 and pieces == sorted(pieces)
    assert all(n == 1 or span // n >= table.PIECE_CHUNKS for span, n in enumerate(pieces, 1))


@pytest.mark.parametrize("light", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 16, 400])
@pytest.mark.parametrize("p", [64, 300, 4096])
def test_walks_of_vector_states_begin_their_tiles_where_the_adjoint_wants_a_state(p, rows, light, monkeypatch):
    monkeypatch.setattr(scan_table, "_processors", lambda device: 132)
    forward, adjoint = (scan_table.vector(backwards, p, rows, light, CPU) for backwards in (False, True))
    assert adjoint.M % forward.K == 0 and adjoint.chunk % adjoint.M == 0


def test_the_plan_prints_the_row():
    row = table.tiles(128, 128, BF16, "scalar", True)
    name, chunk = kernel_of(get("gated_deltanet").recurrence.spec, Sizes(1, 64, 1, 128, 128, 128), BF16, CPU)
    assert f"({row.keys} keys x {row.piece} channels, {row.walk_warps} warps)" in name and chunk == row.chunk


@pytest.fixture
def tuner(monkeypatch):
    """benchmarks/gpu_tiles.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_tiles", FOLDER / "gpu_tiles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("gpu_matrix", "gpu_page", "gpu_compile", "declared"):
        sys.modules.pop(name, None)


def test_the_tuner_joins_what_made_a_row_faster_and_drops_what_was_wrong(tuner, monkeypatch):
    def ask(job, seconds):
        row = job["row"]
        if job["check"]:
            return {"error": 1.0} if row["walk_warps"] == 8 else {"error": 1e-3}
        gain = 0.1 * (row["walk_stages"] == 2) + 0.2 * (row["gradient_warps"] == 8) + 0.9 * (row["walk_warps"] == 8)
        return {"forward": 1 - gain, "both": 2.0, "peak": 1}

    monkeypatch.setattr(tuner, "ask", ask)
    base, tried, chosen = tuner.tune("scalar+delta", 128, 128, "bfloat16", 1)
    assert chosen == replace(base, walk_stages=2, gradient_warps=8)
    assert all("both" not in answer for row, answer in tried if row.walk_warps == 8)


def test_the_tuner_hands_a_row_to_its_processes_whole(tuner):
    for decay, delta, _ in tuner.STRUCTURES.values():
        row = table.tiles(64, 64, BF16, decay, delta)
        assert tuner.row_of(json.loads(json.dumps({"row": asdict(row)}))) == row


@pytest.mark.parametrize(("n", "tokens", "single"), [(16, 4096, True), (16, 1 << 26, True), (16, 1 << 27, False)])
@pytest.mark.parametrize("special", [0, 1, 2])
def test_single_entries_are_taken_where_32_bits_find_their_inputs_in_both_directions(n, tokens, single, special):
    hole = scan_ops.Hole(None, (), False, False, sums=1, separable=True, special=special)
    forward, adjoint = (scan_ops.launch(hole, scan_ops.Sizes(1, tokens, 1, n, 64), back, CPU) for back in (False, True))
    assert hole.by_entry(forward.sizes) == adjoint.by_entry == single
    assert forward.by_entry == (single and special == 0)


@pytest.mark.parametrize("n", [8, 16, 64])
def test_states_are_saved_no_less_often_where_entries_take_more_functions(n):
    def apart(special):
        hole = scan_ops.Hole(None, (), False, False, sums=1, separable=True, special=special)
        adjoint = scan_ops.launch(hole, scan_ops.Sizes(2, 1024, 1, n, 64), True, CPU)
        assert adjoint.by_entry
        return adjoint.tile.M

    found = [apart(special) for special in (0, 1, 2, 4)]
    assert found == sorted(found, reverse=True)
