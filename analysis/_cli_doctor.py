"""The report of `dsf doctor` in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from dsf.analysis.doctor import BROKEN, EXTRAS, REFUSED, WORKS, Examination, Probed, Structure, examine

MARK = {WORKS: "[green]works[/]", BROKEN: "[bold red]broken[/]", REFUSED: "[dim]cannot run[/]"}


def look(calls: bool) -> Examination:
    """Examine, with a status line on stderr."""
    with Console(stderr=True).status("looking …") as status:
        return examine(calls, lambda text: status.update(f"{text} …"))


def show(console: Console, found: Examination) -> None:
    """Print the whole report, section by section."""

    def section(title: str, lines: list[str]) -> None:
        console.print(f"[bold]{title}[/]", highlight=False)
        for line in lines or ["[dim]none[/]"]:
            console.print(f"  {line}", highlight=False, soft_wrap=True)
        console.print()

    section("Versions", _versions(found.versions))
    section("GPUs", [
        f"{g.device}  {escape(g.name)}, {g.capability}, {g.free_gib} of {g.memory_gib} GiB free"
        for g in found.gpus
    ])  # fmt: skip
    if found.backends:
        section("Backends: outputs and gradients in float32 against the float64 oracle", _backends(found.backends))
    section("What runs where, for 2,048 tokens", _runs(found.runs))
    section("Caches", [
        f"{c.of:<17} {escape(c.path)}" + ("" if c.writable else "  [red]cannot be written[/]")
        for c in found.caches
    ])  # fmt: skip
    section("Environment", [
        f"{name}={escape(about.value)}  [dim]{about.meaning}[/]" for name, about in found.environment.items()
    ])  # fmt: skip
    section("Warnings", [escape(w) for w in found.warnings])
    console.print(verdict(found), highlight=False, soft_wrap=True)


def verdict(found: Examination) -> str:
    """The report's last line: whether all works."""
    bad = [f"{x.probe} on {x.backend}, {x.device}" for x in found.backends if x.status == BROKEN]
    if not found.ok:
        return f"[bold red]Broken:[/] {escape(', '.join(bad) or 'triton does not import')}"
    return "All that should work works." if found.backends else "No calls were made."


def _versions(found: dict[str, str | None]) -> list[str]:
    extras = {name for names in EXTRAS.values() for name in names}
    lines = [f"{name:<12} {escape(text or 'not installed')}" for name, text in found.items() if name not in extras]
    for extra, names in EXTRAS.items():
        words = ", ".join(f"{name} {found[name] or '–'}" for name in names)
        lines.append(f"[dim]{extra:<12}[/] {escape(words)}")
    return lines


def _backends(probed: list[Probed]) -> list[str]:
    out = []
    for x in probed:
        head = f"{x.backend:<7} {x.device:<7} {x.probe:<15} {MARK[x.status]}"
        error = f"  {x.error:.0e} of {x.allowed:g}, {x.seconds:.1f} s" if x.status == WORKS else ""
        out.append(head + error + (f"  {escape(x.why)}" if x.why else ""))
    return out


def _runs(rows: list[Structure]) -> list[str]:
    """Two lines for each structure: its mixers, and what runs on each device."""
    out = []
    for row in rows:
        places = [f"{place}: {c.form} on {c.backend} ({c.kernel})" for place, c in row.on.items()]
        more = f", {len(row.mixers) - 1} more" if len(row.mixers) > 1 else ""
        out.append(f"{row.structure:<31} [dim]{row.mixers[0]}{more}[/]\n    " + "\n    ".join(map(escape, places)))
    return out
