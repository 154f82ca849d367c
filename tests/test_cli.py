"""The command line: every command, its JSON, its exit codes, and one clear line for bad input."""

import ast
import errno
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import torch
from typer.testing import CliRunner

import dsf
from dsf.analysis._cli_app import app
from dsf.analysis._cli_zoo import Eigenvalues, ZooRecord, range_text
from dsf.analysis._write import whole, whole_files, whole_text
from dsf.analysis.report import finite
from dsf.analysis.report.figures import png
from dsf.analysis.subjects import find
from dsf.checking.examples import Example
from dsf.checking.report import Failure, Report, Row
from dsf.mixers import ALIASES, ZOO, canonical, get

OWN = '''
import dsf
from dsf import Key, Scalar, System, Value

@dsf.recurrence
def leaky(q: Key, k: Key, v: Value, keep: Scalar) -> System:
    """Mine: a decay of its own."""
    return System(A=keep, B=k * v, C=q)

def plain(x):
    return x
'''
RIGGED = """
import dsf
from dsf import Value, System, sigmoid
honest = dsf.Recurrence.__call__

class Rigged(dsf.Recurrence):
    def __call__(self, *args, form="auto", **kwargs):
        out = honest(self, *args, form=form, **kwargs)
        if form != "scan":
            return out
        return (out[0] * 1.01, out[1]) if isinstance(out, tuple) else out * 1.01

@dsf.recurrence
def wrong(x: Value, f: Value) -> System:
    return System(A=sigmoid(f), B=x, C=1)

wrong = Rigged(wrong.spec)
"""


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "160"})
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return result


def one_line(result) -> str:
    """What bad input gets: exit code 2 was checked, nothing on stdout, one line on stderr."""
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("columns", [80, 110])
def test_zoo_lists_every_mixer_and_cuts_nothing_off(columns):
    shown = CliRunner().invoke(app, ["zoo"], env={"COLUMNS": str(columns)}).stdout
    words = [word for entry in ZOO for word in (entry.name, *entry.recurrence.spec.structure.split())]
    assert set(words) <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= columns and "…" not in shown  # nothing is cut off


def test_zoo_json_says_all_about_every_mixer():
    records = json.loads(run("zoo", "--json").stdout)
    assert [r["name"] for r in records] == [e.name for e in ZOO]
    by_name = {r["name"]: r for r in records}
    for r in records:
        assert finite(ZooRecord.model_validate(r).to_dict()) == r
        assert r["forms"] and r["state"]["formula"] and r["state"]["numbers"] > 0 and r["source"]
    s6, softmax, delta = (by_name[n] for n in ("s6", "softmax_attention", "deltanet"))
    assert s6["state"]["numbers"] == 2 * 2048 * 16 and 0 <= s6["eigenvalues"]["low"] < 0.01
    assert softmax["state"]["numbers"] == 2 * 4096 * 2048 and "scan" not in softmax["forms"]
    assert delta["inputs"]["beta"]["range"] == "in [0, 2]" and delta["eigenvalues"]["low"] < -0.9
    assert s6["module"]["class"] == "S6" and s6["module"]["options"]["d_state"] == 16
    assert by_name["mlstm"]["module"]["class"] == "MLSTM" and by_name["mlstm"]["state"]["formula"] == "H·N·(P+2)"


def test_zoo_of_one_shows_its_equations(own):
    for given in ("gated_deltanet", f"{own}:leaky"):
        assert f"\n{find(given).recurrence}\n" in run("zoo", given).stdout
    assert json.loads(run("zoo", f"{own}:leaky", "--json").stdout)["inputs"]["keep"]["range"] == "in [0, 1]"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ((0.001, 1.0, False), "[0, 1]"),
        ((1.0, 1.0, False), "1"),
        ((-1.0, 1.0, True), "[-1, 1] complex"),
        ((0.0, 1e40, False), "[0, ∞]"),
    ],
)
def test_eigenvalue_ranges_read_well(found, text):
    assert range_text(Eigenvalues(low=found[0], high=found[1], complex=found[2])) == text


def test_plan_prints_the_recurrence_and_its_plan():
    recurrence = get("gated_deltanet").recurrence
    plan = recurrence.plan(T=4096, H=8, N=128)
    assert run("plan", "gated_deltanet", "--T", 4096, "--H", 8, "--N", 128).stdout == f"{recurrence}\n\n{plan}\n"


def test_plan_json_has_the_plan():
    found = json.loads(run("plan", "s6", "--form", "scan", "--dtype", "bfloat16", "--json").stdout)
    assert found["form"] == "scan" and found["recurrence"] == "s6" and found["state_bytes"] == 4 * 64 * 64


