"""Measures of a Trajectory, one function each: spectra (forgetting), kernel (the matrix Phi), state (size, work)."""

from __future__ import annotations

from dsf.analysis.measures.kernel import (
    EffectiveStateSize,
    attention_map,
    effective_state_size,
    embed,
    entropy_rank,
    kernel_matrix,
    mean_distance,
    output,
    phi_distance,
    special_case,
    taylor_error,
)
from dsf.analysis.measures.spectra import (
    cumulative_decay,
    decay_rates,
    eigenvalues,
    half_life,
    horizon,
    lyapunov_exponents,
    percentiles,
    propagator_norm,
    spectral_radius,
    transition_norm,
)
from dsf.analysis.measures.state import (
    Cost,
    Gates,
    StateSize,
    costs,
    effective_rank,
    gate_strengths,
    parameter_count,
    state_change,
    state_norms,
    state_size,
)

__all__ = [
    "Cost", "EffectiveStateSize", "Gates", "StateSize", "attention_map", "costs", "cumulative_decay", "decay_rates",
    "effective_rank", "effective_state_size", "eigenvalues", "embed", "entropy_rank", "gate_strengths", "half_life",
    "horizon", "kernel_matrix", "lyapunov_exponents", "mean_distance", "output", "parameter_count", "percentiles",
    "phi_distance", "propagator_norm", "special_case", "spectral_radius", "state_change", "state_norms", "state_size",
    "taylor_error", "transition_norm",
]  # fmt: skip
