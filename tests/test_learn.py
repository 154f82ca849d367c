"""dsf.learn: systems from losses, beside the same steps by autograd's Hessian; the zoo's objectives; refusals."""

import decimal
import math

import pytest
import torch
from mixer_inputs import sample
from torch.autograd.functional import hessian

import dsf
from dsf import (
    Key,
    Memory,
    Param,
    Scalar,
    System,
    Value,
    diag,
    exp,
    inner,
    learn,
    mixers,
    norm2,
    sigmoid,
    softplus,
)
from dsf.checking.examples import Example
from dsf.checking.laws import LAWS
from dsf.checking.measure import Subject
from dsf.checking.ranges import ranges_of
from dsf.mixers.objectives import LEARNT, OTHERWISE

S = Memory()
RULES = ["hebb", "gradient", "implicit", "flow"]


def square(key, v):
    return 0.5 * norm2(S.T @ key - v)


# Losses in the language, and of a tensor S [N, P]; inputs k, l [N], v, x, w [P], a, b numbers.
LOSSES = {
    "square": (lambda k, l, v, x, w, a: square(k, v), lambda M, k, l, v, x, w, a: 0.5 * (M.T @ k - v).square().sum()),
    "one a channel": (
        lambda k, l, v, x, w, a: 0.5 * inner(sigmoid(w) * (S.T @ k - v), S.T @ k - v),
        lambda M, k, l, v, x, w, a: 0.5 * (w.sigmoid() * (M.T @ k - v).square()).sum(),
    ),
    "and weight decay": (
        lambda k, l, v, x, w, a: 2 * square(k, v) + 0.5 * sigmoid(a) * norm2(S),
        lambda M, k, l, v, x, w, a: (M.T @ k - v).square().sum() + 0.5 * a.sigmoid() * M.square().sum(),
    ),
    "rows of their own": (
        lambda k, l, v, x, w, a: square(k, v) + 0.5 * inner(sigmoid(l) * S, S),
        lambda M, k, l, v, x, w, a: (
            0.5 * (M.T @ k - v).square().sum() + 0.5 * (l.sigmoid()[:, None] * M.square()).sum()
        ),
    ),
    "rows alone": (
        lambda k, l, v, x, w, a: 0.5 * inner(sigmoid(l) * S - k * v, S) - inner(S.T @ k, x),
        lambda M, k, l, v, x, w, a: (
            0.5 * ((l.sigmoid()[:, None] * M - k[:, None] * v) * M).sum() - ((M.T @ k) * x).sum()
        ),
    ),
    "two": (
        lambda k, l, v, x, w, a: square(k, v) + sigmoid(a) * square(l, x),
        lambda M, k, l, v, x, w, a: (
            0.5 * (M.T @ k - v).square().sum() + a.sigmoid() * 0.5 * (M.T @ l - x).square().sum()
        ),
    ),
    "a square and a write elsewhere": (
        lambda k, l, v, x, w, a: 0.5 * norm2(S.T @ k) - inner(S.T @ l, v),
        lambda M, k, l, v, x, w, a: 0.5 * (M.T @ k).square().sum() - ((M.T @ l) * v).sum(),
    ),
    "one of two keys": (
        lambda k, l, v, x, w, a: 0.5 * norm2(S.T @ k - 2 * (S.T @ l) - v + x),
        lambda M, k, l, v, x, w, a: 0.5 * (M.T @ k - 2 * M.T @ l - v + x).square().sum(),
    ),
    "products of two keys": (
        lambda k, l, v, x, w, a: norm2(S.T @ k) - 1.9 * inner(S.T @ k, S.T @ l) + norm2(S.T @ l) - inner(S.T @ k, v),
        lambda M, k, l, v, x, w, a: (
            (M.T @ k).square().sum() - 1.9 * ((M.T @ k) * (M.T @ l)).sum() + (M.T @ l).square().sum()
            - ((M.T @ k) * v).sum()
        ),
    ),
    "a prediction scaled": (
        lambda k, l, v, x, w, a: 0.5 * norm2(a * (S.T @ k) - v),
        lambda M, k, l, v, x, w, a: 0.5 * (a * (M.T @ k) - v).square().sum(),
    ),
    "a prediction scaled by channel": (
        lambda k, l, v, x, w, a: 0.5 * norm2(sigmoid(w) * (S.T @ k) - v),
        lambda M, k, l, v, x, w, a: 0.5 * (w.sigmoid() * (M.T @ k) - v).square().sum(),
    ),
    "two targets of one key, and a write": (
        lambda k, l, v, x, w, a: square(k, v) + sigmoid(a) * norm2(S.T @ k - x) - inner(S.T @ k, w),
        lambda M, k, l, v, x, w, a: (
            0.5 * (M.T @ k - v).square().sum() + a.sigmoid() * (M.T @ k - x).square().sum() - ((M.T @ k) * w).sum()
        ),
    ),
    "a write of its own weight": (
        lambda k, l, v, x, w, a: norm2((S.T @ k - v) / (1 + sigmoid(a))) - 0.3 * inner(S.T @ k, x),
        lambda M, k, l, v, x, w, a: (
            ((M.T @ k - v) / (1 + a.sigmoid())).square().sum() - 0.3 * ((M.T @ k) * x).sum()
        ),
    ),
    "a write": (lambda k, l, v, x, w, a: -inner(S.T @ k, v), lambda M, k, l, v, x, w, a: -((M.T @ k) * v).sum()),
}  # fmt: skip
# Steps without a closed form, and the words that say it.
CLOSED = {
    ("flow", "rows of their own"): "on the rows of S together has no closed form",
    ("flow", "two"): "along k and along S.T @ l together has no closed form",
    ("flow", "products of two keys"): "has no closed form",
    ("flow", "a square and a write elsewhere"): "along k and along S.T @ l together",
}


