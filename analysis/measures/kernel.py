"""The kernel matrix Phi of a system, and measures of what it attends to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsf.call.recurrence import Recurrence
from dsf.kernels.attention import spread_heads
from dsf.kernels.phi import attention_scores
from dsf.language.errors import InputError
from dsf.trajectory import Trajectory


def kernel_matrix(trajectory: Trajectory) -> Tensor:
    """The kernel matrix Phi [B, H, T, S, p], with y = Phi · u: entry (i, j) is the weight of input u_j in output y_i.

    It is exact for every system, with erasure, quotients, bonuses and skips; for attention it is the attention matrix.
    S is T times the micro-steps of a token. If no single input drives the system, it is this times the terms that a
    step writes; for attention it is the number of keys. p is P where channels differ, else 1. Source: DSF (arXiv
    2405.15731), equation 12.
    """
    return trajectory.kernel_matrix()


def output(trajectory: Trajectory) -> Tensor:
    """y = Phi · u, [B, T, H, P]: the recurrence's output from a zero state, computed with the kernel matrix.

    Raises InputError for a system without a single driving input.
    """
    phi = trajectory.kernel_matrix()
    if trajectory.attention is not None:
        u = spread_heads(trajectory.attention.v, trajectory.heads)
    elif trajectory.drive is not None:
        u = trajectory.drive.transpose(1, 2)
    else:
        raise InputError(f"{trajectory.spec.name}: the system has no single driving input to multiply Phi with")
    if phi.shape[-1] == 1:
        return (phi.squeeze(-1) @ u).transpose(1, 2)
    return torch.einsum("bhijp,bhjp->bihp", phi, u)


def attention_map(trajectory: Trajectory, phi: Tensor | None = None) -> Tensor:
    """The share of every token in each output, [B, H, T, S], a picture of attention: |Phi| averaged over channels and
    summed over a token's columns, each row scaled to sum 1. S is T; for attention it is the number of keys.

    The absolute value makes systems with signed weights comparable with softmax (HiddenMambaAttn, arXiv 2403.01590).
    phi: kernel_matrix(trajectory), if it is known already.
    """
    weights = _tokens(_phi(trajectory, phi).abs().mean(-1), trajectory)
    return weights / _nonzero(weights.sum(-1, keepdim=True))


def mean_distance(trajectory: Trajectory, phi: Tensor | None = None) -> Tensor:
    """The mean distance, in tokens, of the inputs of output i: Σ_j |Phi_ij| |i - j| / Σ_j |Phi_ij|, [B, H, T, p].

    Only attention in both directions has inputs after the output, too. phi: kernel_matrix(trajectory), if it is known
    already. Source: arXiv 2406.14528.
    """
    weights = _tokens(_phi(trajectory, phi).abs(), trajectory, axis=3)
    tokens, places = weights.shape[2], weights.shape[3]
    own = torch.arange(tokens, device=weights.device) + _past(trajectory)
    age = (own[:, None] - torch.arange(places, device=weights.device)[None]).abs().to(weights.dtype)
    return (weights * age[..., None]).sum(3) / _nonzero(weights.sum(3))


class EffectiveStateSize(NamedTuple):
    """Effective state sizes in numbers, [B, H, len(at), p] each.

    tolerance: how many singular values of H_i lie above the tolerance. entropy: exp of the entropy of the singular
    values divided by their sum.
    """

    tolerance: Tensor
    entropy: Tensor


def effective_state_size(
    trajectory: Trajectory, at: Sequence[int] | None = None, tolerance: float = 1e-3, phi: Tensor | None = None
) -> EffectiveStateSize:
    """Effective state size: how many numbers of the past the future depends on, from the ranks of H_i = Phi[i:, :i].

    at: the tokens i, 1 ≤ i < T; None: the middle one. tolerance: relative to H_i's largest singular value.
    phi: kernel_matrix(trajectory), if it is known already.

    For each channel it is at most N for a state of N rows, at most K - 1 for a convolution of K taps, and up to
    min(i, T - i) for softmax. Source: Parnichkun et al. (arXiv 2504.19561). Raises InputError for a token outside
    1 … T - 1, for no token, and for a Phi with numbers that are not finite.
    """
    if at is not None and not len(at):
        raise InputError("effective_state_size: at names no token")
    phi = _phi(trajectory, phi).movedim(-1, 2)  # [B, H, p, T, S]
    tokens, each, past = phi.shape[3], _columns(trajectory, phi.shape[4]), _past(trajectory)
    spots = [tokens // 2] if at is None else list(at)
    counts, entropies = [], []
    for i in spots:
        if not 1 <= i < tokens:
            raise InputError(f"effective_state_size: token {i} has no past or no future; expected 1 ≤ i < {tokens}")
        part = phi[..., i:, : past + i * each]
        if not bool(part.isfinite().all()):
            raise InputError(f"effective_state_size: Phi has numbers that are not finite, at or behind token {i}")
        sigma = torch.linalg.svdvals(part)
        counts.append((sigma > tolerance * sigma[..., :1]).sum(-1))
        entropies.append(entropy_rank(sigma))
    return EffectiveStateSize(torch.stack(counts, 2), torch.stack(entropies, 2))


def entropy_rank(sigma: Tensor) -> Tensor:
    """exp(-Σ p log p) of p = σ / Σσ over the last axis: between 1 and the number of values; 0 for all zeros."""
    total = sigma.sum(-1, keepdim=True)
    p = sigma / _nonzero(total)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return torch.where(total.squeeze(-1) == 0, 0.0, entropy.exp())


def phi_distance(a: Trajectory, b: Trajectory) -> Tensor:
    """The relative distance of two kernel matrices, ‖Phi_a - Phi_b‖ / ‖Phi_a‖ (Frobenius norms), [B, H], without unit.
    Both have the same B, T and H; channels broadcast.
    """
    one, other = torch.broadcast_tensors(a.kernel_matrix(), b.kernel_matrix())
    return (one - other).flatten(2).norm(dim=-1) / _nonzero(one.flatten(2).norm(dim=-1))


def special_case(
    general: Recurrence,
    special: Recurrence,
    inputs: Mapping[str, Tensor],
    translate: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> float:
    """How far `special` is from `general` on translated inputs: the largest |difference| of outputs, divided by their
    range. In float64 it is about 1e-15 where special is a case of general.

    inputs: of special, by name. translate: a function that computes general's inputs from these, such as those of Gated
    DeltaNet with alpha = 1 from DeltaNet's.
    """
    given: dict[str, Any] = dict(translate(inputs))
    own: dict[str, Any] = dict(inputs)
    y, expected = general(**given), special(**own)
    return float((y - expected).abs().max() / (expected.max() - expected.min()))


def embed(trajectory: Trajectory, n: int) -> Trajectory:
    """A trajectory with the same outputs and a state of n rows. C is 0 in the added rows, so they are not read.

    The added rows are written as the first row is, so that they are not empty; corrections do not change them. Source:
    DSF (arXiv 2405.15731), Lemma 2. Raises InputError for n below the present size, and for an odd n where the Key axis
    holds pairs.
    """
    size = trajectory.state_size[0]
    if n < size:
        raise InputError(f"{trajectory.spec.name}: cannot be embedded in {n} rows, its state has {size} rows")

    if trajectory.problem is not None and trajectory.problem.cross is not None and n % 2:
        raise InputError(f"{trajectory.spec.name}: turns take rows in pairs, so it embeds in an even number, not {n}")

    def wide(x: Tensor | None, axis: int, zero: bool) -> Tensor | None:
        if x is None:
            return None
        if x.shape[axis] != size:
            x = x.expand(*x.shape[:axis], size, *([] if axis == -1 else x.shape[axis + 1 :]))
        fresh = x.narrow(axis, 0, 1)
        shape = list(x.shape)
        shape[axis] = n - size
        return torch.cat([x, torch.zeros_like(fresh).expand(shape) if zero else fresh.expand(shape)], dim=axis)

    def problem(p):  # type: ignore[no-untyped-def]
        left, right = (wide(p.full_left(), -2, True), wide(p.full_right(), -2, True)) if p.rank else (None, None)
        return replace(
            p, n=n, decay=wide(p.decay, -2, False), readout=wide(p.readout, -2, True), left=left, right=right,
            tie=None, key=wide(p.key, -1, False), dense=wide(p.dense, -2, False),
            cross=wide(p.cross, -2, True),
        )  # fmt: skip

    return replace(
        trajectory,
        problem=problem(trajectory.problem),
        unit=None if trajectory.unit is None else problem(trajectory.unit),
        initial_state=None,
    )


def taylor_error(trajectory: Trajectory, orders: Sequence[int]) -> list[float]:
    """The errors of softmax attention with exponential features up to degree r, for each r of orders.

    An error is the largest |difference| of outputs, divided by the range of the exact outputs. Source: DSF (arXiv
    2405.15731), Lemma 1. Raises InputError for a trajectory that is not plain softmax attention (one with a bias, a
    decay, a sink or a finite state), for negative orders, and for no orders.
    """
    if not orders or min(orders) < 0:
        raise InputError(f"taylor_error: orders are {list(orders)}, expected at least one, from 0 on")
    attention = trajectory.attention
    parts = () if attention is None else (attention.sink, attention.bias, attention.share, attention.skip)
    if attention is None or not attention.exponential or any(x is not None for x in parts):
        raise InputError(f"{trajectory.spec.name}: a Taylor truncation needs plain softmax attention")
    expected = output(trajectory)
    keys, values = (spread_heads(x, trajectory.heads) for x in (attention.k, attention.v))
    scores = attention_scores(attention.a, keys, attention.seen)
    seen = scores > -math.inf  # not weights > 0, which vanish for keys far below the largest
    scores = torch.where(seen, scores, 0.0)
    series, term, errors = torch.ones_like(scores), torch.ones_like(scores), {}
    for order in range(max(orders) + 1):
        if order:
            term = term * scores / order
            series = series + term
        weights = torch.where(seen, series, 0.0)
        y = (weights / weights.sum(-1, keepdim=True)) @ values
        errors[order] = float((y.transpose(1, 2) - expected).abs().max() / (expected.max() - expected.min()))
    return [errors[r] for r in orders]


def _phi(trajectory: Trajectory, phi: Tensor | None) -> Tensor:
    return trajectory.kernel_matrix() if phi is None else phi


def _tokens(weights: Tensor, trajectory: Trajectory, axis: int = -1) -> Tensor:
    """The matrix with the columns of a token summed."""
    each = _columns(trajectory, weights.shape[axis])
    return weights if each == 1 else weights.unflatten(axis, (-1, each)).sum(axis + 1 if axis >= 0 else axis)


def _columns(trajectory: Trajectory, places: int) -> int:
    """Columns of Phi for each token: its micro-steps, each with as many writes as B has where no input drives it."""
    return 1 if trajectory.attention is not None else places // trajectory.tokens


def _past(trajectory: Trajectory) -> int:
    """The number of tokens before the first output's own."""
    return 0 if trajectory.attention is None else trajectory.attention.past


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


__all__ = [
    "EffectiveStateSize", "attention_map", "effective_state_size", "embed", "entropy_rank", "kernel_matrix",
    "mean_distance", "output", "phi_distance", "special_case", "taylor_error",
]  # fmt: skip
