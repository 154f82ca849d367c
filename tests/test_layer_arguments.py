"""What every layer refuses, in words and by its own name: arguments that cannot be, tokens and states of others."""

import inspect

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import dsf
from dsf import mixers
from dsf.mixers import layer_for
from dsf.mixers.models.rotary import RotaryAttention
from dsf.models import CausalLM, ModelConfig

NAMES = pytest.mark.parametrize("name", [*(e.name for e in mixers.ZOO), *mixers.LAYERS])
WITHOUT = ("d_conv", "layer_idx")  # may be 0
COUNTS = ("int", "int | None", int, int | None)
NUMBERS = ("float", float)


def make(name, **options):
    maker = {**{e.name: e.module for e in mixers.ZOO}, **mixers.LAYERS}[name]
    known = inspect.signature(maker).parameters
    small = {"headdim": 8} if "headdim" in known and known["headdim"].default == 64 else {}
    return maker(**{"d_model": 32, **small, **options})


def called(name):
    return type(make(name)).__name__


def arguments(name, kinds):
    maker = {**{e.name: e.module for e in mixers.ZOO}, **mixers.LAYERS}[name]
    return [p.name for p in inspect.signature(maker).parameters.values() if p.annotation in kinds]


@NAMES
def test_sizes_are_whole_numbers_of_at_least_one(name):
    sizes = arguments(name, COUNTS)
    assert "d_model" in sizes
    for argument in sizes:
        wrong = [-1, 2.5, "4", True, torch.tensor(4)] + ([] if argument in WITHOUT else [0])
        if argument == "expand":
            wrong = [-1, 0, "4", True, float("nan")]
        for value in wrong:
            with pytest.raises(dsf.InputError, match=rf"^{called(name)}: {argument} is "):
                make(name, **{argument: value})


@NAMES
def test_numbers_are_finite_and_switches_are_true_or_false(name):
    for argument in arguments(name, NUMBERS):
        for value in (-1.0, float("inf"), float("nan"), "1", True):
            with pytest.raises(dsf.InputError, match=rf"^{called(name)}: {argument} is "):
                make(name, **{argument: value})
    for argument in arguments(name, ("bool", bool)):
        for value in (0, "no"):
            with pytest.raises(dsf.InputError, match=rf"^{called(name)}: {argument} is .*True or False"):
                make(name, **{argument: value})
    for value in ("bf16", torch.int32, torch.complex64):
        with pytest.raises(dsf.InputError, match=rf"^{called(name)}: dtype is .*floating-point"):
            make(name, dtype=value)
    if "dt_min" in arguments(name, NUMBERS):
        with pytest.raises(dsf.InputError, match=rf"^{called(name)}: dt_min is 0.2, above dt_max, 0.1"):
            make(name, dt_min=0.2)


@NAMES
def test_what_a_call_is_asked_for_is_refused_in_words(name):
    """reverse="no" ran backwards, and other things ended in an AttributeError."""
    layer, x, who = make(name), torch.randn(2, 5, 32), called(name)
    for thing in (None, x.numpy(), [1]):
        with pytest.raises(
            dsf.InputError, match=rf"^{who}: x must be a tensor \[B, T, 32\], got {type(thing).__name__}"
        ):
            layer(thing)
    with pytest.raises(dsf.InputError, match=f"^{who}: reverse is True or False, got 'no'"):
        layer(x, reverse="no")
    with pytest.raises(dsf.InputError, match=f"^{who}: attention_mask must be a tensor .*, got list"):
        layer(x, attention_mask=[1])
    with pytest.raises(dsf.InputError, match=f"^{who}: .*parallel"):
        layer(x, parallel=3)
    if isinstance(layer, mixers.Mixer):
        for switch in ({"use_cache": "no"}, {"in_place": "no"}):
            call = layer if "use_cache" in switch else lambda x, **options: layer.step(x[:, 0], **options)
            with pytest.raises(dsf.InputError, match=f"^{who}: {next(iter(switch))} is True or False, got 'no'"):
                call(x, **switch)


