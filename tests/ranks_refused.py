"""What the ranks of tests/test_parallel_refused.py do: calls that differ between ranks, and ranks that do not come."""

import os
import time
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from structures import gated_delta, sample, softmax, turned_delta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dsf import mixers
from dsf.models import CausalLM, ModelConfig
from dsf.parallel import Sequence, Simulated, attach


def refused(call):
    """The type and the text of the error that a call raises, or what it returns."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def drawn(rank, recurrence=gated_delta, **sizes):
    """Tokens that are others on every rank."""
    torch.manual_seed(rank)
    return sample(recurrence, **sizes)


def state_of(recurrence, rows=2):
    return recurrence(**sample(recurrence, B=rows, T=3), return_state=True)[1]


def model_of(name):
    return CausalLM(ModelConfig(d_model=32, n_layers=1, vocab_size=17, mixers=[name]))


def two():
    """What every case comes to on this rank, in one world: what all ranks refuse leaves it as it was."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cube = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    rank, groups = mesh.get_rank(), [dist.new_group([0]), dist.new_group([1])]

    def over(layout="contiguous", **options):
        return Sequence(mesh["cp"], layout, **options)  # a new one, which has agreed on nothing

    def call(inputs, recurrence=gated_delta, cp=None, **options):
        return recurrence(**inputs, parallel=cp or over(), **options)

    def layer(name, x, cp=None, **options):
        return mixers.get(name).module(16)(x, parallel=cp or over(), **options)

    own = partial(drawn, rank)
    mask = torch.ones(1, 4)
    mask[0, 0] = rank
    some, cuts = own(B=1, T=3), torch.tensor([0, 2, 6])
    alike = drawn(7, B=1, T=6)
    cases = {
        "mesh without the dimension": lambda: Sequence(mesh["tp"]),
        "mesh of three dimensions": lambda: Sequence(cube),
        "a group without this rank": lambda: Sequence(groups[1 - rank]),
        "batch": lambda: call(own(B=1 + rank)),
        "batch, relay": lambda: call(own(B=1 + rank), cp=over(exchange="relay")),
        "heads": lambda: call(own(H=2 - rank)),
        "dtype": lambda: call(own(dtype=torch.float32 if rank else torch.bfloat16)),
        "batch of softmax": lambda: call(own(softmax, B=1 + rank), softmax),
        "state on the first": lambda: call(own(), initial_state=None if rank else state_of(gated_delta)),
        "state on the last": lambda: call(own(), initial_state=state_of(gated_delta) if rank else None),
        "state with a turn": lambda: call(
            own(turned_delta), turned_delta, initial_state=state_of(turned_delta) if rank else None
        ),
        "cache on the last": lambda: call(own(softmax), softmax, initial_state=state_of(softmax) if rank else None),
        "state of another shape": lambda: call(own(), initial_state=state_of(gated_delta, 2 + rank)),
        "headtail, odd": lambda: call(own(T=5), cp=over("headtail")),
        "headtail, odd on one": lambda: call(own(T=6 - rank), cp=over("headtail")),
        "headtail, lengths": lambda: call(own(T=6 - 2 * rank), cp=over("headtail")),
        "headtail, lengths of a layer": lambda: layer("retnet", torch.randn(1, 6 - 2 * rank, 16), over("headtail")),
        "headtail, whole": lambda: over("headtail").shard(torch.randn(1, 6, 3)),
        "shard, lengths": lambda: over().shard(torch.randn(1, 6, 3), torch.zeros(1, 5)),
        "shard, one dimension": lambda: over().shard(torch.zeros(6)),
        "positions, half a token": lambda: over().positions(2.5),
        "softmax, lengths": lambda: call(own(softmax, T=3 + rank), softmax),
        "sizes": lambda: call(own(T=3 + rank), cp=over(sizes=(3, 3))),
        "whole by sizes": lambda: call(alike, cp=over(sizes=(3, 3))),
        "whole by cu_seqlens": lambda: call(alike, cu_seqlens=cuts),
        "whole layer by cu_seqlens": lambda: layer("gla", torch.randn(1, 6, 16), cu_seqlens=cuts),
        "whole, checked": lambda: call(alike, cp=over(check=True)),
        "cu_seqlens of one rank": lambda: call(own(B=1, T=3), cu_seqlens=torch.tensor([0, 2, 3])),
        "cu_seqlens": lambda: call(some, cu_seqlens=torch.tensor([0, 2 + rank, 6])),
        "how many cu_seqlens": lambda: call(some, cu_seqlens=torch.tensor([0, 2, 4, 6] if rank else [0, 2, 6])),
        "cu_seqlens on one": lambda: call(some, cu_seqlens=cuts if rank else None),
        "tokens of one, packed": lambda: call(own(B=1, T=3 + rank), cu_seqlens=cuts),
        "layout": lambda: call(own(T=4), cp=over("headtail" if rank else "contiguous")),
        "exchange": lambda: call(own(T=4), cp=over(exchange="relay" if rank else "gather")),
        "return_state": lambda: call(own(), return_state=bool(rank)),
        "reverse": lambda: call(own(), reverse=bool(rank)),
        "gradients": lambda: call({n: x.requires_grad_(bool(rank)) for n, x in own().items()}),
        "an input on one": lambda: call({n: x for n, x in own().items() if n != "k" or not rank}),
        "a shape on one": lambda: call({n: x[:, : 6 - rank] if n == "a" else x for n, x in own().items()}),
        "batch of a layer": lambda: layer("gated_deltanet", torch.randn(1 + rank, 4, 16)),
        "state of a layer": lambda: layer(
            "gla", torch.randn(1, 4, 16), state=mixers.GLA(16)(torch.randn(1, 3, 16))[1] if rank else None
        ),
        "mask on one": lambda: layer("gla", torch.randn(1, 4, 16), attention_mask=mask),
        "mask in both directions": lambda: mixers.Bidirectional(mixers.GLA(16), mixers.GLA(16))(
            torch.randn(1, 4, 16), attention_mask=mask, parallel=over()
        ),
        "positions of a model": lambda: attach(model_of("softmax_attention"), over())(torch.arange(4 + rank)[None]),
        "labels of a model": lambda: attach(model_of("gla"), over())(*torch.zeros(2, 1, 4).long()),
        "steps of a model": lambda: attach(model_of("gla"), over()).step(torch.zeros(1).long()),
        "tokens of a model": lambda: attach(model_of("gla"), over()).generate(torch.zeros(1, 4).long(), 2),
        "layer that needs all": lambda: attach(torch.nn.ModuleList([mixers.GLA(16), mixers.Hyena(16, 9)]), over()),
        "layer that looks ahead": lambda: mixers.Hydra(16, headdim=8)(torch.randn(1, 4, 16), parallel=over()),
        "model without mixers": lambda: attach(torch.nn.Linear(2, 2), over()),
        "gather, lengths": lambda: over().gather(torch.randn(1, 3 + rank, 2)),
        "gather, whole": lambda: over().gather(torch.randn(1, 3, 2), tokens=6 + rank),
    }  # fmt: skip
    found = {name: refused(case) for name, case in cases.items()}
    found |= {name: refused(case) for name, case in placed(mesh, cube, call, over).items()}
    return found, told(rank, over), uneven(mesh)


