"""The rows of docs/performance.md by two trees of this repository in turn, on the same GPUs: what became slower.

git worktree add /tmp/before COMMIT
python benchmarks/beside.py --before /tmp/before --gpus 1 --json /tmp/beside.json
python benchmarks/beside.py --page benchmarks/results/beside.json --into docs/performance.md

Each tree runs its own gpu_matrix.py and gpu_scan.py, ours alone, rows that both have. Rows are dealt out to the GPUs,
and each GPU has its part of the processor's cores. A first round of both trees at once compiles and is thrown away;
then come --rounds rounds of one tree after the other. A row's time is the least of its tree's rounds, and a tree's
spread the largest quotient of two of its rounds. The record is written after every round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from gpu_page import add_page_options, shows

SCRIPTS = {"gpu_matrix": ["--sides", "ours", "ours, CUDA graph"], "gpu_scan": []}
TREES = ("before", "after")
KEY = ("script", "name", "heads", "N", "P", "T")
WAYS = ("forward", "both")


def command(tree, script, names, out):
    return [sys.executable, str(tree / "benchmarks" / f"{script}.py"), "--json", str(out), "--only", *names,
            *SCRIPTS[script]]  # fmt: skip


def environment(tree, gpu, cores, cache):
    """A tree's own modules before all others, its own caches, one GPU, its cores."""
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    paths = [str(tree), str(tree / "benchmarks"), str(tree / "tests"), *rest]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": str(gpu)}
    found |= {"TRITON_CACHE_DIR": f"{cache}/triton", "DSF_CACHE_DIR": f"{cache}/dsf", "OMP_NUM_THREADS": "1"}
    return found, sorted(os.sched_getaffinity(0))[gpu * cores : (gpu + 1) * cores]


def names_of(tree, script):
    """The rows that a tree's script has."""
    code = f"import json, {script}; print(json.dumps(list({script}.ROWS)))"
    found, _ = environment(tree, 0, 1, "/tmp")
    done = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def ran(label, script, names, gpu, asked):
    """The rows that a run of a tree's script wrote; one that was cut off has those it finished."""
    tree = {"before": asked.before, "after": asked.after}[label]
    told, cores = environment(tree, gpu, asked.cores, asked.caches / label)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        process = subprocess.Popen(
            command(tree, script, names, out), env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=asked.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            said += f"\nnot done after {asked.limit} s"
        if not out.exists() or process.returncode:
            print(f"{script} of {label}: {said.strip().splitlines()[-3:]}", flush=True)
        return json.loads(out.read_text())["rows"] if out.exists() else []


class Record:
    """Times of rows by tree, written as they come."""

    def __init__(self, asked):
        self.asked, self.lock, self.rows = asked, threading.Lock(), {}

    def add(self, script, tree, found):
        with self.lock:
            for row in found:
                if not all(way in row for way in WAYS):
                    continue
                who = "" if row.get("who", "ours") == "ours" else f", {row['who'].split(', ')[-1]}"
                key = (script, row["name"] + who, *(row.get(k, 1) for k in KEY[2:]))
                here = self.rows.setdefault(key, {t: [] for t in TREES})
                here[tree].append([row[way] for way in WAYS])
            if self.asked.json:
                self.asked.json.write_text(json.dumps(self.whole(), indent=1) + "\n")

    def whole(self):
        rows = []
        for key, times in self.rows.items():
            row = dict(zip(KEY, key, strict=True)) | times
            if all(times.values()):
                least = {t: [min(way) for way in zip(*times[t], strict=True)] for t in TREES}
                row["ratio"] = [a / b for a, b in zip(least["after"], least["before"], strict=True)]
                row["spread"] = max(max(w) / min(w) for t in TREES for w in zip(*times[t], strict=True))
            rows.append(row)
        return {"machine": self.asked.machine, "commits": self.asked.commits, "rows": rows}


def one_gpu(gpu, work, asked, record):
    """This GPU's rows: compiled by both trees at once, then timed in turn."""
    warm = [
        threading.Thread(target=ran, args=(label, script, names, gpu, asked))
        for label in TREES
        for script, names in work.items()
        if names
    ]
    for thread in warm:
        thread.start()
    for thread in warm:
        thread.join()
    for _ in range(asked.rounds):
        for label in TREES:
            for script, names in work.items():
                if names:
                    record.add(script, label, ran(label, script, names, gpu, asked))


def dealt(asked):
    """For each GPU the names of rows of each script."""
    found = [{} for _ in range(asked.gpus)]
    for script in SCRIPTS:
        known = names_of(asked.before, script)
        both = [n for n in names_of(asked.after, script) if n in known]
        both = [n for n in both if not asked.only or n in asked.only]
        for i, hand in enumerate(found):
            hand[script] = both[i :: asked.gpus]
    return found


def page(data):
    """The rows as a Markdown table, the slowest beside before first."""
    lines = ["| row | heads x N x P | T | before ms | now ms | now ÷ before | spread |", "|---" * 7 + "|"]
    rows = [r for r in data["rows"] if "ratio" in r]
    for r in sorted(rows, key=lambda r: -max(r["ratio"])):
        before, after = ([min(way) for way in zip(*r[t], strict=True)] for t in TREES)
        sizes = f"N = {r['N']}" if r["script"] == "gpu_scan" else f"{r['heads']} x {r['N']} x {r['P']}"
        cells = [r["name"], sizes, r["T"], *(" / ".join(f"{x:.3f}" for x in t) for t in (before, after))]
        cells += [" / ".join(f"{x:.2f}" for x in r["ratio"]), f"{r['spread']:.2f}"]
        lines.append(f"| {' | '.join(str(c) for c in cells)} |")
    m, of = data["machine"], data["commits"]
    last = f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}; before: {of['before']}, now: {of['after']}."
    return "\n".join([*lines, "", last])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a tree of an earlier commit")
    parser.add_argument("--after", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--commits", nargs=2, default=["", ""], help="of the trees, where git does not know them")
    parser.add_argument("--only", nargs="*", help="rows; all that both trees have unless named")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one script's run")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir()) / "dsf-beside")
    parser.add_argument("--json", type=Path)
    add_page_options(parser)
    asked = parser.parse_args()
    if shows(asked, page):
        return
    if asked.before is None:
        parser.error("--before: which tree of an earlier commit?")
    asked.before, asked.after = asked.before.resolve(), asked.after.resolve()
    import torch
    import triton

    asked.cores = len(os.sched_getaffinity(0)) // asked.gpus
    asked.machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    asked.commits = {
        label: told or git_commit(tree)
        for label, told, tree in zip(TREES, asked.commits, (asked.before, asked.after), strict=True)
    }
    record = Record(asked)
    threads = [
        threading.Thread(target=one_gpu, args=(gpu, work, asked, record)) for gpu, work in enumerate(dealt(asked))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(page(record.whole()))


def git_commit(tree):
    done = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
