"""What trainers need of every layer: starts, rates in float32, one vocabulary, refusals; `Layer` and `layer_for`."""

import copy
import inspect
import itertools
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

import dsf
from dsf import Key, Param, Scalar, System, Value, mixers
from dsf.mixers import Layer, layer_for, parameter_groups
from dsf.mixers._own import Owner
from dsf.mixers.ranges import known

ENTRIES = pytest.mark.parametrize("entry", mixers.ZOO, ids=lambda e: e.name)
RATES = {
    "log_dt",
    "A_imag",
    "nu_log",
    "theta_log",
    "gamma_log",
    "log_step",
    "Lambda_re",
    "Lambda_im",
    "A_log",
    "dt_bias",
    "D",
    "Lambda",
    "time_decay",
    "time_first",
    "time_faaaa",
    "w0",
    "a0",
}


def build(entry, seed=0, **options):
    torch.manual_seed(seed)
    return entry.module(d_model=32, **options)


def owners(model):
    return [m for m in model.modules() if isinstance(m, Owner)]


# Starts


@ENTRIES
def test_a_layer_made_without_memory_takes_the_weights_of_another(entry):
    """Constants (slopes, LRU's C), which no state dict has, stayed on the meta device."""
    one, x = moved(build(entry)), torch.randn(2, 5, 32)
    with torch.device("meta"):
        other = entry.module(d_model=32)
    other.load_state_dict(copy.deepcopy(one.state_dict()), assign=True)
    assert not any(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
    torch.testing.assert_close(other(x)[0], one(x)[0])


@ENTRIES
@pytest.mark.parametrize("backwards", [False, True], ids=["parents first", "children first"])
def test_a_layer_made_without_memory_starts_as_a_fresh_one(entry, backwards):
    fresh = build(entry)
    with torch.device("meta"):
        made = entry.module(d_model=32)
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu")
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.fill_(1e30)
    torch.manual_seed(1)
    modules = [m for m in made.modules() if hasattr(m, "reset_parameters")]
    for module in reversed(modules) if backwards else modules:
        module.reset_parameters()
    expected = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
    found = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = found[name]
        if value.numel() == 1:
            assert abs(got - value) < 8, name  # one draw each
            continue
        if value.std() == 0:
            assert torch.equal(got, value), name
            continue
        # Two draws of one distribution: as many numbers as there are tell how near their moments must be.
        few = 6 * value.numel() ** -0.5
        spread = value.std().item() + got.std().item()
        assert abs(got.mean() - value.mean()) <= few * spread, name
        assert got.abs().max() <= 4 * value.abs().max() and got.std() <= (1 + 2 * few) * 3 * value.std(), name
    for module in owners(made):
        for name in module.no_weight_decay():
            assert getattr(module, name)._no_weight_decay and getattr(module, name)._no_reinit


@ENTRIES
def test_the_same_seed_draws_the_same_weights_again(entry):
    layer, again = build(entry), build(entry)
    for seed, module in enumerate(m for m in layer.modules() if hasattr(m, "reset_parameters")):
        torch.manual_seed(seed)
        module.reset_parameters()
    for seed, module in enumerate(m for m in again.modules() if hasattr(m, "reset_parameters")):
        torch.manual_seed(seed)
        module.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters(), strict=True))


@ENTRIES
def test_parameters_that_a_module_owns_are_reset_by_it_alone(entry):
    layer = build(entry)
    for name, module in layer.named_modules():
        if hasattr(module, "reset_parameters"):
            before = {n: p.clone() for n, p in layer.named_parameters()}
            module.reset_parameters()
            own = {f"{name}.{n}".strip(".") for n, _ in module.named_parameters(recurse=False)}
            assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters() if n not in own)


