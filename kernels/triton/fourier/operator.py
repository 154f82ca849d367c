"""A whole call of the convolution form as one custom operator, and its gradient as another.

Forward: the inputs' part of B as rows in time, the impulse response of the Params, the FFTs of both, their product, its
FFT back, and y of its rows. Everything around the FFTs is printed for the declaration (dsf.triton.print_convolution,
dsf.triton.print_impulse), so a call has five launches besides the copies that torch's FFTs make, and one more for an
initial and for a final state. The operators take the name of a registered Convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.invariant import fast_length, fine_of
from dsf.kernels.triton import impulse
from dsf.kernels.triton.fourier import numbers
from dsf.kernels.triton.fourier.rows import into_rows, over_rows
from dsf.kernels.triton.fourier.spectra import product, pull_product, rows_of, spectra_of
from dsf.kernels.triton.fourier.states import run_state
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.kernel import no_finish, no_sums
from dsf.kernels.triton.pointwise.programs import Access, arguments_of
from dsf.kernels.triton.registry import Registry

TOKENS, COLUMNS, WARPS = 32, 64, 8  # of a tile
SPAN = 4  # tiles of tokens of a program that sums over them


@dataclass(frozen=True)
class Fixed:
    """A Param of the impulse response. entries: numbers of it for a k: 0 (no Key axis), 1, or 2 (of pairs)."""

    role: str
    entries: int
    value: bool


@dataclass(frozen=True)
class Convolution:
    """What the operators know of a declaration.

    moving: the inputs that y and the drives are computed from with the FFT's rows; fixed: the Params of the impulse
    response; operands are both, in this order. keyed: every entry of the state has an input of its own; turned: pairs
    of entries turn; numbers: how many an entry or a pair has; before: the state is read before the update; gated: y's
    gradient needs the FFT's rows. accesses: the tensors of each printed function of moving inputs.
    """

    moving: tuple[Access, ...]
    fixed: tuple[Fixed, ...]
    keyed: bool
    turned: bool
    numbers: int
    before: bool
    gated: bool
    accesses: Mapping[str, tuple[Access, ...]]
    functions: Any = field(default=None, compare=False)

    @property
    def roles(self) -> list[str]:
        """The names of the operands."""
        return [*(x.role for x in self.moving), *(x.role for x in self.fixed)]


CONVOLUTIONS: Registry[Convolution] = Registry("convolution")


class Call:
    """One call: its sizes, and launches of its printed functions."""

    def __init__(self, known: Convolution, operands: Sequence[Tensor]) -> None:
        self.known = known
        count = len(known.moving)
        self.moving, self.fixed = operands[:count], operands[count:]
        self.tensors: dict[str, Tensor | None] = {}
        self.n = self.p = 1
        for a, x in zip(known.moving, self.moving, strict=True):
            self.tensors[a.role] = x
            if a.time:
                self.batch, self.tokens, self.heads = x.shape[:3]
                self.like = x
            if a.value:
                self.p = int(x.shape[-1])
            if a.key:
                self.n = int(x.shape[-1])
        k = 1
        for fixed, x in zip(known.fixed, self.fixed, strict=True):
            if fixed.entries:
                k = int(x.shape[1]) // fixed.entries
            if fixed.value:
                self.p = int(x.shape[-1])
        self.k = k if not known.keyed else self.n // 2 if known.turned else self.n
        self.points = 2 * fast_length(self.tokens)
        self.fine = fine_of(self.tokens)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(H, E, P) of the product of spectra: E inputs and P outputs of each of H groups of columns."""
        return (self.heads, self.n, self.p) if self.known.keyed else (self.heads * self.p, 1, 1)

    @property
    def width(self) -> int:
        """Columns of a head that are convolved."""
        return self.n if self.known.keyed else self.p

    def rows(self, name: str, keyed: bool) -> Tensor:
        """What a printed function returns, as rows [B · H · N or P, points]."""
        width = self.n if keyed else self.p
        out = self.like.new_empty(self.batch * self.heads * width, self.points, dtype=torch.float32)
        parts = -(-self.heads * width // COLUMNS)
        across = self.batch * parts
        launch(
            into_rows, (across * -(-self.points // TOKENS),), self.arguments(name), out, self.tokens, self.points,
            parts, across, body=getattr(self.known.functions, name), H=self.heads, W=width, K=TOKENS, C=COLUMNS,
            KEYED=keyed, num_warps=WARPS,
        )  # fmt: skip
        return out

    def run(self, name: str, keyed: bool) -> None:
        """Run a printed function over all tokens and columns."""
        width, f = self.n if keyed else self.p, self.known.functions
        parts, segments, sums = -(-self.heads * width // COLUMNS), self.segments(name), self.sums(name)
        across = self.batch * parts
        launch(
            over_rows, (across * segments,), self.arguments(name), self.tokens, TOKENS * SPAN if sums else TOKENS,
            segments, parts, across, body=getattr(f, name),
            zeros=getattr(f, f"{name}_zeros") if sums else no_sums,
            finish=getattr(f, f"{name}_finish") if sums else no_finish, H=self.heads, W=width, K=TOKENS, C=COLUMNS,
            KEYED=keyed, num_warps=WARPS,
        )  # fmt: skip

    def sums(self, name: str) -> bool:
        """Whether a printed function sums over tokens."""
        return any(a.summed for a in self.known.accesses[name])

    def segments(self, name: str) -> int:
        """Programs along time that run a printed function."""
        return -(-self.tokens // (TOKENS * SPAN if self.sums(name) else TOKENS))

    def arguments(self, name: str) -> tuple[Any, ...]:
        """Addresses and strides of what a printed function reads and stores."""
        return arguments_of(self.known.accesses[name], self.tensors, self.heads, False)

    def in_time(self, x: Tensor, width: int) -> Tensor:
        """Rows [B · H · width, points] as [B, points, H, width]."""
        return x.view(self.batch, self.heads, width, self.points).permute(0, 3, 1, 2)

    def params(self) -> tuple[Any, ...]:
        """Addresses and strides of the Params of the impulse response."""
        return tuple(y for x in self.fixed for y in (x, *x.stride()))

    @property
    def entries(self) -> int:
        """Inputs of a head that an impulse response is computed for."""
        return self.n if self.known.keyed else 1

    @property
    def how(self) -> dict[str, Any]:
        """Constants of the impulse response's launches."""
        return {"TURNED": self.known.turned, "SHIFT": int(self.known.before), "SCALED": True}

    def numbers(self) -> Tensor:
        """The numbers of the impulse response [count, H, K, P]."""
        sizes = self.known.numbers, self.heads, self.k, self.p
        return numbers.make(self.params(), self.known.functions.numbers, sizes, self.like)

    @property
    def read(self) -> Any:
        """The hole that reads the numbers."""
        return numbers.read_made_pairs if self.known.turned else numbers.read_made_entries

    def response(self, made: Tensor) -> Tensor:
        """The impulse responses divided by points / 2, as rows [H · E · P, points]."""
        h = self.like.new_empty(self.heads, self.entries, self.p, self.points, dtype=torch.float32)
        impulse.respond((made, *made.shape), h, self.tokens, self.fine, self.k, self.read, **self.how)
        return h.view(-1, self.points)

    def add_state(self, made: Tensor, state: Tensor, rows: Tensor) -> None:
        """Add what an initial state [B, H, N, P] contributes to y's rows [B · H · P, points]."""
        h = rows.view(self.batch * self.heads, 1, self.p, self.points)
        turned, first = self.known.turned, 0 if self.known.before else 1
        read = numbers.read_state_pairs if turned else numbers.read_state_entries
        args, how = (made, *made.shape, state), {"TURNED": turned, "SHIFT": 0, "SCALED": False}
        impulse.respond(args, h, self.tokens, self.fine, self.k, read, **how, FIRST=first, ADDED=True)

    def final(self, made: Tensor, state: Tensor | None, inputs: Tensor) -> Tensor:
        """The state [B, H, N, P] after the last token. inputs: rows of `enter`."""
        n = 2 * self.k if self.known.turned else self.k
        out = self.like.new_empty(self.batch, self.heads, n, self.p, dtype=torch.float32)
        sizes = self.tokens, self.fine, self.k, self.heads
        how = {"TURNED": self.known.turned, "KEYED": self.known.keyed}
        run_state(inputs, (made, *made.shape), state, out, sizes, self.read, **how)
        return out

    def pull_response(self, made: Tensor, dh: Tensor) -> Tensor:
        """The gradients [1 or 2, count, H, K, P] of the numbers from those of the responses."""
        known, count = self.known, self.known.numbers
        slopes = made.new_empty(2 if known.keyed and known.turned else 1, *made.shape)
        both = self.read, numbers.pull_made_pairs if known.turned else numbers.pull_made_entries
        dh = dh.view(self.heads, self.entries, self.p, self.points)
        args = made, *made.shape
        impulse.pull_back(dh, args, (slopes, count), self.tokens, self.fine, self.k, both, **self.how)
        return slopes


def _forward(
    operands: Sequence[Tensor], state: Tensor | None, program: str, keep: bool, final: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y [B, T, H, P], with `final` the last state [B, H, N, P], and with `keep` what the backward pass needs."""
    call = Call(CONVOLUTIONS[program], operands)
    known = call.known
    state = None if state is None else state.contiguous()
    rows, made = call.rows("enter", known.keyed), call.numbers()
    inputs, responses = spectra_of(rows), spectra_of(call.response(made))
    found = rows_of(product(inputs, responses, call.sizes))
    if state is not None:
        call.add_state(made, state, found)
    y = call.like.new_empty(call.batch, call.tokens, call.heads, call.p)
    call.tensors |= {".y": y, ".z": call.in_time(found, call.p)}
    call.run("leave", False)
    last = call.final(made, state, rows) if final else y.new_empty(0, dtype=torch.float32)
    return y, last, [inputs, responses, made, *([found] if known.gated else [])] if keep else []


def _backward(
    dy: Tensor, operands: Sequence[Tensor], kept: Sequence[Tensor], program: str, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of the operands that need one, in order."""
    call = Call(CONVOLUTIONS[program], operands)
    known, count = call.known, len(call.known.moving)
    call.tensors |= {".dy": dy, ".z": call.in_time(kept[3], call.p) if known.gated else None}
    outputs = spectra_of(call.rows("begin", False))
    wanted, learnt = needs[:count], needs[count:]
    of_responses, of_inputs = pull_product(outputs, kept[0], kept[1], call.sizes, any(wanted))
    return [*gradients_of_moving(call, of_inputs, wanted), *_of_fixed(call, kept[2], of_responses, learnt)]


def gradients_of_moving(call: Call, spectra: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of moving inputs from those of the inputs' spectra and of y."""
    if spectra is None:
        return []
    call.tensors[".du"] = call.in_time(rows_of(spectra), call.width)
    for a, x, need in zip(call.known.moving, call.moving, needs, strict=True):
        shape = x.shape if a.time else (call.batch * call.segments("adjoint"), *x.shape)
        dtype = x.dtype if a.time else torch.float32
        call.tensors[f".grad_{a.role}"] = call.like.new_empty(shape, dtype=dtype) if need else None
    call.run("adjoint", call.known.keyed)
    found = []
    for a, x, need in zip(call.known.moving, call.moving, needs, strict=True):
        slope = call.tensors[f".grad_{a.role}"]
        if need:
            assert slope is not None
            found.append(slope if a.time else slope.sum(0).to(x.dtype))
    return found


def _of_fixed(call: Call, made: Tensor, spectra: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of the impulse response's Params from that of its spectrum. made: its numbers."""
    if not any(needs):
        return []
    slopes = call.pull_response(made, rows_of(spectra))
    grads, rows = list[Tensor | None](), numbers.rows(call.k, call.p)
    for a, x, need in zip(call.known.fixed, call.fixed, needs, strict=True):
        dtype = x.dtype if a.value or rows == 1 else torch.float64
        grads.append(x.new_empty(1 if a.value else rows, *x.shape, dtype=dtype) if need else None)
    numbers.pull(call.params(), slopes, tuple(grads), call.known.functions.pull_numbers)
    pairs = zip(call.fixed, grads, strict=True)
    return [g[0] if g.shape[0] == 1 else g.sum(0).to(x.dtype) for x, g in pairs if g is not None]


_GIVEN = "Tensor[] operands, Tensor? state, str program, bool keep, bool final"
convolve = operator(
    f"convolve({_GIVEN}) -> (Tensor, Tensor, Tensor[])",
    _forward,
)
convolve_backward = operator(
    "convolve_backward(Tensor dy, Tensor[] operands, Tensor[] kept, str program, bool[] needs) -> Tensor[]", _backward
)
