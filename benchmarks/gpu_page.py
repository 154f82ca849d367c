"""The tables of docs/performance.md: what is in benchmarks/results, nothing else. Here that of gpu_matrix.json."""

import json
from pathlib import Path

HEAD = [
    "recurrence", "heads x N x P", "T", "ours ms", "peak MiB", "floor ms", "ours ÷ floor", "peer", "peer ms",
    "peer's peak MiB", "ours ÷ peer: time", "memory",
]  # fmt: skip
OURS = ("ours", "ours, CUDA graph")


def floor(r, run):
    """ms forward and forward+backward: bytes at the copy rate or products at the matmul rate, the larger."""
    moved = (r["bytes"] / run["copy GB/s"] / 1e6, r["bytes both"] / run["copy GB/s"] / 1e6)
    computed = r["flops"] / run["matmul TFLOP/s"] / 1e9
    return [max(moved[0], computed), max(moved[1], 3 * computed)]


def pair(values, digits=2):
    """'forward / forward+backward', a dash for what is not known."""
    return " / ".join("–" if x is None else f"{x:.{digits}f}" for x in values)


def times(r):
    return [r.get("forward"), r.get("both")]


def ratios(a, b):
    return [x / y if x is not None and y is not None else None for x, y in zip(a, b, strict=True)]


def lines_of(case, runs):
    """Table lines of one case: ours beside each peer, then ours in a CUDA graph where that was measured."""
    by_side = {r["who"]: r for r in case}
    ours = by_side.get("ours")
    if ours is None:
        return []
    least, mine = floor(ours, runs[ours["run"]]), times(ours)
    digits = 3 if mine[0] is not None and mine[0] < 0.2 else 2
    peak = f"{ours['peak']:.0f}" if "peak" in ours else "–"
    shape = f"{ours['heads']} x {ours['N']} x {ours['P']}"
    lead = [ours["name"], shape, ours["T"], pair(mine, digits), peak, pair(least), pair(ratios(mine, least), 1)]
    lines = []
    for r in [r for r in case if r["who"] not in OURS] or [None]:
        cells = ["", "", "", "", ""]
        if r is not None:
            star = "" if r["run"] == ours["run"] else "*"
            failed = f" ({r['error'].split(':')[0]})" if "error" in r else ""
            share = ratios([ours.get("peak")], [r.get("peak")])
            theirs = f"{r['peak']:.0f}" if "peak" in r else "–"
            cells = [
                r["who"],
                pair(times(r), digits) + failed,
                theirs,
                pair(ratios(mine, times(r))) + star,
                pair(share),
            ]
        lines.append((["", "", "", "", "", "", ""] if lines else lead) + cells)
    if graph := by_side.get("ours, CUDA graph"):
        lines.append(["", "", "in a CUDA graph", pair(times(graph), digits), "", "", "", "", "", "", "", ""])
    return lines


def page(data):
    """Both tables, and what each run was."""
    cases = {}
    for r in data["rows"]:
        cases.setdefault((r["row"], r["heads"], r["N"], r["P"], r["T"]), []).append(r)
    lines = [HEAD, ["---"] * len(HEAD)]
    for case in cases.values():
        lines += lines_of(case, data["runs"])
    text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    used = sorted({r["run"] for r in data["rows"]}, key=int)
    for name in used:
        run, rows = data["runs"][name], sum(r["run"] == name for r in data["rows"])
        text += (
            f"\n\nRun {name} ({rows} measurements): commit {run['commit']}, {run['gpu']}, torch {run['torch']}, "
            f"triton {run['triton']}, copy {run['copy GB/s'] / 1e3:.2f} TB/s, "
            f"bf16 products {run['matmul TFLOP/s']:.0f} TFLOP/s."
        )
    if any(line[10].endswith("*") for line in lines):
        text += "\n\n\\* ours and the peer were measured in different runs."
    if data["first"]:
        calls = ", ".join(f"{r['name']} {r['seconds']:.1f} s" for r in data["first"])
        text += f"\n\nFirst forward+backward call of a new recurrence, nothing compiled before: {calls}."
    return text


def add_options(parser):
    """What every script says of its record and its table."""
    parser.add_argument("--json", type=Path, help="where the record is written")
    parser.add_argument("--commit", default="", help="which commit the record is of, where there is no git")
    add_page_options(parser)


def add_page_options(parser):
    """Of these, what `shows` reads."""
    parser.add_argument("--page", type=Path, help="measure nothing: print the table of this record")
    parser.add_argument("--into", type=Path, help="and put the table into this page")


def shows(options, page):
    """True where the table of a record was asked for; it is printed, or put into a page."""
    if options.page is None:
        return False
    text = page(json.loads(options.page.read_text()))
    put_into(options.into, options.page.name, text) if options.into else print(text)
    return True


def put_into(path, name, text):
    """Replace what is between <!-- name --> and <!-- end of name --> on a page."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    page = path.read_text()
    before, rest = page.split(begin)
    path.write_text(before + begin + text + end + rest.split(end)[1])
