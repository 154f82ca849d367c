"""torch.func and forward-mode derivatives: `auto` takes a form that they go through, others are refused by name."""

from functools import partial

import pytest
import structures
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import dsf
from dsf import Key, KVCache, Scalar, System, Value, exp_features, turn
from dsf.mixers import MixerState, get
from dsf.models import CausalLM, ModelConfig

EACH = pytest.mark.parametrize("recurrence", structures.ALL, ids=lambda r: r.name)


def operands(recurrence, seed=0):
    """Inputs of 12 tokens, which auto would run in chunks, and directions for all of them."""
    given = tuple(structures.sample(recurrence, B=1, T=12).values())
    generator = torch.Generator().manual_seed(seed)
    return given, tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in given)


@EACH
def test_directional_derivatives_are_finite_differences(recurrence):
    given, along = operands(recurrence)
    y, slope = jvp(recurrence, given, along)
    torch.testing.assert_close(y, recurrence(*given))
    ahead, behind = ([x + h * d for x, d in zip(given, along, strict=True)] for h in (1e-6, -1e-6))
    torch.testing.assert_close(slope, (recurrence(*ahead) - recurrence(*behind)) / 2e-6, rtol=1e-5, atol=1e-6)
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, d) for x, d in zip(given, along, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(recurrence(*dual)).tangent, slope)


@dsf.recurrence
def rotary(q: Key, k: Key, v: Value, t: Scalar):
    return System(A=turn(t), B=exp_features(k) * v, C=exp_features(q), normalize=dsf.ratio)


@pytest.mark.parametrize("recurrence", [structures.softmax, rotary], ids=lambda r: r.name)
def test_softmax_of_as_many_keys_as_channels(recurrence):
    """torch's fused attention takes these on a CPU, and has no forward-mode derivative."""
    given = list(structures.sample(recurrence, B=1, T=4, N=2, P=2).values())
    given[1:3] = (x[:, :, :1] for x in given[1:3])  # keys and values are of both heads
    before = recurrence(*given, return_state=True)[1]

    def outcome(form):
        def total(*inputs):
            first, second = (recurrence(*inputs, form=form, initial_state=x) for x in (None, before))
            return first.sin().sum() + second.cos().sum()

        return total

    places = tuple(range(len(given)))
    for form in ("auto", "chunk"):
        for derivative in (torch.func.jacfwd, torch.func.hessian):
            found, expected = (derivative(outcome(f), argnums=places)(*given) for f in (form, "naive"))
            for a, b in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
                torch.testing.assert_close(a, b)


@EACH
def test_gradients_of_every_sample(recurrence):
    given, along = operands(recurrence)
    both = [torch.stack([x, x + 0.1 * d]) for x, d in zip(given, along, strict=True)]
    places = tuple(range(len(given)))
    found = vmap(grad(lambda *xs: recurrence(*xs).sin().sum(), argnums=places))(*both)
    for sample in range(2):
        leaves = [x[sample].clone().requires_grad_() for x in both]
        expected = torch.autograd.grad(recurrence(*leaves).sin().sum(), leaves)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[sample], b)


@pytest.mark.parametrize("form", ["scan", "chunk"])
def test_forms_without_them_say_so(form):
    given, along = operands(structures.delta)
    for call in (lambda f: vmap(f)(*(x[None] for x in given)), lambda f: jvp(f, given, along)):
        with pytest.raises(dsf.FormError, match=f"delta: the {form} form does not go through torch.func"):
            call(lambda *xs: structures.delta(*xs, form=form))
    with forward_ad.dual_level(), pytest.raises(dsf.FormError, match="forward-mode derivatives"):
        structures.delta(*(forward_ad.make_dual(x, d) for x, d in zip(given, along, strict=True)), form=form)


def test_calls_outside_take_chunks_as_before():
    given, _ = operands(structures.delta)
    vmap(structures.delta)(*(x[None] for x in given))
    with forward_ad.dual_level():
        chunks = structures.delta(*given)
    assert torch.equal(chunks, structures.delta(*given, form="chunk"))
    assert torch.equal(structures.delta(*given), chunks)


