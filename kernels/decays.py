"""Products of decays inside a chunk, without a division and without an exponent above zero.

For rows 0 … L-1 of a chunk, with a_r the decay of row r:
    pair[i, j] = a_i a_{i-1} … a_{j+1}  (i ≥ j; 1 on the diagonal)     weight of row j's write in S_i
    prefix[i]  = a_i … a_0                                             weight of the chunk's first state in S_i
    suffix[j]  = a_{L-1} … a_{j+1}                                     weight of row j's write in the last state
Logarithms are summed over exactly the factors of each product (a difference of two running sums would lose digits
after a strong decay and be NaN after a zero one). Linear decays are multiplied, so zero and negative values are legal.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dsf.kernels.lagged import LaggedRead, LaggedWeights
from dsf.kernels.operators import reduce_to, returned

LOG2_E = math.log2(math.e)  # powers of two take half the time of powers of e


class PairProducts(torch.autograd.Function):
    """pair[..., i, j] from linear decays a [..., L]; the adjoint multiplies products, it never divides by a."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        """a: [..., L] -> [..., L, L], lower triangular."""
        length = a.shape[-1]
        below = torch.ones(length, length, dtype=torch.bool, device=a.device).tril(-1)
        factors = torch.where(below, a.unsqueeze(-1), a.new_ones(()))
        pair = factors.cumprod(-2).tril()
        ctx.save_for_backward(pair)
        return pair

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor]:
        """da_r = Σ_{i ≥ r > j} dpair[i, j] pair[i, r] pair[r-1, j]."""
        (pair,) = ctx.saved_tensors
        reached = pair.transpose(-1, -2) @ cotangents[0].tril(-1)  # [r, j] = Σ_i pair[i, r] dpair[i, j]
        da = torch.zeros_like(pair[..., 0])
        da[..., 1:] = (reached[..., 1:, :] * pair[..., :-1, :]).sum(-1)
        return (da,)


class LogPairProducts(torch.autograd.Function):
    """pair[..., i, j] from the logarithms d [..., L] of the decays."""

    @staticmethod
    def forward(ctx: Any, d: Tensor) -> Tensor:
        """d: [..., L] -> [..., L, L], lower triangular."""
        pair = _log_pair(d)
        ctx.save_for_backward(pair)
        return pair

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor]:
        """dd_r = Σ_{i ≥ r > j} dpair[i, j] pair[i, j].

        Only these terms are added: row sums less column sums would be as fast, but where a decay is 0 they leave a
        rounding error instead of 0, which the derivative of an extreme logarithm (of exp(-exp(12)): 2e5) makes large.
        """
        (pair,) = ctx.saved_tensors
        return (_spanning(pair * cotangents[0]),)


class LogWeighed(torch.autograd.Function):
    """products ⊙ pair, and pair, from the logarithms of the decays; together, since the adjoints share a product."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """products: [..., L, L], fewer heads allowed; d: [..., L]. Returns two [..., L, L], lower triangular."""
        pair = _log_pair(d)
        ctx.save_for_backward(products, pair)
        ctx.set_materialize_grads(False)
        return products * pair, pair

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """As in LogPairProducts; in second derivatives pair also has a cotangent."""
        products, pair = ctx.saved_tensors
        weighed, direct = cotangents
        dd = None if direct is None else _spanning(pair * direct)
        if weighed is None:
            return None, dd
        dproducts = pair * weighed
        own = reduce_to(_spanning(dproducts * products), pair.shape[:-1])
        return reduce_to(dproducts, products.shape), own if dd is None else own + dd


def _log_pair(d: Tensor) -> Tensor:
    """pair [..., L, L] from logarithms [..., L]."""
    length = d.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=d.device).tril(-1)
    return returned(torch.where(below, (d * LOG2_E).unsqueeze(-1), d.new_zeros(())).cumsum_(-2).exp2_().tril_())


def _spanning(terms: Tensor) -> Tensor:
    """[..., r]: Σ of terms [..., i, j] with i ≥ r > j. Overwrites terms."""
    reached = terms.cumsum_(-1).tril_(-1)  # [i, r - 1] = Σ_{j < r} of row i
    return torch.nn.functional.pad(reached.sum(-2)[..., :-1], (1, 0))


def pair_products(decay: Tensor, log: bool) -> Tensor:
    """pair [..., L, L] of decays [..., L] (their logarithms when `log`)."""
    return (LogPairProducts if log else PairProducts).apply(decay)


def prefix_products(decay: Tensor, pair: Tensor | None, log: bool) -> Tensor:
    """prefix [..., L]; pair is needed of linear decays."""
    if log:
        return decay.cumsum(-1).exp()
    assert pair is not None
    return pair[..., 0] * decay[..., :1]


def suffix_products(decay: Tensor, pair: Tensor | None, log: bool) -> Tensor:
    """suffix [..., L]; pair is needed of linear decays."""
    if not log:
        assert pair is not None
        return pair[..., -1, :]
    later = torch.cat([decay[..., 1:], torch.zeros_like(decay[..., :1])], dim=-1)
    return later.flip(-1).cumsum(-1).flip(-1).exp()


def running_products(decay: Tensor, log: bool) -> tuple[Tensor, Tensor]:
    """prefix and suffix of decays [..., L, N] (their logarithms when `log`), each [..., L, N]."""
    join, rows = (torch.add if log else torch.mul), decay.unbind(-2)
    prefix, suffix = [rows[0]], [torch.full_like(rows[0], 0.0 if log else 1.0)]
    for early, late in zip(rows[1:], rows[:0:-1], strict=True):
        prefix.append(join(prefix[-1], early))
        suffix.append(join(suffix[-1], late))
    found = torch.stack(prefix, dim=-2), torch.stack(suffix[::-1], dim=-2)
    return (found[0].exp(), found[1].exp()) if log else found


def shift_down(x: Tensor, first: Tensor | float, dim: int) -> Tensor:
    """x moved by one along dim, with `first` at place 0: row i gets the value of row i-1."""
    head = torch.full_like(x.narrow(dim, 0, 1), first) if isinstance(first, float) else first
    return torch.cat([head, x.narrow(dim, 0, x.shape[dim] - 1)], dim=dim)


class ScalarDecay:
    """One decay for all of a head's state: the score matrix is multiplied by `pair`."""

    def __init__(self, decay: Tensor, log: bool, stride: int) -> None:
        """decay: [B, H, C, L, 1, 1]. stride: rows a token; queries sit on every stride-th row."""
        flat = decay.squeeze(-1).squeeze(-1)
        self.decay, self.log = flat, log
        pair = None if log else self.pair
        self.prefix = prefix_products(flat, pair, log).unsqueeze(-1)
        self.suffix = suffix_products(flat, pair, log).unsqueeze(-1)
        self.total = self.prefix[..., -1:, :]  # [B, H, C, 1, 1], scales the state
        self.stride = stride

    @functools.cached_property
    def pair(self) -> Tensor:
        """[B, H, C, L, L]."""
        return pair_products(self.decay, self.log)

    def scores(self, queries: Tensor, sources: Tensor) -> Tensor:
        """Σ_n q_i[n] pair[i, j] x_j[n]: [.., Lq, N] x [.., L, G, N] -> [.., Lq, L·G]; Lq rows, or one a token."""
        whole = queries.shape[-2] == sources.shape[-3] and sources.shape[-2] == 1
        if self.log and whole and "pair" not in self.__dict__:  # pair is not computed yet
            return LogWeighed.apply(queries @ sources.squeeze(-2).transpose(-1, -2), self.decay)[0]
        return self._weigh(queries, sources, self._query_rows(self.pair, queries.shape[-2]))

    def read_scores(self, reads: Tensor, sources: Tensor) -> Tensor:
        """`scores` for corrections, which read S_{i-1}: reads [.., L, R, N] -> [.., L·R, L·G], strictly lower."""
        earlier = shift_down(self.pair, 0.0, -2)
        return self._weigh(reads.flatten(-3, -2), sources, earlier.repeat_interleave(reads.shape[-2], -2))

    def from_start(self, queries: Tensor) -> Tensor:
        """q_i decayed back to the chunk's first state: [.., Lq, N]."""
        return queries * self._query_rows(self.prefix, queries.shape[-2])

    def reads_from_start(self, reads: Tensor) -> Tensor:
        """`from_start` for corrections, which read S_{i-1}: [.., L, R, N]."""
        return reads * shift_down(self.prefix, 1.0, -2).unsqueeze(-2)

    def decayed_sum(self, weights: Tensor, sources: Tensor) -> Tensor:
        """Σ_j w_ij pair[i, j] x_j: weights [.., Lq, L·G], sources [.., L, G, N] -> [.., Lq, N]."""
        pair = self._query_rows(self.pair, weights.shape[-2])
        pair = pair.repeat_interleave(sources.shape[-2], -1) if sources.shape[-2] > 1 else pair
        return (weights * pair) @ sources.flatten(-3, -2)

    def to_end(self, sources: Tensor) -> Tensor:
        """x_j decayed on to the chunk's last state: [.., L, G, N]."""
        return sources * self.suffix.unsqueeze(-2)

    def _query_rows(self, x: Tensor, count: int) -> Tensor:
        return x if x.shape[-2] == count else x[..., self.stride - 1 :: self.stride, :]

    @staticmethod
    def _weigh(queries: Tensor, sources: Tensor, pair: Tensor) -> Tensor:
        if sources.shape[-2] > 1:
            pair = pair.repeat_interleave(sources.shape[-2], -1)
        return (queries @ sources.flatten(-3, -2).transpose(-1, -2)) * pair


