"""`Plan`: what runs for one call, and why. Immutable; the second stage of the compiler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from dsf.call.bind import Sizes, check_even
from dsf.call.cost import CONVOLUTION, by_channel, cache_bytes, cache_shape, flops, io_bytes, state_bytes
from dsf.call.launches import Planned
from dsf.language.errors import FormError
from dsf.language.expr import VALUE
from dsf.language.invariant import invariant, is_invariant
from dsf.language.reads import apart
from dsf.language.spec import Spec
from dsf.torch.columns import columns, state_columns
from dsf.triton import choose as gpu
from dsf.triton import convolve as gpu_convolve
from dsf.triton import solve as gpu_solve
from dsf.triton.chunk import reads_together

if TYPE_CHECKING:
    from dsf.kernels.triton.schedule import Schedule

FORMS = ("naive", "recurrent", "scan", "chunk", "kernel")  # of every system with a finite state
BACKENDS = ("torch", "triton")
SHORT = 8  # tokens up to which the recurrent form is faster than chunks
LONG = 64  # tokens from which the convolution may be faster
ASKED, READS_APART = "form={!r} was asked for", "; C reads in "  # reasons of plans
CONVOLVED = "A, B and C do not change from token to token: the inputs are convolved with one impulse response"
CPU = torch.device("cpu")
IN_ONE_LAUNCH = "one token without gradients: the state is read and written once, in one launch"
MATRIX_CHUNK, SCAN_BLOCK = 64, 16  # tokens
SEGMENT_NUMBERS = 1 << 20  # of a segment's states (4 MiB): small against a sequence, large against a call's overhead
KEEP_NUMBERS = 1 << 23  # numbers of a sequence's states up to which segments keep them for the backward pass


@dataclass(frozen=True)
class Plan:
    """What runs for one recurrence on inputs of given sizes, and why.

    structure: the recurrence's row of the table in `make_plan`. forms: all that it has. form, backend, kernel: what
    runs. chunk: tokens of a chunk, block or segment; 0 where the form has none. state_shape: [B, H, N, columns]; of a
    KV cache [B, tokens kept, numbers a token]. state_bytes: bytes of the state of all B sequences. flops: additions and
    multiplications of one forward call. bytes: of all inputs, read once, and of y, written once. reason: why this runs.
    source: the printed kernels, or empty. one_step, scan: whether the decode kernel or the fused scan runs. turning:
    whether the scan computes turns itself. torch_alone: whether a convolution launches torch's kernels only. exchange:
    what ranks that share the tokens send each other, or empty. call: what `schedules` needs, on the Triton backend.
    """

    recurrence: str
    structure: str
    forms: tuple[str, ...]
    form: str
    backend: str
    kernel: str
    chunk: int
    state_shape: tuple[int, ...]
    state_bytes: int
    flops: int
    bytes: int
    reason: str
    source: str = ""
    one_step: bool = False
    scan: bool = False
    turning: bool = False
    torch_alone: bool = False
    exchange: str = ""
    call: Planned | None = field(default=None, repr=False, compare=False)

    def schedules(self, gradients: bool = False) -> tuple[Schedule, ...]:
        """Allocations, torch operations and kernel launches of the call: one printable schedule for each operator.

        gradients: whether the call keeps what a backward pass needs; that pass is then listed, too. Empty for the torch
        backend, decode steps, reverse and parallel. For a GPU that this machine lacks: as on an H200.
        """
        return () if self.call is None else self.call.schedules(gradients)

    def __str__(self) -> str:
        rows = [
            ("structure", self.structure),
            ("forms", ", ".join(self.forms)),
            (
                "chosen",
                f"{self.form} on {self.backend}: {self.kernel}" + (f", {self.chunk} tokens" if self.chunk else ""),
            ),
            ("why", self.reason),
            ("state", f"{list(self.state_shape)}, {self.state_bytes:,} bytes"),
            ("work", f"{self.flops:,} flops, {self.bytes:,} bytes in and out"),
        ]
        if self.call is not None:
            kernels = Counter(x.kernel.__name__ for made in self.schedules() for x in made.launches)
            text = ", ".join(name if count == 1 else f"{name} x {count}" for name, count in kernels.items())
            rows.append(("launches", text))
        if self.exchange:
            rows.append(("ranks", self.exchange))
        return f"{self.recurrence}\n" + "\n".join(f"  {name:<10}{text}" for name, text in rows)


def forms_of(spec: Spec) -> tuple[str, ...]:
    """The forms of a recurrence. Attention has no scan, as the states that a scan combines would grow with T."""
    if spec.is_attention:
        return tuple(f for f in FORMS if f != "scan")
    return (*FORMS, CONVOLUTION) if is_invariant(spec) else FORMS


def make_plan(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, backend: str, device: torch.device = CPU,
    grad: bool = False, transformed: bool = False,
) -> Plan:  # fmt: skip
    """Choose form, backend and kernel. grad: whether gradients are needed. transformed: whether the call is inside
    torch.func or a forward-mode derivative, which custom operators and autograd functions do not support.

    The first matching row decides. An explicit `form` or `backend` is used, or refused with an error:

    | structure | up to 8 tokens | longer |
    |---|---|---|
    | exponential features, A = I or a turn, a quotient | chunk: torch's fused attention | the same |
    | other exponential features; any system with a window | chunk: blocks of queries | the same |
    | elementwise (Hadamard, vector, B that does not factor) | recurrent | chunk: segments of the scan |
    | value-diagonal decay | recurrent | chunk of 64: masked matrix products, decays on the channels |
    | identity, constant, scalar, key-diagonal decay | recurrent | chunk of 64: masked matrix products |
    | any decay + corrections | recurrent | chunk of 64: WY / UT transform |
    | a readout that is a solve | recurrent: a Cholesky factor a token | chunk: conjugate gradients on chunks |
    | a sum of gated readouts in C | recurrent | the row of its system, once for each readout |
    | turns whose decay differs within a pair | recurrent | chunk of 64: scan of 2 x 2 blocks (N x N with corrections) |

    Turns that a change of variables (a gauge) removes, previous values and Pair inputs are computed before the form
    runs, except by the decode step. The row is then that of the plain system that remains (Spec.inner). torch computes
    them; kernels compute the turns of inputs of the chunk kernels (dsf.call.turned).

    On CUDA tensors the triton backend runs: the chunk form of identity, constant, scalar and key-diagonal decays,
    alone, with a delta rule or with a rank-one correction; the recurrent, scan and chunk forms of elementwise systems
    and value-diagonal decays, and of tokens that mix a channel's entries (one fused scan); exponential features with a
    bias, a window or another quotient; one token of any finite state without gradients (the decode step). Everything
    else, and everything on a CPU, runs on torch.

    Raises FormError for a form that the structure does not have, or a backend that does not exist or cannot run this;
    InputError for an odd N where key entries are taken in pairs.
    """
    check_even(spec, sizes.keys)
    if form == CONVOLUTION:
        return _of_convolution(spec, sizes, dtype, form, backend, device, transformed)
    wanted = gpu.wanted(backend, device)
    if form == "auto" and backend != "triton" and not transformed and sizes.tokens >= LONG and is_invariant(spec):
        plain = wanted and not spec.is_framed
        by_kernels = plain and _refusal(spec, sizes, dtype, form, backend, device, grad, transformed) is None
        if _convolves(spec, sizes, by_kernels):
            return _of_convolution(spec, sizes, dtype, form, backend, device, transformed)
    if wanted and spec.has_still_keys and dtype.itemsize == 2 and sizes.tokens > 1:
        dtype = torch.float32  # as dsf.call.bind.unrounded widens the inputs
    if spec.system.solve is not None:
        return _of_solve(spec, sizes, dtype, form, backend, device, grad, transformed)
    if spec.is_framed:
        return _of_frame(spec, sizes, dtype, form, backend, device, grad, transformed)
    if apart(spec):
        plan = make_plan(apart(spec)[0], sizes, dtype, form, backend, device, grad, transformed)
        if reads_apart(spec, plan):
            return _of_reads(spec, sizes, dtype, plan)
    forms = forms_of(spec)
    if form not in ("auto", *FORMS):
        raise FormError(f"{spec.name}: there is no form {form!r}; forms are {', '.join(forms)} and auto")
    if form not in ("auto", *forms):
        raise FormError(f"{spec.name}: {spec.structure} has no {form} form; it has {', '.join(forms)}")
    if backend not in ("auto", *BACKENDS):
        raise FormError(f"{spec.name}: there is no backend {backend!r}; backends are {', '.join(BACKENDS)} and auto")
    written_out = transformed and not spec.is_plain_softmax  # torch's attention supports these
    if written_out and form in ("scan", "chunk"):
        raise FormError(
            f"{spec.name}: the {form} form does not go through torch.func (vmap, grad, jvp, ...) or forward-mode "
            "derivatives; the naive, recurrent and kernel forms do, and form='auto' takes the recurrent one there"
        )
    refused = _refusal(spec, sizes, dtype, form, backend, device, grad, transformed)
    on_gpu = refused is None
    one_step = on_gpu and gpu.steps(spec, sizes, dtype, form, grad)
    scan = on_gpu and gpu.scans(spec, sizes, dtype, form)
    if form != "auto":
        chosen, reason = form, ASKED.format(form)
    elif written_out:
        chosen, reason = "recurrent", "torch.func and forward-mode derivatives go through plain operations alone"
    elif one_step:
        chosen, reason = "recurrent", IN_ONE_LAUNCH
    elif on_gpu:
        chosen, reason = _choose(spec, replace(sizes, tokens=max(sizes.tokens, SHORT + 1)))
        if scan and not spec.is_elementwise:
            reason = gpu.why_scanned(spec)
    else:
        chosen, reason = _choose(spec, sizes)
    if refused:
        reason += f"; not on triton: {refused}"
    if on_gpu:
        kernel, chunk = gpu.kernel_of(spec, sizes, dtype, device, one_step, scan)
    else:
        kernel, chunk = _kernel(spec, sizes, chosen)
    layout = columns(spec, sizes.p)
    shape: tuple[int, ...] = (sizes.batch, sizes.heads, sizes.n, layout.total)
    held = state_bytes(shape, dtype)
    if spec.is_attention:
        shape, held = cache_shape(spec, sizes), cache_bytes(spec, sizes, dtype)
    return Plan(
        spec.name, spec.structure, forms, chosen, "triton" if on_gpu else "torch", kernel, chunk, shape,
        held, flops(spec, sizes, chosen, chunk), io_bytes(spec, sizes, dtype), reason,
        gpu.source(spec, dtype, one_step, scan) if on_gpu else "", one_step, scan,
    )  # fmt: skip


def _convolves(spec: Spec, sizes: Sizes, by_kernels: bool) -> bool:
    """True where the convolution is the fastest form (benchmarks/lti.py) of a time-invariant system on many tokens.

    It costs about as much as a scan of eight state entries, and its set-up as much as some dozens of tokens. Chunks of
    matrix products are faster than a scan; transitions that turn or mix entries are slower. by_kernels: whether other
    forms would run on GPU kernels, whose scan of 32 entries and whose chunks of any size are faster than an FFT.
    """
    if by_kernels:
        return spec.is_elementwise and sizes.n >= 64
    least = 1 if spec.turns or spec.rank else (8 if spec.is_elementwise else 32)
    return sizes.n >= least


def _of_convolution(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, backend: str, device: torch.device, transformed: bool
) -> Plan:
    """The plan of the convolution form. Raises FormError where the spec or the backend has none."""
    if isinstance(found := invariant(spec), str):
        raise FormError(
            f"{spec.name}: {spec.structure} has no convolution form, {found}; it has {', '.join(forms_of(spec))}"
        )
    if backend not in ("auto", "torch"):
        made = f"backend={backend!r} was asked for, but" if backend in BACKENDS else f"there is no backend {backend!r};"
        raise FormError(f"{spec.name}: {made} the convolution form runs on torch, whose FFT it is")
    shape = (sizes.batch, sizes.heads, sizes.n, state_columns(spec, sizes.n, sizes.keys, sizes.p))
    alone = backend == "torch"
    kernel = gpu_convolve.kernel_of(spec, sizes, dtype, device, transformed or alone)
    return Plan(
        spec.name, spec.structure, forms_of(spec), CONVOLUTION, "torch", kernel, 0, shape, state_bytes(shape, dtype),
        flops(spec, sizes, CONVOLUTION, 0), io_bytes(spec, sizes, dtype),
        ASKED.format(form) if form == CONVOLUTION else CONVOLVED, torch_alone=alone,
    )  # fmt: skip


def _of_frame(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, backend: str, device: torch.device, grad: bool,
    transformed: bool,
) -> Plan:  # fmt: skip
    """The plan of a declaration with turns, previous values or Pairs: the decode kernel's, or its plain system's."""
    assert spec.frame is not None
    how = (backend, device, grad, transformed)
    able = gpu.wanted(backend, device) and sizes.tokens == 1 and not transformed and gpu.absence(device) is None
    if able and gpu.steps(spec, sizes, dtype, form, grad):
        plan = make_plan(spec.inner, sizes, dtype, "recurrent", "torch", device, grad)
        plan = replace(
            plan, backend="triton", kernel=gpu.kernel_of(spec, sizes, dtype, device, True)[0], one_step=True,
            source=gpu.source(spec, dtype, True), reason=IN_ONE_LAUNCH if form == "auto" else ASKED.format(form),
        )  # fmt: skip
    else:
        turning = None if transformed else gpu.turning_in_scan(spec, sizes, dtype, form, backend, device)
        plan = replace(make_plan(turning or spec.inner, sizes, dtype, form, *how), turning=turning is not None)
        other = None if turning else gpu.frame_in_chunks(spec, plan.backend)
        if other is not None and plan.form not in ("naive", "recurrent"):
            reason, plan = plan.reason, make_plan(other.spec, sizes, dtype, plan.form, *how)
            plan = replace(plan, reason=reason if reads_apart(other.spec, plan) else reason.split(READS_APART)[0])
        turned = turning is None and spec.frame.angles is not None
        made = ["previous values"] * bool(spec.frame.leaves) + ["turned inputs"] * turned
        tell = bool(made) and "was asked for" not in plan.reason
        plan = replace(plan, reason=plan.reason + f"; {' and '.join(made)} are made first" * tell)
    shape = (*plan.state_shape[:-1], state_columns(spec, sizes.n, sizes.keys, sizes.p))
    return replace(
        plan, structure=spec.structure, state_shape=shape, bytes=io_bytes(spec, sizes, dtype),
        state_bytes=state_bytes(shape, dtype),
    )  # fmt: skip


def _of_solve(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, backend: str, device: torch.device, grad: bool,
    transformed: bool,
) -> Plan:  # fmt: skip
    """The plan of a recurrence whose readout is a solve, from that of the system without the solve."""
    assert spec.system.solve is not None
    short = form == "auto" and backend != "triton" and (transformed or sizes.tokens <= SHORT)
    chosen = ("recurrent" if short else "chunk") if form == "auto" else form
    alone = chosen in ("naive", "recurrent", "kernel")
    if alone and backend == "triton":
        raise FormError(
            f"{spec.name}: backend='triton' was asked for, but the {form} form solves token by token, on torch"
        )
    plain = replace(spec, system=replace(spec.system, solve=None))
    squares = replace(sizes, p=sizes.n)  # of the system of H
    if not alone and _refusal(plain, squares, torch.float32, chosen, backend, device, grad, transformed) is not None:
        backend = "torch"
    plan = make_plan(plain, sizes, dtype, chosen, "torch" if alone else backend, device, grad, transformed)
    steps = spec.system.solve.steps
    each = "a Cholesky factor a token"
    alone_kernels = {"naive": "float64 oracle", "recurrent": each, "kernel": f"{each}, {plan.kernel}"}
    kernel = alone_kernels.get(chosen, f"conjugate gradients, {steps} steps in float32, on {plan.kernel}")
    if not alone and plan.backend == "triton" and gpu_solve.takes(spec, sizes, dtype, device):
        kernel = f"conjugate gradients in one launch, at most {steps} steps; {plan.kernel}"
    shape = (*plan.state_shape[:-1], plan.state_shape[-1] + sizes.n)
    reason = "the readout is solved for token by token" if alone else "all tokens' readouts are solved for at once"
    products = sizes.n // 3 if alone else 4 * (steps + 1)  # of H and a vector
    return replace(
        plan, structure=spec.structure, kernel=kernel, state_shape=shape,
        state_bytes=state_bytes(shape, dtype),
        flops=plan.flops + sizes.batch * sizes.tokens * sizes.heads * products * sizes.n**2,
        reason=reason if form == "auto" else plan.reason,
    )  # fmt: skip


def reads_apart(spec: Spec, plan: Plan) -> bool:
    """Whether a call with this plan runs once for each of several readouts in C."""
    if not apart(spec) or plan.one_step or plan.scan or (plan.backend == "triton" and reads_together(spec)):
        return False
    if spec.acts_on_values:
        return plan.form != "naive"
    return plan.form == "chunk" or (plan.form == "scan" and spec.rank > 0)


def _of_reads(spec: Spec, sizes: Sizes, dtype: torch.dtype, plan: Plan) -> Plan:
    """The plan of a system with several readouts, each of which has `plan`."""
    count = len(apart(spec))
    reason = f"{plan.reason}{READS_APART}{count} ways, each a run of its own"
    return replace(plan, flops=count * plan.flops, bytes=io_bytes(spec, sizes, dtype), reason=reason)


def _refusal(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, form: str, backend: str, device: torch.device, grad: bool,
    transformed: bool,
) -> str | None:  # fmt: skip
    """Why the call does not run on the Triton backend, empty where that is not wanted; None where it does run."""
    if not gpu.wanted(backend, device):
        return ""
    refused = gpu.refusal(spec, sizes, dtype, form, device, grad)
    if transformed:
        refused = "its kernels do not go through torch.func or forward-mode derivatives"
    if refused is not None and backend == "triton":
        raise FormError(f"{spec.name}: backend='triton' was asked for, but {refused}")
    return refused


def _choose(spec: Spec, sizes: Sizes) -> tuple[str, str]:
    if spec.is_plain_softmax:
        return (
            "chunk",
            "exponential features have no finite state: the kernel trick is torch's fused attention",
        )
    if spec.is_attention:
        kept = "exponential features have no finite state" if spec.is_softmax else "what leaves a window is forgotten"
        return "chunk", f"{kept}: keys and values are kept, and blocks of queries read the keys that they see"
    if sizes.tokens <= SHORT:
        return (
            "recurrent",
            f"{sizes.tokens} token{'s are' if sizes.tokens > 1 else ' is'} walked faster than chunks are set up",
        )
    if spec.mixes_pairs:
        return (
            "chunk",
            "a decay that differs within a turned pair, or a B or C with a number an entry and channel: no gauge, "
            "so the pairs' matrices are scanned",
        )
    if spec.is_elementwise:
        return (
            "chunk",
            "A acts elementwise: segments of the scan, with A and B computed when a segment needs them",
        )
    if spec.rank:
        return (
            "chunk",
            "rank-one corrections: a triangular solve a chunk turns their product into matrix products",
        )
    return (
        "chunk",
        f"{spec.decay_kind} decay: a chunk is a masked matrix product, states are carried between chunks",
    )


def _kernel(spec: Spec, sizes: Sizes, form: str) -> tuple[str, int]:
    """Name of the routine and its chunk length in tokens."""
    if form == "naive":
        return "float64 oracle", 0
    if form == "recurrent":
        return "one structured step a token", 0
    if form == "kernel":
        return "kernel matrix", 0
    if spec.is_attention:
        return ("scaled_dot_product_attention" if spec.is_plain_softmax else "blocks of queries"), 0
    if spec.mixes_pairs:
        return f"scan of {'N x N' if spec.rank else '2 x 2'} blocks", 0 if form == "scan" else MATRIX_CHUNK
    if form == "scan":
        return ("associative scan of dense blocks", SCAN_BLOCK) if spec.rank else ("associative scan", 0)
    if spec.is_elementwise:
        numbers = sizes.batch * sizes.heads * sizes.n * sizes.p
        return "segments of the scan", max(16, min(512, SEGMENT_NUMBERS // numbers))
    if spec.rank:
        of = " of the transposed state" if spec.acts_on_values else " of every channel" * by_channel(spec)
        return f"WY chunks{of}", MATRIX_CHUNK
    return ("value-decay chunks" if VALUE in spec.decay_axes else "decay chunks"), MATRIX_CHUNK
