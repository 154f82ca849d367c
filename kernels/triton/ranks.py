"""Where the fragments of a sequence lie: on which rank, in which slot of it (dsf.parallel.layout)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rank_slot(j, ranks):
    """(rank, slot) of fragment j (dsf.parallel.layout)."""
    later = (j >= ranks).to(tl.int32)
    return j * (1 - later) + (2 * ranks - 1 - j) * later, later


@triton.jit
def number_of(rank, slot, ranks):
    """The number of the fragment in a slot of a rank."""
    return rank * (1 - slot) + (2 * ranks - 1 - rank) * slot
