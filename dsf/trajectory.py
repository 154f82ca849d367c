"""`Trajectory`: a recurrence on real inputs, as the linear time-varying system that it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsf.bind import Bound, environment
from dsf.errors import FormError
from dsf.evaluate import Evaluator
from dsf.kernels.attention import softmax_matrix, spread_heads
from dsf.kernels.matrix import weights
from dsf.kernels.operators import Transition
from dsf.kernels.problem import Problem
from dsf.lower import lower
from dsf.run import softmax_operands, timed_inputs
from dsf.spec import Spec


@dataclass(frozen=True)
class Trajectory:
    """S_r = A_r S_{r-1} + B_r, y_t = C_tᵀ S_t + D_t with numbers for every token.

    spec: the recurrence. problem: the tensors (kernels.Problem), rows = tokens x micro-steps, None for softmax.
    gauge: [B, T, H] η_t or None: the framework paper's state is S_t / η_t, so its transition is (η_{t-1}/η_t) A_t.
    attention: for softmax, (a [B, H, T, N], k, v): queries with scale, keys, values.
    """

    spec: Spec
    problem: Problem | None
    gauge: Tensor | None
    attention: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def transition(self) -> Transition:
        """Structured A of every row: decay [B, rows, H, n, p], corrections [B, rows, H, R, N, p]."""
        return self._finite().transition()

    @property
    def paper_transition(self) -> Transition:
        """A in the framework paper's gauge, (η_{t-1}/η_t) A_t (DSF eqs. 15, 22); equal to transition without a gauge.

        The first token has no predecessor: its factor is 1.
        """
        a = self.transition
        if self.gauge is None:
            return a
        micro = self._finite().micro
        eta = self.gauge
        factor = torch.cat([torch.ones_like(eta[:, :1]), eta[:, :-1] / eta[:, 1:]], dim=1)
        if micro > 1:  # the gauge changes once a token, with its last micro-step
            rows = torch.ones(*factor.shape[:2], micro, factor.shape[2], dtype=factor.dtype, device=factor.device)
            rows[:, :, -1] = factor
            factor = rows.flatten(1, 2)
        factor = factor[..., None, None]
        left = None if a.left is None else a.left * factor.unsqueeze(-3)
        return Transition(a.decay * factor, left, a.right)

    @property
    def readout(self) -> Tensor:
        """C [B, T, H, n, p]."""
        return self._finite().readout

    @property
    def injection(self) -> Tensor:
        """B of every row, dense [B, rows, H, N, P]."""
        return self._finite().injection()

    @property
    def skip(self) -> Tensor | None:
        """D [B, T, H, P] or None."""
        return self._finite().skip

    def dense(self) -> Tensor:
        """A of every row as matrices [B, rows, H, p, N, N] (p = P where channels differ, else 1). For small sizes."""
        problem = self._finite()
        dense = self.transition.to_dense(problem.n)
        batch, heads = problem.leading
        return dense.expand(batch, problem.tokens * problem.micro, heads, -1, -1, -1)

    def kernel_matrix(self) -> Tensor:
        """Phi [B, H, T, rows·G, p] with y = Phi applied to the written values (DSF eq. 12, D left out).

        For softmax, the attention matrix [B, H, T, T, 1]; for normalised systems the matrix of num / den weights when
        den is shared by the channels. p = 1 where channels agree.
        """
        if self.attention is not None:
            a, k, _ = self.attention
            return softmax_matrix(a, spread_heads(k, a.shape[1]), None).unsqueeze(-1)
        return weights(self._finite())[0]

    def states(self) -> Tensor:
        """S_t after every token [B, T, H, N, P]: walks the recurrence."""
        problem = self._finite()
        a, injections = self.transition, problem.injection()
        state, out = problem.zero_state(), []
        for row in range(problem.tokens * problem.micro):
            state = _row(a, row).apply(state) + injections[:, row]
            if (row + 1) % problem.micro == 0:
                out.append(state)
        return torch.stack(out, dim=1)

    def _finite(self) -> Problem:
        if self.problem is None:
            raise FormError(
                f"{self.spec.name}: its features are infinite, so A, B and C are not tensors; use kernel_matrix() "
                "or .taylor(order) of the recurrence"
            )
        return self.problem


def _row(a: Transition, row: int) -> Transition:
    def at(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, row if x.shape[1] > 1 else 0]

    decay = at(a.decay)
    assert decay is not None
    return Transition(decay, at(a.left), at(a.right))


def record(spec: Spec, bound: Bound) -> Trajectory:
    """The trajectory of `spec` on one call's inputs."""
    timed = timed_inputs(spec, bound)
    if spec.is_softmax:
        return Trajectory(spec, None, None, softmax_operands(spec, bound, timed))
    sizes = bound.sizes
    values = Evaluator(environment(spec, bound), sizes.keys, sizes.p)
    shape = (sizes.batch, sizes.tokens, sizes.heads, sizes.n)
    plain = spec.unnormalised
    problem = lower(plain, values, shape, None, None).problem
    gauge = None
    if spec.system.gauge is not None:
        gauge = values(spec.system.gauge).squeeze(-1).squeeze(-1).expand(shape[:3])
    return Trajectory(spec, problem, gauge)
