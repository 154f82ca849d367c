"""The matrix kernels on the GPU: what holds for every member of their families; and softmax attention beside them."""

import pytest
import torch
from matrix_family import fading_delta, fading_rows, forgetful_delta, gated, late_gate, late_ratio, swinging
from test_gpu_matrix import ALL, compare, draw, outcome, state_of, worst
from torch.utils.checkpoint import checkpoint

import dsf
from dsf.kernels.triton import operators
from dsf.mixers import get

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
BF16 = torch.bfloat16
linear, delta, product, rwkv6, mlstm, kda = (
    get(n).recurrence
    for n in ("unnormalized_linear_attention", "deltanet", "gated_delta_product", "rwkv6", "mlstm", "kda")
)
softmax, s6 = get("softmax_attention").recurrence, get("s6").recurrence
# no decay, a signed one, one for each key; delta rules of each; normalised and read before; several steps a token
KINDS = [linear, swinging, fading_rows, delta, forgetful_delta, fading_delta, late_ratio, product, rwkv6, mlstm]


def named(recurrences):
    return pytest.mark.parametrize("recurrence", recurrences, ids=lambda r: r.name)


SIZES = [(n, p, r) for r in KINDS for n, p in [(1, 1), (24, 40), (100, 7), (130, 255)]]
SIZES += [(256, 256, r) for r in (swinging, fading_delta, get("rwkv7").recurrence)]


@pytest.mark.parametrize("n, p, recurrence", SIZES, ids=lambda x: getattr(x, "name", x))
def test_any_size_of_keys_and_channels(n, p, recurrence):
    if recurrence is forgetful_delta and n == 1:
        pytest.skip("a key of one entry at unit length is its sign: its gradient is rounding alone")
    compare(recurrence, draw(recurrence, 90, n, p, torch.float32), torch.float32, state=state_of(recurrence, n, p))


SCALED = [swinging, gated, fading_rows, forgetful_delta, fading_delta, late_gate, get("rwkv7").recurrence, mlstm]


@pytest.mark.parametrize("n, p", [(40, 16), (24, 16), (16, 24)])
@named(SCALED)
def test_few_keys_and_channels(recurrence, n, p):
    compare(recurrence, draw(recurrence, 200, n, p, BF16), BF16, state=state_of(recurrence, n, p))


@named([r for r in KINDS if r is not late_ratio])
def test_any_number_of_tokens(recurrence):
    for tokens in (1, 2, 31, 32, 33, 63, 64, 65):
        given = draw(recurrence, tokens, 24, 40, BF16)
        compare(recurrence, given, BF16, factor=2.0 if tokens < 64 else 1.0, state=state_of(recurrence, 24, 40))


@named([swinging, forgetful_delta, late_ratio])
def test_the_library_checks_recurrences_it_has_not_seen(recurrence):
    laws, dtypes = ("forms", "causality", "split", "packed", "step"), (torch.float32, BF16)
    report = dsf.check(recurrence, device="cuda", backend="triton", examples=1, tokens=70, laws=laws, dtypes=dtypes)
    assert report.ok, str(report)
    assert {r.law for r in report.rows if r.form == "triton"} == set(laws)