class KeyDecay:
    """Decays that differ along the Key axis.

    The chunk is cut into sub-chunks of `sub` rows. Within one, products are taken pair by pair; between two, a query
    is decayed back to the start of its own sub-chunk and a source on to the end of its own, so every factor is a
    product of decays and no exponent exceeds zero (the anchoring of GLA's secondary chunking, arXiv 2312.06635 §4.3).
    """

    def __init__(self, decay: Tensor, log: bool, stride: int, sub: int) -> None:
        """decay: [B, H, C, L, N, 1] with L a multiple of sub, sub a multiple of stride."""
        blocks = decay.squeeze(-1).unflatten(-2, (-1, sub))  # [.., S, sub, N]
        self.linear = blocks.exp() if log else blocks
        self.prefix, self.suffix = running_products(blocks, log)  # [.., S, sub, N]
        self.start: Tensor | None = None  # of sub-chunks before and behind each one, [.., S, 1, N]
        self.end: Tensor | None = None
        total = self.prefix[..., -1, :]  # [.., S, N]
        if blocks.shape[-3] > 1:  # from sums of all logarithms: products of rounded totals would add their errors up
            totals = (blocks.sum(-2) if log else total).transpose(-1, -2)
            between = pair_products(totals, log)  # [.., N, S, S]: totals of blocks s'+1 … s
            self.before = shift_down(between, 0.0, -2).movedim(-3, -1)  # [.., S, S', N]: blocks s'+1 … s-1
            total = prefix_products(totals, between, log)
            self.start = shift_down(total, 1.0, -1).transpose(-1, -2).unsqueeze(-2)
            self.end = suffix_products(totals, between, log).transpose(-1, -2).unsqueeze(-2)
            total = total.transpose(-1, -2)
        self.total = total[..., -1, :].unsqueeze(-1)  # [B, H, C, N, 1]
        self.stride, self.sub = stride, sub

    def scores(self, queries: Tensor, sources: Tensor) -> Tensor:
        """As ScalarDecay.scores."""
        blocks = self._every_row(queries).unflatten(-2, (-1, self.sub)).unsqueeze(-2)
        found = self._scores(blocks, sources, blocks * self.prefix.unsqueeze(-2), 0)
        return found if found.shape[-2] == queries.shape[-2] else found[..., self.stride - 1 :: self.stride, :]

    def read_scores(self, reads: Tensor, sources: Tensor) -> Tensor:
        """As ScalarDecay.read_scores."""
        blocks = reads.unflatten(-3, (-1, self.sub))
        return self._scores(blocks, sources, blocks * shift_down(self.prefix, 1.0, -2).unsqueeze(-2), 1)

    def _scores(self, blocks: Tensor, sources: Tensor, starts: Tensor, late: int) -> Tensor:
        """blocks: [.., S, sub, R, N] queries, which read the state `late` rows before; starts: `from_start` of them."""
        xs = sources.unflatten(-3, (-1, self.sub))  # [.., S, sub, G, N]
        count = xs.shape[-4]
        seen = blocks[..., late:, :, :]
        seen = torch.cat([seen, torch.zeros_like(blocks[..., :late, :, :])], dim=-3) if late else seen
        own = LaggedWeights.apply(self.linear, seen, xs)  # [.., S, sub, R, sub, G]
        own = shift_down(own, 0.0, -4) if late else own
        own = rearrange(own, "... i r j g -> ... (i r) (j g)")
        if count == 1:
            return own.squeeze(-3)
        carried = self._between(xs)
        outside = starts.flatten(-3, -2) @ carried.flatten(-3, -2).transpose(-1, -2)  # [.., S, sub·R, S'·sub·G]
        outside = outside.unflatten(-1, (count, -1))
        eye = torch.eye(count, dtype=torch.bool, device=own.device)[:, None, :, None]
        merged = torch.where(eye, own.unsqueeze(-2), outside)
        return rearrange(merged, "... s i t j -> ... (s i) (t j)")  # [.., L·R, L·G]

    def decayed_sum(self, weights: Tensor, sources: Tensor) -> Tensor:
        """As ScalarDecay.decayed_sum."""
        rows, groups = self.linear.shape[-3] * self.sub, sources.shape[-2]
        xs = sources.unflatten(-3, (-1, self.sub))
        whole = self._every_row(weights)  # [.., L, L·G]
        grid = rearrange(whole, "... (s i) (t j) -> ... s i t j", i=self.sub, j=self.sub * groups)
        own = rearrange(grid.diagonal(0, -4, -2), "... i (j g) s -> ... s i j g", g=groups)
        found = LaggedRead.apply(self.linear, own.unsqueeze(-3), xs).squeeze(-2)  # [.., S, sub, N]
        count = xs.shape[-4]
        if count > 1:
            found = found + self.prefix * (grid.flatten(-2) @ self._between(xs).flatten(-3, -2))
        flat = found.flatten(-3, -2)
        return flat if weights.shape[-2] == rows else flat[..., self.stride - 1 :: self.stride, :]

    def _between(self, xs: Tensor) -> Tensor:
        """Sources [.., S', sub, G, N] decayed on to the start of every later sub-chunk: [.., S, S', sub·G, N]."""
        anchored = (xs * self.suffix.unsqueeze(-2)).flatten(-3, -2)
        return anchored.unsqueeze(-4) * self.before.unsqueeze(-2)

    def _every_row(self, x: Tensor) -> Tensor:
        """One row a token put on the last row of its token, zeros between: [.., Lq, K] -> [.., L, K]."""
        if self.stride == 1:
            return x
        spread = torch.nn.functional.pad(x.unsqueeze(-2), (0, 0, self.stride - 1, 0))
        return spread.flatten(-3, -2)

    def from_start(self, queries: Tensor) -> Tensor:
        """As ScalarDecay.from_start."""
        flat = self._whole(self.prefix, self.start)
        return queries * (flat if flat.shape[-2] == queries.shape[-2] else flat[..., self.stride - 1 :: self.stride, :])

    def reads_from_start(self, reads: Tensor) -> Tensor:
        """As ScalarDecay.reads_from_start."""
        return reads * self._whole(shift_down(self.prefix, 1.0, -2), self.start).unsqueeze(-2)

    def to_end(self, sources: Tensor) -> Tensor:
        """As ScalarDecay.to_end."""
        return sources * self._whole(self.suffix, self.end).unsqueeze(-2)

    @staticmethod
    def _whole(inside: Tensor, outside: Tensor | None) -> Tensor:
        """Products over rows of a sub-chunk and over sub-chunks: [.., L, N]."""
        return (inside if outside is None else inside * outside).flatten(-3, -2)
