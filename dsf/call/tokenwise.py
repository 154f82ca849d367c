"""Functions of a token's own numbers, declared like recurrences: what a layer computes around its recurrence.

In torch such a function (a norm of each head, a bonus, gates) is a chain of a dozen operators, each of which reads and
writes whole tensors. Declared in the language's expressions it is printed as one kernel, and one for all gradients.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dsf.call.bind import with_own_gradient
from dsf.call.calls import allowing, is_transformed
from dsf.kernels.triton.registry import Registry
from dsf.language.annotations import Input, kinds_of
from dsf.language.errors import DsfError, InputError, TraceError
from dsf.language.expr import KEY, VALUE, Expr, as_expr, children_first, inputs_of, symbol_of
from dsf.language.instead import told
from dsf.language.places import noting
from dsf.language.primitives import BY_TORCH_ALONE
from dsf.language.trace import line_of
from dsf.torch.evaluate import Evaluator
from dsf.triton.choose import absence
from dsf.triton.support import refusal

LARGEST = 1024  # most entries of a head in the GPU kernels
KINDS = (torch.float32, torch.bfloat16, torch.float16)
_known: WeakValueDictionary[str, Tokenwise] = WeakValueDictionary()  # by name and content, as graphs call them


@overload
def tokenwise(function: Callable[..., Any], *, by_torch: Callable[..., Tensor] | None = None) -> Tokenwise: ...


@overload
def tokenwise(
    function: None = None, *, by_torch: Callable[..., Tensor] | None = None
) -> Callable[[Callable[..., Any]], Tokenwise]: ...


def tokenwise(function: Callable[..., Any] | None = None, *, by_torch: Callable[..., Tensor] | None = None) -> Any:
    """Declare a function of a token's own numbers, with the annotations and expressions of a recurrence.

    The function returns an expression with a Key axis, or one number for each head. Inputs are Key, Scalar and Params
    of these: channels are annotated Key, and there is no Value, Pair or Steps. Nothing may read other tokens (prev).
    Raises TraceError otherwise, with the user's line.

    by_torch: the same function of tensors, called where no kernel runs. It may be faster than the expressions there
    (F.layer_norm for a norm of heads), and may round its steps to the inputs' dtype.
    """
    return (lambda f: Tokenwise(f, by_torch)) if function is None else Tokenwise(function, by_torch)


class Tokenwise:
    """A declared function of a token's own numbers, as `dsf.tokenwise` makes it. expression: what it computes."""

    def __init__(self, function: Callable[..., Any], by_torch: Callable[..., Tensor] | None = None) -> None:
        kinds, self.given = kinds_of(function), by_torch
        self.inputs = tuple(Input(name, kind) for name, kind in kinds.items())
        self._layouts = {name: kind.layout() for name, kind in kinds.items()}  # asked for in every call
        self.__name__, self.__doc__ = function.__name__, inspect.getdoc(function)
        with noting(function.__code__) as places:
            try:
                root = function(**{name: symbol_of(name, None, kind.axes) for name, kind in kinds.items()})
                self._check(root)
            except Exception as error:
                where = line_of(places, error)
                raise TraceError(f"{self.__name__}: {told(error)}\n  {where}") from error
        self.expression: Expr = root
        self._unprinted = {x.op for x in children_first(root)} & BY_TORCH_ALONE
        text = repr(([(i.name, str(i.kind)) for i in self.inputs], _content(root)))
        self.key = f"{self.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        first = _known.setdefault(self.key, self)
        self._first = None if first is self else first  # graphs call that one, so it lives as long as any equal one

    def _check(self, root: Any) -> None:
        if not isinstance(root, Expr):
            raise TraceError(f"a function of tokens returns an expression, got {type(root).__name__}")
        for i in self.inputs:
            if VALUE in i.kind.axes or i.kind.steps is not None or i.kind.pair:
                raise TraceError(f"input `{i.name}` is {i.kind}; functions of tokens take Key, Scalar and Params")
        as_expr(root)  # refuses comparisons
        timed = {i.name for i in self.inputs if i.kind.time}
        if not any(x.attrs[0] in timed for x in inputs_of(root)):
            raise TraceError("the result depends on no input of tokens")
        unused = {i.name for i in self.inputs} - {x.attrs[0] for x in inputs_of(root)}
        if unused:
            raise TraceError(f"input `{min(unused)}` is never used; leave it out, or use it")
        for x in children_first(root):
            if x.op == "prev" or x.features is not None:
                raise TraceError(f"{x} is no function of one token's own numbers")
            if x.op == "size" and x.attrs[0] == VALUE:
                raise TraceError("P is the size of the Value axis, which functions of tokens lack; N is the Key's")

    def __call__(self, *args: Tensor, backend: str = "auto", **kwargs: Tensor) -> Tensor:
        """The result [B, T, H, N], or [B, T, H], in the dtype of the first input of tokens.

        Inputs are given by position or name, with any floating dtypes and strides: Key [B, T, H, N], Scalar [B, T, H],
        Param[Key] [H, N], Param[Scalar] [H]. All have H heads.
        backend: "triton", "torch" or "auto". The Triton kernels take CUDA tensors but float64, heads of at most 1,024
          entries, and functions without atan2, pair and quarter_turn. They compute in float32, round the result once,
          and have no second derivatives.
        Raises InputError for inputs that do not fit the declaration, and for backend="triton" where it cannot run them.
        """
        tensors = self._bound(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            allow()
            return tokenwise_in_graph(self.key, backend, *tensors)
        return self.run(backend, *tensors)

    def run(self, backend: str, *tensors: Tensor) -> Tensor:
        """The result for inputs that fit, in their order."""
        like = next(x.dtype for x, i in zip(tensors, self.inputs, strict=True) if i.kind.time)
        if not self.on_kernels(backend, tensors):
            if self.given is not None:
                return self.given(*tensors).to(like)
            return self.evaluated(tensors, like)
        from dsf.kernels.triton.pointwise.tokenwise_ops import tokenwise as launched

        return launched(list(tensors), self.program, like)

    def _bound(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> list[Tensor]:
        """The inputs in their order. Raises InputError."""
        names = self._layouts.keys()
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) + len(kwargs) != len(names) or given.keys() != names:
            raise InputError(f"{self.__name__}: inputs are {', '.join(names)}, each given once")
        sizes: dict[str, int] = {}
        for name, layout in self._layouts.items():
            x = given[name]
            if not isinstance(x, Tensor):
                raise InputError(f"{self.__name__}: `{name}` is a {type(x).__name__}, expected a tensor")
            if not x.is_floating_point():
                raise InputError(f"{self.__name__}: `{name}` must be floating point, got {x.dtype}")
            fits = x.dim() == len(layout)
            for axis, size in zip(layout, x.shape, strict=False):
                fits = fits and sizes.setdefault(axis, size) == size
            if not fits:
                known = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
                expected = ", ".join(layout)
                raise InputError(
                    f"{self.__name__}: `{name}` has shape {list(x.shape)}, expected [{expected}] ({known})"
                )
        return [given[name] for name in names]

    def on_kernels(self, backend: str, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the Triton kernels run. Raises InputError where they were asked for and cannot."""
        if backend not in ("auto", "torch", "triton"):
            raise InputError(f"{self.__name__}: backend is {backend!r}; there are 'auto', 'torch' and 'triton'")
        if backend == "torch" or (backend == "auto" and not _runs(tensors[0].device)):
            return False
        if self._unprinted:
            if backend == "triton":
                raise InputError(f"{self.__name__}: no kernel computes {min(self._unprinted)}, which torch does")
            return False
        width = max((x.shape[-1] for x, i in zip(tensors, self.inputs, strict=True) if KEY in i.kind.axes), default=1)
        fits = all(x.dtype in KINDS and x.numel() for x in tensors) and width <= LARGEST
        if backend == "triton":
            if not fits:
                raise InputError(
                    f"{self.__name__}: the kernels take float32, bfloat16 and float16 and heads of at most {LARGEST}"
                )
            absent = absence(tensors[0].device)
            if absent is not None:
                raise InputError(f"{self.__name__}: backend='triton' was asked for, but {absent}")
            return True
        placed = any(hasattr(x, "device_mesh") for x in tensors)
        return fits and not placed and not is_transformed(tensors)

    @functools.cached_property
    def program(self) -> str:
        """The name of this function's kernels, which the first access prints and registers."""
        from dsf.kernels.triton.pointwise.tokenwise_ops import TOKENWISE
        from dsf.triton.print_prologue import emit_tokenwise

        source, known = emit_tokenwise(self.__name__, self.inputs, self.expression)
        TOKENWISE[self.key] = replace(known, functions=source.module())
        return self.key

    def evaluated(self, tensors: tuple[Tensor, ...], like: torch.dtype) -> Tensor:
        """The expression's value by torch's operators, rounded once to the dtype `like`."""
        wide = functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
        env, n = {}, 1
        for i, x in zip(self.inputs, tensors, strict=True):
            x = with_own_gradient(x) if i.kind.time else with_own_gradient(x)[None, None]
            n = x.shape[-1] if KEY in i.kind.axes else n
            x = x.unsqueeze(-1) if KEY in i.kind.axes else x[..., None, None]
            env[symbol_of(i.name, None, i.kind.axes)] = x.to(wide)
        found = Evaluator(env, n, 1)(self.expression).squeeze(-1)
        return (found if KEY in self.expression.axes else found.squeeze(-1)).to(like)


def _content(root: Expr) -> list[Any]:
    """An expression by its nodes, each by the places of its operands."""
    nodes = children_first(root)
    places = {x: i for i, x in enumerate(nodes)}
    return [(x.op, [places[a] for a in x.args], x.attrs, sorted(x.axes)) for x in nodes]


def _runs(device: torch.device) -> bool:
    return device.type == "cuda" and refusal(device) is None


def tokenwise_in_graph(key: str, backend: str, *tensors: Tensor) -> Tensor:
    """A call of the function of that key, as one node of a compiled graph."""
    return _known[key].run(backend, *tensors)


allow = allowing(tokenwise_in_graph)


def _print(kind: str, name: str) -> None:
    """Print the kernels of a function that a saved graph runs. Raises DsfError where it is not declared here."""
    if kind != "tokenwise":
        return
    if name not in _known:
        raise DsfError(
            f"{name.rpartition('-')[0]}: a graph runs this function of tokens, whose declaration this process does not "
            "have: import the module that declares it (the zoo's: dsf.mixers) before the graph runs"
        )
    assert _known[name].program == name


Registry.finders.append(_print)
