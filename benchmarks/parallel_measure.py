"""What benchmarks/parallel.py measures on every rank: inputs, clocks, errors, memory, pieces, the link, a peer."""

import importlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from gpu_compile import tune_quickly

from dsf.parallel import Link, Sequence, fused
from dsf.parallel.collectives import Gather
from dsf.parallel.exchange import AllGather, _frame, _payload
from dsf.parallel.rank import Rank
from dsf.parallel.summary import Summary

FAR = Link(30e-6, 45e9)  # between nodes: assumed, not measured
BLOCK = 256  # tokens


class Failed(Exception):
    """A row that some rank could not do, raised on every rank."""


def agreed(call, device):
    """call() on every rank; Failed on all of them where one raises outside of a collective.

    Around calls that hold collectives of their own too, whose parts without any (which may run out of memory on one
    rank alone) are then agreed upon themselves, before the next collective.
    """
    found, text = None, ""
    try:
        found = call()
    except Failed as error:
        text = str(error)
    except Exception as error:
        text = f"rank {dist.get_rank()}: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
    failed = torch.tensor([float(bool(text))], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failed.item():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, text)
        raise Failed(next(said for said in every if said))
    return found


def draw(recurrence, tokens, heads, n, p, device, dtype, seed=0):
    """Inputs, alike on every rank, in the ranges of a trained model: unit keys, decays near one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    found = {}
    for i in recurrence.spec.inputs:
        sizes = [{"key": n, "value": p}[a] for a in ("key", "value") if a in i.kind.axes]
        shape = [1, tokens, heads, *sizes] if i.kind.time else [heads, *sizes]
        kept = dtype if i.kind.time else torch.promote_types(dtype, torch.float32)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if i.name == "k":
            x = torch.nn.functional.normalize(x, dim=-1)
        elif i.name == "alpha":
            x = 0.97 + 0.03 * x.sigmoid()
        elif i.name == "beta":
            x = x.sigmoid()
        elif i.name == "g":
            x = -0.05 * x.abs()
        elif i.name == "f":
            x = x + 4.0
        elif i.name in ("dt", "r"):
            x = x - 4.0
        elif i.name == "reset":
            x = torch.zeros_like(x)
        elif i.name == "A_log":
            x = torch.linspace(0.0, 1.0, x.numel(), device=device).view(x.shape)
        found[i.name] = x.to(kept)
    return found


def timed_names(recurrence):
    return {i.name for i in recurrence.spec.inputs if i.kind.time}


def shard(recurrence, inputs, cp):
    timed = timed_names(recurrence)
    return {n: cp.shard(x).clone() if n in timed else x for n, x in inputs.items()}


def both_ways(call, inputs):
    """(forward, forward + backward) of call(**inputs)."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    slope = []

    def forward():
        with torch.no_grad():
            return call(**inputs)

    def both():
        y = call(**leaves)
        if not slope:
            slope.append(torch.ones_like(y))
        return y.detach(), torch.autograd.grad(y, list(leaves.values()), slope[0], allow_unused=True)

    return forward, both


class Clock:
    """Milliseconds a call, of calls one after the other between two events; the slowest rank's, medians of samples.

    A sample has four calls or more, enough for `sample_ms`: the first one begins on an idle GPU, which waits for the
    host, and the others as in training, where the host is ahead.
    """

    def __init__(self, device, repeats, sample_ms=8.0):
        self.device, self.repeats, self.sample_ms = device, repeats, sample_ms

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _sample(self, call, count):
        """(ms on the device, ms until the host had issued it) of a call."""
        self.wait()
        dist.barrier()
        begin = time.perf_counter()
        if self.device.type != "cuda":
            for _ in range(count):
                call()
            took = 1e3 * (time.perf_counter() - begin) / count
            return took, took
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        host = 1e3 * (time.perf_counter() - begin) / count
        self.wait()
        return first.elapsed_time(last) / count, host

    def __call__(self, call):
        """(milliseconds, milliseconds of the host) of a call, the same on every rank."""
        agreed(lambda: thrice(call), self.device)
        samples = []
        count = 1
        for turn in range(self.repeats + 1):
            both = torch.tensor(self._sample(call, count), device=self.device, dtype=torch.float64)
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            if turn:
                samples.append(both.tolist())
            else:
                count = max(4, min(50, int(self.sample_ms / max(both[0].item(), 1e-3))))
        return tuple(statistics.median(column) for column in zip(*samples, strict=True))


