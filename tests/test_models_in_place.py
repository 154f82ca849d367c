"""Decode steps that overwrite their states: the same numbers, in the same memory, and nothing that is still read."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dsf
from dsf import mixers
from dsf.call import decode
from dsf.mixers import GatedDeltaNet, _beside
from dsf.mixers.models import sampling
from dsf.mixers.models.states import ModelState, mapped, tensors_of
from dsf.models import CausalLM, ModelConfig

KINDS = ["gated_deltanet", "ssd", "rwkv7", "mlstm", "retnet", "mamba3", "rg_lru"]
SHARED = {"softmax_attention": {"n_kv_heads": 2}, "fox": {"n_kv_heads": 1}}
HYBRIDS = [["softmax_attention"], ["gated_deltanet", "fox", "softmax_attention"], ["sliding", "alibi", "ssd", "sunk"]]
hybrids = pytest.mark.parametrize("layers", HYBRIDS, ids="+".join)


@torch.no_grad()
def model_of(layers, **fields):
    torch.manual_seed(0)
    config = {"vocab_size": 31, "d_model": 32, "n_layers": len(layers), "n_heads": 2, "mixers": layers}
    return CausalLM(ModelConfig(**config | fields)).eval()


def hybrid(layers):
    """A model in float64 with layers of attention, some of which the configuration has no name for."""
    own = {"sliding": {"window": 70}, "alibi": {"alibi": True}, "sunk": {"window": 5, "sink": "learnt"}}
    named = ["softmax_attention" if x in own else x for x in layers]
    model = model_of(named, n_heads=4, mixer_options={x: SHARED[x] for x in named if x in SHARED})
    for block, x in zip(model.model.layers, layers, strict=True):
        if x in own:
            block.mixer = mixers.SoftmaxAttention(32, 4, n_kv_heads=2, **own[x])
    return model.double()


def places(state):
    return [x.data_ptr() for layer in state.layers for x in tensors_of(layer)]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_place_are_steps(kind):
    model, ids = model_of([kind, "gated_deltanet"]), torch.randint(0, 31, (3, 9))
    plain, own = model(ids[:, :4]).state, model(ids[:, :4]).state
    held, first = tensors_of(own.layers[1]), places(own)
    for t in range(4, 9):
        expected, found = model.step(ids[:, t], plain), model.step(ids[:, t], own, in_place=True)
        assert torch.equal(found.logits, expected.logits)
        plain, own = expected.state, found.state
        for one, other in zip(plain.layers, own.layers, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(tensors_of(one), tensors_of(other), strict=True))
    assert places(own) == first
    assert all(torch.equal(x, y) for x, y in zip(held, tensors_of(own.layers[1]), strict=True))


@torch.no_grad()
def test_hooks_of_a_mixer_see_every_token_also_in_place():
    model, ids, seen = model_of(["gated_deltanet", "softmax_attention"]), torch.randint(0, 31, (3, 9)), []
    whole, state = model(ids).logits, model(ids[:, :4]).state
    expected, held = model.generate(ids, 4), state.layers[0].recurrent
    for block in model.model.layers:
        block.mixer.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
    for t in range(4, 9):
        out = model.step(ids[:, t], state, in_place=True)
        assert torch.allclose(out.logits, whole[:, t], rtol=0, atol=1e-5)
        state = out.state
    assert state.layers[0].recurrent is held
    assert torch.equal(model.generate(ids, 4), expected) and seen == 5 * [1, 1] + [9, 9] + 3 * [1, 1]


@torch.no_grad()
def test_generating_overwrites_no_state_of_the_caller():
    model, ids = model_of(["gated_deltanet", "rwkv7"]), torch.randint(0, 31, (2, 6))
    before = model(ids).state
    kept = [x.clone() for layer in before.layers for x in tensors_of(layer)]
    generated = model.generate(ids, 5)
    slow = ids
    for _ in range(5):
        slow = torch.cat([slow, model(slow).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, slow)
    assert all(torch.equal(x, y) for x, y in zip(kept, [x for s in before.layers for x in tensors_of(s)], strict=True))


@torch.no_grad()
@hybrids
def test_attention_s_steps_in_place_are_the_whole_and_stay_where_they_are(layers):
    model, ids = hybrid(layers), torch.randint(0, 31, (3, 81))
    whole, state = model(ids).logits, model.reserve(model(ids[:, :61]).state, 81)
    first = places(state)
    for t in range(61, 81):
        out = model.step(ids[:, t], state, in_place=True)
        torch.testing.assert_close(out.logits, whole[:, t], rtol=0, atol=1e-10)
        assert places(out.state) == first == places(state)
    later = model(ids[:, :7], state=state)  # a call goes on from there, and the state is still there
    expected = model(torch.cat([ids, ids[:, :7]], 1)).logits[:, 81:]
    torch.testing.assert_close(later.logits, expected, rtol=0, atol=1e-10)
    again = model.step(ids[:, 0], state, in_place=True)
    torch.testing.assert_close(again.logits, expected[:, 0], rtol=0, atol=1e-10)
    rows = torch.tensor([2, 2, 0])  # beams
    found = model.step(ids[rows, 1], again.state.select(rows), in_place=True)
    torch.testing.assert_close(found.logits, expected[rows, 1], rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("layers", [*HYBRIDS, ["retnet", "mamba3", "rg_lru"]], ids="+".join)
def test_joined_states_go_on_as_each_alone(layers):
    """Sequences of other lengths join those that step in place, and some leave, twice."""
    model, ids = hybrid(layers), torch.randint(0, 31, (4, 90))
    whole, held = model(ids).logits, [(0, 68), (1, 68)]  # rows of ids, and how many of its tokens came
    state = model.reserve(model(ids[:2, :68]).state, 80)
    packed, bounds = torch.cat([ids[2, :3], ids[3, :64]])[None], torch.tensor([0, 3, 67])
    new = [(packed, bounds, [(2, 3), (3, 64)]), (ids[1:2, :5], None, [(1, 5)])]
    for tokens, cu_seqlens, rows in new:
        state, held = model.join([state, model(tokens, cu_seqlens=cu_seqlens).state]), held + rows
        for _ in range(3):
            out = model.step(torch.stack([ids[row, n] for row, n in held]), state, in_place=True)
            expected = torch.stack([whole[row, n] for row, n in held])
            torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-10)
            state, held = out.state, [(row, n + 1) for row, n in held]
        state, held = out.state.select(torch.tensor([1, 2, 3])), held[1:4]
    with pytest.raises(dsf.InputError, match="no states to join"):
        model.join([])
    with pytest.raises(dsf.InputError, match=r"of a(nother)? model"):
        model.join([state, model_of(["gated_deltanet"])(ids).state])


class Tape(TorchDispatchMode):
    """What a CUDA graph keeps of a step: its operations on its tensors, with the numbers that the host gave them."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.kept.append((function, args, kwargs or {}, found))
        return found

    def replay(self):
        for function, args, kwargs, found in self.kept:
            own = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)}
            again = function(*args, **kwargs)
            for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(again), strict=True):
                if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in own:
                    x.copy_(y)


