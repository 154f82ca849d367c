"""Random declarations on the GPU: what the kernels make of any combination that the language allows."""

import random

import pytest
import test_gpu_matrix
import torch
from test_gpu_matrix import outcome, worst
from test_random_systems import CORRECTIONS, DECAYS, GAINS, WRITES, X, declare, system_of

import dsf
from dsf.call.bind import Sizes
from dsf.triton.choose import refusal

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
# dtype, what it errs by where nothing cancels, one rounding
DTYPES = [(torch.float32, 1e-4, 2**-24), (torch.float32, 1e-4, 2**-24), (torch.float16, 1e-2, 2**-11),
          (torch.bfloat16, 2e-2, 2**-8)]  # fmt: skip
SIZES, TOKENS, CUTS = [1, 5, 16, 24, 40, 64, 128], [1, 33, 70, 200, 333], [0, 1, 20, 64, 65]
# more of what the kernels take than a choice among everything would have
MINE = {
    "decays": [*DECAYS[:5], DECAYS[6], dsf.exp(-dsf.softplus(X["sk"])), DECAYS[9]],
    "corrections": [None, *CORRECTIONS[2:5:2]], "writes": WRITES[:2], "gains": [None, None, None, GAINS[2]],
}  # fmt: skip


def declared(seed):
    """The declaration of a seed, or None where the language or the kernels do not take it; and what draws on."""
    pick = random.Random(seed).choice
    recurrence = declare(system_of(pick) if seed % 4 == 0 else system_of(pick, **MINE))
    sizes = Sizes(2, 64, 2, 16, 16, 16)
    if recurrence is None or refusal(
        recurrence.spec, sizes, torch.float32, "auto", torch.device(test_gpu_matrix.DEVICE), True
    ):
        return None
    return recurrence, pick


def leaves_of(recurrence, dtype, tokens, n, p, pick, batch):
    """Inputs by name: Key vectors of unit length at most, two heads or one for all."""
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        heads = 2 if i is recurrence.spec.inputs[-1] else pick([1, 2, 2])
        shape = [batch, tokens, heads, *sizes] if i.kind.time else [2, *sizes]
        x = torch.randn(shape, device=test_gpu_matrix.DEVICE)
        if i.kind.axes == {"key"} and i.kind.time:
            x = torch.nn.functional.normalize(x, dim=-1)
        if pick([False, False, True]) and len(sizes) and i.kind.time:  # a view
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        found[i.name] = x.to(dtype).detach().requires_grad_()
    return found


def assert_errs_as_its_inputs_rounding_does(seed):
    """The kernels' errors for the declaration of a seed beside what moving every input by its rounding changes."""
    found = declared(seed)
    if found is None:
        pytest.skip("no declaration, or none that the kernels take")
    recurrence, pick = found
    dtype, limit, unit = pick(DTYPES)
    n, p, tokens = pick(SIZES), pick(SIZES), pick(TOKENS)
    if (
        recurrence.spec.rule is not None
    ):  # a ratio of one key's entries, or of one token's, does not depend on the query
        n, tokens = max(n, 5), max(tokens, 33)
    packed = tokens > 65 and pick([False, True])
    torch.manual_seed(seed)
    given = leaves_of(recurrence, dtype, tokens, n, p, pick, batch=1 if packed else 2)
    how = {"cu_seqlens": torch.tensor([*CUTS, tokens])} if packed else {}
    ratio = recurrence.spec.rule is not None and recurrence.spec.system.read == "before"  # of nothing, without a state
    if ratio or pick([False, True]):  # a state that the recurrence itself reaches: normalisers are what they may be
        reached = {k: x.detach().double() for k, x in given.items()}
        how["state"] = recurrence(**reached, return_state=True, form="recurrent", **how)[1].float()
    ours = outcome(recurrence, given, dtype, backend="triton", **how)
    exact = outcome(recurrence, given, torch.float64, form="recurrent", backend="torch", **how)
    if dtype == torch.float16 and max(x.abs().max().item() for x in exact.values()) > 1e3:
        pytest.skip("dens near zero: what comes between these gradients is beyond float16's range")
    shaken = {k: x.detach().double() * (1 + unit * torch.randn_like(x, dtype=torch.float64)) for k, x in given.items()}
    moved = outcome(recurrence, shaken, torch.float64, form="recurrent", backend="torch", **how)
    own = {name: worst(moved[name], exact[name]) for name in exact}
    known = [name for name in exact if own[name] < 0.1]  # a ratio whose den comes near zero is anything
    errors = {name: worst(ours[name], exact[name]) for name in known}
    beyond = {name: (errors[name], own[name]) for name in known if not errors[name] < limit + 20 * own[name]}
    assert not beyond, f"{beyond}\n{recurrence}\n{dtype}, N={n}, P={p}, T={tokens}, {sorted(how)}"


@pytest.mark.parametrize("seed", range(256))
def test_a_random_declaration_errs_as_its_inputs_rounding_does(seed):
    assert_errs_as_its_inputs_rounding_does(seed)
