"""Readouts by a solve on their kernels, in Triton's interpreter, beside the float64 oracle."""

import gc

import pytest
import torch
from interpreted import interpreted
from test_solve import least_squares, two_squares

import dsf
from dsf import Key, Memory, Param, Scalar, System, Value, learn, mixers, norm2, sigmoid
from dsf.call.bind import bind
from dsf.kernels.triton.pointwise.programs import PROGRAMS
from dsf.kernels.triton.solve.operator import ROWS, solve_mixer
from dsf.language.expr import KEY, const, inputs_of, symbol_of
from dsf.language.solve import weighted
from dsf.triton.chunk import program_of
from dsf.triton.solve import _Operands, matched

pytestmark = interpreted
S = Memory()


@dsf.recurrence
def three_squares(
    q: Key, k: Key, v: Value, l: Key, w: Value, m: Key, b: Scalar, g: Scalar, lam: Param[Scalar]
) -> System:
    """The third square has no value, a key is computed, and the ridge is one number a head."""
    loss = 0.5 * norm2(S.T @ k - v) + norm2(S.T @ (0.5 * l) - w) + 0.25 * norm2(S.T @ m)
    return learn(loss, by="exact", rate=sigmoid(b), decay=sigmoid(g), ridge=0.5 + sigmoid(lam), C=q)


@dsf.recurrence
def pulled_elsewhere(q: Key, k: Key, v: Value, l: Key, w: Value) -> System:
    """A write at a key that no square has."""
    return learn(0.5 * norm2(S.T @ k - v) - dsf.inner(S.T @ l, w), by="exact", ridge=1, C=q)


def drawn(recurrence, tokens, n, p, dtype=torch.float64, batch=2, heads=2, seed=0):
    """Keys and queries of unit length, decays, weights and ridges that need no more than 30 steps; bfloat16 numbers."""
    torch.manual_seed(seed)
    axes = {"B": batch, "T": tokens, "H": heads, "N": n, "P": p}
    found = {}
    for i in recurrence.spec.inputs:
        x = torch.randn([axes[a] for a in i.kind.layout()], dtype=torch.float64)
        if i.kind.time and i.kind.axes == {"key"}:
            x = torch.nn.functional.normalize(x, dim=-1)
        if i.name in ("a", "beta") or (recurrence is two_squares and i.name in ("b", "lam")):
            x = (1.5 if i.name == "lam" else 0.1) + 0.8 * x.sigmoid()
        found[i.name] = x.bfloat16().to(dtype)
    return found


def state_of(recurrence, rows, heads, n, p):
    torch.manual_seed(1)
    root = 0.3 * torch.randn(rows, heads, n, n, dtype=torch.float64)
    return torch.cat([torch.randn(rows, heads, n, p, dtype=torch.float64), root @ root.mT], dim=-1)