def test_a_token_s_block_maps_and_skips_add_nothing_by_an_operator_of_its_own():
    gates, mlstm = mixers.RGLRU(16).input_gate, mixers.MLSTM(16)
    with torch.no_grad():
        for module in (gates, mlstm):
            for parameter in module.parameters():
                parameter.uniform_()
        x, y, u = torch.randn(2, 1, *gates.bias.shape), torch.randn(2, 1, *mlstm.dims[::2]), torch.randn(2, 1, 32)
        with Tape() as tape:
            found = gates(x), mlstm.readout(y, (u,))
        kept = [str(function) for function, *_ in tape.kept]
        assert "aten.bmm.default" in kept and "aten.addcmul.default" in kept and "aten.add.Tensor" not in kept
        inside = F.layer_norm(y, y.shape[-1:]).flatten(2) * mlstm.norm + mlstm.skip * u
        expected = torch.einsum("bthp,hpo->btho", x, gates.weight), mlstm.down_proj(inside)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def tapes(monkeypatch):
    """Graphs of steps on a CPU: tapes."""
    made, thread = [], threading.local()

    def captured(step, device):
        step(), step()
        thread.captures = True
        with Tape() as tape:
            made.append(tape)
            found = step()
        thread.captures = False
        return tape.replay, found

    monkeypatch.setattr(decode, "is_captured", lambda device: getattr(thread, "captures", False))
    monkeypatch.setattr(sampling, "captured", captured)
    return made


