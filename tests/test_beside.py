"""Weights of maps of one input, behind each other in memory: one product a token, and parameters like any other."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from dsf import mixers
from dsf.mixers import _beside
from dsf.mixers._beside import outputs
from dsf.mixers.models.parts import SwiGLU
from dsf.models import CausalLM, ModelConfig

LAYERS = {  # products of a token, beside each other and not
    "gated_deltanet": (mixers.GatedDeltaNet, 2, 4), "deltanet": (mixers.DeltaNet, 2, 3), "gla": (mixers.GLA, 3, 5),
    "softmax_attention": (mixers.SoftmaxAttention, 2, 4), "retnet": (mixers.RetNet, 2, 3),
    "linear_attention": (mixers.LinearAttention, 2, 4), "kda": (mixers.KDA, 4, 7),
}  # fmt: skip
each = pytest.mark.parametrize("kind", LAYERS)


class Products(TorchFunctionMode):
    """Counts linear maps."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is nn.functional.linear
        return function(*args, **(kwargs or {}))


def stepped(layer, x):
    """(the last token's output after a prompt, the products that it took)."""
    with torch.no_grad():
        _, state = layer(x[:, :-1])
        with Products() as products:
            y, _ = layer.step(x[:, -1], state)
    return y, products.count


def made(kind, **options):
    torch.manual_seed(0)
    layer = LAYERS[kind][0](32, n_heads=2, **options).double()
    return layer, torch.randn(2, 5, 32, dtype=torch.float64)


@each
def test_a_token_takes_one_product_of_maps_beside_each_other(kind):
    (layer, x), (_, few, many) = made(kind), LAYERS[kind]
    with torch.no_grad():
        whole = layer(x)[0][:, -1]
    for one in (layer, copy.deepcopy(layer)):  # a copy's weights lie apart
        y, products = stepped(one, x)
        assert products == (few if one is layer else many)
        torch.testing.assert_close(y, whole, rtol=0, atol=1e-12)
    again, products = stepped(copy.deepcopy(layer).float().double(), x)  # moved, they lie beside each other again
    assert products == few
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-6)


@each
def test_weights_beside_each_other_are_trained_saved_and_loaded_like_any_other(kind, tmp_path):
    (layer, x), few = made(kind), LAYERS[kind][1]
    apart = copy.deepcopy(layer)
    for one in (layer, apart):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            one(x)[0].square().sum().backward()
            optimizer.step()
    for (name, p), q in zip(layer.named_parameters(), apart.parameters(), strict=True):
        assert p.is_leaf and p.is_contiguous() and torch.equal(p.grad, q.grad) and torch.equal(p, q), name
    y, products = stepped(layer, x)  # reads what was trained
    assert products == few
    torch.testing.assert_close(y, stepped(apart, x)[0], rtol=0, atol=1e-12)
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    for assign in (False, True):
        fresh = made(kind)[0]
        fresh.load_state_dict(torch.load(tmp_path / "weights.pt"), assign=assign)
        torch.testing.assert_close(stepped(fresh, x)[0], y, rtol=0, atol=1e-12)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(layer.state_dict(), tmp_path / "weights.safetensors")
    kept = safetensors.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in layer.state_dict().items())


