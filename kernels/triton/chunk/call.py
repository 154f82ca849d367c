"""One call of the matrix families: its tensors by name, the printed kernels, and the chunk kernels' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.normaliser import Normaliser
from dsf.kernels.triton.chunk.traits import Traits
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.packed import Sequences, slots
from dsf.kernels.triton.pointwise.kernel import level_blocks, levels
from dsf.kernels.triton.pointwise.programs import EMPTY, LARGEST, MADE_THERE, PADDING, VECTORS, Pointwise, Program
from dsf.kernels.triton.sizes import padded

LEVEL_TOKENS = 1024  # tokens of a program of the running maximum


class ChunkCall(Pointwise):
    """One call. packed: its packed sequences or None; columns: of values, `beside` of them added for a normaliser."""

    def __init__(self, program: Program, operands: Sequence[Tensor], bounds: Tensor | None = None) -> None:
        super().__init__(program, operands)
        self.program = program
        self.packed = None if bounds is None else Sequences(bounds.contiguous(), program.micro)
        self.beside = min(PADDING + -self.p % PADDING, LARGEST - self.p) if program.column else 0
        self.columns = self.p + self.beside

    def beside_values(self, start: Tensor) -> Tensor:
        """A state [..., P + 1] padded to all columns, with the normaliser's column twice."""
        twice = torch.cat([start, start[..., self.p :]], dim=-1)[..., : self.columns]
        return torch.nn.functional.pad(twice, (0, self.columns - twice.shape[-1]))

    def of_ones(self, x: Tensor) -> Tensor:
        """The normaliser's part [...] of a gradient [..., COLUMNS]: the sum of its two columns."""
        return x[..., self.p : self.p + 2].sum(-1, dtype=torch.float32)

    def make(self) -> list[Tensor]:
        """Run the prologue. Returns the operands that are not bare inputs, in order."""
        made = []
        for m in self.program.made:
            rows = (m.rows,) if m.rows > 1 else ()
            if m.key or m.value:
                size = self.n if m.key else self.columns
                kind = torch.float32 if m.name in ("decay", "left") else self.dtype
                x = self.empty(self.batch, self.tokens, *rows, self.heads_of(m.of), size, dtype=kind)
            else:  # contiguous in time, as the chunk kernels read them
                x = self.empty(self.batch, self.heads, self.tokens, *rows)
                x = x.movedim(1, -1)
            made.append(x)
        self.keep(made)
        if made:
            self.launch("prologue")
        return made

    def keep(self, made: Sequence[Tensor]) -> None:
        """Register the prologue's outputs by name."""
        for m, x in zip(self.program.made, made, strict=True):
            self.tensors[f".{m.name}"] = x
            if m.name == "value" and self.program.column:
                self.tensors[".value"], self.tensors[".ones"] = x[..., : self.p], x[..., self.p :]
                self.tensors[".values"] = x

    def operand(self, name: str) -> Tensor | None:
        """An operand of the chunk kernels, [B, rows, H, ·]; read and the query of one readout have one row a token."""
        role = self.program.roles.get(name)
        if name == "read" and ".factor" in self.tensors:
            return self.tensors[".factor"]
        if role is None or f"made_{name}" in self.program.accesses:
            return None
        if role.bare is not None:
            x = self.need(role.bare)
            a = self.inputs[role.bare]
            if (a.key or a.value) and x.stride(-1) != 1:
                x = x.contiguous()
            if not (a.key or a.value) and a.heads(x) != self.heads:
                x = x.repeat_interleave(self.heads // a.heads(x), dim=-1)
        else:
            x = self.need(".values" if name == "value" and self.program.column else f".{name}")
        wide = name in VECTORS or (name == "decay" and self.program.keywise)
        return x.flatten(1, 2) if x.dim() > 3 + wide else x

    def reading(self, name: str) -> Tensor | None:
        """query or read as the chunk kernels take them, [B, rows, H, ·]: at the row that is read.

        For read="before" that is the last row of the token before.
        """
        x = self.operand(name)
        if x is None:
            return None
        if self.program.before:  # last rows of packed sequences get the next one's; unused
            x = torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)
        if self.program.micro > 1 and self.program.reads == 1:
            x = last_rows(x, self.program.micro)
        return x

    def level(self, first: Tensor | None, drifts: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """The running maximum before and after every token [2, B, H, T], the last one [B, H], and with `drifts` the
        logarithms of decays [B · H, blocks], summed over blocks of tokens.

        first: m_0 [B, H], or None. Both are [S, H] for packed sequences.
        """
        out = self.empty(2, self.batch, self.heads, self.tokens)
        last = self.empty(self.ends, self.heads) if first is None else first.clone()
        if self.packed is not None and first is None:  # some sequences may have no tokens
            last.fill_(EMPTY)
        block = padded(min(LEVEL_TOKENS, self.tokens))
        blocks, lanes, table = -(-self.tokens // block), self.batch * self.heads, None
        if self.packed is not None:
            blocks = slots(self.tokens, self.packed.count, block)
            table = self.packed.tables(self.tokens, block).chunks
        maps = self.empty(lanes, blocks, 2)
        args, body = self.arguments(self.program.accesses["levels"]), self.program.functions.levels
        sizes = (self.tokens, self.heads, blocks)
        if blocks > 1 or drifts:
            launch(level_blocks, (blocks, lanes), args, maps, table, *sizes, body=body, K=block)
        launch(levels, (blocks, lanes), args, maps, first, out, last, table, *sizes, body=body, K=block)
        return out, last, maps[:, :, 0] if drifts else None

    def keep_level(self, level: Tensor) -> None:
        """Register the running maximum before and after every token, and at its readout, by name."""
        before, after = level.movedim(2, 3)
        self.tensors[".level_before"], self.tensors[".level_after"] = before, after
        self.tensors[".level_read"] = before if self.program.before else after

    def keep_output(self, num: Tensor, den: Tensor | None) -> None:
        """Register the read of the values (num) and of the normaliser (den) by name."""
        if self.program.column:
            num, den = num[..., : self.p], num[..., self.p]
        self.tensors[".num"], self.tensors[".den"] = num, den

    def chunk_arguments(self, start: Tensor | None) -> dict[str, Any]:
        """The chunk kernels' arguments, by name. start: with the normaliser's column, if there is one."""
        found: dict[str, Any] = {"q": self.reading("query"), "k": self.operand("key"), "v": self.operand("value")}
        found["packed"] = self.packed
        if self.program.floor is not None:
            found |= {name: self.operand(name) for name in ("decay", "left", "right", "own")}
            found["made"] = {name: self.printed_with(f"made_{name}") for name in MADE_THERE}
            found |= {"floor": self.program.floor, "group": self.program.group}
            return found | {"state": start, "heads": self.heads}
        found |= {name: self.operand(name) for name in ("decay", "source", "erase")}
        found |= {"read": self.reading("read"), "heads": self.heads, "log": self.program.log}
        positive = "source" in self.program.roles and self.program.roles["source"].positive
        known = self.program
        found["traits"] = Traits(
            positive, known.group, known.undecayed, self.operand("right"), known.precise, known.together,
            self.operand("fresh"),
        )  # fmt: skip
        normal = None
        if self.inside:
            start, column = self.split(start)
            normal = Normaliser(self.operand("ones"), column)
        return found | {"state": start, "normal": normal}

    def printed_with(self, name: str) -> tuple[Any, tuple[Any, ...]] | None:
        """A printed function that the chunk kernels call, with its pointers and strides; None if there is none."""
        accesses = self.program.accesses.get(name)
        return None if accesses is None else (getattr(self.program.functions, name), self.arguments(accesses))

    @property
    def ends(self) -> int:
        """The number of sequences, each of which has a state."""
        return self.batch if self.packed is None else self.packed.count

    @property
    def firsts(self) -> Tensor:
        """The first tokens of packed sequences [S]; T for sequences without tokens."""
        assert self.packed is not None
        bounds = self.packed.bounds.long()
        return torch.where(bounds[1:] > bounds[:-1], bounds[:-1], self.tokens)

    def first(self, x: Tensor) -> Tensor:
        """x [B, T, ...] at first tokens: [B or sequences, ...], zeros for sequences without tokens."""
        if self.packed is None:
            return x[:, 0]
        at = self.firsts
        rows = x[0, at.clamp(max=self.tokens - 1)]
        return rows.masked_fill((at == self.tokens).view(-1, *[1] * (rows.dim() - 1)), 0)

    def later(self, x: Tensor, first: Tensor) -> Tensor:
        """x [B, T, ...] of the token before, `first` [B or sequences, ...] at first tokens."""
        if self.packed is None:
            return torch.cat([first.unsqueeze(1), x[:, :-1]], dim=1)
        moved = torch.cat([x[0, :1], x[0]])
        return moved.index_copy_(0, self.firsts, first.to(x.dtype))[None, : self.tokens]

    def earlier(self, x: Tensor) -> Tensor:
        """x [B, T, ...] of the token after, zeros at last tokens."""
        whole = torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)
        if self.packed is not None:
            whole[0].index_fill_(0, self.firsts, 0)
        return whole[:, 1:]

    @property
    def varying(self) -> set[str]:
        """The operands that have gradients."""
        return {name for name, role in self.program.roles.items() if role.varies}

    @property
    def inside(self) -> bool:
        """True where the chunk kernels compute a normaliser."""
        return self.program.ones and not self.program.column

    @property
    def refined(self) -> bool:
        """True where the backward pass needs y with more digits than the output has."""
        return self.program.quotient and self.dtype in (torch.bfloat16, torch.float16)

    def split(self, state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """A state [B, H, N, P + 1] split into that of the values and the normaliser's [B, H, N]."""
        if state is None:
            return None, None
        return state[..., : self.p].contiguous(), state[..., self.p].contiguous()


def last_rows(x: Tensor, micro: int) -> Tensor:
    """[B, T, ...] at the last micro-step of every token, zeros at the others: [B, T · micro, ...]."""
    empty = x.new_zeros(x.shape[0], x.shape[1], micro - 1, *x.shape[2:])
    return torch.cat([empty, x.unsqueeze(2)], dim=2).flatten(1, 2)