def launches(call):
    """The operators of a call that compute, without views."""
    with Tape() as tape:
        call()
    return [str(f) for f, *_ in tape.kept if not f.is_view and f is not torch.ops.aten._unsafe_view.default]


@torch.no_grad()
@pytest.mark.parametrize("kind, most", [("softmax_attention", 10), ("sliding", 8)])
def test_a_layer_of_attention_takes_few_operators_a_token(kind, most):
    layer, x = hybrid([kind]).model.layers[0].mixer, torch.randn(2, 90, 32, dtype=torch.float64)
    state = layer(x)[1]
    options = {}
    for _ in range(2):
        if hasattr(layer, "turns"):  # once for all layers of a model
            options = dict(zip(("cos", "sin"), (y[:, 0] for y in layer.turns(x[:, :1], state)), strict=True))
        state = layer.step(x[:, 0], state, in_place=True, **options)[1]
    found = launches(lambda: layer.step(x[:, 0], state, in_place=True, **options))
    assert len(found) <= most, found  # 2 products, 3 for positions, 3 writes, one read, the count


@torch.no_grad()
@hybrids
def test_what_a_graph_of_attention_s_step_replays_is_the_step(layers, tapes, monkeypatch):
    monkeypatch.setattr(sampling, "READ", 8)
    model, ids = hybrid(layers), torch.randint(0, 31, (2, 57))
    slow = model.generate(ids, 75)
    assert torch.equal(model.generate(ids, 75, graph=True), slow)
    assert len(tapes) == 2, "the first has memory for 128 of 131 tokens"


@torch.no_grad()
def test_a_full_memory_doubles_and_a_graph_is_captured_anew(tapes):
    model, ids = hybrid(["softmax_attention", "gated_deltanet"]), torch.randint(0, 31, (2, 150))
    whole, state = model(ids).logits, model(ids[:, :50]).state
    step, sizes = sampling.CapturedStep(model, ids[:, 50:51], state, 64), []
    for t in range(50, 150):
        found = step(ids[:, t : t + 1])
        torch.testing.assert_close(found, whole[:, t], rtol=0, atol=1e-10)
        sizes.append(step.state.layers[0].recurrent.k.shape[2])
    assert sizes == [64] * 14 + [128] * 64 + [256] * 22 and len(tapes) == 3
    state = step.state.layers[0].recurrent
    assert state.filled.most == 150 and state.lengths.tolist() == [150, 150]


