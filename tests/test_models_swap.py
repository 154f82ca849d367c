"""dsf.models.swap: mixers in a Llama-like model, and back."""

import warnings

import pytest
import torch

import dsf
from dsf.mixers.models import swapping

transformers = pytest.importorskip("transformers")

from tiny_models import by_whole_sequences  # noqa: E402

OWN = """import dsf
from dsf import Key, Param, Scalar, System, Value, sigmoid


@dsf.recurrence
def fading(q: Key, k: Key, v: Value, rate: Param[Scalar]) -> System:
    return System(A=sigmoid(rate), B=k * v, C=q)
"""


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


def llama(layers=4):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().double()


def generated(model, ids, **options):
    fixed = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}  # none ends before others
    return model.generate(ids, **fixed, **options)


@pytest.mark.parametrize(
    ("mixer", "layers"), [(dsf.mixers.GatedDeltaNet, [0, 1, 3]), ("s6", None), ("rg_lru", [1]), ("mlstm", [0, 1, 3])]
)
def test_generation_with_and_without_a_cache(mixer, layers):
    model, ids = llama(), torch.randint(1, 64, (2, 9))
    before, names = model(ids).logits, set(dict(model.named_parameters()))
    handle = dsf.models.swap(model, mixer, layers)
    assert sorted(handle.mixers) == (layers or [0, 1, 2, 3])
    assert not torch.allclose(model(ids).logits, before, atol=1e-3)
    greedy = generated(model, ids, use_cache=False)
    assert torch.equal(generated(model, ids), greedy)
    assert torch.equal(generated(model, ids, cache_implementation="static"), greedy)
    beams = generated(model, ids, num_beams=3, use_cache=False)
    assert torch.equal(generated(model, ids, num_beams=3), beams)

    padded = torch.cat([torch.full((2, 3), 7), ids], 1)
    padded[1] = torch.cat([ids[1], ids[1, :3]])
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    assert torch.allclose(model(padded, attention_mask=mask).logits[0, 3:], model(ids[:1]).logits[0], atol=1e-9)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert torch.equal(generated(model, padded, attention_mask=mask, **options)[0, 12:], greedy[0, 9:])

    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    packed = model(ids[:1], position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(ids[:1, :4]).logits, model(ids[:1, 4:]).logits], 1)
    assert torch.allclose(packed, apart, atol=1e-9)

    assert handle.undo() is model
    assert torch.equal(model(ids).logits, before) and set(dict(model.named_parameters())) == names


def windowed(kind, attention, **fields):
    """A model whose layers have windows of 4 tokens, every other one in the first kind."""
    config, model = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "sliding_window": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    return model(config(**sizes, **heads, **fields, attn_implementation=attention)).eval()


@pytest.mark.parametrize("layers", [None, [0], [1]])
@pytest.mark.parametrize(("kind", "attention"), [("Gemma2", "eager"), ("Mistral", "eager"), ("Mistral", "sdpa")])
def test_tokens_outside_of_a_window_are_no_padding(kind, attention, layers):
    model, ids = windowed(kind, attention), torch.randint(1, 64, (1, 12))
    dsf.models.swap(model, "gated_deltanet", layers)
    with torch.no_grad():
        whole, cache, parts = model(ids, use_cache=False).logits, None, []
        for part in ids.split([5, 1, 4, 2], 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-4)
        more, mask = torch.cat([ids, ids[:, :3]], 1), torch.arange(15)[None] < 12
        right = model(more, attention_mask=mask.long(), use_cache=False).logits
        left = model(more.roll(3, 1), attention_mask=mask.roll(3, 1).long(), use_cache=False).logits
        for found in (right[:, :12], left[:, 3:]):
            assert torch.allclose(found, whole, rtol=0, atol=1e-4)
    options = {"return_dict_in_generate": True, "output_logits": True}
    greedy = torch.stack(generated(model, ids, use_cache=False, **options).logits)
    for given in ({}, {"cache_implementation": "static"}):
        found = generated(model, more.roll(3, 1), attention_mask=mask.roll(3, 1).long(), **options, **given)
        assert torch.allclose(torch.stack(found.logits), greedy, rtol=0, atol=1e-4)
        found = generated(model, ids, **options, **given)
        assert torch.allclose(torch.stack(found.logits), greedy, rtol=0, atol=1e-4)


