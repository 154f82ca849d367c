"""Memory that nobody has written is NaN: what a kernel leaves out is then seen, on a CPU and on a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within it torch.empty, empty_like, empty_strided, new_empty and resize_ give NaN, and the largest integer.

    torch fills what it allocates where deterministic algorithms are asked for (torch.utils.deterministic.
    fill_uninitialized_memory). It warns about operators that have no such algorithm; these warnings are not shown.
    Memory that was freed keeps what it held until it is allocated again, and is then filled.
    """
    filling: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        filling.fill_uninitialized_memory,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        filling.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            filling.fill_uninitialized_memory = before[2]
