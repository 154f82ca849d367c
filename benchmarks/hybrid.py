"""A language model over the GPUs of one host, tokens (context parallel) and parameters (FSDP2) divided, beside one GPU.

torchrun --nproc-per-node 2 benchmarks/hybrid.py --json benchmarks/results/hybrid_2.json --commit HASH
torchrun --nproc-per-node 2 benchmarks/hybrid.py --dry --json /tmp/hybrid.json           (a CPU, gloo, tiny, an odd T)
torchrun --nproc-per-node 2 benchmarks/hybrid.py --half ranks --json /tmp/ranks.json     (and --half one elsewhere)
python benchmarks/hybrid.py --join /tmp/ranks.json /tmp/one.json --json benchmarks/results/hybrid_2.json
python benchmarks/hybrid.py --page benchmarks/results/hybrid_2.json --into docs/parallel.md

Three Gated DeltaNet layers for each softmax layer, 340M parameters, one sequence of --tokens a step, AdamW with a
warm-up and clipped gradients, bfloat16 autocast over float32 weights, activations of a block computed again in the
backward pass. The same start and the same tokens: first all together, then every rank alone on whole sequences (each
process is one GPU). Losses of every step, tokens a second (median step, the first two left out), peak memory. tokens:
words of a random language, some often and most seldom, as Zipf's law has it; every other one is of the few that the
word before allows. It is learned little by little: where nothing is to be seen for many steps, two runs part by chance.
--graphed: forward and backward from a CUDA graph (dsf.models.Graphed), collectives too.
"""

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_page import add_options, shows
from models_curves import DEVICE, VOCABULARY
from models_work import fresh_peak, peak
from torch.distributed.device_mesh import init_device_mesh

import dsf
from dsf.models import CausalLM, Graphed, next_labels, sized

MIXERS = ["gated_deltanet"] * 3 + ["softmax_attention"]
TOKENS, STEPS = {False: 131072, True: 301}, {False: 100, True: 4}  # by --dry
HALVES = ("ranks", "one")  # of a run, in this order
WAYS = 4  # words that may follow a word
CLIP = 1.0  # the largest norm of a step's gradient


def text(steps, tokens, device):
    """Ids [steps, tokens], alike on every rank."""
    generator = torch.Generator().manual_seed(0)
    often = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)  # how often the n-th word comes
    follows = torch.multinomial(often, VOCABULARY * WAYS, True, generator=generator).view(VOCABULARY, WAYS)
    free = torch.multinomial(often, steps * tokens, True, generator=generator).view(steps, tokens)
    choices = torch.randint(0, 2 * WAYS, (steps, tokens), generator=generator)
    found = [free[:, 0]]
    for t in range(1, tokens):
        chosen = follows[found[-1], choices[:, t] % WAYS]
        found.append(torch.where(choices[:, t] < WAYS, chosen, free[:, t]))
    return torch.stack(found, dim=1).to(device)


def shared(mesh, layout, tokens):
    """The ranks that share sequences of so many tokens, told their lengths where these differ."""
    ranks = mesh.size()
    uneven = layout == "contiguous" and tokens % ranks
    sizes = [len(part) for part in torch.arange(tokens).tensor_split(ranks)] if uneven else None
    return dsf.parallel.Sequence(mesh, layout, sizes=sizes)


