"""The fused scan compiled, on a CUDA GPU: the laws of its members, in every block of tokens and channels."""

from itertools import pairwise

import pytest
import torch
from scan_family import (
    MIXING,
    UNSEEN,
    aligned,
    before,
    bounded,
    channels,
    crowded,
    leaky_peak,
    swinging,
    twice,
    weighted,
)
from test_triton_mixing import draw as mixed
from test_triton_scan import draw, gradients
from torch.utils.checkpoint import checkpoint

import dsf
from dsf import System, Value
from dsf.mixers.hgrn import hgrn
from dsf.mixers.longhorn import longhorn, longhorn_exact
from dsf.mixers.mingru import mingru, mingru_positive
from dsf.mixers.qlstm import modified_qlstm, qlstm
from dsf.mixers.rg_lru import rg_lru
from dsf.mixers.rwkv4 import rwkv4
from dsf.mixers.s6 import s6, s6_complex, s6_negative
from dsf.triton.scan import _hole, source_of

pytestmark = pytest.mark.gpu
NORMALISED = [weighted, bounded, rwkv4]
MEMBERS = [s6, longhorn, rg_lru, qlstm, s6_negative, hgrn, mingru, mingru_positive, modified_qlstm, *UNSEEN]
PACKED = [rg_lru, s6, longhorn, channels, before, crowded, leaky_peak, weighted, rwkv4]
BLOCK = 64


def cuda(x: dict, dtype: torch.dtype = torch.float32) -> dict:
    return {k: v.cuda().to(dtype) for k, v in x.items()}


def assert_blocks_close(ours: torch.Tensor, oracle: torch.Tensor, tolerance: float) -> None:
    """Worst error of every block of tokens and every head, beside the largest entry of the whole."""
    assert ours.shape == oracle.shape and bool(torch.isfinite(ours).all())
    scale = oracle.abs().max().clamp(min=1e-3)
    error = (ours - oracle).abs() / scale
    blocks = error.split(BLOCK, dim=1) if error.dim() > 2 else (error,)
    worst = [float(b.max()) for b in blocks]
    assert max(worst) < tolerance, worst


@pytest.mark.parametrize(("n", "p", "tokens"), [(16, 64, 300), (24, 40, 265), (3, 5, 1)])
@pytest.mark.parametrize("recurrence", MEMBERS, ids=lambda r: r.name)
def test_equals_the_float64_oracle(recurrence: dsf.Recurrence, n: int, p: int, tokens: int) -> None:
    x = cuda(draw(recurrence, tokens, n=n, p=p, batch=2))
    state = torch.randn(2, 2, *recurrence.state_shape(n if recurrence.spec.has_key else 1, p), device="cuda")
    ours = gradients(recurrence, x, state, backend="triton")
    oracle = gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for a, b in zip(ours, oracle, strict=True):
        assert_blocks_close(a, b, 1e-4)


@pytest.mark.parametrize(("n", "p", "tokens"), [(16, 64, 300), (24, 40, 265), (128, 33, 130), (2, 5, 1)])
@pytest.mark.parametrize("recurrence", [*MIXING, longhorn_exact], ids=lambda r: r.name)
def test_entries_mixed_by_tokens_equal_the_float64_oracle(recurrence, n, p, tokens) -> None:
    x = cuda(mixed(recurrence, batch=2, tokens=tokens, n=n, p=p))
    state = torch.randn(2, 2, *recurrence.state_shape(n, p), device="cuda")
    oracle = gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for _ in range(3):
        for a, b in zip(gradients(recurrence, x, state, backend="triton"), oracle, strict=True):
            assert_blocks_close(a, b, 1e-4)


