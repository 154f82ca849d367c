"""dsf.models in torch alone: the model's law (whole, in pieces, one by one, packed), its configuration, its parts."""

import copy
import errno
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import set_checkpoint_early_stop

import dsf
from dsf.kernels.norm import added_rms_norm
from dsf.mixers import _beside, _own
from dsf.mixers.models import parts
from dsf.mixers.models.parts import IGNORED, cross_entropy, linear_cross_entropy, next_labels
from dsf.mixers.models.states import ModelState
from dsf.models import CausalLM, ModelConfig, RotaryAttention, sized

HYBRID = ["gated_deltanet"] * 3 + ["softmax_attention"]
PATTERNS = [HYBRID, ["s6", "rg_lru"], ["ssd"], ["mlstm"]]


def tiny(mixers=("gated_deltanet", "softmax_attention"), **fields):
    layers = len(mixers) if isinstance(mixers, list | tuple) and mixers else 2
    return ModelConfig(
        **{"vocab_size": 31, "d_model": 32, "n_layers": layers, "n_heads": 2, "mixers": mixers, **fields}
    )


def ids_of(batch=2, tokens=11, vocabulary=31):
    return torch.randint(0, vocabulary, (batch, tokens))


# The model's law


@pytest.mark.parametrize("mixers", PATTERNS, ids="+".join)
def test_whole_pieces_steps_and_packed_are_one(mixers):
    model, ids = CausalLM(tiny(mixers)).double(), ids_of()
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :4])
        second = model(ids[:, 4:9], state=first.state)
        third = model(ids[:, 9:], state=second.state)
        pieces = torch.cat([first.logits, second.logits, third.logits], 1)
        assert torch.allclose(pieces, whole, rtol=0, atol=1e-10)
        state, steps = None, []
        for t in range(ids.shape[1]):
            out = model.step(ids[:, t], state)
            state = out.state
            steps.append(out.logits)
        assert torch.allclose(torch.stack(steps, 1), whole, rtol=0, atol=1e-10)
        bounds = torch.tensor([0, 11, 15, 22])
        packed = model(ids.reshape(1, -1), cu_seqlens=bounds)
        once = model(ids.reshape(1, -1), labels=ids.reshape(1, -1), cu_seqlens=dsf.Packing(bounds))
        assert torch.equal(once.logits, packed.logits)
        assert once.loss == model(ids.reshape(1, -1), labels=ids.reshape(1, -1), cu_seqlens=bounds).loss
        assert torch.allclose(packed.logits[0, :11], whole[0], rtol=0, atol=1e-10)
        assert torch.allclose(packed.logits[0, 11:15], whole[1, :4], rtol=0, atol=1e-10)
        # and the packed call's states go on, each its own sequence: the second from its fourth token
        after = model(ids[1:, 4:5], state=packed.state.select(torch.tensor([1])))
        assert torch.allclose(after.logits[0, 0], whole[1, 4], rtol=0, atol=1e-10)


def test_gradients_through_the_state_are_those_of_the_whole():
    model, ids = CausalLM(tiny(HYBRID)).double(), ids_of()
    for mixer in model.modules():  # drawn gates forget within a token: make what is carried matter
        if isinstance(mixer, dsf.mixers.GatedDeltaNet):
            mixer.A_log.data.fill_(-4.0)
    weights = torch.randn(2, 11, 31, dtype=torch.float64)

    def gradients(cut):
        model.zero_grad()
        if cut is None:
            logits = model(ids).logits
        else:
            first = model(ids[:, :cut])
            logits = torch.cat([first.logits, model(ids[:, cut:], state=first.state).logits], 1)
        (logits * weights).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    whole, pieces = gradients(None), gradients(5)
    model.zero_grad()
    first = model(ids[:, :5])
    cut_off = model(ids[:, 5:], state=first.state.detach())
    (torch.cat([first.logits, cut_off.logits], 1) * weights).sum().backward()
    worth = max((whole[n] - p.grad).abs().max() for n, p in model.named_parameters())
    assert worth > 1e-3  # what the state carries back is not nothing
    for name in whole:
        assert torch.allclose(whole[name], pieces[name], rtol=1e-8, atol=1e-9), name


