"""Times what a call takes on the host, without a GPU: all but the launches, which do nothing here.

python benchmarks/host.py [--only gated_deltanet s6] [--lengths 2000]
python benchmarks/host.py --ranks 2 [--rank 0] [--exchange gather] [--packed] [--only gated_deltanet layer]

Forward + backward of small inputs, medians in ms of processor time of single calls: of sizes that were met before, of a
length that was not, and of `--lengths` lengths in turn, again and again. A kernel counts as compiled.

--ranks: what a call over so many ranks takes on one of them, of sizes that were met before, beside the plain call; its
collectives return at once. Microseconds, and in brackets how many Python functions are entered and torch operators are
dispatched, without gradients, forward and backward. layer: GatedDeltaNet with its convolution; "layer NAME": another
mixer's. softmax_attention and layers have 64 tokens, as torch's attention computes. --packed: six sequences.
"""

import argparse
import statistics
import sys
import time
import warnings

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dsf import Packing, Recurrence
from dsf.kernels import convolution, norm
from dsf.kernels.triton import launch, operators
from dsf.mixers import get
from dsf.parallel import Sequence
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


class Counted(TorchDispatchMode):
    """Counts torch's operators."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def counted(run):
    """(Python functions, torch operators) of run()."""
    entered = 0

    def note(frame, event, arg):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    with Counted() as ops:
        run()
    return entered, ops.count


def both_ways(name, ranks, packed, **parallel):
    """(forward, the leaves of its graph) of a recurrence or a layer. ranks: that share the packed sequences."""
    short = name.startswith("layer") or name == "softmax_attention"
    tokens = 64 if short else 2048
    if packed:
        parallel["cu_seqlens"] = Packing([tokens * ranks * place // 6 for place in range(7)])
    if name.startswith("layer"):
        layer = get(name.partition(" ")[2] or "gated_deltanet").module(32, n_heads=2, dtype=torch.bfloat16)
        x = torch.ones(1, 64, 32, dtype=torch.bfloat16, requires_grad=True)
        return lambda: layer(x, use_cache=False, **parallel)[0], [x, *layer.parameters()]
    recurrence = get(name).recurrence
    x = inputs(recurrence, tokens)
    return lambda: recurrence(**x, **parallel), list(x.values())


def split(forward, leaves, repeats=300):
    """ "microseconds (functions, operators)" without gradients, forward, and backward."""

    def pull(y):
        torch.autograd.grad(y, leaves, y, allow_unused=True)

    def clock(run):
        begin = time.thread_time()
        found = run()
        return found, (time.thread_time() - begin) * 1e6

    rows = []
    for turn in range(repeats + 5):
        with torch.no_grad():
            alone = clock(forward)[1]
        y, there = clock(forward)
        row = alone, there, clock(lambda y=y: pull(y))[1]
        if turn >= 5:
            rows.append(row)
    with torch.no_grad():
        counts = [counted(forward)]
    counts.append(counted(forward))
    ys = iter([forward(), forward()])
    counts.append(counted(lambda: pull(next(ys))))
    times = [statistics.median(column) for column in zip(*rows, strict=True)]
    return ", ".join(f"{t:.0f} ({n}, {ops})" for t, (n, ops) in zip(times, counts, strict=True))


def over_ranks(names, rank, ranks, exchange, packed):
    """Print a row for every name."""
    kernels = convolution._chosen, norm._chosen
    convolution._chosen = lambda x, weight, backend, *rest: kernels[0](x, weight, "triton", *rest)
    norm._chosen = lambda x, gate, activation, backend, size: kernels[1](x, gate, activation, "triton", size)
    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    Sequence.tell = lambda self, text, device: [text] * self.ranks
    cp = Sequence(exchange=exchange)
    warnings.simplefilter("ignore")
    print("us (functions, operators) without gradients, forward, backward")
    for name in names:
        attends = name.endswith("softmax_attention")
        Recurrence.__call__.__kwdefaults__["backend"] = "auto" if attends else "triton"
        print(f"{name}, plain: {split(*both_ways(name, 1, packed))}")
        print(f"{name}, rank {rank} of {ranks}: {split(*both_ways(name, ranks, packed, parallel=cp))}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--lengths", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    launch.runner = operators.runner = runner
    torch.cuda.current_device = lambda: 0
    choose.interpreted = lambda: True  # CPU tensors pass
    if options.ranks > 1:
        return over_ranks(options.only, options.rank, options.ranks, options.exchange, options.packed)
    print("recurrence: sizes met before, a new length, lengths in turn [ms, forward + backward]")
    for name in options.only:
        operators.forget()
        print(f"{name}: " + ", ".join(f"{x:.3f}" for x in measure(get(name).recurrence, options.lengths)), flush=True)


if __name__ == "__main__":
    main()
