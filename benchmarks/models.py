"""Language models on a CUDA GPU: training, decoding, and whether a GPU follows a CPU; transformers and fla beside.

python benchmarks/models.py --json benchmarks/results/models.json --commit HASH      # about four minutes on an H200
python benchmarks/models.py --only training --mixers ssd gla --add                   # parts of it, to the record
python benchmarks/models.py --page benchmarks/results/models.json --into docs/performance.md
OMP_NUM_THREADS=2 python benchmarks/models.py --dry                                  # tiny, on a CPU: does it run?

training: forward, backward and AdamW of --tokens tokens a step at T = --length, bfloat16 autocast over float32 weights:
tokens/s, model flops utilisation (6 flops a weight of matrices and a token, and softmax's 6 · T · d a layer, over
--peak TFLOP/s), peak memory. decoding: one token more of every sequence, in a CUDA graph where states stay in place, at
batch 1 and 128, beside the time to read the weights once and read and write the states at the measured copy rate.
follow: 200 steps of a 20M model on real text, bfloat16 on the GPU beside float32 on the CPU, which runs in the
background from the start, or is read from --curve. control: the same steps on the GPU in float32, and once more from
weights that are moved by 1e-7 of themselves, since in such training any rounding grows: how far apart bfloat16 and
float32 are there, and how far two runs in float32. resume: 4 steps, a checkpoint, 4 steps, to the bit.

Medians; g: a graph. Each model has a process of its own, so that one failure stops no other; the next one imports
while one measures. The JSON file is written after every row. What --seconds does not suffice for is left out, and said
so.
"""

import argparse
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from gpu_page import add_page_options, shows
from models_curves import DEVICE, MOVED, apartness, control, follow
from models_work import FLA, worker

SCHEMA = "dsf.models/2"
SAME = ("commit", "gpu", "torch", "triton")  # of runs in one record
MIXERS = ("gated_deltanet", "deltanet", "softmax_attention", "ssd", "gla")
PARTS = ("training", "decoding", "follow", "control", "resume")
DRY = {"size": "tiny", "follow_size": "tiny", "tokens": 256, "length": 128, "steps": 2, "warmup": 1,
       "batches": [1, 2], "follow_steps": 4, "copy": 10.0}  # fmt: skip


class Worker:
    """A process that measures: one job at a time, killed where it takes too long."""

    def __init__(self, who, nice=0, threads=None):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads)) if threads else None
        command = [sys.executable, __file__, "--worker", who]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*(["nice", "-n", str(nice)] if nice else []), *command],
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment,
        )  # fmt: skip
        self.lines, self.errors = queue.Queue(), []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith(("RECORD ", "FAILED ")):
                self.lines.put((line[:6], json.loads(line[7:])))
        self.lines.put(("FAILED", None))

    def _listen(self):
        self.errors.extend(line.rstrip() for line in self.process.stderr)

    def ask(self, job):
        """Send a job."""
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def answer(self, seconds):
        """(record, None) or (None, what went wrong)."""
        try:
            kind, found = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.process.kill()
            return None, f"not done after {seconds:.0f} s"
        if found is None:
            self.lines.put((kind, None))
            return None, f"the process died: {' | '.join(self.errors[-2:])}"[:300]
        return (found, None) if kind == "RECORD" else (None, found["why"])

    def end(self):
        """End the process."""
        self.process.kill()
        self.process.wait()


def groups(options):
    """(who, mixer) of every process, the issue's pairs beside each other."""
    for mixer in options.mixers:
        yield "ours", mixer
        if mixer == "softmax_attention" and "llama" not in options.without and importlib.util.find_spec("transformers"):
            yield "llama", mixer
        if mixer in FLA and "fla" not in options.without and importlib.util.find_spec("fla"):
            yield "fla", mixer


def jobs_of(who, mixer, options, copy):
    """The jobs of one process."""
    same = {"who": who, "mixer": mixer, "size": options.size, "steps": options.steps, "warmup": options.warmup}
    if "training" in options.only:
        own = {"tokens": options.tokens, "length": options.length, "compile": options.compile, "peak": options.peak}
        for graphed in [False, True] if options.graphed and who == "ours" else [False]:
            yield {"kind": "training", **same, **own, "graphed": graphed}
    if "decoding" in options.only:
        for batch in options.batches:
            yield {"kind": "decoding", **same, "batch": batch, "copy": copy}


