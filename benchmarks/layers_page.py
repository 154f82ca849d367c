"""The table of layers in docs/performance.md: what is in benchmarks/results/layers.json, nothing else."""

HEAD = [
    "layer or part", "ours or whose", "ms", "peak MiB", "floor ms", "ms ÷ floor", "matrix products ms", "recurrence ms"
]  # fmt: skip
FIRST = "1"  # the run whose rows do not name it


def pair(r, name):
    """'forward / forward+backward' of a row, a dash for what was not measured."""
    found = [r.get(f"{name} forward" if name else "forward"), r.get(f"{name} both" if name else "both")]
    return " / ".join("–" if x is None else f"{x:.2f}" for x in found)


def ratio(r):
    found = [(r.get(x), r.get(f"floor {x}")) for x in ("forward", "both")]
    return " / ".join("–" if x is None or not least else f"{x / least:.2f}" for x, least in found)


def page(data):
    """The table, a line a row, and under it what was run where."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for r in data["rows"]:
        if "forward" not in r:
            continue
        run = "" if r["run"] == FIRST else f" (run {r['run']})"
        lines.append([
            r["row"], r["who"] + run, pair(r, ""), f"{r['peak']:.0f}", pair(r, "floor"), ratio(r),
            pair(r, "products"), pair(r, "recurrence"),
        ])  # fmt: skip
    about = [
        f"Run {name}: {run['gpu']}, torch {run['torch']}, triton {run['triton']}, commit {run['commit'][:7]}, "
        f"copy {run['copy GB/s']:.0f} GB/s, matrix products {run['matmul TFLOP/s']:.0f} TFLOP/s."
        for name, run in data["runs"].items()
    ]
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in lines] + ["", *about])
