"""The protocol of a comparison: equal layers and parameters, tried learning rates, several seeds, further tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dsf.analysis._write import whole
from dsf.analysis.compare import recall
from dsf.analysis.compare.records import Kind, Learnt, Parameters, Spread
from dsf.analysis.measures.state import parameter_count
from dsf.analysis.subjects import Subject, find
from dsf.analysis.text import Text
from dsf.analysis.training import (
    ByteLM,
    Setup,
    at_least,
    bits_per_byte,
    check_rates,
    fit,
    loss_on,
    make_model,
    train,
)
from dsf.language.errors import InputError
from dsf.mixers import Mixer
from dsf.mixers.layer import Layer
from dsf.mixers.softmax_attention import softmax_attention

TIMES = (1, 2, 4, 8)  # lengths of text to test, in training lengths
LARGEST_GAP = 0.02  # largest relative difference of parameters
SAMPLE = 240  # bytes of generated text
Make = Callable[..., Mixer]
Tell = Callable[[int, float], None]  # (steps done, bits)


@dataclass(frozen=True)
class Protocol:
    """The runs of each mixer.

    seeds: number of models of each layer, from setup.seed on. rates: learning rates to try; a single one is taken
    without a trial. trial_steps: steps of a trial, at least 2, 0 for a quarter of setup.steps. recall_steps: steps of
    the recall task, 0 for none. papers: whether the paper's layer is trained too. keep: folder for the weights, or
    None. Raises InputError for values out of range.
    """

    seeds: int = 3
    rates: tuple[float, ...] = (2e-3, 6e-3, 1.8e-2)
    trial_steps: int = 0
    recall_steps: int = 0
    papers: bool = True
    keep: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("trial_steps", 0), ("recall_steps", 0)):
            at_least(name, getattr(self, name), least)
        if self.trial_steps == 1:
            raise InputError(
                "trial_steps is 1, expected 0 or at least 2: no rate has changed the loss of the first step"
            )
        check_rates("rates", self.rates)

    def trial(self, setup: Setup) -> int:
        """The steps of a trial."""
        return self.trial_steps or max(2, setup.steps // 4)

    def steps(self, setup: Setup, kind: Kind) -> int:
        """All training steps of one layer."""
        trials = len(self.rates) * self.trial(setup) if len(self.rates) > 1 else 0
        return trials + self.seeds * (setup.steps + (self.recall_steps if kind == "equal" else 0))


def maker(subject: Subject, kind: Kind) -> Make:
    """The constructor of the layer: the `Layer` of the recurrence, or the paper's."""
    return subject.make if kind == "paper" else partial(Layer, subject.recurrence)


def kinds(subject: Subject, protocol: Protocol) -> list[Kind]:
    """The kinds of layers to train."""
    return ["equal", "paper"] if protocol.papers and subject.has_module else ["equal"]


def count(make: Make, setup: Setup) -> int:
    """The number of parameters of a model, counted on the meta device."""
    with torch.device("meta"):
        return sum(p.numel() for p in ByteLM(make, setup).parameters())


