"""What a layer has beside its matrix products and its recurrence: short convolution, norm and gate, one launch each."""
