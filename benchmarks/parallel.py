"""Times context parallelism on the GPUs of one host: efficiency, its pieces, memory, errors, the link, a projection.

torchrun --nproc-per-node 2 benchmarks/parallel.py --json benchmarks/results/parallel.json [--seconds 330] [--commit X]
torchrun --nproc-per-node 4 benchmarks/parallel.py --json benchmarks/results/parallel_4_h200.json \
    --fitted benchmarks/results/parallel.json
torchrun --nproc-per-node 2 benchmarks/parallel.py --dry --json /tmp/parallel.json      (a CPU, gloo, tiny sizes)
python benchmarks/parallel.py --page benchmarks/results/parallel.json --into docs/parallel.md

Public calls of one sequence, bfloat16 on CUDA, decays as of a trained model; every number is the slowest rank's:
  whole    one GPU, the whole sequence: W times a rank's tokens
  part     one GPU, a rank's tokens
  ranks    all ranks, the whole sequence
  strong = whole / (W ranks), weak = part / ranks; forward, and forward + backward ("both"); calls one after the other
  between two events, medians. host: until the host had issued a call.
  exposed = ranks - the same where nothing is sent; pieces (F, M, exchange, fold, C): each alone.
  memory: the peak of forward + backward, inputs included, of a rank and of one GPU.
  errors: of y and all gradients against float32 on one GPU (on CPUs: float32 against float64), of one GPU and of the
  ranks, at the shortest length. repeats: whether a second call has the same bits.
Delta rules and mLSTM have 64 heads at 8,192 tokens a rank, 16 beyond. Layers: d_model 2048, 32,768 tokens a rank.
Exchanges, of more than two ranks: each in turn, beside what the model says of it and which one it chooses. Graphs: the
calls of up to 32,768 tokens a rank replayed from CUDA graphs, collectives too; not on CPUs. Far: forward alone at
524,288 tokens a rank. The link: all-gathers of 2^10 to 2^26 bytes, fitted as latency + bytes / bandwidth, which then
choose the exchanges. Peer: fla's context parallel where fla is importable, last, one row each, ended by
--peer-seconds. The projection to more ranks is a model (parallel_model.py), marked as such, no measurement; --fitted
names a record of fewer ranks, whose projection is then held to this run: off = measured / projected.

The record is written after every row. A row that some rank cannot do is recorded with that rank's words. Kernels are
compiled before anything is timed, by processes that run the rows' shapes on ranks simulated on one GPU and fill
Triton's cache. --parts: some of link, rows, layers, exchanges, graphs, far, peers.
"""

import argparse
import json
import os
import platform
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_page import put_into
from parallel_measure import (
    FAR,
    PEERS,
    Clock,
    Failed,
    Silent,
    agreed,
    both_ways,
    captured,
    draw,
    errors,
    layer_call,
    layer_input,
    link,
    peak,
    peer,
    pieces,
    same_bits,
    shard,
)
from parallel_model import compared, folds, projection
from parallel_page import KINDS, WAYS, line, page, table
from parallel_rows import FAR_TOKENS, LAYER_TOKENS, LENGTHS, ROWS, layer_of, sizes_of, warm, warm_all
from torch.distributed.device_mesh import init_device_mesh

import dsf
from dsf.mixers import get
from dsf.parallel import Sequence
from dsf.parallel.derive import frame_of

PARTS = ("link", "rows", "layers", "exchanges", "graphs", "far", "peers")
EXCHANGED = ("gated_deltanet", "ssd")  # whose exchanges are timed one by one
MOST_CAPTURED = 32768  # tokens a rank; longer calls do not wait for the host