def test_a_saved_swapped_model_says_what_it_needs_and_is_found_again(tmp_path):
    model, ids = llama(), torch.randint(1, 64, (2, 9))
    dsf.models.swap(model, dsf.mixers.GatedDeltaNet, [0, 1], d_conv=3)
    second = dsf.models.swap(model, "ssd", [3])
    model = model.float()
    model.generation_config.max_new_tokens = 7
    with pytest.warns(UserWarning, match=r"gated_deltanet in layers \[0, 1\]; ssd in layers \[3\].*load_swapped"):
        model.save_pretrained(tmp_path)
    loaded = dsf.models.load_swapped(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.max_new_tokens == 7
    assert loaded.model.layers[0].self_attn.mixer.conv1d.kernel_size == (3,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.undo()
    assert model.config.dsf_swap[0]["layers"] == [0, 1]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(dsf.InputError, match="no weights"):
        dsf.models.load_swapped(tmp_path)


def test_a_swapped_mixer_takes_the_cache_by_both_names():
    from transformers import DynamicCache

    x = torch.randn(2, 7, 32)
    layer = swapping.SwappedAttention(dsf.mixers.GatedDeltaNet(32, 2), 0).eval()
    whole, _ = layer(x)
    for name in ("cache", "past_key_values"):
        cache = DynamicCache()
        parts = [layer(part, **{name: cache})[0] for part in x.split([4, 3], dim=1)]
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2])
def test_left_padding_is_none_of_the_text_where_prompts_are_read_in_chunks(chunk):
    model, ids = llama(2).float(), torch.randint(1, 64, (2, 9))
    dsf.models.swap(model, "gated_deltanet")
    mask = (torch.arange(9) >= torch.tensor([[4], [1]])).long()
    options = {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask}
    whole, parts = generated(model, ids, **options), generated(model, ids, prefill_chunk_size=chunk, **options)
    assert torch.allclose(torch.stack(parts.logits), torch.stack(whole.logits), rtol=0, atol=1e-4)


def test_masks_of_flex_attention_say_what_is_padding():
    from torch.nn.attention.flex_attention import create_block_mask

    real = torch.arange(9) >= torch.tensor([[3], [0]])
    mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q - k < 4) & real[b, k], 2, None, 9, 9, device="cpu")
    layer, x = swapping.SwappedAttention(dsf.mixers.GatedDeltaNet(32, 2), 0).eval(), torch.randn(2, 9, 32)
    found = layer(x, attention_mask=mask)[0]
    assert torch.equal(found, layer(x, attention_mask=real)[0])
    assert torch.allclose(found[0, 3:], layer(x[:1, 3:])[0][0], rtol=0, atol=1e-5)


def test_layers_without_a_state_generate_from_whole_sequences_alone():
    model, ids = llama(2), torch.randint(1, 64, (2, 9))
    dsf.models.swap(model, "hyena")
    with pytest.raises(dsf.InputError, match=r"layer 0, Hyena, keeps no state.*use_cache=False"):
        generated(model, ids)
    assert torch.equal(generated(model, ids, use_cache=False), by_whole_sequences(model, ids))


def test_hooks_of_a_mixer_see_every_token():
    model, ids, seen = llama(2), torch.randint(1, 64, (2, 9)), []
    handle = dsf.models.swap(model, "gated_deltanet", [1])
    expected = generated(model, ids)
    handle.mixers[1].register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
    assert torch.equal(generated(model, ids), expected) and seen == [9, 1, 1, 1, 1, 1]


