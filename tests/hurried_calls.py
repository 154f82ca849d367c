"""Functions of triton.language in the interpreter without what they find out over and over (tests/hurried.py).

Each takes the function as it is and gives one that returns the same: what a result is but for its numbers follows from
the types of the blocks that are given and from what Python's numbers are; where it does not, the function as it is
answers.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
import triton_private as private

Function = Callable[..., Any]
TENSOR = tl.tensor
FLOATS = {"fp32", "fp64"}  # of which alone Triton takes exponentials and the like
WIDE = {*FLOATS, "int32", "int64"}


def name_of(x: Any) -> Any:
    """What tells an operand's type, and a number of Python's: 0.0 is not -0.0, nor is True 1."""
    kind = type(x)
    if kind is TENSOR:
        return x.type.name
    if kind is int:
        return x
    return (kind, x) if kind is float and x and x == x else (kind, str(x))  # spelling takes longest


@cache
def _steps(have: tuple[int, ...], want: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Bytes between neighbours of an array that lies in order, once it is repeated."""
    steps, step = [], size
    for n, wanted in zip(reversed(have), reversed(want), strict=False):
        steps.append(0 if n == 1 and wanted != 1 else step)
        step *= n
    return (0,) * (len(want) - len(have)) + tuple(reversed(steps))


