"""Every kernel through Triton's own front end, which needs no GPU.

The interpreter runs kernels as plain Python. What Triton alone refuses, such as a name that is a tensor here and a
struct there, fails here, before it meets a user's GPU. Calls are made on tensors without memory, as for an H200, and
what their schedules launch is made into Triton's intermediate code (TTIR); nothing is run.
"""

import ast
import importlib
import importlib.util
import pkgutil
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import matrix_family as matrix
import pytest
import scan_family as scans
import step_family as framed
import torch
from fourier_family import OWN
from interpreted import INTERPRETED
from layer_family import (
    attention_step,
    convolution,
    convolution_over_ranks,
    convolution_step,
    early,
    entropies,
    mixing,
    norms,
    products,
    pull,
    readouts,
    tensor,
)
from test_solve import two_squares

import dsf
from dsf import (
    I,
    Key,
    Packing,
    Scalar,
    System,
    Value,
    exp,
    exp_features,
    expm1,
    log1p,
    mixers,
    outer,
    ratio,
    sigmoid,
    tanh,
    turn,
)  # fmt: skip
from dsf.mixers import get
from dsf.mixers.mamba3 import mamba3_biased
from dsf.parallel import Simulated
from dsf.triton.choose import elsewhere

pytest.importorskip("triton")
import triton

from dsf.kernels import triton as kernels
from dsf.kernels.triton import launcher
from dsf.kernels.triton.impulse import impulse_response, impulse_response_backward
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import Scheduled, noted

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter compiles nothing")
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = kernels.__name__
KNOWN = {}  # kernels that were compiled, by what they were compiled for: what they are made of


# Calls


def inputs(recurrence, sizes, groups=None, step=False):
    """groups: heads of q, k and the like."""
    found = {}
    for i in recurrence.spec.inputs:
        shape = [sizes.get(a, i.kind.steps or 1) for a in i.kind.layout()]
        if i.kind.time and i.kind.axes == {"key"}:
            shape[-2] = groups or sizes["H"]
        found[i.name] = tensor(*(shape[:1] + shape[2:] if step and i.kind.time else shape))
    return found


