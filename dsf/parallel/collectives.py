"""The collectives of an exchange, as requests that a generator yields, and two ways to answer them.

An exchange is a generator: it yields a `Gather`, `Swap`, `Sum` or `Hop` and is sent the result. A process group answers
one generator by torch's functional collectives; `together` runs the generators of all ranks in step in one process, as
the law `parallel` and the tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsf.language.errors import DsfError, InputError

OUTSIDE = "this rank is not in the group that Sequence was given"
ALL, INNER, OUTER = "all", "inner", "outer"  # all ranks; those of one node; those with the same place in every node


@dataclass(frozen=True)
class Request:
    """A collective on one tensor x. where: the ranks that take part, ALL, INNER or OUTER."""

    x: Tensor
    where: str = ALL

    @property
    def signature(self) -> tuple[Any, ...]:
        """(kind, where, shape, dtype), which must be equal on every rank."""
        return type(self).__name__.lower(), self.where, tuple(self.x.shape), str(self.x.dtype)


class Gather(Request):
    """All-gather. The answer: every rank's x, stacked, [ranks, ...]."""


class Swap(Request):
    """All-to-all of x [ranks, ...]: row r goes to rank r. The answer: [ranks, ...], row r from rank r."""


class Sum(Request):
    """All-reduce. The answer: the sum of every rank's x."""


@dataclass(frozen=True)
class Hop(Request):
    """Send x of rank `source` to rank `target`. The answer: that x on `target`, zeros elsewhere."""

    source: int = 0
    target: int = 0

    @property
    def signature(self) -> tuple[Any, ...]:
        """With source and target."""
        return (*super().signature, self.source, self.target)


# A traced graph drops unused results, and a rank that drops a collective leaves the others waiting: `after` makes the
# values of a rank depend on every answer that it received. In eager mode nothing is dropped.
torch.library.define("dsf::after", "(Tensor x, Tensor[] heard) -> Tensor")
torch.library.impl("dsf::after", "default", lambda x, heard: x.clone())
torch.library.register_fake("dsf::after", lambda x, heard: torch.empty_like(x))


def _count(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.count = len(inputs[1])


torch.library.register_autograd("dsf::after", lambda ctx, g: (g, [None] * ctx.count), setup_context=_count)


def tied(value: Any, heard: Sequence[Tensor]) -> Any:
    """A tensor, or tuples and lists of them, depending on `heard` where a graph is traced."""
    if all(type(x) in (Tensor, nn.Parameter) for x in heard):
        return value
    if isinstance(value, Tensor):
        return torch.ops.dsf.after(value, list(heard))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(tied(x, heard) for x in value))
    return type(value)(tied(x, heard) for x in value) if isinstance(value, (list, tuple)) else value


Steps = Generator[Request, Tensor, Any]


def drive(steps: Steps, answer: Callable[[Request], Tensor]) -> Any:
    """The return value of one generator, whose requests `answer` answers one by one."""
    try:
        request = next(steps)
        while True:
            request = steps.send(answer(request))
    except StopIteration as end:
        return end.value


def mirrored(steps: Steps, sizes: Mapping[str, int]) -> Steps:
    """Translate a generator that numbers ranks from the last one to requests that number them from the first.

    sizes: the number of ranks, by `where`.
    """
    try:
        request = next(steps)
        while True:
            asked = request
            if isinstance(request, Swap):
                asked = Swap(request.x.flip(0), request.where)
            elif isinstance(request, Hop):
                last = sizes[request.where] - 1
                asked = Hop(request.x, request.where, last - request.source, last - request.target)
            answer = yield asked
            request = steps.send(answer.flip(0) if isinstance(request, (Gather, Swap)) else answer)
    except StopIteration as end:
        return end.value