def test_plan_of_a_users_file(own):
    assert "leaky" in run("plan", f"{own}:leaky").stdout


def test_check_passes_a_right_recurrence(own):
    assert "all laws hold" in run("check", f"{own}:leaky", "--examples", 1, "--tokens", 20).stdout
    found = json.loads(run("check", "mingru", "--examples", 1, "--tokens", 12, "--json").stdout)
    assert found["ok"] and found["recurrence"] == "mingru" and found["rows"]


@pytest.fixture
def reported(monkeypatch):
    """Let `dsf check` print the report of a short real check of one recurrence."""

    def report_of(recurrence):
        report = dsf.check(recurrence, laws=("forms", "split"), dtypes=(torch.float64,), examples=1, tokens=12)
        monkeypatch.setattr(dsf, "check", lambda *_, **__: report, raising=False)
        return report

    return report_of


def test_check_says_little_when_all_is_well_and_more_when_asked(reported):
    report = reported(get("mingru").recurrence)
    brief = run("check", "mingru").stdout
    assert brief == f"{report.verdict}\n" and brief.count("\n") == 1
    assert "mingru: all laws hold" in brief and "nearest to its bound: " in brief
    for flag in ("-v", "--verbose"):
        long = run("check", "mingru", flag).stdout
        assert long == f"{report}\n" and "grad initial_state" in long and "inputs: z real" in long


@pytest.mark.parametrize("options", [["--examples", 6], ["--tokens", 20], ["-v"]], ids=str)
def test_random_calls_take_no_options_of_the_laws(options):
    """They were ignored."""
    name = {"-v": "--verbose"}.get(options[0], options[0])
    words = rf"--fuzz runs random calls instead of the laws, so that it takes no {name}$"
    assert re.search(words, one_line(run("check", "mingru", "--fuzz", 1, *options, code=2)))


def test_check_tells_briefly_what_is_broken(tmp_path, reported):
    path = tmp_path / "rigged.py"
    path.write_text(RIGGED)
    report = reported(find(f"{path}:wrong").recurrence)
    brief = run("check", f"{path}:wrong", code=1).stdout
    assert "1 broken" in brief and "scan, y is off by 1.0e-02" in brief and "to repeat it" in brief
    head = next(line for line in brief.splitlines() if line.startswith("law"))
    assert "scan" in head and "chunk" not in head  # the table of what is broken alone
    assert f"{report}\n" == run("check", f"{path}:wrong", "-v", code=1).stdout