def test_what_was_swapped_trains():
    model, ids = llama(2).train(), torch.randint(1, 64, (2, 9))
    handle = dsf.models.swap(model, "gated_deltanet", [1])
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in handle.mixers[1].parameters())
    rough = dsf.models.swap(llama(2).to(torch.bfloat16), "gated_deltanet", [0])
    kinds = {name: p.dtype for name, p in rough.mixers[0].named_parameters()}
    assert kinds["A_log"] == torch.float32 and kinds["qkv_proj.weight"] == torch.bfloat16
    assert rough.model(ids).logits.isfinite().all()


def test_what_is_restored_is_as_the_model_is_by_then():
    """It had the type and the mode of before: an error of torch's, and dropout in a model that evaluates."""
    model, ids = llama(2), torch.randint(1, 64, (2, 9))
    model.model.layers[1].self_attn.attention_dropout = 0.5
    expected = model.to(torch.bfloat16)(ids).logits
    handle = dsf.models.swap(model.float().train(), "ssd", [1])
    assert torch.equal(handle.undo().to(torch.bfloat16).eval()(ids).logits, expected)
    handle = dsf.models.swap(model.float().train(), "ssd", [1])
    model.to(torch.bfloat16).eval()
    assert torch.equal(handle.undo()(ids).logits, expected)


def test_options_that_json_does_not_have_leave_the_configuration_whole(tmp_path):
    """Printing or saving such a model's configuration ended in a TypeError of json's."""
    model = llama(2).float()
    dsf.models.swap(model, "ssd", [0], dtype=torch.float64)
    assert model.model.layers[0].self_attn.mixer.in_proj.weight.dtype == torch.float32
    model.save_pretrained(tmp_path / "named")
    loaded, ids = dsf.models.load_swapped(tmp_path / "named"), torch.randint(1, 64, (2, 9))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    (tmp_path / "own.py").write_text(OWN)
    dsf.models.swap(model, f"{tmp_path}/own.py:fading", [1], init={"rate": torch.zeros})
    assert "dsf_swap" in repr(model.config)
    with pytest.warns(UserWarning, match="a mixer without a name"):
        model.save_pretrained(tmp_path / "unnamed")
    with pytest.raises(dsf.InputError, match="or options that JSON does not have; swap it in yourself"):
        dsf.models.load_swapped(tmp_path / "unnamed")


def test_what_cannot_be_swapped_is_refused_before_anything_changes():
    model = llama(2)
    with pytest.raises(dsf.InputError, match=r"layers is 1, expected several numbers, such as \[0, 1\]"):
        dsf.models.swap(model, "s6", layers=1)
    with pytest.raises(dsf.InputError, match=r"^Hydra reads its sequences in both directions"):
        dsf.models.swap(model, dsf.mixers.Hydra)
    with pytest.raises(dsf.InputError, match="expected different ones of 0 to 1"):
        dsf.models.swap(model, "s6", ["1"])
    with pytest.raises(dsf.InputError, match="expected different ones of 0 to 1"):
        dsf.models.swap(model, "s6", [2])
    with pytest.raises(dsf.InputError, match="near names"):
        dsf.models.swap(model, "gated_delta")
    with pytest.raises(dsf.InputError, match="layers have a self_attn"):
        dsf.models.swap(torch.nn.Linear(2, 2), "s6")
    for both in ("hydra", "vision_mamba", "VisionLSTM"):
        with pytest.raises(dsf.InputError, match=f"{both} reads its sequences in both directions"):
            dsf.models.swap(model, both)
    first = dsf.models.swap(model, "s6", [0])
    second = dsf.models.swap(model, "mingru", [0])
    with pytest.raises(dsf.InputError, match="swapped again since"):
        first.undo()
    second.undo()
    first.undo()
    with dsf.models.swap(model, "s6") as handle:
        assert "s6 in layers 0, 1" in str(handle)
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"
