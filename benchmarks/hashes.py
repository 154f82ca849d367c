"""Hashes of all that the rows of docs/performance.md launch, forward and backward, found without a GPU.

python benchmarks/hashes.py [--only ssd s6] --json before.json      # then change the code, and
python benchmarks/hashes.py [--only ssd s6] --against before.json   # prints what is no longer the same, and fails

A launch's hash is that of its grid and of the intermediate code (TTIR, with everything inlined, for sm_90) of its
kernel, and of its arguments: numbers, and which tensors of the schedule, and where in them. So it stays where code only
moves. Values and parameters are named by the order in which the code has them, and tensors by that in which launches
do; constants and arithmetic of scalars stand where they are used. So it stays, too, where parameters, or the addresses
made of them, only change places. Hashes of one release of Triton say nothing of another's.
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
from pathlib import Path

import torch
import triton
from front_end import FrontEnd
from gpu_matrix import ROWS, recurrence_of
from gpu_scan import CHANNELS, LENGTHS, TOTAL
from gpu_scan import ROWS as SCANS
from layers import BATCH, CONVOLUTIONS, NORMS, TOKENS

from dsf.kernels.convolution import short_convolution
from dsf.kernels.norm import gated, gated_rms_norm
from dsf.kernels.triton import operators
from dsf.kernels.triton.launch import Pointer
from dsf.kernels.triton.schedule import Ref, mapped
from dsf.triton import choose

HEAD = re.compile(r"tt\.func public @[\w.]+\((.*)\) attributes")
NAME, NUMBER, DEFINED = re.compile(r"%[\w.$-]+"), re.compile(r"%<(\d+)>"), re.compile(r"(%[\w.$-]+)(?::\d+)? = ")
SCALAR = re.compile(r" *(%[\w.$-]+) = (arith\.constant .*|(?:arith\.|tt\.get_|tt\.addptr)(?!.*(?:tensor|\{$)).*)")


class Place(Pointer):
    """What Triton asks of a tensor, and which one it is."""

    def __init__(self, x):
        super().__init__(x)
        self.ref = x


class Kernels:
    """The hashes of launches in order; what one is compiled for is compiled once."""

    def __init__(self, folder=None):
        self.front_end = FrontEnd()
        self.code, self.launches, self.folder = {}, [], folder

    def run(self, schedule, *_):
        """In the place of what makes a function of a schedule: one that returns memory of its result's sizes."""
        order = {}
        for x in schedule.launches:
            args = mapped(lambda y: Place(y) if isinstance(y, Ref) else y, x.args)
            self.note(x.kernel, *args, order=order, grid=x.grid, **x.named)
        return lambda *tensors: schedule.empty(next(x for x in tensors if x is not None)), False

    def note(self, kernel, *args, order, grid, **named):
        """Hash a launch. order: of the schedule's tensors, as launches use them."""
        asked = self.front_end.asked(kernel, args, named)
        if asked.key not in self.code:
            found = Canonical(self.front_end.inlined(asked))
            self.code[asked.key] = _digest(found.text), found.used
            if self.folder:
                (self.folder / f"{kernel.fn.__name__}_{self.code[asked.key][0]}.mlir").write_text(found.text)
        code, used = self.code[asked.key]
        given = [x for name, kind in asked.signature.items() for x in _given(kind, asked.bound[name])]
        known = [_argument(given[i], order) for i in used]
        self.launches.append([kernel.fn.__name__, list(grid), _digest(str(known)), code])


class Canonical:
    """A kernel's code with constants and scalars' arithmetic where they are used, and its parameters in that order."""

    def __init__(self, text):
        head = HEAD.search(text)
        parameters = [x.split(":", 1) for x in re.split(r", (?=%)", head[1])]
        self.values = {name: place for place, (name, _) in enumerate(parameters)}  # a number for every one there is
        self.parameters, self.count = len(parameters), len(parameters)
        self.scalars, self.names, self.used, self.named = {}, {}, [], 0
        lines = [x for x in map(self._numbered, text[head.end() :].splitlines()) if x is not None]
        body = [NUMBER.sub(self._name, line) for line in lines]
        self.text = "\n".join([*(parameters[i][1].strip() for i in self.used), *body])

    def _numbered(self, line):
        """A line with numbers for names, which other regions have for other values; None of what stands elsewhere."""
        scalar = SCALAR.fullmatch(line)
        code = scalar and NAME.sub(self._number, scalar[2])
        for name in DEFINED.findall(line) if "^bb" not in line else NAME.findall(line):
            self.values[name] = self.count
            self.count += 1
        if scalar:
            self.scalars[self.values[scalar[1]]] = code
            return None
        return NAME.sub(self._number, line)

    def _number(self, found):
        number = self.values.get(found[0])
        return found[0] if number is None else f"%<{number}>"  # assembly has such names, too

    def _name(self, found):
        number = int(found[1])
        if number not in self.names:
            if number in self.scalars:
                code = NUMBER.sub(self._name, self.scalars[number])
                self.names[number] = f"({code})" if len(code) < 100 else f"(%{_digest(code)})"
            elif number < self.parameters:
                self.names[number] = f"%used{len(self.used)}"
                self.used.append(number)
            else:
                self.names[number] = f"%{self.named}"
                self.named += 1
        return self.names[number]


def _given(kind, x):
    """What of an argument the compiled kernel takes. kind: of its parameter."""
    if isinstance(kind, tuple):
        return [z for each, y in zip(kind, x, strict=True) for z in _given(each, y)]
    return [] if kind == "constexpr" else [x]


def _argument(x, order):
    if not isinstance(x, Place):
        return x
    return order.setdefault(x.ref.number, len(order)), x.ref.offset, str(x.ref.dtype)


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _leaf(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype).requires_grad_()


def _inputs(recurrence, batch, tokens, heads, n, p, shared=(), dtype="bfloat16"):
    """Inputs that nobody has written, as the benchmarks draw them."""
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        mine = 1 if i.name in shared else heads
        lead = (batch, tokens, mine) if i.kind.time else (mine,)
        wide = heads == 1 and not i.kind.time  # the scans' Params
        found[i.name] = _leaf(*lead, *sizes, dtype=torch.float32 if wide else getattr(torch, dtype))
    return found


def rows() -> Iterator:
    """(name, call, leaves) of every row."""
    for name, row in ROWS.items():
        if row.recurrence == "softmax_attention":  # no kernel of ours
            continue
        recurrence = recurrence_of(row.recurrence)
        for heads, n, p in row.shapes:
            for tokens in row.lengths:
                x = _inputs(recurrence, row.batch or 32_768 // tokens, tokens, heads, n, p, row.shared, row.dtype)
                how = {"backend": "triton", "form": row.form}
                yield f"{name} {heads}x{n}x{p} {tokens}", lambda f=recurrence, x=x, how=how: f(**x, **how), x.values()
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
    parser.add_argument("--code", type=Path, help="a folder to write to what is hashed of each kernel")
    options = parser.parse_args()
    kernels, found = Kernels(options.code), {}
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
