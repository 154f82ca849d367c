"""What ranks tell each other before their first call of a kind: whether they are about to make the same one.

Calls that differ between ranks send tensors of other sizes to each other, which ends the process on gloo, hangs on
NCCL, and gives wrong numbers where the sizes happen to fit. So the first call of a kind (of these dtypes, shapes and
options) is compared by one small collective, and with it the errors of single ranks are told to all. Later calls of the
kind say nothing: ranks that keep the rules know the same kinds at every call.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dsf.call import packing
from dsf.language.errors import InputError
from dsf.parallel.layout import host_bounds

if TYPE_CHECKING:
    from dsf.parallel.world import Sequence, World

KINDS = 4096  # that a world remembers


class Said(NamedTuple):
    """A call as other ranks are told of it.

    kind: pairs (name, what it is) that ranks have in common.
    sample: per-token numbers. cu_seqlens: compared, too, but others from call to call.
    """

    kind: tuple[tuple[str, Any], ...]
    sample: Tensor | None
    cu_seqlens: Any

    def lines(self, who: str) -> list[str]:
        """For people, and to be compared."""
        found = [_sample(self.sample), *(f"{name} {_shown(what)}" for name, what in self.kind)]
        bounds = host_bounds(who, self.cu_seqlens)
        if bounds is not None:
            longest = max((b - a for a, b in pairwise(bounds)), default=0)
            found.append(
                f"cu_seqlens of {len(bounds) - 1} sequences, {bounds[-1]} tokens, the longest {longest} "
                f"(crc {_crc(str(bounds).encode())})"
            )
        return found


def agree(world: World, who: str, say: Callable[[], Said], look: Callable[[], object], like: Any) -> None:
    """Raise an error on every rank where a call of a new kind differs between ranks or one of them refuses it.

    say, look: what this rank's call is, and its checks, which raise what they find. like: a tensor of the call. Ranks
    in one process, compiled and captured graphs say nothing to each other. With `Sequence(check=True)` every call is
    compared. `look` is not called where the kind is known: the call itself checks then.
    """
    if world.agreed is None or world.ranks == 1 or is_open(like):
        return
    ranks = cast("Sequence", world)
    told, error = [], None
    try:
        own = say()
        if (who, own.kind) in world.agreed and not ranks.check:
            return
        look()
        told = ["call", *own.lines(who)]
    except Exception as found:
        if who in world.agreed and not ranks.check:  # the others do not listen: they are in the call
            raise
        told, error = ["error", str(found)], found
    device = like.device if isinstance(like, Tensor) else torch.device(ranks.device)
    texts = [text.split("\n") for text in ranks.tell("\n".join(told), device)]
    if error is not None:
        raise error
    for rank, (status, *rest) in enumerate(texts):
        if status == "error":
            text = "\n".join(rest)
            raise InputError(f"{who}: rank {rank} refuses its call, and so do all: {text}")
        if status != "call":  # what it sent into another collective
            raise InputError(
                f"{who}: ranks differ: rank {rank} makes another call than this rank: {'; '.join(told[2:])}"
            )
    _compare(ranks, who, texts)
    if len(world.agreed) >= KINDS:
        world.forget()
    world.agreed.update(((who, own.kind), who))


def _compare(world: Sequence, who: str, texts: list[list[str]]) -> None:
    """Raise InputError where ranks' lines differ. texts: of every rank: status, sample, lines."""
    for rank, text in enumerate(texts):
        if text[2:] == texts[0][2:]:
            continue
        mine, theirs = (set(a) - set(b) for a, b in ((texts[0][2:], text[2:]), (text[2:], texts[0][2:])))
        first = next((line for line in texts[0][2:] if line in mine), "less")
        second = next((line for line in text[2:] if line in theirs), "less")
        hint = ""
        if first.startswith("T ") and world.layout.slots > 1:
            hint = "; layout='headtail' needs runs of one length on all ranks"
        elif first.startswith("T "):
            hint = "; say so by Sequence(..., sizes=...), where shards are not of one length"
        raise InputError(f"{who}: ranks differ: rank 0 has {first}, rank {rank} has {second}{hint}")
    samples = {text[1] for text in texts}
    if len(samples) == 1 and samples != {""} and (world.check or not world.warned):
        same = (
            f"{who}: every rank holds the same {texts[0][1].partition(' ')[2]} tokens. Where these are the whole "
            "sequence, give each rank its own: cp.shard(x)"
        )
        if world.check:
            raise InputError(same)
        world.warned = True
        warnings.warn(same, stacklevel=6)


