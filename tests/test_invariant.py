"""Time-invariant declarations: the convolution form against the oracle and formulas of its own, and what it refuses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dsf
from dsf import (
    FormError,
    I,
    Key,
    Pair,
    Param,
    Scalar,
    System,
    Value,
    compose,
    diag,
    exp,
    l2norm,
    mixers,
    outer,
    prev,
    sigmoid,
    turn,
)
from dsf.checking.examples import Example
from dsf.checking.laws import LAWS
from dsf.checking.measure import Subject
from dsf.checking.ranges import ranges_of
from dsf.kernels.invariant import Diagonal, fast_length
from dsf.kernels.powers import Dense
from dsf.language.invariant import is_invariant

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@dsf.recurrence
def complex_bank(x: Value, g: Value, a: Param[Pair], w: Param[Pair], B: Param[Key], C: Param[Key]):
    return System(A=exp(-exp(a)) * turn(w), B=B * x, C=C * sigmoid(g))


@dsf.recurrence
def driven_entries(u: Key, a: Param[Scalar], w: Param[Pair], C: Param[Key, Value]):
    return System(A=sigmoid(a) * turn(w), B=u, C=C, read="before")


@dsf.recurrence
def blocks(x: Value, a: Param[Key], w: Param[Pair], B: Param[Key], C: Param[Key]):
    return System(A=diag(sigmoid(a)) @ turn(w), B=B * x, C=C)


@dsf.recurrence
def rank_one(x: Value, v: Value, a: Param[Key, Value], p: Param[Key], q: Param[Key], B: Param[Key], C: Param[Key]):
    A = diag(sigmoid(a)) + 0.2 * outer(l2norm(p), l2norm(q))
    return System(A=A, B=B * x + 0.5 * C * prev(v * x), C=C, D=v)


@dsf.recurrence
def two_steps(x: Value, z: Value, a: Param[Scalar], b: Param[Key], B: Param[Key], C: Param[Key]):
    return compose(System(A=2 * sigmoid(a) - 1, B=B * x), System(A=sigmoid(b), B=-C * z, C=C))


@dsf.recurrence
def taps(x: Value, w: Param[Value], o: Value):
    return System(A=0.5, B=x + w * prev(x), C=sigmoid(o))


LINES = [mixers.s4d_real, complex_bank, driven_entries, blocks, rank_one, two_steps, taps]
EVERY = pytest.mark.parametrize("r", LINES, ids=lambda r: r.name)


def sample(r, B=2, T=37, H=2, N=4, P=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"B": B, "T": T, "H": H, "N": N, "N/2": N // 2, "P": P}
    shapes = {i.name: [sizes[axis] for axis in i.kind.layout()] for i in r.spec.inputs}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def everything(r, inputs, form, state=None, **options):
    """y, the final state, and the gradients of both in every input and the initial state."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    start = None if state is None else state.detach().requires_grad_()
    y, final = r(**leaves, initial_state=start, form=form, return_state=True, **options)
    wrt = [*leaves.values(), *([] if start is None else [start])]
    loss = (y * torch.linspace(-1, 1, y.numel()).to(y).view_as(y)).sum() + (final * final.detach().cos()).sum()
    return [y, final, *torch.autograd.grad(loss, wrt)]


@EVERY
@pytest.mark.parametrize("T", [1, 2, 37, 64])
def test_convolution_equals_the_oracle_with_states_and_gradients(r, T):
    state = r(**sample(r, T=3, seed=1), return_state=True)[1]
    inputs = sample(r, T=T)
    for got, expected in zip(
        everything(r, inputs, "convolution", state), everything(r, inputs, "naive", state), strict=True
    ):
        torch.testing.assert_close(got, expected, **CLOSE)


