"""Launches that begin before the kernel before them has ended (CUDA's programmatic dependent launch, Hopper and later).

A decoded token is some hundred short kernels, each of which would wait for the last program of the one before. With
EARLY a kernel is on the multiprocessors by then. It may read what is older than the launch before it, such as weights,
and calls `begin` before it reads or writes anything else: that waits for the end of all earlier kernels. Only then is
the kernel behind it let in. So at most two kernels are on the GPU, and what the first found written is written.

Every program must call `begin`: a kernel of which one did not could end before the kernels before it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton, or one without CUDA
    gdc_launch_dependents = gdc_wait = None
# Triton 3.4 has both for compilers before its own, which hands them another argument than they take.
if gdc_wait is not None and "_semantic" not in inspect.signature(gdc_wait).parameters:
    gdc_launch_dependents = gdc_wait = None

HOPPER = (9, 0)
GRAPHS = (12, 3)  # CUDA's release since which its graphs keep what such launches depend on
SHORT = 1056  # most programs: eight for each multiprocessor of an H100 or H200; a longer launch has nothing to gain


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait for the kernels before this one, then let the next one in. Does nothing unless EARLY."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch(at, ok):
    """Ask for what lies at these addresses, so that the L2 cache has it when it is read. This may stand before `begin`,
    since it reads nothing: a kernel that still writes there does so in that cache. From Hopper on."""
    ask: tl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    tl.inline_asm_elementwise(ask, "=r,l,r", [at.to(tl.int64), ok.to(tl.int32)], tl.int32, is_pure=False, pack=1)


def early(device: torch.device, programs: int = 0) -> dict[str, Any]:
    """The named arguments of a launch on this device, whose kernel takes EARLY. programs: of the launch, where it may
    have so many that it has nothing to gain."""
    return {"EARLY": True, "launch_pdl": True} if programs <= SHORT and _able(device) else {"EARLY": False}


def early_and_fetching(device: torch.device, programs: int) -> dict[str, Any]:
    """`early` for any number of programs, with FETCH: whether so few may call `fetch`. In longer launches most programs
    begin when memory is busy."""
    return {**early(device), "FETCH": early(device, programs)["EARLY"]}


def _able(device: torch.device) -> bool:
    if gdc_wait is None or triton.knobs.runtime.interpret or device.type != "cuda" or torch.version.cuda is None:
        return False
    if tuple(int(x) for x in torch.version.cuda.split(".")[:2]) < GRAPHS or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER
