"""Which calls run on the Triton kernels, and which kernel runs each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from dsf.call.bind import Sizes
from dsf.language.derived import derived
from dsf.language.expr import VALUE
from dsf.language.frame import Frame
from dsf.language.late import early, late
from dsf.language.reads import apart
from dsf.language.spec import Spec
from dsf.triton import across as gpu_across
from dsf.triton import attention as gpu_attention
from dsf.triton import channels as gpu_channels
from dsf.triton import chunk as gpu_matrix
from dsf.triton import features as gpu_features
from dsf.triton import scan as gpu_scan
from dsf.triton import step as gpu_step
from dsf.triton import support

_elsewhere: ContextVar[bool] = ContextVar("_elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Inside, tensors on torch's meta device stand for tensors on a GPU that this machine lacks."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def is_elsewhere(device: torch.device) -> bool:
    """True for tensors that stand for tensors on a GPU."""
    return device.type == "meta" and _elsewhere.get()


def refusal(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, device: torch.device, grad: bool = False
) -> str | None:
    """Why the triton backend cannot run this call, in the user's words; None when it can."""
    unsupported = absence(device)
    if unsupported is not None:
        return unsupported
    if steps(spec, sizes, dtype, form, grad):
        return None
    if spec.mixes_pairs and not is_scan(spec):
        return (
            "turns beside a decay that differs within a pair, or beside a B or C with a number for each entry "
            "and channel, run on torch only in products of operators, sums of angles that torch computes, and "
            "normalised systems, but for one token without gradients"
        )
    if spec.is_attention:
        if form not in ("auto", "chunk"):
            return f"the {form} form of {spec.structure} runs on torch only"
        return gpu_attention.refusal(spec, sizes, dtype)
    if form not in ("auto", *forms_of(spec)):
        token = ", but for one token without gradients" * (gpu_step.refusal(spec, sizes, dtype) is None)
        why = gpu_step.refusal(spec, sizes, dtype) if form == "recurrent" and sizes.tokens == 1 else None
        why = "" if why is None else f": {why}"
        return f"the {form} form of {spec.structure} runs on torch only{token}{why}"
    if scans(spec, sizes, dtype, form):
        return gpu_scan.refusal(spec, sizes, dtype)
    return room_of(spec).refusal(spec, sizes, dtype)


def wanted(backend: str, device: torch.device) -> bool:
    """Whether a call asks for kernels: by name, or with "auto" for tensors on a GPU."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


def absence(device: torch.device) -> str | None:
    """Why no kernel runs on this device, in the user's words; None where they do."""
    unsupported = support.refusal(device)
    if unsupported is None and device.type != "cuda" and not interpreted() and not is_elsewhere(device):
        return f"its kernels need CUDA tensors and the inputs are on {device.type}"
    return unsupported


def steps(spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, grad: bool) -> bool:
    """True for calls that the decode kernel runs: one token, and no gradients, since it has no backward pass."""
    if sizes.tokens != 1 or grad or form not in ("auto", "recurrent"):
        return False
    return gpu_step.refusal(spec, sizes, dtype) is None


def is_scan(spec: Spec) -> bool:
    """True for recurrences of the fused scan; the others run by chunks of matrix products alone."""
    by_channel = VALUE in spec.decay_axes and not (spec.rank or spec.mixes_pairs)
    return spec.is_elementwise or by_channel or gpu_scan.walks(spec) or gpu_scan.mixes(spec)


def scans(spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str) -> bool:
    """True for calls that run on the fused scan. Value-diagonal decays run by chunks where form="chunk" asks for them
    or, with "auto", where chunks are faster or the scan has no room; where chunks have none, the scan stands for them.
    """
    if not is_scan(spec):
        return False
    if form not in ("auto", "chunk") or not gpu_across.covers(spec):
        return True
    if gpu_across.refusal(spec, sizes, dtype) is not None:
        return True
    wanted = form == "chunk" or gpu_across.pays(sizes, dtype)
    return not wanted and gpu_scan.refusal(spec, sizes, dtype) is None


def forms_of(spec: Spec) -> tuple[str, ...]:
    """The forms that the GPU kernels run. The fused scan walks tokens in segments and so counts as three forms, also
    where `scans` says that form="chunk" has kernels of its own."""
    return ("recurrent", "scan", "chunk") if is_scan(spec) else ("chunk",)


