"""How a system forgets: eigenvalues and norms of A_t, products over time, half-lives.

All functions take a Trajectory and use its structure. Elementwise transitions, scalar decays with corrections and
key-diagonal decays with one correction need no N x N matrix. Others are formed as dense matrices, up to an N of
DENSE_LIMIT. Results have the axes [B, T, H, N, p]; p is P where channels differ, else 1. "DSF" is arXiv 2405.15731.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dsf.analysis.measures.norms import general_eigenvalues, norms, spectral_norm
from dsf.analysis.measures.secular import eigenvalues_of_update
from dsf.kernels.operators import Transition
from dsf.language.errors import InputError
from dsf.trajectory import Trajectory

DENSE_LIMIT = 256  # largest N for which dense matrices are formed
BLOCK_NUMBERS = 1 << 24  # numbers in a block of dense matrices


def eigenvalues(trajectory: Trajectory, paper: bool = False) -> Tensor:
    """Eigenvalues of A_t, [B, T, H, N, p], without unit: real where the structure makes them real, else complex.

    paper: those of (η_{t-1}/η_t) A_t, the transition in the framework paper's gauge (DSF, equations 15 and 22; arXiv
      2510.09379).

    How they are computed: for elementwise A they are the entries. For α(I - βkkᵀ) they are α, N - 1 times, and
    α(1 - β|k|²). R corrections of a scalar decay are an R x R problem. One correction of a diagonal decay with entries
    of one sign (KDA, RWKV-7) is the secular equation of the symmetric D^½(I - βkkᵀ)D^½, to 1e-9 of the spectrum's
    extent. Turned pairs without corrections are 2 x 2 blocks, with a e^{±iθ} where the decay a is equal within a pair.
    For attention and windows all eigenvalues are equal, [B, T, H, 1, 1]: the decay (without turns), in the paper's
    gauge times η_{t-1}/η_t. Everything else is a dense problem: InputError where N is above DENSE_LIMIT.
    """
    if trajectory.attention is not None:
        own = trajectory.attention.decay
        rates = trajectory.attention.a.new_ones(()) if own is None else own.unsqueeze(-1)
        rates = rates.expand(trajectory.batch, trajectory.tokens, trajectory.heads, 1)
        factor = trajectory.paper_factor if paper else None
        return (rates if factor is None else rates * factor).unsqueeze(-2)
    a = trajectory.paper_transition if paper else trajectory.token_transition
    a = _full(a, trajectory)
    n = _size(trajectory)
    if a.cross is not None:
        return _of_pairs(a, trajectory, n)
    if a.left is None or a.right is None:
        return a.decay.expand(*a.decay.shape[:3], n, a.decay.shape[-1])
    left, right = _channels(a)
    if a.decay.shape[-2] == 1 and a.rank < n:
        return _of_scalar_decay(a, left, right, n)
    decay = _decay_vectors(a, n, left.shape[3])
    if a.rank == 1:
        product = left[..., 0] * right[..., 0]
        if bool((product <= 0).all()) or bool((product >= 0).all()):
            return _symmetric(decay, product).mT
    _check_dense(trajectory, n)
    values = _blocks(_general, decay, left, right, n=n).movedim(-1, -2)
    return values.real if bool((values.imag == 0).all()) else values


def spectral_radius(trajectory: Trajectory, paper: bool = False) -> Tensor:
    """max |λ| of A_t, [B, T, H, p], without unit. If A is constant and this is below 1, a state decays to zero once
    nothing is written. Raises InputError as `eigenvalues` does.
    """
    return eigenvalues(trajectory, paper).abs().amax(-2)


def transition_norm(trajectory: Trajectory) -> Tensor:
    """Spectral norm of A_t, [B, T, H, p], without unit: the largest factor by which one token lengthens a state.

    For elementwise A it is the largest |entry|. For a scalar decay with R corrections, the larger of |decay| and the
    singular values on the span of the 2R vectors. For a diagonal decay with one correction it is found by bisection,
    for turned pairs from their 2 x 2 blocks. Raises InputError for any other A with N above DENSE_LIMIT.
    """
    a = _full(trajectory.token_transition, trajectory)
    n = _size(trajectory)
    if a.cross is not None:
        if a.left is None:
            return spectral_norm(a.pair_blocks(n)).amax(-1)
        _check_dense(trajectory, n)
        return spectral_norm(a.to_dense(n))
    if a.left is None or a.right is None:
        return a.decay.abs().amax(-2)
    left, right = _channels(a)
    if a.decay.shape[-2] == 1 and 2 * a.rank < n:
        basis = torch.linalg.qr(torch.cat([left, right], dim=-1)).Q
        small = (basis.mT @ left) @ (basis.mT @ right).mT
        decay = a.decay.squeeze(-2)  # [B, T, H, p]
        small = small + decay[..., None, None] * torch.eye(small.shape[-1], dtype=small.dtype, device=small.device)
        return torch.maximum(spectral_norm(small), decay.abs())
    decay = _decay_vectors(a, n, left.shape[3])
    if a.rank == 1:
        flat = (x.expand(decay.shape).flatten(0, 3) for x in (decay, left[..., 0], right[..., 0]))
        return norms(*flat).view(decay.shape[:-1])
    _check_dense(trajectory, n)
    return _blocks(_norm, decay, left, right, n=n)


def cumulative_decay(trajectory: Trajectory) -> Tensor:
    """The product of the decays of tokens 1 … t, without corrections, [B, T, H, n, p], without unit.

    Source: LongMamba (arXiv 2504.16053), its prod A.
    """
    a = _full(trajectory.token_transition, trajectory)
    return _moduli(a, trajectory).cumprod(1)


def propagator_norm(trajectory: Trajectory, start: int = 0) -> Tensor:
    """Spectral norm of A_t … A_{start+1}, [B, T - start, H, p], without unit: the most that is left at token t of the
    state after `start` tokens.

    For elementwise systems it is the largest |product|. With corrections N x N products are formed. Raises InputError
    for these where N is above DENSE_LIMIT, and for a start outside 0 … T - 1.
    """
    if not 0 <= start < trajectory.tokens:
        raise InputError(f"propagator_norm: start is {start}, expected 0 ≤ start < {trajectory.tokens}")
    a = _full(trajectory.token_transition, trajectory)
    if a.is_elementwise:
        return a.decay[:, start:].cumprod(1).abs().amax(-2)
    n = _size(trajectory)
    if a.cross is not None:
        return _pair_propagator(a, trajectory, start, n)
    _check_dense(trajectory, n)
    left, right = _channels(a)
    decay = _decay_vectors(a, n, left.shape[3])
    product = torch.eye(n, dtype=left.dtype, device=left.device)
    out = []
    for t in range(start, trajectory.tokens):
        product = _apply(decay[:, t], left[:, t], right[:, t], product)
        out.append(spectral_norm(product))
    return torch.stack(out, dim=1)


def lyapunov_exponents(trajectory: Trajectory) -> Tensor:
    """Finite-time Lyapunov exponents, in nats per token, [B, H, N, p], the largest first.

    They are the growth rates (1/T) log R_kk of the QR method (Benettin et al. 1980). For elementwise systems they are
    the means of log|decay|, -inf where an entry is zero. With corrections each token takes a QR of an N x N matrix, in
    float64: rounding in float32 would hide directions that a token shrinks by more than 10^7. Raises InputError for
    these where N is above DENSE_LIMIT.
    """
    a = _full(trajectory.token_transition, trajectory)
    n, tokens = _size(trajectory), trajectory.tokens
    if a.is_elementwise:
        mean = a.decay.abs().log().mean(1)
        return mean.expand(*mean.shape[:2], n, mean.shape[-1]).sort(dim=-2, descending=True).values
    if a.cross is not None:  # 2 x 2 blocks do not mix: the system's exponents are theirs
        if a.left is not None:
            _check_dense(trajectory, n)
        matrices = a.pair_blocks(n) if a.left is None else a.to_dense(n)
        small = matrices.shape[-1]
        basis, total = _unit_basis(small, matrices), matrices.new_zeros((), dtype=torch.float64)
        for t in range(tokens):
            basis, r = torch.linalg.qr(matrices[:, t].double() @ basis)
            total = total + r.diagonal(dim1=-2, dim2=-1).abs().log()
        return _ordered(total if a.left is not None else total.flatten(-2), tokens, matrices.dtype)
    _check_dense(trajectory, n)
    left, right = _channels(a)
    decay = _decay_vectors(a, n, left.shape[3])
    basis, total = _unit_basis(n, left), torch.zeros_like(decay[:, 0], dtype=torch.float64)
    for t in range(tokens):
        basis, r = torch.linalg.qr(_apply(decay[:, t].double(), left[:, t].double(), right[:, t].double(), basis))
        total = total + r.diagonal(dim1=-2, dim2=-1).abs().log()
    return _ordered(total, tokens, left.dtype)


def decay_rates(trajectory: Trajectory, of: Literal["decay", "transition"] = "decay") -> Tensor:
    """The mean logarithm of the decay, in nats per token, [B, H, N or 1, p]; at most 0 for a stable system.

    of: "decay" takes the decays alone, without erasure, which is cheap for any N; tokens that clear an entry (a decay
      of 0, a reset) are left out of its mean, unless all do. "transition" takes the Lyapunov exponents, which include
      erasure and resets.
    Raises InputError as `lyapunov_exponents` does, and for another `of`.
    """
    if of not in ("decay", "transition"):
        raise InputError(f"decay_rates: of is {of!r}, expected 'decay' or 'transition'")
    if of == "transition":
        return lyapunov_exponents(trajectory)
    logs = _moduli(_full(trajectory.token_transition, trajectory), trajectory).abs().log()
    kept = logs != -math.inf  # nan is kept, and shows
    mean = torch.where(kept, logs, 0).sum(1) / kept.sum(1)
    return torch.where(kept.any(1), mean, -math.inf)


def horizon(trajectory: Trajectory, eps: float = 0.01, of: Literal["decay", "transition"] = "decay") -> Tensor:
    """The number of tokens until a mode has shrunk to `eps` of itself, ln eps / rate, [B, H, N or 1, p].

    It is inf where a mode never shrinks so far, nan where a decay is nan. of: as in `decay_rates`. Its distribution is
    heavy-tailed: report percentiles(...) rather than the mean. Raises InputError for eps outside (0, 1), and as
    `decay_rates` does.
    """
    if not 0 < eps < 1:
        raise InputError(f"horizon: eps is what is left of a state, expected 0 < eps < 1, got {eps}")
    rate = decay_rates(trajectory, of)
    return torch.where(rate >= 0, math.inf, math.log(eps) / rate)


def half_life(trajectory: Trajectory, of: Literal["decay", "transition"] = "decay") -> Tensor:
    """The number of tokens until a mode has halved, ln ½ / rate, [B, H, N or 1, p]; inf if it never does, 0 if it is
    cleared at every token. of: as in `decay_rates`. Raises InputError as that does.
    """
    return horizon(trajectory, 0.5, of)


def percentiles(x: Tensor, at: tuple[float, ...] = (10, 50, 90)) -> Tensor:
    """Percentiles of all n numbers of x, one for each q of `at`, from 0 to 100.

    The q-th is the number at place ⌊q n / 100⌋ in rising order, counted from 0, so that of two numbers the 50th is the
    larger. Nothing is interpolated, so that inf stays inf.
    """
    flat = x.flatten()
    places = [min(int(q * len(flat) / 100), len(flat) - 1) for q in at]
    return torch.stack([flat.kthvalue(place + 1).values for place in places])


def _unit_basis(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=torch.float64, device=like.device)


def _ordered(logs: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Mean exponents, largest first: [B, H, p, N] -> [B, H, N, p]."""
    return (logs / tokens).movedim(-1, -2).sort(dim=-2, descending=True).values.to(dtype)


