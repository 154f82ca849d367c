"""`analyze`: convert a trained model, record it on text, and measure every layer, for a report."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import dsf
from dsf.analysis.analyze import anatomy, records
from dsf.analysis.analyze.found import in_a_sentence
from dsf.analysis.analyze.records import Analysed, Run
from dsf.analysis.compare import CONTEXTS, machine
from dsf.analysis.convert import Converted, Layer, convert
from dsf.analysis.convert.softmax import declared
from dsf.analysis.measures import costs, parameter_count
from dsf.analysis.models import GIB, free_memory, longest_context
from dsf.analysis.pretrained import Pretrained
from dsf.analysis.record import Entry, record
from dsf.analysis.text import sentences
from dsf.language.errors import InputError

LAW = 1e-4  # limit of the change of outputs by a conversion, as a share of their range, in float32
LEAST_TOKENS = 8
SENTENCE = (20, 44)  # tokens of the sentence for pictures
LARGEST_RECORDING = 4.0  # GiB
STEPS = ("run the original", "convert", "measure on the text", "measure on a sentence")

Report = Callable[[str, int, int], None]  # (step, done, of)
Measure = Callable[[Entry, Run], Tensor | None]  # writes measures into the run; returns its maps


@dataclass(frozen=True)
class Choice:
    """What to record. tokens: of the text, at most. layers: see `chosen`. heads: a slice of each layer's heads.

    gib: limit of the recording of one run of a layer; by default 4, or half of the free memory if that is less.
    """

    tokens: int = 512
    layers: str | None = None
    heads: slice | None = None
    gib: float | None = None

    @property
    def limit(self) -> int:
        """The limit in bytes."""
        if self.gib is not None:
            return int(self.gib * GIB)
        return int(min(LARGEST_RECORDING * GIB, free_memory() / 2))


@dataclass
class Analysis:
    """The result of `analyze`. data: the content of the JSON file. maps: |Phi| of heads [H, T, T] by run, for pictures.

    maps is empty for an analysis read from a file.
    """

    data: Analysed
    maps: dict[str, Tensor] = field(default_factory=dict)

    @property
    def deviation(self) -> float:
        """The largest change of outputs by the conversion, as a share of their range."""
        return self.data.conversion.deviation


def analyze(
    pretrained: Pretrained, text: str, text_name: str, choice: Choice | None = None, report: Report | None = None
) -> Analysis:
    """Convert a model, compare its outputs before and after, and measure every chosen layer on the start of `text`.

    Memory: the model, its outputs twice, and one recorded run of one layer at a time. The model gets its own mixers
    back at the end. Raises InputError for a text with too few tokens, outputs that are NaN, layers and heads that are
    unknown, and layers that do not run on a text; ConversionError for a model without a known mixer; RecordingError for
    a run larger than the limit.
    """
    choice, tell = choice or Choice(), report or (lambda step, done, of: None)
    model = pretrained.model
    seconds: dict[str, float] = {}
    ids, cut_to = _tokens(pretrained, text, choice.tokens)
    sentence = _sentence(pretrained, text, ids.shape[1])
    with torch.no_grad():
        with _timed(seconds, "original", tell, STEPS[0]):
            before = outputs(model, ids)
        _check_numbers(model, before)
        with _timed(seconds, "convert", tell, STEPS[1]):
            converted = convert(model)
        with converted:
            with _timed(seconds, "converted", tell, STEPS[1]):
                after = outputs(model, ids)
            layers = chosen(choice.layers, converted.layers)
            _check_heads(choice.heads, layers)
            found = _Runs(layers, choice, tell)
            with _timed(seconds, "text", tell, STEPS[2]):
                found.over(model, ids, converted, anatomy.of_text, STEPS[2])
            with _timed(seconds, "sentence", tell, STEPS[3]):
                found.over(model, sentence, converted, anatomy.of_sentence, STEPS[3])
            runs, maps = found.finish()
            for run in runs:
                run.found = in_a_sentence(run, min(anatomy.WINDOW, ids.shape[1]))
            data = Analysed(
                dsf=dsf.__version__,
                machine=machine(),
                model=_of_model(pretrained, longest_context(model)),
                conversion=_of_conversion(converted, before, after),
                text=records.ReadText(
                    name=text_name,
                    tokens=ids.shape[1],
                    cut_to_context=cut_to,
                    bits_per_token=_bits_per_token(type(model).__name__, after, ids),
                    sentence="".join(pretrained.piece(i) for i in sentence[0].tolist()),
                    pieces=[pretrained.piece(i) for i in sentence[0].tolist()],
                ),
                window=anatomy.WINDOW,
                contexts=list(CONTEXTS),
                state=_states(converted),
                costs=_costs(layers, ids.shape[1]),
                runs=runs,
                seconds={k: round(v, 2) for k, v in seconds.items()},
                peak_gib=peak_memory(),
            )
    return Analysis(data, maps)


class _Runs:
    """The measures of every run of the chosen layers, from several passes of the model."""

    def __init__(self, layers: Sequence[Layer], choice: Choice, tell: Report) -> None:
        self.layers, self.choice, self.tell = layers, choice, tell
        self.runs: dict[tuple[str, int, int], Run] = {}
        self._maps: dict[tuple[str, int, int], Tensor] = {}

    def over(self, model: nn.Module, ids: Tensor, converted: Converted, measure: Measure, step: str) -> None:
        """Run the model and measure each run of each layer when it happens; only the maps are kept."""
        names = [layer.name for layer in self.layers]
        done: set[str] = set()

        def visit(entry: Entry) -> None:
            key = (entry.layer.name, entry.call, entry.part)
            maps = measure(entry, self.runs.setdefault(key, _identity(entry)))
            if maps is not None:
                self._maps[key] = maps
            done.add(entry.layer.name)
            self.tell(step, len(done), len(names))

        self.tell(step, 0, len(names))
        with record(converted, layers=names, heads=self.choice.heads, limit=self.choice.limit, visit=visit):
            outputs(model, ids)

    def finish(self) -> tuple[list[Run], dict[str, Tensor]]:
        """(the runs in the order of the layers, each with a short name; their maps by that name)."""
        for layer, short in zip(self.layers, short_names(self.layers), strict=True):
            mine = [run for run in self.runs.values() if run.layer == layer.name]
            both_ways = any(run.backward for run in mine)
            several = len({run.part for run in mine}) > 1
            first = (self.choice.heads or slice(None)).indices(layer.state[0] if layer.state else 0)[0]
            for run in mine:
                for head in run.heads:  # counted in the layer, not among those that were chosen
                    head.head += first
                arrow = " ←" if run.backward else " →"
                part = arrow if both_ways else f" part {run.part + 1}" if several else ""
                run.name = short + part + (f" call {run.call + 1}" if run.call else "")
        order = {layer.name: place for place, layer in enumerate(self.layers)}
        keys = sorted(self.runs, key=lambda key: (order[key[0]], *key[1:]))
        return [self.runs[k] for k in keys], {self.runs[k].name: self._maps[k] for k in keys if k in self._maps}


def _identity(entry: Entry) -> Run:
    layer = entry.layer
    _, n, p = layer.state or (0, 0, 0)
    return Run(
        name=layer.name, layer=layer.name, call=entry.call, part=entry.part, backward=entry.backward,
        kind=layer.kind, recurrence=layer.recurrence.name, structure=layer.recurrence.spec.structure, N=n, P=p,
    )  # fmt: skip


def chosen(spec: str | None, layers: Sequence[Layer]) -> list[Layer]:
    """The layers that a text such as `0,4-7,model.layers.9.mixer` names by place among the converted layers, or by
    name.

    All layers for None. Raises InputError, listing the layers.
    """
    if spec is None:
        return list(layers)
    names, places = [layer.name for layer in layers], set()
    for word in (w.strip() for w in spec.split(",")):
        between = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if word in names:
            places.add(names.index(word))
        elif between and int(between[1]) <= int(between[2] or between[1]) < len(layers):
            places.update(range(int(between[1]), int(between[2] or between[1]) + 1))
        else:
            raise InputError(
                f"--layers {word!r} is not there: {len(layers)} converted layers, 0-{len(layers) - 1}, "
                f"{names[0]} to {names[-1]}"
            )
    return [layers[i] for i in sorted(places)]


def outputs(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's outputs on ids [1, T]: logits, or an encoder's hidden states, [1, T, ...]."""
    out = model(ids)
    if isinstance(out, Tensor):
        return out
    logits = getattr(out, "logits", None)
    return out.last_hidden_state if logits is None else logits


