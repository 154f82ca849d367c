"""ptxas, the assembler of Triton's kernels: a release that is not known to assemble them wrongly.

Triton 3.4 to 3.6 come with ptxas 12.8 for GPUs before Blackwell. It makes code for Hopper's matrix products that reads
uniform registers nobody wrote, as part of the addresses of operands: seen on an H100 as gradients of shared heads with
errors near 1 or NaN, other bits in every call. Code and PTX are right, and 12.9 assembles the same PTX rightly. That
release is in Triton 3.6 as well, for Blackwell. Triton 3.4 and 3.5 have none: there every compiled kernel is read for
such code (machine_code.py), and one that has it is refused.
"""

from __future__ import annotations

from typing import Any

import triton

from dsf.kernels.triton.machine_code import disassembled, unwritten

SOUND = (12, 9)  # (major, minor) of ptxas
HOPPER = 90  # the architecture for which older ones are wrong
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
