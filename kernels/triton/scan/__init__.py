"""The fused scan of elementwise systems."""
