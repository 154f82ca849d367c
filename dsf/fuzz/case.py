"""`Case`: the complete description of some calls of a recurrence, as numbers and words that print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from dsf.checking.examples import Drawn
from dsf.checking.measure import KERNELS, TOLERANCE

# Memory layouts of a tensor. All but plain and expanded ones are surrounded by NaN.
#   offset: contiguous, its first number not on a multiple of 16 bytes; late: a slice of more tokens;
#   padded: a slice of longer rows; strided: every other number; transposed: heads before tokens;
#   fused: beside other inputs in the rows of one tensor, as one projection gives them;
#   expanded-*: one number in memory for the whole axis.
LAYOUTS = ("plain", "offset", "late", "padded", "strided", "transposed", "fused")
EXPANDED = ("expanded-batch", "expanded-tokens", "expanded-heads")


@dataclass(frozen=True, repr=False)
class Case(Drawn):
    """Calls 1 to `calls` of one kind, each with its own numbers, and then the first call again.

    tokens, batch, heads, n, p: T, B, H, N, P.
    dtype: of inputs of tokens; beside half precisions Params are float32.
    form: a torch form, or "triton" for any form of that backend.
    groups: the number of heads of inputs that have fewer than H.
    regimes: of the inputs' numbers (dsf.checking.examples.regimes_of).
    layouts: the memory layouts of inputs, "dy" and "initial_state"; by default plain.
    lengths: of packed sequences (B = 1); () for none.
    initial: whether there is an initial state.
    alias: inputs that are the same tensor in the calls with numbers in alias_calls.
    overlap: two inputs in one storage, one token apart, in place of aliases.
    between: what happens before calls 2, 3, …: "", "other" (a call of another recurrence with the same tensors),
      "shorter" (a call with the first half of the tokens, as one sequence), "heads" (a call with another number of
      heads, in the same memory layouts) or "forget" (caches of earlier calls are cleared).
    loss: the outputs that are differentiated: "both" (y and the final state), "y", "state" or "" (none, without a
      graph).
    frozen: inputs without a gradient. step: whether calls run token by token, through step(). reverse: whether they run
      from the last token to the first.
    way: "" (a plain call), "compiled" (inside torch.compile) or "func" (torch.func.vjp; recurrent form).
    seed: of the numbers.
    """

    tokens: int = 1
    batch: int = 1
    heads: int = 1
    n: int = 1
    p: int = 1
    dtype: str = "float64"
    form: str = KERNELS
    groups: Mapping[str, int] = field(default_factory=dict)
    regimes: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    initial: bool = False
    calls: int = 1
    alias: tuple[str, ...] = ()
    alias_calls: tuple[int, ...] = ()
    overlap: bool = False
    between: tuple[str, ...] = ()
    loss: str = "both"
    frozen: tuple[str, ...] = ()
    step: bool = False
    reverse: bool = False
    way: str = ""
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.dtype)

    @property
    def rows(self) -> int:
        """The number of rows of a state: sequences."""
        return len(self.lengths) or self.batch

    @property
    def bounds(self) -> list[int]:
        """cu_seqlens."""
        return [0, *accumulate(self.lengths or (self.tokens,))]

    @property
    def backend(self) -> str:
        """The backend of `form`."""
        return KERNELS if self.form == KERNELS else "torch"

    @property
    def tolerance(self) -> float:
        """The tolerance of its dtype."""
        return TOLERANCE[self.dtype]

    def is_one(self, call: int) -> bool:
        """Whether the aliased inputs are one tensor in a call. call: its number, from 1."""
        return bool(self.alias) and call in self.alias_calls

    def layout(self, name: str, call: int) -> str:
        """The memory layout of an input, "dy" or "initial_state" in a call."""
        if self.is_one(call) and name in self.alias:
            return "plain" if self.overlap else self.layouts.get(self.alias[0], "plain")
        return self.layouts.get(name, "plain")

    def without(self, names: set[str]) -> Case:
        """The case for a recurrence without these inputs."""
        alias = tuple(x for x in self.alias if x not in names)
        pairs: dict[str, Any] = {
            key: {k: v for k, v in getattr(self, key).items() if k not in names}
            for key in ("groups", "regimes", "layouts")
        }
        return replace(
            self, **pairs, frozen=tuple(x for x in self.frozen if x not in names),
            alias=alias if len(alias) > 1 else (), alias_calls=self.alias_calls if len(alias) > 1 else (),
        )  # fmt: skip
