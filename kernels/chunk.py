"""The chunkwise form of every transition whose work is matrix products: decays and rank-one corrections.

Inside a chunk each row writes Σ_g x_g e_gᵀ. Without corrections e is the value. With corrections (WY / UT transform;
Bischof & Van Loan 1987, Joffrain et al. 2006, Yang et al. arXiv 2406.06484) row i also writes left_r u_rᵀ, where
u_r = right_rᵀ S_{i-1} depends on the rows before it: a unit lower-triangular system per chunk,
(I - M) u = R S_0 + M_0 v, solved once for the part that is known and for the part that multiplies the chunk's first
state. Between chunks S ← total ⊙ S + Xᵀ (E_0 + W S): in order (chunk form), or as an associative scan (scan form).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from dsf.kernels.decays import KeyDecay, ScalarDecay
from dsf.kernels.problem import Problem, fold_state, unfold_output, unfold_state
from dsf.kernels.scan import associative_scan, combine_dense
from dsf.kernels.walk import UnitLowerSolve, Walk, add_product

SUB_ROWS = 16  # rows of a sub-chunk, in which key-diagonal decays are multiplied pair by pair


@dataclass(frozen=True)
class Chunks:
    """Per-chunk tensors, leading axes [B, H, C]; e = known + weight @ (first state of the chunk).

    known: [.., L·G, P]; weight: [.., L·G, N] or None; ends: [.., L·G, N], sources decayed to the chunk's end;
    total: [.., n, 1], decay over the chunk; scores: [.., Lq, L·G]; starts: [.., Lq, N], queries decayed to its start.
    """

    known: Tensor
    weight: Tensor | None
    ends: Tensor
    total: Tensor
    scores: Tensor | None = None
    starts: Tensor | None = None


Carry = Callable[[Chunks, Tensor], tuple[Tensor, Tensor, Tensor]]


def chunk(problem: Problem, state: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """The chunk form: chunks of `length` tokens, states walked in order.

    state: [B, H, N, P] or None. Returns y [B, T, H, P] and the final state.
    """
    return _run(problem, state, length, _in_order)


def scan_blocks(problem: Problem, state: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """The scan form for corrections: blocks of `length` tokens as dense (A, B), combined in O(log) steps."""
    return _run(problem, state, length, _as_scan)


def _run(problem: Problem, state: Tensor | None, length: int, carry: Carry) -> tuple[Tensor, Tensor]:
    if _differs_by_channel(problem):
        folded = None if state is None else fold_state(state)
        y, final = _run(problem.fold_channels(), folded, length, carry)
        return unfold_output(y, problem.p), unfold_state(final, problem.p)
    initial = problem.zero_state() if state is None else state
    shifted = (_read_one_later(problem) if problem.before else problem).factored()
    length = min(length, problem.tokens)
    if problem.across:
        y, final = _across(shifted, initial, length, carry)
    elif problem.decay.shape[-1] > 1:
        y, final = _across(shifted.transposed(), initial.transpose(-1, -2), length, carry)
        final = final.transpose(-1, -2)
    else:
        chunks = _summarise(shifted, length)
        starts, entries, final = carry(chunks, initial)
        assert chunks.starts is not None and chunks.scores is not None
        y = add_product(chunks.starts @ starts, chunks.scores, entries)
    y = rearrange(y, "b h c l p -> b (c l) h p")[:, : problem.tokens]
    if problem.before:
        y = torch.cat([problem.seen(problem.readout[:, 0], initial).unsqueeze(1), y[:, :-1]], dim=1)
    return problem.add_skip(y), final


def _differs_by_channel(problem: Problem) -> bool:
    """True where corrections depend on a Value axis, so that every channel has its own triangular system."""
    if not problem.rank or problem.p == 1 or problem.across:
        return False
    wide = (problem.decay, problem.readout, problem.left, problem.right)
    return any(x.shape[-1] > 1 for x in wide if x is not None)


def _read_one_later(problem: Problem) -> Problem:
    """Reading S_{t-1} at t is reading S_t with the next token's readout (the first read sees the initial state)."""
    later = torch.cat([problem.readout[:, 1:], torch.zeros_like(problem.readout[:, :1])], dim=1)
    return replace(problem, readout=later, before=False)


def _blocks(x: Tensor, rows: int, length: int, pad: float = 0.0) -> Tensor:
    """Chunks [B, H, C, L, ...] of x [B, rows, H, ...], the last one padded with `pad`."""
    missing = -rows % length
    if x.shape[1] == 1 and rows > 1:
        if not missing:  # constant in time: one chunk for all
            return rearrange(x.expand(-1, length, *x.shape[2:]), "b l h ... -> b h 1 l ...")
        x = x.expand(-1, rows, *x.shape[2:])
    if missing:
        x = torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), pad)], dim=1)
    x = rearrange(x, "b (c l) h ... -> b h c l ...", l=length)
    return x.contiguous()  # once here, instead of at every product below


