"""A convolution with a given filter as one custom operator, and its gradient as another.

Of dsf.long_convolution, and of time-invariant systems whose impulse response torch computes (dsf.triton.given).

As operator.py's, with the filter's taps in place of the impulse response of Params.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsf.kernels.triton.fourier.operator import CONVOLUTIONS, Call, gradients_of_moving
from dsf.kernels.triton.fourier.spectra import product, pull_product, rows_of, spectra_of
from dsf.kernels.triton.operators import operator


class _Taps(Call):
    """The filter's taps [H, L, P] as tokens of one row, in the size of another call."""

    def __init__(self, call: Call, taps: Tensor, plain: str) -> None:
        tokens = min(taps.shape[1], call.tokens)
        self.view = taps[:, :tokens].transpose(0, 1).unsqueeze(0)
        super().__init__(CONVOLUTIONS[plain], [self.view])
        self.points = call.points


def _forward(
    operands: Sequence[Tensor], taps: Tensor, programs: Sequence[str], keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """y [B, T, H, P], and with `keep` what the backward pass needs. programs: the call's and the plain one."""
    call = Call(CONVOLUTIONS[programs[0]], operands)
    inputs = spectra_of(call.rows("enter", False))
    responses = spectra_of(_Taps(call, taps, programs[1]).rows("enter", False), divided=True)
    found = rows_of(product(inputs, responses, call.sizes))
    y = call.like.new_empty(call.batch, call.tokens, call.heads, call.p)
    call.tensors |= {".y": y, ".z": call.in_time(found, call.p)}
    call.run("leave", False)
    return y, [inputs, responses, *([found] if call.known.gated else [])] if keep else []


def _backward(
    dy: Tensor, operands: Sequence[Tensor], taps: Tensor, kept: Sequence[Tensor], programs: Sequence[str],
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of the operands and the taps that need one, in order."""
    call = Call(CONVOLUTIONS[programs[0]], operands)
    call.tensors |= {".dy": dy, ".z": call.in_time(kept[2], call.p) if call.known.gated else None}
    outputs = spectra_of(call.rows("begin", False))
    wanted = needs[:-1]
    of_responses, of_inputs = pull_product(outputs, kept[0], kept[1], call.sizes, any(wanted))
    found = gradients_of_moving(call, of_inputs, wanted)
    if not needs[-1]:
        return found
    slope = taps.new_empty(taps.shape) if taps.shape[1] <= call.tokens else taps.new_zeros(taps.shape)
    pulled = _Taps(call, slope, programs[1])
    rows = rows_of(of_responses, divided=True)
    pulled.tensors |= {".y": pulled.view, ".z": pulled.in_time(rows, pulled.p)}
    pulled.run("leave", False)
    return [*found, slope]


_GIVEN = "Tensor[] operands, Tensor taps"
filtered = operator(f"filtered({_GIVEN}, str[] programs, bool keep) -> (Tensor, Tensor[])", _forward)
filtered_backward = operator(
    f"filtered_backward(Tensor dy, {_GIVEN}, Tensor[] kept, str[] programs, bool[] needs) -> Tensor[]", _backward
)