def placed(mesh, cube, call, over):
    """Calls on DTensors whose placements do not fit parallel=."""

    def dealt(places, on=mesh):
        return {n: distribute_tensor(x, on, places) for n, x in drawn(7, T=8).items()}

    one = [Replicate(), Replicate()]
    return {
        "DTensors of batch": lambda: call(dealt([Shard(0)])),
        "DTensors, whole": lambda: call(dealt([Replicate()])),
        "DTensors, headtail": lambda: call(dealt([Shard(1)]), cp=over("headtail")),
        "DTensors, other ranks": lambda: call(dealt([Shard(1), *one], cube), cp=Sequence(cube["cp"])),
        "DTensors, simulated": lambda: call(dealt([Shard(1)]), cp=Simulated(2)),
        "DTensors, lengths": lambda: call(
            {n: distribute_tensor(x, mesh, [Shard(1)]) for n, x in drawn(7, softmax, T=7).items()}, softmax
        ),
    }


def told(rank, over):
    """How often ranks compare their calls, and the warning where all have the same tokens."""
    counts = []
    for check in (False, True):
        cp = over(check=check)
        cp.log = []
        for tokens in (4 + rank, 4 + rank, 7, 7 - rank):  # shards may be of any length
            gated_delta(**drawn(rank, T=tokens), parallel=cp)
        gated_delta(**drawn(rank, B=1), parallel=cp)
        counts.append([kind for kind, _, _, dtype in cp.log if dtype == "torch.uint8"])
    cp = over()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in (rank, 7, 8):  # only a call of a new kind is compared
            gated_delta(**drawn(seed, B=1 + seed // 7), parallel=cp)
        gated_delta(**{n: torch.ones_like(x) for n, x in drawn(0, B=4).items()}, parallel=over())
    return counts, [str(w.message) for w in caught if "dsf" in str(w.message) or "tokens" in str(w.message)]


def uneven(mesh):
    """The largest errors of y, the state and gradients of DTensors whose shards are not of one length."""
    found = {}
    for name, places, recurrence, options in (
        ("tokens", [Shard(1)], gated_delta, {"parallel": Sequence(mesh["cp"])}),
        ("tokens of softmax", [Shard(1)], softmax, {"parallel": Sequence(mesh["cp"], sizes=(4, 3))}),
        ("batch", [Shard(0)], gated_delta, {}),
    ):
        inputs = drawn(7, recurrence, B=3, T=7)
        leaves = {n: distribute_tensor(x, mesh, places).requires_grad_() for n, x in inputs.items()}
        plain = {n: x.requires_grad_() for n, x in inputs.items()}
        y, expected = recurrence(**leaves, **options), recurrence(**plain)
        grads = [torch.autograd.grad(a.sin().sum(), list(b.values())) for a, b in (
            (y.full_tensor(), leaves), (expected, plain))]  # fmt: skip
        assert y.shape == expected.shape
        pairs = [(y, expected), *zip(*grads, strict=True)]
        if recurrence is gated_delta:
            pairs.append((recurrence(**leaves, **options, return_state=True)[1], state_whole(plain)))
        found[name] = max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)
    return found


def state_whole(inputs):
    return gated_delta(**inputs, return_state=True)[1]


def later():
    """A call that is of another kind on one rank alone, after one that was alike."""
    cp = Sequence()
    gated_delta(**drawn(cp.rank, B=2), parallel=cp)
    gated_delta(**drawn(cp.rank, B=2 - cp.rank), parallel=cp)


def left(how):
    """What the first rank finds where the second one `dies` or `sleeps` before a collective, and after how long."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    cp, inputs = Sequence(group), {n: x.requires_grad_() for n, x in drawn(dist.get_rank()).items()}
    dist.barrier()  # so that only what follows is waited for
    y = gated_delta(**inputs, parallel=cp)
    if cp.rank:
        if how == "dies":
            os._exit(0)
        time.sleep(3)
        return None
    start = time.monotonic()
    text = refused(lambda: y.sum().backward())
    return text, time.monotonic() - start


def dies():
    return left("dies")


def sleeps():
    return left("sleeps")
