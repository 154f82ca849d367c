"""The calls of benchmarks/sanitize.py that are no recurrences on one rank: parts of layers, ranks, steps in place.

LAYERS: name -> (dtype -> calls, what they take). Calls give results by name; in float64 they run on torch.
"""

import torch

from dsf import long_convolution
from dsf.checking.ranges import ranges_of
from dsf.fuzz import Case
from dsf.fuzz.inputs import numbers
from dsf.kernels.attention import KVCache
from dsf.kernels.convolution import Fused, Piece, short_convolution, short_convolution_step
from dsf.kernels.entropy import row_entropies
from dsf.kernels.fixed_cache import attend, fixed, write
from dsf.kernels.invariant import Diagonal, Invariant, by_kernel
from dsf.kernels.mixture import token_mixtures
from dsf.kernels.norm import added_rms_norm, gated, gated_rms_norm
from dsf.kernels.product import by_blocks, linear
from dsf.kernels.reversal import joined, reversed_tokens
from dsf.kernels.rotary import angles, rotary
from dsf.kernels.triton.attention.step import attention_step
from dsf.mixers import get
from dsf.mixers.mlstm import gated_read as mlstm_read
from dsf.mixers.rwkv7 import gated_read, read
from dsf.parallel import Simulated, windows


def backend(x):
    """float64 is the oracle's."""
    return "torch" if x.dtype == torch.float64 else "triton"


def norms(x, weight, gate):
    """Norms and gates of layers and models (SwiGLU is the gate by silu)."""
    how = {"backend": backend(x)}
    wide = torch.promote_types(x.dtype, torch.float32)
    return {
        "norm": gated_rms_norm(x, weight, **how), "norm, then gate": gated_rms_norm(x, weight, gate, **how),
        "gate, then norm of groups": gated_rms_norm(x, weight, gate, groups=2, gate_first=True, **how),
        "norm alone, wide": gated_rms_norm(x, dtype=wide, **how),
        "gate": gated(x, gate, "sigmoid", **how), "GELU": gated(x, gate, "gelu", **how),
        "SwiGLU": gated(x, gate, **how),
        "SwiGLU, mapped": gated(x, gate, then=x[0], **how),
        "norm, then gate, mapped": gated_rms_norm(x, weight, gate, then=x[0], **how),
        "norm of a sum": sum(added_rms_norm(x, gate, weight, **how)),
    }  # fmt: skip


@torch.no_grad()
def products(x, gate, weight, matrix):
    """Linear maps of a token, behind what layers and models have before them."""
    how = {"backend": backend(x)}
    total, behind_sum = added_rms_norm(x, gate, weight, then=matrix, **how)
    return {
        "alone": linear(x, matrix, **how),
        "with a bias": linear(x, matrix, bias=matrix[:, 0].contiguous(), sigmoid=(2, 5), **how),
        "of blocks": by_blocks((x, gate), [matrix.flatten()[:160].view(10, 4, 4)] * 2, **how),
        "behind a gate": gated(x, gate, then=matrix, **how),
        "behind a norm of groups": gated_rms_norm(x, weight, gate, groups=4, then=matrix, **how),
        "sum": total, "behind its norm": behind_sum,
    }  # fmt: skip


@torch.no_grad()
def attention_tokens(a, k, v, before, log):
    """Two tokens of attention in place, into a memory with room and into a window's. before: keys and values."""
    found, exact = {}, a.dtype == torch.float64
    for name, places, decay in (("room", 80, None), ("window", 40, None), ("decays", 80, -log.abs())):
        lengths = torch.tensor([37, 52 if places == 40 else 40], device=a.device)
        bias = None if decay is None else decay * torch.arange(40, 0, -1, device=a.device)
        cache = fixed(KVCache(before, before, lengths, bias), places, 40 if places == 40 else None)
        kept = cache.k, cache.v, cache.bias, cache.lengths
        for t in range(2):
            token = [x[:, :, t : t + 1] for x in (a, k, v)]
            if exact:
                y = attend(token[0], *write(cache, *token[1:], decay, decay, 40, places), 0.3)
            else:
                y = attention_step(*token, decay, decay, *kept, 0.3, places == 40)
        found |= {name: y, f"{name}, keys": cache.k, f"{name}, values": cache.v}
    return found