@NAMES
def test_tokens_of_another_width_or_type_are_refused(name):
    layer = make(name)
    for x in (torch.randn(2, 3, 16), torch.randn(3, 32), torch.randn(2, 3, 1, 32)):
        with pytest.raises(dsf.InputError, match=rf"^{called(name)}: x has shape .*expected \[B, T, 32\]"):
            layer(x)
    with pytest.raises(dsf.InputError, match=rf"^{called(name)}: x is torch.int64"):
        layer(torch.ones(2, 3, 32, dtype=torch.long))
    for x, axis in ((torch.randn(2, 0, 32), "T"), (torch.randn(0, 3, 32), "B")):
        with pytest.raises(dsf.InputError, match=rf"^{called(name)}: x has {axis} = 0, at least 1 is needed"):
            layer(x)
    if isinstance(layer, mixers.Mixer):
        with pytest.raises(dsf.InputError, match=rf"^{called(name)}: x has shape .*expected \[B, T, 32\]"):
            layer.inputs(torch.randn(2, 3, 16))
        with pytest.raises(dsf.InputError, match=rf"^{called(name)}: x has shape .*expected \[B, 32\]"):
            layer.step(torch.randn(2, 1, 32))


@NAMES
def test_a_convolution_of_no_taps_is_none(name):
    if "d_conv" not in arguments(name, COUNTS):
        return
    if name in ("hyena", "hydra"):  # the papers' operators are not without one
        with pytest.raises(dsf.InputError, match="d_conv"):
            make(name, d_conv=0)
        return
    layer = make(name, d_conv=0)
    y, _ = layer(torch.randn(2, 5, 32))
    assert y.isfinite().all() and not any("conv1d" in n for n, _ in layer.named_parameters())


@pytest.mark.parametrize(
    ("make_wrong", "words"),
    [
        (lambda: mixers.GatedDeltaNet(64, nheads=4), r"^GatedDeltaNet: .*'nheads'; did you mean n_heads\?"),
        (lambda: mixers.GatedDeltaNet(), r"^GatedDeltaNet: missing a required argument: 'd_model'"),
        (lambda: mixers.VisionLSTM(64, d_state=8), r"^VisionLSTM: .*'d_state'.*; it takes d_model, n_heads"),
        (lambda: mixers.S5(8, blocks=3), r"^S5: d_state 64 must be even in each of 3 blocks"),
        (lambda: mixers.LRU(8, r_min=0.9, r_max=0.5), r"^LRU: r_min is 0.9, above r_max, 0.5"),
        (lambda: mixers.LRU(8, r_max=1.5), r"^LRU: r_max is 1.5, expected at most 1"),
        (lambda: mixers.Hydra(8, expand=1.3, headdim=2), r"^Hydra: expand .1.3. times d_model .8."),
        (lambda: mixers.Hydra(8, headdim=3), r"^Hydra: headdim 3 must divide 16"),
        (lambda: mixers.RWKV7(8, ranks=(1, 2, 0, 3)), r"^RWKV7: ranks is \(1, 2, 0, 3\)"),
        (lambda: mixers.GeneralizedLinearAttention(8, eta=3), r"^GeneralizedLinearAttention: eta is 3, expected a Mod"),
        (lambda: mixers.Layer("gla", 8), r"^Layer: recurrence is 'gla', expected a Recurrence"),
        (lambda: mixers.Layer(mixers.gla, 8, N=0), r"^Layer: N is 0"),
        (lambda: mixers.Layer(mixers.gla, 8, conv=-1), r"^Layer: conv is -1"),
        (lambda: mixers.Layer(mixers.gla, 8, init=[1]), r"^Layer: init is \[1\], expected initial values by names"),
        (lambda: mixers.Layer(mixers.gla, 8, 3), r"^Layer: n_heads .3. must divide its 8 channels"),
        (lambda: layer_for(mixers.gla, 8, P=2.0), r"^Layer: P is 2.0"),
    ],
)
def test_the_words_of_other_refusals(make_wrong, words):
    with pytest.raises((dsf.InputError, TypeError), match=words):
        make_wrong()


