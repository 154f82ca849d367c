"""What forward and backward of the chunk kernels allocate, on tensors without memory, beside the best peer."""

import pytest
import torch

from dsf.mixers import get
from dsf.triton.chunk import program_of

pytest.importorskip("triton")
from dsf.kernels.triton.chunk.operator import PROGRAMS, matrix_mixer, matrix_mixer_backward
from dsf.kernels.triton.operators import schedule_of

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "heads", "keys", "values", "tokens", "batch", "most"),
    [
        ("deltanet", 16, 128, 128, 8192, 4, 1857),
        ("deltanet", 32, 64, 64, 8192, 4, 1666),
        ("deltanet", 8, 64, 64, 1024, 8, 104),
        ("gated_deltanet", 16, 128, 128, 8192, 4, 846),
        ("gated_deltanet", 32, 64, 64, 8192, 4, 1678),
        ("gated_deltanet", 8, 64, 64, 1024, 8, 105),
        ("rwkv7", 16, 128, 128, 8192, 4, 3000),
        ("rwkv7", 32, 64, 64, 8192, 4, 3300),
        ("mlstm", 16, 128, 128, 8192, 4, 790),
        ("ssd", 64, 128, 64, 2048, 16, 1140),
        ("ssd", 64, 128, 64, 8192, 4, 1116),
        ("ssd", 64, 128, 64, 32768, 1, 1110),
    ],
)
def test_no_more_memory_than_the_best_peer(name, heads, keys, values, tokens, batch, most):
    spec = get(name).recurrence.spec
    given, like = [], {"dtype": torch.bfloat16, "device": "meta"}
    for i in spec.inputs:
        sizes = [{"key": keys, "value": values}[a] for a in ("key", "value") if a in i.kind.axes]
        shared = name == "ssd" and i.name in ("b", "c")
        lead = [batch, tokens, 1 if shared else heads] if i.kind.time else [heads]
        given.append(torch.empty(*lead, *sizes, **like))
    program = program_of(spec)[1]
    forward = schedule_of(matrix_mixer, given, None, program, True)
    y, _, saved = forward.empty(given[0])
    dy, needs = torch.empty_like(y), [True] * len(given)
    beside = [*saved, y] if PROGRAMS[program].quotient else saved
    backward = schedule_of(matrix_mixer_backward, dy, None, given, None, beside, program, needs)
    held = sum(x.untyped_storage().nbytes() for x in (y, *saved))
    assert max(forward.peak, held + backward.peak) / MIB < most
