"""minGRU: the GRU whose gate does not see its state."""

import dsf
from dsf import System, Value, sigmoid


@dsf.recurrence
def mingru(z: Value, h: Value) -> System:
    """minGRU: move from the old state to a candidate by a gate.

    Source: Feng et al. (arXiv 2410.01201), Section 3.1. Symbols: z is the pre-activation of the update gate,
    h the candidate state.
    """
    return System(A=sigmoid(-z), B=sigmoid(z) * h, C=1)