def declared(name, by):
    @dsf.recurrence(name="learnt")
    def recurrence(q: Key, k: Key, l: Key, v: Value, x: Value, w: Param[Value], a: Scalar, b: Scalar, g: Key) -> System:
        everything = 0 * (dsf.dot(k, l) + a) * (x + w)  # so that no loss has an input too many
        loss = LOSSES[name][0](k, l, v, x, w, a)
        return learn(loss, by=by, rate=softplus(b), decay=sigmoid(g), C=q, D=everything)

    return recurrence


def by_autograd(name, by, inputs):
    """The same, one dense step after the other."""
    q, k, l, v, x, w, a, b, g = inputs
    N, P = k.shape[-1], v.shape[-1]
    M, ys = torch.zeros(N, P, dtype=torch.float64), []
    for t in range(len(q)):

        def f(z, t=t):
            return LOSSES[name][1](z.view(N, P), k[t], l[t], v[t], x[t], w, a[t])

        rate = torch.nn.functional.softplus(b[t])
        old = (g[t].sigmoid()[:, None] * M).flatten()
        zero = torch.zeros(N * P, dtype=torch.float64)
        H = hessian(f, zero)
        R = -torch.autograd.functional.jacobian(f, zero)
        eye = torch.eye(N * P, dtype=torch.float64)
        if by == "hebb":
            new = old + rate * R
        elif by == "gradient":
            new = old - rate * (H @ old - R)
        elif by == "implicit":
            new = torch.linalg.solve(eye + rate * H, old + rate * R)
        else:  # d/ds (S, 1) = [[-H, R], [0, 0]] (S, 1)
            whole = torch.zeros(N * P + 1, N * P + 1, dtype=torch.float64)
            whole[:-1, :-1], whole[:-1, -1] = -H, R
            new = (torch.linalg.matrix_exp(rate * whole) @ torch.cat([old, old.new_ones(1)]))[:-1]
        M = new.view(N, P)
        ys.append(M.T @ q[t])
    return torch.stack(ys), M


