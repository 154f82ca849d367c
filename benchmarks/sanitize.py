"""Every kernel and direction once under NVIDIA's compute-sanitizer: addresses, unwritten memory, races. Needs a GPU.

python benchmarks/sanitize.py --out benchmarks/results/sanitize.json
python benchmarks/sanitize.py --list                        what is called
python benchmarks/sanitize.py --coverage                    which kernels that reaches; needs no GPU
python benchmarks/sanitize.py --unwritten                   reads of memory that nobody wrote; needs no GPU
python benchmarks/sanitize.py --dry-run --only delta s6     the commands, nothing run
python benchmarks/sanitize.py --one delta --dtypes bfloat16 the calls themselves, without the sanitizer

First all calls run plainly, so that Triton's cache holds their kernels: to compile under the sanitizer is slow. Then
come the tools. Each makes `--workers` processes, which share the names between them, since a process takes longer to
begin than to make its calls; where one finds anything or fails, its names run again, each in a process of its own. The
last line of a process says what each name took. Torch's caching allocator is off (PYTORCH_NO_CUDA_MEMORY_CACHING=1): it
would hide what lies outside of a tensor but inside a block. Calls are also held to the float64 oracle. The exit status
is 1 where anything was found, failed or did not end.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sanitize_calls import DTYPES, NAMES, SUBJECTS, launched, one, reached

from dsf.fuzz.report import commit, machine, stderr

TOOLS = {
    "memcheck": ["--tool", "memcheck"],
    "initcheck": ["--tool", "initcheck"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
}
FOUND = 86  # exit status of compute-sanitizer where it found something
TOOK = "seconds of names: "


def parsed(log):
    """What a log of compute-sanitizer says: (findings in all or None where it has no summary, the kinds of them)."""
    counts = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", log)]
    counts += [int(n) for n in re.findall(r"RACECHECK SUMMARY: (\d+) hazard", log)]
    kinds = {}
    for block in re.split(r"(?m)^=========\s*$", log):
        lines = [line.removeprefix("=========").strip() for line in block.splitlines() if line.startswith("=========")]
        lines = [x for x in lines if x and "SUMMARY" not in x and not x.startswith("COMPUTE-SANITIZER")]
        if not lines:
            continue
        place = next((x for x in lines[1:] if x.startswith("at ")), "")
        text = f"{re.sub(r'0x[0-9a-f]+', '0x…', lines[0])} {re.sub(r'[+]0x[0-9a-f]+', '', place)}".strip()
        kinds[text] = kinds.get(text, 0) + 1
    return (sum(counts) if counts else None), kinds


def command(sanitizer, tool, names, dtypes):
    """The command of a process that makes the calls of several names."""
    worker = [sys.executable, str(Path(__file__).resolve()), "--one", *names, "--dtypes", *dtypes]
    if tool is None:
        return worker
    options = ["--target-processes", "all", "--error-exitcode", str(FOUND), "--print-limit", "50"]
    options += ["--show-backtrace", "no"]  # of the host: a minute and more where much is found
    return [sanitizer, *TOOLS[tool], *options, *worker]


def shares(tools, names, dtypes, workers):
    """(tool, names, dtypes) of every process: the names of a tool dealt out to the workers."""
    hands = [names[i::workers] for i in range(min(workers, len(names)))]
    return [(tool, hand, dtypes) for tool in tools for hand in hands]


def run_one(sanitizer, tool, names, dtypes, limit):
    """The rows of a process: a row for each name and dtype. One that is not all right runs again, name by name."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if tool is not None:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    begin = time.perf_counter()
    process = {"ok": False, "found": None, "kinds": {}, "status": None, "said": "did not end in time"}
    took = {}
    try:
        done = subprocess.run(
            command(sanitizer, tool, names, dtypes), capture_output=True, text=True, env=environment, timeout=limit
        )
        log = done.stdout + done.stderr
        found, kinds = (0, {}) if tool is None else parsed(log)
        ok = done.returncode == 0 and found == 0
        said = "" if ok else "\n".join(log.splitlines()[-30:])
        process = {"ok": ok, "found": found, "kinds": kinds, "status": done.returncode, "said": said}
        last = next((x for x in reversed(log.splitlines()) if x.startswith(TOOK)), TOOK + "{}")
        took = json.loads(last.removeprefix(TOOK))
    except subprocess.TimeoutExpired:
        pass
    if process["status"] not in (None, 0) and (len(names) > 1 or len(dtypes) > 1):
        again = [run_one(sanitizer, tool, [name], [dtype], limit) for name in names for dtype in dtypes]
        return [row for rows in again for row in rows]
    seconds = time.perf_counter() - begin
    return [
        {
            "name": name,
            "dtype": dtype,
            "tool": tool or "none",
            "seconds": took.get(f"{name} {dtype}", round(seconds, 1)),
        }
        | process
        for name in names
        for dtype in dtypes
    ]