def test_initialisation_by_class_leaves_rates_and_time_steps_alone():
    """What transformers' `_init_weights` does to every module of a model."""
    for layer in (mixers.S6(32), mixers.SSD(32, headdim=8), mixers.GatedDeltaNet(32)):
        kept = {n: p.clone() for n, p in layer.named_parameters() if n.startswith(("A_log", "D", "dt_"))}
        for module in layer.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        assert kept and all(torch.equal(p, kept[n]) for n, p in layer.named_parameters() if n in kept)


def test_what_a_checkpoint_filled_is_not_drawn_again():
    layer = mixers.S6(16)
    layer.A_log._is_hf_initialized = True  # as transformers marks it while it loads
    layer.A_log.data.fill_(7.0)
    layer.D.data.fill_(7.0)
    layer.reset_parameters()
    assert bool((layer.A_log == 7).all()) and bool((layer.D == 1).all())


# Rates


@ENTRIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rates_stay_float32_when_a_model_is_cast(entry, dtype):
    exact, cast = build(entry), nn.Sequential(build(entry)).to(dtype)[0]
    made = build(entry, dtype=dtype)
    for layer in (cast, made):
        for name, parameter in layer.named_parameters():
            rate = (name.split(".")[-1] in RATES and "." not in name) or name == "slope" or (name, entry.name) in POWERS
            assert parameter.dtype is (torch.float32 if rate else dtype), name
            if rate:
                assert torch.equal(parameter, dict(exact.named_parameters())[name])
        y, state = layer(torch.randn(2, 5, 32, dtype=dtype))
        assert y.dtype is dtype and y.isfinite().all()
        assert layer.step(torch.randn(2, 32, dtype=dtype), state)[0].dtype is dtype
    assert all(p.dtype is torch.float64 for p in build(entry).double().parameters())


POWERS = {("a", "modified_qlstm"), ("p", "s4"), ("B", "s4"), ("lam", "mesanet")}