def test_a_state_is_a_value_to_go_back_to():
    model, ids = CausalLM(tiny(["gated_deltanet", "softmax_attention"])).eval(), ids_of()
    with torch.no_grad():
        kept = model(ids[:, :6]).state
        once = model(ids[:, 6:], state=kept).logits
        model.step(ids[:, 6], kept)
        assert torch.equal(model(ids[:, 6:], state=kept).logits, once)
        rows = torch.tensor([1, 1, 0])
        beams = model(ids[rows, 6:], state=kept.select(rows)).logits
        assert torch.allclose(beams, once[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [False, True])
def test_a_saved_state_is_loaded_by_the_defaults_of_torch(steps, tmp_path):
    """Which read weights only. After a step in place, attention's keys are in fixed memory."""
    model = CausalLM(ModelConfig(vocab_size=31, d_model=32, n_layers=2, mixers=["gated_deltanet", "softmax_attention"]))
    ids = torch.randint(31, (2, 7))
    with torch.no_grad():
        state = model(ids, return_state=True).state
        if steps:
            state = model.step(ids[:, 0], state, in_place=True).state
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt")
        assert torch.equal(model(ids, state=loaded).logits, model(ids, state=state).logits)


def test_states_of_other_models_and_batches_are_refused():
    model, ids = CausalLM(tiny(["gated_deltanet"] * 2)), ids_of()
    state = model(ids).state
    with pytest.raises(dsf.InputError, match="2 layers, this one has 1"):
        CausalLM(tiny(["gated_deltanet"]))(ids, state=state)
    with pytest.raises(dsf.InputError, match="holds 2 sequences, the call has 1"):
        model(ids[:1], state=state)
    with pytest.raises(dsf.InputError, match=r"layer 0 is of another model: GatedDeltaNet: .*this one keeps a window"):
        CausalLM(tiny(["gated_deltanet"] * 2, d_model=64))(ids, state=state)
    with pytest.raises(dsf.InputError, match=r"initial_state|another model"):
        CausalLM(tiny(["mingru"] * 2))(ids, state=CausalLM(tiny(["mingru"] * 2, d_model=64))(ids).state)
    with pytest.raises(dsf.InputError, match="type tuple"):
        model(ids, state=tuple(state.layers))
    other = CausalLM(tiny(["gated_deltanet", "deltanet"]))
    for given in (state, state.detach(), state.select(torch.tensor([1, 0])), model.reserve(state, 20)):
        with pytest.raises(dsf.InputError, match=r"layer 1 is of another model: .* gated_delta.*layer is deltanet"):
            other(ids, state=given)
    assert other(ids, state=ModelState(state.layers)).logits.shape == (2, 11, 31)  # of one that was made by hand


def test_bad_inputs_are_named():
    model = CausalLM(tiny(["mingru"]))
    with pytest.raises(dsf.InputError, match=r"ids: expected integers \[B, T\]"):
        model(torch.randn(2, 3))
    with pytest.raises(dsf.InputError, match="no tokens"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(dsf.InputError, match="labels"):
        model(ids_of(), labels=ids_of(2, 3))
    with pytest.raises(dsf.InputError, match="packs sequences into one row"):
        model(ids_of(), cu_seqlens=torch.tensor([0, 11, 22]))


# Learning


@pytest.mark.parametrize("mixers", [HYBRID[2:], ["s6"]], ids="+".join)
def test_a_model_learns_and_checkpointing_changes_nothing(mixers):
    model, ids = CausalLM(tiny(mixers)), ids_of(4, 17)
    gradients = []
    for on in (False, True):
        model.enable_gradient_checkpointing(on)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*gradients, strict=True))
    assert all(bool(g.any()) for g in gradients[0])
    optimizer = torch.optim.AdamW(dsf.models.decay_groups(model, 0.1), lr=1e-2)
    start = model(ids, labels=ids).loss.item()
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert abs(start - math.log(31)) < 0.3 and loss.item() < start - 0.8


