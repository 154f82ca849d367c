"""A recording is the system that ran: Phi applied to its inputs is what the layer computed, in bounded memory."""

import convert_models as zoo
import pytest
import torch
from torch import nn

import dsf
from dsf import mixers
from dsf.analysis import measures, record
from dsf.analysis.convert import Layer
from dsf.analysis.record import RecordingError, size_of

pytest.importorskip("transformers")
EVERY = pytest.mark.parametrize("name", list(zoo.CONFIGS))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@EVERY
def test_phi_times_the_inputs_is_what_the_layer_computed(name, monkeypatch):
    outputs = []
    run = Layer.run_wide

    def spy(layer, recurrence, state=None, **inputs):
        y, final = run(layer, recurrence, state, **inputs)
        outputs.append(y.double())
        return y, final

    monkeypatch.setattr(Layer, "run_wide", spy)
    model = zoo.build(name)
    converted = dsf.convert(model)
    with record(converted, dtype=torch.float64) as recording:
        model(input_ids=torch.randint(3, 64, (2, 11)))
    assert recording.layers == tuple(dict.fromkeys(recording.layers))
    assert set(recording.layers) == {layer.name for layer in converted.layers}
    mine = [e for e in recording if e.layer.kind not in ("softmax", "FIR")]
    assert len(mine) == len(outputs)
    for entry, y in zip(mine, outputs, strict=True):
        got = measures.output(entry.trajectory)
        assert (got - y).abs().max() <= 1e-5 * y.abs().max()
    for entry in recording:
        if entry.layer.kind == "softmax":
            assert (measures.kernel_matrix(entry.trajectory) >= 0).all()
        else:
            assert measures.eigenvalues(entry.trajectory).abs().max() <= 1 + 1e-6


@EVERY
def test_no_recording_is_larger_than_its_limit(name):
    """The estimate that refuses is never below what would be taken."""
    model = zoo.build(name)
    converted = dsf.convert(model)
    ids = torch.randint(3, 64, (2, 11))
    with record(converted) as recording:
        model(input_ids=ids)
    with pytest.raises(RecordingError), record(converted, limit=recording.bytes - 1):
        model(input_ids=ids)


def build(name="mamba2"):
    model = zoo.build(name)
    return model, dsf.convert(model), torch.randint(3, 64, (2, 11))


def test_layers_heads_tokens_and_sequences_bound_the_recording():
    model, converted, ids = build()
    with record(converted) as everything:
        model(input_ids=ids)
    one = {"layers": ["backbone.layers.1.mixer"], "heads": slice(2, 4), "tokens": 5, "batch": slice(0, 1)}
    with record(converted, **one) as part:
        model(input_ids=ids)
    assert part.layers == ("backbone.layers.1.mixer",)
    small, whole = part.trajectory(part.layers[0]), everything.trajectory(part.layers[0])
    assert (small.batch, small.tokens, small.heads) == (1, 5, 2)
    expected = measures.kernel_matrix(whole)[:1, 2:4, :5, :5]
    torch.testing.assert_close(measures.kernel_matrix(small), expected)
    assert part.bytes == size_of(small) < size_of(whole)
    with record(converted, layers=lambda layer: layer.name.endswith("0.mixer")) as chosen:
        model(input_ids=ids)
    assert chosen.layers == ("backbone.layers.0.mixer",)


def test_the_first_tokens_of_attention_are_measured_as_in_the_whole():
    model, converted, ids = build("llama")
    with record(converted) as whole, record(converted, tokens=5) as part:
        model(input_ids=ids)
    distances = [measures.mean_distance(x.trajectory(x.layers[0])) for x in (whole, part)]
    torch.testing.assert_close(distances[1], distances[0][:, :, :5])


@pytest.mark.parametrize("name", ["mamba", "gpt_oss"])
def test_a_recording_larger_than_its_limit_is_refused_with_its_size(name):
    model, converted, ids = build(name)
    refused = pytest.raises(RecordingError, match=r"needs \d+\.\d\d GiB .* record fewer layers")
    with refused, record(converted, limit=1000):
        model(input_ids=ids)
    assert not converted.layers[0].listeners


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bloom", "mpt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_half_precision_models_is_measured_in_float32(name, dtype):
    model = zoo.build(name, dtype)
    converted, ids = dsf.convert(model), torch.randint(3, 64, (2, 40))
    with record(converted) as single, record(converted, dtype=torch.float64) as double:
        model(input_ids=ids)
    for layer in single.layers:
        one, other = single.trajectory(layer), double.trajectory(layer)
        measured = [measures.output, measures.mean_distance, lambda t: measures.effective_state_size(t).entropy]
        for measure in [*measured, lambda t: measures.eigenvalues(t, paper=True)]:
            assert measure(one).dtype == torch.float32
            torch.testing.assert_close(measure(one).double(), measure(other), rtol=1e-3, atol=1e-4)


def test_what_is_not_there_is_named():
    model, converted, ids = build()
    unknown = pytest.raises(RecordingError, match=r"no converted layer is called 'x'; they are backbone.layers.0.mixer")
    with unknown, record(converted, layers=["x"]):
        pass
    with pytest.raises(RecordingError, match="tokens is -1, expected at least 1"), record(converted, tokens=-1):
        pass
    with record(converted) as recording:
        pass
    with pytest.raises(RecordingError, match="was the model called inside the block"):
        recording.trajectory("backbone.layers.0.mixer")