def test_rates_that_torch_computes_of_others_stay_float32():
    """Parametrizations and pruning keep the rate in a parameter of another name, which was rounded."""
    layer = mixers.SSD(32)
    parametrize.register_parametrization(layer, "A_log", nn.Hardtanh(-3.0, 3.0))
    prune.identity(layer, "D")
    before = {name: p.clone() for name, p in layer.named_parameters()}
    layer.to(torch.bfloat16)
    for name in ("parametrizations.A_log.original", "D_orig"):
        assert torch.equal(layer.get_parameter(name), before[name]) and before[name].dtype == torch.float32
    assert layer.A_log.dtype == torch.float32 and layer.in_proj.weight.dtype == torch.bfloat16
    assert layer(torch.randn(1, 5, 32, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_casting_keeps_gradients_of_rates_and_marks():
    layer = mixers.SSD(16, headdim=8)
    layer(torch.randn(1, 3, 16))[0].sum().backward()
    gradient = layer.A_log.grad.clone()
    layer.to(torch.bfloat16)
    assert layer.A_log.grad.dtype is torch.float32 and torch.equal(layer.A_log.grad, gradient)
    assert layer.in_proj.weight.grad.dtype is torch.bfloat16 and layer.A_log._no_weight_decay
    order = [n for n, _ in layer.named_parameters()]
    assert order == [n for n, _ in mixers.SSD(16, headdim=8).named_parameters()]  # optimizers count on it


def test_rates_reach_the_recurrence_in_float32_under_autocast():
    layer = mixers.GatedDeltaNet(16)
    with torch.autocast("cpu", torch.bfloat16):
        inputs = layer.inputs(torch.randn(1, 4, 16))
        y, _ = layer(torch.randn(1, 4, 16))
    assert inputs["A_log"].dtype is inputs["dt_bias"].dtype is torch.float32
    assert y.isfinite().all()


WIDE = {  # what CUDA's autocast computes in float32, and a CPU's does not
    "cumprod", "cumsum", "exp", "expm1", "layer_norm", "log", "log1p", "log_softmax", "norm", "normalize", "pow",
    "prod", "reciprocal", "rms_norm", "rsqrt", "softmax", "softplus", "sum", "tan",
}  # fmt: skip


class AsOnCuda(TorchFunctionMode):
    """A CPU's autocast with the types of CUDA's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in WIDE and torch.is_autocast_enabled("cpu"):
            args = [x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x for x in args]
        return func(*args, **(kwargs or {}))


@ENTRIES
@pytest.mark.parametrize("mode", [nullcontext, AsOnCuda], ids=["cpu", "cuda"])
def test_layers_train_under_autocast_near_float32(entry, mode):
    layer, x = build(entry), torch.randn(2, 9, 32)
    for p in layer.parameters():
        p.data.add_(0.05 * torch.randn_like(p))  # some maps begin at zero
    plain, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16), mode():
        y, state = layer(x)
        stepped, _ = layer.step(x[:, 0], state)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    assert stepped.isfinite().all()
    assert (y.float() - plain).norm() < 0.05 * plain.norm()


class OfTwoTypes(mixers.Mixer):
    """A layer as users write it, whose inputs autocast gives different types."""

    recurrence = mixers.gated_deltanet

    def __init__(self, d_model):
        super().__init__()
        self.dims = (2, d_model // 2, d_model // 2)
        self.qkv, self.gates = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, 4)
        self.own("floor", torch.zeros, 2, kind="rate")

    def arguments(self, u, side, span):
        q, k, v = self.qkv(u).unflatten(-1, (3, 2, -1)).unbind(2)
        alpha, beta = self.gates(u).sigmoid().chunk(2, -1)
        k = nn.functional.normalize(k, dim=-1)
        return {"q": q, "k": k, "v": v, "alpha": alpha, "beta": self.floor.sigmoid().to(u.dtype) * beta}

    def readout(self, y, side):
        return y.flatten(2)


@pytest.mark.parametrize("mode", [nullcontext, AsOnCuda], ids=["cpu", "cuda"])
def test_a_layer_of_ones_own_runs_under_autocast(mode):
    torch.manual_seed(0)
    layer, x = OfTwoTypes(16), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16), mode():
        assert {n: i.dtype for n, i in layer.inputs(x).items()} == dict.fromkeys(layer.inputs(x), torch.bfloat16)
        y, state = layer(x)
        layer.step(x[:, 0], state)
    y.sum().backward()
    assert (y.float() - layer(x)[0]).norm() < 0.05 * layer(x)[0].norm() and layer.floor.grad.isfinite().all()


def test_a_layer_without_its_maps_says_which_one_it_lacks():
    class Without(OfTwoTypes):
        arguments, readout = mixers.Mixer.arguments, mixers.Mixer.readout

    with pytest.raises(NotImplementedError, match=r"Without defines no arguments\(u, side, span\)"):
        Without(16)(torch.randn(1, 3, 16))
    Without.arguments = OfTwoTypes.arguments
    with pytest.raises(NotImplementedError, match=r"Without defines no readout\(y, side\)"):
        Without(16)(torch.randn(1, 3, 16))


def test_rwkv7_takes_the_first_layers_values_under_autocast():
    layer, x = mixers.RWKV7(32, value_residual=True), torch.randn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, v_first=torch.randn(2, 9, 32))[0].isfinite().all()


def test_parameter_groups_spare_rates_biases_and_norms():
    model = nn.Sequential(mixers.S6(16), nn.LayerNorm(16), mixers.RWKV7(16))
    decayed, spared = parameter_groups(model, 0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    found = {names[id(p)] for p in spared["params"]}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert {"0.A_log", "0.D", "0.dt_proj.bias", "0.conv1d.bias", "1.weight", "1.bias", "2.w0", "2.x_r"} <= found
    assert {names[id(p)] for p in decayed["params"]} >= {"0.in_proj.weight", "0.dt_proj.weight", "2.w1", "2.key.weight"}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert model[0].no_weight_decay() == {"A_log", "D"}
    torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3).step()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("apart", [False, True])
def test_fsdp_policies_cast_rates_unless_they_are_sharded_apart(apart, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.utils import _to_kwargs

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = mixers.GatedDeltaNet(16)
        expected, names = {n: p.clone() for n, p in layer.state_dict().items()}, set(layer.state_dict())
        model = nn.Sequential(layer)
        mesh, seen = init_device_mesh("cpu", (1,)), {}
        arguments = layer.arguments
        layer.arguments = lambda *given: seen.update(arguments(*given)) or dict(seen)
        if apart:
            (child,) = mixers.shard_rates(model, mesh=mesh)
            assert isinstance(layer, mixers.GatedDeltaNet)
            # what FSDP does on a GPU where a checkpoint calls this module first: it moves the arguments it finds
            place = torch.device("cpu")
            child.register_forward_pre_hook(lambda _, args: _to_kwargs(args, {}, place, False)[0][0])
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        y, _ = model(torch.randn(2, 5, 16))
        y.float().square().mean().backward()
        assert seen["A_log"].dtype is seen["dt_bias"].dtype is (torch.float32 if apart else torch.bfloat16)
        assert seen["q"].dtype is torch.bfloat16 and all(p.grad is not None for p in model.parameters())
        assert set(layer.state_dict()) == names
        assert all(torch.equal(p.full_tensor(), expected[n]) for n, p in layer.state_dict().items())
        if apart:
            assert len(parameter_groups(model, 0.1)[1]["params"]) == 3  # two rates, one norm
            saved = {n: p.clone() + 1 for n, p in layer.state_dict().items()}
            layer.load_state_dict(saved)
            assert all(torch.equal(p, saved[n]) for n, p in layer.state_dict().items())
            with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
                layer.load_state_dict({**saved, "other": saved["A_log"]})
            with pytest.raises(RuntimeError, match=r"Missing key.*A_log"):
                layer.load_state_dict({n: p for n, p in saved.items() if n != "A_log"})
            with pytest.raises(TypeError, match="float32"):
                mixers.shard_rates(model, mp_policy=MixedPrecisionPolicy())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["rwkv7", "retnet", "mlstm"])
def test_layers_with_states_of_their_own_are_one_graph(name):
    layer, x = build(mixers.get(name)), torch.randn(2, 12, 32)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    y, state = compiled(x, attention_mask=torch.ones(2, 12))
    torch.testing.assert_close(y, layer(x)[0])
    torch.testing.assert_close(compiled(x, state)[0], layer(x, state)[0])


# One vocabulary


@ENTRIES
def test_every_constructor_takes_the_common_arguments(entry):
    layer = entry.module(32, layer_idx=3, device="cpu", dtype=torch.float64, bare=True)
    assert layer.layer_idx == 3 and {p.dtype for p in layer.parameters()} == {torch.float64}
    assert all(p.is_meta for p in entry.module(32, device="meta").parameters())
    named = inspect.signature(entry.module).parameters
    assert next(iter(named)) == "d_model" and list(named)[-3:] == ["layer_idx", "device", "dtype"] and len(named) <= 20
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in named.values())
    known = {"n_heads", "n_key_heads", "n_kv_heads", "d_state", "headdim", "expand", "d_conv", "bias", "n_groups"}
    assert not {"heads", "num_heads", "head_dim", "nheads", "d_inner"} & set(named) and known & set(named)
    with pytest.raises(TypeError, match=rf"^{type(layer).__name__}: .*'nheads'.* it takes d_model, "):
        entry.module(32, nheads=3)
    with pytest.raises(dsf.InputError, match=f"{layer.__class__.__name__}.*nheads.*it takes d_model"):
        layer_for(entry.name, 32, nheads=3)


@ENTRIES
def test_layers_copy_and_pickle(entry):
    layer = build(entry)
    x = torch.randn(1, 4, 32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], layer(x)[0])
        for module in owners(other):
            module.reset_parameters()


@pytest.mark.parametrize(
    "make",
    [mixers.GatedDeltaNet, mixers.GLA, mixers.KDA, mixers.RetNet, mixers.HGRN2, mixers.DeltaProduct, mixers.RWKV6,
     mixers.RWKV7, mixers.MLSTM, mixers.LinearAttention, mixers.SoftmaxAttention],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_in_words(make):
    with pytest.raises(dsf.InputError, match=f"{make.__name__}: n_heads .5. must divide"):
        make(32, 5)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: mixers.MinGRU(5, expand=1.5), "MinGRU: expand .1.5. times d_model .5."),
        (lambda: mixers.HGRN(8, lower_bound=1.0), "lower_bound is 1.0"),
        (lambda: mixers.MLSTM(8, qkv_block=3), "qkv_block .3. must divide"),
        (lambda: mixers.DeltaProduct(8, n_steps=0), "n_steps is 0"),
        (lambda: mixers.RWKV4(8, n_layers=2, layer_idx=2), "layer_idx is 2"),
        (lambda: mixers.SoftmaxAttention(8, n_kv_heads=3), "n_kv_heads .3."),
        (lambda: mixers.RWKV7(8, value_residual=True)(torch.randn(1, 2, 8)), "v_first"),
        (lambda: mixers.SSD(8, headdim=4, dt_limit=(0.1, 0.01)), "dt_limit is .0.1, 0.01., expected two numbers"),
        (lambda: mixers.Mamba3(8, headdim=5), "headdim 5 must divide 16"),
        (lambda: mixers.Mamba3(8, headdim=8, d_state=7), "an even d_state, got 0.5 of 7"),
    ],
)
def test_other_impossible_arguments_are_refused_in_words(make, words):
    with pytest.raises(dsf.InputError, match=words):
        make()


@ENTRIES
def test_masks_of_ones_pass_and_padding_is_refused_with_a_way_out(entry):
    layer, x = build(entry), torch.randn(2, 5, 32)
    y, state = layer(x)
    masked, none = layer(x, attention_mask=torch.ones(2, 5, dtype=torch.long), use_cache=False)
    assert torch.equal(masked, y) and none is None and state is not None
    for mask in (torch.tensor([[0, 1, 1, 1, 1], [1] * 5]), torch.tensor([[1] * 5, [1, 1, 1, 1, 0]])):
        with pytest.raises(dsf.InputError, match=r"1 padded tokens.*cu_seqlens"):
            layer(x, attention_mask=mask)
    with pytest.raises(dsf.InputError, match="both given"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 2, 5]), attention_mask=torch.ones(1, 5))
    with pytest.raises(dsf.InputError, match=r"\[B, T\] of ones"):
        layer(x, attention_mask=torch.ones(2, 1, 5, 5))
    for shape in ((2, 4), (3, 5)):
        with pytest.raises(dsf.InputError, match=r"attention_mask has shape .*, and x has \[2, 5\] tokens"):
            layer(x, attention_mask=torch.ones(shape))
    for shape in ((1, 5), (2, 9)):  # of all rows alike, and with earlier tokens
        assert torch.equal(layer(x, attention_mask=torch.ones(shape), use_cache=False)[0], masked)


def test_the_way_out_of_padding_works():
    layer, x = mixers.S6(16).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    packed, cuts = x[mask.bool()].unsqueeze(0), torch.tensor([0, *mask.sum(1).cumsum(0).tolist()])
    y, _ = layer(packed, cu_seqlens=cuts)
    torch.testing.assert_close(y[:, :3], layer(x[:1, 2:])[0])
    torch.testing.assert_close(y[:, 3:], layer(x[1:, :4])[0])


@ENTRIES
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
def test_a_state_keeps_no_tokens_in_memory(entry, reverse):
    """The window of a convolution was a view of all tokens: those of a prompt stayed as long as its state."""
    layer = build(entry)
    _, state = layer(torch.randn(2, 60, 32), reverse=reverse)
    for part in (state.conv, state.recurrent, state.position):
        if isinstance(part, torch.Tensor):
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@pytest.mark.parametrize("name", ["rwkv4", "rwkv7", "retnet", "kda", "mamba3", "rg_lru"])
def test_empty_sequences_in_a_packed_row_keep_their_state(name):
    """Whether they have had tokens before or not, and whatever comes after."""
    layer, state, alone = moved(build(mixers.get(name))).double(), None, [None] * 5
    for cuts in ([0, 0, 4, 4, 9, 9], [0, 3, 3, 3, 9, 9], [0, 1, 2, 5, 5, 9]):
        x = torch.randn(1, 9, 32, dtype=torch.float64)
        y, state = layer(x, state, cu_seqlens=torch.tensor(cuts))
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin < end:
                expected, alone[i] = layer(x[:, begin:end], alone[i])
                torch.testing.assert_close(y[:, begin:end], expected, rtol=1e-9, atol=1e-9)
            if alone[i] is None:
                continue
            for got, wanted in zip(state, alone[i], strict=True):
                counted = name == "rg_lru" and wanted is None  # by packed calls alone
                assert (got is None) == (wanted is None) or counted
                if got is not None and not counted:
                    torch.testing.assert_close(got[i : i + 1], wanted, rtol=1e-9, atol=1e-9)


def test_rwkv7_takes_the_values_of_the_first_layer():
    torch.manual_seed(0)
    first, second = mixers.RWKV7(16).double(), mixers.RWKV7(16, value_residual=True).double()
    nn.init.normal_(second.output.weight)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    values = first.inputs(x)["v"].flatten(2)
    y, _ = second(x, v_first=values)
    a, state = second(x[:, :4], v_first=values[:, :4])
    b, state = second.step(x[:, 4], state, v_first=values[:, 4])
    torch.testing.assert_close(torch.cat([a, b.unsqueeze(1)], 1), y[:, :5])
    assert not torch.allclose(y, second(x, v_first=values.flip(-1))[0])


# A layer of any recurrence


@dsf.recurrence
def mine(q: Key, k: Key, v: Value, keep: Scalar, write: Scalar, floor: Param[Key], scale: Param[Value]) -> System:
    """A decay of one's own with two Params."""
    return System(A=dsf.diag(keep * dsf.sigmoid(floor)), B=dsf.l2norm(k) * (dsf.sigmoid(write) * v), C=q, D=scale * v)


@dsf.recurrence
def by_value(q: Key, k: Key, v: Value, g: Value, beta: Scalar) -> System:
    """A acts on the Value axis, so there is no trajectory."""
    return System(A=(dsf.I - beta * dsf.outer(v, v)) @ dsf.diag(dsf.sigmoid(g)), B=beta * k * v, C=q)


@dsf.recurrence
def within_five(q: Key, k: Key, v: Value, x: Value, f: Scalar) -> System:
    """What D adds is no multiple of what the window keeps, so there is no matrix of weights."""
    return System(A=dsf.sigmoid(f), B=k * v, C=q, D=x, window=5)


def moved(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


OF_ALL_KINDS = [*(e.recurrence for e in mixers.ZOO), mine, by_value, within_five]


@pytest.mark.parametrize("recurrence", OF_ALL_KINDS, ids=lambda r: r.name)
def test_layers_of_any_recurrence_obey_the_laws(recurrence):
    torch.manual_seed(0)
    shared = {} if recurrence.name in NO_KEYS else {"n_key_heads": 1}
    layer = moved(Layer(recurrence, 8, 2, N=recurrence.spec.keys_of(3), P=5, conv=3, **shared)).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    y, last = layer(x)
    first, middle = layer(x[:, :3])
    second, end = layer(x[:, 3:6], middle)
    third, end = layer.step(x[:, 6], end)
    torch.testing.assert_close(torch.cat([first, second, third.unsqueeze(1)], 1), y, rtol=1e-9, atol=1e-9)
    packed, _ = layer(x.flatten(0, 1).unsqueeze(0), cu_seqlens=torch.tensor([0, 7, 14]))
    torch.testing.assert_close(packed.view_as(y), y, rtol=1e-9, atol=1e-9)
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name
    counted = [
        t for t in torch.utils._pytree.tree_leaves(last) if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    assert layer.state_size(context=7) == sum(t[0].numel() for t in counted)


NO_KEYS = {"s5", "lru", "qlstm", "modified_qlstm", "rg_lru", "hgrn", "mingru", "rwkv4"}


@pytest.mark.parametrize(
    "options", [{"conv": 0}, {"gate": False}, {"norm": False}, {"bare": True}, {"norm": False, "gate": False}]
)
def test_parts_of_a_layer_can_be_left_out(options):
    layer = Layer(mine, 8, 2, N=3, P=5, **options)
    assert (layer.conv1d is None) == ("conv" in options or "bare" in options)
    assert (layer.g_proj is None) == ("gate" in options or "bare" in options)
    assert (layer.o_norm is None) == ("norm" in options)
    assert layer(torch.randn(2, 5, 8))[0].isfinite().all()


def test_a_layer_follows_the_declaration():
    layer = Layer(mine, 8, 4, N=3, P=5, n_key_heads=2)
    assert layer.in_proj.weight.shape == (2 * 3 + 2 * 3 + 4 * 5, 8)  # q, k, v
    assert layer.gates_proj.weight.shape == (4 + 4, 8) and layer.floor.shape == (4, 3) and layer.scale.shape == (4, 5)
    inputs = layer.inputs(torch.randn(2, 6, 8))
    assert inputs["k"].shape == (2, 6, 2, 3) and inputs["keep"].min() >= 0 and inputs["keep"].max() <= 1
    assert dict(layer.named_parameters()).keys() == {
        "floor", "scale", "in_proj.weight", "conv1d.weight", "gates_proj.weight", "gates_proj.bias", "g_proj.weight",
        "o_norm.weight", "o_proj.weight",
    }  # fmt: skip
    same = Layer(mine, 8, 4, d_state=3, headdim=5, d_conv=2)
    assert same.dims == layer.dims and same.conv1d.kernel_size == (2,)


def test_starts_of_a_layer_can_be_given():
    values = torch.linspace(-1, 1, 6).reshape(2, 3)
    layer = Layer(mine, 8, 2, N=3, P=5, init={"floor": values, "scale": 0.5, "keep": 0.9, "write": torch.zeros})
    assert torch.equal(layer.floor, values) and bool((layer.scale == 0.5).all())
    layer.floor.data.zero_()
    layer.reset_parameters()
    assert torch.equal(layer.floor, values)
    nothing = layer.inputs(torch.zeros(1, 2, 8))
    torch.testing.assert_close(nothing["keep"], torch.full((1, 2, 2), 0.9))
    assert bool((nothing["write"] == 0).all())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"init": {"kept": 1.0}}, "init sets `kept`.*did you mean keep"),
        ({"init": {"q": 1.0}}, "init sets `q`.*no bias"),
        ({"init": {"keep": 2.0}}, "init of `keep` in mine: it must lie inside its range .in .0, 1.."),
        ({"init": {"floor": torch.zeros(2)}}, "init of `floor`"),
        ({"n_key_heads": 3}, "n_key_heads .3. must divide"),
        ({"N": 3, "d_state": 4}, "N is 3 but d_state"),
    ],
)
def test_what_a_layer_cannot_be_is_refused_in_words(options, words):
    with pytest.raises(dsf.InputError, match=words):
        Layer(mine, 8, 2, **options)


