"""Every kernel and direction once under NVIDIA's compute-sanitizer: addresses, unwritten memory, races. Needs a GPU.

python benchmarks/sanitize.py --out benchmarks/results/sanitize.json
python benchmarks/sanitize.py --list                        what is called
python benchmarks/sanitize.py --dry-run --only delta s6     the commands, nothing run
python benchmarks/sanitize.py --one delta --dtype bfloat16  the calls themselves, without the sanitizer

First all calls run plainly, so that Triton's cache holds their kernels: to compile under the sanitizer is slow. Then
each name, dtype and tool is a process of its own, `--workers` of them side by side. Torch's caching allocator is off
(PYTORCH_NO_CUDA_MEMORY_CACHING=1): it would hide what lies outside of a tensor but inside a block. Calls are also held
to the float64 oracle. The exit status is 1 where anything was found, failed or did not end.
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
from dataclasses import replace
from pathlib import Path

import torch

from dsf.checking.measure import TOLERANCE
from dsf.fuzz import Case, Declaration, attempt
from dsf.fuzz.grammar import KNOWN
from dsf.fuzz.report import commit, machine, stderr
from dsf.kernels.convolution import short_convolution, short_convolution_step
from dsf.kernels.norm import added_rms_norm, gated, gated_rms_norm
from dsf.mixers import get

TOOLS = {
    "memcheck": ["--tool", "memcheck"],
    "initcheck": ["--tool", "initcheck"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
}
DTYPES = ("float32", "bfloat16")
FOUND = 86  # exit status of compute-sanitizer where it found something


def declared(a, b, c="q", d="0", **more):
    return Declaration("own", ((a, b),), c, d, **more).build


def mixer(name):
    return lambda: get(name).recurrence


# kernels of chunks, by structure, then fused scans and attention
SUBJECTS = {
    "identity": mixer("unnormalized_linear_attention"), "constant-decay": mixer("retnet"), "scalar-decay": mixer("ssd"),
    "key-decay": mixer("gla"), "read-before": mixer("rwkv6"), "delta": mixer("deltanet"),
    "gated-delta": mixer("gated_deltanet"), "kda": mixer("kda"), "rank-one": mixer("rwkv7"),
    "summed-deltas": declared(
        "sigmoid(s) * (I - sigmoid(b) * outer(k, k) - 0.5 * outer(l, l))", "k * (sigmoid(b) * v) + l * x", d="pv * v"
    ),
    "summed-key-deltas": declared(
        "(I - sigmoid(b) * outer(k, k) - 0.5 * outer(l, l)) @ diag(sigmoid(sk))", "k * (sigmoid(b) * v)"
    ),
    "summed-rows": declared("diag(sigmoid(sk)) - sigmoid(b) * outer(k, k) + 0.5 * outer(l, sigmoid(k) * l)", "k * v"),
    "micro-steps": mixer("delta_product"), "gated-micro-steps": mixer("gated_delta_product"),
    "normalised": mixer("linear_attention"), "exponential-gate": mixer("mlstm"),
    "gated-read": declared("sigmoid(s)", "k * v", "q * sigmoid(o)", "pv * v"),
    "s6": mixer("s6"), "longhorn": mixer("longhorn"), "dots": KNOWN.build, "vector": mixer("qlstm"),
    "vector-where": mixer("rg_lru"), "vector-normalised": mixer("rwkv4"),
    "value-decay": declared("sigmoid(sv)", "k * v", d="pv * v"),
    "dense-write": declared("sigmoid(sk)", "sigmoid(k * v + pkv) * v"),
    "scan-read-before": declared("exp(-softplus(sk) * sigmoid(sv))", "k * v", d="dot(q, pk * k) * v", read="before"),
    "scan-normalised": declared("exp(-softplus(pk) * sigmoid(sv))", "sigmoid(k) * v", "sigmoid(q)", rule="dsf.ratio"),
    "prologue": declared("exp(-softplus(dot(q, l2norm(k)) + pk) * sigmoid(sv))", "softplus(s) * l2norm(k) * v"),
    "scan-micro-steps": Declaration(
        "own", (("sigmoid(gv[0] + gk[0])", "ks[0] * vs[0]"), ("sigmoid(gv[1])", "ks[1] * vs[1]")), "q"
    ).build,
    "attention": mixer("fox"),
    "attention-window": declared("0.9", "exp_features(l2norm(k)) * v", "exp_features(q)", rule="dsf.ratio", window=16),
    "attention-turned": declared(
        "turn(th)", "exp_features(k) * v", "exp_features(N**-0.5 * q)",
        rule="lambda num, den, one: num / (den + exp(ps) * one)",
    ),
}  # fmt: skip


def norms(x, weight, gate):
    """Every kernel of norms that layers launch, by name."""
    return {
        "norm": gated_rms_norm(x, weight), "norm, then gate": gated_rms_norm(x, weight, gate),
        "gate, then norm of groups": gated_rms_norm(x, weight, gate, groups=2, gate_first=True),
        "gate": gated(x, gate, "sigmoid"), "norm of a sum": sum(added_rms_norm(x, gate, weight)),
    }  # fmt: skip


def convolutions(x, weight, bias, state):
    """Every kernel of short convolutions, by name. state: [3, C, K - 1]."""
    bounds = torch.tensor([0, 5, 6, x.shape[1]], device=x.device)
    with torch.no_grad():
        step = short_convolution_step(x[:, :1], weight, bias, state[:1])[0][0]
    return {
        "plain": short_convolution(x, weight, bias, state[:1])[0][0], "step": step,
        "packed": short_convolution(x, weight, bias, state, cu_seqlens=bounds, activation=None)[0][0],
    }  # fmt: skip


# kernels of layers: calls, and the shapes of what they take
LAYERS = {
    "layer-norm": (norms, [(2, 37, 40), (40,), (2, 37, 40)]),
    "layer-convolution": (convolutions, [(1, 37, 40), (40, 4), (40,), (3, 40, 3)]),
}


def cases(dtype):
    """Odd sizes, every direction: whole and packed sequences, gradients, first states, one token."""
    sizes = {"heads": 3, "n": 24, "p": 40, "dtype": dtype}
    return {
        "plain": Case(tokens=37, batch=2, initial=True, **sizes),
        "chunks": Case(tokens=131, batch=1, **sizes),
        "small": Case(tokens=5, batch=1, heads=1, n=3, p=5, dtype=dtype, loss="y"),
        "packed": Case(tokens=37, lengths=(5, 1, 31), initial=True, **sizes),
        "strides": Case(tokens=33, batch=2, layouts={"dy": "expanded-tokens", "k": "late", "v": "transposed"}, **sizes),
        "step": Case(tokens=3, batch=2, step=True, loss="", initial=True, **sizes),
    }


NAMES = [*SUBJECTS, *LAYERS]


def called(calls, inputs):
    """What calls give, and the gradients of their inputs, by name."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    found = calls(*leaves)
    sum(y.square().sum() for y in found.values() if y.requires_grad).backward()
    return found | {f"gradient {i}": x.grad for i, x in enumerate(leaves)}


