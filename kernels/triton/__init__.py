"""Kernels in Triton, imported only when a GPU backend is asked for.

`chunk/`: chunks of matrix products; `scan/`: the fused scan; `pointwise/`: printed elementwise kernels and the decode
step; `layer/`: what a layer has beside its recurrence.

Two words for ranges of T: a *chunk* is the L tokens that one round of matrix products handles, a *segment* a range of
whole chunks. Segments of one sequence are walked at once where programs leave processors idle, after a pass that sums
up what each does to the state; or one after the other, in the same memory, where only one segment's states fit.

Shapes are of one head; i and j are rows, that is tokens, of a chunk.

| term | letter here | shape | fla | mamba_ssm |
|---|---|---|---|---|
| state at a chunk's start | S, S_0 | [N, P] | h | states |
| adjoint of the state at a chunk's end | G (gradients), dS | [N, P] | dh | dstates |
| decay of a token | a; log a | 1 or [N] | exp(g); g, gk | exp(dA); dA |
| running sum of a chunk's log decays | G, `running` | [L] or [L, N] | g after chunk_local_cumsum | dA_cumsum |
| decay between two rows, exp(G_i - G_j) | M | [L, L] | exp(g_i - g_j) | L, segsum |
| decay from the chunk's start to row i | `prefix` | [L] | exp(g_i) | exp(dA_cumsum) |
| decay from row j to the chunk's end | `suffix` | [L] | exp(g_last - g_j) | decay_states |
| decay of a whole chunk | `total` | 1 or [N] | exp(g_last) | chunk_decay |
| scores | q kᵀ M | [L, L] | A, Aqk | CB |
| write strength, scales what is written | s, `source` | [L] | beta in k or v | dt |
| erase strength of a delta rule | b, `erase` | [L] | beta | |
| read scale, of y | c, `read` | [L] | scale | |
| new value, what a row really writes | e, `entries` | [L, P] | v_new, u | |
| adjoint of the new value | f | [L, P] | dv (in chunk_delta_h) | |
| inverse of the UT transform, less the identity | T - I, `solve` | [L, L] | A after solve_tril | |
| rows that erase, decayed | b K exp(G), `erased` | [L, N] | w | |
| bonus of a token's own write | `own` | [N] | u (RWKV) | |
| diagonal plus rank one: T b, and T folded into q, k and scores | W, Q, K, M | [L, N], [L, L] | wy of dplr | |
| normaliser | n, `normal`, `weights` | [N], [L] | z | |
| stabiliser, the running maximum of exponential gates | m, `level` | 1 | m | |
| sequence and head in one index | `lane` | B H | i_bh | |
| lane of a warp | lanes.py | 32 | | |
| channels of one program | `piece`, slice | BP | BV | headdim |
| summary of a segment: what it adds to a state | SUMMARY | [N, P] | hm of context parallelism | |
| what a segment multiplies a state by | `passed` | [N] or [N, N] | | |
| heads that share q and k | `group` | H / G | GVA | ngroups |
| one of the sums of an operand in low precision | term | | | |
| several sequences in one row; their chunks | `table`, slot | [slots, 4] | cu_seqlens, chunk_indices | seq_idx |
| printed function that a kernel calls: gates, what finishes y, adjoints | hole | | | |
"""