def turned(q, k):
    """Rotary positions of queries and of fewer keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = angles(torch.arange(q.shape[1], device=q.device)[None], q.shape[-1], 100.0, wide)
    return dict(zip(("q", "k"), rotary(q, k, cos, sin, 0.5, backend(q)), strict=True))


def mixtures(x, other, share):
    """Mixtures of tokens, one and three at once."""
    how = {"backend": backend(x)}
    three = token_mixtures(x, other, [share, share * share, 0.5 * share], **how)
    found = {"one": token_mixtures(x, other, [share], **how)[0], **{f"{i} of three": y for i, y in enumerate(three)}}
    return found | {"with more": token_mixtures(x, other, [share], x[None], **how)[0]}


def directions(ahead, back, x, gain):
    """A reversed copy, and sums of both directions."""
    how = {"backend": backend(x)}
    late = joined(ahead, back, x, gain, 1, **how)
    return {"reversed": reversed_tokens(x, **how), "sum": joined(ahead, back, **how), "late, with a gain": late}


@torch.no_grad()
def entropies(logits):
    """Cross entropy of rows of logits, a row without a target among them, and their gradient."""
    targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    targets[1] = -100
    own, slope = row_entropies(logits.clone(), targets, logits.new_ones(()), backend=backend(logits))
    return {"own": own, "slope": slope}


def readouts(y, r, k, weight):
    """What layers of RWKV-7 and mLSTM make of their recurrences' results, in printed kernels."""
    how = {"backend": backend(y)}
    return {
        "rwkv7": read(y, r, k, r * k, k - r, *[weight] * 5, **how),
        "rwkv7, gated": gated_read(y, r, k, r * k, k - r, *[weight] * 5, gate=r, **how),
        "mlstm": mlstm_read(y, k, weight, weight, z=r, **how),
    }


def convolutions(x, weight, bias, state):
    """Short convolutions; state: [3, C, K - 1]."""
    how = {"backend": backend(x)}
    bounds = torch.tensor([0, 5, 6, x.shape[1]], device=x.device)
    pieces = short_convolution(x, weight, None, pieces=[Piece(8), Piece(32, 16, 0.5)], **how)[0]
    with torch.no_grad():
        step = short_convolution_step(x[:, :1], weight, bias, state[:1], **how)[0][0]
        own = state[:1].detach().clone()
        again = short_convolution_step(x[:, :1], weight, bias, own, in_place=True, **how)[0][0]
    return {
        "plain": short_convolution(x, weight, bias, state[:1], **how)[0][0], "step": step, "step in place": again,
        "packed": short_convolution(x, weight, bias, state, cu_seqlens=bounds, activation=None, **how)[0][0],
        "three later tokens": short_convolution(x, weight, bias, ahead=3, **how)[0][0],
        "state in place": own, "first piece": pieces[0], "heads of one length": pieces[1],
    }  # fmt: skip


def convolved_over_ranks(x, weight, bias, state):
    """Windows of a convolution over two ranks, also of two rows each, and ranks shorter than a window."""
    if x.dtype == torch.float64:
        (y,), last = short_convolution(x, weight, bias, state)
        (short,), _ = short_convolution(x[:, :4], weight, bias)
        return {"y": y, "last": last, "y of head and tail": y, "last of head and tail": last, "short": short}
    fused, found = Fused(weight, bias, (True, [x.shape[-1]], [0], [1.0], 0)), {}
    for name, world in (("", Simulated(2)), (" of head and tail", Simulated(2, layout="headtail"))):
        (found[f"y{name}"],), found[f"last{name}"] = windows.convolve(world, fused, x, state)
    (found["short"],), _ = windows.convolve(Simulated(3, sizes=(2, 1, 1)), fused, x[:, :4].contiguous(), None)
    return found


def impulses(c, b, rate, angle):
    """Impulse responses of entries, and of pairs that turn. c, b: [H, N, 1]; rate, angle: [H, N / 2, 1]."""
    exact, found = c.dtype == torch.float64, {}
    c, b, rate, angle = (x.double() for x in (c, b, rate, angle))
    log = -0.1 * rate.square().repeat_interleave(2, dim=1)
    for name, turn in (("entries", None), ("pairs", angle)):
        step = Diagonal(log, True, turn)
        found[name] = Invariant(step, c, (b,)).products(b, 300, c.dtype) if exact else by_kernel(step, c, b, 300)
        found[name] = found[name][..., :300]
    return found


def drawn(name, case):
    """Legal numbers of a recurrence's inputs, by name."""
    recurrence = get(name).recurrence
    return recurrence, numbers(recurrence, ranges_of(recurrence.spec), case, 1)


def recurrences(results, sizes, *names):
    """Calls and inputs of recurrences, in cases of these sizes. results(recurrence, inputs): what to compare."""

    def make(dtype):
        parts = [drawn(name, Case(dtype=dtype, **sizes)) for name in names]

        def calls(*inputs):
            rest, found = iter(inputs), {}
            for recurrence, given in parts:
                found |= results(recurrence, {n: next(rest) for n in given})
            return found

        return calls, [x for _, given in parts for x in given.values()]

    return make


def side(recurrence, inputs):
    """The backend of a recurrence's inputs."""
    return backend(inputs[recurrence.spec.inputs[0].name])


