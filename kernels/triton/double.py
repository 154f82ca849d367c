"""Elementwise functions of printed kernels in float64, for Params whose powers need all digits.

They run compiled and in Triton's interpreter, so none calls libdevice. Arguments are computed in float64.
"""

import triton
import triton.language as tl


@triton.jit
def expm1(x):
    """e^x - 1. Near 0 the rounding error of u = e^x, which u - 1 would show, is in log u, too, and cancels."""
    far, u = tl.abs(x) > 0.5, tl.exp(x)
    near = tl.where(far | (u == 1.0), 2.0, u)
    return tl.where(far, u - 1.0, tl.where(u == 1.0, x, (near - 1.0) * (x / tl.log(near))))


@triton.jit
def log1p(x):
    """log(1 + x), as expm1."""
    far, u = tl.abs(x) > 0.5, 1.0 + x
    near = tl.where(far | (u == 1.0), 2.0, u)
    return tl.where(far, tl.log(u), tl.where(u == 1.0, x, tl.log(near) * (x / (near - 1.0))))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def complement(x):
    """1 - sigmoid(x) without cancellation."""
    return 1.0 / (1.0 + tl.exp(x))


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def logsigmoid(x):
    """log sigmoid(x)."""
    return -softplus(-x)
