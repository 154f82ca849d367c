"""The fused scan of one call: the printed holes of a Spec, its operands, and which specs it can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dsf.call import packing
from dsf.call.bind import Bound, Sizes
from dsf.language.derived import derived
from dsf.language.expr import BY_TORCH, KEY, VALUE, Expr, children_first
from dsf.language.spec import Spec
from dsf.triton import channels, chunk
from dsf.triton import normalised as gpu_ratio
from dsf.triton.hoist import parts
from dsf.triton.print_scan import INITIAL, STARTS, VALID, emit
from dsf.triton.source import Source, name_of

LARGEST = 256  # state entries that a program can hold
PACKED = "packed", "continued"  # sequences without and with initial states
LIGHT = 2  # operations of a step up to which only memory traffic counts


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the fused scan cannot run this, in the user's words; None when it can."""
    if sizes.n > LARGEST:
        return f"the fused scan holds at most N = {LARGEST} state entries, got N = {sizes.n}"
    if dtype == torch.float64:
        return "GPU kernels compute in float32; float64 inputs run on the torch backend"
    return _refusal(spec)


@derived
def _refusal(spec: Spec) -> str | None:
    """The reasons that depend on neither sizes nor dtype."""
    if spec.is_attention or ((spec.rank or spec.mixes_pairs) and not mixes(spec)):
        return f"the fused scan is for elementwise A, this is {spec.structure}"
    if spec.features is not None:
        return "the fused scan has no Taylor features"
    if spec.rule is not None and (refused := gpu_ratio.refusal(spec)) is not None:
        return refused
    if not spec.has_key and any(KEY in x.axes for x in _nodes(spec)):
        return "the fused scan has no vector state (N = 1) made of Key inputs"
    if any(x.op == "sum_value" for x in _nodes(spec)):
        return "the fused scan cuts the Value axis into blocks, and sum_value needs all of it"
    return None


@derived
def mixes(spec: Spec) -> bool:
    """True for systems that mix the entries of a channel, token by token, and whose chunks are no matrix products:
    turned pairs beside a decay that differs within a pair, and corrections where A differs by channel."""
    if not spec.is_linear or spec.micro != 1 or spec.acts_on_values or spec.is_stabilised:
        return False
    factor = spec.rows[0].normal
    moved = [factor.decay, *(x for c in factor.corrections for x in (c.scale, c.left, c.right))]
    apart = spec.rank > 0 and any(VALUE in x.axes for x in moved)
    return (apart or spec.mixes_pairs) and not any(x.op in BY_TORCH for x in _nodes(spec))


@derived
def walks(spec: Spec) -> bool:
    """True for decays by key that the chunk kernels refuse, as their logarithm is not derived."""
    diagonal = spec.is_linear and not (spec.rank or spec.mixes_pairs)
    return diagonal and KEY in spec.decay_axes and not chunk.fits(spec)


def kernel_of(spec: Spec, sizes: Sizes, device: torch.device) -> tuple[str, int]:
    """Name of the kernel with its tile, and 0 for no chunks."""
    from dsf.kernels.triton.scan.launches import HOLES, tile_of
    from dsf.kernels.triton.scan.launches import Sizes as Counts

    heads, p = (1, sizes.heads) if channels.takes(spec, sizes) else (sizes.heads, sizes.p)
    t = tile_of(HOLES[_hole(spec)], Counts(sizes.batch, sizes.tokens, heads, sizes.n, p), False, device)
    of = " of heads as channels" * (p != sizes.p)
    return f"fused scan{of}, tiles of {t.K * t.G} x {t.NB} x {t.BP}, {t.warps} warps", 0


def _nodes(spec: Spec) -> list[Expr]:
    steps, factors = spec.system.micro_steps, [r.normal for r in spec.rows]
    low = [x for f in factors for c in f.corrections for x in (c.scale, c.left, c.right)]
    decays = [x for f in factors for x in (f.decay, f.angle)]
    return children_first(spec.readout, spec.system.D, *(s.B for s in steps), *decays, *low)


@derived
def source_of(spec: Spec, tokens: str = "", rough: bool = False) -> Source:
    """The printed holes of a spec, printed once a process. tokens, rough: as in `emit`."""
    return emit(_plain(spec), tokens, rough)


def _plain(spec: Spec) -> Spec:
    """The system that the scan runs: doubled, for a normalised one."""
    return spec if spec.rule is None else gpu_ratio.doubled(spec)


def text_of(spec: Spec, dtype: torch.dtype = torch.float32) -> str:
    """All that is printed for a spec and inputs of a dtype."""
    prologue, holes = _prologue(spec), source_of(spec, "", _is_rough(dtype)).text
    return holes if prologue is None else f"{prologue[0].text}\n\n{holes}"


def _is_rough(dtype: torch.dtype) -> bool:
    """True for 16-bit inputs, for which faster functions are accurate enough (`emit`)."""
    return dtype.itemsize == 2


@derived
def _prologue(spec: Spec) -> tuple[Source, str, list[Expr]] | None:
    """The kernel before a spec's scan: its source, its name, its outputs; None where there is none."""
    from dsf.kernels.triton.pointwise.prologue_ops import PROLOGUES
    from dsf.triton.print_prologue import emit_prologue

    found = parts(_plain(spec))
    if not found.made:
        return None
    source, prologue = emit_prologue(_plain(spec), found)
    name = name_of(spec, source, prologue)
    PROLOGUES[name] = replace(prologue, functions=source.module())
    return source, name, [x for x, _ in found.given]


