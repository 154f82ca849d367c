"""Decode steps that overwrite their states: the same numbers, in the same memory, and nothing that is still read."""

import pytest
import torch

import dsf
from dsf import mixers
from dsf.mixers.models.states import tensors_of
from dsf.models import CausalLM, ModelConfig

KINDS = ["gated_deltanet", "ssd", "rwkv7", "mlstm", "retnet", "mamba3", "rg_lru", "softmax_attention"]


@torch.no_grad()
def model_of(layers):
    torch.manual_seed(0)
    return CausalLM(ModelConfig(vocab_size=31, d_model=32, n_layers=len(layers), n_heads=2, mixers=layers)).eval()


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
    if kind != "softmax_attention":  # its keys and values lie in a cache that grows
        assert places(own) == first
    assert all(torch.equal(x, y) for x, y in zip(held, tensors_of(own.layers[1]), strict=True))


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
        with pytest.raises(RuntimeError, match="single memory location"):
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
