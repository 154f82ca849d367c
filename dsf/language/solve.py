"""Readouts by a solve, y = Gᵀ (H + Λ)⁻¹ C: the `Solve` of a System, from `dsf.learn(by="exact")`, and its parts.

H_t = a_t H_{t-1} + Σ weight · key keyᵀ is a plain system whose values are its keys. So H_t x is its output for the
query x, for all tokens at once in any form, and one step of conjugate gradients is one call of that system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from dsf.language.annotations import Input, Kind
from dsf.language.derived import derived, interned
from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.language.frame import needs_frame, roots_of
from dsf.language.functions import exp
from dsf.language.operator import I
from dsf.language.spec import Spec
from dsf.language.system import System

Decay = Literal["one", "plain", "log"]


@dataclass(frozen=True, eq=False)
class Solve:
    """A solve of the readout: x = (H + diag(ridge))⁻¹ C reads the state in place of C.

    squares: (key, weight) of H, weights Scalars of at least 0. ridge: Λ, positive, a Key or a Scalar. steps: the number
    of conjugate gradient steps in float32.
    """

    squares: tuple[tuple[Expr, Expr], ...]
    ridge: Expr
    steps: int

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression."""
        return *(x for square in self.squares for x in square), self.ridge

    def __str__(self) -> str:
        hessian = " + ".join(f"{weight} * outer({key}, {key})" for key, weight in self.squares)
        return f"(H + diag({self.ridge}))^-1, H the decayed sum of {hessian}"


def check_solve(spec: Spec) -> None:
    """Check the whole System of a solve. Raises TraceError."""
    solve = spec.system.solve
    if solve is None:
        return
    if needs_frame(spec):
        raise TraceError("by='exact' takes no turn, prev or Pair; make what they would give an input of its own")
    kinds = {x.features for x in (spec.readout, *solve.exprs)}
    if kinds != {None}:
        raise TraceError(
            f"by='exact' solves for N numbers, and {', '.join(sorted(k for k in kinds if k))} features have another "
            "number of entries; give them as Key inputs"
        )
    if spec.readout.axes != {KEY}:
        raise TraceError(f"C = {spec.readout} is solved with, so it must be a Key, one for all channels")


@derived
def reads_of(spec: Spec) -> tuple[Spec, str]:
    """The System with an input in place of C and of the solve, and that input's name."""
    name = "x"
    while name in {i.name for i in spec.inputs}:
        name += "_"
    x = Expr("input", (), (name, None), frozenset({KEY}))
    system = replace(spec.system, C=x, solve=None)
    used = {n.attrs[0] for n in inputs_of(*roots_of(system))}
    inputs = (*(i for i in spec.inputs if i.name in used), Input(name, Kind(frozenset({KEY}))))
    return _spec(f"{spec.name} (read)", inputs, system), name


@lru_cache(maxsize=64)
def products(squares: int, decay: Decay, read: Literal["after", "before"]) -> Spec:
    """H x of all tokens. Inputs: k0, v0, w0, k1, ..., x and `a` (the decay or its log; none for "one"); v = k."""

    def system(make: Callable[[str, frozenset[str]], Expr], a: Expr) -> System:
        written: Expr = const(0)
        for i in range(squares):
            key, value = make(f"k{i}", frozenset({KEY})), make(f"v{i}", frozenset({VALUE}))
            written = written + key * (make(f"w{i}", frozenset()) * value)
        return System(A=_operator(a, decay), B=written, C=make("x", frozenset({KEY})), read=read)

    return _declared("products", decay, system)


@lru_cache(maxsize=64)
def diagonal(decay: Decay, read: Literal["after", "before"]) -> Spec:
    """The diagonal of H of all tokens. Inputs: `a` as in `products`, w = Σ weight · k²."""
    return _declared(
        "diagonal", decay,
        lambda make, a: System(A=_operator(a, decay), B=make("w", frozenset({VALUE})), C=1, read=read),
    )  # fmt: skip


def _operator(a: Expr, decay: Decay) -> object:
    return {"one": I, "plain": a, "log": exp(a)}[decay]


def _declared(name: str, decay: Decay, system: Callable[..., System]) -> Spec:
    inputs: list[Input] = []

    def make(name: str, axes: frozenset[str]) -> Expr:
        inputs.append(Input(name, Kind(axes)))
        return Expr("input", (), (name, None), axes)

    made = system(make, Expr("input", (), ("a", None), frozenset()))
    if decay != "one":
        inputs.append(Input("a", Kind(frozenset())))
    return _spec(name, tuple(inputs), made)


def _spec(name: str, inputs: tuple[Input, ...], system: System) -> Spec:
    return interned(Spec(name, "", inputs, system))