def _decay_of(problem: Problem, length: int) -> tuple[ScalarDecay | KeyDecay, int]:
    """The chunk's decay products, and the number of rows of a chunk with its padding."""
    rows, micro = problem.tokens * problem.micro, problem.micro
    one = 0.0 if problem.log else 1.0
    if problem.decay.shape[-2] == 1:
        size = length * micro
        return ScalarDecay(_blocks(problem.decay, rows, size, one), problem.log, micro), size
    sub = micro * max(1, min(SUB_ROWS // micro, length))
    size = sub * -(-length * micro // sub)
    return KeyDecay(_blocks(problem.decay, rows, size, one), problem.log, micro, sub), size


def _across(problem: Problem, initial: Tensor, length: int, carry: Carry) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, C, Lq, N] read along the other axis, y[n] = Σ_p C[p] S[n, p], and the final state.

    Row j wrote x_j e_jᵀ, so y_i is the sum of D[i, j] x_j with weights e_j · C_i (decayed_sum).
    """
    decay, size = _decay_of(problem, length)
    sources, chunks = _written(problem, decay, size)
    starts, entries, final = carry(chunks, initial)
    readout = _blocks(problem.readout.squeeze(-2), problem.tokens, size // problem.micro)
    inside = decay.decayed_sum(readout @ entries.transpose(-1, -2), sources)
    return inside + decay.from_start(readout @ starts.transpose(-1, -2)), final


def _summarise(problem: Problem, length: int) -> Chunks:
    decay, size = _decay_of(problem, length)
    sources, chunks = _written(problem, decay, size)
    queries = _blocks(problem.readout.squeeze(-1), problem.tokens, size // problem.micro)
    return replace(chunks, scores=decay.scores(queries, sources), starts=decay.from_start(queries))


def _written(problem: Problem, decay: ScalarDecay | KeyDecay, size: int) -> tuple[Tensor, Chunks]:
    """The sources [.., L, G, N] of a chunk, and its Chunks without the readout."""
    assert problem.key is not None and problem.value is not None
    rows = problem.tokens * problem.micro
    sources = _blocks(problem.key, rows, size)
    known = _blocks(problem.value, rows, size).flatten(-3, -2)
    weight = None
    if problem.rank:
        sources, known, weight = _solve(problem, decay, sources, known, size)
    ends, heads = decay.to_end(sources).flatten(-3, -2), problem.leading[1]
    known, ends = (x.expand(-1, heads, -1, -1, -1) for x in (known, ends))
    return sources, Chunks(known, weight, ends, decay.total)


def _solve(
    problem: Problem, decay: ScalarDecay | KeyDecay, sources: Tensor, known: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The triangular system of a chunk: sources and e = known + weight @ S_0 once corrections are written too."""
    rows = problem.tokens * problem.micro
    reads = sources if problem.right is None else _blocks(problem.right.squeeze(-1), rows, size)
    mixing = decay.read_scores(reads, sources)
    from_start = decay.reads_from_start(reads)
    if problem.tie is not None:  # erase and write share their vectors: e = v + tie (reads S_0 + mixing e)
        feed = _blocks(problem.tie, rows, size)  # [.., L, R], R = G
        system = mixing * feed.flatten(-2, -1).unsqueeze(-1)
        fed = (from_start * feed.unsqueeze(-1)).flatten(-3, -2)
        return sources, *UnitLowerSolve.apply(system, known, fed)
    assert problem.left is not None
    lefts = _blocks(problem.left.squeeze(-1), rows, size)
    system = decay.read_scores(reads, lefts)
    found, weight = UnitLowerSolve.apply(system, mixing @ known, from_start.flatten(-3, -2))
    sizes = problem.rank, sources.shape[-2]
    nothing = torch.zeros_like(sources.flatten(-3, -2))
    return torch.cat([lefts, sources], dim=-2), _beside(found, known, *sizes), _beside(weight, nothing, *sizes)


def _beside(a: Tensor, b: Tensor, rank: int, groups: int) -> Tensor:
    """For each row the R entries of a, then the G entries of b: [.., L·R, x], [.., L·G, x] -> [.., L·(R+G), x]."""
    a, b = (rearrange(x, "... (l k) x -> ... l k x", k=k) for x, k in ((a, rank), (b, groups)))
    return rearrange(torch.cat([a, b], dim=-2), "... l k x -> ... (l k) x")


def _in_order(chunks: Chunks, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First state of every chunk [B, H, C, N, P], entries [B, H, C, L·G, P] and the final state, in order."""
    return Walk.apply(chunks.total, chunks.ends, chunks.known, chunks.weight, initial)


def _as_scan(chunks: Chunks, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_in_order` by an associative scan over dense block transitions."""
    ends = chunks.ends.transpose(-1, -2)
    n, count = ends.shape[-2], ends.shape[2]
    moves = torch.diag_embed(chunks.total.squeeze(-1).expand(*ends.shape[:3], n))
    if chunks.weight is not None:
        moves = moves + ends @ chunks.weight
    writes = ends @ chunks.known
    first = writes[:, :, :1] + moves[:, :, :1] @ initial.unsqueeze(2)
    writes = torch.cat([first, writes[:, :, 1:]], dim=2)
    states = associative_scan(combine_dense, moves.transpose(1, 2), writes.transpose(1, 2))[1].transpose(1, 2)
    starts = torch.cat([initial.unsqueeze(2), states[:, :, : count - 1]], dim=2)
    entries = chunks.known if chunks.weight is None else chunks.known + chunks.weight @ starts
    return starts, entries, states[:, :, -1].clone()  # a view would keep all blocks' states