class Record:
    """What was found so far, written after every row."""

    def __init__(self, options, run):
        settings = {k: v for k, v in vars(options).items() if k not in ("json", "worker", "dry")}
        settings = {k: v.name if isinstance(v, Path) else v for k, v in settings.items()}
        self.path = options.json
        self.data = {"schema": SCHEMA, "machine": run, "settings": settings, "records": [], "failed": [], "left": []}
        if options.add and self.path.is_file():
            before = json.loads(self.path.read_text())
            if [before["machine"].get(x) for x in SAME] != [run.get(x) for x in SAME]:
                sys.exit(f"{self.path} is of another commit or machine: {before['machine']}")
            self.data |= {"machine": before["machine"], "records": before["records"], "failed": before["failed"]}

    def add(self, job, found, why):
        """One row more, printed and written."""
        name = named(job)
        if found is None:
            self.data["failed"].append({"case": name, "why": why})
            print(f"{name:48} failed: {why}", flush=True)
        else:
            row = {**job, **found}
            if row.get("text"):
                row["text"] = Path(row["text"]).name
            self.data["records"].append(row)
            print(f"{name:48} {shown(row)}", flush=True)
        self.write()

    def leave(self, name):
        """Say that the time did not suffice for this."""
        self.data["left"].append(name)
        print(f"{name:48} left out: --seconds are spent", flush=True)
        self.write()

    def write(self):
        """Write the JSON file, whole or not at all."""
        if self.path is not None:
            beside = self.path.with_suffix(".new")
            beside.write_text(json.dumps(self.data, indent=1) + "\n")
            beside.replace(self.path)


def named(job):
    """A job in a line."""
    return " ".join(str(x) for x in (job["kind"], whose(job), job["mixer"], job.get("batch", ""))).strip()


def shown(row):
    """A record in a few words."""
    if row["kind"] == "training":
        memory = f"{row['peak_mib']:,.0f} MiB" if row["peak_mib"] else ""
        return f"{row['tokens_per_second']:>10,.0f} tokens/s  MFU {row['mfu']:.1%}  {memory}"
    if row["kind"] == "decoding":
        how = "graph" if row["graph"] else f"no graph: {row['no_graph']}"
        return f"{row['ms_a_token']:>10.3f} ms a token  {row['ms_a_token'] / row['floor_ms']:.2f} x floor  ({how})"
    if row["kind"] == "follow":
        return f"{apartness(row)}; last {row['last']}"
    if row["kind"] == "control":
        return (
            f"bfloat16 and float32 {apartness(row['rounded'])}; float32 twice, the second time from weights moved by "
            f"{MOVED:.0e} of themselves, {apartness(row['moved'])}"
        )
    return f"{'equal to the bit' if row['equal'] else 'differs'}: {row['losses'][0][-1]} and {row['losses'][1][-1]}"


class Background:
    """The CPU's half of `follow`: read from a file, or computed while the GPU measures other things."""

    def __init__(self, options, job):
        self.path, self.worker, self.job = options.curve, None, {**job, "device": "cpu"}
        self.found = json.loads(self.path.read_text()) if self.path and self.path.is_file() else None
        if self.found is None:
            self.worker = Worker("ours", nice=10, threads=options.threads)
            self.worker.ask(self.job)

    def answer(self, seconds):
        """(record, None) or (None, what went wrong)."""
        if self.worker is None:
            return self.found, None
        found, why = self.worker.answer(max(seconds, 1))
        if found is not None and self.path:
            self.path.write_text(json.dumps(found) + "\n")
        return found, why

    def end(self):
        """End what still runs."""
        if self.worker is not None:
            self.worker.end()


