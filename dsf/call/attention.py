"""Running one call of attention: exponential features, and systems with a window. The state is a KVCache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsf.call import packing
from dsf.call.bind import Bound, cache_layout, params_unrounded
from dsf.call.digits import sums_angles
from dsf.call.operands import Operands, fused_operands, kernel_operands, operands
from dsf.call.plan import Plan
from dsf.call.run import Timed, timed_inputs
from dsf.drive import multiple_of
from dsf.kernels import scores
from dsf.kernels.attention import KVCache, append, extend, fused, joined, spread_heads, visible, write_behind
from dsf.kernels.scores import FLOOR, Definition, Read, Scores, place_behind, place_of
from dsf.kernels.turns import turn_pairs, turned_and_rounded, whole_turns_left_out
from dsf.language.attention import divides_by_one
from dsf.language.errors import FormError
from dsf.language.expr import const
from dsf.language.spec import Spec
from dsf.language.system import DEN, NUM
from dsf.torch.lower import apply_linear_rule, apply_rule
from dsf.triton.attention import attend

FORMS = {"recurrent": scores.stepwise, "chunk": scores.blocks, "kernel": scores.dense}


def run_attention(
    spec: Spec, bound: Bound, bounds: list[int] | None, cache: KVCache | None, plan: Plan, wanted: bool = True
) -> tuple[Tensor, Any]:
    """y [B, T, H, P] in the computing dtype and the extended cache; kernels leave the cache out unless it is wanted."""
    if (plan.form == "naive" or sums_angles(spec, bound, plan)) and bound.compute != torch.float64:
        wide = replace(bound, compute=torch.float64)
        y, final = run_attention(spec, wide, bounds, cache, plan, wanted)
        if final is None:
            return y.to(bound.compute), None
        bias, angle = (None if x is None else x.to(bound.compute) for x in (final.bias, final.angle))
        return y.to(bound.compute), KVCache(final.k, final.v, final.lengths, bias, angle)
    timed = timed_inputs(spec, bound)
    if bounds is None:
        y, final = _run(spec, bound, timed, cache, None, plan, wanted)
        return y, _apart(final, bound) if wanted and cache is None else final
    outputs, caches, bound = [], [], params_unrounded(spec, bound)
    batches = packing.batches(bounds, bound.device)
    for batch in batches:
        start = None if cache is None else cache.rows(batch.chosen)
        y, final = _run(spec, bound, batch.take(timed), start, batch.counts, plan, True)
        outputs.append((batch, y))
        caches.append(final)
    rest = _untouched(spec, bound, cache, batches[0].without)
    whole = joined(caches if rest is None else [*caches, rest])
    return packing.unpack(outputs), whole.rows(batches[0].order)


def _apart(cache: KVCache, bound: Bound) -> KVCache:
    """A call's cache in memory of its own: a caller may write the next tokens where these came from."""
    if torch._C._are_functorch_transforms_active():  # where nothing is written
        return cache
    given = {x.untyped_storage()._cdata for x in bound.tensors.values()}
    k, v = (x.clone() if x.untyped_storage()._cdata in given else x for x in (cache.k, cache.v))
    return cache._replace(k=k, v=v)


def _untouched(spec: Spec, bound: Bound, cache: KVCache | None, rows: Tensor | None) -> KVCache | None:
    """The caches `rows` of sequences without tokens."""
    if rows is None:
        return None
    return empty_cache(spec, bound, len(rows)) if cache is None else cache.rows(rows)


def empty_cache(spec: Spec, bound: Bound, rows: int) -> KVCache:
    """The cache before the first token."""
    layout = cache_layout(spec, bound, rows, 0).values()
    k, v, lengths, bias, angle = (
        None if shape is None else torch.zeros(shape, dtype=dtype, device=bound.device) for shape, dtype in layout
    )
    assert k is not None and v is not None and lengths is not None
    return KVCache(k, v, lengths, bias, angle)


@dataclass(frozen=True)
class Summed:
    """a and k after their turns, and sums over tokens in float64: late [B, Hb, T], of log decays; early [B, Hb, T],
    gain - late; angle [B, Ha, T, ·], after every token. A score's bias is late of its query plus early of its key."""

    a: Tensor
    k: Tensor
    late: Tensor | None
    early: Tensor | None
    angle: Tensor | None


