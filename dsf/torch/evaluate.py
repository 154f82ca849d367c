"""Evaluates expressions on tensors [B, T, H, n, p], in which every named axis has a fixed position."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dsf.language.expr import ARITHMETIC, KEY, Expr, children_first, const
from dsf.language.primitives import PRIMITIVES

DISTURBANCE = 2.0**-26  # far above the rounding of float64, small enough for a linear response
_disturbing: ContextVar[tuple[torch.Generator, float] | None] = ContextVar("disturbing", default=None)


@contextmanager
def disturbed(seed: int, share: float = DISTURBANCE) -> Iterator[None]:
    """Inside, every computed expression and its gradient changes by that share of itself, up or down at random. The
    change of a result then shows its condition number."""
    token = _disturbing.set((torch.Generator().manual_seed(seed), share))
    try:
        yield
    finally:
        _disturbing.reset(token)


@functools.lru_cache(maxsize=256)
def number_of(x: Expr, keys: int, p: int) -> float:
    """The value of an expression without inputs, undisturbed; also while a graph is traced, whose tensors have none."""
    token = _disturbing.set(None)
    try:
        with _disable_current_modes():
            zero = torch.zeros((), dtype=torch.float64, device="cpu")
            return float(Evaluator({const(0): zero}, keys, p)(x))
    finally:
        _disturbing.reset(token)


class _Disturbed(torch.autograd.Function):
    """x times one factor, its gradient times another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x * there

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return given[0] * back, None, None


def _below(root: Expr) -> tuple[Expr, ...]:
    """The nodes below root that are no constants, each after its operands; kept on root, as every call needs them."""
    try:
        return root._below
    except AttributeError:
        root._below = tuple(x for x in children_first(root)[:-1] if not x.is_constant)
        return root._below


class Evaluator:
    """Computes expressions in one environment, each node once.

    env: input nodes -> tensors [B, T, H, n, p]. keys, p: sizes of the Key and the Value axis.
    """

    def __init__(self, env: Mapping[Expr, Tensor], keys: int, p: int) -> None:
        self.values = dict(env)
        self.keys, self.p = keys, p
        like = next(iter(env.values()))
        self.dtype, self.device = like.dtype, like.device

    def __call__(self, root: Expr) -> Tensor:
        """The value of root, [B|1, T|1, H|1, n, p], of size one along axes that root lacks."""
        if root.is_constant or root in self.values:
            return self._value(root)
        for node in (*_below(root), root):
            if node not in self.values:
                self.values[node] = self._disturb(self._compute(node))
        return self.values[root]

    @staticmethod
    def _disturb(x: Tensor) -> Tensor:
        disturbing = _disturbing.get()
        if disturbing is None:
            return x
        generator, share = disturbing
        there, back = (2.0 * torch.randint(2, (2, *x.shape), generator=generator, dtype=torch.float64) - 1) * share
        return _Disturbed.apply(x, (1 + there).to(x), (1 + back).to(x))

    def _compute(self, node: Expr) -> Tensor:
        if node.op == "size":
            return self.full(float(self.keys if node.attrs[0] == KEY else self.p))
        if node.op == "pair":
            return PRIMITIVES["pair"].torch(*map(self._value, node.args), self.keys)
        if node.op in ARITHMETIC:  # a literal operand stays a Python number: cheaper, and exact powers
            a, b = (x.value if x.is_constant else self.values[x] for x in node.args)
            return ARITHMETIC[node.op](a, b)
        return PRIMITIVES[node.op].torch(*map(self._value, node.args), *node.attrs)

    def _value(self, node: Expr) -> Tensor:
        return self.full(node.value) if node.is_constant else self.values[node]

    def full(self, number: float) -> Tensor:
        """A number as a tensor [1, 1, 1, 1, 1]."""
        return torch.full((1, 1, 1, 1, 1), number, dtype=self.dtype, device=self.device)


def stack_rows(rows: list[Tensor]) -> Tensor:
    """M tensors, one a micro-step, each [B|1, T|1, ...] -> one tensor of rows [B|1, T·M, ...]."""
    if len(rows) == 1:
        return rows[0]
    rows = list(torch.broadcast_tensors(*rows))
    return torch.stack(rows, dim=2).flatten(1, 2)
