"""The plan: one ladder from structure to form, its costs, and what Spec and Plan print."""

import dataclasses
import re

import pytest
import structures
import torch

import dsf
from dsf import FormError, Key, Pair, Scalar, System, Value, exp_features, mixers, ratio, sigmoid, turn
from dsf.call.plan import FORMS, SHORT

STRUCTURES = {
    "identity": ("identity", "decay chunks"),
    "constant": ("constant decay", "decay chunks"),
    "scalar": ("scalar decay", "decay chunks"),
    "gated": ("scalar decay", "decay chunks"),
    "signed": ("scalar decay", "decay chunks"),
    "key_diagonal": ("key-diagonal decay", "decay chunks"),
    "read_before": ("key-diagonal decay", "decay chunks"),
    "value_diagonal": ("value-diagonal decay", "value-decay chunks"),
    "hadamard": ("Hadamard", "segments of the scan"),
    "dense_write": ("scalar decay", "segments of the scan"),
    "two_writes": ("key-diagonal decay", "decay chunks"),
    "vector": ("vector (N = 1)", "segments of the scan"),
    "delta": ("identity + delta", "WY chunks"),
    "gated_delta": ("scalar decay + delta", "WY chunks"),
    "key_delta": ("key-diagonal decay + delta", "WY chunks"),
    "rank_one": ("key-diagonal decay + rank-one", "WY chunks"),
    "channel_delta": ("identity + delta", "WY chunks of every channel"),
    "product": ("scalar decay + product", "WY chunks"),
    "normalised": ("identity", "decay chunks"),
    "stabilised": ("scalar decay", "decay chunks"),
    "stabilised_delta": ("key-diagonal decay + delta", "WY chunks"),
    "normalised_product": ("identity + product", "WY chunks"),
    "turned": ("turned scalar decay", "decay chunks"),
    "turned_delta": ("turned identity + delta", "WY chunks"),
    "turned_blocks": ("turned key-diagonal decay (2 x 2 blocks)", "scan of 2 x 2 blocks"),
    "trapezoid": ("turned scalar decay", "decay chunks"),
    "remembered": ("scalar decay", "decay chunks"),
    "softmax": ("exponential features (N = ∞)", "scaled_dot_product_attention"),
}
ALL = pytest.mark.parametrize("recurrence", structures.ALL, ids=lambda r: r.name)


def test_every_structure_is_listed_here():
    assert {r.name for r in structures.ALL} == set(STRUCTURES)


@ALL
def test_the_ladder(recurrence):
    plan = recurrence.plan(T=2048, N=64, P=64)
    assert (plan.structure, plan.kernel) == STRUCTURES[recurrence.name]
    assert (plan.recurrence, plan.form, plan.backend) == (recurrence.name, "chunk", "torch")
    short = recurrence.plan(T=SHORT, N=64, P=64)
    assert short.form == ("chunk" if recurrence is structures.softmax else "recurrent")
    assert plan.reason and short.reason


def test_chunks_of_corrections_beside_values_are_named_and_counted_as_they_run():
    """On the Key axis one triangular system a channel, P times the work; on the Value axis the transposed state."""

    @dsf.recurrence
    def channels(q: Key, k: Key, v: Value, g: Value, b: Scalar):
        return dsf.System(A=dsf.sigmoid(g) * (dsf.I - b * dsf.outer(k, k)), B=b * k * v, C=q)

    @dsf.recurrence
    def columns(q: Key, k: Key, v: Value, g: Value, b: Scalar):
        return dsf.System(A=dsf.sigmoid(g) * dsf.I - b * dsf.outer(v, v), B=b * k * v, C=q)

    plans = [channels.plan(T=2048, N=16, P=p) for p in (1, 32)]
    assert {p.kernel for p in plans} == {"WY chunks of every channel"} and plans[1].flops == 32 * plans[0].flops
    assert columns.plan(T=2048, N=16, P=32).kernel == "WY chunks of the transposed state"


def declared(a, b="k * v", c="q", **options):
    """A recurrence of these expressions."""
    kinds = {"q": Key, "k": Key, "l": Key, "ak": Key, "v": Value, "av": Value, "a": Scalar, "b": Scalar, "t": Scalar}
    text = " ".join(map(str, (a, b, c, *options.values())))
    names = [n for n in kinds if re.search(rf"\b{n}\b", text)]
    scope = {**vars(dsf), "options": {n: eval(x, vars(dsf) | {"ratio": dsf.ratio}) for n, x in options.items()}}
    exec(f"def made({', '.join(names)}): return System(A={a}, B={b}, C={c}, **options)", scope)
    scope["made"].__annotations__ = {n: kinds[n] for n in names}
    return dsf.recurrence(scope["made"])


