"""Triton's interpreter without what it finds out over and over: the same results in half the time.

Most of its time goes to types: every result gets a new one, checked and spelled out again, and every operand is
converted to it. Here that is done once for each pair of types. tests/test_triton_strict.py compares the results with
those of the interpreter as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
import triton_private as private
from hurried_calls import QUICK, at_once, name_of, tensor_at_once
from hurried_memory import loaded, stored
from hurried_source import at_once as rewritten_at_once

PLAIN = {int, float, bool, str, type(None), tl.tensor}
# Operations of two operands, which numpy does where both have the type of the computation.
OF_TWO: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "equal": np.equal, "not_equal": np.not_equal,
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater, "greater_equal": np.greater_equal,
    "and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor, "truediv": np.divide,
    "floordiv": lambda x, y: (x - np.fmod(x, y)) // y, "mod": np.fmod,
}  # fmt: skip
OPERATORS = {
    "__add__": "add", "__sub__": "sub", "__mul__": "mul", "__eq__": "equal", "__ne__": "not_equal",
    "__lt__": "less_than", "__le__": "less_equal", "__gt__": "greater_than", "__ge__": "greater_equal",
    "__and__": "and_", "__or__": "or_", "__xor__": "xor_", "__truediv__": "truediv", "__floordiv__": "floordiv",
    "__mod__": "mod",
}  # fmt: skip
TURNED = {"__radd__": "add", "__rsub__": "sub", "__rmul__": "mul", "__rtruediv__": "truediv"}
INTEGERS = {"int32", "int64"}  # which numpy, too, brings to the wider one
KINDS = {  # quotients of float16 are float32
    "truediv": {"fp32", "fp64"}, "floordiv": INTEGERS, "mod": INTEGERS, "xor_": INTEGERS,
}  # fmt: skip
BOOLEAN = np.dtype(bool)
NEW, HANDLE, TENSOR = object.__new__, private.Handle, tl.tensor
SIZES = ("shape", "numel", "dtype")  # what a tensor has of its type
REPEATED = {"fp16", "fp32", "fp64", *INTEGERS}
_swapped: list[tuple[Any, str, Any, Any]] = []


def install() -> None:
    """Hurry the interpreter of this process, for good."""
    # Sums of int32 are not computed in int64, too: only tensors of tests/test_gpu_large.py leave int32.
    _swap(*private.OPTIONS, replace(getattr(*private.OPTIONS), sanitize_overflow=False))
    _share_types()
    _remember_conversions()
    _repeat_operations()
    _wrap_once()
    _unwrap_at_once()
    _combine_slices()
    _make_handles()
    _swap(*private.REWRITE, rewritten_at_once(getattr(*private.REWRITE)))


@contextmanager
def as_it_is() -> Iterator[None]:
    """The interpreter without any of this; it leaves what functions of a kernel wrap wrapped, which ends with it."""
    before = [(owner, dict(vars(owner))) for owner in (tl, tl.core, tl.math, tl.tensor)]
    for owner, name, original, _ in _swapped:
        setattr(owner, name, original)
    try:
        yield
    finally:
        for owner, name, _, new in _swapped:
            setattr(owner, name, new)
        for place, had in before:
            for name in (name for name, x in had.items() if vars(place).get(name) is not x):
                setattr(place, name, had[name])


def _swap(owner: Any, name: str, new: Any) -> None:
    _swapped.append((owner, name, getattr(owner, name), new))
    setattr(owner, name, new)


def _wrap_once() -> None:
    """A launch wraps triton.language once, not at every call of a function, and no wrapper has another inside. Later
    launches take the wrappers of the first."""
    patch, kind, guard = getattr(*private.PATCH), getattr(*private.NUMPY_TYPE), tl.load.__code__
    operators = {name: getattr(private.Semantic, method).of_two for name, method in OPERATORS.items()}
    operators |= {name: getattr(private.Semantic, method).of_two_turned for name, method in TURNED.items()}
    operators["__getitem__"] = _indexed(tl.tensor.__getitem__)
    wrapped: set[str] = set()
    found, nothing = dict[frozenset[str], Any](), private.Scope()
    kinds: dict[str, Any] = {}
    ready: dict[Any, Callable[..., Any]] = {}
    inner: list[Callable[[], None]] = []  # what restores what a launch has wrapped

    def kind_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in kinds:
            kinds[name] = kind(dtype)
        return kinds[name]

    def ended() -> None:
        while inner:
            inner.pop()()
        wrapped.clear()
        ready.clear()

    def once(fn: Callable[..., Any]) -> Any:
        used = private.languages(fn)
        if used <= wrapped:
            return nothing
        if used in found:
            scope = private.Scope()
            scope.again(found[used])
        else:
            scope = patch(fn)
            found[used] = private.changed(scope)
        inner.append(scope.restore)
        if not wrapped:  # the kernel's own
            scope.restore = ended
        wrapped.update(used)
        return scope

    def attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        plain = member.__wrapped__ if getattr(member, "__code__", None) is guard else member
        if owner is tl.tensor and name in operators:
            return scope.set_attr(owner, name, operators[name])
        if name in QUICK:
            return scope.set_attr(owner, name, QUICK[name](plain, _block))

        def called(*args: Any, _semantic: Any = None, **named: Any) -> Any:
            return plain(*args, _semantic=private.semantic(), **named)

        scope.set_attr(owner, name, called)

    _swap(*private.PATCH, once)
    _swap(*private.CALL, at_once(ready))
    _swap(*private.NUMPY_TYPE, kind_of)
    _swap(*private.PATCH_ATTRIBUTE, attribute)


def _unwrap_at_once() -> None:
    unwrap = getattr(*private.UNWRAP)

    def unwrapped(x: Any) -> Any:
        kind = type(x)
        return x if kind in PLAIN else x.value if kind is tl.constexpr else unwrap(x)

    _swap(*private.UNWRAP, unwrapped)


def _share_types() -> None:
    """Types of blocks that are the same share what they are made of; sizes of a tensor are its type's."""
    make, fill, equal = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, Any] = {}

    def shared(self: Any, element: Any, shape: Sequence[Any]) -> None:
        sizes = [x.value if type(x) is tl.constexpr else x for x in shape]
        key = (element.name, *((x, type(x)) for x in sizes))
        if key not in types:
            make(self, element, shape)
            self.shape = shapes.setdefault(str(self.shape), self.shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    def filled(self: Any, handle: Any, kind: Any) -> None:
        if "filled" not in kind.__dict__:
            fill(self, None, kind)
            assert set(self.__dict__) == {"handle", "type", *SIZES}  # all that a block has, or finds in its type
            kind.filled = self.shape, self.numel, self.dtype
            kind = self.type
        self.handle, self.type = handle, kind

    def same(self: Any, other: Any) -> bool:
        return self is other or (self.name == other.name if isinstance(other, tl.dtype) else equal(self, other))

    for place, name in enumerate(SIZES):
        setattr(tl.tensor, name, _Made(name, lambda x, place=place: x.type.filled[place]))
    _swap(tl.block_type, "__init__", shared)
    _swap(tl.tensor, "__init__", filled)
    _swap(tl.dtype, "__eq__", same)


def _remember_conversions() -> None:
    """What becomes of two operands follows from their types, and from their values where they are Python's.

    numpy repeats what is smaller by itself, so an operand gets the type of its repetition and keeps its data.
    """
    convert, spread = getattr(*private.CONVERT), getattr(*private.SPREAD)
    known: dict[Any, Any] = {}
    spreads: dict[Any, Any] = {}

    def role(before: Any, after: tl.tensor) -> Any:
        """The type that an operand gets, or the tensor that a number becomes."""
        if type(before) is tl.tensor:
            return after.type
        return tl.tensor(private.Handle(after.handle.data.ravel()[:1].copy(), after.dtype), after.type)

    def played(self: Any, x: Any, role: Any) -> Any:
        if type(role) is tl.tensor:
            return role
        if x.dtype.name != role.scalar.name:
            x = self.cast(x, role.scalar)
        return x if x.type.name == role.name else tl.tensor(x.handle, role)

    def converted(self: Any, x: Any, y: Any, *allowed: Any, **named: Any) -> Any:
        key = (name_of(x), name_of(y), allowed, *named.items())
        roles = known.get(key)
        if roles is None:
            found = convert(self, x, y, *allowed, **named)
            known[key] = role(x, found[0]), role(y, found[1])
            return found
        return played(self, x, roles[0]), played(self, y, roles[1])

    def widened(z: tl.tensor, kind: Any) -> tl.tensor:
        if kind is None or z.type is kind:
            return z
        data = z.handle.data
        if data.shape != tuple(kind.shape):  # what is broadcast cannot be written to, which a store asks of pointers
            data = np.broadcast_to(data, kind.shape)
        return _block(data, z.dtype, kind)

    def repeated(self: Any, x: Any, y: Any) -> Any:
        shape = getattr(x.type, "shape", None)
        if shape is not None and shape is getattr(y.type, "shape", None):
            return x, y
        key = (x.type.name, y.type.name)
        kinds = spreads.get(key)
        if kinds is None:
            found = spread(self, x, y)
            spreads[key] = [z.type if z.type.is_block() else None for z in found]
            return found
        return tuple(widened(z, kind) for z, kind in zip((x, y), kinds, strict=True))

    _swap(*private.CONVERT, converted)
    _swap(*private.SPREAD, repeated)


def _repeat_operations() -> None:
    """What an operation gives but for its numbers follows from its operands' types, and from numbers of Python's."""
    for name, op in OF_TWO.items():
        _swap(private.Semantic, name, _repeated(name, getattr(private.Semantic, name), op))
    for name, op in (("minimum", np.fmin), ("maximum", np.fmax)):
        _swap(private.Semantic, name, _extreme(getattr(private.Semantic, name), op))
    _swap(private.Semantic, "to_tensor", tensor_at_once(private.Semantic.to_tensor, _block))
    _swap(private.Semantic, "cast", _cast(private.Semantic.cast))
    _swap(private.Semantic, "where", _chosen(private.Semantic.where))
    _swap(private.Semantic, "full", _filled(private.Semantic.full))
    _swap(private.Semantic, "load", loaded(private.Semantic.load, _block))
    _swap(private.Semantic, "store", stored(private.Semantic.store))


def _repeated(name: str, operation: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """`operation` of the semantic; its attributes are operators of tensors, `of_two` and `of_two_turned`."""
    convert, known, tensor, number = getattr(*private.CONVERT), dict[Any, Any](), tl.tensor, tl.constexpr
    pairs, first_of, second_of = dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()  # of two tensors, or one number
    checked = (True,) if name in ("add", "sub", "mul") else ()

    def way_of(self: Any, x: Any, y: Any, found: Any) -> Any:
        """(Type, dtype and numbers' dtype of a result, operands that are numbers of Python's, bytes of what a pointer
        points to); None where more is to be done. Bits are int1, whatever was compared for them."""
        tensors = [z for z in (x, y) if type(z) is tl.tensor]
        kinds = {z.type.scalar.name for z in tensors}
        if name == "add" and len(tensors) == 2 and x.type.scalar.is_ptr() and y.type.scalar.name in INTEGERS:
            return found.type, found.handle.dtype, found.handle.data.dtype, None, None, _bytes_of(x)
        bits = kinds == {"int1"} and name in ("and_", "or_") and len(tensors) == 2
        if not bits and not kinds <= INTEGERS and (len(kinds) != 1 or not kinds <= REPEATED):
            return None
        made = convert(self, x, y)
        if (not bits and {z.type.scalar.name for z in made} - kinds) or not kinds <= KINDS.get(name, kinds):
            return None
        numbers = [
            None if type(z) is tl.tensor else w.handle.data.ravel()[:1].copy()
            for z, w in zip((x, y), made, strict=True)
        ]
        return found.type, tl.int1 if bits else found.handle.dtype, found.handle.data.dtype, *numbers, 0

    def repeated(self: Any, x: Any, y: Any, *more: Any, **named: Any) -> Any:
        key = (name_of(x), name_of(y))
        way = known.get(key, known)
        if way is known:
            found = operation(self, x, y, *more, **named)
            way = known[key] = way_of(self, x, y, found)
            if way is not None:
                kind, dtype, numbers, first, second, size = way
                if first is None and second is None:
                    pairs[key] = kind, dtype, numbers, size
                elif first is None:
                    second_of[key] = kind, dtype, numbers, second
                else:
                    first_of[key] = kind, dtype, numbers, first
            return found
        found = None if way is None else played(x, y, *way)
        return operation(self, x, y, *more, **named) if found is None else found

    def played(x: Any, y: Any, kind: Any, dtype: Any, numbers: Any, first: Any, second: Any, size: int) -> Any:
        if size:
            data = x.handle.data + size * y.handle.data.astype(np.uint64)
        else:
            data = op(x.handle.data if first is None else first, y.handle.data if second is None else second)
        return _block(data, dtype, kind) if data.dtype is numbers or data.dtype == numbers else None

    def of_two(x: Any, y: Any, _semantic: Any = None) -> Any:
        if type(y) is tensor:
            way = pairs.get((x.type.name, y.type.name))
            if way is not None:
                kind, dtype, numbers, size = way
                data = y.handle.data
                data = x.handle.data + size * data.astype(np.uint64) if size else op(x.handle.data, data)
                if data.dtype is numbers:
                    handle, found = NEW(HANDLE), NEW(TENSOR)  # _block, without a call
                    handle.data, handle.dtype, found.handle, found.type = data, dtype, handle, kind
                    return found
        else:
            y = y.value if type(y) is number else y
            way = second_of.get((x.type.name, y if type(y) is int else name_of(y)))
            if way is not None:
                data = op(x.handle.data, way[3])
                if data.dtype is way[2]:
                    return _block(data, way[1], way[0])
        return repeated(private.semantic(), x, y, *checked)

    def of_two_turned(x: Any, y: Any, _semantic: Any = None) -> Any:
        return of_two(y, x) if type(y) is tensor else turned(x, y.value if type(y) is number else y)

    def turned(y: Any, x: Any) -> Any:
        """x is a number of Python's."""
        way = first_of.get((name_of(x), y.type.name))
        if way is not None:
            data = op(way[3], y.handle.data)
            if data.dtype is way[2]:
                return _block(data, way[1], way[0])
        return repeated(private.semantic(), x, y, *checked)

    repeated.of_two, repeated.of_two_turned = of_two, of_two_turned  # type: ignore[attr-defined]
    return repeated


def _extreme(operation: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """`minimum` or `maximum`, where of NaN and a number the number is taken."""
    none = tl.PropagateNan.NONE
    once = _repeated("extreme", lambda self, x, y: operation(self, x, y, none), op)

    def chosen(self: Any, x: Any, y: Any, propagate_nan: Any) -> Any:
        return once(self, x, y) if propagate_nan == none else operation(self, x, y, propagate_nan)

    return chosen


def _block(data: np.ndarray, dtype: Any, kind: Any) -> Any:
    """A tensor of that type with these numbers, whose size is not checked again. kind: of a tensor that there was."""
    handle, found = NEW(HANDLE), NEW(TENSOR)
    handle.data, handle.dtype, found.handle, found.type = data, dtype, handle, kind
    return found


class _Made:
    """An attribute that is made when it is first asked for, of what has it."""

    def __init__(self, name: str, make: Callable[[Any], Any]) -> None:
        self.name, self.make = name, make

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            raise AttributeError(self.name)
        found = owner.__dict__[self.name] = self.make(owner)
        return found


def _bytes_of(pointer: Any) -> int:
    return max(1, pointer.handle.get_element_ty().primitive_bitwidth // 8)


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Casts between the types that numpy has, and between float32 and bfloat16."""
    known: dict[Any, Any] = {}

    def converted(self: Any, x: Any, kind: Any, *mode: Any, **named: Any) -> Any:
        if (mode or named) and (any(mode) or any(named.values())):
            return cast(self, x, kind, *mode, **named)
        key = (x.type.name, kind.name)
        way = known.get(key, known)
        if way is known:
            found, old, new = cast(self, x, kind), x.type.scalar.name, kind.scalar.name
            plain = old in REPEATED and new in REPEATED
            known[key] = None
            if old == new or plain or {old, new} == {"fp32", "bf16"}:
                known[key] = found.type, found.handle.dtype, found.handle.data.dtype, plain, old == new
            return found
        if way is None:
            return cast(self, x, kind)
        made, dtype, numbers, plain, same = way
        if same:
            return x
        data = x.handle.data.astype(numbers) if plain else self.builder.cast_impl(x.handle, made).data
        return _block(data, dtype, made)

    return converted


def _chosen(where: Callable[..., Any]) -> Callable[..., Any]:
    """`where` of tensors of one type, or of one and a number."""
    known: dict[Any, Any] = {}
    tensor, convert = tl.tensor, getattr(*private.CONVERT)

    def way_of(self: Any, x: Any, y: Any, found: Any) -> Any:
        """(dtype, type, operands that are numbers of Python's), or None."""
        made, given = convert(self, x, y, True, True), [z for z in (x, y) if type(z) is tensor]
        if len({z.type.scalar.name for z in (*given, *made, found)}) > 1:
            return None
        numbers = [
            None if type(z) is tensor else w.handle.data.ravel()[:1].copy() for z, w in zip((x, y), made, strict=True)
        ]
        return found.handle.dtype, found.type, *numbers

    def chosen(self: Any, which: Any, x: Any, y: Any) -> Any:
        if type(which) is not tensor or which.handle.data.dtype is not BOOLEAN:
            return where(self, which, x, y)
        key = (which.type.name, name_of(x), name_of(y))
        way = known.get(key, known)
        if way is known:
            found = where(self, which, x, y)
            known[key] = way_of(self, x, y, found) if type(x) is tensor or type(y) is tensor else None
            return found
        if way is None:
            return where(self, which, x, y)
        dtype, kind, first, second = way
        x, y = x.handle.data if first is None else first, y.handle.data if second is None else second
        return _block(np.where(which.handle.data, x, y), dtype, kind)

    return chosen


def _indexed(member: Callable[..., Any]) -> Callable[..., Any]:
    """x[:, None] and its like."""
    inner, known = getattr(member, "__wrapped__", member), dict[Any, Any]()

    def indexed(x: Any, places: Any, _semantic: Any = None) -> Any:
        data, way_there, kept = x.handle.data, 1, 0  # in binary digits: 1, then 0 for each None, 1 for each axis
        for place in places if type(places) is tuple else (0,):
            if place is None:
                way_there *= 2
            elif type(place) is slice and place.start is None and place.stop is None and place.step is None:
                way_there, kept = 2 * way_there + 1, kept + 1
            else:
                return inner(x, places, _semantic=private.semantic())
        if data.ndim != kept:
            return inner(x, places, _semantic=private.semantic())
        key = (x.type.name, way_there)
        way = known.get(key)
        if way is None:
            found = inner(x, places, _semantic=private.semantic())
            known[key] = found.handle.dtype, found.type
            return found
        return _block(data[places], *way)

    return indexed


def _filled(full: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks of one number of Python's, which no operation changes."""
    known: dict[Any, Any] = {}

    def filled(self: Any, shape: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, float, bool):
            return full(self, shape, value, dtype)
        key = (*(int(size) for size in shape), type(value), str(value), dtype.name)
        found = known.get(key)
        if found is None:
            found = known[key] = full(self, shape, value, dtype)
            found.handle.data.flags.writeable = False
        return _block(found.handle.data, found.handle.dtype, found.type)

    return filled


def _make_handles() -> None:
    """Numbers fit a dtype where others of their size did; what a pointer points to is found once."""
    make, element = getattr(*private.HANDLE), getattr(*private.ELEMENT)
    fit: set[Any] = set()
    private.Handle.attr = _Made("attr", lambda _: {})

    def made(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        key = (data.itemsize, dtype.name)
        if key in fit:
            self.data, self.dtype = data, dtype
            if attr is not None:
                self.attr = attr
        else:
            make(self, data, dtype, *(() if attr is None else (attr,)))
            fit.add(key)

    def innermost(self: Any) -> Any:
        known = self.dtype.__dict__
        if "innermost" not in known:
            known["innermost"] = element(self)
        return known["innermost"]

    _swap(*private.HANDLE, made)
    _swap(*private.ELEMENT, innermost)


def _combine_slices() -> None:
    """Reductions and scans by any function combine whole slices of a block, not one number after another."""
    reduce = getattr(*private.REDUCE)

    def slices(self: Any, given: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """What is combined of the slices along the axis up to each of them."""
        rows = [np.moveaxis(x.handle.data, self.axis, 0) for x in given]
        state: Any = None
        for i in range(len(rows[0])):
            row = tuple(self.to_tensor(data[i], x.dtype) for data, x in zip(rows, given, strict=True))
            found = row if state is None else self.combine_fn.fn(*state, *row)
            state = found if isinstance(found, tuple) else (found,)
            state = tuple(
                x if type(x) is tl.tensor else self.to_tensor(np.full_like(data[i], x), y.dtype)
                for x, data, y in zip(state, rows, given, strict=True)
            )
            yield tuple(x.handle.data.reshape(data[i].shape) for x, data in zip(state, rows, strict=True))

    def scanned(self: Any, given: Sequence[Any]) -> list[Any]:
        every = zip(*slices(self, given), strict=True)
        return [self.to_tensor(np.stack(x, self.axis), y.dtype) for x, y in zip(every, given, strict=True)]

    def reduced(self: Any, given: Sequence[Any]) -> list[Any]:
        if self.axis is None:
            found: list[Any] = reduce(self, given)
            return found
        *_, last = slices(self, given)
        kept = [np.expand_dims(x, self.axis) if self.keep_dims else x for x in last]
        return [self.to_tensor(x, y.dtype) for x, y in zip(kept, given, strict=True)]

    convert = getattr(*private.RESULT)
    known: dict[Any, Any] = {}

    def result(self: Any, data: Any, dtype: Any) -> Any:
        if type(data) is not np.ndarray or not data.shape:
            return convert(self, data, dtype)
        way = known.get((data.shape, dtype.name))
        if way is None:
            found = convert(self, data, dtype)
            known[data.shape, dtype.name] = found.type, found.handle.dtype, found.handle.data.dtype
            return found
        kind, scalar, numbers = way
        return _block(data.astype(numbers, copy=False), scalar, kind)

    _swap(*private.SCAN, scanned)
    _swap(*private.REDUCE, reduced)
    _swap(*private.RESULT, result)
