"""Parts of Triton that it does not promise to keep, as the strict and the hurried interpreter change them: here alone.

A release of Triton that names one otherwise fails here. Pairs are an owner and the name of what tests put in its place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import ismodule, signature
from typing import Any

import numpy as np
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter, jit
from triton.runtime._async_compile import active_mode

__all__ = ["active_mode"]

Place = tuple[Any, str]

Error = interpreter.InterpreterError
Handle, Builder, Semantic = interpreter.TensorHandle, interpreter.InterpreterBuilder, TritonSemantic
TF32, TF32_TIMES_3 = (getattr(interpreter._ir.INPUT_PRECISION, x) for x in ("TF32", "TF32x3"))

# What a rewritten kernel finds beside its own names.
GLOBALS = vars(interpreter)

# Of a launch.
ARGUMENTS: Place = (interpreter.GridExecutor, "_init_args_hst")
GRID: Place = (Builder, "set_grid_dim")
PROGRAM: Place = (Builder, "set_grid_idx")
# Of what a kernel does.
LOAD: Place = (Builder, "create_masked_load")
STORE: Place = (Builder, "create_masked_store")
DOT: Place = (Builder, "create_dot")
SCAN: Place = (interpreter.ScanOps, "generic_scan")
REDUCE: Place = (interpreter.ReduceOps, "generic_reduce")
RESULT: Place = (interpreter.ReduceScanOpInterface, "to_tensor")
ELEMENT: Place = (Handle, "get_element_ty")
HANDLE: Place = (Handle, "__init__")
CALL: Place = (interpreter.InterpretedFunction, "__call__")
REWRITE: Place = (interpreter.FunctionRewriter, "rewrite_ast")
# Of how triton.language is wrapped, and of types.
OPTIONS: Place = (interpreter.interpreter_builder, "options")
PATCH: Place = (interpreter, "_patch_lang")
PATCH_ATTRIBUTE: Place = (interpreter, "_patch_attr")
NUMPY_TYPE: Place = (interpreter, "_get_np_dtype")
UNWRAP: Place = (core, "_unwrap_if_constexpr")
CONVERT: Place = (Semantic, "binary_op_type_checking_impl")
SPREAD: Place = (Semantic, "broadcast_impl_value")

# What a plain load and a plain store give beside pointers, numbers and masks. Before Triton 3.9 they begin with what
# block pointers take: two arguments of a load, one of a store.
BLOCKS = "boundary_check" in signature(Semantic.load).parameters
PLAIN_LOAD: tuple[Any, ...] = ((), "", "", "", False)
PLAIN_STORE: tuple[Any, ...] = ((), "", "")
if not BLOCKS:
    PLAIN_STORE = (core._normalize_cache_policy(None, "", ""),)
    PLAIN_LOAD = (*PLAIN_STORE, False)


class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """What a launch puts in the place of triton.language's functions, until it ends."""

    def again(self, changes: list[tuple[Any, str, Any]]) -> None:
        """The changes of another scope, as `changed` of it gave them."""
        for owner, name, new in changes:
            self.set_attr(owner, name, new)


def changed(scope: Any) -> list[tuple[Any, str, Any]]:
    """(Owner, name, what now stands there) of all that a scope changed."""
    return [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]


@cache
def languages(fn: Callable[..., Any]) -> frozenset[str]:
    """The modules of triton.language that a kernel's code names."""
    return frozenset(x.__name__ for x in fn.__globals__.values() if ismodule(x) and x in (tl, tl.core))


def asked_of(kernel: Any, *args: Any) -> list[Any]:
    """What Triton asks of the arguments of a launch on an H200: kernels are compiled for the answers."""
    binder = jit.create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    found: list[Any] = binder(*args)[1]
    return found


def rewritten(function: Any) -> Callable[..., Any]:
    """What Triton's interpreter runs for a function that a kernel calls."""
    found: Callable[..., Any] = function.rewrite()
    return found


def rewritten_anew(function: Any) -> Callable[..., Any]:
    """The same, whatever was rewritten before."""
    found: Callable[..., Any] = function.rewriter.rewrite_ast()
    return found


def semantic() -> Any:
    """What operations of a kernel are done by."""
    return interpreter.interpreter_semantic


@contextmanager
def products() -> Iterator[list[tuple[Any, ...]]]:
    """What the builder is given for each product from now on."""
    asked: list[tuple[Any, ...]] = []
    builder = semantic().builder
    product = builder.create_dot

    def told(*args: Any) -> Any:
        asked.append(args)
        return product(*args)

    builder.create_dot = told
    try:
        yield asked
    finally:
        del builder.create_dot


def tensor_of(x: Any) -> Any:
    """The tensor of an argument of a launch."""
    return interpreter._unwrap_tensor(x)


def block_of(data: np.ndarray, dtype: tl.dtype, kind: Any) -> tl.tensor:
    """A block of a kernel with these numbers, which have Triton's dtype."""
    return tl.tensor(Handle(data.astype(getattr(*NUMPY_TYPE)(dtype)), dtype), kind)
