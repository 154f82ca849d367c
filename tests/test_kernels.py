"""The numerics of the chunk and scan forms, each against the loop or the dense product that defines it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import dsf
from dsf import mixers
from dsf.kernels.chunk import chunk, scan_blocks
from dsf.kernels.decays import KeyDecay, ScalarDecay, pair_products, prefix_products, suffix_products
from dsf.kernels.lagged import LaggedRead, LaggedWeights
from dsf.kernels.problem import Problem
from dsf.kernels.read_scan import scan_elementwise
from dsf.kernels.recurrent import recurrent
from dsf.kernels.scan import associative_scan, combine_dense, scan_backward_, scan_forward_
from dsf.kernels.segments import segments
from dsf.kernels.walk import UnitLowerSolve, Walk, unit_lower_inverse

F64 = torch.float64
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


@pytest.mark.parametrize("length", LENGTHS)
def test_tree_scans_equal_the_loop_in_both_directions(length: int) -> None:
    a, b = rand(2, length, 3), rand(2, length, 3)
    forward, backward = b.clone(), b.clone()
    scan_forward_(a, forward)
    scan_backward_(a[:, 1:], backward)
    want_forward, want_backward = b.clone(), b.clone()
    for t in range(1, length):
        want_forward[:, t] += a[:, t] * want_forward[:, t - 1]
        want_backward[:, -1 - t] += a[:, -t] * want_backward[:, -t]
    torch.testing.assert_close(forward, want_forward)
    torch.testing.assert_close(backward, want_backward)


def test_tree_scan_takes_logarithmically_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = Tensor.addcmul_
    monkeypatch.setattr(Tensor, "addcmul_", lambda *args, **kw: calls.append(1) or original(*args, **kw))
    scan_forward_(rand(1, 1024, 1), rand(1, 1024, 1))
    assert len(calls) <= 2 * 10


def elementwise(
    tokens: int, decay: tuple[int, int], readout: tuple[int, int], micro: int, **changes: object
) -> Problem:
    """A random elementwise Problem, N = 2, P = 3; decay and readout have the given axes."""
    rows = tokens * micro
    return Problem(
        decay=rand(1, rows, 2, *decay), log=False, readout=rand(1, tokens, 2, *readout), n=2, p=3,
        key=rand(1, rows, 2, 1, 2), value=rand(1, rows, 2, 1, 3), micro=micro, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("decay", [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("readout", [(2, 1), (2, 3)])
@pytest.mark.parametrize(("before", "micro"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_the_read_scan_equals_the_recurrence(tokens, decay, readout, before: bool, micro: int) -> None:
    given, state = elementwise(tokens, decay, readout, micro, before=before), rand(1, 2, 2, 3).requires_grad_()
    leaves = [given.decay, given.readout, given.key, given.value]
    for x in leaves:
        x.requires_grad_()
    results = []
    for form in (scan_elementwise, recurrent):
        y, final = form(given, state)
        results.append((y, final, *torch.autograd.grad(y.square().sum() + final.cos().sum(), [*leaves, state])))
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("log", [False, True])
def test_the_read_scan_has_every_gradient(log: bool) -> None:
    given, state = elementwise(5, (2, 3), (2, 1), 1, skip=rand(1, 5, 2, 3)), rand(1, 2, 2, 3)
    inputs = tuple(x.requires_grad_() for x in (given.decay, given.key, given.value, given.readout, state))

    def run(decay: Tensor, key: Tensor, value: Tensor, c: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        return scan_elementwise(replace(given, decay=decay, log=log, key=key, value=value, readout=c), initial)

    assert gradcheck(run, inputs)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("span", [1, 3, 4, 11, 20])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("before", "micro"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_segments_of_the_read_scan_are_the_whole(span: int, keep: bool, fixed: bool, before: bool, micro: int) -> None:
    given, state = elementwise(11, (2, 3), (2, 1), micro, before=before), rand(1, 2, 2, 3).requires_grad_()
    decay = given.decay[:, :1].clone() if fixed else given.decay
    given = replace(given, decay=decay)
    leaves = [given.decay, given.readout, given.key, given.value, state]
    for x in leaves:
        x.requires_grad_()
    results = []
    for run in (lambda: scan_elementwise(given, state, span, keep), lambda: recurrent(given, state)):
        y, final = run()
        results.append((y, final, *torch.autograd.grad(y.square().sum() + final.cos().sum(), leaves)))
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("span", [1, 3, 11])
@pytest.mark.parametrize("block", [1, 7, 1 << 19])
@pytest.mark.parametrize(("fixed", "moving"), [((2, 3), (1, 3)), ((2, 3), (2, 1)), ((2, 1), (1, 3))])
def test_factors_of_a_decay_are_multiplied_in_segments(
    fixed, moving, span: int, keep: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsf.kernels.read_scan.BLOCK", block)
    given, state = elementwise(11, (2, 3), (2, 1), 1), rand(1, 2, 2, 3).requires_grad_()
    one, other = -rand(1, 1, 2, *fixed).square(), rand(1, 11, 2, *moving).square()
    leaves = [one, other, given.readout, given.key, given.value, state]
    for x in leaves:
        x.requires_grad_()
    factored = replace(given, decay=one, factor=other, log=True)
    whole = replace(given, decay=one * other, log=True)
    results = []
    for y, final in (scan_elementwise(factored, state, span, keep), recurrent(whole, state)):
        results.append(
            (y, final, *torch.autograd.grad(y.square().sum() + final.cos().sum(), leaves, retain_graph=True))
        )
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want)


def test_scans_do_not_write_into_their_inputs() -> None:
    given, state = elementwise(9, (2, 3), (2, 1), 1), rand(1, 2, 2, 3)
    kept = [x.clone() for x in (given.decay, given.key, given.value, given.readout, state)]
    scan_elementwise(given, state)
    for x, y in zip((given.decay, given.key, given.value, given.readout, state), kept, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("terms", [1, 2])
def test_an_injection_of_several_terms_is_their_sum(terms: int) -> None:
    given = replace(elementwise(5, (2, 3), (2, 1), 1), key=rand(1, 5, 2, terms, 2), value=rand(1, 5, 2, terms, 3))
    dense = replace(given, key=None, value=None, dense=given.injection())
    want = recurrent(given, None)
    for have in (scan_elementwise(given, None), scan_elementwise(dense, None)):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("length", LENGTHS)
def test_associative_scan_of_matrices_equals_the_loop(length: int) -> None:
    a, b = rand(2, length, 3, 3), rand(2, length, 3, 2)
    products, states = associative_scan(combine_dense, a, b)
    product, state = a[:, 0], b[:, 0]
    for t in range(1, length):
        product, state = a[:, t] @ product, a[:, t] @ state + b[:, t]
        torch.testing.assert_close(products[:, t], product)
        torch.testing.assert_close(states[:, t], state)


DECAYS = {
    "in (0, 1)": lambda: torch.rand(6, dtype=F64),
    "negative": lambda: -torch.rand(6, dtype=F64),
    "with zeros": lambda: torch.tensor([0.5, 0.0, 0.3, 0.0, 0.0, 0.9], dtype=F64),
    "tiny": lambda: torch.full((6,), 1e-30, dtype=F64),
    "one": lambda: torch.ones(6, dtype=F64),
}


@pytest.mark.parametrize("name", DECAYS)
def test_decay_products_are_the_products_of_their_factors(name: str) -> None:
    a = DECAYS[name]()
    pair = pair_products(a, log=False)
    for i in range(6):
        for j in range(6):
            want = a[j + 1 : i + 1].prod() if i >= j else torch.zeros((), dtype=F64)
            torch.testing.assert_close(pair[i, j], want)
    torch.testing.assert_close(prefix_products(a, pair, False), a.cumprod(0))
    torch.testing.assert_close(suffix_products(a, pair, False), pair[-1])


@pytest.mark.parametrize("name", ["in (0, 1)", "with zeros", "tiny", "one"])
def test_logarithms_give_the_same_products_and_nothing_is_nan(name: str) -> None:
    a = DECAYS[name]()
    pair = pair_products(a.log(), log=True)
    torch.testing.assert_close(pair, pair_products(a, log=False))
    torch.testing.assert_close(suffix_products(a.log(), pair, True), pair[-1])
    torch.testing.assert_close(prefix_products(a.log(), pair, True), a.cumprod(0))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("name", ["in (0, 1)", "one"])
def test_pair_products_have_their_gradient(name: str, log: bool) -> None:
    a = DECAYS[name]()
    a = (a.log() if log else a).requires_grad_()
    assert gradcheck(lambda x: pair_products(x, log), (a,))


@pytest.mark.parametrize("name", ["negative", "with zeros", "tiny"])
def test_pair_products_of_linear_decays_have_their_gradient_at_zero_too(name: str) -> None:
    a = DECAYS[name]().requires_grad_()
    assert gradcheck(lambda x: pair_products(x, False), (a,))


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("rank, groups", [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("heads", [1, 2])
def test_lagged_products_are_those_of_all_pairs_and_so_are_their_gradients(
    name: str, rank: int, groups: int, heads: int
) -> None:
    a = DECAYS[name]().unsqueeze(-1) * torch.tensor([1.0, 0.5, 0.9], dtype=F64)  # [L, N], of one head for all
    w, y, x = rand(heads, 6, rank, 6, groups), rand(heads, 6, rank, 3), rand(1, 6, groups, 3)
    a, w, y, x = (z.requires_grad_() for z in (a[None], w, y, x))

    def pair(a: Tensor) -> Tensor:
        return pair_products(a.transpose(-1, -2), log=False)  # [.., N, L, L]

    for inputs, lagged, letters in (
        ((a, w, x), LaggedRead, "hnij,hirjg,hjgn->hirn"),
        ((a, y, x), LaggedWeights, "hnij,hirn,hjgn->hirjg"),
    ):
        decay, *others = (z.expand(heads, *z.shape[1:]) for z in inputs)
        found, expected = lagged.apply(*inputs), torch.einsum(letters, pair(decay), *others)
        torch.testing.assert_close(found, expected)
        cotangent = torch.randn_like(expected)
        for have, want in zip(*(torch.autograd.grad(z, inputs, cotangent) for z in (found, expected)), strict=True):
            torch.testing.assert_close(have, want)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("log", [False, True])
def test_key_decay_and_scalar_decay_agree_where_all_keys_decay_alike(log: bool, stride: int) -> None:
    length, n = 8, 3
    decay = torch.rand(1, 1, 2, length, 1, 1, dtype=F64)
    decay = decay.log() if log else decay
    scalar = ScalarDecay(decay, log, stride)
    key = KeyDecay(decay.expand(-1, -1, -1, -1, n, -1), log, stride, sub=4)
    queries, sources, reads = (
        rand(1, 1, 2, length // stride, n),
        rand(1, 1, 2, length, 2, n),
        rand(1, 1, 2, length, 1, n),
    )
    mixing = rand(1, 1, 2, length // stride, 2 * length)
    for have, want in [
        (key.scores(queries, sources), scalar.scores(queries, sources)),
        (key.read_scores(reads, sources), scalar.read_scores(reads, sources)),
        (key.from_start(queries), scalar.from_start(queries)),
        (key.reads_from_start(reads), scalar.reads_from_start(reads)),
        (key.to_end(sources), scalar.to_end(sources)),
        (key.decayed_sum(mixing, sources), scalar.decayed_sum(mixing, sources)),
        (key.total, scalar.total.expand_as(key.total)),
    ]:
        torch.testing.assert_close(have, want)


def test_slow_decays_by_key_keep_their_digits_over_many_chunks() -> None:
    """1 - 1.5 · 2^-24 lies between two float32 numbers: as a factor of every token it would err by 3e-8 each time."""
    tokens = 8192
    decay = torch.tensor([-1.5 * 2.0**-24, -3.0]).view(1, 1, 1, 2, 1).expand(1, tokens, 1, -1, -1)
    ones = torch.ones(1, tokens, 1, 1, 2)
    given = Problem(decay, True, ones.mT, n=2, p=1, key=ones, value=ones[..., :1])
    a = decay[0, 0, 0, :, 0].double()
    expected = torch.expm1(tokens * a) / torch.expm1(a)
    torch.testing.assert_close(chunk(given, None, 64)[1][0, 0, :, 0].double(), expected, rtol=1e-5, atol=0)


def test_key_decay_never_takes_an_exponential_above_one() -> None:
    decay = torch.full((1, 1, 1, 64, 2, 1), -200.0)
    for factor in vars(KeyDecay(decay, True, 1, 16)).values():
        if isinstance(factor, Tensor):
            assert factor.isfinite().all() and factor.abs().max() <= 1


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 24, 33, 64])
def test_unit_lower_inverse_inverts(length: int) -> None:
    system = rand(3, length, length).tril(-1) / length
    eye = torch.eye(length, dtype=F64)
    torch.testing.assert_close(unit_lower_inverse(system) @ (eye - system), eye.expand(3, -1, -1))


def test_unit_lower_inverse_stays_bounded_for_repeated_keys_with_beta_two() -> None:
    system = torch.full((64, 64), -2.0).tril(-1)
    assert unit_lower_inverse(system).abs().max() <= 2


def test_the_triangular_system_has_every_gradient() -> None:
    system, first, second = rand(2, 5, 5).tril(-1), rand(2, 5, 3), rand(2, 5, 2)
    inputs = tuple(x.requires_grad_() for x in (system, first, second))
    assert gradcheck(lambda m, r, s: UnitLowerSolve.apply(m.tril(-1), r, s), inputs)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("shared_total", [False, True])
def test_the_walk_has_every_gradient(corrected: bool, shared_total: bool) -> None:
    total = rand(1, 1, 1, 1, 1) if shared_total else rand(1, 2, 3, 4, 1)
    ends, known, weight = rand(1, 2, 3, 5, 4), rand(1, 2, 3, 5, 2), rand(1, 2, 3, 5, 4)
    inputs = tuple(x.requires_grad_() for x in (total, ends, known, weight, rand(1, 2, 4, 2)))

    def walk(total: Tensor, ends: Tensor, known: Tensor, weight: Tensor, initial: Tensor) -> tuple[Tensor, ...]:
        return Walk.apply(total, ends, known, weight if corrected else None, initial)

    checked = inputs if corrected else (*inputs[:3], inputs[3].detach(), inputs[4])
    assert gradcheck(walk, checked)
    found = walk(*checked)
    given = [torch.randn_like(y) for y in found]
    before = [g.clone() for g in given]
    torch.autograd.grad(found, inputs[1:3], given)
    assert all(torch.equal(g, b) for g, b in zip(given, before, strict=True))  # which others may read, too


def problem(
    rows: int, shared_key: bool, rank: int, key_decay: bool, micro: int
) -> tuple[Problem, tuple[Tensor, Tensor]]:
    """A random Problem of two heads (views of one where shared_key), and the leaves behind its key and readout."""
    n, p, tokens = 3, 2, rows // micro
    heads = 1 if shared_key else 2
    key = (0.5 * rand(1, rows, heads, 1, n)).requires_grad_()
    readout = rand(1, tokens, heads, n, 1).requires_grad_()
    leaves = key, readout
    key, readout = key.expand(1, rows, 2, 1, n), readout.expand(1, tokens, 2, n, 1)
    low = {}
    if rank:
        low = {"left": 0.3 * rand(1, rows, 2, rank, n, 1), "right": 0.3 * rand(1, rows, 2, rank, n, 1)}
    given = Problem(
        decay=torch.rand(1, rows, 2, n if key_decay else 1, 1, dtype=F64), log=False, readout=readout, n=n, p=p,
        key=key, value=rand(1, rows, 2, 1, p), skip=rand(1, tokens, 2, p), micro=micro, **low,
    )  # fmt: skip
    return given, leaves


@pytest.mark.parametrize("form", [chunk, scan_blocks])
@pytest.mark.parametrize("shared_key", [False, True])
@pytest.mark.parametrize(("rank", "key_decay", "micro"), [(0, False, 1), (0, True, 1), (2, False, 1), (1, True, 2)])
def test_many_chunks_equal_the_recurrence(form, shared_key: bool, rank: int, key_decay: bool, micro: int) -> None:
    given, leaves = problem(150, shared_key, rank, key_decay, micro)
    state = rand(1, 2, 3, 2)
    want_y, want_state = recurrent(given, state)
    y, final = form(given, state, 16)
    torch.testing.assert_close(y, want_y)
    torch.testing.assert_close(final, want_state)
    want = torch.autograd.grad(want_y.square().sum() + want_state.sum(), leaves)
    have = torch.autograd.grad(y.square().sum() + final.sum(), leaves)
    for x, z in zip(have, want, strict=True):
        torch.testing.assert_close(x, z)


def test_segments_hand_their_state_on_and_recompute_for_the_gradient() -> None:
    x = rand(1, 10, 2).requires_grad_()
    calls = []

    def body(state: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(piece.shape[1])
        y = state.unsqueeze(1) + piece.square().cumsum(1)
        return y, y[:, -1]

    y, state = segments(body, (x,), torch.zeros(1, 2, dtype=F64), 4)
    torch.testing.assert_close(y, x.square().cumsum(1))
    assert calls == [4, 4, 2]
    torch.testing.assert_close(torch.autograd.grad((y * y).sum() + state.sum(), x)[0], _cumsum_gradient(x))
    assert len(calls) == 6
    y, state = segments(body, (x,), torch.zeros(1, 2, dtype=F64), 4, keep=True)
    torch.testing.assert_close(torch.autograd.grad((y * y).sum() + state.sum(), x)[0], _cumsum_gradient(x))
    assert len(calls) == 9


def _cumsum_gradient(x: Tensor) -> Tensor:
    y = x.square().cumsum(1)
    return torch.autograd.grad((y * y).sum() + y[:, -1].sum(), x)[0]


def test_heads_that_the_caller_made_views_of_one_keep_a_gradient_of_their_own() -> None:

    rule: dsf.Recurrence = mixers.get("retnet").recurrence
    q, k, v, slope = rand(1, 9, 2, 3), rand(1, 9, 1, 3).expand(1, 9, 2, 3), rand(1, 9, 2, 2), rand(2).exp()
    k.requires_grad_()
    want = torch.autograd.grad(rule(q, k, v, slope, form="naive").square().sum(), k)[0]
    have = torch.autograd.grad(rule(q, k, v, slope, form="chunk").square().sum(), k)[0]
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("heads", [(1, 1, 2, 2), (2, 1, 4, 1), (1, 2, 1, 4), (1, 1, 1, 3), (3, 3, 3, 1)], ids=str)
@pytest.mark.parametrize("name", ["gla", "kda"])
def test_heads_may_share_any_of_queries_keys_values_and_decays(name: str, heads: tuple[int, ...]) -> None:
    q, k, v, g = (rand(2, 37, h, n).requires_grad_() for h, n in zip(heads, (4, 4, 5, 4), strict=True))
    count = max(heads)
    rest = (torch.rand(2, 37, count, dtype=F64).requires_grad_(),) if name == "kda" else ()
    unit = [x / x.norm(dim=-1, keepdim=True) if name == "kda" else x for x in (q, k)]
    given = (*unit, v, -g.square() if name == "kda" else g, *rest)
    first = rand(2, count, 4, 5).requires_grad_()
    leaves = (q, k, v, g, *rest, first)
    found = []
    for form in ("naive", "chunk"):
        y, last = mixers.get(name).recurrence(*given, initial_state=first, form=form, return_state=True)
        loss = (y * y.detach().cos()).sum() + (last * last.detach().sin()).sum()
        found.append((y, last, *torch.autograd.grad(loss, leaves, retain_graph=True)))
    for mine, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)
