"""Where the Triton kernels run: which releases of Triton, which GPUs. Checked before Triton is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch

OLDEST = (3, 4)  # of Triton: earlier releases lack triton.knobs
CAPABILITY = (8, 0)  # of the GPU: the kernels use bfloat16 and tf32 tensor cores


@functools.cache
def triton_version() -> tuple[int, ...] | None:
    """(major, minor) of the installed Triton; None without one."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build under another distribution's name
        import triton

        text = str(triton.__version__)
    return tuple(int(x) for x in text.split("+")[0].split(".")[:2])


def refusal(device: torch.device) -> str | None:
    """Why no kernel of the Triton backend runs on this device, in the user's words; None where they do."""
    version = triton_version()
    if version is None:
        return "triton is not installed"
    if version < OLDEST:
        found, oldest = (".".join(map(str, x)) for x in (version, OLDEST))
        return f"triton {found} is installed and its kernels need {oldest} or later, which come with torch 2.8 or later"
    return _of_gpu(device) if device.type == "cuda" else None


@functools.cache
def _of_gpu(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "its kernels contain instructions of NVIDIA GPUs, and this is a ROCm build of torch"
    if not torch.cuda.is_available():  # a plan for a GPU that is elsewhere
        return None
    if device.index is not None and device.index >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        needed, has = (".".join(map(str, x)) for x in (CAPABILITY, found))
        return f"its kernels need an NVIDIA GPU of compute capability {needed} or later, and this one has {has}"
    return None