def measure(options, record, copy):
    """All rows of training and decoding."""
    deadline = time.monotonic() + options.seconds
    wanted = [(g, list(jobs_of(*g, options, copy))) for g in groups(options)]
    wanted = [(g, jobs) for g, jobs in wanted if jobs]
    ahead = Worker(wanted[0][0][0]) if wanted else None
    for number, (_, jobs) in enumerate(wanted):
        worker, ahead = ahead, None
        if number + 1 < len(wanted) and time.monotonic() < deadline:
            ahead = Worker(wanted[number + 1][0][0])  # imports meanwhile
        for job in jobs:
            if time.monotonic() > deadline or worker is None:
                record.leave(named(job))
                continue
            worker.ask(job)
            record.add(job, *worker.answer(min(options.row, max(10, deadline - time.monotonic() + 20))))
        if worker is not None:
            worker.end()


def check(options, record, background, job):
    """The rows of resume and follow."""
    worker = Worker("ours")
    if "resume" in options.only:
        asked = {**job, "kind": "resume"}
        worker.ask(asked)
        record.add(asked, *worker.answer(options.row))
    if "control" in options.only:
        record.add({**job, "kind": "control"}, *control(worker, job, options.row))
    if background is not None:
        worker.ask({**job, "device": "cuda"})
        gpu, why = worker.answer(options.row * 2)
        cpu, other = background.answer(options.patience)
        found = follow([gpu, cpu]) if gpu and cpu else None
        record.add({**job, "kind": "follow"}, found, why or other)
    worker.end()


def whose(row):
    """Whose model a row of training or decoding is of, and how it trains."""
    return row.get("who", "") + ", graph" * row.get("graphed", False) + ", compiled" * row.get("compile", False)


def table(data):
    """The short table: a line a model; ours beside the others of the same mixer."""
    rows = {}
    for r in data["records"]:
        if r["kind"] in ("training", "decoding"):
            what = r["kind"] if r["kind"] == "training" else f"b{r['batch']}"
            rows.setdefault((r["mixer"], whose(r)), {})[what] = r
    batches = sorted({r["batch"] for r in data["records"] if r["kind"] == "decoding"})
    heads = "".join(f"{f'b {b}, ms':>10}{'x floor':>9}" for b in batches)
    lines = [f"{'mixer':20}{'':12}{'M par':>7}{'tokens/s':>10}{'MFU':>7}{'MiB':>9}{'of ours':>9}{heads}"]
    for (mixer, who), found in rows.items():
        line, train = f"{mixer:20}{who:12}", found.get("training")
        if train is None:
            line += " " * 42
        else:
            own = rows.get((mixer, "ours"), {}).get("training")
            share = f"{train['tokens_per_second'] / own['tokens_per_second']:.2f}" if own else ""
            line += f"{train['parameters'] / 1e6:7.0f}{train['tokens_per_second']:10,.0f}{train['mfu']:7.1%}"
            line += f"{train['peak_mib'] or 0:9,.0f}{share:>9}"
        for batch in batches:
            r = found.get(f"b{batch}")
            line += (
                f"{r['ms_a_token']:9.3f}{'g' if r['graph'] else ' '}{r['ms_a_token'] / r['floor_ms']:9.2f}"
                if r
                else " " * 19
            )
        lines.append(line)
    lines += [f"{r['kind']:20}{shown(r)}" for r in data["records"] if r["kind"] in ("follow", "control", "resume")]
    lines += [f"failed: {f['case']}: {f['why']}" for f in data["failed"]]
    return "\n".join([*lines, *(f"left out: {name}" for name in data["left"])])


