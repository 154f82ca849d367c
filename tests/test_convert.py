"""Converted models say what the originals say, in every way of calling them; where those are wrong, ours are right."""

import copy
import inspect
import warnings
from contextlib import contextmanager

import convert_models as zoo
import pytest
import torch
from torch import nn

import dsf
from dsf import Key, Scalar, System, Value, mixers
from dsf.analysis import convert as conversion
from dsf.analysis import record
from dsf.analysis.convert import ConversionError, fir, fir_inputs

pytest.importorskip("transformers")

TYPES = list(zoo.CONFIGS)
EVERY = pytest.mark.parametrize("name", TYPES)
TOKENS = 13
FIXED_STATE = ["mamba", "falcon_mamba", "mamba2", "rwkv", "xlstm"]  # nothing but recurrences
# A window or biases of key places, counted with the padding between: out of the reach of a mask.
WINDOWED = ["mistral", "gpt_oss", "recurrent_gemma", "inkling_text", "mpt"]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def ids():
    return torch.randint(3, 64, (2, TOKENS))


@contextmanager
def float64_throughout():
    """transformers computes its cores in float32 whatever the model's dtype; here it means float64 by that."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    single, cast = torch.float32, torch.Tensor.float
    RecurrentGemmaRglru._rnn_scan.__defaults__ = (torch.float64,)  # acc_dtype
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, cast
        RecurrentGemmaRglru._rnn_scan.__defaults__ = (single,)
        torch.set_default_dtype(single)


def off(got, expected):
    """Largest deviation over the range of the logits."""
    return float((got - expected).abs().max() / (expected.max() - expected.min()))


def takes_positions(model):
    return "position_ids" in inspect.signature(type(model).forward).parameters


def behind_padding(model, ids):
    """Logits of two calls with a cache, of the tokens behind padding in front of the second row."""
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    first = model(input_ids=ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
    rest = model(input_ids=ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    return torch.cat([first.logits, rest.logits], dim=1)[mask == 1]


@EVERY
def test_logits_stay_and_undo_restores(name, ids):
    model = zoo.build(name)
    expected = model(input_ids=ids).logits
    converted = dsf.convert(model)
    assert off(model(input_ids=ids).logits, expected) < 1e-4
    assert converted.model is model and not converted.left_alone
    converted.undo()
    assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("name", list(zoo.BACKBONES))
def test_hidden_states_of_encoders_and_backbones_stay(name, ids):
    model = zoo.backbone(name)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    given = {"input_ids": ids, "attention_mask": mask} | ({"decoder_input_ids": ids} if name == "t5" else {})
    expected = model(**given).last_hidden_state
    converted = dsf.convert(model)
    assert off(model(**given).last_hidden_state[mask == 1], expected[mask == 1]) < 1e-4
    assert not converted.left_alone


@EVERY
def test_float64_logits_stay(name, ids):
    with float64_throughout():
        model = zoo.build(name, torch.float64)
        for buffer in model.buffers():
            buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
        expected = model(input_ids=ids).logits
        dsf.convert(model)
        assert off(model(input_ids=ids).logits, expected) < 1e-9
        assert off(zoo.in_pieces(model, ids, [4, 1, 8]), expected) < 1e-9


@EVERY
@pytest.mark.parametrize("cuts", [[5, 8], [4, 1, 5, 3], [1] * TOKENS], ids=str)
def test_pieces_with_a_cache_say_what_the_whole_says(name, cuts, ids):
    model = zoo.build(name)
    expected = model(input_ids=ids).logits
    dsf.convert(model)
    assert off(zoo.in_pieces(model, ids, cuts), expected) < 1e-4


@EVERY
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side, ids):
    model = zoo.build(name)
    dsf.convert(model)
    lengths = (TOKENS, 9)
    places = [slice(TOKENS - n, TOKENS) if side == "left" else slice(0, n) for n in lengths]
    padded, mask, positions = (torch.zeros_like(ids) for _ in range(3))
    for row, (n, place) in enumerate(zip(lengths, places, strict=True)):
        padded[row, place], mask[row, place], positions[row, place] = ids[row, :n], 1, torch.arange(n)
    given = {"position_ids": positions} if takes_positions(model) else {}
    logits = model(input_ids=padded, attention_mask=mask, **given).logits
    for row, (n, place) in enumerate(zip(lengths, places, strict=True)):
        alone = model(input_ids=ids[row : row + 1, :n]).logits[0]
        assert off(logits[row, place], alone) < 1e-4


@pytest.mark.parametrize("name", [t for t in TYPES if t not in WINDOWED])
def test_padding_at_the_end_stays_out_of_the_cache(name, ids):
    """The originals decay their states and shift their convolutions by it."""
    model = zoo.build(name)
    dsf.convert(model)
    whole = torch.cat([ids, ids], dim=1)
    lengths, begun, extra = (8, 5), 8, 5
    padded, positions = (torch.zeros(2, begun + extra, dtype=torch.long) for _ in range(2))
    mask = torch.ones_like(padded)
    for row, n in enumerate(lengths):
        padded[row, :n], padded[row, begun:] = whole[row, :n], whole[row, n : n + extra]
        positions[row, :n], positions[row, begun:] = torch.arange(n), torch.arange(n, n + extra)
        mask[row, n:begun] = 0
    given = {"position_ids": positions} if takes_positions(model) else {}
    for cuts in ([8, 5], [8, 1, 1, 3]):
        logits = zoo.in_pieces(model, padded, cuts, attention_mask=mask, **given)
        for row, n in enumerate(lengths):
            alone = model(input_ids=whole[row : row + 1, : n + extra]).logits[0]
            assert off(logits[row, begun:], alone[n:]) < 1e-4


@EVERY
def test_packed_sequences_are_kept_apart(name, ids):
    model = zoo.build(name)
    dsf.convert(model)
    cut, row = 6, ids[:1]
    bounds = torch.tensor([0, cut, TOKENS], dtype=torch.int32)
    positions = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)])[None]
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 7, "max_length_k": 7}
    given |= {"position_ids": positions} if takes_positions(model) else {}
    logits = model(input_ids=row, use_cache=False, **given).logits
    apart = [model(input_ids=x).logits for x in (row[:, :cut], row[:, cut:])]
    assert off(logits, torch.cat(apart, dim=1)) < 1e-4


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "kimi_linear", "lfm2", "minimax", "llama"])
def test_gradients_stay(name, ids):
    model = zoo.build(name)

    def gradients():
        with torch.enable_grad():
            model.zero_grad()
            model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    dsf.convert(model)
    got = gradients()
    assert got.keys() == expected.keys()
    for key, grad in expected.items():
        assert (got[key] - grad).abs().max() <= 2e-4 * grad.abs().max() + 1e-7, key


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("name", ["mamba", "minimax", "rwkv", "xlstm"])
def test_gradients_behind_padding_stay_with_checkpointing(name, reentrant, ids):
    """The backward pass runs blocks again without the model, whose arguments held the mask."""
    model, mask = zoo.build(name).train(), torch.ones_like(ids)
    mask[1, :4] = 0
    dsf.convert(model)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask == 1].sin().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with torch.enable_grad():
        expected = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if name in ("rwkv", "xlstm"):  # whose blocks are not given the mask
            with pytest.raises(
                ConversionError, match="runs it again in the backward pass, without the mask of padding"
            ):
                gradients()
            return
        for got, own in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(got, own)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "kimi_linear", "recurrent_gemma", "llama", "lfm2"])
def test_generation_says_what_the_original_says(name, ids):
    model = zoo.build(name)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    # Without a cache: with one, mamba2's original forgets its limit on the step size.
    expected = model.generate(ids, use_cache=False, **options)
    dsf.convert(model)
    assert torch.equal(model.generate(ids, **options), expected)


@EVERY
def test_a_padded_batch_generates_what_its_rows_generate_alone(name, ids):
    model = zoo.build(name)
    dsf.convert(model)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    rows = [ids[:1, :9], ids[1:, :6]]
    alone = [model.generate(row, use_cache=False, **options)[0, -4:] for row in rows]
    batch, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for place, row in enumerate(rows):
        batch[place, -row.shape[1] :], mask[place, -row.shape[1] :] = row[0], 1
    assert torch.equal(model.generate(batch, attention_mask=mask, **options)[:, -4:], torch.stack(alone))


@EVERY
def test_bfloat16_models_stay_within_their_rounding(name, ids):
    model = zoo.build(name, torch.bfloat16)
    expected = model(input_ids=ids).logits
    dsf.convert(model)
    logits = model(input_ids=ids).logits
    assert logits.dtype == expected.dtype
    # The mean: rounding sends some tokens to another expert.
    assert (logits - expected).abs().mean() < 0.03 * (expected.max() - expected.min())


@pytest.mark.parametrize("name", FIXED_STATE)
def test_the_cache_of_a_recurrent_model_does_not_grow(name, ids):
    model = zoo.build(name)
    converted = dsf.convert(model)
    key = zoo.cache_name(name)

    def numbers(cache):
        return sum(x.numel() for x in _tensors(cache))

    first = model(input_ids=ids, use_cache=True)[key]
    size = numbers(first)
    later = model(input_ids=ids, use_cache=True, **{key: first})[key]
    assert size == numbers(later) > 0
    assert all(layer.state is not None for layer in converted.layers)


def _tensors(x):
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for v in x.values() for t in _tensors(v)]
    if isinstance(x, (list, tuple)):
        return [t for v in x for t in _tensors(v)]
    return _tensors(vars(x)) if hasattr(x, "__dict__") and type(x).__module__.startswith("transformers") else []


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "rwkv", "xlstm", "llama"])
def test_a_cache_from_before_the_conversion_goes_on(name, ids):
    model = zoo.build(name)
    key = zoo.cache_name(name)
    expected = model(input_ids=ids).logits
    cache = model(input_ids=ids[:, :7], use_cache=True)[key]
    dsf.convert(model)
    rest = model(input_ids=ids[:, 7:], use_cache=True, **{key: cache}).logits
    assert off(rest, expected[:, 7:]) < 1e-4


@pytest.mark.parametrize("name", ["roberta", "opt"])
def test_models_that_count_positions_their_own_way_go_on_counting(name, ids):
    """From another number than 0, or by the mask."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = zoo.BACKBONES["opt"] if name == "opt" else {**zoo.SMALL, **zoo.HEADS, **zoo.TWO, "pad_token_id": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, is_decoder=True)).eval()
    expected = behind_padding(model, ids)
    with dsf.convert(model):
        assert off(behind_padding(model, ids), expected) < 1e-4


