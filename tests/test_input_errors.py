"""Bad input gets one clear error naming the recurrence, the argument, what was expected and what was given."""

import re

import pytest
import structures
import torch

import dsf
from dsf import FormError, I, InputError, Key, KVCache, Param, Scalar, System, Value, sigmoid
from dsf.call.asked import NoRanks


@dsf.recurrence
def mixer(q: Key, k: Key, v: Value, a: Scalar, w: Param[Key], d: Param[Key, Value]):
    return System(A=sigmoid(a), B=(w * k + d) * v, C=q)


B, T, H, N, P = 2, 5, 4, 3, 2
SHAPES = {"q": (B, T, H, N), "k": (B, T, H, N), "v": (B, T, H, P), "a": (B, T, H), "w": (H, N), "d": (H, N, P)}


def good() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def refused(text: str, *args, call=mixer, error=InputError, **kwargs) -> None:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert re.search(text, message), message
    assert message.count("\n") == 0


@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_tensors_that_are_not_dense_are_refused(made):
    """They ended in torch's words, also after a call of dense ones of their shapes."""
    words = r"must be a dense tensor, got one of torch\.\w+; give its to_dense\(\)"
    state = mixer(**good(), return_state=True)[1]
    for name in "kw":
        refused(rf"^mixer: `{name}` {words}", **(good() | {name: made(good()[name])}))
    refused(rf"^mixer: initial_state {words}", **good(), initial_state=made(state))
    refused(rf"^GLA: x {words}", made(torch.randn(1, 3, 8)), call=dsf.mixers.GLA(8))


def test_good_input_runs():
    assert mixer(**good()).shape == (B, T, H, P)
    x = good()
    assert mixer(x["q"], x["k"], **{n: x[n] for n in "vawd"}).shape == (B, T, H, P)


@pytest.mark.parametrize(
    "name, shape, text",
    [
        ("k", (B, T, H, N + 1), r"`k` has N = 4, but `q` has N = 3; `k` has shape \[2, 5, 4, 4\]"),
        ("k", (B, T + 1, H, N), "`k` has T = 6, but `q` has T = 5"),
        ("k", (B + 1, T, H, N), "`k` has B = 3, but `q` has B = 2"),
        ("k", (1, T, H, N), "`k` has B = 1, but `q` has B = 2"),
        ("k", (B, 1, H, N), "`k` has T = 1, but `q` has T = 5"),
        ("k", (B, T, H, 1), "`k` has N = 1, but `q` has N = 3"),
        ("d", (H, N, P + 1), "`d` has P = 3, but `v` has P = 2"),
        ("d", (H, P, N), "`d` has [NP] = ., but `.` has [NP] = ."),
        ("w", (H, 1), "`w` has N = 1, but `q` has N = 3"),
        ("k", (B, T, 3, N), r"`k` has 3 heads, expected a divisor of 4 \(`.` has 4 heads\); `k` has shape"),
        ("k", (B, T, 8, N), r"has 4 heads|expected a divisor of 8"),
        ("w", (2, N), r"`w` has 2 heads, expected 4 \(`.` has 4 heads\)"),
        ("w", (8, N), r"`w` has 8 heads, expected 4"),
        ("w", (1, N), r"`w` has 1 heads, expected 4"),
        ("w", (N,), r"`w` is Param\[Key\], expected 2 axes \[H, N\], got shape \[3\]"),
        ("w", (1, 1, H, N), r"`w` is Param\[Key\], expected 2 axes \[H, N\], got shape \[1, 1, 4, 3\]"),
        ("d", (H, N), r"`d` is Param\[Key, Value\], expected 3 axes \[H, N, P\], got shape \[4, 3\]"),
        ("a", (B, T, H, 1), r"`a` is Scalar, expected 3 axes \[B, T, H\], got shape \[2, 5, 4, 1\]"),
        ("q", (B, T, N), r"`q` is Key, expected 4 axes \[B, T, H, N\], got shape \[2, 5, 3\]"),
    ],
)
def test_a_wrong_shape_is_refused_never_broadcast(name, shape, text):
    if shape == (B, T, 8, N):  # then 8 is the number of heads, and the Params do not fit
        text = "`w` has 4 heads, expected 8"
    refused(f"^mixer: {text}", **(good() | {name: torch.randn(shape)}))