def test_a_token_input_can_be_given_in_place_of_the_layers_own():
    layer, x = Layer(mine, 8, 2), torch.randn(2, 4, 8)
    forgetful, _ = layer(x, keep=torch.zeros(2, 4, 2))
    assert not torch.allclose(forgetful, layer(x)[0])
    torch.testing.assert_close(layer(x, keep=layer.inputs(x)["keep"])[0], layer(x)[0])
    with pytest.raises(dsf.InputError, match="no token input called kept"):
        layer(x, kept=torch.zeros(2, 4, 2))


def test_a_layer_of_a_recurrence_without_memory_behind_it():
    with torch.device("meta"):
        layer = Layer(mine, 8, 2)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer(torch.randn(1, 3, 8))[0].isfinite().all()
    layer.to(torch.bfloat16)
    assert layer.floor.dtype is torch.float32 and layer(torch.randn(1, 3, 8).bfloat16())[0].dtype is torch.bfloat16


@pytest.mark.parametrize(("recurrence", "gate"), [(by_value, "g"), (within_five, "f"), (mixers.s4, "A_log")])
def test_memory_of_a_gate_is_told_by_the_decay_alone(recurrence, gate):
    """Without a trajectory, and without the cosines of turns, which hide that a larger rate forgets."""
    assert known(recurrence).memory[gate] == (-1.0 if gate == "A_log" else 1.0)


