"""Measures of one run of a converted layer: memory, attention, state, gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.analysis import probe
from dsf.analysis.analyze.records import Along, EffectiveSize, Gates, Head, Run, State
from dsf.analysis.convert import fir
from dsf.analysis.measures import (
    attention_map,
    effective_rank,
    effective_state_size,
    eigenvalues,
    gate_strengths,
    half_life,
    horizon,
    kernel_matrix,
    mean_distance,
    state_norms,
)
from dsf.analysis.record import Entry
from dsf.analysis.records import HalfLives, Lifetimes, Percentiles
from dsf.language.errors import InputError
from dsf.trajectory import Trajectory

WINDOW = 256  # tokens on which Phi is formed: it is quadratic in them
CHANNELS = 16  # number of channels looked at, where each has its own Phi
POINTS = 32  # points of a curve along the sequence
NUMBERS = 1 << 23  # most eigenvalues to compute
WORK = 1 << 32  # most multiplications on matrices of N x N
NEVER = 1e9  # tokens: longer half-lives are rounding errors, not forgetting
EPS = 0.01  # share of a state that is left at its horizon


def of_text(entry: Entry, run: Run) -> None:
    """Write into the run the measures over a recorded text: of each head, and of the whole layer for pictures."""
    t = entry.trajectory
    run.causal, run.attention = is_causal(t), t.attention is not None
    run.heads = [Head(head=h) for h in range(t.heads)]
    if run.causal:  # attention to later tokens has neither eigenvalues nor a memory
        spectrum(t, run)
        memory(t, entry.layer.window, run)
    reach(t, run)
    if t.attention is None:  # a KV cache has neither norm nor rank
        state(t, run)


def of_sentence(entry: Entry, run: Run) -> Tensor:
    """Write into the run Phi and gates on a sentence, in reading order.

    Returns |Phi| of the heads, [H, T, T], for pictures; it is not stored.
    """
    t = entry.trajectory
    maps = attention_map(t)[0]
    gates = None if t.attention is not None else gate_strengths(t)
    if entry.backward:
        maps = maps.flip(1, 2)
        gates = None if gates is None else type(gates)(*(g.flip(1) for g in gates))
    run.shares, run.received = rounded(maps.mean(0)), rounded(received(maps))
    for name, x in {} if gates is None else gates._asdict().items():
        if bool(x.isfinite().all()):
            setattr(run, name, rounded(x[0].mean(-1)))
    return maps


def is_causal(t: Trajectory) -> bool:
    """False for attention in which a token sees later ones, else True."""
    seen = None if t.attention is None else t.attention.seen
    return seen is None or not bool(seen.triu(1 + seen.shape[-1] - seen.shape[-2]).any())


def received(maps: Tensor) -> Tensor:
    """How much the other tokens look at each token, [T], from maps [H, T, T].

    Relative to how much they look at tokens of the same distance, so 1 for an average token; a token's own row is left
    out.
    """
    share = maps.double().mean(0)
    share = share - share.diagonal().diag()
    usual = torch.zeros_like(share)
    for offset in range(1 - len(share), len(share)):
        line = share.diagonal(offset)
        usual.diagonal(offset).fill_(line.mean())
    expected = usual.sum(0)
    return share.sum(0) / torch.where(expected == 0, 1.0, expected)


def spectrum(t: Trajectory, run: Run) -> None:
    """Eigenvalues of A_t in the framework paper's gauge, from the second token on."""
    try:
        values = eigenvalues(affordable(t), paper=True)[:, 1:]
    except InputError:  # dense matrices that are too wide
        return
    real = values.real if values.is_complex() else values
    run.eigenvalues = probe.of_eigenvalues(values.flatten())
    for head in run.heads:
        head.eigenvalues = Percentiles.of(real[:, :, head.head])


