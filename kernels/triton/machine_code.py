"""What an assembler made of a kernel: reads of uniform registers that nobody wrote before. Needs no GPU.

ptxas 12.8 makes such reads in code for Hopper's matrix products (assembler.py). A register counts as
written from the first instruction on, in the order of the text, that writes it; so code is not found faulty that only
some ways through it leave unwritten.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton

WRITERS = ("U", "R2UR", "S2UR", "LDCU", "REDUX")  # operations whose first operand is a uniform register they write
PREDICATE = re.compile(r"!?U?P(?:\d+|T)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")


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
    """The instructions that read a uniform register before any instruction has written it."""
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
