"""What benchmarks/parallel.py prints: a line a row as it is measured, and the tables of docs/parallel.md from a record.

python benchmarks/parallel.py --page benchmarks/results/parallel.json --into docs/parallel.md
"""

KINDS = ("rows", "layers", "exchanges", "graphs", "far", "peers")  # of a record
WAYS = ("forward", "both")
SUFFIX = {"layers": " layer"}


# -- while it runs


def percent(row, key):
    found = row.get(key, {})
    return "  ".join(f"{100 * found[w]:5.1f} %" if w in found else "      -" for w in WAYS)


def line(row):
    """One row, for people."""
    text = f"{row['name']:15} {row['tokens_a_rank']:7}  strong {percent(row, 'strong')}  weak {percent(row, 'weak')}"
    ms = row.get("ranks_ms", {})
    text += "  " + " ".join(f"{ms[w]:8.3f}" if w in ms else "       -" for w in WAYS) + " ms"
    if "memory" in row and row["memory"].get("ratio"):
        text += f"  memory {row['memory']['ratio']:.3f}"
    if "error_ratio" in row:
        text += f"  error x{row['error_ratio']:.2f}"
    if "repeats" in row:
        text += "  same bits" if row["repeats"] else "  OTHER BITS"
    if "exposed_ms" in row:
        text += "  exposed " + " ".join(f"{row['exposed_ms'][w]:.3f}" for w in WAYS)
    if "off" in row:
        text += "  off " + " ".join(f"{row['off'][w]:.2f}" for w in WAYS)
    for name, found in row.get("exchanges", {}).items():
        text += f"  {name} {pair(found.get('ranks_ms'), 3)}"
    text += "".join(f"  REFUSED {what}: {words}" for what, words in row.get("refused", {}).items())
    return text + (f"  FAILED {row['failed']}" if "failed" in row else "")


def table(record):
    """All rows: efficiency forward and forward + backward, milliseconds over ranks."""
    found = ["", f"{record['machine']}", f"link {record.get('link')}"]
    for kind in KINDS:
        found += [f"-- {kind}", *(line(row) for row in record[kind])] if record[kind] else []
    return "\n".join([*found, f"left out: {record['left_out']}"])


# -- a page


def pair(found, digits=2, scale=1, unit=""):
    """'forward / forward+backward', a dash for what was not measured."""
    found = found or {}
    texts = [f"{scale * found[w]:.{digits}f}{unit}" if w in found else "–" for w in WAYS]
    return "–" if texts == ["–", "–"] else " / ".join(texts)


def share(found):
    return pair(found, 0, 100, " %")


def table_of(head, lines):
    """Markdown; columns in which nothing stands are left out."""
    kept = [i for i in range(len(head)) if any(cells[i] not in ("–", "") for cells in lines)]
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells[i] for i in kept) + " |" for cells in rows)


def main_table(record):
    """Rows, layers and long rows, with their times from CUDA graphs and what was projected for them."""
    graphs = {(r["name"], r["tokens_a_rank"]): r for r in record.get("graphs", [])}
    head = [
        "mixer", "heads x N x P", "tokens a rank", "ms", "strong", "weak", "host ms", "in CUDA graphs: ms", "strong",
        "weak", "memory ÷ one GPU", "exchange", "projected ms", "measured ÷ projected", "commit",
    ]  # fmt: skip
    lines = []
    for kind in ("rows", "layers", "far"):
        for r in sorted(record.get(kind, []), key=lambda r: r["tokens_a_rank"]):
            graph = graphs.get((r["name"], r["tokens_a_rank"]), {}) if kind == "rows" else {}
            ratio = r.get("memory", {}).get("ratio")
            exchange = r["exchange"].split(": ")[0].split(", ")[-1] if "exchange" in r else "–"
            lines.append([
                r["name"] + SUFFIX.get(kind, ""), f"{r['heads']} x {r['n']} x {r['p']}" if "heads" in r else "–",
                f"{r['tokens_a_rank']:,}", pair(r.get("ranks_ms")), share(r.get("strong")), share(r.get("weak")),
                pair(r.get("ranks_host_ms")), pair(graph.get("ranks_ms")), share(graph.get("strong")),
                share(graph.get("weak")), f"{ratio:.2f}" if ratio else "–", exchange, pair(r.get("projected_ms")),
                pair(r.get("off")), r.get("commit", "–"),
            ])  # fmt: skip
    return table_of(head, lines)


