"""Kernels in Triton, imported only when the Triton backend is used.

`chunk/`: chunks of matrix products; `scan/`: the fused scan; `pointwise/`: printed elementwise kernels and the decode
step; `attention/`: softmax with a bias or a window; `layer/`: the short convolution and the gated norm of layers;
`turn/`: keys and queries turned by sums of angles; `solve/`: readouts that solve a system for every token; `fold.py`:
the maps of ranks.

Ranges of T: a *chunk* is the L tokens that one round of matrix products handles, a *segment* a range of whole chunks.
Where whole sequences would not fill the GPU, segments are walked in parallel, after a pass that computes the effect of
each segment, or of several *pieces* of it, on the state. Where memory is short, *stretches* of T are processed one
after the other in the same memory.

Shapes are of one head; i and j are rows, that is tokens, of a chunk.

| term | letter here | shape | fla | mamba_ssm |
|---|---|---|---|---|
| state at a chunk's start | S, S_0 | [N, P] | h | states |
| adjoint of the state at a chunk's end | G (gradient.py), dS | [N, P] | dh | dstates |
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
| keys along which is erased, if not those of the writes | r, `right` | [L, N] | p (comba), b k (gdn2) | |
| rows that erase, decayed | b K exp(G), `erased` | [L, N] | w | |
| bonus of a token's own write | `own` | [N] | u (RWKV) | |
| diagonal plus rank one: T folded into b, q, k and scores | W, Q, K, M | [L, N], [L, L] | wy of dplr | |
| normaliser | n, `normal`, `weights` | [N], [L] | z | |
| stabiliser, the running maximum of exponential gates | m, `level` | 1 | m | |
| sequence and head in one index | `lane` | B H | i_bh | |
| lane of a warp (the other meaning of lane) | lanes.py | 32 | | |
| channels of one program | `piece`, slice | BP | BV | headdim |
| summary of a segment: what it adds to a state | SUMMARY | [N, P] | hm of context parallelism | |
| what a segment multiplies its first state by | `passed` | [N] or [N, N] | | |
| heads that share q and k | `group` | H / G | GVA | ngroups |
| rows of a step whose A sums corrections; no row reads another one's | GROUP | 1, 2, 4, 8 | | |
| one of the bfloat16 numbers whose sum is an operand | term | | | |
| packed sequences; the chunks of all of them | `table`, slot | [slots, 4] | cu_seqlens, chunk_indices | seq_idx |
| printed function that a kernel calls: gates, quotient and skip of y, adjoints | hole | | | |
"""
