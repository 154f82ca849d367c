"""Causal attention of a sequence's last tokens to all of it, as ranks compute it, beside torch's public operator.

python benchmarks/last_tokens.py --commit HASH --json benchmarks/results/last_tokens.json
python benchmarks/last_tokens.py --page benchmarks/results/last_tokens.json --into docs/parallel.md
python benchmarks/last_tokens.py --dry --json /tmp/last_tokens.json                          (a CPU, few tokens)

Every row: milliseconds forward and with backward of the last T of S tokens, bfloat16, one sequence (median of single
calls), ours and torch's; errors of y and of the queries' gradient, of the first and the last 64 queries of a head,
over the norm of these, against float64. --decays: attention with a decay a token and head (FoX) by the attention
kernels, beside blocks of torch's operators in float32.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from gpu_page import add_options, pair, shows
from softmax import both, milliseconds
from torch.nn.attention.bias import causal_lower_right

from dsf.kernels.attention import fused
from dsf.kernels.scores import FLOOR, Scores, blocks
from dsf.triton.attention import attend

ROWS = [  # heads, width, S, parts of S that T is
    (16, 64, 131072, (1, 2, 4)), (16, 128, 131072, (4,)), (16, 128, 32768, (1, 2, 4, 8)), (16, 128, 8192, (2, 4)),
]  # fmt: skip
DECAYS = [(16, 128, 8192, (1, 2, 4)), (16, 64, 8192, (4,))]
FEW = 64


def public(a, k, v):
    """Torch's own, which knows this mask without storing it."""
    if a.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(a, k, v, is_causal=True)
    return F.scaled_dot_product_attention(a, k, v, attn_mask=causal_lower_right(a.shape[2], k.shape[2]))


def by_blocks(a, k, v, log):
    """Attention with decays by torch's operators."""
    a, late = a.float() * k.shape[3] ** -0.5, log.double().cumsum(2)
    place = torch.arange(k.shape[2], device=k.device)
    last = slice(k.shape[2] - a.shape[2], None)
    found = blocks(
        Scores(a, k.float(), v.float(), place[None], late[:, :, last], -late, None, True, FLOOR, place[last])
    )
    return (found.num / found.total.unsqueeze(-1)).to(v.dtype)


def exact(leaves, dy, queries):
    """[y, the gradient of a] of some queries of the first head, in float64."""
    a, k, v, *log = (x.detach()[0, 0].double() for x in leaves)
    places = torch.arange(len(k), device=k.device) <= queries[:, None] + len(k) - leaves[0].shape[2]
    some = a[queries].requires_grad_()
    scores = some @ k.T * k.shape[1] ** -0.5
    for late in (x.cumsum(0) for x in log):
        scores = scores + late[queries + len(k) - leaves[0].shape[2]][:, None] - late
    scores = scores.masked_fill(~places, float("-inf"))
    y = scores.softmax(-1) @ v
    return [y.detach(), *torch.autograd.grad(y, some, dy[0, 0, queries].double())]


def measured(heads, width, places, part, device, runs, decays):
    """One row."""
    torch.manual_seed(0)
    tokens = places // part
    leaves = [
        torch.randn(1, heads, t, width, device=device, dtype=torch.bfloat16).requires_grad_()
        for t in (tokens, places, places)
    ]
    if decays:
        log = torch.nn.functional.logsigmoid(torch.randn(1, heads, places, device=device) + 4)
        leaves.append(log.requires_grad_())
    dy = torch.randn_like(leaves[0])
    row = {"heads": heads, "width": width, "places": places, "tokens": tokens}
    few = min(FEW, tokens // 2)
    queries = torch.cat([torch.arange(few), torch.arange(tokens - few, tokens)]).to(device)
    truth = exact(leaves, dy, queries)
    calls = {"dsf": lambda *x: fused(*x, None, width**-0.5), "torch": public}
    if decays:
        calls = {"dsf": lambda *x: attend(*x, width**-0.5, None)[0], "torch": by_blocks}
    for who, call in calls.items():
        found = both(call, leaves, dy)[:2]
        off = [(x[0, 0, queries].double() - y).norm() / y.norm() for x, y in zip(found, truth, strict=True)]
        with torch.no_grad():
            forward = milliseconds(lambda call=call: call(*leaves), device, runs)
        whole = milliseconds(lambda call=call: both(call, leaves, dy), device, runs)
        row[who] = {"ms": [forward, whole], "errors": [float(x) for x in off]}
    return row


def page(data):
    """The table of a record."""
    lines = ["| heads x width | S | T | ours ms | torch's ms | ours ÷ torch's | error of y, dq: ours | torch's |"]
    lines.append("|---" * 8 + "|")
    for row in data["rows"]:
        ours, theirs = row["dsf"], row["torch"]
        over = [x / y for x, y in zip(ours["ms"], theirs["ms"], strict=True)]
        off = [", ".join(f"{x:.1e}" for x in side["errors"]) for side in (ours, theirs)]
        sizes = f"{row['heads']} x {row['width']} | {row['places']:,} | {row['tokens']:,}"
        lines.append(f"| {sizes} | {pair(ours['ms'])} | {pair(theirs['ms'])} | {pair(over)} | {' | '.join(off)} |")
    return "\n".join([*lines, "", f"{data['device']}, torch {data['torch']}, commit {data['commit']}, bfloat16."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--decays", action="store_true", help="attention with decays")
    parser.add_argument("--dry", action="store_true", help="on a CPU, few tokens: whether all of it runs")
    asked = parser.parse_args()
    if shows(asked, page):
        return
    device = torch.device("cpu" if asked.dry else "cuda")
    name = "cpu" if asked.dry else torch.cuda.get_device_name()
    record = {"device": name, "torch": torch.__version__, "commit": asked.commit, "rows": []}
    for heads, width, places, parts in [(2, 16, 300, (1, 2))] if asked.dry else DECAYS if asked.decays else ROWS:
        for part in parts:
            row = measured(heads, width, places, part, device, 1 if asked.dry else 5, asked.decays)
            record["rows"].append(row)
            if asked.json:
                asked.json.write_text(json.dumps(record, indent=1) + "\n")
    print(page(record))


if __name__ == "__main__":
    main()
