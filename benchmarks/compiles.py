"""Compiles the kernels of recurrences for a GPU that need not be there, by the installed Triton.

python benchmarks/compiles.py [--only gated_deltanet s6] [--dtypes float16] [--processes 2] [--gpu rtx4090] [--whole]

Forward and backward, without gradients, packed, from given states, at several sizes and dtypes: every kernel that such
calls launch goes through Triton's passes, of which the interpreter sees nothing. --whole: to machine code, which must
fit into a program's shared memory and read no uniform register that nobody wrote; several times as long. --gpu: one
whose tiles are chosen and for which kernels are compiled. The exit status is 1 where something does not compile. Calls
are made on tensors without memory, and nothing is run.
"""

import argparse
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple
from unittest import mock

import torch
import triton
from declared import OWN
from front_end import FrontEnd
from gpu_matrix import recurrence_of
from triton.backends.compiler import GPUTarget

from dsf import Packing
from dsf.kernels.triton.assembler import disassembled, unwritten
from dsf.kernels.triton.chunk import matrix, walks
from dsf.kernels.triton.chunk import table as chunks
from dsf.kernels.triton.operators import noted
from dsf.kernels.triton.scan import table as scans
from dsf.kernels.triton.solve import operator as solves
from dsf.language.errors import DsfError
from dsf.mixers import ZOO
from dsf.triton.choose import elsewhere

DTYPES = ("float16", "bfloat16", "float32")


class GPU(NamedTuple):
    """Compute capability, bytes of shared memory of a program and of a processor, processors."""

    capability: int
    shared: int
    of_processor: int
    processors: int


GPUS = {
    "a100": GPU(80, 166_912, 167_936, 108), "rtx3090": GPU(86, 101_376, 102_400, 82),
    "rtx4090": GPU(89, 101_376, 102_400, 128), "h100": GPU(90, 232_448, 233_472, 132),
    "b200": GPU(100, 232_448, 233_472, 148), "rtx5090": GPU(120, 101_376, 102_400, 170),
}  # fmt: skip


class Sizes(NamedTuple):
    """Of a call's inputs, and how it is made."""

    batch: int
    tokens: int
    heads: int
    n: int
    p: int
    packed: bool = False
    state: bool = False


CALLS = (
    Sizes(1, 200, 2, 64, 64, packed=True), Sizes(1, 64, 16, 128, 128, state=True), Sizes(2, 100, 3, 16, 16),
    Sizes(4, 2048, 16, 128, 128, state=True), Sizes(2, 200, 2, 64, 64), Sizes(1, 200, 2, 256, 256, state=True),
)  # fmt: skip


def call(recurrence, sizes, dtype):
    """Forward and backward, then forward alone, on tensors without memory."""
    axes = {"B": sizes.batch, "T": sizes.tokens, "H": sizes.heads, "N": sizes.n, "N/2": sizes.n // 2, "P": sizes.p}
    given, how = {}, {"backend": "triton"}
    for i in recurrence.spec.inputs:
        shape = [axes.get(a, i.kind.steps or 1) for a in i.kind.layout()]
        given[i.name] = torch.empty(shape, dtype=dtype if i.kind.time else torch.float32, device="meta")
    leaves = [x.requires_grad_() for x in given.values()]
    rows = sizes.batch
    if sizes.packed:
        how["cu_seqlens"] = Packing((0, 1, sizes.tokens // 2, sizes.tokens))
        rows = 3
    if sizes.state and not recurrence.spec.is_attention:
        shape = recurrence.state_shape(sizes.n if recurrence.spec.has_key else 1, sizes.p)
        how["initial_state"] = torch.empty(rows, sizes.heads, *shape, device="meta").requires_grad_()
        leaves.append(how["initial_state"])
    y, state = recurrence(**given, return_state=True, **how)
    ends = [x for x in (y, state) if isinstance(x, torch.Tensor)]
    torch.autograd.grad(ends, leaves, [torch.empty_like(x) for x in ends], allow_unused=True)
    with torch.no_grad():
        recurrence(**given, **how)


def failure(front_end, asked, gpu, whole):
    """Why a kernel does not compile, or ""."""
    try:
        if not whole:
            front_end.laid_out(asked)
            return ""
        kernel = front_end.compiled(asked)
        if kernel.metadata.shared > gpu.shared:
            return f"{kernel.metadata.shared} bytes of shared memory, {gpu.shared} are there"
        reads = unwritten(disassembled(kernel.asm["cubin"]))
        return f"reads what nobody wrote: {reads[0]}" if reads else ""
    except Exception as error:  # whatever a compiler says
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def one(name, dtype, gpu, whole):
    """(kernels, failures, refusal or "") of a recurrence and dtype."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    front_end, seen, failed, refused = FrontEnd(GPUTarget("cuda", gpu.capability, 32)), set(), [], ""
    for module in (chunks, matrix, walks, solves):
        mock.patch.object(module, "limits", lambda device: (gpu.shared, gpu.processors)).start()
    mock.patch.object(scans, "_shared", lambda device: gpu.of_processor).start()
    mock.patch.object(scans, "_processors", lambda device: gpu.processors).start()
    for sizes in CALLS:
        with noted() as schedules, elsewhere():
            try:
                call(recurrence_of(name), sizes, getattr(torch, dtype))
            except DsfError as error:  # sizes or a recurrence that no kernel takes
                refused = str(error).splitlines()[0]
        for x in (x for schedule in schedules for x in schedule.launches):
            asked = front_end.of(x)
            if asked.key in seen:
                continue
            seen.add(asked.key)
            why = failure(front_end, asked, gpu, whole)
            if why:
                failed.append(f"{name} {dtype} {sizes}: {x.kernel.fn.__name__}: {why}\n    {x.named}")
    return len(seen), failed, refused


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*(e.name for e in ZOO if e.recurrence is not None), *OWN])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--whole", action="store_true", help="to machine code")
    options = parser.parse_args()
    begin, kernels, failed = time.monotonic(), 0, []
    rows = [(name, dtype) for name in options.only for dtype in options.dtypes]
    with ProcessPoolExecutor(options.processes) as pool:
        asked = [pool.submit(one, *row, GPUS[options.gpu], options.whole) for row in rows]
        for (name, dtype), future in zip(rows, asked, strict=True):
            count, wrong, refused = future.result()
            kernels, failed = kernels + count, failed + wrong
            print(f"{name:32}{dtype:10}{count:5} kernels{len(wrong):4} fail  {refused[:80]}", flush=True)
    print(*failed, sep="\n")
    told = f"{kernels} kernels, {len(failed)} fail, {time.monotonic() - begin:.0f} s"
    print(f"Triton {triton.__version__}, {options.gpu}: {told}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
