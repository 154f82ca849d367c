"""Time-invariant systems as one operator, in Triton's interpreter, against their steps in float64."""

import gc
import weakref

import pytest
import torch
from fourier_family import BY_FILTERS, PRINTED, compare, corrected, corrected_shift, drawn, gated_bank, results, uneven
from interpreted import interpreted
from test_invariant import LINES, blocks, complex_bank

import dsf
from dsf import Key, Param, Scalar, System, Value, exp, mixers, turn
from dsf.kernels.triton.fourier.operator import CONVOLUTIONS
from dsf.kernels.triton.operators import forget, noted
from dsf.language.functions import maximum
from dsf.triton import convolve, given
from dsf.triton.choose import elsewhere

pytestmark = interpreted


@pytest.fixture
def on_kernels(monkeypatch):
    """A function that says whether the operator takes calls that are not float64 from now on."""

    def set_to(now):
        monkeypatch.setattr(convolve, "on_kernels", lambda x: now and x.dtype != torch.float64)

    set_to(True)
    return set_to


@pytest.mark.parametrize("r", PRINTED, ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 131])
def test_one_operator_gives_outputs_and_gradients_of_the_steps(r, tokens, on_kernels, counting):
    inputs = drawn(r, T=tokens)
    calls = counting(convolve, "program_of")
    got = results(r, inputs, "convolution")
    assert calls[0] and not isinstance(convolve.program_of(r.spec), str)
    with torch.no_grad():
        assert torch.equal(r(**inputs, form="convolution"), got["y"])
    on_kernels(False)
    plain = results(r, inputs, "convolution")
    compare(r, inputs, got, results(r, {n: x.double() for n, x in inputs.items()}, "recurrent"), 3e-6, plain)


@pytest.mark.parametrize("heads, N, P, tokens", [(1, 10, 70, 40), (3, 40, 1, 65), (70, 2, 1, 9), (2, 6, 3, 530)])
def test_any_sizes_of_heads_states_and_channels(heads, N, P, tokens, on_kernels):
    for r in (complex_bank, gated_bank):
        inputs = drawn(r, B=1, H=heads, N=N, P=P, T=tokens)
        expected = results(r, {n: x.double() for n, x in inputs.items()}, "recurrent")
        compare(r, inputs, results(r, inputs, "convolution"), expected, 5e-6)


@pytest.mark.parametrize("r", [mixers.h3, mixers.s5], ids=lambda r: r.name)
def test_half_precisions_are_rounded_once(r, on_kernels):
    inputs = drawn(r, T=70, dtype=torch.bfloat16)
    got = results(r, inputs, "convolution")
    assert got["y"].dtype == torch.bfloat16 and all(got[n].dtype == x.dtype for n, x in inputs.items())
    compare(r, inputs, got, results(r, {n: x.double() for n, x in inputs.items()}, "recurrent"), 2.0**-7)


@dsf.recurrence
def many_turns(x: Value, a: Param[Scalar], w: Param[Scalar], B: Param[Key], C: Param[Key]):
    """By an angle that float32 does not hold, of a number or a Param."""
    return System(A=exp(-exp(a)) * turn(maximum(w, 0.7)), B=B * x, C=C)


@pytest.mark.parametrize("angle", [0.0, 2.5])
def test_angles_keep_their_digits_over_many_turns(angle, on_kernels):
    inputs = drawn(many_turns, B=1, T=3000, H=1, P=1)
    inputs |= {"a": torch.full((1,), -9.0), "w": torch.full((1,), angle)}
    exact = many_turns(**{n: x.double() for n, x in inputs.items()}, form="convolution")
    compare(many_turns, inputs, {"y": many_turns(**inputs, form="convolution")}, {"y": exact}, 3e-6)


def test_params_of_any_strides_and_gradients_of_some(on_kernels):
    r = mixers.s4d_real
    inputs = drawn(r, H=1, N=6, P=5)
    expected = results(r, {n: x.double() for n, x in inputs.items()}, "recurrent")
    inputs["A_log"] = inputs["A_log"].mT.contiguous().mT
    inputs["x"] = inputs["x"].movedim(1, -1).contiguous().movedim(-1, 1)
    compare(r, inputs, results(r, inputs, "convolution"), expected, 3e-6)
    for chosen in (("A_log",), ("x",), ("D", "C")):
        leaves = {n: x.detach().requires_grad_(n in chosen) for n, x in inputs.items()}
        y = r(**leaves, form="convolution")
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).cos().bfloat16().to(y).view_as(y)
        found = torch.autograd.grad((y * weights).sum(), [leaves[n] for n in chosen])
        compare(r, inputs, dict(zip(chosen, found, strict=True)), {n: expected[n] for n in chosen}, 3e-6)