def spread(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """np.broadcast_to, which it must be possible to call."""
    if data.shape == shape:
        return data
    if not data.flags.c_contiguous:
        return np.broadcast_to(data, shape)
    return np.ndarray(shape, data.dtype, data, 0, _steps(data.shape, shape, data.itemsize))


def at_once(ready: dict[Any, Function]) -> None:
    """A kernel's functions are found once in a launch. ready: those that were, until it ends."""
    known, error = private.rewritten, private.Error

    def called(self: Any, *args: Any, **named: Any) -> Any:
        fn = ready.get(self)
        if fn is None:
            getattr(*private.PATCH)(self.fn)
            fn = ready[self] = known(self)
        try:
            return fn(*args, **named)
        except Exception as e:
            raise error(repr(e)) from e

    return called


def tensor_at_once(convert: Function, block: Function) -> Function:
    """`to_tensor`, which every assignment calls: of tuples, which it leaves as they are, as often as of tensors."""
    tensor, number = tl.tensor, tl.constexpr
    converts, left = (tensor, number, int, float), set[type]()
    known: dict[Any, Any] = {}

    def converted(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is tensor or (kind in left and not check_type):
            return x
        if kind is number:
            x = x.value
            kind = type(x)
        if kind is int or kind is float or kind is bool:
            key = x if kind is int else name_of(x)
            found = known.get(key)
            if found is None:
                found = known[key] = convert(self, x, check_type)
                found.handle.data.flags.writeable = False
            return block(found.handle.data, found.handle.dtype, found.type)
        if not issubclass(kind, converts):
            left.add(kind)
        return convert(self, x, check_type)

    return converted


# Functions: (as it is, what makes blocks) -> the same at once


def _where(inner: Function, block: Function) -> Function:
    choose, tensor = private.semantic().where, tl.tensor

    def called(which: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        if type(which) is tensor and type(x) is not tl.constexpr and type(y) is not tl.constexpr:
            return choose(which, x, y)
        return inner(which, x, y, _semantic=private.semantic())

    return called


def _cast(inner: Function, block: Function) -> Function:
    convert, tensor = private.semantic().cast, tl.tensor

    def called(x: Any, dtype: Any, *more: Any, _semantic: Any = None, **named: Any) -> Any:
        how = (more or named) and (any(more) or any(named.values()))
        if how or type(x) is not tensor or type(dtype) is tl.constexpr:
            return inner(x, dtype, *more, _semantic=private.semantic(), **named)
        return convert(x, dtype)

    return called


def _load(inner: Function, block: Function) -> Function:
    fetch, tensor, to_tensor = private.semantic().load, tl.tensor, private.semantic().to_tensor

    def called(
        pointer: Any, mask: Any = None, other: Any = None, *more: Any, _semantic: Any = None, **named: Any
    ) -> Any:
        if more or named or type(pointer) is not tensor or not (mask is None or type(mask) is tensor):
            return inner(pointer, mask, other, *more, _semantic=private.semantic(), **named)
        other = other.value if type(other) is tl.constexpr else other
        return fetch(pointer, mask, None if other is None else to_tensor(other), *private.PLAIN_LOAD)

    return called


def _store(inner: Function, block: Function) -> Function:
    put, tensor, to_tensor = private.semantic().store, tl.tensor, private.semantic().to_tensor

    def called(pointer: Any, value: Any, mask: Any = None, *more: Any, _semantic: Any = None, **named: Any) -> Any:
        if more or named or type(pointer) is not tensor or not (mask is None or type(mask) is tensor):
            return inner(pointer, value, mask, *more, _semantic=private.semantic(), **named)
        return put(pointer, to_tensor(value), mask, *private.PLAIN_STORE)

    return called


def _full(inner: Function, block: Function) -> Function:
    known: dict[Any, Any] = {}

    def called(shape: Any, value: Any, dtype: Any, _semantic: Any = None) -> Any:
        sizes, plain = _sizes((shape,)), type(value) in (int, float, bool) and type(dtype) is tl.dtype
        if sizes is None or not plain:
            return inner(shape, value, dtype, _semantic=private.semantic())
        key = (sizes, type(value), str(value), dtype.name)
        found = known.get(key)
        if found is None:
            found = known[key] = inner(shape, value, dtype, _semantic=private.semantic())
            found.handle.data.flags.writeable = False
        return block(found.handle.data, found.handle.dtype, found.type)

    return called


def _arange(inner: Function, block: Function) -> Function:
    known: dict[Any, Any] = {}

    def called(start: Any, end: Any, _semantic: Any = None) -> Any:
        end = end.value if type(end) is tl.constexpr else end
        if type(start) is not int or type(end) is not int:
            return inner(start, end, _semantic=private.semantic())
        found = known.get((start, end))
        if found is None:
            found = known[start, end] = inner(start, end, _semantic=private.semantic())
            found.handle.data.flags.writeable = False
        return block(found.handle.data, found.handle.dtype, found.type)

    return called


def _of_one(op: Any) -> Callable[[Function, Function], Function]:
    def made(inner: Function, block: Function) -> Function:
        known: dict[str, Any] = {}
        tensor = tl.tensor

        def called(x: Any, *more: Any, _semantic: Any = None, **named: Any) -> Any:
            if type(x) is not tensor or more or named:
                return inner(x, *more, _semantic=private.semantic(), **named)
            way = known.get(x.type.name)
            if way is None:
                found = inner(x, _semantic=private.semantic())
                if x.dtype.name in FLOATS:
                    known[x.type.name] = found.handle.dtype, found.type
                return found
            return block(op(x.handle.data), *way)

        return called

    return made


def _extreme(name: str) -> Callable[[Function, Function], Function]:
    def made(inner: Function, block: Function) -> Function:
        choose, tensor, none = getattr(private.semantic(), name), tl.tensor, tl.PropagateNan.NONE
        to_tensor = private.semantic().to_tensor

        def called(x: Any, y: Any, *more: Any, _semantic: Any = None, **named: Any) -> Any:
            other = to_tensor(y, False)
            plain = type(x) is tensor and type(other) is tensor and not more and not named
            # Narrower ones become float32, or stay as they are, as the release of Triton has it.
            if not plain or x.dtype.name not in WIDE or other.dtype.name not in WIDE:
                return inner(x, y, *more, _semantic=private.semantic(), **named)
            return choose(x, other, none)

        return called

    return made


def _sizes(shape: Sequence[Any]) -> tuple[int, ...] | None:
    """Sizes as a function is given them, one by one or in one tuple; None where they are not Python's numbers."""
    if len(shape) == 1:
        kind = type(shape[0])
        shape = shape[0] if kind is tuple or kind is list else shape[0].values if kind is tl.tuple else shape
    found = tuple([x.value if type(x) is tl.constexpr else x for x in shape])
    return found if found and all([type(x) is int for x in found]) else None


def _moved(move: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]) -> Callable[[Function, Function], Function]:
    """Functions that put a block's numbers elsewhere, as `move` does."""

    def made(inner: Function, block: Function) -> Function:
        known: dict[Any, Any] = {}
        tensor = tl.tensor

        def called(x: Any, *sizes: Any, _semantic: Any = None, **named: Any) -> Any:
            wanted = None if named or type(x) is not tensor else _sizes(sizes)
            if wanted is None:
                named.pop("_generator", None)
                return inner(x, *sizes, _semantic=private.semantic(), **named)
            way = known.get((x.type.name, wanted))
            if way is None:
                found = inner(x, *sizes, _semantic=private.semantic())
                if found.type.is_block() and move(x.handle.data, wanted).shape == found.handle.data.shape:
                    known[x.type.name, wanted] = found.handle.dtype, found.type
                return found
            return block(move(x.handle.data, wanted), *way)

        return called

    return made


def _gather(inner: Function, block: Function) -> Function:
    known: dict[Any, Any] = {}
    tensor = tl.tensor

    def called(x: Any, index: Any, axis: Any, _semantic: Any = None) -> Any:
        if type(x) is not tensor or type(index) is not tensor or type(axis) is not int:
            return inner(x, index, axis, _semantic=private.semantic())
        key = (x.type.name, index.type.name, axis)
        way = known.get(key)
        if way is None:
            found, sizes = inner(x, index, axis, _semantic=private.semantic()), index.handle.data.shape
            places: list[Any] = list(np.ogrid[tuple(slice(n) for n in sizes)])
            known[key] = found.handle.dtype, found.type, places, axis % len(sizes)
            return found
        dtype, kind, places, at = way
        return block(x.handle.data[(*places[:at], index.handle.data, *places[at + 1 :])], dtype, kind)

    return called


def _trans(inner: Function, block: Function) -> Function:
    """Of a matrix, whose axes need not be named; of others as it is."""
    known: dict[str, Any] = {}

    def called(x: Any, *dims: Any, _semantic: Any = None) -> Any:
        if dims or type(x) is not TENSOR or x.handle.data.ndim != 2:
            return inner(x, *dims, _semantic=private.semantic())
        way = known.get(x.type.name)
        if way is None:
            found = inner(x, _semantic=private.semantic())
            known[x.type.name] = found.handle.dtype, found.type
            return found
        return block(x.handle.data.T, *way)

    return called


def _dot(inner: Function, block: Function) -> Function:
    known: dict[Any, Any] = {}

    def called(x: Any, y: Any, acc: Any = None, input_precision: Any = None, _semantic: Any = None, **more: Any) -> Any:
        how = input_precision.value if type(input_precision) is tl.constexpr else input_precision
        plain = type(x) is TENSOR and type(y) is TENSOR and (acc is None or type(acc) is TENSOR) and not more
        if not plain:
            return inner(x, y, acc, how, _semantic=private.semantic(), **more)
        key = (x.type.name, y.type.name, None if acc is None else acc.type.name, how)
        way = known.get(key)
        if way is None:
            with private.products() as asked:
                found = inner(x, y, acc, how, _semantic=private.semantic())
            _, _, added, *options = asked.pop()
            added.data.flags.writeable = added.data.flags.writeable and acc is not None
            known[key] = added, options, found.handle.dtype, found.type
            return found
        added, options, dtype, kind = way
        product = private.semantic().builder.create_dot
        return block(product(x.handle, y.handle, added if acc is None else acc.handle, *options).data, dtype, kind)

    return called


QUICK: dict[str, Callable[[Function, Function], Function]] = {
    "where": _where, "cast": _cast, "to": _cast, "load": _load, "store": _store, "full": _full, "arange": _arange,
    "exp": _of_one(np.exp), "exp2": _of_one(np.exp2), "log": _of_one(np.log), "log2": _of_one(np.log2),
    "sqrt": _of_one(np.sqrt), "sin": _of_one(np.sin), "cos": _of_one(np.cos), "maximum": _extreme("maximum"),
    "minimum": _extreme("minimum"), "broadcast_to": _moved(spread), "reshape": _moved(np.reshape),
    "permute": _moved(np.transpose), "gather": _gather, "trans": _trans, "dot": _dot,
}  # fmt: skip