def summed(x: Operands, cache: KVCache | None, kind: torch.dtype = torch.float32) -> Summed:
    """The bias of scores, and turned queries and keys, rounded to `kind` if that is a half precision."""
    late = early = angle = None
    a, k = x.a, x.k
    if x.log is not None:
        late = x.log.cumsum(-1)
        early = -late if x.gain is None else x.gain - late
    if x.angle is not None:
        angle = x.angle.double().cumsum(2)
        angle = angle if cache is None or cache.angle is None else angle + cache.angle.double().unsqueeze(2)
        back = -whole_turns_left_out(angle, a.dtype)

        def turned(y: Tensor) -> Tensor:
            x, by = y.unsqueeze(-1), spread_heads(back, y.shape[1]).unsqueeze(-1)
            return (turned_and_rounded(x, by, kind) if kind.itemsize < 4 else turn_pairs(x, by)).squeeze(-1)

        a, k = turned(a), turned(k)
    return Summed(a, k, late, early, angle)


def _run(
    spec: Spec, bound: Bound, timed: Timed, cache: KVCache | None, counts: Tensor | None, plan: Plan, wanted: bool
) -> tuple[Tensor, Any]:
    window, form = spec.system.window, plan.form
    if plan.backend == "triton" and cache is None:
        return _on_triton(spec, bound, timed, counts, wanted)
    decoded = form == "recurrent" and cache is not None and counts is None and bound.sizes.tokens == 1
    if decoded and spec.is_plain_softmax and not torch.is_grad_enabled():
        form = "chunk"  # the same sums for one token; torch's attention reads the cache once
    if form == "chunk" and bound.device.type == "cuda" and spec.is_plain_softmax and not spec.turns:
        a, k, v, scale = fused_operands(spec, bound, timed)
        return _fused(a, k, v, scale, cache, counts, bound.dtype)
    x = operands(spec, bound, timed)
    s = summed(x, cache)
    if form == "chunk" and spec.is_plain_softmax:
        if bound.device.type == "cuda":  # torch's fused attention takes turned queries and keys in the inputs' dtype
            a, k, v = (y.to(bound.dtype) for y in (s.a, s.k, x.v))
            return _fused(a, k, v, 1.0, cache, counts, bound.dtype, s)
        return _fused(s.a, s.k, x.v, 1.0, cache, counts, bound.dtype, s)
    if cache is not None and form != "naive" and counts is None and _may_append(cache, s.k, x.v):
        found = append(cache, s.k, x.v, window)
        if found is not None:
            return _behind(spec, x, s, cache, found, form)
    cache, counts = None if cache is None else cache.to(bound.compute), _counts(counts, s.a)
    if form == "naive":
        read = scores.definition(_definition(spec, x), cache)
    else:
        read = FORMS[form](scores_of(spec, x, s, cache))
    return finish(spec, x, read), _extended(cache, s, x.v, counts, window).to(bound.dtype)


def _on_triton(spec: Spec, bound: Bound, timed: Timed, counts: Tensor | None, wanted: bool) -> tuple[Tensor, Any]:
    """The attention kernels: exponential features with a bias, a window or another rule than num / den, no cache.

    Bare inputs are not evaluated: queries, keys and values of half precision reach the kernel unchanged.
    """
    x, scale = kernel_operands(spec, bound, timed)
    wide = bound.compute
    if x.angle is not None:
        x = replace(x, a=x.a.to(wide), k=x.k.to(wide))
    s = summed(x if wanted else replace(x, log=None), None, bound.dtype)
    y, lse = attend(s.a, s.k, x.v, x.log, scale, spec.system.window)
    final = None
    if wanted:
        kept = replace(s, a=s.a[:, :, :0].to(wide), k=s.k.to(bound.dtype))  # of a, the dtype of biases alone
        final = _extended(None, kept, x.v, _counts(counts, x.a), spec.system.window)
    return after_kernels(spec, x, y, lse, wide), final


def after_kernels(spec: Spec, x: Operands, y: Tensor, lse: Tensor, wide: torch.dtype) -> Tensor:
    """y [B, T, H, P] of what the kernels made: its own, or in a wide dtype the rule applied to num, den and one."""
    if spec.rule is NUM / DEN:
        return y.transpose(1, 2)
    m = lse.detach().clamp(min=FLOOR)
    total = (lse - m).exp()
    return finish(spec, x, Read(y.to(wide) * total.unsqueeze(-1), total, m))


