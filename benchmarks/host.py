"""Times what a call takes on the host, without a GPU: all but the launches, which do nothing here.

python benchmarks/host.py [--only gated_deltanet s6] [--lengths 2000]

Forward + backward of small inputs, medians in ms of processor time of single calls: of sizes that were met before, of a
length that was not, and of `--lengths` lengths in turn, again and again. A kernel counts as compiled.
"""

import argparse
import statistics
import time

import torch

from dsf.kernels.triton import launch, operators
from dsf.mixers import get
from dsf.triton import choose

NAMES = ("gated_deltanet", "ssd", "kda", "rwkv7", "s6", "rg_lru")


def inputs(recurrence, tokens, heads=2, n=16, p=16):
    """Inputs in bfloat16 that nobody has written."""
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        lead = (1, tokens, heads) if i.kind.time else (heads,)
        found[i.name] = torch.ones(*lead, *sizes, dtype=torch.bfloat16).requires_grad_()
    return found


def runner(x, capturing=False):
    """What launches nothing; a kernel is looked for among those compiled."""
    launch._ready.get(launch._key(x))
    return lambda grid: lambda *args: None, ()


def timed(recurrence, x):
    """Milliseconds of forward and backward."""
    begin = time.process_time()
    y = recurrence(**x, backend="triton")
    torch.autograd.grad(y, list(x.values()), y, allow_unused=True)
    return (time.process_time() - begin) * 1e3


def measure(recurrence, lengths):
    """(sizes met before, new lengths, lengths in turn)."""
    calls = {tokens: inputs(recurrence, tokens) for tokens in range(2048, 2048 + lengths)}
    same = calls[2048]
    for _ in range(3):
        timed(recurrence, same)
    again = [timed(recurrence, same) for _ in range(200)]
    new = [timed(recurrence, x) for tokens, x in calls.items() if tokens > 2048]
    for x in calls.values():
        timed(recurrence, x)
    return tuple(statistics.median(x) for x in (again, new, [timed(recurrence, x) for x in calls.values()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--lengths", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    launch.runner = operators.runner = runner
    torch.cuda.current_device = lambda: 0
    choose.interpreted = lambda: True  # CPU tensors pass
    print("recurrence: sizes met before, a new length, lengths in turn [ms, forward + backward]")
    for name in options.only:
        operators.forget()
        print(f"{name}: " + ", ".join(f"{x:.3f}" for x in measure(get(name).recurrence, options.lengths)), flush=True)


if __name__ == "__main__":
    main()
