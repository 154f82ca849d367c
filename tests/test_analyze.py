"""`dsf analyze` from end to end: a saved model becomes numbers, a page, pictures; bad input one clear line."""

import json
import math
import re

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import convert_models as zoo
import tiny_models
from tiny_models import TEXT
from typer.testing import CliRunner

import dsf
from dsf import mixers
from dsf.analysis import analyze as engine
from dsf.analysis import measures, report
from dsf.analysis import models as loading
from dsf.analysis._cli_app import app
from dsf.analysis.analyze import Analysis, Choice, analyze, anatomy
from dsf.analysis.analyze.found import in_a_sentence
from dsf.analysis.analyze.page import Report
from dsf.analysis.analyze.records import Analysed, EffectiveSize, Head, Run
from dsf.analysis.models import load_model
from dsf.analysis.pretrained import EmptyTextError, Pretrained
from dsf.analysis.probe import of_eigenvalues
from dsf.analysis.record import record
from dsf.analysis.records import HalfLives, Lifetimes

OF_A_RECURRENCE = {"eigenvalues", "half_life", "horizon", "effective_state_size", "along", "gates", "decay", "write"}


def run(*args, code=0):
    result = CliRunner().invoke(app, ["analyze", *map(str, args)], env={"COLUMNS": "160"})
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return result


def one_line(result) -> str:
    """What bad input gets, beside exit code 2: nothing on stdout, one line on stderr."""
    assert result.stdout == "" and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    return result.stderr


def letters(model_type):
    """A random model as load_model would give it."""
    model = zoo.build(model_type) if model_type in zoo.CONFIGS else zoo.backbone(model_type)
    ids = {letter: place for place, letter in enumerate(tiny_models.LETTERS, start=3)}
    pieces = {place: letter for letter, place in ids.items()}
    return Pretrained(model_type, model, lambda t: [ids[c] for c in t if c in ids], "tiny", pieces.__getitem__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save("jamba", tmp_path_factory.mktemp("models") / "jamba")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 3)
    return path


@pytest.fixture(scope="module")
def analysed(folder, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "deep" / "jamba.html"
    result = run(folder, "--text", text, "--tokens", 60, "--out", out, "--png", out.parent / "png")
    return out, result, json.loads(out.with_suffix(".json").read_text())


# From end to end


def test_a_saved_model_becomes_a_page_data_and_pictures(analysed):
    out, result, data = analysed
    for found in data["runs"]:
        assert any(line.startswith(found["name"] + " ") for line in result.stdout.splitlines())
        assert found["found"] in result.stdout
    assert str(out) in result.stdout
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    pictures = {p.name for p in (out.parent / "png").iterdir()}
    assert {"maps.png", "map_0_S6.png", "map_1_softmax.png", "half_lives.png", "tokens_write.png"} <= pictures
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (out.parent / "png").iterdir())


def lives(low, median, high):
    """Half-lives of these percentiles, which never end if they are infinite."""
    return HalfLives(percentiles=Lifetimes(low=low, median=median, high=high), share_never=float(low == math.inf))


@pytest.mark.parametrize(
    ("run", "numbers"),
    [
        ({"half_life": lives(2.0, 5.0, 400.0), "distance": 9.6,
          "effective_state_size": EffectiveSize(entropy=3.21, tolerance=4)}, [5, 400, 10, 3.2, 16]),
        ({"half_life": lives(4.0, 5.0, 9.0), "distance": 9.6}, [5, 10]),  # no tail to speak of
        ({"half_life": lives(0.1, 0.2, 0.4), "distance": 0.7}, []),  # within a token
        ({"half_life": lives(math.inf, math.inf, math.inf), "distance": 24.0,
          "heads": [Head(head=0, distance=1.0), Head(head=1, distance=30.0)],
          "eigenvalues": of_eigenvalues(torch.tensor([-1.0, 1.0, 1.0, 1.0]))}, [24, 1, 30, 25]),
        ({"kind": "softmax", "window": 64}, [64]),
    ],
)  # fmt: skip
def test_a_layers_sentence_is_one_and_has_the_numbers_that_were_found(run, numbers):
    about = {"name": "a X", "layer": "x", "recurrence": "x", "structure": "x", "kind": "own", "N": 16, "P": 1, **run}
    said = in_a_sentence(Run(call=0, part=0, backward=False, **about), 100)
    assert said.startswith("a X ") and said.endswith(".") and ". " not in said
    assert [float(x) for x in re.findall(r"\d+(?:\.\d+)?", said)] == numbers


