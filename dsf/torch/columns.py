"""The columns of a state: of S, of a normaliser, of its running maximum, and of what `prev` remembers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsf.language.expr import KEY, VALUE, Expr, const
from dsf.language.frame import Leaf
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator


@dataclass(frozen=True)
class Columns:
    """Layout of the last state axis: p columns of S, den of the normaliser's state, gain of the running maximum."""

    p: int
    den: int
    gain: int

    @property
    def total(self) -> int:
        """All columns."""
        return self.p + self.den + self.gain


def columns(spec: Spec, p: int) -> Columns:
    """How many columns of each kind the state of `spec` has for P = p channels."""
    den = 0 if spec.ones is None else (p if spec.den_has_channels else 1)
    gain = 0 if not spec.is_stabilised else (p if VALUE in spec.gain_axes else 1)
    return Columns(p, den, gain)


def leaf_columns(leaf: Leaf, n: int, keys: int, p: int) -> int:
    """Columns of a state of n rows that one value of a leaf takes."""
    return -(-leaf_size(leaf, keys, p) // n)


def leaf_size(leaf: Leaf, keys: int, p: int) -> int:
    """Numbers of one value of a leaf."""
    return math.prod({KEY: keys, VALUE: p}[a] for a in leaf.source.axes)


def state_columns(spec: Spec, n: int, keys: int, p: int) -> int:
    """All columns of a state of `spec`: of its plain system, of what readouts are solved with, of what `prev` keeps."""
    total = columns(spec.inner, p).total + (0 if spec.system.solve is None else n)
    if spec.frame is None:
        return total
    return total + sum(len(leaf.nodes) * leaf_columns(leaf, n, keys, p) for leaf in spec.frame.leaves)


def beside(num: Tensor, den: Tensor, layout: Columns) -> Tensor:
    """[..., p] and [..., den] as columns of one tensor."""
    lead = torch.broadcast_shapes(num.shape[:-1], den.shape[:-1])
    return torch.cat([num.expand(*lead, layout.p), den.expand(*lead, layout.den)], dim=-1)


def tiled(m: Tensor, layout: Columns) -> Tensor:
    """The running maximum's columns for num and den side by side."""
    return torch.cat([m, m], dim=-1) if m.shape[-1] > 1 and layout.den else m


def skip_columns(values: Evaluator, num: Expr, den: Expr | None, layout: Columns) -> Tensor | None:
    """D's columns [B|1, T|1, H|1, p], or None when there is no skip."""
    if num is const(0):
        return None
    main = values(num).squeeze(-2)
    if den is None:
        return main.expand(*main.shape[:-1], layout.p)
    return beside(main, values(den).squeeze(-2), layout)