def _counts(counts: Tensor | None, a: Tensor) -> Tensor:
    """Tokens of each row: `counts`, or T where there is no padding."""
    whole = torch.full((a.shape[0],), a.shape[2], dtype=torch.int64, device=a.device)
    return whole if counts is None else counts


def scores_of(spec: Spec, x: Operands, s: Summed, cache: KVCache | None) -> Scores:
    """The forms' operands; keys and values of the cache come first."""
    window = spec.system.window
    place = place_of(cache, s.a.shape[2], window, s.a.device)
    k, v, early = s.k, x.v, s.early
    if cache is not None:
        k, v = torch.cat([cache.k.to(k.dtype), k], dim=2), torch.cat([cache.v.to(v.dtype), v], dim=2)
        if early is not None:
            assert cache.bias is not None
            early = torch.cat([cache.bias.double(), early], dim=2)
    return Scores(s.a, k, v, place, s.late, early, window, *scores_options(spec))


def _behind(
    spec: Spec, x: Operands, s: Summed, cache: KVCache, found: tuple[KVCache, Tensor, Tensor], form: str
) -> tuple[Tensor, KVCache]:
    """y and the final cache where `append` wrote the new tokens into the cache's spare memory; found: its result."""
    after, k, v = found
    left, bias, angle = _ends(s, _counts(None, s.a))
    early = s.early
    if early is not None and cache.bias is not None and bias is not None and left is not None:
        blank = (0, early.shape[2])
        early = write_behind(pad(cache.bias.double(), blank), early, cache)
        bias = write_behind(pad(cache.bias + left.unsqueeze(-1), blank), bias, cache)[:, :, -after.k.shape[2] :]
    place = place_behind(cache, s.a.shape[2])
    read = FORMS[form](Scores(s.a, k, v, place, s.late, early, spec.system.window, *scores_options(spec)))
    return finish(spec, x, read), KVCache(after.k, after.v, after.lengths, bias, angle)


def scores_options(spec: Spec) -> tuple[bool, float]:
    """Whether weights are exponentials of scores, and the lower bound of a row's maximum."""
    return spec.is_softmax, FLOOR if divides_by_one(spec) else -float("inf")


def _definition(spec: Spec, x: Operands) -> Definition:
    """The oracle's operands, with the decay itself, not its logarithm."""
    batch, _, tokens, _ = x.k.shape
    ones = x.a.new_ones(batch, 1, tokens)
    decay = gain = ones
    if x.log is not None:
        every = x.a.shape[1] // x.log.shape[1]
        found = x.values(spec.rows[0].normal.decay).squeeze(-1).squeeze(-1)
        decay = found.expand(batch, tokens, x.a.shape[1])[:, :, ::every].transpose(1, 2)
        gain = torch.ones_like(decay) if x.gain is None else x.gain.exp()
    return Definition(x.a, x.k, x.v, decay, gain, x.angle, spec.system.window, spec.is_softmax)


def finish(spec: Spec, x: Operands, read: Read) -> Tensor:
    """y [B, T, H, P]: the rule applied to num, den and one, or num times C's gate plus D."""
    read = _unscaled(spec, x, read)
    num = read.num.transpose(1, 2)
    if spec.rule is None:
        y = num if x.gate is None else num * x.gate
        return y if x.skip is None else y + x.skip
    den, m = (y.transpose(1, 2).unsqueeze(-1) for y in (read.total, read.m))
    return apply_rule(spec, x.values, num, den, (-m).exp())


def _unscaled(spec: Spec, x: Operands, read: Read) -> Read:
    """The sums themselves where weights are neither exponentials nor have gains: decays above 1 alone scale them, and
    neither D nor a rule without `one` knows of a scale."""
    if spec.is_softmax or x.log is None or x.gain is not None:
        return read
    scale = read.m.exp()
    return Read(read.num * scale.unsqueeze(-1), read.total * scale, torch.zeros_like(read.m))


def _extended(cache: KVCache | None, s: Summed, v: Tensor, counts: Tensor, window: int | None) -> KVCache:
    """The cache after these tokens, with biases relative to the last one."""
    left, bias, angle = _ends(s, counts)
    return extend(cache, s.k, v, counts, bias, left, angle, window)


