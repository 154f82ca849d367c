"""bfloat16 accuracy of the chunk kernels on a CUDA GPU, beside a float32 recurrence that is rounded once at the end.

python benchmarks/gpu_accuracy.py [--json benchmarks/results/gpu_accuracy.json]
python benchmarks/gpu_accuracy.py --page benchmarks/results/gpu_accuracy.json --into docs/performance.md
TRITON_INTERPRET=1 PYTHONPATH=tests python benchmarks/gpu_accuracy.py --only rwkv7 --tokens 512 --heads 2 (no GPU)

Both are fed the same bfloat16 inputs and compared with float64: the error of a head's block of 64 tokens, relative to
the block's norm (at least 5% of the largest one's), and of these the worst. A table of worst errors and their ratio,
and the same of fla, where it is installed (`--peers`; its gates, which it takes as logarithms, are given in float32).
"""

import argparse
import json
import math
import os
from dataclasses import replace

import torch
from gpu_matrix import ROWS, draw
from gpu_page import add_options, shows

from dsf import Recurrence
from dsf.analysis.peers import operator, peers_of
from dsf.mixers import get

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAMES = (
    "unnormalized_linear_attention", "retnet", "mlstm", "ssd", "deltanet", "gated_deltanet", "comba", "gla", "rwkv6",
    "kda", "gated_deltanet2", "rwkv7", "mesanet",
)  # fmt: skip
SHAPES = {"ssd": ((4, 128, 64), (160, 128, 64))}  # of the latter all share b and c, and a program takes several
ROWS_OF = {"ssd": "cbx", "rwkv6": "rkv", "rwkv7": "rkv"}  # what is q, k and v of the others
PLAIN = ((4, 128, 128), (4, 64, 64))
STEP = (1e-3, 0.1)  # of SSD's steps at initialisation


def given_to(name, tokens, heads, n, p):
    """Inputs as benchmarks/gpu_matrix.py draws them; gates that it draws for speed alone as their modules begin."""
    shared = ROWS[name].shared if name in ROWS and heads > PLAIN[0][0] else ()
    drawn = draw(get(name).recurrence, 1, tokens, heads, n, p, shared, device=DEVICE)
    given = {x: v.detach() for x, v in drawn.items()}
    if name == "ssd":
        given["A_log"] = torch.empty(heads, device=DEVICE).uniform_(1, 16).log()
        step = torch.empty(heads, device=DEVICE).uniform_(*map(math.log, STEP)).exp()
        given["dt_bias"] = step + torch.log(-torch.expm1(-step))
    if name in ("rwkv6", "rwkv7"):
        given["w"] = given["w"] - 3
        given["u"] = torch.randn_like(given["u"]) / 2 if name == "rwkv6" else torch.zeros_like(given["u"])
    return {x: v.to(torch.bfloat16) for x, v in given.items()}


def cotangent(y):
    """The same dy for everyone."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(y.shape, generator=generator, device=DEVICE).to(torch.bfloat16).to(y.dtype)


def of_peer(name, given):
    """y and the gradients of q, k and v by fla's operator; nothing where it has none, or none that takes a bonus u."""
    if "fla" not in peers_of(name) or "u" in given:
        return {}
    gates = {x: given[x].detach().float() for x in ("alpha", "g") if x in given}
    call, leaves = operator("fla", name, given | gates)
    y = call()
    return dict(zip("yqkv", (y, *torch.autograd.grad(y, leaves[:3], cotangent(y))), strict=True))


def outcome(recurrence, given, dtype, **how):
    """y and the gradients by name, of the inputs in `dtype`, rounded to bfloat16."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
    y = recurrence(**leaves, **how)
    dy = cotangent(y)
    found = {"y": y} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    return found if dtype == torch.float64 else {name: x.bfloat16() for name, x in found.items()}


def worst(found, expected):
    """Largest relative error of any head's block of 64 tokens [B, T, H, ·]; of a Param [H, ·] the whole."""
    a, b = found.double(), expected.double()
    if a.dim() < 3:
        return ((a - b).norm() / b.norm()).item()
    blocks = [x.unflatten(1, (-1, 64)).transpose(2, 3).flatten(3).norm(dim=-1) for x in (a - b, b)]
    return (blocks[0] / blocks[1].clamp(min=0.05 * blocks[1].max())).max().item()


