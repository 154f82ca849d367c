"""Declarations whose vectors kernels turn, their inputs, and what a call of them gives."""

import torch
from test_turns import rotary, spiral

import dsf
from dsf import I, Key, Pair, Param, Scalar, Steps, System, Value, compose, l2norm, outer, prev, sigmoid, turn
from dsf.mixers import mamba3, mamba3_mimo_of
from dsf.mixers.mamba3 import mamba3_biased


@dsf.recurrence
def delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, t: Pair) -> System:
    key = l2norm(k)
    return System(A=sigmoid(a) * (I - sigmoid(b) * outer(key, key)) @ turn(t), B=sigmoid(b) * key * v, C=q)


@dsf.recurrence
def one_angle(q: Key, k: Key, v: Value, a: Scalar, t: Scalar, w: Scalar) -> System:
    """All pairs turn alike, and products are written twice."""
    return compose(System(A=I, B=w * prev(k * v)), System(A=sigmoid(a) * turn(t), B=k * v, C=q))


@dsf.recurrence
def biased(q: Key, k: Key, v: Value, a: Scalar, t: Param[Pair], u: Param[Key], w: Param[Key]) -> System:
    return System(A=sigmoid(a) * turn(t), B=(k + u) * v, C=w + q)


@dsf.recurrence
def two_products(q: Key, k: Steps[Key, 2], v: Steps[Value, 2], a: Scalar, t: Pair, w: Scalar) -> System:
    """Two products a token, each written twice."""
    pairs = list(zip(k, v, strict=True))
    before = [System(A=I, B=prev(b * x) * w) for b, x in pairs]
    first, second = [b * ((1 - w) * x) for b, x in pairs]
    return compose(*before, System(A=sigmoid(a) * turn(t), B=first), System(A=I, B=second, C=q))


RECURRENCES = [rotary, spiral, delta, one_angle, biased, mamba3, mamba3_biased, two_products, mamba3_mimo_of(2)]
BOUNDS = [0, 0, 17, 18, 18, 130, 147]


def sample(r, B=2, T=147, H=2, N=32, P=16, keys=None, seed=0):
    """keys: heads of per-token Key and Pair inputs."""
    g = torch.Generator().manual_seed(seed)
    sizes, found = {"B": B, "T": T, "H": H, "N": N, "N/2": N // 2, "P": P}, {}
    for i in r.spec.inputs:
        shape = [sizes.get(axis, i.kind.steps) for axis in i.kind.layout()]
        if keys is not None and i.kind.time and (i.kind.pair or i.kind.axes == {"key"}):
            shape[2] = keys
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        found[i.name] = (0.3 * x if i.kind.pair else x).bfloat16().double()
    if "Lambda_re" in found:  # S5's rates, which must decay
        found["Lambda_re"] = -found["Lambda_re"].abs()
    return found


def outcome(r, given, dtype, start=None, calls=1, **options):
    """y, the final state, and the gradients of a fixed functional of both, of the last of some calls."""
    for _ in range(calls):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        if start is not None:
            leaves["initial_state"] = start.to(torch.float64 if dtype == torch.float64 else torch.float32)
            leaves["initial_state"].requires_grad_()
        y, state = r(**leaves, return_state=True, **options)
        g = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.device) for x in (y, state)]
        loss = (y.double() * weights[0]).sum() + (state.double() * weights[1]).sum()
        found = torch.autograd.grad(loss, list(leaves.values()))
    return {"y": y, "state": state} | dict(zip(leaves, found, strict=True))


TERMS = {"dt_bias": "dt"}  # Params whose gradient is the sum over tokens of another input's


def compare(found, expected, allowed):
    """Gradients of Params, sums over tokens of which much cancels, may err by twice as much. Where the terms are known
    head by head, by a tenth of that of their absolute sum, since the sum itself may be less than a fiftieth of it."""
    for name, want in expected.items():
        terms = expected[TERMS[name]].abs().sum((0, 1)) if name in TERMS else None
        if terms is not None and terms.shape == want.shape:
            assert ((found[name].double() - want).abs() <= 0.1 * allowed * terms).all(), name
            continue
        error = (found[name].double() - want).norm() / want.norm().clamp(min=1e-3)
        assert error < allowed * (1 if want.dim() > 2 else 2), (name, float(error))