def test_what_saves_models_takes_no_weight_for_another(tmp_path):
    """safetensors and accelerate look at storages: of several that are one they keep one, or nothing."""
    safetensors, accelerate = (pytest.importorskip(name) for name in ("safetensors.torch", "accelerate"))
    config = ModelConfig(
        vocab_size=31, d_model=32, n_layers=2, mixers=["linear_attention", "kda"], tie_embeddings=False
    )
    torch.manual_seed(0)
    model, other = CausalLM(config), CausalLM(config)
    stored = [p.untyped_storage() for p in model.parameters()]
    assert len({s.data_ptr() for s in stored}) == len(stored)
    assert all(s.nbytes() == p.numel() * 4 for s, p in zip(stored, model.parameters(), strict=True))
    safetensors.save_model(model, tmp_path / "model.safetensors")
    safetensors.load_model(other, tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    run = accelerate.Accelerator(cpu=True)
    made = run.prepare(model)
    run.save_model(made, tmp_path / "whole")
    assert safetensors.load_file(tmp_path / "whole" / "model.safetensors").keys() == model.state_dict().keys()
    run.save_state(tmp_path / "state")
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    run.load_state(tmp_path / "state")
    assert all(torch.equal(x, kept[name]) for name, x in model.state_dict().items())
    with torch.no_grad():
        x = torch.randn(1, 1, 32)
        assert all(outputs(x, block.mixer.maps_beside()) is not None for block in model.model.layers)


def test_memory_of_weights_beside_each_other_is_free_once_none_is_in_it():
    layer = mixers.RetNet(32, n_heads=2)
    first, second = (m.weight for m in layer.maps_beside())
    view = _beside._views[first.data_ptr()]
    second.data = second.data.clone()
    assert view() is not None  # of the first
    first.data = first.data.clone()
    assert view() is None
    layer.double()  # moved, they lie beside each other again
    assert outputs_of(layer)
    view = _beside._views[first.data_ptr()]
    del layer, first, second
    gc.collect()
    assert view() is None and not any(kept is view for kept in _beside._views.values())


@pytest.fixture
def swapping():
    """Parameters change places with others where modules are moved and loaded, as torch plans to."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_weights_beside_each_other_can_change_places_with_others(swapping):
    """torch swaps no parameter that something holds a weak reference to: layers could not be moved or loaded."""
    (layer, x), other = made("gated_deltanet"), made("gated_deltanet")[0]
    expected, _ = stepped(layer, x)
    other.float().double().load_state_dict(layer.state_dict())
    assert outputs_of(other) and all(p.dtype == torch.float64 for p in other.parameters())
    torch.testing.assert_close(stepped(other, x)[0], expected, rtol=0, atol=1e-12)
    model = CausalLM(ModelConfig(vocab_size=31, d_model=32, n_layers=1, mixers=["gla"]))
    assert model.double().lm_head.weight is model.model.embed_tokens.weight


STEPPED = [e for e in mixers.ZOO if hasattr(e.module, "step")]


@pytest.mark.parametrize("entry", STEPPED, ids=lambda e: e.name)
def test_every_layer_s_token_is_that_of_weights_apart(entry):
    torch.manual_seed(0)
    layer, x = entry.module(d_model=32).double(), torch.randn(2, 4, 32, dtype=torch.float64)
    y, products = stepped(layer, x)
    other, apart = stepped(copy.deepcopy(layer), x)
    torch.testing.assert_close(y, other, rtol=0, atol=1e-12)
    maps = layer.maps_beside()
    small = isinstance(layer, mixers.GatedDeltaNet)  # two small maps share a product in any case
    assert apart - products == (len(maps) - 1 - small if outputs_of(layer) else 0)
    assert outputs_of(layer) == (len(maps) > 1 and len({m.bias is None for m in maps}) == 1)


def outputs_of(layer):
    with torch.no_grad():
        return outputs(torch.zeros(1, 1, 32, dtype=torch.float64), layer.maps_beside()) is not None


def test_maps_that_are_wrapped_hooked_or_replaced_are_called():
    layer, x = made("softmax_attention")
    expected, calls = stepped(layer, x)[0], []
    handle = layer.k_proj.register_forward_hook(lambda *_: calls.append("hook"))
    assert torch.equal(stepped(layer, x)[0], expected) and len(calls) == 2
    handle.remove()
    plain, layer.q_proj = layer.q_proj, nn.Sequential(layer.q_proj)
    assert stepped(layer, x)[1] == 4
    layer.q_proj = plain
    assert stepped(layer, x)[1] == 2
    with torch.no_grad():
        layer.v_proj.weight = nn.Parameter(2 * layer.v_proj.weight)
        twice, products = stepped(layer, x)
        assert products == 4
    torch.testing.assert_close(twice, 2 * expected, rtol=0, atol=1e-12)


def test_maps_of_blocks_that_are_hooked_are_called():
    torch.manual_seed(0)
    layer, x, calls = mixers.MLSTM(32, n_heads=2).double(), torch.randn(2, 5, 32, dtype=torch.float64), []
    expected, _ = stepped(layer, x)
    layer.v_proj.register_forward_hook(lambda *_: calls.append("hook"))
    torch.testing.assert_close(stepped(layer, x)[0], expected, rtol=0, atol=1e-12)
    assert len(calls) == 2  # of the prompt and of the token


def test_gates_see_what_hooked_and_pruned_maps_of_blocks_make():
    """Of whole sequences they saw the maps without the hook, of single tokens with it; pruned maps trained one step."""
    torch.manual_seed(0)
    layer, x = mixers.MLSTM(32, n_heads=2).double(), torch.randn(2, 5, 32, dtype=torch.float64)
    nn.init.normal_(layer.gates.weight)
    twice, half = copy.deepcopy(layer), copy.deepcopy(layer)
    handle = layer.v_proj.register_forward_hook(lambda module, args, y: 2 * y)
    with torch.no_grad():
        twice.v_proj.weight *= 2
        torch.testing.assert_close(layer(x)[0], twice(x)[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(stepped(layer, x)[0], twice(x)[0][:, -1], rtol=0, atol=1e-12)
    handle.remove()
    prune.l1_unstructured(layer.q_proj, "weight", 0.5)
    with torch.no_grad():
        half.q_proj.weight *= layer.q_proj.weight_mask
        layer.q_proj.weight_orig *= 3
        half.q_proj.weight *= 3
    for _ in range(2):
        found, expected = layer(x)[0], half(x)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        found.square().sum().backward()


def test_pruned_gates_of_blocks_are_those_of_now():
    """Their weight was read before the call in which pruning computes it: that of the step before."""
    torch.manual_seed(0)
    layer, x = mixers.MLSTM(32, n_heads=2).double(), torch.randn(2, 5, 32, dtype=torch.float64)
    other = copy.deepcopy(layer)
    prune.identity(layer.gates, "weight")
    for _ in range(3):
        with torch.no_grad():
            nn.init.normal_(layer.gates.weight_orig)
            other.gates.weight.copy_(layer.gates.weight_orig)
        found, expected = layer(x)[0], other(x)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(stepped(layer, x)[0], expected[:, -1], rtol=0, atol=1e-12)
        found.square().sum().backward()


def test_weights_that_cannot_lie_beside_each_other_are_multiplied_one_by_one():
    token = torch.randn(1, 1, 3)
    with torch.no_grad():
        odd = SwiGLU(3, 5)  # rows of 12 bytes
        assert outputs(token, (odd.gate_proj, odd.up_proj)) is None and odd(token).shape == (1, 1, 3)
        biased = mixers.SoftmaxAttention(32, n_heads=2, bias=True)
        plain = mixers.SoftmaxAttention(32, n_heads=2)
        x = torch.randn(1, 1, 32)
        for made, m in zip(outputs(x, biased.maps_beside()), biased.maps_beside(), strict=True):
            torch.testing.assert_close(made, m(x))
        assert outputs(x, [*biased.maps_beside(), plain.q_proj]) is None
        biased.v_proj.bias = nn.Parameter(biased.v_proj.bias.clone())
        assert outputs(x, biased.maps_beside()) is None
        assert outputs(x, plain.maps_beside()) is not None and outputs(x.expand(1, 2, 32), plain.maps_beside()) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert outputs(x, plain.maps_beside()) is None
    assert outputs(x, plain.maps_beside()) is None  # with gradients
    meta = mixers.SoftmaxAttention(32, n_heads=2, device="meta")
    with torch.no_grad():
        assert outputs(x, meta.maps_beside()) is None
        empty = meta.to_empty(device="cpu")
        empty.load_state_dict(plain.state_dict())
        for a, b in zip(outputs(x, empty.maps_beside()), outputs(x, plain.maps_beside()), strict=True):
            assert torch.equal(a, b)
    shared = mixers.SoftmaxAttention(32, n_heads=2).share_memory()
    assert all(p.is_shared() for p in shared.parameters())


def test_a_model_s_token_takes_two_products_of_its_mlp():
    config = ModelConfig(vocab_size=31, d_model=32, n_layers=1, n_heads=2, mixers=["ssd"], tie_embeddings=False)
    for model in (CausalLM(config).eval(), copy.deepcopy(CausalLM(config)).eval()):
        with torch.no_grad():
            state = model(torch.randint(0, 31, (2, 5))).state
            with Products() as products:
                model.step(torch.randint(0, 31, (2,)), state)
        assert products.count in (5, 6)  # 2 of SSD, the head
    assert products.count == 6
