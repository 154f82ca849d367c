"""Softmax attention: the KV cache as the state, against torch's own attention, and its Taylor truncations."""

import math
from itertools import pairwise

import pytest
import structures
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

import dsf
from dsf import I, Key, KVCache, Param, Scalar, System, Value, exp_features, mixers
from dsf.kernels import attention
from dsf.kernels.attention import causal, extend, fused, softmax_matrix, spread_heads, visible
from dsf.torch.evaluate import number_of

softmax = structures.softmax
FORMS = pytest.mark.parametrize("form", softmax.forms)


def operands(T: int = 7, B: int = 2, heads: tuple[int, int, int] = (6, 2, 3), dtype=torch.float64):
    """q, k, v with as many heads as asked; N = 3, P = 2."""
    return tuple(torch.randn(B, T, h, size, dtype=dtype) for h, size in zip(heads, (3, 3, 2), strict=True))


def sdpa(q, k, v):
    """torch's attention on [B, T, H, ·], every group's heads written out."""
    q, k, v = (spread_heads(x.transpose(1, 2), q.shape[2]) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0).transpose(1, 2)


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@FORMS
@pytest.mark.parametrize("heads", [(2, 2, 2), (6, 2, 2), (6, 2, 3), (6, 1, 6), (4, 4, 1)])
@pytest.mark.parametrize("T", [1, 9])
def test_softmax_is_torch_s_attention(form, heads, T):
    q, k, v = (x.requires_grad_() for x in operands(T, heads=heads))
    y, expected = softmax(q, k, v, form=form), sdpa(q, k, v)
    assert_same(y, expected)
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy), strict=True):
        assert_same(a, b)


@FORMS
def test_large_scores_do_not_overflow(form):
    q, k, v = operands(dtype=torch.float32)
    y = softmax(q * 1e3, k * 1e3, v, form=form)
    assert y.isfinite().all()
    torch.testing.assert_close(y, sdpa(q * 1e3, k * 1e3, v), rtol=1e-4, atol=1e-4)


def test_the_state_is_the_cache_with_the_heads_of_the_inputs():
    q, k, v = operands(7)
    _, cache = softmax(q, k, v, return_state=True)
    assert isinstance(cache, KVCache)
    assert cache.k.shape == (2, 2, 7, 3) and cache.v.shape == (2, 3, 7, 2)
    assert cache.lengths.tolist() == [7, 7]
    assert cache.numel() == 2 * 7 * (2 * 3 + 3 * 2)
    assert_same(cache.k.transpose(1, 2), k)


@pytest.mark.parametrize("form", ["chunk", "recurrent", "kernel", "naive"])
@pytest.mark.parametrize("name", ["softmax_attention", "alibi", "sliding_window_attention"])
def test_a_cache_keeps_the_memory_of_the_heads_that_differ(name, form):
    """It was a view of keys and values that were repeated for all heads."""
    r, g = mixers.get(name).recurrence, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 8, generator=g) for heads in (6, 3, 2))
    slope = {"slope": torch.rand(6, generator=g)} if name == "alibi" else {}
    _, cache = r(q, k, v, **slope, return_state=True, form=form)
    for x, heads in ((cache.k, 3), (cache.v, 2)):
        assert x.shape[1] == heads and x.untyped_storage().nbytes() == 4 * x.numel()


@FORMS
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_continuing_is_the_whole(form, cut):
    q, k, v = operands(7)
    whole, last = softmax(q, k, v, return_state=True)
    first, state = softmax(q[:, :cut], k[:, :cut], v[:, :cut], return_state=True, form=form)
    second, final = softmax(q[:, cut:], k[:, cut:], v[:, cut:], initial_state=state, return_state=True, form=form)
    assert_same(torch.cat([first, second], dim=1), whole)
    assert_same(final.k, last.k)
    assert torch.equal(final.lengths, last.lengths)


def test_stepping_grows_the_cache_by_one_token():
    q, k, v = operands(5)
    whole, cache = softmax(q, k, v), None
    for t in range(5):
        y, cache = softmax.step(cache, q[:, t], k[:, t], v[:, t])
        assert_same(y, whole[:, t])
        assert cache.k.shape[2] == t + 1 and cache.lengths.tolist() == [t + 1] * 2


