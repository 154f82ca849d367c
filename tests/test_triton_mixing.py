"""Scans that mix the entries of a channel, and heads of one channel as channels, in Triton's interpreter."""

import pytest
import torch
from interpreted import interpreted
from scan_family import (
    MIXING,
    aligned,
    channels,
    erasing_while_turning,
    leaning_channels,
    signed_keys,
    turning_unequally,
)  # fmt: skip

import dsf
from dsf.mixers.longhorn import longhorn_exact
from dsf.mixers.s6 import s6, s6_complex

TOLERANCE = 2e-5
SCANNED = "fused scan"


def draw(recurrence, batch=1, tokens=19, heads=2, n=6, p=34, keys=None):
    """Random inputs; keys: heads of inputs with a Key axis that are no Params."""
    sizes = {"B": batch, "T": tokens, "N": n, "N/2": n // 2, "P": p}
    found = {}
    for i in recurrence.spec.inputs:
        own = heads if keys is None or not i.kind.time or i.kind.axes != {"key"} else keys
        shape = [{**sizes, "H": own, "n": i.kind.steps}[a] for a in i.kind.layout()]
        found[i.name] = torch.randn(shape) * (1.0 if i.kind.axes != {"key"} else n**-0.5)
    if "beta" in found:
        found["beta"] = found["beta"].sigmoid()
    return found


def results(recurrence, x, state, **how):
    """y, the final state, and the gradients of a functional of both, by name."""
    x = {name: value.detach().clone().requires_grad_() for name, value in x.items()}
    start = None if state is None else state.detach().clone().requires_grad_()
    y, final = recurrence(**x, initial_state=start, return_state=True, **how)
    torch.manual_seed(5)
    weights = [torch.randn(a.shape, dtype=torch.float64).to(a.dtype) for a in (y, final)]
    leaves = x if start is None else x | {"initial_state": start}
    total = (y * weights[0]).sum() + (final * weights[1]).sum()
    found = torch.autograd.grad(total, list(leaves.values()))
    return {"y": y.detach(), "final": final.detach()} | dict(zip(leaves, found, strict=True))


def agree(ours, oracle, tolerance=TOLERANCE):
    """Every result to `tolerance` of its largest entry; y by head."""
    for name, b in oracle.items():
        parts = zip(ours[name].split(1, 2), b.split(1, 2), strict=True) if name == "y" else [(ours[name], b)]
        for mine, true in parts:
            error = (mine.double() - true).abs().max() / true.abs().max()
            assert error < tolerance, (name, float(error))


def compare(recurrence, x, state=None, tolerance=TOLERANCE, **how):
    wide = {name: value.double() for name, value in x.items()}
    start = None if state is None else state.double()
    ours = results(recurrence, x, state, backend="triton", **how)
    agree(ours, results(recurrence, wide, start, form="naive", **how), tolerance)


def random_state(recurrence, rows, heads, n, p):
    return torch.randn(rows, heads, *recurrence.state_shape(n, p))


def scanned(recurrence, x, **how):
    plan = recurrence.plan(**x, backend="triton", **how)
    return plan.scan and plan.kernel.startswith(SCANNED)


@interpreted
@pytest.mark.parametrize("n", [2, 6, 16])
@pytest.mark.parametrize("recurrence", [*MIXING, longhorn_exact], ids=lambda r: r.name)
def test_equals_the_oracle_forward_and_backward(recurrence, n):
    x = draw(recurrence, n=n)
    assert scanned(recurrence, x)
    compare(recurrence, x, random_state(recurrence, 1, 2, n, 34))


@interpreted
@pytest.mark.parametrize("n", [1, 6, 33])
def test_decays_by_key_without_a_logarithm(n):
    x = draw(signed_keys, n=n)
    assert scanned(signed_keys, x)
    compare(signed_keys, x, random_state(signed_keys, 1, 2, n, 34))
    packed = {"cu_seqlens": torch.tensor([0, 5, 5, 6, 19])}
    compare(signed_keys, x, random_state(signed_keys, 4, 2, n, 34), **packed)


@interpreted
@pytest.mark.parametrize("recurrence", [leaning_channels, longhorn_exact], ids=lambda r: r.name)
@pytest.mark.parametrize("n", [1, 5, 33])
def test_odd_numbers_of_entries(recurrence, n):
    x = draw(recurrence, batch=1, tokens=9, n=n, p=3)
    compare(recurrence, x, random_state(recurrence, 1, 2, n, 3))


@interpreted
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("recurrence", MIXING, ids=lambda r: r.name)
def test_few_tokens_and_shared_keys(recurrence, tokens):
    x = draw(recurrence, batch=2, tokens=tokens, heads=4, keys=2, n=4, p=5)
    compare(recurrence, x, random_state(recurrence, 2, 4, 4, 5))


@interpreted
@pytest.mark.parametrize("recurrence", [*MIXING, longhorn_exact], ids=lambda r: r.name)
def test_packed_sequences_and_reversed(recurrence):
    x = draw(recurrence, batch=1, tokens=13, p=7)
    packed = {"cu_seqlens": torch.tensor([0, 5, 5, 6, 13])}
    state = random_state(recurrence, 4, 2, 6, 7)
    compare(recurrence, x, state, **packed)
    compare(recurrence, x, state, reverse=True, **packed)
    compare(recurrence, x, reverse=True)


@interpreted
@pytest.mark.parametrize("recurrence", MIXING, ids=lambda r: r.name)
def test_a_sequence_that_is_not_finite_reaches_no_other(recurrence):
    x = draw(recurrence, batch=1, tokens=20, p=7)
    bounds = torch.tensor([0, 9, 20])
    clean = recurrence(**x, backend="triton", cu_seqlens=bounds)
    broken = {name: value.clone() for name, value in x.items()}
    broken["v"][:, 4] = float("nan")
    found = recurrence(**broken, backend="triton", cu_seqlens=bounds)
    assert found[:, 4:9].isnan().any()
    assert torch.equal(found[:, 9:], clean[:, 9:])


@interpreted
def test_the_third_call_aliased_inputs_and_strides():
    x = draw(turning_unequally, n=6, p=6)
    key = torch.randn(1, 2, 19, 6).transpose(1, 2)
    x |= {"q": key, "k": key}
    ours = [results(turning_unequally, x, None, backend="triton") for _ in range(3)]
    wide = {name: value.double() for name, value in x.items()}
    for found in ours:
        agree(found, results(turning_unequally, wide, None, form="naive"))
    leaf = key.clone().requires_grad_()
    turning_unequally(**x | {"q": leaf, "k": leaf}, backend="triton").square().sum().backward()
    true = key.double().requires_grad_()
    turning_unequally(**wide | {"q": true, "k": true}, form="naive").square().sum().backward()
    assert leaf.grad is not None and true.grad is not None
    assert (leaf.grad - true.grad).abs().max() < TOLERANCE * true.grad.abs().max()


@interpreted
@pytest.mark.parametrize("recurrence", [*MIXING, longhorn_exact], ids=lambda r: r.name)
def test_half_precision(recurrence):
    x = {name: value.bfloat16().float() for name, value in draw(recurrence).items()}
    half = {name: value.bfloat16() for name, value in x.items()}
    oracle = results(recurrence, {name: value.double() for name, value in x.items()}, None, form="naive")
    ours = results(recurrence, half, None, backend="triton")
    agree({name: value.float() for name, value in ours.items()}, oracle, 1e-2)


@interpreted
def test_the_laws():
    laws = ("causality", "split", "parallel")
    report = dsf.check(erasing_while_turning, backend="triton", examples=1, tokens=5, laws=laws)
    assert report.ok, str(report)


# ---- heads of one channel ----


@interpreted
def test_values_that_heads_of_one_channel_share():
    x = of_heads(turning_unequally, heads=6)
    x |= {"v": torch.randn(1, 19, 1, 1), "g": torch.randn(1, 19, 3, 6)}
    compare(turning_unequally, x, random_state(turning_unequally, 1, 6, 6, 1))


def of_heads(recurrence, heads=34, **sizes):
    return draw(recurrence, heads=heads, p=1, **sizes)


@interpreted
@pytest.mark.parametrize("keys", [1, 17, 34])
@pytest.mark.parametrize("recurrence", [s6_complex, aligned, channels, s6, erasing_while_turning], ids=lambda r: r.name)
def test_heads_as_channels_equal_the_oracle(recurrence, keys):
    x = of_heads(recurrence, keys=keys)
    assert "of heads as channels" in recurrence.plan(**x, backend="triton").kernel
    compare(recurrence, x, random_state(recurrence, 1, 34, 6, 1))


@interpreted
def test_heads_as_channels_packed_and_reversed():
    for recurrence in (s6_complex, s6):
        x = of_heads(recurrence, batch=1, tokens=13, keys=1)
        state = random_state(recurrence, 3, 34, 6, 1)
        packed = {"cu_seqlens": torch.tensor([0, 5, 6, 13])}
        compare(recurrence, x, state, **packed)
        compare(recurrence, x, state, reverse=True, **packed)


@interpreted
def test_a_complex_layer_trains_and_decodes_as_it_is_declared():
    layer = dsf.mixers.S6(16, d_state=4, complex=True)
    u = torch.randn(2, 9, 16)
    whole, _ = layer(u)
    state, parts = None, []
    for piece in u.split([4, 1, 4], 1):
        y, state = layer(piece, state)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
