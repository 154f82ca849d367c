"""Pairs of neighbouring key entries, (2i, 2i + 1): rotations, and transitions that mix the entries of a pair.

A turn by θ takes (x, y) to (x cos θ - y sin θ, x sin θ + y cos θ). Where decays are equal within a pair it is a gauge:
with Θ_t the sum of the angles up to t, Ŝ_t = R(-Θ_t) S_t obeys the same recurrence without turns, its keys, readouts
and corrections turned by -Θ_t. Elsewhere transitions are blocks of 2 x 2, closed under products, which a scan combines.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dsf.kernels.problem import Problem
from dsf.kernels.scan import associative_scan, combine_dense


def turned_decay(decay: Tensor, angle: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """decay and cross [..., N, p] (dsf.kernels.operators) of a decay after a turn.

    decay: [..., 1 or N, p]; angle: [..., 1 or N, 1], equal within pairs: the even place is read, as in the other
    forms, so that the gradient goes there.
    """
    angle = angle.expand(*angle.shape[:-2], n, 1)[..., ::2, :]
    cosine, sine = angle.cos(), angle.sin()
    same, signed = (torch.stack(x, dim=-2).flatten(-3, -2) for x in ((cosine, cosine), (-sine, sine)))
    return decay * same, decay * signed


def turn_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Each pair of x turned by its angle. x: [..., N, p], angle: [..., 1 or N/2, 1] -> [..., N, p]."""
    first, second = x.unflatten(-2, (-1, 2)).unbind(-2)
    cosine, sine = angle.cos(), angle.sin()
    low = torch.addcmul(cosine * first, sine, second, value=-1)
    return torch.stack([low, torch.addcmul(sine * first, cosine, second)], dim=-2).flatten(-3, -2)


def turned_back(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """`turn_pairs` by minus the angle of that cosine and sine."""
    first, second = x.unflatten(-2, (-1, 2)).unbind(-2)
    high = torch.addcmul(cosine * second, sine, first, value=-1)
    return torch.stack([torch.addcmul(cosine * first, sine, second), high], dim=-2).flatten(-3, -2)


class SumsApart(torch.autograd.Function):
    """Running sums over the tokens of each packed sequence: apply(x, which, starts, ends), x [B, T, ...].

    which: [T], the sequence of a token; starts, ends: [S], the first and last tokens of sequences. One sum runs over
    all tokens, from which each sequence subtracts what came before it. What is not finite is left out of that sum and
    put back in its own sequence, as are gradients: a NaN in one sequence reaches no other.
    """

    @staticmethod
    def forward(x: Tensor, which: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """The sums, of x's shape."""
        return _apart(x, starts.index_select(0, which))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Kept for the backward pass: the places."""
        ctx.save_for_backward(inputs[1], inputs[3])

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None, None]:
        """The same sums from the last token of every sequence to the first."""
        which, ends = ctx.saved_tensors
        first = given[0].shape[1] - 1 - ends.index_select(0, which)
        return _apart(given[0].flip(1), first.flip(0)).flip(1), None, None, None


def _apart(x: Tensor, first: Tensor) -> Tensor:
    """Running sums of x [B, T, ...] from the token `first` [T] of every token's sequence on."""
    finite = x.isfinite()
    found, spoiled = torch.where(finite, x, 0.0).cumsum(1), (~finite).cumsum(1, dtype=torch.int32)

    def begun(y: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
        return y - before.index_select(1, first)

    return torch.where(begun(spoiled) > 0, math.nan, begun(found))


class _TurnedAndRounded(torch.autograd.Function):
    """turn_pairs in x's dtype, rounded to `kind`. The angle's gradient is computed from the rounded result, since it is
    a sum over tokens of kernels' gradients for these numbers, in which most cancels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: Tensor, kind: torch.dtype) -> Tensor:
        y = turn_pairs(x, angle).to(kind).to(x.dtype)
        ctx.save_for_backward(y, angle)
        return y

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None]:
        y, angle = ctx.saved_tensors
        (first, second), (d_first, d_second) = (z.unflatten(-2, (-1, 2)).unbind(-2) for z in (y, given[0]))
        return turn_pairs(given[0], -angle), (d_second * first - d_first * second).sum_to_size(angle.shape), None


def turned_and_rounded(x: Tensor, angle: Tensor, kind: torch.dtype) -> Tensor:
    """turn_pairs in float32, rounded to `kind`. x: [..., N, p]; angle: [..., N/2 or 1, 1]."""
    return _TurnedAndRounded.apply(x, angle, kind)


def whole_turns_left_out(angle: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 angles modulo whole turns, in another dtype; float32 sums of 10^5 radians would lose 10^-2."""
    return torch.remainder(angle, 2 * math.pi).to(dtype)


def scan_pairs(problem: Problem, state: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """The scan of transitions that mix pairs, and corrections if there are any, `length` tokens at a time.

    state: [B, H, N, P] or None. Returns y [B, T, H, P] and the final state. Matrices are 2 x 2, one a pair (and channel
    where they differ), or N x N beside corrections.
    """
    current = problem.zero_state() if state is None else state
    size = length * problem.micro
    outputs = []
    rows = problem.tokens * problem.micro
    for begin in range(0, rows, size):
        count = min(size, rows - begin)
        states = _states(problem, current, begin, count)  # [B, count, H, N, P]
        first, last = begin // problem.micro, (begin + count) // problem.micro
        seen = states[:, problem.micro - 1 :: problem.micro]
        if problem.before:
            seen = torch.cat([current.unsqueeze(1), seen[:, :-1]], dim=1)
        outputs.append((problem.readout[:, first:last] * seen).sum(-2))
        current = states[:, -1]
    return problem.add_skip(torch.cat(outputs, dim=1)), current.clone()  # a view would keep all tokens' states


def _states(problem: Problem, state: Tensor, begin: int, count: int) -> Tensor:
    a = problem.transition().rows(begin, count)
    written = problem.injection()[:, begin : begin + count]
    if a.rank:
        moves = a.to_dense(problem.n)  # [B, rows, H, p, N, N]
        columns, start = written.unsqueeze(-3), state.unsqueeze(-3)
        if moves.shape[-3] > 1:
            columns, start = (x.transpose(-1, -2).unsqueeze(-1) for x in (written, state))
        found = _combined(moves, columns, start)
        return found.squeeze(-3) if moves.shape[-3] == 1 else found.squeeze(-1).transpose(-1, -2)
    moves = a.pair_blocks(problem.n)  # [B, rows, H, p, N/2, 2, 2]
    if moves.shape[-4] == 1:
        columns, start = (rearrange(x, "... (n two) p -> ... n two p", two=2) for x in (written, state))
        return rearrange(_combined(moves.squeeze(-4), columns, start), "... n two p -> ... (n two) p")
    columns, start = (rearrange(x, "... (n two) p -> ... p n two 1", two=2) for x in (written, state))
    return rearrange(_combined(moves, columns, start), "... p n two 1 -> ... (n two) p")


def _combined(moves: Tensor, columns: Tensor, start: Tensor) -> Tensor:
    """S_r of every row, from moves [.., x, x], columns and start [.., x, y]."""
    count = columns.shape[1]
    moves = moves.expand(columns.shape[0], count, columns.shape[2], *moves.shape[3:])
    first = moves[:, :1] @ start.unsqueeze(1) + columns[:, :1]
    return associative_scan(combine_dense, moves, torch.cat([first, columns[:, 1:]], dim=1))[1]
