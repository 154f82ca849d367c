"""The kernels fed bfloat16, in the interpreter, beside a float32 recurrence that is rounded once at the end.

Both are compared with float64 on the same inputs: the norm of the error of a head's block of 64 tokens beside the
block's, and of these the worst. What rounds where is in docs/kernels/chunks.md.
"""

import mixer_inputs
import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted
from mixer_inputs import sample
from scan_family import aligned, gated, swinging
from torch import Tensor

import dsf
from dsf import I, Key, Recurrence, Scalar, System, Value, exp, maximum
from dsf.kernels.triton.chunk import matrix
from dsf.mixers import get
from dsf.mixers.longhorn import longhorn

pytestmark = interpreted
TOKENS, BLOCK = 256, 64
UNUSED = {"allow_unused": True, "materialize_grads": True}
TIMES = 1.5  # the error of one rounding at the end
MOVED = {"gla": ("g", 3.0), "mlstm": ("f", 3.0), "rwkv6": ("w", -3.0)}  # gates as trained models have them


def outcome(recurrence: Recurrence, given: dict[str, Tensor], dtype: torch.dtype, **how: str) -> dict[str, Tensor]:
    """y and the gradients by input, rounded to bfloat16 unless they are the exact ones."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
    y = recurrence(**leaves, **how)
    torch.manual_seed(1)
    dy = torch.randn(y.shape).bfloat16().to(y.dtype)
    found = {"y": y} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy, **UNUSED), strict=True))
    return found if dtype == torch.float64 else {name: x.bfloat16() for name, x in found.items()}


def worst(found: Tensor, exact: Tensor) -> float:
    """The largest error of a head's block; blocks with less than 5 % of the largest norm count as if they had that."""
    error, size = (
        x.unflatten(1, (-1, BLOCK)).transpose(2, 3).flatten(3).norm(dim=-1) for x in (found.double() - exact, exact)
    )
    return (error / size.clamp(min=0.05 * size.max())).max().item()


@pytest.mark.parametrize("keys", [64, 128])
def test_errors_of_delta_rules_are_so_in_stretches_of_time(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "stretches", lambda *_: 2)
    test_errors_are_of_the_size_of_one_rounding("gated_deltanet", keys, keys, monkeypatch)


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("unnormalized_linear_attention", 64, 64),
        ("retnet", 128, 128),
        ("mlstm", 64, 64),
        ("mlstm", 128, 128),
        ("ssd", 128, 64),
        ("deltanet", 64, 64),
        ("deltanet", 128, 128),
        ("gated_deltanet", 64, 64),
        ("gated_deltanet", 128, 128),
        ("gla", 64, 64),
        ("gla", 128, 128),
        ("rwkv6", 64, 64),
        ("kda", 64, 64),
        ("kda", 128, 128),
        ("rwkv7", 64, 64),
        ("rwkv7", 128, 128),
    ],
)
def test_errors_are_of_the_size_of_one_rounding(
    name: str, keys: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrence = get(name).recurrence
    monkeypatch.setitem(mixer_inputs.SIZE, "key", keys)
    monkeypatch.setitem(mixer_inputs.SIZE, "value", values)
    monkeypatch.setitem(mixer_inputs.RANGES, "alpha", lambda x: torch.sigmoid(x + 3.0))
    monkeypatch.setitem(mixer_inputs.RANGES, "slope", lambda x: F.softplus(x) / 16)
    monkeypatch.setitem(mixer_inputs.RANGES, "u", torch.zeros_like)
    if name in MOVED:
        gate, by = MOVED[name]
        monkeypatch.setitem(mixer_inputs.RANGES, gate, lambda x: x + by)
    given = {name: x.bfloat16() for name, x in sample(recurrence, batch=1, tokens=TOKENS).items()}
    times = ratios(recurrence, given)
    assert max(times.values()) < TIMES, times


@pytest.mark.parametrize("keys", [64, 128])
def test_errors_of_rows_that_remember_are_so(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RWKV-7 with decays as its layer begins; a bonus, whose part of dr and dk is added to what is rounded."""
    recurrence = get("rwkv7").recurrence
    for axis in ("key", "value"):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, keys)
    monkeypatch.setitem(mixer_inputs.RANGES, "w", lambda x: x - 3.0)
    given = {name: x.bfloat16() for name, x in sample(recurrence, batch=1, tokens=TOKENS).items()}
    times = ratios(recurrence, given)
    assert max(times[x] for x in ("y", "v", "w", "kappa", "a")) < TIMES, times
    times = ratios(recurrence, given | {"u": torch.zeros_like(given["u"])})
    assert max(times.values()) < TIMES, times


@dsf.recurrence
def read_before(q: Key, k: Key, v: Value, i: Scalar, f: Scalar) -> System:
    """A quotient of what the update has not reached, which no walk finishes."""
    return System(
        A=dsf.sigmoid(f),
        B=dsf.exp(i) * k * v,
        C=q,
        read="before",
        normalize=lambda num, den, one: num / dsf.maximum(dsf.abs(den), one),
    )


@pytest.mark.parametrize(
    ("recurrence", "length"), [(get("mlstm").recurrence, 8.0), (read_before, 1.0)], ids=lambda x: getattr(x, "name", x)
)
def test_quotients_err_like_one_rounding(
    recurrence: Recurrence, length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they sum cancels (of longer keys more): den's gradient needs more digits of y than it is given in."""
    for axis in ("key", "value"):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, 64)
    monkeypatch.setitem(mixer_inputs.RANGES, "k", lambda x: F.normalize(x, dim=-1) * length)
    monkeypatch.setitem(mixer_inputs.RANGES, "f", lambda x: x + 3.0)
    given = {name: x.bfloat16() for name, x in sample(recurrence, batch=1, tokens=128).items()}
    times = ratios(recurrence, given)
    assert max(times.values()) < 1.2, times


def test_decays_of_short_keys_need_more_digits_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrence = get("gated_deltanet").recurrence
    for axis in ("key", "value"):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, 64)
    monkeypatch.setitem(mixer_inputs.RANGES, "alpha", lambda x: torch.sigmoid(x + 3.0))
    given = {name: x.bfloat16() for name, x in sample(recurrence, batch=1, tokens=TOKENS, seed=2).items()}
    assert ratios(recurrence, given)["alpha"] < 1.2


