"""dsf train: trains, goes on bit for bit, refuses before work, and leaves whole what was whole."""

import errno
import json
import shutil
import signal
from functools import partial

import pytest
import torch

import dsf

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
typer = pytest.importorskip("typer")

from ranks import spawned  # noqa: E402
from ranks_train import SMALLEST, trained  # noqa: E402
from transformers import Trainer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from dsf.analysis import checkpoints  # noqa: E402
from dsf.analysis import train as engine  # noqa: E402
from dsf.analysis._cli_app import app  # noqa: E402

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 40
PATTERN = "own.py:forgetful,softmax_attention"
OWN = """import dsf
from dsf import I, Key, Scalar, System, Value, l2norm, outer, sigmoid


@dsf.recurrence
def forgetful(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    k, beta = l2norm(k), sigmoid(b)
    return System(A=sigmoid(a) * (I - beta * outer(k, k)), B=k * (beta * v), C=q)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "own.py").write_text(OWN)
    # the smallest model that is one
    monkeypatch.setitem(engine.SIZES, "tiny", SMALLEST)
    return tmp_path


def command(folder, *more, out="run", mixer="own.py:forgetful", steps=4):
    words = ["--mixer", mixer, "--text", "text.txt", "--steps", steps, "--batch", 2, "--seq", 16, "--device", "cpu"]
    return CliRunner().invoke(app, ["train", *map(str, [*words, "--out", out, *more])])


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_run_is_trained_saved_and_opened(folder):
    done = command(folder, mixer="own.py:forgetful,softmax_attention", steps=12)
    assert done.exit_code == 0, done.output
    assert "12 steps" in done.output and "wrote run" in done.output
    record = json.loads((folder / "run/train.json").read_text())
    assert engine.Trained.load(folder / "run/train.json").to_dict() == record
    assert record["loss"][-1][1] < record["loss"][0][1] and len(record["loss"]) == 12
    assert record["held_out"][-1][0] == 12 and (folder / "run/loss.png").stat().st_size > 5000
    assert not list((folder / "run").glob(".*"))
    (folder / "own.py").unlink()  # the run has a copy
    found = dsf.analysis.models.load_model("run")
    assert found.tokenize("Ωa") == [0xCE, 0xA9, ord("a")] and found.piece(ord("a")) == "a"
    ids = torch.tensor([found.tokenize(TEXT[:60])])
    assert found.model(ids, labels=ids).loss.item() == pytest.approx(record["held_out"][-1][1], abs=0.6)
    opened = CliRunner().invoke(app, ["analyze", "run", "--tokens", "24", "--out", "a.html", "--text", "text.txt"])
    assert opened.exit_code == 0 and "2 mixers ran as recurrences" in " ".join(opened.output.split())


def test_a_last_step_that_breaks_the_model_is_no_success(folder):
    """No loss of training was of the model behind it."""
    done = command(folder, "--lr", "1e30", mixer="s6", steps=2)
    assert done.exit_code == 2 and "the loss is not finite after 2 steps; try a smaller --lr" in done.output
    assert not (folder / "run/model.safetensors").exists()


def test_a_run_is_opened_with_its_own_copy_of_the_recurrence(folder, monkeypatch):
    assert command(folder, steps=1).exit_code == 0
    ids = torch.arange(24)[None]
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained("run")(ids).logits
    (folder / "other").mkdir()
    (folder / "other/own.py").write_text(OWN.replace("sigmoid(a) *", "0.1 * sigmoid(a) *"))
    monkeypatch.chdir(folder / "other")  # where the run's own.py:forgetful is another
    opened = dsf.analysis.models.load_model("../run").model
    assert opened.config.mixers == [f"{folder / 'run/own.py'}:forgetful"]
    for model in (opened, AutoModelForCausalLM.from_pretrained(folder / "run")):
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_copy_of_a_recurrence_is_its_file_in_any_encoding(folder, newline):
    """A file in another encoding than UTF-8 ended in a traceback, and lines got other ends."""
    source = "# coding: latin-1\n# d'apr\xe8s Schlag et al.\n" + OWN
    (folder / "own.py").write_bytes(source.replace("\n", newline).encode("latin-1"))
    done = command(folder)
    assert done.exit_code == 0, done.stderr
    assert (folder / "run/own.py").read_bytes() == (folder / "own.py").read_bytes()


def test_modules_beside_the_recurrence_go_with_it(folder):
    (folder / "gates").mkdir()
    (folder / "gates/__init__.py").write_text("from gates.open import half, gate\n")
    (folder / "gates/open.py").write_text("import dsf\nhalf = 0.5\ndef gate(a): return dsf.sigmoid(a)\n")
    (folder / "unused.py").write_text("")
    (folder / "own.py").write_text("from gates import gate\n" + OWN.replace("A=sigmoid(a)", "A=gate(a)"))
    assert command(folder, steps=1).exit_code == 0
    kept = {str(file.relative_to(folder / "run")) for file in (folder / "run").rglob("*.py")}
    assert kept == {"own.py", "gates/__init__.py", "gates/open.py"}
    ids = torch.arange(24)[None]
    before = dsf.analysis.models.load_model("run").model(ids).logits
    (folder / "gates/open.py").write_text("import dsf\nhalf = 0.5\ndef gate(a): return half * dsf.sigmoid(a)\n")
    assert "gates/open.py has changed since the run" in command(folder, "--resume", steps=1).stderr
    shutil.copytree(folder / "run", folder / "moved")
    shutil.copy(folder / "gates/open.py", folder / "moved/gates/open.py")
    found = [dsf.analysis.models.load_model(name).model(ids).logits for name in ("moved", "run")]  # each its own gates
    assert torch.equal(found[1], before) and not torch.equal(found[0], before)


def test_different_files_of_one_name_are_refused(folder):
    for name, more in (("a", ""), ("b", "# other\n")):
        (folder / name).mkdir()
        (folder / name / "own.py").write_text(OWN + more)
    refused = command(folder, mixer="a/own.py:forgetful,b/own.py:forgetful")
    assert refused.exit_code == 2 and not (folder / "run").exists()
    assert refused.stderr.startswith("dsf: a/own.py and b/own.py are different files of one name"), refused.stderr
    (folder / "b/own.py").write_text(OWN)
    assert command(folder, mixer="a/own.py:forgetful,b/own.py:forgetful", steps=1).exit_code == 0


def test_a_run_that_was_stopped_goes_on_bit_for_bit(folder, monkeypatch):
    assert command(folder, out="whole").exit_code == 0
    from dsf.analysis import trainer

    save, seen = trainer._Trainer._save_checkpoint, []

    def stopping(self, *args, **kwargs):
        save(self, *args, **kwargs)
        seen.append(self.state.global_step)
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(trainer._Trainer, "_save_checkpoint", stopping)
    before, stopped = signal.getsignal(signal.SIGTERM), command(folder, out="parts")
    assert stopped.exit_code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    assert stopped.stderr == "dsf: stopped; the checkpoint of step 2 is kept, --resume goes on from it\n"
    assert seen == [1, 2] and not (folder / "parts/model.safetensors").exists()
    with pytest.raises(dsf.InputError, match="training run that has not ended; dsf train --resume"):
        dsf.analysis.models.load_model("parts")
    monkeypatch.setattr(trainer._Trainer, "_save_checkpoint", save)
    torch.manual_seed(99)
    assert command(folder, "--resume", out="parts").exit_code == 0
    one, other = weights(folder / "whole"), weights(folder / "parts")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    records = [json.loads((folder / name / "train.json").read_text()) for name in ("whole", "parts")]
    assert records[0]["loss"] == records[1]["loss"] and records[0]["held_out"] == records[1]["held_out"]
    assert command(folder, "--resume", out="parts").exit_code == 0  # of a run that is complete: its record stays
    again = json.loads((folder / "parts/train.json").read_text())
    assert again["tokens_per_second"] == records[1]["tokens_per_second"] > 0 and again["loss"] == records[1]["loss"]


def test_a_run_without_a_recurrence_does_not_promise_to_be_analysed(folder):
    done = command(folder, mixer="hyena", steps=1)
    words = " ".join(done.stdout.split())
    assert "wrote run (which dsf analyze does not open: its filters have a number of their own for every lag" in words
    opened = CliRunner().invoke(app, ["analyze", "run", "--tokens", "24", "--text", "text.txt", "--out", "a.html"])
    assert opened.exit_code == 2 and "and 1 more (Hyena): its filters" in " ".join(opened.stderr.split())


def test_ctrl_c_before_the_first_checkpoint_says_so(folder, monkeypatch):
    from dsf.analysis import trainer

    def stopping(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "make_trainer", stopping)
    stopped = command(folder)
    assert stopped.exit_code == 130
    assert stopped.stderr == "dsf: stopped; there is no checkpoint yet, --resume begins again\n"
    monkeypatch.setattr(engine, "prepare", stopping)
    assert command(folder, out="other").stderr == "dsf: stopped; nothing was written\n"


def test_a_signal_while_a_checkpoint_is_written_ends_the_run_in_words(folder, monkeypatch):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write = FileSystemWriter.write_data

    def stopping(self, *args, **kwargs):
        if "checkpoint-2" in str(self.path):
            signal.raise_signal(signal.SIGTERM)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", stopping)
    stopped = command(folder)
    assert stopped.stderr == "dsf: stopped; the checkpoint of step 1 is kept, --resume goes on from it\n"
    assert stopped.exit_code == 128 + signal.SIGTERM and not (folder / "run/checkpoints/checkpoint-2").exists()


def test_a_full_disk_leaves_the_last_checkpoint(folder, monkeypatch):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from dsf.mixers.models import hf

    write, save = FileSystemWriter.write_data, hf.DsfForCausalLM.save_pretrained

    def full(self, *args, **kwargs):
        if "checkpoint-3" in str(self.path):
            (engine.Path(self.path) / "half").write_bytes(b"half")
            raise full.error
        return write(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    # what a small tmpfs makes torch say, then what others do
    for error, words in (
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
            "the disk of run is full",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk of run is full"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot write run: Read-only file system"),
    ):
        full.error = error
        done = command(folder, *(["--resume"] if (folder / "run").exists() else []))
        assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
        assert done.stderr == f"dsf: {words}; the checkpoint of step 2 is kept, --resume goes on from it\n"
        assert not (folder / "run/checkpoints/checkpoint-3").exists()
    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    assert command(folder, "--resume").exit_code == 0
    before = (folder / "run/model.safetensors").read_bytes()

    def final(self, where, *args, **kwargs):
        if "checkpoint" not in str(where):
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, where, *args, **kwargs)

    monkeypatch.setattr(hf.DsfForCausalLM, "save_pretrained", final)
    assert command(folder, "--resume").exit_code == 2
    assert (folder / "run/model.safetensors").read_bytes() == before and not (folder / "run/.part").exists()
    monkeypatch.setattr(hf.DsfForCausalLM, "save_pretrained", save)
    monkeypatch.setattr(engine.Path, "write_bytes", lambda *args, **kwargs: final(None, "own.py"))
    words = "the disk of run/own.py is full; the checkpoint of step 4 is kept, --resume goes on from it"
    assert command(folder, "--resume").stderr == f"dsf: {words}\n"
    assert (folder / "run/own.py").read_bytes() == (folder / "own.py").read_bytes()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--mixer", "gated_delta"], "near names: gated_deltanet"),
        (["--mixer", "own.py:forgetfull"], "its recurrences are forgetful"),
        (["--size", "tinny"], "did you mean 'tiny'"),
        (["--seq", "4000"], "--seq 4000 needs at least 40,010"),
        (["--text", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--tokenizer", "nowhere"], "expected the folder of a tokenizer, or bytes"),
        (
            ["--tokenizer", "."],
            "cannot be loaded: Couldn't instantiate the backend tokenizer from one of: (1)",
        ),
        (["--resume"], "holds no training run"),
        (["--device", "cuda"], "no CUDA GPU"),
        (["--device", "cuda:1"], "--device cuda:1: expected cpu or cuda"),
        (["--lr", "0"], "--lr 0.0: expected a number above 0"),
        (["--seed", "5000000000"], "--seed is 5000000000, expected at most 4294967295"),
        (["--mixer", "hydra"], "hydra reads its sequences in both directions"),
        (["--mixer", "own.py:forgetful,hyena,s6"], "mixers has 3 entries, which do not divide n_layers"),
    ],
)
def test_bad_input_is_refused_before_work(folder, more, words):
    if "cuda" in more and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = command(folder, *more)
    assert done.exit_code == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.output
    assert not (folder / "run").exists()


def test_a_run_does_not_go_on_with_another_tokenizer_in_the_same_folder(folder):
    """Its tokens would be others, in a vocabulary of the same size."""
    saved = json.loads(engine.byte_tokenizer().backend_tokenizer.to_str())
    engine.byte_tokenizer().save_pretrained("tokenizer")

    def prepared(shift, resume=True):
        saved["model"]["vocab"] = {letter: (i + shift) % 256 for i, letter in enumerate(engine._byte_letters())}
        (folder / "tokenizer/tokenizer.json").write_text(json.dumps(saved))
        run = engine.Run("ssd", folder / "run", folder / "text.txt", steps=1, seq=16, tokenizer="tokenizer")
        return engine.prepare(run, resume).identity.to_dict()

    before = prepared(1, resume=False)
    (folder / "run").mkdir()
    (folder / "run/train.json").write_text(json.dumps({"identity": before}))
    assert prepared(1) == before
    with pytest.raises(dsf.InputError, match="has another encoding, and not this one"):
        prepared(2)
    del before["encoding"]  # as runs of earlier releases
    (folder / "run/train.json").write_text(json.dumps({"identity": before}))
    prepared(2)


def test_a_folder_with_another_run_is_refused(folder):
    assert command(folder, steps=1).exit_code == 0
    assert "--resume goes on with it" in command(folder, steps=1).stderr
    other = command(folder, "--resume", mixer="mingru", steps=1).stderr
    assert "another model (mixers" in other and "does not fit" in other
    assert "another steps (1), and not 2" in command(folder, "--resume", steps=2).stderr
    (folder / "text.txt").write_text(TEXT + "more")
    assert "has another text, and not this one" in command(folder, "--resume", steps=1).stderr
    (folder / "text.txt").write_text(TEXT)
    (folder / "own.py").write_text(OWN.replace("sigmoid(a) *", "sigmoid(a + 1) *"))
    assert "own.py has changed since the run in run began" in command(folder, "--resume", steps=1).stderr
    (folder / "own.py").write_text(OWN)
    assert "text.txt is a file; expected a folder" in command(folder, out="text.txt").stderr
    (folder / "full").mkdir()
    (folder / "full/thing").touch()
    assert "is not empty and holds no training run" in command(folder, out="full").stderr


def spread(folder, *more, out):
    """`dsf train` in two processes; the first alone says what was done."""
    words = ["--mixer", PATTERN, "--text", "text.txt", "--steps", 4, "--batch", 2, "--seq", 16, "--device", "cpu"]
    found = spawned(2, partial(trained, folder, [str(x) for x in [*words, "--out", out, *more]]))
    assert [code for code, _ in found] == [0, 0], found
    assert f"wrote {out}" in found[0][1] and "wrote" not in found[1][1]


def curves(run):
    record = json.loads((run / "train.json").read_text())
    return [value for name in ("loss", "held_out") for _, value in record[name]]


def test_processes_share_a_run_and_others_go_on_with_it(folder):
    """Two by heads to one, one to two by tokens: curves and weights as if one process had done it all."""
    assert command(folder, out="one", mixer=PATTERN).exit_code == 0
    spread(folder, "--tp", 2, out="two")
    assert curves(folder / "two") == pytest.approx(curves(folder / "one"), abs=2e-5)
    one, two = weights(folder / "one"), weights(folder / "two")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=0)
    whole = curves(folder / "one")
    for run in ("one", "two"):
        shutil.rmtree(folder / run / "checkpoints/checkpoint-4")  # as if it had been stopped after three steps
    assert command(folder, "--resume", out="two", mixer=PATTERN).exit_code == 0
    spread(folder, "--resume", "--cp", 2, out="one")
    for run in ("one", "two"):
        assert curves(folder / run) == pytest.approx(whole, abs=2e-5)
        record = json.loads((folder / run / "train.json").read_text())
        assert [step for step, _ in record["loss"]] == [1, 2, 3, 4]


def test_a_loss_is_of_its_targets_whatever_transformers_counts(folder, monkeypatch):
    assert command(folder, out="one", steps=1).exit_code == 0
    counted = partial(torch.tensor, 2 * 16)  # first tokens too, as transformers 5.6 does
    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", lambda *args, **kwargs: counted())
    assert command(folder, out="two", steps=1).exit_code == 0
    assert curves(folder / "two") == curves(folder / "one")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tp", "2"], "need a multiple of 2 processes, and there is 1: torchrun --no-python --nproc-per-node 2"),
        (["--cp", "2", "--tp", "2"], "--cp 2 and --tp 2 need a multiple of 4 processes"),
    ],
)
def test_processes_that_are_not_there_are_refused(folder, more, words):
    done = command(folder, *more)
    assert done.exit_code == 2 and words in " ".join(done.stderr.split()) and not (folder / "run").exists()


def test_runs_that_processes_cannot_share_are_refused(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--batch 2: 3 groups of processes" in command(folder).stderr
    assert "has n_heads=2, which 3 ranks cannot share" in command(folder, "--tp", "3").stderr
    assert "--compile works in one process only" in command(folder, "--cp", "3", "--compile").stderr
    assert not (folder / "run").exists()


def test_checkpoints_of_an_earlier_version_are_refused_in_words(tmp_path):
    (tmp_path / checkpoints.RECORD).write_text(json.dumps({"identity": {}}))
    old = tmp_path / "checkpoints" / "checkpoint-3"
    old.mkdir(parents=True)
    (old / checkpoints.WHOLE).touch()
    with pytest.raises(dsf.InputError, match="checkpoint-3 is of an earlier dsf"):
        checkpoints.last_checkpoint(tmp_path, {}, True)


def test_damaged_runs_are_refused_in_words(folder):
    assert command(folder, steps=2).exit_code == 0
    last, record = folder / "run/checkpoints/checkpoint-2", folder / "run/train.json"
    before = (folder / "run/model.safetensors").read_bytes()
    for path, content, words in (
        (record, b"[]", "cannot be read as the record of a run"),
        (record, b"{", "cannot be read as the record of a run"),
        (last / "scheduler.pt", None, "scheduler.pt is not there"),
        (last / "scheduler.pt", b"half", "checkpoint-2 cannot be read ("),
        (last / "state/__0_0.distcp", b"half", "checkpoint-2 cannot be read ("),
    ):
        whole = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        done = command(folder, "--resume", steps=2)
        assert done.exit_code == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        path.write_bytes(whole)
    assert (folder / "run/model.safetensors").read_bytes() == before
    shutil.rmtree(last)
    assert command(folder, "--resume", steps=2).exit_code == 0  # from the one before, to the same weights
    assert (folder / "run/model.safetensors").read_bytes() == before
