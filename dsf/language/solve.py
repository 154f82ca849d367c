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
    """H x of all tokens. Inputs: `a` (the decay or its log; none for "one"), k0, w0, k1, ..., x; w = weight · k."""
    return _sums("products", squares, decay, read, lambda make, i: make(f"w{i}", frozenset({VALUE})))


@derived
def weighted(spec: Spec, decay: Decay) -> Spec:
    """H x and Gᵀ x of all tokens, with weights apart. Inputs: k0, w0, v0, k1, ..., x, `a`; the writes are w k vᵀ.

    It has the declaration's name, by which another process finds it.
    """
    assert spec.system.solve is not None
    return _sums(
        spec.name, len(spec.system.solve.squares), decay, spec.system.read,
        lambda make, i: make(f"w{i}", frozenset()) * make(f"v{i}", frozenset({VALUE})),
    )  # fmt: skip


Make = Callable[[str, frozenset[str]], Expr]


def _sums(
    name: str, squares: int, decay: Decay, read: Literal["after", "before"], value: Callable[[Make, int], Expr]
) -> Spec:
    """What x reads of the decayed sum of keys k0, k1, ... times values."""

    def system(make: Make, a: Expr) -> System:
        written: Expr = const(0)
        for i in range(squares):
            written = written + make(f"k{i}", frozenset({KEY})) * value(make, i)
        return System(A=_operator(a, decay), B=written, C=make("x", frozenset({KEY})), read=read)

    return _declared(name, decay, system)


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