def short_names(layers: Sequence[Layer]) -> list[str]:
    """Names without the parts at both ends that all have in common, plus the kind: backbone.layers.3.mixer is "3
    S6".
    """
    parts = [layer.name.split(".") for layer in layers]
    while len(parts) > 1 and all(len(p) > 1 and p[0] == parts[0][0] for p in parts):
        parts = [p[1:] for p in parts]
    while len(parts) > 1 and all(len(p) > 1 and p[-1] == parts[0][-1] for p in parts):
        parts = [p[:-1] for p in parts]
    numbers = [next((x for x in p if x.isdigit()), "") for p in parts]
    labels = [
        f"{n} {layer.kind.partition(',')[0]}" if n else ".".join(p)
        for n, p, layer in zip(numbers, parts, layers, strict=True)
    ]
    twice = {label for label, times in Counter(labels).items() if times > 1}
    return [".".join(p) if label in twice else label for label, p in zip(labels, parts, strict=True)]


def peak_memory() -> float | None:
    """The most GiB that this process has held, None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


@contextmanager
def _timed(seconds: dict[str, float], name: str, tell: Report, step: str) -> Iterator[None]:
    begin = time.perf_counter()
    tell(step, 0, 1)
    yield
    seconds[name] = time.perf_counter() - begin


def _tokens(pretrained: Pretrained, text: str, most: int) -> tuple[Tensor, int | None]:
    """(ids [1, T] of the start of the text, the model's longest context where that limits T)."""
    if most < LEAST_TOKENS:
        raise InputError(f"{most} tokens are too few to measure; expected at least {LEAST_TOKENS}")
    ids = pretrained.encode(text[: 64 * most])
    longest = longest_context(pretrained.model)
    cut_to = longest if longest is not None and longest < min(most, ids.shape[1]) else None
    ids = ids[:, : cut_to or most]
    if ids.shape[1] < LEAST_TOKENS:
        raise InputError(f"the text has {ids.shape[1]} tokens; expected at least {LEAST_TOKENS}")
    embedding: Any = getattr(pretrained.model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", math.inf)
    if int(ids.max()) >= rows:
        raise InputError(f"the tokenizer gives the token {int(ids.max())}, but the model has only {rows}: not its own")
    return ids, cut_to


def _sentence(pretrained: Pretrained, text: str, tokens: int) -> Tensor:
    """ids [1, T] of the first plain sentence of SENTENCE tokens, or of the start of the text if there is none."""
    start = text[: 64 * max(tokens, 1024)]
    shortest, longest = SENTENCE
    found = (pretrained.tokenize(s) for s in sentences(start))
    whole = next((ids for ids in found if shortest <= len(ids) <= min(longest, tokens)), None)
    ids = pretrained.tokenize(start) if whole is None else whole
    return torch.tensor([ids[: min(tokens, longest)]])


def _check_numbers(model: nn.Module, found: Tensor) -> None:
    if bool(found.isnan().any()):
        named = (name for name, p in model.named_parameters() if not bool(p.isfinite().all()))
        why = next((f"; {name} has weights that are not finite" for name in named), "")
        raise InputError(f"{type(model).__name__}: its outputs on the text are NaN{why}")


def _check_heads(heads: slice | None, layers: Sequence[Layer]) -> None:
    if all(layer.state is None for layer in layers):  # of a tower that reads images
        raise InputError(f"{layers[0].name} did not run on the text; choose other --layers")
    for layer in layers:
        if layer.state is None or heads is None:
            continue
        there = layer.state[0]
        if not range(there)[heads]:
            last = (there if heads.stop is None else heads.stop) - 1
            raise InputError(
                f"--heads {heads.start or 0} to {last}: {layer.name} has {there} head{'s' * (there != 1)}, "
                "counted from 0; choose others, or other --layers"
            )


def _bits_per_token(name: str, out: Tensor, ids: Tensor) -> float | None:
    """Cross entropy in bits per token; None for outputs that are no logits of the next token."""
    if not name.endswith(("ForCausalLM", "LMHeadModel")) or out.shape[-1] <= int(ids.max()):
        return None
    nats = nn.functional.cross_entropy(out[0, :-1].float(), ids[0, 1:])
    return float(nats) / math.log(2)


def _of_model(pretrained: Pretrained, context: int | None) -> records.Model:
    model = pretrained.model
    return records.Model(
        name=pretrained.name,
        about=pretrained.about,
        class_=type(model).__name__,
        parameters=parameter_count(model),
        longest_context=context,
    )


def _of_conversion(converted: Converted, before: Tensor, after: Tensor) -> records.Conversion:
    span = float(before.max() - before.min())
    moved = float((after - before).abs().max())
    return records.Conversion(
        layers=[
            records.ConvertedLayer(
                name=layer.name, kind=layer.kind, recurrence=layer.recurrence.name,
                structure=layer.recurrence.spec.structure, system=str(layer.recurrence),
                heads=layer.state and layer.state[0] * layer.parts, N=layer.state and layer.state[1],
                P=layer.state and layer.state[2], window=layer.window, notes=list(layer.notes),
                parameters=parameter_count(layer.module),
            )
            for layer in converted.layers
        ],
        left_alone=[records.LeftAlone(name=x.name, type=x.type, why=x.why) for x in converted.left_alone],
        largest_difference=moved,
        range=span,
        deviation=moved / span if span else moved,
    )  # fmt: skip


def _states(converted: Converted) -> records.StateBytes:
    """Bytes of state at each of CONTEXTS."""
    ran = [layer for layer in converted.layers if layer.state is not None]
    by_kind: dict[str, list[int]] = {}
    conv, cached = 0, [0] * len(CONTEXTS)
    for place, context in enumerate(CONTEXTS):
        sizes = converted.state_size(context)
        for layer in ran:
            line = by_kind.setdefault(layer.kind, [0] * len(CONTEXTS))
            line[place] += sizes[layer.name].recurrent * sizes[layer.name].width
            if not layer.recurrence.spec.is_attention and layer.state is not None:
                heads, _, p = layer.state
                cached[place] += context * heads * layer.parts * 2 * p * sizes[layer.name].width
        conv = sum(s.conv * s.width for s in sizes.values())
    return records.StateBytes(bytes_by_kind=by_kind, convolutions=conv, recurrent_if_cached=cached)


def _costs(layers: Sequence[Layer], tokens: int) -> list[records.Costs]:
    """The work of each form, one record for each recurrence, size and window."""
    found: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        if layer.state is not None:
            heads, n, p = layer.state
            found.setdefault((layer.recurrence.name, heads * layer.parts, n, p, layer.window), []).append(layer)
    out = []
    for (name, heads, n, p, window), same in found.items():
        own = same[0].recurrence
        if own.spec.is_softmax and own.spec.system.window != window:  # of a model's, which is found in its calls
            own = declared(window, sunk=False)
        forms = {
            c.form: records.Work(flops=c.flops, bytes=c.bytes) for c in costs(own, T=tokens, heads=heads, N=n, P=p)
        }
        sizes = {"heads": heads, "N": n, "P": p, "window": window}
        out.append(records.Costs(recurrence=name, kind=same[0].kind, layers=len(same), forms=forms, **sizes))
    return out
