"""Packed sequences, their states, resets, pieces and shared heads on the GPU, for one member of every structure."""

import pytest
import torch
from matrix_family import fading_delta, fading_rows, forgetful_delta, late_ratio, swinging
from test_gpu_matrix import compare, draw, outcome, state_of, worst

from dsf.mixers import get

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
BF16 = torch.bfloat16
linear, delta, product, gated, gla, kda, rwkv7, mlstm, s6, rg_lru = (
    get(n).recurrence
    for n in ("unnormalized_linear_attention", "deltanet", "delta_product", "gated_deltanet", "gla", "kda", "rwkv7",
              "mlstm", "s6", "rg_lru")
)  # fmt: skip
KINDS = [linear, swinging, fading_rows, delta, fading_delta, late_ratio, product, rwkv7, mlstm]
SHARED = [swinging, fading_rows, forgetful_delta, fading_delta, mlstm]
CUTS = [0, 1, 65, 128, 300]


def named(recurrences):
    return pytest.mark.parametrize("recurrence", recurrences, ids=lambda r: r.name)


@named(KINDS)
def test_packed_sequences_begin_in_states_of_their_own(recurrence):
    given, state = draw(recurrence, 300, 24, 40, BF16, batch=1), state_of(recurrence, 24, 40, batch=len(CUTS) - 1)
    if recurrence is late_ratio:  # a normaliser near zero would magnify what is rounded
        state[..., 40:] = state[..., 40:].abs() + 1
    # a sequence of one token has one rounding of everything
    compare(recurrence, given, BF16, factor=1.5, state=state, cu_seqlens=torch.tensor(CUTS))


@named(SHARED)
def test_heads_share_queries_and_keys(recurrence):
    compare(recurrence, draw(recurrence, 130, 64, 64, BF16, heads=4, groups=2), BF16)


# recurrence, an input and the value of it that makes A zero
RESETS = [(gated, "alpha", 0.0), (swinging, "a", 0.0), (gla, "g", -2e3), (kda, "g", -2e3), (rg_lru, "reset", 1.0)]
RESETS += [(s6, "dt", 200.0)]


@pytest.mark.parametrize("recurrence, name, zero", RESETS, ids=lambda x: getattr(x, "name", ""))
def test_a_decay_of_zero_begins_a_new_sequence(recurrence, name, zero):
    given = draw(recurrence, 300, 16, 40, torch.float32, batch=1)
    if recurrence is rg_lru:
        given["reset"] = torch.zeros_like(given["reset"]).requires_grad_()
    if recurrence is s6:  # A = exp(-e^A_log softplus(dt)) is zero where dt is large
        given["A_log"] = given["A_log"].detach().abs().requires_grad_()
    with torch.no_grad():
        for cut in CUTS[1:-1]:
            given[name][:, cut] = zero
    whole = outcome(recurrence, given, torch.float32, backend="triton")
    packed = outcome(recurrence, given, torch.float32, backend="triton", cu_seqlens=torch.tensor(CUTS))
    assert worst(whole["y"], packed["y"]) < 1e-4
    assert all(bool(x.isfinite().all()) for x in whole.values())
    compare(recurrence, given, torch.float32)


@named([swinging, fading_rows, fading_delta, product, rwkv7, mlstm, s6, rg_lru])
def test_a_sequence_in_pieces_is_the_whole(recurrence):
    given, cut = draw(recurrence, 1500, 16, 40, torch.float32), 1001
    state = state_of(recurrence, 16, 40)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}

    def halves(**x):
        first, rest = ({k: (v[:, :cut], v[:, cut:])[i] if k in timed else v for k, v in x.items()} for i in (0, 1))
        y, middle = recurrence(**first, initial_state=state, return_state=True, backend="triton")
        z, final = recurrence(**rest, initial_state=middle, return_state=True, backend="triton")
        return torch.cat([y, z], 1), final

    both = []
    for run in (lambda **x: recurrence(**x, initial_state=state, return_state=True, backend="triton"), halves):
        leaves = {k: x.detach().requires_grad_() for k, x in given.items()}
        y, final = run(**leaves)
        true = recurrence.true_state(final, 40)
        loss = (y * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum() + true.tanh().sum()
        both.append([y, true, *torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)])
    for a, b in zip(*both, strict=True):
        assert worst(a, b) < 2e-4
