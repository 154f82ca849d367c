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
import os

import torch
from gpu_matrix import draw
from gpu_page import add_options, shows
from gpu_peers import operator

from dsf.mixers import get

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAMES = ("unnormalized_linear_attention", "retnet", "deltanet", "gated_deltanet", "gla", "kda")
SIZES = ((128, 128), (64, 64))


def cotangent(y):
    """The same dy for everyone."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(y.shape, generator=generator, device=DEVICE).to(torch.bfloat16).to(y.dtype)


def of_peer(name, given):
    """y and the gradients of q, k and v by fla's operator."""
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


def page(data):
    """The table: ratios of worst errors, in brackets our error, and after a stroke fla's ratio."""
    lines = ["| recurrence | heads x N x P | y | dq | dk | dv | other inputs |", "|---" * 7 + "|"]
    for name, shape in dict.fromkeys((r["name"], tuple(r["shape"])) for r in data["rows"]):
        mine = [r for r in data["rows"] if (r["name"], tuple(r["shape"])) == (name, shape)]
        cells = {
            r["of"]: f"{r['ratio']:.2f} ({r['ours']:.1e})" + (f" / {r['fla']:.2f}" if "fla" in r else "") for r in mine
        }
        main = [cells.pop(x, "") for x in ("y", "q", "k", "v")]
        rest = ", ".join(f"{x} {cell}" for x, cell in cells.items())
        lines.append(f"| {name} | {' x '.join(map(str, shape))} | {' | '.join(main)} | {rest} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
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
        for n, p in SIZES:
            torch.manual_seed(options.seed)
            given = draw(recurrence, 1, options.tokens, options.heads, n, p, device=DEVICE)
            exact = outcome(recurrence, given, torch.float64, form="chunk", backend="torch")
            ours = outcome(recurrence, given, torch.bfloat16, backend="triton")
            plain = outcome(recurrence, given, torch.float32, form="recurrent", backend="torch")
            peer = of_peer(name, given) if options.peers else {}
            for x in exact:
                least = worst(plain[x], exact[x])
                error = worst(ours[x], exact[x])
                found = {"ours": error, "ratio": error / least}
                found |= {"fla": worst(peer[x], exact[x]) / least} if x in peer else {}
                rows.append({"name": name, "shape": (options.heads, n, p), "of": x} | found)
    gpu = "none: Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name()
    data = {"gpu": gpu, "commit": options.commit, "tokens": options.tokens, "rows": rows}
    print(page(data))
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