def exchange_table(record):
    head = ["mixer", "tokens a rank", "exchange", "ms", "host ms", "by the model, forward ms", "bytes into a rank"]
    lines = []
    for r in record.get("exchanges", []):
        for name, found in r.get("exchanges", {}).items():
            chosen = " (chosen)" if name == r["chosen"] else ""
            ms, host, model = pair(found.get("ranks_ms")), pair(found.get("ranks_host_ms")), f"{found['model_ms']:.2f}"
            size = f"{found['bytes']:,} / {found['back']:,}"
            lines.append([r["name"], f"{r['tokens_a_rank']:,}", name + chosen, ms, host, model, size])
    return table_of(head, lines) if lines else ""


def peer_table(record):
    """Another library beside ours on the same rows."""
    head, lines = ["mixer", "tokens a rank", "ms", "fla: ms", "strong", "fla: strong"], []
    ours = {(r["name"], r["tokens_a_rank"]): r for r in record["rows"]}
    for r in record.get("peers", []):
        mine = ours.get((r["name"], r["tokens_a_rank"]), {})
        times = [pair(x.get("ranks_ms")) for x in (mine, r)]
        lines.append([r["name"], f"{r['tokens_a_rank']:,}", *times, share(mine.get("strong")), share(r.get("strong"))])
    return table_of(head, lines) if lines else ""


def words(record):
    """Where and with what it ran, the link, errors, and what failed or was left out."""
    here = record["machine"]
    where = f"{here['ranks']} x {here.get('gpu', 'CPU')}, {here['backend']} {here.get('nccl', '')}".strip()
    text = f"{where}, torch {here['torch']}, commit {here['commit']}"
    rows = record["rows"]
    if any("commit" in r for kind in KINDS for r in record.get(kind, [])):
        text += " where a row names no other"
    if "link" in record:
        near = record["link"]
        text += f". All-gathers fit a link of {1e6 * near['latency']:.0f} µs and {near['bandwidth'] / 1e9:.0f} GB/s"
    if worst := [r["error_ratio"] for r in rows if "error_ratio" in r]:
        text += f". Errors are at most {max(worst):.2f} times those of one GPU"
    if again := [r["repeats"] for r in rows if "repeats" in r]:
        text += f". A second call had the same bits in {sum(again)} of {len(again)} rows"
    if fitted := next((r["fitted"] for r in rows if "fitted" in r), None):
        text += f". Projected from {fitted['ranks']} ranks at commit {fitted['commit']}"
    found = [text + "."]
    for kind in KINDS:
        for r in record.get(kind, []):
            name = f"{r['name']}{SUFFIX.get(kind, '')}, {r['tokens_a_rank']:,} tokens a rank"
            if "failed" in r:
                found.append(f"* {name} ({kind}): {r['failed']}")
            found += [f"* {name}, no graph of {what}: {said}" for what, said in r.get("refused", {}).items()]
    for left in record["left_out"]:
        found.append(f"* Left out: {', '.join(f'{x:,}' if isinstance(x, int) else x for x in left)}.")
    return found[0] + ("\n\n" + "\n".join(found[1:]) if found[1:] else "")


def page(record):
    """The tables of one record, and under them what it was."""
    parts = [main_table(record), exchange_table(record), peer_table(record), words(record)]
    return "\n\n".join(part for part in parts if part)