@pytest.mark.parametrize("axis, size", [(0, "B"), (1, "T"), (2, "0 heads"), (3, "N")])
def test_a_size_of_zero_is_refused(axis, size):
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    for name, shape in shapes.items():
        if axis < 2 and len(shape) > 2 and name != "d":
            shape[axis] = 0
        if axis == 2:
            shape[-1 - (name != "a") - (name == "d")] = 0
        if axis == 3 and name in "qkwd":
            shape[1 if name in "wd" else 3] = 0
    refused(f"^mixer: `.` has {size}", **{name: torch.randn(shape) for name, shape in shapes.items()})


def test_inputs_are_all_given_and_once():
    x = good()
    refused("^mixer: missing inputs `a`, `w`, `d`", x["q"], x["k"], x["v"])
    refused("^mixer: missing input `k`", **{n: t for n, t in x.items() if n != "k"})
    refused(r"^mixer: no input is called `gate`; inputs are q, k, v, a, w, d", **x, gate=x["a"])
    refused("^mixer: no input is called `initial_stat`", **x, initial_stat=None)
    refused("^mixer: input `q` is given twice", x["q"], **x)
    refused(r"^mixer: expected 6 inputs \(q, k, v, a, w, d\), got 7", *x.values(), x["q"])


@pytest.mark.parametrize("thing", [None, 1.0, [[1.0]], "text"])
def test_inputs_are_tensors(thing):
    refused(rf"^mixer: `k` must be a tensor \[B, T, H, N\], got {type(thing).__name__}", **(good() | {"k": thing}))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_inputs_are_floating_point(dtype):
    refused(f"^mixer: `k` must be floating point, got {dtype}", **(good() | {"k": torch.ones(SHAPES["k"]).to(dtype)}))


def test_dtypes_are_not_mixed():
    x = good()
    refused("^mixer: `k` has dtype torch.float64, expected torch.float32 .`q` has torch.float32",
            **(x | {"k": x["k"].double()}))  # fmt: skip
    half = {n: t.bfloat16() for n, t in x.items()}
    refused("^mixer: `w` has dtype torch.float16, expected torch.bfloat16 or torch.float32",
            **(half | {"w": x["w"].half()}))  # fmt: skip
    refused("^mixer: `w` has dtype torch.float32, expected torch.float64 .`q` has torch.float64",
            **({n: t.double() for n, t in x.items()} | {"w": x["w"]}))  # fmt: skip
    assert mixer(**(half | {"w": x["w"], "d": x["d"]})).dtype == torch.bfloat16, "Params may be float32"


@pytest.mark.parametrize("name", ["k", "w"])
def test_devices_are_not_mixed(name):
    x = good()
    refused(f"^mixer: `{name}` is on meta, but `q` is on cpu", **(x | {name: x[name].to("meta")}))


@pytest.mark.parametrize(
    "bounds, text",
    [
        (torch.tensor([0, 4, 2, 5]), r"must not decrease, got \[0, 4, 2, 5\]"),
        (torch.tensor([0, 3]), r"must begin with 0 and end with T = 5, got \[0, 3\]"),
        (torch.tensor([0, 3, 6]), "must begin with 0 and end with T = 5"),
        (torch.tensor([1, 5]), "must begin with 0 and end with T = 5"),
        (torch.tensor([5]), "must begin with 0 and end with T = 5"),
        (torch.tensor([], dtype=torch.int64), "must begin with 0 and end with T = 5"),
        (torch.tensor([0.0, 5.0]), "must be a one-dimensional integer tensor or a dsf.Packing, got tensor"),
        (torch.tensor([[0, 5]]), "must be a one-dimensional integer tensor"),
        (torch.tensor([False, True]), "must be a one-dimensional integer tensor"),
        ([0, 5], r"must be a one-dimensional integer tensor or a dsf.Packing, got \[0, 5\]"),
    ],
)
def test_cu_seqlens_are_boundaries(bounds, text):
    x = {n: t[:1] if t.dim() > 2 and n != "d" else t for n, t in good().items()}
    refused(f"^mixer: cu_seqlens {text}", **x, cu_seqlens=bounds)