DELTA = "(I - sigmoid(b) * outer(k, k))"
SOFTMAX = {"b": "exp_features(k) * v", "c": "exp_features(q)", "normalize": "ratio"}
ON_KERNELS = [  # docs/forms.md, "Where it runs": what a call of 256 tokens on a GPU takes, or why it takes torch
    (declared("I"), "chunk walk"),
    (declared("sigmoid(a)", "k * v - l * v"), "chunk walk"),
    (declared("diag(exp(ak)) @ " + DELTA), "generalised WY transform"),
    (declared(DELTA + " @ diag(exp(ak))", "sigmoid(b) * k * v", "q + sigmoid(av) * l"), "WY transform"),
    (declared(DELTA + " @ turn(t)", "prev(k * v)"), "generalised WY transform"),
    (declared("diag(sigmoid(ak)) + outer(k, l)"), "generalised WY transform"),
    (declared("diag(tanh(ak))"), "fused scan.*no logarithm of the decays is derived"),
    (declared("sigmoid(a)", "exp(b) * k * v", normalize="ratio"), "chunk walk"),
    (declared("sigmoid(a)", "exp(k) * v", normalize="ratio"), "exponential gains of one number a head"),
    (declared("I - 0.5 * outer(v, v)"), "WY transform and chunk walk .* of the transposed state"),
    (declared("I", "taylor_features(k, 2) * v", "taylor_features(q, 2)"), "chunk walk"),
    (declared("sigmoid(av)"), "fused scan.*value decay: .* one fused scan walks them all"),
    (declared("sigmoid(ak + av)"), "fused scan"),
    (declared("sigmoid(av)", "v", "1"), "fused scan"),
    (declared("sigmoid(av) * " + DELTA), "fused scan.*tokens mix the entries of a channel"),
    (declared("I - sigmoid(av) * outer(k, k)"), "fused scan.*tokens mix the entries of a channel"),
    (declared("(I - sigmoid(av) * outer(k, k)) @ (I - outer(l, l))"), "not on triton: .* erase alike in all channels"),
    (declared("I - 0.5 * outer(k, k) - 0.5 * outer(l, l)"), "^WY transform and chunk walk of sums of corrections"),
    (declared("diag(sigmoid(ak)) + outer(k, l) - outer(l, k)"), "^generalised WY transform .* of sums of corrections"),
    (
        declared("tanh(a) * I + outer(k, l) - outer(l, k)"),
        "not on triton: beside a correction .* made of exp and sigmo",
    ),
    (declared("diag(sigmoid(ak)) @ turn(t)"), "fused scan.*tokens mix the entries of a channel"),
    (declared("turn(t) @ diag(sigmoid(ak))"), "not on triton: turns beside a decay that differs within a pair"),
    (declared("sigmoid(a)", window="7"), "not on triton: .* a window of a finite state runs on torch"),
    (declared("sigmoid(a)", **SOFTMAX), "attention by tiles"),
    (declared("I", **SOFTMAX, window="7"), "attention by tiles"),
    (declared("I", **SOFTMAX), "not on triton: plain softmax attention is torch's fused attention"),
    (mixers.mesanet, "conjugate gradients in one launch, at most 30 steps; chunk walk"),
]


@pytest.mark.parametrize("r, words", ON_KERNELS, ids=lambda x: x.spec.structure if hasattr(x, "spec") else "")
def test_gpu_calls_run_where_the_page_of_forms_says(r, words):
    """And what backend="triton" refuses is why a call is left to torch."""
    sizes = {"T": 256, "N": 16, "P": 16, "dtype": torch.bfloat16, "device": "cuda"}
    plan = r.plan(**sizes)
    assert re.search(words, f"{plan.kernel} {plan.reason}"), plan
    reason = plan.reason.partition("not on triton: ")[2]
    assert (plan.backend == "torch") == bool(reason)
    if reason:
        with pytest.raises(FormError, match=re.escape(reason.removesuffix("; turned inputs are made first"))):
            r.plan(**sizes, backend="triton")
    else:
        assert r.plan(**sizes, backend="triton").kernel == plan.kernel


