"""Time-invariant systems as one operator: printed kernels around torch's FFT, and another for the gradients."""
