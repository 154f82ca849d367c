"""Triton's interpreter (TRITON_INTERPRET=1), mended where a release of it cannot run masked loads and stores.

Triton 3.9.0 keeps what two integers' comparison finds as integers and then refuses them as a mask.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton


def mend() -> None:
    """Hand masks to the interpreter's memory as the booleans that they are. Does nothing where that was done."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def masked(method: Any, place: int) -> Any:
        @functools.wraps(method)
        def access(self: Any, *args: Any) -> Any:
            mask = args[place]
            if mask is not None and mask.data.dtype != np.bool_:
                mask = TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return method(self, *args[:place], mask, *args[place + 1 :])

        access.mended = True  # type: ignore[attr-defined]
        return access

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        method = getattr(InterpreterBuilder, name)
        if not hasattr(method, "mended"):
            setattr(InterpreterBuilder, name, masked(method, place))


if triton.knobs.runtime.interpret:
    mend()
