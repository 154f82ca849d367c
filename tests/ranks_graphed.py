"""What two GPUs of tests/test_gpu_ranks.py do: training steps from CUDA graphs beside the same steps without.

torchrun --nproc-per-node 2 tests/ranks_graphed.py FOLDER CASE ...: writes {case: what was found} to FOLDER/RANK.json.
"""

import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

import dsf
from dsf.mixers.models.graphed import local
from dsf.models import CausalLM, Graphed, ModelConfig, next_labels

HYBRID = ["gated_deltanet", "softmax_attention"]
LAYERS = ["kda", "ssd", "s6", "mlstm", "rg_lru", "gla", "rwkv7", "mamba3", "hgrn2", "fox"]
# heads, tokens, parameters: what is divided over the ranks
CASES = {
    "tokens": {"tokens": True},
    "tokens of several lengths": {"tokens": True, "lengths": (64, 96)},
    "tokens from both ends": {"tokens": True, "layout": "headtail"},
    "uneven tokens": {"tokens": True, "lengths": (71,)},
    "parameters": {"parameters": True},
    "heads": {"heads": True},
    "tokens and parameters": {"tokens": True, "parameters": True},
    "tokens and parameters in bfloat16": {"tokens": True, "parameters": True, "bf16": True},
    "blocks computed again": {"tokens": True, "parameters": True, "again": True},
    **{f"tokens and parameters, {name}": {"tokens": True, "parameters": True, "mixers": [name]} for name in LAYERS},
}


def steps(mesh, graph, tokens=False, parameters=False, heads=False, bf16=False, again=False, layout="contiguous",
          lengths=(64,), mixers=HYBRID):  # fmt: skip
    """(losses, this rank's gradients after every step and weights) of six steps."""
    torch.manual_seed(0)
    ranks = mesh.size()
    with torch.device("cuda"):
        model = CausalLM(ModelConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=2, mixers=mixers))
    if again:
        model.enable_gradient_checkpointing(preserve_rng_state=False)
    if heads:
        parallelize_module(model, mesh, dsf.parallel.plan_of(model))
    shared = {n: dsf.parallel.Sequence(mesh, layout, sizes=sizes if layout == "contiguous" else None)
              for n in lengths for sizes in [[len(part) for part in torch.arange(n).tensor_split(ranks)]]}  # fmt: skip
    if parameters:
        if tokens:
            dsf.parallel.attach(model, shared[lengths[0]])
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        dsf.parallel.prepare(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(ids, labels):
        with torch.autocast("cuda", torch.bfloat16, enabled=not bf16):
            return model(ids, shift_labels=labels, num_items_in_batch=128, return_state=False).loss * ranks

    step, found = Graphed(model, loss_of), []
    for number in range(3 * len(lengths) + 3):
        length = lengths[number % len(lengths)]
        ids = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(number)).cuda()
        labels = next_labels(ids)
        if tokens:
            dsf.parallel.attach(model, shared[length])
            ids, labels = shared[length].shard(ids, labels)
        if graph:
            loss = step(ids, labels)
        else:
            loss = loss_of(ids, labels)
            loss.backward()
        found += [loss.detach(), *(local(p.grad).clone() for p in model.parameters())]
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    graphs = len(step.graphs)
    step.clear()
    return found, [local(p).detach() for p in model.parameters()], graphs


def compared(mesh, case):
    """The number of graphs, and by how much losses, gradients and weights differ from those without a graph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a CUDA graph.*")
        found, weights, graphs = steps(mesh, True, **case)
    expected, others, _ = steps(mesh, False, **case)
    pairs = list(zip([*found, *weights], [*expected, *others], strict=True))
    apart = max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs)
    return {"graphs": graphs, "apart": apart, "equal": all(torch.equal(a, b) for a, b in pairs)}


def each(known, compare, seconds=60):
    """Write what compare(mesh of the ranks, name) finds of every name of the command line, or of all known ones."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(known)
    dist.init_process_group("nccl", timeout=timedelta(seconds=seconds))
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    found = {}
    for name in names:
        try:
            found[name] = compare(mesh, name)
        except Exception as error:
            found[name] = {"failed": str(error), "where": traceback.format_exc()}
        if not dist.get_rank():
            print(name, {k: x for k, x in found[name].items() if k != "where"}, flush=True)
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    each(CASES, lambda mesh, name: compared(mesh, CASES[name]))