def trained(asked, ids, sequence, mesh):
    """{losses, ms, peak}. sequence: over which tokens are divided, or None."""
    torch.manual_seed(0)
    fresh_peak()
    with torch.device(ids.device):
        model = CausalLM(sized("tiny" if asked.dry else "340m", MIXERS, VOCABULARY, fused_loss=True)).train()
    model.enable_gradient_checkpointing(preserve_rng_state=not asked.graphed)
    if sequence is not None:
        dsf.parallel.attach(model, sequence)
        dsf.parallel.prepare(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr, weight_decay=0.1)
    warm = max(1, len(ids) // 10)  # steps until the whole rate
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    losses, times, ranks = [], [], 1 if sequence is None else sequence.ranks

    def loss_of(given, labels, count):
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(given, shift_labels=labels, num_items_in_batch=count, return_state=False).loss
        return loss * ranks  # FSDP takes the mean over ranks, and the loss is the sum

    graphed = Graphed(model, loss_of)
    for row in ids:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        given, labels = row[None], next_labels(row[None])
        count = (labels != -100).sum()
        if sequence is not None:
            given, labels = sequence.shard(given, labels)
        if asked.graphed:
            loss = graphed(given, labels, count)
        else:
            loss = loss_of(given, labels, count)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        rate.step()
        optimizer.zero_grad(set_to_none=True)
        found = loss.detach() / ranks
        if sequence is not None:
            dist.all_reduce(found)
        losses.append(found.item())
        times.append((time.perf_counter() - begin) * 1e3)
    graphs = len(graphed.graphs)
    graphed.clear()  # NCCL waits for its graphs
    ms = statistics.median(times[2:] or times)
    return {"losses": losses, "ms": ms, "ms_all": times, "peak_mib": peak(), "graphs": graphs}


def halves(asked, facts):
    """What --json holds of a run under the same conditions that was cut off: {"ranks" or "one": the half}."""
    if asked.json is None or not asked.json.exists():
        return {}
    data = json.loads(asked.json.read_text())
    found = {who: data[who] for who in HALVES if who in data}
    same = all(data.get(name, False) == x for name, x in facts.items())
    same = same and all(len(x["losses"]) == asked.steps for x in found.values())
    return found if same and len(found) == 1 else {}


def whole(facts, one, ranks):
    """The record of both halves. Steps that one of them did not make are left out of `apart`."""
    pairs = zip(one["losses"], ranks["losses"], strict=False)
    apart = max(abs(a - b) / b for a, b in pairs)
    strong = one["ms"] / (facts["ranks_count"] * ranks["ms"])
    return {**facts, "one": one, "ranks": ranks, "apart": apart, "strong": strong}


def joined(ranks, one):
    """The record of halves that ran at the same time, on GPUs of one host. The layout is that of the ranks."""
    facts = {name: x for name, x in ranks.items() if name not in HALVES}
    differ = [name for name, x in facts.items() if name not in ("layout", "ranks_count") and one.get(name) != x]
    if differ:
        raise SystemExit(f"the halves differ in {', '.join(differ)}")
    return whole(facts, one["one"], ranks["ranks"])


def save(asked, record):
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


def page(data):
    """The table of a record."""
    steps = min(len(data[who]["losses"]) for who in HALVES)
    last = f"loss after {steps} steps"
    lines = [f"| 340M, {data['tokens']:,} tokens | tokens/s | step ms | peak MiB a GPU | {last} |", "|---" * 5 + "|"]
    for who, title in (("one", "one GPU"), ("ranks", f"{data['ranks_count']} GPUs, tokens and parameters divided")):
        row = data[who]
        memory = "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
        speed = data["tokens"] / row["ms"] * 1e3
        lines.append(f"| {title} | {speed:,.0f} | {row['ms']:,.0f} | {memory} | {row['losses'][steps - 1]:.4f} |")
    graphs = "Steps from CUDA graphs. " if data.get("graphed") else ""
    apart = f"Losses of a step are at most {data['apart']:.2%} apart; strong efficiency {data['strong']:.0%}. "
    where = f"{data['device']}, torch {data['torch']}, commit {data['commit']}."
    return "\n".join([*lines, "", graphs + apart + where])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--tokens", type=int, help="of a step: 131072, with --dry 301")
    parser.add_argument("--steps", type=int, help="100, with --dry 4")
    parser.add_argument("--layout", default="contiguous", help="headtail balances the work of softmax attention")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--graphed", action="store_true", help="steps from a CUDA graph")
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny: whether all of it runs")
    parser.add_argument("--half", choices=HALVES, help="measure this half alone")
    parser.add_argument("--join", type=Path, nargs=2, metavar=("RANKS", "ONE"), help="measure nothing: join two halves")
    asked = parser.parse_args()
    asked.tokens, asked.steps = asked.tokens or TOKENS[asked.dry], asked.steps or STEPS[asked.dry]
    if shows(asked, page):
        return
    if asked.join:
        record = joined(*(json.loads(path.read_text()) for path in asked.join))
        print(page(record))
        return save(asked, record)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if asked.dry else torch.device("cuda", local)
    if not asked.dry:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if asked.dry else "nccl", timeout=timedelta(seconds=180))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    ids = text(asked.steps, asked.tokens, device)
    sequence = shared(mesh["cp"], asked.layout, asked.tokens)
    facts = {
        "device": "cpu" if asked.dry else torch.cuda.get_device_name(), "torch": torch.__version__,
        "commit": asked.commit, "tokens": asked.tokens, "layout": asked.layout, "ranks_count": sequence.ranks,
        "graphed": asked.graphed,
    }  # fmt: skip
    found = halves(asked, facts)
    for who in HALVES:
        if who not in found and asked.half in (None, who):
            found[who] = trained(asked, ids, *((sequence, mesh["cp"]) if who == "ranks" else (None, None)))
        if not dist.get_rank() and len(found) == 1 and who in found:
            print(f"{who}:", json.dumps(found[who]), flush=True)
            save(asked, {**facts, **found})
    if not dist.get_rank() and len(found) == len(HALVES):
        record = whole(facts, found["one"], found["ranks"])
        print(page(record), flush=True)
        save(asked, record)
    dist.barrier()  # until all is written
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads free the last tensors, with Python's lock: where Python ends before, torch aborts


if __name__ == "__main__":
    main()