def page(data):
    """The table in docs/performance.md: a line a model, then how a GPU follows a CPU, what failed, and what ran."""
    decoded = any(r["kind"] == "decoding" for r in data["records"])
    heads = ["mixer", "whose", "M parameters", "tokens/s", "MFU", "peak MiB"]
    heads += ["ms a token, batch 1 (x floor)", "batch 128"] if decoded else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    models = {(r["mixer"], whose(r)): {} for r in data["records"] if r["kind"] in ("training", "decoding")}
    for r in data["records"]:
        if r["kind"] in ("training", "decoding"):
            models[r["mixer"], whose(r)]["training" if r["kind"] == "training" else r["batch"]] = r
    for (mixer, who), found in models.items():
        train, cells = found.get("training"), []
        if train:
            cells = [f"{train['parameters'] / 1e6:.0f}", f"{train['tokens_per_second']:,.0f}", f"{train['mfu']:.1%}"]
            cells.append(f"{train['peak_mib']:,.0f}")
        cells = cells or ["–"] * 4
        for batch in (1, 128) if decoded else ():
            r = found.get(batch)
            how = "" if r is None or r["graph"] else ", no graph"
            cells.append(f"{r['ms_a_token']:.2f} ({r['ms_a_token'] / r['floor_ms']:.2f}{how})" if r else "–")
        earlier = {r["commit"] for r in found.values() if "commit" in r}
        who += f" (of {', '.join(sorted(earlier))})" if earlier else ""
        lines.append(f"| `{mixer}` | {who} | {' | '.join(cells)} |")
    for r in data["records"]:
        if r["kind"] in ("follow", "control", "resume"):
            lines += ["", f"{r['kind'].capitalize()} (`{r['mixer']}`, 20M): {shown(r)}."]
    run, asked = data["machine"], data["settings"]
    lines += ["", *(f"Failed: {x['case']}: {x['why']}" for x in data["failed"])]
    lines.append(
        f"{run['gpu']}, torch {run['torch']}, triton {run['triton']}, commit {run['commit'][:7]}; {asked['size']} "
        f"models, T = {asked['length']}, {asked['tokens']:,} tokens a step."
    )
    return "\n".join(lines)


def machine(commit):
    """Where it runs, and the rates there."""
    if DEVICE == "cpu":
        return {"commit": commit, "gpu": "none", "torch": torch.__version__, "copy GB/s": DRY["copy"]}
    from gpu_matrix import machine as measured

    return measured(commit)


def options_of():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mixers", nargs="*", default=list(MIXERS))
    parser.add_argument("--without", nargs="*", default=[], choices=("llama", "fla"))
    parser.add_argument("--size", default="340m")
    parser.add_argument("--tokens", type=int, default=32768, help="a step")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help="timed of each")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 128])
    parser.add_argument("--follow-mixer", default="gated_deltanet")
    parser.add_argument("--follow-size", default="20m")
    parser.add_argument("--follow-steps", type=int, default=200)
    parser.add_argument("--curve", type=Path, help="file of the CPU's losses: read if it is there, else written")
    parser.add_argument("--text", type=Path, help="of both halves; by default one that differs between Python releases")
    parser.add_argument("--threads", type=int, default=8, help="of the CPU's half")
    parser.add_argument("--patience", type=float, default=240, help="seconds to wait for it at the end")
    parser.add_argument("--peak", type=float, default=989.0, help="dense bfloat16 TFLOP/s of the GPU")
    parser.add_argument("--compile", action="store_true", help="training through torch.compile")
    parser.add_argument("--graphed", action="store_true", help="our training also by dsf.models.Graphed")
    parser.add_argument("--seconds", type=float, default=240, help="after which no further row begins")
    parser.add_argument("--row", type=float, default=90, help="seconds after which a row is given up")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="to the record that is there, of the same commit and GPU")
    add_page_options(parser)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to see on a CPU that all of it runs")
    parser.add_argument("--worker", choices=("ours", "llama", "fla"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry:
        vars(options).update({k: v for k, v in DRY.items() if k != "copy"})
    return options


def main():
    options = options_of()
    if options.worker:
        return worker(options.worker)
    if shows(options, page):
        return 0
    if DEVICE == "cpu" and not options.dry:
        sys.exit("benchmarks/models.py measures on a CUDA GPU, and there is none; --dry runs it in small here")
    job = {"kind": "curve", "mixer": options.follow_mixer, "size": options.follow_size,
           "follow_steps": options.follow_steps, "threads": options.threads,
           "text": None if options.text is None else str(options.text.resolve())}  # fmt: skip
    background = Background(options, job) if "follow" in options.only else None
    run = machine(options.commit)
    print(run, flush=True)
    record = Record(options, run)
    try:
        if {"training", "decoding"} & set(options.only):
            measure(options, record, run["copy GB/s"])
        if {"follow", "control", "resume"} & set(options.only):
            check(options, record, background, job)
    finally:
        if background is not None:
            background.end()
        record.write()
        print("\n" + table(record.data))
    return 1 if record.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