@FORMS
def test_ragged_caches_continue_each_row_at_its_own_length(form):
    q, k, v = operands(12, B=1)
    _, cache = softmax(q, k, v, cu_seqlens=torch.tensor([0, 2, 12]), return_state=True, form=form)
    assert cache.lengths.tolist() == [2, 10]
    new = operands(3, B=2)
    y, final = softmax(*new, initial_state=cache, return_state=True, form=form)
    assert final.lengths.tolist() == [5, 13]
    for row, (start, end) in enumerate([(0, 2), (2, 12)]):
        joined = [torch.cat([x[:, start:end], n[row : row + 1]], dim=1) for x, n in zip((q, k, v), new, strict=True)]
        assert_same(y[row : row + 1], sdpa(*joined)[:, -3:])
        assert_same(final.k[row, :, : end - start + 3], joined[1][0].transpose(0, 1))


def test_packed_sequences_continue_ragged_caches():
    q, k, v = operands(6, B=1)
    _, cache = softmax(q, k, v, cu_seqlens=torch.tensor([0, 1, 6]), return_state=True)
    new = operands(7, B=1)
    y, final = softmax(*new, initial_state=cache, cu_seqlens=torch.tensor([0, 5, 7]), return_state=True)
    assert final.lengths.tolist() == [6, 7]
    for old, fresh in (((0, 1), (0, 5)), ((1, 6), (5, 7))):
        joined = [
            torch.cat([x[:, slice(*old)], n[:, slice(*fresh)]], dim=1) for x, n in zip((q, k, v), new, strict=True)
        ]
        assert_same(y[:, slice(*fresh)], sdpa(*joined)[:, old[1] - old[0] :])


def test_padding_of_a_cache_is_never_read():
    q, k, v = operands(4)
    _, cache = softmax(q, k, v, return_state=True)
    rubbish = KVCache(cache.k.clone(), cache.v.clone(), torch.tensor([2, 4]))
    rubbish.k[0, :, 2:], rubbish.v[0, :, 2:] = torch.nan, torch.nan
    clean = KVCache(cache.k.clone(), cache.v.clone(), torch.tensor([2, 4]))
    new = operands(2)
    for form in ("recurrent", "chunk"):
        y, final = softmax(*new, initial_state=clean, return_state=True, form=form)
        assert y.isfinite().all()
        assert final.lengths.tolist() == [4, 6]
    assert extend(rubbish, *(x.transpose(1, 2) for x in new[1:]), torch.tensor([2, 2])).k[0, :, :4].isfinite().all()


def test_visible_places_are_the_cache_and_the_past():
    cache = KVCache(torch.zeros(2, 1, 3, 1), torch.zeros(2, 1, 3, 1), torch.tensor([1, 3]))
    seen = visible(cache, 2, torch.device("cpu"))
    assert seen.shape == (2, 1, 2, 5)
    assert seen.sum(-1).squeeze(1).tolist() == [[2, 3], [4, 5]]
    assert visible(None, 2, torch.device("cpu")) is None


def test_the_future_changes_nothing():
    q, k, v = operands(9, dtype=torch.float32)
    y = softmax(q, k, v)
    k[:, 5:], v[:, 5:] = torch.randn_like(k[:, 5:]), torch.randn_like(v[:, 5:])
    assert torch.equal(softmax(q, k, v)[:, :5], y[:, :5])


@dsf.recurrence
def scaled_heads(q: Key, k: Key, v: Value, w: Param[Key], g: Scalar):
    return System(A=I, B=exp_features(g * k * w) * v, C=exp_features(q), normalize=dsf.ratio)


@FORMS
def test_parameters_of_a_head_are_not_shared_by_its_group(form):
    (q, k, v), w = operands(), torch.randn(6, 3, dtype=torch.float64)
    g = torch.randn(2, 7, 3, dtype=torch.float64)
    y, cache = scaled_heads(q, k, v, w, g, form=form, return_state=True)
    wide_k = k.repeat_interleave(3, 2) * g.repeat_interleave(2, 2).unsqueeze(-1) * w
    assert_same(y, sdpa(q, wide_k, v.repeat_interleave(2, 2)))
    assert (cache.k.shape[1], cache.v.shape[1]) == (6, 3), "a parameter of 6 heads spreads the keys alone"


@dsf.recurrence
def groups_of_groups(q: Key, k: Key, v: Value, g: Scalar):
    return System(A=I, B=exp_features(g * k) * v, C=exp_features(q), normalize=dsf.ratio)


@FORMS
def test_groups_of_different_sizes_meet_on_all_heads(form):
    (q, k, v), g = operands(), torch.randn(2, 7, 3, dtype=torch.float64)
    y, cache = groups_of_groups(q, k, v, g, form=form, return_state=True)
    wide_k = k.repeat_interleave(3, 2) * g.repeat_interleave(2, 2).unsqueeze(-1)
    assert_same(y, sdpa(q, wide_k, v.repeat_interleave(2, 2)))
    assert (cache.k.shape[1], cache.v.shape[1]) == (6, 3), "2 groups beside 3 groups differ on 6 heads"


