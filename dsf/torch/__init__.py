"""The torch backend: evaluates expressions on tensors and lowers a spec to the Problem that dsf.kernels solves."""