def interpreted() -> bool:
    """True when Triton's interpreter is on (TRITON_INTERPRET=1): kernels then run on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernel_of(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, device: torch.device, one_step: bool = False, scan: bool = False
) -> tuple[str, int]:
    """Name of the kernel with its tiles, and its chunk length in tokens (0 where it has no chunks).

    scan: whether the fused scan runs (`scans`), also in `source`.
    """
    if spec.is_attention:
        return gpu_attention.kernel_of(sizes, dtype)
    if one_step:
        return gpu_step.kernel_of(spec, sizes), 0
    if scan:
        return gpu_scan.kernel_of(spec, sizes, device)
    if room_of(spec) is gpu_across:
        name, length = gpu_matrix.kernel_of(gpu_across.transposed(spec), gpu_across.sizes_of(sizes), dtype, device)
        return f"{name} of the transposed state", length
    sizes = gpu_features.sizes_of(sizes) if gpu_features.has_features(spec) else sizes
    return gpu_matrix.kernel_of(inside(spec), sizes, dtype, device)


def source(spec: Spec, dtype: torch.dtype, one_step: bool = False, scan: bool = False) -> str:
    """The source printed for this spec and inputs of a dtype; empty for attention, whose kernels have no holes."""
    if spec.is_attention:
        return ""
    if one_step:
        return gpu_step.program_of(spec)[0].text
    return gpu_scan.text_of(spec, dtype) if scan else gpu_matrix.program_of(inside(spec))[0].text


def room_of(spec: Spec) -> Any:
    """The module that runs a call by chunks: transposed (A acts on values, or decays differ by them), with features,
    or plain."""
    if spec.acts_on_values or is_scan(spec):
        return gpu_across
    return gpu_features if gpu_features.has_features(spec) else gpu_matrix


@derived
def frame_of_kernels(spec: Spec) -> Frame | None:
    """The frame of a declaration whose tokens write for the one after, where one run of the chunk kernels computes its
    several readouts. Of a single readout `late` has as few rows, and its angles' gradients err less."""
    found = early(spec)
    if found is None or room_of(found.spec) is not gpu_matrix:
        return None
    return found if gpu_matrix.reads_together(found.spec) else None


def why_scanned(spec: Spec) -> str:
    """Why the fused scan runs a system that is not elementwise."""
    if gpu_scan.mixes(spec):
        return "tokens mix the entries of a channel in their own way: one fused scan walks all channels, token by token"
    if VALUE not in spec.decay_axes:
        return "no logarithm of the decays is derived, which chunks would add up: one fused scan walks all channels"
    return "value decay: every channel forgets by itself, and one fused scan walks them all"


def turning_in_scan(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, backend: str, device: torch.device
) -> Spec | None:
    """The system with its turns left in A where the fused scan runs that: of heads of one channel, for which turned
    keys and queries, one a head, are larger than all states."""
    if spec.turning is None or not spec.turns or not gpu_channels.takes(spec, sizes) or not wanted(backend, device):
        return None
    found = spec.turning.spec
    asked = form in ("auto", "scan", "chunk") and absence(device) is None
    return found if asked and gpu_scan.mixes(found) and gpu_scan.refusal(found, sizes, dtype) is None else None


def frame_in_chunks(spec: Spec, backend: str) -> Frame | None:
    """The frame that the scan and chunk forms of a backend take in place of `Spec.frame`; None for that one."""
    return (frame_of_kernels(spec) if backend == "triton" else None) or late(spec)


def inside(spec: Spec) -> Spec:
    """The system that the matrix kernels run."""
    if room_of(spec) is gpu_across:
        return gpu_across.transposed(spec)
    return gpu_features.featured(spec).spec if gpu_features.has_features(spec) else spec


def _one_read(spec: Spec, scan: bool) -> Spec:
    """The system with the first of its readouts, where kernels run once for each of several readouts."""
    parts = () if scan else apart(spec)
    return parts[0] if parts else spec


def packs(spec: Spec) -> bool:
    """True for scans that take packed sequences in place, without gathering them."""
    return is_scan(spec) and gpu_scan.packs(spec)


def packs_on_device(spec: Spec, sizes: Sizes, dtype: torch.dtype, scan: bool) -> bool:
    """True where the boundaries of packed sequences may stay on the GPU: the chunk kernels take them as a tensor.

    scan: whether the call runs on the fused scan.
    """
    spec = _one_read(spec, scan)
    return not (spec.is_attention or spec.mixes_pairs or scan) and room_of(spec).refusal(spec, sizes, dtype) is None


def packs_hidden(spec: Spec, form: str) -> bool:
    """True where the boundaries need not be known on the host, for all sizes that the kernels can run."""
    if spec.mixes_pairs:
        return False
    if is_scan(spec):  # whose calls by chunks take hidden boundaries, too
        return form in ("auto", *forms_of(spec)) and packs(spec)
    spec = inside(_one_read(spec, False))
    return form in ("auto", *forms_of(spec)) and gpu_matrix.fits(spec)
