"""More than 2^31 elements, forward and backward: a long sequence ends as its end does, run from the state before it."""

import fcntl
import math
import tempfile
from pathlib import Path

import pytest
import torch
from test_gpu_matrix import draw, worst

from dsf.mixers import get

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
# heads, N, P; keys (matrix families) or channels (scans) have the many elements
SIZES = {"retnet": (64, 128, 16), "gla": (64, 128, 16), "gated_deltanet": (64, 128, 16), "kda": (64, 128, 16)}
SIZES |= {"rwkv7": (64, 128, 16), "mingru": (2, 1, 4096), "s6": (2, 4, 4096)}
TOKENS, REST = 2**18 + 640, 704
FEW = 6208  # tokens that are cut into as many segments


def repeated(recurrence, tokens, heads, n, p):
    """Leaves of one sequence, the numbers of 2048 tokens again and again; and the names of those with tokens."""
    given = draw(recurrence, 2048, n, p, torch.bfloat16, batch=1, heads=heads)
    timed = [i.name for i in recurrence.spec.inputs if i.kind.time]
    for name in timed:
        x = given[name].detach()
        x = x.repeat(1, -(-tokens // 2048), *[1] * (x.dim() - 2))[:, :tokens]
        # one sequence lies anywhere: as far from the next as in a long call, so that the same kernels are compiled
        far = x.as_strided(x.shape, (TOKENS * x.stride(1), *x.stride()[1:]))
        given[name] = far.requires_grad_()
    return given, timed


def errors(recurrence, tokens, sizes):
    """Of y and of the gradients of the last tokens, beside what they are when run from the state before them."""
    given, timed = repeated(recurrence, tokens, *sizes)
    assert tokens < TOKENS or max(x.numel() for x in given.values()) > 2**31
    cut = tokens - REST
    tail = {k: (x[:, cut:] if k in timed else x).detach().clone().requires_grad_() for k, x in given.items()}
    with torch.no_grad():
        head = {k: x[:, :cut] if k in timed else x for k, x in given.items()}
        _, state = recurrence(**head, return_state=True, backend="triton")
    y = recurrence(**given, backend="triton")
    alone = recurrence(**tail, initial_state=state, backend="triton")
    dy = torch.randn_like(alone)
    found = torch.autograd.grad(y[:, cut:], [given[k] for k in timed], dy, materialize_grads=True)
    expected = torch.autograd.grad(alone, [tail[k] for k in timed], dy, materialize_grads=True)
    pairs = zip(["y", *timed], [y, *found], [alone, *expected], strict=True)
    return {name: worst(a[:, cut:], b) if bool(a[:, :64].isfinite().all()) else math.inf for name, a, b in pairs}


@pytest.mark.parametrize("name", SIZES)
def test_more_than_two_to_the_31_elements(name):
    recurrence, sizes = get(name).recurrence, SIZES[name]
    few = errors(recurrence, FEW, sizes)  # compiles
    with Path(tempfile.gettempdir(), "dsf-large.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time, whatever runs the tests: each takes tens of GiB
        many = errors(recurrence, TOKENS, sizes)
        torch.cuda.empty_cache()
    assert not {x: e for found in (few, many) for x, e in found.items() if not e < 3e-2}
