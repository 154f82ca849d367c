"""Training of a `dsf.models` language model on a text with transformers' Trainer, for `dsf train`."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.utils.data import Dataset

import dsf
from dsf.analysis._write import Left, refusals, whole, whole_files, whole_text
from dsf.analysis.checkpoints import RECORD, kept, last_checkpoint
from dsf.analysis.ranks import Ranks, whole_state
from dsf.analysis.records import File, Number, Record, read, schema_field
from dsf.analysis.report import finite
from dsf.analysis.text import HELD_OUT, read_text
from dsf.analysis.training import check_seed
from dsf.language.errors import DsfError, InputError
from dsf.mixers._files import files_of
from dsf.mixers.models.causal_lm import CausalLM
from dsf.mixers.models.config import SIZES, ModelConfig, sized

RATES = {"tiny": 3e-3, "20m": 1e-3, "100m": 6e-4, "340m": 3e-4}
EVALUATED = 64  # held-out windows at most
Progress = Callable[[int, float], None]  # (steps done, loss in nats)


@dataclass(frozen=True)
class Run:
    """Settings of a training run.

    mixer: names separated by commas, a pattern over the layers. out: folder of the results. text: a file, None for
    Python's documentation. size: of `dsf.models.SIZES`. tokenizer: "bytes", or a folder that save_pretrained wrote.
    batch: sequences a step; seq: tokens a sequence. lr: the highest learning rate, None for that of the size. saves:
    number of checkpoints. cp, tp: sizes of the groups of torchrun's processes that share each sequence, and the heads;
    the groups share the batch. graph: steps on GPUs come from a CUDA graph, unless they go through torch.compile.
    """

    mixer: str
    out: Path
    text: Path | None = None
    size: str = "tiny"
    steps: int = 1000
    tokenizer: str = "bytes"
    device: str = "cpu"
    lr: float | None = None
    batch: int = 16
    seq: int = 256
    bf16: bool = False
    compile: bool = False
    seed: int = 0
    saves: int = 5
    cp: int = 1
    tp: int = 1
    graph: bool = True

    @property
    def ranks(self) -> Ranks:
        """The ranks of torchrun's processes. Raises InputError for numbers that do not fit."""
        return Ranks.of(self)


class Identity(Record):
    """What must be equal for a checkpoint to fit a run. text, sources: SHA-256 of the text, and of the files of the
    user's recurrences, by their places in the run's folder. encoding: of the text's tokens by a folder's tokenizer.
    """

    model: dict[str, JsonValue]
    text: str
    steps: int
    batch: int
    seq: int
    seed: int
    lr: float
    bf16: bool
    tokenizer: str
    sources: dict[str, str] | None = None
    encoding: str | None = None


class Begun(File):
    """The content of train.json while a run goes on."""

    schema_: Literal["dsf.train/1"] = schema_field("dsf.train/1")
    identity: Identity


class TokensRead(Record):
    """The text of a run, and its number of tokens."""

    name: str
    tokens: int


