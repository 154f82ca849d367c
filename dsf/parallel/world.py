"""`Sequence`, the ranks that share a sequence; `Simulated`, the same ranks in one process."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.affine import Frame
from dsf.kernels.recent import Recent
from dsf.language.errors import InputError
from dsf.parallel.agree import agree_whole
from dsf.parallel.collectives import (
    ALL,
    INNER,
    OUTER,
    Gather,
    Hop,
    Request,
    Steps,
    Sum,
    Swap,
    drive,
    groups_of,
    mirrored,
    tied,
    together,
)
from dsf.parallel.cost import Choice, Link, choose, default_links
from dsf.parallel.layout import LAYOUTS, Layout, Packing
from dsf.parallel.tokens import gather_tokens

WORLDS: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()
ROOM = 2053  # bytes of a text that ranks tell: no number of floats, so that it never passes for another message
ROUTES = 1024  # that a world remembers
UNSAVED = ("key", "log", "_backwards", "agreed", "routes", "told")
_numbers = itertools.count()


class World:
    """The ranks that share one sequence, each holding a part of its tokens.

    layout: "contiguous" or "headtail" (`Layout`). sizes: tokens of every rank; None: the most even shards. exchange:
    "auto", "gather", "transpose", "relay" or "two-level". nodes: the number of nodes. links: latency and bandwidth
    within a node and between nodes, for "auto". log: None, or a list to which every collective's signature is added.
    """

    def __init__(
        self, layout: str, ranks: int, nodes: int, sizes: Several[int] | None, exchange: str, links: tuple[Link, Link]
    ) -> None:
        if layout not in LAYOUTS:
            raise InputError(f"layout is {layout!r}; layouts are {', '.join(LAYOUTS)}")
        if exchange not in ("auto", "gather", "transpose", "relay", "two-level"):
            raise InputError(f"exchange is {exchange!r}; it is auto, gather, transpose, relay or two-level")
        if exchange == "two-level" and nodes < 2:
            raise InputError("exchange='two-level' needs a mesh of two dimensions, nodes and ranks of a node")
        if sizes is not None and (layout != "contiguous" or len(sizes) != ranks or min(sizes) < 0):
            raise InputError(f"sizes={tuple(sizes)} must be the tokens of each of {ranks} contiguous shards")
        self.layout = Layout(layout, ranks)
        self.sizes = None if sizes is None else tuple(sizes)
        self.exchange, self.nodes, self.links = exchange, nodes, links
        self.log: list[tuple[Any, ...]] | None = None
        self.check = False
        self.agreed: set[Any] | None = None  # kinds of calls that processes have compared, and whose (see agree.py)
        self._forward: World | None = None  # of a world that counts ranks from the last, the one it is made of
        self._backwards: World | None = None
        self._register()

    def _register(self) -> None:
        self.routes: Recent[Any] = Recent(ROUTES)  # of calls so far, and layers' that ranks compared
        self.told: list[tuple[str, Any]] | None = None  # its options, for other ranks (dsf.parallel.agree)
        self.key = f"{type(self).__name__}#{next(_numbers)}"
        WORLDS[self.key] = self

    def __copy__(self) -> World:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        """This object: a copied model has the same ranks."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name not in UNSAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.log = self._backwards = None
        self._register()

    def forget(self) -> None:
        """Forget earlier calls, so that ranks compare the next call of every kind again."""
        for world in (self, self._forward, self._backwards):
            if world is not None:
                world.routes.clear()
        if self.agreed is not None:
            self.agreed.clear()

    @property
    def ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return self.layout.ranks

    @property
    def here(self) -> list[int]:
        """The ranks of this process."""
        raise NotImplementedError

    def run(self, steps: Several[Steps], first: Several[Tensor] = ()) -> list[Any]:
        """The values of this process's generators (dsf.parallel.collectives).

        first: tensors that a traced graph must compute before the first collective. Compilers may reorder what does not
        depend on each other, and ranks' graphs differ.
        """
        if self._forward is None:
            return self._run(steps, first)
        sizes = {ALL: self.ranks, INNER: self.ranks // self.nodes, OUTER: self.nodes}
        return self._forward.run([mirrored(one, sizes) for one in reversed(steps)], first)[::-1]

    def _run(self, steps: Several[Steps], first: Several[Tensor]) -> list[Any]:
        raise NotImplementedError

    def backwards(self) -> World:
        """The world of calls with reverse=True, in which rank r of this world is rank W - 1 - r.

        Every rank flips its tokens; the collectives stay the same. With layout="headtail" it is this world, since a
        rank's runs are the same counted from either end.
        """
        if self.layout.slots > 1:
            return self
        if self._forward is not None:
            return self._forward
        turned_about(self.key)
        assert self._backwards is not None
        return self._backwards

    def _turn(self) -> None:
        self.sizes = None if self.sizes is None else self.sizes[::-1]

    def called(self, rank: int) -> int:
        """The number that a rank of this world has in the world that the user made."""
        return rank if self._forward is None else self.ranks - 1 - rank

    def choice(self, frame: Frame, rows: int, width: int) -> Choice:
        """The exchange for states of this shape. rows: batch times heads; width: bytes of a number."""
        return choose(frame, self.layout, rows, width, self.exchange, self.nodes, self.links)

    def packing(self, bounds: Several[int]) -> Packing:
        """Packed sequences (cu_seqlens `bounds`) over the ranks. Raises InputError where they do not fit."""
        sizes: Several[int] | None = self.sizes
        if len(bounds) == 2:  # one sequence, whose length may be a symbol: a graph is of one, as places are numbers
            bounds = (0, int(bounds[1]))
        if self._forward is not None:  # uneven shards come in reversed order
            sizes = self.layout.sizes(bounds[-1], self._forward.sizes)[::-1]
        return Packing.of(self.layout, bounds, sizes)

    def places(self, tokens: int, rank: int, device: torch.device | str | None = None) -> Tensor:
        """int64 [T of the rank]: the positions of a rank's tokens in a sequence of `tokens` tokens."""
        return self.packing([0, tokens]).positions(rank, device)

    def shard_of(self, rank: int, *xs: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """A rank's tokens of whole tensors, as one tensor each. dim: the axis of tokens."""
        found = []
        for x in xs:
            packing = self.packing([0, x.shape[dim]])
            parts = []
            for slot in range(self.layout.slots):
                number = self.layout.number(rank, slot)
                parts.append(x.narrow(dim, packing.starts[number], packing.starts[number + 1] - packing.starts[number]))
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim))
        return tuple(found)

    def whole_of(self, shards: Several[Tensor], dim: int = 1) -> Tensor:
        """The whole tensor from the shards of all ranks, in their order. dim: the axis of tokens."""
        layout = self.layout
        if layout.slots == 1:
            return torch.cat(list(shards), dim=dim)
        halves = [x.chunk(2, dim=dim) for x in shards]
        owners = [layout.owner(number) for number in range(layout.fragments)]
        return torch.cat([halves[rank][slot] for rank, slot in owners], dim=dim)


