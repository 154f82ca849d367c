"""Triton's interpreter, made strict.

Strict: what a kernel reads and writes lies in the tensors that its launch was given (on a GPU it would read what lies
beside them, or corrupt it), memory that nobody has written is NaN, and programs of a launch run in another order than
that of their numbers, since none may need what another leaves. Products in tf32 cut off what tf32 does not hold, which
is the worst that a GPU does.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton_private as private


class Memory:
    """The storages of a launch's tensors: first bytes and those after the last, in order."""

    kernel = ""
    first = last = np.zeros(0, np.uint64)
    starts: list[int]
    ends: list[int]
    lows: list[np.uint64]  # the starts

    def enter(self, kernel: str, arguments: Iterable[Any]) -> None:
        """Take the tensors among a kernel's arguments."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(arguments)}
        self.kernel = kernel
        self.first = np.array(sorted(storages), np.uint64)
        self.last = self.first + np.array([storages[int(x)] for x in self.first], np.uint64)
        self.starts, self.ends, self.lows = self.first.tolist(), self.last.tolist(), list(self.first)

    def check(self, pointers: Any, mask: Any, what: str) -> None:
        """Raise IndexError for an address outside of them."""
        size, places, lanes = pointers.get_element_ty().primitive_bitwidth // 8 or 1, pointers.data, mask.data
        every = "everywhere" in mask.attr
        if not every and lanes.dtype != bool:
            lanes = lanes.astype(bool)
        one = 0 if every else int(lanes.argmax())  # a place that is read or written, if any is
        if not places.size or not (every or lanes.item(one)):
            return
        place = places.item(one)
        at = bisect_right(self.starts, place) - 1
        if at >= 0 and place + size <= self.ends[at]:  # most often all places lie in one tensor
            if places.size == 1:
                return
            inside = places - self.lows[at] <= self.ends[at] - self.starts[at] - size  # unsigned: none is below
            if b"\0" not in inside.tobytes() if every else b"\1" not in (lanes > inside).tobytes():
                return
        places = places if every else places[lanes]
        size = np.uint64(size)
        at = np.searchsorted(self.first, places, side="right") - 1
        wrong = (at < 0) | (places + size > self.last[np.maximum(at, 0)])
        if wrong.any():
            raise IndexError(f"{self.kernel} {what} {int(wrong.sum())} of {places.size} numbers outside its tensors")


def _tensors(arguments: Iterable[Any]) -> Iterable[torch.Tensor]:
    for x in arguments:
        if isinstance(x, tuple):
            yield from _tensors(x)
        elif hasattr(x, "data_ptr"):
            yield private.tensor_of(x)


def _tf32(x: np.ndarray, nearest: bool = False) -> np.ndarray:
    """x cut to tf32's 10 bits, or rounded to the nearest such number."""
    half = np.uint32(0x1000 if nearest else 0)
    return ((np.ascontiguousarray(x).view(np.uint32) + half) & np.uint32(0xFFFFE000)).view(np.float32)


def _in_two(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two tf32 numbers whose sum Triton takes for a float32 number in tf32x3."""
    first = _tf32(x, nearest=True)
    with np.errstate(invalid="ignore"):  # infinity less itself
        return first, _tf32(x - first)


def install() -> None:
    """Make the interpreter of this process strict, for good."""
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import a compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    memory = Memory()
    enter, load, store = (getattr(*x) for x in (private.ARGUMENTS, private.LOAD, private.STORE))

    def entered(self: Any, arguments: Any, named: Any) -> Any:
        found = enter(self, arguments, named)
        memory.enter(self.fn.__name__, [*found[0], *found[1].values()])
        return found

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    setattr(*private.ARGUMENTS, entered)
    setattr(*private.LOAD, loaded)
    setattr(*private.STORE, stored)
    _shuffle_programs()
    _cut_tf32()


def _shuffle_programs() -> None:
    dim, place = getattr(*private.GRID), getattr(*private.PROGRAM)

    def known(self: Any, *sizes: int) -> None:
        dim(self, *sizes)
        count = int(np.prod(sizes))
        order = np.random.default_rng(count).permutation(count)
        self.order = order[::-1] if (order == np.arange(count)).all() else order

    def placed(self: Any, *index: int) -> None:
        sizes = self.grid_dim
        found = np.unravel_index(self.order[np.ravel_multi_index(index, sizes)], sizes)
        place(self, *(int(x) for x in found))

    setattr(*private.GRID, known)
    setattr(*private.PROGRAM, placed)


def _cut_tf32() -> None:
    dot = getattr(*private.DOT)

    def product(self: Any, x: Any, y: Any, added: Any, precision: Any, imprecise: Any) -> Any:
        if x.data.dtype == np.float32 and precision == private.TF32:
            x, y = (private.Handle(_tf32(z.data), tl.float32) for z in (x, y))
        if x.data.dtype == np.float32 and precision == private.TF32_TIMES_3:
            (a, a_rest), (b, b_rest) = _in_two(x.data), _in_two(y.data)
            rest = np.matmul(a_rest, b) + np.matmul(a, b_rest)
            more = np.where(np.isnan(rest), np.float32(0), rest)  # what is not finite is in the first product
            x, y, added = (private.Handle(z, tl.float32) for z in (a, b, added.data + more))
        return dot(self, x, y, added, precision, imprecise)

    setattr(*private.DOT, product)
