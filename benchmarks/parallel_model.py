"""What a measurement on some ranks says of more of them: the projection of benchmarks/parallel.py, a model.

From a row measured on W ranks to one on V > W ranks, tokens a rank and sizes alike:

  forward(V) = ranks(W) + M + send(V) - send(W) + fold(V) - fold(W)
  both(V)    = that of both, with send and fold of either direction, and M once (backward uses the M's of forward)

or, where that is more, what the host of W ranks takes and the host of M and of the folds. ranks(W) is measured: passes,
host, waiting for each other and what they overlap are in it, so that only what differs is a model. M, the map that two
ranks do not send, is measured alone and added from two ranks alone. send is `dsf.parallel.cost` with the fitted link
and the exchange that it chooses for each number of ranks; backward C alone is sent. fold is measured: V maps, drawn,
folded on one GPU as the chosen exchange does (gather: all heads, on the last rank forward and the first one backward;
transpose: a share of the heads). It grows with V, one map after another, and the choice of the exchange leaves it out.
Beyond the largest fold that was measured it goes on along a line.
"""

import torch
from parallel_measure import FAR

from dsf.parallel import Link, Simulated
from dsf.parallel.cost import candidates
from dsf.parallel.derive import frame_of
from dsf.parallel.fold import Fold

NODE = 8  # GPUs
WORLDS = (4, 8, 64, 1024)
FOLDED = (2, 4, 8, 64)  # maps, folded alone


def world_of(ranks, near):
    return Simulated(ranks, nodes=max(1, ranks // NODE), links=(near, FAR))


def sent(frame, heads, ranks, near):
    """(The choice, its seconds forward, its seconds backward, where ranks send their C's and no maps)."""
    world = world_of(ranks, near)
    choice = world.choice(frame, heads, 4)
    back = candidates(frame.without_moves, world.layout, heads, 4, world.nodes, world.links)
    return choice, choice.seconds, back[choice.name].seconds


def fold_times(frame, heads, ranks, name, clock, device):
    """Milliseconds (forward, backward) of the fold of `ranks` maps, as the exchange of that name does it, and of the
    host."""
    layout = Simulated(ranks).layout
    shared = name != "gather"
    share = -(-heads // ranks) if shared else heads
    fresh = [number == 0 for number in range(ranks)]
    used = frame if ranks > 2 else frame.without_moves
    numbers = range(ranks), range(ranks)
    if not shared:
        numbers = [ranks - 1], [0]
    with torch.no_grad():
        state = frame.empty(torch.zeros((), device=device), 1, share)
        rows = used.pack(state, used.neutral(state, 1, share) if used.move_numbers else None)
        rows = rows.expand(ranks, 1, *rows.shape).contiguous()
        own = torch.zeros(ranks, 1, 1, share, frame.n, frame.plain, device=device)
        last, first = (Fold(used, layout, fresh, n, shared, kernels=device.type == "cuda") for n in numbers)
        kept = first.forward(rows)[1]
        return tuple(zip(clock(lambda: last.forward(rows)), clock(lambda: first.backward(own, kept)), strict=True))


def folds(recurrence, sizes, clock, device, near):
    """{number of maps: milliseconds (forward, backward)}, by the exchange that is chosen for as many ranks, and the
    same of the host."""
    heads, n, p = sizes
    frame = frame_of(recurrence.spec, n, p)
    names = {ranks: world_of(ranks, near).choice(frame, heads, 4).name for ranks in FOLDED}
    found = {
        str(ranks): fold_times(frame, heads, ranks, name, clock, device)
        for ranks, name in names.items() if name in ("gather", "transpose")
    }  # fmt: skip
    return tuple({ranks: list(times[part]) for ranks, times in found.items()} for part in (0, 1))


def folded(measured, ranks):
    """Milliseconds (forward, backward) of the fold of so many maps, by the two measured numbers of maps around it."""
    points = sorted((int(count), times) for count, times in measured.items())
    if len(points) == 1:
        return points[0][1]
    above = next((i for i, (count, _) in enumerate(points) if count >= ranks), len(points) - 1) or 1
    (low, before), (high, after) = points[above - 1], points[above]
    return [b + (a - b) * (ranks - low) / (high - low) for b, a in zip(before, after, strict=True)]


def fold_of(measured, choice, world):
    """Of a chosen exchange; two-level: within the node, between nodes, within the node."""
    if choice.name != "two-level":
        return folded(measured, world.ranks)
    inside, between = folded(measured, world.ranks // world.nodes), folded(measured, world.nodes)
    return [2 * a + b for a, b in zip(inside, between, strict=True)]


def projection(recurrence, row, base, near):
    """{ranks: milliseconds and weak efficiency by the model, forward and both} from a row of `base` ranks."""
    heads, n, p = (row[x] for x in ("heads", "n", "p"))
    frame = frame_of(recurrence.spec, n, p)
    pieces, found = row["pieces_ms"], {}
    folding = row.get("folds_ms") or {str(w): [pieces["fold"] * (w - 1) / (base - 1)] * 2 for w in FOLDED}
    before, before_fold = sent(frame, heads, base, near), folded(folding, base)
    host, host_fold = row.get("ranks_host_ms", {}), row.get("folds_host_ms")
    for ranks in (w for w in WORLDS if w > base):
        choice, forward, back = sent(frame, heads, ranks, near)
        fold = fold_of(folding, choice, world_of(ranks, near))
        ways = [1e3 * (forward - before[1]) + fold[0] - before_fold[0] + (pieces["M"] if base == 2 else 0.0)]
        ways.append(ways[0] + 1e3 * (back - before[2]) + fold[1] - before_fold[1])
        ms = {way: row["ranks_ms"][way] + more for way, more in zip(("forward", "both"), ways, strict=True)}
        if host and host_fold:
            folds_there = fold_of(host_fold, choice, world_of(ranks, near))
            more = [a - b for a, b in zip(folds_there, folded(host_fold, base), strict=True)]
            more[0] += pieces.get("M_host", 0.0) if base == 2 else 0.0
            ms = {way: max(ms[way], host[way] + sum(more[:n])) for way, n in (("forward", 1), ("both", 2))}
        found[str(ranks)] = {
            "exchange": choice.name, "bytes": choice.bytes, "more_ms": ways, "ms": ms,
            "weak": {way: row["part_ms"][way] / ms[way] for way in ms}, "projection": True,
        }  # fmt: skip
    return found


def compared(row, fitted, recurrence, ranks):
    """Put into a row of many ranks what a record of fewer projected, and how far off that is: measured / projected."""
    if "link" not in fitted:
        return
    same = ("name", "tokens_a_rank", "heads", "n", "p")
    base = fitted["machine"]["ranks"]
    for other in fitted["rows"]:
        if base < ranks and "pieces_ms" in other and all(other[x] == row[x] for x in same):
            told = projection(recurrence, other, base, Link(**fitted["link"])).get(str(ranks))
            if told is not None:
                row["projected_ms"] = told["ms"]
                row["off"] = {way: row["ranks_ms"][way] / ms for way, ms in told["ms"].items()}
                row["fitted"] = {"ranks": base, "commit": other.get("commit", fitted["machine"]["commit"])}