@pytest.mark.parametrize("tokens", [1, SHORT, 300])
def test_attention_and_windows_take_blocks_of_queries_at_every_length(tokens):
    @dsf.recurrence
    def windowed(q: Key, k: Key, v: Value):
        return dsf.System(A=0.9, B=k * v, C=q, window=5)

    for r in (windowed, mixers.fox, mixers.sink_attention):
        plan = r.plan(T=tokens, N=16, P=16)
        assert (plan.form, plan.kernel) == ("chunk", "blocks of queries")


@ALL
def test_an_asked_form_is_honoured(recurrence):
    for form in recurrence.forms:
        plan = recurrence.plan(form=form, backend="torch")
        assert (plan.form, plan.backend) == (form, "torch")
        assert plan.reason == f"form={form!r} was asked for"
    assert recurrence.plan().forms == recurrence.forms


def test_all_structures_have_every_form_but_softmax_no_scan():
    assert {r.forms for r in structures.FINITE} == {FORMS}
    assert structures.softmax.forms == ("naive", "recurrent", "chunk", "kernel")
    with pytest.raises(FormError, match=r"softmax: .* has no scan form"):
        structures.softmax.plan(form="scan")


@ALL
@pytest.mark.parametrize("axis", ["B", "T", "H", "N", "P"])
def test_costs_grow_with_every_size(recurrence, axis):
    sizes = {"B": 2, "T": 64, "H": 2, "N": 8, "P": 8}
    for form in recurrence.forms:
        plans = [recurrence.plan(**(sizes | {axis: sizes[axis] * factor}), form=form) for factor in (1, 2, 4)]
        has_axis = axis != "N" or recurrence.spec.has_key
        for cost in ("flops", "bytes"):
            small, middle, large = (getattr(p, cost) for p in plans)
            assert (0 < small < middle < large) if has_axis else small == middle == large, (form, cost)


