"""Expressions on tensors [B, T, H, n, p]: broadcasting by axis name is broadcasting by place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsf.expr import ARITHMETIC, KEY, Expr, children_first
from dsf.primitives import PRIMITIVES


class Evaluator:
    """Computes expressions under one environment, each node once.

    env: input nodes -> tensors [B, T, H, n, p]. keys, p: sizes of the Key and the Value axis.
    """

    def __init__(self, env: Mapping[Expr, Tensor], keys: int, p: int) -> None:
        self.values = dict(env)
        self.keys, self.p = keys, p
        like = next(iter(env.values()))
        self.dtype, self.device = like.dtype, like.device

    def __call__(self, root: Expr) -> Tensor:
        """The value of root, [B|1, T|1, H|1, n, p] with size one for every axis root lacks."""
        for node in children_first(root):
            if node not in self.values:
                self.values[node] = self._compute(node)
        return self.values[root]

    def _compute(self, node: Expr) -> Tensor:
        if node.op == "const":
            return self.full(node.value)
        if node.op == "size":
            return self.full(float(self.keys if node.attrs[0] == KEY else self.p))
        args: list[Tensor | float] = [self.values[a] for a in node.args]
        if node.op in ARITHMETIC:  # a literal operand stays a Python number: cheaper, and exact powers
            for place in (1,) if node.op == "pow" else (1, 0):
                other = node.args[1 - place]
                if (
                    node.args[place].is_constant
                    and not other.is_constant
                    and not (place == 0 and node.op in ("div", "sub"))
                ):
                    args[place] = node.args[place].value
                    break
            if isinstance(args[0], float):
                args = [args[1], args[0]]  # add and mul commute
        return PRIMITIVES[node.op].torch(*args, *node.attrs)

    def full(self, number: float) -> Tensor:
        """A number as a tensor that broadcasts."""
        return torch.full((1, 1, 1, 1, 1), number, dtype=self.dtype, device=self.device)
