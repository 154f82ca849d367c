"""Triton's interpreter (TRITON_INTERPRET=1), corrected where its results would differ from a GPU's.

bfloat16: numpy lacks it, and the interpreter computes with its bits as with integers. Here bfloat16 arithmetic is in
float32, rounded to nearest, as on a GPU. Masks: in Triton 3.9.0 a comparison of integers gives integers, which it then
refuses as a mask. Bounds of loops: Triton 3.6 converts arrays of one entry to integers, which NumPy 2.4 refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

HALF, ONE, ALMOST_HALF = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)  # of float32's bits
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def mend() -> None:
    """Patch the interpreter: masks become booleans, bounds numbers, bfloat16 is computed. Nothing the second time."""
    from triton.runtime.interpreter import InterpreterBuilder

    if not hasattr(InterpreterBuilder, "mended"):
        _hand_on_masks()
        _take_bounds()
        _compute_bfloat16()
        InterpreterBuilder.mended = True


def _hand_on_masks() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def masked(method: Any, place: int) -> Any:
        @functools.wraps(method)
        def access(self: Any, *args: Any) -> Any:
            mask = args[place]
            if mask is not None and mask.data.dtype != np.bool_:
                mask = TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return method(self, *args[:place], mask, *args[place + 1 :])

        return access

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, masked(getattr(InterpreterBuilder, name), place))


def _take_bounds() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:  # without a scope before Triton 3.6; it restores what `patch` sets
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _wide(bits: np.ndarray) -> np.ndarray:
    """bfloat16 numbers, given by their bits, as float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << HALF).view(np.float32)


def _narrow(x: np.ndarray) -> np.ndarray:
    """The bits of x rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + ALMOST_HALF + ((bits >> HALF) & ONE)) >> HALF).astype(np.uint16)
    none = np.isnan(x)
    if b"\1" in none.tobytes():  # which takes less time than numpy's reductions
        rounded[none] = 0x7FC0
    return rounded


def _is_bfloat16(x: Any) -> bool:
    return bool(x.dtype.scalar.name == tl.bfloat16.name)


def _compute_bfloat16() -> None:
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import ReduceScanOpInterface as Reduction
    from triton.runtime.interpreter import TensorHandle as Handle

    cast, binary, unary, dot = Builder.cast_impl, Builder.binary_op, Builder.unary_op, Builder.create_dot
    fma, reduce = Builder.create_fma, Reduction.apply

    def converted(self: Any, x: Any, kind: Any, *mode: Any) -> Any:
        if _is_bfloat16(x) == (kind.scalar == tl.bfloat16):
            return cast(self, x, kind)
        if _is_bfloat16(x):
            return cast(self, Handle(_wide(x.data), tl.float32), kind)
        return Handle(_narrow(x.data.astype(np.float32)), tl.bfloat16)

    def of_two(self: Any, x: Any, y: Any, op: Callable[..., Any]) -> Any:
        if not _is_bfloat16(x) or op in BITWISE:
            return binary(self, x, y, op)
        found = op(_wide(x.data), _wide(y.data))
        return Handle(found, tl.int1) if found.dtype == bool else Handle(_narrow(found), tl.bfloat16)

    def of_one(self: Any, x: Any, op: Callable[..., Any]) -> Any:
        return Handle(_narrow(op(_wide(x.data))), tl.bfloat16) if _is_bfloat16(x) else unary(self, x, op)

    def product(self: Any, x: Any, y: Any, added: Any, precision: Any, imprecise: Any) -> Any:
        if _is_bfloat16(x):
            x, y = Handle(_wide(x.data), tl.float32), Handle(_wide(y.data), tl.float32)
        return dot(self, x, y, added, precision, imprecise)

    def fused(self: Any, x: Any, y: Any, added: Any) -> Any:
        if not _is_bfloat16(x):
            return fma(self, x, y, added)
        return Handle(_narrow(_wide(x.data) * _wide(y.data) + _wide(added.data)), tl.bfloat16)

    def reduced(self: Any, given: Any) -> Any:  # scans, too
        if not isinstance(given, tuple) or not any(map(_is_bfloat16, given)):  # one tensor is returned as a tuple
            return reduce(self, given)
        found = reduce(self, tuple(x.to(tl.float32) if _is_bfloat16(x) else x for x in given))
        return tuple(y.to(x.dtype) for x, y in zip(given, found, strict=True))

    Builder.cast_impl = converted
    Builder.binary_op, Builder.unary_op, Builder.create_dot = of_two, of_one, product
    Builder.create_fma, Reduction.apply = fused, reduced


if triton.knobs.runtime.interpret:
    mend()