def memory(t: Trajectory, window: int | None, run: Run) -> None:
    """Write half-lives and horizons in tokens, with erasure; infinite for softmax attention without a decay.

    For attention with a window and for convolutions, which keep tokens whole and drop the others, only the window in
    tokens.
    """
    if t.attention is not None:
        if window is not None:
            run.window = window
            return
        never = torch.full((1, t.heads, 1, 1), torch.inf)
        lives = [never, never] if t.attention.decay is None else [half_life(t), horizon(t, EPS)]
    else:
        taps = t.state_size[0] + 1
        if t.spec.name == "fir" and t.spec is fir(taps).spec:
            run.window = taps
            return
        a = t.transition
        part = t if a.is_elementwise else affordable(t)
        of: Any = "decay" if a.is_elementwise else "transition"
        try:
            lives = [half_life(part, of), horizon(part, EPS, of)]
        except InputError:
            lives = [half_life(t), horizon(t, EPS)]
        lives = [torch.where(x > NEVER, torch.inf, x.double()) for x in lives]
    run.half_life, run.horizon = HalfLives.of(lives[0]), Lifetimes.of(lives[1])
    for head in run.heads:
        head.half_life = HalfLives.of(lives[0][:, head.head])
        head.horizon = Lifetimes.of(lives[1][:, head.head])


def reach(t: Trajectory, run: Run) -> None:
    """Write the mean attention distance and the effective state size, from Phi on the first WINDOW tokens."""
    part = t.select(tokens=slice(0, WINDOW)) if t.tokens > WINDOW else t
    if part.attention is None:
        part = part.select(channels=slice(0, CHANNELS))
    elif part.tokens < t.tokens:
        part = _first_keys(part, part.tokens)
    phi = kernel_matrix(part)
    if not bool(phi.isfinite().all()):
        return
    distance = mean_distance(part, phi)[0].mean((1, 2)).tolist()
    run.distance = _mean(distance)
    for head in run.heads:
        head.distance = distance[head.head]
    if not run.causal:
        return
    size = effective_state_size(part, phi=phi)
    tolerance, entropy = (x[0].double().mean((1, 2)).tolist() for x in size)
    run.effective_state_size = EffectiveSize(tolerance=_mean(tolerance), entropy=_mean(entropy))
    for head in run.heads:
        head.effective_state_size = EffectiveSize(tolerance=tolerance[head.head], entropy=entropy[head.head])


def _first_keys(t: Trajectory, places: int) -> Trajectory:
    """Attention of the first tokens without later keys, which a cut of the queries leaves in."""
    a = t.attention
    assert a is not None
    seen, bias = (x if x is None else x[..., :places] for x in (a.seen, a.bias))
    return replace(t, attention=replace(a, k=a.k[:, :, :places], v=a.v[:, :, :places], seen=seen, bias=bias))


def state(t: Trajectory, run: Run) -> None:
    """Write the norm and the effective rank of S_t along the text, and mean gates."""
    every = max(1, t.tokens // POINTS)
    norms = state_norms(t)[0, every - 1 :: every]
    ranks = effective_rank(t, every)[0]
    run.along = Along(
        tokens=list(range(every, t.tokens + 1, every)), norm=rounded(norms.mean(-1)), rank=rounded(ranks.mean(-1))
    )
    gates = {name: x[0].mean(0) for name, x in gate_strengths(t)._asdict().items() if bool(x.isfinite().all())}
    run.gates = Gates(**{name: float(x.mean()) for name, x in gates.items()})
    for head in run.heads:
        h = head.head
        head.state = State(norm=float(norms[-1, h]), rank=float(ranks[-1, h]))
        head.gates = Gates(**{name: float(x[h]) for name, x in gates.items()})


def affordable(t: Trajectory) -> Trajectory:
    """The trajectory cut to its first tokens, as many as NUMBERS and WORK allow, at least four."""
    if t.attention is not None:
        return t
    n, p = t.state_size
    a = t.transition
    numbers = t.heads * n * (p if a.is_per_channel else 1)
    tokens = NUMBERS // numbers
    if a.left is not None:
        tokens = min(tokens, WORK // (numbers * n * n))
    tokens = max(4, tokens)
    return t if tokens >= t.tokens else t.select(tokens=slice(0, tokens))


def rounded(x: Tensor, digits: int = 4) -> Any:
    """A tensor as nested lists, rounded to this number of significant digits."""
    values = x.double()
    size = torch.where(values == 0, 1.0, values.abs()).log10().floor()
    scale = 10.0 ** (digits - 1 - size).clamp(max=300)  # of the smallest numbers it would be infinite
    return torch.where(values.isfinite(), (values * scale).round() / scale, values).tolist()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
