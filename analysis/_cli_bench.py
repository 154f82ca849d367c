"""The command `dsf bench`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from dsf.analysis import _cli_analyze

_NAME = "a mixer of the zoo, or file.py:function for a recurrence of your own"


def bench(
    subject: Annotated[str, typer.Argument(metavar="NAME|FILE.py:FUNCTION", help=_NAME)],
    heads: Annotated[int, typer.Option(min=1, help="heads")] = 4,
    n: Annotated[int, typer.Option(min=1, help="size of the Key axis")] = 64,
    p: Annotated[int, typer.Option(min=1, help="size of the Value axis")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="tokens a sequence")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 1,
    layer: Annotated[bool, typer.Option("--layer", help="time the layers around it too, of width heads · p")] = False,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16, float16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda; the GPU if there is one by default")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.01, help="spent on each timing")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Say what a recurrence or its layer costs here: times, memory, the floor, the peers that are installed."""
    from dsf.analysis import bench as engine
    from dsf.analysis.subjects import find

    found = find(subject)
    sizes = engine.Sizes(
        batch=batch, tokens=tokens, heads=heads, n=n, p=p, dtype=dtype, device=_cli_analyze.device_of(device)
    )
    with _cli_analyze.Bar() as bar:
        bar.step(f"time {found.name}", 0, 1)
        result = engine.bench(found, sizes, layer, seconds)
    if as_json:
        typer.echo(result.model_dump_json(indent=1, by_alias=True))
        return
    console = _cli_analyze.console()
    console.print(table(result))
    for line in words(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def table(result: Any) -> Table:
    """The table of times (ms) and memory: one row an implementation, and one for the lower bound."""
    labels = ("", "forward", "x floor", "both", "decode", "first call", "kept, MiB", "peak, MiB")
    shown = _cli_analyze.table(*labels, left=("",))
    for row in result.rows:
        if row.failed:
            shown.add_row(row.who, "failed")
            continue
        numbers = (row.forward, row.forward / result.floor, row.both, row.decode, row.first, row.kept, row.peak)
        shown.add_row(row.who, *("–" if x is None else f"{x:.3g}" if x < 1000 else f"{x:,.0f}" for x in numbers))
    shown.add_row("floor", f"{result.floor:.3g}", "1", "", f"{result.floor_decode:.3g}")
    return shown


def words(result: Any) -> list[str]:
    """Lines that say what was measured and how."""
    sizes = result.sizes
    lines = [
        f"ms of one call: {sizes.batch} x {sizes.tokens} tokens, {sizes.heads} heads, N {sizes.n}, P {sizes.p}, "
        f"{sizes.dtype} on {sizes.device}; decode: one token of each sequence.",
        f"Floor: {result.limited_by} of the chosen form at {result.copy_rate:,.0f} GB/s (copy) and "
        f"{result.product_rate:.3g} TFLOP/s (matrix product), both measured here.",
        "Kept: what forward holds for backward.",
        result.plan,
    ]
    lines += [f"{row.who} failed: {row.failed}" for row in result.rows if row.failed]
    if result.missing:
        lines.append(f"not here (not installed, or for GPUs only): {', '.join(result.missing)}")
    return lines