def test_the_page_loads_nothing_and_says_no_nan(analysed):
    html = analysed[0].read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=\"(?!data:)|href=\"(?!#|data:)", html)
    shown = re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", html, flags=re.S)
    assert not {"nan", "inf", "None"} & set(shown.split())
    assert set(re.findall(r'href="#([^"]*)"', re.sub(r"<svg.*?</svg>", "", html, flags=re.S))) <= set(
        re.findall(r'id="([^"]*)"', html)
    )


def test_the_data_says_what_was_converted_and_found(analysed):
    data = analysed[2]
    assert data["conversion"]["deviation"] < 1e-5 and not data["conversion"]["left_alone"]
    assert [x["kind"] for x in data["conversion"]["layers"]] == ["S6", "softmax", "S6", "softmax"]
    assert data["text"]["sentence"] == "The wife had found out about the affair." and data["text"]["tokens"] == 60
    assert data["text"]["bits_per_token"] > 0 and data["model"]["class"] == "JambaForCausalLM"
    for found in data["runs"]:
        if found["kind"] == "S6":
            assert found.keys() >= OF_A_RECURRENCE and found["half_life"]["percentiles"]["50"] > 0
            assert found["heads"][0].keys() >= {"half_life", "horizon", "eigenvalues", "effective_state_size", "gates"}
        else:
            assert found["half_life"]["share_never"] == 1 and "gates" not in found
    assert {c["recurrence"] for c in data["costs"]} == {"s6", "softmax_attention"}


def test_maps_are_in_the_order_of_the_sentence(analysed):
    data = analysed[2]
    size = len(data["text"]["pieces"])
    for found in data["runs"]:
        shares = torch.tensor(found["shares"])
        assert shares.shape == (size, size) and float(shares.triu(1).abs().max()) == 0
        torch.testing.assert_close(shares.sum(1), torch.ones(size), atol=1e-2, rtol=0)


def test_json_on_request_and_layers_and_heads_narrow_it_down(folder, text, tmp_path):
    args = (folder, "--text", text, "--tokens", 30, "--out", tmp_path / "a.html", "--layers", "1,3", "--heads", "2-3")
    data = json.loads(run(*args, "--json").stdout)
    assert [r["name"] for r in data["runs"]] == ["1 softmax", "3 softmax"]
    assert len(data["conversion"]["layers"]) == 4
    whole = json.loads(run(*args[:-2], "--json").stdout)["runs"]
    for part, run_ in zip(data["runs"], whole, strict=True):  # heads keep their numbers
        assert [h["head"] for h in part["heads"]] == [2, 3]
        assert [h["distance"] for h in part["heads"]] == pytest.approx([h["distance"] for h in run_["heads"][2:]])


@pytest.mark.parametrize("heads", [slice(None, 2), slice(-1, None)])
def test_any_slice_of_heads_is_measured_as_those_of_the_whole(heads):
    part, whole = (analyze(letters("mamba2"), TEXT, "text", Choice(20, heads=x)).data.runs[0] for x in (heads, None))
    for mine, same in zip(part.heads, whole.heads[heads], strict=True):
        assert mine.head == same.head and mine.distance == pytest.approx(same.distance)


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "recurrent_gemma", "kimi_linear", "rwkv", "zamba", "bert"])
def test_every_kind_of_mixer_has_a_page(name):
    layers = "1-3" if name == "zamba" else None  # all of its others are alike
    found = analyze(letters(name), "The wife had found out. " * 4, "text", Choice(tokens=40, layers=layers))
    html = Report(found).page().html()
    shown = re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", html, flags=re.S)
    assert not {"nan", "inf", "None"} & set(shown.split())
    assert found.deviation < 1e-5
    if name == "lfm2":
        assert found.data.runs[0].window == 3 and found.data.runs[0].half_life is None
    if name == "bert":
        assert not any(r.causal or r.half_life or r.eigenvalues for r in found.data.runs)