def matched(makes: Sequence[Make], setup: Setup) -> list[Setup]:
    """Setups with MLP widths that make the parameters of all models equal, to LARGEST_GAP.

    The common number is that of softmax attention in its `Layer` with an MLP of 2 · d_model, or more where a layer is
    so large that its MLP would be narrower than d_model / 2. Raises InputError for models so small that no width fits.
    """
    goal = count(partial(Layer, softmax_attention), setup)
    least = max(1, setup.d_model // 2)
    at_least = [count(make, replace(setup, hidden=least)) for make in makes]
    goal = max(goal, *at_least)
    slope = setup.layers * (2 * setup.d_model + 1)
    setups = [replace(setup, hidden=least + round((goal - size) / slope)) for size in at_least]
    for make, own in zip(makes, setups, strict=True):
        if abs(count(make, own) / goal - 1) > LARGEST_GAP / 2:
            raise InputError(f"d_model {setup.d_model} is so small that no MLP makes the parameters equal to 2 %")
    return setups


class _Run(NamedTuple):
    """The results of one seed's model, as in `Learnt`."""

    curve: list[float]
    seconds: float
    after: float
    by_length: dict[str, float]
    recall: dict[str, float] | None
    weights: str | None


def learn(
    subject: Subject, kind: Kind, text: Text, setup: Setup, protocol: Protocol, tell: Tell
) -> tuple[Learnt, ByteLM]:
    """Train one layer of a mixer by the protocol; returns (results, the first seed's model).

    Raises DsfError for a loss that is not finite.
    """
    make = maker(subject, kind)
    done = 0

    def advance(step: int, bits: float) -> None:
        tell(done + step, bits)

    trials: dict[str, float] = {}
    if len(protocol.rates) > 1:
        for rate in protocol.rates:
            trials[f"{rate:g}"] = _trial(make, text, replace(setup, lr=rate, steps=protocol.trial(setup)), advance)
            done += protocol.trial(setup)
    rate = min(protocol.rates, key=lambda r: trials.get(f"{r:g}", 0.0))
    models, runs, before = [], [], math.nan
    for number in range(protocol.seeds):
        own = replace(setup, lr=rate, seed=setup.seed + number)
        model = make_model(make, own)
        if not number:
            before = bits_per_byte(model, text.held_out, setup.seq)
        curve, seconds = train(model, text, own, advance)
        done += setup.steps
        after, lengths = bits_per_byte(model, text.held_out, setup.seq), by_length(model, text.held_out, setup.seq)
        recalled = None
        if protocol.recall_steps and kind == "equal":
            recalled = _recall(make, replace(own, steps=protocol.recall_steps), advance)
            done += protocol.recall_steps
        models.append(model if not number or protocol.keep else None)
        weights = None if protocol.keep is None else keep(model, subject, kind, own, protocol.keep)
        runs.append(_Run(curve, seconds, after, lengths, recalled, weights))
    first = models[0]
    assert first is not None
    mixer = cast(Any, first.blocks[0]).mixer
    return Learnt(
        kind=kind,
        layer=_name(make),
        has_convolution=mixer.conv1d is not None,
        parameters=Parameters(model=parameter_count(first), mixer=parameter_count(mixer)),
        hidden=setup.hidden or 2 * setup.d_model,
        rates=trials,
        rate=rate,
        before=before,
        after=Spread.of([r.after for r in runs]),
        by_length=_together([r.by_length for r in runs]),
        recall=None if runs[0].recall is None else _together([r.recall for r in runs if r.recall is not None]),
        curve=[round(statistics.fmean(x), 4) for x in zip(*(r.curve for r in runs), strict=True)],
        seconds=sum(r.seconds for r in runs),
        sample=sample(first, text),
        weights=[r.weights for r in runs if r.weights is not None],
    ), first


def _trial(make: Make, text: Text, setup: Setup, tell: Tell) -> float:
    """Training bits per byte in the last quarter of a trial, infinite where it diverged. Its seed is used in no
    other run.
    """
    own = replace(setup, seed=setup.seed + 1000)
    try:
        curve, _ = train(make_model(make, own), text, own, tell)
    except (ArithmeticError, RuntimeError, ValueError):
        return float("inf")
    return statistics.fmean(curve[-max(1, len(curve) // 4) :])


def _recall(make: Make, setup: Setup, tell: Tell) -> dict[str, float]:
    """Accuracy of a new model trained on the recall task."""
    model = make_model(make, setup)
    fit(model, recall.sequences, partial(recall.loss, model), setup, tell)
    return recall.accuracy(model, model.embedding.weight.device)


@torch.no_grad()
def by_length(model: ByteLM, data: Tensor, seq: int, windows: int = 24) -> dict[str, float]:
    """Bits per byte of the same bytes after contexts of seq, 2 seq, 4 seq, ... bytes, by length, where data is long
    enough.

    Counted on the last seq / 2 bytes of every window.
    """
    lengths = [n for n in (seq * times for times in TIMES) if n < len(data)]
    if not lengths:
        return {}
    ends = torch.linspace(lengths[-1], len(data) - 1, windows).long().unique().unsqueeze(1)
    found = {}
    for length in lengths:
        cut = data[ends - length + torch.arange(length + 1)]
        parts = cut.split(8)
        total = sum(loss_on(model, part, max(1, seq // 2)).item() * len(part) for part in parts)
        found[str(length)] = total / len(cut) / torch.tensor(2.0).log().item()
    return found


def sample(model: ByteLM, text: Text) -> str:
    """Text that the model generates after the first held-out sentence."""
    return model.generate(text.sentence().encode(), SAMPLE).decode("utf-8", errors="replace")


def keep(model: ByteLM, subject: Subject, kind: Kind, setup: Setup, folder: Path) -> str:
    """Write a model's weights and settings to a file that `load` reads; returns its path."""
    path = folder / f"{subject.name}-{kind}-{setup.seed}.pt"
    data = {"given": subject.given, "kind": kind, "setup": asdict(setup), "weights": model.state_dict()}
    data["system"] = str(subject.recurrence)
    whole(path, lambda other: torch.save(data, other))
    return str(path)


def load(path: Path) -> ByteLM:
    """The model in a file of `dsf compare --save-weights`. Raises InputError for another file, and where the mixer was
    declared otherwise then."""
    try:
        data = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception:  # what torch raises for files that it did not write
        data = None
    if not isinstance(data, dict) or {"given", "kind", "setup", "weights"} - data.keys():
        raise InputError(f"{path} is no file of dsf compare --save-weights")
    subject = find(data["given"])
    if data.get("system", str(subject.recurrence)) != str(subject.recurrence):
        then = " ".join(data["system"].split())
        raise InputError(f"{path}: {subject.given} was edited since it was trained, when it was {then}")
    model = make_model(maker(subject, data["kind"]), Setup(**{**data["setup"], "device": "cpu"}))
    model.load_state_dict(data["weights"])
    return model


def _together(runs: Sequence[dict[str, float]]) -> dict[str, Spread]:
    return {key: Spread.of([run[key] for run in runs]) for key in runs[0]}


def _name(make: Make) -> str:
    return getattr(make, "__name__", None) or str(cast(Any, make).func.__name__)