class Trained(Begun):
    """The content of train.json after a run's end. loss, held_out: (step, nats a token)."""

    run: Run
    text: TokensRead
    parameters: int
    loss: list[tuple[int, Number]]
    held_out: list[tuple[int, Number]]
    bits_per_token: Number | None
    seconds: float
    tokens_per_second: float
    versions: dict[str, str]

    @property
    def mixers(self) -> str:
        """The names of the mixers, separated by commas."""
        return ", ".join(ModelConfig(**self.identity.model).mixers)


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a text at given starts, in the same order for every model."""

    def __init__(self, tokens: Tensor, starts: Tensor, seq: int) -> None:
        self.tokens, self.starts, self.seq = tokens, starts, seq

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = int(self.starts[index])
        window = self.tokens[begin : begin + self.seq].long()
        return {"input_ids": window, "labels": window}


@dataclass(frozen=True)
class Prepared:
    """A checked run with all that it needs; nothing was written yet."""

    run: Run
    config: ModelConfig
    tokenizer: Any
    train: Windows
    held_out: Windows
    text: str
    identity: Identity
    checkpoint: Path | None


def prepare(run: Run, resume: bool) -> Prepared:
    """Read and tokenize the text, and check everything before training. resume: go on from the last checkpoint.

    Raises InputError for all that would fail later, DsfError without transformers or accelerate.
    """
    for package in ("transformers", "accelerate"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise DsfError(f"dsf train needs {package}: pip install 'dsf-zoo[models]'") from error
    mixers = [name.strip() for name in run.mixer.split(",") if name.strip()]
    if run.size not in SIZES:
        sized(run.size, mixers)  # raises the error that lists the sizes
    if run.device not in ("cpu", "cuda"):
        raise InputError(
            f"--device {run.device}: expected cpu or cuda (of several GPUs, CUDA_VISIBLE_DEVICES picks one)"
        )
    if run.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA GPU that torch can use")
    if run.lr is not None and not 0 < run.lr < math.inf:
        raise InputError(f"--lr {run.lr}: expected a number above 0")
    check_seed("--seed", run.seed)
    sized(run.size, mixers)  # unknown mixers, before the text is read
    ranks = run.ranks
    name, data = read_text(run.text)
    tokenizer = byte_tokenizer() if run.tokenizer == "bytes" else load_tokenizer(run.tokenizer)
    tokens = tokens_of(tokenizer, data)
    held = int(len(tokens) * HELD_OUT)
    if held < run.seq + 1:
        raise InputError(
            f"the text {name} has {len(tokens):,} tokens; --seq {run.seq} needs at least "
            f"{math.ceil((run.seq + 1) / HELD_OUT):,}: a tenth is held out"
        )
    config = sized(run.size, mixers, len(tokenizer), fused_loss=True)
    with torch.device("meta"):
        model = CausalLM(config)  # raises what its layers refuse
    if ranks.tp > 1:
        from dsf.parallel.heads import check_heads

        check_heads(model, ranks.tp)
    identity = Identity(
        model=config.model_dump(mode="json"), text=hashlib.sha256(data).hexdigest(), steps=run.steps, batch=run.batch,
        seq=run.seq, seed=run.seed, lr=run.lr or RATES[run.size], bf16=run.bf16, tokenizer=run.tokenizer,
    )  # fmt: skip
    if run.tokenizer != "bytes":
        identity.encoding = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    if sources := _sources(config):
        identity.sources = {place: hashlib.sha256(file.read_bytes()).hexdigest() for place, file in sources.items()}
    generator = torch.Generator().manual_seed(run.seed)
    split = len(tokens) - held
    starts = torch.randint(0, split - run.seq, (run.steps * run.batch,), generator=generator)
    spread = torch.linspace(split, len(tokens) - run.seq - 1, min(EVALUATED, held // run.seq)).long()
    return Prepared(
        run, config, tokenizer, Windows(tokens, starts, run.seq), Windows(tokens, spread, run.seq), name, identity,
        last_checkpoint(run.out, identity.to_dict(), resume),
    )  # fmt: skip


def byte_tokenizer() -> Any:
    """A tokenizer of transformers whose tokens are the bytes of UTF-8, with ids 0 to 255."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    letters = _byte_letters()
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(others)) for b in range(256)]


def load_tokenizer(folder: str) -> Any:
    """A tokenizer from a local folder. Raises InputError."""
    transformers: Any = importlib.import_module("transformers")
    if not Path(folder).is_dir():
        raise InputError(f"--tokenizer {folder}: expected the folder of a tokenizer, or bytes")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many classes
        raise InputError(f"--tokenizer {folder} cannot be loaded: {' '.join(str(error).split())}") from error


def tokens_of(tokenizer: Any, data: bytes) -> Tensor:
    """The tokens of a text, int32 [length]."""
    if len(tokenizer) == 256 and tokenizer.convert_ids_to_tokens(0) == _byte_letters()[0]:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int32)
    ids = tokenizer(data.decode("utf-8", errors="replace"), add_special_tokens=False).input_ids
    return torch.tensor(ids, dtype=torch.int32)


