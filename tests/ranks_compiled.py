"""What two GPUs of tests/test_gpu_ranks.py do: compiled layers on packed sequences that are spread over both.

torchrun --nproc-per-node 2 tests/ranks_compiled.py FOLDER NAME ...: writes {case: what was found} to FOLDER/RANK.json.
"""

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsf
from dsf import mixers

NAMES = ["gated_deltanet", "kda", "ssd", "mlstm", "rg_lru", "softmax_attention", "fox"]
BOUNDS = [0, 130, 130, 700, 1024]  # the last sequence but one lies on both ranks


def summed(x):
    dist.all_reduce(x)
    return x


def compared(cp, name):
    """By how much outputs and gradients of the third call err in float32, without and with torch.compile."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer, x = mixers.get(name).module(128), torch.randn(1, 1024, 128)
        exact, truth = mixers.get(name).module(128).double(), x.double()
    exact.load_state_dict(layer.state_dict())

    def run(call, layer, x):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        return y, *torch.autograd.grad(y.sin().sum(), [leaf, *layer.parameters()])

    packing = dsf.Packing(BOUNDS)
    y, dx, *dp = run(lambda x: exact(x, None, packing, use_cache=False)[0], exact, truth)
    true = [*cp.shard(y, dx), *dp]

    def call(x):
        return layer(x, None, packing, use_cache=False, parallel=cp)[0]

    errors = {}
    for kind, way in (("eager", call), ("compiled", torch.compile(call, fullgraph=True))):
        for _ in range(3):
            y, dx, *dp = run(way, layer, cp.shard(x))
            found = [y, dx, *map(summed, dp)]
        errors[kind] = max(float((a - b).norm() / b.norm()) for a, b in zip(found, true, strict=True))
    return errors


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:] or NAMES
    dist.init_process_group("nccl", timeout=timedelta(seconds=120))
    torch.cuda.set_device(dist.get_rank())
    cp = dsf.parallel.Sequence(init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"])
    found = {}
    for name in names:
        try:
            found[name] = compared(cp, name)
        except Exception as error:
            found[name] = {"failed": str(error), "where": traceback.format_exc()}
        if not dist.get_rank():
            print(name, {k: x for k, x in found[name].items() if k != "where"}, flush=True)
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
