"""Tensors without memory whose sizes may be symbolic, and the results of torch functions on them.

Views are computed here; dtypes of other results come from torch, for the sizes of one call. Where the sizes of a result
for other sizes, or the order of its strides, are not known, `Unsaid` is raised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.symbolic import Size

SIGNS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "gt", "ge", "lt", "le", "eq", "ne", "and", "or",
    "invert",
)  # fmt: skip
ALIKE = frozenset({
    "to", "float", "long", "clone", "exp", "neg", "clamp", "where", "masked_fill", "zeros_like", "empty_like", "sub",
    "add", "mul", *(f"__{x}__" for x in SIGNS),
})  # fmt: skip  # functions of tensors of one shape, but for axes of 1
KEPT = frozenset({"to", "float", "long", "clone", "zeros_like", "empty_like"})  # functions that keep strides


class Unsaid(Exception):
    """A result for symbolic sizes is not known."""


class Storage:
    """The identity of a tensor's memory."""

    @property
    def _cdata(self) -> int:
        return id(self)


class Unwritten:
    """A tensor's sizes, strides and offset in its memory."""

    def __init__(
        self, shape: Sequence[Any], strides: Sequence[Any] | None, dtype: torch.dtype, offset: Any = 0,
        storage: Storage | None = None,
    ) -> None:  # fmt: skip
        self.shape = tuple(shape)
        self.strides = dense(self.shape) if strides is None else tuple(strides)
        self.dtype, self._offset, self._storage = dtype, offset, storage or Storage()

    def stride(self, axis: int | None = None) -> Any:
        """The stride of an axis, or all of them, in elements."""
        return self.strides if axis is None else self.strides[axis]

    def storage_offset(self) -> Any:
        """The offset in its memory, in elements."""
        return self._offset

    def untyped_storage(self) -> Storage:
        """The Storage."""
        return self._storage

    def view(self, axes: Sequence[tuple[Any, Any]], offset: Any = 0) -> Unwritten:
        """A view of the same memory with other axes (size, stride), from `offset` on."""
        shape, strides = [x[0] for x in axes], [x[1] for x in axes]
        return Unwritten(shape, strides, self.dtype, self._offset + offset, self._storage)

    @property
    def axes(self) -> list[tuple[Any, Any]]:
        """(size, stride) of each axis."""
        return list(zip(self.shape, self.strides, strict=True))

    def is_dense(self) -> bool:
        """True for the strides of a new contiguous tensor."""
        return all(a == b or size == 1 for a, b, size in zip(self.strides, dense(self.shape), self.shape, strict=True))

    def order(self) -> list[int]:
        """The axes from the largest to the smallest stride, as torch sorts them; empty where that is not known."""
        found = sorted(range(len(self.shape)), key=lambda i: -_number(self.strides[i]))
        axes = [self.axes[i] for i in found]
        pairs = itertools.pairwise(axes)
        known = all(a[1] > b[1] or (a[1] == b[1] and b[0] == 1) for a, b in pairs)
        return found if known and self.strides[-1:] != (0,) else []

    def is_filled(self) -> bool:
        """True for a dense tensor with its axes in any order."""
        step: Any = 1
        for size, stride in sorted(self.axes, key=lambda x: _number(x[1])):
            if size != 1:
                if stride != step:
                    return False
                step = step * size
        return True