def test_typesegs_two_directions_are_told_apart_and_read_in_order(tmp_path):
    pytest.importorskip("typeseg")
    html = tmp_path / "typeseg.html"
    data = json.loads(run("typeseg", "--tokens", 64, "--layers", "2", "--out", html, "--json").stdout)
    forth, back = data["runs"]
    assert (forth["name"], back["name"]) == ("2 S6 →", "2 S6 ←") and back["backward"]
    assert torch.tensor(forth["shares"]).triu(1).abs().max() == 0
    assert torch.tensor(back["shares"]).tril(-1).abs().max() == 0
    assert data["state"]["bytes_by_kind"]["S6, both directions"] == [2 * 6 * 16 * 256 * 4] * len(data["contexts"])
    assert 3 < forth["half_life"]["percentiles"]["50"] < 20  # bytes


# The file


def test_a_saved_analysis_is_drawn_again_as_it_was(analysed, tmp_path):
    """All but the wall of maps: a square a head, but from a file, which does not keep them, the mean of a layer's."""
    out, said, _ = analysed
    beside, page = out.with_suffix(".json"), tmp_path / "again.html"
    again = run("--from", beside, "--out", page).stdout
    assert again.replace(str(page), str(out)) == said.stdout[: said.stdout.rindex(f"wrote {out}")] + f"wrote {out}\n"
    assert list(tmp_path.iterdir()) == [page]  # the data stays where it is
    report.write_json(tmp_path / "again.json", Analysed.load(beside).to_dict())
    assert (tmp_path / "again.json").read_bytes() == beside.read_bytes()
    assert without_the_wall(page.read_text(encoding="utf-8")) == without_the_wall(out.read_text(encoding="utf-8"))


def without_the_wall(html):
    wall = re.compile(r"<figure[^>]*>(?:(?!</figure>).)*?All layers (?:and heads )?at once.*?</figure>", re.S)
    assert len(wall.findall(html)) == 1
    return wall.sub("", html)


def test_numbers_that_json_does_not_have_come_back(analysed, tmp_path):
    data = json.loads(analysed[0].with_suffix(".json").read_text())
    softmax = next(place for place, r in enumerate(data["runs"]) if r["kind"] == "softmax")
    assert data["runs"][softmax]["half_life"]["percentiles"]["50"] is None
    data["runs"][softmax]["eigenvalues"]["max"] = None
    report.write_json(tmp_path / "a.json", data)
    found = Analysed.load(tmp_path / "a.json").runs[softmax]
    assert found.half_life.percentiles.median == found.horizon.low == math.inf
    assert math.isnan(found.eigenvalues.max) and found.gates is None


