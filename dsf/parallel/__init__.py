"""Past one GPU: one sequence over many ranks, for every recurrence, on torch.distributed (docs/parallel.md)."""

from typing import Any

from dsf.parallel.cost import Choice, Link
from dsf.parallel.cuts import Cuts
from dsf.parallel.modules import attach, prepare
from dsf.parallel.world import Sequence, Simulated, World

__all__ = [
    "Choice",
    "Cuts",
    "HeadShard",
    "Link",
    "Sequence",
    "SequenceShard",
    "Simulated",
    "World",
    "attach",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in ("HeadShard", "SequenceShard"):  # torch's styles take seconds to import, and few need them
        from dsf.parallel import styles

        return getattr(styles, name)
    raise AttributeError(f"module 'dsf.parallel' has no attribute {name!r}")
