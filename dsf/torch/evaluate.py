"""Expressions on tensors [B, T, H, n, p]: broadcasting by axis name is broadcasting by place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsf.language.expr import ARITHMETIC, KEY, Expr, children_first
from dsf.language.primitives import PRIMITIVES


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
            if node not in self.values and not node.is_constant:
                self.values[node] = self._compute(node)
        return self._value(root)

    def _compute(self, node: Expr) -> Tensor:
        if node.op == "size":
            return self.full(float(self.keys if node.attrs[0] == KEY else self.p))
        if node.op in ARITHMETIC:  # a literal operand stays a Python number: cheaper, and exact powers
            a, b = (x.value if x.is_constant else self.values[x] for x in node.args)
            return ARITHMETIC[node.op](a, b)
        return PRIMITIVES[node.op].torch(*map(self._value, node.args), *node.attrs)

    def _value(self, node: Expr) -> Tensor:
        return self.full(node.value) if node.is_constant else self.values[node]

    def full(self, number: float) -> Tensor:
        """A number as a tensor that broadcasts."""
        return torch.full((1, 1, 1, 1, 1), number, dtype=self.dtype, device=self.device)