def test_cu_seqlens_pack_into_one_row():
    refused("^mixer: cu_seqlens packs sequences into one row, expected B = 1, got B = 2", **good(),
            cu_seqlens=torch.tensor([0, 2, 5]))  # fmt: skip


def test_the_initial_state_has_the_state_s_shape_dtype_and_device():
    state = torch.zeros(B, H, N, P)
    assert mixer(**good(), initial_state=state).shape == (B, T, H, P)
    for wrong in (state.mT, state[:1], state[0], state[..., :1], torch.zeros(())):
        shape = re.escape(str(list(wrong.shape)))
        refused(rf"^mixer: initial_state has shape {shape}, expected \[2, 4, 3, 2\]", **good(), initial_state=wrong)
    for dtype in (torch.float64, torch.bfloat16):
        refused(f"^mixer: initial_state has dtype {dtype}, expected torch.float32", **good(),
                initial_state=state.to(dtype))  # fmt: skip
    refused("^mixer: initial_state is on meta, but the inputs are on cpu", **good(), initial_state=state.to("meta"))
    refused(r"^mixer: initial_state must be a tensor \[2, 4, 3, 2\], got list", **good(), initial_state=[state])
    packed = {n: t[:1] if t.dim() > 2 and n != "d" else t for n, t in good().items()}
    refused(r"^mixer: initial_state has shape \[1, 4, 3, 2\], expected \[3, 4, 3, 2\]", **packed,
            initial_state=state[:1], cu_seqlens=torch.tensor([0, 1, 2, 5]))  # fmt: skip


def test_forms_and_backends_are_honoured_or_refused():
    x = good()
    refused("^mixer: there is no form 'fast'; forms are naive, recurrent, scan, chunk, kernel and auto", **x,
            error=FormError, form="fast")  # fmt: skip
    refused("^mixer: there is no form None", **x, error=FormError, form=None)
    refused("^mixer: there is no backend 'cuda'; backends are ", **x, error=FormError, backend="cuda")
    s = structures.sample(structures.softmax)
    refused(r"^softmax: exponential features \(N = ∞\) has no scan form; it has naive, recurrent, chunk, kernel", **s,
            call=structures.softmax, error=FormError, form="scan")  # fmt: skip


def test_steps_have_their_number_of_micro_steps():
    x = structures.sample(structures.product)
    kind = r"^product: `k` is Steps\[Key, 2\], expected"
    refused(kind + r" n = 2 micro-steps \[B, T, n, H, N\], got shape \[2, 6, 3, 2, 3\]", call=structures.product,
            **(x | {"k": torch.randn(2, 6, 3, 2, 3).double()}))  # fmt: skip
    refused(kind + r" 5 axes \[B, T, n, H, N\], got shape \[2, 6, 2, 3\]", call=structures.product,
            **(x | {"k": torch.randn(2, 6, 2, 3).double()}))  # fmt: skip


def one_token() -> dict[str, torch.Tensor]:
    return {n: t[:, 0] if n not in "wd" else t for n, t in good().items()}


def test_a_step_takes_inputs_without_the_token_axis():
    x = one_token()
    y, state = mixer.step(None, **x)
    assert y.shape == (B, H, P) and state.shape == (B, H, N, P)
    refused(r"^mixer: `q` is Key, expected 3 axes \[B, H, N\], got shape \[2, 1, 4, 3\]", None,
            call=mixer.step, **(x | {"q": x["q"].unsqueeze(1)}))  # fmt: skip
    refused(r"^mixer: `a` is Scalar, expected 2 axes \[B, H\], got shape \[4\]", None, call=mixer.step,
            **(x | {"a": x["a"][0]}))  # fmt: skip
    refused(r"^mixer: `v` has B = 1, but `q` has B = 2; `v` has shape \[1, 4, 2\]", None, call=mixer.step,
            **(x | {"v": x["v"][:1]}))  # fmt: skip
    refused(r"^mixer: `k` must be a tensor \[B, H, N\], got NoneType", None, call=mixer.step, **(x | {"k": None}))


