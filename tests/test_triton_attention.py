"""The attention kernels in Triton's interpreter: gradients against float64, biases, windows, groups, sinks, packing."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from interpreted import interpreted
from test_attention_bias import alibi, drawn, everything, forgetting, linear, rotary, sinking, sliding

import dsf
import dsf.fuzz
from dsf.call import attention
from dsf.kernels.triton import operators
from dsf.kernels.triton.attention import operator
from dsf.parallel import Simulated, scores

pytestmark = interpreted
BLOCK = 16


@dsf.recurrence
def limited(q: dsf.Key, k: dsf.Key, v: dsf.Value, f: dsf.Scalar) -> dsf.System:
    """A decay in a window."""
    write = dsf.exp_features(k) * v
    return dsf.System(A=dsf.sigmoid(f), B=write, C=dsf.exp_features(q), normalize=dsf.ratio, window=25)


def judged(got, exact, limit):
    """Largest error of a block of tokens of a head, over the norm of the typical one."""
    got, exact = got.detach(), exact.detach()
    error = (got.double() - exact).flatten(3) if exact.dim() > 3 else (got.double() - exact).unsqueeze(-1)
    size = exact.flatten(3) if exact.dim() > 3 else exact.unsqueeze(-1)
    if exact.dim() < 3:
        assert error.norm() <= limit * size.norm()
        return
    blocks = error.split(BLOCK, 1)
    typical = size.square().mean(dim=(1, 3), keepdim=True).sqrt()
    assert max(float((b.square().mean(dim=(1, 3), keepdim=True).sqrt() / typical).max()) for b in blocks) <= limit


@pytest.mark.parametrize("recurrence", [everything, forgetting, alibi, sliding, sinking], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("T, N, P", [(70, 4, 3), (37, 16, 20)])
def test_kernels_are_the_definition(recurrence, dtype, limit, T, N, P):
    x = {n: z.to(dtype) for n, z in drawn(recurrence, T, H=4, N=N, P=P).items()}
    x["k"], x["v"] = torch.randn(2, T, 2, N).to(dtype), torch.randn(2, T, 4, P).to(dtype)
    dy = torch.randn(2, T, 4, P).to(dtype)
    found = {}
    for backend in ("triton", "torch"):
        wide = torch.float64 if backend == "torch" else dtype
        leaves = {n: z.to(wide).requires_grad_() for n, z in x.items()}
        y, cache = recurrence(**leaves, backend=backend, return_state=True)
        assert y.dtype == wide
        grads = torch.autograd.grad(y, list(leaves.values()), dy.to(wide))
        found[backend] = [y, *grads, cache]
    for got, exact in zip(found["triton"][:-1], found["torch"][:-1], strict=True):
        judged(got, exact, limit)
    for got, exact in zip(found["triton"][-1], found["torch"][-1], strict=True):
        assert (got is None) == (exact is None)
        if got is not None:
            torch.testing.assert_close(got.double(), exact.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [1, 33, 64])
def test_the_last_queries_attend_as_among_all(last, dtype, decays, window):
    torch.manual_seed(0)
    tokens = 100
    given = [torch.randn(2, tokens, h, n, dtype=dtype) for h, n in ((2, 16), (1, 16), (2, 20))]
    if dtype == torch.bfloat16:  # as after a turn
        given[:2] = [x.float() for x in given[:2]] if window == 9 else given[:2]
    log = [torch.randn(2, 2, tokens).double().sigmoid().log()] if decays else []
    given[0][:, :-last] = 0
    dy, dlse = torch.randn(2, tokens, 2, 20, dtype=dtype), torch.randn(2, 2, tokens)
    dy[:, :-last], dlse[:, :, :-last] = 0, 0
    found = []
    for begin in (0, tokens - last):
        leaves = [x.clone().requires_grad_() for x in (*given, *log)]
        q, k, v, *given_log = leaves
        y, lse, _ = operator.attention(q[:, begin:], k, v, given_log[0] if decays else None, 0.3, window)
        y, lse = y[:, begin - tokens :][:, -last:], lse[:, :, -last:]
        grads = torch.autograd.grad((y, lse), leaves, (dy[:, -last:], dlse[:, :, -last:]))
        found.append([y, lse, grads[0][:, -last:], *grads[1:]])
    for among_all, alone in zip(*found, strict=True):
        torch.testing.assert_close(alone, among_all, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-2)
        assert not bool(alone.isnan().any())


@pytest.mark.parametrize("tokens", [1, 1024, 2500])
def test_sums_of_several_stretches(tokens):
    """Of strided log decays; every program sums the tokens before its own."""
    from dsf.kernels.triton.attention.sums import NEAR, SIZE, attention_sums, attention_sums_gradient

    log = -torch.rand(2, tokens, 3).transpose(1, 2)  # [B, H, T]
    c, back, stretches = torch.empty(2, 3, 3, tokens), torch.empty(2, 3, tokens), -(-tokens // SIZE.value)
    attention_sums[6, stretches](log, c, tokens, 3, *log.stride())
    exact = log.double().cumsum(-1)
    torch.testing.assert_close(c[:, :, 0].double() + c[:, :, 1].double(), exact, rtol=1e-12, atol=1e-12)
    first = exact[..., torch.arange(tokens) // NEAR.value * NEAR.value]
    torch.testing.assert_close(c[:, :, 2].double(), (exact - first) / math.log(2), rtol=1e-6, atol=1e-6)
    given = torch.randn(2, 3, tokens)
    attention_sums_gradient[6, stretches](given, back, tokens)
    torch.testing.assert_close(back.double(), given.double().flip(-1).cumsum(-1).flip(-1), rtol=1e-6, atol=1e-6)


CUTS = {
    "even": (Simulated(3), None),
    "uneven": (Simulated(4, sizes=(20, 0, 1, 51)), None),
    "both ends": (Simulated(2, "headtail"), None),
    "packed": (Simulated(3), [0, 5, 5, 40, 72]),
    "packed, both ends": (Simulated(2, "headtail"), [0, 30, 72]),
}


SHARED = [(limited, torch.bfloat16, cut) for cut in CUTS]
SHARED += [(r, torch.bfloat16, "uneven") for r in (forgetting, alibi, sliding, sinking)]
SHARED += [(forgetting, torch.float32, cut) for cut in ("packed", "both ends")]


@pytest.mark.parametrize("recurrence, dtype, cut", SHARED)
def test_ranks_share_a_sequence(recurrence, dtype, cut, counting):
    (world, bounds), limit = CUTS[cut], 2e-5 if dtype == torch.float32 else 2e-2
    made = counting(scores, "attend")
    x = {n: z.to(dtype) for n, z in drawn(recurrence, 72, B=1, H=4, N=16, P=20).items()}
    x["k"], dy = torch.randn(1, 72, 2, 16).to(dtype), torch.randn(1, 72, 4, 20).to(dtype)
    options = {} if bounds is None else {"cu_seqlens": dsf.Packing(bounds)}
    found = {}
    for _ in range(2):
        for wide in (dtype, torch.float64):
            leaves = {n: z.to(wide).requires_grad_() for n, z in x.items()}
            how = {"backend": "torch"} if wide == torch.float64 else {"backend": "triton", "parallel": world}
            y = recurrence(**leaves, **how, **options)
            assert y.dtype == wide
            found[wide] = [y, *torch.autograd.grad(y, list(leaves.values()), dy.to(wide))]
        for got, exact in zip(found[dtype], found[torch.float64], strict=True):
            judged(got, exact, limit)
    assert made[0] % 2 == 0 < made[0]


@pytest.mark.parametrize("case", ["reverse", "reverse, packed", "one tensor thrice", "a token a rank"])
def test_ranks_share_other_calls(case):
    tokens, n, p = (3, 12, 7) if case == "a token a rank" else (41, 16, 16)
    x = {name: z.float() for name, z in drawn(limited, tokens, B=1, H=1, N=n, P=p).items()}
    if case == "one tensor thrice":
        x["q"] = x["k"] = x["v"]
    world = Simulated(3, sizes=(tokens // 3, tokens // 3, tokens - tokens // 3 * 2))
    options = {"cu_seqlens": dsf.Packing([0, 5, 5, tokens])} if "packed" in case else {}
    found = []
    for wide, how in ((torch.float32, {"backend": "triton", "parallel": world}), (torch.float64, {"backend": "torch"})):
        leaf = {id(z): z.to(wide).requires_grad_() for z in x.values()}
        y = limited(**{n: leaf[id(z)] for n, z in x.items()}, **how, **options, reverse="reverse" in case)
        found.append([y, *torch.autograd.grad(y.sin().sum(), list(leaf.values()))])
    for got, exact in zip(*found, strict=True):
        judged(got, exact, 2e-5)


def test_a_call_that_ranks_share_is_one_graph():
    x = {name: z.float() for name, z in drawn(forgetting, 40, B=1, N=16, P=16).items()}
    call = partial(forgetting, backend="triton", parallel=Simulated(2))
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(**x), call(**x))


@pytest.mark.parametrize("recurrence", [forgetting, everything, sinking], ids=lambda r: r.name)
def test_a_cache_that_nobody_asks_for_is_not_made(recurrence, counting):
    x = {n: z.bfloat16().requires_grad_() for n, z in drawn(recurrence, 33, N=16).items()}
    made, found = counting(attention, "_extended"), []
    for state in (True, False):
        y = recurrence(**x, backend="triton", return_state=state)
        y = y[0] if state else y
        found.append([y, *torch.autograd.grad(y.float().square().sum(), list(x.values()))])
    assert made == [1] and all(map(torch.equal, *found))


ALONE = """
import torch
from test_attention_bias import drawn, forgetting

