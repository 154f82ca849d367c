"""The law `parallel`: sequences over simulated ranks (dsf.parallel.Simulated) with random layouts and exchanges."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dsf.call.recurrence import State
from dsf.checking.compare import Measure, Measures, compare_runs
from dsf.checking.examples import Example, lengths
from dsf.checking.measure import AGAINST, Subject
from dsf.language.expr import const
from dsf.language.spec import Spec
from dsf.parallel import Simulated
from dsf.parallel.derive import kind_of_map

WORTH = 1e-6  # the least relative effect of earlier ranks on an output, or the law tests nothing

BACKWARDS = 0.3  # the share of examples that run in reverse


def over_ranks(subject: Subject, form: str, example: Example) -> Measures:
    """The measures of the law.

    The example's seed chooses layout, exchange, an empty shard, packed sequences, and whether it runs in reverse.
    """
    if form == AGAINST or example.tokens < 2:
        return
    chance = random.Random(example.seed)
    way = ("shards", "headtail", "packed")[example.seed % 3]
    if way == "headtail":
        ranks = chance.randint(1, max(1, min(3, example.tokens // 2)))
        example = replace(example, tokens=example.tokens // (2 * ranks) * 2 * ranks, cuts=())
        world = Simulated(ranks, "headtail", exchange=_exchange(subject, chance, 1))
    else:
        sizes = lengths(example.bounds)
        if way == "packed":
            example = replace(example, batch=1)
            cuts = sorted(chance.sample(range(1, example.tokens), min(2, example.tokens - 1)))
            sizes = lengths([0, *cuts, example.tokens])
        sizes.insert(chance.randint(0, len(sizes)), 0)
        nodes = 2 if len(sizes) % 2 == 0 else 1
        world = Simulated(len(sizes), sizes=sizes, nodes=nodes, exchange=_exchange(subject, chance, nodes))
    packed = torch.tensor(example.bounds, device=subject.device) if way == "packed" else None
    rows = len(example.bounds) - 1 if packed is not None else 0
    reverse = chance.random() < BACKWARDS

    def whole(form: str, given: Mapping[str, Tensor], start: State | None) -> tuple[Tensor, State | None]:
        return subject.run(form, given, start, packed, reverse=reverse)

    def cut(form: str, given: Mapping[str, Tensor], start: State | None) -> tuple[Tensor, State | None]:
        return subject.run(form, given, start, packed, world, reverse)

    text = f"{world.ranks} ranks, {way}, {world.exchange} exchange{', in reverse' if reverse else ''}"
    yield from compare_runs(subject, form, example, cut, whole, rows, text)
    if way == "shards" and not example.regimes and example.cuts and _remembers(subject.recurrence.spec):
        yield _worth(subject, form, example)


def _exchange(subject: Subject, chance: random.Random, nodes: int) -> str:
    """A random exchange that the recurrence supports."""
    spec = subject.recurrence.spec
    if spec.is_attention or kind_of_map(spec) == "channel":
        return "auto"
    return chance.choice(["gather", "transpose", "relay", *(["two-level"] if nodes > 1 else [])])


def _remembers(spec: Spec) -> bool:
    """False where, by what is written, no token's output depends on earlier tokens: the cut has nothing to lose."""
    rows = spec.inner.rows
    if spec.system.window == 1 or all(not r.terms and r.dense is None for r in rows):
        return False
    later = spec.system.read == "before" or (spec.frame is not None and bool(spec.frame.leaves))
    return later or not any(r.normal.decay is const(0) and not r.normal.corrections for r in rows)


@torch.no_grad()
def _worth(subject: Subject, form: str, example: Example) -> Measure:
    """Whether the first output after some cut changes without the tokens before the cut."""
    inputs, most = subject.inputs(example), 0.0
    y, _ = subject.run(form, inputs, subject.state(example))
    for cut in example.cuts:
        found, _ = subject.run(form, subject.part(inputs, cut, cut + 1))
        here = y[:, cut : cut + 1]
        size = max(float(here.abs().max()), float(found.abs().max()), 1e-300)
        most = max(most, float((here - found).abs().max()) / size)
    detail = f"what came before the cuts at {list(example.cuts)} changes the outputs after them by {most:.1e}"
    return Measure("worth", 0.0 if most > WORTH else math.inf, 0.0, detail)
