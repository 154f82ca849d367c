"""The parts of a layer besides its projections and recurrence: short convolution, norm and gate, one launch each."""
