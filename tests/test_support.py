"""Which releases of Triton and which GPUs the kernels are for: said in words before anything is launched."""

import pytest
import torch

from dsf import FormError, mixers
from dsf.triton import support

CUDA = torch.device("cuda", 0)


@pytest.fixture
def known(monkeypatch):
    """What a machine has: Triton's version, and a GPU's capability."""

    def set_(version=(3, 6), hip=None, capability=(9, 0)):
        support._of_gpu.cache_clear()
        monkeypatch.setattr(support, "triton_version", lambda: version)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    yield set_
    support._of_gpu.cache_clear()


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ({"version": None}, "triton is not installed"),
        ({"version": (3, 2)}, "triton 3.2 is installed and its kernels need 3.4 or later"),
        ({"hip": "6.4"}, "ROCm build of torch"),
        ({"capability": (7, 5)}, "compute capability 8.0 or later, and this one has 7.5"),
    ],
)
def test_what_is_not_supported_is_refused_in_words_and_runs_on_torch(known, has, said):
    known(**has)
    with pytest.raises(FormError, match=said):
        mixers.gated_deltanet.plan(T=128, device="cuda:0", backend="triton")
    plan = mixers.gated_deltanet.plan(T=128, device="cuda:0")
    assert plan.backend == "torch" and said in plan.reason


@pytest.mark.parametrize("version", [(3, 4), (3, 6), (3, 9), (4, 0)])
def test_later_releases_run(known, version):
    known(version=version)
    assert support.refusal(CUDA) is None
