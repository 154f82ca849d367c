"""Reads of memory that nobody wrote, in Triton's interpreter: what initcheck finds on a GPU, without one.

Memory that is allocated in a call is NaN (dsf.fuzz.poison), so a masked-in load of NaN is such a read, whether its
value is used or not. Integers are not looked at. At cdf8a8d it named the same two lines as initcheck on an H100. So
does torch's clone of such memory, which is a copy by the driver, and initcheck looks at it.
"""

import contextlib
import sys
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
from sanitize_calls import LAYERS, SUBJECTS, called, cases_of, walked

import dsf.kernels.triton
from dsf.fuzz import attempt
from dsf.fuzz.poison import poisoned

HOME = Path(dsf.kernels.triton.__file__).parent


def _is_nan(x):
    """Where the numbers of an interpreter's tensor are NaN; bfloat16 is there as its bits."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data & 0x7F80 == 0x7F80) & (x.data & 0x7F != 0)
    return np.isnan(x.data) if x.data.dtype.kind == "f" else np.zeros(x.data.shape, bool)


def _place(home=HOME):
    """The line of a kernel that is running, or of what lies below `home`, and the function."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if home in path.parents and path.name not in ("interpreter.py", "operators.py"):
            return f"{path.relative_to(home)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "printed code"


def _noting(found, copy):
    """torch's copy of a tensor, which puts its place into `found` where it reads memory that nobody wrote."""

    def note(x, *how, **options):
        if x.is_floating_point() and not x.is_meta and bool(x.isnan().any()):
            found.add(_place(HOME.parent.parent))
        return copy(x, *how, **options)

    return note


@contextlib.contextmanager
def watched():
    """The places of such reads inside, in a set."""
    from triton.runtime.interpreter import InterpreterBuilder

    found, load, clone = set(), InterpreterBuilder.create_masked_load, torch.Tensor.clone

    def watch(self, pointers, mask, *rest):
        out = load(self, pointers, mask, *rest)
        if bool((_is_nan(out) & np.broadcast_to(mask.data.astype(bool), out.data.shape)).any()):
            found.add(_place())
        return out

    InterpreterBuilder.create_masked_load = watch
    try:
        torch.Tensor.clone = _noting(found, clone)
        with poisoned():
            yield found
    finally:
        torch.Tensor.clone = clone
        InterpreterBuilder.create_masked_load = load


def unwritten(name, dtype):
    """The places of such reads in the calls of a name."""
    with watched() as found:
        if name in LAYERS:
            torch.manual_seed(0)
            called(*LAYERS[name](dtype))
            return found
        recurrence = SUBJECTS[name]()
        for call in cases_of(recurrence, dtype).values():
            with walked(call.how):
                attempt(recurrence, call.case, "cpu")
    return found


def report(names, dtypes):
    """Print the places for each name. 1 where there are any."""
    wrong = 0
    for name in names:
        for dtype in dtypes:
            found = unwritten(name, dtype)
            wrong |= bool(found)
            print(f"{name:<20}{dtype:<10}{', '.join(sorted(found)) or 'ok'}", flush=True)
    return wrong
