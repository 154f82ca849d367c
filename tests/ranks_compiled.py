"""What two GPUs of tests/test_gpu_ranks.py do: compiled layers on packed sequences that are spread over both.

torchrun --nproc-per-node 2 tests/ranks_compiled.py FOLDER NAME ...: writes {case: what was found} to FOLDER/RANK.json.
"""

import torch
import torch.distributed as dist
from ranks_graphed import each

import dsf
from dsf import mixers

NAMES = ["gated_deltanet", "kda", "ssd", "mlstm", "rg_lru", "softmax_attention", "fox"]
BOUNDS = [0, 130, 130, 700, 1024]  # the last sequence but one lies on both ranks


def summed(x):
    dist.all_reduce(x)
    return x


def compared(mesh, name):
    """By how much outputs and gradients of the third call err in float32, without and with torch.compile."""
    torch.manual_seed(0)
    cp = dsf.parallel.Sequence(mesh)
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


if __name__ == "__main__":
    each(NAMES, compared, seconds=120)
