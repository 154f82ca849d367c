"""`Trajectory`: a recurrence on given inputs as a linear time-varying system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsf.kernels.attention import spread_heads
from dsf.kernels.operators import Transition
from dsf.kernels.phi import attention_matrix, attention_scores, injection_row, response, weights, window_matrix
from dsf.kernels.problem import Problem
from dsf.kernels.recurrent import recurrent
from dsf.language.errors import FormError, InputError
from dsf.language.expr import const, inputs_of
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator
from dsf.torch.lower import apply_linear_rule


@dataclass(frozen=True)
class Attention:
    """The operands of attention over T queries and S keys.

    a: [B, H, T, N], the scaled queries. k: [B, G, S, N], the keys. v: [B, G, S, P], the values. G divides H.
    seen: bool [B|1, H|1, T, S], True where a query reads a key; None for plain causal attention (S = T).
    bias: [B|1, H|1, T, S], added to the scores (ALiBi), or None.
    sink: [H], the score of a key without a value, or None.
    decay: [B, T, H], the declaration's A; None for I.
    share: [B, H, T, p], the rule's factor for a row of weights with sum 1; None for 1.
    exponential: False for a window of a finite state. Weights are then scores times e^bias, `share` includes the
      quotient or C's gate, and log_eta does not apply.
    skip: [B, H, T, p], D as a factor of the query's own value, which is the last that it reads, or None.
    first: the place of the first query among the keys; None for S - T, where the queries are those of the last tokens.
    """

    a: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    decay: Tensor | None = None
    share: Tensor | None = None
    exponential: bool = True
    skip: Tensor | None = None
    first: int | None = None

    @property
    def past(self) -> int:
        """The number of keys before the first query's own."""
        return self.k.shape[2] - self.a.shape[2] if self.first is None else self.first

    def matrix(self) -> Tensor:
        """The weights [B, H, T, S] without share and skip. Softmax's rows sum to 1, with a sink to less."""
        k = spread_heads(self.k, self.a.shape[1])
        if self.exponential:
            return attention_matrix(self.a, k, self.seen, self.bias, self.sink)
        return window_matrix(self.a, k, self.seen, self.bias)

    def phi(self) -> Tensor:
        """Phi [B, H, T, S, p], the matrix that multiplies v, with share and skip."""
        found = self.matrix().unsqueeze(-1)
        found = found if self.share is None else found * self.share.unsqueeze(3)
        if self.skip is None:
            return found
        assert self.seen is not None
        own = self.seen.shape[-1] - 1 - self.seen.flip(-1).int().argmax(-1)
        place = torch.nn.functional.one_hot(own, self.seen.shape[-1]).to(found.dtype)
        return found + place.unsqueeze(-1) * self.skip.unsqueeze(3)

    def log_eta(self) -> Tensor:
        """The logarithm of each row's divisor, log Σ_j exp(score of key j) - log share: [B, H, T, p]."""
        scores = attention_scores(self.a, spread_heads(self.k, self.a.shape[1]), self.seen, self.bias)
        if self.sink is not None:
            own = self.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, own], dim=-1)
        found = scores.logsumexp(-1, keepdim=True)
        return found if self.share is None else found - self.share.log()


