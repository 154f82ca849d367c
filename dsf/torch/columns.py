"""The columns of a state: of S, of the normaliser, of the running maximum, and of previous values (`prev`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsf.kernels.operators import broadcast_shape
from dsf.language.expr import KEY, VALUE, Expr, const
from dsf.language.frame import Leaf
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator


@dataclass(frozen=True)
class Columns:
    """Columns of the last axis of a state: p of S, then den of the normaliser, then gain of the running maximum."""

    p: int
    den: int
    gain: int

    @property
    def total(self) -> int:
        """The number of all columns."""
        return self.p + self.den + self.gain


def columns(spec: Spec, p: int) -> Columns:
    """The columns of the state of `spec` for P = p channels."""
    den = 0 if spec.ones is None else (p if spec.den_has_channels else 1)
    gain = 0 if not spec.is_stabilised else (p if VALUE in spec.gain_axes else 1)
    return Columns(p, den, gain)


def leaf_columns(leaf: Leaf, n: int, keys: int, p: int) -> int:
    """How many columns of n rows one value of a leaf fills."""
    return -(-leaf_size(leaf, keys, p) // n)


def leaf_size(leaf: Leaf, keys: int, p: int) -> int:
    """How many numbers one value of a leaf has."""
    return math.prod({KEY: keys, VALUE: p}[a] for a in leaf.source.axes)


def state_columns(spec: Spec, n: int, keys: int, p: int) -> int:
    """All columns of a state of `spec`: of its plain system, of H for a readout that is a solve, of previous values."""
    total = columns(spec.inner, p).total + (0 if spec.system.solve is None else n)
    if spec.frame is None:
        return total
    return total + sum(len(leaf.nodes) * leaf_columns(leaf, n, keys, p) for leaf in spec.frame.leaves)


def beside(num: Tensor, den: Tensor, layout: Columns) -> Tensor:
    """num [..., p] and den [..., den] concatenated along the last axis."""
    lead = broadcast_shape(num.shape[:-1], den.shape[:-1])
    return torch.cat([num.expand(*lead, layout.p), den.expand(*lead, layout.den)], dim=-1)


def tiled(m: Tensor, layout: Columns) -> Tensor:
    """A tensor with columns of the running maximum, repeated for num and den where it has one a channel."""
    return torch.cat([m, m], dim=-1) if m.shape[-1] > 1 and layout.den else m


def skip_columns(values: Evaluator, num: Expr, den: Expr | None, layout: Columns) -> Tensor | None:
    """D's columns [B|1, T|1, H|1, p, plus den where `den` is given], or None without a skip."""
    if num is const(0):
        return None
    main = values(num).squeeze(-2)
    if den is None:
        return main.expand(*main.shape[:-1], layout.p)
    return beside(main, values(den).squeeze(-2), layout)
