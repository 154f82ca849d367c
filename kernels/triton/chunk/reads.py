"""What is read of states around the chunk kernels: first tokens' reads of S_0, and the gradients of reads from y's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.call import ChunkCall, last_rows


def read_first(call: ChunkCall, start: Tensor | None, y: Tensor) -> Tensor:
    """The first tokens' reads of S_0 [B or sequences, H, columns], for read="before"."""
    if start is None:
        return y.new_zeros(call.ends, call.heads, call.columns + call.inside)
    query, read = call.operand("query"), call.operand("read")
    assert query is not None
    q = call.first(query).float().repeat_interleave(call.heads // query.shape[2], dim=1)
    seen = _read(q, start)
    return (seen if read is None else seen * call.first(read).unsqueeze(-1)).to(y.dtype)


def _read(q: Tensor, state: Tensor) -> Tensor:
    """qᵀ S [..., columns] for q [..., N]. Not by matmul, for which users may have chosen tf32."""
    return (q.unsqueeze(-1) * state).sum(-2)


def read_gradient(call: ChunkCall, dy: Tensor, held: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor | None]:
    """The gradients of the read [B, T, H, columns] and of the normaliser's read [B, T, H] or None, from y's.

    held: what `held_reads` gave after an earlier call of the same tensors, or nothing.
    """
    call.tensors[".dy"] = dy
    if "readout_adjoint" not in call.program.accesses:
        return dy, None
    if call.program.quotient:
        of_den, factor = held or [call.empty(call.batch, call.heads, call.tokens).movedim(1, -1) for _ in range(2)]
        call.tensors |= {".dden": of_den, ".factor": factor}
        out, slope = dy, of_den
    else:
        rows = (call.program.micro,) if call.program.reads > 1 else ()
        shape = (call.batch, call.tokens, *rows, call.heads, call.columns)
        out = held[0] if held else call.empty(*shape, dtype=call.dtype)
        slope = None
        if call.inside:
            slope = held[1] if held else call.empty(call.batch, call.heads, call.tokens).movedim(1, -1)
        call.tensors |= {".dnum": out[..., : call.p], ".dtail": out[..., call.p :], ".dden": slope}
        call.tensors[".of_reads"] = out
    if not held:
        call.launch("readout_adjoint")
    return out, slope


def count_reads(call: ChunkCall) -> int:
    """How many tensors `held_reads` gives."""
    if "readout_adjoint" not in call.program.accesses:
        return 0
    return 2 if call.program.quotient or call.inside else 1


def held_reads(call: ChunkCall) -> list[Tensor]:
    """What `read_gradient` computed."""
    names = (".dden", ".factor") if call.program.quotient else (".of_reads", ".dden")
    return [call.need(name) for name in names[: count_reads(call)]]


def pull_first(
    call: ChunkCall, d_first: Tensor, start: Tensor | None, gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    """For read="before": the gradients of queries and read scales moved to their own tokens, with those of the first
    token's read of S_0; `state`: the gradient of S_0 through it."""
    found = {}
    query, read = call.operand("query"), call.operand("read")
    for name, x in gradients.items():
        found[name] = call.later(x, x.new_zeros(call.ends, *x.shape[2:]))
    if start is None or query is None:
        return found
    q = call.first(query).float().repeat_interleave(call.heads // query.shape[2], dim=1)
    d = d_first.float()
    if read is not None:
        if "read" in found:
            of_read = (_read(q, start) * d).sum(-1)
            found["read"] = call.later(gradients["read"], of_read)
        d = d * call.first(read).unsqueeze(-1)
    of_query = (start * d.unsqueeze(-2)).sum(-1)
    found["query"] = call.later(gradients["query"], of_query.to(gradients["query"].dtype))
    found["state"] = first_reads(call, d_first)
    return found


def first_reads(call: ChunkCall, d_first: Tensor) -> Tensor:
    """The gradient of S_0 through first tokens' reads, for read="before"."""
    query, read = call.operand("query"), call.operand("read")
    assert query is not None
    q, d = call.first(query).float().repeat_interleave(call.heads // query.shape[2], dim=1), d_first.float()
    d = d if read is None else d * call.first(read).unsqueeze(-1)
    return q.unsqueeze(-1) * d.unsqueeze(-2)


def by_row(
    call: ChunkCall, dy: Tensor, slope: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients (of first tokens' reads, of all reads, of the normaliser's reads, of the final state), arranged by
    the chunk kernels' rows: micro-steps, shifted for read="before"."""
    known, micro = call.program, call.program.micro
    d_first = dy[:, 0]
    if known.before:
        d_first = call.first(dy)
        if slope is not None:
            d_first = torch.cat([d_first.float(), call.first(slope).unsqueeze(-1)], dim=-1)
        dy, slope = call.earlier(dy), None if slope is None else call.earlier(slope)
    if known.reads > 1:
        dy = dy.flatten(1, 2)
    elif micro > 1:
        dy, slope = last_rows(dy, micro), None if slope is None else last_rows(slope, micro)
    if dfinal is not None and known.column:
        dfinal = torch.nn.functional.pad(dfinal[..., : call.p + 1], (0, call.columns - call.p - 1)).contiguous()
    return d_first, dy, slope, dfinal
