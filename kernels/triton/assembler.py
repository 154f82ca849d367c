"""ptxas, the assembler of Triton's kernels: a release that is not known to assemble them wrongly.

Triton 3.4 to 3.6 come with ptxas 12.8 for GPUs before Blackwell. It makes code for Hopper's matrix products that reads
uniform registers nobody wrote, as part of the addresses of operands: seen on an H100 as gradients of shared heads with
errors near 1 or NaN, other bits in every call. Code and PTX are right, and 12.9 assembles the same PTX rightly. That
release is in Triton 3.6 as well, for Blackwell. Triton 3.4 and 3.5 have none: there every compiled kernel is read for
such code, and one that has it is refused.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import triton

SOUND = (12, 9)  # (major, minor) of ptxas
HOPPER = 90  # the architecture for which older ones are wrong
WRITERS = ("U", "R2UR", "S2UR", "LDCU", "REDUX")  # operations whose first operand is a uniform register they write
PREDICATE = re.compile(r"!?U?P(?:\d+|T)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
_right: set[str] = set()  # hashes of kernels that were read


def release_of(tool: object) -> tuple[int, ...]:
    """(major, minor) of an assembler as triton.knobs gives it; (0,) where it does not say."""
    text = str(getattr(tool, "version", ""))
    return tuple(int(x) for x in text.split(".")[:2]) if text.replace(".", "").isdigit() else (0,)


def chosen(name: str = "ptxas") -> Any:
    """The assembler that Triton would use, with `path` and `version`; None where it has none. name: its own one's."""
    try:
        return getattr(triton.knobs.nvidia, name)
    except (AttributeError, RuntimeError):  # Triton without NVIDIA's tools, or without that one
        return None


def is_sound() -> bool:
    """True unless Triton's assembler is known to assemble kernels wrongly."""
    own = chosen()
    return own is None or release_of(own) >= SOUND


def choose_assembler() -> None:
    """Let Triton use a ptxas of SOUND or later for all GPUs if its own is older and it has one. For the whole process.

    Kernels that another ptxas compiled are not used again: Triton knows them by its release.
    """
    if is_sound():
        return
    other = chosen("ptxas_blackwell")
    if other is not None and release_of(other) >= SOUND:
        triton.knobs.nvidia.ptxas = other.path
        _forget_release()


def hold(kernel: Any) -> None:
    """Raise RuntimeError for a compiled kernel that reads a uniform register nobody wrote. Reads each once."""
    if kernel is None or kernel.metadata.target.arch != HOPPER or kernel.hash in _right:
        return
    if unwritten(disassembled(kernel.asm["cubin"])):
        raise RuntimeError(
            f"ptxas {chosen().version} assembled the kernel {kernel.metadata.name} wrongly, as it does some on Hopper "
            "GPUs: set TRITON_PTXAS_PATH to a ptxas of CUDA 12.9 or later, or use backend='torch'"
        )
    _right.add(kernel.hash)


def _forget_release() -> None:
    """Triton asks ptxas for its release once and takes it as a part of the names of compiled kernels."""
    from triton.backends.nvidia import compiler

    compiler.get_ptxas_version.cache_clear()


def disassembled(cubin: bytes) -> str:
    """The instructions of a compiled kernel, as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", path], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def unwritten(text: str) -> list[str]:
    """The instructions that read a uniform register before any instruction has written it, in the order of the text.

    So code is not found faulty that only some ways through it leave unwritten.
    """
    known: set[int] = set()
    found = []
    for line in text.splitlines():
        match = INSTRUCTION.search(line)
        if match is None or "UR" not in match.group(1):
            continue
        operation, _, rest = match.group(1).partition(" ")
        operands = [x.strip() for x in re.split(r",(?![^\[]*\])", rest)]
        written: set[int] = set()
        first = re.fullmatch(r"UR(\d+)", operands[0])
        if first and operation.startswith(WRITERS):
            count = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
            written, operands = {int(first.group(1)) + i for i in range(count)}, operands[1:]
        operands = [x for x in operands if not PREDICATE.fullmatch(x)]  # a carry moves what is added to another place
        read = {register for place in range(len(operands)) for register in _registers(operation, operands, place)}
        if read - known:
            found.append(match.group(1))
        known |= written
    return found


def _registers(operation: str, operands: Sequence[str], place: int) -> Iterator[int]:
    """The uniform registers of an operand; 64 bits are a pair. A matrix's descriptor is a pair too, B's the second."""
    uniform = operation.startswith("U")
    wide = uniform and (".64" in operation or ("WIDE" in operation and place == 2))  # what is added to a wide product
    for name, pair in re.findall(r"\bUR(\d+)(\.64)?", operands[place]):
        at = int(name)
        if "gdesc" in operands[place]:
            yield from (at + 2, at + 3) if re.fullmatch(r"R\d+", operands[1]) else range(at, at + 4)
        else:
            yield from (at, at + 1) if pair or wide else (at,)
