"""A token of attention over a cache in fixed memory in Triton's interpreter, against its definition in float64."""

import pytest
import torch
from interpreted import interpreted

from dsf.kernels.attention import Filled, KVCache
from dsf.kernels.fixed_cache import attend, fixed, step, write

pytestmark = interpreted

# rows' lengths, heads, heads of keys, N, P, places, a window
CASES = [
    ((0, 5, 63), 2, 2, 16, 16, 64, None), ((200, 1), 4, 2, 24, 40, 256, None), ((7, 40, 100), 2, 1, 16, 8, 32, 32),
    ((31, 32), 3, 1, 8, 8, 32, 32),
]  # fmt: skip


def cache_of(lengths, groups, n, p, places, window, dtype, biased=0):
    """biased: heads of biases, 0 for none."""
    g = torch.Generator().manual_seed(1)
    held = max(1, min(max(lengths), places))
    k, v = (torch.randn(len(lengths), groups, held, w, generator=g).to(dtype) for w in (n, p))
    bias = -torch.rand(len(lengths), biased, held, generator=g) if biased else None
    return fixed(KVCache(k, v, torch.tensor(lengths), bias), places, window)


def copied(cache, kind=None):
    made = cache.map(lambda x: x.to(x.dtype if kind is None else kind, copy=True))
    return made._replace(lengths=cache.lengths.clone(), filled=Filled(cache.filled.most))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("decays", ["none", "keys", "queries", "gains"])
def test_five_tokens(decays, case, dtype):
    from dsf.kernels.triton.attention.step import attention_step

    lengths, heads, groups, n, p, places, window = case
    biased = {"none": 0, "keys": groups, "queries": heads, "gains": 1}[decays]
    cache = cache_of(lengths, groups, n, p, places, window, dtype, biased)
    exact, by_torch, ring = copied(cache, torch.float64), copied(cache), places == window
    g = torch.Generator().manual_seed(2)
    for _ in range(5 if ring or max(lengths) + 5 <= places else 1):
        a, k, v = (torch.randn(len(lengths), h, w + 3, generator=g)[..., None, 3:] for h, w in
                   ((heads, n), (groups, n), (groups, p)))  # fmt: skip
        a, k, v = (x.to(dtype) for x in (a, k, v))
        log, gain = (-torch.rand(len(lengths), max(1, biased), 1, generator=g) for _ in range(2))
        log, gain = None if decays in ("none", "gains") else log, None if decays in ("none", "keys") else gain
        kept = cache.k, cache.v, cache.bias, cache.lengths
        found = attention_step(a, k, v, log, gain, *kept, 0.3, ring)
        wide = [None if x is None else x.double() for x in (a, k, v, log, gain)]
        wanted = attend(wide[0], *write(exact, *wide[1:], window, places), 0.3)
        other = step(by_torch, a, k, v, log, gain, 0.3, window, places)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        assert ((found.double() - wanted).abs().amax((0, 2, 3)) <= tolerance * wanted.abs().amax((0, 2, 3))).all()
        assert ((other.double() - wanted).abs().amax((0, 2, 3)) <= tolerance * wanted.abs().amax((0, 2, 3))).all()
        assert torch.equal(cache.lengths, exact.lengths)
        assert torch.equal(cache.k.double(), exact.k) and torch.equal(cache.v.double(), exact.v)
        assert torch.allclose(cache.bias.double(), exact.bias, rtol=1e-6)