def layer(name, dtype, device):
    """The calls of a name of LAYERS beside torch's in float64; True where all are right."""
    calls, shapes = LAYERS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]
    exact, found, right = called(calls, [x.double() for x in inputs]), called(calls, [x.to(device) for x in inputs]), 0
    for key, y in found.items():
        true = exact[key].detach()
        error = float((y.detach().double().cpu() - true).norm() / true.norm())
        print(f"{name} {dtype} {key}: off by {error:.1e}", flush=True)
        right += error < TOLERANCE[dtype]
    return right == len(found)


def one(name, dtype, device):
    """The calls of a name; True where all are right."""
    if name in LAYERS:
        return layer(name, dtype, device)
    recurrence, right = SUBJECTS[name](), True
    for kind, case in cases(dtype).items():
        if case.step and recurrence.spec.is_attention:
            continue  # torch's
        case = replace(case, n=case.n + case.n % 2) if recurrence.spec.turns else case
        names = {i.name for i in recurrence.spec.inputs} | {"dy"}
        verdict = attempt(recurrence, case.without(set(case.layouts) - names), device, poison=False)
        print(f"{name} {dtype} {kind}: {verdict}", flush=True)
        right = right and verdict.status != "wrong"
    return right


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


def command(sanitizer, tool, name, dtype):
    worker = [sys.executable, str(Path(__file__).resolve()), "--one", name, "--dtype", dtype]
    if tool is None:
        return worker
    options = ["--target-processes", "all", "--error-exitcode", str(FOUND), "--print-limit", "50"]
    return [sanitizer, *TOOLS[tool], *options, *worker]


def run_one(sanitizer, tool, name, dtype, limit):
    """A row of the record."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if tool is not None:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    begin = time.perf_counter()
    row = {"name": name, "dtype": dtype, "tool": tool or "none"}
    try:
        done = subprocess.run(
            command(sanitizer, tool, name, dtype), capture_output=True, text=True, env=environment, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return row | {"ok": False, "found": None, "kinds": {}, "seconds": limit, "said": "did not end in time"}
    log = done.stdout + done.stderr
    found, kinds = (0, {}) if tool is None else parsed(log)
    ok = done.returncode == 0 and found == 0
    said = "" if ok else "\n".join(log.splitlines()[-30:])
    return row | {
        "ok": ok, "found": found, "kinds": kinds, "seconds": round(time.perf_counter() - begin, 1),
        "status": done.returncode, "said": said,
    }  # fmt: skip


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
    again = {(tool or "none", name, dtype) for tool, name, dtype in jobs}
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
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", choices=NAMES, metavar="NAME", help="make this one's calls, and no more")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.list:
        about = {name: SUBJECTS[name]().spec.structure for name in given.only if name in SUBJECTS}
        print("\n".join(f"{name}: {about.get(name, 'of a layer')}" for name in given.only))
        return 0
    if given.one:
        return 0 if one(given.one, given.dtype, given.device) else 1
    jobs = [(tool, name, dtype) for tool in given.tools for name in given.only for dtype in given.dtypes]
    if given.dry_run:
        print("\n".join(" ".join(command(given.sanitizer, *job)) for job in jobs))
        return 0
    if not shutil.which(given.sanitizer):
        stderr(f"there is no {given.sanitizer}: it comes with the CUDA toolkit; --sanitizer says where it is")
        return 2
    first = [(None, name, dtype) for name in given.only for dtype in given.dtypes]
    where = given.commit or commit()
    rows = kept(given.out, where, [*first, *jobs]) if given.add else []
    about = {"machine": machine(given.device), "commit": where, "sanitizer": version(given.sanitizer)}
    with ThreadPoolExecutor(given.workers) as pool:
        for part in (first, jobs):
            for row in pool.map(lambda job: run_one(given.sanitizer, *job, given.limit), part):
                rows.append(row)
                word = "ok" if row["ok"] else f"FOUND {row['found']} {row['kinds']} {row['said']}"
                print(f"{row['tool']:<10}{row['name']:<20}{row['dtype']:<10}{row['seconds']:>7} s  {word}", flush=True)
                write(given.out, about, rows)
    wrong = [row for row in rows if not row["ok"]]
    print(f"{len(rows)} runs, {len(wrong)} with findings, {sum(row['found'] or 0 for row in rows)} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
