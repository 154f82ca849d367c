"""dsf.models.hf: what transformers asks of a model, and every trap that others fell into."""

import copy
import errno
import json
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import dsf

transformers = pytest.importorskip("transformers")

from tiny_models import by_whole_sequences  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache, modeling_utils  # noqa: E402

import dsf.models.hf as hf  # noqa: E402
from dsf.mixers import SoftmaxAttention  # noqa: E402
from dsf.mixers._beside import outputs  # noqa: E402
from dsf.mixers.models.states import tensors_of  # noqa: E402
from dsf.parallel import Simulated, attach, prepare  # noqa: E402

MIXERS = [["gated_deltanet"], ["s6"], ["ssd", "softmax_attention"], ["rg_lru"]]
EACH = pytest.mark.parametrize("mixers", MIXERS, ids="+".join)


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tiny(mixers=("gated_deltanet",), **fields):
    own = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "mixers": list(mixers), "n_heads": 2, **fields}
    model = hf.DsfForCausalLM(hf.DsfConfig(**own)).eval().double()  # float64: what differs is wrong
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    return model


def prompt(batch=2, tokens=9):
    return torch.randint(1, 64, (batch, tokens))


def generated(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options})


def left_padded(ids, pads=3, token=7):
    """Sequence 0 with `pads` padding tokens more than sequence 1."""
    wide = torch.cat([torch.full((len(ids), pads), token), ids], 1)
    wide[1, :-pads] = ids[1].clone()
    wide[1] = torch.cat([ids[1], ids[1, :pads]])
    mask = torch.ones_like(wide)
    mask[0, :pads] = 0
    return wide, mask


# Generation


@EACH
def test_every_way_to_generate_agrees_with_no_cache(mixers):
    model, ids = tiny(mixers, tie_embeddings=False), prompt()  # a tied, untrained model repeats its last token
    greedy = generated(model, ids, use_cache=False)
    assert len(set(greedy[:, 9:].flatten().tolist())) > 2
    assert torch.equal(generated(model, ids), greedy)
    assert torch.equal(generated(model, ids, cache_implementation="static"), greedy)
    beams = generated(model, ids, num_beams=3, use_cache=False)
    assert torch.equal(generated(model, ids, num_beams=3), beams)
    assert torch.equal(generated(model, ids, num_beams=3, cache_implementation="static"), beams)
    drawn = []
    for cache in (True, False):
        torch.manual_seed(1)
        drawn.append(generated(model, ids, do_sample=True, top_k=5, use_cache=cache, num_return_sequences=2))
    assert torch.equal(*drawn)


@EACH
def test_left_padding_touches_nothing(mixers):
    model, ids = tiny(mixers, tie_embeddings=False), prompt()
    wide, mask = left_padded(ids)
    padded, alone = model(wide, attention_mask=mask).logits, model(ids[:1]).logits
    assert torch.allclose(padded[0, 3:], alone[0], rtol=0, atol=1e-9)
    assert not torch.allclose(model(wide).logits[0, 3:], alone[0], atol=1e-4)  # without a mask it is seen
    for options in ({}, {"use_cache": False}, {"num_beams": 2}, {"cache_implementation": "static"}):
        found = generated(model, wide, attention_mask=mask, **options)
        apart = {k: v for k, v in options.items() if k != "cache_implementation"}
        assert torch.equal(found[0, 12:], generated(model, ids[:1], **apart)[0, 9:])
        assert torch.equal(found[1, 12:], generated(model, wide[1:], **apart)[0, 12:])


@torch.no_grad()
def test_left_padding_predicts_no_first_token():
    model, (ids, mask) = tiny(), left_padded(prompt())
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    alone = [model(x, labels=x).loss * (x.shape[1] - 1) for x in (ids[:1, 3:], ids[1:])]
    torch.testing.assert_close(loss, sum(alone) / (8 + 11))


@pytest.mark.parametrize("mixers", [["gated_deltanet", "softmax_attention"], ["rg_lru"]], ids="+".join)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_left_padding_touches_nothing_where_prompts_are_read_in_chunks(chunk, mixers):
    model, (ids, mask) = tiny(mixers), left_padded(prompt())
    ids, mask = (torch.cat([x[:, :1] * 0, x], 1) for x in (ids, mask))  # a place that is padding in all sequences
    options = {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask}
    whole, parts = generated(model, ids, **options), generated(model, ids, prefill_chunk_size=chunk, **options)
    assert torch.allclose(torch.stack(parts.logits), torch.stack(whole.logits), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [hf.DsfModel, hf.DsfForCausalLM])