def _make(spec: Spec, tensors: Mapping[str, Tensor]) -> dict[tuple[str, int | None], Tensor]:
    """Outputs of the kernel before the scan, by name and micro-step."""
    found = _prologue(spec)
    if found is None:
        return {}
    from dsf.kernels.triton.pointwise.prologue_ops import PROLOGUES, scan_prologue

    _, name, made = found
    operands = [tensors[a.role] for a in PROLOGUES[name].inputs]
    return dict(zip([x.attrs for x in made], scan_prologue(operands, name), strict=True))


@derived
def _hole(spec: Spec, tokens: str = "", rough: bool = False) -> str:
    """The name of a spec's holes in the kernels' registry."""
    from dsf.kernels.triton.scan.launches import HOLES, Hole, Operand

    source = source_of(spec, tokens, rough)
    operands = tuple(Operand(o.time, KEY in o.axes, VALUE in o.axes, o.name == INITIAL) for o in source.operands)
    fades = rough and spec.rule is None  # not for a quotient, which may be one of two nearly vanished sums
    light = sum(bool(x.args) for x in _nodes(spec)) <= LIGHT
    before = spec.system.read == "before"
    flags = source.sums, source.separable, source.special, source.keyed
    known = operands, before, light, *flags, fades
    name = name_of(spec, source, known)
    HOLES[name] = Hole(source.module(), *known)
    return name


def prologue_names(spec: Spec) -> list[str]:
    """The name of the kernel before a spec's scan, if it has one, which this call prints and registers."""
    found = _prologue(spec) if _refusal(spec) is None else None
    return [] if found is None else [found[1]]


def names(spec: Spec) -> list[str]:
    """Names of all scans of a spec, which this call prints and registers."""
    if _refusal(spec) is not None:
        return []
    return [_hole(spec, tokens, rough) for tokens in ("", "masked", *PACKED) for rough in (False, True)]


def packs(spec: Spec) -> bool:
    """True where packed sequences are scanned in place; a running maximum would have to start again with each."""
    return not mixes(spec) and (not spec.is_stabilised or spec.rule is None)


def fused_scan(
    spec: Spec, bound: Bound, timed: Mapping[str, Tensor], state: Tensor | None, valid: Tensor | None,
    bounds: list[int] | Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [B, T, H, P] in the inputs' dtype and the final state [B, H, N, columns].

    timed: the per-token inputs (or a repacking of them); valid: [B, T] bool, False for padding tokens after a sequence.
    bounds: boundaries of packed sequences (B = 1), each of which has a state; a tensor where the host does not know
    them.
    """
    from dsf.kernels.triton.scan.operator import scan as operator

    if channels.takes(spec, bound.sizes):
        y, final = fused_scan(*channels.moved(spec, bound, timed, state), valid, bounds)
        return y.transpose(2, 3), channels.turned(final)
    tokens = "" if valid is None else "masked"
    tensors = {**bound.tensors, **timed}
    pairs = None
    if spec.rule is not None:
        pairs = gpu_ratio.prepare(spec, bound, timed, state, valid)
        state = pairs.state
        tensors |= pairs.tensors
    if valid is not None:
        tensors[VALID] = valid.to(bound.dtype).unsqueeze(2)
    ends = filled = kept = None
    if bounds is not None:
        tokens = PACKED[state is not None]
        if isinstance(bounds, Tensor):
            tensors[STARTS], ends, filled = packing.hidden_marks(bounds, bound.sizes.tokens)
        else:
            tensors[STARTS], ends, filled = packing.marks(bounds, bound.device)
        kept = state
        if filled is not None:
            filled = filled[:, None, None, None]
            # Kernels neither read nor differentiate the states of sequences without tokens.
            state = None if state is None else torch.where(filled, state, 0.0)
        tensors |= {} if state is None else {INITIAL: state}
        state = None
    rough = _is_rough(bound.dtype)
    operands = _operands(spec, tensors, tokens, rough)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in [*operands, state])
    count = 0 if bounds is None else len(bounds) - 1
    y, final, _ = operator(operands, state, _hole(spec, tokens, rough), keep, pairs is not None, ends, count)
    if filled is not None:  # sequences without tokens keep their state
        final = torch.where(filled, final, torch.zeros_like(final) if kept is None else kept)
    return (y, final) if pairs is None else gpu_ratio.finish(spec, bound, timed, pairs, y, final)


def operands_and_hole(spec: Spec, bound: Bound) -> tuple[list[Tensor], str]:
    """Operands and name of the holes, for a system without quotient on sequences neither packed nor padded."""
    rough = _is_rough(bound.dtype)
    return _operands(spec, bound.tensors, "", rough), _hole(spec, "", rough)


def _operands(spec: Spec, tensors: Mapping[str, Tensor], tokens: str, rough: bool) -> list[Tensor]:
    made = _make(spec, tensors)
    chosen = source_of(spec, tokens, rough).operands
    return [made[key] if (key := (o.name, o.step)) in made else _take(tensors, *key) for o in chosen]


def _take(tensors: Mapping[str, Tensor], name: str, step: int | None) -> Tensor:
    """An input, or one micro-step of it."""
    return tensors[name] if step is None else tensors[name].select(2, step)
