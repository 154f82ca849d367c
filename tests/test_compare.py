"""`dsf compare`'s engine: two mixers, a handful of steps; what is trained, measured and reported."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import dsf
from dsf import InputError, Key, Scalar, System, Value
from dsf.analysis import compare as engine
from dsf.analysis import report
from dsf.analysis.compare import fair, recall, saved
from dsf.analysis.probe import disagreement, first, spectrum, speeds
from dsf.analysis.records import HalfLives, Lifetimes
from dsf.analysis.subjects import find, find_all
from dsf.analysis.text import load_text
from dsf.analysis.training import Setup, bits_per_byte, build, make_model, train
from dsf.checking.values import Range
from dsf.mixers import ZOO
from dsf.mixers.layer import Layer, random_inputs, squash

SETUP = Setup(steps=12, batch=4, seq=64, d_model=32, n_heads=2, layers=1)
PROTOCOL = engine.Protocol(seeds=2, rates=(2e-3, 6e-3), trial_steps=3, recall_steps=2)
NAMES = ["gated_deltanet", "mlstm"]  # and a recurrence of one's own, in a layer made of its declaration
OWN = '''
import dsf
from dsf import I, Key, Scalar, System, Value, exp, l2norm

@dsf.recurrence
def leaky(q: Key, k: Key, v: Value, keep: Scalar) -> System:
    """Mine: a decay of its own."""
    return System(A=keep, B=k * v, C=q)

@dsf.recurrence
def windowed(q: Key, k: Key, v: Value, d: Scalar) -> System:
    """Mine, without a trajectory: in a window, with more of the newest value."""
    return System(A=I, B=l2norm(k) * v, C=q, D=d * v, window=8)

@dsf.recurrence
def broken(v: Value, keep: Value) -> System:
    """Mine too: what it writes is beyond what numbers hold."""
    return System(A=keep, B=exp(exp(v + 10)), C=1)
'''


@pytest.fixture(scope="module")
def text():
    return load_text()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def result(text, own):
    return engine.compare([*NAMES, f"{own}:leaky"], text, SETUP, workers=1, protocol=PROTOCOL)


@pytest.fixture(scope="module")
def page(result):
    """Its builder, and the page."""
    pytest.importorskip("matplotlib")
    from dsf.analysis.compare.page import Builder

    builder = Builder(result)
    return builder, builder.build().html()


def test_every_mixer_has_a_whole_record(result):
    data = json.loads(json.dumps(result.to_dict()))
    assert data["schema"] == "dsf.compare/2" and not data["failed"]
    assert [m["name"] for m in data["mixers"]] == [*NAMES, "leaky"]
    assert {m["equal"]["layer"] for m in data["mixers"]} == {"Layer"}
    assert [m["paper"] and m["paper"]["layer"] for m in data["mixers"]] == ["GatedDeltaNet", "MLSTM", None]
    for m in data["mixers"]:
        assert len(m["equal"]["curve"]) == SETUP.steps and m["equal"]["has_convolution"]
        assert len(m["equal"]["after"]["each"]) == 2 and m["equal"]["after"]["spread"] > 0
        assert set(m["equal"]["recall"]) == {str(gap) for gap in recall.GAPS}
        assert set(m["equal"]["by_length"]) == {"64", "128", "256", "512"} and m["equal"]["sample"]
        assert math.isclose(sum(m["eigenvalues"]["histogram"]["shares"]), 1, rel_tol=1e-9)
        assert {"10", "50", "90"} == set(m["half_life"]["percentiles"])
        assert len(m["state"]["here"]) == len(m["state"]["at_paper_width"]) == len(data["contexts"])
        assert set(m["tokens_per_second"]) == {"naive", "recurrent", "scan", "chunk", "kernel"}
        assert all(speed > 0 for speed in m["tokens_per_second"].values())


def test_a_saved_comparison_is_drawn_again_as_it_was(result, page, tmp_path):
    from dsf.analysis.compare.page import Builder

    report.write_json(tmp_path / "compare.json", result.to_dict())
    again = saved.load(tmp_path / "compare.json")
    assert report.finite(again.to_dict()) == report.finite(json.loads(json.dumps(result.to_dict())))
    assert Builder(again).build().html() == page[1]
    report.write_json(tmp_path / "again.json", again.to_dict())
    assert (tmp_path / "again.json").read_text() == (tmp_path / "compare.json").read_text()
    of_setup, of_protocol = saved.settings(tmp_path / "compare.json")
    assert Setup(**of_setup) == result.setup and engine.Protocol(**of_protocol) == result.protocol


def test_a_repeated_comparison_leaves_the_models_of_the_first_alone(tmp_path):
    """Its --save-weights would write other models over them, wherever the new --out is."""
    file = tmp_path / "compare.json"
    for schema, kept in (({"schema": "dsf.compare/2"}, {"seeds": 2}), ({}, {"seeds": 2, "keep": tmp_path})):
        file.write_text(json.dumps({**schema, "protocol": {"seeds": 2, "keep": str(tmp_path)}}))
        assert saved.settings(file) == ({}, kept)


def test_a_setups_rate_is_the_one_that_trains(text, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_in_turn", lambda jobs, report: [str(job.protocol.rates) for job in jobs])
    found = engine.compare(["qlstm"], text, replace(SETUP, lr=1.25e-3), workers=1)
    assert found.failed == {"qlstm": "(0.00125,)"} and found.protocol.rates == (1.25e-3,)
    with pytest.raises(dsf.InputError, match="hidden is chosen"):
        engine.compare(["qlstm"], text, replace(SETUP, hidden=8), workers=1)
    file = tmp_path / "settings.json"
    for protocol, rates in (({}, (1e-3,)), ({"rates": [2e-3, 4e-3]}, (2e-3, 4e-3))):
        file.write_text(json.dumps({"setup": {"lr": 1e-3}, "protocol": protocol}))
        assert saved.settings(file)[1]["rates"] == rates


def test_half_lives_that_never_end_come_back_as_infinite(result, tmp_path):
    data = result.to_dict()
    data["mixers"][0]["half_life"]["percentiles"]["90"] = math.inf
    data["mixers"][0]["equal"]["before"] = math.nan
    report.write_json(tmp_path / "compare.json", data)
    mixer = saved.load(tmp_path / "compare.json").mixers[0]
    assert mixer.half_life.percentiles.high == math.inf and math.isnan(mixer.equal.before)
    assert saved.load(tmp_path / "compare.json").mixers[-1].paper is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "dsf.compare/1"}, "of the schema 'dsf.compare/1'; this release of dsf reads dsf.compare/2"),
        ({"schema": None}, "no file of dsf.compare/2: it names no schema"),
        ({"seconds": "long"}, "seconds: input should be a valid number"),
        ({"mixers": [{"name": "x"}]}, r"mixers\.0\.given: field required"),
        ({"more": 1}, "more: extra inputs are not permitted"),
    ],
)
def test_a_file_that_is_no_comparison_is_refused_in_one_line(result, tmp_path, change, said):
    report.write_json(tmp_path / "compare.json", result.to_dict() | change)
    with pytest.raises(dsf.language.errors.InputError, match=said):
        saved.load(tmp_path / "compare.json")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("state", "here"), [1, 2], r"state\.here has 2 numbers, expected 11"),
        (("kernel", "shares"), [[1.0]], r"kernel\.shares has 1 numbers, expected \d+"),
        (("equal", "curve"), [], "curve is empty"),
        (
            ("equal", "recall"),
            {"9": {"mean": 0, "spread": 0, "each": [0]}},
            "recall is of 9 bytes of noise, expected 4, ",
        ),
        (("tokens_per_second",), {}, "tokens_per_second is empty"),
        (("kernel",), None, "kernel, eigenvalues and half_life are null together"),
    ],
)
def test_a_comparison_whose_lists_do_not_fit_is_refused_in_one_line(result, tmp_path, place, value, said):
    data = result.to_dict()
    holder = data["mixers"][0]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    report.write_json(tmp_path / "compare.json", data)
    with pytest.raises(dsf.language.errors.InputError, match=data["mixers"][0]["name"] + ": " + said):
        saved.load(tmp_path / "compare.json")


@pytest.mark.parametrize(
    ("text_of_file", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "expected a JSON object"),
        ('{"steps": 3}', "steps is not known; expected setup and protocol"),
        ('{"setup": {"stepz": 3}}', "setup has no field 'stepz'; expected d_model"),
        ('{"setup": {"steps": "many"}}', r"setup\.steps: input should be a valid integer"),
        ('{"protocol": {"rates": 3}}', r"protocol\.rates: input should be a valid tuple"),
        *(
            (json.dumps({"setup": {field: value}}), rf"setup\.{field} is {value}, expected at least")
            for field, value in (("steps", 0), ("d_model", -4), ("batch", 0), ("seq", 0), ("hidden", 0), ("seed", -1))
        ),
        ('{"setup": {"lr": -1}}', r"setup\.lr is -1.0, expected a positive one"),
        ('{"protocol": {"seeds": 0}}', r"protocol\.seeds is 0, expected at least 1"),
        ('{"protocol": {"rates": []}}', r"protocol\.rates is nothing, expected different positive ones"),
        ('{"protocol": {"rates": [1e-3, 1e-3]}}', r"protocol\.rates is 0.001, 0.001, expected different"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(tmp_path, text_of_file, said):
    (tmp_path / "settings.json").write_text(text_of_file)
    with pytest.raises(dsf.language.errors.InputError, match=said):
        saved.settings(tmp_path / "settings.json")


def test_all_models_have_the_same_number_of_parameters(result):
    sizes = [c.parameters.model for m in result.mixers for c in m.columns]
    assert len(sizes) == 5 and max(sizes) <= 1.02 * min(sizes)
    assert len({c.parameters.mixer for m in result.mixers for c in m.columns}) > 1
    assert result.parameters_apart == max(sizes) / min(sizes) - 1


def test_parameters_of_the_whole_zoo_are_equal_to_two_percent():
    subjects = [find(name) for name in ("softmax_attention", "s6", "ssd", "qlstm", "rwkv7", "gla", "mlstm")]
    makes = [fair.maker(s, kind) for s in subjects for kind in ("equal", "paper")]
    setups = fair.matched(makes, Setup())
    sizes = [fair.count(make, setup) for make, setup in zip(makes, setups, strict=True)]
    assert max(sizes) <= 1.02 * min(sizes)
    with pytest.raises(dsf.InputError, match="so small"):
        tiny = Setup(d_model=2, layers=64, n_heads=1, d_state=2, headdim=2)
        fair.matched([fair.maker(find("ssd"), "equal")], tiny)


def quiet(step, bits):
    """No progress is told."""


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 400])
def test_a_trial_has_a_step_that_its_rate_has_changed(steps):
    """The first step's loss is the same for all rates: trials of one step chose the first rate, whatever it was."""
    assert engine.Protocol().trial(replace(SETUP, steps=steps)) == max(2, steps // 4)
    with pytest.raises(InputError, match="trial_steps is 1, expected 0 or at least 2: no rate has changed"):
        engine.Protocol(trial_steps=1)


@pytest.mark.parametrize("seed", [2**32, 10**22])
def test_seeds_that_no_generator_takes_are_refused(seed):
    """Every mixer failed by them, and the report of that was written."""
    with pytest.raises(InputError, match=f"^seed is {seed}, expected at most 4294967295$"):
        Setup(seed=seed)


def test_rates_of_the_shortest_runs_have_results_of_their_own(text):
    setup, protocol = replace(SETUP, steps=2), engine.Protocol(seeds=1)
    found, _ = fair.learn(find("linear_attention"), "equal", text, setup, protocol, quiet)
    assert len(set(found.rates.values())) == len(found.rates) == 3
    assert found.rate == min((bits, float(rate)) for rate, bits in found.rates.items())[1]


def test_weights_of_a_file_that_was_edited_since_are_not_loaded(text, tmp_path):
    """They were, into another recurrence."""
    source = tmp_path / "mine.py"
    code = "import dsf\nfrom dsf import Key, System, Value\n\n@dsf.recurrence\ndef slow(q: Key, k: Key, v: Value):\n"
    source.write_text(code + "    return System(A=0.9, B=k * v, C=q)\n")
    protocol = engine.Protocol(seeds=1, rates=(2e-3,), keep=tmp_path)
    found, model = fair.learn(find(f"{source}:slow"), "equal", text, replace(SETUP, steps=1), protocol, quiet)
    again = fair.load(Path(found.weights[0]))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    source.write_text(code + "    return System(A=0.75, B=k * v, C=q)\n")
    read = [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(source)]
    del sys.modules[read[0]]  # as in another process
    with pytest.raises(InputError, match=r"mine.py:slow was edited .* when it was slow\(q: Key.*A = 0.9"):
        fair.load(Path(found.weights[0]))


def test_the_rate_is_the_best_of_its_trials(result):
    for column in (c for m in result.mixers for c in m.columns):
        assert set(column.rates) == {"0.002", "0.006"}
        assert column.rate == min(column.rates, key=column.rates.__getitem__, default=None) or math.isclose(
            column.rates[f"{column.rate:g}"], min(column.rates.values())
        )


def test_kept_weights_make_the_same_model(text, tmp_path):
    quick = Setup(steps=2, batch=2, seq=16, d_model=16, n_heads=2, layers=1, d_state=8, headdim=8)
    protocol = engine.Protocol(seeds=2, rates=(6e-3,), papers=False, keep=tmp_path)
    found = engine.compare(["ssd"], text, quick, workers=1, protocol=protocol).mixers[0].equal
    assert [Path(p).name for p in found.weights] == ["ssd-equal-0.pt", "ssd-equal-1.pt"]
    again = fair.load(Path(found.weights[0]))
    assert bits_per_byte(again, text.held_out, quick.seq) == found.after.each[0]
    assert fair.sample(again, text) == found.sample
    torch.save([1], tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no weights")
    for other in ("other.pt", "text.pt"):
        with pytest.raises(dsf.InputError, match="no file of dsf compare"):
            fair.load(tmp_path / other)
    for other, why in (("missing.pt", "No such file"), ("", "Is a directory")):
        with pytest.raises(dsf.InputError, match=f"cannot be read .{why}"):
            fair.load(tmp_path / other)


def test_generation_step_by_step_is_that_of_the_whole_text(text):
    model = make_model(find("gated_deltanet").make, SETUP)
    prompt = b"All happy families"
    found = model.generate(prompt, 12, temperature=1e-4)
    ids = torch.tensor([list(prompt + found)])
    likeliest = model(ids)[0, len(prompt) - 1 : -1].argmax(-1)
    assert bytes(likeliest.tolist()) == found


def test_states_that_grow_without_bound_are_named_where_text_is_generated():
    """A doubling state passes training on short windows; generation ended in torch's words about a probability."""

    @dsf.recurrence
    def growing(q: Key, k: Key, v: Value) -> System:
        return System(A=4.0, B=k * v, C=q)

    with pytest.raises(dsf.DsfError, match=r"its logits are not finite after [0-9]+ bytes of generated text"):
        make_model(partial(Layer, growing, norm=False), SETUP).generate(b"All happy families", 200)


def test_longer_windows_are_judged_on_the_same_bytes(text):
    class Counting(torch.nn.Module):
        """Predicts the next byte by the one before, whatever was read earlier."""

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(256, 256)

        def forward(self, ids, at):
            return self.embedding(ids)[:, at]

    found = fair.by_length(Counting(), text.held_out, 64)
    assert list(found) == ["64", "128", "256", "512"]
    assert max(found.values()) - min(found.values()) < 1e-5
    assert fair.by_length(Counting(), text.held_out[:100], 64).keys() == {"64"}


def test_recall_is_answered_by_who_looks_it_up_and_by_nobody_else():
    ids = recall.sequences(torch.Generator().manual_seed(0), rows=40, gap=9)

    class Reader(torch.nn.Module):
        def forward(self, ids, at):
            logits = torch.zeros(*ids.shape, 256)
            for row, line in enumerate(ids.tolist()):
                told = dict(zip(line[0 : 2 * recall.PAIRS : 2], line[1 : 2 * recall.PAIRS : 2], strict=True))
                for place, byte in enumerate(line):
                    logits[row, place, told.get(byte, 255)] = 50.0
            return logits[:, at]

    logits, asked = recall.answers(Reader(), ids)
    assert bool((logits.argmax(-1) == asked).all()) and float(recall.loss(Reader(), ids)) < 1e-3
    found = recall.accuracy(Reader(), torch.device("cpu"), rows=8)
    assert set(found) == {str(gap) for gap in recall.GAPS} and set(found.values()) == {1.0}
    assert recall.accuracy(lambda ids, at: torch.zeros(*ids[:, at].shape, 256), torch.device("cpu"))["4"] < 0.05


def test_training_lowers_bits_per_byte_of_held_out_text(result):
    for m in result.mixers:
        assert 7.5 < m.equal.before < 8.5
        assert m.equal.after.mean < m.equal.before - 1


def test_forms_agree_on_the_text_forward_and_backward(result):
    assert 0 < result.worst_disagreement <= 1e-9
    for m in result.mixers:
        assert set(m.forms) == {"recurrent", "scan", "chunk", "kernel"}
        assert all(errors.worst <= 1e-9 for errors in m.forms.values())


def test_kernel_pictures_are_causal_shares_of_the_sentence(result):
    for m in result.mixers:
        shares = torch.tensor(m.kernel.shares)
        assert shares.shape == (len(result.text.sentence.encode()),) * 2
        assert float(shares.triu(1).abs().max()) == 0
        torch.testing.assert_close(shares.sum(1), torch.ones(len(shares)), atol=1e-3, rtol=0)


def test_the_same_seed_gives_the_same_numbers_and_every_step_is_reported(result, text):
    steps = []
    papers = engine.Protocol(**{**vars(PROTOCOL), "papers": False})
    again = engine.compare(NAMES, text, SETUP, lambda *told: steps.append(told[:3]), workers=2, protocol=papers)
    for there, here in zip(again.mixers, result.mixers, strict=False):
        for key in ("eigenvalues", "half_life", "kernel", "forms"):
            assert getattr(there, key) == getattr(here, key), key
        assert there.equal.model_dump(exclude={"seconds"}) == here.equal.model_dump(exclude={"seconds"})
    each = PROTOCOL.steps(SETUP, "equal")
    assert each == 2 * 3 + 2 * (SETUP.steps + 2)
    assert sorted(steps) == sorted((name, step + 1, each) for name in NAMES for step in range(each))


def test_a_mixer_that_fails_is_listed_and_the_others_go_on(text, own):
    quick = Setup(steps=2, batch=2, seq=16, d_model=16, n_heads=2, layers=1)
    found = engine.compare([f"{own}:broken", "qlstm"], text, quick, workers=1)
    assert [m.name for m in found.mixers] == ["qlstm"]
    assert "broken" in found.failed and "not finite" in found.failed["broken"]


def test_a_mixer_without_a_trajectory_is_compared_in_all_but_its_matrices(result, text, own, tmp_path):
    pytest.importorskip("matplotlib")
    from dsf.analysis._cli_compare import summary
    from dsf.analysis.compare.page import Builder

    quick = Setup(steps=2, batch=2, seq=16, d_model=16, n_heads=2, layers=1)
    found = engine.compare([f"{own}:windowed"], text, quick, workers=1, protocol=replace(PROTOCOL, seeds=1))
    report.write_json(tmp_path / "compare.json", found.to_dict())
    (record,) = saved.load(tmp_path / "compare.json").mixers
    assert not found.failed and record.half_life is record.eigenvalues is record.kernel is None
    assert "D = d * v is no multiple of" in record.unseen
    assert math.isfinite(record.equal.after.mean) and record.worst_disagreement < 1e-9
    for mixers in ([record], [record, result.mixers[0]]):  # none seen, and some
        whole = found.model_copy(update={"mixers": mixers})
        assert "D = d * v is no multiple of" in Builder(whole).build().html()
        assert summary(whole).row_count == len(mixers)


def test_the_page_shows_every_mixer_and_loads_nothing(result, page):
    builder, html = page
    assert not re.search(r"https?:|src=\"(?!data:)|href=\"(?!#|data:)", html)
    assert [html.count(drawn) for drawn in builder.drawn.values()] == [1] * len(builder.figures())
    best_first = sorted(result.mixers, key=lambda m: m.equal.after.mean)
    first_table = html[html.index("<tbody") : html.index("</tbody>")]
    places = [first_table.index(f">{m.name}<") for m in best_first]
    assert places == sorted(places)
    shown = re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", html, flags=re.S)
    assert not {"nan", "inf", "None"} & set(shown.split())


def test_time_invariant_systems_show_the_form_that_they_alone_have(text):
    pytest.importorskip("matplotlib")
    from dsf.analysis.compare.page import Builder

    quick = Setup(steps=2, batch=2, seq=16, d_model=16, n_heads=2, layers=1)
    builder = Builder(engine.compare(["s4d", "qlstm"], text, quick, workers=1))
    html = builder.build().html()
    assert html.count("tokens per second of convolution") == 1 and "in up to six ways" in html
    drawn = [x.get_text() for x in builder.figures()["speeds"].axes[0].get_legend().get_texts()]
    assert drawn == ["naive", "recurrent", "scan", "chunk", "kernel", "convolution"]


# The text


def test_the_default_text_is_prose_whose_held_out_part_is_not_in_what_is_trained_on(text):
    assert len(text.train) > 100_000 and len(text.held_out) > 10_000
    train_paragraphs = set(bytes(text.train.tolist()).split(b"\n\n"))
    held = [p for p in text.held_out_bytes.split(b"\n\n")[1:] if p]
    assert not train_paragraphs.intersection(held)
    assert 20 < len(text.sentence()) <= 56 and text.sentence().endswith(".")


@pytest.mark.parametrize("longest, said", [(math.inf, "never"), (3e5, "100,000 to never"), (9e4, "never")])
def test_the_axis_of_half_lives_says_where_it_ends(longest, said):
    pytest.importorskip("matplotlib")
    from dsf.analysis.compare import pictures

    life = HalfLives(percentiles=Lifetimes(low=1.0, median=5.0, high=longest), share_never=0.0)
    figure = pictures.lives({"a": life}, {"a": "#112233"}, "tokens")
    assert figure.axes[0].get_xticklabels()[-1].get_text() == said


def test_yardsticks_order_as_coders_do(text):
    found = text.yardsticks()
    assert 8 > found["order-0"] > found["bzip2"] > found["xz"] > 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "is empty"), (b" \n\t\n", "is empty"), (b"short", "at least 4,096")],
)
def test_a_text_that_cannot_be_used_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(dsf.InputError, match=message) as error:
        load_text(path)
    assert str(path) in str(error.value)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(dsf.InputError, match="is not a file"):
        load_text(tmp_path)


