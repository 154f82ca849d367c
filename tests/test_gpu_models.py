"""The parts of models and their decode steps on a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kept_bytes import kept_bytes

from dsf.mixers import SoftmaxAttention
from dsf.mixers.models import sampling
from dsf.mixers.models.parts import RMSNorm, SwiGLU, linear_cross_entropy
from dsf.mixers.models.states import tensors_of
from dsf.models import CausalLM, ModelConfig

pytestmark = pytest.mark.gpu


def pulled(call, leaves, dy):
    y = call(leaves)
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.parametrize("part", [lambda: RMSNorm(192, 1e-6), lambda: SwiGLU(192, 320)], ids=["norm", "swiglu"])
@pytest.mark.parametrize("tokens", [1, 37])
def test_parts_under_autocast_err_as_their_rounding_does(part, tokens):
    torch.manual_seed(0)
    part = part().cuda()
    x, dy = (torch.randn(3, tokens, 192, device="cuda") for _ in range(2))
    dy = dy.bfloat16()
    part.double()
    exact = pulled(lambda given: part(given[0]), [x.double().requires_grad_(), *part.parameters()], dy)
    part.float()
    with torch.autocast("cuda", torch.bfloat16):
        found = pulled(lambda given: part(given[0]), [x.requires_grad_(), *part.parameters()], dy)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    for i, (a, b) in enumerate(zip(found, exact, strict=True)):  # y and dx for each token, a weight's gradient whole
        error, size = (t.reshape(-1, t.shape[-1] if i < 2 else t.numel()).norm(dim=-1) for t in (a.double() - b, b))
        assert (error / size).max() < 2e-2


def test_swiglu_keeps_its_product_only_where_it_must():
    part = SwiGLU(64, 256).cuda()
    x = torch.randn(2, 512, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        kept = kept_bytes(lambda: part(x))
        part.down_proj.register_forward_hook(lambda *_: None)  # it may want the product
        assert kept_bytes(lambda: part(x)) - kept == 2 * 512 * 256 * 2


def test_the_norm_rounds_once_and_keeps_the_model_s_type():
    norm, x = RMSNorm(256, 1e-6).cuda(), torch.randn(5, 7, 256, device="cuda")
    exact = norm.double()(x.double())
    norm.float()
    torch.testing.assert_close(norm(x).double(), exact, rtol=1e-6, atol=1e-6)
    with torch.autocast("cuda", torch.bfloat16):
        found = norm(x)
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs()).all()
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [64, 192, 1024, 2560])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_norm_that_adds_first_is_the_sum_and_its_norm(autocast, tokens, width):
    torch.manual_seed(0)
    norm = RMSNorm(width, 1e-6).cuda()
    x, other, dx, dy = (torch.randn(3, tokens, width, device="cuda") for _ in range(4))
    other, dy = other.bfloat16(), dy.bfloat16()
    leaves = [x.requires_grad_(), other.requires_grad_()]
    wide = [y.detach().double().requires_grad_() for y in leaves]

    def outcome(given):
        total, y = norm.added(*given)
        loss = (total.double() * dx.double()).sum() + (y.double() * dy.double()).sum()
        return [total, y, *torch.autograd.grad(loss, [*given, norm.weight])]

    norm.double()
    exact = outcome(wide)
    norm.float()
    assert norm.sums(*leaves)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = outcome(leaves)
    assert found[0].dtype == torch.float32 and found[1].dtype == (torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-6, atol=1e-6)
    for i, (a, b) in enumerate(zip(found, exact, strict=True)):
        error, size = (t.reshape(-1, t.shape[-1] if i < 4 else t.numel()).norm(dim=-1) for t in (a.double() - b, b))
        rounded = a.dtype == torch.bfloat16 or (autocast and i >= 2)
        assert (error / size).max() < (1e-2 if rounded else 1e-5), i


def test_a_model_whose_norms_add_first_is_the_model(monkeypatch):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=3, n_heads=2, mixers=["ssd", "softmax_attention", "s6"])
    model, ids = CausalLM(config).cuda(), torch.randint(0, 97, (2, 70), device="cuda")

    def outcome():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return [out.logits.detach(), *[p.grad.clone() for p in model.parameters()]]

    found = outcome()
    monkeypatch.setattr(RMSNorm, "sums", lambda self, *given: False)
    for a, b in zip(found, outcome(), strict=True):
        assert (a - b).norm() < 1e-4 * b.norm()


def test_the_loss_in_pieces_is_the_loss_in_bfloat16():
    hidden, weight = torch.randn(2, 33, 64, device="cuda"), 0.1 * torch.randn(500, 64, device="cuda")
    targets = torch.randint(0, 500, (2, 33), device="cuda")
    targets[0, 3] = -100
    leaves = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    one = torch.ones((), device="cuda")
    found, exact = (pulled(lambda given: linear_cross_entropy(*given, targets), part, one) for part in (leaves, wide))
    for a, b in zip(found, exact, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 1e-2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gated_deltanet", "ssd", "rwkv7", "mamba3"])
def test_steps_in_place_are_steps_and_are_captured(kind):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=[kind])
    model, ids = CausalLM(config).cuda().bfloat16().eval(), torch.randint(0, 97, (3, 12), device="cuda")
    plain, own, token = model(ids[:, :5]).state, model(ids[:, :5]).state, ids[:, 5].clone()
    expected = []
    for t in range(5, 12):
        out = model.step(ids[:, t], plain)
        plain = out.state
        expected.append(out.logits)
    found = [model.step(ids[:, 5], own, in_place=True).logits, model.step(ids[:, 6], own, in_place=True).logits]
    places = [x.data_ptr() for layer in own.layers for x in tensors_of(layer)]
    held = [x.clone() for layer in own.layers for x in tensors_of(layer)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model.step(token, own, in_place=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.step(token, own, in_place=True)
    assert places == [x.data_ptr() for layer in out.state.layers for x in tensors_of(layer)]
    for x, y in zip([x for layer in own.layers for x in tensors_of(layer)], held, strict=True):
        x.copy_(y)
    for t in range(7, 12):
        token.copy_(ids[:, t])
        graph.replay()
        found.append(out.logits.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 5])
def test_generating_by_a_graph_is_generating(batch):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=3, n_heads=2, mixers=["gated_deltanet", "rwkv7", "s6"])
    model, ids = CausalLM(config).cuda(), torch.randint(0, 97, (batch, 7), device="cuda")
    assert torch.equal(model.generate(ids, 20, graph=True), model.generate(ids, 20))
    drawn = [torch.Generator("cuda").manual_seed(1) for _ in range(2)]
    one = model.generate(ids, 9, temperature=1.0, top_k=5, generator=drawn[0], graph=True)
    assert torch.equal(one, model.generate(ids, 9, temperature=1.0, top_k=5, generator=drawn[1]))


def test_a_second_thread_generates_by_a_graph_of_its_own():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=["ssd", "softmax_attention"])
    model, ids = CausalLM(config).cuda().double().eval(), torch.randint(0, 97, (2, 9), device="cuda")
    expected = model.generate(ids, 30)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model.generate, ids, 30, graph=True).result(), expected)
    assert torch.equal(model.generate(ids, 30, graph=True), expected)


ATTENTION = [["softmax_attention"], ["gated_deltanet", "softmax_attention"], ["fox"], ["alibi"], ["sliding"], ["sink"]]


@torch.no_grad()
@pytest.mark.parametrize("mixers", ATTENTION, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_captured_and_captured_anew_where_its_memory_doubles(mixers, dtype):
    torch.manual_seed(0)
    own = {"alibi": {"alibi": True}, "sliding": {"window": 70}, "sink": {"sink": "learnt", "window": 7}}
    named = ["softmax_attention" if x in own else x for x in mixers]
    options = {x: {"n_kv_heads": 2} for x in named if x != "gated_deltanet"}
    config = {"vocab_size": 97, "d_model": 128, "n_layers": len(mixers), "n_heads": 4, "mixer_options": options}
    model = CausalLM(ModelConfig(**config, mixers=named))
    for block, x in zip(model.model.layers, mixers, strict=True):
        if x in own:
            block.mixer = SoftmaxAttention(128, 4, n_kv_heads=2, **own[x])
    model, ids = model.cuda().eval(), torch.randint(0, 97, (3, 150), device="cuda")
    exact = model.to(dtype).double()(ids).logits
    model.to(dtype)
    for steps in ("graph", "eager"):
        state = model(ids[:, :50]).state
        step = sampling.CapturedStep(model, ids[:, 50:51], state, 64) if steps == "graph" else None
        for t in range(50, 150):
            if step is not None:
                found = step(ids[:, t : t + 1])
            else:
                out = model.step(ids[:, t], state, in_place=True)
                found, state = out.logits, out.state
            error = (found.double() - exact[:, t]).norm(dim=-1) / exact[:, t].norm(dim=-1)
            assert error.max() < (1e-4 if dtype == torch.float32 else 5e-2), (steps, t)
    assert model.generate(ids, 80, graph=True).shape == (3, 230)


MIXED = [
    ["gated_deltanet", "softmax_attention"], ["mlstm", "rg_lru"], ["ssd", "fox"], ["s6", "mamba3"], ["kda", "rwkv7"],
]  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("mixers", MIXED, ids=" ".join)
def test_a_compiled_model_is_the_model(mixers, autocast):
    """Losses and gradients of two lengths, from one graph each."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.device("cuda"):
        model = CausalLM(ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=mixers))
    compiled, weights = torch.compile(model, fullgraph=True), list(model.parameters())
    for tokens in (130, 200):
        ids = torch.randint(0, 97, (2, tokens), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            losses = [m(ids, labels=ids, return_state=False).loss for m in (compiled, model)]
        found, expected = ([loss.detach(), *torch.autograd.grad(loss, weights)] for loss in losses)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= (6e-2 if autocast else 1e-4) * b.norm()  # biases of gates: sums that nearly cancel


@torch.no_grad()
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mixers", MIXED, ids=" ".join)
def test_a_compiled_step_is_the_step(mixers, in_place):
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.device("cuda"):
        model = CausalLM(ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=mixers)).eval()
    ids = torch.randint(0, 97, (2, 44), device="cuda")
    expected, state, step = model(ids).logits, model(ids[:, :40]).state, torch.compile(model.step)
    for t in range(40, 44):
        out = step(ids[:, t], state, in_place=in_place)
        state = out.state
        torch.testing.assert_close(out.logits, expected[:, t], rtol=1e-3, atol=1e-4)
