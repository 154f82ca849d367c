"""What constructors of layers and calls check of their arguments: one rule for each kind, by name and annotation."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsf import Recurrence
from dsf.language.errors import InputError

# Whole numbers count something, so they are at least 1; but for these, of which 0 says "none" or "the first".
FROM_ZERO = ("d_conv", "conv", "layer_idx")
POSITIVE = ("expand", "dt_min", "dt_max", "max_phase", "r_max")  # the other floats may be 0
ORDERED = (("dt_min", "dt_max"), ("r_min", "r_max"))
MOST = {"r_max": 1.0}
FEWEST, WIDEST = 4, 128  # heads of a layer that is not told how many, and channels of d_model for each
OBJECTS: dict[str, type] = {"Module": nn.Module, "Recurrence": Recurrence}

Constructor = Callable[..., None]


class Sized(nn.Module):
    """A module whose subclasses' constructors are `checked`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]


def heads_to_try(d_model: int, least: int, widest: int, of: int = 1) -> range:
    """Numbers of heads, the best first: `least` or more, of at most `widest` of d_model's channels, multiples of `of`.

    It ends at twice the first number: more heads would be needlessly narrow.
    """
    first = -(-max(least, -(-d_model // widest)) // of) * of
    return range(first, 2 * first + 1, of)


class Divided:
    """The sizes of a layer that divide one another, and what it says where they do not."""

    even: tuple[str, ...] = ()  # widths of a head that must be even

    def heads(
        self,
        d_model: int,
        n_heads: int | None,
        groups: tuple[str, int | None] = ("", None),
        /,
        **widths: tuple[int, int | None],
    ) -> tuple[int, ...]:
        """The number of heads, and after it the width of a head for each of widths: (channels, width given or None).

        Without n_heads: the smallest number from FEWEST on that divides the channels, with at most WIDEST of d_model's
        channels for each head, since the GPU's chunk kernels take no wide ones. groups: name and number (or None) of
        the heads that groups of them share, which divides it. Raises InputError where nothing divides.
        """
        if n_heads is None:
            divided = {name: channels for name, (channels, width) in widths.items() if width is None}
            tried = heads_to_try(d_model, FEWEST, WIDEST, groups[1] or 1)
            for n in tried:
                if all(c % (2 * n if name in self.even else n) == 0 for name, c in divided.items()):
                    n_heads = n
                    break
            else:
                channels = " and ".join(map(str, sorted(set(divided.values()))))
                also = "" if groups[1] is None else f" and is a multiple of {groups[0]} ({groups[1]})"
                raise InputError(
                    f"{type(self).__name__}: no number of heads from {tried[0]} to {tried[-1]} divides its {channels} "
                    f"channels{also}; give n_heads= or another d_model"
                )
        return n_heads, *(self.width(channels, n_heads, given, name) for name, (channels, given) in widths.items())

    def shared(self, name: str, given: int | None, n_heads: int) -> int:
        """How many heads groups of n_heads share: as given, or all. Raises InputError where that does not divide."""
        found = n_heads if given is None else given
        if n_heads % found:
            raise InputError(f"{type(self).__name__}: {name} ({found}) must divide n_heads ({n_heads})")
        return found

    def inner(self, d_model: int, expand: float) -> int:
        """expand · d_model channels. Raises InputError unless that is a whole number."""
        found = int(expand * d_model)
        if found < 1 or found != expand * d_model:
            raise InputError(
                f"{type(self).__name__}: expand ({expand}) times d_model ({d_model}) must be a whole number"
            )
        return found

    def inner_heads(self, d_inner: int, headdim: int, n_groups: int) -> int:
        """Heads of headdim channels, in groups that share keys. Raises InputError where either does not divide."""
        heads = d_inner // headdim
        if heads * headdim != d_inner or heads % n_groups:
            raise InputError(
                f"{type(self).__name__}: headdim {headdim} must divide {d_inner}, and n_groups {n_groups} the heads"
            )
        return heads

    def width(self, channels: int, n_heads: int, given: int | None, name: str) -> int:
        """The width of a head: as given, or channels / n_heads. Raises InputError where that does not divide."""
        if given is None and channels % n_heads:
            raise InputError(
                f"{type(self).__name__}: n_heads ({n_heads}) must divide its {channels} channels, or give {name}="
            )
        return given if given is not None else channels // n_heads


def checked(init: Constructor) -> Constructor:
    """A constructor that looks at its arguments first, in the words of the class that is made.

    `int` is a whole number of at least 1 (FROM_ZERO: 0), `float` a finite one, not negative (POSITIVE: above 0),
    `bool` True or False, dtype a floating-point type. Raises InputError otherwise, and TypeError for arguments that the
    class does not have. What a layer alone can judge, such as widths that must divide, it judges itself.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(misfit(name, error, list(signature.parameters)[1:], kwargs)) from None
        for argument in list(bound.arguments):
            parameter = signature.parameters[argument]
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                bound.arguments[argument] = _fitting(name, parameter, bound.arguments[argument])
        _check_order(name, signature, bound.arguments)
        init(*bound.args, **bound.kwargs)
        if type(self).__init__ is run and "d_model" in bound.arguments and not hasattr(self, "d_model"):
            self.d_model = bound.arguments["d_model"]

    return run


def misfit(name: str, error: TypeError, known: Iterable[str], given: Mapping[str, Any]) -> str:
    """Why arguments do not fit a constructor, with what it takes and the name that was meant."""
    known = list(known)
    strange = next((word for word in given if word not in known), None)
    near = [] if strange is None else difflib.get_close_matches(strange, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name}: {error}{hint}; it takes {', '.join(known)}"


def _fitting(name: str, parameter: inspect.Parameter, value: Any) -> Any:
    """The argument, whole numbers of any library as Python's."""
    argument, kind = parameter.name, _kind(parameter)
    if value is parameter.default or value is None:
        return value
    if argument == "dtype":
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            raise InputError(f"{name}: dtype is {value!r}, expected a floating-point type such as torch.bfloat16")
    elif argument in POSITIVE or kind == "float":
        low = argument in POSITIVE
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0 or (low and value == 0):
            raise InputError(f"{name}: {argument} is {value!r}, expected a number {'above' if low else 'from'} 0")
        if value > MOST.get(argument, math.inf):
            raise InputError(f"{name}: {argument} is {value!r}, expected at most {MOST[argument]:g}")
    elif kind == "int":
        least = 0 if argument in FROM_ZERO else 1
        number = not isinstance(value, bool | Tensor) and hasattr(value, "__index__")
        if not number or operator.index(value) < least:
            raise InputError(f"{name}: {argument} is {value!r}, expected a whole number of at least {least}")
        return operator.index(value)
    elif kind == "bool" and not isinstance(value, bool):
        raise InputError(f"{name}: {argument} is {value!r}, expected True or False")
    elif kind in OBJECTS and not isinstance(value, OBJECTS[kind]):
        raise InputError(f"{name}: {argument} is {value!r}, expected a {OBJECTS[kind].__name__}")
    return value


def _kind(parameter: inspect.Parameter) -> str:
    """The name of the type in the annotation, without its modules and a None beside it."""
    given = parameter.annotation
    words = given if isinstance(given, str) else inspect.formatannotation(given)
    return words.removesuffix(" | None").rpartition(".")[2]


def _check_order(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    for low, high in ORDERED:
        if low in signature.parameters and high in signature.parameters:
            first, last = (given.get(x, signature.parameters[x].default) for x in (low, high))
            if first > last:
                raise InputError(f"{name}: {low} is {first!r}, above {high}, {last!r}")


def check_input(layer: Any, x: Tensor, step: bool = False, spread: bool = False) -> None:
    """Refuse what is no [B, T, d_model] (step: [B, d_model]) of floats, in the layer's words. Raises InputError.

    spread: over ranks, which may have no tokens.
    """
    width, axes = getattr(layer, "d_model", None), 2 if step else 3
    name, expected = type(layer).__name__, f"[B, {'' if step else 'T, '}{'d_model' if width is None else width}]"
    if not isinstance(x, Tensor):
        raise InputError(f"{name}: x must be a tensor {expected}, got {type(x).__name__}")
    if x.dim() != axes or (width is not None and x.shape[-1] != width):
        raise InputError(f"{name}: x has shape {list(x.shape)}, expected {expected}")
    if x.layout != torch.strided:
        raise InputError(f"{name}: x must be a dense tensor, got one of {x.layout}; give its to_dense()")
    if not x.is_floating_point():
        raise InputError(f"{name}: x is {x.dtype}, expected floating-point numbers {expected}; embed tokens first")
    for axis, size in zip("BT", x.shape[:-1], strict=False):
        if size == 0 and not (spread and axis == "T"):
            raise InputError(f"{name}: x has {axis} = 0, at least 1 is needed; shape {list(x.shape)}")