class Bench:
    """This rank's part of the run."""

    def __init__(self, asked):
        self.asked, self.begin = asked, asked.started
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu") if asked.dry else torch.device("cuda", local)
        self.dtype = torch.float32 if asked.dry else torch.bfloat16
        if not asked.dry:
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo" if asked.dry else "nccl", timeout=timedelta(seconds=150))
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        self.clock, self.cp = Clock(self.device, asked.repeats), Sequence(self.mesh["cp"])
        self.near = self.cp.links[0]
        self.record = {"machine": self.machine(), **{kind: [] for kind in KINDS}, "left_out": []}
        self.folds, self.refused = {}, {}  # what was folded alone; captures that failed, which are not tried again
        self.fitted = json.loads(asked.fitted.read_text()) if asked.fitted else {}

    def machine(self):
        here = Path(__file__).resolve().parent
        said = subprocess.run(["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        found = {
            "commit": self.asked.commit or said.stdout.strip() or "unknown",
            "time": time.strftime("%Y-%m-%d %H:%M"),
        }
        found |= {"torch": torch.__version__, "python": platform.python_version(), "dsf": dsf.__version__}
        found |= {"ranks": self.cp.ranks, "backend": dist.get_backend()}
        if not self.asked.dry:
            found |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        return found

    def save(self):
        if not self.cp.rank:
            self.asked.json.write_text(json.dumps(self.record, indent=1) + "\n")

    def late(self):
        """One answer for all ranks."""
        spent = torch.tensor([time.monotonic() - self.begin], device=self.device, dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent) > self.asked.seconds

    def measure(self, kind, name, tokens, make):
        """Put what make(row) fills into the record; where it fails, what it had filled and why."""
        row = {"name": name, "tokens_a_rank": tokens}
        if self.late():
            self.record["left_out"].append([kind, name, tokens])
            return
        begin = time.monotonic()
        try:
            make(row)
        except Failed as error:
            row["failed"] = str(error)
        row["seconds"] = round(time.monotonic() - begin, 1)
        self.record[kind].append(row)
        if not self.asked.dry:
            torch.cuda.empty_cache()
        self.save()
        if not self.cp.rank:
            print(line(row), flush=True)

    def times(self, row, label, ways, names=WAYS):
        """Time calls into row[label], or say what failed in all ranks' words."""
        for name, call in zip(names, ways, strict=True):
            ms, host = agreed(lambda call=call: self.clock(call), self.device)
            row.setdefault(f"{label}_ms", {})[name] = ms
            row.setdefault(f"{label}_host_ms", {})[name] = host

    def efficiency(self, row):
        ranks = row["ranks_ms"]
        for label, key, count in (("strong", "whole_ms", self.cp.ranks), ("weak", "part_ms", 1)):
            if key in row:
                row[label] = {way: row[key][way] / (count * ranks[way]) for way in row[key] if way in ranks}

    def inputs(self, name, tokens, row):
        """Of all ranks, alike on each."""
        sizes = sizes_of(name, tokens, self.asked)
        row |= dict(zip(("heads", "n", "p"), sizes, strict=True))
        count = tokens * self.cp.ranks
        return agreed(lambda: draw(get(name).recurrence, count, *sizes, self.device, self.dtype), self.device)

    def peak(self, row, label, call):
        row.setdefault("memory", {})[label] = agreed(lambda: peak(call, self.device), self.device)
        if label == "one" and row["memory"]["one"]:
            row["memory"]["ratio"] = row["memory"]["ranks"] / row["memory"]["one"]

    def row(self, name, tokens, row):
        self.row_of_ranks(name, tokens, row)
        recurrence, whole = get(name).recurrence, self.inputs(name, tokens, row)
        ways = both_ways(recurrence, whole)
        self.peak(row, "one", ways[1])
        self.times(row, "whole", ways)
        self.efficiency(row)
        if tokens == self.asked.shortest and "errors" not in self.asked.without:
            row["errors"] = agreed(lambda: errors(recurrence, whole, self.cp, self.device), self.device)
            # Params' gradients are float32 sums, in another order with ranks: below its digits nothing is an error.
            least = 8 * torch.finfo(torch.float32).eps
            row["error_ratio"] = max(max(e["ranks"], least) / max(e["one"], least) for e in row["errors"].values())

    def row_of_ranks(self, name, tokens, row):
        """What needs a rank's tokens alone; the whole sequence is not in memory."""
        recurrence, cp, device = get(name).recurrence, self.cp, self.device
        given = shard(recurrence, self.inputs(name, tokens, row), cp)
        row["exchange"] = recurrence.plan(**given, parallel=cp).exchange
        ways = both_ways(lambda **x: recurrence(**x, parallel=cp), given)
        self.times(row, "ranks", ways)
        self.peak(row, "ranks", ways[1])
        row["repeats"] = agreed(lambda: same_bits(ways[1], device), device)
        self.times(row, "part", both_ways(recurrence, given))
        self.efficiency(row)
        silent = Silent(self.mesh["cp"], links=cp.links)
        self.times(row, "silent", both_ways(lambda **x: recurrence(**x, parallel=silent), given))
        row["exposed_ms"] = {way: row["ranks_ms"][way] - row["silent_ms"][way] for way in WAYS}
        row["pieces_ms"] = agreed(lambda: pieces(recurrence, given, cp, self.clock), device)
        sizes = tuple(row[x] for x in ("heads", "n", "p"))
        if (name, sizes) not in self.folds:
            folding = agreed(lambda: folds(recurrence, sizes, self.clock, device, self.near), device)
            self.folds[name, sizes] = folding
        row["folds_ms"], row["folds_host_ms"] = self.folds[name, sizes]
        row["projection"] = projection(recurrence, row, cp.ranks, self.near)
        compared(row, self.fitted, recurrence, cp.ranks)

    def exchanges(self, name, tokens, row):
        """Every exchange of a call, asked for, beside what the model says of each and which one it chooses."""
        recurrence = get(name).recurrence
        given = shard(recurrence, self.inputs(name, tokens, row), self.cp)
        frame = frame_of(recurrence.spec, row["n"], row["p"])
        row["chosen"] = self.cp.choice(frame, row["heads"], 4).name
        row["exchanges"] = {}
        for exchange in ("gather", "transpose", "relay"):
            cp = Sequence(self.mesh["cp"], exchange=exchange, links=self.cp.links)
            told = cp.choice(frame, row["heads"], 4)
            found = {"model_ms": 1e3 * told.seconds, "bytes": told.bytes, "back": told.back, "rounds": told.rounds}
            row["exchanges"][exchange] = found
            try:
                self.times(found, "ranks", both_ways(lambda cp=cp, **x: recurrence(**x, parallel=cp), given))
            except Failed as error:
                found["failed"] = str(error)

    def graphs(self, name, tokens, row):
        """The times of a row where the calls are replayed from CUDA graphs: what is left when no host is waited for."""
        recurrence, whole = get(name).recurrence, self.inputs(name, tokens, row)
        given = shard(recurrence, whole, self.cp)
        calls = {
            "part": both_ways(recurrence, given), "whole": both_ways(recurrence, whole),
            "ranks": both_ways(lambda **x: recurrence(**x, parallel=self.cp), given),
        }  # fmt: skip
        for label, ways in calls.items():
            for way, call in zip(WAYS, ways, strict=True):
                try:
                    self.graph(row, label, way, call)
                except Failed as error:
                    self.refused[name, label, way] = str(error)
                    row.setdefault("refused", {})[f"{label} {way}"] = str(error)
        if "ranks_ms" in row:
            self.efficiency(row)

    def graph(self, row, label, way, call):
        if said := self.refused.get((row["name"], label, way)):
            raise Failed(said)
        replay = agreed(lambda: captured(call, self.device), self.device)
        row.setdefault(f"{label}_ms", {})[way] = agreed(lambda: self.clock(replay), self.device)[0]

    def layer(self, name, tokens, row):
        layer, width = layer_of(name, self.asked, self.device)

        def ways(whole, **options):
            x = layer_input(tokens * self.cp.ranks, width, self.device, self.dtype)
            call, values = layer_call(layer, **options)
            return both_ways(call, {"x": x if whole else self.cp.shard(x).clone()} | values)

        ranks = ways(False, parallel=self.cp)
        self.times(row, "ranks", ranks)
        self.peak(row, "ranks", ranks[1])
        self.times(row, "part", ways(False))
        alone = ways(True)
        self.peak(row, "one", alone[1])
        self.times(row, "whole", alone)
        self.efficiency(row)

    def far(self, name, tokens, row):
        recurrence, whole = get(name).recurrence, self.inputs(name, tokens, row)
        given, first = shard(recurrence, whole, self.cp), WAYS[:1]
        self.times(row, "ranks", both_ways(lambda **x: recurrence(**x, parallel=self.cp), given)[:1], first)
        self.times(row, "part", both_ways(recurrence, given)[:1], first)
        self.times(row, "whole", both_ways(recurrence, whole)[:1], first)
        self.efficiency(row)

    def peer(self, name, tokens, row):
        whole = self.inputs(name, tokens, row)
        given = shard(get(name).recurrence, whole, self.cp)
        row |= agreed(lambda: peer(name, whole, given, self.cp, self.clock), self.device)

    def peers(self):
        """fla's rows, after which nothing is waited for: a thread ends the process when their time is over."""

        def end():
            if not self.cp.rank:
                self.record["left_out"].append(["peers", f"not done after {self.asked.peer_seconds} s"])
                self.save()
                print(f"peers: not done after {self.asked.peer_seconds} s", flush=True)
            os._exit(0)

        timer = threading.Timer(self.asked.peer_seconds, end)
        timer.daemon = True
        timer.start()
        for name in PEERS:
            if name in self.asked.only:
                tokens = self.asked.shortest
                self.measure("peers", name, tokens, lambda row, name=name, tokens=tokens: self.peer(name, tokens, row))
        timer.cancel()

    def run(self):
        asked = self.asked
        if "link" in asked.parts:
            self.near, points = link(self.cp, self.clock, self.device, 20 if asked.dry else 26)
            self.cp = Sequence(self.mesh["cp"], links=(self.near, FAR))
            self.record |= {"link": self.near._asdict(), "gathers": points}
            self.save()
        layers = asked.shortest if asked.dry else LAYER_TOKENS
        plan = [("rows", t, self.row) for t in asked.lengths] + [("layers", layers, self.layer)]
        few = [t for t in asked.lengths if t <= MOST_CAPTURED]
        plan += [("exchanges", t, self.exchanges) for t in few if self.cp.ranks > 2]  # of two ranks all are alike
        plan += [("graphs", t, self.graphs) for t in few if not asked.dry]
        plan += [("far", 256 if asked.dry else FAR_TOKENS, self.far)]
        for kind, tokens, make in plan:
            names = [n for n in asked.only if kind != "exchanges" or n in EXCHANGED]
            for name in names if kind in asked.parts else ():
                self.measure(kind, name, tokens, lambda row, m=make, n=name, t=tokens: m(n, t, row))
        if not self.cp.rank:
            print(table(self.record), flush=True)
        if "peers" in asked.parts:
            self.peers()
        self.save()
        dist.barrier()  # nobody leaves while another is still talking
        dist.destroy_process_group()


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the record is written")
    parser.add_argument("--page", type=Path, nargs="*", help="measure nothing: print these records' tables")
    parser.add_argument("--into", type=Path, help="and put them into this page")
    parser.add_argument("--fitted", type=Path, help="a record of fewer ranks, whose projection is held to this run")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--without", nargs="*", choices=("errors",), default=[])
    parser.add_argument("--lengths", nargs="*", type=int, help="tokens a rank")
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny: whether all of it runs")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no row after these")
    parser.add_argument("--warm-seconds", type=float, default=150.0)
    parser.add_argument("--peer-seconds", type=float, default=90.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--warm", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.lengths = asked.lengths or ([64, 128] if asked.dry else list(LENGTHS))
    if not asked.page and not asked.json:
        parser.error("--json: where is the record to be written?")
    asked.shortest, asked.started = min(asked.lengths), time.monotonic()
    return asked


def main():
    asked = options()
    if asked.page:
        for path in asked.page:
            text = page(json.loads(path.read_text()))
            put_into(asked.into, path.name, text) if asked.into else print(text)
        return
    if asked.warm:
        warm(asked.warm, asked)
        return
    if not asked.dry and asked.warm_seconds:
        warm_all(asked, int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    Bench(asked).run()


if __name__ == "__main__":
    main()