def test_values_that_erase_stay_bounded_in_a_layer():
    """They are made of length one over channels, not over heads."""
    torch.manual_seed(0)
    layer = Layer(by_value, 16, 4, init={"beta": 1.9})
    v = layer.inputs(x := torch.randn(1, 500, 16))["v"]
    torch.testing.assert_close(v.norm(dim=-1), torch.ones_like(v[..., 0]))
    assert layer(x)[0].abs().max() < 100


# However a mixer is given


def test_a_layer_for_every_way_to_give_a_mixer(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import dsf\nfrom dsf import Scalar, System, Value\n\n\n@dsf.recurrence\n"
                    "def held(v: Value, keep: Scalar) -> System:\n    return System(A=keep, B=v, C=1)\n")  # fmt: skip
    found = [layer_for(m, 16, n_heads=2) for m in ("gated_deltanet", mixers.GLA, mixers.gla, f"{path}:held")]
    assert [type(layer) for layer in found] == [mixers.GatedDeltaNet, mixers.GLA, Layer, Layer]
    assert type(layer_for("mamba", 16)) is mixers.S6 and type(layer_for("GatedDeltaNet", 16)) is mixers.GatedDeltaNet
    assert layer_for("s6_negative", 16).recurrence is mixers.s6_negative
    for given, words in (
        ("gated_delta", "near names"), (f"{path}:hold", "its recurrences are held"), (f"{path}", "which function"),
        ("none.py:f", "there is no file"), (3, "not int"),
    ):  # fmt: skip
        with pytest.raises(dsf.InputError, match=words):
            layer_for(given, 16)
    with pytest.raises(dsf.InputError, match=r"Layer: .*heads.*it takes d_model"):
        layer_for(mixers.gla, 16, heads=2)


