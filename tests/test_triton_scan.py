"""The fused scan in Triton's interpreter: what is printed computes what was declared, forward and backward."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interpreted import INTERPRETED, interpreted
from not_finite import BOUNDS, assert_alone
from scan_family import aligned, before, bounded, channels, erasing, late_swing, leaky_peak, swinging, twice, weighted

import dsf
from dsf import System, Value
from dsf.language.errors import FormError
from dsf.mixers.hgrn import hgrn
from dsf.mixers.longhorn import longhorn
from dsf.mixers.mingru import mingru, mingru_positive
from dsf.mixers.qlstm import modified_qlstm, qlstm
from dsf.mixers.rg_lru import rg_lru
from dsf.mixers.rwkv4 import rwkv4
from dsf.mixers.s6 import s6, s6_negative
from dsf.triton.print_scan import emit
from dsf.triton.source import write

NORMALISED = [weighted, bounded, rwkv4]
RECURRENCES = [s6, longhorn, rg_lru, qlstm, leaky_peak, aligned, swinging, late_swing, channels, erasing, twice]
OTHERS = [hgrn, mingru, modified_qlstm, s6_negative]
SMALL = {1: (2, 4, 1, 4, 4, 2, 4, 64, 0), 256: (1, 4, 1, 4, 4, 2, 4, 64, 0)}  # two channel blocks, several segments


def draw(recurrence: dsf.Recurrence, tokens: int, heads: int = 2, n: int = 3, p: int = 5, batch: int = 1) -> dict:
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        shared = 1 if i.kind.time and "key" in i.kind.axes else heads
        steps = [i.kind.steps] if i.kind.steps else []
        x = torch.randn([batch, tokens, *steps, shared, *sizes] if i.kind.time else [heads, *sizes])
        found[i.name] = (x > 0.7).float() if i.name in ("reset", "stop") else x.sigmoid() if i.name == "beta" else x
    return found


def gradients(recurrence: dsf.Recurrence, x: dict, state: torch.Tensor, **how) -> list[torch.Tensor]:
    """y, the final state, and the gradients of a fixed functional of both in every input and the first state."""
    x = {k: v.detach().clone().requires_grad_() for k, v in x.items()}
    state = state.detach().clone().requires_grad_()
    y, final = recurrence(**x, initial_state=state, return_state=True, **how)
    weights = (
        torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y),
        torch.linspace(1, 2, final.numel()).reshape(final.shape).to(y),
    )
    total = (y * weights[0]).sum() + (final * weights[1]).sum()
    found = torch.autograd.grad(total, [*x.values(), state], allow_unused=True, materialize_grads=True)
    return [y.detach(), final.detach(), *found]


def close(ours: list[torch.Tensor], oracle: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    for place, (a, b) in enumerate(zip(ours, oracle, strict=True)):
        scale = b.abs().max().clamp(min=1e-3)
        assert float((a - b).abs().max() / scale) < tolerance, f"result {place}"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.scan import table as scan_table

    operators.forget()
    for table in (scan_table.RUNS_FORWARD, scan_table.RUNS_ADJOINT):
        for light in (True, False):
            monkeypatch.setitem(table, light, (2, 4, 4, 1, 4, 1, 64, 0))
    monkeypatch.setattr(scan_table, "LANES", 4)
    monkeypatch.setattr(scan_table, "ENTRIES", (2, 1, 4, 4, 64, 0))
    monkeypatch.setattr(scan_table, "BACKWARD", (2, 4, 4, 0))
    monkeypatch.setattr(scan_table, "DEAR", 4)
    for table in (scan_table.FORWARD, scan_table.ADJOINT):
        for size in list(table):
            monkeypatch.delitem(table, size)
        for size, row in SMALL.items():
            monkeypatch.setitem(table, size, row)


@interpreted
@pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda r: r.name)
def test_equals_the_oracle_forward_and_backward(recurrence: dsf.Recurrence, small_tiles: None) -> None:
    equals_the_oracle(recurrence, tokens=7)


def equals_the_oracle(recurrence: dsf.Recurrence, tokens: int) -> None:
    x = draw(recurrence, tokens=tokens)
    state = torch.randn(1, 2, *recurrence.state_shape(3 if recurrence.spec.has_key else 1, 5))
    ours = gradients(recurrence, x, state, backend="triton")
    wide = {k: v.double() for k, v in x.items()}
    close(ours, gradients(recurrence, wide, state.double(), form="naive"))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recurrence", [s6, longhorn, erasing, aligned], ids=lambda r: r.name)
def test_a_gradient_asked_for_alone_is_the_same(recurrence: dsf.Recurrence, dtype: torch.dtype) -> None:
    given = {name: x.to(dtype) for name, x in draw(recurrence, tokens=11, n=4, p=40).items()}
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    together = torch.autograd.grad(recurrence(**leaves, backend="triton").square().sum(), list(leaves.values()))
    for name, expected in zip(given, together, strict=True):
        x = given[name].clone().requires_grad_()
        (alone,) = torch.autograd.grad(recurrence(**{**given, name: x}, backend="triton").square().sum(), [x])
        assert torch.equal(alone, expected), name


@pytest.mark.parametrize(
    "n, keyed, keys, states", [(16, 1, 2, 2), (16, 0, 2, 2), (20, 1, 2, 1), (24, 1, 2, 0), (6, 0, 1, 0), (64, 1, 2, 0)]
)
def test_shared_memory_has_room_for_rows_of_few_entries(n: int, keyed: int, keys: int, states: int) -> None:
    """As on an H200, with sixteen programs a processor; shelves are filled 32 numbers at a time."""
    from dsf.kernels.triton.scan import table as scan_table

    t = scan_table.backward(scan_table.tile(scan_table.ADJOINT, n, 4096))
    assert scan_table.shared_states(t, n, keyed, keys, torch.device("cpu")) == states
    taken = 4 * n * (32 * (1 + 2 * keyed + states) + keys * t.K) + scan_table.SYSTEM
    assert not states or t.busy * taken <= 228 << 10


@interpreted
@pytest.mark.parametrize("recurrence", [s6, longhorn, swinging], ids=lambda r: r.name)
def test_states_are_kept_for_a_few_runs_at_a_time(
    recurrence: dsf.Recurrence, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in shared memory that has no room for a group's eight; the last group is not whole."""
    from dsf.kernels.triton.scan import gradients as scan_gradients
    from dsf.kernels.triton.scan import table as scan_table

    monkeypatch.setattr(scan_table, "BACKWARD", (2, 16, 4, 0))
    monkeypatch.setattr(scan_gradients, "shared_states", lambda *_: 3)
    equals_the_oracle(recurrence, tokens=21)