def turned_about(key: str) -> bool:
    """Make the world of a world's reversed calls, unless it has one. Dynamo calls this while it traces, as it cannot
    follow locks; torch 2.11's takes no objects there."""
    world = WORLDS[key]
    if world._backwards is None:
        found = object.__new__(type(world))
        found.__dict__.update(world.__dict__)
        found._forward = world
        found._turn()
        found._register()
        world._backwards = found
    return True


turned_about._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


class Sequence(World):
    """Context parallelism: a sequence over the ranks of a mesh or a process group.

        cp = dsf.parallel.Sequence(mesh["cp"])
        x, labels = cp.shard(x, labels)
        y = gated_deltanet(q, k, v, alpha, beta, parallel=cp)

    mesh: a DeviceMesh with one dimension, or with two (nodes, ranks of a node), which allow the two-level exchange; a
      ProcessGroup; or None for all ranks.
    layout: "contiguous", or "headtail", which balances the load of softmax attention: of 2 W equal runs, rank r of W
      holds the runs r and 2 W - 1 - r.
    sizes: tokens of every rank, if contiguous shards are not as even as torch.tensor_split's. Only packed sequences and
      softmax attention need this.
    exchange: how states pass between ranks: "gather", "transpose", "relay", "two-level", or "auto" for the cheapest.
    links: two `Link`s, within a node and between nodes, for "auto"; None: assumed values of the device.
    check: True: ranks compare their calls before every call, by one more small collective. False: only before the first
      call of a kind (dtypes, shapes but for T, options).

    Every rank must make the same calls in the same order, forward and backward, even without tokens. Copies of a model
    share this object; a pickle stores the names of its groups. Raises InputError for a mesh of another shape, a rank
    outside it, or other options. Calls that differ between ranks raise it on all (docs/parallel.md#what-is-refused).
    """

    def __init__(
        self,
        mesh: Any = None,
        layout: str = "contiguous",
        *,
        sizes: Several[int] | None = None,
        exchange: str = "auto",
        links: tuple[Link, Link] | None = None,
        check: bool = False,
    ) -> None:
        self._groups, self.device = groups_of(mesh)
        outer, inner = self._groups
        self._rank = outer.rank * inner.size + inner.rank
        super().__init__(
            layout, outer.size * inner.size, outer.size, sizes, exchange, links or default_links(self.device)
        )
        self.check = check
        self.agreed = set()
        self.warned = False  # that all ranks hold the same tokens

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.agreed = set()

    def __repr__(self) -> str:
        return f"Sequence(rank {self._rank} of {self.ranks}, layout={self.layout.name!r}, exchange={self.exchange!r})"

    @property
    def rank(self) -> int:
        """This process's place among the ranks of the sequence."""
        return self._rank

    @property
    def here(self) -> list[int]:
        """The rank of this process."""
        return [self._rank]

    def is_of(self, ranks: Several[int]) -> bool:
        """Whether these global ranks share the sequence, in this order."""
        outer, inner = self._groups
        if len(ranks) != self.ranks:
            return False
        node, equals = ranks[outer.rank * inner.size :][: inner.size], ranks[inner.rank :: inner.size]
        return tuple(node) == inner.members and (outer.size == 1 or tuple(equals) == outer.members)

    def _turn(self) -> None:
        super()._turn()
        self._rank = self.ranks - 1 - self._rank

    def _run(self, steps: Several[Steps], first: Several[Tensor]) -> list[Any]:
        """One generator, by torch's functional collectives, each after the one before it."""
        (one,) = steps
        heard: list[Tensor] = []

        def answer(request: Request) -> Tensor:
            x = tied(request.x, heard[-1:] or first)
            heard.append(self._answer(request if x is request.x else replace(request, x=x)))
            return heard[-1]

        return [tied(drive(one, answer), heard)]

    def _answer(self, request: Request) -> Tensor:
        if self.log is not None:
            self.log.append(request.signature)
        outer, inner = self._groups
        if request.where == INNER or (request.where == ALL and outer.size == 1):
            return inner.answer(request)
        if request.where == OUTER:
            return outer.answer(request)
        if isinstance(request, Gather):
            near = inner.answer(request)
            return outer.answer(replace(request, x=near)).flatten(0, 1)
        if isinstance(request, Sum):
            return outer.answer(replace(request, x=inner.answer(request)))
        if isinstance(request, Swap):
            x = request.x.unflatten(0, (outer.size, inner.size)).transpose(0, 1)
            near = inner.answer(Swap(x)).transpose(0, 1)
            return outer.answer(Swap(near)).flatten(0, 1)
        assert isinstance(request, Hop)
        (a, i), (b, j) = divmod(request.source, inner.size), divmod(request.target, inner.size)
        x = request.x
        if i != j:
            x = inner.answer(Hop(x, INNER, i, j))
        return outer.answer(Hop(x, OUTER, a, b)) if a != b else x

    def tell(self, text: str, device: torch.device) -> list[str]:
        """The texts of all ranks, in the order of the ranks that the user knows. Every rank calls this."""
        room = torch.zeros(ROOM, dtype=torch.uint8)
        letters = list(text.encode())
        if len(letters) > ROOM:
            letters = [*letters[: ROOM - 9], *f" {zlib.crc32(bytes(letters)):08x}".encode()]  # tells cut ones apart
        room[: len(letters)] = torch.tensor(letters, dtype=torch.uint8)
        every = self._answer(Gather(room.to(device))).cpu()
        return [bytes(row[row > 0].tolist()).decode(errors="ignore") for row in every]

    def shard(self, *xs: Tensor, dim: int = 1) -> Any:
        """This rank's tokens of whole tensors: one tensor, or a tuple for several. dim: the axis of tokens."""
        if any(not -x.dim() <= dim < x.dim() or x.shape[dim] != xs[0].shape[dim] for x in xs):
            shapes = ", ".join(str(list(x.shape)) for x in xs)
            raise InputError(f"shard cuts dimension {dim}, the tokens, as many in every tensor; got shapes {shapes}")
        found = self.shard_of(self._rank, *xs, dim=dim)
        return found[0] if len(found) == 1 else found

    def gather(self, x: Tensor, tokens: int | None = None, dim: int = 1) -> Tensor:
        """The whole tensor from the shards x of all ranks, on every rank. Gradients return to each token's rank.

        tokens: the length of the whole sequence, needed where shards differ in length. dim: the axis of tokens. Raises
        InputError on every rank for shards that do not fit each other.
        """
        agree_whole(self, x, tokens, dim)
        return gather_tokens(self, [x], self.lengths(x.shape[dim], tokens), dim)[0]

    def positions(self, tokens: int, device: torch.device | str | None = None) -> Tensor:
        """int64 [T of this rank]: the positions of its tokens. tokens: the length of the whole sequence."""
        if not isinstance(tokens, (int, torch.SymInt)) or tokens < 0:
            raise InputError(f"positions: tokens is {tokens!r}, expected the number of the whole sequence's tokens")
        return self.places(tokens, self._rank, device)

    @property
    def fragments(self) -> list[int]:
        """The numbers of this rank's runs of tokens (fragments), counted along the sequence."""
        return [self.layout.number(self._rank, slot) for slot in range(self.layout.slots)]

    def lengths(self, mine: int, tokens: int | None = None) -> list[int]:
        """Tokens of every rank. mine: this rank's. tokens: of the whole sequence. Raises InputError if mine differs."""
        if tokens is None:
            found = list(self.sizes) if self.sizes is not None else [mine] * self.ranks
        else:
            packing = self.packing([0, tokens])
            found = [packing.tokens(r) for r in range(self.ranks)]
        if found[self._rank] != mine:
            raise InputError(f"rank {self._rank} holds {mine} tokens, expected {found[self._rank]}, of {sum(found)}")
        return found


