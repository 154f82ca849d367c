"""What to write in place of what expressions do not take: the second half of many errors' words."""

from __future__ import annotations

import difflib
import re
import sys
from typing import Any

from torch import Tensor

from dsf.language.errors import InputError

FUNCTIONS: set[str] = set()  # names of dsf.language.functions
_OF_AXES = {"T", "mT", "H", "mH", "t", "transpose", "permute", "movedim", "unsqueeze", "squeeze", "view", "reshape"}
OF_NUMPY = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "power": "pow"}
OF_NUMPY |= {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"}


def instead_of(text: str, name: str) -> str:
    """Of a tensor's attribute or method; text: the expression that it was asked of."""
    if name in _OF_AXES:
        return (
            "expressions have no order of axes, which meet by name; k * v of a Key and a Value is the outer product, "
            "dot(a, b) the inner one over the Key axis, outer(a, b) the operator a bᵀ"
        )
    if name in ("shape", "size", "ndim", "dim", "numel"):
        return "expressions have no shape; N and P are the sizes of the Key and the Value axis"
    if name in ("sum", "mean", "norm"):
        return f"write sum_key({text}) or sum_value({text}), or l2norm({text}) for a Key of unit length"
    if name in FUNCTIONS:
        return f"write {name}({text})"
    return f"expressions have no {name!r}; they take + - * / ** and comparisons, and go into dsf's functions"


def counted(text: str) -> str:
    """Of a number that Python asks an expression for."""
    return (
        f"`{text}` has no number while the recurrence is declared: dsf's own functions (exp, ...) take it, Python's do "
        "not, and what is counted (loops, micro-steps) is a number of Python's own"
    )


def foreign(library: str, name: str) -> str:
    """Of another library's function."""
    own = {"normalize": "l2norm"}.get(name, name)
    write = f"write dsf.{own}" if own in FUNCTIONS else "use dsf's own functions"
    return f"{library}.{name} does not take expressions, which have no numbers yet; {write}"


def no_number(x: Any) -> str:
    """Of what is neither an expression nor a number."""
    found = f"expected an expression or a number, got {type(x).__name__}: {x!r}"
    if (
        isinstance(x, tuple)
        and x
        and all(getattr(part, "op", "") == "input" and part.attrs[1] is not None for part in x)
    ):
        name = x[0].attrs[0]
        return f"{found}; `{name}` has an expression for each of its {len(x)} micro-steps: {name}[0] is the first"
    if isinstance(x, tuple | list):
        return (
            f"{found}; several writes or reads are a sum, k1 * v1 + k2 * v2 or q + gate * p, and several steps of a "
            "token compose(first, second)"
        )
    if isinstance(x, complex):
        return f"{found}; complex numbers are pairs of key entries: turn(angle), pair(re, im), quarter_turn(x)"
    if isinstance(x, Tensor):
        return f"{found}; give tensors as inputs (Param[...] for those of no token), plain numbers as they are"
    return f"{found}; 0 is nothing" if x is None else found


def told(error: Exception) -> str:
    """An error's words and what to write instead, in place of the guess that Python 3.13 adds to its own."""
    more = hint(error)
    return f"{error}".partition(". Did you mean ")[0] + more if more else f"{error}"


def hint(error: Exception) -> str:
    """Behind the words of one of Python's own errors, or nothing."""
    known = getattr(sys.modules.get("dsf"), "__all__", ())
    name = getattr(error, "name", None)
    if isinstance(error, NameError) and name in known:
        return f"; from dsf import {name}"
    of_dsf = isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == "dsf"
    if name and (isinstance(error, NameError) or of_dsf):
        near = difflib.get_close_matches(name, known, cutoff=0.5)
        return f"; near names of dsf: {', '.join(near)}" if near else ""
    if isinstance(error, InputError):
        return "; recurrences are called on tensors: call this one before, and give its y as an input"
    if isinstance(error, IndexError):
        return "; of Steps[..., n] inputs there are n, the first at 0"
    if isinstance(error, TypeError) and str(error).startswith("System.__init__()"):
        return "; it is System(A, B, C, D=0, read='after', normalize=None, gauge=None, drive=None, window=None)"
    if isinstance(error, TypeError) and re.search(r"(for|unary) [&|~]", str(error)):
        return "; a condition is one comparison: where(a > 0, where(b > 0, x, y), y) is x where both hold"
    if isinstance(error, TypeError) and "for ** or pow(): 'Operator'" in str(error):
        return "; a power of an operator is a product, A @ A"
    return ""