def _size(trajectory: Trajectory) -> int:
    return trajectory.state_size[0]


def _full(a: Transition, trajectory: Trajectory) -> Transition:
    """a with batch, token and head axes at full size (constants are stored once)."""
    lead = (trajectory.batch, trajectory.tokens, trajectory.heads)

    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.expand(*lead, *x.shape[3:])

    decay = spread(a.decay)
    assert decay is not None
    return Transition(decay, spread(a.left), spread(a.right), spread(a.cross))


def _moduli(a: Transition, trajectory: Trajectory) -> Tensor:
    """Moduli of the decays, [B, T, H, n, p]; for turned pairs |eigenvalue|, √|det| where a pair's two are complex."""
    if a.cross is None:
        return a.decay
    return _of_blocks(a.pair_blocks(_size(trajectory))).abs()


def _of_pairs(a: Transition, trajectory: Trajectory, n: int) -> Tensor:
    """Eigenvalues [B, T, H, N, p] of a transition that mixes pairs."""
    if a.left is None:
        return _of_blocks(a.pair_blocks(n))
    _check_dense(trajectory, n)
    values = general_eigenvalues(a.to_dense(n)).movedim(-1, -2)
    return values.real if bool((values.imag == 0).all()) else values


def _of_blocks(blocks: Tensor) -> Tensor:
    """Eigenvalues m ± √(m² - det) of matrices [B, T, H, p, N/2, 2, 2] -> [B, T, H, N, p], real if all are."""
    (a, b), (c, d) = (row.unbind(-1) for row in blocks.unbind(-2))
    mean, spread = (a + d) / 2, ((a - d) / 2) ** 2 + b * c  # m² - det without its cancellation
    root = spread if bool((spread >= 0).all()) else torch.complex(spread, torch.zeros_like(spread))
    root = root.sqrt()
    return torch.stack([mean + root, mean - root], dim=-1).flatten(-2).movedim(-1, -2)