def test_one_tensor_as_several_inputs_has_the_sum_of_their_gradients(on_kernels):
    inputs = drawn(mixers.h3, T=20)
    x, rate = (inputs[n].detach().requires_grad_() for n in ("q", "A_log"))
    found = {}
    for now, wide in ((True, torch.float32), (False, torch.float64)):
        on_kernels(now)
        given = {n: v.to(wide) for n, v in inputs.items()}
        given |= dict.fromkeys("qkv", x.to(wide)) | dict.fromkeys(("A_log", "A_imag"), rate.to(wide))
        loss = mixers.h3(**given, form="convolution").square().sum()
        found[now] = torch.autograd.grad(loss, [x, rate], create_graph=True)
        found[now] += torch.autograd.grad(sum(g.square().sum() for g in found[now]), [x, rate])
    for a, b in zip(found[True], found[False], strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_second_derivatives_go_through_torch(on_kernels):
    for r in (mixers.s4d, gated_bank):
        inputs, found = drawn(r, T=12), []
        for now, wide in ((True, torch.float32), (False, torch.float64)):
            on_kernels(now)
            leaves = [x.to(wide).requires_grad_() for x in inputs.values()]
            y = r(*leaves, form="convolution")
            first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
        for a, b in zip(*found, strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


def test_what_is_read_for_the_backward_pass_must_not_change(on_kernels):
    inputs = {n: x.requires_grad_() for n, x in drawn(mixers.s4d).items()}
    y = mixers.s4d(**inputs, form="convolution")
    with torch.no_grad():
        inputs["dt"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_params_that_changed_are_seen_whatever_changed_them(on_kernels):
    """Nothing of a call is remembered but sizes."""
    inputs = drawn(mixers.s4d)
    for change in (lambda x: x.mul_(0.5), lambda x: x.data.add_(0.1), lambda x: None):
        change(inputs["A_log"])
        expected = mixers.s4d(**{n: x.double() for n, x in inputs.items()}, form="recurrent")
        compare(mixers.s4d, inputs, {"y": mixers.s4d(**inputs, form="convolution")}, {"y": expected}, 3e-6)


def test_a_gradient_without_memory_of_its_own(on_kernels):
    """A sum's, one number for all tokens."""
    inputs = {n: x.requires_grad_() for n, x in drawn(mixers.s4d).items()}
    wide = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    got = torch.autograd.grad(mixers.s4d(**inputs, form="convolution").sum(), [*inputs.values()])
    expected = torch.autograd.grad(mixers.s4d(**wide, form="recurrent").sum(), [*wide.values()])
    compare(mixers.s4d, inputs, dict(zip(inputs, got, strict=True)), dict(zip(inputs, expected, strict=True)), 3e-6)


@pytest.mark.parametrize("r", PRINTED, ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 131])
def test_states_in_and_out_are_those_of_the_steps(r, tokens, on_kernels, monkeypatch):
    inputs = drawn(r, T=tokens)
    wide = {n: x.double() for n, x in inputs.items()}
    state = torch.randn_like(r(**wide, return_state=True, form="recurrent")[1])
    monkeypatch.setattr("dsf.call.convolution._by_torch", None)  # nothing else runs
    for start in (None, state.mT.contiguous().mT):
        narrow = None if start is None else start.float()
        y, last = r(**inputs, initial_state=narrow, return_state=True, form="convolution")
        exact, ended = r(**wide, initial_state=start, return_state=True, form="recurrent")
        assert last.dtype == torch.float32 and last.is_contiguous()
        compare(r, inputs, {"y": y}, {"y": exact}, 3e-6)
        for a, b in zip(last.double().unbind(1), ended.unbind(1), strict=True):
            assert a.shape == b.shape and (a - b).norm() <= 3e-6 * b.norm()
        if start is not None:
            y = r(**inputs, initial_state=narrow, form="convolution")
            compare(r, inputs, {"y": y}, {"y": exact}, 3e-6)


@pytest.mark.parametrize("r", [mixers.s4d, mixers.lru, gated_bank], ids=lambda r: r.name)
def test_gradients_through_states(r, on_kernels):
    inputs = drawn(r, T=40)
    start = torch.randn_like(r(**inputs, return_state=True, form="recurrent")[1])
    for options in ({}, {"initial_state": start}):
        found = []
        for dtype, form in ((torch.float32, "convolution"), (torch.float64, "recurrent")):
            given = {n: x.to(dtype).requires_grad_() for n, x in {**inputs, **options}.items()}
            y, last = r(**given, return_state=True, form=form)
            both = y.square().sum() + last.square().sum()
            found.append([g for x in (both, last.sum(), y.sum()) for g in slopes(x, [*given.values()])])
        for a, b in zip(*found, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-5


@pytest.mark.parametrize("r", [mixers.s4d, mixers.s5, gated_bank], ids=lambda r: r.name)
def test_packed_sequences_are_batches_of_it(r, on_kernels, monkeypatch):
    """Some are empty, some of one token; what a sequence ends with does not reach the next.

    Of 95 tokens no Param's gradient all but cancels; of 90 one does, and whether it met the bound was the processor's.
    """
    inputs, bounds = drawn(r, B=1, T=95), torch.tensor([0, 0, 5, 12, 13, 44, 44, 57, 95])
    expected = results(r, {n: x.double() for n, x in inputs.items()}, "recurrent", cu_seqlens=bounds)
    monkeypatch.setattr("dsf.call.convolution._by_torch", None)  # nothing else runs
    compare(r, inputs, results(r, inputs, "convolution", cu_seqlens=bounds), expected, 3e-6)
    state = torch.randn_like(r(**inputs, return_state=True, form="recurrent", cu_seqlens=bounds)[1])
    y = r(**inputs, form="convolution", cu_seqlens=bounds, initial_state=state)
    wide = {n: x.double() for n, x in inputs.items()}
    exact = r(**wide, form="recurrent", cu_seqlens=bounds, initial_state=state.double())
    compare(r, inputs, {"y": y}, {"y": exact}, 3e-6)


def slopes(x, leaves):
    return torch.autograd.grad(x, leaves, retain_graph=True, materialize_grads=True)


UNPRINTED = pytest.mark.parametrize("r", BY_FILTERS, ids=lambda r: r.name)


@pytest.fixture
def nothing_by_torch(monkeypatch):
    """No convolution by torch's operators from now on."""
    return lambda: monkeypatch.setattr("dsf.kernels.invariant.causal", None)


@UNPRINTED
@pytest.mark.parametrize("tokens", [1, 131])
def test_what_is_not_printed_convolves_by_the_operator_of_given_filters(r, tokens, on_kernels, nothing_by_torch):
    assert isinstance(convolve.program_of(r.spec), str)
    one_drive = r in (blocks, uneven, corrected, mixers.s4)
    assert isinstance(given.program_of(r.spec), str) is not one_drive
    inputs = drawn(r, T=tokens)
    on_kernels(False)
    plain = results(r, inputs, "convolution")
    on_kernels(True)
    expected = results(r, {n: x.double() for n, x in inputs.items()}, "recurrent")
    nothing_by_torch()
    for _ in range(3):
        got = results(r, inputs, "convolution")
        with torch.no_grad():
            assert torch.equal(r(**inputs, form="convolution"), got["y"])
        compare(r, inputs, got, expected, 4e-6, plain)


@pytest.mark.parametrize("r", [corrected, mixers.s4], ids=lambda r: r.name)
def test_beside_a_given_filter_half_precisions_are_rounded_once(r, on_kernels):
    inputs = drawn(r, T=70, dtype=torch.bfloat16)
    got = results(r, inputs, "convolution")
    assert got["y"].dtype == torch.bfloat16 and all(got[n].dtype == x.dtype for n, x in inputs.items())
    compare(r, inputs, got, results(r, {n: x.double() for n, x in inputs.items()}, "recurrent"), 2.0**-7)


@UNPRINTED
def test_states_of_what_is_not_printed_with_all_gradients(r, on_kernels, nothing_by_torch):
    """In and out, of whole and of packed sequences, forwards and in reverse."""
    inputs = drawn(r, B=1, T=90)
    bounds = torch.tensor([0, 0, 5, 12, 13, 44, 44, 57, 90])
    found = {}
    for dtype, form in ((torch.float64, "recurrent"), (torch.float32, "convolution")):
        if form == "convolution":
            nothing_by_torch()
        for name, options in (("whole", {}), ("packed", {"cu_seqlens": bounds}), ("reversed", {"reverse": True})):
            leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in inputs.items()}
            y, last = r(**leaves, return_state=True, form=form, **options)
            start = torch.linspace(-1, 1, last.numel()).to(dtype).cos().view_as(last).requires_grad_()
            z, ended = r(**leaves, initial_state=start, return_state=True, form=form, **options)
            loss = sum((x * x.detach().cos()).sum() for x in (y, last, z, ended))
            slopes = torch.autograd.grad(loss, [*leaves.values(), start], materialize_grads=True)
            found[form, name] = [y, last, z, ended, *slopes]
    for name in ("whole", "packed", "reversed"):
        for a, b in zip(found["convolution", name], found["recurrent", name], strict=True):
            assert a.dtype == torch.float32 and (a - b).norm() <= 1e-5 * b.norm() + 1e-5


@pytest.mark.parametrize("r", [corrected, corrected_shift, mixers.s4], ids=lambda r: r.name)
def test_second_derivatives_beside_a_given_filter(r, on_kernels):
    inputs, found = drawn(r, T=12), []
    for now, wide in ((True, torch.float32), (False, torch.float64)):
        on_kernels(now)
        leaves = [x.to(wide).requires_grad_() for x in inputs.values()]
        first = torch.autograd.grad(r(*leaves, form="convolution").square().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_one_tensor_as_several_inputs_beside_a_given_filter(on_kernels):
    inputs, found = drawn(corrected, T=20, P=4), []
    for now, wide in ((True, torch.float32), (False, torch.float64)):
        on_kernels(now)
        x, rate = (inputs[n].detach().to(wide).requires_grad_() for n in ("x", "a"))
        mixed = {n: v.to(wide) for n, v in inputs.items()} | dict.fromkeys("xzg", x) | dict.fromkeys("aBC", rate)
        found.append(torch.autograd.grad(corrected(**mixed, form="convolution").square().sum(), [x, rate]))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("r", [mixers.s4d, mixers.s4], ids=lambda r: r.name)
def test_a_million_tokens_fit_the_grids(r):
    """Whose second and third axes end at 65,535 in CUDA."""
    sizes = {"B": 1, "T": 3_000_000, "H": 2, "N": 8, "N/2": 4, "P": 1}
    shapes = {i.name: [sizes[a] for a in i.kind.layout()] for i in r.spec.inputs}
    leaves = [torch.empty(shape, device="meta").requires_grad_() for shape in shapes.values()]
    forget()
    with noted() as schedules, elsewhere():
        torch.autograd.grad(r(*leaves, form="convolution").sum(), leaves)
    grids = [launch.grid for schedule in schedules for launch in schedule.launches]
    assert grids and all(size <= 65_535 for grid in grids for size in grid[1:])


OF_EACH_WAY = [mixers.s4d, corrected, blocks]  # all is printed, what is around the filter, each drive's convolution


@pytest.mark.parametrize("r", OF_EACH_WAY, ids=lambda r: r.name)
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": torch.tensor([0, 100, 300])}], ids=["whole", "packed"])
def test_the_torch_backend_launches_no_kernels(r, options):
    sizes = {"B": 1, "T": 300, "H": 4, "N": 8, "N/2": 4, "P": 1}
    shapes = {i.name: [sizes[a] for a in i.kind.layout()] for i in r.spec.inputs}
    leaves = {name: torch.empty(shape, device="meta").requires_grad_() for name, shape in shapes.items()}
    for backend, launched in (("auto", True), ("torch", False)):
        forget()
        with noted() as schedules, elsewhere():
            plan = r.plan(**leaves, form="convolution", backend=backend)
            y, last = r(**leaves, form="convolution", backend=backend, return_state=True, **options)
            y = y + r(**leaves, form="convolution", backend=backend, **options)
            torch.autograd.grad(y.sum() + last.sum(), [*leaves.values()])
        assert (plan.kernel != "FFT") == bool(schedules) == launched


@pytest.mark.parametrize("r", OF_EACH_WAY, ids=lambda r: r.name)
def test_the_torch_backend_gives_torch_s_numbers(r, on_kernels, monkeypatch):
    inputs, found = drawn(r, T=70), []
    for now in (True, False):
        on_kernels(now)
        monkeypatch.setattr("dsf.kernels.invariant._has_kernel", lambda *_, now=now: now)
        found.append(results(r, inputs, "convolution", backend="torch" if now else "auto"))
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_a_call_with_a_given_filter_makes_few_launches():
    """Rows of the tokens and of the filter, the product of their spectra, y; and the same backwards."""
    sizes = {"B": 2, "T": 300, "H": 4, "N": 8, "N/2": 4, "P": 1}
    shapes = {i.name: [sizes[a] for a in i.kind.layout()] for i in mixers.s4.spec.inputs}
    leaves = [torch.empty(shape, device="meta").requires_grad_() for shape in shapes.values()]
    forget()
    with noted() as schedules, elsewhere():
        torch.autograd.grad(mixers.s4(*leaves, form="convolution").sum(), leaves)
    forward, backward = schedules
    assert [len(x.launches) for x in (forward, backward)] == [4, 4]


def test_states_and_packed_sequences_still_agree(on_kernels):
    for r in (complex_bank, mixers.lru):
        inputs = drawn(r, B=1, T=40)
        wide, steps = {n: x.double() for n, x in inputs.items()}, {"form": "recurrent"}
        state = r(**wide, return_state=True, form="recurrent")[1]
        bounds = torch.tensor([0, 7, 7, 40])
        pairs = [
            (
                r(**inputs, form="convolution", initial_state=state.float()),
                r(**wide, form="recurrent", initial_state=state),
            ),
            (r(**inputs, form="convolution", cu_seqlens=bounds), r(**wide, **steps, cu_seqlens=bounds)),
            (r(**inputs, form="convolution", return_state=True)[1], state),
            (r(**inputs, form="convolution", reverse=True), r(**wide, **steps, reverse=True)),
        ]
        for a, b in pairs:
            assert (a - b).norm() <= 3e-6 * b.norm()


def test_a_call_makes_few_launches():
    """So that the host, which took most of the time, has little to do."""
    sizes = {"B": 2, "T": 300, "H": 4, "N": 8, "N/2": 4, "P": 1}
    shapes = {i.name: [sizes[a] for a in i.kind.layout()] for i in mixers.s4d.spec.inputs}
    inputs = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    leaves = [x.requires_grad_() for x in inputs.values()]
    forget()
    with noted() as schedules, elsewhere():
        torch.autograd.grad(mixers.s4d(*leaves, form="convolution").sum(), leaves)
    forward, backward = schedules
    assert len(forward.launches) <= 5 and len(forward.steps) <= 15
    assert len(backward.launches) <= 5 and len(backward.steps) <= 20


def test_the_test_s_recurrences_are_those_of_the_convolution_form():
    assert all("convolution" in r.forms for r in (*PRINTED, *LINES))


def test_a_dropped_declaration_is_freed_and_its_program_is_found_by_content(on_kernels):
    def declare():
        @dsf.recurrence
        def dropped(x: Value, a: Param[Key], C: Param[Key]):
            return System(A=exp(-exp(a)), B=x, C=C)

        return dropped

    r = declare()
    inputs = {n: x.requires_grad_() for n, x in drawn(r).items()}
    r(**inputs, form="convolution").sum().backward()
    name, by_filter = (x.program_of(r.spec)[1] for x in (convolve, given))
    alive = weakref.ref(r.spec)
    del r
    gc.collect()
    assert alive() is None
    known, other = CONVOLUTIONS.pop(name), CONVOLUTIONS.pop(by_filter)
    for x in (name, by_filter):
        with pytest.raises(dsf.DsfError, match="whose declaration"):
            CONVOLUTIONS[x]
    kept = declare()
    assert CONVOLUTIONS[name] == known and name == convolve.program_of(kept.spec)[1]
    assert CONVOLUTIONS[by_filter] == other and by_filter == given.program_of(kept.spec)[1] != name
