"""How precise the chunk kernels are: three named choices a row of the tile table, and all that follows from them.

A float32 call needs no choice: its numbers and products are float32, or as good (`tiles.arithmetic`). In bfloat16
every operand of a product is rounded to 8 bits. A choice says where that is too few, and the number is kept in float32
or float16 instead, or as the sum of two bfloat16 terms, which makes one product two. docs/kernels/ has what each
rounding costs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch


class Precision(NamedTuple):
    """The choices of a row of the table.

    rows: of what the walks write into states, rows times their decays and strengths: "one" or "two" terms.
    states: "plain": kept in the inputs' dtype; "half": kept in float16, in as many bytes (states.py); "wide": kept in
    float32; "two": kept plain, but a delta rule's walks multiply them in two terms, and its triangular inverses.
    pairs: of the products between the rows of a chunk: "one" term; "weights": two terms of the products, one of the
    delta rule's entries that y reads by them; "two": two of both.
    """

    rows: Literal["one", "two"] = "one"
    states: Literal["plain", "half", "wide", "two"] = "plain"
    pairs: Literal["one", "weights", "two"] = "one"


PLAIN = Precision()  # one bfloat16 number for everything


class Terms(NamedTuple):
    """How many bfloat16 terms the operands of a call's products have, and the dtype of states between the walks.

    written: rows times their decays and strengths, as the walks write them into states and adjoint states; with scalar
    decays and a delta rule also, in the backward pass, its scores, and its entries as they are stored.
    states: a delta rule's states and adjoint states, the right sides and the inverses of its triangles.
    scores: products between a chunk's rows. read: a delta rule's entries as y reads them.
    kept: a delta rule's entries as gradients find them. adjoints, kept_adjoints: the gradients of these entries as they
    are written into adjoint states, and as other gradients find them.
    keys: where decays differ by key, scores and what is kept of entries (delta rules), or rows as they are written into
    states and states as they are read (no delta rule). With 2, products between rows for gradients are in tf32. Where
    transitions are diagonal plus rank one, all products between rows are, and their results have two terms or are
    float16.
    """

    written: int
    states: int
    scores: int
    read: int
    kept: int
    adjoints: int
    kept_adjoints: int
    keys: int
    state_dtype: torch.dtype
    stored: torch.dtype


def chosen(
    keys: int, p: int, dtype: torch.dtype, decay: str, delta: bool, normal: bool, roomy: bool, precise: bool = False
) -> Precision:
    """The choices for states [keys, p], where decay: none, scalar, key or rank_one.

    normal: beside a normaliser; roomy: on a GPU with shared memory for second terms and float16 states; precise: as
    Program has it.
    """
    narrow, slim = keys <= 64, p <= 64
    if dtype != torch.bfloat16 or keys > 128:
        return PLAIN
    if decay == "rank_one":
        return Precision("one", "half", "two")
    if decay == "key":
        return Precision("one", "plain", "two" if narrow else "weights") if delta else Precision("two", "wide")
    if precise and roomy:
        return Precision("two", "half", "two")
    if not delta:
        weighed = normal or (decay == "scalar" and slim and not narrow)
        return Precision("two", "half" if normal and roomy else "plain", "two" if weighed else "one")
    if not roomy:
        return PLAIN
    if decay == "none":
        return Precision("two", "two", "two")
    if not narrow:
        return Precision("one", "plain", "two")
    return Precision("two", "half", "two") if keys == 64 and slim else PLAIN


@lru_cache
def terms(choice: Precision, dtype: torch.dtype, decay: str, delta: bool, back: bool) -> Terms:
    """What the choices come to in a family of kernels, forwards or (back) in the backward pass."""
    pairs, rows = 1 if choice.pairs == "one" else 2, 2 if choice.rows == "two" else 1
    by_key = decay in ("key", "rank_one")
    stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return Terms(
        written=pairs if back and delta and decay == "scalar" else rows,
        states=2 if choice.states == "two" else 1,
        scores=1 if by_key and not delta else pairs,
        read=2 if delta and choice.pairs == "two" else 1,
        kept=pairs if delta else 1,
        adjoints=rows,
        kept_adjoints=(pairs if by_key else rows) if delta else 1,
        keys=(pairs if delta else rows) if by_key else 1,
        stored=stored,
        state_dtype={"half": torch.float16, "wide": torch.float32}.get(choice.states, stored),
    )


def decay_kind(decay: torch.Tensor | None) -> str:
    """The table's name for a decay operand, [B, T, H] or by key [B, T, H, N]."""
    return "none" if decay is None else ("key" if decay.dim() == 4 else "scalar")


def decay_gradient(decay: torch.Tensor | None, heads: int) -> torch.dtype:
    """The dtype of the decays' gradient: their own if they are by key and head, else float32."""
    same = decay is not None and decay.dim() == 4 and decay.shape[2] == heads
    return decay.dtype if decay is not None and same else torch.float32