def _pair_propagator(a: Transition, trajectory: Trajectory, start: int, n: int) -> Tensor:
    """`propagator_norm` of transitions that mix pairs."""
    if a.left is not None:
        _check_dense(trajectory, n)
    matrices = a.pair_blocks(n) if a.left is None else a.to_dense(n)
    product = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    out = []
    for t in range(start, trajectory.tokens):
        product = matrices[:, t] @ product
        norm = spectral_norm(product)
        out.append(norm if a.left is not None else norm.amax(-1))
    return torch.stack(out, dim=1)


def _channels(a: Transition) -> tuple[Tensor, Tensor]:
    """left, right [B, T, H, p, N, R]: an operator for each channel where decay or corrections have channels."""
    assert a.left is not None and a.right is not None
    p = max(a.decay.shape[-1], a.left.shape[-1], a.right.shape[-1])
    left, right = (x.expand(*x.shape[:-1], p).movedim(-1, 3).mT for x in (a.left, a.right))
    return left, right


def _decay_vectors(a: Transition, n: int, p: int) -> Tensor:
    """The decay as vectors, [B, T, H, p, N]."""
    return a.decay.expand(*a.decay.shape[:3], n, p).mT


def _of_scalar_decay(a: Transition, left: Tensor, right: Tensor, n: int) -> Tensor:
    """Eigenvalues for a scalar decay d: d (N - R times) and d + eig(RᵀL)."""
    decay = a.decay.squeeze(-2).unsqueeze(-1)  # [B, T, H, p, 1]
    small = right.mT @ left
    moved = small.squeeze(-1) if a.rank == 1 else general_eigenvalues(small)
    if moved.is_complex() and bool((moved.imag == 0).all()):
        moved = moved.real
    shape = moved.shape[:-1]
    values = torch.cat([(decay + moved), decay.expand(*shape, n - a.rank).to(moved.dtype)], dim=-1)
    return values.mT