def test_any_bytes_are_text(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 32)
    found = load_text(path)
    assert len(found.train) + len(found.held_out) == 8192
    assert found.sentence()


# The layers


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_a_generic_layer_wraps_any_recurrence_and_learns(entry):
    layer = Layer(entry.recurrence, 16, n_heads=2)
    x = torch.randn(2, 9, 16)
    y, state = layer(x)
    assert y.shape == x.shape and y.isfinite().all()
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.o_proj.parameters())
    half, state = layer(x[:, :5])
    rest, _ = layer(x[:, 5:], state)
    if "reset" not in layer.known.ranges:
        torch.testing.assert_close(torch.cat([half, rest], 1), y, atol=1e-4, rtol=1e-3)
    assert layer.state_size(7) > 0


def test_generic_layers_keep_every_transition_stable():
    for entry in ZOO:
        if entry.recurrence.spec.is_softmax or entry.recurrence.spec.system.gauge is not None:
            continue
        inputs = random_inputs(entry.recurrence, tokens=16, heads=2, N=3, P=3, scale=5.0)
        radius = torch.linalg.eigvals(entry.recurrence.trajectory(**inputs).dense()).abs().max()
        assert radius <= 1 + 1e-9, entry.name


@pytest.mark.parametrize("allowed", [Range(0, 1), Range(low=0.1), Range(high=0.0), Range(-1, 2)], ids=str)
def test_squashing_lands_in_the_range(allowed):
    x = squash(torch.linspace(-30, 30, 61, dtype=torch.float64), allowed)
    assert float(x.min()) >= allowed.low and float(x.max()) <= allowed.high
    assert bool((x[1:] != x[:-1]).any())


