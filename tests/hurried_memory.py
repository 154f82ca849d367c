"""Loads and stores in Triton's interpreter without what it finds out over and over (tests/hurried.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton_private as private
from hurried_calls import spread


def handle_of(data: np.ndarray, dtype: Any) -> Any:
    data.flags.writeable = False
    return private.Handle(data, dtype)


def everywhere(shape: tuple[int, ...]) -> Any:
    """A mask that is true; it says so."""
    found = handle_of(np.ones(shape, bool), tl.int1)
    found.set_attr("everywhere", True)
    return found


def loaded(load: Callable[..., Any], block: Callable[..., Any]) -> Callable[..., Any]:
    """`load` of a block of pointers, masked or not, the rest a number. block: (numbers, dtype, type) -> a tensor."""
    known: dict[Any, Any] = {}
    tensor, blocks = tl.tensor, 2 if private.BLOCKS else 0

    def way_of(ptr: Any, mask: Any, other: Any, found: Any) -> Any:
        """What loads of such operands share, or None where they are not repeated: (what stands where the mask is false,
        a mask that is true, whether the given mask has the block's shape, dtype, type)."""
        shape, dtype = found.handle.data.shape, found.handle.dtype
        if ptr.handle.data.shape != shape or ptr.type.scalar.element_ty == tl.int1 or not found.type.is_block():
            return None
        rest = np.zeros(shape, found.handle.data.dtype)
        if other is not None:
            number = private.semantic().cast(other, dtype).handle.data
            rest = np.full(shape, number.reshape(-1)[0], found.handle.data.dtype)
        same = mask is None or mask.handle.data.shape == shape
        return handle_of(rest, dtype), everywhere(shape), same, dtype, found.type

    def quickly(self: Any, ptr: Any, mask: Any, other: Any, *more: Any) -> Any:
        of_blocks, how = more[:blocks], more[blocks:]
        plain = type(ptr) is tensor and not any(of_blocks)
        if mask is not None:
            plain = plain and type(mask) is tensor and mask.handle.data.dtype == bool
        if other is not None:
            plain = plain and mask is not None and type(other) is tensor and other.handle.data.size == 1
        if not plain:
            return load(self, ptr, mask, other, *more)
        key = (
            ptr.type.name, None if mask is None else mask.type.name,
            None if other is None else (other.type.name, other.handle.data.tobytes()),
        )  # fmt: skip
        way = known.get(key, known)
        if way is known:
            found = load(self, ptr, mask, other, *more)
            known[key] = way_of(ptr, mask, other, found)
            return found
        if way is None:
            return load(self, ptr, mask, other, *more)
        rest, every, same, dtype, kind = way
        if mask is None:
            chosen = every
        elif same:
            chosen = mask.handle
        else:
            chosen = private.Handle(mask.handle.data & every.data, tl.int1)
        return block(self.builder.create_masked_load(ptr.handle, chosen, rest, *how).data, dtype, kind)

    return quickly


def stored(store: Callable[..., Any]) -> Callable[..., Any]:
    """`store` of a block where pointers are, masked or not."""
    known: dict[Any, Any] = {}
    tensor, blocks = tl.tensor, 1 if private.BLOCKS else 0

    def way_of(ptr: Any, *others: Any) -> Any:
        """(Shape, dtype, a mask that is true), or None where more is to be done."""
        shape, element = ptr.handle.data.shape, ptr.type.scalar.element_ty
        shapes = (x.handle.data.shape for x in others if x is not None)
        if element == tl.int1 or any(np.broadcast_shapes(shape, x) != shape for x in shapes):
            return None
        return shape, element, everywhere(shape)

    def quickly(self: Any, ptr: Any, value: Any, mask: Any, *more: Any) -> Any:
        plain = type(ptr) is type(value) is tensor and not any(more[:blocks])
        if mask is not None:
            plain = plain and type(mask) is tensor and mask.handle.data.dtype == bool
        if not plain:
            return store(self, ptr, value, mask, *more)
        key = (ptr.type.name, value.type.name, None if mask is None else mask.type.name)
        way = known.get(key, known)
        if way is known:
            found = store(self, ptr, value, mask, *more)
            known[key] = way_of(ptr, value, mask)
            return found
        if way is None:
            return store(self, ptr, value, mask, *more)
        shape, element, every = way
        numbers = private.Handle(spread(self.cast(value, element).handle.data, shape), element)
        if mask is not None:
            every = mask.handle
            every = every if every.data.shape == shape else private.Handle(spread(every.data, shape), tl.int1)
        return self.builder.create_masked_store(ptr.handle, numbers, every, *more[blocks:])

    return quickly