def _apply(decay: Tensor, left: Tensor, right: Tensor, matrix: Tensor) -> Tensor:
    """A applied to the columns of matrix [..., p, N, M]."""
    return decay.unsqueeze(-1) * matrix + left @ (right.mT @ matrix)


def _symmetric(decay: Tensor, product: Tensor) -> Tensor:
    """Eigenvalues of diag(d) + l rᵀ [B, T, H, p, N], similar to diag(d) ± z zᵀ with z² = |l r|, for l r of one sign."""
    sign = torch.where(product.sum(-1, keepdim=True) < 0, -1.0, 1.0).to(decay.dtype)
    flat = (x.expand(product.shape).flatten(0, 3) for x in (sign * decay, product.abs()))
    return sign * eigenvalues_of_update(*flat).view(product.shape)


def _general(decay: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return general_eigenvalues(torch.diag_embed(decay) + left @ right.mT)


def _norm(decay: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return spectral_norm(torch.diag_embed(decay) + left @ right.mT)


def _blocks(function, *tensors: Tensor, n: int) -> Tensor:  # type: ignore[no-untyped-def]
    """function applied to all matrices of [B, T, H, p, ...], at most BLOCK_NUMBERS numbers at a time."""
    lead = tensors[0].shape[:4]
    flat = [x.flatten(0, 3) for x in tensors]
    step = max(1, BLOCK_NUMBERS // (n * n))
    parts = [function(*(x[i : i + step] for x in flat)) for i in range(0, flat[0].shape[0], step)]
    return torch.cat(parts).unflatten(0, lead)


def _check_dense(trajectory: Trajectory, n: int) -> None:
    if n > DENSE_LIMIT:
        raise InputError(
            f"{trajectory.spec.name}: this measure needs dense {n} x {n} matrices; the limit is N = {DENSE_LIMIT}"
        )