def test_the_cache_has_two_names(kind):
    """Releases of transformers from 5.24 on say `cache`, those before `past_key_values`."""
    model, ids = kind(tiny(["gated_deltanet", "softmax_attention"]).config).eval(), prompt()
    whole = model(ids, use_cache=False)[0]
    for name in ("cache", "past_key_values"):
        cache = hf.DsfCache(model.config)
        first, rest = model(ids[:, :5], **{name: cache}), model(ids[:, 5:], **{name: cache})
        assert torch.allclose(torch.cat([first[0], rest[0]], 1), whole, rtol=0, atol=1e-5)
        assert getattr(rest, hf.CACHE) is cache


@pytest.mark.parametrize("kind", [hf.DsfModel, hf.DsfForCausalLM])
def test_outputs_are_tuples_where_those_are_asked_for(kind):
    model, ids = kind(tiny().config).eval(), prompt()
    more = {"labels": ids} if kind is hf.DsfForCausalLM else {}
    expected = model(ids, **more)
    found = model(ids, **more, return_dict=False)
    assert type(found) is tuple and len(found) == len(expected.to_tuple()) and torch.equal(found[0], expected[0])
    model.config.return_dict = False
    assert type(model(ids, **more)) is tuple and type(model(ids, **more, return_dict=True)) is type(expected)


def test_padding_on_the_right_and_inside_is_cut_out_too():
    model, ids = tiny(["s6"]), prompt()
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    mask[1, 3:5] = 0
    found = model(ids, attention_mask=mask).logits
    assert torch.allclose(found[0, :6], model(ids[:1, :6]).logits[0], rtol=0, atol=1e-9)
    kept = mask[1].bool()
    assert torch.allclose(found[1, kept], model(ids[1:, kept]).logits[0], rtol=0, atol=1e-9)
    cache = hf.DsfCache(model.config)  # and the state after it is that of the tokens
    model(ids[:1], attention_mask=mask[:1], past_key_values=cache)
    after = model(ids[:1, :1], past_key_values=cache).logits
    assert torch.allclose(after[0, 0], model(torch.cat([ids[:1, :6], ids[:1, :1]], 1)).logits[0, -1], rtol=0, atol=1e-9)


def test_masks_that_cannot_be_are_refused():
    model, ids = tiny(), prompt()
    with pytest.raises(dsf.InputError, match="say the same thing twice"):
        model(ids[:1], attention_mask=torch.ones(1, 9), cu_seqlens=torch.tensor([0, 4, 9]))
    with pytest.raises(dsf.InputError, match="sequence 1 has no token"):
        model(ids, attention_mask=torch.tensor([[1] * 9, [0] * 9]))
    with pytest.raises(dsf.InputError, match=r"shape \[2, past \+ 9\]"):
        model(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(dsf.InputError, match="lie in one row"):
        model(ids, cu_seqlens=torch.tensor([0, 4, 9]))
    with pytest.raises(dsf.InputError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(dsf.InputError, match="dynamic or static"):
        generated(model, ids, cache_implementation="quantized")


def test_labels_that_cannot_be_are_refused_in_the_models_words():
    model, ids = tiny(), prompt()
    for name in ("labels", "shift_labels"):
        for wrong in (ids[:1], ids[0], ids[:, :4], ids.unsqueeze(2)):
            with pytest.raises(dsf.InputError, match=r"labels: expected the shape of ids, \(2, 9\), got"):
                model(ids, **{name: wrong})
        with pytest.raises(dsf.InputError, match=r"labels: expected integers \[B, T\], got torch.float64"):
            model(ids, **{name: ids.double()})
    assert torch.equal(model(ids, labels=ids.int()).loss, model(ids, labels=ids).loss)


@EACH
def test_packed_sequences_are_apart_however_they_are_said(mixers):
    model, ids = tiny(mixers), prompt(1, 12)
    apart = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    for said in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": positions}):
        assert torch.allclose(model(ids, **said).logits, apart, rtol=0, atol=1e-9)
    assert not torch.allclose(model(ids).logits, apart, atol=1e-4)
    losses = [model(part, labels=part).loss * (part.shape[1] - 1) for part in (ids[:, :5], ids[:, 5:])]
    assert torch.allclose(model(ids, labels=ids, position_ids=positions).loss, sum(losses) / 10)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@EACH
def test_positions_separate_sequences_of_any_row_beside_a_mask_too(mixers, padded):
    model, ids = tiny(mixers), prompt(2, 9)
    cuts, real = [(3, 9), (5, 9)], [slice(2 * padded, 9), slice(0, 9 - padded)]
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(9 - n)]) for n, _ in cuts])
    mask = torch.ones_like(ids)
    mask[0, : 2 * padded], mask[1, 9 - padded :] = 0, 0
    if padded:
        positions[0, :3] = torch.tensor([0, 0, 0])
    labels = ids.masked_fill(mask == 0, -100)
    found = model(ids, attention_mask=mask, position_ids=positions, labels=labels)
    losses, count = [], 0
    for row, (cut, kept) in enumerate(zip((3, 5), real, strict=True)):
        for part in (slice(kept.start, cut), slice(cut, kept.stop)):
            alone = model(ids[row : row + 1, part], labels=ids[row : row + 1, part])
            assert torch.allclose(found.logits[row, part], alone.logits[0], rtol=0, atol=1e-9)
            count += part.stop - part.start - 1
            losses.append(alone.loss * (part.stop - part.start - 1))
    assert torch.allclose(found.loss, sum(losses) / count)
    if not padded:
        assert torch.equal(model(ids, position_ids=positions).logits, found.logits)
        both = model(ids, position_ids=positions[:1]).logits  # of all rows
        assert torch.allclose(both[1, 3:], model(ids[1:, 3:]).logits[0], rtol=0, atol=1e-9)


