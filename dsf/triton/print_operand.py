"""One input of the fused scan's kernels: the lines that load a tile of it and store its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsf.language.expr import KEY, VALUE

ALONG = "(((place * grads[0] + batch) * H + head) * N + n) * rows + t0 + shift"  # tokens of an entry, in a gradient


def _row(batch: str, token: str) -> str:
    """Where token t0 lies, by two strides."""
    return f"tile.row_of(batch, t0, T, {batch}, {token})"


@dataclass(frozen=True)
class Operand:
    """One input of a kernel: where its pointer and strides begin in `args`, and its pointer in `grads`."""

    name: str
    time: bool
    axes: frozenset[str]
    step: int | None
    place: int
    index: int

    @property
    def strides(self) -> int:
        """Numbers after the pointer: batch and token (per token), head, group size, then one an axis."""
        return (2 if self.time else 0) + 2 + len(self.axes)

    def load(self, fixed: bool = False, widen: bool = False) -> str:
        """The expression that loads this tile of it as float32. fixed: for tokens one after the other (tile.fixed).

        widen: of one token, of so many channels that lanes have two (tile.widened).
        """
        at = iter(range(self.place + 1, self.place + 10))
        terms: list[str] = [f"args[{self.place}]"]
        masks, last = [], []
        if self.time:
            batch, token = next(at), next(at)
            terms.append(_row(f"args[{batch}]", f"args[{token}]"))
            last = [f"t * args[{token}]"]  # so that what is before it is the same for all tokens of a tile
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
        """The line that asks for L tokens of it ahead of time."""
        batch, token, stride, group, *last = (f"args[{self.place + i}]" for i in range(1, 5 + len(self.axes)))
        row = f"args[{self.place}] + {_row(batch, token)} + head // {group} * {stride}"
        if self.axes == {KEY}:
            return f"tile.prefetch_run({row}, {last[0]}, N, L)"
        return f"tile.prefetch_rows({row} + edge * {last[0]}, {token}, {last[0]}, edge, P, T - t0, L, BP)"

    def _run(self) -> str:
        """Where L tokens of one entry of a Key input begin that lies along time."""
        batch, token, stride, group, key = (f"args[{self.place + i}]" for i in range(1, 6))
        return f"args[{self.place}] + {_row(batch, token)} + head // {group} * {stride} + n * {key}"

    def load_run(self) -> str:
        """The expression that loads L tokens of one entry as float32, each the same in all lanes."""
        return f"tile.load_run({self._run()}, L)"

    def load_lanes(self) -> str:
        """The expression that loads L tokens of one entry, a token a lane (dsf.kernels.triton.scan.launches)."""
        return f"lanes.load_lanes({self._run()}, p, L)"

    def store(self, value: str, summed: bool = False, fixed: bool = False) -> list[str]:
        """The lines that store its gradient: one row a token (or segment), partial sums where channels are summed.

        summed: the value is yet to be summed over the channels (a Key operand's).
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
        """Where sums over the channels (lanes.begin_run) of L tokens and one entry lie, along time.

        others: one or none, whose sums follow.
        """
        found = [f"grads[{x.index}] + {ALONG}" for x in (self, *others)]
        behind = "".join(f", other={x}" for x in found[1:])
        return f"lanes.places({found[0]}, {len(found)} * L, BP, {rough}{behind})"

    def store_tokens(self, tile: str, rough: bool) -> list[str]:
        """The lines that sum the gradient of L tokens, each a number, over the channels and store it."""
        pointer = f"grads[{self.index}]"
        place = f"{pointer} + ((place * grads[0] + batch) * rows + t0 + shift) * H + head"
        return [f"if {pointer} is not None:", f"    lanes.store_tokens({place}, H, {tile}, p, p_ok, edge, {rough})"]


@dataclass(frozen=True)
class Initial(Operand):
    """The states [sequences, H, N, P] in which packed sequences begin; at other tokens it is zero.

    number: the name of what tells a token's sequence, from 1.
    """

    number: str = ""

    @property
    def strides(self) -> int:
        """None: it is contiguous."""
        return 0

    def _place(self, pointer: str) -> str:
        entry = "n * P + p" if KEY in self.axes else "p"
        return f"{pointer} + (({self.number}.to(tl.int64) - 1) * H + head) * (N * P) + {entry}"

    def _mask(self) -> str:
        return f"t_ok & {'n_ok & ' if KEY in self.axes else ''}p_ok & ({self.number} > 0.5)"

    def load(self, fixed: bool = False, widen: bool = False) -> str:
        """The expression that loads this tile of it, zero at tokens where no sequence begins."""
        return f"tl.load({self._place(f'args[{self.place}]')}, mask={self._mask()}, other=0.0)"

    def store(self, value: str, summed: bool = False, fixed: bool = False) -> list[str]:
        """The lines that store its gradient."""
        pointer = f"grads[{self.index}]"
        return [f"if {pointer} is not None:", f"    tile.store({self._place(pointer)}, {value}, {self._mask()})"]
