"""Past one GPU: one sequence over many ranks, for every recurrence, on torch.distributed (docs/parallel.md)."""

from dsf.parallel.cost import Choice, Link
from dsf.parallel.modules import attach
from dsf.parallel.world import Sequence, Simulated, World

__all__ = ["Choice", "Link", "Sequence", "Simulated", "World", "attach"]