@pytest.mark.parametrize("form", ["auto", "recurrent", "naive"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_cache_and_the_output_have_the_inputs_type(dtype, form):
    y, cache = softmax(*operands(dtype=dtype), return_state=True, form=form)
    assert y.dtype == cache.k.dtype == cache.v.dtype == dtype
    y, cache = softmax(*operands(dtype=dtype), initial_state=cache, return_state=True, form=form)
    assert y.dtype == cache.k.dtype == cache.v.dtype == dtype


@pytest.mark.parametrize("heads", [(6, 6, 6), (6, 2, 3)])
def test_what_the_fused_kernels_get_is_what_the_forms_compute(heads):
    from dsf.call import operands as call
    from dsf.call.bind import bind
    from dsf.call.run import timed_inputs
    from dsf.mixers import get

    q, k, v = operands(heads=heads)
    w, g = torch.randn(6, 3, dtype=torch.float64), torch.randn(2, 7, 2, dtype=torch.float64)
    for spec, given in ((get("softmax_attention").recurrence.spec, (q, k, v)), (scaled_heads.spec, (q, k, v, w, g))):
        bound = bind(spec, given, {})
        *found, scale = call.fused_operands(spec, bound, timed_inputs(spec, bound))
        whole = call.operands(spec, bound, timed_inputs(spec, bound))
        for x, y in zip(found, (whole.a / scale, whole.k, whole.v), strict=True):
            assert_same(x, y)
    assert found[0].data_ptr() == q.data_ptr() and scale == 1.0


def test_the_scale_is_a_number_while_a_graph_is_traced():
    """On a GPU the first call of a layer could not be one in a compiled graph."""
    number_of.cache_clear()
    with FakeTensorMode():
        assert number_of(mixers.softmax_attention.spec.readout.args[0].args[1], 16, 4) == 0.25


def test_taylor_truncations_converge_to_softmax():
    q, k, v = operands(9, heads=(2, 2, 2))
    q, k, exact = q / 2, k / 2, sdpa(q / 2, k / 2, v)
    errors = [(softmax.taylor(order)(q, k, v) - exact).abs().max().item() for order in range(0, 9, 2)]
    assert all(later < earlier / 2 for earlier, later in pairwise(errors)), errors
    assert errors[-1] < 1e-5


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_truncation_is_a_finite_recurrence_like_any_other(order):
    r = softmax.taylor(order)
    q, k, v = operands(9, heads=(2, 1, 2))
    scores = (q.transpose(1, 2) / 2) @ k.transpose(1, 2).mT
    kernel = sum(scores**p / torch.lgamma(torch.tensor(p + 1.0)).exp() for p in range(order + 1)).tril()
    expected = (kernel / kernel.sum(-1, keepdim=True)) @ v.transpose(1, 2)
    assert r.name == f"softmax_taylor{order}" and "scan" in r.forms
    for form in r.forms:
        y, state = r(q / 2, k, v, form=form, return_state=True)
        torch.testing.assert_close(y.transpose(1, 2), expected, rtol=1e-6, atol=1e-6)
        assert state.shape[2:] == r.state_shape(N=3, P=2) == (math.comb(3 + order, order), 2 + 1)


def appended(state, tokens, seed):
    """softmax_attention of `tokens` new tokens after a state, from a seed."""
    q, k, v = torch.randn(3, 2, tokens, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (q, k, v), mixers.softmax_attention(q, k, v, initial_state=state, return_state=True)


@torch.no_grad()
def test_a_decoded_token_is_written_where_the_cache_lies():
    _, (_, state) = appended(None, 5, 0)
    _, (_, state) = appended(state, 1, 1)  # moves it to memory with room
    place = state.k.data_ptr(), state.v.data_ptr()
    for seed in range(2, 30):
        _, (_, state) = appended(state, 1, seed)
        assert (state.k.data_ptr(), state.v.data_ptr()) == place and state.k.shape[2] == 4 + seed + 1


@pytest.mark.parametrize("grad", [False, True])
def test_a_cache_is_not_what_the_inputs_hold(grad):
    """Whoever writes the next token where the first one came from changed the first cache."""
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        states = [
            mixers.softmax_attention(q, k, v, return_state=True)[1],
            mixers.softmax_attention.step(None, q[:, 0], k[:, 0], v[:, 0])[1],
        ]
        kept = [(s.k.clone(), s.v.clone()) for s in states]
        k.zero_(), v.zero_()
    for state, (keys, values) in zip(states, kept, strict=True):
        assert torch.equal(state.k, keys) and torch.equal(state.v, values)


@torch.no_grad()
def test_caches_that_were_kept_stay_what_they_are_and_go_on_each_for_itself():
    pieces, (_, kept) = appended(None, 3, 0)
    for seed in (1, 2):
        more, (_, kept) = appended(kept, 1, seed)
        pieces = tuple(torch.cat(pair, 1) for pair in zip(pieces, more, strict=True))
    before = [x.clone() for x in (kept.k, kept.v, kept.lengths)]
    for seeds in ((5, 6, 7), (8, 9), range(10, 90)):  # branches, the last one beyond the room
        state, parts = kept, pieces
        for seed in seeds:
            new = 2 if seed % 3 == 0 else 1
            more, (y, state) = appended(state, new, seed)
            parts = tuple(torch.cat(pair, 1) for pair in zip(parts, more, strict=True))
            expected = mixers.softmax_attention(*parts)[:, -new:]
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert all(torch.equal(x, y) for x, y in zip(before, (kept.k, kept.v, kept.lengths), strict=True))


@torch.no_grad()
def test_a_cache_with_other_values_reads_these():
    """Its keys still lie in memory with room behind them, beside the values as they were."""
    q, k, v = torch.randn(3, 2, 9, 4, 8, dtype=torch.float64)
    _, cache = softmax(q[:, :7], k[:, :7], v[:, :7], return_state=True)
    _, cache = softmax(q[:, 7:8], k[:, 7:8], v[:, 7:8], initial_state=cache, return_state=True)
    y, _ = softmax(q[:, 8:], k[:, 8:], v[:, 8:], initial_state=cache._replace(v=-cache.v), return_state=True)
    assert_same(y, softmax(q, k, torch.cat([-v[:, :8], v[:, 8:]], 1))[:, 8:])


@torch.no_grad()
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("rejected", [torch.tensor([2, 2]), torch.tensor([3, 1])])
def test_tokens_taken_back_by_their_lengths_stay_in_caches_that_were_kept(rejected, written):
    """As a draft's rejected tokens are, which another branch may have accepted."""
    pieces, kept, state = [], [], None
    for seed in range(5):
        more, (_, state) = appended(state, 3 if seed == 0 else 1, seed)
        pieces.append(more)
        kept.append((state.k, state.v, state.k.clone(), state.v.clone()))
    q, k, v = (torch.cat(x, 1) for x in zip(*pieces, strict=True))
    if written:
        state.lengths.sub_(rejected)
    else:
        state = state._replace(lengths=state.lengths - rejected)
    new, (y, _) = appended(state, 1, 9)
    for row, left in enumerate((7 - rejected).tolist()):
        parts = (torch.cat([x[row : row + 1, :left], z[row : row + 1]], 1) for x, z in zip((q, k, v), new, strict=True))
        torch.testing.assert_close(y[row], mixers.softmax_attention(*parts)[0, -1:], rtol=0, atol=1e-12)
    assert all(torch.equal(x, before) and torch.equal(z, old) for x, z, before, old in kept)


@torch.no_grad()
def test_rows_of_unequal_lengths_are_appended_each_at_its_end():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 7, 4, 8, dtype=torch.float64)
    packed = {"cu_seqlens": torch.tensor([0, 2, 7])}
    _, state = mixers.softmax_attention(q, k, v, return_state=True, **packed)
    parts = [[x[:, :2], x[:, 2:]] for x in (q, k, v)]
    for seed in range(4):
        new, (y, state) = appended(state, 1, seed)
        for row in (0, 1):
            for place, x in enumerate(new):
                parts[place][row] = torch.cat([parts[place][row], x[row : row + 1]], 1)
            expected = mixers.softmax_attention(*(p[row] for p in parts))[:, -1]
            torch.testing.assert_close(y[row], expected[0, None], rtol=0, atol=1e-12)


def test_gradients_go_through_a_cache_that_was_decoded_from():
    with torch.no_grad():
        _, (_, state) = appended(None, 3, 0)
        _, (_, state) = appended(state, 1, 1)
    (q, k, v), _ = appended(state, 2, 2)
    leaf = k.clone().requires_grad_()
    y, after = mixers.softmax_attention(q, leaf, v, initial_state=state, return_state=True)
    assert torch.autograd.grad(y.sum() + after.k.sum(), leaf)[0].abs().sum() > 0
    assert after.k.data_ptr() != state.k.data_ptr()


def test_gradients_of_queries_alone_outlast_later_tokens():
    """No key wants a gradient, and yet these must stay what they are until the queries' gradient is taken."""
    q, k, v = torch.randn(3, 2, 9, 4, 8, dtype=torch.float64)
    q.requires_grad_()
    cache, found = None, []
    for t in (slice(0, 7), slice(7, 8), slice(8, 9)):
        y, cache = softmax(q[:, t], k[:, t], v[:, t], initial_state=cache, return_state=True)
        found.append(y)
    dq, expected = (torch.autograd.grad(y.square().sum(), q)[0] for y in (torch.cat(found, 1), softmax(q, k, v)))
    assert_same(dq, expected)


def test_a_second_thread_between_takes_memory_of_its_own(monkeypatch):
    """Two calls that go on from one cache, the second while the first has only found the cache's room."""
    first, second, others = (torch.randn(1, 2, 1, 4) for _ in range(3))
    found = []

    class Between(WeakTensorKeyDictionary):
        def _meddled(self, room):
            if not found:
                found.append(None)
                found[0] = attention.append(cache, second, others)
            return room

        def pop(self, key, *default):
            return self._meddled(super().pop(key, *default))

        def get(self, key, default=None):
            return self._meddled(super().get(key, default))

    start = attention.KVCache(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.tensor([3]))
    cache = attention.append(start, first, others)[0]  # the latest in memory with room
    monkeypatch.setattr(attention, "_ROOMS", Between(attention._ROOMS))
    mine = attention.append(cache, first, others)[0]
    theirs = found[0][0]
    assert torch.equal(mine.k, torch.cat([cache.k, first], 2))
    assert torch.equal(theirs.k, torch.cat([cache.k, second], 2))


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2), (6, 2, 3)])
@pytest.mark.parametrize("T", [1, 5, 9])
def test_queries_that_are_the_last_of_the_tokens(T, heads, monkeypatch):
    """With the mask stored, in rows of few entries, and as torch's kernels know it, which is what a GPU is given."""
    a, k, v = (torch.randn(2, h, t, 8, requires_grad=True) for h, t in zip(heads, (T, 9, 9), strict=True))
    keys, values = spread_heads(k, heads[0]), spread_heads(v, heads[0])
    seen = torch.arange(9) <= torch.arange(9)[-T:, None]
    assert torch.equal(causal(T, 9, a.device), seen)
    expected = F.scaled_dot_product_attention(a, keys, values, attn_mask=seen, scale=0.3)
    found = [fused(a, k, v, None, 0.3), softmax_matrix(0.3 * a, keys, None) @ values]
    monkeypatch.setattr(attention, "MASK", 20)  # two rows of 9
    found.append(fused(a, k, v, seen, 0.3))
    bias = attention._unstored(T, 9)
    found.append(F.scaled_dot_product_attention(a, keys, values, attn_mask=bias, scale=0.3))
    wanted = torch.autograd.grad(expected.sin().sum(), (a, k, v))
    for y in found:
        grads = torch.autograd.grad(y.sin().sum(), (a, k, v))
        for one, other in zip((y, *grads), (expected, *wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [None, lambda num, den: num / (1 + dsf.abs(den))], ids=["sum", "quotient"])
@pytest.mark.parametrize("form", ["naive", "recurrent", "chunk", "kernel"])
def test_windows_of_states_that_grow_are_not_scaled(form, rule):
    """Decays above 1: what is left of a window's first token is more than what was written."""

    @dsf.recurrence
    def growing(q: Key, k: Key, v: Value, a: Scalar) -> System:
        return System(A=dsf.exp(a), B=k * v, C=q, D=0 if rule else v, normalize=rule, window=3)

    torch.manual_seed(0)
    q, k = torch.rand(2, 1, 9, 1, 4, dtype=torch.float64)
    v, a = torch.rand(1, 9, 1, 2, dtype=torch.float64), 1 + torch.rand(1, 9, 1, dtype=torch.float64)
    y = growing(q, k, v, a, form=form)
    values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # num beside den
    for t in range(9):
        read = torch.zeros(3, dtype=torch.float64)
        for j in range(max(0, t - 2), t + 1):
            read += (q[0, t, 0] @ k[0, j, 0]) * a[0, j + 1 : t + 1, 0].sum().exp() * values[0, j, 0]
        expected = read[:-1] / (1 + read[-1].abs()) if rule else read[:-1] + v[0, t, 0]
        torch.testing.assert_close(y[0, t, 0], expected)
