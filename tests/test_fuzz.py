"""The adversary: what it draws, planted faults that it finds and makes small, and 3,000 cases of the torch forms."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsf
from dsf.call import recurrence as call
from dsf.call.calls import Calls
from dsf.checking.laws import forms
from dsf.checking.measure import ORACLE, Subject
from dsf.checking.ranges import ranges_of
from dsf.fuzz import Case, attempt, combined, poisoned, run, shrink
from dsf.fuzz.__main__ import main
from dsf.fuzz.case import EXPANDED, LAYOUTS
from dsf.fuzz.declaration import Declaration, smaller
from dsf.fuzz.draw import GPU, TORCH, Cases
from dsf.fuzz.grammar import DECK, FAMILIES, KNOWN, draw
from dsf.fuzz.inputs import Memory, cotangents, given_of, numbers, states
from dsf.fuzz.judge import _start
from dsf.fuzz.loop import takes_empty
from dsf.fuzz.truth import truths
from dsf.kernels.attention import KVCache

SMALL = replace(TORCH, n=(1, 2, 3, 4), p=(1, 2, 3, 5), heads=(1, 2, 2, 3), longest=70, far=0.0, calls=(1, 1, 1, 2, 3))
PARTS = 12  # of the 3,000 cases, for runners side by side


def plain() -> dsf.Recurrence:
    """A scalar decay."""
    return replace(KNOWN, steps=(("sigmoid(b)", "k * x"),), D="0", lets=()).build()


# 3,000 cases


@pytest.mark.parametrize("part", range(PARTS))
def test_torch_forms_withstand_random_calls_of_random_declarations(part: int) -> None:
    profile = SMALL if part % 3 == 0 else replace(SMALL, longest=33)  # a third of them crosses chunks of 64 tokens
    result = run(cases=3000 // PARTS, seed=100 + part, profile=profile, each=10)
    assert result.ok, str(result)
    assert result.cases == 3000 // PARTS
    assert len(result.declarations) >= 3000 // PARTS // 10
    assert len(result.undecided) <= result.cases // 100, result.undecided
    missing = [q for q, n in result.quotas.items() if not n and "bfloat16" not in q]
    assert [q for q in missing if takes_empty() or "empty" not in q] == []


# What is planted is found


def leaking(monkeypatch: pytest.MonkeyPatch, change) -> None:  # type: ignore[no-untyped-def]
    """Every form's y goes through `change`, but the oracle's."""
    ran = call.run

    def wrong(spec, bound, bounds, state, plan, *more):  # type: ignore[no-untyped-def]
        y, final = ran(spec, bound, bounds, state, plan, *more)
        return y if plan.form == "naive" else change(y), final

    monkeypatch.setattr(call, "run", wrong)


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * 1.001


def test_a_wrong_gradient_is_found_made_small_and_printed_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leaking(monkeypatch, Steep.apply)
    tried, safely = list[str](), shrink._safely

    def noted(subject: shrink.Subject, case: Case, *how: Any) -> Any:
        tried.append(repr(subject.declaration) + repr(case))
        return safely(subject, case, *how)

    monkeypatch.setattr(shrink, "_safely", noted)
    result = run(cases=3, seed=1, profile=SMALL, shrink=10.0)
    assert len(tried) == len(set(tried)) < 100  # it ends where nothing is smaller, before its time is over
    assert not result.ok
    failure = result.failures[0]
    assert failure["quantity"].startswith("grad")
    assert "off by 1.00e-03" in failure["finding"] and "head 0" in failure["finding"]
    assert len(failure["script"].splitlines()) <= 20
    scope: dict[str, object] = {}
    exec(failure["script"], scope)  # pasted, it finds the same
    assert capsys.readouterr().out.startswith("wrong: call 1, grad")
    case = scope["case"]
    assert isinstance(case, Case) and (case.tokens, case.batch, case.heads, case.calls) == (1, 1, 1, 1)


def test_calls_that_take_two_inputs_for_one_because_they_once_were_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[object, set[tuple[str, str]]] = {}
    prepare = Calls.prepare

    def remembered(self, *args):  # type: ignore[no-untyped-def]
        bound, plan = prepare(self, *args)
        if plan.form == "naive" or bound.dtype != torch.float32:
            return bound, plan
        given = bound.tensors
        key = (id(self), *((n, x.shape, x.stride()) for n, x in given.items()))
        names = sorted(given)
        pairs = {(a, b) for a in names for b in names if a < b and given[a] is given[b]}
        ones = seen.setdefault(key, pairs)  # what was one on the first call of a kind is one for ever
        return replace(bound, tensors={**given, **{b: given[a] for a, b in ones}}), plan

    monkeypatch.setattr(Calls, "prepare", remembered)
    case = Case(tokens=9, n=3, p=2, dtype="float32", form="recurrent", calls=3, alias=("q", "k"), alias_calls=(1, 2))
    verdict = attempt(plain(), case)
    assert verdict.status == "wrong" and verdict.finding is not None and verdict.finding.call == 3
    seen.clear()
    result = run(cases=60, seed=3, profile=replace(SMALL, dtypes=("float32",)), shrink=0)
    assert not result.ok


def test_a_failure_that_needs_an_earlier_call_is_printed_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last: list[int] = []

    def odd(y: torch.Tensor) -> torch.Tensor:
        """Wrong for one token where the call before had more."""
        wrong = y.shape[1] == 1 and bool(last) and last[-1] > 1
        last.append(y.shape[1])
        return y * 2 if wrong else y

    monkeypatch.setattr(shrink, "forget", lambda recurrence: last.clear())
    leaking(monkeypatch, odd)
    recurrence = plain()
    subject = shrink.Subject(None, recurrence)
    cases = [Case(tokens=t, form="recurrent", seed=t) for t in (1, 1, 3, 4)]
    final = Case(tokens=1, form="recurrent")
    for case in cases:
        assert subject.attempt(case, "cpu").status == "right"
    verdict = subject.attempt(final, "cpu")
    *_, history = shrink.shrunk(subject, final, verdict, "cpu", 20.0, history=cases)
    assert history == (cases[-1],)
    program = shrink.script(subject, final, verdict, "cpu", history=history)
    last.clear()
    exec(program, {"fuzzed": recurrence})
    assert capsys.readouterr().out.startswith("wrong")


@pytest.mark.parametrize("poison", [True, False])
def test_rows_that_nobody_wrote_are_found(monkeypatch: pytest.MonkeyPatch, poison: bool) -> None:
    def unwritten(y: torch.Tensor) -> torch.Tensor:
        room = torch.empty_like(y)
        whole = y.shape[1] - y.shape[1] % 8
        return torch.cat([y[:, :whole], room[:, whole:]], dim=1)

    leaking(monkeypatch, unwritten)
    case = Case(tokens=21, n=3, p=2, form="chunk")
    verdict = attempt(plain(), case, poison=poison)
    assert verdict.status == "wrong"
    if poison:
        assert verdict.finding is not None and "not finite" in verdict.finding.detail
        assert verdict.finding.block == 1
    assert attempt(plain(), replace(case, tokens=24), poison=poison).status == "right"


def test_a_call_that_writes_into_its_inputs_or_beside_them_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    leaking(monkeypatch, lambda y: (given[0].data.fill_(0.0), y)[1])
    put = Memory.put

    def noted(self, x, way, heads):  # type: ignore[no-untyped-def]
        view = put(self, x, way, heads)
        if way == "late":
            given[:] = [view.as_strided((1,), (1,), view.storage_offset() - 1)]  # what lies before it
        return view

    monkeypatch.setattr(Memory, "put", noted)
    case = Case(tokens=5, n=2, p=2, form="recurrent", layouts=dict.fromkeys("qkxb", "late"))
    verdict = attempt(plain(), case)
    assert verdict.finding is not None and verdict.finding.quantity == "inputs"


def test_other_bits_on_a_repeat_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(100))
    leaking(monkeypatch, lambda y: y * (1 + 1e-15 * (next(turns) % 3)))
    verdict = attempt(plain(), Case(tokens=40, n=3, p=2, form="recurrent"))
    assert verdict.finding is not None and verdict.finding.quantity == "repeat y"


def test_what_a_call_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.Tensor) -> None:
        raise RuntimeError("the kernel is on fire")

    leaking(monkeypatch, broken)
    verdict = attempt(plain(), Case(tokens=4, form="recurrent"))
    assert verdict.status == "wrong" and "the kernel is on fire" in str(verdict)


# The parts


def test_memory_that_nobody_has_written_is_poison() -> None:
    x = torch.zeros(3, 4)
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        made = [
            torch.empty(5), torch.empty_like(x), torch.empty_strided((3, 4), (8, 2)), x.new_empty(4, 4),
            x.new_empty_strided((3, 3), (3, 1)), torch.empty(3, dtype=torch.bfloat16),
            torch.ops.aten.empty_strided.default([3], [1]), torch.empty(2, dtype=torch.float64).resize_(3),
        ]  # fmt: skip
        numbers = [torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.int64)]
    assert all(bool(x.isnan().all()) for x in made)
    assert all(bool((x == torch.iinfo(x.dtype).max).all()) for x in numbers)
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_declarations_are_source_that_a_person_can_paste(family: str) -> None:
    for seed in range(10):
        declaration = draw(random.Random(seed).choice, family)
        scope: dict[str, object] = {}
        exec(declaration.text, scope)
        pasted = scope["fuzzed"]
        assert isinstance(pasted, dsf.Recurrence)
        assert str(pasted) == str(declaration.build())
        assert all(len(line) < 200 for line in declaration.text.splitlines())


def test_a_declaration_without_one_of_its_terms_is_shorter_and_mostly_legal() -> None:
    found = list(smaller(KNOWN))
    legal = []
    for declaration in found:
        try:
            legal.append(declaration.build())
        except dsf.TraceError:
            continue
    assert len(legal) > 3 and all(len(d.text) < len(KNOWN.text) for d in found)


def test_a_case_prints_as_what_makes_it_again() -> None:
    recurrence = KNOWN.build()
    cases = Cases(recurrence, ranges_of(recurrence.spec), random.Random(5), GPU, "torch", True)
    for _ in range(40):
        case = cases.draw()
        assert eval(repr(case), {"Case": Case}) == case
        assert sum(case.lengths or (case.tokens,)) == case.tokens
        assert json.loads(json.dumps(case.to_dict()))["tokens"] == case.tokens


def test_lengths_take_every_residue() -> None:
    recurrence = KNOWN.build()
    cases = Cases(recurrence, ranges_of(recurrence.spec), random.Random(0), GPU, "torch", True)
    tokens = [cases.draw().tokens for _ in range(150)]
    assert {t % 64 for t in tokens} == set(range(64)) and max(tokens) > 300


def test_the_oracle_of_several_calls_is_the_one_of_dsf_check() -> None:
    """Params spread over tokens, calls side by side and packed sequences one by one change no number."""
    declaration = replace(KNOWN, steps=(("exp(-exp(pkv) * softplus(bv))", "k * x"),), D="pv * x", lets=())
    recurrence = declaration.build()
    ranges = ranges_of(recurrence.spec)
    case = Case(tokens=11, heads=2, n=3, p=2, dtype="bfloat16", lengths=(4, 1, 6), initial=True, calls=2)
    values = [numbers(recurrence, ranges, case, number) for number in (1, 2)]
    starts = states(recurrence, ranges, case)
    cots = [cotangents(case, number, (3, 2, 3, 2)) for number in (1, 2)]
    for place, found in enumerate(truths(recurrence, case, values, starts, cots)):
        leaves = {n: x.double().requires_grad_() for n, x in values[place].items()}
        start = starts[place]
        assert start is not None
        wide = start.double().requires_grad_()
        y, state = recurrence(
            **leaves, initial_state=wide, form="naive", return_state=True, cu_seqlens=torch.tensor(case.bounds)
        )
        loss = (y * cots[place][0].double()).sum() + (state * cots[place][1]).sum()
        grads = torch.autograd.grad(loss, [*leaves.values(), wide])
        torch.testing.assert_close(found.y, y.detach())
        torch.testing.assert_close(found.state, state.detach())
        for name, g in zip([*leaves, "initial_state"], grads, strict=True):
            torch.testing.assert_close(found.grads[name], g)
    # and the terms of Params' gradients, that half precisions are relative to
    single = replace(case, lengths=(), calls=1, initial=False, loss="y")
    subject = Subject(recurrence, ranges, None)
    values = [numbers(recurrence, ranges, single, 1)]
    cot = cotangents(single, 1, (1, 2, 3, 2))
    (found,) = truths(recurrence, single, values, [None], [cot])
    wide_inputs = {n: x.double() for n, x in values[0].items()}
    terms, _ = subject.terms(wide_inputs, None, cot[0].double(), 0)
    for name, x in terms.items():
        torch.testing.assert_close(found.terms[name], x)
    assert set(terms) == {"pkv", "pv"} and forms and ORACLE


@pytest.mark.parametrize("way", [*LAYOUTS, *EXPANDED])
def test_a_layout_holds_the_same_numbers(way: str) -> None:
    recurrence = plain()
    ranges = ranges_of(recurrence.spec)
    case = Case(tokens=5, batch=2, heads=2, n=3, p=4, dtype="float32", layouts=dict.fromkeys("qkxb", way))
    values = numbers(recurrence, ranges, case, 1)
    memory = Memory(torch.device("cpu"))
    leaves = given_of(recurrence, ranges, case, 1, values, memory)
    assert all(torch.equal(leaves[n], x) for n, x in values.items())
    assert not memory.changed()
    if way.startswith("expanded"):
        assert 0 in leaves["q"].stride()
    elif way not in ("plain", "offset"):
        assert not leaves["q"].is_contiguous()


def test_aliases_are_one_tensor_in_their_calls_alone() -> None:
    recurrence = plain()
    ranges = ranges_of(recurrence.spec)
    case = Case(tokens=5, n=3, p=4, calls=3, alias=("q", "k"), alias_calls=(1, 2))
    for overlap in (False, True):
        case = replace(case, overlap=overlap)
        for number in (1, 2, 3):
            values = numbers(recurrence, ranges, case, number)
            leaves = given_of(recurrence, ranges, case, number, values, Memory(torch.device("cpu")))
            assert (leaves["q"] is leaves["k"]) == (number < 3 and not overlap)
            shared = leaves["q"].untyped_storage().data_ptr() == leaves["k"].untyped_storage().data_ptr()
            assert shared == (number < 3)
            assert all(torch.equal(leaves[n], x) for n, x in values.items())


# Runs and records


def test_the_same_seed_is_the_same_run_and_records_add_up() -> None:
    first, again = (run(cases=6, seed=9, profile=SMALL).to_dict() for _ in range(2))
    assert first["rows"] == again["rows"] and first["counts"] == again["counts"]
    other = run(cases=5, seed=10, profile=SMALL).to_dict()
    both = combined([first, other])
    assert both["cases"] == 11 and both["seeds"] == [9, 10]
    assert sum(row["cases"] for row in both["rows"]) == 11
    assert json.loads(json.dumps(both)) == both
    with pytest.raises(ValueError, match="share seeds"):
        combined([first, again])
    with pytest.raises(ValueError, match="differ in device"):
        combined([first, {**other, "device": "cuda"}])


def test_several_processes_try_different_declarations() -> None:
    result = run(cases=8, seed=4, workers=2, each=2, profile=SMALL)
    assert result.ok, str(result)
    assert result.cases == 8 and len(result.declarations) == 4 and result.workers == 2


def test_one_recurrence_is_kept_and_its_cases_are_drawn() -> None:
    result = run(cases=10, recurrence=plain(), profile=SMALL)
    assert result.ok and result.declarations == {"fuzzed"} and result.cases == 10


def test_the_command_prints_a_table_and_writes_a_record(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "fuzz.json"
    assert main(["--cases", "4", "--seed", "2", "--out", str(out)]) == 0
    assert "4 cases over 1 declarations on cpu (torch): no failures" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["cases"] == 4 and record["seeds"] == [2] and record["failures"] == []


def test_dsf_check_fuzz_draws_calls_of_one_recurrence() -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from dsf.analysis._cli_app import app

    done = typer_testing.CliRunner().invoke(app, ["check", "retnet", "--fuzz", "1", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["declarations"] == 1 and found["failures"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "0"], "positive"),
        (["--device", "tpu"], "no device 'tpu'"),
        (["--backend", "triton", "--cases", "1"], "backend='triton' was asked for, but"),
        (["--cases", "1000000", "--out", f"{__file__}/x.json"], "x.json: cannot write a file there"),
        (["--cases", "1000000", "--out", str(Path(__file__).parent)], "cannot write a file there"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1 and line.count("dsf.fuzz:") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_record_that_cannot_be_written_is_one_line_behind_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "1", "--out", "/dev/full"]) == 2
    table, line = capsys.readouterr()
    assert "1 cases over 1 declarations" in table
    assert line == "dsf.fuzz: --out /dev/full: cannot be written (No space left on device)\n"


def test_every_family_is_dealt() -> None:
    assert set(DECK) == set(FAMILIES)


@pytest.mark.parametrize("name", ["softmax_attention", "fox", "sink_attention"])
def test_attention_is_tried_with_its_caches(name: str) -> None:
    result = run(cases=12, recurrence=dsf.mixers.get(name).recurrence, seed=1, profile=SMALL)
    assert result.ok, result


WINDOWED = Declaration("window", (("sigmoid(s)", "k * v"),), "q", window=5)


@pytest.mark.parametrize("wrong", ["keys", "count", "gradient"])
def test_a_wrong_cache_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cache with one key, one count or one gradient that is another."""
    case = Case(tokens=9, lengths=(4, 0, 5), n=2, p=2, heads=2, initial=True, form="chunk", seed=3)
    recurrence = WINDOWED.build()
    assert attempt(recurrence, case).status == "right"
    whole = Subject.run

    def spoilt(self: Any, form: str, *given: Any, **more: Any) -> Any:
        y, cache = whole(self, form, *given, **more)
        if wrong == "keys":
            cache = cache._replace(k=torch.cat([cache.k[:, :, :1] + 1e-6, cache.k[:, :, 1:]], 2))
        elif wrong == "count":
            cache = cache._replace(lengths=cache.lengths + 1)
        else:
            cache = cache._replace(k=cache.k.detach())
        return y, cache

    monkeypatch.setattr(Subject, "run", spoilt)
    verdict = attempt(recurrence, case)
    assert verdict.status == "wrong" and verdict.finding is not None
    assert verdict.finding.quantity == ("grad initial_state.k" if wrong == "gradient" else "state")


