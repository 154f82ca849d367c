"""Random declarations: whatever the language lets a user combine, every form computes the same, gradients included."""

from collections.abc import Callable
from typing import Any

import structures
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsf
from dsf import (
    Expr,
    I,
    Key,
    Pair,
    Param,
    Scalar,
    System,
    Value,
    compose,
    diag,
    dot,
    exp,
    maximum,
    outer,
    prev,
    sigmoid,
    turn,
    where,
)  # fmt: skip
from dsf.language.annotations import Kind
from dsf.language.expr import const, inputs_of, symbol_of

KINDS: dict[str, Any] = {
    "q": Key, "k": Key, "l": Key, "v": Value, "s": Scalar, "sk": Key, "sv": Value, "b": Scalar, "bv": Value,
    "i": Scalar, "ik": Key, "iv": Value, "pk": Param[Key], "pv": Param[Value], "pkv": Param[Key, Value],
    "t": Pair, "ts": Scalar,
}  # fmt: skip
X = {
    name: symbol_of(name, None, kind.axes, kind.pair)
    for name, kind in ((n, k if isinstance(k, Kind) else k.kind) for n, k in KINDS.items())
}
DECAYS = [
    const(1), const(0.9), sigmoid(X["s"]), -sigmoid(X["s"]), sigmoid(X["sk"]), dsf.tanh(X["sk"]),
    sigmoid(X["pk"]), sigmoid(X["sv"]), sigmoid(X["sk"] + X["sv"]), where(X["s"] > 0.5, 0.0, sigmoid(X["s"])),
    exp(-exp(X["pkv"]) * dsf.softplus(X["sv"])),
]  # fmt: skip
CORRECTIONS = [
    None, None, sigmoid(X["b"]) * outer(X["k"], X["k"]), sigmoid(X["bv"]) * outer(X["k"], X["k"]),
    0.5 * outer(X["k"], X["l"]), sigmoid(X["b"]) * outer(X["k"] * sigmoid(X["bv"]), X["l"]),
    sigmoid(X["b"]) * outer(X["k"], X["l"] * sigmoid(X["bv"])),
]  # fmt: skip
WRITES = [
    X["k"] * X["v"], X["k"] * (sigmoid(X["b"]) * X["v"]), X["k"] * X["v"] - X["l"] * X["v"], X["pkv"] * X["k"] * X["v"],
    X["k"] * X["v"] + sigmoid(X["b"]) * X["l"] * X["v"], X["v"] * sigmoid(X["b"]), (X["k"] + X["pkv"]) * X["v"],
]  # fmt: skip
TURNS = [None, None, turn(X["t"]), turn(X["ts"]), turn(X["t"] + dsf.sum_key(X["pk"]))]
PREVS = [
    0.5 * X["k"] * X["v"] + sigmoid(X["b"]) * prev(X["k"] * X["v"]), prev(X["k"] + prev(X["l"])) * X["v"],
    X["k"] * X["v"] + prev(prev(X["l"])) * prev(sigmoid(X["sv"]) * X["v"]),
    prev(exp(-X["k"] * X["k"]) * X["s"]) * X["v"],
]  # fmt: skip
GAINS = [None, None, X["i"], X["ik"], X["iv"], X["i"] + X["iv"]]
READS = [X["q"], X["q"] * sigmoid(X["pk"]), X["q"] * sigmoid(X["sv"])]
SKIPS = [const(0), X["pv"] * X["v"], dot(X["q"], X["k"]) * X["v"], exp(X["i"]) * X["v"]]
RULES = [None, None, dsf.ratio, lambda num, den, one: num / maximum(dsf.abs(den), one)]


