"""One input of the fused scan: the printed lines that load a tile of it and store its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsf.language.expr import KEY, VALUE

ALONG = "(((place * grads[0] + batch) * H + head) * N + n) * rows + t0 + shift"  # an entry's tokens in a gradient


def _row(batch: str, token: str) -> str:
    """The offset of token t0 of a batch row, by two strides."""
    return f"tile.row_of(batch, t0, T, {batch}, {token})"


@dataclass(frozen=True)
class Operand:
    """One input of a kernel. place: of its pointer in `args`, strides follow; index: of its gradient's in `grads`."""

    name: str
    time: bool
    axes: frozenset[str]
    step: int | None
    place: int
    index: int

    @property
    def strides(self) -> int:
        """How many numbers follow the pointer: strides of batch and token (with a time axis), stride of heads, group
        size, then one stride an axis."""
        return (2 if self.time else 0) + 2 + len(self.axes)

    def load(self, fixed: bool = False, widen: bool = False) -> str:
        """The expression that loads a tile as float32.

        fixed: by tile.fixed, for loops over tokens; widen: by tile.widened, for lanes with two channels of one token.
        """
        at = iter(range(self.place + 1, self.place + 10))
        terms: list[str] = [f"args[{self.place}]"]
        masks, last = [], []
        if self.time:
            batch, token = next(at), next(at)
            terms.append(_row(f"args[{batch}]", f"args[{token}]"))
            last = [f"t * args[{token}]"]  # last, so that the rest is common to all tokens of a tile
            masks.append("t_ok")
        stride, group = next(at), next(at)
        terms.append(f"head // args[{group}] * args[{stride}]")
        if KEY in self.axes:
            terms.append(f"n * args[{next(at)}]")
            masks.append("n_ok")
        if VALUE in self.axes:
            terms.append(f"p * args[{next(at)}]")
            masks.append("p_ok")
        where = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        pointers = " + ".join(terms)
        pointers = f"tile.fixed({pointers}, {last[0]})" if fixed else " + ".join([pointers, *last])
        found = f"tl.load({pointers}{where})"
        return f"tile.widened({found})" if widen else f"{found}.to(tl.float32)"

    def prefetch(self) -> str:
        """The line that prefetches L tokens."""
        batch, token, stride, group, *last = (f"args[{self.place + i}]" for i in range(1, 5 + len(self.axes)))
        row = f"args[{self.place}] + {_row(batch, token)} + head // {group} * {stride}"
        if self.axes == {KEY}:
            return f"tile.prefetch_run({row}, {last[0]}, N, L)"
        return f"tile.prefetch_rows({row} + edge * {last[0]}, {token}, {last[0]}, edge, P, T - t0, L, BP)"

    def _run(self) -> str:
        """The address of the first of L tokens of one entry of a Key input."""
        batch, token, stride, group, key = (f"args[{self.place + i}]" for i in range(1, 6))
        return f"args[{self.place}] + {_row(batch, token)} + head // {group} * {stride} + n * {key}"

    def load_run(self) -> str:
        """The expression that loads L tokens of one entry as float32, all of them in every lane."""
        return f"tile.load_run({self._run()}, L)"

    def load_lanes(self) -> str:
        """The expression that loads L tokens of one entry, one token a lane (dsf.kernels.triton.lanes)."""
        return f"lanes.load_lanes({self._run()}, p, L)"

    def store(self, value: str, summed: bool = False, fixed: bool = False) -> list[str]:
        """The lines that store its gradient: one row a token (a segment, without a time axis).

        Where channels are summed, each program stores a partial sum. summed: `value` still has its channels (a Key
        operand's), over which these lines sum it.
        """
        ends, last, masks = [], [], (["t_ok"] if self.time else [])
        width = "1"
        if KEY in self.axes:
            ends.append("n * P" if VALUE in self.axes else "n")
            masks.append("n_ok")
            width = "N"
        ends += ["p"] if VALUE in self.axes else [] if KEY in self.axes else ["p * 0"]
        masks.append("p_ok" if VALUE in self.axes else "first")
        if VALUE in self.axes:
            width = "(N * P)" if KEY in self.axes else "P"
        lead = "batch" if VALUE in self.axes else "(place * grads[0] + batch)"
        if self.time:
            token = "T + t0" if VALUE in self.axes else "rows + t0 + shift"
            row = f"(({lead} * {token}) * H + head)"
            last = [f"t * (H * {width})"]
        else:
            row = f"(({lead} * segments + segment) * H + head)"
        pointer = f"grads[{self.index}]"
        target = " + ".join([pointer, f"{row} * {width}", *ends])
        target = f"tile.fixed({target}, {last[0]})" if fixed else " + ".join([target, *last])
        if summed:
            base = " + ".join([pointer, f"{row} * {width}", *last])
            call = f"tile.store_sums({base}, {value}, n, p, p_ok, t_ok, N)"
            return [f"if {pointer} is not None:", f"    {call}"]
        if self.axes == {KEY}:
            target = f"tile.to_lanes({target}, p)"
        mask = " & ".join(masks)
        return [f"if {pointer} is not None:", f"    tile.store({target}, {value}, {mask})"]

    def places(self, others: Sequence[Operand], rough: bool) -> str:
        """The addresses of sums over channels (lanes.begin_run) of L tokens and one entry, along time.

        others: at most one more operand, whose sums follow.
        """
        found = [f"grads[{x.index}] + {ALONG}" for x in (self, *others)]
        behind = "".join(f", other={x}" for x in found[1:])
        return f"lanes.places({found[0]}, {len(found)} * L, BP, {rough}{behind})"

    def store_tokens(self, tile: str, rough: bool) -> list[str]:
        """The lines that sum a gradient of one number a token over the channels, for L tokens, and store it."""
        pointer = f"grads[{self.index}]"
        place = f"{pointer} + ((place * grads[0] + batch) * rows + t0 + shift) * H + head"
        return [f"if {pointer} is not None:", f"    lanes.store_tokens({place}, H, {tile}, p, p_ok, edge, {rough})"]


@dataclass(frozen=True)
class Initial(Operand):
    """The initial states [sequences, H, N, P] of packed sequences, as an input of each sequence's first token.

    Its value at other tokens is zero. number: name of the input that is a sequence's number, from 1, at its first token
    and 0 elsewhere.
    """

    number: str = ""

    @property
    def strides(self) -> int:
        """0: the states are contiguous."""
        return 0

    def _place(self, pointer: str) -> str:
        entry = "n * P + p" if KEY in self.axes else "p"
        return f"{pointer} + (({self.number}.to(tl.int64) - 1) * H + head) * (N * P) + {entry}"

    def _mask(self) -> str:
        return f"t_ok & {'n_ok & ' if KEY in self.axes else ''}p_ok & ({self.number} > 0.5)"

    def load(self, fixed: bool = False, widen: bool = False) -> str:
        """The expression that loads a tile, zero at tokens where no sequence begins."""
        return f"tl.load({self._place(f'args[{self.place}]')}, mask={self._mask()}, other=0.0)"

    def store(self, value: str, summed: bool = False, fixed: bool = False) -> list[str]:
        """The lines that store its gradient."""
        pointer = f"grads[{self.index}]"
        return [f"if {pointer} is not None:", f"    tile.store({self._place(pointer)}, {value}, {self._mask()})"]