@dataclass(frozen=True)
class Trajectory:
    """A recurrence on given inputs, as the system S_r = A_r S_{r-1} + B_r, y_t = C_tᵀ S_t + D_t with numbers.

    A row r is a micro-step of a token; there are T times micro-steps rows. "DSF" is the framework paper (arXiv
    2405.15731). Axes p have P entries where channels differ, else 1.
    spec: the recurrence. problem: the system's tensors (kernels.Problem); None for attention and windows.
    gauge: [B, T, H], η_t, or None. The framework paper's state is S_t / η_t, so its transition is (η_{t-1}/η_t) A_t.
    attention: the operands of attention and windows, else None.
    drive: [B, rows, H, P], the input u in which the system is linear; None if there is no single one.
    unit: the system with u = 1, whose injection and skip are the paper's B_t and D_t.
    scale: of quotients: (a factor of unit's output, the rule's `one` in the true scale), [B, T, H, p] or None each.
    initial_state: [B, H, N, P], the state before the first token; None for zeros.
    """

    spec: Spec
    problem: Problem | None
    gauge: Tensor | None
    attention: Attention | None = None
    drive: Tensor | None = None
    unit: Problem | None = None
    scale: tuple[Tensor | None, Tensor | None] = (None, None)
    initial_state: Tensor | None = None

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self.attention.a.shape[0] if self.attention is not None else self._finite().leading[0]

    @property
    def state_size(self) -> tuple[int, int]:
        """(N, P), the size of one head's state. Raises FormError for attention and windows."""
        return self._finite().n, self._finite().p

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return self.attention.a.shape[2] if self.attention is not None else self._finite().tokens

    @property
    def heads(self) -> int:
        """H, the number of heads."""
        return self.attention.a.shape[1] if self.attention is not None else self._finite().leading[1]

    @property
    def transition(self) -> Transition:
        """A of every row in parts: decay [B, rows, H, n, p], corrections [B, rows, H, R, N, p].

        For attention its decay, without turns. Raises FormError for attention without a decay.
        """
        if self.attention is not None and self.attention.decay is not None:
            return Transition(self.attention.decay[..., None, None])
        return self._finite().transition()

    @property
    def token_transition(self) -> Transition:
        """A of every token in parts: the product of the token's micro-steps. Their ranks add up."""
        a, micro = self.transition, 1 if self.problem is None else self.problem.micro
        if micro == 1:
            return a
        rows = self._finite().tokens * micro
        whole = a._each(lambda x: x.expand(x.shape[0], rows, *x.shape[2:]))
        steps = [whole._each(lambda x, m=m: x[:, m::micro]) for m in range(micro)]  # type: ignore[misc]
        out = steps[0]
        for step in steps[1:]:
            out = step.compose(out)
        return out

    @property
    def paper_transition(self) -> Transition:
        """token_transition in the framework paper's gauge: paper_factor times A_t (DSF, equations 15 and 22)."""
        a, factor = self.token_transition, self.paper_factor
        if factor is None:
            return a
        factor = factor.unsqueeze(-2)
        left = None if a.left is None else a.left * factor.unsqueeze(-3)
        cross = None if a.cross is None else a.cross * factor
        return Transition(a.decay * factor, left, a.right, cross)

    @property
    def paper_factor(self) -> Tensor | None:
        """η_{t-1}/η_t [B, T, H, p], where η_t is the declared gauge or what the output is divided by.

        For softmax η_t = Σ_j exp(q_tᵀ k_j). The first token's factor is 1. None for a system that divides by nothing.
        Raises FormError for a normalize that reads inputs.
        """
        found = self._log_eta()
        if found is None:
            return None
        log_eta, sign = found
        factor = (log_eta[:, :-1] - log_eta[:, 1:]).exp() * (sign[:, :-1] * sign[:, 1:])
        return torch.cat([torch.ones_like(log_eta[:, :1]), factor], dim=1)

    def _log_eta(self) -> tuple[Tensor, Tensor] | None:
        """(log |η_t|, up to a constant of the sequence, the sign of η_t), [B, T, H, p] each."""
        if self.attention is not None:
            if not self.attention.exponential:
                return None
            log_eta = self.attention.log_eta().transpose(1, 2)
            return log_eta, torch.ones_like(log_eta)
        if self.gauge is not None:
            return _log_and_sign(self.gauge.unsqueeze(-1))
        if self.spec.rule is None or self.unit is None:
            return None
        den, _ = recurrent(replace(self.unit, skip=None), None)
        rescale, one = self.scale
        den = den if rescale is None else den * rescale
        den = den if self.unit.skip is None else den + self.unit.skip
        one = torch.ones_like(den) if one is None else one
        log_inverse, sign = _log_and_sign(one * self._quotient(den, one))
        return -log_inverse, sign

    def _quotient(self, den: Tensor, one: Tensor) -> Tensor:
        """The rule's value for num = 1."""
        assert self.spec.rule is not None and self.unit is not None
        if inputs_of(self.spec.rule):
            raise FormError(
                f"{self.spec.name}: normalize = {self.spec.rule} reads inputs, which a trajectory does not hold; for "
                "its matrix leave them out of the rule and apply them to y"
            )
        values = Evaluator({const(0): den.new_zeros(())}, self.unit.n, self.unit.p)
        return apply_linear_rule(self.spec, values, torch.ones_like(den), den, one)

    @property
    def readout(self) -> Tensor:
        """C of every token, [B, T, H, n, p]."""
        return self._finite().readout

    @property
    def injection(self) -> Tensor:
        """B of every row, written out: [B, rows, H, N, P]."""
        return self._finite().injection()

    @property
    def skip(self) -> Tensor | None:
        """D of every token, [B, T, H, P]; None without one."""
        return self._finite().skip

    def dense(self) -> Tensor:
        """A of every row as matrices [B, rows, H, p, N, N]. They take N² numbers each, so only for small sizes."""
        problem = self._finite()
        dense = self.transition.to_dense(problem.n)
        batch, heads = problem.leading
        return dense.expand(batch, problem.tokens * problem.micro, heads, -1, -1, -1)

    def kernel_matrix(self) -> Tensor:
        """Phi [B, H, T, rows, p] with y = Phi · u for the driving input u (DSF, equation 12, with D on the diagonal).

        Phi[..., i, j, p] is the weight of row j's u in y_i, from a zero state. It is exact for every system, quotients
        included. For attention it is the attention matrix [B, H, T, S, p]. If no single input drives the system
        (`drive` is None), Phi multiplies the written values, with a column for each term of B, and leaves D out.
        Raises FormError for a normalize that reads inputs.
        """
        if self.attention is not None:
            return self.attention.phi()
        if self.unit is None:
            return weights(self._finite())[0]
        phi = response(self.unit)
        rescale, one = (None if x is None else x.transpose(1, 2).unsqueeze(3) for x in self.scale)
        if rescale is not None:
            phi = phi * rescale
        if self.unit.skip is not None:
            last = torch.arange(1, self.tokens + 1, device=phi.device) * self.unit.micro - 1
            own = self.unit.skip.transpose(1, 2).unsqueeze(3)
            place = torch.nn.functional.one_hot(last, phi.shape[3]).to(phi.dtype)[..., None]
            phi = phi + place * own
        if self.spec.rule is None:
            return phi
        den = phi.sum(3, keepdim=True)
        one = torch.ones_like(den) if one is None else one
        return phi * self._quotient(den, one)

    def walk(self) -> Iterator[Tensor]:
        """Yield S_t [B, H, N, P] of one token after the other, with one state in memory at a time."""
        problem = self._finite()
        state = problem.zero_state() if self.initial_state is None else self.initial_state
        for row, move in enumerate(self.transition.each_row(problem.tokens * problem.micro)):
            state = move.apply(state) + injection_row(problem, row)
            if (row + 1) % problem.micro == 0:
                yield state

    def states(self) -> Tensor:
        """S_t after every token, [B, T, H, N, P], computed token by token."""
        return torch.stack(list(self.walk()), dim=1)

    def select(
        self,
        batch: slice | None = None,
        tokens: slice | None = None,
        heads: slice | None = None,
        channels: slice | None = None,
    ) -> Trajectory:
        """Part of the trajectory, as views of its tensors; None: all. A part that begins after the first token has no
        initial state. Raises InputError for slices with a step."""
        parts = [slice(None) if s is None else s for s in (batch, tokens, heads, channels)]
        if any(s.step not in (None, 1) for s in parts):
            raise InputError(f"{self.spec.name}: select takes slices without a step")
        if self.attention is not None:
            return replace(self, attention=_select_attention(self.attention, parts))
        micro = self._finite().micro
        rows = slice(*(None if x is None else x * micro for x in (parts[1].start, parts[1].stop)))
        b, t, h, p = parts

        def at(x: Tensor | None, row: slice, channel: slice | None = None) -> Tensor | None:
            return None if x is None else cut(x, b, row, h, channel)

        start = self.initial_state
        keep = start is not None and parts[1].start in (None, 0)
        return replace(
            self,
            problem=_select_problem(self._finite(), b, rows, t, h, p),
            unit=None if self.unit is None else _select_problem(self.unit, b, rows, t, h, p),
            drive=at(self.drive, rows, p),
            gauge=at(self.gauge, t),
            scale=(at(self.scale[0], t, p), at(self.scale[1], t, p)),
            initial_state=start[b, h, :, p] if keep and start is not None else None,
        )

    def _finite(self) -> Problem:
        if self.problem is None:
            why, instead = "a window forgets whole tokens, as no A does", ""
            if self.spec.is_softmax:
                why, instead = "its features are infinite", " or .taylor(order) of the recurrence"
            raise FormError(f"{self.spec.name}: {why}, so A, B and C are not tensors; use kernel_matrix(){instead}")
        return self.problem


