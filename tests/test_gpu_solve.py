"""Readouts by a solve on a GPU, against float64, per head and block of tokens."""

import pytest
import torch
from test_triton_solve import CASES, drawn, outcome, state_of, worst

from dsf import mixers

pytestmark = pytest.mark.gpu
BOUNDS = [0, 5, 5, 90, 300, 517]


def on_gpu(found):
    return {name: x.cuda() for name, x in found.items()}


@pytest.mark.parametrize("n, p", [(64, 64), (128, 128), (40, 24)])
@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_are_the_oracles(name, n, p):
    recurrence, how = CASES[name]
    batch, options = (1, {"cu_seqlens": torch.tensor(BOUNDS)}) if how.get("packed") else (2, {})
    given = drawn(recurrence, BOUNDS[-1], n, p, batch=batch)
    state = state_of(recurrence, len(BOUNDS) - 1 if how.get("packed") else batch, 2, n, p) if how.get("state") else None
    exact, slopes = outcome(recurrence, given, state, torch.float64, form="naive", **options)
    options = {key: x.cuda() for key, x in options.items()}
    start, slopes = None if state is None else state.cuda(), [x.cuda() for x in slopes]
    for dtype, limits in ((torch.float32, {}), (torch.bfloat16, {"y": 3e-3, "final": 1e-4, "dq": 4e-3})):
        for _ in range(3):  # the third call, too
            found, _ = outcome(recurrence, on_gpu(given), start, dtype, slopes, **options)
        for key, expected in exact.items():
            limit = 1e-4 if dtype == torch.float32 else limits.get(key, 3e-2)
            assert worst(found[key].cpu(), expected, 64) < limit, (dtype, key)


def test_a_new_length_and_a_graph_of_one():
    given = on_gpu({name: x.bfloat16() for name, x in drawn(mixers.mesanet, 300, 64, 64).items()})
    exact = mixers.mesanet(**{name: x.double() for name, x in given.items()}, form="recurrent")
    shorter = {name: x if name == "lam" else x[:, :131] for name, x in given.items()}
    with torch.no_grad():
        for x in (given, shorter, given):
            y = mixers.mesanet(**x)
        mixers.mesanet(**shorter)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = mixers.mesanet(**shorter)
        graph.replay()
    assert worst(y, exact, 64) < 3e-3
    assert worst(held, exact[:, :131], 64) < 3e-3
