"""ptxas, the assembler of Triton's kernels: a release that is not known to assemble them wrongly.

Triton 3.4 to 3.6 come with ptxas 12.8 for GPUs before Blackwell. It makes code for Hopper's matrix products that reads
uniform registers nobody wrote, as part of the addresses of operands: seen on an H100 as gradients of shared heads with
errors near 1 or NaN, other bits in every call. Code and PTX are right, and 12.9 assembles the same PTX rightly. That
release is in the same Triton, for Blackwell. benchmarks/machine_code.py finds such code without a GPU.
"""

from __future__ import annotations

import warnings
from typing import Any

import triton

SOUND = (12, 9)  # (major, minor) of ptxas


def release_of(tool: object) -> tuple[int, ...]:
    """(major, minor) of an assembler as triton.knobs gives it; (0,) where it does not say."""
    text = str(getattr(tool, "version", ""))
    return tuple(int(x) for x in text.split(".")[:2]) if text.replace(".", "").isdigit() else (0,)


def chosen() -> Any:
    """The assembler that Triton would use, with `path` and `version`; None where it has none."""
    try:
        return triton.knobs.nvidia.ptxas
    except (AttributeError, RuntimeError):  # Triton without NVIDIA's tools
        return None


def choose_assembler() -> None:
    """Let Triton use a ptxas of SOUND or later for all GPUs if its own is older and it has one. For the whole process.

    Warns where there is none. Kernels that another ptxas compiled are not used again: Triton knows them by its release.
    """
    own = chosen()
    if own is None or release_of(own) >= SOUND:
        return
    other = getattr(triton.knobs.nvidia, "ptxas_blackwell", None)
    if other is not None and release_of(other) >= SOUND:
        triton.knobs.nvidia.ptxas = other.path
        _forget_release()
        return
    warnings.warn(
        f"ptxas {own.version} is known to assemble kernels for Hopper GPUs wrongly, and this Triton has no later one: "
        "set TRITON_PTXAS_PATH to a ptxas of CUDA 12.9 or later, or use backend='torch'",
        stacklevel=2,
    )


def _forget_release() -> None:
    """Triton asks ptxas for its release once and takes it as a part of the names of compiled kernels."""
    from triton.backends.nvidia import compiler

    compiler.get_ptxas_version.cache_clear()
