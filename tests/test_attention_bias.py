"""Softmax with a transition, windows of any kind, sinks and turns: the laws, the papers' formulas, caches, refusals."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dsf
from dsf import (
    FormError,
    I,
    InputError,
    Key,
    KVCache,
    N,
    Pair,
    Param,
    Scalar,
    System,
    TraceError,
    Value,
    exp,
    exp_features,
    l2norm,
    ratio,
    sigmoid,
    turn,
)  # fmt: skip
from dsf.kernels import scores


def with_sink(s):
    return lambda num, den, one: num / (den + exp(s) * one)


@dsf.recurrence
def everything(q: Key, k: Key, v: Value, f: Scalar, t: Scalar, s: Param[Scalar]):
    c, write = exp_features(q * N**-0.5), exp_features(k) * v
    return System(A=sigmoid(f) * turn(t), B=write, C=c, normalize=with_sink(s), window=5)


@dsf.recurrence
def forgetting(q: Key, k: Key, v: Value, f: Scalar):
    return System(A=sigmoid(f), B=exp_features(k) * v, C=exp_features(q), normalize=ratio)


@dsf.recurrence
def alibi(q: Key, k: Key, v: Value, slope: Param[Scalar]):
    return System(A=exp(-exp(slope)), B=exp_features(k) * v, C=exp_features(q), normalize=ratio)


@dsf.recurrence
def forgotten(q: Key, k: Key, v: Value, s: Param[Scalar]):
    return System(A=sigmoid(s), B=exp_features(l2norm(k)) * v, C=exp_features(N**-0.5 * q), normalize=ratio)


@dsf.recurrence
def sliding(q: Key, k: Key, v: Value):
    return System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=ratio, window=4)


@dsf.recurrence
def sinking(q: Key, k: Key, v: Value, s: Param[Scalar]):
    return System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=with_sink(s))


@dsf.recurrence
def rotary(q: Key, k: Key, v: Value, t: Pair):
    return System(A=turn(t), B=exp_features(k) * v, C=exp_features(q), normalize=ratio)


@dsf.recurrence
def linear(q: Key, k: Key, v: Value, a: Scalar, o: Value, D: Param[Value]):
    return System(A=sigmoid(a), B=k * v, C=q * sigmoid(o), D=D * v, window=4)


@dsf.recurrence
def linear_quotient(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.elu1(k) * v, C=dsf.elu1(q), normalize=ratio, window=4)


@dsf.recurrence
def gated_quotient(q: Key, k: Key, v: Value, i: Scalar, f: Scalar):
    rule = lambda num, den, one: num / dsf.maximum(dsf.abs(den), one)  # noqa: E731
    return System(A=sigmoid(f), B=exp(i) * k * v, C=q, normalize=rule, window=6)


ALL = [everything, forgetting, alibi, sliding, sinking, rotary, linear, linear_quotient, gated_quotient]
each = pytest.mark.parametrize("recurrence", ALL, ids=lambda r: r.name)
randn = partial(torch.randn, dtype=torch.float64)


def drawn(recurrence, T, H=2, N=4, P=3, B=2, dtype=torch.float64):
    """Random inputs, one head for the keys and values where a group may share them."""
    torch.manual_seed(T)
    sizes = {"key": N, "value": P}
    inputs = {}
    for entry in recurrence.spec.inputs:
        axes = [N // 2 if entry.kind.pair else sizes[a] for a in ("key", "value") if a in entry.kind.axes]
        heads = 1 if entry.name in ("k", "v", "t") else H
        inputs[entry.name] = torch.randn(*([B, T, heads] if entry.kind.time else [H]), *axes, dtype=dtype)
    return inputs


@pytest.mark.parametrize("recurrence", [everything, linear], ids=lambda r: r.name)
def test_laws(recurrence):
    laws = ("forms", "split", "packed", "causality", "reverse", "parallel")
    report = dsf.check(recurrence, laws=laws, examples=1, dtypes=("float64",))
    assert report.ok, report


def test_forgetting_attention_is_its_paper_s_formula():
    """Lin et al. (arXiv 2503.02130), equation 4: softmax of q'k + the sum of log f from j + 1 to i."""
    x = drawn(forgetting, 7)
    y = forgetting(**x)
    q, k, v = (x[n].transpose(1, 2).expand(-1, 2, -1, -1) for n in "qkv")
    log = F.logsigmoid(x["f"]).transpose(1, 2)
    for i in range(7):
        rows = torch.stack(
            [(q[:, :, i] * k[:, :, j]).sum(-1) + log[:, :, j + 1 : i + 1].sum(-1) for j in range(i + 1)], -1
        )
        torch.testing.assert_close(y[:, i], (rows.softmax(-1).unsqueeze(-2) @ v[:, :, : i + 1]).squeeze(-2))


