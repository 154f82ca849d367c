"""Public calls on a CUDA GPU: compiled whole, captured in graphs, checkpointed, under autocast; and the decode step."""

import pytest
import torch
from matrix_family import UNSEEN
from mixer_inputs import RANGES, sample
from step_family import assert_same, decode
from structures import normalised, normalised_product, stabilised_delta
from test_gpu_matrix import state_of
from torch.utils.checkpoint import checkpoint

from dsf import mixers
from dsf.parallel import Simulated

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
NAMES = ["mlstm", "ssd", "gated_deltanet", "gla", "rwkv7", "s6", "qlstm"]
SPECS = [(e.recurrence, e.recurrence.spec) for e in mixers.ZOO]
DECODED = [
    r for r, spec in SPECS
    if not (spec.is_softmax or spec.den_has_channels or spec.mixes_pairs or spec.system.solve is not None)
]  # fmt: skip


def draw(recurrence, batch=2, tokens=128, heads=2, n=64, p=64, dtype=torch.bfloat16, grad=True):
    """Leaves by name."""
    torch.manual_seed(0)
    out = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        lead = [batch, tokens, *([i.kind.steps] if i.kind.steps else []), heads] if i.kind.time else [heads]
        x = RANGES.get(i.name, lambda x: x)(torch.randn([*lead, *sizes], device="cuda"))
        out[i.name] = (x / n**0.5 if i.kind.axes == {"key"} else x).to(dtype).requires_grad_(grad)
    return out


def loss_of(recurrence):
    def loss(*given):
        y, state = recurrence(*given, return_state=True)
        return y.float().square().mean() + state.square().mean()

    return loss


