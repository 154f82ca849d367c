"""Hashes of all that the rows of docs/performance.md launch, forward and backward, found without a GPU.

python benchmarks/hashes.py [--only ssd s6] --json before.json      # then change the code, and
python benchmarks/hashes.py [--only ssd s6] --against before.json   # prints what is no longer the same, and fails

A launch's hash is that of its grid, of its numbers and of the intermediate code (TTIR, with everything inlined, for
sm_90) of its kernel, so it stays where code only moves. Hashes of one release of Triton say nothing of another's.
Tensors are on the CPU, and nothing is launched: what is hashed is what operators' schedules say. Options that ask for
the device take that of an H200, but those of the scans, which take what the interpreter has.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator

import torch
import triton
from gpu_matrix import ROWS, recurrence_of
from gpu_scan import CHANNELS, LENGTHS, TOTAL
from gpu_scan import ROWS as SCANS
from layers import BATCH, CONVOLUTIONS, NORMS, TOKENS
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import jit

from dsf.kernels.convolution import short_convolution
from dsf.kernels.norm import gated, gated_rms_norm
from dsf.kernels.triton import operators
from dsf.kernels.triton.launch import _pointers
from dsf.triton import choose

TARGET = GPUTarget("cuda", 90, 32)
MODULE, LOCATION, NAME = re.compile(r"#loc.*\n"), re.compile(r" ?loc\(.*?\)+"), re.compile(r"@[\w.]+")


class Kernels:
    """The hashes of launches in order; what one is compiled for is compiled once."""

    def __init__(self):
        self.backend = make_backend(TARGET)
        self.code, self.launches = {}, []

    def run(self, schedule):
        """In the place of what makes a function of a schedule: one that returns memory of its result's sizes."""
        for x in schedule.launches:
            self.note(x.kernel, *_pointers(x.args), grid=x.grid, **x.named)
        return lambda *tensors: schedule.empty(next(x for x in tensors if x is not None)), False

    def note(self, kernel, *args, grid, **named):
        """Hash a launch."""
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, self.backend)
        named |= {"debug": False, "instrumentation_mode": ""}
        bound, specialization, options = binder(*args, **named)
        options, signature, constants, attributes = kernel._pack_args(
            self.backend, named, bound, specialization, options
        )
        about = f"{kernel.fn.__module__}.{kernel.fn.__name__} {signature} {attributes} {options}"
        about += str({place: x.fn.__name__ if hasattr(x, "fn") else x for place, x in constants.items()})
        functions = [x.cache_key for x in tree_leaves(tuple(constants.values())) if hasattr(x, "cache_key")]
        key = about, *functions
        if key not in self.code:
            self.code[key] = _digest(self.ttir(kernel, signature, constants, attributes, options))
        numbers = [x for x in tree_leaves(tuple(bound.values())) if type(x) is int]
        self.launches.append([kernel.fn.__name__, list(grid), _digest(str(numbers)), self.code[key]])

    def ttir(self, kernel, signature, constants, attributes, options):
        """The kernel's intermediate code, without what tells where it stood."""
        from triton._C.libtriton import ir

        context, backend = ir.context(), self.backend
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = ASTSource(kernel, signature, constants, attributes)
        made = source.make_ir(
            TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        )
        stages = {}
        backend.add_stages(stages, options, source.language)
        text = str(stages["ttir"](made, {}))
        return NAME.sub("@f", LOCATION.sub("", MODULE.sub("", text)))


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _leaf(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype).requires_grad_()


def _inputs(recurrence, batch, tokens, heads, n, p, shared=()):
    """Inputs that nobody has written, as the benchmarks draw them."""
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        mine = 1 if i.name in shared else heads
        lead = (batch, tokens, mine) if i.kind.time else (mine,)
        wide = heads == 1 and not i.kind.time  # the scans' Params
        found[i.name] = _leaf(*lead, *sizes, dtype=torch.float32 if wide else torch.bfloat16)
    return found


def rows() -> Iterator:
    """(name, call, leaves) of every row."""
    for name, row in ROWS.items():
        if row.recurrence == "softmax_attention":  # no kernel of ours
            continue
        recurrence = recurrence_of(row.recurrence)
        for heads, n, p in row.shapes:
            for tokens in row.lengths:
                x = _inputs(recurrence, row.batch or 32_768 // tokens, tokens, heads, n, p, row.shared)
                yield f"{name} {heads}x{n}x{p} {tokens}", lambda f=recurrence, x=x: f(**x, backend="triton"), x.values()
    for name, (recurrence, n, _) in SCANS.items():
        for tokens in LENGTHS:
            x = _inputs(recurrence, TOTAL // tokens, tokens, 1, n, CHANNELS)
            yield f"{name} {n} {tokens}", lambda f=recurrence, x=x: f(**x, backend="triton"), x.values()
    for name, (channels, bias, pieces) in CONVOLUTIONS.items():
        x, weight, added = _leaf(BATCH, TOKENS, channels), _leaf(channels, 4), _leaf(channels) if bias else None
        call = lambda x=x, w=weight, b=added, p=pieces: short_convolution(x, w, b, pieces=p, backend="triton")[0][0]  # noqa: E731
        yield name, call, [y for y in (x, weight, added) if y is not None]
    for name, (shape, with_gate, first, norm) in NORMS.items():
        x, weight, gate = _leaf(*shape), _leaf(shape[-1]) if norm else None, _leaf(*shape) if with_gate else None
        if norm:
            call = lambda x=x, w=weight, g=gate, f=first: gated_rms_norm(x, w, g, 1, f, backend="triton")  # noqa: E731
        else:
            call = lambda x=x, g=gate: gated(x, g, backend="triton")  # noqa: E731
        yield name, call, [y for y in (x, weight, gate) if y is not None]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="the first words of rows")
    parser.add_argument("--json", help="where to write them")
    parser.add_argument("--against", help="what an earlier run wrote")
    options = parser.parse_args()
    kernels, found = Kernels(), {}
    operators.runnable, choose.interpreted = kernels.run, lambda: True  # CPU tensors pass
    for name, call, leaves in rows():
        if options.only and name.split()[0] not in options.only:
            continue
        begin = time.perf_counter()
        y = call()
        torch.autograd.grad(y, list(leaves), torch.empty_like(y), allow_unused=True)
        found[name], kernels.launches = kernels.launches, []
        print(f"{name}: {len(found[name])} launches, {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    if options.json:
        with open(options.json, "w") as file:
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in found.items())
            file.write(f'{{"triton": {json.dumps(triton.__version__)}, "rows": {{\n{lines}\n}}}}\n')
    if options.against:
        with open(options.against) as file:
            before = json.load(file)
        if before["triton"] != triton.__version__:
            sys.exit(f"{options.against} is of Triton {before['triton']}, this is {triton.__version__}")
        changed = [name for name, x in found.items() if x != before["rows"].get(name)]
        for name in changed:
            was = before["rows"].get(name, [])
            print(name, *(f"  {a} -> {b}" for a, b in zip(was, found[name], strict=False) if a != b), sep="\n")
            print(f"  {len(was)} launches -> {len(found[name])}")
        sys.exit(f"{len(changed)} of {len(found)} rows changed" if changed else 0)


if __name__ == "__main__":
    main()