def together(ranks: Sequence[Steps], nodes: int = 1, log: list[tuple[Any, ...]] | None = None) -> list[Any]:
    """The return values of all ranks' generators, run in step. nodes: the number of nodes.

    log: a list that takes each collective's signature. Raises DsfError where ranks ask for different collectives.
    """
    answers: list[Tensor | None] = [None] * len(ranks)
    values: list[Any] = [None] * len(ranks)
    while True:
        requests: list[Request] = []
        for r, (steps, answer) in enumerate(zip(ranks, answers, strict=True)):
            try:
                requests.append(next(steps) if answer is None else steps.send(answer))
            except StopIteration as end:
                values[r] = end.value
        if not requests:
            return values
        asked = {q.signature for q in requests}
        if len(requests) < len(ranks) or len(asked) > 1:
            raise DsfError(f"ranks do not ask for the same collectives: {sorted(map(str, asked))}")
        if log is not None:
            log.append(requests[0].signature)
        answers = list(_answered(requests, nodes))


def _answered(requests: Sequence[Request], nodes: int) -> list[Tensor]:
    world = len(requests)
    inner = world // nodes
    groups = {
        ALL: [list(range(world))],
        INNER: [list(range(o * inner, (o + 1) * inner)) for o in range(nodes)],
        OUTER: [list(range(i, world, inner)) for i in range(inner)],
    }[requests[0].where]
    found: list[Tensor] = [requests[0].x] * world
    for group in groups:
        xs = [requests[r].x for r in group]
        for place, r in enumerate(group):
            q = requests[r]
            if isinstance(q, Gather):
                found[r] = torch.stack(xs)
            elif isinstance(q, Swap):
                found[r] = torch.stack([x[place] for x in xs])
            elif isinstance(q, Sum):
                found[r] = torch.stack(xs).sum(0)
            else:
                assert isinstance(q, Hop)
                found[r] = xs[q.source].clone() if place == q.target else torch.zeros_like(q.x)
    return found


@dataclass(frozen=True)
class Group:
    """A process group by name, so that it can be compiled, copied and pickled. rank: this process's place in it;
    members: all of its processes, by their places among all."""

    name: str
    size: int
    rank: int
    members: tuple[int, ...] = ()

    def answer(self, request: Request) -> Tensor:
        """Run one collective, wait for it, and return the result."""
        ops = torch.ops._c10d_functional
        x = request.x.contiguous()
        if self.size == 1:
            return x.unsqueeze(0) if isinstance(request, Gather) else x
        if isinstance(request, Gather):
            return ops.wait_tensor(ops.all_gather_into_tensor(x, self.size, self.name)).view(self.size, *x.shape)
        if isinstance(request, Sum):
            return ops.wait_tensor(ops.all_reduce(x, "sum", self.name))
        if isinstance(request, Swap):
            each = [x[0].numel()] * self.size
            flat = ops.all_to_all_single(x.reshape(-1), each, each, self.name)
            return ops.wait_tensor(flat).view(x.shape)
        assert isinstance(request, Hop)
        count = x.numel()
        sent = [count if self.rank == request.source and r == request.target else 0 for r in range(self.size)]
        got = [count if self.rank == request.target and r == request.source else 0 for r in range(self.size)]
        given = x.reshape(-1)[: sum(sent)]
        flat = ops.wait_tensor(ops.all_to_all_single(given, got, sent, self.name))
        return flat.view(x.shape) if sum(got) else torch.zeros_like(x)


def groups_of(mesh: Any) -> tuple[tuple[Group, Group], str]:
    """((group between nodes, group within a node), kind of device). Raises InputError."""
    if not dist.is_available() or not dist.is_initialized():
        raise InputError("dsf.parallel.Sequence needs torch.distributed.init_process_group first")
    one = Group("", 1, 0)
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives ranks that are not in it
        raise InputError(OUTSIDE)
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        group = mesh if mesh is not None else dist.group.WORLD
        assert group is not None
        device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        return (one, _named(group)), device
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise InputError(f"Sequence takes a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    if mesh.ndim == 1:
        return (one, _named(mesh.get_group())), mesh.device_type
    if mesh.ndim != 2:
        raise InputError(f"Sequence takes a mesh of one dimension, or of two (nodes, ranks of a node), got {mesh.ndim}")
    return (_named(mesh.get_group(0)), _named(mesh.get_group(1))), mesh.device_type


def _named(group: Any) -> Group:
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError(OUTSIDE)
    return Group(group.group_name, dist.get_world_size(group), rank, tuple(dist.get_process_group_ranks(group)))