def _log_and_sign(x: Tensor) -> tuple[Tensor, Tensor]:
    """log |x|, and 1 or -1."""
    return x.abs().log(), torch.where(x < 0, -1.0, 1.0).to(x.dtype)


def cut(x: Tensor, batch: slice, rows: slice, heads: slice, channels: slice | None = None) -> Tensor:
    """Slices of x [B|1, rows|1, H|1, ..., P|1]. Axes of size one stay, as what they hold is shared."""
    for axis, part in ((0, batch), (1, rows), (2, heads), (-1, channels)):
        if part is not None and x.shape[axis] > 1:
            x = x[(slice(None),) * (axis % x.dim()) + (part,)]
    return x


def _select_problem(problem: Problem, b: slice, rows: slice, t: slice, h: slice, p: slice) -> Problem:
    def at(x: Tensor | None, rows: slice, channel: slice | None) -> Tensor | None:
        return None if x is None else cut(x, b, rows, h, channel)

    count = len(range(problem.p)[p]) if problem.p > 1 else 1
    decay, readout = at(problem.decay, rows, p), at(problem.readout, t, p)
    assert decay is not None and readout is not None
    return replace(
        problem, p=count, decay=decay, readout=readout,
        key=at(problem.key, rows, None), value=at(problem.value, rows, p), dense=at(problem.dense, rows, p),
        left=at(problem.left, rows, p), right=at(problem.right, rows, p), tie=at(problem.tie, rows, None),
        cross=at(problem.cross, rows, p),
        skip=at(problem.skip, t, p),
    )  # fmt: skip


def _select_attention(attention: Attention, parts: list[slice]) -> Attention:
    """The queries of tokens t, and all keys. Keys and values are first repeated for all heads."""
    b, t, h, p = parts
    heads = attention.a.shape[1]
    k, v = spread_heads(attention.k, heads), spread_heads(attention.v, heads)
    seen = attention.seen
    if seen is None and t != slice(None):
        tokens, places = attention.a.shape[2], k.shape[2]
        seen = torch.ones(1, 1, tokens, places, dtype=torch.bool, device=k.device).tril(places - tokens)

    def at(x: Tensor | None, channel: slice | None = None) -> Tensor | None:
        return None if x is None else cut(x, b, h, t, channel)

    decay = attention.decay
    first = attention.past + t.indices(attention.a.shape[2])[0]
    return Attention(
        attention.a[b, h, t], k[b, h], v[b, h, :, p], at(seen), at(attention.bias),
        None if attention.sink is None else attention.sink[h],
        None if decay is None else cut(decay, b, t, h), at(attention.share, p), attention.exponential,
        at(attention.skip, p), first,
    )  # fmt: skip
