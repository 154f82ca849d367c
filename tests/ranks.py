"""Worlds of processes for tests: forked on gloo, one function on every rank, a time limit that ends a hang.

They are forked from a server process that has imported what they need and done nothing else.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import garbage
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What the server imports. It finds modules of this folder by PYTHONPATH alone.
PRELOADED = [
    "ranks_work", "ranks_heads", "ranks_handed", "ranks_refused", "dsf.parallel.checkpoint", "dsf.analysis.trainer",
    "torch.distributed.device_mesh", "torch._dynamo", "torch._inductor.compile_fx",
]  # fmt: skip
LIMIT = 120.0  # seconds; half of it for one collective, while other ranks may be compiling


def _enter(rank, world, work, folder, alone):
    torch.set_num_threads(1)
    garbage.seldom()
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT / 2)
    )
    found = work()
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(found, file)
    if alone:
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


def _serve():
    """Start the server, unless it runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def spawned(world, work, limit=LIMIT, alone=False):
    """What `work()` returns on every rank, in the order of the ranks; a rank that raises or hangs fails the caller.

    alone: ranks end without waiting for each other, and one that died has returned None.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _serve()
        context = mp.start_processes(
            _enter, (world, work, folder, alone), nprocs=world, join=False, start_method="forkserver"
        )
        end = time.monotonic() + limit
        try:
            while not context.join(timeout=max(0.1, end - time.monotonic())):
                if time.monotonic() > end:
                    raise TimeoutError(f"{world} ranks did not finish within {limit} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        paths = [f"{folder}/{rank}" for rank in range(world)]
        return [None if alone and not os.path.exists(p) else pickle.loads(open(p, "rb").read()) for p in paths]