@pytest.mark.parametrize("keys", [1, 35, 70])
@pytest.mark.parametrize("recurrence", [s6_complex, s6, *MIXING], ids=lambda r: r.name)
def test_heads_of_one_channel_equal_the_float64_oracle(recurrence, keys) -> None:
    x = cuda(mixed(recurrence, batch=2, tokens=145, heads=70, n=16, p=1, keys=keys))
    state = torch.randn(2, 70, *recurrence.state_shape(16, 1), device="cuda")
    ours = gradients(recurrence, x, state, backend="triton")
    oracle = gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for a, b in zip(ours, oracle, strict=True):
        assert_blocks_close(a, b, 1e-4)


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("recurrence", NORMALISED, ids=lambda r: r.name)
def test_normalised_systems_equal_the_float64_oracle(recurrence: dsf.Recurrence, n: int) -> None:
    x, y = cuda(draw(recurrence, 300, n=n, p=40, batch=2)), {}
    for dtype in (torch.float32, torch.float64):
        leaves = [v.to(dtype).requires_grad_() for v in x.values()]
        backend = "triton" if dtype == torch.float32 else "torch"
        out, state = recurrence(*leaves, return_state=True, backend=backend)
        true = recurrence.true_state(state, 40)
        weights = torch.linspace(-1, 1, out.numel(), device="cuda").reshape(out.shape)
        grads = torch.autograd.grad((out * weights).sum() + true.tanh().sum(), leaves)
        y[dtype] = [out.detach(), true.detach(), *grads]
    for a, b in zip(*y.values(), strict=True):
        assert_blocks_close(a, b, 1e-4)


@pytest.mark.parametrize("recurrence", [leaky_peak, aligned, swinging], ids=lambda r: r.name)
def test_the_library_checks_recurrences_it_has_not_seen(recurrence: dsf.Recurrence) -> None:
    laws = ("forms", "causality", "split", "packed", "step")
    dtypes = (torch.float32, torch.bfloat16)
    report = dsf.check(recurrence, device="cuda", backend="triton", examples=1, tokens=70, laws=laws, dtypes=dtypes)
    assert report.ok, str(report)
    assert {r.dtype for r in report.rows if r.form == "triton"} == {"float32", "bfloat16"}
    assert {r.law for r in report.rows if r.form == "triton"} == set(laws)


def test_training_keeps_no_state_of_every_token() -> None:
    tokens, n, p = 4096, 16, 512
    leaves = [v.requires_grad_() for v in cuda(draw(s6, tokens, heads=1, n=n, p=p), torch.bfloat16).values()]
    torch.autograd.grad(s6(*leaves, backend="triton").float().sum(), leaves)
    torch.cuda.synchronize()
    before_call = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(s6(*leaves, backend="triton").float().sum(), leaves)
    assert len(found) == len(leaves)
    assert torch.cuda.max_memory_allocated() - before_call < 0.5 * 4 * tokens * n * p