@EVERY
def test_packed_sequences_and_their_states(r):
    """Lengths of one group are padded to the longest, and some sequences are empty."""
    bounds = torch.tensor([0, 0, 5, 12, 13, 30, 30, 41, 63])
    inputs = sample(r, B=1, T=63)
    state = r(**sample(r, B=8, T=3, seed=1), return_state=True)[1]
    got = everything(r, inputs, "convolution", state, cu_seqlens=bounds)
    for a, b in zip(got, everything(r, inputs, "recurrent", state, cu_seqlens=bounds), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@EVERY
def test_it_is_chosen_where_it_is_fastest_and_steps_go_on_from_its_state(r):
    plan = r.plan(T=512, N=32)
    expected = ("chunk", "torch", "segments of the scan") if r is taps else ("convolution", "torch", "FFT")
    assert (plan.form, plan.backend, plan.kernel) == expected
    assert r.plan(T=4, N=32).form == "recurrent" and r.forms[-1] == "convolution"
    inputs = sample(r, T=200)
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    before = {n: x[:, :199] if n in timed else x for n, x in inputs.items()}
    y, state = r(**before, form="convolution", return_state=True)
    assert state.is_contiguous()  # channels that share their numbers do not share memory: who writes to one
    last, _ = r.step(state, **{n: x[:, 199] if n in timed else x for n, x in inputs.items()})
    torch.testing.assert_close(torch.cat([y, last[:, None]], 1), r(**inputs, form="recurrent"), **CLOSE)


def test_on_a_gpu_short_states_are_scanned():
    sizes = {"B": 8, "T": 2048, "P": 64, "device": "cuda", "dtype": torch.float32}
    chosen = [mixers.s4d_real.plan(N=n, **sizes) for n in (32, 64)]
    assert [(p.form, p.backend) for p in chosen] == [("chunk", "triton"), ("convolution", "torch")]
    assert mixers.s4d_real.plan(N=32, **sizes, backend="torch").form == "convolution"
    assert mixers.s4d.plan(N=32, **sizes).form == "convolution"


def test_a_plan_says_what_is_around_the_fft():
    sizes = {"B": 8, "T": 2048, "N": 32, "P": 4, "form": "convolution"}
    shown = {
        mixers.s4d: "FFT between printed kernels",
        mixers.s4: "FFT between printed kernels; impulse response apart",
        rank_one: "FFT between kernels, of each drive; impulse response apart",
    }
    for r, kernel in shown.items():
        assert r.plan(**sizes, device="cuda").kernel == kernel
        assert r.plan(**sizes).kernel == r.plan(**sizes, device="cuda", dtype=torch.float64).kernel == "FFT"


def test_real_rates_are_the_exact_solution_of_their_differential_equation():
    """s4d_real, channel by channel: x' = a x + u with u held, an integral of exponentials, convolved by definition."""
    x, dt, A_log, C, D = sample(mixers.s4d_real, B=1, T=9, H=1).values()
    a, step = -A_log[0].exp(), dt[0].exp()
    age = torch.arange(9.0, dtype=torch.float64)[:, None, None]
    h = (C[0] * (torch.exp(a * step * (age + 1)) - torch.exp(a * step * age)) / a).sum(1)  # [T, P]
    expected = torch.stack([sum(h[t - s] * x[0, s, 0] for s in range(t + 1)) for t in range(9)]) + D[0] * x[0, :, 0]
    torch.testing.assert_close(mixers.s4d_real(x, dt, A_log, C, D, form="convolution")[0, :, 0], expected, **CLOSE)


def test_float32_keeps_its_digits_over_many_turns():
    """Angles and decays are raised to powers in float64, whatever the inputs."""
    inputs = sample(complex_bank, B=1, T=3000, H=1)
    inputs["a"] = torch.full_like(inputs["a"], -9.0)
    rounded = {name: x.float() for name, x in inputs.items()}
    expected = complex_bank(**{name: x.double() for name, x in rounded.items()}, form="recurrent")
    error = (complex_bank(**rounded, form="convolution") - expected).abs().max() / expected.abs().max()
    assert error < 1e-6


def test_second_derivatives_and_torch_func_go_through():
    inputs = sample(taps, B=1, T=6, H=1)

    def loss(w):
        return taps(**{**inputs, "w": w}, form="convolution").square().sum()

    w = inputs["w"].requires_grad_()
    torch.autograd.gradgradcheck(loss, [w])
    (slope,) = torch.autograd.grad(loss(w), [w])
    torch.testing.assert_close(torch.func.grad(loss)(w.detach()), slope)


@dsf.recurrence
def two_blocks(x: Value, a: Param[Key], w: Param[Key], B: Param[Key], C: Param[Key]):
    """Two factors of A."""
    A = (I - outer(l2norm(w), l2norm(w)) * 0.01) @ (diag(sigmoid(-a)) - 0.01 * outer(l2norm(w), l2norm(C)))
    return System(A=A, B=B * x, C=C)


@dsf.recurrence
def moving_decay(x: Value, a: Scalar, b: Param[Key], c: Param[Key]):
    return System(A=sigmoid(a), B=b * x, C=c)


@dsf.recurrence
def moving_read(x: Value, q: Key, b: Param[Key], a: Param[Scalar]):
    return System(A=sigmoid(a), B=b * x, C=q)


@dsf.recurrence
def quotient(v: Value, b: Param[Key], c: Param[Key]):
    return System(A=0.5, B=exp(b) * v, C=exp(c), normalize=dsf.ratio)


@pytest.mark.parametrize(
    "r, words",
    [
        (moving_decay, "scalar decay has no convolution form, A changes from token to token with `a`; it has naive"),
        (moving_read, "constant decay has no convolution form, C changes from token to token with `q`; it has naive"),
        (quotient, "no convolution form, normalize divides by a second system"),
        (mixers.softmax_attention, "no convolution form, exponential features have no state of fixed size"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_what_moves_is_refused_in_words(r, words):
    assert not is_invariant(r.spec) and "convolution" not in r.forms
    with pytest.raises(FormError, match=words):
        r.plan(T=100, N=4, form="convolution")


def test_a_kernel_asked_for_by_name_is_refused_in_words():
    with pytest.raises(FormError, match="the convolution form runs on torch, whose FFT it is"):
        taps.plan(T=100, form="convolution", backend="triton")


@pytest.mark.parametrize("r, kind", [(mixers.s4, Dense), (two_steps, Diagonal)], ids=["s4", "two steps"])
def test_outputs_and_states_share_the_tables_of_powers(r, kind, counting):
    """Of what is read, of each write, and for an initial state beside them of what it leaves."""
    inputs, writes = sample(r, T=50), {"s4": 1, "two_steps": 2}[r.name]
    calls = counting(kind, "table")
    _, state = r(**inputs, return_state=True, form="convolution")
    assert calls[0] == 1 + writes
    calls = counting(kind, "table")
    r(**inputs, initial_state=state, return_state=True, form="convolution")
    assert calls[0] == 1 + writes + (kind is Dense)


def test_fast_lengths_hold_what_they_must():
    for least in (1, 2, 3, 7, 97, 1025, 4095, 12_287):
        found = fast_length(least)
        rest = found
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        assert least <= found <= 1.2 * least + 1 and rest == 1


@pytest.mark.parametrize("recurrence", LINES, ids=lambda r: r.name)
def test_backwards_is_the_convolution_of_the_other_order(recurrence):
    """By the law, packed and in pieces with states and all gradients, and against the naive form."""
    subject = Subject(recurrence, ranges_of(recurrence.spec))
    for example in (
        Example(tokens=83, heads=2, n=4, p=3, initial=True, cuts=(4, 4, 70), seed=1),
        Example(batch=2, tokens=70, heads=2, n=4, p=3, initial=True, cuts=(5, 66), seed=2),
    ):
        broken = [m for m in LAWS["reverse"].measure(subject, "convolution", example) if not m.ok]
        assert not broken, broken
    inputs = subject.inputs(Example(tokens=71, heads=2, n=4, p=3))
    state = subject.state(Example(tokens=71, heads=2, n=4, p=3, initial=True))
    (y, last), (expected, first) = (
        recurrence(**inputs, initial_state=state, reverse=True, return_state=True, form=form)
        for form in ("convolution", "naive")
    )
    torch.testing.assert_close(y, expected, **CLOSE)
    torch.testing.assert_close(last, first, **CLOSE)


def test_backwards_is_the_sum_over_later_tokens():
    torch.manual_seed(0)
    x = torch.randn(1, 70, 1, 1, dtype=torch.float64)
    a, c = torch.rand(1, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)

    @dsf.recurrence
    def bank(x: Value, a: Param[Key], c: Param[Key]) -> System:
        return System(A=a, B=c * x, C=c)

    y = bank(x, a, c, form="convolution", reverse=True)
    response = torch.stack([(c**2 * a**lag).sum() for lag in range(70)])
    later = torch.stack([(response[: 70 - t] * x[0, t:, 0, 0]).sum() for t in range(70)])
    torch.testing.assert_close(y[0, :, 0, 0], later, **CLOSE)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("lead", [(), (5,), (5, 2)], ids=str)
@pytest.mark.parametrize("adjoint", [False, True])
def test_powers_of_matrices(channels, lead, adjoint):
    """Of one matrix a head, or one a channel, for any number of states."""
    torch.manual_seed(0)
    a = torch.randn(2, channels, 4, 4, dtype=torch.float64) / 2
    for width in (1, 3):
        x = torch.randn(*lead, 2, 4, width, dtype=torch.float64)
        expected = x.expand(*x.shape[:-1], max(width, channels))
        for _ in range(6):
            each = (a.mT if adjoint else a).expand(-1, expected.shape[-1], -1, -1)
            expected = torch.einsum("hpnm,...hmp->...hnp", each, expected)
        torch.testing.assert_close(Dense(a).power(x, 6, adjoint), expected, **CLOSE)


@pytest.mark.parametrize("channels, width", [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("count, stride", [(1, 1), (2, 4), (5, 1), (8, 2)])
def test_tables_of_powers_with_first_and_second_derivatives(channels, width, lead, adjoint, count, stride):
    torch.manual_seed(0)
    a = (torch.randn(2, channels, 4, 4, dtype=torch.float64) / 3).requires_grad_()
    x = torch.randn(*lead, 2, 4, width, dtype=torch.float64).requires_grad_()

    def by_steps(a, x):
        found = [x.expand(*lead, 2, 4, max(channels, width))]
        for _ in range(count):
            later = found[-1]
            for _ in range(stride):
                each = (a.mT if adjoint else a).expand(-1, later.shape[-1], -1, -1)
                later = torch.einsum("hpnm,...hmp->...hnp", each, later)
            found.append(later)
        return torch.stack(found)

    def by_table(a, x):
        system = Dense(a)
        return torch.cat([system.table(x, count, stride, adjoint), system.power(x, count * stride, adjoint)[None]])

    results = []
    for table in (by_steps, by_table):
        y = table(a, x)
        first = torch.autograd.grad((y * y.detach().cos()).sum(), [a, x], create_graph=True, materialize_grads=True)
        loss = sum(z.square().sum() for z in first)
        results.append([y, *first, *torch.autograd.grad(loss, [a, x], allow_unused=True, materialize_grads=True)])
        results[-1].append(torch.func.grad(lambda a, table=table: table(a, x.detach()).square().sum())(a.detach()))
        frozen = table(a.detach(), x)
        results[-1] += [frozen, *torch.autograd.grad(frozen.sum(), [x])]
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("r", [mixers.s4, two_blocks], ids=lambda r: r.name)
def test_powers_of_matrices_are_no_products_of_tf32(r, monkeypatch):
    """A power of 1024 has a thousand times the error of its matrix, one product beside it its own: 2^-11."""
    inputs = {n: x.requires_grad_() for n, x in sample(r, T=2000, N=8, dtype=torch.float32).items()}
    inputs |= {n: (x.detach() - 4).requires_grad_() for n, x in inputs.items() if n in ("dt", "a")}
    found = []
    for dtype in (torch.float64, torch.float32):
        if dtype == torch.float32:
            monkeypatch.setattr("dsf.kernels.affine.in_tf32", lambda x: x.dtype == torch.float32)
            monkeypatch.setattr("dsf.kernels.powers.in_tf32", lambda x: x.dtype == torch.float32)
            for name in ("bmm", "baddbmm", "matmul"):
                monkeypatch.setattr(torch, name, rounding(getattr(torch, name)))
            monkeypatch.setattr(torch.Tensor, "__matmul__", torch.matmul)
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs.values()]
        y = r(*leaves, form="convolution")
        weights = torch.linspace(-1, 1, y.numel()).to(y).view_as(y)
        found.append([y, *torch.autograd.grad((y * weights).sum(), leaves)])
    for exact, got in zip(*found, strict=True):
        assert got.dtype == torch.float32 and (got - exact).norm() <= 2e-3 * exact.norm(), (
            got - exact
        ).norm() / exact.norm()


def rounding(product):
    """A product of matrices that takes 10 bits of float32 numbers, as GPUs do in tf32."""

    def short(x):
        if x.dtype == torch.float64:
            return x
        bits = (x.detach().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
        return x + (bits.view(torch.float32) - x.detach())

    return lambda *args: product(*map(short, args))


class Operations(TorchDispatchMode):
    """Collects torch's operations, and how often matrices [..., n, n] are converted."""

    def __init__(self, n):
        super().__init__()
        self.names, self.n, self.conversions = set(), n, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names.add(name)
        self.conversions += name == "_to_copy" and args[0].shape[-2:] == (self.n, self.n)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("r", [mixers.s4, rank_one, blocks], ids=lambda r: r.name)
def test_matrices_are_rounded_once_and_turns_are_no_gathers(r):
    """Their powers have float32 digits, and more digits of what they multiply would be lost in every product."""
    inputs = {n: x.requires_grad_() for n, x in sample(r, T=70, N=6, dtype=torch.float32).items()}
    with Operations(6) as seen:
        y, last = r(**inputs, form="convolution", return_state=True)
        forward = seen.conversions
        torch.autograd.grad(y.sum() + last.sum(), list(inputs.values()))
    assert (forward, seen.conversions) == (1, 2)
    assert not any(name.startswith(("index", "_index", "_unsafe_index")) for name in seen.names)