def thrice(call):
    """Compiled, recorded, played; where memory does not suffice, here."""
    for _ in range(3):
        call()


def captured(call, device):
    """What replays call() from a CUDA graph; collectives are in it, so all ranks capture alike."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        agreed(lambda: thrice(call), device)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # NCCL's threads go on meanwhile
            call()

    agreed(capture, device)  # nothing is sent while it is recorded, so that a rank that fails leaves none waiting
    return graph.replay


def peak(call, device):
    """Bytes that a call needs at most, with what lies there already; the most of all ranks."""
    if device.type != "cuda":
        return None

    def measured():
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()

    agreed(measured, device)
    found = torch.tensor([torch.cuda.max_memory_allocated()], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def same_bits(call, device):
    """Whether every rank finds the same bits again."""
    (y, grads), (again, others) = call(), call()
    equal = torch.equal(y, again) and all(
        torch.equal(a, b) for a, b in zip(grads, others, strict=True) if a is not None
    )
    told = torch.tensor([float(equal)], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


# -- layers


def layer_call(layer, **options):
    """The layer as a function of its input and parameters, all of which get gradients."""
    names = [n for n, _ in layer.named_parameters()]

    def call(x, **values):
        given = {n: values[n.replace(".", "/")] for n in names}
        return torch.func.functional_call(layer, given, (x,), {"use_cache": False} | options)[0]

    return call, {n.replace(".", "/"): p.detach() for n, p in layer.named_parameters()}


def layer_input(tokens, width, device, dtype):
    generator = torch.Generator(device=device).manual_seed(2)
    return torch.randn(1, tokens, width, generator=generator, device=device).to(dtype)


# -- errors


def _worst_block(error, truth):
    """The largest relative error of a head in a block of tokens; [1, T, H, ...]."""
    block = min(BLOCK, error.shape[1])
    cut = error.shape[1] // block * block
    sums = [
        x[0, :cut].reshape(cut, x.shape[2], -1).sum(-1).unflatten(0, (-1, block)).sum(1) for x in (error**2, truth**2)
    ]
    return (sums[0] / sums[1].clamp(min=1e-30)).max().sqrt()


def errors(recurrence, whole, cp, device):
    """Errors of y and of every gradient, of one GPU and of the ranks, against one GPU in the next wider dtype.

    {quantity: {"one", "ranks": relative norms of all tokens, "one_block", "ranks_block": the worst head and block}}.
    """
    timed = timed_names(recurrence)
    wide = torch.float32 if device.type == "cuda" else torch.float64
    generator = torch.Generator(device=device).manual_seed(1)

    def run(inputs, dy, **options):
        leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
        y = recurrence(**leaves, **options)
        dy = torch.randn(y.shape, generator=generator, device=device).to(y.dtype) if dy is None else dy.to(y.dtype)
        grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
        named = {f"d{n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
        return {"y": y.detach()} | named, dy

    def alone():
        one, dy = run(whole, None)
        return one, dy, run({n: x.to(wide) for n, x in whole.items()}, dy)[0]

    one, dy, truth = agreed(alone, device)
    ranks, _ = run(shard(recurrence, whole, cp), cp.shard(dy), parallel=cp)
    found = {}
    for name, exact in truth.items():
        over_tokens = name == "y" or name[1:] in timed
        mine, own = ranks[name].to(wide), exact
        if over_tokens:
            own = cp.shard(exact)
        else:
            mine = mine.clone()
            dist.all_reduce(mine)
        size = float((exact**2).sum().sqrt())
        if not size:
            continue
        squares = ((mine - own) ** 2).sum()
        if over_tokens:
            dist.all_reduce(squares)
        entry = {"one": float((one[name].to(wide) - exact).norm()) / size, "ranks": float(squares.sqrt()) / size}
        if over_tokens and own.shape[1]:
            block = _worst_block(mine - own, own)
            dist.all_reduce(block, op=dist.ReduceOp.MAX)
            entry |= {"one_block": float(_worst_block(one[name].to(wide) - exact, exact)), "ranks_block": float(block)}
        found[name] = entry
    return found


# -- the link, the pieces


def told(x):
    """The steps of one all-gather."""
    return (yield Gather(x))


def link(cp, clock, device, most):
    """Latency and bandwidth of an all-gather, least squares over sizes, and the sizes with their times."""
    points = []
    for power in range(10, most + 1, 2):
        x = torch.zeros(2**power // 4, device=device)
        points.append(((cp.ranks - 1) * 2**power, 1e-3 * clock(lambda x=x: cp.run([told(x)]))[0]))
    sizes, times = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    weights = 1 / times
    design = torch.stack([torch.ones_like(sizes), sizes], dim=1) * weights[:, None]
    latency, per_byte = torch.linalg.lstsq(design, (times * weights)[:, None]).solution.flatten().tolist()
    return Link(max(latency, 1e-7), 1 / max(per_byte, 1e-13)), points


class Silent(Sequence):
    """Ranks that send nothing and hear themselves: wrong results in the time of all that is not communication."""

    def _answer(self, request):
        if isinstance(request, Gather):
            return request.x.unsqueeze(0).expand(self.ranks, *request.x.shape).contiguous()
        return request.x


def pieces(recurrence, given, cp, clock):
    """Milliseconds of F, what M adds (which two ranks do not need), the exchange of maps, the fold and C, each alone.

    Where the kernels have a call's passes (fused) also of the pass after the exchange, without gradients, and what M
    adds on the host.
    """
    bound, plan = recurrence._calls.prepare(recurrence.spec, (), given, None, "auto", "auto")
    summary = Summary(recurrence, bound, "auto", "auto")
    found = {"fused": fused.fits(recurrence.spec, bound, plan)}
    rank = Rank(cp.rank, cp.layout, summary, None, None)
    if found["fused"]:
        rank = fused.rank_of(cp.rank, cp.layout, summary, None)
    dy = torch.ones(*next(iter(bound.tensors.values())).shape[:2], bound.sizes.heads, bound.sizes.p)
    dy = dy.to(bound.device, bound.dtype)
    with torch.no_grad():
        start = rank.empty()
        if found["fused"]:
            shard = rank.shard
            found["F"], without = clock(lambda: shard.summary(None, False, False))
            both, host = clock(lambda: shard.summary(None, True, False))
            found["M"], found["M_host"] = max(0.0, both - found["F"]), max(0.0, host - without)
            held = shard.summary(None, False, False)[2]
            found["main"] = clock(lambda: shard.forward(start, False, held))[0]
            held = shard.summary(None, False, True)[2]
            _, _, saved = shard.forward(start, True, held)
            held = shard.held_back(held)
            found["C"] = clock(lambda: shard.adjoint(dy, None, start, saved, held))[0]
        else:
            tokens = bound.sizes.tokens
            found["F"] = clock(lambda: rank.summary.written(0, tokens, None))[0]
            found["M"] = clock(lambda: rank.summary.move(0, tokens))[0]
        x = _payload(rank, _frame(rank))
        found["exchange"] = clock(lambda: cp.run([told(x)]))[0]
        (rows,) = cp.run([told(x)])
        found["fold"] = clock(lambda: AllGather._fold(rank).forward(rows))[0]
    if not found["fused"]:
        found["C"] = clock(lambda: rank.summary.adjoint(0, tokens, start, dy, None))[0]
    return found


# -- a peer

os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla hands its gated delta rule over to others
PEERS = {"gated_deltanet": "gated_delta_rule.chunk_gated_delta_rule", "kda": "kda.chunk_kda"}


def peer_call(name, inputs, **options):
    """fla's operator as (forward, forward + backward) on a row's inputs, its decays made before."""
    module, function = PEERS[name].split(".")
    operator = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    decay = inputs["alpha"].float().log() if name == "gated_deltanet" else inputs["g"].float()
    named = {n: inputs[n] for n in ("q", "k", "v", "beta")} | {"g": decay}
    return both_ways(lambda **x: operator(**x, scale=1.0, **options)[0], named)


def peer(name, whole, given, cp, clock):
    """flash-linear-attention's context parallel on the same shards, and its operator on the whole sequence."""
    contexts = importlib.import_module("fla.ops.cp")
    tune_quickly()
    bounds = torch.tensor([0, whole["q"].shape[1]], device=whole["q"].device, dtype=torch.int32)
    context = contexts.build_cp_context(cu_seqlens=bounds, group=dist.group.WORLD)
    found = {}
    for label, inputs, options in (("ranks_ms", given, {"cp_context": context}), ("whole_ms", whole, {})):
        ways = peer_call(name, inputs, **options)
        found[label] = {w: clock(call)[0] for w, call in zip(("forward", "both"), ways, strict=True)}
    found["strong"] = {w: found["whole_ms"][w] / (cp.ranks * ms) for w, ms in found["ranks_ms"].items()}
    return found
