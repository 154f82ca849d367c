"""The way of an input: the files that hold q during a call, as docs/architecture.md lists them."""

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import INTERPRETED

from dsf import mixers
from dsf.call import calls
from dsf.call.bind import Bound
from dsf.triton import choose

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text().partition("## The way of an input")[2].partition("\n## ")[0]
EVERY, FIRST = (set(re.findall(r"^\| `(\S+)`", part, re.M)) for part in PAGE.split("The first call")[:2])


def holds(x: Any, q: torch.Tensor, depth: int = 4) -> bool:
    """True where x is q, the slot that stands for it, or something plain that holds one of them."""
    if x is q or depth == 0:
        return x is q
    if type(x).__name__ == "Slot":
        return getattr(x, "number", None) == 0
    if isinstance(x, Bound):
        x = x.tensors
    inside = x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else ()
    return any(holds(y, q, depth - 1) for y in inside)


@cache
def file_of(name: str) -> str | None:
    """The file of a function, from the root; None for those of others, and for printed and made functions."""
    path = Path(os.path.realpath(name))
    own = path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / ".venv")
    return str(path.relative_to(ROOT)) if own and path.is_file() else None


def way_of(q: torch.Tensor, call: Callable[[], Any]) -> set[str]:
    """The files of this package with a function that is called with q."""
    found = set()

    def look(frame: Any, event: str, _: Any) -> None:
        file = file_of(frame.f_code.co_filename) if event == "call" else None
        if file is not None and file not in found and any(holds(x, q) for x in frame.f_locals.values()):
            found.add(file)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found - {"tests/test_way.py"}


@pytest.mark.skipif(INTERPRETED, reason="launches do nothing here")
@pytest.mark.parametrize("gradient", [False, True])
def test_q_passes_the_files_that_the_page_lists(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsf.kernels.triton import launch, operators

    for room in (launch, operators):
        monkeypatch.setattr(room, "runner", lambda x, capturing=False: (lambda grid: lambda *args: None, ()))
    for room in (choose, calls):
        monkeypatch.setattr(room, "interpreted", lambda: True)  # tensors on a CPU pass
    operators.forget()
    q, k = torch.randn(2, 1, 75, 3, 24)
    v, (alpha, beta) = torch.randn(1, 75, 3, 24), torch.rand(2, 1, 75, 3)
    q.requires_grad_(gradient)

    def call() -> None:
        mixers.gated_deltanet(q, k, v, alpha, beta, backend="triton")

    first, second, third = (way_of(q, call) for _ in range(3))
    operators.forget()
    more = {"kernels/triton/chunk/operator.py"} if gradient else set()
    assert first == EVERY | FIRST
    assert second == third == EVERY | more and len(EVERY) == 5
