"""The calls that benchmarks/sanitize.py makes: every kernel and direction at odd sizes, beside float64.

`reached` says which kernels they launch, without a GPU and without running any.
"""

import ast
import contextlib
import importlib
import inspect
import os
import pkgutil
from dataclasses import dataclass, replace
from typing import Any

import torch
from sanitize_layers import LAYERS

from dsf.checking.measure import TOLERANCE
from dsf.fuzz import Case, Declaration, attempt
from dsf.fuzz.grammar import KNOWN
from dsf.language.expr import KEY
from dsf.mixers import get
from dsf.triton.across import LEAST, covers

DTYPES = ("float32", "bfloat16")


def declared(a, b, c="q", d="0", **more):
    return Declaration("own", ((a, b),), c, d, **more).build


def mixer(name):
    return lambda: get(name).recurrence


# kernels of chunks, by structure, then fused scans and attention
SUBJECTS = {
    "identity": mixer("unnormalized_linear_attention"), "constant-decay": mixer("retnet"), "scalar-decay": mixer("ssd"),
    "key-decay": mixer("gla"), "read-before": mixer("rwkv6"), "delta": mixer("deltanet"),
    "gated-delta": mixer("gated_deltanet"), "kda": mixer("kda"), "rank-one": mixer("rwkv7"),
    "undecayed-delta": declared("sigmoid(s) * I - sigmoid(b) * outer(k, k)", "k * (sigmoid(b) * v)"),
    "key-delta-apart": declared(
        "(I - sigmoid(b) * outer(k, sigmoid(l) * k)) @ diag(sigmoid(sk))", "k * (sigmoid(b) * v)"
    ),
    "summed-deltas": declared(
        "sigmoid(s) * (I - sigmoid(b) * outer(k, k) - 0.5 * outer(l, l))", "k * (sigmoid(b) * v) + l * x", d="pv * v"
    ),
    "summed-key-deltas": declared(
        "(I - sigmoid(b) * outer(k, k) - 0.5 * outer(l, l)) @ diag(sigmoid(sk))", "k * (sigmoid(b) * v)"
    ),
    "summed-rows": declared("diag(sigmoid(sk)) - sigmoid(b) * outer(k, k) + 0.5 * outer(l, sigmoid(k) * l)", "k * v"),
    "micro-steps": mixer("delta_product"), "gated-micro-steps": mixer("gated_delta_product"),
    "turned": mixer("mamba3"), "turned-rows": mixer("mamba3_mimo"),
    "turned-biased": declared("sigmoid(s) * turn(th)", "(k + pk) * v", "pk + q"),
    "turned-delta": declared("sigmoid(s) * (I - sigmoid(b) * outer(k, k)) @ turn(th)", "k * (sigmoid(b) * v)"),
    "normalised": mixer("linear_attention"), "exponential-gate": mixer("mlstm"),
    "gated-read": declared("sigmoid(s)", "k * v", "q * sigmoid(o)", "pv * v"),
    "s6": mixer("s6"), "longhorn": mixer("longhorn"), "dots": KNOWN.build, "vector": mixer("qlstm"),
    "vector-where": mixer("rg_lru"), "vector-normalised": mixer("rwkv4"),
    "value-decay": declared("sigmoid(sv)", "k * v", d="pv * v"),
    "dense-write": declared("sigmoid(sk)", "sigmoid(k * v + pkv) * v"),
    "scan-read-before": declared("exp(-softplus(sk) * sigmoid(sv))", "k * v", d="dot(q, pk * k) * v", read="before"),
    "scan-normalised": declared("exp(-softplus(pk) * sigmoid(sv))", "sigmoid(k) * v", "sigmoid(q)", rule="dsf.ratio"),
    "prologue": declared("exp(-softplus(dot(q, l2norm(k)) + pk) * sigmoid(sv))", "softplus(s) * l2norm(k) * v"),
    "scan-turned": declared("diag(sigmoid(sk)) @ turn(th)", "k * v", d="pv * v"),
    "scan-corrections": declared("diag(sigmoid(sk)) - sigmoid(sv) * outer(l2norm(k), l2norm(k))", "k * v"),
    "scan-micro-steps": Declaration(
        "own", (("sigmoid(gv[0] + gk[0])", "ks[0] * vs[0]"), ("sigmoid(gv[1])", "ks[1] * vs[1]")), "q"
    ).build,
    "solve": mixer("mesanet"), "attention": mixer("fox"),
    "attention-window": declared("0.9", "exp_features(l2norm(k)) * v", "exp_features(q)", rule="dsf.ratio", window=16),
    "attention-turned": declared(
        "turn(th)", "exp_features(k) * v", "exp_features(N**-0.5 * q)",
        rule="lambda num, den, one: num / (den + exp(ps) * one)",
    ),
}  # fmt: skip