def test_a_step_loses_nothing_silently():
    x = one_token()
    _, state = mixer.step(None, **x)
    refused(r"^mixer: expected 6 inputs \(q, k, v, a, w, d\), got 7", state, *x.values(), x["q"], call=mixer.step)
    refused("^mixer: input `q` is given twice", state, x["q"], call=mixer.step, **x)
    refused("^mixer: missing input `d`", state, *list(x.values())[:-1], call=mixer.step)
    for option in ("form", "cu_seqlens", "return_state", "initial_state"):
        refused(f"^mixer: no input is called `{option}`", state, call=mixer.step, **x, **{option: "auto"})
    refused("abacus", state, call=mixer.step, error=FormError, **x, backend="abacus")
    refused(r"^mixer: initial_state has shape \[1, 4, 3, 2\], expected \[2, 4, 3, 2\]", state[:1], call=mixer.step, **x)


def test_a_step_takes_an_input_that_is_called_state():
    @dsf.recurrence
    def odd(state: Value, self: Scalar):
        return System(A=sigmoid(self), B=state, C=1)

    y, _ = odd.step(None, state=torch.ones(1, 1, 2), self=torch.zeros(1, 1))
    torch.testing.assert_close(y, torch.ones(1, 1, 2))
    assert odd(state=torch.ones(1, 3, 1, 2), self=torch.zeros(1, 3, 1)).shape == (1, 3, 1, 2)


@dsf.recurrence
def grouped(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.exp_features(k) * v, C=dsf.exp_features(q), normalize=dsf.ratio)


def test_a_kv_cache_fits_the_inputs():
    q, k, v = torch.randn(B, T, 4, N), torch.randn(B, T, 2, N), torch.randn(B, T, 4, P)
    _, cache = grouped(q, k, v, return_state=True)
    assert cache.k.shape == (B, 2, T, N) and cache.v.shape == (B, 4, T, P)

    def wrong(text: str, **parts) -> None:
        refused(f"^grouped: {text}", q, k, v, call=grouped, initial_state=cache._replace(**parts))

    wrong(r"k of the KV cache is \[2, 4, 5, 3\].* expected \[2, 2, 5, 3\]", k=cache.k.repeat(1, 2, 1, 1))
    wrong(r"v of the KV cache is \[2, 1, 5, 2\].* expected \[2, 4, 5, 2\]", v=cache.v[:, :1])
    wrong(r"k of the KV cache is \[2, 2, 5, 4\]", k=torch.zeros(B, 2, T, N + 1))
    wrong(r"k of the KV cache is \[1, 2, 5, 3\]", k=cache.k[:1])
    wrong(r"v of the KV cache is \[2, 4, 4, 2\].* expected \[2, 4, 5, 2\]", v=cache.v[:, :, :-1])
    wrong("k of the KV cache is .*torch.float64.* expected .*torch.float32", k=cache.k.double())
    wrong("v of the KV cache is .*on meta; expected .*on cpu", v=cache.v.to("meta"))
    wrong(r"lengths of the KV cache is \[3\].* expected \[2\], torch.int64", lengths=torch.tensor([5, 5, 5]))
    wrong("lengths of the KV cache is .*torch.float32.* expected .*torch.int64", lengths=cache.lengths.float())
    wrong(r"lengths of the KV cache are \[5, 6\], expected from 0 to 5", lengths=torch.tensor([5, 6]))
    wrong(r"lengths of the KV cache are \[-1, 5\], expected from 0 to 5", lengths=torch.tensor([-1, 5]))
    wrong(r"k of the KV cache is \[2, 5, 3\]", k=cache.k[:, 0])
    refused("^grouped: initial_state must be a KVCache .*, got Tensor", q, k, v, call=grouped, initial_state=cache.k)
    refused("^grouped: initial_state must be a KVCache .*, got tuple", q, k, v, call=grouped, initial_state=(1, 2, 3))
    assert isinstance(grouped(q, k, v, initial_state=cache, return_state=True)[1], KVCache)
    with pytest.raises(FormError, match="grouped: its state is a KV cache"):
        grouped.state_shape(N=N, P=P)


def test_plan_checks_as_a_call_does():
    refused("^mixer: missing input", torch.zeros(B, T, H, N), call=mixer.plan)
    refused("there is no form 'x'", call=mixer.plan, error=FormError, form="x")