def train(prepared: Prepared, progress: Progress | None = None) -> Trained:
    """Train or resume; write model, tokenizer, record and loss curve into the run's folder; returns the record.

    Raises DsfError for a full disk and for a loss that is not finite. Complete files in the folder stay complete.
    """
    from dsf.analysis.trainer import make_trainer

    run, ranks = prepared.run, prepared.run.ranks
    with ranks.joined(run.device), refusals(run.out, partial(kept, run.out)):
        ranks.wait()  # until all processes have read the folder
        if ranks.rank == 0:
            _begin(prepared)
        ranks.wait()
        trainer = make_trainer(prepared, progress)
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=None if prepared.checkpoint is None else str(prepared.checkpoint))
        record = _record(prepared, trainer, time.perf_counter() - start)
        model = trainer.model
        if ranks.world > 1:
            state = whole_state(trainer.model)
            model = trainer.new_model(state) if ranks.rank == 0 else None
        if model is not None:
            model.config.fused_loss = False  # a model that is loaded later returns its logits
            saved = (model, prepared.tokenizer)
            left = partial(kept, run.out)
            whole_files(run.out, lambda folder: [part.save_pretrained(str(folder)) for part in saved], left)
            _curve(run.out / "loss.png", record, left)
            whole_text(run.out / RECORD, json.dumps(finite(record.to_dict()), indent=1) + "\n", left)
        ranks.wait()
    return record


def _begin(prepared: Prepared) -> None:
    """Make the folder, and write what is known before training. Raises InputError where it cannot be made."""
    out = prepared.run.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot make this folder ({error.strerror})") from error
    _keep_sources(prepared)
    if prepared.checkpoint is None:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        begun = Begun(identity=prepared.identity)
        whole_text(out / RECORD, json.dumps(begun.to_dict(), indent=1) + "\n", partial(kept, out))


def _record(prepared: Prepared, trainer: Any, seconds: float) -> Trained:
    run, log = prepared.run, trainer.state.log_history
    done = run.steps - (0 if prepared.checkpoint is None else int(prepared.checkpoint.name.rpartition("-")[2]))
    speed = done * run.batch * run.seq / seconds
    if not done:  # the run was complete: its speed is that of its training
        before = read(run.out / RECORD)
        seconds, speed = before.get("seconds", seconds), before.get("tokens_per_second", speed)
    held = [(e["step"], e["eval_loss"]) for e in log if "eval_loss" in e]
    return Trained(
        identity=prepared.identity,
        run=run,
        text=TokensRead(name=prepared.text, tokens=len(prepared.train.tokens)),
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        loss=[(e["step"], e["loss"]) for e in log if "loss" in e],
        held_out=held,
        bits_per_token=held[-1][1] / math.log(2) if held else None,
        seconds=seconds,
        tokens_per_second=speed,
        versions={"dsf": dsf.__version__, "torch": torch.__version__},
    )


def _keep_sources(prepared: Prepared) -> None:
    """Copy the files of the user's recurrences into the folder, so that what was trained can be read and opened."""
    out = prepared.run.out
    for place, file in _sources(prepared.config).items():
        whole(out / place, partial(Path.write_bytes, data=file.read_bytes()), partial(kept, out))


def _sources(config: ModelConfig) -> dict[str, Path]:
    """The files of the user's recurrences and what they import from their folders: place in the run's folder -> file.

    Raises InputError for two different files with one place.
    """
    found: dict[str, Path] = {}
    for path, colon, _ in (mixer.rpartition(":") for mixer in dict.fromkeys(config.mixers)):
        for place, file in files_of(Path(path)).items() if colon else ():
            other = found.setdefault(place, file)
            if other.read_bytes() != file.read_bytes():
                raise InputError(
                    f"{other} and {file} are different files of one name, and the run keeps a copy of both: rename one"
                )
    return found


def _curve(path: Path, record: Trained, left: Left) -> None:
    """Write the loss curve as a picture, where matplotlib is installed."""
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return
    figure = figure_module.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for points, label, marker in ((record.loss, "training", None), (record.held_out, "held out", "o")):
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3)
    title = f"{record.mixers} on {record.text.name}"
    axes.set(xlabel="step", ylabel="nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    whole(path, lambda other: figure.savefig(other, dpi=150, format="png"), left)