def test_packed_sequences():
    """Inside torch.func, torch 2.8 reads boundaries one at a time alone."""
    given, bounds = operands(structures.delta)[0], torch.tensor([0, 5, 12])

    def total(cu_seqlens, *given):
        return structures.delta(*given, cu_seqlens=cu_seqlens).sin().sum()

    found, expected = (grad(partial(total, b))(*given) for b in (bounds, dsf.Packing(bounds)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_layers_and_single_tokens():
    layer = get("gated_deltanet").module(d_model=16).double()
    parameters = dict(layer.named_parameters())
    x = torch.randn(3, 12, 16, dtype=torch.float64)

    def loss(parameters, sample):
        return functional_call(layer, parameters, (sample[None],))[0].square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    expected = torch.autograd.grad(loss(parameters, x[1]), list(parameters.values()))
    for name, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[name][1], wanted)
    token = [y[:, 0] for y in operands(structures.delta)[0]]
    y, _ = vmap(lambda *xs: structures.delta.step(None, *xs))(*(x[None] for x in token))
    torch.testing.assert_close(y[0], structures.delta.step(None, *token)[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax_attention", "sliding_window_attention", "alibi"])
def test_caches_of_other_lengths_go_on_sample_by_sample(name):
    """Their lengths were read on the host, where vmap has no numbers."""
    layer = get(name).module(d_model=16).double()
    x, token = (torch.randn(*shape, 16, dtype=torch.float64) for shape in ((1, 9), (3,)))
    state = layer(x, cu_seqlens=torch.tensor([0, 2, 8, 9]))[1]

    def two(token, cache):
        y, after = layer.step(token[None], MixerState(None, cache))
        return torch.cat([y, layer.step(token[None] - y, after)[0]])

    dims = KVCache(*(None if x is None else 0 for x in state.recurrent))
    rows = KVCache(*(None if x is None else x.unsqueeze(1) for x in state.recurrent))
    found = vmap(two, in_dims=(0, dims))(token, rows)
    y, after = layer.step(token, state)
    torch.testing.assert_close(found, torch.stack([y, layer.step(token - y, after)[0]], 1))


@torch.no_grad()
def test_single_tokens_of_rotary_attention():
    """Whether q and k lie side by side was asked of memory that samples and tangents do not have."""
    config = ModelConfig(vocab_size=7, d_model=16, n_layers=1, n_heads=2, mixers=["softmax_attention"])
    model, x = CausalLM(config).double().model, torch.randn(3, 1, 16, dtype=torch.float64)
    torch.testing.assert_close(vmap(lambda x: model.run(x[None])[0][0])(x), model.run(x)[0])
    along = torch.randn_like(x)
    slope = jvp(lambda x: model.run(x)[0], (x,), (along,))[1]
    ahead, behind = (model.run(x + h * along)[0] for h in (1e-6, -1e-6))
    torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_single_tokens_of_layers_whose_weights_lie_beside_each_other():
    layer, x = get("gated_deltanet").module(d_model=16), torch.randn(3, 1, 16)
    y = vmap(lambda x: layer(x[None])[0])(x)
    torch.testing.assert_close(y[:, 0], layer(x)[0])


@pytest.mark.parametrize("name", ["gated_deltanet", "s6"])
def test_layers_have_second_derivatives(name):
    """A penalty on the gradient of x: refused in autograd, where the error says how to have it."""
    torch.manual_seed(0)
    layer = get(name).module(d_model=32).double()
    x, parameters = torch.randn(1, 12, 32, dtype=torch.float64), {n: p.detach() for n, p in layer.named_parameters()}

    def loss(x, parameters):
        return functional_call(layer, parameters, (x,))[0].square().sum()

    def penalty(parameters):
        return grad(loss)(x, parameters).square().sum()

    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"take both derivatives by torch\.func, which layers, too,"):
        torch.autograd.grad(layer(leaf)[0].square().sum(), leaf, create_graph=True)
    found, step = grad(penalty)(parameters), 1e-6
    along = {n: torch.randn_like(p) for n, p in parameters.items()}
    ends = [penalty({n: p + sign * step * along[n] for n, p in parameters.items()}) for sign in (1, -1)]
    expected = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(sum((found[n] * along[n]).sum() for n in found), expected, rtol=1e-6, atol=1e-6)