@torch.no_grad()
@hybrids
def test_packed_prompts_go_on_in_place_each_for_itself(layers, tapes):
    model, ids = hybrid(layers), torch.randint(0, 31, (1, 100))
    bounds, new = [0, 3, 3, 90, 100], torch.randint(0, 31, (4, 8))  # the second prompt is empty
    whole = [
        model(torch.cat([ids[:, a:b], new[row : row + 1]], 1)).logits[0, b - a :]
        for row, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    packed = model(ids, cu_seqlens=torch.tensor(bounds)).state
    copied = ModelState(tuple(mapped(s, torch.clone) for s in packed.layers))
    state, step = model.reserve(packed, 95), sampling.CapturedStep(model, new[:, :1], copied, 95)
    for t in range(8):
        out = model.step(new[:, t], state, in_place=True)
        replayed = step(new[:, t : t + 1])
        for row in range(4):
            torch.testing.assert_close(out.logits[row], whole[row][t], rtol=0, atol=1e-10)
            torch.testing.assert_close(replayed[row], whole[row][t], rtol=0, atol=1e-10)
    kept = [x.clone() for layer in state.layers for x in tensors_of(layer)]
    with pytest.raises(dsf.InputError, match="in_place=True is for a step"):  # one token each, but packed
        model(new[:, :1].reshape(1, -1), state=state, cu_seqlens=torch.arange(5), in_place=True)
    assert all(torch.equal(x, y) for x, y in zip(kept, [x for s in state.layers for x in tensors_of(s)], strict=True))


@torch.no_grad()
def test_threads_decode_one_model_each_its_own_sequences(tapes):
    model = hybrid(["softmax_attention", "gated_deltanet", "sliding"])
    prompts = [torch.randint(0, 31, (2, 9 + 20 * i)) for i in range(3)]
    states = [model(ids).state for ids in prompts]
    expected = [model.generate(ids, 60) for ids in prompts]
    drawn = torch.randint(0, 31, (2, 30))
    stepped = [model(torch.cat([ids, drawn], 1)).logits[:, ids.shape[1] :] for ids in prompts]

    def decode_both(i):
        with torch.no_grad():
            state, steps = states[i], []
            for t in range(30):
                out = model.step(drawn[:, t], state, in_place=True)
                state = out.state
                steps.append(out.logits)
            return model.generate(prompts[i], 60, graph=True), torch.stack(steps, 1)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(decode_both, range(3)))
    for (tokens, logits), wanted, right in zip(found, expected, stepped, strict=True):
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(logits, right, rtol=0, atol=1e-10)
    assert len(tapes) == 3


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_reserved_states_are_contiguous_and_stay(kind):
    model, ids = model_of([kind]), torch.randint(0, 31, (3, 9))
    state = model.reserve(model(ids[:, :8]).state, 20)
    first = places(state)
    assert all(x.is_contiguous() for x in tensors_of(state.layers[0]))
    assert places(model.step(ids[:, 8], state, in_place=True).state) == first == places(model.reserve(state, 20))


def test_a_graph_calls_no_hooks():
    model, ids = model_of(["gated_deltanet"]), torch.randint(0, 31, (2, 6))
    model.model.layers[0].mixer.register_forward_hook(lambda *_: None)
    with pytest.raises(dsf.InputError, match="a graph calls no hooks, and a layer's mixer has some"):
        model.generate(ids, 3, graph=True)


def test_a_graph_is_for_a_gpu():
    model, ids = model_of(["gated_deltanet"]), torch.randint(0, 31, (2, 6))
    with pytest.raises(dsf.InputError, match="not on a GPU"):
        model.generate(ids, 5, graph=True)
    assert model.generate(ids, 1, graph=True).shape == (2, 7)  # needs no step


def test_what_cannot_be_overwritten_is_refused_before_anything_is():
    model, ids = model_of(["gated_deltanet"]), torch.randint(0, 31, (2, 3))
    with torch.no_grad():
        state = model(ids).state
    for options in ({"state": None}, {"state": state, "ids": ids}):
        with torch.no_grad(), pytest.raises(dsf.InputError, match="in_place=True is for a step"):
            model(options.pop("ids", ids[:, :1]), in_place=True, **options)
    with pytest.raises(dsf.InputError, match="no gradients"):
        model(ids[:, :1], state=state, in_place=True)
    layer = mixers.GatedDeltaNet(32, n_heads=2)
    x = torch.randn(2, 32)
    with torch.no_grad():
        _, state = layer.step(x)
    kept = [y.clone() for y in tensors_of(state)]
    with pytest.raises(dsf.InputError, match=r"torch\.no_grad"):
        layer.step(x, state, in_place=True)
    assert all(torch.equal(y, z) for y, z in zip(kept, tensors_of(state), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda s: s.mT.contiguous().mT, lambda s: s[:1].expand_as(s)], ids=["turned", "one"])