@dsf.recurrence
def given(a: Value, b: Value) -> System:
    """Next to nothing to compute a step."""
    return System(A=a, B=b, C=1)


@interpreted
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "segments"])
@pytest.mark.parametrize("runs", [False, True], ids=["one_warp", "runs"])
@pytest.mark.parametrize("recurrence", [given, rg_lru, qlstm, leaky_peak, mingru_positive], ids=lambda r: r.name)
def test_vector_states(
    recurrence: dsf.Recurrence, runs: bool, cut: bool, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsf.kernels.triton.scan import launches as scan_ops
    from dsf.kernels.triton.scan import table as scan_table

    monkeypatch.setattr(scan_table, "FULL", 1 << 20 if runs else 0)
    monkeypatch.setattr(scan_table, "LANES", 2)  # so that there are channels enough
    if cut:
        monkeypatch.setattr(scan_ops, "segments", lambda tokens, programs, t, device: (2, 32))
    x = draw(recurrence, tokens=53)
    state = torch.randn(1, 2, 1, 5)
    ours = gradients(recurrence, x, state, backend="triton")
    wide = {k: v.double() for k, v in x.items()}
    close(ours, gradients(recurrence, wide, state.double(), form="naive"))


@interpreted
@pytest.mark.parametrize("recurrence", NORMALISED, ids=lambda r: r.name)
def test_normalised_systems_equal_the_oracle(recurrence: dsf.Recurrence, small_tiles: None) -> None:
    x = draw(recurrence, tokens=7)
    keys = 3 if recurrence.spec.has_key else 1
    _, state = recurrence(**draw(recurrence, tokens=2), return_state=True)
    assert state.shape[-2:] == recurrence.state_shape(N=keys, P=5)

    def found(x: dict, state: torch.Tensor, **how: str) -> list[torch.Tensor]:
        """y, the state in its true scale and gradients; the running maximum has none."""
        leaves = [v.detach().clone().requires_grad_() for v in (*x.values(), state)]
        y, final = recurrence(**dict(zip(x, leaves, strict=False)), initial_state=leaves[-1], return_state=True, **how)
        true = recurrence.true_state(final, 5)
        total = (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum() + true.cos().sum()
        grads = list(torch.autograd.grad(total, leaves))
        grads[-1] = grads[-1][..., : true.shape[-1]]
        return [y.detach(), true.detach(), *grads]

    ours = found(x, state, backend="triton")
    close(ours, found({k: v.double() for k, v in x.items()}, state.double(), form="naive"), 1e-4)


@interpreted
@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("how", ["params", "heads", "decays"])
def test_a_running_maximum_of_segments(how: str, before: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decays from Params, one number a head, or not as logarithms; of three segments and of one."""
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.scan import maximum
    from dsf.torch.columns import Columns
    from dsf.torch.stabilise import running_maximum

    operators.forget()
    monkeypatch.setattr(maximum, "segments", lambda count, *_: (-(-count // 16), 16))
    monkeypatch.setattr(maximum, "LANES", 4)
    size, channels = (2, tokens, 3), 1 if how == "heads" else 5
    log = -torch.rand(1, 1, 3, 5) if how == "params" else -3 * torch.rand(*size, channels)
    log[..., :1, :] *= 1e4  # some decay by all that there is
    gain, own = 5 * torch.randn(*size, channels), 9 * torch.randn(*size[:2], 1, channels)
    first = None if how == "params" else torch.randn(2, 3, channels)
    given = log if how != "decays" else log.exp() * torch.randn(*size, channels).sign()
    m, top = maximum.running(given.expand(*size, channels), gain, own.expand_as(gain), first, how != "decays", before)
    start = torch.full((2, 3, channels), -1e30) if first is None else first
    wide = [x.double().unsqueeze(-2) for x in (given, gain, start)]
    layout = Columns(channels, channels, channels)
    old, new = running_maximum(rwkv4.spec, wide[0], how != "decays", layout, *wide[1:])
    torch.testing.assert_close(m[:, :-1].double(), old.squeeze(-2), rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(m[:, 1:].double(), new.squeeze(-2), rtol=1e-6, atol=1e-3)
    seen = m[:, :-1] if before else m[:, 1:]
    torch.testing.assert_close(top, torch.maximum(seen, own), rtol=1e-6, atol=1e-3)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_tensor_as_keys_and_values_of_a_normalised_scan(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third call, over three segments of its running maximum."""
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.scan import maximum

    operators.forget()
    monkeypatch.setattr(maximum, "segments", lambda count, *_: (-(-count // 16), 16))
    x = draw(rwkv4, tokens=37)
    x["k"] = x["v"] = x["k"].to(dtype)

    def found(dtype: torch.dtype, **how: str) -> list[torch.Tensor]:
        k, w, u = (x[name].to(dtype if name == "k" else torch.float32).requires_grad_() for name in "kwu")
        if dtype == torch.float64:
            w, u = w.double(), u.double()
        y = rwkv4(k=k, v=k, w=w, u=u, **how)
        return [y.detach().double(), *(g.double() for g in torch.autograd.grad(y.double().sin().sum(), [k, w, u]))]

    for _ in range(2):
        found(dtype, backend="triton")
    close(found(dtype, backend="triton"), found(torch.float64, form="naive"), 1e-4 if dtype == torch.float32 else 3e-2)


@interpreted
def test_normalised_systems_hand_their_state_over_and_pack(small_tiles: None) -> None:
    x, bounds = draw(rwkv4, tokens=7), torch.tensor([0, 3, 4, 7])
    whole, last = rwkv4(**x, backend="triton", return_state=True)
    timed = {i.name for i in rwkv4.spec.inputs if i.kind.time}
    _, state = rwkv4(**{k: v[:, :3] if k in timed else v for k, v in x.items()}, backend="triton", return_state=True)
    rest = {k: v[:, 3:] if k in timed else v for k, v in x.items()}
    y, final = rwkv4(**rest, backend="triton", initial_state=state, return_state=True)
    close([y, rwkv4.true_state(final, 5)], [whole[:, 3:], rwkv4.true_state(last, 5)])
    ours = rwkv4(**x, backend="triton", cu_seqlens=bounds, initial_state=last.expand(3, -1, -1, -1), return_state=True)
    plain = rwkv4(**x, backend="torch", cu_seqlens=bounds, initial_state=last.expand(3, -1, -1, -1), return_state=True)
    close([ours[0], rwkv4.true_state(ours[1], 5)], [plain[0], rwkv4.true_state(plain[1], 5)])


@interpreted
@pytest.mark.parametrize(("tokens", "shared"), [(8, 1 << 30), (9, 1), (8, 400)])
@pytest.mark.parametrize("recurrence", [s6, aligned], ids=lambda r: r.name)  # by entries, and all of them at once
def test_the_adjoint_by_stretches_of_time(
    recurrence: dsf.Recurrence, tokens: int, shared: int, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsf.kernels.triton.scan import gradients as scan_gradients

    monkeypatch.setattr(scan_gradients, "SHARED", shared)
    x = draw(recurrence, tokens=tokens, heads=1, batch=2)
    state = torch.randn(2, 1, *recurrence.state_shape(3 if recurrence.spec.has_key else 1, 5))
    ours = gradients(recurrence, x, state, backend="triton")
    wide = {k: v.double() for k, v in x.items()}
    close(ours, gradients(recurrence, wide, state.double(), form="naive"))


@interpreted
@pytest.mark.parametrize("recurrence", [s6, swinging], ids=lambda r: r.name)  # with and without sums of log A
def test_segments_summarised_in_pieces_by_walks_that_load_tiles_ahead(
    recurrence: dsf.Recurrence, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsf.kernels.triton.scan import launches as scan_ops
    from dsf.kernels.triton.scan import table as scan_table

    for table in (scan_table.FORWARD, scan_table.ADJOINT):
        monkeypatch.setitem(table, 256, (1, 4, 1, 1, 4, 2, 4, 64, 0))
    for name, value in (("SKIM", 2), ("SUMMARIES", 1000)):
        monkeypatch.setattr(scan_table, name, value)
    monkeypatch.setattr(scan_ops, "segments", lambda tokens, programs, t, device: (3, 8))
    x = draw(recurrence, tokens=21, heads=1)
    state = torch.randn(1, 1, *recurrence.state_shape(3, 5))
    ours = gradients(recurrence, x, state, backend="triton")
    wide = {k: v.double() for k, v in x.items()}
    close(ours, gradients(recurrence, wide, state.double(), form="naive"))


@interpreted
@pytest.mark.parametrize("recurrence", [s6, longhorn], ids=lambda r: r.name)
def test_segments_whose_entries_several_programs_summarise(
    recurrence: dsf.Recurrence, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsf.kernels.triton.scan import launches as scan_ops
    from dsf.kernels.triton.scan import table as scan_table

    for name, value in (("FEW", 2), ("CROWD", 1000)):
        monkeypatch.setattr(scan_table, name, value)
    monkeypatch.setattr(scan_ops, "segments", lambda tokens, programs, t, device: (3, 8))
    assert scan_table.shares(4, 1, torch.device("cpu")) == 2
    x = draw(recurrence, tokens=21, heads=1, n=4)
    state = torch.randn(1, 1, *recurrence.state_shape(4, 5))
    ours = gradients(recurrence, x, state, backend="triton")
    wide = {k: v.double() for k, v in x.items()}
    close(ours, gradients(recurrence, wide, state.double(), form="naive"))


@interpreted
def test_outputs_without_a_gradient_count_as_zeros(small_tiles: None) -> None:
    x = draw(rg_lru, tokens=3)

    def found(backend: str) -> list[torch.Tensor]:
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        y, state = rg_lru(**leaves, return_state=True, backend=backend)
        how = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return [g for z in (y, state) for g in torch.autograd.grad(z.sum(), [*leaves.values()], **how)]

    close(found("triton"), found("torch"))


@interpreted
@pytest.mark.parametrize("recurrence", [mingru, rg_lru], ids=lambda r: r.name)
def test_small_programs_where_sequences_fill_the_gpu(
    recurrence: dsf.Recurrence, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsf.kernels.triton.scan import table as scan_table

    monkeypatch.setattr(scan_table, "LANES", 2)
    monkeypatch.setattr(scan_table, "FULL", 6)
    x = draw(recurrence, tokens=21, heads=1, p=33)
    state = torch.randn(1, 1, 1, 33)
    ours = gradients(recurrence, x, state, backend="triton")
    close(ours, gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="naive"))


@interpreted
def test_one_token_and_no_state(small_tiles: None) -> None:
    x = {k: v.requires_grad_() for k, v in draw(s6, tokens=1).items()}
    close([s6(**x, backend="triton", form="recurrent")], [s6(**x, backend="torch")])


@interpreted
@pytest.mark.parametrize("recurrence", [s6, rg_lru], ids=lambda r: r.name)
def test_gradients_pass_through_steps(recurrence: dsf.Recurrence, small_tiles: None) -> None:
    x = draw(recurrence, tokens=2)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}

    def decoded(backend: str) -> list[torch.Tensor]:
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        state = torch.ones(1, 2, *recurrence.state_shape(3, 5)[:1], 5) if recurrence is s6 else torch.ones(1, 2, 1, 5)
        start = last = state.requires_grad_()
        total = torch.zeros(())
        for t in range(2):
            token = {k: v[:, t] if k in timed else v for k, v in leaves.items()}
            y, last = recurrence.step(last, **token, backend=backend)
            total = total + (y * (t + 1)).sum()
        return list(torch.autograd.grad(total + last.sum(), [*leaves.values(), start], materialize_grads=True))

    close(decoded("triton"), decoded("torch"))


@interpreted
def test_the_library_checks_its_kernels(small_tiles: None) -> None:
    laws = ("forms", "packed", "step", "contract")
    report = dsf.check(
        leaky_peak, backend="triton", examples=1, tokens=3, laws=laws, dtypes=(torch.float64, torch.float32)
    )
    assert report.ok, str(report)
    assert {(r.form, r.dtype) for r in report.rows} >= {("triton", "float32"), ("naive", "float64")}
    assert {r.law for r in report.rows if r.form == "triton"} == set(laws)


@interpreted
def test_split_equals_whole(small_tiles: None) -> None:
    x = draw(longhorn, tokens=7)
    whole = longhorn(**x, backend="triton")
    timed = {i.name for i in longhorn.spec.inputs if i.kind.time}
    first = {k: v[:, :3] if k in timed else v for k, v in x.items()}
    rest = {k: v[:, 3:] if k in timed else v for k, v in x.items()}
    y1, state = longhorn(**first, backend="triton", return_state=True)
    y2 = longhorn(**rest, backend="triton", initial_state=state)
    close([torch.cat([y1, y2], 1)], [whole])


@interpreted
@pytest.mark.parametrize(
    ("recurrence", "states"),
    [(qlstm, False), (leaky_peak, True), (s6, False), (before, True), (channels, True), (weighted, True)],
    ids=lambda r: getattr(r, "name", ""),
)
def test_packed_sequences_are_walked_as_they_lie(
    recurrence: dsf.Recurrence, states: bool, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsf.call import packing
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.scan import launches as scan_ops

    x, bounds = draw(recurrence, tokens=9), torch.tensor([0, 3, 4, 9])
    first = torch.randn(3, 2, *recurrence.state_shape(3 if recurrence.spec.has_key else 1, 5)) if states else None

    def found(backend: str) -> list[torch.Tensor]:
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        start = None if first is None else first.clone().requires_grad_()
        y, final = recurrence(
            **leaves, initial_state=start, cu_seqlens=bounds, return_state=True, backend=backend, form="chunk"
        )
        total = (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum()
        total = total + (final * torch.linspace(1, 2, final.numel()).reshape(final.shape)).sum()
        wrt = [*leaves.values(), *([] if start is None else [start])]
        return [y.detach(), final.detach(), *torch.autograd.grad(total, wrt, allow_unused=True, materialize_grads=True)]

    expected = found("torch")
    monkeypatch.setattr(packing, "batches", None)  # nothing is gathered
    close(found("triton"), expected)
    operators.forget()
    monkeypatch.setattr(scan_ops, "segments", lambda tokens, programs, t, device: (3, 4))
    close(found("triton"), expected)


@interpreted
@pytest.mark.parametrize("recurrence", [s6, before], ids=lambda r: r.name)
def test_packed_segments_without_a_cotangent_of_the_states(
    recurrence: dsf.Recurrence, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsf.kernels.triton.scan import launches as scan_ops

    x, bounds = draw(recurrence, tokens=9), torch.tensor([0, 3, 4, 9])

    def found(backend: str) -> list[torch.Tensor]:
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        y = recurrence(**leaves, cu_seqlens=bounds, backend=backend, form="chunk")
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(leaves.values()))]

    expected = found("torch")
    monkeypatch.setattr(scan_ops, "segments", lambda tokens, programs, t, device: (3, 4))
    close(found("triton"), expected)


@interpreted
@pytest.mark.parametrize("heads", [1, 4], ids=["runs", "tiles in flight"])  # of vector states
@pytest.mark.parametrize("segments", [(1, 24), (6, 4)], ids=lambda x: f"{x[0]} segments")
@pytest.mark.parametrize("recurrence", [qlstm, mingru, leaky_peak, s6, before, channels], ids=lambda r: r.name)
def test_a_packed_sequence_that_is_not_finite_reaches_no_other(
    recurrence: dsf.Recurrence, segments: tuple[int, int], heads: int, small_tiles: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its state is dropped where the next begins; multiplied by a decay of zero it would stay NaN."""
    from dsf.kernels.triton.scan import launches as scan_ops

    if heads > 1 and recurrence.spec.has_key:
        pytest.skip("the same tiles")
    monkeypatch.setattr(scan_ops, "segments", lambda tokens, programs, t, device: segments)
    given = draw(recurrence, tokens=BOUNDS[-1], heads=heads, p=9)
    state = torch.randn(4, heads, *recurrence.state_shape(3 if recurrence.spec.has_key else 1, 9))
    assert_alone(recurrence, given, state if segments[0] > 1 else None, float("nan"), backend="triton")


@interpreted
@pytest.mark.parametrize("recurrence", [qlstm, longhorn], ids=lambda r: r.name)
def test_strided_inputs_need_no_copy(recurrence: dsf.Recurrence, small_tiles: None) -> None:
    from dsf.kernels.triton.scan.launches import HOLES, _arguments, sizes_of
    from dsf.triton.scan import _hole, _make, source_of

    x = draw(recurrence, tokens=5)
    views = {k: v.transpose(1, 3).contiguous().transpose(1, 3) if v.dim() == 4 else v for k, v in x.items()}
    assert torch.equal(recurrence(**x, backend="triton"), recurrence(**views, backend="triton"))
    hole, made = HOLES[_hole(recurrence.spec)], _make(recurrence.spec, views)
    operands = [
        made[o.name, o.step] if o.name not in views else views[o.name] for o in source_of(recurrence.spec).operands
    ]
    read = {a.data_ptr() for a in _arguments(hole, operands, sizes_of(hole, operands)) if torch.is_tensor(a)}
    assert read == {x.data_ptr() for x in operands}


def sliced(x: torch.Tensor) -> torch.Tensor:
    """x as a part of wider rows, as a projection to several inputs leaves it."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


def turned(x: torch.Tensor) -> torch.Tensor:
    """x with its tokens side by side."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@interpreted
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("view", [sliced, turned])
@pytest.mark.parametrize("recurrence", [longhorn, s6, swinging], ids=lambda r: r.name)
def test_gradients_of_strided_inputs(
    recurrence: dsf.Recurrence, view: Callable[..., torch.Tensor], tokens: int, small_tiles: None
) -> None:
    x = draw(recurrence, tokens=tokens, batch=2)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time and i.kind.axes}

    def found(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = {k: v.requires_grad_() for k, v in given.items()}
        y = recurrence(**leaves, backend="triton")
        wanted = [v for k, v in leaves.items() if k != "stop"]
        return [y, *torch.autograd.grad(y.square().sum(), wanted)]

    plain = found({k: v.clone() for k, v in x.items()})
    views = {k: view(v) if k in timed else v.clone() for k, v in x.items()}
    assert all(torch.equal(a, b) for a, b in zip(found(views), plain, strict=True))


@interpreted
def test_operator_passes_opcheck(small_tiles: None) -> None:
    from dsf.kernels.triton.scan.operator import scan
    from dsf.triton.scan import _hole, source_of

    x = draw(qlstm, tokens=2, heads=1)
    operands = [x[o.name].requires_grad_() for o in source_of(qlstm.spec).operands]
    torch.library.opcheck(
        scan, (operands, torch.randn(1, 1, 1, 5, requires_grad=True), _hole(qlstm.spec), True, False, None, 0)
    )


@pytest.mark.parametrize("recurrence", [*RECURRENCES, *OTHERS], ids=lambda r: r.name)
def test_source_is_named_by_its_content(
    recurrence: dsf.Recurrence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSF_CACHE_DIR", str(tmp_path))
    source = emit(recurrence.spec)
    assert write(source) == write(emit(recurrence.spec))
    assert all(f"{o.name} = tl.load(" in source.text or o.step is not None for o in source.operands)
    assert compile(source.text, source.name, "exec")


@pytest.mark.skipif(INTERPRETED, reason="about the compiled backend")
def test_refusals_are_in_the_users_words() -> None:
    x = draw(s6, tokens=2)
    with pytest.raises(FormError, match="backend='triton' was asked for"):
        s6(**x, backend="triton")
    with pytest.raises(FormError, match="s6: backend='triton' was asked for, but its kernels need CUDA tensors"):
        dsf.check(s6, backend="triton")
