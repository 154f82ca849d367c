"""Measures of the state: norms along the sequence, gates, sizes, and the work of each form."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsf.analysis.measures.kernel import entropy_rank
from dsf.analysis.measures.norms import singular_values
from dsf.call.bind import Sizes, state_keys
from dsf.call.cost import cache_angles, cache_shape
from dsf.call.plan import Plan
from dsf.call.recurrence import Recurrence
from dsf.kernels.phi import injection_row
from dsf.language.errors import InputError
from dsf.trajectory import Trajectory


def state_norms(trajectory: Trajectory) -> Tensor:
    """The Frobenius norm of S_t, [B, T, H]. Runs the recurrence token by token, with one state in memory."""
    return torch.stack([s.flatten(2).norm(dim=-1) for s in trajectory.walk()], dim=1)


def state_change(trajectory: Trajectory) -> Tensor:
    """‖S_t - S_{t-1}‖ / ‖S_{t-1}‖ from the second token on, [B, T - 1, H], without unit: 0 where the state stays zero,
    inf where it was zero before. Raises InputError for a single token.
    """
    out, before = [], None
    for state in trajectory.walk():
        if before is not None:
            moved = (state - before).flatten(2).norm(dim=-1)
            out.append(torch.where(moved == 0, 0.0, moved / before.flatten(2).norm(dim=-1)))
        before = state
    if before is None or not out:
        raise InputError(f"{trajectory.spec.name}: a change of state needs at least two tokens")
    return torch.stack(out, dim=1)


def effective_rank(trajectory: Trajectory, every: int = 1) -> Tensor:
    """The effective rank of S_t, [B, ⌊T / every⌋, H]: exp of the entropy of its singular values divided by their sum.

    every: tokens from one measurement to the next. A measurement takes an SVD of an N x P matrix for each head. Source:
    Roy & Vetterli (2007); arXiv 2602.02195. Raises InputError for an `every` outside 1 … T.
    """
    if every < 1:
        raise InputError(f"effective_rank: every is {every}, expected at least 1")
    out = [
        entropy_rank(singular_values(s)) for t, s in enumerate(trajectory.walk(), 1) if t % every == 0
    ]  # fmt: skip
    if not out:
        raise InputError(f"{trajectory.spec.name}: every = {every} skips all {trajectory.tokens} tokens")
    return torch.stack(out, dim=1)


class Gates(NamedTuple):
    """Gate strengths of every token and head, [B, T, H] each, without unit.

    decay: the mean |decay| of the state's entries (of turned pairs √|det|); 1 for a system that keeps everything.
    erase: 1 - |det A| / |det decay|, the share that corrections remove. It is β|k|² for the delta family, 0 without
      corrections, and 0 where a decay of 0 leaves nothing to remove.
    write: ‖B_t‖, the Frobenius norm.
    """

    decay: Tensor
    erase: Tensor
    write: Tensor


class _Pairs(NamedTuple):
    """The decays of turned pairs: decay [..., N, p], √|det| of both entries; inverse [..., p, N / 2, 2, 2], of what a
    decay of 0 leaves (Moore and Penrose's), times `scale` [..., p, N / 2, 1, 1], which may be very small.
    """

    decay: Tensor
    inverse: Tensor
    scale: Tensor

    @classmethod
    def of(cls, blocks: Tensor) -> _Pairs:
        """Of the matrices of pairs [..., p, N / 2, 2, 2]."""
        scale = blocks.abs().amax((-1, -2), keepdim=True)
        unit = torch.where(scale == 0, 0.0, blocks / scale)
        (a, b), (c, d) = (row.unbind(-1) for row in unit.unbind(-2))
        det = (a * d - b * c)[..., None, None]
        other = torch.stack([torch.stack([d, -b], -1), torch.stack([-c, a], -1)], -2)
        square = unit.square().sum((-1, -2), keepdim=True)
        single = torch.where(square == 0, 0.0, unit.mT / square)  # of rank one
        decay = (det.abs().sqrt() * scale).squeeze(-1).expand(*scale.shape[:-2], 2).flatten(-2).mT
        return cls(decay, torch.where(det == 0, single, other / det), scale)

    def undo(self, x: Tensor) -> Tensor:
        """Vectors [..., r, N, p] before the decays; 0 where these leave nothing."""
        parts = x.mT.unflatten(-1, (-1, 2)).unsqueeze(-1)
        found = self.inverse.unsqueeze(-5) @ parts
        scale = self.scale.unsqueeze(-5)
        return torch.where(scale == 0, 0.0, found / scale).squeeze(-1).flatten(-2).mT


def gate_strengths(trajectory: Trajectory) -> Gates:
    """How strongly each token decays, erases and writes. Of several micro-steps, decays and what erasures leave are
    multiplied, writes are added. Raises FormError for attention and windows, which have no state of fixed size.
    """
    n = trajectory.state_size[0]  # FormError where A, B and C are not tensors
    a, problem = trajectory.transition, trajectory.problem
    assert problem is not None
    micro, tokens, heads = problem.micro, trajectory.tokens, trajectory.heads
    lead = (trajectory.batch, tokens * micro, heads)
    pairs = None if a.cross is None else _Pairs.of(a.pair_blocks(n))
    decay = a.decay if pairs is None else pairs.decay
    decay = decay.expand(*lead, *decay.shape[3:])
    kept = torch.ones(lead, dtype=decay.dtype, device=decay.device)
    if a.left is not None and a.right is not None:
        left = a.left.expand(*lead, *a.left.shape[3:])
        whole = decay.unsqueeze(-3)
        left = torch.where(whole == 0, 0.0, left / whole) if pairs is None else pairs.undo(left)
        small = torch.einsum("...rnp,...snp->...prs", *torch.broadcast_tensors(a.right, left))
        small = small + torch.eye(small.shape[-1], dtype=small.dtype, device=small.device)
        kept = torch.linalg.det(small).abs().mean(-1)
    write = torch.stack([injection_row(problem, r).flatten(2).norm(dim=-1) for r in range(lead[1])], dim=1)
    return Gates(
        decay.abs().mean((-1, -2)).unflatten(1, (tokens, micro)).prod(2),
        1 - kept.unflatten(1, (tokens, micro)).prod(2),
        write.unflatten(1, (tokens, micro)).sum(2),
    )


@dataclass(frozen=True)
class StateSize:
    """How many numbers a layer keeps for one sequence, and their bytes.

    recurrent: numbers of states; for attention those of keys and values, which grow with the context. conv: numbers of
    short convolutions. width: bytes of a number.
    """

    recurrent: int
    conv: int
    width: int

    @property
    def numbers(self) -> int:
        """How many numbers there are in all: recurrent + conv."""
        return self.recurrent + self.conv

    @property
    def bytes(self) -> int:
        """Their bytes: numbers · width."""
        return self.numbers * self.width


def state_size(
    recurrence: Recurrence,
    context: int = 0,
    *,
    heads: int,
    N: int = 1,
    P: int = 1,
    key_heads: int | None = None,
    conv: int = 0,
    window: int | None = None,
    width: int = 4,
) -> StateSize:
    """The size of a recurrence's state for one sequence after `context` tokens.

    heads, N, P: of the recurrence.
    key_heads: heads of keys and values in a KVCache; None: heads.
    conv: numbers that a convolution keeps, channels · (taps - 1).
    window: tokens that a KVCache keeps; None: the declaration's window, or all.
    width: bytes of a number.

    For attention and windows this is a KVCache: key_heads · (N + P) numbers for each token that it keeps, a number for
    each of its biases where there are decays or gains, and with turns the sums of angles. Other states have heads ·
    rows · columns numbers for any context. Raises InputError for a context below 0.
    """
    if context < 0:
        raise InputError(f"state_size: context is {context}, expected at least 0")
    spec = recurrence.spec
    if spec.is_attention:
        kept = context if window is None else min(context, window)
        shared = [i.name for i in spec.inputs if i.kind.time and i.kind.axes] if key_heads else []
        sizes = Sizes(1, kept, heads, N, state_keys(spec, N), P, dict.fromkeys(shared, key_heads or heads))
        return StateSize(math.prod(cache_shape(spec, sizes)) + cache_angles(spec, sizes), conv, width)
    rows, columns = recurrence.state_shape(N=N, P=P)
    return StateSize(heads * rows * columns, conv, width)


@dataclass(frozen=True)
class Cost:
    """The work of one form for one token. flops: additions and multiplications. bytes: of inputs, outputs and a share
    of the state.
    """

    form: str
    flops: float
    bytes: float


def costs(
    recurrence: Recurrence,
    *,
    T: int = 2048,
    heads: int = 1,
    N: int = 64,
    P: int = 64,
    dtype: torch.dtype = torch.float32,
) -> list[Cost]:
    """The `Cost` of one token in each form of a recurrence, from its plans (`Plan` says what is counted).

    T, heads, N, P, dtype: of the inputs. Bytes include inputs and outputs once. The recurrent form reads and writes its
    state at every token (attention reads all keys and values so far, and writes the token's), the chunk form once a
    chunk. The kernel form reads a row of T weights.
    """
    found = []
    for form in recurrence.forms:
        plan = recurrence.plan(T=T, H=heads, N=N, P=P, dtype=dtype, form=form)
        per_token = plan.bytes / T
        if form == "kernel":
            per_token += heads * T * 4
        elif form in ("recurrent", "naive"):
            per_token += statistics.fmean(step_bytes(plan, t) for t in range(1, T + 1))
        elif plan.chunk == 0:
            per_token += 2 * plan.state_bytes / (T if recurrence.spec.is_attention else 1)
        else:
            per_token += 2 * plan.state_bytes / plan.chunk
        found.append(Cost(form, plan.flops / T, per_token))
    return found


def step_bytes(plan: Plan, tokens: int) -> float:
    """Bytes of the state that a step reads and writes after `tokens` tokens. plan: of a call."""
    if len(plan.state_shape) > 3:
        return 2 * plan.state_bytes
    kept = plan.state_shape[1]  # a cache [B, tokens, numbers a token], of which the token's own are written
    return plan.state_bytes / kept * (min(tokens, kept) + 1)


def parameter_count(module: nn.Module) -> int:
    """How many trainable numbers a module has, shared ones once."""
    return sum(p.numel() for p in module.parameters())


__all__ = [
    "Cost", "Gates", "StateSize", "costs", "effective_rank", "gate_strengths", "parameter_count", "state_change",
    "state_norms", "state_size",
]  # fmt: skip