@pytest.mark.parametrize("bounds", [[0, 1], [0, 101], [0, 1, 70, 101]], ids=["one", "odd", "packed"])
@pytest.mark.parametrize(("name", "keys", "values"), [("mlstm", 24, 72), ("gated_deltanet", 40, 24)])
def test_states_in_float16_are_right_at_uneven_sizes(
    name: str, keys: int, values: int, bounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an initial state, and through the last one where it is no other's multiple."""
    recurrence = get(name).recurrence
    monkeypatch.setitem(mixer_inputs.SIZE, "key", keys)
    monkeypatch.setitem(mixer_inputs.SIZE, "value", values)
    given = {x: v.bfloat16() for x, v in sample(recurrence, batch=1, tokens=bounds[-1]).items()}
    state = torch.randn(len(bounds) - 1, 2, *recurrence.state_shape(N=keys, P=values))
    packed = {"cu_seqlens": torch.tensor(bounds)} if len(bounds) > 2 else {}

    def found(dtype: torch.dtype, **how: str) -> list[Tensor]:
        leaves = {x: v.to(dtype).requires_grad_() for x, v in given.items()}
        start = state.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
        y, final = recurrence(**leaves, initial_state=start, return_state=True, **packed, **how)
        last = 0.0 if recurrence.spec.is_stabilised else final.square().sum()
        return [y, *torch.autograd.grad(y.square().sum() + last, [*leaves.values(), start])]

    for a, b in zip(found(torch.bfloat16, backend="triton"), found(torch.float64, form="naive"), strict=True):
        assert float((a.double() - b).abs().max()) < 0.02 * float(b.abs().max())


@pytest.mark.parametrize(
    ("name", "read", "size"),
    [("gated_deltanet", "q", 1e-30), ("gated_deltanet", "q", 1e30), ("rwkv7", "r", 1e-20), ("rwkv7", "r", 1e20)],
)
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_of_delta_rules_have_the_range_of_bfloat16(
    name: str, read: str, size: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of RWKV-7's in products with rows that are scaled by up to e^39, at a chunk's start."""
    recurrence = get(name).recurrence
    for axis in ("key", "value"):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, width)
    monkeypatch.setitem(mixer_inputs.RANGES, "alpha", lambda x: torch.sigmoid(x + 3.0))
    given = {name: x.bfloat16() for name, x in sample(recurrence, batch=1, tokens=128).items()}
    given |= {"v": given["v"] * size, read: given[read] * (1 / size)}
    exact = outcome(recurrence, given, torch.float64, form="chunk", backend="torch")
    found = outcome(recurrence, given, torch.bfloat16, backend="triton")
    assert max(worst(found[x], exact[x]) for x in exact if x != "u") < 0.01


def test_sums_over_heads_that_share_keys_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrence = get("ssd").recurrence
    monkeypatch.setitem(mixer_inputs.SIZE, "key", 128)
    monkeypatch.setitem(mixer_inputs.SIZE, "value", 64)
    monkeypatch.setattr(matrix, "sharing", lambda *_: 2)  # as many heads a program as where there are many chunks
    given = {name: x.bfloat16() for name, x in sample(recurrence, batch=1, tokens=128, heads=4).items()}
    given |= {name: F.normalize(given[name][:, :, :1], dim=-1) for name in ("b", "c")}
    times = ratios(recurrence, given)
    assert max(times.values()) < 1.2, times


def ratios(recurrence: Recurrence, given: dict[str, Tensor], form: str = "chunk") -> dict[str, float]:
    """Of y and the gradients of inputs that have tokens: the worst error beside that of one rounding."""
    exact = outcome(recurrence, given, torch.float64, form=form, backend="torch")
    once = outcome(recurrence, given, torch.float32, form="recurrent", backend="torch")
    found = outcome(recurrence, given, torch.bfloat16, backend="triton")
    timed = ["y", *(i.name for i in recurrence.spec.inputs if i.kind.time)]
    return {x: worst(found[x], exact[x]) / worst(once[x], exact[x]) for x in timed}


@pytest.mark.parametrize("recurrence", [gated, longhorn, aligned, swinging], ids=lambda r: r.name)
def test_errors_of_scans_are_of_the_size_of_one_rounding(
    recurrence: Recurrence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles and the sums that tensor cores make; a segment that forgets what enters it before it ends."""
    from dsf.kernels.triton.scan import launches as scan_ops

    monkeypatch.setattr(scan_ops, "segments", lambda *_: (2, 64))
    torch.manual_seed(0)
    sizes, given = {"key": 2, "value": 40}, {}
    for i in recurrence.spec.inputs:
        shape = [sizes[a] for a in ("key", "value") if a in i.kind.axes]
        x = torch.randn([1, 2 * BLOCK, 1, *shape] if i.kind.time else [1, *shape])
        given[i.name] = (x.sigmoid() if i.name == "beta" else (x > 2.0).float() if i.name == "stop" else x).bfloat16()
    times = ratios(recurrence, given, "recurrent")
    times.pop("stop", None)  # it only chooses: its gradient is 0
    assert max(times.values()) < TIMES, times


def test_levels_of_first_tokens_take_no_digits_of_later_ones() -> None:
    """In float32 a decay from no level at all, cut off at e^-55, would leave 1e-6 of an error in every later weight."""

    @dsf.recurrence
    def gained(q: Key, k: Key, v: Value, i: Scalar):
        return System(A=I, B=exp(i) * k * v, C=q, normalize=lambda num, den, one: num / maximum(dsf.abs(den), one))

    torch.manual_seed(0)
    q, k, v, i = (torch.randn(1, 60, 2, *size) for size in ((8,), (8,), (16,), ()))
    _, exact = gained(*(x.double() for x in (q, k, v, i)), form="naive", return_state=True)
    _, state = gained(q, k, v, i, backend="triton", return_state=True)
    found = state[..., :17].double() * state[..., 17:].double().exp()
    assert (found - exact[..., :17]).norm() < 2.5e-7 * exact[..., :17].norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_decays_of_zero_are_finite_in_16_bits(dtype: torch.dtype) -> None:
    """Divided by the decay, of which float16 has no bound below: since Triton 3.9 a number is of the block's type."""

    @dsf.recurrence
    def decaying(q: Key, k: Key, v: Value, a: Scalar):
        return System(A=a, B=k * v, C=q)

    given = {name: torch.randn(1, BLOCK, 1, 16).to(dtype) for name in ("q", "k", "v")}
    given["a"] = torch.rand(1, BLOCK, 1).index_fill(1, torch.tensor([7]), 0.0).to(dtype)
    exact = outcome(decaying, given, torch.float64, form="naive")
    found = outcome(decaying, given, dtype, backend="triton")
    assert all(worst(found[x], exact[x]) < 0.02 for x in exact)
