"""Time-invariant declarations that run as one operator on a GPU (dsf.triton.convolve, or given), and inputs of them."""

import torch
from test_invariant import blocks, complex_bank, driven_entries, rank_one, sample, taps, two_steps

import dsf
from dsf import (
    Key,
    Pair,
    Param,
    Scalar,
    System,
    Value,
    diag,
    exp,
    expm1,
    l2norm,
    log,
    mixers,
    outer,
    prev,
    sigmoid,
    softplus,
    turn,
    zoh,
)
from dsf.language.functions import abs as absolute
from dsf.language.functions import complement, cos, log1p, logsigmoid, maximum, minimum, rsqrt, sin, sqrt, where


@dsf.recurrence
def gated_bank(x: Value, z: Value, g: Value, dt: Param[Value], a: Param[Key, Value], C: Param[Key], D: Param[Value]):
    """Channels with steps of their own, a drive of two inputs, a gate, and the state before the update."""
    step = zoh(-exp(a), 0.5, exp(dt))
    return System(A=step.A, B=step.B * (x * sigmoid(z)), C=C * g, D=D * (x + z), read="before")


@dsf.recurrence
def entries(u: Key, a: Param[Key], B: Param[Key], C: Param[Key, Value]):
    """An input for every entry of a state that does not turn."""
    return System(A=exp(-exp(a)), B=B * u, C=C)


@dsf.recurrence
def every_function(x: Value, a: Param[Key], w: Param[Pair], B: Param[Key], C: Param[Key]):
    """All that is printed in float64, two factors of A and a B of two terms."""
    decay = (
        diag(sigmoid(w)) @ diag(exp(logsigmoid(w) - softplus(w) - absolute(w) - 0.01)) @ turn(sin(w) / rsqrt(w**2 + 1))
    )
    read = sqrt(C * C + 1) * maximum(minimum(C, 0.9), -0.9) + where(C > 0, complement(C), log(2 + expm1(C)))
    write = log1p(B**2) / (1 + B**4) + cos(B) * (B * B + 0.1) ** 0.5 - (B * B + 0.1) ** -1.5
    turned = decay @ turn(sin(w) / rsqrt(w**2 + 1))
    return System(A=turned, B=write * x + 0.5 * a * x, C=read)


@dsf.recurrence
def half_read(x: Value, a: Param[Scalar], w: Param[Scalar], B: Param[Key]):
    """The first entry of a pair alone is read, and the write does not depend on the second one."""
    return System(A=exp(-exp(a)) * turn(w), B=dsf.pair(1.0, 0.0) * x, C=dsf.pair(1.0, 0.0) * B)


@dsf.recurrence
def still_pairs(x: Value, a: Param[Pair], B: Param[Key], C: Param[Key]):
    """Pairs that do not turn, but are written and read as pairs, by constants that float32 does not hold."""
    number = where(a > 0, 0.1, 0.3) + maximum(a, 0.7)
    return System(A=exp(-number), B=dsf.pair(1.0, 0.5) * B * x, C=dsf.quarter_turn(C))


@dsf.recurrence
def uneven(x: Value, a: Param[Key], B: Param[Key], C: Param[Key]):
    """Pairs in B beside decays that differ within them: not printed."""
    return System(A=exp(-exp(a)), B=dsf.pair(1.0, 0.5) * B * x, C=C)


@dsf.recurrence
def spread_drive(u: Pair, a: Param[Key], C: Param[Key]):
    """One input for two entries: not printed."""
    return System(A=exp(-exp(a)), B=u, C=C)


@dsf.recurrence
def corrected(
    x: Value, z: Value, g: Value, a: Param[Key], v: Param[Key, Value], w: Param[Pair], B: Param[Key], C: Param[Key],
    D: Param[Value],
):  # fmt: skip
    """A correction and turns, a drive of two inputs that is written twice, a gate, and the state before the update."""
    drive = x * sigmoid(z)
    A = (diag(sigmoid(a)) + 0.2 * outer(l2norm(v), l2norm(B))) @ turn(w)
    return System(A=A, B=B * drive - 0.5 * a * drive, C=C * g, D=D * (x + z), read="before")


@dsf.recurrence
def corrected_shift(x: Scalar, a: Param[Key], B: Param[Key], C: Param[Key, Value]):
    """One number a head drives all channels, and the one before it."""
    return System(A=diag(sigmoid(a)) - 0.2 * outer(l2norm(B), l2norm(B)), B=B * prev(x), C=C)


OWN = [still_pairs, gated_bank, entries, every_function, half_read, complex_bank, driven_entries]
PRINTED = [mixers.s4d, mixers.s4d_real, mixers.dss, mixers.lru, mixers.s5, mixers.h3, *OWN]
BY_FILTERS = [blocks, rank_one, two_steps, taps, uneven, spread_drive, corrected, corrected_shift, mixers.s4]
TILE = 64  # tokens that are compared as one
SIZES = {"lru": {"N": 2, "P": 2}, "s5": {"N": 2, "P": 2}, "s4d": {"P": 1}, "dss": {"P": 1}, "h3": {"P": 1}}


def drawn(r, dtype=torch.float32, **sizes):
    """Inputs of a recurrence, of rates that decay."""
    found = sample(r, dtype=torch.float32, **{**SIZES.get(r.name, {}), **sizes})
    for name in ("dt", "log_step"):
        if name in found:
            found[name] -= 3
    if "Lambda_re" in found:
        found["Lambda_re"] = -found["Lambda_re"].abs() - 0.1
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    return {name: x.to(dtype) if name in timed else x for name, x in found.items()}


def results(r, inputs, form, **options):
    """y, and its gradients in every input."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = r(**leaves, form=form, **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).cos().bfloat16().to(y).view_as(y)
    found = torch.autograd.grad((y * weights).sum(), [*leaves.values()], materialize_grads=True)
    return {"y": y.detach(), **dict(zip(leaves, found, strict=True))}


def compare(r, inputs, got, expected, error, plain=None):
    """Each head, and of tokens each block.

    plain: results of torch's operators in the same precision. A Param's gradient is one sum over all tokens, which errs
    by what its terms cancel: it may err twice as much as the worst head of `plain`, where that is more than `error`.
    """
    timed = {"y", *(i.name for i in r.spec.inputs if i.kind.time)}
    for name, b in expected.items():
        a = got[name].double()
        assert a.shape == b.shape
        heads = [x.unbind(2 if name in timed else 0) for x in (a, b)]
        least = max(1e-6, *(0.1 * x.norm() for x in heads[1]))  # sums that nearly cancel err by what they cancel
        own = 0.0
        if plain is not None and name not in timed:
            own = 2 * max((x - truth).norm() for x, truth in zip(plain[name].double(), heads[1], strict=True))
        for head, truth in zip(*heads, strict=True):
            pieces = (head.split(TILE, 1), truth.split(TILE, 1)) if name in timed else ((head,), (truth,))
            for found, exact in zip(*pieces, strict=True):
                assert (found - exact).norm() <= max(error * max(exact.norm(), least), own), name