def agree_layer(
    world: World, layer: nn.Module, x: Tensor, state: Any, cu_seqlens: Any, look: Callable[[], object] = lambda: None,
    *options: tuple[str, Any],
) -> None:  # fmt: skip
    """`agree` on the call of a layer: x [B, T, d_model], state a MixerState or None. look: more that it checks.

    options: of the call, by name.
    """
    if world.agreed is None or is_open(x):
        return
    who = type(layer).__name__
    spec = getattr(getattr(layer, "recurrence", None), "spec", None)
    attention = spec is not None and spec.is_attention
    kept = None if state is None else tuple(_form(part) for part in state)
    known = who, attention, x.dtype, x.shape, kept, cu_seqlens is None, options  # which the kind follows from
    if not world.check and world.routes.get(known):
        return

    def say() -> Said:
        length = length_of(world, attention, x.shape[1], cu_seqlens)
        return Said((*options_of(world), ("x", _form(x, True)), ("state", kept), *options, *length), x, cu_seqlens)

    def checks() -> None:
        look()
        check_tokens(who, world, world.here[0], x.shape[0], x.shape[1], host_bounds(who, cu_seqlens))

    agree(world, who, say, checks, x)
    world.routes.put(known, True)  # where ranks differ, `agree` raised


def agree_whole(world: World, x: Tensor, tokens: int | None, dim: int) -> None:
    """`agree` on a call of `Sequence.gather`."""

    def say() -> Said:
        shape = ["T" if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
        length = [] if tokens is not None else length_of(world, True, x.shape[dim], None)
        return Said((*options_of(world), ("x", (x.dtype, tuple(shape))), ("tokens", tokens), *length), None, None)

    agree(world, "gather", say, lambda: cast("Sequence", world).lengths(x.shape[dim], tokens), x)


def options_of(world: World) -> list[tuple[str, Any]]:
    """What ranks must have said alike when they made their `Sequence`."""
    if world.told is not None:
        return world.told
    last = "" if world._forward is None else ", from the last token"
    sizes = None if world.sizes is None else list(world.sizes)
    text = f"(layout={world.layout.name!r}, sizes={sizes}, exchange={world.exchange!r}){last}"
    world.told = [("Sequence", text)]
    return world.told


def length_of(world: World, attention: bool, tokens: int, cu_seqlens: Any) -> list[tuple[str, Any]]:
    """("packed", whether) and, where shards must be of one length, ("T", tokens)."""
    same = cu_seqlens is None and world.sizes is None and (attention or world.layout.slots > 1)
    return [("packed", cu_seqlens is not None), *([("T", f"= {tokens}")] if same else [])]


def described(given: dict[str, Tensor], timed: set[str]) -> list[tuple[str, Any]]:
    """Inputs by name. timed: those of which ranks hold tokens."""
    return [(name, _form(x, name in timed)) for name, x in given.items()]


def check_tokens(who: str, world: World, rank: int, batch: int, tokens: int, bounds: list[int] | None) -> None:
    """Raise InputError for tokens of a rank that do not fit the layout. bounds: of packed sequences."""
    layout = world.layout
    if bounds is not None and batch != 1:
        raise InputError(f"{who}: cu_seqlens packs sequences into one row, expected B = 1, got B = {batch}")
    if bounds is not None:
        packed = world.packing(bounds)
        expected, total, source = packed.tokens(rank), packed.bounds[-1], "cu_seqlens of the global sequences gives"
    elif layout.slots > 1:
        if tokens % layout.slots:
            raise InputError(f"{who}: layout='headtail' gives a rank two runs of one length, got {tokens} tokens")
        return
    elif world.sizes is not None:
        expected, total, source = world.sizes[rank], sum(world.sizes), f"sizes={world.sizes} of the Sequence give"
    else:
        return
    if tokens == expected:
        return
    hint = "; these are all of them: give this rank's alone, cp.shard(x)" if tokens == total else ""
    raise InputError(
        f"{who}: rank {world.called(rank)} of {layout.ranks} has {tokens} tokens, but {source} it {expected} of "
        f"{total}{hint}"
    )


def is_open(x: Any) -> bool:
    """Whether a call has no numbers yet, in a compiled or captured graph."""
    if torch.compiler.is_compiling():
        return True
    if not isinstance(x, Tensor):
        return False
    return type(x) not in (Tensor, nn.Parameter) or packing.is_captured(x.device)


def _form(x: Any, timed: bool = False) -> Any:
    """A tensor's dtype and shape, without its tokens where it has some; of anything else its type."""
    if not isinstance(x, Tensor):
        return None if x is None else type(x).__name__
    return x.dtype, (x.shape[0], "T", *x.shape[2:]) if timed and x.dim() > 1 else tuple(x.shape)


def _shown(what: Any) -> str:
    if isinstance(what, tuple) and len(what) == 2 and isinstance(what[0], torch.dtype):
        return f"{str(what[0]).removeprefix('torch.')} [{', '.join(map(str, what[1]))}]"
    if isinstance(what, tuple):
        return f"({', '.join(map(_shown, what))})"
    return "none" if what is None else str(what)


def _crc(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"


def _sample(x: Tensor | None) -> str:
    """A mark of some of x [B, T, ...], and T, by which ranks that hold the same tokens are known; "" for tokens that
    do not differ from each other, as in a trial on ones."""
    if x is None or x.dim() < 2 or x.shape[1] < 2 or not x.numel():
        return ""
    rows = torch.stack([x.detach()[:4, t].flatten(1)[:, :256] for t in (0, x.shape[1] // 2, -1)]).float().cpu()
    if torch.equal(rows[0], rows[-1]):
        return ""
    return f"{_crc(rows.numpy().tobytes())} {x.shape[1]}"