class Simulated(World):
    """The ranks of a `Sequence` in one process. A call takes whole sequences, cuts them, runs every rank and joins y.

        sim = dsf.parallel.Simulated(3)
        y = mine(q, k, v, parallel=sim)       # equals mine(q, k, v)

    It tests the context parallelism of a recurrence without a cluster, as dsf.check's law `parallel` does. ranks: their
    number W on all nodes; nodes: a divisor of it. Other arguments as of `Sequence`. Raises InputError for bad options.
    """

    def __init__(
        self,
        ranks: int,
        layout: str = "contiguous",
        *,
        nodes: int = 1,
        sizes: Several[int] | None = None,
        exchange: str = "auto",
        links: tuple[Link, Link] | None = None,
    ) -> None:
        if ranks < 1 or nodes < 1 or ranks % nodes:
            raise InputError(f"{ranks} ranks cannot be {nodes} nodes")
        super().__init__(layout, ranks, nodes, sizes, exchange, links or default_links("cpu"))

    @property
    def here(self) -> list[int]:
        """All ranks."""
        return list(range(self.ranks))

    def _run(self, steps: Several[Steps], first: Several[Tensor]) -> list[Any]:
        """All generators in step. Raises DsfError where they do not ask for the same collectives."""
        return together(steps, self.nodes, self.log)


def world_of(key: str) -> World:
    """The world with this key, by which compiled graphs refer to it."""
    return WORLDS[key]