def dense(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a new contiguous tensor."""
    found: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        found.append(step)
        step = step * (1 if size == 0 else size)
    return tuple(reversed(found))


def _sizes(given: Sequence[Any]) -> Sequence[Any]:
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _axis(x: Unwritten, axis: int, more: int = 0) -> int:
    return axis % (len(x.shape) + more)


def _transpose(x: Unwritten, a: int, b: int) -> Unwritten:
    axes = x.axes
    a, b = _axis(x, a), _axis(x, b)
    axes[a], axes[b] = axes[b], axes[a]
    return x.view(axes)


def _permute(x: Unwritten, *order: Any) -> Unwritten:
    return x.view([x.axes[_axis(x, i)] for i in _sizes(order)])


def _movedim(x: Unwritten, source: Any, destination: Any) -> Unwritten:
    a, b = ([y] if isinstance(y, int) else list(y) for y in (source, destination))
    to = {_axis(x, j): _axis(x, i) for i, j in zip(a, b, strict=True)}
    rest = iter(i for i in range(len(x.shape)) if i not in to.values())
    return x.view([x.axes[to[j] if j in to else next(rest)] for j in range(len(x.shape))])


def _unsqueeze(x: Unwritten, axis: int) -> Unwritten:
    at, axes = _axis(x, axis, 1), x.axes
    axes.insert(at, (1, axes[at][0] * axes[at][1] if at < len(axes) else 1))
    return x.view(axes)


def _squeeze(x: Unwritten, axis: int) -> Unwritten:
    at = _axis(x, axis)
    return x.view([a for i, a in enumerate(x.axes) if i != at or a[0] != 1])


def _select(x: Unwritten, axis: int, index: Any) -> Unwritten:
    at = _axis(x, axis)
    size, step = x.axes[at]
    if not -size <= index < size:
        raise IndexError(f"index {index} of an axis of {size}")
    return x.view(x.axes[:at] + x.axes[at + 1 :], (index + size if index < 0 else index) * step)


def _slice(x: Unwritten, at: int, cut: slice) -> Unwritten:
    size, step = x.axes[at]
    ends = []
    for end, default in ((cut.start, 0), (cut.stop, size)):
        end = default if end is None else end + size if end < 0 else end
        ends.append(0 if end < 0 else size if end > size else end)
    begin, stop = ends
    by = cut.step or 1
    count = 0 if stop <= begin else stop - begin if by == 1 else -((begin - stop) // by)
    return x.view([*x.axes[:at], (count, step * by), *x.axes[at + 1 :]], begin * step)


def _getitem(x: Unwritten, index: Any) -> Unwritten:
    given = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [y for y in given if y is Ellipsis]:
        at = next(i for i, y in enumerate(given) if y is Ellipsis)
        missing = len(x.shape) - sum(y is not None for y in given) + 1
        given[at : at + 1] = [slice(None)] * missing
    at = 0
    for y in given:
        if y is None:
            x = _unsqueeze(x, at)
        elif isinstance(y, slice):
            x = _slice(x, at, y)
        elif isinstance(y, (int, Size)):
            x, at = _select(x, at, y), at - 1
        else:
            raise Unsaid("an index that is a tensor")
        at += 1
    return x


def _expand(x: Unwritten, *sizes: Any) -> Unwritten:
    wanted = _sizes(sizes)
    axes = x.axes
    while len(axes) < len(wanted):
        axes.insert(0, (1, axes[0][0] * axes[0][1] if axes else 1))
    return x.view([a if size == -1 or size == a[0] else (size, 0) for a, size in zip(axes, wanted, strict=True)])


def _unflatten(x: Unwritten, axis: int, sizes: Sequence[Any]) -> Unwritten:
    at, found = _axis(x, axis), list(sizes)
    for i, size in enumerate(found):
        if isinstance(size, int) and size == -1:
            found[i] = x.shape[at] // math.prod([y for j, y in enumerate(found) if j != i])
    return _reshape(x, *x.shape[:at], *found, *x.shape[at + 1 :])


def _flatten(x: Unwritten, start: int = 0, end: int = -1) -> Unwritten:
    a, b = _axis(x, start), _axis(x, end)
    return x if a == b else _reshape(x, *x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :])


def _reshape(x: Unwritten, *sizes: Any) -> Unwritten:
    """A view by torch's rule: axes that are contiguous to each other are merged, and split again from the last one."""
    shape = list(_sizes(sizes))
    for i, size in enumerate(shape):
        if isinstance(size, int) and size == -1:
            shape[i] = math.prod(x.shape) // math.prod(shape[:i] + shape[i + 1 :])
    if any(size == 0 for size in x.shape) or not x.shape:
        raise Unsaid("another shape of no entries")
    strides: list[Any] = []
    left, step, there, made = len(shape), x.strides[-1], 1, 1
    for i, (size, _) in reversed(list(enumerate(x.axes))):
        there = there * size
        if i == 0 or (x.shape[i - 1] != 1 and x.strides[i - 1] != there * step):
            while left and (made < there or shape[left - 1] == 1):
                left -= 1
                strides.insert(0, made * step)
                made = made * shape[left]
            if made != there:
                raise Unsaid("rows that do not lie side by side, as one")
            if i:
                step, there, made = x.strides[i - 1], 1, 1
    if left:
        raise Unsaid("a shape of other entries")
    return x.view(list(zip(shape, strides, strict=True)))


def _contiguous(x: Unwritten) -> Unwritten:
    return x if x.is_dense() else Unwritten(x.shape, None, x.dtype)


KNOWN: dict[str, Callable[..., Any]] = {
    "transpose": _transpose, "permute": _permute, "movedim": _movedim, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "select": _select, "__getitem__": _getitem, "expand": _expand, "unflatten": _unflatten, "flatten": _flatten,
    "view": _reshape, "reshape": _reshape, "contiguous": _contiguous, "numel": lambda x: math.prod(x.shape),
    "is_contiguous": Unwritten.is_dense, "element_size": lambda x: x.dtype.itemsize,
}  # fmt: skip


def evaluate(function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
    """The result of a torch function with Unwritten arguments. Raises Unsaid."""
    title = function.__name__
    if title in KNOWN:
        return KNOWN[title](*args, **named)
    given = [x for x in _leaves((args, named)) if isinstance(x, Unwritten)]
    like = result(function, _meta(args), _meta(named))
    if not isinstance(like, Tensor):
        raise Unsaid(f"what {title} returns")
    if like.dtype == given[0].dtype and title in ("to", "float", "long"):
        return given[0]
    numbers = [z for x in given for y in (x.shape, x.strides) for z in y]
    if not any(isinstance(x, Size) for x in (*numbers, *_leaves((args, named)))):
        return Unwritten(like.shape, like.stride(), like.dtype)
    shape = _shape(title, given, args, named)
    out = Unwritten(shape, _strides(title, given, shape), like.dtype)
    if [_number(x) for x in (*out.shape, *out.strides)] != [*like.shape, *like.stride()]:
        raise Unsaid(f"the sizes and strides of what {title} makes")
    return out


def result(function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
    """The result of a torch function on meta tensors.

    What most calls need is said here, for contiguous results: some of torch's own rules are in Python and import SymPy
    or its compiler, which takes a second or several in the first call of a process.
    """
    title, x = function.__name__, args[0]
    if title in ("empty_like", "zeros_like", "sum") and not named.keys() - {"dtype"}:
        dtype, steps = named.get("dtype", x.dtype), x.stride()
        if title != "sum" and steps == dense(x.shape):
            return x.new_empty(x.shape, dtype=dtype)
        ordered = steps == dense(x.shape) or (
            min(x.shape) > 1 and all(a > b for a, b in itertools.pairwise((*steps, 0)))
        )
        if title == "sum" and ordered and len(args) == 2 and isinstance(args[1], int) and x.is_floating_point():
            axis = args[1] % x.dim()
            return x.new_empty(x.shape[:axis] + x.shape[axis + 1 :], dtype=dtype)
    if title == "cat" and len({y.dtype for y in x}) == 1:
        shape, axis = list(x[0].shape), args[1] if len(args) > 1 else named.get("dim", 0)
        if len(shape) not in (4, 5) or any(y.stride(1) > y.stride(-1) for y in x):  # no image whose channels are last
            shape[axis] = sum(y.shape[axis] for y in x)
            return x[0].new_empty(shape)
    return function(*args, **named)


def _strides(title: str, given: Sequence[Unwritten], shape: Sequence[Any]) -> Sequence[Any] | None:
    """The strides of a function's result: None for contiguous ones, else those that it takes from its arguments."""
    first = given[0]
    if title in KEPT and first.is_filled():
        return first.strides
    if all(x.is_dense() or x.order() == list(range(len(x.shape))) for x in given):
        return None
    if title in ALIKE and all(x.axes == first.axes for x in given) and first.is_filled():
        return first.strides
    order = first.order()
    if (
        title in ALIKE and not title.startswith("__r") and order and list(first.shape) == list(shape)
    ):  # torch gives it precedence
        steps = dict(zip(order, dense([shape[i] for i in order]), strict=True))
        return [steps[i] for i in range(len(shape))]
    raise Unsaid(f"how {title} lays out what it makes")


def _shape(title: str, given: Sequence[Unwritten], args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """The shape of a function's result."""
    if title in ALIKE:
        length = max(len(x.shape) for x in given)
        wide = [(1,) * (length - len(x.shape)) + x.shape for x in given]
        return [_common(sizes) for sizes in zip(*wide, strict=True)]
    x = given[0]
    if title in ("sum", "amax"):
        at = args[1] if len(args) > 1 else named["dim"]
        axes = [_axis(x, y) for y in ([at] if isinstance(at, int) else at)]
        keep = (len(args) > 2 and args[2]) or named.get("keepdim", False)
        return [1 if i in axes else size for i, size in enumerate(x.shape) if keep or i not in axes]
    if title == "cat":
        at = _axis(x, args[1] if len(args) > 1 else named.get("dim", 0))
        total = x.shape[at]
        for other in given[1:]:
            total = total + other.shape[at]
        return [*x.shape[:at], total, *x.shape[at + 1 :]]
    if title in ("new_zeros", "new_empty", "new_full"):
        return list(_sizes(args[1:]) if title != "new_full" else args[1])
    raise Unsaid(f"the sizes of what {title} makes")


def _common(sizes: Sequence[Any]) -> Any:
    """The common size of axes that broadcast."""
    found = [x for x in sizes if x != 1]
    if any(x != found[0] for x in found[1:]):
        raise Unsaid("sizes that differ")
    return found[0] if found else 1


def _number(x: Any) -> int:
    """The present value of x."""
    return x.value if isinstance(x, Size) else x


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return _leaves(list(x.values()))
    return [z for y in x for z in _leaves(y)] if isinstance(x, (tuple, list)) else [x]


def _meta(x: Any) -> Any:
    """x on torch's meta device, with the present values of symbols."""
    if isinstance(x, Unwritten):
        return torch.empty_strided(_meta(x.shape), _meta(x.strides), dtype=x.dtype, device="meta")
    if isinstance(x, Size):
        return x.value
    if isinstance(x, dict):
        return {name: _meta(y) for name, y in x.items()}
    assert not isinstance(x, Tensor)
    return type(x)(map(_meta, x)) if type(x) in (tuple, list) else x