def calls(names, dtypes, device):
    """What a process does: the calls of these names. Its exit status."""
    took, right = {}, True
    for name in names:
        for dtype in dtypes:
            begin = time.perf_counter()
            right = one(name, dtype, device) and right
            took[f"{name} {dtype}"] = round(time.perf_counter() - begin, 1)
    print(TOOK + json.dumps(took), flush=True)
    return 0 if right else 1


def coverage(names):
    """Print which names reach each kernel. 1 where one is not reached, or a launch cannot be read."""
    os.environ["TRITON_INTERPRET"] = "1"
    found = reached(names)
    kernels, unread = launched()
    for kernel in sorted(kernels | set(found)):
        print(f"{kernel:<22}{', '.join(sorted(found.get(kernel, {'NOT REACHED'})))}")
    print(f"{len(kernels)} kernels, {len(kernels - set(found))} not reached", *sorted(unread), sep="\n")
    return 1 if unread or not kernels <= set(found) else 0


def version(sanitizer):
    done = subprocess.run([sanitizer, "--version"], capture_output=True, text=True)
    return next((x for x in done.stdout.splitlines() if "ersion" in x), done.stdout.strip())


def write(out, about, rows):
    """The record of the rows so far: what is cut off keeps them. about: what ran them."""
    if out is None:
        return
    record = about | {
        "findings": sum(row["found"] or 0 for row in rows), "wrong": sum(not row["ok"] for row in rows), "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def kept(out, where, jobs):
    """The rows of a record that are not to be run again. Exits where it is another commit's."""
    if out is None or not out.exists():
        return []
    record = json.loads(out.read_text())
    if record["commit"] != where:
        sys.exit(f"{out} is of {record['commit']}, this is {where}")
    again = {(tool or "none", name, dtype) for tool, names, dtypes in jobs for name in names for dtype in dtypes}
    return [row for row in record["rows"] if (row["tool"], row["name"], row["dtype"]) not in again]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="of the tree that runs, where git does not know it")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of one process")
    default = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    parser.add_argument("--sanitizer", default=default, help="path of compute-sanitizer")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="to the record of the same commit that is there")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--coverage", action="store_true", help="the kernels that are reached, in the interpreter")
    parser.add_argument("--unwritten", action="store_true", help="what initcheck looks for, in the interpreter")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", nargs="+", choices=NAMES, metavar="NAME", help="make the calls of these, and no more")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.list:
        about = {name: SUBJECTS[name]().spec.structure for name in given.only if name in SUBJECTS}
        print("\n".join(f"{name}: {about.get(name, 'of layers and ranks')}" for name in given.only))
        return 0
    if given.one:
        return calls(given.one, given.dtypes, given.device)
    if given.coverage:
        return coverage(given.only)
    if given.unwritten:
        os.environ["TRITON_INTERPRET"] = "1"
        from sanitize_unwritten import report  # which imports Triton's interpreter

        return report(given.only, given.dtypes)
    jobs = shares(given.tools, given.only, given.dtypes, given.workers)
    if given.dry_run:
        print("\n".join(" ".join(command(given.sanitizer, *job)) for job in jobs))
        return 0
    if not shutil.which(given.sanitizer):
        stderr(f"there is no {given.sanitizer}: it comes with the CUDA toolkit; --sanitizer says where it is")
        return 2
    first = shares([None], given.only, given.dtypes, given.workers)
    where = given.commit or commit()
    rows = kept(given.out, where, [*first, *jobs]) if given.add else []
    about = {"machine": machine(given.device), "commit": where, "sanitizer": version(given.sanitizer)}
    with ThreadPoolExecutor(given.workers) as pool:
        for part in (first, jobs):
            for several in pool.map(lambda job: run_one(given.sanitizer, *job, given.limit), part):
                for row in several:
                    rows.append(row)
                    word = "ok" if row["ok"] else f"FOUND {row['found']} {row['kinds']} {row['said']}"
                    what = f"{row['tool']:<10}{row['name']:<20}{row['dtype']:<10}{row['seconds']:>7} s"
                    print(f"{what}  {word}", flush=True)
                write(given.out, about, rows)
    wrong = [row for row in rows if not row["ok"]]
    print(f"{len(rows)} runs, {len(wrong)} with findings, {sum(row['found'] or 0 for row in rows)} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
