"""What every test runs under: the Hypothesis profile, a seeded torch, and the rule for tests of the GPU."""

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import garbage
import hypothesis
import pytest
import torch
from interpreted import INTERPRETED

if INTERPRETED:
    import hurried
    import strict

    strict.install()
    hurried.install()

# No deadline: the first call of a form compiles. CI draws the same examples on every run; elsewhere they are
# random, and a failure prints the blob that reproduces it.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("local"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")


if not torch.cuda.is_available():  # torch's own keeps a traceback for each kind of device, for later: 0.4 ms and more
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_collection_finish() -> None:
    """All modules are imported."""
    garbage.seldom()


class _TorchRandom:
    """Torch's global generator, in the shape by which Hypothesis seeds it before every example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # Hypothesis holds only a weak reference
hypothesis.register_random(_TORCH_RANDOM)


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Every test starts from the same seed, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def measured_once() -> None:
    """Reports time one call of every form, not calls for a fifth of a second: tests look at no speed but its sign."""
    if not INTERPRETED:
        from dsf.analysis import probe

        probe.SPEED_SECONDS = 0.0


def _forget() -> None:
    if "dsf.kernels.triton.operators" in sys.modules:
        sys.modules["dsf.kernels.triton.operators"].forget()


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """pytest's, for tests that change tile sizes and the like: they play no call of other tests, nor these theirs.

    All other tests meet what earlier calls left behind, as users' calls do.
    """
    _forget()
    yield monkeypatch
    _forget()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is no CUDA GPU."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], list[int]]:
    """counting(module, name): a list of one number, of the calls of that function from now on."""

    def count(module: ModuleType, name: str) -> list[int]:
        calls, run = [0], getattr(module, name)

        def counted(*args: Any) -> Any:
            calls[0] += 1
            return run(*args)

        monkeypatch.setattr(module, name, counted)
        return calls

    return count
