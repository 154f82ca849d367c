"""What two GPUs of tests/test_gpu_ranks.py do: compiled layers on packed sequences, and models, spread over both.

torchrun --nproc-per-node 2 tests/ranks_compiled.py FOLDER NAME ...: writes {case: what was found} to FOLDER/RANK.json.
"""

import torch
import torch.distributed as dist
from ranks_graphed import each

import dsf
from dsf import mixers
from dsf.models import CausalLM, ModelConfig, next_labels

NAMES = ["gated_deltanet", "kda", "ssd", "mlstm", "rg_lru", "softmax_attention", "fox"]
MODELS = {"model of " + " and ".join(mixers): mixers
          for mixers in (["gated_deltanet", "softmax_attention"], ["ssd", "mlstm"])}  # fmt: skip
BOUNDS = [0, 130, 130, 700, 1024]  # the last sequence but one lies on both ranks


def summed(x):
    dist.all_reduce(x)
    return x


def models(mesh, name):
    """By how much a model's loss and gradients err in float32 in its third call, without and with torch.compile."""
    torch.manual_seed(0)
    cp = dsf.parallel.Sequence(mesh)
    config = ModelConfig(vocab_size=97, d_model=128, n_layers=2, n_heads=2, mixers=MODELS[name])
    with torch.device("cuda"):
        model, exact = CausalLM(config), CausalLM(config).double()
        ids = torch.randint(0, 97, (2, 512))
    exact.load_state_dict(model.state_dict())

    def run(call, weights, ids, labels):
        loss = call(ids, shift_labels=labels, num_items_in_batch=1022, return_state=False).loss
        return loss.detach(), *torch.autograd.grad(loss, weights)

    labels = next_labels(ids)
    true = run(exact, list(exact.parameters()), ids, labels)
    dsf.parallel.attach(model, cp)
    errors = {}
    for kind, way in (("eager", model), ("compiled", torch.compile(model, fullgraph=True))):
        for _ in range(3):
            found = [summed(x) for x in run(way, list(model.parameters()), *cp.shard(ids, labels))]
        errors[kind] = max(float((a - b).norm() / b.norm()) for a, b in zip(found, true, strict=True))
    return errors


def layers(mesh, name):
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
    each([*NAMES, *MODELS], lambda mesh, name: (models if name in MODELS else layers)(mesh, name), seconds=120)