def test_options_that_a_layer_of_several_does_not_have_are_refused_by_its_own_name():
    with pytest.raises(dsf.InputError, match=r"^VisionLSTM: got an unexpected keyword argument 'foo'"):
        layer_for("vision_lstm", 64, foo=1)


@NAMES
def test_layers_are_made_in_a_short_default_type(name):
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = make(name)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(bool(p.isfinite().all()) for p in layer.parameters())
    assert torch.bfloat16 in {p.dtype for p in layer.parameters()}


def test_whole_numbers_of_numpy_are_sizes():
    numpy = pytest.importorskip("numpy")
    layer = mixers.GLA(numpy.int64(32), n_heads=numpy.int32(2))
    assert layer.dims == (2, 8, 16) and type(layer.dims[0]) is int


def test_a_layer_of_ones_own_is_checked_by_the_same_rules():
    class Mine(mixers.DeltaNet):
        def __init__(self, d_model: int, taps: int = 2, slope: float = 0.5):
            super().__init__(d_model, 2, d_conv=taps)
            self.slope = slope

    assert Mine(8, 3).conv1d.kernel_size == (3,)
    for options, words in (({"taps": 0}, "taps is 0"), ({"slope": "x"}, "slope is 'x'"), ({"tap": 1}, "did you mean")):
        with pytest.raises((dsf.InputError, TypeError), match=f"^Mine: .*{words}"):
            Mine(8, **options)


# States


@pytest.mark.parametrize(
    ("layer", "other", "words"),
    [
        (mixers.RWKV7(16), mixers.RWKV7(8), r"keeps a window \['sequences', 16, 1\], the state's is \[2, 8, 1\]"),
        (mixers.RWKV7(16), mixers.RWKV7(16, bare=True), "the state's is none"),
        (mixers.RWKV7(16, bare=True), mixers.RWKV7(16), "keeps no window of a convolution"),
        (mixers.GatedDeltaNet(16, d_conv=3), mixers.GatedDeltaNet(16), r"keeps .*, 2\], the state's is \[2, 48, 3\]"),
        (mixers.RetNet(16, headdim=4), mixers.GLA(16, d_state=4), "has no positions"),
        (mixers.GLA(16, d_state=4), mixers.RetNet(16, headdim=4), "has positions"),
        (mixers.GLA(16), mixers.GLA(16, 2), "initial_state"),
        (mixers.GLA(16), mixers.SoftmaxAttention(16), "KVCache"),
        (mixers.SoftmaxAttention(16), mixers.GLA(16), "KVCache"),
    ],
)
def test_states_of_other_layers_are_refused(layer, other, words):
    x = torch.randn(2, 3, 16)
    _, state = other(torch.randn(2, 3, other.d_model))
    with pytest.raises(dsf.InputError, match=words):
        layer(x, state)
    with pytest.raises(dsf.InputError, match=words):
        layer.step(x[:, 0], state)


@pytest.mark.parametrize("name", ["rwkv4", "rwkv6", "rwkv7", "gated_deltanet", "retnet"])
def test_states_of_another_number_of_sequences_are_refused(name):
    layer, x = make(name), torch.randn(3, 4, 32)
    state = layer(x)[1]
    for given, more in ((x[:1], {}), (x.flatten(0, 1)[None], {"cu_seqlens": torch.tensor([0, 5, 12])})):
        with pytest.raises(dsf.InputError, match=r"3 sequences|initial_state"):
            layer(given, state, **more)
    with pytest.raises(dsf.InputError, match="type tuple"):
        layer(x, tuple(state))