def test_the_schema_names_every_field_of_the_file(analysed):
    """Each object of the file has the fields that its schema requires and no others, wherever it is."""
    schema = Analysed.model_json_schema(mode="serialization")

    def walk(data, node):
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "anyOf" in node:
            node = next(n for n in node["anyOf"] if (n.get("type") == "null") == (data is None))
            return walk(data, node) if data is not None else None
        if isinstance(data, list):
            return [walk(each, node["items"]) for each in data]
        if isinstance(data, dict) and "properties" in node:
            assert set(node.get("required", ())) <= data.keys() <= node["properties"].keys()
            return [walk(each, node["properties"][key]) for key, each in data.items()]
        return None

    walk(analysed[2], schema)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "dsf.analyze/0"}, "of the schema 'dsf.analyze/0'; this release of dsf reads dsf.analyze/1"),
        ({"schema": None}, "no file of dsf.analyze/1"),
        ({"window": "wide"}, "window: input should be a valid integer"),
        ({"runs": [{"name": "x"}]}, "runs.0.layer: field required"),
        ({"more": 1}, "more: extra inputs are not permitted"),
        ({"runs": []}, "runs: list should have at least 1 item"),
        ({"contexts": [1, 4]}, "for 2 contexts"),
    ],
)
def test_a_file_that_is_no_analysis_is_refused_in_one_line(analysed, tmp_path, change, said):
    report.write_json(tmp_path / "a.json", analysed[2] | change)
    assert said in one_line(run("--from", tmp_path / "a.json", "--out", tmp_path / "a.html", code=2))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("runs", 0, "along", "norm"), r"runs: 0 S6: norm: \d+ for \d+ tokens"),
        (("runs", 0, "write"), r"runs: 0 S6: write: \d+ for \d+ pieces"),
        (("runs", 0, "shares"), r"runs: 0 S6: shares: \d+ for \d+ pieces"),
        (("runs", 1, "shares", 2), r"runs: 1 softmax: shares: \d+ for \d+ pieces"),
        (("state", "bytes_by_kind", "S6"), "state: S6: 5 for 11 contexts"),
        (("state", "recurrent_if_cached"), "state: recurrent_if_cached: 5 for 11 contexts"),
    ],
)
def test_lists_of_unlike_lengths_are_refused_in_one_line(analysed, tmp_path, path, said):
    data = json.loads(json.dumps(analysed[2]))
    *there, last = path
    holder = data
    for key in there:
        holder = holder[key]
    holder[last] = holder[last][: len(holder[last]) // 2]
    report.write_json(tmp_path / "a.json", data)
    assert re.search(said, one_line(run("--from", tmp_path / "a.json", "--out", tmp_path / "a.html", code=2)))


# The numbers


def test_the_numbers_are_those_of_the_measures():
    model = letters("mamba2")
    found = analyze(model, TEXT, "text", Choice(tokens=50)).data.runs
    ids = model.encode(TEXT)[:, :50]
    with torch.no_grad(), dsf.convert(model.model) as converted, record(converted) as recording:
        model.model(ids)
    for entry, run_ in zip(recording, found, strict=True):
        lives = measures.half_life(entry.trajectory)
        for head in run_.heads:
            own = measures.percentiles(lives[:, head.head])[1]
            assert head.half_life.percentiles.median == pytest.approx(float(own), rel=1e-5)
        part = entry.trajectory.select(channels=slice(0, anatomy.CHANNELS))
        distance = measures.mean_distance(part).mean()
        assert run_.distance == pytest.approx(float(distance), rel=1e-5)
        entropy = measures.effective_state_size(part).entropy.mean()
        assert run_.effective_state_size.entropy == pytest.approx(float(entropy), rel=1e-4)


def test_the_work_of_attention_is_that_of_its_window():
    data = analyze(letters("gpt_oss"), TEXT, "text", Choice(tokens=48)).data
    windows = {x.window for x in data.conversion.layers}
    assert windows == {6, None} == {x.window for x in data.costs}
    work = {x.window: x.forms["recurrent"].flops for x in data.costs}
    keys = {window: sum(min(t, window or t) for t in range(1, 49)) / 48 for window in windows}
    assert work[6] / work[None] == pytest.approx(keys[6] / keys[None])
    assert "softmax_attention, window 6, 1 layer" in Report(Analysis(data)).page().html()


def test_the_work_of_a_layer_is_that_of_all_its_parts():
    data = analyze(letters("zamba"), TEXT, "text", Choice(tokens=20)).data
    own = next(x for x in data.conversion.layers if x.recurrence == "s6")
    work = next(x for x in data.costs if x.recurrence == "s6")
    assert (work.heads, work.N, work.P) == (own.heads, own.N, own.P) == (2, 8, own.P)
    assert work.forms["recurrent"].flops == 2 * 5 * 8 * own.P


def test_long_texts_are_measured_on_a_window(monkeypatch):
    monkeypatch.setattr(anatomy, "WINDOW", 16)
    found = analyze(letters("llama"), TEXT, "text", Choice(tokens=48)).data
    short = analyze(letters("llama"), TEXT, "text", Choice(tokens=16)).data
    for long, whole in zip(found.runs, short.runs, strict=True):
        assert long.distance == pytest.approx(whole.distance, rel=1e-4)


def test_wide_spectra_are_measured_on_fewer_tokens(monkeypatch):
    monkeypatch.setattr(anatomy, "WORK", 1)
    found = analyze(letters("kimi_linear"), TEXT, "text", Choice(tokens=40)).data.runs[0]
    assert found.eigenvalues.max <= 1 + 1e-6 and found.half_life.percentiles.median > 0


def test_eigenvalues_that_turn_are_not_said_to_flip_or_clear():
    """Of nearly a quarter of a circle the real part is nearly 0, of more it is negative; both keep all."""
    turning = of_eigenvalues(torch.polar(torch.ones(3), torch.tensor([0.0, 1.5, 2.5])))
    found = analyze(letters("mamba2"), TEXT, "text", Choice(tokens=20))
    assert "planes below" not in Report(found).page().html()
    run_ = found.data.runs[0]
    run_.eigenvalues = turning
    said = in_a_sentence(run_, 20)
    assert "33% of its eigenvalues turn what is stored by more than a right angle" in said and "flips" not in said
    html = Report(found).page().html()
    assert "planes below" in html and "real parts: median" in html and "real part of the eigenvalue" in html


def test_tokens_looked_at_like_any_other_count_one():
    even = torch.ones(2, 5, 5).tril()
    found = anatomy.received(even / even.sum(-1, keepdim=True))
    assert found[0] > found[1] and found[-1] == 0  # nobody is left to look at the last one
    band = torch.eye(5).roll(1, 0).tril()[None]  # each looks at the one before
    torch.testing.assert_close(anatomy.received(band)[:4], torch.ones(4, dtype=torch.float64))


def test_rounding_keeps_significant_digits():
    assert anatomy.rounded(torch.tensor([0.0, 1.23456e-7, -123456.0])) == [0.0, 1.235e-7, -123500.0]
    assert anatomy.rounded(torch.tensor([1e-320, math.inf], dtype=torch.float64)) == [0.0, math.inf]


def test_the_model_is_its_own_again_afterwards():
    model = letters("mamba2")
    analyze(model, TEXT, "text", Choice(tokens=20))
    dsf.convert(model.model).undo()


def test_short_names_leave_out_what_all_share():
    with dsf.convert(letters("falcon_h1").model) as converted:
        assert engine.short_names(converted.layers) == ["0 SSD", "0 softmax", "1 SSD", "1 softmax"]
    with dsf.convert(letters("inkling_text").model) as converted:
        names = engine.short_names(converted.layers)
        assert len(set(names)) == len(names)


def test_progress_is_reported():
    steps = []
    analyze(letters("llama"), TEXT, "text", Choice(tokens=20), lambda *step: steps.append(step))
    assert (engine.STEPS[2], 2, 2) in steps and (engine.STEPS[3], 2, 2) in steps


# Bad input


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "expected either a model or --from a JSON file of dsf analyze"),
        (("{folder}", "--from", "a.json"), "expected either a model or --from"),
        (("typesg",), "no model folder 'typesg', and no model of that name: typeseg, smollm2; did you mean typeseg?"),
        (("{folder}", "--layers", "7"), "4 converted layers, 0-3, model.layers.0.mamba to"),
        (("{folder}", "--layers", "0", "--heads", "1-2"), "model.layers.0.mamba has 1 head, counted from 0"),
        (("{folder}", "--heads", "b"), "such as 2 or 0-3"),
        (("{folder}", "--tokens", "5"), "5 tokens are too few to measure; expected at least 8"),
        (("{folder}", "--text", "nowhere.txt"), "nowhere.txt does not exist"),
        (("{folder}", "--out", "page"), "a name that ends in .html"),
        (("{folder}", "--memory", "0.000001"), "more than the limit of 0.00 GiB; record fewer layers, heads or tokens"),
        (("{folder}/config.json",), "is a file; expected the folder of a model"),
    ],
)
def test_bad_options_are_one_clear_line(args, expected, folder, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [a.format(folder=folder) for a in args]
    extra = [] if "--text" in given else ["--text", text]
    extra += [] if "--tokens" in given else ["--tokens", 30]
    assert expected in one_line(run(*given, *extra, code=2))


def test_folders_without_a_model_are_one_clear_line(folder, tmp_path):
    assert "has no config.json" in one_line(run(tmp_path, code=2))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    assert "its configuration cannot be loaded" in one_line(run(tmp_path, code=2))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found = one_line(run(tmp_path, code=2))
    assert "has a model, but no tokenizer (tokenizer.json" in found and f"save_pretrained('{tmp_path}')" in found
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "its tokenizer cannot be loaded" in one_line(run(tmp_path, code=2))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((folder / file).read_text())
    assert "its model cannot be loaded" in one_line(run(tmp_path, code=2))


def test_a_tokenizer_without_a_vocabulary_is_not_the_texts_fault(tmp_path):
    """transformers makes an empty one for folders of some models."""
    zoo.build("gpt2").save_pretrained(tmp_path)
    assert "no tokenizer" in one_line(run(tmp_path, code=2))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert "has a tokenizer without a vocabulary" in one_line(run(tmp_path, code=2))


@pytest.mark.parametrize("name", ["gpt2", "state-spaces/mamba-130m-hf"])
def test_ids_of_the_hub_get_the_line_that_saves_them(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = one_line(run(name, code=2))
    folder = name.rpartition("/")[2]
    line = loading.save_line(name)
    assert "saved to a folder first" in found and line in found and f"&& dsf analyze ./{folder}" in line
    program = line.partition('python -c "')[2].partition('"')[0]
    compile(program, "line", "exec")
    assert f"from_pretrained('{name}').save_pretrained('{folder}')" in program
    for path in ("./gpt2", "models/x/y", "a b"):
        assert "hub" not in one_line(run(path, code=2))


def test_an_encoder_decoder_is_refused(tmp_path):
    tiny_models.save("t5", tmp_path)
    assert "t5 is an encoder-decoder" in one_line(run(tmp_path, code=2))


def test_weights_larger_than_the_memory_are_refused(folder, monkeypatch):
    monkeypatch.setattr(loading, "free_memory", lambda: 1e4)
    with pytest.raises(dsf.InputError, match=r"its weights take 0\.0 GiB in float32, but 0\.0 are free"):
        load_model(str(folder))


def test_positions_behind_that_of_padding_are_what_a_text_may_fill(text, tmp_path):
    from transformers import AutoConfig, AutoModelForMaskedLM

    sizes = {**zoo.SMALL, **zoo.HEADS, **zoo.TWO, "pad_token_id": 1, "max_position_embeddings": 42}
    folder = tiny_models.save("llama", tmp_path / "model")  # its tokenizer
    AutoModelForMaskedLM.from_config(AutoConfig.for_model("roberta", **sizes)).save_pretrained(folder)
    assert "on 40 tokens" in run(folder, "--text", text, "--tokens", 100, "--out", tmp_path / "x.html").stdout


def test_a_text_that_tokenises_to_nothing_or_too_little_is_refused(folder, tmp_path):
    digits = tmp_path / "digits.txt"
    digits.write_text("0123456789")
    assert "the text of 10 characters has no tokens" in one_line(run(folder, "--text", digits, code=2))
    digits.write_text("All 1")
    assert "the text has 4 tokens" in one_line(run(folder, "--text", digits, code=2))
    with pytest.raises(EmptyTextError):
        load_model(str(folder)).encode("123")


def test_a_foreign_tokenizer_is_noticed():
    model = letters("llama")
    foreign = Pretrained("foreign", model.model, lambda text: [99] * len(text), "tiny", str)
    with pytest.raises(dsf.InputError, match="the token 99, but the model has only 64"):
        analyze(foreign, TEXT, "text", Choice(tokens=20))


def test_missing_weights_are_said(folder, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.0.mamba.A_log"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert (
        "1 weights are not in its files and therefore random, model.layers.0.mamba.A_log"
        in load_model(str(broken)).about
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_one_clear_line(value, text, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_models.save("mamba", tmp_path / "mamba")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.backbone.layers[1].mixer.in_proj.weight[3, 2] = value
    model.save_pretrained(folder)
    said = one_line(run(folder, "--text", text, "--tokens", 40, "--out", tmp_path / "x.html", code=2))
    assert "outputs on the text are NaN; backbone.layers.1.mixer.in_proj.weight has weights that are not finite" in said


def test_a_model_that_also_reads_images_is_measured_on_what_reads_text(text, tmp_path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config={**zoo.BACKBONES["gemma3_text"]},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    folder = tiny_models.save("llama", tmp_path / "model")  # its tokenizer
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    given = (folder, "--text", text, "--tokens", 40, "--out", tmp_path / "x.html")
    assert "2 mixers ran as recurrences" in run(*given, "--heads", 0).stdout
    assert "self_attn did not run on the text; choose other --layers" in one_line(run(*given, "--layers", 0, code=2))


def test_attention_of_this_library_is_described_as_attention():
    """By what it keeps: a window, a decay's half-life or everything, and never as a share of N state entries."""
    from dsf.models.hf import DsfConfig, DsfForCausalLM

    names = ["alibi", "sliding_window_attention", "sink_attention"]
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 2}
    model = DsfForCausalLM(DsfConfig(**sizes, mixers=names, mixer_options={names[1]: {"window": 5}})).eval()
    given = letters("llama")
    found = analyze(Pretrained("ours", model, given.tokenize, "tiny", given.piece), TEXT * 3, "text", Choice(tokens=60))
    decaying, windowed, keeping = found.data.runs
    inputs = model.model.layers[0].mixer.inputs(torch.randn(1, 9, 32))
    rate = -measures.eigenvalues(mixers.alibi.trajectory(**inputs))[0, 0].log().flatten()
    halves = [head.half_life.percentiles.median for head in decaying.heads]
    assert halves == pytest.approx((math.log(2) / rate).tolist(), rel=1e-4)
    assert decaying.half_life.share_never == 0 and "has forgotten half after" in decaying.found
    assert windowed.window == 5 and "keeps the last 5 tokens as they were" in windowed.found
    assert "keeps every key and value" in keeping.found and keeping.half_life.share_never == 1
    page = Report(found).page().html()
    assert page.count("KV\u00a0cache") == 3 and not any("state entries" in run.found for run in found.data.runs)


def test_a_transition_without_a_decay_is_no_convolution():
    """A projection keeps what lies along it as long as its factor lasts, not N + 1 tokens."""

    @dsf.recurrence
    def projected(q: dsf.Key, k: dsf.Key, v: dsf.Value, u: dsf.Param[dsf.Key]):
        u = dsf.l2norm(u)
        return dsf.System(A=0.99 * dsf.outer(u, u), B=k * v, C=q)

    layer = mixers.Layer(projected, d_model=8, n_heads=1, d_state=2, headdim=4)
    with dsf.convert(torch.nn.Sequential(layer)) as converted, torch.no_grad(), record(converted) as recording:
        layer(torch.randn(1, 100, 8))
    (entry,) = recording
    about = {"name": "x", "layer": "x", "kind": "own", "recurrence": "x", "structure": "x", "N": 2, "P": 4}
    found = Run(call=0, part=0, backward=False, **about)
    anatomy.of_text(entry, found)
    assert found.window is None
    lives = measures.half_life(entry.trajectory, of="transition")
    assert found.half_life.percentiles.high == pytest.approx(float(lives.max())) and float(lives.max()) > 10


def test_unknown_mixers_are_listed(text):
    model = letters("llama")
    model.model.add_module("odd", torch.nn.LSTM(4, 4))
    found = analyze(model, TEXT, "text", Choice(tokens=20))
    assert [x.to_dict() for x in found.data.conversion.left_alone] == [
        {"name": "odd", "type": "LSTM", "why": "its recurrence is nonlinear in its state"}
    ]
    assert "nonlinear in its state" in Report(found).page().html()


def test_a_conversion_that_changes_the_model_exits_with_one(folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_of_conversion", off(engine._of_conversion))
    run(folder, "--text", text, "--tokens", 20, "--layers", "1", "--out", tmp_path / "a.html", code=1)


def off(honest):
    return lambda *args: honest(*args).model_copy(update={"deviation": 0.5})


def test_free_memory_is_a_number_everywhere(monkeypatch):
    assert loading.free_memory() > 1e6
    monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    assert loading.free_memory() > 1e6
    monkeypatch.setattr(loading.os, "sysconf", lambda _: (_ for _ in ()).throw(ValueError()))
    assert loading.free_memory() == math.inf
