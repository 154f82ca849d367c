"""Results derived from a Spec, cached on the Spec itself: computed once, shared by copies, freed with the Spec.

Specs are also identified by content: `digest` is the same in every process that declares the same recurrence, and
`interned` makes equal declarations, copies and pickles share one Spec and its cached results.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from dsf.language.expr import Expr, children_first
from dsf.language.operator import Operator
from dsf.language.system import System, rule_of

if TYPE_CHECKING:
    from dsf.language.spec import Spec

Rest = ParamSpec("Rest")
Found = TypeVar("Found")

_specs: weakref.WeakValueDictionary[str, Spec] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def derived(
    function: Callable[Concatenate[Spec, Rest], Found],
) -> Callable[Concatenate[Spec, Rest], Found]:
    """A function of a Spec and of hashable positional arguments, whose results are kept on the Spec."""

    @functools.wraps(function)
    def kept(spec: Spec, *args: Rest.args, **kwargs: Rest.kwargs) -> Found:
        assert not kwargs, "what is kept is found by positional arguments"
        results = spec.__dict__.get("_derived")
        if results is None:
            results = spec.__dict__.setdefault("_derived", {})
        key = (function, args)
        if key not in results:  # of racing threads, all return the first one's result
            results.setdefault(key, function(spec, *args, **kwargs))
        return results[key]

    return kept


@derived
def digest(spec: Spec) -> str:
    """The hash of a declaration's name, inputs and system, without its docstring: 16 hexadecimal digits."""
    return hashlib.sha256(_content(spec).encode()).hexdigest()[:16]


def interned(spec: Spec) -> Spec:
    """The living Spec with this content; if there is none, this one becomes it."""
    with _lock:
        return _specs.setdefault(digest(spec), spec)


def by_digest(name: str) -> Spec | None:
    """The living Spec with that digest, or None."""
    return _specs.get(name)


def living(name: str) -> list[Spec]:
    """All living Specs of that name."""
    return [spec for spec in list(_specs.values()) if spec.name == name]


def _content(spec: Spec) -> str:
    """A declaration as text that depends only on its content: every node by the numbers of its operands."""
    numbers: dict[Expr, int] = {}
    lines = [spec.name, *(["made"] if spec.made else []), *(f"{i.name}: {i.kind}" for i in spec.inputs)]

    def number(x: Expr | None) -> str:
        if x is None:
            return "none"
        for node in children_first(x):
            if node not in numbers:
                numbers[node] = len(numbers)
                args = [numbers[a] for a in node.args]
                lines.append(f"{node.op} {args} {node.attrs!r} {sorted(node.axes)} {node.features}")
        return str(numbers[x])

    def operator(x: Operator) -> str:
        return f"{x.kind}({', '.join([*map(operator, x.parts), *map(number, x.exprs)])})"

    def system(s: System) -> str:
        drive = s.drive if isinstance(s.drive, tuple) else (s.drive,)
        rule = None if s.normalize is None else rule_of(s.normalize)
        parts = [operator(s.A), *map(number, (s.B, s.C, s.D, rule, s.gauge, *drive)), s.read]
        parts += [] if s.window is None else [f"window {s.window}"]
        parts += [] if s.solve is None else ["solve", *map(number, s.solve.exprs), f"steps {s.solve.steps}"]
        parts += ["unseen", *map(number, s.unseen)] if s.unseen else []
        return f"system {' '.join(parts)}"

    steps = [system(s) for s in spec.system.micro_steps]
    return "\n".join([*lines, *steps])
