"""The measurement of laws: a run with all its gradients, and the distance of two tensors, head by head."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.call.bind import Sizes, bind
from dsf.call.recurrence import Recurrence, State
from dsf.checking.examples import Example, generator_of
from dsf.checking.states import changed
from dsf.checking.values import Range
from dsf.kernels.attention import KVCache
from dsf.language.annotations import Kind
from dsf.language.errors import FormError
from dsf.torch.columns import columns
from dsf.torch.evaluate import DISTURBANCE, disturbed

Run = Callable[..., tuple[Tensor, State | None]]  # as Subject.run
BLOCK = 16  # tokens whose error is measured together
KEPT = 24  # outcomes at a time, of a few examples in all forms
DISTURBED = 4  # random disturbances for a condition estimate
ORACLE, AGAINST, KERNELS = "naive", "against", "triton"  # KERNELS: any form of the triton backend
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}

# The error of a head's block is relative to the block's norm, but at least to this share of the head's typical block
# and (second number) of the largest block of the tensors that it is computed from. In a smaller block the terms of its
# sum cancelled, and any order of summation loses the digits that a comparison would need: tolerance times share
# is 5,000 (second number: 500) roundings in float64, 170 (500) in float32 and half a rounding of the output in half
# precisions. This happens where a chunk's triangular system erases the state. Outputs and final states are computed
# from states, whose size the initial state, outputs and final state show; gradients from each other; gradients through
# the final state also from its cotangent, whose entries are near 1.
RESOLUTION = {
    "float64": (1e-3, 1e-4),
    "float32": (1e-1, 3e-1),
    "bfloat16": (1e-1, 1e-1),
    "float16": (1e-1, 1e-1),
}
HALF = ("bfloat16", "float16")  # dtypes in which the terms of a sum are rounded more than the sum
LARGEST = {"float64": 1e300, "float32": 1e37, "bfloat16": 1e37, "float16": 6e4}


@dataclass(frozen=True)
class Outcome:
    """One run and its gradients. state: tensors of the final state in the true scale, () if there is none.

    start: the largest typical entry of the initial state. grads: of ⟨y, dy⟩; state_grads: of ⟨final state, dS⟩; by
    input name, "initial_state" included. terms, state_terms: in half precisions, for the Params' gradients the root of
    the sum of squares of all tokens' parts (`Subject.terms`). condition: computes these tensors' errors per relative
    error of the declaration's expressions (`Subject.condition`).
    """

    y: Tensor
    state: tuple[Tensor, ...]
    start: float = 0.0
    grads: Mapping[str, Tensor] = field(default_factory=dict)
    state_grads: Mapping[str, Tensor] = field(default_factory=dict)
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    state_terms: Mapping[str, Tensor] = field(default_factory=dict)
    condition: Callable[[], Outcome] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Subject:
    """The subject of a check: a recurrence, or a user's function against it, on inputs of the given ranges."""

    recurrence: Recurrence
    ranges: Mapping[str, Range]
    against: Callable[..., Any] | None = None
    device: torch.device | str = "cpu"
    backend: str = "auto"
    cache: dict[tuple[str, str], Outcome] = field(default_factory=dict, repr=False)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of every input."""
        return {i.name: i.kind for i in self.recurrence.spec.inputs}

    @property
    def against_takes_state(self) -> bool:
        """True when the user's function has a parameter initial_state."""
        return self.against is not None and "initial_state" in inspect.signature(self.against).parameters

    @property
    def has_decode_kernel(self) -> bool:
        """True when one token without gradients runs on the triton backend."""
        try:
            self.recurrence.plan(T=1, N=4, P=2, form="recurrent", backend=KERNELS, device=self.device)
        except FormError:
            return False
        return True

    def supports(self, form: str, example: Example) -> Example:
        """The example; for a user's function without grouped heads and, if it takes none, without initial state."""
        if form != AGAINST:
            return example
        return replace(example, groups={}, initial=example.initial and self.against_takes_state)

    def inputs(self, example: Example) -> dict[str, Tensor]:
        """The example's tensors."""
        return example.inputs(self.recurrence, self.ranges, self.device)

    def state(self, example: Example, rows: int = 0) -> State | None:
        """The example's initial state."""
        return example.state(self.recurrence, self.ranges, self.device, rows)

    def sizes(self, inputs: Mapping[str, Tensor]) -> Sizes:
        """B, T, H, N, P of a call."""
        return bind(self.recurrence.spec, (), inputs).sizes

    def part(self, inputs: Mapping[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
        """The inputs of some tokens, Params whole."""
        kinds = self.kinds
        return {name: x[:, begin:end] if kinds[name].time else x for name, x in inputs.items()}

    def run(
        self, form: str, inputs: Mapping[str, Tensor], state: State | None = None, cu_seqlens: Tensor | None = None,
        parallel: Any = None, reverse: bool = False,
    ) -> tuple[Tensor, State | None]:  # fmt: skip
        """y and the final state (None when the user's function returns none)."""
        if form != AGAINST:
            backend = {ORACLE: "auto", KERNELS: KERNELS}.get(form, self.backend)
            how = {"form": "auto" if form == KERNELS else form, "backend": backend}
            call: dict[str, Any] = {**inputs, "initial_state": state, **how}
            options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "parallel": parallel, "reverse": reverse}
            y, final = self.recurrence(**call, **options, return_state=True)
            return y, final
        assert self.against is not None
        options = {} if state is None else {"initial_state": state}
        result = self.against(*inputs.values(), **options)
        return result if isinstance(result, tuple) else (result, None)

    def truth(self, state: State | None, p: int) -> tuple[Tensor, ...]:
        """A state as comparable float64 tensors: in the true scale, a cache cut to its used entries."""
        if state is None:
            return ()
        if isinstance(state, KVCache):
            state, used = state.map(Tensor.double), state.in_use()[:, None]
            kept = [x * used[..., None] for x in (state.k, state.v)]
            kept += [] if state.bias is None else [(state.bias * used).exp()]
            kept += [] if state.angle is None else [state.angle.cos(), state.angle.sin()]
            return *kept, state.lengths[:, None].double()
        own = self.recurrence.true_state(state.double(), p)
        remembered = state.double()[..., columns(self.recurrence.spec.inner, p).total :]
        return (own, remembered) if remembered.shape[-1] else (own,)

    def outcome(self, form: str, example: Example) -> Outcome:
        """The example's run by one form with all gradients; the oracle in float64 on the same rounded inputs."""
        key = (form, repr(example))
        found = self.cache.get(key)
        if found is None:
            if len(self.cache) > KEPT:
                self.cache.clear()
            inputs, state = self.inputs(example), self.state(example)
            dy = cotangent(example, self.sizes(inputs)).to(example.torch_dtype).to(self.device)
            if form == ORACLE:
                inputs, dy = {name: x.double() for name, x in inputs.items()}, dy.double()
                state = changed(state, Tensor.double)
            found = self.differentiate(form, inputs, state, dy, example.seed)
            if form == ORACLE and example.dtype in HALF:
                terms, state_terms = self.terms(inputs, state, dy, example.seed)
                found = replace(found, terms=terms, state_terms=state_terms)
            self.cache[key] = found  # other threads may clear it
        return found

    def terms(
        self, inputs: Mapping[str, Tensor], state: State | None, dy: Tensor, seed: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The size of Params' gradients without cancellation: √Σ_t g_t², of ⟨y, dy⟩ and of ⟨final state, dS⟩.

        g_t: token t's part, by the oracle with a separate Param for every token. Each has the Param's shape.
        """
        params = [name for name, kind in self.kinds.items() if not kind.time]
        if not params:
            return {}, {}
        tokens = dy.shape[1]
        stacked = {name: x.expand(tokens, *x.shape) if name in params else x for name, x in inputs.items()}

        def one_by_one(form: str, given: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
            outputs = []
            for t in range(tokens):
                now = {name: x[t] if name in params else x[:, t : t + 1] for name, x in given.items()}
                y, state = self.run(form, now, state)
                outputs.append(y)
            return torch.cat(outputs, dim=1), state

        found = self.differentiate(ORACLE, stacked, state, dy, seed, one_by_one)
        each = found.grads, found.state_grads
        terms, state_terms = ({n: g[n].square().sum(0).sqrt() for n in params if n in g} for g in each)
        return terms, state_terms

    def differentiate(
        self,
        form: str,
        inputs: Mapping[str, Tensor],
        state: State | None,
        dy: Tensor,
        seed: int,
        run: Run | None = None,
    ) -> Outcome:
        """Run and differentiate ⟨y, dy⟩ and ⟨final state, random⟩ in every input and the initial state."""
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        start = changed(state, lambda x: x.detach().requires_grad_())
        y, final = (run or self.run)(form, leaves, start)
        p = y.shape[-1]
        truth = self.truth(final, p)
        wrt = leaves | self.state_leaves(start)
        generator = generator_of(seed + 2)
        ds = [torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x) for x in truth]
        grads = gradients((y * dy.to(y)).sum(), wrt)
        of_state = gradients(sum((x * d).sum() for x, d in zip(truth, ds, strict=True)), wrt) if truth else {}
        parts = tuple(x.detach() for x in truth)
        size = max((typical_entry(x, None) for x in self.truth(state, p)), default=0.0)
        grads, of_state = self.without_gain(grads, p), self.without_gain(of_state, p)
        return Outcome(
            y.detach(), parts, size, grads, of_state,
            condition=lambda: self.condition(inputs, state, dy, seed, run),
        )  # fmt: skip

    def condition(
        self,
        inputs: Mapping[str, Tensor],
        state: State | None,
        dy: Tensor,
        seed: int,
        run: Run | None,
    ) -> Outcome:
        """The oracle's errors under small random relative errors of every expression, divided by their size.

        A gradient through l2norm(u) with u near 0, for example, is a small difference of large numbers: any form loses
        digits there, because the recurrence is ill-conditioned.
        """
        wide = {name: x.double() for name, x in inputs.items()}
        start = changed(state, Tensor.double)
        a = self.differentiate(ORACLE, wide, start, dy.double(), seed, run)
        found = Outcome(torch.zeros_like(a.y), tuple(map(torch.zeros_like, a.state)))
        for draw in range(DISTURBED):
            with disturbed(seed + draw):
                b = self.differentiate(ORACLE, wide, start, dy.double(), seed, run)
            found = Outcome(
                _farther(found.y, a.y, b.y),
                tuple(map(_farther, found.state, a.state, b.state)),
                grads={n: _farther(found.grads.get(n), x, b.grads[n]) for n, x in a.grads.items()},
                state_grads={
                    n: _farther(found.state_grads.get(n), x, b.state_grads[n]) for n, x in a.state_grads.items()
                },
            )
        return found

    @staticmethod
    def state_leaves(state: State | None) -> dict[str, Tensor]:
        """The differentiable tensors of an initial state."""
        if state is None:
            return {}
        if isinstance(state, KVCache):
            found = {"k": state.k, "v": state.v, "bias": state.bias, "angle": state.angle}
            return {f"initial_state.{name}": x for name, x in found.items() if x is not None}
        return {"initial_state": state}

    def without_gain(self, grads: dict[str, Tensor], p: int) -> dict[str, Tensor]:
        """The gradients without those of the running maximum of an initial state, which is a free choice of scale."""
        return without_gain(self.recurrence, grads, p)


def without_gain(recurrence: Recurrence, grads: dict[str, Tensor], p: int) -> dict[str, Tensor]:
    """`Subject.without_gain` for a recurrence."""
    layout = columns(recurrence.spec.inner, p)
    if layout.gain and "initial_state" in grads:
        whole = grads["initial_state"]
        grads["initial_state"] = torch.cat([whole[..., : layout.p + layout.den], whole[..., layout.total :]], dim=-1)
    return grads


def _farther(known: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in units of the disturbance, plus that of other draws, as a single one may vanish by chance."""
    off = (a - b).abs() / DISTURBANCE
    return off if known is None else known + off


def gradients(loss: Any, wrt: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient of a scalar in every named leaf, zeros where it does not depend on it."""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return {name: torch.zeros_like(x) for name, x in wrt.items()}
    found = torch.autograd.grad(loss, list(wrt.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wrt.items(), found, strict=True)}


def cotangent(example: Example, sizes: Sizes) -> Tensor:
    """dy [B, T, H, P], float64."""
    generator = generator_of(example.seed + 1)
    return torch.randn(sizes.batch, sizes.tokens, sizes.heads, sizes.p, generator=generator, dtype=torch.float64)


def by_head(x: Tensor, kind: Kind | None) -> Tensor:
    """x as [B · heads, blocks of tokens, numbers]; kind None: a state [B, H, ...]."""
    if kind is not None and not kind.time:
        return x.reshape(x.shape[0], 1, -1)
    if kind is None:
        return x.reshape(x.shape[0] * max(1, x.shape[1]), 1, -1)
    x = x.movedim(2 + (kind.steps is not None), 1).flatten(3) if x.dim() > 3 else x.movedim(2, 1).unsqueeze(-1)
    missing = -x.shape[2] % BLOCK
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2] // BLOCK, -1)


def distance(
    got: Tensor, expected: Tensor, kind: Kind | None, dtype: str, scale: float = 0.0, terms: Tensor | None = None,
    condition: Tensor | None = None,
) -> float:  # fmt: skip
    """Worst relative error over heads and token blocks; see RESOLUTION.

    scale: typical_entry of the tensors that it is computed from. terms: for a sum its size without cancellation, to
    which errors of half precisions are relative. condition: its error per relative error of the expressions, one more
    scale. Infinite for a wrong shape or a number that is not finite; 0 where an expected number exceeds the dtype.
    """
    if got.shape != expected.shape:
        return math.inf
    if expected.numel() == 0 or not float(expected.abs().max()) <= LARGEST[dtype]:  # NaN is no more than anything
        return 0.0
    if not got.isfinite().all():
        return math.inf
    return float(misfits(got, expected, kind, dtype, scale, terms, condition).max())


def misfits(
    got: Tensor, expected: Tensor, kind: Kind | None, dtype: str, scale: float = 0.0, terms: Tensor | None = None,
    condition: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Relative errors [B · heads, blocks of tokens], of which `distance` is the largest."""
    ref = by_head(expected.double(), kind)
    difference = by_head(got.double(), kind) - ref
    share, floor = RESOLUTION[dtype]
    own = ref.norm(dim=-1)
    typical = own.norm(dim=-1, keepdim=True) / math.sqrt(own.shape[-1])
    least = max(scale, _largest(own, ref.shape[-1])) * floor * math.sqrt(ref.shape[-1])
    limits = torch.finfo(torch.float64 if dtype == "float64" else torch.float32)
    least = max(least, limits.tiny / limits.eps)  # smaller numbers lose digits (subnormal)
    size = torch.maximum(own, share * typical).clamp(min=least)
    if condition is not None and condition.dim():
        size = torch.maximum(size, floor * by_head(condition.double(), kind).norm(dim=-1))
    if terms is not None:
        size = torch.maximum(size, by_head(terms.double(), kind).norm(dim=-1))
    error = difference.norm(dim=-1)
    return torch.where(error == 0, 0.0, error / size)


def typical_entry(x: Tensor, kind: Kind | None) -> float:
    """Root mean square of the largest block of a tensor; 0 if it is not finite."""
    if not x.numel():
        return 0.0
    blocks = by_head(x.detach().double(), kind)
    return _largest(blocks.norm(dim=-1), blocks.shape[-1])


def _largest(norms: Tensor, width: int) -> float:
    """`typical_entry` of blocks of so many numbers."""
    largest = float(norms.max()) / math.sqrt(width)
    return largest if math.isfinite(largest) else 0.0