# Caches


@torch.no_grad()
def test_positions_that_begin_each_row_once_begin_no_second_sequence():
    """As a loop of one's own gives them beside padding: the cache has a state for each row and no more."""
    model, (ids, mask), token = tiny(), left_padded(prompt()), prompt(2, 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = [model(ids, attention_mask=mask, use_cache=True, **how) for how in ({}, {"position_ids": positions})]
    assert torch.equal(*(x.logits for x in found))
    assert torch.equal(*(model(token, past_key_values=getattr(x, hf.CACHE)).logits for x in found))


@EACH
def test_a_cache_goes_on_and_a_copy_of_it_too(mixers):
    model, ids = tiny(mixers), prompt()
    with torch.no_grad():
        whole = model(ids).logits
        cache = hf.DsfCache(model.config)
        model(ids[:, :5], past_key_values=cache)
        assert cache.get_seq_length() == 5
        saved = copy.deepcopy(cache)
        for state in (cache, saved):
            assert torch.allclose(model(ids[:, 5:], past_key_values=state).logits, whole[:, 5:], rtol=0, atol=1e-9)
        saved.batch_repeat_interleave(2)
        saved.batch_select_indices(torch.tensor([3]))
        one = model(ids[1:, :1], past_key_values=saved).logits
        assert torch.allclose(one[0, 0], model(torch.cat([ids[1:], ids[1:, :1]], 1)).logits[0, -1], rtol=0, atol=1e-9)
        cache.reset()
        assert torch.allclose(model(ids, past_key_values=cache).logits, whole, rtol=0, atol=1e-9)


@EACH
def test_gradients_go_through_the_states_of_a_static_cache(mixers):
    model, ids = tiny(mixers), prompt()
    found = []
    for parts in ((slice(None),), (slice(0, 3), slice(3, 6), slice(6, None))):
        cache = hf.DsfCache(model.config, static=True)
        last = [model(ids[:, part], past_key_values=cache, use_cache=True) for part in parts][-1]
        found.append(torch.autograd.grad(last.logits[:, -3:].square().sum(), list(model.parameters())))
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-7, atol=1e-9)


@EACH
def test_generate_takes_the_caches_that_transformers_makes_of_a_configuration(mixers):
    """Those of models of recurrent layers alone have layers that do not count their tokens."""
    model, ids = tiny(mixers), prompt()
    expected = generated(model, ids)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=40)):
        assert torch.equal(generated(model, ids, **{hf.CACHE: cache}), expected)


def test_a_static_cache_stays_where_it_is():
    model, ids = tiny(), prompt()
    cache = hf.DsfCache(model.config, static=True)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
        places = [x.data_ptr() for x in tensors_of(cache.layers[0].state)]
        for t in range(5, 9):
            last = model(ids[:, t : t + 1], past_key_values=cache).logits
        assert places == [x.data_ptr() for x in tensors_of(cache.layers[0].state)]
        assert torch.allclose(last[:, 0], model(ids).logits[:, -1], rtol=0, atol=1e-9)