def outcome(recurrence, given, state, dtype, slopes=None, **how):
    """Outputs, the final state, and all gradients."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
    if state is not None:
        how["initial_state"] = leaves["state"] = state.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    y, last = recurrence(**{n: x for n, x in leaves.items() if n != "state"}, return_state=True, **how)
    if slopes is None:
        slopes = torch.randn_like(y).bfloat16(), torch.randn_like(last).float()
    total = (y.double() * slopes[0].double()).sum() + (last.double() * slopes[1].double()).sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {"y": y, "final": last, **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}, slopes


def worst(found, expected, block=16):
    """The largest error of a head and block of tokens, beside the norm of that block or a tenth of the largest one."""
    error, size = (found.double() - expected).detach(), expected.detach()
    if expected.dim() > 2 and expected.shape[1] > block:  # [B, T, H, ·]
        error, size = (torch.stack([x.flatten(3).norm(dim=(1, 3)) if x.dim() > 3 else x.norm(dim=1)
                                    for x in t.split(block, 1)]) for t in (error, size))  # fmt: skip
    else:
        error, size = error.norm(), size.norm()
    return float((error / size.clamp(min=0.1 * float(size.max()) + 1e-30)).max())


CASES = {
    "plain": (mixers.mesanet, {}), "state": (mixers.mesanet, {"state": True}),
    "packed": (mixers.mesanet, {"packed": True, "state": True}), "before, two": (two_squares, {"state": True}),
    "before, two, packed": (two_squares, {"packed": True}), "no decay": (least_squares, {}),
    "three": (three_squares, {"state": True}),
}  # fmt: skip


@pytest.mark.parametrize("n, p", [(16, 24), (12, 5), (32, 80)])
@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_are_the_oracles(name, n, p):
    recurrence, how = CASES[name]
    tokens, options = 2 * ROWS + 3, {}
    batch = 1 if how.get("packed") else 2
    given = drawn(recurrence, tokens, n, p, batch=batch)
    if how.get("packed"):
        options["cu_seqlens"] = torch.tensor([0, 5, 5, 90, tokens])
    state = state_of(recurrence, 4 if how.get("packed") else batch, 2, n, p) if how.get("state") else None
    exact, slopes = outcome(recurrence, given, state, torch.float64, form="naive", **options)
    found, _ = outcome(recurrence, given, state, torch.float32, slopes, backend="triton", **options)
    for key, expected in exact.items():
        assert worst(found[key], expected) < 2e-5, key


@pytest.mark.parametrize("n, p", [(64, 64), (16, 24)])
def test_bfloat16_errs_by_little_more_than_one_rounding(n, p):
    """Gradients of keys, weights and decays, too, which sum what G and H do, though that nearly cancels."""
    given = drawn(mixers.mesanet, 3 * ROWS + 1, n, p, batch=1)
    exact, slopes = outcome(mixers.mesanet, given, None, torch.float64, form="naive")
    for _ in range(3):  # the third call, too
        found, _ = outcome(mixers.mesanet, given, None, torch.bfloat16, slopes, backend="triton")
    for key, expected in exact.items():
        once = worst(expected.bfloat16(), expected, 64)
        assert worst(found[key], expected, 64) < {"final": 0.1}.get(key, 1.6) * once, key


def test_computed_keys_keep_their_digits_in_bfloat16():
    given = drawn(three_squares, ROWS + 5, 16, 16)
    exact, slopes = outcome(three_squares, given, None, torch.float64, form="naive")
    found, _ = outcome(three_squares, given, None, torch.bfloat16, slopes, backend="triton")
    assert worst(found["y"], exact["y"]) < 1.2 * worst(exact["y"].bfloat16(), exact["y"])


def test_one_tensor_as_several_inputs():
    x = drawn(mixers.mesanet, ROWS + 7, 16, 16)
    given = {name: x[name] for name in ("f", "beta", "lam")}
    results = []
    for dtype, how in ((torch.float64, {"form": "naive"}), (torch.float32, {"backend": "triton"})):
        k, f = x["k"].to(dtype).requires_grad_(), given["f"].to(dtype).requires_grad_()
        y = mixers.mesanet(k, k, k, f, f.sigmoid(), given["lam"].to(dtype), **how)
        results.append([y, *torch.autograd.grad(y.square().sum(), [k, f])])
    for exact, found in zip(*results, strict=True):
        assert worst(found, exact) < 2e-5


def solved(given, steps, narrow=False):
    ridge = torch.full((1, 1, 1, 1), 0.5).expand_as(given["q"])
    tensors = [given[name].float() for name in ("q", "k", "v", "beta")]
    query, keys, values, weights = tensors
    if narrow:
        keys, values = keys.bfloat16(), values.bfloat16()
    decay = torch.nn.functional.logsigmoid(given["f"].float() + 6)
    return solve_mixer(query, None, ridge, keys, values, weights, decay, None, None, None, narrow, True, False, steps)


@pytest.mark.parametrize("narrow", [False, True])
def test_more_steps_come_nearer_and_the_last_ones_change_nothing(narrow):
    given = drawn(mixers.mesanet, 2 * ROWS, 16, 16)
    exact = solved(given, 200)[0]
    off = [float((solved(given, steps, narrow)[0] - exact).norm()) for steps in (0, 1, 2, 4, 8, 60)]
    assert off == sorted(off, reverse=True) and off[-1] < 1e-5 * exact.norm()
    assert torch.equal(solved(given, 60, narrow)[0], solved(given, 90, narrow)[0])


def test_a_token_does_not_depend_on_the_steps_that_others_need():
    given = drawn(mixers.mesanet, ROWS, 16, 16)
    easy = {**given, "q": given["q"] * (torch.arange(ROWS) < 3).view(1, -1, 1, 1)}
    assert torch.equal(solved(given, 60)[0][:, :3], solved(easy, 60)[0][:, :3])
    assert (solved(easy, 60)[0][:, 3:] == 0).all()


@pytest.mark.parametrize("decays", [{7: 0.0, 70: 0.0}, {9: -0.01, 40: -0.02, 41: -0.02}], ids=["zero", "negative"])
def test_decays_may_be_zero_and_small_negative_ones(decays):
    """What is left of H before them must not exceed the ridge."""
    given = drawn(two_squares, ROWS + 20, 16, 16)
    for token, decay in decays.items():
        given["a"][:, token] = decay
    exact, slopes = outcome(two_squares, given, None, torch.float64, form="naive")
    found, _ = outcome(two_squares, given, None, torch.float32, slopes, backend="triton")
    assert all(worst(found[key], expected) < 2e-5 for key, expected in exact.items() if key != "da")


def test_which_systems_the_kernels_take():
    for recurrence, squares in ((mixers.mesanet, 1), (two_squares, 2), (least_squares, 1)):
        assert len(matched(recurrence.spec).values) == squares
    assert matched(pulled_elsewhere.spec) is None
    given = drawn(pulled_elsewhere, 40, 16, 16)
    plan = pulled_elsewhere.plan(**{n: x.float() for n, x in given.items()}, backend="triton")
    assert "steps in float32, on chunk walk" in plan.kernel
    exact, slopes = outcome(pulled_elsewhere, given, None, torch.float64, form="naive")
    found, _ = outcome(pulled_elsewhere, given, None, torch.float32, slopes, backend="triton")
    assert all(worst(found[key], expected) < 2e-5 for key, expected in exact.items())
    assert "steps in float32" in mixers.mesanet.plan(T=100, N=160, P=16, device="cuda").kernel


def test_inputs_that_need_no_computing_are_not_converted():
    spec = three_squares.spec
    bound = bind(spec, (), drawn(three_squares, 3, 16, 4, torch.bfloat16))
    for half in (const(0.5) * symbol_of("l", None, frozenset({KEY})), const(2)):
        made = _Operands(spec, bound, [spec.readout, half]).values.values
        assert [x.attrs[0] for x in made if x.op == "input"] == [x.attrs[0] for x in inputs_of(half)]


def test_another_process_finds_the_program_by_the_declaration():
    spec = three_squares.spec
    name = program_of(weighted(spec, "log"), True)[1]
    del PROGRAMS[name]
    spec.__dict__.pop("_derived")
    gc.collect()
    assert PROGRAMS[name].precise


def test_a_call_is_one_graph():
    given = {name: x.bfloat16() for name, x in drawn(mixers.mesanet, 40, 16, 16).items()}
    plain = [x.clone().requires_grad_() for x in given.values()]
    compiled = torch.compile(lambda *x: mixers.mesanet(*x, backend="triton"), fullgraph=True, backend="aot_eager")
    results = []
    for call in (lambda *x: mixers.mesanet(*x, backend="triton"), compiled):
        y = call(*plain)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), plain)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_refused():
    given = {name: x.float().requires_grad_() for name, x in drawn(mixers.mesanet, 20, 16, 16).items()}
    y = mixers.mesanet(**given, backend="triton")
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), given["q"], create_graph=True)
