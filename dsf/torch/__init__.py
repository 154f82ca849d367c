"""The torch backend: expressions evaluated on tensors, and the Problem that dsf.kernels solves."""
