"""More than 2^31 elements, forward and backward: a long sequence ends as its end does, run from the state before it."""

import math

import pytest
import torch
from test_gpu_matrix import draw, worst

from dsf.mixers import get

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
# keys (matrix families) or channels (scans) have the many elements
SIZES = {"retnet": (64, 128, 16), "gla": (64, 128, 16), "deltanet": (64, 128, 16), "gated_deltanet": (64, 128, 16)}
SIZES |= {"kda": (64, 128, 16), "rwkv7": (64, 128, 16), "mingru": (2, 1, 4096), "s6": (2, 4, 4096)}
TOKENS, CUT = 2**18 + 640, 2**18 - 64


def repeated(recurrence, heads, n, p):
    """Leaves of one sequence, the numbers of 4096 tokens again and again; and the names of those with tokens."""
    given = draw(recurrence, 4096, n, p, torch.bfloat16, batch=1, heads=heads)
    timed = [i.name for i in recurrence.spec.inputs if i.kind.time]
    for name in timed:
        x = given[name].detach()
        given[name] = x.repeat(1, -(-TOKENS // 4096), *[1] * (x.dim() - 2))[:, :TOKENS].requires_grad_()
    return given, timed


def errors(recurrence, given, timed):
    """Of y and of the gradients of the last tokens, beside what they are when run from the state before them."""
    tail = {k: (x[:, CUT:] if k in timed else x).detach().clone().requires_grad_() for k, x in given.items()}
    with torch.no_grad():
        head = {k: x[:, :CUT] if k in timed else x for k, x in given.items()}
        _, state = recurrence(**head, return_state=True, backend="triton")
    y = recurrence(**given, backend="triton")
    alone = recurrence(**tail, initial_state=state, backend="triton")
    dy = torch.randn_like(alone)
    found = torch.autograd.grad(y[:, CUT:], [given[k] for k in timed], dy)
    expected = torch.autograd.grad(alone, [tail[k] for k in timed], dy)
    pairs = zip(["y", *timed], [y, *found], [alone, *expected], strict=True)
    return {name: worst(a[:, CUT:], b) if bool(a[:, :64].isfinite().all()) else math.inf for name, a, b in pairs}


def test_more_than_two_to_the_31_elements():
    beyond = {}  # one test, so that one recurrence at a time has the tens of GiB that it takes
    for name, sizes in SIZES.items():
        recurrence = get(name).recurrence
        given, timed = repeated(recurrence, *sizes)
        assert max(x.numel() for x in given.values()) > 2**31
        beyond |= {f"{name} {x}": e for x, e in errors(recurrence, given, timed).items() if not e < 3e-2}
        del given
        torch.cuda.empty_cache()
    assert not beyond