def _ends(s: Summed, counts: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Each row's sum of log decays [B, Hb], its tokens' biases relative to the last one, and the last angle."""
    left = bias = angle = None
    last = counts - 1
    if s.late is not None and s.early is not None:
        left = s.late.gather(2, last[:, None, None].expand(-1, s.late.shape[1], 1)).squeeze(-1)
        bias, left = (s.early + left.unsqueeze(-1)).to(s.a.dtype), left.to(s.a.dtype)
    if s.angle is not None:
        index = last[:, None, None, None].expand(-1, s.angle.shape[1], 1, s.angle.shape[3])
        angle = whole_turns_left_out(s.angle.gather(2, index).squeeze(2), s.a.dtype)
    return left, bias, angle


def _fused(
    a: Tensor, k: Tensor, v: Tensor, scale: float, cache: KVCache | None, counts: Tensor | None, dtype: torch.dtype,
    s: Summed | None = None,
) -> tuple[Tensor, KVCache]:  # fmt: skip
    """Softmax attention without decay: torch's fused attention."""
    even, counts = counts is None, _counts(counts, a)
    whole, seen = KVCache(k, v, counts), visible(cache, a.shape[2], a.device)
    if cache is not None and seen is not None:
        found = append(cache, k, v) if even and _may_append(cache, k, v) else None
        if found is not None:
            angle = None if s is None else _ends(s, counts)[2]
            return fused(a, found[1], found[2], seen, scale).transpose(1, 2), KVCache(*found[0][:4], angle)
        cache = cache.to(k.dtype)
        whole = extend(cache, k, v, torch.full_like(counts, a.shape[2]))
        seen = seen[..., : whole.k.shape[2]]
    y = fused(a, whole.k, whole.v, seen, scale).transpose(1, 2)
    if s is None or s.angle is None:
        return y, extend(cache, k, v, counts).to(dtype)
    return y, _extended(cache, replace(s, k=k), v, counts, None).to(dtype)


def _may_append(cache: KVCache, k: Tensor, v: Tensor) -> bool:
    """Whether new tokens may be written into a cache's memory: no tracing, torch.func or gradients."""
    plain = all(type(x) is Tensor and not x.requires_grad for x in (cache.k, cache.v, k, v))
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return plain and not traced and not torch.is_grad_enabled()


def attention_of(spec: Spec, bound: Bound, timed: Timed) -> dict[str, Any]:
    """The fields of dsf.trajectory.Attention, by name. Raises FormError for a D that is no multiple of the values."""
    x = operands(spec, bound, timed)
    s = summed(x, None)
    if spec.is_plain_softmax:
        return {"a": s.a, "k": s.k, "v": x.v}
    found = scores_of(spec, x, s, None)
    tokens = s.a.shape[2]
    seen, bias = found.seen(0, tokens, slice(0, tokens)), found.bias(0, tokens, slice(0, tokens))
    decay = None if x.log is None else spread_heads(x.log, s.a.shape[1]).exp().to(s.a.dtype).transpose(1, 2)
    share = None
    if spec.rule is not None:
        read = _unscaled(spec, x, scores.dense(found))
        unit = read.total.transpose(1, 2).unsqueeze(-1)
        num = unit if spec.is_softmax else torch.ones_like(unit)
        one = (-read.m).exp().transpose(1, 2).unsqueeze(-1)
        share = apply_linear_rule(spec, x.values, num, unit, one).transpose(1, 2)
        share = share if spec.is_softmax else share * (-read.m).exp().unsqueeze(-1)
    elif x.gate is not None:
        share = x.gate.transpose(1, 2)
    return {
        "a": s.a, "k": s.k, "v": x.v, "seen": seen, "bias": bias, "decay": decay, "share": share,
        "exponential": spec.is_softmax, "skip": None if x.skip is None else _own(spec, x),
    }  # fmt: skip


def no_matrix(spec: Spec) -> str | None:
    """Why the matrix of the weights of values cannot hold D, or None."""
    value = spec.rows[0].terms[0].value
    if spec.system.D is const(0) or multiple_of(spec.system.D, value) is not None:
        return None
    return (
        f"D = {spec.system.D} is no multiple of {value}, the values that the window keeps, so the matrix of their "
        "weights cannot hold it; leave D out and add it to y"
    )


def _own(spec: Spec, x: Operands) -> Tensor:
    """D as a factor of the token's value [B, H, T, p]."""
    why, found = no_matrix(spec), multiple_of(spec.system.D, spec.rows[0].terms[0].value)
    if found is None:
        raise FormError(f"{spec.name}: {why}")
    return x.values(found).squeeze(-2).transpose(1, 2)
