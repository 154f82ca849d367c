"""Measurements of one trained mixer: spectrum, memory, kernel matrix, agreement and speed of its forms."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsf import Recurrence
from dsf.analysis.measures import attention_map, eigenvalues, half_life
from dsf.analysis.records import Eigenvalues, Errors, HalfLives, Histogram, Percentiles, Plane
from dsf.analysis.training import ByteLM
from dsf.checking.measure import distance, typical_entry
from dsf.language.annotations import Kind
from dsf.language.expr import VALUE

SPECTRUM_TOKENS = 256
BINS = 90
SIDE, SQUARES = 1.1, 55  # the complex plane's half-width, and its squares along a side
LOW, HIGH = -1.0, 1.25  # histogram range; what lies outside is counted in the end bins
SPEED_SECONDS = 0.2  # time for each form
MATRIX_TOKENS = 64  # on which the kernel-matrix form, quadratic in T, is timed
OUTPUT = Kind(frozenset({VALUE}))

Inputs = dict[str, Tensor]


def inputs_of_layers(model: ByteLM, ids: Tensor) -> list[Inputs]:
    """The inputs of every layer's recurrence in float64 on ids [1, T]; the model is unchanged afterwards."""
    dtype = next(model.parameters()).dtype
    try:
        return [{k: v.detach() for k, v in layer.items()} for layer in model.double().mixer_inputs(ids)]
    finally:
        model.to(dtype)


def spectrum(recurrence: Recurrence, layers: list[Inputs]) -> tuple[Eigenvalues, HalfLives]:
    """Eigenvalues of A_t (real parts, in the framework paper's gauge) and half-lives, over layers, tokens, heads and
    modes.

    In the gauge, normalised systems and softmax attention have the factor η_{t-1}/η_t, below 1 where a token adds to
    the denominator. Half-lives are in tokens, from the Lyapunov exponents of A_t without the gauge, which changes no
    output: the time until what was written is halved, with erasure; infinite for softmax attention without a decay, at
    most the window where there is one, after which a token is dropped.
    """
    found = [recurrence.trajectory(**first(recurrence, inputs, SPECTRUM_TOKENS)) for inputs in layers]
    values = torch.cat([eigenvalues(t, paper=True)[:, 1:].flatten() for t in found])
    # Half-lives, too, from the second token on: where a sequence begins, a reset may clear the state.
    found = [t.select(tokens=slice(1, None)) for t in found]
    if recurrence.spec.is_attention and recurrence.spec.decay_kind != "identity":
        lives = torch.cat([half_life(t).flatten() for t in found]).double()
    elif recurrence.spec.is_attention:
        lives = torch.full((1,), torch.inf)
    else:
        # Products of orthogonal steps keep lengths only to rounding errors, which are no forgetting.
        lives = torch.cat([half_life(t, of="transition").flatten() for t in found]).double()
        lives = torch.where(lives > 1e9, torch.inf, lives)
    lives = lives if recurrence.spec.system.window is None else lives.clamp(max=recurrence.spec.system.window)
    return of_eigenvalues(values), HalfLives.of(lives)


def of_eigenvalues(values: Tensor) -> Eigenvalues:
    """The record of eigenvalues: extremes, percentiles, shares, a histogram; a plane where some are complex."""
    real = values.real if values.is_complex() else values
    counts = torch.histc(real.clamp(LOW, HIGH).double(), BINS, LOW, HIGH)
    found = Eigenvalues(
        min=float(real.min()),
        max=float(real.max()),
        percentiles=Percentiles.of(real),
        share_negative=float((real < -1e-9).double().mean()),
        share_above_one=float((real > 1 + 1e-9).double().mean()),
        share_one=float(((real - 1).abs() <= 1e-9).double().mean()),
        histogram=Histogram(low=LOW, high=HIGH, shares=(counts / counts.sum()).tolist()),
    )
    if values.is_complex() and bool((values.imag.abs() > 1e-9).any()):
        found.plane = plane_of(values)
    return found