def test_two_models_of_a_type_are_converted_one_by_one(ids):
    one, other = zoo.build("mamba"), zoo.build("mamba")
    converted = dsf.convert(one)
    with dsf.analysis.record(converted) as recording:
        other(input_ids=ids)
    assert len(recording) == 0
    again = dsf.convert(other)
    converted.undo()
    with dsf.analysis.record(again) as recording:
        one(input_ids=ids)
        assert len(recording) == 0
        other(input_ids=ids)
    assert len(recording) == 2


@pytest.mark.parametrize(
    "name, names",
    [("mistral", ["windowed"] * 2), ("gpt_oss", ["windowed_sinking", "sinking"])],
    ids=["mistral", "gpt_oss"],
)
def test_windows_and_sinks_run_as_declarations(name, names, monkeypatch):
    """Logits and the gradient of every weight, the sinks' too, are the model's; padded rows keep to their masks."""
    from dsf.analysis.convert import softmax

    model, ran, run = zoo.build(name), [], softmax._run
    monkeypatch.setattr(softmax, "_run", lambda r, x: ran.append(r.name.removesuffix("_attention")) or run(r, x))
    ids = torch.randint(3, 64, (2, 20))
    weights = [p.requires_grad_() for p in model.parameters()]

    def everything():
        with torch.enable_grad():
            logits = model(input_ids=ids).logits
            return [logits.detach(), *torch.autograd.grad(logits.sin().sum(), weights, allow_unused=True)]

    plain = everything()
    dsf.convert(model)
    for a, b in zip(everything(), plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6
    assert ran == names
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    model(input_ids=ids, attention_mask=padded)
    assert ran == names


def test_the_report_names_layers_notes_and_what_is_left(ids):
    model = zoo.build("jamba")
    model.extra = nn.LSTM(4, 4)
    report = str(dsf.convert(model))
    assert "model.layers.0.mamba: S6 -> s6 (Hadamard)" in report
    assert "model.layers.1.self_attn: softmax -> softmax_attention" in report
    assert "a cached call of several tokens starts from the cached state" in report
    assert "left alone: extra (LSTM), because its recurrence is nonlinear in its state" in report


NOTES = [
    ("mamba", "S6: a cached call of several tokens starts from the cached state"),
    ("mamba2", "SSD: one-token steps limit the step size to time_step_limit"),
    ("qwen3_next", "Gated DeltaNet: packed sequences and padding at the end are kept out"),
    ("recurrent_gemma", "RG-LRU: the convolution keeps its past in calls of several tokens"),
    ("rwkv", "WKV-4: calls of one token keep the sequences of a batch apart"),
    ("bamba", "softmax: a cached call without position_ids goes on after the cache"),
    ("minimax", "Lightning: cached calls of several tokens go on"),
    ("xlstm", "mLSTM: the original adds eps"),
]


@pytest.mark.parametrize("by", ["call", "configuration"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_attentions_that_a_call_or_the_configuration_asks_for_stay(name, by, ids):
    """GPT-2 does not pass the wish on to its layers, and no model that of its configuration."""
    model = zoo.build(name)
    model.config.output_attentions = by == "configuration"
    asked = {"output_attentions": True} if by == "call" else {}
    expected = model(input_ids=ids, **asked).attentions
    dsf.convert(model)
    got = model(input_ids=ids, **asked).attentions
    assert len(got) == len(expected) == 2
    for ours, own in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_boolean_mask_says_what_is_seen_and_the_report_that_eager_adds_it(name, ids):
    """As torch's attention reads it, by which the converted model is the model; eager would see later tokens by it."""
    model = zoo.build(name)
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None].repeat(len(ids), 1, 1, 1)
    seen[:, :, 5:, 2] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = model(input_ids=ids, attention_mask=mask).logits
    assert off(model(input_ids=ids, attention_mask=seen).logits, expected) > 0.01
    with dsf.convert(model) as converted:
        assert "adds it to its scores" in str(converted)
        assert off(model(input_ids=ids, attention_mask=seen).logits, expected) < 1e-5
    model.set_attn_implementation("sdpa")
    own = model(input_ids=ids, attention_mask=seen).logits
    with dsf.convert(model) as converted:
        assert "adds it to its scores" not in str(converted)
        assert off(model(input_ids=ids, attention_mask=seen).logits, own) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_a_mask_adds_to_scores_counts_beside_rows_that_see_nothing(name, ids):
    """As Doge's masks do, which hold its scores of keys and hide padding in front."""
    model, hidden = zoo.build(name), torch.finfo(torch.float32).min
    added = torch.randn(len(ids), 1, 1, TOKENS).expand(-1, -1, TOKENS, -1)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    mask = added.masked_fill(later, hidden)
    mask[1, :, :, :3] = hidden  # the first three rows then see nothing
    expected = model(input_ids=ids, attention_mask=mask).logits
    with dsf.convert(model):
        got = model(input_ids=ids, attention_mask=mask).logits
    assert off(got[0], expected[0]) < 1e-5
    assert off(got[1, 3:], expected[1, 3:]) < 1e-5


def test_a_row_of_padding_reads_nothing_where_a_sink_takes_it_all(ids):
    """Models that pool rows without a mask (DeepSeek-V4) mix it into the logits of tokens."""
    model, mask = zoo.build("gpt_oss"), torch.ones_like(ids)
    mask[1, :4] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits
    dsf.convert(model)
    assert off(model(input_ids=ids, attention_mask=mask).logits, expected) < 1e-4


@pytest.mark.parametrize("name, note", NOTES)
def test_the_report_says_where_the_original_is_wrong(name, note):
    assert f"note, {note}" in str(dsf.convert(zoo.build(name)))


def test_layers_know_their_state():
    model = zoo.build("mamba2")
    converted = dsf.convert(model)
    model(input_ids=torch.randint(3, 64, (1, 5)))
    layer = converted["backbone.layers.0.mixer"]
    assert layer.state == (8, 8, 8) and layer.conv == (64 + 2 * 2 * 8) * 3
    with pytest.raises(KeyError, match=r"no converted layer is called 'x'; they are backbone.layers.0.mixer"):
        converted["x"]


def test_state_sizes_of_a_model_include_caches_and_convolutions():
    converted = dsf.convert(zoo.build("zamba"))
    with pytest.raises(ConversionError, match="no converted layer has run yet"):
        converted.state_size(100)
    converted.model(input_ids=torch.randint(3, 64, (1, 5)))
    sizes = converted.state_size(100, width=2)
    mamba, attention = sizes["model.layers.0.mamba"], sizes["model.layers.2.shared_transf.self_attn"]
    assert (mamba.recurrent, mamba.conv) == (2 * 8 * 32, 64 * 3) and mamba.bytes == 2 * mamba.numbers
    assert attention.numbers == 2 * 100 * 4 * 16
    windowed = dsf.convert(zoo.build("mistral"))
    windowed.model(input_ids=torch.randint(3, 64, (1, 5)))
    assert windowed.state_size(100)["model.layers.0.self_attn"].numbers == 2 * 6 * 2 * 8


@pytest.mark.parametrize("options", [{}, {"n_key_heads": 1}])
def test_state_sizes_of_declared_attention_are_those_of_its_layers(options):
    @dsf.recurrence
    def declared(q: dsf.Key, k: dsf.Key, v: dsf.Value, s: dsf.Param[dsf.Scalar]):
        return dsf.System(A=0.9 * dsf.turn(s), B=dsf.exp_features(k) * v, C=dsf.exp_features(q), normalize=dsf.ratio)

    layer = mixers.Layer(declared, d_model=8, n_heads=2, d_state=4, headdim=4, **options)
    with dsf.convert(nn.Sequential(layer)) as converted:
        _, state = layer(torch.randn(1, 5, 8))
        size = converted.state_size(5)["0"]
        with pytest.raises(dsf.InputError, match="context is -1"):
            converted.state_size(-1)
    assert size.recurrent == state.recurrent.numel() and size.numbers == layer.state_size(5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid", "inkling_text", "jamba", "bloom", "mpt"])
def test_state_sizes_are_those_of_the_models_own_cache(name):
    """Latents of keys and values, and every convolution once; a cache keeps a tap more of these than they need."""
    model = zoo.build(name)
    converted = dsf.convert(model)
    for layer in converted.layers:
        layer.window = None  # those of a window are cut later
    tokens = 5
    cache = model(input_ids=torch.randint(3, 64, (1, tokens)), use_cache=True).past_key_values
    sizes = converted.state_size(tokens)
    keys = sum(
        x.numel()
        for layer in cache.layers
        for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if x is not None
    )
    attention = [x for x in converted.layers if x.kind == "softmax"]
    assert sum(sizes[x.name].recurrent for x in attention) == keys
    taps = [x for layer in cache.layers for x in dict(getattr(layer, "conv_states", {})).values()]
    kept = sum(size.conv for size in sizes.values()) + sum(
        sizes[x.name].recurrent for x in converted.layers if x.kind == "FIR"
    )
    assert kept == sum(x[..., 1:].numel() for x in taps)


def test_quantised_projections_are_used_as_they_are(ids):
    model = zoo.build("llama")
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    expected = model(input_ids=ids).logits
    converted = dsf.convert(model)
    assert off(model(input_ids=ids).logits, expected) < 1e-4
    assert "quantised projections are used as they are" in str(converted)


def test_a_part_of_torchs_attention_is_not_called_quantised():
    """Its class is called NonDynamicallyQuantizableLinear."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2), mixers.HGRN(8))
    assert [x.type for x in dsf.convert(model).left_alone] == ["MultiheadAttention"]


def test_copies_of_a_converted_model_are_refused(ids):
    """Bloom's gave other logits, and others' were recorded as the original's."""
    model = zoo.build("bloom")
    expected = model(input_ids=ids).logits
    refused = pytest.raises(ConversionError, match=r"a converted model cannot be copied: undo\(\) the conversion")
    with dsf.convert(model), refused:
        copy.deepcopy(model)
    assert torch.equal(copy.deepcopy(model)(input_ids=ids).logits, expected)


def test_torchs_fused_attention_is_left_alone():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2))
    with pytest.raises(ConversionError, match=r"MultiheadAttention\): torch's fused attention"):
        dsf.convert(model)


class Retention(nn.Module):
    """A mixer that nobody has heard of."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.mT).tril() @ v)


def test_a_user_teaches_a_mixer_in_a_few_lines():
    recurrence = dsf.mixers.unnormalized_linear_attention
    model = nn.Sequential(nn.Linear(8, 8), Retention())
    with pytest.raises(ConversionError, match=r"1 \(Retention\): an unknown mixer"):
        dsf.convert(model)
    x = torch.randn(2, 6, 8)
    expected = model(x)

    @conversion.register(Retention, recurrence)
    def retention(layer, module, x):
        q, k, v = (part.unsqueeze(2) for part in module.qkv(x).chunk(3, dim=-1))
        y, _ = layer.run(recurrence, q=q, k=k, v=v)
        return module.out(y.squeeze(2))

    with dsf.convert(model) as converted, dsf.analysis.record(converted) as recording:
        torch.testing.assert_close(model(x), expected)
        assert recording.layers == ("1",)
    assert torch.equal(model(x), expected)
    del conversion.FORWARDS[Retention]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_what_a_taught_mixer_gets_has_its_inputs_dtype(dtype):
    """It was float32, which a model in half precision cannot multiply by its weights."""
    recurrence = dsf.mixers.unnormalized_linear_attention
    model, x = Retention().to(dtype), torch.randn(2, 6, 8, dtype=dtype)
    expected, wide = model(x), Retention().double()
    wide.load_state_dict(model.state_dict())

    @conversion.register(Retention, recurrence)
    def retention(layer, module, x):
        q, k, v = (part.unsqueeze(2) for part in module.qkv(x).chunk(3, dim=-1))
        y, state = layer.run(recurrence, q=q, k=k, v=v)
        assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        return module.out(y.squeeze(2))

    try:
        with dsf.convert(model):
            y = model(x)
    finally:
        del conversion.FORWARDS[Retention]
    assert y.dtype == dtype
    rounding = (expected - wide(x.double())).abs().max()
    assert (y - wide(x.double())).abs().max() <= 2 * rounding + 1e-12


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
def test_the_convolutions_system_is_the_convolution(taps):
    x, weight = torch.randn(2, 9, 5, dtype=torch.float64), torch.randn(5, taps, dtype=torch.float64)
    expected = nn.functional.conv1d(nn.functional.pad(x.mT, (taps - 1, 0)), weight.unsqueeze(1), groups=5).mT
    y = fir(taps)(**fir_inputs(x, weight))
    torch.testing.assert_close(y.squeeze(2), expected, rtol=1e-10, atol=1e-10)
    trajectory = fir(taps).trajectory(**fir_inputs(x, weight))
    assert (dsf.analysis.measures.eigenvalues(trajectory).abs() < 1e-12).all()
    size = dsf.analysis.measures.effective_state_size(trajectory, tolerance=1e-9).tolerance
    assert size.max() == min(taps - 1, 4)


def test_capped_scores_and_unknown_attention_are_left_alone():
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, why in (("gemma2", "its scores are capped"), ("falcon", "an unknown mixer")):
        sizes = {**zoo.SMALL, **zoo.HEADS, **zoo.TWO} | ({"head_dim": 8} if name == "gemma2" else {})
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
        with pytest.raises(ConversionError, match=rf"no mixer to convert: .*{why}"):
            dsf.convert(model)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_biases_of_positions_are_a_decay(name, ids):
    """ALiBi: logits, weights and gradients behind padding at both places, in pieces, with dropout; as recorded, too."""
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 5:8] = 0
    with float64_throughout(), torch.enable_grad():
        model = zoo.build(name, torch.float64)
        for part in model.modules():
            if hasattr(part, "attn_dropout_p"):
                part.attn_dropout_p = 0.3
            if isinstance(getattr(part, "attention_dropout", None), nn.Dropout):
                part.attention_dropout.p = 0.3

        def everything():
            found, given = [], {"input_ids": ids, "use_cache": False}
            for more in ({}, {"attention_mask": mask}, {"attention_mask": mask, "output_attentions": True}):
                out = model(**given, **more)
                logits = out.logits[mask == 1] if more else out.logits
                found += [logits.detach(), *torch.autograd.grad(logits.sin().sum(), weights, allow_unused=True)]
                found += [x.transpose(1, 2)[mask == 1].detach() for x in out.attentions or ()]
            found.append(zoo.in_pieces(model, ids, [4, 1, 8], attention_mask=mask)[mask == 1].detach())
            model.train()
            torch.manual_seed(3)
            found.append(model(**given).logits.detach())
            model.eval()
            return [x for x in found if x is not None]

        weights = list(model.parameters())
        expected = everything()
        with dsf.convert(model) as converted:
            assert {x.recurrence.name for x in converted.layers} == {"alibi"}
            for got, wanted in zip(everything(), expected, strict=True):
                assert (got - wanted).abs().max() <= 1e-11 * (wanted.abs().max() + 1)
            with torch.no_grad(), dsf.analysis.record(converted) as recording:
                shown = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
            for layer, weight in zip(recording.layers, shown, strict=True):
                trajectory = recording.trajectory(layer)
                torch.testing.assert_close(trajectory.kernel_matrix()[..., 0], weight)
                assert ((trajectory.attention.decay > 0) & (trajectory.attention.decay < 1)).all()


def test_attention_with_sinks_for_every_query_is_left_alone_with_its_masks(ids):
    """Its convolutions are converted; the mask of a cached call reaches its attention whole."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {k: v for k, v in zoo.CONFIGS["inkling_text"].items() if k not in ("head_dim", "swa_head_dim")}
    config = AutoConfig.for_model("inkling2_text", **sizes, head_dim=8, swa_head_dim=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    expected = behind_padding(model, ids)
    with dsf.convert(model) as converted:
        assert {x.kind for x in converted.layers} == {"FIR"}
        assert "because its attention also takes sinks" in str(converted)
        assert off(behind_padding(model, ids), expected) < 1e-4


def test_attention_that_says_it_is_not_causal_reads_both_ways():
    from transformers import Llama4VisionConfig, Llama4VisionModel

    sizes = {"hidden_size": 32, "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32}
    config = Llama4VisionConfig(
        **sizes, vision_output_dim=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
    )
    model = Llama4VisionModel._from_config(config, attn_implementation="eager").eval()
    x = torch.randn(2, 3, 32, 32)
    for p in model.parameters():
        p.mul_(3 if p.dim() >= 2 else 1)
    expected = model(x).last_hidden_state
    with dsf.convert(model):
        assert off(model(x).last_hidden_state, expected) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_conversion_that_fails_leaves_the_model_as_it_was(name, ids, monkeypatch):
    model = zoo.build(name)
    expected = model(input_ids=ids).logits

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("dsf.analysis.convert.conversion._mend_methods", interrupted)
        dsf.convert(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    dsf.convert(model)


def test_parts_of_a_model_are_not_converted_twice(ids):
    model = zoo.build("llama")
    expected = model(input_ids=ids).logits
    for first, second, said in (
        (model, model.model, "^LlamaModel is"),
        (model.model, model, "^model of LlamaForCausal"),
    ):
        converted = dsf.convert(first)
        with pytest.raises(ConversionError, match=f"{said}.* converted already; undo"):
            dsf.convert(second)
        converted.undo()
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_an_early_transformers_is_warned_of(monkeypatch):
    for oldest, words in (((99, 1), "tried with transformers 99.1 and later, this is"), ((5, 6), "")):
        monkeypatch.setattr("dsf.analysis.convert.conversion.OLDEST", oldest)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsf.convert(zoo.build("llama")).undo()
        found = [str(w.message) for w in caught if "dsf.convert" in str(w.message)]
        assert len(found) == bool(words) and all(words in message for message in found)


def test_a_layer_without_a_state_says_so_once():
    model = nn.Sequential(mixers.Hyena(16, l_max=8), mixers.Hyena(16, l_max=8))
    words = r"no mixer to convert: 0 and 1 more \(Hyena\): its filters have a number .* no state of fixed size"
    with pytest.raises(ConversionError, match=words) as error:
        dsf.convert(model)
    assert "Conv" not in str(error.value)
    with dsf.convert(nn.Sequential(model[0], mixers.GLA(16))) as converted:
        assert [x.name for x in converted.layers] == ["1"] and converted.left_alone[0].type == "Hyena"


def test_layers_of_recurrences_without_a_trajectory_are_left_alone_with_the_reason():
    """One of them refused the recording of a whole model."""

    @dsf.recurrence
    def oja(q: Key, k: Key, v: Value, b: Scalar) -> System:
        return System(A=dsf.I - dsf.sigmoid(b) * dsf.outer(v, v), B=k * v, C=q)

    @dsf.recurrence
    def within(q: Key, k: Key, v: Value, x: Value) -> System:
        return System(A=0.9, B=k * v, C=q, D=x, window=3)

    torch.manual_seed(0)
    layers = [mixers.Layer(r, 16, 2, conv=0, gate=False) for r in (oja, mixers.gla, within)]
    model = nn.ModuleList(layers)
    with dsf.convert(model) as converted, record(converted) as recording:
        x = torch.randn(1, 5, 16)
        for layer in model:
            layer(x)
        first, last = converted.left_alone
        assert (first.name, last.name) == ("0", "2")
        assert "A acts on the Value axis" in first.why and "D = x is no multiple of v" in last.why
    assert recording.layers == ("1",)


def test_bad_models_are_refused_with_the_reason():
    with pytest.raises(ConversionError, match="takes a torch module, got str"):
        dsf.convert("mamba")
    with pytest.raises(ConversionError, match="nothing mixes tokens"):
        dsf.convert(nn.Linear(3, 3))
    with pytest.raises(ConversionError, match=r"meta device \(weight\): load its weights first"):
        dsf.convert(nn.Linear(3, 3, device="meta"))
    with pytest.raises(ConversionError, match=r"\(LSTM\): its recurrence is nonlinear"):
        dsf.convert(nn.Sequential(nn.LSTM(3, 3)))
    model = zoo.build("llama")
    dsf.convert(model)
    with pytest.raises(ConversionError, match="converted already"):
        dsf.convert(model)