@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_what_its_rule_makes_of_the_hessian(name, by):
    if (by, name) in CLOSED:
        with pytest.raises(dsf.TraceError, match="by='flow': the flow of .*" + CLOSED[by, name]):
            declared(name, by)
        return
    recurrence = declared(name, by)
    torch.manual_seed(0)
    q, k, l, g = torch.randn(4, 1, 6, 1, 3, dtype=torch.float64)
    v, x = torch.randn(2, 1, 6, 1, 2, dtype=torch.float64)
    w, (a, b) = torch.randn(1, 2, dtype=torch.float64), torch.randn(2, 1, 6, 1, dtype=torch.float64)
    y, last = recurrence(q, k, l, v, x, w, a, b, g, return_state=True)
    own = [z[0, :, 0] for z in (q, k, l, v, x)] + [w[0]] + [z[0, :, 0] for z in (a, b, g)]
    expected, memory = by_autograd(name, by, own)
    torch.testing.assert_close(y[0, :, 0], expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(last[0, 0], memory, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("factor", ["-1", "sigmoid(a)"])
def test_reads_at_two_keys_in_one_square_are_one_correction(factor):
    """A sum of squares of k, l, k + l and k - l, some of them negative, would be the same up to its rounding errors."""

    @dsf.recurrence
    def recurrence(q: Key, k: Key, l: Key, v: Value, a: Scalar, b: Scalar) -> System:
        scale = -1 + 0 * a if factor == "-1" else sigmoid(a)
        return learn(0.5 * norm2(S.T @ k + scale * (S.T @ l) - v), by="implicit", rate=softplus(b), C=q)

    assert recurrence.spec.structure == "identity + delta"
    torch.manual_seed(0)
    q, k, l = torch.randn(3, 1, 40, 2, 4)
    v, a, b = torch.randn(1, 40, 2, 3), *(4 + torch.randn(2, 1, 40, 2))
    inputs = [x.requires_grad_() for x in (q, k, l, v, a, b)]
    results = []
    for form, given in (("naive", [x.double() for x in inputs]), ("chunk", inputs)):
        y = recurrence(*given, form=form)
        results.append([y, *torch.autograd.grad(y.sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


# ---- the zoo -------------------------------------------------------------------------------------------------------


def test_every_objective_is_executable_or_has_a_reason():
    said = {e.name for e in mixers.ZOO if e.objective and not e.recurrence.spec.is_softmax}
    assert said - LEARNT.keys() == OTHERWISE.keys()
    assert LEARNT.keys() <= {e.name for e in mixers.ZOO}


@pytest.mark.parametrize("name", LEARNT)
def test_an_objective_derives_its_member(name):
    learnt, member = LEARNT[name], mixers.get(name).recurrence
    assert learnt.spec.structure == member.spec.structure
    assert [(i.name, i.kind) for i in learnt.spec.inputs] == [(i.name, i.kind) for i in member.spec.inputs]
    given = {n: x.requires_grad_() for n, x in sample(member, tokens=70).items()}
    p = next(given[i.name].shape[-1] for i in member.spec.inputs if i.kind.axes == {"value"})

    def everything(recurrence):
        y, last = recurrence(**given, return_state=True)
        last = recurrence.true_state(last, p)
        return [y, last, *torch.autograd.grad(y.sin().sum() + last.cos().sum(), list(given.values()))]

    for a, b in zip(everything(learnt), everything(member), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_what_is_derived_is_what_a_person_would_write():
    for name in ("deltanet", "kda", "longhorn_exact", "efla", "retnet", "gla"):
        learnt, member = LEARNT[name].spec.system, mixers.get(name).recurrence.spec.system
        assert (repr(learnt.A), learnt.B) == (repr(member.A), member.B)


# ---- cells that no paper names -------------------------------------------------------------------------------------


@dsf.recurrence
def implicit_kda(q: Key, k: Key, v: Value, g: Key, beta: Scalar) -> System:
    return learn(square(k, v), by="implicit", rate=softplus(beta), decay=exp(-softplus(g)), C=q)


@dsf.recurrence
def flow_gated(q: Key, k: Key, v: Value, a: Scalar, beta: Scalar) -> System:
    return learn(square(k, v), by="flow", rate=softplus(beta), decay=sigmoid(a), C=q)


@dsf.recurrence
def ridge_flow(q: Key, k: Key, v: Value, a: Scalar, beta: Scalar) -> System:
    return learn(square(k, v) + 0.5 * softplus(a) * norm2(S), by="flow", rate=softplus(beta), C=q)


@dsf.recurrence
def two_at_once(q: Key, k: Key, v: Value, l: Key, x: Value, beta: Scalar) -> System:
    return learn(square(k, v) + square(l, x), by="implicit", rate=sigmoid(beta), C=q)


@dsf.recurrence
def turned(q: Key, k: Key, v: Value, beta: Scalar, angle: Scalar) -> System:
    return learn(square(k, v), by="implicit", rate=softplus(beta), decay=0.9 * dsf.turn(angle), C=q)


EXAMPLES = [
    Example(batch=2, tokens=11, heads=2, n=3, p=2, initial=True, cuts=(4, 9), seed=0),
    Example(tokens=11, heads=2, n=3, p=2, initial=True, cuts=(5,), seed=3),
    Example(tokens=70, heads=1, n=3, p=2, seed=4),
]


@pytest.mark.parametrize(
    "recurrence", [implicit_kda, flow_gated, ridge_flow, two_at_once, turned], ids=lambda r: r.name
)
def test_new_cells_obey_the_laws(recurrence):
    subject = Subject(recurrence, ranges_of(recurrence.spec))
    assert all(r.is_real for r in subject.ranges.values()), "any numbers keep the state bounded"
    for law in ("forms", "finite", "split", "packed", "reverse", "step", "parallel"):
        forms = {"step": ("recurrent",), "parallel": ("auto",)}.get(law, recurrence.forms[1:])
        for form in forms:
            for example in EXAMPLES if law in ("forms", "parallel") else EXAMPLES[:2]:
                broken = [m for m in LAWS[law].measure(subject, form, example) if not m.ok]
                assert not broken, (law, form, broken)


def test_a_structure_and_its_kernel_follow():
    assert implicit_kda.spec.structure == "key-diagonal decay + delta"
    assert flow_gated.spec.structure == "scalar decay + delta"
    assert two_at_once.spec.structure == "identity + low-rank"
    assert turned.spec.structure == "turned constant decay + delta"


def test_keys_of_no_length():
    given = {n: x.requires_grad_() for n, x in sample(mixers.efla, tokens=5).items()}
    with torch.no_grad():
        given["k"][:, ::2] = 0
    y = mixers.efla(**given)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), list(given.values())))
    assert "efla" not in ranges_of(mixers.efla.spec) and str(ranges_of(mixers.efla.spec)["beta"]) == "≥ 0"


@pytest.mark.parametrize("x", [0.0, 1e-300, -1e-9, 1e-5, -0.01, 0.2999, -0.3001, 0.3001, -2.0, 5.0, -50.0, -1e6, 80.0])
def test_phi1_and_its_derivative_keep_their_digits(x):
    decimal.getcontext().prec = 60
    z, number = decimal.Decimal(x), torch.tensor(x, dtype=torch.float64, requires_grad=True)
    true = (z.exp() - 1) / z if x and abs(x) > 1e-20 else decimal.Decimal(1)
    slope = (z.exp() - true) / z if x and abs(x) > 1e-20 else decimal.Decimal("0.5")
    from dsf.language.primitives import PRIMITIVES

    found = PRIMITIVES["phi1"].torch(number)
    assert math.isclose(float(found.detach()), float(true), rel_tol=1e-14)
    assert math.isclose(float(torch.autograd.grad(found, number)[0]), float(slope), rel_tol=2e-14)


# ---- what is refused -----------------------------------------------------------------------------------------------

REFUSED = [
    (lambda k, v, b: learn(norm2(S.T @ k - v) ** 2, by="gradient", C=k), r"not quadratic in S: `\(norm2\("),
    (lambda k, v, b: learn(norm2(S.T @ k) * norm2(S), by="gradient", C=k), r"\* \(norm2\(S\)\)` is of degree 4"),
    (lambda k, v, b: learn(inner(norm2(S), S.T @ k), by="gradient", C=k), "is of degree 3"),
    (lambda k, v, b: learn(dsf.exp(norm2(S.T @ k)), by="gradient", C=k), r"`norm2\(S.T @ k\)` depends on the memory S"),
    (lambda k, v, b: learn(norm2(dsf.tanh(S.T @ k)), by="gradient", C=k), "`S.T @ k` depends on the memory S, and no"),
    (lambda k, v, b: learn(norm2(v / (S.T @ k)), by="gradient", C=k), r"`v / \(S.T @ k\)` divides by"),
    (lambda k, v, b: learn(b / norm2(S), by="gradient", C=k), "divides by what depends on S"),
    (lambda k, v, b: learn((S.T @ k - v) ** 2, by="gradient", C=k), r"write norm2\(S.T @ k - v\)"),
    (lambda k, v, b: learn((S.T @ k) * (S.T @ k), by="gradient", C=k), r"sum it: inner\(S.T @ k, S.T @ k\)"),
    (lambda k, v, b: learn(S.T @ k - v, by="gradient", C=k), r"the loss `S.T @ k - v` is a vector"),
    (lambda k, v, b: learn(norm2(v), by="gradient", C=k), r"does not depend on S: write it with S = dsf.Memory\(\)"),
    (lambda k, v, b: learn(v * norm2(S.T @ k), by="gradient", C=k), r"a loss is a number, but `v` varies over Value"),
    (lambda k, v, b: learn(norm2(S.T @ v), by="gradient", C=k), "reads S at a Key, but `v` varies over Value"),
    (lambda k, v, b: learn(norm2(S @ v), by="gradient", C=k), "`S @ v` reads S along its Value axis"),
    (lambda k, v, b: learn(norm2(S.T @ k - k), by="gradient", C=k), "has no Key axis any more, but `k` has one"),
    (lambda k, v, b: learn(norm2(S.T @ k - S), by="gradient", C=k), "adds what was read of S to S itself"),
    (lambda k, v, b: learn(norm2(S.T @ k) + S.T @ k, by="gradient", C=k), "adds a vector to a number"),
    (lambda k, v, b: learn(square(k, v), by="newton", C=k), "lowered by hebb, gradient, implicit, flow, exact"),
    (lambda k, v, b: learn(square(k, v), by="exact", C=k), "by='exact' needs ridge=, positive"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=1, decay=k, C=k), "decay = .* whole losses .*: a Scalar"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=1, rate=v, C=k), "has a Value axis; one solve serves"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=exp(v), C=k), "has a Value axis; one solve serves"),
    (lambda k, v, b: learn(square(k, v) + norm2(S), by="exact", ridge=1, C=k), "give its weight on S once, as ridge="),
    (lambda k, v, b: learn(-inner(S.T @ k, v), by="exact", ridge=1, C=k), "has no square of S.T @ k"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=1, steps=0, C=k), "steps = 0 is how many"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=1, C=k, normalize=dsf.ratio), "leave normalize, drive"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=1, rate=b, C=dsf.prev(k)), "takes no turn, prev or Pair"),
    (lambda k, v, b: learn(square(k, v), by="gradient", ridge=1, C=k), r"ridge = 1 is of by='exact'"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=0, C=k), "ridge = 0 must be positive"),
    (lambda k, v, b: learn(square(k, v), by="exact", ridge=-1.0, C=k), "ridge = -1 must be positive"),
    (lambda k, v, b: learn(square(k, v), by="gradient", steps=3, C=k), "steps = 3 is of by='exact'; by='gradient'"),
    (
        lambda k, v, b: dsf.compose(System(A=b, B=0), learn(square(k, v), by="exact", ridge=1, C=k)),
        "not one of several steps of a token",
    ),
    (lambda k, v, b: learn(square(k, v), by="gradient", rate=k, C=k), "rate = k has a Key axis"),
    (lambda k, v, b: learn(square(k, v) + inner(exp(k * v) * S, S), by="implicit", C=k), "differs by entry of S"),
    (
        lambda k, v, b: learn(
            0.5 * inner(sigmoid(v) * (S.T @ k), S.T @ k) + norm2(S.T @ (b * k)), by="implicit", C=k
        ),
        "give weights of several squares no Value axis",
    ),
    (lambda k, v, b: System(A=diag(b), B=S, C=k), "B: `S` depends on the memory S"),
    (lambda k, v, b: System(A=S, B=k * v, C=k), "depends on the memory S"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "said"), REFUSED, ids=range(len(REFUSED)))
def test_a_loss_that_is_none_is_refused_with_its_term(body, said):
    with pytest.raises(dsf.TraceError, match=said) as error:

        @dsf.recurrence
        def refused(k: Key, v: Value, b: Scalar) -> System:
            return body(k, v, b)

    assert "test_learn.py:" in str(error.value)
