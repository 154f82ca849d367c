"""Times context parallelism on the GPUs of one host: efficiency, its pieces, memory, errors, the link, a projection.

torchrun --nproc-per-node 2 benchmarks/parallel.py --json benchmarks/results/parallel.json [--seconds 330] [--commit X]
torchrun --nproc-per-node 2 benchmarks/parallel.py --dry --json /tmp/parallel.json      (a CPU, gloo, tiny sizes)

Public calls of one sequence, bfloat16 on CUDA, decays as of a trained model; every number is the slowest rank's:
  whole    one GPU, the whole sequence: W times a rank's tokens
  part     one GPU, a rank's tokens
  ranks    all ranks, the whole sequence
  strong = whole / (W ranks), weak = part / ranks; forward, and forward + backward ("both"); calls one after the other
  between two events, medians. host: until the host had issued a call.
  exposed = ranks - the same where nothing is sent; pieces (F, M, exchange, fold, C): each alone.
  memory: the peak of forward + backward, inputs included, of a rank and of one GPU.
  errors: of y and all gradients against float32 on one GPU (on CPUs: float32 against float64), of one GPU and of the
  ranks. repeats: whether a second call has the same bits.
Delta rules and mLSTM have 64 heads at 8,192 tokens a rank, 16 beyond. Layers: d_model 2048, 32,768 tokens a rank.
Far: forward alone at 524,288 tokens a rank. The link: all-gathers of 2^10 to 2^26 bytes, fitted as latency +
bytes / bandwidth, which then choose the exchanges. Peer: fla's context parallel where fla is importable, last, one row
each, ended by --peer-seconds. The projection to 64 and 1,024 ranks is a model (dsf.parallel.cost with 8 GPUs a node),
marked as such, no measurement.

The record is written after every row. Kernels are compiled before anything is timed, by processes that run the rows'
shapes on ranks simulated on one GPU and fill Triton's cache. --parts: some of link, rows, layers, far, peers.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_compile import compile_share
from parallel_measure import (
    FAR,
    PEERS,
    Clock,
    Failed,
    Silent,
    agreed,
    both_ways,
    draw,
    errors,
    layer_call,
    layer_input,
    link,
    peak,
    peer,
    peer_call,
    pieces,
    projection,
    same_bits,
    shard,
)
from torch.distributed.device_mesh import init_device_mesh

import dsf
from dsf.mixers import get
from dsf.parallel import Sequence, Simulated

ROWS = {  # heads, N, P: of one sequence, as in papers
    "gated_deltanet": (16, 128, 128), "kda": (16, 128, 128), "ssd": (64, 128, 64), "s6": (1, 16, 4096),
    "mlstm": (16, 128, 128), "rg_lru": (1, 1, 4096),
}  # fmt: skip
WIDER = ("gated_deltanet", "kda", "mlstm")  # heads as wide as N and P: 64 at the shortest length, and of layers
LENGTHS, LAYER_TOKENS, FAR_TOKENS, D_MODEL = (8192, 32768, 131072), 32768, 524288, 2048
SHARES = 6  # processes that compile the candidates of a peer's autotuners
PARTS = ("link", "rows", "layers", "far", "peers")
WAYS = ("forward", "both")


def sizes_of(name, tokens, asked):
    heads, n, p = ROWS[name]
    if asked.dry:
        return min(heads, 2), min(n, 8), min(p, 8)
    return (64 if name in WIDER and tokens <= 8192 else heads), n, p


def layer_of(name, asked, device):
    """A layer and its input's width: where it has heads of a width of their own, as many as the recurrence's row."""
    torch.manual_seed(0)
    width = 32 if asked.dry else D_MODEL
    heads = {"n_heads": sizes_of(name, LAYER_TOKENS, asked)[0]} if name in WIDER else {}
    layer = get(name).module(d_model=width, **heads).to(device)
    return (layer if asked.dry else layer.to(torch.bfloat16)), width


# -- kernels, before anything is timed


def warm(name, asked):
    """Run a recurrence's rows on simulated ranks, so that Triton's cache has their kernels; or compile a peer's."""
    device = torch.device("cuda")
    if asked.share:
        compile_share(*asked.share)
        inputs = draw(get(name).recurrence, asked.lengths[0], *sizes_of(name, 1, asked), device, torch.bfloat16)
        peer_call(name, inputs)[1]()
        return
    recurrence, world = get(name).recurrence, Simulated(asked.ranks)
    with torch.no_grad():
        layer, width = layer_of(name, asked, device)
    for tokens in [t for t in asked.lengths if t <= 32768]:
        whole = draw(recurrence, asked.ranks * tokens, *sizes_of(name, tokens, asked), device, torch.bfloat16)
        for options in ({"parallel": world}, {}):
            both_ways(lambda options=options, **x: recurrence(**x, **options), whole)[1]()
        if tokens == asked.lengths[0]:
            both_ways(recurrence, {n: x.float() for n, x in whole.items()})[1]()
    if "layers" in asked.parts:
        call, values = layer_call(layer, parallel=world)
        x = layer_input(asked.ranks * asked.lengths[0], width, device, torch.bfloat16)
        both_ways(call, {"x": x} | values)[1]()
    torch.cuda.synchronize()