NAMES = [*SUBJECTS, *LAYERS]


# ---- calls of recurrences ----


@contextlib.contextmanager
def walked(how):
    """Choices that short sequences never meet.

    "cut": T in segments, as few sequences are on an idle GPU; "full": as on a full one, heads that share keys in one
    program, and backward passes in stretches of T.
    """
    if not how:
        yield
        return
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.chunk import matrix
    from dsf.kernels.triton.scan import launches, maximum

    other = {
        "cut": (
            (matrix, "segments", lambda *_: 2), (matrix, "finer", lambda span: min(span, 2)),
            *((of, "segments", lambda tokens, _, tile, __: (-(-tokens // tile.chunk), tile.chunk))
              for of in (launches, maximum)),
        ),
        "full": (
            (matrix, "sharing", lambda heads, *_: 2 if heads % 2 == 0 else 1),
            (matrix, "stretches", lambda chunks, most, delta=False: max(1, min(most, chunks))),
        ),
    }[how]  # fmt: skip
    before = [(place, name, getattr(place, name)) for place, name, _ in other]
    operators.forget()
    try:
        for place, name, function in other:
            setattr(place, name, function)
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)
        operators.forget()


@dataclass(frozen=True)
class Call:
    """A case, and how kernels walk it."""

    case: Case
    how: str = ""


def cases(dtype):
    """Odd sizes, every direction: whole and packed sequences, shared keys, gradients, first states, one token."""
    sizes = {"heads": 3, "n": 24, "p": 40, "dtype": dtype}
    few = {"q": 2, "k": 2, "b": 2, "c": 2}  # of four heads, where these are keys
    small = {"dy": "expanded-tokens", "k": "late", "v": "transposed"}
    return {
        "shared": Call(Case(tokens=131, initial=True, groups=few, **sizes | {"heads": 4}), "full"),
        "segments": Call(Case(tokens=131, **sizes), "cut"),
        "packed": Call(Case(tokens=37, lengths=(5, 1, 31), initial=True, **sizes)),
        "small": Call(Case(tokens=33, batch=2, heads=1, n=3, p=5, dtype=dtype, loss="y", layouts=small)),
        "step": Call(Case(tokens=3, batch=2, step=True, loss="", initial=True, **sizes)),
    }


def cases_of(recurrence, dtype):
    """The cases that a recurrence has: with its inputs, an even N for turns, without attention's caches (torch's).

    Decays by channel have as many keys as chunks are chosen for, in bfloat16; in float32 they are scanned.
    """
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time and KEY in i.kind.axes}
    given, found = {i.name for i in recurrence.spec.inputs} | {"dy"}, {}
    for kind, call in cases(dtype).items():
        case = call.case
        if case.step and (recurrence.spec.is_attention or recurrence.spec.system.solve is not None):
            continue
        case = replace(case, initial=case.initial and not recurrence.spec.is_attention)
        groups = {n: count for n, count in case.groups.items() if n in timed}
        case = replace(case.without(set(case.layouts) - given), groups=groups)
        if covers(recurrence.spec) and kind != "small":
            case = replace(case, n=2 * LEAST)
        found[kind] = replace(call, case=replace(case, n=case.n + case.n % 2) if recurrence.spec.turns else case)
    return found


def called(calls, inputs):
    """The results of calls, and the gradients of their inputs, by name."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    found = calls(*leaves)
    total = sum(y.double().square().sum() for y in found.values() if y.requires_grad)
    if torch.is_tensor(total):
        total.backward()
        found |= {f"gradient {i}": torch.zeros_like(x) if x.grad is None else x.grad for i, x in enumerate(leaves)}
    return found


def layer(name, dtype, device):
    """The calls of a name of LAYERS beside torch's in float64; True where all are right."""
    torch.manual_seed(0)
    calls, inputs = LAYERS[name](dtype)
    exact, found, right = called(calls, [x.double() for x in inputs]), called(calls, [x.to(device) for x in inputs]), 0
    for key, y in found.items():
        true = exact[key].detach()
        error = float((y.detach().double().cpu() - true).norm() / true.norm().clamp(min=1e-30))
        print(f"{name} {dtype} {key}: off by {error:.1e}", flush=True)
        right += error < TOLERANCE[dtype]
    return right == len(found)


def one(name, dtype, device):
    """The calls of a name; True where all are right."""
    if name in LAYERS:
        return layer(name, dtype, device)
    recurrence, right = SUBJECTS[name](), True
    for kind, call in cases_of(recurrence, dtype).items():
        with walked(call.how):
            verdict = attempt(recurrence, call.case, device, poison=False)
        print(f"{name} {dtype} {kind}: {verdict}", flush=True)
        right = right and verdict.status != "wrong"
    return right


# ---- which kernels they launch ----


def launched():
    """(the names of all kernels that host code launches, expressions for kernels that this function cannot read)."""
    import dsf.kernels.triton as home
    from dsf.kernels.triton.launch import launch

    found, unread = set(), set()
    for known in pkgutil.walk_packages(home.__path__, f"{home.__name__}."):
        module = importlib.import_module(known.name)
        tree = ast.parse(inspect.getsource(module))
        for call in (x for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)):
            if getattr(module, call.func.id, None) is not launch or not call.args:
                continue
            kernels = _kernels(module, tree, call.args[0])
            found |= kernels
            unread |= set() if kernels else {f"{known.name}: {ast.unparse(call.args[0])}"}
    return found, unread