def over_ranks(recurrence, inputs):
    """Tokens on three ranks, in one slot or two (head and tail)."""
    found, exact = {}, side(recurrence, inputs) == "torch"
    for layout in ("contiguous", "headtail"):
        world = Simulated(3, layout, exchange="gather")
        how = {"form": "recurrent"} if exact else {"backend": "triton", "parallel": world}
        y, last = recurrence(**inputs, return_state=True, **how)
        found |= {f"{recurrence.name} {layout}": y, f"{recurrence.name} {layout}, state": last}
    return found


def attended_over_ranks(recurrence, inputs):
    """Attention's queries on three ranks, one of them without tokens, or in two slots."""
    found, exact = {}, side(recurrence, inputs) == "torch"
    for name, world in (("uneven", Simulated(3, sizes=(41, 0, 91))), ("both ends", Simulated(3, "headtail"))):
        how = {"form": "naive"} if exact else {"backend": "triton", "parallel": world}
        found[f"{recurrence.name}, {name}"] = recurrence(**inputs, **how)
    return found


@torch.no_grad()
def in_place(recurrence, inputs):
    """Decode steps that overwrite their states."""
    timed, state = {i.name for i in recurrence.spec.inputs if i.kind.time}, None
    on = side(recurrence, inputs)
    for t in range(2):
        now = {n: x[:, t] if n in timed else x for n, x in inputs.items()}
        y, state = recurrence.step(state, **now, in_place=state is not None, backend=on)
    return {recurrence.name: y, f"{recurrence.name}, state": state}


def by_fft(recurrence, inputs):
    """A time-invariant system by FFT, also from a state and to one."""
    how = {"form": "recurrent" if side(recurrence, inputs) == "torch" else "convolution"}
    y, last = recurrence(**inputs, return_state=True, **how)
    with torch.no_grad():
        later, end = recurrence(**inputs, initial_state=last, return_state=True, **how)
    name = recurrence.name
    return {name: y, f"{name}, state": last.detach(), f"{name}, from a state": later, f"{name}, its end": end}


def long(x, h):
    """A convolution with a given filter."""
    return {"y": long_convolution(x, h, form="naive" if x.dtype == torch.float64 else "auto")}


def shaped(calls, *shapes):
    """Calls and inputs of these shapes."""
    return lambda dtype: (calls, [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes])


SYSTEM = {"tokens": 37, "batch": 2, "heads": 3, "n": 24, "p": 5}
SPREAD = {"tokens": 132, "batch": 2, "heads": 2, "n": 24, "p": 40}
STEPS = {"tokens": 2, "batch": 3, "heads": 3, "n": 24, "p": 40}
LAYERS = {
    "layer-norm": shaped(norms, (2, 37, 40), (40,), (2, 37, 40)),
    "layer-convolution": shaped(convolutions, (1, 37, 40), (40, 4), (40,), (3, 40, 3)),
    "layer-products": shaped(products, (2, 1, 40), (2, 1, 40), (40,), (9, 40)),
    "attention-tokens": shaped(attention_tokens, (2, 4, 2, 24), *[(2, 2, 2, 24)] * 2, (2, 2, 40, 24), (2, 4, 1)),
    "layer-rotary": shaped(turned, (2, 37, 3, 40), (2, 37, 1, 40)),
    "layer-mixture": shaped(mixtures, (2, 37, 40), (2, 37, 40), (40,)),
    "layer-directions": shaped(directions, *[(2, 37, 3, 40)] * 3, (2, 37, 3)),
    "layer-entropies": shaped(entropies, (7, 131)),
    "layer-readout": shaped(readouts, *[(2, 37, 3, 40)] * 3, (3, 40)),
    "impulse-responses": shaped(impulses, (3, 40, 1), (3, 40, 1), (3, 20, 1), (3, 20, 1)),
    "time-invariant": recurrences(by_fft, SYSTEM, "s4d", "s4d_real", "h3"),
    "long-convolution": shaped(long, (2, 131, 3, 5), (3, 131, 5)),
    "many-taps": shaped(long, (2, 37, 1, 40), (1, 20, 40)),
    "ranks-convolution": shaped(convolved_over_ranks, (2, 36, 40), (40, 4), (40,), (2, 40, 3)),
    "ranks-chunks": recurrences(over_ranks, SPREAD, "linear_attention", "ssd", "mlstm", "deltanet", "gated_deltanet"),
    "ranks-key-decays": recurrences(over_ranks, SPREAD, "gla", "kda", "rwkv7"),
    "ranks-scans": recurrences(over_ranks, SPREAD, "s6", "rg_lru"),
    "ranks-attention": recurrences(attended_over_ranks, SPREAD, "fox", "sliding_window_attention", "softmax_one"),
    "steps-in-place": recurrences(
        in_place, STEPS, "gated_deltanet", "linear_attention", "mlstm", "rwkv7", "s6", "qlstm"
    ),
    "steps-of-pairs": recurrences(in_place, STEPS, "mamba3", "s5"),
}