def test_unit_ranges_give_directions():
    x = squash(torch.randn(5, 4), Range(unit=True))
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(5))


def test_mixers_of_one_setup_start_and_train_the_same_every_time(text):
    one, two = (make_model(find("ssd").make, SETUP) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    quick = Setup(**{**SETUP.__dict__, "steps": 2})
    assert train(one, text, quick)[0] == train(two, text, quick)[0]


def test_bare_setups_take_the_convolutions_away():
    assert build(find("s6").make, SETUP).conv1d is not None
    assert build(find("s6").make, Setup(bare=True)).conv1d is None


# The measures


def test_the_spectrum_counts_the_first_key():
    """All queries look at the first key (a sink), beside which later ones hardly change the sum that is divided by."""
    softmax = find("softmax_attention").recurrence
    k = torch.zeros(1, 40, 1, 2, dtype=torch.float64)
    k[:, 0] = 20.0
    found, _ = spectrum(softmax, [{"q": torch.ones_like(k), "k": k, "v": torch.randn_like(k)}])
    assert found.min == pytest.approx(1) and found.max == pytest.approx(1)


def test_the_spectrum_of_a_fixed_decay_is_that_decay():
    retnet = find("retnet").recurrence
    inputs = random_inputs(retnet, tokens=20, heads=2, N=3, P=3)
    inputs["slope"] = torch.full((2,), math.log(2) / 10, dtype=torch.float64)
    found, life = spectrum(retnet, [inputs])
    assert math.isclose(found.min, 0.5**0.1) and math.isclose(found.max, 0.5**0.1)
    assert math.isclose(life.percentiles.median, 10) and life.share_never == 0


def test_softmax_attention_never_forgets_but_dilutes():
    softmax = find("softmax_attention").recurrence
    inputs = random_inputs(softmax, tokens=40, heads=2, N=3, P=3)
    found, life = spectrum(softmax, [inputs])
    assert life.share_never == 1
    eta = (torch.einsum("bihn,bjhn->hij", inputs["q"], inputs["k"]) * 3**-0.5).exp().tril().sum(-1)
    ratio = eta[:, :-1] / eta[:, 1:]
    assert math.isclose(found.max, float(ratio.max()), rel_tol=1e-9)
    assert math.isclose(found.min, float(ratio.min()), rel_tol=1e-9)


@pytest.mark.parametrize("decay", [1, 0.999, 0.5])
def test_a_window_forgets_what_leaves_it(decay):
    @dsf.recurrence
    def windowed(q: dsf.Key, k: dsf.Key, v: dsf.Value):
        return dsf.System(A=decay, B=k * v, C=q, window=16)

    _, lives = spectrum(windowed, [{n: torch.randn(1, 40, 1, 2, dtype=torch.float64) for n in "qkv"}])
    assert lives.percentiles.median == pytest.approx(min(16, math.log(0.5) / math.log(decay) if decay < 1 else 16))
    assert lives.share_never == 0


def test_disagreement_sees_a_form_that_is_off(monkeypatch):
    deltanet = find("deltanet").recurrence
    inputs = random_inputs(deltanet, tokens=12, heads=2, N=3, P=3)
    honest = dsf.Recurrence.__call__

    def wrong(self, *args, form="auto", **kwargs):
        y = honest(self, *args, form=form, **kwargs)
        return y * (1 + 1e-6) if form == "chunk" else y

    monkeypatch.setattr(dsf.Recurrence, "__call__", wrong)
    found = disagreement(deltanet, inputs)
    assert found["chunk"].output > 1e-7 and found["scan"].output < 1e-12


def test_a_gradient_that_is_nothing_is_no_disagreement():
    """A gate of num and den alike cancels in their quotient, so its gradient is 0; rounding leaves no share of that."""

    @dsf.recurrence
    def gated_quotient(v: Value, i: Value, o: Value) -> System:
        return System(A=0.9, B=dsf.exp(i) * v, C=dsf.sigmoid(o), normalize=dsf.ratio)

    found = disagreement(gated_quotient, random_inputs(gated_quotient, tokens=40, heads=2, N=1, P=3))
    assert max(errors.worst for errors in found.values()) < engine.LAW


def test_speeds_are_of_every_form_the_structure_has():
    softmax = find("softmax_attention").recurrence
    inputs = random_inputs(softmax, tokens=8, heads=1, N=2, P=2)
    assert set(speeds(softmax, inputs)) == {"naive", "recurrent", "chunk", "kernel"}
    assert first(softmax, inputs, 5, start=1)["q"].shape[1] == 4


def test_state_formulas_give_the_numbers_of_the_layers():
    for entry in ZOO:
        subject = find(entry.name)
        formula = subject.state_formula().replace("·", "*")
        formula = re.sub(r"(\d)P", r"\1*P", formula).replace("⌈P/N⌉", "-(-P//N)")
        got = eval(formula, {"T": 5, "H": 3, "N": 4, "P": 6})
        assert got == subject.state_numbers(5, heads=3, N=4, P=6), entry.name


def test_two_subjects_of_one_name_are_refused(own):
    with pytest.raises(dsf.InputError, match="named twice"):
        find_all(["deltanet", "deltanet"])


def test_a_recurrence_without_channels_has_a_layer():
    @dsf.recurrence
    def counter(s: Scalar, f: Scalar) -> System:
        return System(A=dsf.sigmoid(f), B=s, C=1)

    layer = Layer(counter, 16, n_heads=2)
    y, state = layer(torch.randn(2, 9, 16))
    assert y.shape == (2, 9, 16) and state.recurrent.shape == (2, 2, 1, 1)
    assert layer.state_size() == 2


INTERRUPTED = """
import multiprocessing, os, signal, sys, threading, time
from dsf.analysis import compare
from dsf.analysis.text import load_text
from dsf.analysis.training import Setup

def interrupt():
    while not multiprocessing.active_children():
        time.sleep(0.01)
    time.sleep(float(sys.argv[1]))
    os.killpg(0, signal.SIGINT)  # as a terminal does: this process and its workers, which are importing torch

if __name__ == "__main__":
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        compare.compare(["qlstm", "mingru"], load_text(), Setup(steps=100_000), workers=2)
    except KeyboardInterrupt:
        print("ended", multiprocessing.active_children())
        sys.exit(130)
"""


KILLED = """
import multiprocessing, os, signal
from dsf.analysis import compare
from dsf.analysis.text import load_text
from dsf.analysis.training import Setup

def report(*news):
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    compare.compare(["qlstm", "mingru"], load_text(), Setup(steps=100_000), workers=2, report=report)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "program.py").write_text(KILLED)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pids, end = [int(word) for word in done.stdout.split()], time.monotonic() + 60
    assert len(pids) == 2
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, running
        time.sleep(0.1)


def is_running(pid):
    """Whether a process runs, which may have ended without anybody who asked for its exit code."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(done.stdout.strip()) and not done.stdout.strip().startswith("Z")


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("pause", ["0", "1"])  # seconds: the first comes while jobs are handed out
def test_an_interrupt_while_workers_start_ends_them_without_a_word(pause, tmp_path):
    (tmp_path / "program.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", pause], capture_output=True, text=True, timeout=120,
        start_new_session=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "ended []\n", "")
