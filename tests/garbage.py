"""Garbage collection for tests."""

import gc


def seldom() -> None:
    """Look for garbage among what is made from now on, and seldom: else a twentieth of what is interpreted
    goes into looking through what imports have made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