@named([r for r in ALL if r is not forgetful_delta])
def test_runs_repeat_to_the_bit(recurrence):
    given = draw(recurrence, 200, 64, 64, BF16)
    first, second = (outcome(recurrence, given, BF16, backend="triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@named([*KINDS, get("rwkv7").recurrence, s6, *(get(n).recurrence for n in ("rwkv4", "rg_lru"))])
def test_played_calls_equal_the_first_of_their_kind(recurrence):
    state = state_of(recurrence, 64, 64)

    def found(seed):
        given = draw(recurrence, 200, 64, 64, BF16, seed=seed)
        return outcome(recurrence, given, BF16, state, backend="triton")

    played = [found(seed) for seed in range(4)][-1]
    operators.forget()
    first = found(3)
    assert all(torch.equal(played[name], first[name]) for name in first)


@named(ALL)
def test_the_future_changes_no_bit_of_the_past(recurrence):
    given = {n: x.detach() for n, x in draw(recurrence, 200, 64, 64, BF16).items()}
    y = recurrence(**given, backend="triton")
    for entry in recurrence.spec.inputs:
        if entry.kind.time:
            given[entry.name][:, 131:] = given[entry.name][:, 131:].flip(1)
    assert torch.equal(recurrence(**given, backend="triton")[:, :131], y[:, :131])


def strided(x):
    """The same numbers as a slice of a wider tensor, heads before tokens."""
    wide = torch.zeros(
        *x.shape[:1], *x.shape[2:3], *x.shape[1:2], *x.shape[3:-1], 2 * x.shape[-1], device="cuda", dtype=x.dtype
    )
    view = wide[..., : x.shape[-1]].transpose(1, 2)
    view.copy_(x.detach())
    return view


@named([linear, delta, mlstm, kda, rwkv6, *(get(n).recurrence for n in ("retnet", "gated_deltanet", "gla", "rwkv7"))])
def test_strided_inputs_are_read_where_they_lie(recurrence):
    given = {n: x.detach() for n, x in draw(recurrence, 512, 64, 64, BF16, heads=8).items()}
    views = {n: strided(x) if x.dim() == 4 else x for n, x in given.items()}
    assert all(not x.is_contiguous() for x in views.values() if x.dim() == 4)
    peaks, outputs = [], []
    for x in (given, views, given, views):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        outputs.append(recurrence(**x, backend="triton"))
        peaks.append(torch.cuda.max_memory_allocated() - base)
    assert torch.equal(outputs[2], outputs[3])
    assert peaks[3] <= peaks[2], "a copy of an input"
    leaves = [{n: x.requires_grad_() for n, x in side.items()} for side in (given, views)]
    found = [torch.autograd.grad(recurrence(**x, backend="triton").float().sum(), list(x.values())) for x in leaves]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_beyond_two_to_the_31_elements():
    recurrence = linear
    tokens, cut = 2**18 + 640, 2**18 - 64
    given = {n: x.detach() for n, x in draw(recurrence, 4096, 128, 128, BF16, batch=1, heads=64).items()}
    given = {n: x.repeat(1, 65, *[1] * (x.dim() - 2))[:, :tokens].requires_grad_() for n, x in given.items()}
    tail = {n: x[:, cut:].detach().clone().requires_grad_() for n, x in given.items()}
    assert given["q"].numel() > 2**31
    with torch.no_grad():
        _, state = recurrence(**{n: x[:, :cut] for n, x in given.items()}, return_state=True, backend="triton")
    dy = torch.randn(1, tokens - cut, 64, 128, device="cuda", dtype=BF16)
    y = recurrence(**given, backend="triton")
    found = torch.autograd.grad(y[:, cut:], list(given.values()), dy)
    expected = torch.autograd.grad(recurrence(**tail, initial_state=state, backend="triton"), list(tail.values()), dy)
    for a, b in zip(found, expected, strict=True):
        assert worst(a[:, cut:], b) < 2e-2
        assert bool(a[:, :64].isfinite().all())


@pytest.mark.parametrize("name", ["mlstm", "gated_delta_product", "rwkv6", "kda"])
def test_every_operator_passes_opcheck(name):
    from dsf.kernels.triton.chunk.operator import matrix_mixer, matrix_mixer_backward
    from dsf.kernels.triton.pointwise.programs import PROGRAMS
    from dsf.kernels.triton.pointwise.step_ops import matrix_step, matrix_step_in_place
    from dsf.triton.chunk import program_of
    from dsf.triton.step import program_of as step_of

    recurrence = get(name).recurrence
    given = draw(recurrence, 70, 16, 16, torch.float32, batch=1, heads=1)
    operands = [given[i.name] for i in recurrence.spec.inputs]
    state, program = state_of(recurrence, 16, 16, 1, 1).requires_grad_(), program_of(recurrence.spec)[1]
    torch.library.opcheck(matrix_mixer, (operands, state, program, True))
    plain = [x.detach() for x in operands]
    y, final, saved = matrix_mixer(plain, state.detach(), program, True)
    if PROGRAMS[program].quotient:  # autograd keeps y beside what the operator saves
        saved = [*saved, y]
    arguments = (
        torch.randn_like(y),
        torch.randn_like(final),
        plain,
        state.detach(),
        saved,
        program,
        [True] * len(plain),
    )
    torch.library.opcheck(matrix_mixer_backward, arguments, test_utils=("test_schema", "test_faketensor"))
    token = [x[:, :1] if i.kind.time else x for i, x in zip(recurrence.spec.inputs, plain, strict=True)]
    for op in (matrix_step, matrix_step_in_place):
        torch.library.opcheck(op, (token, state.detach(), step_of(recurrence.spec)[1]))


def test_the_chunk_operators_pass_opcheck():
    from chunk_operator import chunk_matrix

    for recurrence, scalars in ((linear, 0), (forgetful_delta, 3)):
        given = draw(recurrence, 70, 16, 16, torch.float32, batch=1, heads=1)
        g, s, b = (torch.rand(1, 70, 1, device="cuda", requires_grad=True) if scalars else None for _ in "gsb")
        state = torch.randn(1, 1, 16, 16, device="cuda", requires_grad=True)
        rest = (None if g is None else -g.detach(), s, b, None, state, 1, True, True, False)
        torch.library.opcheck(chunk_matrix, (*(given[n] for n in "qkv"), *rest))


PACKED = torch.tensor([0, 1, 70, 100, 300])


@named(ALL)
def test_packed_sequences_are_read_where_they_lie(recurrence):
    n = 64
    given = draw(recurrence, 700, n, n, BF16, batch=1)
    bounds = torch.tensor([0, 1, 64, 129, 130, 300, 700], device="cuda")
    stable = recurrence.spec.rule is None or recurrence.spec.is_stabilised  # others divide by a random normaliser
    state = state_of(recurrence, n, n, batch=6) if stable else None
    # a sequence of one token has one rounding of everything
    compare(recurrence, given, BF16, factor=1.5, state=state, cu_seqlens=bounds)


@pytest.mark.parametrize("n, p", [(128, 128), (24, 40)])
@named([swinging, forgetful_delta, get("gla").recurrence, kda, mlstm, get("rwkv7").recurrence])
def test_packed_sequences_of_other_sizes(recurrence, n, p):
    dtype = torch.float32 if n == 24 else BF16
    given = draw(recurrence, 400, n, p, dtype, batch=1, heads=4)
    bounds = torch.tensor([0, 190, 190 + 63, 400], device="cuda")
    compare(recurrence, given, dtype, cu_seqlens=bounds)


@named([get("retnet").recurrence, forgetful_delta, get("gla").recurrence, mlstm])
def test_packed_sequences_in_segments(recurrence):
    cuts = [0, 9000, 9001, 4 * 64 * 64]
    given = draw(recurrence, cuts[-1], 64, 64, BF16, batch=1)
    state = state_of(recurrence, 64, 64, batch=3)
    compare(recurrence, given, BF16, state=state, cu_seqlens=torch.tensor(cuts, device="cuda"))


@named([linear, late_ratio, get("gated_deltanet").recurrence, rwkv6, product, mlstm, get("rwkv7").recurrence, s6])
def test_packed_training_steps_are_captured_and_take_other_boundaries(recurrence):
    given = draw(recurrence, 300, 64, 64, BF16, batch=1)
    bounds = torch.tensor([0, 1, 70, 100, 300], device="cuda")
    state = state_of(recurrence, 64, 64, batch=4).requires_grad_()
    leaves = [*given.values(), state]

    def gradients():
        y, final = recurrence(**given, initial_state=state, cu_seqlens=bounds, return_state=True, backend="triton")
        return [y, final, *torch.autograd.grad(y.float().square().sum() + final.sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
        gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    for cuts in ([0, 1, 70, 100, 300], [0, 128, 129, 257, 300]):
        bounds.copy_(torch.tensor(cuts))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(), strict=True))
    bounds.copy_(torch.tensor([0, 0, 200, 200, 300]))  # sequences without tokens, as captured calls may have
    graph.replay()
    y, final = recurrence(
        **given, initial_state=state[1::2], cu_seqlens=torch.tensor([0, 200, 300]), return_state=True, backend="triton"
    )
    assert torch.equal(found[0], y) and torch.equal(found[1][1::2], final)
    torch.testing.assert_close(found[1][::2], state[::2].detach())


@named([linear, s6])
def test_boundaries_read_before_are_checked_against_other_lengths(recurrence):
    given = draw(recurrence, 300, 64, 64, BF16, batch=1)
    bounds = torch.tensor([0, 1, 70, 300], device="cuda")
    recurrence(**given, cu_seqlens=bounds, backend="triton")
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    shorter = {name: x[:, :200] if name in timed else x for name, x in given.items()}
    with pytest.raises(dsf.InputError, match="end with T = 200"):
        recurrence(**shorter, cu_seqlens=bounds, backend="triton")


@named([late_ratio, get("gated_deltanet").recurrence, s6])
def test_boundaries_on_the_gpu_are_waited_for_once(recurrence):
    given = draw(recurrence, 300, 64, 64, BF16, batch=1)
    bounds = torch.tensor([0, 1, 70, 100, 300], device="cuda")
    y = recurrence(**given, cu_seqlens=bounds, backend="triton")
    torch.autograd.grad(y.sum(), list(given.values()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = recurrence(**given, cu_seqlens=bounds, backend="triton")
        torch.autograd.grad(y.sum(), list(given.values()))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@named([linear, late_ratio, forgetful_delta, get("gla").recurrence, product, mlstm, get("rwkv7").recurrence, s6])
def test_packed_training_steps_are_one_graph(recurrence):
    given = draw(recurrence, 300, 64, 64, BF16, batch=1)
    bounds = torch.tensor([0, 1, 70, 100, 300], device="cuda", dtype=torch.int32)
    state = state_of(recurrence, 64, 64, batch=4)

    def loss(*x):
        y, final = recurrence(*x[:-1], initial_state=state, cu_seqlens=x[-1], return_state=True)
        return y.float().square().sum() + final.sum()

    torch.compiler.reset()  # or sizes that differ between recurrences are left open
    compiled = torch.compile(loss, fullgraph=True)
    for cuts in ([0, 1, 70, 100, 300], [0, 128, 129, 257, 300]):
        bounds.copy_(torch.tensor(cuts))
        wanted = list(given.values())
        expected = torch.autograd.grad(loss(*wanted, bounds), wanted)
        found = torch.autograd.grad(compiled(*wanted, bounds), wanted)
        for a, b in zip(found, expected, strict=True):
            assert worst(a, b) < 1e-2


@named([late_ratio, mlstm, forgetful_delta])
def test_packed_calls_are_captured_checkpointed_and_run_under_autocast(recurrence):
    given = draw(recurrence, 300, 64, 64, BF16, batch=1)

    def run(*x):
        return recurrence(*x, cu_seqlens=PACKED, backend="triton")

    def gradients():
        return torch.autograd.grad(run(*given.values()).float().square().sum(), list(given.values()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected, y = gradients(), run(*given.values())
        gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.autocast("cuda", BF16):
        again = checkpoint(run, *given.values(), use_reentrant=False)
    assert torch.equal(again, y)
    found = torch.autograd.grad(again.float().square().sum(), list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype, limit", [(BF16, 1.5e-2), (torch.float16, 3e-3), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("groups", [None, 1])
def test_softmax_attention_is_torch_s_fused_one(dtype, limit, groups):
    given = {n: x.detach() for n, x in draw(softmax, 200, 64, 64, dtype, heads=4).items()}
    given = {n: x if n == "q" or not groups else x[:, :, :groups] for n, x in given.items()}

    def run(kind, **how):
        x = {n: t.detach().to(kind).requires_grad_() for n, t in given.items()}
        y = softmax(**x, **how)
        weight = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        return [y, *torch.autograd.grad((y.double() * weight.to(dtype).double()).sum(), list(x.values()))]

    for a, b in zip(run(dtype), run(torch.float64, form="naive"), strict=True):
        assert worst(a, b) < limit
    with torch.no_grad():
        y, cache = softmax(**given, return_state=True)
        _, first = softmax(**{n: x[:, :130] for n, x in given.items()}, return_state=True)
        rest = softmax(**{n: x[:, 130:] for n, x in given.items()}, initial_state=first)
        assert cache.k.dtype == dtype and worst(rest, y[:, 130:]) < limit
        one = {n: x[:1] for n, x in given.items()}
        packed = softmax(**one, cu_seqlens=torch.tensor([0, 70, 200]))
        parts = [softmax(**{n: x[:, a:b] for n, x in one.items()}) for a, b in ((0, 70), (70, 200))]
        assert worst(packed, torch.cat(parts, dim=1)) < limit


def test_softmax_attention_copies_no_input():
    q, k, v = (torch.randn(2, 2048, 8, 64, device="cuda", dtype=BF16) for _ in "qkv")
    softmax(q, k, v)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = softmax(q, k, v)
    assert torch.cuda.max_memory_allocated() - base < 1.5 * y.numel() * y.element_size()
