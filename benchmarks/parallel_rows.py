"""What benchmarks/parallel.py times: rows and their sizes, and processes that compile their kernels before."""

import importlib.util
import os
import subprocess
import sys
import time

import torch
from gpu_compile import compile_share
from parallel_measure import PEERS, both_ways, draw, layer_call, layer_input, peer_call

from dsf.mixers import get
from dsf.parallel import Simulated

ROWS = {  # heads, N, P: of one sequence, as in papers
    "gated_deltanet": (16, 128, 128), "kda": (16, 128, 128), "ssd": (64, 128, 64), "s6": (1, 16, 4096),
    "mlstm": (16, 128, 128), "rg_lru": (1, 1, 4096),
}  # fmt: skip
WIDER = ("gated_deltanet", "kda", "mlstm")  # heads as wide as N and P: 64 at the shortest length, and of layers
LENGTHS = (32768, 8192, 131072)  # tokens a rank, the most telling first: time may not suffice for all
LAYER_TOKENS, FAR_TOKENS, D_MODEL = 32768, 524288, 2048
SHARES = 6  # processes that compile the candidates of a peer's autotuners


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
        inputs = draw(get(name).recurrence, asked.shortest, *sizes_of(name, 1, asked), device, torch.bfloat16)
        peer_call(name, inputs)[1]()
        return
    recurrence, world = get(name).recurrence, Simulated(asked.ranks)
    with torch.no_grad():
        layer, width = layer_of(name, asked, device)
    for tokens in [t for t in asked.lengths if t <= 32768]:
        whole = draw(recurrence, asked.ranks * tokens, *sizes_of(name, tokens, asked), device, torch.bfloat16)
        for options in ({"parallel": world}, {}):
            both_ways(lambda options=options, **x: recurrence(**x, **options), whole)[1]()
        if tokens == asked.shortest:
            both_ways(recurrence, {n: x.float() for n, x in whole.items()})[1]()
    if "layers" in asked.parts:
        call, values = layer_call(layer, parallel=world)
        x = layer_input(asked.ranks * asked.shortest, width, device, torch.bfloat16)
        both_ways(call, {"x": x} | values)[1]()
    torch.cuda.synchronize()


def warm_all(asked, rank, ranks):
    """One process for each recurrence, this rank's share of them."""
    begin, running = time.monotonic(), []
    told = [str(asked.json), "--ranks", str(ranks), "--lengths", *map(str, asked.lengths), "--parts", *asked.parts]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER", "GROUP", "ROLE"))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    clean["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    jobs = [(name, []) for name in asked.only]
    if "peers" in asked.parts and importlib.util.find_spec("fla"):
        jobs += [(n, ["--share", str(i), str(SHARES)]) for n in PEERS if n in asked.only for i in range(SHARES)]
    for name, share in jobs[rank::ranks]:
        command = [sys.executable, sys.argv[0], "--warm", name, *share, "--json", *told]
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