def test_an_input_that_is_called_like_a_size_can_be_planned():
    @dsf.recurrence
    def mamba(x: Value, dt: Scalar, B: Key, C: Key):
        return System(A=sigmoid(dt), B=B * x, C=C)

    x, dt, b, c = torch.zeros(1, 7, 2, 4), torch.zeros(1, 7, 2), torch.zeros(1, 7, 2, 3), torch.zeros(1, 7, 2, 3)
    assert mamba.plan(x=x, dt=dt, B=b, C=c).state_shape == (1, 2, 3, 4)
    assert mamba.plan(B=5, H=2, N=3, P=4).state_shape == (5, 2, 3, 4)
    refused("^mixer: B is a size of the plan, expected at least 1, got Tensor", call=mixer.plan, B=x)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": -1}, {"H": 0}, {"N": 0}, {"P": 0}])
def test_sizes_of_a_plan_are_positive(sizes):
    name, size = next(iter(sizes.items()))
    refused(f"^mixer: {name} is a size of the plan, expected at least 1, got {size}", call=mixer.plan, **sizes)


@pytest.mark.parametrize("sizes", [{"N": 10**22}, {"T": 10**10, "H": 10**10}], ids=str)
def test_sizes_of_a_plan_can_be_counted(sizes):
    refused("^mixer: inputs of B = 1, .* have more numbers than torch can count", call=mixer.plan, **sizes)


@pytest.mark.parametrize("sizes", [{"N": 0}, {"P": -2}, {"N": 2.0}, {"N": "3"}, {"P": None}, {"P": True}], ids=str)
def test_sizes_of_a_state_are_positive_integers(sizes):
    name, size = next(iter(sizes.items()))
    given = size if type(size) is int else type(size).__name__
    refused(f"^mixer: {name} is a size of the state, expected at least 1, got {given}", call=mixer.state_shape, **sizes)


@pytest.mark.parametrize("dtype", ["float32", torch.int32, torch.complex64, float, None], ids=str)
def test_a_plan_s_dtype_is_one_of_inputs(dtype):
    text = f"^mixer: dtype must be one of torch.float16, .*, got {re.escape(repr(dtype))}"
    for recurrence in (mixer, grouped):
        refused(text.replace("mixer", recurrence.name), call=recurrence.plan, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", None], ids=str)
def test_a_plan_s_device_is_one(device):
    refused(f"^mixer: device must be a torch.device or .*, got {device!r}", call=mixer.plan, device=device)


@pytest.mark.parametrize("given", ["no", "", 3, torch.tensor([True, False])], ids=repr)
def test_switches_are_true_or_false(given):
    """Any word would be taken for True: reverse="no" ran backwards."""
    inputs, token = good(), {n: x[:, 0] if n in "qkva" else x for n, x in good().items()}
    for name in ("reverse", "return_state"):
        refused(f"^mixer: {name} is True or False, got ", **inputs, **{name: given})
        assert isinstance(mixer(**inputs, **{name: None}), torch.Tensor)
    refused("^mixer: in_place is True or False, got ", None, call=mixer.step, **token, in_place=given)


def test_ranks_are_a_sequence_of_dsf_parallel(monkeypatch):
    """Also where nobody has imported dsf.parallel."""
    for known in (NoRanks, dsf.parallel.call):
        monkeypatch.setattr(dsf.Recurrence, "ranks", known)
        for ranks in (3, "x", True):
            text = f"^mixer: parallel must be a dsf.parallel.Sequence, got {type(ranks).__name__}"
            refused(text, **good(), parallel=ranks)
            refused(text, call=mixer.plan, parallel=ranks)


def test_trajectories_check_their_initial_state():
    refused(r"^mixer: initial_state has shape \[2, 4, 3\], expected \[2, 4, 3, 2\]", call=mixer.trajectory,
            initial_state=torch.zeros(B, H, N), **good())  # fmt: skip
    refused("^softmax: the trajectory of softmax attention has no states", call=structures.softmax.trajectory,
            initial_state=torch.zeros(1), **structures.sample(structures.softmax))  # fmt: skip


def test_true_state_checks_the_columns():
    refused(r"^stabilised: a state of P = 5 has 7 columns, got shape \[2, 4\]", torch.zeros(2, 4), 5,
            call=structures.stabilised.true_state)  # fmt: skip