def warm_all(asked, rank, ranks):
    """One process for each recurrence, this rank's share of them."""
    begin, running = time.monotonic(), []
    told = [str(asked.json), "--ranks", str(ranks), "--lengths", *map(str, asked.lengths), "--parts", *asked.parts]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER", "GROUP", "ROLE"))}
    clean["CUDA_VISIBLE_DEVICES"] = str(rank)
    jobs = [(name, []) for name in asked.only]
    if "peers" in asked.parts and importlib.util.find_spec("fla"):
        jobs += [(n, ["--share", str(i), str(SHARES)]) for n in PEERS if n in asked.only for i in range(SHARES)]
    for name, share in jobs[rank::ranks]:
        command = [sys.executable, __file__, "--warm", name, *share, "--json", *told]
        running.append((name, subprocess.Popen(command, env=clean, stderr=subprocess.PIPE, text=True)))
    for name, process in running:
        left = asked.warm_seconds - (time.monotonic() - begin)
        try:
            _, said = process.communicate(timeout=max(1.0, left))
            if process.returncode:
                print(f"warming {name}: {said.strip().splitlines()[-1:]}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"warming {name}: not done after {asked.warm_seconds} s", flush=True)
    print(f"rank {rank}: kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)


# -- rows


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
        self.record = {"machine": self.machine(), "rows": [], "layers": [], "far": [], "peers": [], "left_out": []}

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
                row[label] = {way: row[key][way] / (count * ranks[way]) for way in row[key]}

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
        if tokens == self.asked.lengths[0]:
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
        row["projection"] = projection(recurrence, sizes, row["part_ms"], row["pieces_ms"], self.near)

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
                tokens = self.asked.lengths[0]
                self.measure("peers", name, tokens, lambda row, name=name, tokens=tokens: self.peer(name, tokens, row))
        timer.cancel()

    def run(self):
        asked = self.asked
        if "link" in asked.parts:
            self.near, points = link(self.cp, self.clock, self.device, 20 if asked.dry else 26)
            self.cp = Sequence(self.mesh["cp"], links=(self.near, FAR))
            self.record |= {"link": self.near._asdict(), "gathers": points}
            self.save()
        far = 256 if asked.dry else FAR_TOKENS
        layers = asked.lengths[0] if asked.dry else LAYER_TOKENS
        plan = [("rows", t, self.row) for t in asked.lengths] + [("layers", layers, self.layer), ("far", far, self.far)]
        for kind, tokens, make in plan:
            for name in asked.only if kind in asked.parts else ():
                self.measure(kind, name, tokens, lambda row, m=make, n=name, t=tokens: m(n, t, row))
        if not self.cp.rank:
            print(table(self.record), flush=True)
        if "peers" in asked.parts:
            self.peers()
        self.save()
        dist.barrier()  # nobody leaves while another is still talking
        dist.destroy_process_group()


# -- what is printed


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
    return text + (f"  FAILED {row['failed']}" if "failed" in row else "")


def table(record):
    """All rows: efficiency forward and forward + backward, milliseconds over ranks."""
    found = ["", f"{record['machine']}", f"link {record.get('link')}"]
    for kind in ("rows", "layers", "far", "peers"):
        found += [f"-- {kind}", *(line(row) for row in record[kind])] if record[kind] else []
    return "\n".join([*found, f"left out: {record['left_out']}"])


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
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
    asked.started = time.monotonic()
    return asked


def main():
    asked = options()
    if asked.warm:
        warm(asked.warm, asked)
        return
    if not asked.dry and asked.warm_seconds:
        warm_all(asked, int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    Bench(asked).run()


if __name__ == "__main__":
    main()