def _kernels(module, tree, x):
    """The kernels that an expression, or what is assigned to a name, names."""
    names = {n.id for n in ast.walk(x) if isinstance(n, ast.Name)}
    if not any(_is_kernel(getattr(module, n, None)) for n in names):
        for given in ast.walk(tree):
            targets = given.targets if isinstance(given, ast.Assign) else [getattr(given, "target", None)]
            bound = {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}
            if isinstance(given, (ast.Assign, ast.For)) and bound & names:
                value = given.value if isinstance(given, ast.Assign) else given.iter
                names |= {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    return {getattr(module, n).__name__ for n in names if _is_kernel(getattr(module, n, None))}


def _is_kernel(x):
    return hasattr(x, "fn") and hasattr(x, "__name__") and hasattr(x, "__getitem__")


class _Enough(Exception):
    """The calls of a case were made; what they give is not asked for."""


class _Unasked:
    """In place of what is expected of a call."""

    def is_usable(self, dtype: str) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise _Enough


def reached(names=NAMES, dtypes=DTYPES[1:]):
    """Kernel -> the names whose calls launch it. In Triton's interpreter, where launches are noted and not run."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before Triton is imported"
    from dsf.call import long
    from dsf.fuzz import judge
    from dsf.kernels.triton import operators
    from dsf.kernels.triton.schedule import Book
    from dsf.triton import convolve

    found: dict[str, set[str]] = {}
    now = [""]

    def note(self: Any, kernel: Any, *_: Any) -> None:
        found.setdefault(kernel.__name__, set()).add(now[0])

    def zeros(*given: Any, **how: Any) -> Any:  # no kernel fills the tables of packed sequences, either
        return empty(*given, **how).zero_()

    def unasked(recurrence: Any, case: Case, *rest: Any) -> Any:
        return truths(recurrence, case, *rest) if recurrence.spec.is_attention else [_Unasked()]

    def on_kernels(x: torch.Tensor) -> bool:  # the operators of convolutions ask for a GPU
        return x.dtype != torch.float64

    real, truths, empty, asked = Book.launch, judge.truths, torch.empty_strided, convolve.on_kernels
    operators.forget()
    Book.launch, judge.truths, torch.empty_strided = note, unasked, zeros
    long.on_kernels = convolve.on_kernels = on_kernels
    try:
        for name in names:
            now[0] = name
            for dtype in dtypes:
                if name in LAYERS:
                    called(*LAYERS[name](dtype))
                    continue
                recurrence = SUBJECTS[name]()
                for case in cases_of(recurrence, dtype).values():
                    with contextlib.suppress(_Enough), walked(case.how):
                        attempt(recurrence, case.case, "cpu", poison=False)
    finally:
        Book.launch, judge.truths, torch.empty_strided = real, truths, empty
        long.on_kernels = convolve.on_kernels = asked
        operators.forget()  # schedules without launches
    return found
