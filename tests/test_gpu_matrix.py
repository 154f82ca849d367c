"""The matrix kernels compiled for the GPU, held to the float64 oracle per head and per block of 64 tokens."""

import pytest
import torch
from matrix_family import SUMMED, UNSEEN, forgetful_delta, leaning_rows, moving_rows, skipping_rows, swinging
from mixer_inputs import RANGES
from torch.utils.checkpoint import checkpoint

from dsf.mixers import get

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

NAMES = ["unnormalized_linear_attention", "linear_attention", "retnet", "ssd", "mlstm", "deltanet", "gated_deltanet"]
NAMES += ["delta_product", "gated_delta_product", "gla", "kda", "rwkv6", "rwkv7"]
ALL = UNSEEN + SUMMED + [get(name).recurrence for name in NAMES]
DEVICE = "cuda"  # tests/test_triton_random.py has it on the CPU
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1.5e-2}


def draw(recurrence, tokens, n, p, dtype, batch=2, heads=2, groups=None, seed=0):
    """Leaves by name, rounded to dtype."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    out = {}
    for i in recurrence.spec.inputs:
        mine = groups if groups and i.kind.time and i.kind.axes == {"key"} else heads
        lead = [batch, tokens, *([i.kind.steps] if i.kind.steps else []), mine] if i.kind.time else [heads]
        shape = [*lead, *({"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes)]
        x = RANGES.get(i.name, lambda x: x)(torch.randn(shape, generator=g, device=DEVICE, dtype=torch.float64))
        if i.kind.axes == {"key"} and i.name not in RANGES:
            x = x / n**0.5
        out[i.name] = x.to(dtype).requires_grad_()
    return out


def state_of(recurrence, n, p, batch=2, heads=2):
    """A random first state."""
    keys = n if recurrence.spec.has_key else 1
    state = torch.randn(batch, heads, *recurrence.state_shape(N=keys, P=p), device=DEVICE)
    if recurrence.spec.is_stabilised:
        state[..., -1] = state[:, :, :1, -1]
    return state


def outcome(recurrence, given, dtype, state=None, ends=True, **how):
    """y, the final state and the gradients, by name; ends: a loss has the final state in it, too."""
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in given.items()}
    start = None if state is None else state.to(torch.float64 if dtype == torch.float64 else torch.float32)
    start = None if start is None else start.requires_grad_()
    y, final = recurrence(**leaves, initial_state=start, return_state=True, **how)
    g = torch.Generator(DEVICE).manual_seed(1)
    dy = torch.randn(y.shape, generator=g, device=DEVICE).to(torch.bfloat16).to(y.dtype)
    loss = (y.double() * dy.double()).sum()
    if ends and not recurrence.spec.is_stabilised:
        loss = loss + (final.double() * torch.randn(final.shape, generator=g, device=DEVICE).double()).sum()
    wanted = leaves if start is None else leaves | {"state": start}
    grads = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    true = recurrence.true_state(final, y.shape[-1])
    return {"y": y, "final": true} | {f"d{n}": x for n, x in zip(wanted, grads, strict=True)}


def worst(found, expected):
    """Largest relative error of any head and any block of 64 tokens."""
    a, b = found.double(), expected.double()
    if not bool(b.any()):  # what is nothing has no scale of its own: inputs are about one
        return a.abs().max().item()
    if a.dim() < 3 or a.shape[1] < 64:
        return ((a - b).norm() / b.norm().clamp(min=1e-6)).item()
    tokens = a.shape[1] // 64 * 64
    shape = (a.shape[0], tokens // 64, 64, a.shape[2], -1)
    error = (a - b)[:, :tokens].reshape(shape).pow(2).sum((2, 4)).sqrt()
    size = b[:, :tokens].reshape(shape).pow(2).sum((2, 4)).sqrt()
    return (error / size.clamp(min=0.05 * size.max())).max().item()


def compare(recurrence, given, dtype, factor=1.0, **how):
    found = outcome(recurrence, given, dtype, backend="triton", **how)
    expected = outcome(recurrence, given, torch.float64, form="chunk", backend="torch", **how)
    errors = {name: worst(found[name], expected[name]) for name in found}
    # A Param's gradient is a sum over all tokens, a normalised readout's a difference: both cancel most of their terms.
    slack = {f"d{i.name}": 10.0 for i in recurrence.spec.inputs if not i.kind.time}
    if recurrence.spec.rule is not None:
        slack["dq"] = 4.0
    limit = factor * TOLERANCE[dtype]
    beyond = {name: f"{e:.1e}" for name, e in errors.items() if not e < limit * slack.get(name, 1.0)}
    assert not beyond


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("recurrence", ALL, ids=lambda r: r.name)
def test_kernels_equal_float64_forward_and_backward(recurrence, dtype):
    compare(recurrence, draw(recurrence, 200, 64, 64, dtype), dtype)


@pytest.mark.parametrize(
    "name, n, of",
    [
        *((name, n, "y q k v") for name in ("unnormalized_linear_attention", "retnet") for n in (64, 128)),
        ("deltanet", 64, "y q k v beta"),
        ("deltanet", 128, "y q k v beta"),
        ("gated_deltanet", 64, "y q k v beta"),
        *(("gla", n, "y q k v g") for n in (64, 128)),
        *(("kda", n, "y q k v g beta") for n in (64, 128)),
    ],
)
def test_bfloat16_errs_little_more_than_float32_rounded_once(name, n, of):
    recurrence = get(name).recurrence
    given = draw(recurrence, 512, n, n, torch.bfloat16)
    if "slope" in given:  # decays over some ten tokens: where one token's score is most of a row, so is its rounding
        given["slope"] = (given["slope"] / 16).detach()
    ends = name != "kda"  # it forgets within a token or two: the last ones' gradients would be the final state's
    exact = outcome(recurrence, given, torch.float64, ends=ends, form="chunk", backend="torch")
    ours = outcome(recurrence, given, torch.bfloat16, ends=ends, backend="triton")
    plain = outcome(recurrence, given, torch.float32, ends=ends, form="recurrent", backend="torch")
    for x in ("y" if x == "y" else f"d{x}" for x in of.split()):
        assert worst(ours[x], exact[x]) < 1.5 * worst(plain[x].bfloat16(), exact[x])


@pytest.mark.parametrize("n, p", [(128, 128), (24, 40), (128, 64), (256, 128), (3, 5), (64, 256)])
@pytest.mark.parametrize(
    "recurrence", [forgetful_delta, get("ssd").recurrence, leaning_rows, get("rwkv7").recurrence], ids=lambda r: r.name
)
def test_every_tile_size(recurrence, n, p):
    given = draw(recurrence, 150, n, p, torch.bfloat16)
    state = torch.randn(2, 2, *recurrence.state_shape(N=n, P=p), device="cuda")
    compare(recurrence, given, torch.bfloat16, state=state)


@pytest.mark.parametrize("n, strength", [(64, 8), (128, 1), (128, 8)])
@pytest.mark.parametrize("name", ["gla", "kda"])
def test_decays_of_keys_weak_and_strong(name, n, strength):
    recurrence = get(name).recurrence
    given = draw(recurrence, 200, n, n, torch.bfloat16)
    given["g"] = (strength * given["g"]).detach().requires_grad_()
    compare(recurrence, given, torch.bfloat16)


@pytest.mark.parametrize("recurrence", [forgetful_delta, leaning_rows, moving_rows], ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127])
def test_any_number_of_tokens(tokens, recurrence):
    compare(recurrence, draw(recurrence, tokens, 32, 32, torch.bfloat16), torch.bfloat16)


def test_adjoints_used_a_stretch_at_a_time():
    compare(forgetful_delta, draw(forgetful_delta, 3000, 128, 64, torch.bfloat16, heads=48), torch.bfloat16)


@pytest.mark.parametrize("heads", [8, 48])
@pytest.mark.parametrize(
    "recurrence", [get("mlstm").recurrence, swinging, get("gated_deltanet").recurrence], ids=lambda r: r.name
)
def test_states_kept_for_the_backward_pass(recurrence, heads):
    compare(recurrence, draw(recurrence, 3000 if heads == 48 else 1000, 128, 128, torch.bfloat16, heads=heads),
            torch.bfloat16)  # fmt: skip


@pytest.mark.parametrize("n, p", [(128, 128), (24, 40)])
@pytest.mark.parametrize("name", ["mlstm", "linear_attention"])
def test_normalisers_of_other_sizes(name, n, p):
    compare(get(name).recurrence, draw(get(name).recurrence, 200, n, p, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("heads, tokens", [(48, 3000), (24, 6000)])
def test_gradients_of_shared_rows_summed_a_stretch_at_a_time(heads, tokens):
    given = draw(get("ssd").recurrence, tokens, 128, 64, torch.bfloat16, heads=heads, groups=2)
    compare(get("ssd").recurrence, given, torch.bfloat16)


def test_pointers_that_are_not_aligned():
    linear = get("unnormalized_linear_attention").recurrence
    wide = [torch.randn(2, 130, 2, 72, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    for first in (0, 8, 1):
        given = [x[..., first : first + 64] for x in wide]
        assert torch.equal(linear(*given, backend="triton"), linear(*(x.clone() for x in given), backend="triton"))


@pytest.mark.parametrize("recurrence", [get("ssd").recurrence, leaning_rows], ids=lambda r: r.name)
def test_grouped_heads_and_packed_sequences(recurrence):
    given = draw(recurrence, 300, 64, 64, torch.bfloat16, batch=1, heads=8, groups=2)
    compare(recurrence, given, torch.bfloat16, cu_seqlens=torch.tensor([0, 1, 70, 300]))


SEGMENT = 64 * 64  # tokens that are worth a segment of a delta rule


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["retnet", "deltanet", "gated_deltanet", "gla", "kda"])
def test_segments_of_long_sequences(name, dtype):
    recurrence = get(name).recurrence
    given = draw(recurrence, 4 * SEGMENT, 64, 64, dtype, batch=1)
    state = torch.randn(1, 2, 64, 64, device="cuda")
    compare(recurrence, given, dtype, state=state)


@pytest.mark.parametrize("tokens", [256, 300])
@pytest.mark.parametrize("n, p", [(128, 128), (64, 64), (40, 24)])
@pytest.mark.parametrize("recurrence", [get("rwkv7").recurrence, skipping_rows], ids=lambda r: r.name)
def test_rows_are_read_alike_with_and_without_gradients(recurrence, n, p, tokens):
    given = draw(recurrence, tokens, n, p, torch.bfloat16)
    kept = recurrence(**given, backend="triton")
    assert torch.equal(recurrence(**{x: y.detach() for x, y in given.items()}, backend="triton"), kept)


PIECES = [("ssd", 32, 128, 64), ("retnet", 6, 128, 128), ("retnet", 2, 256, 40), ("retnet", 2, 24, 16)]


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("name, heads, n, p", PIECES)
def test_segments_are_summed_up_in_pieces(name, heads, n, p, forgets):
    recurrence = get(name).recurrence
    given = draw(recurrence, 2 * SEGMENT - 70, n, p, torch.bfloat16, batch=1, heads=heads, groups=2)
    rates = given["A_log" if name == "ssd" else "slope"]
    if not forgets:  # a piece's decays keep a state within float32's range
        with torch.no_grad():
            rates.copy_(rates - 6 if name == "ssd" else rates.abs() / 512)
    compare(recurrence, given, torch.bfloat16, state=torch.randn(1, heads, n, p, device="cuda"))


@pytest.mark.parametrize("n, p", [(128, 128), (24, 40), (256, 64), (128, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_segments_of_every_size(n, p, dtype):
    given = draw(forgetful_delta, 4 * SEGMENT, n, p, dtype, batch=1, heads=1)
    state = torch.randn(1, 1, n, p, device="cuda")
    compare(forgetful_delta, given, dtype, state=state)


@pytest.mark.parametrize("n", [64, 128])
def test_the_future_of_segments_changes_no_bit_of_the_past(n):
    given = {x: y.detach() for x, y in draw(forgetful_delta, 4 * SEGMENT, n, n, torch.bfloat16, batch=1).items()}
    y = forgetful_delta(**given, backend="triton")
    assert torch.equal(forgetful_delta(**given, backend="triton"), y)
    for x in given.values():
        x[:, SEGMENT + 999 :] *= -1
    assert torch.equal(forgetful_delta(**given, backend="triton")[:, : SEGMENT + 999], y[:, : SEGMENT + 999])


@pytest.mark.parametrize("recurrence", [forgetful_delta, get("retnet").recurrence, leaning_rows], ids=lambda r: r.name)
def test_bitwise_the_same_on_every_run(recurrence):
    given = draw(recurrence, 1000, 64, 64, torch.bfloat16)
    first, second = (outcome(recurrence, given, torch.bfloat16, backend="triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "recurrence",
    [forgetful_delta, get("retnet").recurrence, leaning_rows, moving_rows, get("rwkv7").recurrence],
    ids=lambda r: r.name,
)
def test_the_future_changes_no_bit_of_the_past(recurrence):
    given = {n: x.detach() for n, x in draw(recurrence, 300, 64, 64, torch.bfloat16).items()}
    y = recurrence(**given, backend="triton")
    for entry in recurrence.spec.inputs:
        if entry.kind.time:
            given[entry.name] = given[entry.name].clone()
            given[entry.name][:, 131:] *= -1
    assert torch.equal(recurrence(**given, backend="triton")[:, :131], y[:, :131])


def test_more_than_two_to_the_31_elements():
    linear = get("unnormalized_linear_attention").recurrence
    tokens, cut = 2**18 + 640, 2**18 - 64
    q, k, v = (torch.randn(1, tokens, 64, 128, device="cuda", dtype=torch.bfloat16) / 11 for _ in "qkv")
    whole = linear(q, k, v, backend="triton")
    _, state = linear(q[:, :cut], k[:, :cut], v[:, :cut], return_state=True, backend="triton")
    tail = linear(q[:, cut:], k[:, cut:], v[:, cut:], initial_state=state, backend="triton")
    assert worst(whole[:, cut:], tail) < 2e-2


def op_arguments(grad=True):
    given = draw(forgetful_delta, 130, 64, 64, torch.bfloat16)
    g, s, b = (torch.rand(2, 130, 2, device="cuda", requires_grad=grad) for _ in "gsb")
    q, k, v = (given[n].detach().requires_grad_(grad) for n in "qkv")
    return (q, k, v, -g, s, b, None, None, 2, True, True, False)


def test_opcheck():
    from chunk_operator import chunk_matrix

    torch.library.opcheck(chunk_matrix, op_arguments(), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(chunk_matrix, op_arguments(), test_utils=("test_autograd_registration",))


def test_compiles_in_full_and_runs_in_a_graph():
    from chunk_operator import chunk_matrix

    args = op_arguments()

    def step(q):
        return chunk_matrix(q * 2, *args[1:])[0].float().square().sum()

    expected = torch.autograd.grad(step(args[0]), args[:3])
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(args[0]), args[:3])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(step(args[0]), args[:3])
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_autocast_and_checkpointing_change_nothing():
    given = draw(forgetful_delta, 100, 64, 64, torch.bfloat16)
    plain = forgetful_delta(**given, backend="triton")
    grads = torch.autograd.grad(plain.float().sum(), list(given.values()))
    with torch.autocast("cuda", torch.bfloat16):
        y = checkpoint(lambda **x: forgetful_delta(**x, backend="triton"), use_reentrant=False, **given)
    again = torch.autograd.grad(y.float().sum(), list(given.values()))
    assert torch.equal(y, plain) and all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_cuda_tensors_choose_the_kernels():
    given = {n: x.detach() for n, x in draw(forgetful_delta, 100, 64, 64, torch.bfloat16).items()}
    assert forgetful_delta.plan(**given).backend == "triton"
    rwkv7 = get("rwkv7").recurrence
    plan = rwkv7.plan(**{n: x.detach() for n, x in draw(rwkv7, 100, 64, 64, torch.bfloat16).items()})
    assert plan.backend == "triton" and "generalised WY transform and chunk walk (64 keys x 64 channels" in plan.kernel