def test_a_window_a_sink_and_slopes_are_their_formulas():
    """The last W tokens; a sink as a further column of scores (gpt-oss); ALiBi's bias -m (i - j) (arXiv 2108.12409)."""
    age = torch.arange(9)[:, None] - torch.arange(9)[None]
    for recurrence in (sliding, sinking, alibi):
        x = drawn(recurrence, 9)
        q, k, v = (x[n].transpose(1, 2).expand(-1, 2, -1, -1) for n in "qkv")
        rows = q @ k.mT
        if recurrence is alibi:
            rows = rows - x["slope"].exp()[:, None, None] * age
        rows = rows.masked_fill((age < 0) | (age >= (4 if recurrence is sliding else 9)), -torch.inf)
        if recurrence is sinking:
            rows = torch.cat([rows, x["s"][:, None, None].expand(2, 2, 9, 1)], -1)
        expected = rows.softmax(-1)[..., :9] @ v
        torch.testing.assert_close(recurrence(**x), expected.transpose(1, 2))


def test_turns_are_rotary_positions():
    """Su et al. (arXiv 2104.09864): equal angles of every token rotate queries and keys by their positions."""
    x = drawn(rotary, 6)
    angle = torch.tensor([1.0, 0.01], dtype=torch.float64)
    x["t"] = -angle.expand(2, 6, 1, 2)

    def rotated(y):
        z = torch.view_as_complex(y.unflatten(-1, (2, 2)).contiguous())
        z = z * torch.polar(torch.ones(()).double(), angle * torch.arange(6).double()[:, None, None])
        return torch.view_as_real(z).flatten(-2)

    q, k, v = (y.transpose(1, 2).expand(-1, 2, -1, -1) for y in (rotated(x["q"]), rotated(x["k"]), x["v"]))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    torch.testing.assert_close(rotary(**x), expected.transpose(1, 2))


def test_a_linear_window_is_what_the_window_s_tokens_leave():
    """Every output is that of the recurrence without a window, run over the window's tokens alone."""

    @dsf.recurrence
    def whole(q: Key, k: Key, v: Value, a: Scalar, o: Value, D: Param[Value]):
        return System(A=sigmoid(a), B=k * v, C=q * sigmoid(o), D=D * v)

    x = drawn(linear, 9)
    y = linear(**x)
    for t in range(9):
        part = {n: z if n == "D" else z[:, max(0, t - 3) : t + 1] for n, z in x.items()}
        torch.testing.assert_close(y[:, t], whole(**part, form="naive")[:, -1])


