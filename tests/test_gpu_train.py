"""Training steps from CUDA graphs, and `dsf train` with them, on a GPU."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from dsf.mixers import ZOO
from dsf.models import CausalLM, Graphed, ModelConfig

pytestmark = pytest.mark.gpu
NAMES = [entry.name for entry in ZOO if entry.module is not None and entry.name not in ("hydra", "semiseparable")]


def started(config, bf16):
    """(model, its optimizer, its loss)."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = CausalLM(config)

    def loss_of(ids):
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            return model(ids, labels=ids, return_state=False).loss

    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), loss_of


def trained(config, graph, bf16=True, steps=5, outer=False, again=False):
    """(losses, weights) of a few steps. outer: autocast begins before the step. again: blocks are computed again."""
    model, optimizer, loss_of = started(config, bf16 and not outer)
    model.enable_gradient_checkpointing(again, preserve_rng_state=False)
    step, losses = Graphed(model, loss_of), []
    for seed in range(steps):
        ids = torch.randint(0, 97, (2, 70), generator=torch.Generator().manual_seed(seed)).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=outer):
            if graph:
                losses.append(step(ids))
            else:
                losses.append(loss_of(ids))
                losses[-1].backward()
        optimizer.step()
    assert not graph or [c is not None for c in step.graphs.values()] == [True]
    return torch.stack(losses).detach(), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_trains_from_a_graph_as_without_one(name):
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = trained(config, True), trained(config, False)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("options", [{"fused_loss": True}, {"tie_embeddings": False}], ids=str)
@pytest.mark.parametrize("outer", [False, True])
def test_models_train_from_a_graph_as_without_one(options, outer):
    config = ModelConfig(
        vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=["ssd", "softmax_attention"], **options
    )
    found, expected = (trained(config, graph, outer=outer, steps=6) for graph in (True, False))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_blocks_that_are_computed_again_train_from_a_graph_as_without_one():
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=["ssd", "softmax_attention"])
    found, expected = (trained(config, graph, again=True) for graph in (True, False))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_steps_of_another_thread_come_from_a_graph():
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=["gated_deltanet"])
    with ThreadPoolExecutor(1) as pool:
        found, expected = pool.submit(trained, config, True).result(), trained(config, False)
    assert torch.equal(found[0], expected[0])


def test_gradients_accumulate_over_lengths():
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=["gated_deltanet"])
    made = []
    for graph in (True, False):
        model, optimizer, loss_of = started(config, False)
        step, found = Graphed(model, loss_of), []
        for number in range(12):
            length = (70, 33)[number % 3 == 0]
            ids = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(number)).cuda()
            step(ids) if graph else loss_of(ids).backward()
            found.append([p.grad.clone() for p in model.parameters()])
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        made.append(found)
    for one, other in zip(*made, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


def test_packed_sequences_of_other_lengths_take_the_same_graph():
    config = ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=["gated_deltanet"])
    model, _, _ = started(config, False)

    def loss_of(ids, cu):
        return model(ids, labels=ids, cu_seqlens=cu, return_state=False).loss

    step = Graphed(model, loss_of)
    for cut in (20, 30, 40, 7, 63):
        ids, cu = torch.randint(0, 97, (1, 70), device="cuda"), torch.tensor([0, cut, 70], device="cuda")
        model.zero_grad()
        expected = loss_of(ids, cu)
        expected.backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        expected = expected.detach()  # else its nodes, of another stream, stay those of the parameters
        torch.testing.assert_close(step(ids, cu), expected, rtol=1e-5, atol=0)
        for p, g in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-5 * g.abs().max().item())
    assert [c is not None for c in step.graphs.values()] == [True]


def test_what_waits_for_the_gpu_goes_on_without_a_graph():
    model = torch.nn.Linear(3, 3).cuda()
    step = Graphed(model, lambda x: model(x).square().sum() * float(x.sum()))
    x = torch.ones(2, 3)
    for number in range(5):
        model.zero_grad()
        if number == 2:
            with pytest.warns(UserWarning, match="without a CUDA graph"):
                step(x)
        else:
            step(x)
        gradient = model.weight.grad.clone()
        model.zero_grad()
        (model(x.cuda()).square().sum() * 6).backward()
        torch.testing.assert_close(gradient, model.weight.grad)
        assert torch.rand(7, device="cuda").max() < 1  # random numbers are as before


def test_dsf_train_with_graphs_is_without_and_goes_on_bit_for_bit(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    from dsf.analysis import train as engine

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 40)
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 2, "context_length": 64}
    monkeypatch.setitem(engine.SIZES, "tiny", sizes)
    run = partial(engine.Run, "gated_deltanet", text=text, steps=12, batch=4, seq=64, device="cuda", saves=3, bf16=True)

    def stopping(step, loss):
        if step == 9:
            raise KeyboardInterrupt

    engine.train(engine.prepare(run(tmp_path / "whole"), False))
    engine.train(engine.prepare(run(tmp_path / "eager", graph=False), False))
    with pytest.raises(KeyboardInterrupt):
        engine.train(engine.prepare(run(tmp_path / "parts"), False), stopping)
    engine.train(engine.prepare(run(tmp_path / "parts"), True))
    whole, *others = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "eager", "parts"))
    for other in others:
        assert all(torch.equal(whole[name], other[name]) for name in whole)
