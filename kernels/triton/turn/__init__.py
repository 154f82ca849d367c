"""Keys and readouts turned by the sum of a sequence's angles, and their gradients."""
