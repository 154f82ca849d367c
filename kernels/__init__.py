"""Numerics: tensors in, tensors out."""