def test_generate_is_refused_while_ranks_share_the_sequence():
    model = hf.DsfForCausalLM(hf.DsfConfig(d_model=32, n_layers=1, vocab_size=11, mixers=["gla"]))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for world in (type("Shared", (Simulated,), {"shard": None})(2), None):
        attach(model, world)
        with nullcontext() if world is None else pytest.raises(dsf.InputError, match=r"^generate: .* over 2 ranks"):
            assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape == (1, 6)


def test_boundaries_of_one_rank_are_refused_while_ranks_share_the_sequence():
    """A mask's or positions' boundaries of this rank's tokens were taken for those of the whole row."""
    model = hf.DsfForCausalLM(hf.DsfConfig(d_model=32, n_layers=1, vocab_size=11, mixers=["gla"]))
    attach(model, type("Shared", (Simulated,), {"shard": None})(2))
    ids, mask, places = torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4), torch.arange(4)[None]
    assert model(ids, attention_mask=mask, position_ids=places + 4).logits.shape == (1, 4, 11)
    for given in ({"attention_mask": mask.masked_fill(places == 0, 0)}, {"position_ids": places % 2}):
        with pytest.raises(dsf.InputError, match=r"^DsfModel: .* over 2 ranks .* give cu_seqlens of all of them"):
            model(ids, **given)


