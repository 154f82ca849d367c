"""More than one GPU: ranks share the tokens of a sequence, for every recurrence, or the heads of layers.

On torch.distributed; docs/parallel.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dsf.call.recurrence import Recurrence
from dsf.parallel import call
from dsf.parallel.cost import Choice, Link
from dsf.parallel.cuts import Cuts
from dsf.parallel.modules import attach, prepare
from dsf.parallel.world import Sequence, Simulated, World

if TYPE_CHECKING:  # what is late below
    from dsf.parallel.checkpoint import Checkpoint as Checkpoint
    from dsf.parallel.styles import HeadShard as HeadShard
    from dsf.parallel.styles import SequenceShard as SequenceShard
    from dsf.parallel.styles import plan_of as plan_of

__all__ = [
    "Checkpoint",
    "Choice",
    "Cuts",
    "HeadShard",
    "Link",
    "Sequence",
    "SequenceShard",
    "Simulated",
    "World",
    "attach",
    "plan_of",
    "prepare",
]

Recurrence.ranks = call

# Importing torch's parallel styles and checkpoints takes seconds, and few programs need them.
_LATE = {"Checkpoint": "checkpoint", "HeadShard": "styles", "SequenceShard": "styles", "plan_of": "styles"}


if not TYPE_CHECKING:  # or every name would be Any

    def __getattr__(name: str) -> Any:
        if name in _LATE:
            return getattr(importlib.import_module(f"dsf.parallel.{_LATE[name]}"), name)
        raise AttributeError(f"module 'dsf.parallel' has no attribute {name!r}")
