"""dsf.convert, dsf.analysis.record and dsf analyze on our own layers and models, from the declaration alone."""

import pytest
import torch
from torch import nn

import dsf
from dsf.analysis import measures, record
from dsf.mixers import ZOO, layer_for
from dsf.models import CausalLM, ModelConfig


def test_every_member_of_the_zoo_is_opened():
    ids = torch.randint(0, 31, (1, 9))
    for entry in ZOO:
        options = {"n_heads": 2} if entry.name == "softmax_attention" else {}
        model = nn.Sequential(nn.Embedding(31, 64), layer_for(entry.name, 64, **options))
        before = model(ids)[0]
        with dsf.convert(model) as converted:
            (layer,) = converted.layers
            assert layer.recurrence is model[1].recurrence and layer.name == "1", entry.name
            with record(converted) as rec:
                after = model(ids)[0]
        assert torch.equal(before, after)
        (found,) = rec
        assert found.trajectory.tokens == 9
        if found.trajectory.attention is None:
            assert measures.half_life(found.trajectory, "decay").shape[1] == layer.state[0], entry.name
        assert torch.equal(model(ids)[0], before)  # undone


def test_a_recorded_model_shows_what_its_layers_computed():
    model = CausalLM(ModelConfig(vocab_size=31, d_model=32, n_layers=2, n_heads=2, mixers=["ssd", "softmax_attention"]))
    model, ids = model.eval().double(), torch.randint(0, 31, (1, 12))
    mixer = model.model.layers[0].mixer
    with dsf.convert(model) as converted, record(converted, dtype=torch.float64) as rec:
        model(ids)
    assert rec.layers == ("model.layers.0.mixer", "model.layers.1.mixer")
    trajectory = rec.trajectory("model.layers.0.mixer")
    phi = measures.kernel_matrix(trajectory)
    assert phi.shape.count(12) == 2 and measures.half_life(trajectory).isfinite().all()
    assert rec.trajectory("model.layers.1.mixer").attention.k.shape == (1, 2, 12, 16)
    size = converted.state_size(100)
    assert size["model.layers.0.mixer"].recurrent + size["model.layers.0.mixer"].conv == mixer.state_size(100)
    assert size["model.layers.1.mixer"].recurrent == 100 * 2 * 32


def test_swapped_models_are_opened_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=31
    )
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 31, (1, 12))
    dsf.models.swap(model, "gated_deltanet", [0])
    before = model(ids).logits
    with dsf.convert(model) as converted:
        assert [layer.kind for layer in converted.layers] == ["GatedDeltaNet", "softmax"] and not converted.left_alone
        assert torch.allclose(model(ids).logits, before, atol=1e-5)