given = {name: x.bfloat16() for name, x in drawn(forgetting, 20).items()}
exact = forgetting(**{name: x.double() for name, x in given.items()}, form="naive")
torch.testing.assert_close(forgetting(**given, backend="triton").double(), exact, rtol=0.02, atol=0.02)
"""


def test_a_process_that_runs_no_other_kernels_computes_with_bfloat16():
    """In this one other tests may have imported what mends the interpreter."""
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packed_sequences_and_third_calls():
    x = {n: z.float() for n, z in drawn(everything, 60, B=1).items()}
    bounds = torch.tensor([0, 17, 17, 60])
    y = everything(**x, cu_seqlens=bounds, backend="triton")
    torch.testing.assert_close(y, everything(**x, cu_seqlens=bounds, backend="torch"), rtol=1e-4, atol=1e-5)
    runs = [everything(**x, backend="triton") for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_the_bias_keeps_its_digits():
    x = {n: z.float() for n, z in drawn(forgetting, 700, B=1, H=1).items()}
    x["f"] = x["f"] * 10
    y, exact = forgetting(**x, backend="triton"), forgetting(**{n: z.double() for n, z in x.items()})
    torch.testing.assert_close(y.double(), exact, rtol=2e-5, atol=2e-6)


def test_a_decay_s_gradient_keeps_its_digits():
    """Sums of float32 lost 2.3e-4 of it: what it takes from queries and from keys cancels but for near tokens."""
    recurrence = dsf.fuzz.Declaration(
        "own", (("exp(-softplus(ps))", "exp_features(l2norm(k)) * v"),), "exp_features(q * N ** -0.5)",
        rule="lambda num, den, one: num / (den + one)",
    ).build()  # fmt: skip
    aliases = {"alias": ("k", "q"), "alias_calls": (1, 2, 3), "overlap": True}
    case = dsf.fuzz.Case(
        tokens=67, batch=3, heads=2, n=64, p=64, dtype="float32", calls=3, reverse=True, seed=19865, **aliases
    )
    verdict = dsf.fuzz.attempt(recurrence, case)
    assert verdict.status == "right" and verdict.errors["grad ps"] < 2e-5, verdict


def test_plans_and_refusals():
    plan = everything.plan(T=100, N=64, P=64, dtype=torch.bfloat16, backend="triton")
    assert plan.form == "chunk" and plan.kernel.startswith("attention by tiles")
    for recurrence, sizes, message in [
        (linear, {}, "backend='triton' was asked for, but the attention kernels take exponential features"),
        (rotary, {}, "plain softmax attention is torch's fused attention"),
        (forgetting, {"dtype": torch.float64}, "the inputs are float64"),
        (forgetting, {"N": 512}, "N and P up to 256, got N = 512"),
        (forgetting, {"form": "kernel"}, "the kernel form of .* runs on torch only"),
    ]:
        with pytest.raises(dsf.FormError, match=message):
            recurrence.plan(T=100, backend="triton", **sizes)


def test_gradients_where_one_weight_is_nearly_one():
    k, v, dy = torch.randn(1, 64, 1, 16), torch.randn(1, 64, 1, 16) + 4, torch.randn(1, 64, 1, 16)
    x = {"q": k, "k": k * 0.7, "v": v}
    x = {n: z.half() for n, z in x.items()}
    found = {}
    for backend, wide in (("triton", torch.float16), ("torch", torch.float64)):
        leaves = {n: z.to(wide).requires_grad_() for n, z in x.items()}
        found[backend] = torch.autograd.grad(sliding(**leaves, backend=backend), list(leaves.values()), dy.to(wide))
    for got, exact in zip(found["triton"], found["torch"], strict=True):
        judged(got, exact, 4e-3)


@pytest.mark.parametrize("T", [1, 33])
def test_queries_that_are_the_keys_under_a_turn(T):
    x = {n: z.bfloat16() for n, z in drawn(everything, T, H=2, N=4, P=3).items()}
    x["q"] = torch.randn(2, T, 2, 4).bfloat16()
    found = {}
    for backend, wide in (("triton", torch.bfloat16), ("torch", torch.float64)):
        leaves = {n: z.to(wide).requires_grad_() for n, z in x.items() if n != "k"}
        y = everything(**leaves, k=leaves["q"], backend=backend)
        found[backend] = [y.detach(), *torch.autograd.grad(y.sum(), list(leaves.values()))]
    for got, exact in zip(found["triton"], found["torch"], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()) + 1e-6)


@pytest.mark.parametrize("window", [None, 1, 20, 77])
@pytest.mark.parametrize("tile", [(32, 16), (16, 32), (64, 16)], ids=str)
def test_tiles_that_are_seen_whole_or_in_part(window, tile, monkeypatch):
    """Long sequences have tiles of all kinds: before a window, within it, at the diagonal, past the end; some rows of
    which lost all that came before. Exponents of whole tiles leave out what all keys of a query have in common."""
    made = {"R": tile[0], "C": tile[1], "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(operator, "tiles", lambda *_: dict(made))
    operators.forget()

    @dsf.recurrence
    def seen(q: dsf.Key, k: dsf.Key, v: dsf.Value, f: dsf.Scalar):
        write = dsf.exp_features(k) * v
        return dsf.System(
            A=dsf.sigmoid(f), B=write, C=dsf.exp_features(q * dsf.N**-0.5), normalize=dsf.ratio, window=window
        )

    T, dtype, found = 150, torch.float16, {}
    x = {n: torch.randn(1, T, 2, 16).to(dtype) for n in "qkv"} | {"f": (2 * torch.randn(1, T, 2) + 2).to(dtype)}
    x["f"][:, [40, 90]] = -60.0
    dy = torch.randn(1, T, 2, 16)
    for backend, wide in (("triton", dtype), ("torch", torch.float64)):
        leaves = {n: z.to(wide).requires_grad_() for n, z in x.items()}
        y = seen(**leaves, backend=backend)
        found[backend] = [y, *torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))]
    operators.forget()
    for name, got, exact in zip("yqkvf", found["triton"], found["torch"], strict=True):
        assert bool(got.isfinite().all())
        if window != 1 or name in "yv":  # of one token alone the weight is 1, and its gradients are rounding errors
            judged(got, exact, 2e-2)


@pytest.mark.parametrize("low, often", [(-200.0, 0.9), (-1e4, 0.3), (-float("inf"), 0.3)])
def test_decays_that_forget_nearly_all_keep_gradients(low, often):
    """Weights are made relative to the first query of a tile, so their exponents reach 18,000 after 63 tokens at log
    decays of -200; float32 then keeps steps of 1/512. Lower ones count as -1000."""
    T, dtype, found = 130, torch.bfloat16, {}
    x = {n: torch.randn(1, T, 2, 16).to(dtype) for n in "qkv"}
    x["f"] = torch.where(torch.rand(1, T, 2) < often, low, 3.0).to(dtype)
    dy = torch.randn(1, T, 2, 16).to(dtype)
    for backend, wide in (("triton", dtype), ("torch", torch.float64)):
        leaves = {n: z.to(wide).requires_grad_() for n, z in x.items()}
        y = forgetting(**leaves, **({"backend": backend} if backend == "triton" else {"form": "naive"}))
        found[backend] = [y, *torch.autograd.grad(y, list(leaves.values()), dy.to(wide))]
    for got, exact in zip(found["triton"], found["torch"], strict=True):
        got, exact = got.detach().double(), exact.detach()
        torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


@pytest.mark.parametrize("T", [1, 45])
@pytest.mark.parametrize("batch", [1, 2])
def test_inputs_are_read_as_they_lie(T, batch):
    """Values that are half of a projection, queries with their heads before their tokens, keys of every other token."""
    half = torch.randn(batch, T, 2 * 3 * 16).chunk(2, -1)[1].unflatten(-1, (3, 16))
    x = {"q": torch.randn(batch, 3, T, 16).transpose(1, 2), "k": torch.randn(batch, 2 * T, 3, 16)[:, ::2], "v": half}
    x["f"] = torch.randn(batch, T, 3)
    found = {}
    for name, given in (
        ("as they lie", x),
        ("copied", {n: z.clone(memory_format=torch.contiguous_format) for n, z in x.items()}),
    ):
        leaves = {n: z.detach().requires_grad_() for n, z in given.items()}
        y = forgetting(**leaves, backend="triton")
        found[name] = [y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))]
    assert all(map(torch.equal, *found.values()))
    exact = forgetting(**{n: z.double() for n, z in x.items()})
    torch.testing.assert_close(found["copied"][0].double(), exact, rtol=2e-5, atol=2e-6)
