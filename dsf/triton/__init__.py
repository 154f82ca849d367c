"""The Triton backend: which calls its kernels take, and the source printed for them."""