def test_cached_calls_are_recorded_one_by_one_and_states_go_on():
    model, converted, ids = build()
    name = "backbone.layers.1.mixer"
    with record(converted) as whole:
        model(input_ids=ids)
    with record(converted) as pieces:
        zoo.in_pieces(model, ids, [4, 1, 6])
    states = torch.cat([pieces.trajectory(name, call=i).states() for i in range(3)], dim=1)
    torch.testing.assert_close(states, whole.trajectory(name).states(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "lfm2"])
def test_packed_sequences_are_not_recorded_as_one(name):
    model, converted, ids = build(name)
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7, "use_cache": False}
    with pytest.raises(RecordingError, match="ran packed sequences"), record(converted):
        model(input_ids=ids[:1], **packed)
    model(input_ids=ids[:1], **packed)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "lfm2", "rwkv"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_recorded_as_tokens_that_forget_nothing(name, side):
    model, converted, ids = build(name)
    mask, first = torch.ones_like(ids), converted.layers[0].name
    mask[1, slice(0, 4) if side == "left" else slice(7, 11)] = 0
    with pytest.raises(RecordingError, match=f"{first} read padding"), record(converted):
        model(input_ids=ids, attention_mask=mask)
    model(input_ids=ids, attention_mask=mask)
    with record(converted) as alone:
        model(input_ids=ids[:1])
    with record(converted, batch=slice(0, 1)) as beside:  # the row without padding
        model(input_ids=ids, attention_mask=mask)
    lives = [measures.half_life(x.trajectory(first)) for x in (alone, beside)]
    torch.testing.assert_close(lives[1], lives[0])
    if side == "right":
        with record(converted, tokens=7) as before:
            model(input_ids=ids, attention_mask=mask)
        assert before.trajectory(first).tokens == 7


def test_padding_hides_keys_of_recorded_attention():
    model, converted, ids = build("llama")
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with record(converted) as recording:
        model(input_ids=ids, attention_mask=mask)
    assert measures.kernel_matrix(recording.trajectory(recording.layers[0]))[1, :, 7:, 7:].max() == 0


def test_packed_sequences_of_this_librarys_layers_are_not_recorded_as_one():
    x, cu = torch.randn(1, 11, 32), torch.tensor([0, 4, 11])
    for layer in (dsf.mixers.GLA(32, n_heads=2), dsf.mixers.SoftmaxAttention(32, n_heads=2), dsf.mixers.Hydra(32)):
        converted = dsf.convert(layer)
        for boundaries in (cu, dsf.Packing(cu)):
            with pytest.raises(RecordingError, match="ran packed sequences"), record(converted):
                layer(x, cu_seqlens=boundaries)
        with record(converted) as recording:
            layer(x, cu_seqlens=torch.tensor([0, 11]))
        assert len(recording) > 0


def test_attention_that_goes_on_from_a_cache_is_not_recorded_without_it():
    layer, x = dsf.mixers.SoftmaxAttention(32, n_heads=2), torch.randn(2, 7, 32)
    converted = dsf.convert(layer)
    with record(converted) as recording:
        _, state = layer(x[:, :4])
    assert len(recording) == 1
    with pytest.raises(RecordingError, match="went on from a cache of keys"), record(converted):
        layer(x[:, 4:], state)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("padded", [0, 2])
def test_static_caches_are_recorded_without_places_to_be_filled(name, padded):
    from transformers import StaticCache

    model, converted, ids = build(name)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :padded] = 0
    with record(converted) as whole:
        model(input_ids=ids, attention_mask=mask)
    cache = StaticCache(config=model.config, max_cache_len=40)
    with record(converted) as pieces:
        for part in (slice(0, 6), slice(6, 10), slice(10, 11)):
            model(input_ids=ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache, use_cache=True)
    for layer in whole.layers:
        parts = [measures.mean_distance(pieces.trajectory(layer, call)) for call in range(3)]
        expected = measures.mean_distance(whole.trajectory(layer))
        torch.testing.assert_close(torch.cat(parts, 2)[0], expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.cat(parts, 2)[1, :, padded:], expected[1, :, padded:], atol=1e-4, rtol=1e-4)


def test_recordings_stay_structured_and_detached():
    model, converted, ids = build("qwen3_next")
    with record(converted) as recording:
        model(input_ids=ids)
    t = recording.trajectory("model.layers.0.linear_attn")
    assert t.transition.rank == 1 and t.transition.decay.shape[-2:] == (1, 1)
    assert not t.problem.value.requires_grad


def test_a_visitor_sees_every_run_and_nothing_is_kept():
    model, converted, ids = build()
    with record(converted) as kept:
        model(input_ids=ids)
    seen = []
    limit = kept.bytes - 1  # enough for one layer, not for all
    with record(converted, limit=limit, visit=seen.append) as recording:
        model(input_ids=ids)
    assert len(recording) == 0 and recording.bytes == 0
    for entry, expected in zip(seen, kept, strict=True):
        assert (entry.layer, entry.call, entry.part) == (expected.layer, expected.call, expected.part)
        torch.testing.assert_close(entry.trajectory.transition.decay, expected.trajectory.transition.decay)


def test_a_compiled_model_is_converted_within_and_torch_traces_no_recorder():
    """The wrapper's forward has no names of arguments, and a traced recorder ended in an error of torch's."""
    model = nn.Sequential(mixers.HGRN(4)).eval()
    with dsf.convert(torch.compile(model, backend="eager")) as converted, record(converted) as recording:
        assert converted.model is model and converted.layers[0].name == "0"
        assert all(listener._torchdynamo_disable for listener in converted.layers[0].listeners)
        model(torch.randn(1, 5, 4))
    assert recording.trajectory("0").tokens == 5