def held_bytes(state):
    """Bytes of a state's tensors, lengths of a cache left out."""
    parts = [state.k, state.v, state.bias, state.angle] if isinstance(state, dsf.KVCache) else [state]
    return sum(x.numel() * x.element_size() for x in parts if x is not None)


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_state_shape_and_bytes_are_those_of_the_state(recurrence, dtype):
    inputs = structures.sample(recurrence, T=9, dtype=dtype)
    plan = recurrence.plan(**inputs)
    _, state = recurrence(**inputs, return_state=True)
    assert plan.state_bytes == held_bytes(state)
    if isinstance(state, torch.Tensor):
        assert plan.state_shape == tuple(state.shape)
        assert plan.state_shape[2:] == recurrence.state_shape(N=recurrence.spec.keys_of(3), P=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_a_cache_counts_biases_and_angles_in_the_states_dtype(dtype, by_pair, window):
    def turned(q: Key, k: Key, v: Value, f: Scalar, th: Pair if by_pair else Scalar) -> System:
        return System(sigmoid(f) * turn(th), exp_features(k) * v, exp_features(q), normalize=ratio, window=window)

    recurrence = dsf.recurrence(turned)
    inputs = structures.sample(recurrence, T=9, N=4, dtype=dtype)
    _, cache = recurrence(**inputs, return_state=True)
    assert cache.bias is not None and cache.angle is not None
    assert recurrence.plan(**inputs).state_bytes == held_bytes(cache)


def test_a_cache_counts_the_heads_it_keeps():
    q, k, v = torch.randn(1, 7, 6, 3), torch.randn(1, 7, 2, 3), torch.randn(1, 7, 3, 2)
    plan = structures.softmax.plan(q, k, v)
    _, cache = structures.softmax(q, k, v, return_state=True)
    assert plan.state_bytes == 4 * (cache.k.numel() + cache.v.numel()) == 4 * 7 * (2 * 3 + 3 * 2)
    assert plan.bytes == 4 * (q.numel() + k.numel() + v.numel() + 7 * 6 * 2)


def test_a_plan_of_tensors_is_the_plan_of_their_sizes():
    inputs = structures.sample(structures.gated_delta, B=2, T=40, H=3, N=5, P=7, dtype=torch.float32)
    assert structures.gated_delta.plan(**inputs) == structures.gated_delta.plan(B=2, T=40, H=3, N=5, P=7)


@ALL
def test_a_plan_is_immutable_and_prints_what_it_holds(recurrence):
    for form in recurrence.forms:
        plan = recurrence.plan(B=1, T=2048, H=2, N=64, P=32, form=form)
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.form = "scan"
        held = [plan.recurrence, plan.structure, *plan.forms, plan.form, plan.backend, plan.kernel, plan.reason]
        held += [str(list(plan.state_shape)), *(f"{n:,}" for n in (plan.state_bytes, plan.flops, plan.bytes))]
        assert [x for x in held if not re.search(rf"(?<![\d,]){re.escape(x)}(?!,?\d)", str(plan))] == []


PLAIN = [r for r in structures.ALL if "\n  y = " not in str(r) and r is not structures.softmax]


@pytest.mark.parametrize("recurrence", PLAIN, ids=lambda r: r.name)
def test_what_a_recurrence_prints_declares_it_again(recurrence):
    """But for quotients, whose rule is a function that prints as what it returns."""
    signature, *lines = str(recurrence).splitlines()
    found = dict(line.strip().partition(" = ")[::2] for line in lines if " = " in line)
    steps = ["", *(f" [{i}]" for i in range(1, 9))]
    systems = [f"A={found[f'A{i}']}, B={found[f'B{i}']}" for i in steps if f"A{i}" in found]
    read = "before" if "  read before the update" in lines else "after"
    systems[-1] += f", C={found['C']}, D={found['D']}, read={read!r}"
    body = f"    return dsf.compose({', '.join(f'System({x})' for x in systems)})"
    names = {name: getattr(dsf, name) for name in dsf.__all__} | {"dsf": dsf}
    exec(f"def {signature}:\n{body}", names)
    again = dsf.recurrence(names[recurrence.name])
    inputs = structures.sample(recurrence, T=9)
    assert str(again) == str(recurrence) and torch.equal(again(**inputs), recurrence(**inputs))


def test_the_plan_says_why_a_cuda_call_stays_on_torch():
    recurrence = declared("turn(t) @ diag(sigmoid(ak))")
    plan = recurrence.plan(T=100, device="cuda", dtype=torch.bfloat16)
    assert plan.backend == "torch" and "not on triton: " in plan.reason
    assert "not on triton" not in recurrence.plan(T=100).reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("sizes", [{}, {"N": 16, "P": 4096}, {"T": 1}], ids=str)
def test_every_mixer_has_a_plan_for_a_gpu_that_is_not_there(sizes):
    for entry in mixers.ZOO:
        assert entry.recurrence.plan(device="cuda", **sizes).reason


def test_reasons_and_refusals_name_what_the_declaration_has():
    """Long sums of corrections, Taylor features decoded, solves: why, in the words of the declaration."""
    from dsf import I, Key, Steps, System, Value, outer, taylor_features

    @dsf.recurrence
    def nine(q: Key, k: Steps[Key, 9], v: Value):
        erased = outer(k[0], k[0])
        for i in range(1, 9):
            erased = erased + outer(k[i], k[i])
        return System(A=I - 0.1 * erased, B=k[0] * v, C=q)

    @dsf.recurrence
    def based(q: Key, k: Key, v: Value):
        return System(A=I, B=taylor_features(k, 2) * v, C=taylor_features(q, 2))

    device = {"device": "cuda", "backend": "triton"}
    message = "nine: .* the matrix kernels take a step of at most 8 corrections, and products in B, that are summed"
    with pytest.raises(dsf.FormError, match=message):
        nine.plan(**device)
    with pytest.raises(dsf.FormError, match="on torch only: no printed kernel evaluates Taylor features"):
        based.plan(T=1, N=8, P=8, form="recurrent", **device)
    assert nine.plan().kernel == "WY chunks"
    assert mixers.get("mesanet").recurrence.plan().reason == "all tokens' readouts are solved for at once"


def test_inputs_may_have_the_names_of_sizes_and_of_methods_first_argument():
    @dsf.recurrence
    def named(self: dsf.Key, N: dsf.Key, T: dsf.Value):
        return dsf.System(A=0.9, B=N * T, C=self)

    keys, values = torch.ones(1, 20, 2, 4), torch.ones(1, 20, 2, 3)
    given = {"self": keys, "N": keys, "T": values}
    assert named.plan(**given).state_shape == (1, 2, 4, 3)
    assert named.trajectory(**given).tokens == 20
    assert torch.equal(named(**given), named(keys, keys, values))
