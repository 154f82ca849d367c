"""Calls of the fused parts of layers, and their gradients, on tensors without memory, for tests/test_compiled.py."""

from unittest import mock

import torch

from dsf.call import tokenwise
from dsf.kernels.convolution import Fused, Piece, short_convolution, short_convolution_step
from dsf.kernels.entropy import row_entropies
from dsf.kernels.mixture import token_mixtures
from dsf.kernels.norm import added_rms_norm, gated, gated_rms_norm
from dsf.kernels.product import by_blocks, linear
from dsf.kernels.reversal import joined, reversed_tokens
from dsf.kernels.rotary import rotary
from dsf.kernels.triton import early as starts
from dsf.parallel import Simulated, windows


def tensor(*shape, grad=True):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=grad)


def pull(ys, leaves):
    torch.autograd.grad(ys, leaves, [torch.empty_like(y) for y in ys], allow_unused=True)


def convolution(bounds=None):
    given = tensor(1, 2048, 256), tensor(256, 4), tensor(256), tensor(1 if bounds is None else 3, 256, 3)
    *rest, state = given
    ys, final = short_convolution(*rest, state, bounds, pieces=[Piece(128, 32), Piece(128)], backend="triton")
    pull([*ys, final], given)
    if bounds is None:
        pull([short_convolution(*rest, backend="triton", ahead=2)[0][0]], rest)


def convolution_over_ranks():
    x, weight, bias, state = given = tensor(2, 1536, 256), tensor(256, 4), tensor(256), tensor(2, 256, 3)
    kernels = Fused(weight, bias, (True, [128, 128], [32, 0], [1.0, 1.0], 0))
    for layout in ("contiguous", "headtail"):
        ys, last = windows.convolve(Simulated(2, layout), kernels, x, state)
        pull([*ys, last], given)


@torch.no_grad()
def convolution_step():
    given = tensor(2, 1, 256), tensor(256, 4), tensor(256), tensor(2, 256, 3)
    short_convolution_step(*given, pieces=[Piece(128, 32), Piece(128)], backend="triton")


def norms():
    x, weight, gate = tensor(2, 2048, 256), tensor(256), tensor(2, 2048, 256)
    pull([gated_rms_norm(x, weight, gate, 2, True, backend="triton")], [x, weight, gate])
    pull([gated_rms_norm(x, weight, backend="triton")], [x, weight])
    pull([gated(x, gate, backend="triton")], [x, gate])
    pull([gated(x, gate, "gelu", backend="triton")], [x, gate])
    pull([gated_rms_norm(x, weight, gate, backend="triton", then=tensor(128, 256))], [x, weight, gate])
    pull(added_rms_norm(x, gate, weight, backend="triton"), [x, gate, weight])


@torch.no_grad()
def products():
    x, matrix, weight = tensor(2, 1, 256), tensor(96, 256), tensor(256)
    linear(x, matrix, "triton")
    matrix = torch.nn.Parameter(matrix.detach(), False)  # read ahead
    linear(x, matrix, "triton", True, tensor(96), (3, 7))
    by_blocks((x, x), [tensor(64, 4, 4)] * 2, "triton")
    gated(x, x, backend="triton", then=matrix)
    gated_rms_norm(x.view(2, 1, 4, 64), tensor(64), x.view(2, 1, 4, 64), backend="triton", then=matrix)
    added_rms_norm(x, x, weight, backend="triton", then=matrix)


@torch.no_grad()
def attention_step():
    from dsf.kernels.triton.attention.step import attention_step as step

    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    for window, heads in ((False, 1), (True, 2), (False, 4)):
        log = None if heads == 1 else torch.empty(2, heads, 1, device="meta")
        kept = tensor(2, 2, 128, 64), tensor(2, 2, 128, 64), tensor(2, heads, 128), lengths
        step(tensor(2, 4, 1, 64), tensor(2, 2, 1, 64), tensor(2, 2, 1, 64), log, log, *kept, 0.125, window)


def early(call):
    """call, on a GPU that starts kernels before others have ended, where this Triton can have it do so."""

    def called():
        with mock.patch.object(starts, "_able", return_value=starts.gdc_wait is not None):
            call()

    return called


def mixing():
    q, k, angle = tensor(2, 2048, 4, 64), tensor(2, 2048, 2, 64), torch.empty(1, 2048, 32, device="meta")
    pull(rotary(q, k, angle, angle, 0.5, "triton"), [q, k])
    x, other, shares = tensor(2, 2048, 256), tensor(2, 2048, 256), [tensor(256) for _ in range(6)]
    for more in (None, tensor(6, 2, 2048, 256)):
        pull(token_mixtures(x, other, shares, more, "triton"), [x, other, *shares])
    y, back, v, gain = tensor(2, 2048, 4, 64), tensor(2, 2048, 4, 64), tensor(2, 2048, 4, 64), tensor(2, 2048, 4)
    pull([reversed_tokens(y, "triton")], [y])
    pull([joined(y, back, backend="triton")], [y, back])
    pull([joined(y, back, v, gain, 1, "triton")], [y, back, v, gain])


def entropies():
    """With the logits' gradient and without."""
    targets, divisor = torch.empty(64, dtype=torch.long, device="meta"), torch.empty((), device="meta")
    for gradient in (True, False):
        row_entropies(tensor(64, 320).detach(), targets, divisor, gradient=gradient, backend="triton")


def readouts():
    """What layers declare of a token's own numbers."""
    sizes = {"B": 2, "T": 2048, "H": 4, "N": 64}
    for function in tokenwise._known.values():
        given = [tensor(*(sizes[a] for a in i.kind.layout())) for i in function.inputs]
        pull([function(*given, backend="triton")], given)