def call(recurrence, grad=True, packed=False, state=False, groups=None, parallel=None, dtype=None, **sizes):
    """A call, and where `grad` its gradients; state: goes in and comes out."""
    sizes = {"B": 1 if packed else 2, "T": 2048, "H": 4, "N": 64, "P": 64} | sizes
    sizes["N/2"], tokens = sizes["N"] // 2, sizes["T"]
    given, how = inputs(recurrence, sizes, groups), {} if parallel is None else {"parallel": parallel}
    if dtype is not None:
        given = {name: torch.empty_like(x, dtype=dtype, requires_grad=True) for name, x in given.items()}
    leaves = list(given.values())
    if packed:
        how["cu_seqlens"] = Packing((0, tokens // 3, tokens // 2, tokens))
    if state:
        shape = recurrence.state_shape(sizes["N"] if recurrence.spec.has_key else 1, sizes["P"])
        start = torch.empty(3 if packed else sizes["B"], sizes["H"], *shape, device="meta", requires_grad=True)
        how |= {"initial_state": start, "return_state": True}
        leaves.append(start)
    with torch.set_grad_enabled(grad):
        y = recurrence(**given, backend="triton", **how)
    if grad:
        pull(y if state else [y], leaves)


def every_way(recurrence, **sizes):
    """With gradients and without, packed with states, token by token."""
    call(recurrence, **sizes)
    call(recurrence, grad=False, **sizes)
    call(recurrence, packed=True, state=True, **sizes)
    step(recurrence)


@torch.no_grad()
def step(recurrence):
    given = inputs(recurrence, {"B": 2, "H": 4, "N": 64, "N/2": 32, "P": 64}, step=True)
    shape = recurrence.state_shape(64 if recurrence.spec.has_key else 1, 64)
    recurrence.step(torch.empty(2, 4, *shape, device="meta"), **given, backend="triton")


def fourier():
    """Of channels and of entries, with and without turns, with a gate, before the update."""
    sizes = {"B": 2, "T": 300, "H": 4, "N": 40, "N/2": 20, "P": 3}
    for r in (*OWN, mixers.s5, mixers.h3):
        given = [torch.empty([sizes[a] for a in i.kind.layout()], device="meta") for i in r.spec.inputs]
        state = torch.empty(r.state_shape(40, 3), device="meta").expand(2, 4, -1, -1)
        r(*given, initial_state=state, return_state=True, form="convolution")
        pull([r(*(x.requires_grad_() for x in given), form="convolution")], given)


def filters():
    """Convolutions with given filters, longer and shorter than the tokens."""
    for length in (300, 50):
        leaves = [tensor(2, 300, 4, 3), tensor(4, length, 3), tensor(2, 300, 4, 3), tensor(4, 3)]
        pull([dsf.long_convolution(*leaves)], leaves)
    pull([dsf.long_convolution(*leaves[:2])], leaves[:2])


def impulses():
    """Of pairs that turn, and of entries."""
    for turned in (True, False):
        vectors = [torch.empty(2, 40, p, dtype=torch.float64, device="meta").expand(2, 40, 3) for p in (1, 3)]
        rates = torch.empty(2, 20 if turned else 40, 3, dtype=torch.float64, device="meta")
        given = (*vectors, rates, rates if turned else None, 300, 32)
        impulse_response(*given)
        impulse_response_backward(torch.empty(2, 3, 300, device="meta"), *given)


def probe():
    """What finds out, on a GPU, whether Triton launches as it did."""

    def host(x):
        launch(launcher._probe, (2, 2), x, launcher._Factor(x, 5), 7, None, SCALE=2)
        return x.new_empty(1)

    Scheduled(host).schedule(tensor(4, grad=False))


# Families


class Family(NamedTuple):
    """Calls by name, and files of kernels/triton, of which every function is compiled in them."""

    calls: dict
    files: tuple


@dsf.recurrence
def curved(x: Value, a: Value, b: Value) -> System:
    """Functions that no other declaration here has."""
    return System(A=tanh(a), B=expm1(b) * x, C=log1p(exp(b)))


def of(recurrence, how=call, **sizes):
    """A call of a recurrence, or of one of the zoo by its name."""
    return partial(how, get(recurrence).recurrence if isinstance(recurrence, str) else recurrence, **sizes)


def every(*recurrences):
    return {r.name: of(r, every_way) for r in recurrences}


@dsf.recurrence
def turned(q: Key, k: Key, v: Value, f: Scalar, t: Scalar) -> System:
    """Attention whose queries and keys are float32 beside bfloat16 values."""
    return System(A=sigmoid(f) * turn(t), B=exp_features(k) * v, C=exp_features(q), normalize=ratio)


@dsf.recurrence
def erasing_and_turning(q: Key, k: Key, v: Value, f: Scalar, b: Scalar, t: Scalar) -> System:
    """All pairs by one angle."""
    return System(A=sigmoid(f) * (I - sigmoid(b) * outer(k, k)) @ turn(t), B=sigmoid(b) * k * v, C=q)


FEW = {"T": 128, "N": 16}  # no segments, the summaries of which take as long to compile as all the rest
RANKS = {"T": 3 * 2048, "parallel": Simulated(3)}
FAMILIES = {
    "a decay for a head": Family(
        every(matrix.swinging, matrix.forgetful_delta, matrix.early_delta, matrix.late_ratio, get("mlstm").recurrence)
        | {
            "driven_ratio": of(matrix.driven_ratio),
            "turning": of(matrix.turning),
            "erasing_ratio": of(matrix.erasing_ratio),
            "momentary_ratio": of(matrix.momentary_ratio),
            "gated": of(matrix.gated),
            "single_steps": of(matrix.single_steps),
            "mamba3_mimo": of("mamba3_mimo", every_way, **FEW),
            "twice_erased": of(matrix.twice_erased, **FEW),
            "deltanet, fewer channels than keys": of("deltanet", N=128, P=32),
            "forgetful_delta, wide": of(matrix.forgetful_delta, N=128, P=128),
            "swinging, long": of(matrix.swinging, B=1, H=1, T=40_000),
            "deltanet, long": of("deltanet", B=1, H=1, T=40_000),
            "ssd, shared keys": of("ssd", B=16, H=64, groups=1, N=128),
            "ssd, shared keys, packed": of("ssd", H=8, groups=2, packed=True),
            "ssd, ranks": of("ssd", **RANKS),
            "gated_deltanet, ranks": of("gated_deltanet", **RANKS),
            "mlstm, ranks": of("mlstm", **RANKS),
        },
        (
            "chunk.gradient", "chunk.gradient_parts", "chunk.normaliser", "chunk.reverse_walk", "chunk.scalars",
            "chunk.shared_gradient", "chunk.states", "chunk.sums", "chunk.tiles", "chunk.transform",
            "chunk.write_gradient", "fold", "packed", "structs",
        ),
    ),
    "a decay for a key": Family(
        every(matrix.fading_rows, matrix.fading_delta, matrix.apart_delta)
        | {"late_gate": of(matrix.late_gate), "kda, ranks": of("kda", **RANKS), "late_ratio": of(matrix.late_ratio)}
        | {"thrice_erased": of(matrix.thrice_erased, **FEW), "given_channels": of(matrix.given_channels, T=128)},
        (
            "chunk.across", "chunk.forward_walk", "chunk.key_gradient", "chunk.keywise", "chunk.walk",
        ),
    ),
    "turned vectors": Family(
        {
            "mamba3_biased": of(mamba3_biased, every_way, **FEW),
            "mamba3, long": of("mamba3", B=1, H=1, T=40_000),
            "erasing and turning": of(erasing_and_turning, every_way, **FEW),
        },
        ("chunk.cross", "turn.kernel"),
    ),
    "solves": Family(
        {
            "mesanet": of("mesanet", **FEW),
            "mesanet, packed": of("mesanet", packed=True, state=True, **FEW),
            "two_squares": of(two_squares, state=True, **FEW),
        },
        ("solve.kernel",),
    ),
    "rank-one rows": Family(
        every(matrix.leaning_rows, matrix.skipping_rows)
        | {
            "moving_rows": of(matrix.moving_rows),
            "sure_rows": of(matrix.sure_rows),
            "rwkv7, ranks": of("rwkv7", **RANKS),
            "twice_moved": of(matrix.twice_moved),
        },
        ("chunk.halves", "chunk.rank_one", "chunk.rank_one_gradient"),
    ),
    "scans by entry": Family(
        {
            "aligned": of(scans.aligned, **FEW),
            "channels, packed": of(scans.channels, packed=True, state=True, **FEW),
            "swinging": of(scans.swinging, **FEW),
            "twice": of(scans.twice, **FEW),
            "twice, a token": of(scans.twice, step),
            "crowded": of(scans.crowded, **FEW),
            "s6, ranks": of("s6", **RANKS),
        },
        ("lanes", "scan.entries", "scan.forward", "scan.rows"),
    ),
    "scans": Family(
        {
            "leaky_peak": of(scans.leaky_peak, every_way),
            "leaky_peak, wide": of(scans.leaky_peak, B=16, H=1, P=1024),
            "leaky_peak, packed, wide": of(scans.leaky_peak, packed=True, state=True, H=1, P=1 << 14),
            "before": of(scans.before, **FEW),
            "crowded, packed": of(scans.crowded, packed=True, state=True, N=16),
            "crowded, packed, long": of(scans.crowded, packed=True, state=True, T=1 << 16, N=16, P=4096),
            "rwkv4": of("rwkv4"),
            "bounded": of(scans.bounded, **FEW),
            "leaning_channels": of(scans.leaning_channels, **FEW),
            "erasing_while_turning": of(scans.erasing_while_turning, every_way, **FEW),
            "s6_complex": of("s6_complex", H=64, N=16, P=1),
        },
        ("scan.adjoint", "scan.maximum", "scan.mixing", "scan.summaries", "scan.tiles", "scan.walk"),
    ),
    "what printed code calls": Family(
        {
            "curved": of(curved),
            "leaky_peak": of(scans.leaky_peak),
            "aligned": of(scans.aligned, N=16),
            "late_swing": of(scans.late_swing, **FEW),
            "late_swing, packed": of(scans.late_swing, packed=True, state=True, N=16),
            "rg_lru": of("rg_lru"),
            "modified_qlstm": of("modified_qlstm"),
            "efla": of("efla"),
            "driven_ratio": of(matrix.driven_ratio),
            "mlstm": of("mlstm"),
            "mlstm, a token": of("mlstm", step),
            "rwkv4, a token": of("rwkv4", step),
            "pairs, a token": of(framed.turned_twice, step),
            "previous values, a token": of(framed.remembering, step),
            "turns by float64": impulses,
            "readouts of layers": readouts,
        },
        ("functions", "pointwise.kernel", "tile"),
    ),
    "beside recurrences": Family(
        {
            "convolution": convolution,
            "convolution, packed": partial(convolution, torch.empty(4, dtype=torch.int32, device="meta")),
            "convolution, a token": convolution_step,
            "convolution, ranks": convolution_over_ranks,
            "entropies": entropies,
            "fourier": fourier,
            "fourier, filters": filters,
            "impulse responses": impulses,
            "mixing": mixing,
            "norms": norms,
            "probe": probe,
            "products": products,
            "products, early": early(products),
            "convolution, a token, early": early(convolution_step),
            "mlstm, a token, early": early(of("mlstm", step)),
            "attention, a token": attention_step,
            "attention, a token, early": early(attention_step),
            "alibi": of("alibi"),
            "alibi, float32": of("alibi", dtype=torch.float32),
            "sink_attention": of("sink_attention"),
            "sliding_window_attention": of("sliding_window_attention"),
            "fox, ranks": of("fox", **RANKS),
            "sliding_window_attention, ranks": of("sliding_window_attention", **RANKS),
            "turned attention": of(turned),
        },
        (
            "attention.kernel", "attention.step", "attention.sums", "attention.tiles", "double", "early",
            "fourier.numbers", "fourier.rows", "fourier.spectra", "fourier.states", "impulse",
            "launcher", "layer.convolution", "layer.convolution_gradient", "layer.depthwise", "layer.entropy",
            "layer.mixture", "layer.norm", "layer.product", "layer.reversal", "layer.rotary", "layer.windows", "ranks",
        ),
    ),
}  # fmt: skip


# Kernels


@cache
def front_end():
    """benchmarks/front_end.py."""
    spec = importlib.util.spec_from_file_location("front_end", ROOT / "benchmarks" / "front_end.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FrontEnd()


def compiled(x):
    """The functions that a launch's kernel is made of."""
    asked = front_end().of(x)
    if asked.key not in KNOWN:
        found = {f"{x.kernel.fn.__module__}.{x.kernel.__name__}", *front_end().functions(asked)}
        KNOWN[asked.key] = {name.removeprefix(f"{PACKAGE}.") for name in found}
    return KNOWN[asked.key]


def functions():
    """Names of the functions that Triton compiles, by file of kernels/triton."""
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, f"{PACKAGE}."):
        known = vars(importlib.import_module(module.name)).values()
        mine = {x.__name__ for x in known if isinstance(x, triton.JITFunction) and x.fn.__module__ == module.name}
        if mine:
            file = module.name.removeprefix(f"{PACKAGE}.")
            found[file] = {f"{file}.{name}" for name in mine}
    return found


def reason(error):
    """What Triton says, of the innermost function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", FAMILIES)
def test_triton_takes_every_kernel(name):
    family, met, refused = FAMILIES[name], set(), {}
    for title, make in family.calls.items():
        with noted() as schedules, elsewhere():
            make()
        for x in (x for schedule in schedules for x in schedule.launches):
            try:
                met |= compiled(x)
            except Exception as error:
                refused.setdefault(f"{x.kernel.__name__}: {reason(error)}", set()).add(title)
    if refused:
        pytest.fail("\n".join(f"{'; '.join(sorted(titles))}: {why}" for why, titles in refused.items()))
    known = functions()
    missed = {function for file in family.files for function in known[file]} - met
    assert not missed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gates_of_other_types_go_through_triton_s_passes(dtype):
    """Scalars that are read in one type and written in another are where the passes of a release failed."""
    recurrence, seen = get("gated_deltanet").recurrence, set()
    drawn = inputs(recurrence, {"B": 2, "T": 200, "H": 2, "N": 64, "P": 64})
    given = {name: x.detach().to(dtype).requires_grad_() for name, x in drawn.items()}
    with noted() as schedules, elsewhere():
        pull([recurrence(**given, backend="triton")], list(given.values()))
    for x in (x for schedule in schedules for x in schedule.launches):
        asked = front_end().of(x)
        if x.kernel.fn.__name__ in ("prepare", "pointwise") and asked.key not in seen:
            assert front_end().laid_out(asked).verify()
            seen.add(asked.key)
    assert seen


def test_every_file_belongs_to_a_family():
    assert sorted(file for family in FAMILIES.values() for file in family.files) == sorted(functions())


def test_all_that_nobody_has_seen_is_compiled():
    given = {x.args[0] for family in FAMILIES.values() for x in family.calls.values() if isinstance(x, partial)}
    assert {*matrix.UNSEEN, *scans.UNSEEN} <= given


def test_no_kernel_asks_for_pythons_min_or_max():
    """Triton before 3.6 makes tensors even of constants that they are given."""
    asked = set()
    for path in (ROOT / "kernels" / "triton").rglob("*.py"):
        for f in (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)):
            if any("triton.jit" in ast.unparse(x) for x in f.decorator_list):
                names = {x.func.id for x in ast.walk(f) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}
                asked |= {(path.name, f.name)} if names & {"min", "max"} else set()
    assert not asked
