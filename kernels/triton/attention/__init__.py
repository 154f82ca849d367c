"""Softmax attention with a bias of sums and a window (FlashAttention-2's loops, arXiv 2307.08691), no atomics."""