def test_every_entry_of_the_zoo_has_a_layer_with_its_source():
    for entry in mixers.ZOO:
        assert entry.module is not None
        assert len((inspect.getdoc(inspect.unwrap(entry.module)) or "").split()) > 15, entry.name


CORRECTING = (
    "deltanet", "gated_deltanet", "gated_deltanet2", "comba", "efla", "kda", "delta_product", "gated_delta_product",
    "mesanet",
)  # fmt: skip


@pytest.mark.parametrize("again", [False, True], ids=["new", "reset"])
@pytest.mark.parametrize("name", CORRECTING)
def test_what_corrects_at_keys_begins_with_the_newest_token(name, again):
    """A random mixture of tokens as keys costs it up to half a bit (docs/layers.md)."""
    layer = mixers.layer_for(name, 16)
    if again:
        layer.conv1d.weight.data.zero_()
        layer.conv1d.reset_parameters()
    taps = layer.conv1d.weight.detach()
    assert (taps[..., -1] - 1).abs().max() <= 0.15 and taps[..., :-1].abs().max() <= 0.15
    assert taps.std(0).min() > 0.05


def test_what_decays_begins_with_a_mixture():
    for layer in (mixers.SSD(16, headdim=8), mixers.S6(16), mixers.MLSTM(16), mixers.Layer(mixers.kda, 16)):
        assert layer.conv1d.weight[..., -1].mean().abs() < 0.3