def test_states_of_other_layouts_hold_the_new_state_too(make):
    layer, x = mixers.DeltaNet(32, n_heads=2), torch.randn(2, 1, 32).expand(2, 4, 32)
    _, state = layer(x[:, :3])
    odd = state._replace(recurrent=make(state.recurrent))
    expected, after = layer.step(x[:, 3], state)
    if odd.recurrent.stride(0) == 0:  # rows share memory: nothing can be written there
        with pytest.raises(dsf.InputError, match="sequences share"):
            layer.step(x[:, 3], odd, in_place=True)
        return
    found, same = layer.step(x[:, 3], odd, in_place=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(same.recurrent, after.recurrent)
    assert same.recurrent.data_ptr() == odd.recurrent.data_ptr()


@torch.no_grad()
def test_a_static_cache_is_overwritten_where_it_goes_on_alone():
    hf = pytest.importorskip("dsf.models.hf")
    config = hf.DsfConfig(vocab_size=31, d_model=32, n_layers=2, n_heads=2, mixers=["gated_deltanet"])
    model, ids = hf.DsfForCausalLM(config).eval(), torch.randint(0, 31, (2, 8))
    cache = hf.DsfCache(config, static=True)
    model(ids[:, :5], past_key_values=cache)
    held = [x for layer in cache.layers for x in tensors_of(layer.state)]
    kept = [x.clone() for x in held]
    looked = model(ids[:, 5:6], past_key_values=cache, use_cache=False).logits  # only looks
    assert all(torch.equal(x, y) for x, y in zip(held, kept, strict=True))
    assert torch.equal(model(ids[:, 5:6], past_key_values=cache).logits, looked)
    after = [x for layer in cache.layers for x in tensors_of(layer.state)]
    assert all(x is y for x, y in zip(held, after, strict=True))
    assert not torch.equal(held[1], kept[1])


@torch.no_grad()
def test_weights_are_read_ahead_only_behind_a_launch_of_the_model(monkeypatch):
    """A layer that is called by itself, or whose weights a hook may gather, waits for the launch before."""
    seen = []

    def linear(x, matrix, ahead=False, bias=None, sigmoid=(0, 0)):
        seen.append(ahead)
        return torch.nn.functional.linear(x, matrix, bias)

    monkeypatch.setattr(_beside, "linear", linear)
    GatedDeltaNet(32, n_heads=2).step(torch.randn(1, 32))
    assert seen and not any(seen)
    model = CausalLM(ModelConfig(vocab_size=11, d_model=32, n_layers=1, mixers=["gated_deltanet"]))
    for hooked in (False, True):
        seen.clear()
        model.step(torch.tensor([3]), model(torch.tensor([[1, 2]])).state)
        assert seen[0] is not hooked
        model.model.layers[0].mixer.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("name", ["gated_deltanet", "rg_lru", "rwkv7"])
def test_a_refused_step_leaves_the_state_as_it_was(name):
    """The window of the convolution had moved on, so that the step that was meant went on from another state."""
    layer, x = mixers.layer_for(name, 16).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    with torch.no_grad():
        (whole, _), (_, state) = layer(x), layer(x[:, :4])
        state = layer.step(x[:, 4], state, in_place=True)[1]
        with pytest.raises((TypeError, dsf.InputError)):
            layer.step(x[:, 5], state, in_place=True, tokens=torch.zeros(2))
        assert torch.allclose(layer.step(x[:, 5], state, in_place=True)[0], whole[:, 5], rtol=0, atol=1e-9)


def test_a_step_in_place_takes_tensors_of_the_token():
    layer, x = mixers.RGLRU(16).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    reset = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]])
    with torch.no_grad():
        (whole, _), (_, state) = layer(x, reset=reset), layer(x[:, :2], reset=reset[:, :2])
        places = [part.data_ptr() for part in (state.conv, state.recurrent)]
        for t in range(2, 6):
            y, state = layer.step(x[:, t], state, in_place=True, reset=reset[:, t])
            assert torch.allclose(y, whole[:, t], rtol=0, atol=1e-9)
        assert places == [part.data_ptr() for part in (state.conv, state.recurrent)]
