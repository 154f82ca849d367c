"""The grammar of random declarations: combinations of the language's terms, structure by structure.

With inputs in the ranges of dsf.checking.ranges states stay bounded: decays are at most 1, a correction is no larger
than 2. `Pick` chooses one of a list: random.Random(seed).choice, or Hypothesis'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsf.fuzz.declaration import Declaration

Pick = Callable[[Sequence[Any]], Any]

CONSTANT = ["I", "0.9", "sigmoid(ps)", "exp(-softplus(ps))"]
SCALAR = [
    "sigmoid(s)", "exp(-softplus(s))", "2 * sigmoid(s) - 1", "-sigmoid(s)", "sigmoid(s) ** 0.5", "tanh(s)",
    "where(s > 0.5, 0.0, sigmoid(s))", "exp(-exp(ps) * softplus(s))", "minimum(sigmoid(s), 0.95)",
    "1 / (1 + softplus(s))", "sigmoid(s) ** relu(b)",
]  # fmt: skip
KEYWISE = [
    "sigmoid(sk)", "exp(-softplus(sk))", "sigmoid(sk) ** 0.0625", "tanh(sk)", "sigmoid(pk)", "sigmoid(sk + s)",
    "exp(-exp(pk) * softplus(s))", "sigmoid(s) * sigmoid(sk)", "where(sk > 0, sigmoid(sk), 0.5)",
    "maximum(sigmoid(sk), 0.1)",
]  # fmt: skip
VALUEWISE = [
    "sigmoid(sv)", "exp(-softplus(sv))", "sigmoid(sv) ** relu(bv)", "exp(-exp(pv) * softplus(s))", "tanh(sv)",
    "sigmoid(s) * sigmoid(sv)", "where(sv > 0.5, 0.0, sigmoid(sv))", "minimum(sigmoid(sv), sigmoid(pv))",
]  # fmt: skip
HADAMARD = [
    "exp(-exp(pkv) * softplus(sv))", "sigmoid(sk + sv)", "2 * exp(-exp(pkv) * softplus(sv)) - 1",
    "sigmoid(sk) * sigmoid(sv)", "exp(-softplus(sk) * softplus(sv))", "where(sv > 0.5, sigmoid(sk), sigmoid(sk + sv))",
    "maximum(sigmoid(sk + sv), 0.1)", "sigmoid(pkv) ** sigmoid(s)", "1 - sigmoid(sv) * sigmoid(sk)",
]  # fmt: skip
# Decays beside shared expressions: steps that fall with the length of the key (Longhorn), and other sums over it.
SHARED = [
    ("sigmoid(b) / (1 + dot(k, k))", ["1 - d * k ** 2"]),
    ("sigmoid(bv) / (1 + dot(k, k))", ["1 - d * k ** 2"]),
    ("softplus(bv)", ["exp(-d * exp(pk))", "exp(-d * exp(pkv))", "1 / (1 + d * sigmoid(sk))"]),
    ("sigmoid(b + dot(k, pk))", ["1 - d * sigmoid(sk + sv)", "sigmoid(sv + pkv) * (1 - d)"]),
    ("rsqrt(1 + dot(sk, sk))", ["sigmoid(sv) ** d", "1 - d ** 2 * sk ** 2", "exp(-d * softplus(sv) * exp(pk))"]),
    ("sum_key(sigmoid(sk)) / N", ["d * sigmoid(pkv)", "minimum(d, sigmoid(sv + sk))"]),
    ("1 + dot(l2norm(k), l2norm(l))", ["exp(-d * softplus(sv + pk))", "where(d > 1, sigmoid(sv), 1 / (1 + d))"]),
]  # fmt: skip
TWISTS = [
    "{}", "{}", "{}", "{}", "({}) * sigmoid(b)", "minimum({}, 0.9)", "maximum({}, -0.2)", "({}) ** 2",
    "where(b > 0, {}, 0.5)", "({}) / (1 + softplus(b))", "({}) * tanh(pv)",
]  # fmt: skip

WRITES = [
    "k * v", "k * v", "k * (sigmoid(b) * v)", "k * v - l * v", "pkv * k * v", "k * v + sigmoid(b) * l * v",
    "(k + pkv) * v", "silu(k) * v", "k * relu(v)", "l2norm(k) * v", "k * (v * rsqrt(1 + dot(k, k)))",
    "k * where(b > 0, v, 0.5 * x)", "minimum(k, 1) * tanh(v)",
]  # fmt: skip
DENSE_WRITES = ["sigmoid(k * v) * v", "tanh(k * v + pkv)", "maximum(k, v) * sigmoid(b)", "exp(-softplus(k + v)) * v"]
READS = [
    "q",
    "q",
    "q",
    "q * sigmoid(pk)",
    "q * sigmoid(o)",
    "silu(q)",
    "l2norm(q)",
    "q * N ** -0.5",
    "q / (1 + abs(pk))",
]
SKIPS = [
    "0", "0", "pv * v", "dot(q, k) * v", "dot(q, pk * k) * v", "tanh(i) * v", "where(i > 0, v, 0.0)",
    "maximum(v, 0) * sigmoid(pv)", "ps * v",
]  # fmt: skip
DELTAS = [
    "sigmoid(b) * outer(k, k)",
    "2 * sigmoid(b) * outer(k, k)",
    "b * outer(k, k)",
    "sigmoid(b) * outer(l2norm(k), l2norm(k))",
]
LEARNT = [
    "softplus(b) / (1 + softplus(b) * dot(k, k))", "softplus(bv) / (1 + softplus(bv) * dot(k, k))",
    "softplus(b) * phi1(-(softplus(b) * dot(k, k)))", "exp(ps) * phi1(-(exp(ps) * dot(k, k)))",
    "softplus(b) / (1 + softplus(s) + softplus(b) * dot(k, k))",
]  # fmt: skip
CHANNELS = [
    "sigmoid(bv) * outer(k, k)",
    "sigmoid(b) * outer(k * sigmoid(bv), l)",
    "sigmoid(b) * outer(k, l * sigmoid(bv))",
]
RANK_ONE = [
    ("diag(sigmoid(sk))", "-0.5 * outer(k, l)"), ("diag(0.5 * sigmoid(sk))", "0.5 * outer(k, l)"),
    ("diag(exp(-0.6 * sigmoid(sk)))", "-outer(sigmoid(bk) * k, k)"), ("sigmoid(s) * I", "-0.5 * outer(k, bk * k)"),
    ("diag(sigmoid(sk))", "outer(0.5 * tanh(b) * k, l)"), ("I", "-sigmoid(b) * outer(k, k * sigmoid(pk))"),
]  # fmt: skip
SUMS = [
    "sigmoid(s) * (I - 0.5 * outer(k, k) - 0.5 * outer(l, l))",
    "0.5 * sigmoid(s) * (I - outer(k, k)) - 0.5 * outer(l, l)",
    "(I - 0.5 * outer(k, k) - sigmoid(b) * outer(l, l)) @ diag(exp(-softplus(sk)))",
    "diag(0.5 * sigmoid(sk)) + 0.25 * outer(k, l) - 0.25 * outer(l, sigmoid(bk) * k)",
    "I - 0.3 * outer(k, k) - 0.3 * outer(l, l) - 0.3 * outer(l2norm(k + l), l2norm(k + l))",
]  # fmt: skip
WINDOWS = [0, 0, 1, 2, 3, 5, 16, 40]
SINKS = ["lambda num, den, one: num / (den + exp(ps) * one)", "lambda num, den, one: num / (den + one)"]
GUARDED = [
    "lambda num, den, one: num / maximum(abs(den), one)",
    "lambda num, den, one: num / (abs(den) + one)",
    "lambda num, den, one: num / sqrt(den ** 2 + one ** 2)",
]  # fmt: skip
POSITIVE = [("exp(k)", "exp(q)"), ("elu1(k)", "elu1(q)"), ("sigmoid(k)", "sigmoid(q)"), ("softplus(k)", "softplus(q)")]


def draw(pick: Pick, family: str | None = None) -> Declaration:
    """A random declaration, which may be invalid (Declaration.build). family: one of FAMILIES, by default any."""
    name = pick(list(FAMILIES)) if family is None else family
    return FAMILIES[name](pick)


def _read(pick: Pick) -> str:
    return pick(["after", "after", "after", "before"])


def _single(pick: Pick, family: str, a: str, b: str, **more: Any) -> Declaration:
    return Declaration(family, ((a, b),), pick(READS), pick(SKIPS), _read(pick), **more)


def _elementwise(pick: Pick) -> Declaration:
    """Hadamard decays, with or without shared expressions, and injections that are no matrix products."""
    if pick([True, True, False]):
        let, decays = pick(SHARED)
        writes = ["k * (d * v)", "k * (d * x)", "k * v", "k * (sqrt(abs(d)) * v)", "silu(k) * (d * v)"]
        a = pick(TWISTS).format(pick(decays))
        return _single(pick, "elementwise", a, pick(writes), lets=(("d", let),))
    a = pick(TWISTS).format(pick(HADAMARD))
    return _single(pick, "elementwise", a, pick(WRITES + DENSE_WRITES))


def _dense_write(pick: Pick) -> Declaration:
    return _single(pick, "elementwise", pick([*SCALAR, *KEYWISE, *VALUEWISE]), pick(DENSE_WRITES))


def _decay(pick: Pick) -> Declaration:
    """Constant, scalar and key-diagonal decays."""
    return _single(pick, "decay", pick([pick(CONSTANT), pick(SCALAR), pick(KEYWISE)]), pick(WRITES))


def _value_decay(pick: Pick) -> Declaration:
    return _single(pick, "value decay", pick(VALUEWISE), pick(WRITES))


def _vector(pick: Pick) -> Declaration:
    """A state of one number for each channel."""
    write = pick(
        ["sigmoid(-sv) * v", "sigmoid(bv) * v", "v * sqrt(1 - sigmoid(sv) ** 2)", "sigmoid(b) * v", "relu(v) * x"]
    )
    read, skip = pick(["1", "sigmoid(o)", "silu(o)", "tanh(pv)"]), pick(["0", "pv * v", "tanh(i) * v"])
    decay = pick(TWISTS).format(pick([*VALUEWISE, *SCALAR]))
    return Declaration("vector", ((decay, write),), read, skip, _read(pick))


def _delta(pick: Pick) -> Declaration:
    """Delta rules with no, a scalar or a key-diagonal decay, with one strength or one for each channel; those that
    erase before their decay, or along another key than they write at."""
    low = pick([*DELTAS, *DELTAS, *CHANNELS])
    erase = f"I - {low}"
    a = pick([
        erase, f"{pick(SCALAR)} * ({erase})", f"({erase}) @ diag({pick(KEYWISE)})",
        f"diag({pick(KEYWISE)}) @ ({erase})", f"{pick(SCALAR)} * I - {low}",
        f"(I - sigmoid(b) * outer(k, sigmoid(bk) * k)) @ diag({pick(KEYWISE)})",
    ])  # fmt: skip
    tied = low.partition(" * outer")[0]
    return _single(pick, "delta", a, pick([f"k * ({tied} * v)", "k * (sigmoid(b) * v)", pick(WRITES)]))


def _on_values(pick: Pick) -> Declaration:
    """Corrections on the Value axis, with any decay without a Key axis."""
    low = pick(["sigmoid(b) * outer(v, v)", "2 * sigmoid(b) * outer(v, v)", "sigmoid(b) * outer(v, sigmoid(bv) * v)",
                "sigmoid(b) * outer(tanh(pv) * x, v)"])  # fmt: skip
    erase = f"I - {low}"
    a = pick([
        erase, f"{pick(SCALAR)} * ({erase})", f"({erase}) @ diag({pick(VALUEWISE)})",
        f"diag({pick(VALUEWISE)}) @ ({erase})", f"diag(0.5 * ({pick(VALUEWISE)})) - 0.5 * outer(v, x)",
        f"{erase} - sigmoid(s) * outer(x, x)",
    ])  # fmt: skip
    return _single(pick, "on values", a, pick(["k * (sigmoid(b) * v)", "sigmoid(sk) * k * v", *WRITES]))


def _several(pick: Pick) -> Declaration:
    """Several writes, corrections and reads in one step."""
    a = pick([
        "I - sigmoid(b) * outer(k, k) - sigmoid(s) * outer(l, l)", pick(SUMS), pick(SUMS), pick(SCALAR), pick(KEYWISE),
        pick(VALUEWISE), f"diag({pick(KEYWISE)}) @ (I - sigmoid(b) * outer(k, k))",
    ])  # fmt: skip
    b = pick(["k * v + l * x", "k * (sigmoid(b) * v) - 0.5 * l * x", "k * v + l * v + sigmoid(sk) * x"])
    c = pick(["q", "q + sigmoid(o) * l", "(q - o * silu(l)) * sigmoid(pk)", "o * (q + pv * l) * N ** -0.5"])
    return Declaration("several", ((a, b),), c, pick(SKIPS), _read(pick))


def _learnt(pick: Pick) -> Declaration:
    """Steps of dsf.learn on a square: strengths that fall with the length of the key, after any decay."""
    strength = pick(LEARNT)
    erase = "I - d * outer(k, k)"
    a = pick([
        erase, f"{pick(SCALAR)} * ({erase})", f"({erase}) @ diag({pick(KEYWISE)})",
    ])  # fmt: skip
    return _single(pick, "learnt", a, pick(["k * (d * v)", "k * (d * (v - x))", "k * v"]), lets=(("d", strength),))


def _rank_one(pick: Pick) -> Declaration:
    decay, low = pick(RANK_ONE)
    sign = " - " if low.startswith("-") else " + "
    return _single(pick, "rank one", decay + sign + low.lstrip("-"), pick(WRITES))


def _product(pick: Pick) -> Declaration:
    """Two micro-steps a token: delta rules, decays, or one of each."""

    def step(j: int) -> tuple[str, str]:
        erase = f"I - sigmoid(bs[{j}]) * outer(ks[{j}], ks[{j}])"
        a = pick([
            erase, f"sigmoid(gs[{j}]) * ({erase})", f"sigmoid(gs[{j}])", f"sigmoid(gk[{j}])", f"sigmoid(gv[{j}])",
            f"sigmoid(gk[{j}] + gv[{j}])", "I", f"0.5 * ({erase}) - 0.5 * outer(l, l)",
        ])  # fmt: skip
        return a, pick([f"ks[{j}] * (sigmoid(bs[{j}]) * vs[{j}])", f"ks[{j}] * vs[{j}]"])

    skip = pick(["0", "pv * vs[1]", "dot(q, ks[1]) * vs[0]"])
    return Declaration("micro-steps", (step(0), step(1)), pick(READS), skip, _read(pick))


def _normalised(pick: Pick) -> Declaration:
    """Quotients: positive features under the plain ratio, anything under a rule that keeps den from 0."""
    a = pick(["I", pick(CONSTANT[2:]), "sigmoid(s)", "sigmoid(sk)", "exp(-softplus(s))", "I - 0.5 * outer(k, k)"])
    if pick([True, False]) and "outer" not in a:
        key, query = pick(POSITIVE)
        return Declaration("normalised", ((a, f"{key} * v"),), query, rule="dsf.ratio")
    b = pick(["k * v", "sigmoid(b) * k * v", "k * (sigmoid(b) * v)"])
    return Declaration("normalised", ((a, b),), pick(READS[:5]), "0", _read(pick), pick(GUARDED), "v")


def _exponential(pick: Pick) -> Declaration:
    """Exponential input gates, with a running maximum."""
    gate = pick(["exp(i)", "exp(i)", "exp(2 * i)", "exp(ik)", "exp(i + ik)", "exp(iv)"])
    a = pick(["sigmoid(s)", "sigmoid(s)", "exp(-softplus(s))", "sigmoid(sk)", "I", "sigmoid(sv)"])
    return Declaration(
        "exponential gate", ((a, f"{gate} * k * v"),), pick(["q", "q * N ** -0.5", "silu(q)"]), "0", _read(pick),
        pick(GUARDED), "v",
    )  # fmt: skip


def _turned(pick: Pick) -> Declaration:
    """Decays and delta rules that turn pairs of key entries, and writes of the last token."""
    angle = pick(["b", "tanh(b)", "ps", "th", "pth", "softplus(b) * pth"])
    decay = pick(["", "sigmoid(s) * ", "exp(-softplus(ps)) * ", "(I - sigmoid(b) * outer(k, k)) @ "])
    a = pick([f"{decay}turn({angle})", f"{decay}turn({angle})", "sigmoid(s)", "sigmoid(sk)"])
    last = ["k * v + sigmoid(b) * prev(k * v)", "0.5 * k * v + 0.5 * prev(k * v)", "k * (v + prev(v))", "prev(k) * v"]
    b = pick([*last, "k * v", "k * (sigmoid(b) * v)"] if "turn" in a else last)
    return Declaration("turned", ((a, b),), pick(["q", "q", "q * sigmoid(o)"]), pick(["0", "pv * v"]))


def _invariant(pick: Pick) -> Declaration:
    """A and C of Params: the convolution form beside all others, driven by channels or by entries."""
    decays = ["sigmoid(ps)", "sigmoid(pk)", "exp(-exp(pk))", "exp(-exp(pkv))", "2 * sigmoid(pk) - 1", "I"]
    turned = ["sigmoid(ps) * turn(pth)", "diag(sigmoid(pk)) @ turn(pth)", "turn(ps)"]
    low = "diag(sigmoid(pk)) - 0.5 * outer(l2norm(pk), l2norm(pk))"
    a = pick([*decays, *turned, low, "diag(zoh(-exp(pk), 1, sigmoid(ps)).A)", "bilinear(-exp(pk), 1, sigmoid(ps)).A"])
    b = pick(["pk * v", "pk * (sigmoid(b) * v)", "pkv * v - pk * x", "k * v", "zoh(-exp(pk), pk, sigmoid(ps)).B * v",
              "pk * v + 0.5 * pk * prev(v)", "quarter_turn(pk) * v", "pair(pth, sin(ps)) * v"])  # fmt: skip
    c = pick(["pk", "pk * sigmoid(o)", "pk * sigmoid(s)", "pkv", "sin(pk)"])
    return Declaration("time-invariant", ((a, b),), c, pick(["0", "pv * v", "tanh(i) * v"]), _read(pick))


def _attention(pick: Pick) -> Declaration:
    """Exponential features, with a decay for each head, turns, windows or sinks."""
    decay = pick(["", "", "sigmoid(s) * ", "exp(-softplus(ps)) * ", "exp(-softplus(s)) * ", "0.9 * "])
    turn = pick(["", "", "", "turn(ps)", "turn(th)", "turn(tanh(b))", "turn(softplus(b) * pth)"])
    a = f"{decay}{turn}" if turn else decay.removesuffix(" * ") or "I"
    key = pick(["k", "k", "silu(k)", "l2norm(k)", "k * sigmoid(sk)", "k * sigmoid(pk)"])
    query = pick(["q * N ** -0.5", "q * N ** -0.5", "0.3 * q", "l2norm(q)", "q * (sigmoid(b) * N ** -0.5)"])
    rule = pick(["dsf.ratio", "dsf.ratio", *SINKS])
    return Declaration(
        "attention", ((a, f"exp_features({key}) * v"),), f"exp_features({query})", rule=rule, window=pick(WINDOWS)
    )


def _window(pick: Pick) -> Declaration:
    """A window of finite states, with or without a quotient."""
    a = pick(["I", "0.9", "sigmoid(s)", "exp(-softplus(ps))", "exp(-softplus(s))", "sigmoid(s) * turn(th)", "turn(ps)"])
    window = pick(WINDOWS[2:])
    if pick([True, False]):
        b = pick(["k * v", "k * (sigmoid(b) * v)", "silu(k) * v", "l2norm(k) * (v * relu(b))"])
        c, skip = pick(["q", "q * sigmoid(o)", "silu(q)"]), pick(["0", "pv * v"])
        return Declaration("window", ((a, b),), c, skip, window=window)
    if "turn" in a or pick([True, False]):
        rule, b, c = pick(GUARDED), pick(["k * v", "exp(i) * k * v"]), "q"
    else:
        rule, (key, c) = "dsf.ratio", pick(POSITIVE)
        b = f"{key} * v"
    return Declaration("window", ((a, b),), c, rule=rule, drive="v" if rule in GUARDED else "", window=window)


FAMILIES: dict[str, Callable[[Pick], Declaration]] = {
    "elementwise": _elementwise, "dense write": _dense_write, "decay": _decay, "value decay": _value_decay,
    "vector": _vector, "delta": _delta, "rank one": _rank_one, "micro-steps": _product, "normalised": _normalised,
    "exponential gate": _exponential, "turned": _turned, "learnt": _learnt, "time-invariant": _invariant,
    "on values": _on_values, "several": _several, "attention": _attention, "window": _window,
}  # fmt: skip
# What run() deals from, in turn: half elementwise, where the kernels differ most from one declaration to the next.
DECK = (
    "elementwise", "decay", "elementwise", "delta", "vector", "elementwise", "rank one", "value decay", "elementwise",
    "micro-steps", "dense write", "learnt", "delta", "elementwise", "normalised", "exponential gate", "elementwise",
    "decay", "turned", "time-invariant", "on values", "several",
    "attention", "window",
)  # fmt: skip
# Wrong once: rows of a last block that no token fills, left unwritten. Every run tries it first.
KNOWN = Declaration(
    "elementwise", (("1 - d * k ** 2", "k * (d * x)"),), "q", "x", lets=(("d", "sigmoid(bv) / (1 + dot(k, k))"),)
)