def test_generate_decodes_in_the_memory_of_its_own_cache():
    model, (ids, mask) = tiny(["ssd", "softmax_attention"], tie_embeddings=False), left_padded(prompt())
    found = generated(model, ids, attention_mask=mask, return_dict_in_generate=True)
    cache = getattr(found, hf.CACHE)
    state = cache.layers[1].state.recurrent
    assert state.filled is not None and state.lengths.tolist() == [9 + 5, 12 + 5]
    with torch.no_grad():  # and goes on from there
        last = model(found.sequences[:, -1:], past_key_values=cache).logits[0, 0]
        assert torch.allclose(last, model(found.sequences[:1, 3:]).logits[0, -1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("static", [False, True])
def test_a_mask_of_one_token_behind_a_cache_is_read(static):
    """A masked token went into the state."""
    model, ids = tiny(["gated_deltanet", "softmax_attention"]), prompt(tokens=8)
    cache, whole = hf.DsfCache(model.config, static=static), torch.ones(2, 8, dtype=torch.long)
    masked = whole.clone()
    masked[1, 5:7] = 0
    with torch.no_grad():
        model(ids[:, :5], attention_mask=masked[:, :5], past_key_values=cache)
        for t in range(5, 8):
            last = model(ids[:, t : t + 1], attention_mask=masked[:, : t + 1], past_key_values=cache).logits[:, 0]
        kept = torch.cat([ids[1:, :5], ids[1:, 7:]], 1)
        for row, expected in ((0, model(ids[:1])), (1, model(kept))):
            assert torch.allclose(last[row], expected.logits[0, -1], rtol=0, atol=1e-9)
        model(ids[:, :1], attention_mask=torch.zeros_like(whole[:, :1]), past_key_values=cache)  # of no row
        after = model(ids[:, :1], past_key_values=cache).logits[1, 0]
        assert torch.allclose(after, model(torch.cat([kept, ids[1:, :1]], 1)).logits[0, -1], rtol=0, atol=1e-9)


def test_a_static_cache_leaves_a_window_s_keys_in_their_memory():
    model, ids = tiny(["softmax_attention"]), prompt(tokens=40)
    for block in model.model.layers:
        block.mixer = SoftmaxAttention(32, 2, window=6).eval().double()
    for static in (False, True):
        cache = hf.DsfCache(model.config, static=static)
        with torch.no_grad():
            model(ids[:, :9], past_key_values=cache)
            places = set()
            for t in range(9, 40):
                last = model(ids[:, t : t + 1], past_key_values=cache).logits
                assert torch.allclose(last[:, 0], model(ids[:, : t + 1]).logits[:, -1], rtol=0, atol=1e-9), t
                places.add(cache.layers[0].state.recurrent.k.untyped_storage().data_ptr())
        assert len(places) == 1 and cache.layers[0].state.recurrent.k.shape[2] == 6


def test_other_caches_are_taken_empty_and_refused_full():
    model, ids = tiny(["s6"]), prompt()
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
        last = model(ids[:, 5:], past_key_values=cache).logits
    assert torch.allclose(last, model(ids).logits[:, 5:], rtol=0, atol=1e-9)
    full = DynamicCache()
    full.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
    with pytest.raises(dsf.InputError, match="filled by another model"):
        model(ids, past_key_values=full)
    with pytest.raises(dsf.InputError, match="cannot be cropped"):
        cache.crop(2)
    with pytest.raises(dsf.InputError, match="3 layers, this one has 2"):
        model(ids, past_key_values=hf.DsfCache(layers=3))


# Weights


@EACH
def test_saved_and_loaded_it_is_the_same_model(mixers, tmp_path):
    model, ids = tiny(mixers).float(), prompt()
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is hf.DsfConfig and config.model_config == model.config.model_config
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is hf.DsfForCausalLM and not loaded.training
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    with torch.no_grad():
        assert all(outputs(torch.zeros(1, 1, 32), b.mlp.maps_beside()) is not None for b in loaded.model.layers)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    inner = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(inner(ids).last_hidden_state, model.model(ids).last_hidden_state)
    rough = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {name: p.dtype for name, p in rough.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    rates = [n for n in kinds if n.rsplit(".")[-1] in ("A_log", "dt_bias", "D", "Lambda")]
    assert rates and all(kinds[n] == torch.float32 for n in rates)
    assert rough(ids).logits.isfinite().all()


def test_a_save_over_another_replaces_all_of_it_or_nothing(tmp_path, monkeypatch):
    old, new, ids = tiny(["mingru"]).float(), tiny(["mingru"], d_model=48).float(), prompt()
    old.save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(modeling_utils, "safe_save_file", full)
        with pytest.raises(OSError, match="No space left"):
            new.save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    for model, size in ((new, "20KB"), (old, "8KB"), (new, "5GB")):  # of the weights before, none stays to be read
        model.save_pretrained(str(tmp_path), state_dict=model.state_dict(), max_shard_size=size)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
        assert (tmp_path / "model.safetensors").exists() == (size == "5GB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 and not list(tmp_path.glob(".*"))
    before = (tmp_path / "model.safetensors").read_bytes()
    old.save_pretrained(tmp_path, False)  # of a process that is not the first
    assert json.loads((tmp_path / "config.json").read_text())["d_model"] == 48
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("mixer", ["retnet", "lru", "s5", "alibi"])
def test_constants_that_are_not_saved_are_there_after_loading(mixer, tmp_path):
    """transformers gives buffers outside the checkpoint new memory, which holds anything."""
    model, ids = tiny([mixer], rope_base=None).float(), prompt()
    constants = dict(model.named_buffers())
    assert constants
    model.save_pretrained(tmp_path)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        for name, buffer in loaded.named_buffers():
            assert torch.equal(buffer, constants[name if name in constants else f"model.{name}"]), name
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("mixers", [["gated_deltanet", "softmax_attention"], ["lru"]], ids="+".join)
def test_torch_only_and_hugging_face_models_are_one(mixers):
    model, ids = tiny(mixers), prompt()
    plain = model.to_torch()
    assert torch.equal(plain(ids).logits, model(ids).logits)
    types = {name: x.dtype for name, x in model.named_buffers()}
    assert {name: x.dtype for name, x in plain.named_buffers()} == types
    assert torch.equal(hf.DsfForCausalLM.of(plain)(ids).logits, model(ids).logits)
    assert set(plain.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_a_model_whose_configuration_was_untied_saves_its_head(given, tmp_path):
    """What read it drew a head at random."""
    model, ids = tiny(["mingru"]).float(), prompt()
    model.config.tie_embeddings = False
    for _ in range(2):  # over an earlier save, too
        model.save_pretrained(tmp_path, **({"state_dict": model.state_dict()} if given else {}))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    model.model.save_pretrained(tmp_path / "backbone")  # has no head


def test_a_model_in_parts_is_saved_from_gathered_weights_alone(tmp_path):
    """safetensors asked a DTensor for its memory, which ended in torch's words."""
    model, ids = tiny(["mingru"]).float(), prompt()
    expected = model(ids).logits
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        prepare(model, mesh=init_device_mesh("cpu", (1,)))
        parts = model.state_dict()
        for given in ({}, {"state_dict": parts}):
            with pytest.raises(dsf.InputError, match=r"is a DTensor.*get_model_state_dict"):
                model.save_pretrained(tmp_path / "saved", **given)
        assert not (tmp_path / "saved").exists()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        model.save_pretrained(tmp_path / "saved", state_dict=whole)
    finally:
        dist.destroy_process_group()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits, expected)


def test_copies_have_the_head_that_the_model_has_whatever_its_configuration_says():
    """A head of its own was lost without a word."""
    ids = prompt()
    for tied in (True, False):
        model = tiny(["mingru"]).float()
        if tied:
            model.config.tie_embeddings = False
        else:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        plain = model.to_torch()
        again = hf.DsfForCausalLM.of(plain)
        for copied in (plain, again):
            assert (copied.lm_head.weight is copied.model.embed_tokens.weight) == tied == copied.config.tie_embeddings
            assert torch.equal(copied(ids).logits, model(ids).logits)


def test_tokens_outside_of_the_vocabulary_are_refused_in_words():
    model, ids = tiny(["gla"]), prompt()
    strange = torch.where(ids == ids[0, 1], model.config.vocab_size, ids)
    for call in (lambda: model(strange), lambda: model.model(strange), lambda: model(ids, labels=strange)):
        with pytest.raises(dsf.InputError, match=r"has the token \d+, and the vocabulary is 0 to"):
            call()


def test_initialisation_does_not_undo_the_papers():
    """transformers re-initialises modules; A_log drawn again as if it were a weight is another memory."""
    delta, s6, ssd, rg = (tiny([mixer]).model.layers[1].mixer for mixer in ("gated_deltanet", "s6", "ssd", "rg_lru"))
    assert torch.allclose(s6.A_log.exp(), torch.arange(1.0, 17.0).double().expand(64, 16)) and bool((s6.D == 1).all())
    for bias in (s6.dt_proj.bias, ssd.dt_bias, delta.dt_bias):
        step = torch.nn.functional.softplus(bias)
        assert float(step.min()) > 0.9e-4 and float(step.max()) < 0.11
    assert float(delta.A_log.exp().min()) > 0 and float(delta.A_log.exp().max()) <= 16
    assert float(ssd.A_log.exp().min()) >= 1 and float(ssd.A_log.exp().max()) <= 16
    kept = torch.exp(-8 * torch.nn.functional.softplus(rg.Lambda))
    assert float(kept.min()) > 0.89 and float(kept.max()) < 0.9991
    again = tiny(["s6"])
    with torch.no_grad():
        for p in again.parameters():
            p.fill_(7.0)
    for module in again.modules():
        module._is_hf_initialized = False
    again.initialize_weights()
    values = dict(again.named_parameters())
    assert torch.allclose(values["model.layers.0.mixer.A_log"].exp(), s6.A_log.exp())
    assert float(values["model.layers.0.mlp.up_proj.weight"].detach().std()) < 0.03
    assert float(values["model.embed_tokens.weight"].detach().std()) < 0.03


def test_weights_that_are_missing_are_drawn_and_those_loaded_stay(tmp_path):
    model = tiny(["s6"])
    model.model.layers[0].mixer.A_log.data.fill_(-7.0)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    gone = {"model.layers.0.mixer.D", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mixer.A_log"}
    gone |= {"model.layers.0.mixer.in_proj.weight", "model.layers.1.mixer.dt_proj.bias"}
    save_file({k: v for k, v in weights.items() if k not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = hf.DsfForCausalLM.from_pretrained(tmp_path)
    inside = dict(loaded.model.layers[0].mixer.named_parameters())["in_proj.weight"].detach()
    assert 0.05 < float(inside.std()) < 0.2 and float(inside.abs().max()) <= 32**-0.5  # as torch draws a linear map
    step = torch.nn.functional.softplus(loaded.model.layers[1].mixer.dt_proj.bias)
    assert float(step.min()) > 0.9e-4 and float(step.max()) < 0.11
    for name, p in loaded.named_parameters():
        assert p.isfinite().all(), name
        if name not in gone:
            assert torch.equal(p, dict(model.named_parameters())[name]), name
    drawn = dict(loaded.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    assert 0.01 < float(drawn.detach().std()) < 0.03


# Training


@EACH
def test_gradient_checkpointing_changes_no_gradient(mixers):
    model, ids = tiny(mixers).train(), prompt()
    gradients = []
    for on in (False, True):
        model.gradient_checkpointing_enable() if on else model.gradient_checkpointing_disable()
        assert all(block.gradient_checkpointing == on for block in model.model.layers)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*gradients, strict=True))


def test_the_loss_is_divided_by_what_the_trainer_says():
    model, ids = tiny(["mingru"]), prompt()
    loss = model(ids, labels=ids).loss
    assert torch.allclose(model(ids, labels=ids, num_items_in_batch=torch.tensor(64)).loss, loss * 16 / 64)
    fused = tiny(["mingru"], fused_loss=True).train()
    out = fused(ids, labels=ids, num_items_in_batch=torch.tensor(64))
    assert out.logits is None
    fused.config.fused_loss = False
    assert torch.allclose(fused(ids, labels=ids, num_items_in_batch=torch.tensor(64)).loss, out.loss)


def test_the_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate")
    model = tiny(["gated_deltanet", "softmax_attention"])
    rows = [{"input_ids": row, "labels": row} for row in prompt(8, 12)]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, gradient_checkpointing=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = prompt()
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("usual", "name", "value"),
    [
        ("num_attention_heads", "n_heads", 3), ("intermediate_size", "mlp_hidden", 100), ("hidden_size", "d_model", 48),
        ("num_hidden_layers", "n_layers", 2), ("rms_norm_eps", "norm_eps", 1e-5), ("rope_theta", "rope_base", 5e5),
        ("max_position_embeddings", "context_length", 99), ("tie_word_embeddings", "tie_embeddings", False),
        ("initializer_range", "init_std", 0.1),
    ],
)  # fmt: skip
def test_the_usual_names_of_a_configuration_are_ours_when_given_set_and_saved(usual, name, value, tmp_path):
    start = {"mixers": ["softmax_attention"], "vocab_size": 30, "d_model": 96}
    given = hf.DsfConfig(**{**start, usual: value} if usual != "hidden_size" else {"mixers": ["mingru"], usual: value})
    later = hf.DsfConfig(**start)
    setattr(later, usual, value)
    for config in (given, later):
        config.save_pretrained(tmp_path)
        for found in (config, hf.DsfConfig.from_pretrained(tmp_path), hf.DsfConfig.from_dict(config.to_dict())):
            assert getattr(found.model_config, name) == getattr(found, name) == getattr(found, usual) == value
            assert len(found.layer_types) == found.n_layers
    again = hf.DsfConfig.from_pretrained(tmp_path, **{usual: value})
    assert getattr(again.model_config, name) == value


def test_a_saved_configuration_names_the_heads_of_every_layer(tmp_path):
    mixers = ["gated_deltanet", "mingru", "softmax_attention"]
    config = hf.DsfConfig(vocab_size=30, d_model=256, n_layers=3, mixers=mixers)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["layer_heads"] == [2, None, 4] == hf.DsfConfig.from_pretrained(tmp_path).layer_heads
    (tmp_path / "config.json").write_text(json.dumps({**saved, "layer_heads": [4, None, 4]}))
    with pytest.raises(dsf.InputError, match=r"layer_heads is .4, None, 4., but .2, None, 4. follows from n_heads"):
        hf.DsfConfig.from_pretrained(tmp_path)


def test_hidden_states_are_what_every_block_is_given_and_the_result():
    model, ids = tiny(["gated_deltanet", "softmax_attention"]), prompt()
    out = model(ids, output_hidden_states=True, use_cache=False)
    states, blocks = out.hidden_states, model.model.layers
    assert len(states) == len(blocks) + 1 and torch.equal(states[0], model.model.embed_tokens(ids))
    first = blocks[0](states[0])[0]
    assert torch.equal(first, states[1]) and torch.equal(model.lm_head(states[-1]), out.logits)
    assert model(ids).hidden_states is None
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    padded = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    alone = model(ids[:1, 2:], output_hidden_states=True).hidden_states
    for one, other in zip(padded, alone, strict=True):
        assert torch.allclose(one[:1, 2:], other, rtol=0, atol=1e-9)


def test_models_say_which_configuration_they_take():
    config = hf.DsfConfig(n_layers=1, vocab_size=30)
    with pytest.raises(dsf.InputError, match=r"CausalLM takes a ModelConfig, got DsfConfig; its model_config is one"):
        dsf.models.CausalLM(config)
    with pytest.raises(dsf.InputError, match=r"takes a DsfConfig, got ModelConfig; DsfConfig.of.config. makes one"):
        hf.DsfForCausalLM(config.model_config)


def test_a_file_written_when_another_number_of_attention_heads_followed_is_read():
    fields = {"vocab_size": 30, "d_model": 200, "n_layers": 1, "n_heads": None, "num_attention_heads": 3}
    assert hf.DsfConfig(**fields, mixers=["gated_deltanet"]).n_heads is None  # it has no attention
    with pytest.raises(dsf.InputError, match="num_attention_heads is 3, but 4 follows"):
        hf.DsfConfig(**fields, mixers=["softmax_attention"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 64, "d_model": 32}, r"hidden_size .64. is another name for d_model .32."),
        ({"num_attention_heads": 4, "n_heads": 2}, "num_attention_heads is 4, but 2 follows from n_heads"),
        ({"intermediate_size": 100, "mlp_hidden": None}, "intermediate_size is 100, but 384 follows"),
        ({"layer_types": ["full_attention"] * 4}, "follows from mixers"),
        ({"num_key_value_heads": 2}, "n_kv_heads"),
        ({"head_dim": 32}, "headdim"),
        ({"sliding_window": 8}, "sliding_window_attention"),
        ({"n_embd": 32}, "give d_model"),
        ({"num_heads": 2}, "did you mean n_heads"),
        ({"mixer": "s6"}, "did you mean mixers"),
        ({"hidden_act": "gelu"}, "nothing of the kind"),
        ({"attention_dropout": 0.1}, "nothing of the kind"),
    ],
)
def test_names_of_other_configurations_are_refused_and_not_dropped(fields, words):
    with pytest.raises(dsf.InputError, match=words):
        hf.DsfConfig(**fields)


def test_what_changes_nothing_and_what_is_someone_elses_is_let_through(tmp_path):
    config = hf.DsfConfig(hidden_act="silu", attention_dropout=0.0, rope_scaling=None, my_note="kept", pad_token_id=0)
    config.save_pretrained(tmp_path)
    again = hf.DsfConfig.from_pretrained(tmp_path)
    assert again.my_note == "kept" and again.pad_token_id == 0 and again.model_config == config.model_config


@pytest.mark.parametrize("mixers", [["hyena"], ["hyena", "gla"]], ids="+".join)
def test_layers_without_a_state_generate_from_whole_sequences_alone(mixers):
    model, ids = tiny(mixers, tie_embeddings=False), prompt()
    with pytest.raises(dsf.InputError, match=r"layer 0, Hyena, keeps no state.*use_cache=False"):
        generated(model, ids)
    assert torch.equal(generated(model, ids, use_cache=False), by_whole_sequences(model, ids))


@pytest.mark.parametrize("mixers", [["gated_deltanet", "softmax_attention"], ["mlstm", "rg_lru"]], ids="+".join)
def test_offloaded_weights_are_there_for_every_token(mixers):
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny(mixers), prompt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        logits, expected = model(ids).logits, generated(model, ids)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(p.is_meta for p in model.model.layers[0].mixer.parameters())
    torch.testing.assert_close(model(ids).logits, logits)
    assert torch.equal(generated(model, ids), expected)


def test_folders_of_models_of_other_sizes_are_refused(tmp_path):
    tiny(["mingru"]).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path, mlp_hidden=24)
    made, info = AutoModelForCausalLM.from_pretrained(tmp_path, n_layers=4, output_loading_info=True)
    assert len(made.model.layers) == 4 and any("layers.3" in name for name in info["missing_keys"])
    with pytest.raises(dsf.InputError, match=r"takes a dsf.models.CausalLM"):
        hf.DsfForCausalLM.of(made)


def test_the_usual_names_are_ours_and_embeddings_grow():
    config = hf.DsfConfig(vocab_size=64, hidden_size=48, num_hidden_layers=3, mixers=["mingru"])
    assert (config.d_model, config.n_layers, config.hidden_size) == (48, 3, 48)
    assert config.layer_types == ["linear_attention"] * 3
    with pytest.raises(dsf.InputError, match="near names: gated_deltanet"):
        hf.DsfConfig(mixers=["gated_delta"])
    model = tiny(["mingru"])
    model.resize_token_embeddings(70)
    assert model.lm_head.weight.shape[0] == 70 and model.config.vocab_size == 70
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.full((1, 4), 69)).logits.shape == (1, 4, 70)
    assert hf.DsfForCausalLM(config).no_weight_decay() >= {"model.norm.weight"}
