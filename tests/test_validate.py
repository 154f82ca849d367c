"""`dsf.validate`: what calls are held to, what its errors name, what it leaves alone, and what it costs when off."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import dsf
from dsf import I, InputError, Key, Param, Scalar, System, Value, mixers, outer, sigmoid
from dsf.call import guard
from dsf.checking.examples import Example
from dsf.checking.ranges import legal_ranges, ranges_of
from dsf.testing import Range

B, T, H, N, P = 2, 9, 3, 4, 5
delta = mixers.gated_deltanet


def good(tokens: int = T, batch: int = B) -> dict[str, torch.Tensor]:
    q, k = torch.randn(2, batch, tokens, H, N)
    alpha, beta = torch.rand(2, batch, tokens, H)
    return {"q": q, "k": F.normalize(k, dim=-1), "v": torch.randn(batch, tokens, H, P), "alpha": alpha, "beta": beta}


def broken(name: str, place: tuple[int, ...], number: float, **sizes: int) -> dict[str, torch.Tensor]:
    x = good(**sizes)
    x[name][place] = number
    return x


def refused(*texts: str, call=delta, options=None, **inputs) -> None:
    with dsf.validate(**(options or {})), pytest.raises(InputError) as caught:
        call(**inputs)
    message = str(caught.value)
    assert message.count("\n") == 0
    for text in texts:
        assert text in message, message


@dsf.recurrence
def summed(x: Value, a: Scalar, b: Scalar):
    return System(A=a + b, B=x, C=1)


@dsf.recurrence
def weighted(x: Value, w: Param[Value], f: Scalar):
    return System(A=sigmoid(f), B=w * x, C=1)


@dsf.recurrence
def growing(x: Value, f: Scalar):
    return System(A=2 * sigmoid(f), B=x, C=1)


@pytest.mark.parametrize("entry", mixers.ZOO, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_every_legal_example_passes(entry, dtype):
    recurrence = entry.recurrence
    ranges = ranges_of(recurrence.spec)
    with dsf.validate():
        for regime in ("corners", "mixed"):
            regimes = {name: regime for name, r in ranges.items() if not r.is_real and not r.unit}
            example = Example(2, 7, 2, 4, 3, dtype, regimes=regimes, initial=True)
            inputs = example.inputs(recurrence, ranges)
            y, state = recurrence(**inputs, initial_state=example.state(recurrence, ranges), return_state=True)
            timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
            recurrence.step(state, **{n: x[:, 0] if n in timed else x for n, x in inputs.items()})
            assert y.isfinite().all()


@pytest.mark.parametrize("entry", [e for e in mixers.ZOO if e.module is not None], ids=lambda e: e.name)
def test_every_layer_passes_and_is_watched(entry):
    layer, x = entry.module(d_model=64), torch.randn(1, 11, 64)
    with dsf.validate():
        layer(x)
        layer(x, cu_seqlens=torch.tensor([0, 3, 11]))
        _, state = layer(x)
        layer.step(x[:, 0], state)
        x[0, 6] = math.nan
        with pytest.raises(InputError, match=r": `\w+` is nan at batch row 0, token 6, "):
            layer(x)


def test_values_out_of_their_range_are_named_with_place_value_and_range():
    refused(
        "gated_deltanet: `alpha` is 1.5 at batch row 1, token 4, head 2; expected alpha in [0, 1]",
        "sigmoid(alpha)",
        **broken("alpha", (1, 4, 2), 1.5),
    )
    refused("`beta` is -0.25 at batch row 0, token 0, head 0; expected beta in [0, 2]", "2 * sigmoid(beta)",
            **broken("beta", (0, 0, 0), -0.25))  # fmt: skip
    x = good()
    x["k"][1, 7, 0] *= 3
    refused("`k` has length 3 at batch row 1, token 7, head 0; expected unit length", "l2norm(k)", **x)
    x["k"] = 5 * x["k"]
    refused("batch row 0, token 0, head 0 (and 53 more)", **x)


@dsf.recurrence
def oja(q: Key, k: Key, v: Value, b: Scalar):
    return System(A=I - b * outer(v, v), B=k * v, C=q)


def test_values_that_erase_are_held_to_their_length_over_channels():
    """Not over heads, where several vectors of length one meet."""
    (q, k), v, b = torch.randn(2, B, T, H, N), F.normalize(torch.randn(B, T, H, P), dim=-1), torch.rand(B, T, H)
    with dsf.validate():
        oja(q, k, v, b)
    v[1, 7, 2] *= 3
    words = "`v` has length 3 at batch row 1, token 7, head 2; expected unit length"
    refused(words, "v * rsqrt(sum_value(v * v)", call=oja, q=q, k=k, v=v, b=b)


def test_the_earliest_token_is_named():
    x = good()
    x["alpha"][0, 8, 1] = x["alpha"][1, 2, 0] = 7.0
    refused("batch row 1, token 2, head 0 (and 1 more)", **x)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_inputs_are_finite(number):
    refused(f"gated_deltanet: `v` is {number:g} at batch row 1, token 3, head 2, channel 4; expected finite numbers",
            **broken("v", (1, 3, 2, 4), number))  # fmt: skip
    refused(f"`k` is {number:g} at batch row 0, token 1, head 0, entry 3", **broken("k", (0, 1, 0, 3), number))


def test_packed_sequences_are_named():
    bounds = torch.tensor([0, 2, 6, 9])
    x = broken("alpha", (0, 7, 1), 2.0, batch=1)
    refused("`alpha` is 2 at token 7 (sequence 2, its token 1), head 1", cu_seqlens=bounds, **x)


def test_a_step_is_held_as_a_call_is():
    x = {name: t[:, 0] for name, t in broken("alpha", (1, 0, 2), -1.0).items()}
    with dsf.validate(), pytest.raises(InputError, match="`alpha` is -1 at batch row 1, head 2; expected"):
        delta.step(None, **x)
    state = torch.zeros(B, H, N, P)
    with dsf.validate(), pytest.raises(InputError, match="`alpha` is -1"):
        delta.step(state, in_place=True, **x)
    assert not state.any()


def test_parameters_and_micro_steps_have_their_places():
    x, f, w = torch.randn(B, T, H, P), torch.randn(B, T, H), torch.ones(H, P)
    w[2, 3] = math.inf
    refused("weighted: `w` is inf at head 2, channel 3", call=weighted, x=x, w=w, f=f)
    product = mixers.delta_product
    names = {i.name: i.kind for i in product.spec.inputs}
    steps = names["beta"].steps
    assert str(names["beta"]) == f"Steps[Scalar, {steps}]"
    inputs = Example(B, T, H, N, P, "float32").inputs(product, ranges_of(product.spec))
    inputs["beta"][1, 5, 1, 2] = 9.0
    refused("delta_product: `beta` is 9 at batch row 1, token 5, micro-step 1, head 2", call=product, **inputs)


def test_states_and_caches_are_finite():
    state = torch.zeros(B, H, N, P)
    state[1, 2, 3, 4] = math.nan
    refused("gated_deltanet: initial_state is nan at row 1, head 2, entry 3, column 4", initial_state=state, **good())
    softmax, (q, k, v) = mixers.softmax_attention, torch.randn(3, B, T, H, N)
    _, cache = softmax(q, k, v, return_state=True)
    wide = cache._replace(k=cache.k.clone(), lengths=cache.lengths - 1)
    wide.k[1, 2, T - 1] = math.nan  # beyond what it holds
    with dsf.validate():
        assert softmax(q, k, v, initial_state=wide).isfinite().all()
    wide.k[0, 1, 3, 2] = math.inf
    refused("k of initial_state is inf at row 0, head 1, place 3, entry 2", call=softmax, q=q, k=k, v=v,
            initial_state=wide)  # fmt: skip


def test_the_decay_of_softmax_attention_is_held_as_any_other_is():
    q, k, v, slope = *torch.randn(3, B, T, H, N), torch.tensor([0.5, -0.25, 0.0])
    assert {name: str(x) for name, x in ranges_of(mixers.alibi.spec).items() if not x.is_real} == {"slope": "≥ 0"}
    assert dsf.check(mixers.alibi, laws=("finite",), dtypes=(torch.float32,), examples=2).ok
    refused("alibi: `slope` is -0.25 at head 1; expected slope ≥ 0", call=mixers.alibi, q=q, k=k, v=v, slope=slope)


def test_outputs_that_grow_without_bound_are_told_from_bad_inputs():
    x, f = torch.ones(1, 200, 1, 2), torch.full((1, 200, 1), 20.0)
    y = growing(x, f)
    first = int((~y.isfinite()).any(-1).flatten().nonzero()[0])
    refused(f"growing: y is inf at batch row 0, token {first}, head 0, channel 0", "grows without bound", call=growing,
            x=x, f=f)  # fmt: skip
    half = 30000 * torch.ones(1, 3, 1, 2, dtype=torch.float16)
    refused("y is inf at batch row 0, token 2", "65,504", call=growing, x=half, f=torch.zeros(1, 3, 1).half())


def test_what_several_inputs_share_is_held_together():
    """a + b ≤ 1: dsf.check draws both below a half, but 0.8 and 0.1 are as legal."""
    x, a = torch.randn(B, T, H, P), torch.full((B, T, H), 0.8)
    assert ranges_of(summed.spec)["a"].high == 0.5 and legal_ranges(summed.spec)[1] == {"a", "b"}
    with dsf.validate():
        summed(x, a, a / 8)
    b = a / 8
    b[1, 3, 0] = 0.5
    refused("summed: `a`, `b`: the decay a + b is 1.3 at batch row 1, token 3, head 0; expected ≤ 1 in size",
            call=summed, x=x, a=a, b=b)  # fmt: skip


def test_denominators_may_come_as_near_to_zero_as_they_like():
    gla = mixers.generalized_linear_attention
    inputs = Example(1, 5, 2, 3, 3, "float32").inputs(gla, ranges_of(gla.spec))
    inputs["eta"].fill_(1e-3)
    with dsf.validate():
        gla(**inputs)
    inputs["eta"][0, 2, 1] = 0.0
    refused("`eta` is 0 at batch row 0, token 2, head 1; expected eta > 0", call=gla, **inputs)


def test_the_users_own_ranges_hold_instead():
    x = good()
    x["alpha"] = torch.full_like(x["alpha"], 0.7)
    for name in ("alpha", "gated_deltanet.alpha"):
        refused("`alpha` is 0.7", "expected alpha in [0, 0.5]", options={"ranges": {name: (0.0, 0.5)}}, **x)
    refused("expected alpha in [0.8, 0.9]", options={"ranges": {"alpha": Range(0.8, 0.9)}}, **x)
    with dsf.validate(ranges={"k": None, "alpha": (0, 2), "ssd.alpha": (0.0, 0.1)}) as held, warnings.catch_warnings():
        delta(**(x | {"k": torch.randn(B, T, H, N), "alpha": 2 * x["alpha"]}))
        held.guard.unused.clear()


def test_ranges_that_cannot_be_or_are_for_nothing_are_said():
    with pytest.raises(InputError, match=r"^dsf.validate: the range of `alpha` is empty: low 2, high 1"):
        dsf.validate(ranges={"alpha": (2, 1)})
    with pytest.raises(InputError, match=r"^dsf.validate: the range of `alpha` must be \(low, high\), got 3"):
        dsf.validate(ranges={"alpha": 3})
    refused("gated_deltanet: ranges names `alfa`, which is no input", options={"ranges": {"gated_deltanet.alfa": None}},
            **good())  # fmt: skip
    with pytest.warns(UserWarning, match="no call had an input `alfa`"), dsf.validate(ranges={"alfa": (0, 1)}):
        delta(**good())


def test_blocks_nest_end_and_belong_to_their_thread():
    bad = broken("alpha", (0, 0, 0), 2.0)
    found = []
    with dsf.validate():
        assert guard.ON
        with dsf.validate(enabled=False):
            delta(**bad)
        thread = threading.Thread(target=lambda: found.append(delta(**bad)))
        thread.start()
        thread.join()
        with pytest.raises(InputError):
            delta(**bad)
    assert found and guard.ON == guard.EVERYWHERE
    delta(**bad)

    @dsf.validate()
    def held(depth: int = 2):
        return held(depth - 1) if depth else delta(**bad)

    for _ in range(2):
        with pytest.raises(InputError):
            held()
    delta(**bad)


def test_the_environment_switches_it_on_and_needs_no_hypothesis():
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import torch, dsf\nfrom dsf import mixers\n"
        "print('at first', dsf.call.guard.ON)\n"
        "x = torch.zeros(1, 3, 1, 2)\n"
        "try: mixers.gated_deltanet(x, x, x, x[..., 0] + 2, x[..., 0])\n"
        "except dsf.InputError as error: print(error)\n"
        "with dsf.validate(enabled=False): mixers.gated_deltanet(x, x, x, x[..., 0] + 2, x[..., 0])\n"
        "print(dsf.call.guard.ON)"
    )
    for value, on in (("1", True), ("0", False)):
        env = os.environ | {"DSF_VALIDATE": value}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
        assert ("`alpha` is 2" in done.stdout) == on
        assert f"at first {on}\n" in done.stdout and done.stdout.endswith(f"{on}\n")


def test_off_it_is_one_look_at_a_module_variable(monkeypatch):
    monkeypatch.setattr(guard, "ON", False)
    monkeypatch.setattr(guard, "current", None)  # calling it would raise
    delta(**broken("alpha", (0, 0, 0), 2.0))
    assert "dsf.validate" not in sys.modules


def test_a_compiled_graph_is_left_whole_and_said_to_be():
    bad = broken("alpha", (0, 0, 0), 2.0)
    compiled = torch.compile(lambda **x: delta(**x), fullgraph=True, backend="aot_eager")
    with dsf.validate(), pytest.warns(UserWarning, match="calls in a compiled graph are not looked into"):
        y = compiled(**bad)
    torch.testing.assert_close(y, delta(**bad))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(x):
        with dsf.validate():
            return delta(**x)

    torch.testing.assert_close(inside(bad), y)


def test_transformed_and_meta_calls_are_let_through():
    x = broken("alpha", (0, 0, 0), 2.0)
    with dsf.validate(), pytest.warns(UserWarning, match=r"within torch\.func"):
        torch.func.vmap(lambda v: delta(**(x | {"v": v})))(torch.randn(2, B, T, H, P))
    with dsf.validate(), pytest.warns(UserWarning, match="on the meta device"):
        delta(**{name: t.to("meta") for name, t in x.items()})


def test_gradients_pass_as_if_nobody_watched():
    x = {name: t.double().requires_grad_() for name, t in good().items()}
    with dsf.validate():
        watched = torch.autograd.grad(delta(**x).sum(), list(x.values()))
    for a, b in zip(watched, torch.autograd.grad(delta(**x).sum(), list(x.values())), strict=True):
        assert torch.equal(a, b)


def fresh():
    return dsf.Recurrence(delta.spec)


def test_more_heads_than_tokens_are_warned_of_once_at_the_users_line():
    recurrence = fresh()
    swapped = {name: x.transpose(1, 2) for name, x in good().items()}
    with pytest.warns(UserWarning, match=r"gated_deltanet: the inputs have H = 9 heads and T = 3 tokens") as caught:
        recurrence(**swapped)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recurrence(**{name: x[:, :2] for name, x in swapped.items()})  # once is enough
        fresh()(**good())


def test_steps_states_and_layers_are_not_taken_for_swapped():
    x = good(tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh()(**x, initial_state=torch.zeros(B, H, N, P))
        fresh().step(None, **{name: t[:, 0] for name, t in x.items()})
        layer = mixers.GatedDeltaNet(32, n_heads=4)  # its own dsf.Recurrence: one that has not warned
        layer.recurrence = dsf.Recurrence(layer.recurrence.spec)
        layer(torch.randn(1, 2, 32))