def test_a_root_of_what_cancels_is_undecided_and_the_same_far_from_it_is_not() -> None:
    near = Declaration("decay", (("0.2", "sqrt(1 + l2norm(l))"),), "q").build()
    case = Case(tokens=2, heads=2, dtype="float32", form="scan", loss="", seed=11197)
    verdict = attempt(near, case)
    assert verdict.status == "undecided" and verdict.finding and "values of expressions" in verdict.finding.detail
    assert attempt(Declaration("decay", (("0.2", "sqrt(2 + l2norm(l))"),), "q").build(), case).status == "right"


@pytest.mark.parametrize("decay, status", [("3", "undecided"), ("0.3", "wrong")])
def test_what_overflows_is_undecided_where_the_oracle_does_but_for_one_rounding(
    decay: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelling = Declaration("decay", ((decay, "k * v - l * v"),), "q").build()
    case = Case(tokens=99, n=3, dtype="float32", form="recurrent", loss="", alias=("k", "l"), alias_calls=(1,))
    assert attempt(cancelling, case).status == "right"
    leaking(monkeypatch, lambda y: y + torch.inf)
    assert attempt(cancelling, case).status == status


@pytest.mark.parametrize("way", ["func", "compiled"])
def test_other_ways_of_calling_are_held_to_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        tokens=9, n=3, p=2, dtype="float32", form="recurrent", calls=3, between=("shorter", "forget"), way=way,
        alias=("q", "k"), alias_calls=(1, 3), initial=True,
    )  # fmt: skip
    delta = Declaration("delta", (("sigmoid(s) * (I - sigmoid(b) * outer(k, k))", "k * v"),), "q").build()
    assert attempt(delta, case).status == "right"
    leaking(monkeypatch, lambda y: 1.001 * y)
    assert attempt(delta, case).status == "wrong"


def test_all_of_a_cache_lies_where_the_call_runs():
    start = KVCache(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), torch.tensor([2]))
    found = _start(Case(initial=True), start, Memory(torch.device("meta")))
    assert {x.device.type for x in found if x is not None} == {"meta"}


def test_what_the_definition_loses_in_float32_is_no_finding() -> None:
    underflows = Declaration(  # sigmoid(-1e2), whose root has no slope in float32
        "decay", (("I", "k * sqrt(d)"),), "q", lets=(("d", "sigmoid(dot(k, pk))"),)
    )
    case = Case(
        tokens=5, n=5, dtype="float32", form="chunk", regimes={"k": "saturated", "pk": "wide"}, loss="state", seed=4942
    )
    verdict = attempt(underflows.build(), case)
    assert verdict.status == "undecided" and verdict.finding is not None
    assert "in float32" in verdict.finding.detail
    assert attempt(underflows.build(), replace(case, dtype="float64")).status == "right"