@pytest.mark.parametrize("name", ["rwkv4", "gated_deltanet", "retnet", "softmax_attention"])
def test_states_on_another_device_are_refused(name):
    """A GPU's kernels would read a window of the host where there is nothing."""
    layer, x = make(name), torch.randn(2, 3, 32)
    state = tree_map_only(torch.Tensor, lambda part: part.to("meta"), layer(x)[1])
    for call in (lambda: layer(x, state), lambda: layer.step(x[:, 0], state)):
        with pytest.raises(dsf.InputError, match="on meta"):
            call()
    with torch.no_grad(), pytest.raises(dsf.InputError, match="on meta"):
        layer.step(x[:, 0], state, in_place=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["rwkv4", "gated_deltanet", "retnet", "softmax_attention"])
def test_steps_in_place_of_sequences_that_share_memory_are_refused_before_anything_is_written(name):
    """As those of one prompt, expanded."""
    layer, x = make(name), torch.randn(1, 3, 32)
    _, state = layer.step(x[:, 0], layer(x[:, 1:])[1], in_place=True)
    state = tree_map_only(torch.Tensor, lambda part: part.expand(2, *part.shape[1:]), state)
    if state.conv is not None:
        state = state._replace(conv=state.conv.contiguous())
    before = tree_map_only(torch.Tensor, torch.clone, state)
    with pytest.raises(dsf.InputError, match="in_place needs a place for every number"):
        layer.step(x[0, :2], state, in_place=True)
    pairs = zip(tree_leaves(before), tree_leaves(state), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
    torch.testing.assert_close(layer.step(x[0, :2], state)[0][1:], layer.step(x[:, 1], layer(x[:, [1, 2, 0]])[1])[0])


# One entry for each layer with heads; of softmax attention one that torch's own attention does not run.
HEADED = pytest.mark.parametrize(
    "entry",
    {e.module.__name__: e for e in mixers.ZOO if "n_heads" in inspect.signature(e.module).parameters}.values(),
    ids=lambda e: e.name,
)


def made(entry, d_model, *n_heads):
    """The layer, without memory, or None where its sizes are refused."""
    try:
        return entry.module(d_model, *n_heads, device="meta")
    except dsf.InputError:
        return None


@HEADED
@pytest.mark.parametrize("d_model", [20, 512, 1000])
def test_a_layer_has_the_fewest_heads_that_divide_it_and_are_at_most_128_wide(entry, d_model):
    layer = made(entry, d_model)
    heads = layer.dims[0]
    assert heads >= 4 and heads * 128 >= d_model
    assert all(made(entry, d_model, n) is None for n in range(4, heads) if n * 128 >= d_model)
    same = made(entry, d_model, heads)
    assert [p.shape for p in same.parameters()] == [p.shape for p in layer.parameters()] and same.dims == layer.dims


@HEADED
def test_a_layer_of_a_models_width_runs_on_kernels(entry):
    layer = made(entry, 2048)
    heads, n, p = layer.dims
    sizes = {"T": 4096, "H": heads, "N": n, "P": p, "dtype": torch.bfloat16, "device": "cuda"}
    assert layer.recurrence.plan(**sizes).backend == "triton"


@HEADED
def test_a_width_that_no_number_of_heads_divides_is_refused_unless_told(entry):
    with pytest.raises(dsf.InputError, match=r"no number of heads from 5 to 10 divides .*\d channels; give n_heads"):
        entry.module(521, device="meta")
    assert made(entry, 524, 2).dims[0] == 2


@pytest.mark.parametrize("groups", [2, 3, 8])
def test_heads_that_groups_share_divide_the_number_of_heads(groups):
    for make_one, word in ((mixers.GatedDeltaNet, "n_key_heads"), (mixers.SoftmaxAttention, "n_kv_heads")):
        for d_model in (96, 1536):
            layer = make_one(d_model, **{word: groups}, device="meta")
            assert layer.dims[0] % groups == 0 and d_model % layer.dims[0] == 0 and layer.dims[0] * 128 >= d_model
    with pytest.raises(dsf.InputError, match=r"64 channels and is a multiple of n_key_heads .5."):
        mixers.DeltaNet(64, n_key_heads=5)


def test_widths_that_are_given_need_not_divide():
    layer = mixers.GatedDeltaNet(521, d_state=64, headdim=32, device="meta")
    assert layer.dims == (5, 64, 32)
    assert mixers.Layer(mixers.gated_deltanet, 1042, N=64, P=64, device="meta").dims == (9, 64, 64)
    assert mixers.Layer(mixers.gated_deltanet, 2048, device="meta").dims == (16, 128, 128)
    assert RotaryAttention(130).dims == (5, 26, 26)  # an even width of a head


@NAMES
def test_boundaries_of_packed_sequences_are_checked_before_a_convolution_reads_them(name):
    layer, x = make(name), torch.randn(1, 12, 32)
    wrong = [[0, 5], [0, 12, 20], [0], [0, 7, 5, 12], [[0, 12]]]
    for given in (*map(torch.tensor, wrong), [0, 5, 12], torch.tensor([0.0, 12.0]), dsf.Packing([0, 5])):
        for more in ({}, {"reverse": True}):
            if more and "reverse" not in inspect.signature(layer.forward).parameters:
                continue
            with pytest.raises(dsf.InputError, match="cu_seqlens must "):
                layer(x, cu_seqlens=given, **more)
    with pytest.raises(dsf.InputError, match="expected B = 1, got B = 2"):
        layer(x.view(2, 6, 32), cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("mixer", ["gated_deltanet", "softmax_attention"])
def test_a_model_checks_boundaries_of_packed_sequences(mixer):
    model = CausalLM(ModelConfig(vocab_size=16, d_model=32, n_layers=1, n_heads=2, mixers=[mixer]))
    for given in (*map(torch.tensor, ([0, 5], [0, 12, 20], [0], [[0, 12]])), [0, 5, 12]):
        with pytest.raises(dsf.InputError, match="cu_seqlens must "):
            model(torch.zeros(1, 12, dtype=torch.long), cu_seqlens=given)


@NAMES
def test_arguments_that_no_call_has_are_refused_by_the_layer_s_name(name):
    """They ended in Python's words about a method that nobody has called, numbers in an AttributeError."""
    layer, x = make(name), torch.randn(1, 3, 32)
    both = type(layer).__name__ in ("Hydra", "Hyena", "VisionMamba", "VisionLSTM")  # whose calls name all arguments
    refused = (
        (TypeError, r"unexpected keyword argument") if both else (dsf.InputError, rf"^{called(name)}: there is no")
    )
    for given, more in (({"foo": 3}, "foo"), ({"foo": x}, "foo"), ({"revers": True}, "revers")):
        for call in (lambda: layer(x, **given), lambda: layer.step(x[:, 0], **given)):  # noqa: B023
            with pytest.raises(refused[0], match=rf"{refused[1]}.*{more}"):
                call()


def test_an_argument_that_was_meant_is_named():
    x = torch.randn(1, 3, 32)
    for call, words in (
        (lambda: mixers.GLA(32)(x, revers=True), "did you mean reverse"),
        (lambda: mixers.RWKV7(32)(x, first=x), "did you mean v_first"),
        (lambda: mixers.RWKV7(32)(x, foo=x), "beside x it takes state, .*, v_first"),
        (lambda: mixers.GLA(32).step(x[:, 0], inplace=True), "did you mean in_place"),
        (lambda: mixers.GLA(32).inputs(x, foo=x), "beside x it takes state, cu_seqlens$"),
        (lambda: mixers.RGLRU(32)(x, reset=3), "reset must be a tensor with a number for every token, got 3"),
        (lambda: mixers.RGLRU(32)(x, reset=x[:, :1, 0]), r"reset has shape .1, 1., expected .1, 3. and what belongs"),
        (lambda: mixers.Layer(mixers.gla, 32)(x, foo=x), "gla has no token input called foo"),
    ):
        with pytest.raises(dsf.InputError, match=words):
            call()