def plane_of(values: Tensor) -> Plane:
    """The record of complex numbers: shares of squares of the complex plane, those outside in the squares of its edge.
    What is no number is left out.
    """
    values = values[~values.isnan()]
    parts = (x.double().clamp(-SIDE, SIDE) for x in (values.real, values.imag))  # inf as an integer may be negative
    cells = [((x + SIDE) / (2 * SIDE) * SQUARES).long().clamp(max=SQUARES - 1) for x in parts]
    counts = torch.bincount((cells[1] * SQUARES + cells[0]).flatten(), minlength=SQUARES**2).double()
    return Plane(side=SIDE, shares=(counts / counts.sum()).view(SQUARES, SQUARES).tolist())


def picture_of_kernel(recurrence: Recurrence, inputs: Inputs) -> list[list[float]]:
    """|Phi| on a sentence [T, T], the share of every earlier token in each output, mean of channels and heads."""
    shares = attention_map(recurrence.trajectory(**inputs))[0].mean(0)
    return [[round(x, 5) for x in row] for row in shares.tolist()]


def disagreement(recurrence: Recurrence, inputs: Inputs) -> dict[str, Errors]:
    """The worst relative errors of each form against naive in float64, by form.

    Worst over heads and blocks of 16 tokens (dsf.checking.measure.distance). Gradients are those of all inputs for a
    fixed random gradient of the output, and are computed from each other, so that one whose terms cancel (what num and
    den are multiplied by alike) is held to the size of the largest, as in dsf.check.
    """
    expected = _with_gradients(recurrence, inputs, "naive")
    kinds = {i.name: i.kind for i in recurrence.spec.inputs}
    scale = max(typical_entry(x, kinds[k]) for k, x in expected[1].items())
    found = {}
    for form in recurrence.forms:
        if form == "naive":
            continue
        y, grads = _with_gradients(recurrence, inputs, form)
        errors = [distance(grads[k], expected[1][k], kinds[k], "float64", scale) for k in grads]
        found[form] = Errors(output=distance(y, expected[0], OUTPUT, "float64"), gradient=max(errors))
    return found


def _with_gradients(recurrence: Recurrence, inputs: Inputs, form: str) -> tuple[Tensor, Inputs]:
    leaves: dict[str, Any] = {k: v.detach().clone().requires_grad_() for k, v in inputs.items()}
    y = recurrence(**leaves, form=form)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    grads = torch.autograd.grad(y, list(leaves.values()), cotangent, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), grads, strict=True))
    return y.detach(), dict(zip(leaves, zeros, strict=True))


def speeds(recurrence: Recurrence, inputs: Inputs) -> dict[str, float]:
    """Tokens per second of each form by name: forward, float32, one thread, the best run within SPEED_SECONDS.

    inputs: [1, T, …]; the kernel form, quadratic in T, gets the first MATRIX_TOKENS tokens. naive computes in float64.
    """
    given = {k: v.float() for k, v in inputs.items()}
    with torch.no_grad(), threads(1):
        return {
            form: _speed(recurrence, first(recurrence, given, MATRIX_TOKENS) if form == "kernel" else given, form)
            for form in recurrence.forms
        }


def _speed(recurrence: Recurrence, given: Mapping[str, Any], form: str) -> float:
    tokens = next(given[i.name].shape[1] for i in recurrence.spec.inputs if i.kind.time)
    best, begin = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begin < SPEED_SECONDS:
        start = time.perf_counter()
        recurrence(**given, form=form)
        best = min(best, time.perf_counter() - start)
    return tokens / best


def first(recurrence: Recurrence, inputs: Mapping[str, Tensor], tokens: int, start: int = 0) -> Inputs:
    """The inputs of tokens start … tokens - 1, Params unchanged."""
    names = ((i.name, i.kind.time) for i in recurrence.spec.inputs)
    return {name: inputs[name][:, start:tokens] if timed else inputs[name] for name, timed in names}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """torch computes with `number` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
