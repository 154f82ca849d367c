"""Functions of a token's own numbers: torch's form, and printed kernels in Triton's interpreter, against float64."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from interpreted import INTERPRETED

import dsf
from dsf import InputError, Key, Param, Scalar, TraceError, Value, dot, exp, prev, rsqrt, sigmoid, sum_key
from dsf.call import tokenwise
from dsf.mixers import ZOO
from dsf.mixers.fox import mixed

assert ZOO  # the layers' functions are declared
BACKENDS = ["triton" if INTERPRETED else "torch"]  # each in one half of the tests


@dsf.tokenwise
def norm_and_bonus(y: Key, r: Key, k: Key, b: Scalar, gate: Key, weight: Param[Key], u: Param[Key], s: Param[Scalar]):
    """A layer norm of each head, a bonus and a gate."""
    centred = y - sum_key(y) / dsf.N
    normed = centred * rsqrt(dot(centred, centred) / dsf.N + 1e-5) * weight
    return (normed + dot(r, u * k) * sigmoid(b) * k) * (gate * sigmoid(s * gate))


@dsf.tokenwise
def overlap(q: Key, k: Key, a: Param[Scalar]):
    """One number a head."""
    return exp(-a * dot(q - k, q - k))


def definition(y, r, k, b, gate, weight, u, s):
    n = y.shape[-1]
    normed = torch.nn.functional.layer_norm(y, (n,)) * weight
    inner = normed + ((r * u * k).sum(-1) * b.sigmoid())[..., None] * k
    return inner * gate * (s[:, None] * gate).sigmoid()


def leaves_of(batch, tokens, heads, n, kind=torch.float32):
    """Inputs; the gate lies as a part of a projection."""
    key, scalar = (batch, tokens, heads, n), (batch, tokens, heads)
    shapes = [key, key, key, scalar, (batch, tokens, heads * n + 3), (heads, n), (heads, n), (heads,)]
    return [torch.randn(s, dtype=torch.float64).to(kind).requires_grad_() for s in shapes]


def outcome(run, leaves):
    y, r, k, b, wider, weight, u, s = leaves
    found = run(y, r, k, b, wider[..., 3:].unflatten(-1, y.shape[-2:]), weight, u, s)
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(found.dtype)
    return [found, *torch.autograd.grad(found, leaves, slope)]


def wide(leaves):
    return [x.detach().double().requires_grad_() for x in leaves]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(2, 5, 3, 24), (1, 70, 2, 16), (3, 1, 1, 40)], ids=str)
def test_the_result_and_all_gradients_are_the_definition_s(sizes, backend):
    leaves, calls = leaves_of(*sizes), []
    wanted = outcome(definition, wide(leaves))
    for _ in range(3):
        calls.append(outcome(lambda *t: norm_and_bonus(*t, backend=backend), leaves))
        for i, (a, b) in enumerate(zip(calls[-1], wanted, strict=True)):
            assert a.shape == b.shape and (a.double() - b).abs().max() <= 1e-5 * b.abs().max(), i
    assert all(torch.equal(a, b) for a, b in zip(*calls[1:], strict=True))


def test_float64_is_exact_and_twice_differentiable():
    leaves = wide(leaves_of(1, 3, 2, 4))
    for a, b in zip(outcome(norm_and_bonus, leaves), outcome(definition, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    q, k, a = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 2, 3), (1, 2, 2, 3), (2,)))
    assert torch.autograd.gradcheck(overlap, (q, k, a)) and torch.autograd.gradgradcheck(overlap, (q, k, a))


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_rounded_once(backend):
    leaves = leaves_of(2, 40, 2, 32, torch.bfloat16)
    found = outcome(lambda *t: norm_and_bonus(*t, backend=backend), leaves)
    for i, (a, b) in enumerate(zip(found, outcome(definition, wide(leaves)), strict=True)):
        assert a.dtype == torch.bfloat16
        least = (b.bfloat16().double() - b).abs().mean()
        assert (a.double() - b).abs().mean() <= (1.5 if backend == "triton" else 3) * least, i


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_number_a_head_and_inputs_that_are_one(backend):
    q, k = (torch.randn(2, 9, 3, 8, requires_grad=True) for _ in range(2))
    a = torch.rand(3, requires_grad=True)
    torch.testing.assert_close(overlap(q, k, a, backend=backend), (-a * (q - k).square().sum(-1)).exp())
    same = overlap(q, q, a, backend=backend)
    torch.testing.assert_close(same, torch.ones(2, 9, 3))
    assert not torch.autograd.grad(same.sum(), q)[0].any()
    frozen = overlap(q=q, a=a.detach(), k=k.detach(), backend=backend)
    assert torch.autograd.grad(frozen.sum(), q)[0].shape == q.shape


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, with TRITON_INTERPRET=1")
def test_the_operator_passes_opcheck_and_refuses_second_derivatives():
    from dsf.kernels.triton.pointwise import tokenwise_ops

    q, k, a = (torch.randn(s, requires_grad=True) for s in ((2, 3, 2, 8), (2, 3, 2, 8), (2,)))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(tokenwise_ops.tokenwise, ([q, k, a], overlap.program, torch.float32), test_utils=tests)
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(overlap(q, k, a, backend="triton").sum(), q, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_it_is_one_node_of_the_graph(backend):
    torch.compiler.reset()
    leaves = leaves_of(1, 5, 2, 8)
    loss = lambda *t: norm_and_bonus(*t, backend=backend).square().sum()  # noqa: E731
    given = [x.detach().requires_grad_() for x in leaves[:4]]
    rest = [torch.randn(1, 5, 2, 8), *leaves[5:]]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(*given, *rest), given) for f in (compiled, loss))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("key", sorted(tokenwise._known))
def test_torch_s_own_operators_are_the_expression(key):
    function = tokenwise._known[key]
    sizes = {"B": 2, "T": 3, "H": 2, "N": 8}
    given = [torch.randn([sizes[a] for a in i.kind.layout()], dtype=torch.float64) for i in function.inputs]
    torch.testing.assert_close(function(*given), function.evaluated(tuple(given), torch.float64))
    for backend in BACKENDS:
        found = function(*(x.float() for x in given), backend=backend)
        torch.testing.assert_close(found.double(), function(*given), rtol=1e-4, atol=1e-5)


def test_declarations_that_are_no_functions_of_a_token_are_refused():
    def two_values(v: Value, k: Key):
        return v * sum_key(k)

    def earlier(k: Key):
        return k - prev(k)

    def unused(k: Key, q: Key):
        return 2 * k

    def fixed(a: Param[Key]):
        return a * a

    def sized(k: Key):
        return k * dsf.P

    def compared(k: Key):
        return k > 0

    def mistaken(k: Key):
        return sigmoid(k) @ k

    for function, said in (
        (compared, "^compared: the comparison `k > 0` has no number as its value; use where.*\\n  .*: def compared"),
        (mistaken, r"^mistaken: \(sigmoid\(k\)\) @ \(k\): @ multiplies operators.*\n  .*: return sigmoid\(k\) @ k"),
        (sized, "P is the size of the Value axis"), (two_values, "`v` is Value"),
        (earlier, "no function of one token's own"), (unused, "`q` is never used"),
        (fixed, "depends on no input of tokens"), (lambda: None, "returns an expression, got NoneType"),
    ):  # fmt: skip
        with pytest.raises(TraceError, match=said):
            dsf.tokenwise(function)


@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_that_differ_little_are_not_one_and_end_with_their_last_name(backend):
    def scaled(factor):
        @dsf.tokenwise
        def times(k: Key):
            return k * factor

        return times

    k = torch.ones(1, 2, 1, 4)
    a, b, same = scaled(1 / 3), scaled(1 / 3 + 1e-7), scaled(1 / 3)
    assert a.key == same.key != b.key
    assert float(b(k, backend=backend)[0, 0, 0, 0]) > float(a(k, backend=backend)[0, 0, 0, 0])
    keys = {a.key, b.key}
    del a, b, same
    gc.collect()
    assert not keys & set(tokenwise._known)


def test_what_no_kernel_computes_is_computed_by_torch(monkeypatch):
    @dsf.tokenwise
    def spun(k: Key, s: Scalar):
        return dsf.quarter_turn(k) * dsf.pair(s, 1) + dsf.atan2(k, 2)

    k, s = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2)
    monkeypatch.setattr(tokenwise, "_runs", lambda device: True)  # as on a GPU
    spins = torch.stack([-k[..., 1::2] * s[..., None], k[..., ::2]], dim=-1).flatten(-2)
    torch.testing.assert_close(spun(k, s), spins + torch.atan2(k, torch.tensor(2.0)))
    with pytest.raises(InputError, match="spun: no kernel computes atan2, which torch does"):
        spun(k, s, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels on a CPU")
def test_kernels_that_are_asked_for_on_a_cpu_are_refused():
    q, a = torch.randn(1, 3, 2, 4), torch.randn(2)
    with pytest.raises(InputError, match="overlap: backend='triton' was asked for, but its kernels need CUDA tensors"):
        overlap(q, q, a, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_print_it_and_call_it(backend):
    @dsf.tokenwise
    def shifted(k: Key, w: Param[Key]):
        return sigmoid(k - sum_key(k) / dsf.N) * w

    k, w = torch.randn(2, 9, 2, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    start, alone = threading.Barrier(2), threading.Lock()

    def first():
        start.wait()
        if backend == "triton":
            assert shifted.program == shifted.key
        with alone:  # Triton's interpreter runs one kernel at a time
            y = shifted(k, w, backend=backend)
            return y, *torch.autograd.grad(y.sum(), [k, w])

    with ThreadPoolExecutor(2) as threads:
        calls = [f.result() for f in [threads.submit(first) for _ in range(2)]]
    y = (k - k.mean(-1, keepdim=True)).sigmoid() * w
    for found in calls:
        torch.testing.assert_close(found, (y, *torch.autograd.grad(y.sum(), [k, w], retain_graph=True)))


def test_inputs_that_do_not_fit_are_refused():
    q, k, a = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8), torch.randn(2)
    with pytest.raises(InputError, match="inputs are q, k, a, each given once"):
        overlap(q, k)
    with pytest.raises(InputError, match="inputs are q, k, a, each given once"):
        overlap(q, k, q=q)
    with pytest.raises(InputError, match="`a` is a float, expected a tensor"):
        overlap(q, k, 1.0)
    with pytest.raises(InputError, match=r"`k` has shape \[2, 3, 2, 4\], expected \[B, T, H, N\] \(B = 2.*N = 8"):
        overlap(q, k[..., :4], a)
    with pytest.raises(InputError, match=r"overlap: `k` must be floating point, got torch\.int64"):
        overlap(q, k.long(), a)
    with pytest.raises(InputError, match="'auto', 'torch' and 'triton'"):
        overlap(q, k, a, backend="cuda")
    with pytest.raises(InputError, match="at most 1024"):
        overlap(q.double(), k, a, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_fox_mixes_a_projection_with_its_tokens_before(tokens, backend):
    """As they lie: the tokens before are a part of what a token shift joined, as long as the sequence and one."""
    given = torch.randn(2, tokens, 6 * 20, dtype=torch.float64), torch.rand(2, tokens, 6, dtype=torch.float64)
    found = []
    for kind, how in ((torch.float32, {"backend": backend}), (torch.float64, {"backend": "torch"})):
        kv, share = (x.to(kind).requires_grad_() for x in given)
        before = torch.cat([kv.new_zeros(2, 1, 6 * 20), kv], 1)[:, :-1]
        y = mixed(kv.unflatten(-1, (6, 20)), before.unflatten(-1, (6, 20)), share, **how)
        found.append([y, *torch.autograd.grad(y.cos().sum(), [kv, share])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach(), rtol=1e-5, atol=1e-6)


@dsf.tokenwise
def scaled_twice(x: Key, a: Param[Key], b: Param[Key]):
    return x * (a + b)


def test_params_that_are_added_have_gradients_of_their_own():
    x, a, b = torch.randn(1, 3, 2, 4), *(torch.randn(2, 4, requires_grad=True) for _ in range(2))
    scaled_twice(x, a, b, backend="torch").square().sum().backward()
    expected = b.grad.clone()
    a.grad.mul_(2)
    assert torch.equal(b.grad, expected)


def test_equal_functions_outlive_each_other_and_keep_their_own_torch():
    def declared(by_torch=None):
        @dsf.tokenwise(by_torch=by_torch)
        def halved(x: Key, w: Param[Key]):
            return 0.5 * x * w

        return halved

    x, w = torch.ones(1, 2, 1, 4), torch.ones(1, 4)
    by_expression, other, last = declared(), declared(lambda x, w: 0.25 * x * w), declared()
    assert by_expression.key == other.key
    assert float(by_expression(x, w, backend="torch")[0, 0, 0, 0]) == 0.5
    assert float(other(x, w, backend="torch")[0, 0, 0, 0]) == 0.25
    del last, by_expression
    gc.collect()
    assert float(other(x, w, backend="torch")[0, 0, 0, 0]) == 0.25
    assert float(tokenwise.tokenwise_in_graph(other.key, "torch", x, w)[0, 0, 0, 0]) == 0.5
    key = other.key
    del other
    gc.collect()
    assert key not in tokenwise._known