@pytest.mark.parametrize("T", [300, 2048])
def test_the_bias_keeps_its_digits_over_long_sequences(T):
    """Sums of logarithms of -10^4 and more, float32 inputs: near tokens still weigh what they should."""
    x = {n: z.float() for n, z in drawn(forgetting, T, B=1).items()}
    x["f"] = x["f"] * 10
    assert F.logsigmoid(x["f"]).sum(1).max() < -T
    y, exact = forgetting(**x), forgetting(**{n: z.double() for n, z in x.items()}, form="kernel")
    torch.testing.assert_close(y.double(), exact, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("recurrence", [everything, forgetting, linear, gated_quotient], ids=lambda r: r.name)
@pytest.mark.parametrize("low", [-1e30, -float("inf")])
def test_a_decay_of_zero_clears_the_state_and_does_no_other_harm(recurrence, low):
    """Of sigmoid(f), f as in a mask: tokens behind it see nothing before it, and one another as ever."""
    x = drawn(recurrence, 23)
    gate = "a" if recurrence is linear else "f"
    x[gate][:, 4::6] = low
    leaves = {n: z.requires_grad_() for n, z in x.items()}
    exact = recurrence(**leaves, form="naive")
    slopes = torch.autograd.grad(exact.square().sum(), list(leaves.values()))
    for form in set(recurrence.forms) - {"naive"}:
        y = recurrence(**leaves, form=form)
        torch.testing.assert_close(y, exact)
        for name, a, b in zip(x, torch.autograd.grad(y.square().sum(), list(leaves.values())), slopes, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
    later = {n: z if z.dim() < 3 else z[:, 9:] for n, z in x.items()}
    _, cache = recurrence(**{n: z if z.dim() < 3 else z[:, :9] for n, z in x.items()}, return_state=True)
    torch.testing.assert_close(recurrence(**later, initial_state=cache), exact[:, 9:])
    for t in range(9, 23):
        step = {n: z if z.dim() < 3 else z[:, t] for n, z in x.items()}
        y, cache = recurrence.step(cache, **step)
        torch.testing.assert_close(y, exact[:, t])


def test_a_slope_s_gradient_keeps_its_digits_over_long_sequences():
    """What it takes from queries and from keys cancels but for near tokens; in float32 sums 2e-4 of it were lost."""
    x = drawn(forgotten, 2048, B=1, H=2)
    x["s"] = torch.tensor([1.4, -0.3], dtype=torch.float64)
    dy = torch.randn(1, 2048, 2, 3, dtype=torch.float64)
    found = {}
    for dtype in (torch.float32, torch.float64):
        leaves = {n: z.float().to(dtype).requires_grad_() for n, z in x.items()}
        y = forgotten(**leaves, form="chunk", backend="torch")
        found[dtype] = torch.autograd.grad(y, leaves["s"], dy.float().to(dtype))[0].double()
    torch.testing.assert_close(found[torch.float32], found[torch.float64], rtol=2e-5, atol=2e-5)


@each
def test_blocks_of_queries_see_few_keys_and_are_the_matrix(recurrence, monkeypatch):
    """Many blocks, T no multiple of anything; a window's blocks hold no more scores than its tokens ask for."""
    largest = []
    plain = scores._weights
    monkeypatch.setattr(scores, "_weights", lambda *a, **o: largest.append(plain(*a, **o)) or largest[-1])
    monkeypatch.setattr(scores, "NUMBERS", 1 << 9)
    x = {n: z.requires_grad_() for n, z in drawn(recurrence, 53).items()}
    found = [recurrence(**x, form=form) for form in ("chunk", "kernel")]
    torch.testing.assert_close(*found)
    grads = [torch.autograd.grad(y, list(x.values()), torch.ones_like(y)) for y in found]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    if recurrence.spec.system.window is not None:
        blocks = [w for w, _, _ in largest if w.shape[-2] < 53]
        assert blocks and max(w.shape[-1] for w in blocks) <= 32 + recurrence.spec.system.window


@each
def test_a_cache_holds_what_is_read(recurrence):
    x = drawn(recurrence, 11)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    _, cache = recurrence(**x, return_state=True)
    window = recurrence.spec.system.window
    assert isinstance(cache, KVCache)
    assert cache.k.shape[:3] == (2, 1, min(11, window or 11)) and cache.lengths.tolist() == [11, 11]
    assert (cache.bias is None) == (recurrence.spec.decay_kind == "identity")
    assert (cache.angle is None) == (not recurrence.spec.turns)
    assert recurrence.plan(**x).state_shape[1] == cache.k.shape[2]
    stepped = None
    for t in range(11):
        now = {n: z[:, t] if n in timed else z for n, z in x.items()}
        y, stepped = recurrence.step(stepped, **now)
    for a, b in zip(stepped, cache, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_ragged_caches_continue_each_row():
    """Rows of a packed call, shorter and longer than the window, go on by themselves."""
    x, more = drawn(everything, 12, B=1), drawn(everything, 5)
    timed = {i.name for i in everything.spec.inputs if i.kind.time}
    more |= {"s": x["s"]}
    _, cache = everything(**x, cu_seqlens=torch.tensor([0, 2, 12]), return_state=True)
    assert cache.lengths.tolist() == [2, 10] and cache.k.shape[2] == 5
    y, final = everything(**more, initial_state=cache, return_state=True)
    assert final.lengths.tolist() == [7, 15]
    for row, (start, end) in enumerate([(0, 2), (2, 12)]):
        both = {n: torch.cat([z[:, start:end], more[n][row : row + 1]], 1) if n in timed else z for n, z in x.items()}
        torch.testing.assert_close(y[row : row + 1], everything(**both)[:, -5:])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recurrence", [everything, forgetting], ids=lambda r: r.name)
def test_packed_sequences_of_unequal_lengths_continue_ragged_caches(recurrence, grad):
    """Padding of their batches is no token: without gradients, too, where other calls write into the caches' memory."""
    parts, bounds = [drawn(recurrence, T, B=1) for T in (12, 7, 9)], ([0, 2, 12], [0, 3, 7], [0, 4, 9])
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    params = {n: x for n, x in parts[0].items() if n not in timed}
    cache, found = None, []
    with torch.set_grad_enabled(grad):
        for x, at in zip(parts, bounds, strict=True):
            x |= params
            y, cache = recurrence(**x, initial_state=cache, cu_seqlens=torch.tensor(at), return_state=True)
            found.append(y)
    assert cache.lengths.tolist() == [9, 19]
    for row in (0, 1):
        cut = [slice(*at[row : row + 2]) for at in bounds]
        both = {n: torch.cat([x[n][:, c] for x, c in zip(parts, cut, strict=True)], 1) for n in timed}
        y = torch.cat([y[:, c] for y, c in zip(found, cut, strict=True)], 1)
        torch.testing.assert_close(y, recurrence(**both, **params))


def token_of(recurrence, x, t):
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {n: z[:, t : t + 1] if n in timed else z for n, z in x.items()}


@each
@torch.no_grad()
def test_caches_that_were_kept_stay_what_they_are_and_branches_go_on_by_themselves(recurrence):
    """Beams: every kept cache is gone on from by two futures, in turns, and both are the whole sequence's."""
    trunk, futures = drawn(recurrence, 9), [drawn(recurrence, T) for T in (21, 22)]
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    _, cache = recurrence(**trunk, return_state=True)
    kept, states, wholes = [], [cache, cache], [dict(trunk), dict(trunk)]
    for t in range(20):
        for beam in (0, 1):
            now = {n: futures[beam][n][:, t : t + 1] if n in timed else z for n, z in trunk.items()}
            kept.append((states[beam], [None if z is None else z.clone() for z in states[beam]]))
            y, states[beam] = recurrence(**now, initial_state=states[beam], return_state=True)
            wholes[beam] |= {n: torch.cat([wholes[beam][n], now[n]], 1) for n in timed}
            torch.testing.assert_close(y, recurrence(**wholes[beam], form="kernel")[:, -1:])
        if t == 11:  # both beams go on from the second one's
            states[0], wholes[0] = states[1], dict(wholes[1])
    for state, before in kept:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(state, before, strict=True))


WIDE = 64


@dsf.recurrence
def wide_everything(q: Key, k: Key, v: Value, f: Scalar, t: Scalar, s: Param[Scalar]):
    c, write = exp_features(q * N**-0.5), exp_features(k) * v
    return System(A=sigmoid(f) * turn(t), B=write, C=c, normalize=with_sink(s), window=WIDE)


@dsf.recurrence
def wide_linear(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.elu1(k) * v, C=dsf.elu1(q), normalize=ratio, window=WIDE)


class Written(TorchDispatchMode):
    """Bytes of memory that operators fill: what they return anew, and what they overwrite whole."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and (not func._schema.is_mutable or "copy_" in str(func)):
            self.bytes += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


@pytest.mark.parametrize("recurrence", [wide_everything, wide_linear, forgetting, rotary], ids=lambda r: r.name)
@torch.no_grad()
def test_a_decoded_token_copies_no_cache(recurrence):
    """Over three windows of steps: memory changes once a window at most, and little of it is written."""
    x = drawn(recurrence, 4 * WIDE, N=128, P=128, B=1)
    start = {n: z[:, :WIDE] if z.dim() > 1 else z for n, z in x.items()}
    y, cache = recurrence(**start, return_state=True)
    places, found = [], [y]
    for t in range(WIDE, 4 * WIDE):
        with Written() as step:
            y, cache = recurrence(**token_of(recurrence, x, t), initial_state=cache, return_state=True)
        places.append((cache.k.untyped_storage().data_ptr(), cache.v.untyped_storage().data_ptr()))
        found.append(y)
        moved = len(places) > 1 and places[-1] != places[-2]
        held = cache.k.nbytes + cache.v.nbytes
        assert len(places) == 1 or moved or step.bytes < 0.3 * held, (t, step.bytes / held)
    assert sum(a != b for a, b in pairwise(places)) <= 3
    assert recurrence.spec.system.window is None or cache.k.shape[2] == WIDE
    torch.testing.assert_close(torch.cat(found, 1), recurrence(**x))


@pytest.mark.parametrize("recurrence", [everything, linear, forgetting, rotary], ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [0, 3])
@torch.no_grad()
def test_tokens_may_come_from_one_buffer(recurrence, tokens):
    """The first cache held the buffer itself, so that the next tokens replaced those of the first call."""
    x = drawn(recurrence, 12)
    y = recurrence(**x)
    params = {i.name for i in recurrence.spec.inputs if not i.kind.time}
    piece = {n: t if n in params else t[:, :tokens].clone() if tokens else t[:, 0].clone() for n, t in x.items()}
    state, found = None, []
    for at in range(0, 12, tokens or 1):
        for name in piece.keys() - params:
            piece[name].copy_(x[name][:, at : at + tokens] if tokens else x[name][:, at])
        if tokens:
            part, state = recurrence(**piece, initial_state=state, return_state=True)
        else:
            part, state = recurrence.step(state, **piece)
        found.append(part if tokens else part.unsqueeze(1))
    torch.testing.assert_close(torch.cat(found, 1), y)


@torch.inference_mode()
def test_decoding_in_inference_mode_reads_lengths_on_the_host_once(monkeypatch):
    x = drawn(forgetting, 6, B=2)
    cache = None
    for t in range(6):
        if t == 2:
            monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("waits for the device"))
        _, cache = forgetting(**token_of(forgetting, x, t), initial_state=cache, return_state=True)
    assert cache.k.shape[2] == 6


@pytest.mark.parametrize("recurrence", [forgetting, sliding], ids=lambda r: r.name)
@torch.no_grad()
def test_decoding_reads_lengths_on_the_host_once(recurrence, monkeypatch):
    """On a GPU that waits for the device. What somebody has written to is read again, and refused where it is wrong."""
    x = drawn(recurrence, 6, B=2)
    start = {n: z[:, :3] if z.dim() > 1 else z for n, z in x.items()}
    _, cache = recurrence(**start, return_state=True)
    _, cache = recurrence(**token_of(recurrence, x, 3), initial_state=cache, return_state=True)
    with monkeypatch.context() as nobody:
        nobody.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("waits for the device"))
        _, cache = recurrence(**token_of(recurrence, x, 4), initial_state=cache, return_state=True)
    for wrong in (cache._replace(lengths=cache.lengths - 9), cache):
        if wrong is cache:
            cache.lengths.sub_(9)
        with pytest.raises(InputError, match=r"lengths of the KV cache are \[-4, -4\]"):
            recurrence(**token_of(recurrence, x, 5), initial_state=wrong)


@torch.no_grad()
def test_half_precision_and_chunks_of_tokens_are_written_in_place_too():
    x = drawn(everything, 40, dtype=torch.bfloat16)
    whole, whole_cache = everything(**x, return_state=True)
    cache, found, t, moves, last = None, [], 0, 0, None
    for size in (3, 1, 4, 1, 1, 2, 7, 1, 5, 1, 1, 1, 1, 1, 3, 3, 1, 1, 1, 1):
        now = {n: z[:, t : t + size] if z.dim() > 1 else z for n, z in x.items()}
        y, cache = everything(**now, initial_state=cache, return_state=True)
        found.append(y)
        t += size
        place = cache.k.untyped_storage().data_ptr()
        moves, last = moves + (place != last), place
    assert t == 40 and moves <= 6
    assert cache.k.dtype == torch.bfloat16 and cache.bias.dtype == torch.float32
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=2e-2, atol=2e-2)
    assert torch.equal(cache.v, whole_cache.v)


@torch.no_grad()
def test_rows_of_unequal_lengths_fill_their_windows_one_by_one():
    x, more = drawn(everything, 12, B=1), drawn(everything, 30)
    timed = {i.name for i in everything.spec.inputs if i.kind.time}
    more |= {"s": x["s"]}
    for bounds in ([0, 1, 3, 3], [0, 2, 12], [0, 0, 4]):
        part = {n: z[:, : bounds[-1]] if n in timed else z for n, z in x.items()}
        rows = len(bounds) - 1
        _, cache = everything(**part, cu_seqlens=torch.tensor(bounds), return_state=True)
        found = []
        for t in range(30):
            now = {n: z[:1, t : t + 1].expand(rows, *z[:1, :1].shape[1:]) if n in timed else z for n, z in more.items()}
            y, cache = everything(**now, initial_state=cache, return_state=True)
            found.append(y)
        for row, (a, b) in enumerate(pairwise(bounds)):
            both = {n: torch.cat([z[:, a:b], more[n][:1]], 1) if n in timed else z for n, z in x.items()}
            torch.testing.assert_close(torch.cat(found, 1)[row : row + 1], everything(**both)[:, -30:])


def test_caches_of_others_are_refused():
    x = drawn(everything, 9)
    _, cache = everything(**x, return_state=True)
    for wrong, message in [
        (cache._replace(bias=None), r"the KV cache has no bias, expected \[2, 2, 5\]; it is another recurrence's"),
        (cache._replace(angle=cache.angle.float()), r"angle of the KV cache is \[2, 1, 1\], torch.float32"),
        (cache._replace(lengths=torch.tensor([-1, 4])), r"lengths of the KV cache are \[-1, 4\]"),
        (dsf.kernels.attention.joined([cache._replace(k=F.pad(cache.k, (0, 0, 0, 1)), v=F.pad(cache.v, (0, 0, 0, 1)),
                                       bias=F.pad(cache.bias, (0, 1)))]), "6 places, expected at most the window's 5"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            everything(**x, initial_state=wrong)
    y = drawn(sliding, 3)
    with pytest.raises(InputError, match="the KV cache has bias, none is expected; it is another recurrence's"):
        sliding(**y, initial_state=forgetting(**drawn(forgetting, 3), return_state=True)[1])


@pytest.mark.parametrize("recurrence", [forgetting, sinking, linear], ids=lambda r: r.name)
def test_second_derivatives_are_refused_or_right_but_never_zero(recurrence):
    """A loss whose gradient by y is a constant is what a rule that looks at that gradient alone lets pass."""
    inputs = {n: x.requires_grad_() for n, x in drawn(recurrence, 6).items()}

    def bent(form):
        given = list(inputs.values())
        slopes = torch.autograd.grad(recurrence(**inputs, form=form).sum(), given, create_graph=True)
        return torch.autograd.grad(sum((x * x).sum() for x in slopes), given)

    with pytest.raises(RuntimeError, match=r"second derivatives .* ask for form='recurrent', backend='torch'"):
        bent("chunk")
    for got, want in zip(bent("recurrent"), bent("naive"), strict=True):
        torch.testing.assert_close(got, want)
        assert want.abs().sum() > 0


def test_transformations_and_graphs():
    x = drawn(everything, 6)
    plain = everything(**x)
    compiled = torch.compile(lambda **x: everything(**x) * 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**x), plain)
    tangent = torch.func.jvp(lambda q: everything(**(x | {"q": q})), (x["q"],), (torch.ones_like(x["q"]),))[1]
    step = 1e-6
    near = everything(**(x | {"q": x["q"] + step})) - everything(**(x | {"q": x["q"] - step}))
    torch.testing.assert_close(tangent, near / (2 * step), rtol=1e-6, atol=1e-8)
    with pytest.raises(FormError, match=r"everything: the chunk form does not go through torch.func"):
        torch.func.jvp(lambda q: everything(**(x | {"q": q}), form="chunk"), (x["q"],), (x["q"],))


def test_what_is_not_there_is_refused_in_words():
    x = drawn(linear, 3)
    with pytest.raises(FormError, match="linear: scalar decay in a window of 4 has no scan form"):
        linear(**x, form="scan")
    with pytest.raises(FormError, match="its state is a KV cache"):
        linear.state_shape(3, 2)


def no_tokens(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, window=0)


def half_a_token(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, window=2.5)


def erased(q: Key, k: Key, v: Value, b: Scalar):
    return System(A=I - b * dsf.outer(k, k), B=k * (b * v), C=q, window=8)


def keywise(q: Key, k: Key, v: Value, a: Key):
    return System(A=sigmoid(a), B=exp_features(k) * v, C=exp_features(q), normalize=ratio)


def signed(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=dsf.tanh(a), B=exp_features(k) * v, C=exp_features(q), normalize=ratio)


def twice(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v + q * v, C=q, window=8)


def early(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, window=8, read="before")


def steps(q: Key, k: Key, v: Value):
    return dsf.compose(System(A=I, B=k * v), System(A=I, B=q * v, C=q, window=8))


def remembered(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.prev(k) * v, C=q, window=8)


def by_channel(q: Key, k: Key, v: Value, w: Param[Key, Value]):
    return System(A=I, B=k * v, C=q * w, window=8)


def skipped(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, D=v, normalize=ratio, window=8)


def unscaled(q: Key, k: Key, v: Value):
    rule = lambda num, den: num / (den + 1)  # noqa: E731
    return System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=rule)


@pytest.mark.parametrize(
    "function, message",
    [
        (no_tokens, r"window = 0: a window is a number of tokens, .* an integer of at least 1\n.*: return System"),
        (half_a_token, "window = 2.5: a window is a number of tokens"),
        (
            erased,
            r"A = I - b \* outer\(k, k\): beside a window of 8 A is a decay of one number a head.* identity . delta",
        ),
        (keywise, r"A = sigmoid\(a\): beside softmax attention A is a decay of one number a head, a turn, or both"),
        (
            signed,
            r"A = tanh\(a\): beside softmax attention a decay is a bias .* exp\(g\), sigmoid\(g\), a positive number",
        ),
        (twice, r"B = k \* v \+ q \* v: a window of 8 keeps one key and one value a token"),
        (early, 'a window of 8 reads after it has written; leave read="before" out'),
        (steps, "a window of 8 takes one micro-step a token, this recurrence has 2"),
        (remembered, "a window of 8 keeps keys and values alone: prev has no place beside them"),
        (by_channel, r"C = q \* w: beside a window of 8 what C reads with a Key axis has no Value axis"),
        (skipped, "D = v: a window of 8 with normalize has no skip; add it to y"),
        (unscaled, r"normalize = num / \(den \+ 1\) changes .* exponential features keep the state at a scale"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_declarations_that_keys_and_values_cannot_hold(function, message):
    with pytest.raises(TraceError, match=message):
        dsf.recurrence(function)


def test_angles_of_many_tokens_are_added_up_in_float64():
    """A float32 sum of these has steps of 1e-3 radians at the end."""
    x = drawn(everything, 2048, B=1, H=1, dtype=torch.float32)
    x["t"] = 6 + 0.1 * x["t"]
    wide = everything(**{n: z.double() for n, z in x.items()}, form="chunk")
    torch.testing.assert_close(everything(**x, form="chunk"), wide.float(), rtol=1e-4, atol=1e-4)