def gradients(loss, given):
    return torch.autograd.grad(loss(*given.values()), list(given.values()), materialize_grads=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_training_call_compiles_whole(name):
    torch.compiler.reset()
    recurrence = mixers.get(name).recurrence
    given = draw(recurrence)
    loss = loss_of(recurrence)
    plain, whole = gradients(loss, given), gradients(torch.compile(loss, fullgraph=True), given)
    for a, b in zip(whole, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


KEPT = [
    "hgrn2", "rwkv6", "s4d", "h3", "kda", "mamba3", "mesanet", "delta_product", "longhorn", "rg_lru", "fox", "rwkv4",
]  # fmt: skip


@pytest.mark.parametrize("recurrence", [mixers.get(name).recurrence for name in [*NAMES, *KEPT]], ids=lambda r: r.name)
def test_what_is_kept_may_lie_on_the_cpu(recurrence):
    """It comes back contiguous, whatever strides it had."""
    given = {n: x.float().cuda().requires_grad_() for n, x in sample(recurrence, tokens=130).items()}

    def loss(*inputs):
        return recurrence(*inputs).square().mean()

    expected = gradients(loss, given)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = loss(*given.values())
    found = torch.autograd.grad(y, list(given.values()), materialize_grads=True)
    for name, a, b in zip(given, found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm(), name


@pytest.mark.parametrize("name", [*NAMES, "linear_attention", "kda", "delta_product", "longhorn", "rg_lru"])
def test_forward_and_training_step_are_captured(name):
    recurrence = mixers.get(name).recurrence
    given = draw(recurrence)
    loss, side = loss_of(recurrence), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # that is where the inputs are made
    with torch.cuda.stream(side):
        expected = gradients(loss, given)
        with torch.no_grad():
            y = recurrence(**given)
    torch.cuda.synchronize()
    graph, forward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(loss, given)
    with torch.no_grad(), torch.cuda.graph(forward):
        again = recurrence(**given)
    graph.replay()
    forward.replay()
    assert torch.equal(again, y) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["mlstm", "ssd", "linear_attention", "gated_deltanet", "rwkv7", "s6"])
def test_parts_of_longer_sequences_with_other_heads_are_what_whole_ones_are(name):
    """Strides of inputs do not tell the number of heads there, and a kernel is compiled for each."""
    recurrence = mixers.get(name).recurrence
    loss = loss_of(recurrence)
    for heads, tokens, p in ((64, 256, 32), (16, 1024, 32), (32, 512, 32), (16, 512, 64), (64, 256, 32)):
        long = draw(recurrence, 1, 2 * tokens, heads, 32, p, grad=False)
        timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
        given = {name: (x[:, tokens:] if name in timed else x).requires_grad_() for name, x in long.items()}
        whole = {
            name: x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for name, x in given.items()
        }
        for _ in range(3):
            for a, b in zip(gradients(loss, given), gradients(loss, whole), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())
        y = recurrence(**{name: x.detach() for name, x in given.items()})
        torch.testing.assert_close(y, recurrence(**{name: x.detach() for name, x in whole.items()}))


RANKED = ["mlstm", "ssd", "linear_attention", "retnet", "gated_deltanet", "kda", "gla", "rwkv7"]


@pytest.mark.parametrize("heads, tokens", [((64, 16), (512, 2048)), ((3, 5), (320, 192))])
@pytest.mark.parametrize("name", RANKED)
def test_ranks_with_other_numbers_of_heads(name, heads, tokens):
    """One after the other in one process, on two simulated ranks: as the whole sequence."""
    recurrence, world = mixers.get(name).recurrence, Simulated(2)
    for h, t in zip(heads, tokens, strict=True):
        given = draw(recurrence, 1, t, h)
        found = gradients(lambda *x: recurrence(*x, parallel=world).float().square().mean(), given)
        whole = gradients(lambda *x: recurrence(*x).float().square().mean(), given)
        for a, b in zip(found, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_and_autocast_change_nothing(name):
    recurrence = mixers.get(name).recurrence
    given = draw(recurrence)
    plain = torch.autograd.grad(recurrence(**given).float().sum(), list(given.values()))
    with torch.autocast("cuda", torch.bfloat16):
        y = checkpoint(lambda *x: recurrence(*x), *given.values(), use_reentrant=False)
    again = torch.autograd.grad(y.float().sum(), list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def step_of(recurrence, batch, heads, n, p, dtype, seed=0):
    given = draw(recurrence, batch, 1, heads, n, p, dtype, grad=False)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {name: x[:, 0] if name in timed else x for name, x in given.items()}


@pytest.mark.parametrize("sizes", [(1, 2, 64, 64), (3, 2, 24, 40), (2, 1, 256, 256), (2, 3, 5, 3), (130, 2, 128, 128)])
@pytest.mark.parametrize("recurrence", [*UNSEEN, *DECODED], ids=lambda r: r.name)
def test_a_step_equals_float64_and_overwrites_on_request(recurrence, sizes):
    given, state = step_of(recurrence, *sizes, torch.bfloat16), state_of(recurrence, *sizes[2:], *sizes[:2])
    y, new = recurrence.step(state, **given)
    wide, last = recurrence.step(state.double(), **{n: x.double() for n, x in given.items()})
    for found, expected, limit in ((y, wide, 8e-3), (new, last, 1e-5)):
        error = (found.double() - expected).abs().amax((-1, *range(2, expected.dim() - 1)))
        assert (error / expected.abs().amax().clamp(min=1e-3)).max().item() < limit
    kept = state.clone()
    again, same = recurrence.step(kept, **given, in_place=True)
    assert same.data_ptr() == kept.data_ptr()
    torch.testing.assert_close(kept, new, rtol=1e-5, atol=1e-5 * new.abs().max().item())
    torch.testing.assert_close(again, y, rtol=1e-2, atol=1e-2 * y.abs().max().item())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sizes", [(1, 5, 2, 64, 64), (3, 5, 2, 24, 40), (130, 4, 2, 128, 128), (2, 7, 3, 5, 3)])
@pytest.mark.parametrize("recurrence", [normalised, normalised_product, stabilised_delta], ids=lambda r: r.name)
def test_gains_by_key_are_decoded_from_the_start(recurrence, sizes, in_place):
    given = draw(recurrence, *sizes, torch.float32, grad=False)
    y, _ = decode(recurrence, given, in_place=in_place)
    assert_same(y.double(), recurrence(**{n: x.double() for n, x in given.items()}, form="naive"), 1e-4)


@pytest.mark.parametrize("recurrence", [*UNSEEN, *(r for r in DECODED if not r.spec.is_framed)], ids=lambda r: r.name)
def test_a_step_is_one_launch(recurrence):  # torch turns what a turn turns, and keeps what prev remembers
    sizes = (4, 2, 64, 64)
    given, state = step_of(recurrence, *sizes, torch.bfloat16), state_of(recurrence, *sizes[2:], *sizes[:2])
    recurrence.step(state, **given, in_place=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        recurrence.step(state, **given, in_place=True)
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1, launched


@pytest.mark.parametrize("batch", [1, 17, 1024])
@pytest.mark.parametrize("name", ["mlstm", "kda", "rwkv7", "s6", "qlstm"])
def test_any_number_of_sequences_is_decoded(name, batch):
    recurrence = mixers.get(name).recurrence
    sizes = (batch, 2, 32, 32)
    given, state = step_of(recurrence, *sizes, torch.bfloat16), state_of(recurrence, *sizes[2:], *sizes[:2])
    y, new = recurrence.step(state, **given)
    wide, last = recurrence.step(state.double(), **{n: x.double() for n, x in given.items()})
    for found, expected, limit in ((y, wide, 8e-3), (new, last, 1e-5)):
        assert ((found.double() - expected).abs().max() / expected.abs().max()).item() < limit


@pytest.mark.parametrize("name", ["mlstm", "gated_deltanet"])
def test_decoding_is_captured_and_compiled(name):
    torch.compiler.reset()
    recurrence = mixers.get(name).recurrence
    sizes = (4, 2, 64, 64)
    given, state = step_of(recurrence, *sizes, torch.bfloat16), state_of(recurrence, *sizes[2:], *sizes[:2])
    recurrence.step(state, **given)
    expected, _ = recurrence.step(recurrence.step(state, **given)[1], **given)
    kept, graph = state.clone(), torch.cuda.CUDAGraph()
    recurrence.step(kept.clone(), **given, in_place=True)
    with torch.cuda.graph(graph):
        y, _ = recurrence.step(kept, **given, in_place=True)
    graph.replay()
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    compiled = torch.compile(lambda s, x: recurrence.step(s, **x), fullgraph=True)
    torch.testing.assert_close(compiled(compiled(state, given)[1], given)[0], expected, rtol=1e-2, atol=1e-2)


def test_the_plan_says_what_decodes():
    given = draw(mixers.rwkv7, tokens=1, grad=False)
    plan = mixers.rwkv7.plan(**given)
    assert plan.backend == "triton" and plan.form == "recurrent" and "decode step" in plan.kernel
    assert "def step(" in plan.source
    given = {name: x.repeat(1, 2, 1, 1) if x.dim() == 4 else x for name, x in given.items()}
    assert "chunk walk" in mixers.rwkv7.plan(**given).kernel