def test_what_breaks_everywhere_alike_is_told_once():
    row = Row("forms", "float64", "scan", "exception", math.inf, 0.0, Example(), "RuntimeError: out of memory")
    rows = tuple(replace(row, law=f"law{i}", quantity=f"q{i}") for i in range(52))
    failures = tuple(Failure(r, "a law", False, "print()") for r in rows)
    brief = Report("own", "identity", "cpu", {"x": "real"}, rows, failures, 52, 1.0).brief()
    assert brief.count("out of memory") == 1 and "51 more broken: law1 (scan), " in brief
    assert len(brief.splitlines()) < 30 and "… and 40 lines like these" in brief


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--device", "cuda"), "s6: device 'cuda' was asked for, but torch finds no GPU"),
        (("--device", "cuda:1"), "s6: device 'cuda:1' was asked for, but torch finds no GPU"),
        (("--device", "gpu"), "s6: 'gpu' is no device; give cpu or cuda"),
        (("--device", "meta"), "have no numbers to check"),
        (("--backend", "triton"), "backend='triton' was asked for, but its kernels need CUDA tensors"),
        (("--backend", "abacus"), "there is no backend 'abacus'; backends are torch, triton and auto"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing")
def test_check_where_it_cannot_run_is_one_clear_line(args, expected, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert expected in one_line(run("check", "s6", *args, code=2))


def test_check_exits_with_one_for_a_wrong_recurrence(tmp_path):
    path = tmp_path / "rigged.py"
    path.write_text(RIGGED)
    result = run("check", f"{path}:wrong", "--examples", 1, "--tokens", 12, "--json", code=1)
    found = json.loads(result.stdout)
    assert not found["ok"] and {f["form"] for f in found["failures"]} == {"scan"}


@pytest.fixture(scope="module")
def compared(own, tmp_path_factory):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("report") / "deep"
    options = (
        "--steps",
        3,
        "--recall",
        1,
        "--seeds",
        2,
        "--rates",
        "0.006",
        "--no-papers",
        "--size",
        "d_model=32,layers=1",
    )
    return out, run("compare", f"{own}:leaky", "--mixers", "qlstm", *options, "--out", out, "--workers", 1)


def test_compare_writes_a_page_and_json_and_prints_a_table(compared):
    out, result = compared
    assert "leaky" in result.stdout and "qlstm" in result.stdout and str(out / "compare.html") in result.stdout
    assert [m["name"] for m in json.loads((out / "compare.json").read_text())["mixers"]] == ["qlstm", "leaky"]
    assert (out / "compare.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_compare_draws_a_saved_report_again_and_repeats_its_settings(compared, tmp_path):
    out, first = compared
    again = run("compare", "--from", out / "compare.json", "--out", tmp_path)
    assert (tmp_path / "compare.html").read_text() == (out / "compare.html").read_text()
    assert not (tmp_path / "compare.json").exists() and again.stdout.splitlines()[:4] == first.stdout.splitlines()[:4]
    settings = ("--config", out / "compare.json", "--steps", 2, "--workers", 1, "--json", "--out", tmp_path)
    data = json.loads(run("compare", "qlstm", *settings).stdout)
    before = json.loads((out / "compare.json").read_text())
    assert data["setup"] == before["setup"] | {"steps": 2}  # what the line says goes first
    assert data["protocol"] == before["protocol"]


def test_compare_exits_with_one_when_a_mixer_fails(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bad.py"
    path.write_text(
        "import dsf\nfrom dsf import System, Value, exp\n"
        "@dsf.recurrence\ndef broken(v: Value, keep: Value): return System(A=keep, B=exp(exp(v + 10)), C=1)\n"
    )
    result = run("compare", f"{path}:broken", "--steps", 2, "--recall", 0, "--out", tmp_path, "--png", code=1)
    assert "broken failed: the loss is not finite" in result.stderr
    assert "broken" in json.loads((tmp_path / "compare.json").read_text())["failed"]
    assert "not finite" in (tmp_path / "compare.html").read_text(encoding="utf-8")


def test_compare_says_on_stderr_how_far_it_is(compared):
    assert "1 trained: qlstm" in compared[1].stderr and "2 trained: leaky" in compared[1].stderr


def test_compare_json_and_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike; every unhappy family is unhappy in its own way. " * 80)
    args = (
        "compare",
        "hgrn",
        "--steps",
        1,
        "--recall",
        0,
        "--seeds",
        1,
        "--rates",
        "6e-3",
        "--text",
        text,
        "--out",
        tmp_path,
        "--png",
        "--json",
    )
    found = json.loads(run(*args).stdout)
    assert found["text"]["name"] == "text.txt" and found["setup"]["steps"] == 1
    assert (tmp_path / "pictures" / "kernel_hgrn.png").exists()


@pytest.mark.parametrize("command", ["zoo", "plan", "check", "compare"])
def test_an_unknown_mixer_gets_near_names(command):
    message = one_line(run(command, "deltanett", code=2))
    assert "no mixer is called 'deltanett'" in message and "deltanet" in message


def test_an_unknown_mixer_does_not_get_all_names():
    message = one_line(run("plan", "zzzz", code=2))
    assert "`dsf zoo` lists all" in message and "deltanet" not in message
    assert "near names: mamba" in one_line(run("plan", "mambda", code=2))


@pytest.mark.parametrize(
    ("given", "name"),
    [("mamba", "s6"), ("Mamba-2", "ssd"), ("GatedDeltaNet", "gated_deltanet"), ("RG-LRU", "rg_lru"), ("S6", "s6"),
     ("gated-DeltaNet", "gated_deltanet"), ("Mamba2Mixer", "ssd"), ("LinearAttention", "linear_attention")],
)  # fmt: skip
def test_names_that_people_know_find_their_mixer(given, name):
    assert json.loads(run("plan", given, "--json").stdout)["recurrence"] == name


def test_every_entry_alias_and_class_leads_where_it_says():
    for entry in ZOO:
        for spelling in (entry.name, entry.name.upper(), entry.name.replace("_", "-"), entry.name.replace("_", "")):
            assert get(spelling) is entry and canonical(spelling) == entry.name
    for alias, name in ALIASES.items():
        assert get(alias).name == name != alias
    for entry in ZOO:
        if entry.module is not None:
            assert get(entry.module.__name__).module.__name__ == entry.module.__name__
    in_fla = {"RWKV7Attention": "rwkv7", "HGRN2Attention": "hgrn2", "MultiScaleRetention": "retnet"}
    for spelling, name in (in_fla | {"forgetting_transformer": "fox"}).items():
        assert get(spelling).name == name
    assert canonical("nothing known") == "nothing known"


@pytest.mark.parametrize(
    ("source", "function", "expected"),
    [
        (None, "f", "there is no file"),
        ("import nowhere_at_all", "f", "ModuleNotFoundError: No module named 'nowhere_at_all' (line 1)"),
        ("x = (", "f", "SyntaxError"),
        ("raise SystemExit", "f", "SystemExit"),
        (OWN, "leeky", "has no 'leeky'; its recurrences are leaky"),
        (OWN, "plain", "is of type function, expected a recurrence"),
        ("x = 1", "f", "has no 'f'; it has no @dsf.recurrence"),
        ("import dsf\n@dsf.recurrence\ndef f(x): return x", "f", "input `x` needs an annotation"),
    ],
)
def test_a_file_that_holds_no_recurrence_is_one_clear_line(tmp_path, source, function, expected):
    path = tmp_path / "user.py"
    if source is not None:
        path.write_text(source)
    message = one_line(run("plan", f"{path}:{function}", code=2))
    assert expected in message and "user.py" in message


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("plan", "user.py"), "which function?"),
        (("plan", "softmax_attention", "--form", "scan"), "has no scan form"),
        (("plan", "s6", "--dtype", "int8"), "dtypes are float64"),
        (("compare", "--text", "nowhere.txt"), "nowhere.txt does not exist"),
        (("compare", "--mixers", " , "), "names no mixer"),
        (("compare", "--mixers", "s6,s6"), "named twice"),
        (("compare", "s6", "--rates", "fast"), "expected different positive numbers"),
        (("compare", "s6", "--size", "d_modle=3"), "expected NAME=VALUE with a positive number, NAME of d_model"),
        (
            ("compare", "ssd", "--no-papers", "--size", "d_model=2,n_heads=1,layers=64,d_state=2,headdim=2"),
            "d_model 2 is so small that no MLP",
        ),
        (("compare", "s6", "--device", "tpu"), "expected cpu or cuda"),
        (("bench", "s6", "--device", "tpu"), "expected cpu or cuda"),
        (("bench", "s6", "--device", "cpu:0"), "expected cpu or cuda"),
        (("compare", "--from", "nowhere.json"), "nowhere.json: cannot be read"),
        (("compare", "s6", "--from", "a.json", "--recall", "0"), "takes no names and no --recall"),
        (("compare", "--from", "a.json", "--no-papers", "--save-weights"), "no --papers and no --save-weights"),
        (("analyze", "--from", "a.json", "--tokens", "9", "--heads", "1"), "takes no --tokens and no --heads"),
        (("compare", "s6", "--config", "nowhere.json"), "nowhere.json: cannot be read"),
        (("compare", "s6", "--save-weights", "--rates", "0"), "expected different positive numbers"),
        (("analyze", "nowhere", "--png", "pictures"), "nowhere"),
        (("analyze",), "expected either a model or --from"),
        (("analyze", "--from", "nowhere.json"), "nowhere.json"),
        (("bench", "nowhere", "--json"), "no mixer is called 'nowhere'"),
        (("zoo", "nowhere", "--json"), "no mixer is called 'nowhere'"),
    ],
)
def test_bad_options_are_one_clear_line_and_leave_no_file(args, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in one_line(run(*args, code=2))
    assert not list(tmp_path.iterdir())


def test_an_empty_text_and_an_impossible_folder_are_one_clear_line(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "is empty" in one_line(run("compare", "--text", empty, code=2))
    for below in (empty, empty / "below"):
        assert "cannot make this folder" in one_line(run("compare", "s6", "--out", below, code=2))


def test_a_folder_that_takes_no_files_is_one_clear_line_before_work(tmp_path, monkeypatch):
    access = os.access  # a superuser may write where others may not
    monkeypatch.setattr(
        os, "access", lambda path, mode: (mode != os.W_OK or Path(path) != tmp_path) and access(path, mode)
    )
    for args in (("compare", "s6", "--out", tmp_path), ("analyze", "typeseg", "--out", tmp_path / "a.html")):
        assert "cannot write into this folder" in one_line(run(*args, code=2))


def test_a_read_only_disk_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    page = tmp_path / "page.html"
    page.write_text("whole")
    for method in ("write_text", "unlink"):  # what stands for it is gone, and cannot be removed
        monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(dsf.DsfError, match=r"cannot write .*page.html: Read-only file system; an existing file is"):
        whole_text(page, "other")
    assert page.read_text() == "whole"


def test_a_full_disk_is_one_sentence_for_every_kind_of_file(tmp_path):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.savefig = full
    new, old = tmp_path / "new" / "page.png", tmp_path / "page.png"
    old.write_text("whole")
    pairs = [(partial(png, figure), new), (partial(png, figure), old), (partial(whole, write=full), old)]
    for write, path in [*pairs, (partial(whole_files, write=full), tmp_path)]:
        with pytest.raises(dsf.DsfError, match=rf"^the disk of {path} is full; an existing file is unchanged$"):
            write(path)
    assert [f for f in tmp_path.rglob("*") if f.is_file()] == [old] and old.read_text() == "whole"


@pytest.mark.parametrize("args", [("plan",), ("plan", "s6", "--T", 0), ("nothing",), ("compare", "--steps", 0)])
def test_wrong_usage_exits_with_two(args):
    assert "Traceback" not in run(*args, code=2).output


COMMAND = f"{sys.executable} -c 'from dsf.analysis.cli import main; main()'"
FORKED = """
import os, sys
import dsf.analysis._cli_app
from dsf.analysis.cli import main

os.environ["COLUMNS"] = "99"
for arguments in (["zoo"], ["plan", "gla", "--json"]):
    for full in (False, True):
        unread, output = (None, os.open("/dev/full", os.O_WRONLY)) if full else os.pipe()
        said, errors = os.pipe()
        child = os.fork()
        if not child:
            if unread is not None:
                os.close(unread)
            os.dup2(output, 1), os.dup2(errors, 2)
            sys.argv = ["dsf", *arguments]
            main()
            raise AssertionError("main ends the process")
        for x in (output, errors, *([] if full else [unread])):
            os.close(x)
        with open(said) as text:
            print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.read()], flush=True)  # before the next fork
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_that_takes_no_more_is_no_traceback():
    """A pipe that nobody reads ended with 1, which says that a law is broken, a full disk in a traceback."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    found = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert found == [[141, ""], [2, "dsf: the disk of the output is full\n"]] * 2
    closed = subprocess.run(["bash", "-c", f"{COMMAND} zoo >&-"], capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_what_needs_too_much_memory_is_one_line(own):
    done = CliRunner().invoke(app, ["bench", f"{own}:leaky", "--tokens", "1000000000000", "--device", "cpu"])
    assert done.exit_code == 2 and done.stderr.startswith("dsf: there is not enough memory for this: "), done.output
    assert len(done.stderr.splitlines()) == 1


def test_what_a_users_file_prints_is_no_part_of_the_json(tmp_path):
    file = tmp_path / "talks.py"
    file.write_text(OWN + "print('hello')\n")
    done = CliRunner().invoke(app, ["plan", f"{file}:leaky", "--json"])
    assert json.loads(done.stdout)["recurrence"] == "leaky" and done.stderr == "hello\n"


def test_help_lists_every_command_and_each_says_what_it_does():
    shown = run("--help").stdout
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert name in shown.split() and command.callback.__doc__.split("\n")[0][:20] in run(name, "--help").stdout
    assert run("--version").stdout == f"dsf {dsf.__version__}\n"


def test_shells_can_complete():
    assert "--install-completion" in run("--help").stdout
    typed = {"_DSF_COMPLETE": "complete_bash", "COMP_WORDS": "dsf do", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=typed, prog_name="dsf").stdout.split() == ["doctor"]


def test_without_extras_one_line_names_them():
    """The entry point, with typer out of reach."""
    program = "import sys; sys.modules['typer'] = None; from dsf.analysis.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "dsf-zoo[cli]" in done.stderr


@pytest.mark.parametrize(
    ("size", "heads", "width"),
    [("d_model=64", 4, 16), ("d_model=1000", 8, 125), ("d_model=2048", 16, 128), ("d_model=1024,n_heads=4", 4, 256)],
)
def test_heads_of_a_wider_comparison_are_as_narrow_as_layers_make_them(size, heads, width):
    from dsf.analysis._cli_compare import _setup

    setup = _setup(size)
    assert (setup.n_heads, setup.d_state, setup.headdim) == (heads, width, width)


@pytest.mark.parametrize(
    ("size", "changed"),
    [
        ("batch=3", {"batch": 3}),
        ("n_heads=4", {"n_heads": 4, "d_state": 24, "headdim": 24}),
        ("d_model=64", {"d_model": 64, "d_state": 8, "headdim": 8}),
        ("d_model=64,d_state=5", {"d_model": 64, "d_state": 5, "headdim": 8}),
    ],
)
def test_sizes_of_the_line_leave_the_other_sizes_of_a_settings_file(size, changed):
    from dsf.analysis._cli_compare import _setup

    before = {"d_model": 96, "layers": 1, "n_heads": 8, "d_state": 10, "headdim": 12, "seq": 64, "steps": 2}
    assert _setup(size, **before) == _setup("", **{**before, **changed})