def roundings(recurrence, given):
    """Of each Param's gradient Σ_t g_t: the root of what rounding every token's g_t, and the sum, once adds up to.

    The sum's own rounding is no measure of what a sum of products in bfloat16 can keep: it is chance for a few heads,
    and knows nothing of how much the tokens cancel. g_t: found with a Param of its own for every token.
    """
    params = {i.name for i in recurrence.spec.inputs if not i.kind.time}
    if not params:
        return {}
    timed = [replace(i, kind=replace(i.kind, time=True)) for i in recurrence.spec.inputs]
    apart = Recurrence(replace(recurrence.spec, inputs=tuple(timed)))
    tokens = next(x.shape[1] for name, x in given.items() if name not in params)
    rows = {name: x.expand(1, tokens, *x.shape) if name in params else x for name, x in given.items()}
    leaves = {name: x.detach().double().requires_grad_() for name, x in rows.items()}
    y = apart(**leaves, form="chunk", backend="torch")
    each = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), cotangent(y)), strict=True))
    found = {}
    for name in params:
        terms = torch.cat([each[name][0], each[name][0].sum(0, keepdim=True)])
        found[name] = (terms.bfloat16() - terms).norm(dim=0)
    return found


def page(data):
    """The table: ratios of worst errors, in brackets our error, and after a stroke fla's ratio."""
    lines = ["| recurrence | heads x N x P | y | dq | dk | dv | other inputs |", "|---" * 7 + "|"]
    for name, shape in dict.fromkeys((r["name"], tuple(r["shape"])) for r in data["rows"]):
        mine = [r for r in data["rows"] if (r["name"], tuple(r["shape"])) == (name, shape)]
        cells = {
            r["of"]: f"{r['ratio']:.2f} ({r['ours']:.1e})" + (f" / {r['fla']:.2f}" if "fla" in r else "") for r in mine
        }
        main = [cells.pop(x, "") for x in ("y", *ROWS_OF.get(name, "qkv"))]
        rest = ", ".join(f"{x} {cell}" for x, cell in cells.items())
        lines.append(f"| {name} | {' x '.join(map(str, shape))} | {' | '.join(main)} | {rest} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, help="instead of 4 (SSD: also 160); more than 4 share b and c")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--peers", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    if shows(options, page):
        return
    if INTERPRETED:
        import strict

        strict.install()
    rows = []
    for name in options.only:
        recurrence = get(name).recurrence
        for heads, n, p in dict.fromkeys((options.heads or h, n, p) for h, n, p in SHAPES.get(name, PLAIN)):
            torch.manual_seed(options.seed)
            given = given_to(name, options.tokens, heads, n, p)
            exact = outcome(recurrence, given, torch.float64, form="chunk", backend="torch")
            ours = outcome(recurrence, given, torch.bfloat16, backend="triton")
            plain = outcome(recurrence, given, torch.float32, form="recurrent", backend="torch")
            peer = of_peer(name, given) if options.peers else {}
            once = {x: r.norm().item() / exact[x].norm().item() for x, r in roundings(recurrence, given).items()}
            for x in exact:
                least = once[x] if x in once else worst(plain[x], exact[x])
                error = worst(ours[x], exact[x])
                found = {"ours": error, "ratio": error / least}
                found |= {"fla": worst(peer[x], exact[x]) / least} if x in peer else {}
                rows.append({"name": name, "shape": (heads, n, p), "of": x} | found)
    gpu = "none: Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name()
    data = {"gpu": gpu, "commit": options.commit, "tokens": options.tokens, "rows": rows}
    print(page(data))
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