@pytest.mark.parametrize("mixers", PATTERNS, ids="+".join)
@pytest.mark.parametrize("reentrant", [True, False])
@set_checkpoint_early_stop(False)  # blocks are computed again to their end
def test_gradients_go_through_the_states_of_checkpointed_blocks(mixers, reentrant):
    """Those of torch's reentrant checkpoint ended where a call went on from a state."""
    model, ids = CausalLM(tiny(mixers)).double(), ids_of(2, 11)
    model(ids).logits[:, 4:].square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.enable_gradient_checkpointing(use_reentrant=reentrant)
    first = model(ids[:, :4])
    model(ids[:, 4:], state=first.state).logits.square().sum().backward()
    for found, wanted in zip((p.grad for p in model.parameters()), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def test_blocks_may_be_wrapped():
    """As torch's tools wrap the layers of a model: they put a module of their own in a block's place."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, ids = CausalLM(tiny()).train(), ids_of()
    wrapped = copy.deepcopy(plain)
    for i, block in enumerate(plain.model.layers):
        wrapped.model.layers[i] = checkpoint_wrapper(copy.deepcopy(block))
    for model in (plain, wrapped):
        model(ids, labels=ids).loss.backward()
    for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert torch.equal(wrapped.generate(ids, 3), plain.generate(ids, 3))


def test_weight_decay_leaves_rates_and_vectors_alone():
    model = CausalLM(tiny(["gated_deltanet", "s6"]))
    apart = dsf.models.undecayed_names(model)
    assert {"model.layers.0.mixer.A_log", "model.layers.0.mixer.dt_bias", "model.layers.1.mixer.A_log"} <= apart
    assert "model.layers.1.mixer.D" in apart and "model.norm.weight" in apart
    assert "model.layers.0.mlp.up_proj.weight" not in apart and "model.embed_tokens.weight" not in apart
    assert model.no_weight_decay() == apart
    with_decay, without = dsf.models.decay_groups(model, 0.1)
    assert len(with_decay["params"]) + len(without["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("count", [None, 100])
@pytest.mark.parametrize("piece", [31 * 4 * 3, 1 << 28])
def test_the_loss_in_pieces_is_the_loss(piece, count, monkeypatch):
    monkeypatch.setattr(dsf.mixers.models.parts, "PIECE", piece)
    hidden = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 16, dtype=torch.float64, requires_grad=True)
    targets = ids_of(2, 7)
    targets[0, 2:4] = IGNORED
    wide = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum") / (count or 12)
    found = linear_cross_entropy(hidden, weight, targets, count)
    assert torch.allclose(found, wide, rtol=1e-12)
    assert torch.allclose(cross_entropy(hidden @ weight.T, targets, count), wide, rtol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(3 * found, (hidden, weight)), torch.autograd.grad(3 * wide, (hidden, weight)), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-14)
    with pytest.raises(RuntimeError, match=r"second derivatives .* cross_entropy of the logits \(fused_loss=False\)"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, count), hidden, create_graph=True)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**18])
def test_the_loss_in_pieces_keeps_float16_gradients_of_a_scaled_loss(scale):
    """Gradients rounded before they were scaled had lost what is below 6e-8, and a scale above 65504 made them NaN."""
    torch.manual_seed(0)
    given, targets = (torch.randn(1, 2000, 16), torch.randn(500, 16) / 2), torch.randint(0, 500, (1, 2000))
    found = {}
    for kind, dtype in (("exact", torch.float64), ("wide", torch.float16), ("pieces", torch.float16)):
        hidden, weight = (x.half().to(dtype).requires_grad_() for x in given)
        pieces = kind == "pieces"
        loss = linear_cross_entropy(hidden, weight, targets) if pieces else cross_entropy(hidden @ weight.T, targets)
        grads = torch.autograd.grad(scale * loss, (hidden, weight))
        found[kind] = [x.double() / scale for x in grads]
    for exact, wide, mine in zip(*found.values(), strict=True):
        assert (mine - exact).norm() < 1.2 * (wide - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_ignored_tokens_that_are_not_finite_are_ignored(bad):
    """Padding behind which a model has no number: neither the loss nor the gradient of other tokens has it."""
    hidden, weight, targets = torch.randn(2, 7, 16), torch.randn(31, 16), torch.randint(0, 31, (2, 7))
    targets[1, :3] = IGNORED
    spoiled = hidden.clone()
    spoiled[1, :3] = bad
    found = []
    for given in (hidden, spoiled):
        leaf = given.requires_grad_()
        loss = linear_cross_entropy(leaf, weight, targets)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].isfinite() and found[0][1][1, :3].eq(0).all()


def test_fused_loss_trains_the_same_and_keeps_no_logits():
    plain = CausalLM(tiny(HYBRID)).double()
    fused = CausalLM(plain.config.changed(fused_loss=True)).double()
    fused.load_state_dict(plain.state_dict())
    ids = ids_of()
    one, other = plain(ids, labels=ids), fused(ids, labels=ids)
    assert other.logits is None and torch.allclose(one.loss, other.loss, rtol=1e-10)
    one.loss.backward()
    other.loss.backward()
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-12)
    assert fused.eval()(ids, labels=ids).logits is not None


class Adapter(nn.Module):
    """A map beside another, whose weight it shows, as LoRA's layers do."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.beside = nn.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.beside(x)


def adapted(model):
    model.lm_head = Adapter(model.lm_head)


def with_a_bias(model):
    model.lm_head.bias = nn.Parameter(torch.randn_like(model.lm_head.weight[:, 0]))


def louder(model):
    model.lm_head.register_forward_hook(lambda module, args, y: 2 * y)


def pruned(model):
    prune.l1_unstructured(model.lm_head, "weight", 0.5)


@pytest.mark.parametrize("change", [adapted, with_a_bias, louder, pruned])
@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_fused_loss_is_that_of_what_the_head_does(kind, change):
    """The loss of all in pieces read the head's weight: adapters, hooks and biases took no part in training, and
    pruned weights were those of the step before."""
    model = CausalLM(tiny(HYBRID, tie_embeddings=False, fused_loss=True))
    if kind == "transformers":
        model = pytest.importorskip("dsf.models.hf").DsfForCausalLM.of(model)
    model, ids = model.double().train(), ids_of()
    change(model)
    for _ in range(2):
        model.zero_grad()
        found = model(ids, labels=ids).loss
        found.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        wide = cross_entropy(model(ids).logits, next_labels(ids))
        wide.backward()
        assert torch.allclose(found, wide, rtol=1e-10)
        for name, p in model.named_parameters():
            assert torch.allclose(grads[name], p.grad, rtol=1e-9, atol=1e-12), name


def test_fused_loss_has_the_derivatives_of_torch_func():
    model, ids = CausalLM(tiny(HYBRID, fused_loss=True)).double(), ids_of()
    weights = dict(model.named_parameters())

    def loss_of(weights):
        return torch.func.functional_call(model, weights, (ids,), {"labels": ids}).loss

    found = torch.func.grad(loss_of)(weights)
    model(ids, labels=ids).loss.backward()
    for name, p in weights.items():
        assert torch.allclose(found[name], p.grad, rtol=1e-9, atol=1e-12), name


def test_an_adapter_around_a_tied_head_leaves_the_model_whole():
    """Moving such a model registered the embedding with the adapter, and loading weights ended in torch's KeyError."""
    model = CausalLM(tiny(HYBRID))
    count, inner = model.parameter_count(), model.parameter_count(embeddings=False)
    adapted(model)
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(saved)
    model.double()
    assert model.state_dict().keys() == saved.keys()
    beside = model.lm_head.beside.weight.numel()
    assert (model.parameter_count(), model.parameter_count(embeddings=False)) == (count + beside, inner)


def test_no_sequence_is_predicted_from_the_one_before_it():
    labels = torch.arange(1, 8)[None]
    assert next_labels(labels).tolist() == [[2, 3, 4, 5, 6, 7, IGNORED]]
    bounds = torch.tensor([0, 3, 3, 7])
    assert next_labels(labels, bounds).tolist() == [[2, 3, IGNORED, 5, 6, 7, IGNORED]]
    assert next_labels(labels, torch.tensor([0, 0, 7])).tolist() == [[2, 3, 4, 5, 6, 7, IGNORED]]
    model, ids = CausalLM(tiny(["mingru"])).eval(), ids_of()
    apart = [F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum") for row in ids]
    packed = model(ids.reshape(1, -1), labels=ids.reshape(1, -1), cu_seqlens=torch.tensor([0, 11, 22])).loss
    assert torch.allclose(packed, sum(apart) / 20)


# Generation


def test_generate_takes_the_likeliest_and_leaves_the_mode():
    model, ids = CausalLM(tiny(HYBRID)), ids_of(2, 5)
    frozen = model.model.layers[1].eval()
    found = model.generate(ids, 6)
    assert model.training and model.model.layers[0].training and torch.equal(found[:, :5], ids)
    assert not any(module.training for module in frozen.modules())
    model.eval()
    for t in range(5, 11):
        assert torch.equal(model(found[:, :t]).logits[:, -1].argmax(-1), found[:, t])


def test_generate_draws_from_the_likeliest_k():
    model, ids = CausalLM(tiny(["mingru"], init_std=0.5)).eval(), ids_of(1, 5)
    likely = model(ids).logits[0, -1].topk(3).indices.tolist()
    generator = torch.Generator().manual_seed(0)
    drawn = {int(model.generate(ids, 1, 1.0, top_k=3, generator=generator)[0, -1]) for _ in range(40)}
    assert drawn <= set(likely) and len(drawn) > 1
    again = [model.generate(ids, 8, 1.0, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*again)
    for arguments in ((-1,), (1, -1.0), (1, 1.0, 0), (2.5,), (1, math.nan), (1, 1.0, 2.5)):
        with pytest.raises(dsf.InputError):
            model.generate(ids, *arguments)


# Rotary positions


def test_rotary_scores_depend_on_distances_alone():
    layer = RotaryAttention(32, n_heads=2)
    x = torch.randn(1, 9, 32)
    plain = layer.inputs(x)
    far = layer.inputs(x, cos=torch.ones(1, 9, 16), sin=torch.zeros(1, 9, 16))
    assert not torch.allclose(plain["q"], far["q"]) and torch.allclose(plain["v"], far["v"])
    scores = torch.einsum("bthn,bshn->bhts", plain["q"], plain["k"])
    same = layer.inputs(x[:, :1].expand(-1, 9, -1))
    equal = torch.einsum("bthn,bshn->bhts", same["q"], same["k"])
    for offset in range(9):  # equal tokens: a score is a function of the distance
        line = equal.diagonal(offset, dim1=2, dim2=3)
        assert torch.allclose(line, line[..., :1].expand_as(line), atol=1e-5)
    assert scores.isfinite().all()
    complex_q = torch.view_as_complex(torch.stack(far["q"].chunk(2, -1), -1).contiguous())
    rates = 10000.0 ** (-torch.arange(8) / 8)
    turned = complex_q * torch.polar(torch.ones(9, 8), torch.arange(9.0)[:, None] * rates)[None, :, None]
    assert torch.allclose(torch.cat([turned.real, turned.imag], -1), plain["q"], atol=1e-5)


def test_only_softmax_attention_gets_positions():
    model = CausalLM(tiny(["linear_attention", "softmax_attention"]))
    assert isinstance(model.model.layers[1].mixer, RotaryAttention)
    assert not isinstance(model.model.layers[0].mixer, RotaryAttention)
    bare = CausalLM(tiny(["softmax_attention"], rope_base=None))
    assert type(bare.model.layers[0].mixer) is dsf.mixers.SoftmaxAttention


# The configuration


def test_a_configuration_survives_json(tmp_path):
    config = tiny(HYBRID, mixer_options={"gated_deltanet": {"d_conv": 3}}, tie_embeddings=False)
    assert ModelConfig.from_json(config.to_json()) == config
    config.to_json(tmp_path / "c.json")
    assert ModelConfig.from_json(tmp_path / "c.json") == config
    assert config.layer_mixers == tuple(HYBRID)
    assert CausalLM(config).model.layers[0].mixer.conv1d.kernel_size == (3,)
    assert tiny(["mingru"], n_layers=3).layer_mixers == ("mingru",) * 3


def test_a_full_disk_leaves_the_configuration_that_was_there(tmp_path, monkeypatch):
    path, write = tmp_path / "c.json", Path.write_text
    before = tiny(HYBRID).to_json(path)

    def full(self, text, **options):
        write(self, text[:40], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        tiny(HYBRID, d_model=64).to_json(path)
    assert path.read_text() == before + "\n" and list(tmp_path.iterdir()) == [path]


def test_tuples_among_the_options_survive_json():
    config = tiny(["ssd"], mixer_options={"ssd": {"headdim": 8, "dt_limit": (0.0, 1.0)}})
    assert ModelConfig.from_json(config.to_json()) == config
    assert CausalLM(config).model.layers[0].mixer.recurrence.name == "ssd"


def test_mixers_are_kept_by_name(tmp_path: Path):
    assert tiny([dsf.mixers.GatedDeltaNet, dsf.mixers.mingru]).mixers == ("gated_deltanet", "mingru")
    file = tmp_path / "own.py"
    file.write_text(
        "import dsf\nfrom dsf import Key, Scalar, System, Value, sigmoid\n\n\n@dsf.recurrence\n"
        "def fading(q: Key, k: Key, v: Value, g: Scalar) -> System:\n    return System(A=sigmoid(g), B=k * v, C=q)\n"
    )
    config = tiny([f"{file}:fading"])
    model, ids = CausalLM(config), ids_of()
    assert model.model.layers[0].mixer.recurrence.name == "fading"
    assert model(ids, labels=ids).loss.isfinite()
    assert tiny([model.model.layers[0].mixer.recurrence]).mixers == (f"{file}:fading",)

    @dsf.recurrence
    def nowhere(q: dsf.Key, k: dsf.Key, v: dsf.Value) -> dsf.System:
        return dsf.System(A=dsf.I, B=k * v, C=q)

    with pytest.raises(dsf.InputError, match="not defined in a file"):
        tiny([nowhere])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixers": ["gated_delta"]}, "near names: gated_deltanet"),
        ({"mixers": ["nowhere.py:mixer"]}, "there is no file nowhere.py"),
        ({"mixers": []}, "mixers: names no mixer"),
        ({"mixers": ["mingru", "s6"], "n_layers": 3}, "2 entries, which do not divide n_layers = 3"),
        ({"mixers": ["softmax_attention"], "d_model": 33}, "2 heads do not divide d_model = 33"),
        ({"mixers": ["softmax_attention"], "d_model": 6}, "even width of a head"),
        ({"d_model": -1}, "d_model = -1"),
        ({"d_modell": 3}, "no field 'd_modell'; did you mean 'd_model'"),
        ({"mixer_options": {"s6": {}}}, "mixer_options has 's6'"),
        ({"mixer_options": {"gla": {}, "GLA": {}}, "mixers": "gla"}, "mixer_options has gla twice"),
        ({"mixer_options": {"gla": {"d_model": 8}}, "mixers": "gla"}, "gla gets d_model = "),
        ({"mixers": 3}, "mixers"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_words(fields, words):
    with pytest.raises(dsf.InputError, match=words):
        tiny(**fields)


def test_options_that_json_does_not_have_are_refused_where_it_is_written(tmp_path):
    config = tiny(["ssd"], mixer_options={"ssd": {"headdim": 8, "dtype": torch.bfloat16}})
    assert CausalLM(config).model.layers[0].mixer.in_proj.weight.dtype == torch.bfloat16
    with pytest.raises(dsf.InputError, match=r"cannot be JSON: .*dtype"):
        config.to_json(tmp_path / "config.json")
    assert not list(tmp_path.iterdir())


def test_unknown_options_and_sizes_are_refused():
    with pytest.raises(dsf.InputError, match="heads_n"):
        CausalLM(tiny(["mingru"], mixer_options={"mingru": {"heads_n": 3}}))
    with pytest.raises(dsf.InputError, match="sizes are tiny, 20m, 100m, 340m"):
        sized("30m", ["s6"])
    with pytest.raises(dsf.InputError, match="needs vocab_size="):
        ModelConfig(d_model=3, n_layers=1, mixers=["s6"])
    with pytest.raises(dsf.InputError, match="not JSON"):
        ModelConfig.from_json("{")


@pytest.mark.parametrize(
    ("size", "low", "high"), [("tiny", 4, 6), ("20m", 20, 26), ("100m", 100, 125), ("340m", 330, 365)]
)
def test_named_sizes_have_their_parameters(size, low, high):
    for mixer in ("softmax_attention", "gated_deltanet"):
        with torch.device("meta"):
            model = CausalLM(sized(size, [mixer]))
        assert low <= model.parameter_count() / 1e6 <= high
        assert model.parameter_count(embeddings=False) == model.parameter_count() - 32000 * model.config.d_model
    if size == "340m":
        assert (model.config.n_layers, model.config.d_model) == (24, 1024)


@pytest.mark.parametrize("mixers", [["gated_deltanet", "softmax_attention"], ["s6", "rwkv7"], ["lru", "mlstm"]])
def test_a_model_made_without_memory_starts_whole(mixers):
    with torch.device("meta"):
        model = CausalLM(tiny(mixers))
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for tensor in model.parameters():
        tensor.data.fill_(1e30)
    torch.manual_seed(1)
    model.reset_parameters()
    fresh = dict(CausalLM(tiny(mixers)).named_parameters())
    for name, p in model.named_parameters():
        assert float(p.detach().abs().max()) <= 2 * float(fresh[name].detach().abs().max()) + 1, name
    assert model(ids_of()).logits.isfinite().all()
    torch.manual_seed(1)
    once = [p.detach().clone() for p in model.parameters()]
    model.reset_parameters()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), once, strict=True))


def test_weights_that_are_read_after_to_empty_find_their_constants_there():
    source = CausalLM(tiny(["retnet", "lru"]))
    with torch.device("meta"):
        model = CausalLM(tiny(["retnet", "lru"]))
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    ids = ids_of()
    assert torch.equal(model(ids).logits, source(ids).logits)


def test_constants_keep_their_values_where_parameters_alone_have_no_memory():
    """As under accelerate's init_empty_weights; `to_empty` took new memory for them, which held anything."""
    source, ids = CausalLM(tiny(["retnet", "lru"])), ids_of()
    model = CausalLM(source.config)
    for module in model.modules():
        module._parameters = {
            name: None if p is None else torch.nn.Parameter(p.to("meta")) for name, p in module._parameters.items()
        }
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert dict(model.named_buffers()).keys() == dict(source.named_buffers()).keys() != set()
    assert torch.equal(model(ids).logits, source(ids).logits)


def test_a_layer_whose_calls_take_more_than_a_model_gives_is_refused_when_the_model_is_made():
    """It was at the first call."""
    config = tiny(["mingru", "rwkv7"], mixer_options={"rwkv7": {"value_residual": True}})
    with pytest.raises(
        dsf.InputError, match=r"RWKV7 of these options takes v_first= in every call.*value_residual=True"
    ):
        CausalLM(config)


def test_tied_embeddings_are_one_parameter_and_untied_ones_two():
    tied, apart = CausalLM(tiny(["mingru"])), CausalLM(tiny(["mingru"], tie_embeddings=False))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert apart.parameter_count() - tied.parameter_count() == 31 * 32
    assert tied.state_size() == sum(b.mixer.state_size() for b in tied.model.layers)


def test_layers_of_both_directions_and_without_state_are_refused_where_they_cannot_work():
    for mixer in ("hydra", "vision_mamba", "VisionLSTM"):
        with pytest.raises(dsf.InputError, match=r"both directions.* cannot be made of it"):
            tiny([mixer])
    model, ids = CausalLM(tiny(["hyena"])), ids_of()
    out = model(ids, labels=ids)
    assert torch.isfinite(out.loss) and out.logits.shape[:2] == ids.shape
    for go_on in (lambda: model(ids, state=out.state), lambda: model.generate(ids, 2)):
        with pytest.raises(dsf.InputError, match="layer 0, Hyena, keeps no state"):
            go_on()


def test_weights_that_do_not_fit_are_refused():
    model = CausalLM(tiny(["mingru"]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for fields in ({"d_model": 64}, {"n_layers": 2}, {"mixers": ["gla"]}):
        with pytest.raises(RuntimeError, match=r"size mismatch|Unexpected key|Missing key"):
            model.load_state_dict(CausalLM(tiny(**{"mixers": ["mingru"], **fields})).state_dict())
    apart = CausalLM(tiny(["mingru"], tie_embeddings=False)).state_dict()
    model.load_state_dict(before)
    with pytest.raises(RuntimeError, match=r"a head of their own.*tie_embeddings=False"):
        model.load_state_dict(apart)  # one of the two would be lost
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict({**apart, "lm_head.weight": apart["model.embed_tokens.weight"].clone()})


@pytest.mark.parametrize("d_model", [72, 130, 200, 1000])
def test_a_width_that_128_does_not_divide_gets_heads_that_do(d_model):
    config = ModelConfig(vocab_size=31, d_model=d_model, n_layers=2, mixers=["gated_deltanet", "softmax_attention"])
    for mixer, widest in (("gated_deltanet", 128), ("softmax_attention", 64)):
        assert d_model % config.heads(mixer) == 0 and config.heads(mixer) >= d_model // widest
    with torch.device("meta"):
        dims = [block.mixer.dims for block in CausalLM(config).model.layers]
    assert [heads * p for heads, _, p in dims] == [d_model] * 2 and dims[1][1] % 2 == 0


@pytest.mark.parametrize("d_model", [64, 128, 192, 320, 384, 768, 1024, 2048])
def test_models_keep_a_head_for_each_128_channels_where_that_divides(d_model):
    config = ModelConfig(vocab_size=31, d_model=d_model, n_layers=1, mixers=["gated_deltanet"])
    assert config.heads("gated_deltanet") == max(1, d_model // 128)  # saved models are read by this rule


@pytest.mark.parametrize("name", ["attention", "SoftmaxAttention", "softmax"])
def test_other_names_of_attention_get_its_heads_and_positions(name):
    options = {name: {"bias": True}}
    config = ModelConfig(vocab_size=31, d_model=128, n_layers=2, mixers=["mamba2", name], mixer_options=options)
    assert config.mixers == ("ssd", "softmax_attention") and ModelConfig.from_json(config.to_json()) == config
    layer = CausalLM(config).model.layers[1].mixer
    assert isinstance(layer, RotaryAttention) and layer.dims == (2, 64, 64) and layer.q_proj.bias is not None


@pytest.mark.parametrize("value", ["x", -2, 2.0])
def test_a_number_of_heads_that_cannot_be_is_refused_by_the_mixers_name(value):
    with pytest.raises(dsf.InputError, match=r"n_heads of softmax_attention is .*, expected a whole number"):
        tiny(["softmax_attention"], mixer_options={"softmax_attention": {"n_heads": value}})


def test_ids_and_labels_of_no_integers_are_refused():
    """They ended in torch's words."""
    model = CausalLM(ModelConfig(vocab_size=50, d_model=16, n_layers=1, mixers="linear_attention"))
    ids = torch.randint(50, (2, 5))
    for dtype in (torch.bool, torch.float32, torch.int8):
        with pytest.raises(dsf.InputError, match=rf"ids: expected integers \[B, T\], got {dtype}"):
            model(ids.to(dtype))
    for dtype in (torch.bool, torch.float32):
        with pytest.raises(dsf.InputError, match=rf"labels: expected integers \[B, T\], got {dtype}"):
            model(ids, labels=ids.to(dtype))
    assert torch.equal(model(ids.int()).logits, model(ids).logits)


@pytest.mark.parametrize(
    "names", [{"lm_head.weight"}, {"model.embed_tokens.weight"}, set()], ids=["embedding", "head", "both"]
)
def test_a_tied_head_stays_tied_where_weights_are_assigned(names):
    """Head and embedding became two parameters of one memory, each with a part of the gradient, which both moved."""
    model = CausalLM(tiny(["retnet"]))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    count, ids = model.parameter_count(), torch.randint(7, (2, 5))
    with torch.device("meta"):
        other = CausalLM(model.config)
    for name in names:
        del weights[name]
    other.load_state_dict(weights, strict=not names, assign=True)
    assert other.lm_head.weight is other.model.embed_tokens.weight and other.parameter_count() == count
    assert torch.equal(other(ids).logits, model(ids).logits)
    weights["model.norm.weight"] = weights["model.norm.weight"][:3]
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(weights, strict=False, assign=True)
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_a_model_without_memory_by_accelerate_keeps_its_head_tied(tmp_path):
    """It replaces torch's register_parameter by one that makes another parameter, also of one that is there."""
    accelerate, safetensors = (pytest.importorskip(name) for name in ("accelerate", "safetensors.torch"))
    model, ids = CausalLM(tiny(["retnet"])), torch.randint(7, (2, 5))
    count, logits = model.parameter_count(), model(ids).logits
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    safetensors.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    def loaded(empty):
        empty.load_state_dict(model.state_dict(), assign=True)
        return empty

    def dispatched(empty):
        path = str(tmp_path / "model.safetensors")
        return accelerate.load_checkpoint_and_dispatch(empty, path, device_map={"": "cpu"})

    def filled(empty):
        return loaded(empty.to_empty(device="cpu"))

    for load in (loaded, dispatched, filled):
        with accelerate.init_empty_weights():
            other = CausalLM(model.config)
        assert other.lm_head.weight.is_meta and other.parameter_count() == count
        other = load(other)
        assert other.lm_head.weight is other.model.embed_tokens.weight and torch.equal(other(ids).logits, logits)


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
def test_labels_may_be_integers_of_any_size(fused):
    """Ids were taken as int32, and the same tensor as labels ended in an error of torch's."""
    model = CausalLM(tiny(["gla"], fused_loss=fused))
    ids = torch.randint(model.config.vocab_size, (2, 5))
    for name, labels in (("labels", ids), ("shift_labels", next_labels(ids))):
        expected = model(ids, **{name: labels}).loss
        for dtype in (torch.int32, torch.int16) + (torch.uint8,) * (name == "labels"):
            assert torch.equal(model(ids.int(), **{name: labels.to(dtype)}).loss, expected)


@pytest.mark.parametrize("wrong", [31, -1])
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
def test_tokens_outside_of_the_vocabulary_are_refused_in_words(wrong, fused):
    """They ended in torch's: index out of range in self."""
    model, ids = CausalLM(tiny(["gla"], fused_loss=fused)), torch.full((2, 5), 30)
    strange = ids.clone()
    strange[1, 3] = wrong
    words = rf"has the token {wrong}, and the vocabulary is 0 to 30"
    for call in (lambda: model(strange), lambda: model.step(strange[1]), lambda: model.generate(strange, 2)):
        with pytest.raises(dsf.InputError, match=f"ids {words}"):
            call()
    for labels in ({"labels": strange}, {"shift_labels": strange}):
        with pytest.raises(dsf.InputError, match=f"labels {words}"):
            model(ids, **labels)
    ignored = ids.clone()
    ignored[0] = -100
    assert model(ids, labels=ignored).loss.isfinite()
    traced = torch.compile(model, backend="eager")
    assert torch.equal(traced(ids).logits, model(ids).logits)


def test_ids_that_are_no_tensor_are_refused():
    for call in (lambda model: model([[1, 2]]), lambda model: model.generate("hello", 3)):
        with pytest.raises(dsf.InputError, match=r"ids: expected integers .B, T. as a tensor, got"):
            call(CausalLM(tiny(["gla"])))


def test_hugging_face_models_are_found_without_an_import_of_their_own(monkeypatch):
    pytest.importorskip("transformers")
    import dsf.models.hf as hf

    monkeypatch.delattr(dsf.models, "hf")  # as where nobody imported it
    assert dsf.models.hf is hf


# Norms that add to the residual stream


def everything_of(model, ids, **options):
    """Logits, loss and all gradients of a model."""
    model.zero_grad()
    out = model(ids, labels=ids, **options)
    out.loss.backward()
    found = [out.loss.detach(), *[p.grad.clone() for p in model.parameters()]]
    return found if out.logits is None else [out.logits.detach(), *found]


@pytest.fixture
def summing(monkeypatch):
    """Models that run the launches of a GPU, in their torch forms; the sums that were normed in them."""
    found = []

    def added(x, other, *rest, **options):
        found.append(x.shape)
        return added_rms_norm(x, other, *rest, **options)

    monkeypatch.setattr(parts, "_fuses", lambda *tensors: True)
    monkeypatch.setattr(parts, "_liger", lambda module, name: None)
    monkeypatch.setattr(parts, "added_rms_norm", added)
    return found


@pytest.mark.parametrize("mode", ["train", "checkpointed", "hooked", "eval"])
def test_norms_that_add_first_are_sums_and_their_norms(mode, summing, monkeypatch):
    model, ids = CausalLM(tiny(HYBRID)).double(), ids_of()
    model.train(mode != "eval")
    bounds = {"ids": ids.reshape(1, -1), "cu_seqlens": torch.tensor([0, 5, 22])}
    with monkeypatch.context() as apart:
        apart.setattr(parts, "_fuses", lambda *tensors: False)
        expected = everything_of(model, ids), everything_of(model, **bounds)
    seen = []
    if mode == "hooked":  # a hook is given what it always was
        for block in model.model.layers:
            block.register_forward_hook(lambda _, given, result: seen.append(result[0]))
            block.mlp_norm.register_forward_hook(lambda _, given, result: seen.append(result))
    model.enable_gradient_checkpointing(mode == "checkpointed")
    assert not summing
    found = everything_of(model, ids)
    assert len(summing) == {"train": 8, "eval": 8, "checkpointed": 8, "hooked": 0}[mode]  # 4 forward, 4 again
    for a, b in zip([*found, *everything_of(model, **bounds)], [*expected[0], *expected[1]], strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    assert all(x.shape[-1] == 32 for x in seen)


@torch.no_grad()
def test_steps_and_hidden_states_with_norms_that_add_first(summing):
    model, ids = CausalLM(tiny(HYBRID)).double().eval(), ids_of()
    whole, state = model(ids).logits, model(ids[:, :7]).state
    for t in range(7, 11):
        out = model.step(ids[:, t], state, in_place=True)
        state = out.state
        assert torch.allclose(out.logits, whole[:, t], rtol=0, atol=1e-10)
    hidden = []
    last, _ = model.model.run(model.model.embed_tokens(ids), hidden=hidden)
    assert torch.allclose(model.lm_head(last), whole, rtol=0, atol=1e-10)
    x = hidden[0]
    for block, after in zip(model.model.layers, [*hidden[1:-1], None], strict=True):
        x, _ = (
            block(x, turn=None)
            if not isinstance(block.mixer, RotaryAttention)
            else block(x, turn=block.mixer.turns(x, None))
        )
        assert after is None or torch.allclose(x, after, rtol=0, atol=1e-10)


FIRST = (  # mixers whose first maps a token's norm makes along
    "comba", "deltanet", "delta_product", "fox", "gated_deltanet", "gated_deltanet2", "gla", "h3", "hgrn", "hgrn2",
    "kda", "linear_attention", "longhorn", "mamba3", "mesanet", "mlstm", "qlstm", "retnet", "rg_lru", "s6",
    "softmax_attention", "ssd",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("mixer", FIRST)
def test_first_maps_of_a_token_are_made_by_the_norm_before(mixer, summing, monkeypatch):
    taken, handed = [], _beside.handed

    def watched(x, maps):
        found = handed(x, maps)
        taken.extend(maps if found is not None else [])
        return found

    monkeypatch.setattr(_own, "handed", watched)
    config = ModelConfig(vocab_size=97, d_model=32, n_layers=3, n_heads=2, mixers=[mixer])
    model, ids = CausalLM(config).eval(), ids_of()
    whole, state = model(ids).logits, model(ids[:, :7]).state
    assert not taken
    for t in range(7, 9):
        out = model.step(ids[:, t], state, in_place=t > 7)
        state = out.state
        torch.testing.assert_close(out.logits, whole[:, t], rtol=1e-3, atol=1e-4)
    blocks = model.model.layers
    behind = [id(x) for b in blocks[1:] for x in b.mixer.maps_beside()]  # the first block adds nothing
    assert [id(x) for x in taken] == 2 * behind
    hooked = blocks[1].mixer.register_forward_hook(lambda *_: None)
    taken.clear()
    model.step(ids[:, 9], state)
    assert len(taken) == len(blocks[2].mixer.maps_beside())
    hooked.remove()
    taken.clear()
    with torch.enable_grad():
        model(ids[:, 9:10], state=state)
    assert not taken and _beside._handed.now is None


def test_threads_find_the_first_maps_of_their_own_tokens(summing, monkeypatch):
    """Both stand between a norm and its layer when they ask."""
    model, ids = CausalLM(tiny(["gated_deltanet", "softmax_attention"], n_layers=4)).eval(), ids_of()
    both, taken, handed = threading.Barrier(2), [], _beside.handed

    def meeting(x, maps):
        both.wait(timeout=60)
        found = handed(x, maps)
        taken.append(found is not None)
        return found

    @torch.no_grad()
    def stepped(t):
        return model.step(ids[:, t], model(ids[:, :t]).state).logits

    expected = [stepped(t) for t in (5, 9)]
    monkeypatch.setattr(_own, "handed", meeting)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(stepped, (5, 9)))
    assert taken.count(True) == 2 * 3  # of four layers the first has no sum before it
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
