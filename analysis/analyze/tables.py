"""The tables of `dsf analyze`: each a function of its records that returns a block of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dsf.analysis.analyze.anatomy import EPS
from dsf.analysis.analyze.records import Analysed, Gates, Head, LeftAlone, Run
from dsf.analysis.report import Block, Cell, Column, count, duration, table

Colors = Mapping[str, str]

SHOWN_CONTEXTS = (1024, 4096, 65_536, 1_048_576)


def layers(data: Analysed, colors: Colors) -> Block:
    """The table of layers, or runs of layers: one row each."""
    columns = [
        Column("layer", "place in the model, and kind of mixer; ← reads from right to left", "ascending"),
        Column("structure", "of the transition A"),
        Column("heads", "copies side by side, each with a state of its own"),
        Column("N × P", "rows and columns of one head's state"),
        *_measured(data),
    ]
    rows = []
    for place, run in enumerate(data.runs):
        size = "KV cache" if run.keeps_keys else f"{run.N} × {run.P}"
        rows.append([
            Cell(run.name, place, color=colors[run.name], strong=True),
            Cell(run.structure.partition(" (")[0].replace(" ", "\u00a0"), note=run.recurrence),
            _number(len(run.heads)),
            Cell(size.replace(" ", "\u00a0")),
            *_measures(run, run.window, run.along.rank[-1] if run.along else None),
        ])  # fmt: skip
    return _filled(columns, rows)


def heads(data: Analysed, colors: Colors) -> Block:
    """The table of heads: one row each."""
    columns = [Column("layer", "", "ascending"), Column("head"), *_measured(data)]
    rows = [
        [
            Cell(run.name, place, color=colors[run.name]),
            _number(head.head),
            *_measures(head, run.window, head.state.rank if head.state else None),
        ]
        for place, run in enumerate(data.runs)
        for head in run.heads
    ]
    return _filled(columns, rows)


def _filled(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Block:
    """A table without the columns in which no row has a number."""
    kept = [i for i in range(len(columns)) if any(row[i].sort is None or row[i].sort == row[i].sort for row in rows)]
    return table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _measured(data: Analysed) -> list[Column]:
    return [
        Column("half-life", "tokens until half is forgotten: median over the state"),
        Column("slowest tenth", "90th percentile of the half-life"),
        Column("horizon", f"tokens until {EPS:.0%} is left, median"),
        Column("looks back", f"mean distance in tokens, on the first {data.window} tokens"),
        Column("effective state", "numbers of the past that the future depends on, a channel (entropy)"),
        Column("rank", "effective rank of the state at the end of the text"),
        Column("decay", "share of the state that a token keeps, mean"),
        Column("erase", "share that a token erases in one direction, mean"),
        Column("write", "norm of what a token writes, mean"),
    ]


def _measures(of: Run | Head, window: int | None, rank: float | None) -> list[Cell]:
    gates, size = of.gates or Gates(), of.effective_state_size
    life = of.half_life.percentiles if of.half_life else None
    return [
        _life(life.median if life else None, window),
        _life(life.high if life else None, window),
        _life(of.horizon.median if of.horizon else None, window),
        *map(_number, (of.distance, size.entropy if size else None, rank, gates.decay, gates.erase, gates.write)),
    ]


def state(data: Analysed, colors: Colors) -> Block:
    """The table of bytes kept at some contexts, by kind of layer."""
    contexts, lines = data.contexts, dict(data.state.bytes_by_kind)
    columns = [Column("kind of layer"), *(Column(f"at {c:,} tokens") for c in SHOWN_CONTEXTS)]
    if data.state.convolutions:
        lines["convolutions in front"] = [data.state.convolutions] * len(contexts)
    places = [contexts.index(c) for c in SHOWN_CONTEXTS]
    rows = [
        [Cell(kind, color=colors.get(kind)), *(Cell(nbytes(sizes[p]), sizes[p]) for p in places)]
        for kind, sizes in lines.items()
    ]
    totals = [sum(sizes[p] for sizes in lines.values()) for p in places]
    rows.append([Cell("together", strong=True), *(Cell(nbytes(t), t, strong=True) for t in totals)])
    return table(columns, rows)


def costs(data: Analysed) -> Block:
    """The table of work per token of every form."""
    columns = [
        Column("recurrence", "and how many layers run it"),
        Column("heads, N, P"),
        Column("form", "one and the same recurrence computed in another order"),
        Column("flops per token", "multiplications and additions of one layer, projections left out"),
        Column("bytes per token", "inputs, outputs and the state's share"),
    ]
    rows = [
        [
            Cell(
                f"{entry.recurrence}{f', window {entry.window}' if entry.window else ''}, "
                f"{entry.layers} layer{'s' * (entry.layers > 1)}"
            ),
            Cell(f"{entry.heads}, {entry.N}, {entry.P}"),
            Cell(form),
            Cell(count(work.flops), work.flops),
            Cell(count(work.bytes), work.bytes),
        ]
        for entry in data.costs
        for form, work in entry.forms.items()
    ]
    return table(columns, rows)


def converted(data: Analysed) -> Block:
    """The table of converted modules."""
    columns = [Column("module"), Column("kind"), Column("runs as"), Column("parameters", "projections included")]
    columns.append(Column("notes", "where the original is wrong and the converted layer is right"))
    rows = [
        [
            Cell(x.name),
            Cell(x.kind),
            Cell(f"{x.recurrence}, {x.structure}"),
            Cell(count(x.parameters), x.parameters),
            Cell("; ".join(x.notes) or "–"),
        ]
        for x in data.conversion.layers
    ]
    return table(columns, rows)


def left_alone(entries: Sequence[LeftAlone]) -> Block:
    """The table of modules that were not converted, with reasons."""
    rows = [[Cell(x.name), Cell(x.type), Cell(x.why)] for x in entries]
    return table([Column("left alone"), Column("class"), Column("because")], rows)


def nbytes(number: float) -> str:
    """A readable number of bytes: 512 B, 1.5 KiB, 48 MiB."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while abs(number) >= 1024 and len(units) > 1:
        number /= 1024
        units.pop()
    return f"{number:.0f} {units[-1]}" if abs(number) >= 999.5 else f"{number:.3g} {units[-1]}"


def _life(found: float | None, window: int | None) -> Cell:
    """The cell of a half-life or horizon; of a window, for a layer that drops older tokens at once."""
    if found is None and window is not None:
        return Cell(f"window {window}", window, note="kept whole, then dropped")
    if found is None:
        return _number(None)
    return Cell("never" if math.isinf(found) else duration(found), found)


def _number(value: float | None) -> Cell:
    if value is None or math.isnan(value):
        return Cell("–", math.nan, note="not defined for this mixer")
    return Cell(count(value), value)
