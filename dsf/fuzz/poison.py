"""Uninitialised memory filled with NaN, which reveals values that a kernel does not write, on CPU and GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty, empty_like, empty_strided, new_empty and resize_ return NaN, or the largest integer.

    torch fills allocations in its deterministic mode (torch.utils.deterministic.fill_uninitialized_memory).
    Warnings about operators without such an algorithm are suppressed. Freed memory is filled when it is reused.
    """
    filling: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), filling.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import a compiler: seconds
        filling.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before[0])
            filling.fill_uninitialized_memory = before[1]