def system_of(
    pick: Callable[[list[Any]], Any],
    decays: list[Any] = DECAYS,
    corrections: list[Any] = CORRECTIONS,
    writes: list[Any] = WRITES,
    gains: list[Any] = GAINS,
    turned: list[Any] | None = None,
) -> System:
    """One or two micro-steps of any decay, correction, turn and injection; any readout, skip and normalisation."""
    steps = []
    for _ in range(pick([1, 1, 1, 2])):
        decay, low = diag(pick(decays)), pick(corrections)
        if low is not None:
            decay = pick([decay - low, decay @ (I - low), (I - low) @ decay])
        angle = None if turned is None else pick(turned)
        if angle is not None:
            decay = decay @ angle
        write, gain = pick(writes), pick(gains)
        steps.append(System(A=decay, B=write if gain is None else exp(gain) * write))
    rule = pick(RULES)
    last = System(
        A=steps[-1].A, B=steps[-1].B, C=pick(READS), D=pick(SKIPS),
        read=pick(["after", "before"]), normalize=rule, drive=None if rule is None else X["v"],
    )  # fmt: skip
    return compose(*steps[:-1], last)


systems = st.composite(
    lambda draw: system_of(lambda choices: draw(st.sampled_from(choices)), writes=WRITES + PREVS, turned=TURNS)
)


REFUSED = (
    "reads the Key axis, but the state has none", "keeps a running maximum, which needs one", "leave it out of prev",
    "A is no operator on Key",
)  # fmt: skip


def declare(system: System) -> dsf.Recurrence | None:
    """The recurrence that returns `system`; None where C reads a Key axis that the state does not have."""
    roots = [system.C, system.D] + [x for s in system.micro_steps for x in (s.B, *leaves_of(s.A))]
    used = {x.attrs[0] for x in inputs_of(*roots)}

    names = [name for name in KINDS if name in used]
    source = f"def random_system({', '.join(names)}): return system"
    scope: dict[str, Any] = {"system": system}
    exec(source, scope)
    scope["random_system"].__annotations__ = {name: KINDS[name] for name in names}
    try:
        return dsf.recurrence(scope["random_system"])
    except dsf.TraceError as error:
        assert any(reason in str(error) for reason in REFUSED), error
        return None


def leaves_of(operator: dsf.Operator) -> list[Expr]:
    return [*operator.exprs, *(x for part in operator.parts for x in leaves_of(part))]


def gradients(r: dsf.Recurrence, inputs: dict, start: torch.Tensor, form: str) -> list[torch.Tensor]:
    """y, the true final state, and the gradients of all inputs under fixed random cotangents."""
    y, state = r(**inputs, initial_state=start, form=form, return_state=True)
    true = r.true_state(state, y.shape[-1])
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in (y, true))
    return [y, true, *torch.autograd.grad(loss, list(inputs.values()))]


def test_den_has_term_for_term_what_num_has():
    """Driven by ones a product of a sum falls into more terms, which must not stand beside another step's keys."""
    first = System(A=I, B=X["k"] * X["v"] + X["l"] * X["v"])
    last = System(A=I, B=prev(X["k"] + X["l"]) * X["v"], C=X["q"], normalize=dsf.ratio, drive=X["v"])
    r = declare(compose(first, last))
    inputs = structures.sample(r, T=7)
    _, state = r(**inputs, form="naive", return_state=True)
    for form in r.forms[1:]:
        _, found = r(**inputs, form=form, return_state=True)
        torch.testing.assert_close(r.true_state(found, 2), r.true_state(state, 2), rtol=1e-9, atol=1e-9)


@settings(max_examples=60)
@given(systems())
def test_every_form_of_a_random_declaration_is_the_naive_one(system):
    r = declare(system)
    if r is None:
        return
    start = r(**structures.sample(r, T=3), return_state=True)[1].detach()
    inputs = {name: x.requires_grad_() for name, x in structures.sample(r, T=19).items()}
    if "l" in inputs:  # of unit length, as k: corrections do not explode
        inputs["l"] = torch.nn.functional.normalize(inputs["l"].detach(), dim=-1).requires_grad_()
    expected = gradients(r, inputs, start, "naive")
    for form in r.forms[1:]:
        found = gradients(r, inputs, start, form)
        for name, got, want in zip(["y", "state", *inputs], found, expected, strict=True):
            worst = ((got - want).abs().max() / want.abs().max().clamp(min=1)).item()
            assert worst < 1e-7, f"{form}, {name}: {worst}\n{r}"