@pytest.mark.parametrize("n", [1, 2, 64, 100, 256])
def test_every_row_of_the_tile_table(n: int) -> None:
    x = cuda(draw(s6, 130, n=n, p=33))
    state = torch.randn(1, 2, n, 33, device="cuda")
    ours = gradients(s6, x, state, backend="triton")
    oracle = gradients(s6, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for a, b in zip(ours, oracle, strict=True):
        assert_blocks_close(a, b, 1e-4)


@dsf.recurrence
def given(a: Value, b: Value) -> System:
    """A vector scan of given a, b."""
    return System(A=a, B=b, C=1)


@pytest.mark.parametrize(("batch", "tokens", "p"), [(16, 75, 4100), (1, 1111, 4096), (3, 777, 96)])
@pytest.mark.parametrize("recurrence", [given, rg_lru, qlstm, s6], ids=lambda r: r.name)
def test_vector_states_in_one_pass_and_in_segments(recurrence: dsf.Recurrence, batch: int, tokens: int, p: int) -> None:
    x = cuda(draw(recurrence, tokens, heads=1, n=1, p=p, batch=batch))
    x = {k: v.sigmoid() if k == "a" else v for k, v in x.items()}
    state = torch.randn(batch, 1, 1, p, device="cuda")
    ours = gradients(recurrence, x, state, backend="triton")
    oracle = gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for a, b in zip(ours, oracle, strict=True):
        assert_blocks_close(a, b, 1e-4)


@pytest.mark.parametrize("n", [16, 40, 64])
def test_the_adjoint_in_stretches_of_time(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.scan import gradients as scan_gradients

    x = cuda(draw(s6, 300, n=n, p=100, batch=2))
    state = torch.randn(2, 2, n, 100, device="cuda")
    whole = gradients(s6, x, state, backend="triton")
    operators.forget()
    monkeypatch.setattr(scan_gradients, "SHARED", 1 << 18)
    parts = gradients(s6, x, state, backend="triton")
    oracle = gradients(s6, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for a, b, c in zip(whole, parts, oracle, strict=True):
        assert_blocks_close(a, c, 1e-4)
        assert_blocks_close(b, c, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recurrence", [s6, rg_lru], ids=lambda r: r.name)
def test_narrow_inputs_are_rounded_once(recurrence: dsf.Recurrence, dtype: torch.dtype) -> None:
    x = cuda(draw(recurrence, 200, n=16, p=64), dtype)
    y = recurrence(**x, backend="triton")
    oracle = recurrence(**{k: v.float() for k, v in x.items()}, backend="torch")
    assert y.dtype == dtype
    assert_blocks_close(y.float(), oracle.to(dtype).float(), 1.5 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recurrence", [s6, longhorn, rg_lru, aligned], ids=lambda r: r.name)
def test_gradients_of_narrow_inputs_are_rounded_once(recurrence: dsf.Recurrence, dtype: torch.dtype) -> None:
    x = cuda(draw(recurrence, 200, n=16, p=64, batch=2), dtype)
    state = torch.randn(2, 2, *recurrence.state_shape(16 if recurrence.spec.has_key else 1, 64), device="cuda")
    ours = gradients(recurrence, x, state, backend="triton")
    oracle = gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for a, b in zip(ours, oracle, strict=True):
        assert_blocks_close(a.double(), b, torch.finfo(dtype).eps)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("recurrence", [s6, rg_lru], ids=lambda r: r.name)
def test_any_number_of_tokens(recurrence: dsf.Recurrence, tokens: int) -> None:
    x = cuda(draw(recurrence, tokens, n=24, p=40))
    state = torch.randn(1, 2, *recurrence.state_shape(24 if recurrence.spec.has_key else 1, 40), device="cuda")
    ours = gradients(recurrence, x, state, backend="triton")
    oracle = gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="recurrent")
    for a, b in zip(ours, oracle, strict=True):
        assert_blocks_close(a, b, 1e-4)


@pytest.mark.parametrize("recurrence", [s6, longhorn, aligned, rg_lru, swinging, weighted], ids=lambda r: r.name)
def test_repeated_runs_are_bitwise_equal(recurrence: dsf.Recurrence) -> None:
    x = cuda(draw(recurrence, 700, n=16, p=96, batch=2))
    state = torch.randn(2, 2, *recurrence.state_shape(16 if recurrence.spec.has_key else 1, 96), device="cuda")
    first, second = (gradients(recurrence, x, state, backend="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recurrence", [s6, longhorn, aligned, rg_lru, swinging, twice], ids=lambda r: r.name)
def test_the_future_changes_no_bit_of_the_past_and_its_gradients(recurrence: dsf.Recurrence) -> None:
    x, cut, found = cuda(draw(recurrence, 700, n=16, p=96)), 400, []
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    other = {k: torch.cat([v[:, :cut], v[:, cut:].flip(1)], 1) if k in timed else v for k, v in x.items()}
    for given in (x, other):
        leaves = {k: v.clone().requires_grad_() for k, v in given.items()}
        y = recurrence(**leaves, backend="triton")[:, :cut]
        grads = torch.autograd.grad(y.sum(), list(leaves.values()), materialize_grads=True)
        kept = [g[:, :cut] if k in timed else g for k, g in zip(leaves, grads, strict=True)]
        assert all(not bool(g[:, cut:].any()) for k, g in zip(leaves, grads, strict=True) if k in timed)
        found.append([y, *kept])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_operators_pass_opcheck() -> None:
    from dsf.kernels.triton.scan.operator import scan, scan_adjoint

    for recurrence in (s6, rg_lru):
        x = {k: v.requires_grad_() for k, v in cuda(draw(recurrence, 70, n=16, p=40)).items()}
        operands, name = [x[o.name] for o in source_of(recurrence.spec).operands], _hole(recurrence.spec)
        state = torch.randn(1, 2, 16 if recurrence is s6 else 1, 40, device="cuda", requires_grad=True)
        torch.library.opcheck(scan, (operands, state, name, True, False, None, 0))
        y, final, saved = scan(operands, state, name, True, False, None, 0)
        plain, needs = [v.detach() for v in operands], [True] * len(operands)
        given = (torch.randn_like(y), torch.randn_like(final), plain, saved.detach(), name, needs, None)
        torch.library.opcheck(scan_adjoint, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("recurrence", [qlstm, s6], ids=lambda r: r.name)
def test_strided_views_are_read_where_they_lie(recurrence: dsf.Recurrence) -> None:
    x = cuda(draw(recurrence, 2048, n=16, p=512), torch.bfloat16)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    views = {k: v.movedim(1, -1).contiguous().movedim(-1, 1) if k in timed else v for k, v in x.items()}
    plain, strided = recurrence(**x, backend="triton"), recurrence(**views, backend="triton")
    # walked by other programs, or compiled for other strides, a sum may round otherwise: the last bit of bfloat16
    torch.testing.assert_close(strided, plain, rtol=2**-7, atol=1e-6 * plain.abs().max().item())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = recurrence(**views, backend="triton")
    needed = torch.cuda.max_memory_allocated() - before - kept.numel() * kept.element_size()
    assert needed < 0.9 * min(v.numel() * v.element_size() for v in views.values() if v.shape == kept.shape)
    leaves = [[v.detach().requires_grad_() for v in given.values()] for given in (x, views)]
    grads = [torch.autograd.grad(recurrence(*given, backend="triton").float().sum(), given) for given in leaves]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6 * a.abs().max().item())


@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("recurrence", PACKED, ids=lambda r: r.name)
def test_packed_equals_separate(recurrence: dsf.Recurrence, states: bool) -> None:
    tokens, cuts = 1100, (0, 1, 130, 700, 1100)
    x = {k: v.requires_grad_() for k, v in cuda(draw(recurrence, tokens, n=16, p=40)).items()}
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    _, start = recurrence(**cuda(draw(recurrence, 3, n=16, p=40, batch=4)), return_state=True)
    start = start.detach().requires_grad_() if states else None
    y, final = recurrence(
        **x, initial_state=start, cu_seqlens=torch.tensor(cuts, device="cuda"), return_state=True, backend="triton"
    )
    parts = []
    for row, (a, b) in enumerate(pairwise(cuts)):
        part = {k: v[:, a:b] if k in timed else v for k, v in x.items()}
        first = None if start is None else start[row : row + 1]
        parts.append(recurrence(**part, initial_state=first, return_state=True, backend="triton"))
    other = torch.cat([out for out, _ in parts], 1), torch.cat([state for _, state in parts])
    weights = torch.linspace(-1, 1, y.numel(), device="cuda").reshape(y.shape)
    wrt = [*x.values(), *([] if start is None else [start])]
    both = [[out, state, *torch.autograd.grad((out * weights).sum() + state.tanh().sum(), wrt, allow_unused=True,
             materialize_grads=True)] for out, state in ((y, final), other)]  # fmt: skip
    for a, b in zip(*both, strict=True):
        assert_blocks_close(a, b, 1e-4)


def test_offsets_beyond_32_bits() -> None:
    tokens, channels = (1 << 19) + 5, 4096
    z = torch.randn(1, tokens, 1, channels, device="cuda", dtype=torch.bfloat16)
    h = torch.randn_like(z)
    y, state = mingru(z=z, h=h, return_state=True, backend="triton")
    tail = slice(tokens - 300, None)
    expected, last = mingru(z=z[:, tail], h=h[:, tail], return_state=True, backend="torch")
    assert_blocks_close(y[:, tokens - 40 :].float(), expected[:, -40:].float(), 1e-2)
    assert_blocks_close(state, last, 1e-4)


def test_the_operator_compiles_whole() -> None:
    x = {k: v.requires_grad_() for k, v in cuda(draw(qlstm, 256, p=64)).items()}
    name = _hole(qlstm.spec)
    operands = [x[o.name] for o in source_of(qlstm.spec).operands]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.ops.dsf.fused_scan(list(tensors), None, name, True, False, None, 0)[0].sin()

    plain, whole = run(*operands), torch.compile(run, fullgraph=True)(*operands)
    found = [torch.autograd.grad(y.sum(), operands) for y in (plain, whole)]
    assert_blocks_close(whole, plain, 1e-5)
    for a, b in zip(*found, strict=True):
        assert_blocks_close(a, b, 1e-5)


@pytest.mark.parametrize("recurrence", [longhorn, aligned], ids=lambda r: r.name)
def test_a_call_with_shared_parts_made_before_compiles_whole(recurrence: dsf.Recurrence) -> None:
    x = [v.requires_grad_() for v in cuda(draw(recurrence, 256, n=16, p=64), torch.bfloat16).values()]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return recurrence(*tensors, backend="triton").sin()

    plain, whole = run(*x), torch.compile(run, fullgraph=True)(*x)
    found = [torch.autograd.grad(y.float().sum(), x) for y in (plain, whole)]
    for a, b in zip([plain, *found[0]], [whole, *found[1]], strict=True):
        assert_blocks_close(a.float(), b.float(), 1e-2)


@pytest.mark.parametrize("recurrence", [s6, aligned], ids=lambda r: r.name)
def test_a_training_step_is_captured_in_a_graph(recurrence: dsf.Recurrence) -> None:
    x = cuda(draw(recurrence, 256, n=16, p=64))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(recurrence(**leaves, backend="triton").sum(), list(leaves.values()))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(recurrence(**leaves, backend="triton").sum(), list(leaves.values()))
    graph.replay()
    again = torch.autograd.grad(recurrence(**leaves, backend="triton").sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_checkpointing_and_autocast_change_nothing() -> None:
    x = {k: v.requires_grad_() for k, v in cuda(draw(qlstm, 100, p=64)).items()}
    plain = torch.autograd.grad(qlstm(**x, backend="triton").sum(), list(x.values()))
    with torch.autocast("cuda", torch.bfloat16):
        y = checkpoint(lambda *a: qlstm(*a, backend="triton"), *x.values(), use_reentrant=False)
    saved = torch.autograd.grad(y.sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))


def test_auto_chooses_it_also_to_decode() -> None:
    x = cuda(draw(s6, 1, n=16, p=64))
    assert s6.plan(T=2, device="cuda").backend == "triton" and "def pull(" in s6.plan(T=2, device="cuda").source
    assert "decode step" in s6.plan(**x).kernel
    timed = {i.name for i in s6.spec.inputs if i.kind.time}
    token = {k: v[:, 0] if k in timed else v for k, v in x.items()}
    y, state = s6.step(None, **token)
    expected, last = s6(**x, backend="torch", return_state=True)
    assert_blocks_close(y, expected[:, 0], 1e-5)
    assert_blocks_close(state, last, 1e-5)
