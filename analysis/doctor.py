"""The examination of `dsf doctor`: versions, devices, a test of each backend, and what runs where."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import torch

import dsf
from dsf.analysis.records import File, Number, Record, schema_field
from dsf.call import guard
from dsf.checking.compare import words_of
from dsf.checking.examples import Example
from dsf.checking.laws import LAWS
from dsf.checking.measure import KERNELS, TOLERANCE, Subject
from dsf.checking.ranges import ranges_of
from dsf.language.errors import FormError
from dsf.mixers import ZOO, get
from dsf.triton import choose, source

GIB = 1 << 30
CORE = ("dsf-zoo", "torch", "triton", "numpy", "einops", "pydantic")
EXTRAS = {
    "cli": ("typer", "rich"),
    "plots": ("matplotlib",),
    "convert": ("transformers", "accelerate"),
    "test": ("pytest", "hypothesis"),
    "others": ("liger-kernel", "flash-linear-attention", "mamba-ssm"),
}
# One of every family of kernels and torch forms: masked matrix products, decays by key, triangular systems, scans.
PROBES = ("ssd", "gla", "gated_deltanet", "rwkv7", "s6", "mingru")
INTERPRETED = PROBES[:3]  # scans take minutes in Triton's interpreter
LENGTHS = (70, 33)  # tokens: more than a chunk of 64, and a second call with other shapes
VARIABLES = {
    "DSF_VALIDATE": "holds every call to its ranges (dsf.validate)",
    "DSF_CACHE_DIR": "where generated source is kept",
    "XDG_CACHE_HOME": "where generated source is kept, in dsf/",
    "TRITON_INTERPRET": "1: Triton's kernels run in its interpreter, on CPU tensors, slowly",
    "TRITON_CACHE_DIR": "where Triton keeps compiled kernels",
    "TRITON_HOME": "where Triton keeps compiled kernels, in .triton/",
    "TORCHINDUCTOR_CACHE_DIR": "where torch.compile keeps compiled code",
    "TORCH_COMPILE_DISABLE": "1: torch.compile does nothing",
    "TORCHDYNAMO_DISABLE": "1: torch.compile does nothing",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are",
    "CUDA_LAUNCH_BLOCKING": "1: every launch waits for its kernel",
    "NVIDIA_TF32_OVERRIDE": "1: float32 products in TF32, 0: never",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: float32 products in TF32",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch takes GPU memory",
    "PYTORCH_ALLOC_CONF": "how torch takes GPU memory",
    "OMP_NUM_THREADS": "threads of torch on the CPU",
    "CC": "the C compiler that Triton's launchers are built with",
    "HF_HUB_OFFLINE": "1: transformers downloads nothing",
}
Status = Literal["works", "broken", "cannot run"]
WORKS: Status = "works"
BROKEN: Status = "broken"
REFUSED: Status = "cannot run"
Step = Callable[[str], None]


class Gpu(Record):
    """A GPU. memory_gib: in all; free_gib: of it, now."""

    device: str
    name: str
    capability: str
    memory_gib: float
    free_gib: float


class Probed(Record):
    """Result of one probe. probe: name of its mixer, or "all" where a backend cannot run at all.

    error: the largest relative error of outputs and gradients, float32 against the float64 oracle; allowed: its
    tolerance. why: the reason of a status other than "works".
    """

    backend: str
    device: str
    probe: str
    status: Status
    error: Number | None = None
    allowed: float | None = None
    seconds: float | None = None
    why: str = ""


class Cache(Record):
    """A folder of generated or compiled code."""

    of: str
    path: str
    writable: bool


class Variable(Record):
    """An environment variable that is set."""

    value: str
    meaning: str


class Choice(Record):
    """What the plan of a call says. refused: why the call does not run on triton."""

    form: str
    backend: str
    kernel: str
    refused: str


class Structure(Record):
    """A structure of A, the zoo's mixers that have it, and the plan of a call of 2,048 tokens by device."""

    structure: str
    mixers: list[str]
    on: dict[str, Choice]


class Examination(File):
    """All results of `dsf doctor`. ok: False when something that should work is broken. versions: None for a package
    that is not installed.
    """

    schema_: Literal["dsf.doctor/1"] = schema_field("dsf.doctor/1")
    ok: bool
    versions: dict[str, str | None]
    gpus: list[Gpu]
    backends: list[Probed]
    caches: list[Cache]
    environment: dict[str, Variable]
    runs: list[Structure]
    warnings: list[str]


def examine(calls: bool = True, step: Step = lambda _: None) -> Examination:
    """Examine this installation and this machine.

    calls: False omits the tests of backends (`backends` is then empty). step: called with each step's name.
    """
    environment, gpus = _environment(), _gpus()
    places = ["cpu", *(f"cuda:{i}" for i in range(len(gpus)))]
    backends = [x for place in places for x in _backends(place, step)] if calls else []
    step("what runs where")
    runs, caches, triton = _runs(places), _caches(), _import_triton()
    warnings = [*_warnings(gpus, caches, triton), *_refusals(runs)]
    return Examination(
        ok=triton in ("", "not installed") and not any(x.status == BROKEN for x in backends),
        versions=_versions(),
        gpus=gpus,
        backends=backends,
        caches=caches,
        environment=environment,
        runs=runs,
        warnings=warnings,
    )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "dsf": f"{dsf.__version__} ({Path(dsf.__file__).parent})",
        "torch build": f"CUDA {torch.version.cuda}" if torch.version.cuda else _rocm() or "CPU alone",
    }
    for name in [*CORE[1:], *(x for names in EXTRAS.values() for x in names)]:
        found[name] = _version(name)
    return found | {"ptxas": _assembler()}


def _assembler() -> str | None:
    """The release and place of the assembler that Triton's kernels get; None without Triton or NVIDIA's tools."""
    if _import_triton():
        return None
    from dsf.kernels.triton.assembler import choose_assembler, chosen

    choose_assembler()
    tool = chosen()
    return None if tool is None else f"{tool.version} ({tool.path})"


def _rocm() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            Gpu(
                device=f"cuda:{index}",
                name=about.name,
                capability=f"sm_{about.major}{about.minor}",
                memory_gib=round(total / GIB, 1),
                free_gib=round(free / GIB, 1),
            )
        )
    return found


def _backends(place: str, step: Step) -> list[Probed]:
    """A record for each probe on each backend of a device; a single one for a backend that cannot run there.

    Kernels' probes on a GPU run at the same time, since most of it goes into compiling; torch's do not, since it loads
    some of its libraries in a way that threads disturb.
    """
    records: list[Probed] = []
    for backend in ("torch", "triton"):
        names = INTERPRETED if backend == "triton" and place == "cpu" else PROBES
        step(f"{', '.join(names)} on {backend}, {place}")
        with ThreadPoolExecutor(1 if place == "cpu" or backend == "torch" else len(names)) as threads:
            found = list(threads.map(partial(_probe, backend=backend, place=place), names))
        same = all(x.status == REFUSED for x in found) and len({x.why for x in found}) == 1
        records += [found[0].model_copy(update={"probe": "all"})] if same else found
    return records


def _probe(name: str, backend: str, place: str) -> Probed:
    """Test the outputs, final states and gradients of a few calls."""
    begin = time.perf_counter()
    found = partial(Probed, backend=backend, device=place, probe=name)
    try:
        worst, at = _worst(name, backend, place)
    except FormError as error:  # the planner's message
        return found(status=REFUSED, why=str(error).partition("but ")[2] or str(error))
    except Exception as error:  # of compiler, driver or launcher: any exception means a broken backend
        return found(status=BROKEN, why=words_of(error), seconds=round(time.perf_counter() - begin, 2))
    allowed = TOLERANCE["float32"]
    found = partial(found, error=worst, allowed=allowed, seconds=round(time.perf_counter() - begin, 2))
    if worst <= allowed:
        return found(status=WORKS)
    return found(status=BROKEN, why=f"{at} is off by {worst:.1e}, allowed {allowed:g}")


def _worst(name: str, backend: str, place: str) -> tuple[float, str]:
    """The largest relative error of a probe's calls, and where it arose. Raises what planning and running raise."""
    recurrence = get(name).recurrence
    recurrence.plan(T=LENGTHS[0], N=6, P=2, backend=backend, device=place)
    form = KERNELS if backend == "triton" else "chunk"
    subject = Subject(recurrence, ranges_of(recurrence.spec), None, place, "torch")
    lengths = LENGTHS[1:] if place == "cpu" and backend == "triton" else LENGTHS  # the interpreter is slow
    worst, at = 0.0, ""
    for tokens in lengths:
        example = Example(1, tokens, 2, 6, 2, "float32", initial=True)
        for measure in LAWS["forms"].measure(subject, form, subject.supports(form, example)):
            if not measure.error <= worst:
                worst, at = measure.error, f"{measure.quantity}, {tokens} tokens"
    return worst, at


def _runs(places: list[str]) -> list[Structure]:
    """For each structure of the zoo, its mixers and what a call of 2,048 tokens runs on each device."""
    structures: dict[str, list[str]] = {}
    for entry in ZOO:
        structures.setdefault(entry.recurrence.spec.structure, []).append(entry.name)
    rows = []
    for structure, names in structures.items():
        chosen = {}
        for place in places:
            try:
                plan = get(names[0]).recurrence.plan(T=2048, H=16, device=place)
            except Exception as error:
                chosen[place] = Choice(form="nothing", backend="none", kernel="none", refused=words_of(error))
                continue
            refused = plan.reason.partition("not on triton: ")[2]
            chosen[place] = Choice(form=plan.form, backend=plan.backend, kernel=plan.kernel, refused=refused)
        rows.append(Structure(structure=structure, mixers=names, on=chosen))
    return rows


def _refusals(runs: list[Structure]) -> list[str]:
    """Devices on which no structure at all reaches the kernels, and why."""
    found = []
    for place in runs[0].on:
        chosen = [row.on[place] for row in runs]
        if place != "cpu" and not any(choice.backend == "triton" for choice in chosen):
            reasons = "; ".join(sorted({choice.refused for choice in chosen}))
            found.append(f"{place}: nothing runs on triton ({reasons}); the torch forms run there")
    return found


def _caches() -> list[Cache]:
    found = {"generated source": _source_folder(), "Triton": _triton_cache()}
    with contextlib.suppress(Exception):  # torch's internals, which change between releases
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        found["torch.compile"] = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    return [Cache(of=name, path=str(path), writable=is_writable(path)) for name, path in found.items()]


def _source_folder() -> Path:
    """The folder of printed source, without creating it."""
    chosen = os.environ.get("DSF_CACHE_DIR")
    return Path(chosen) if chosen else source.cache_directory()


def _triton_cache() -> Path:
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def is_writable(folder: Path) -> bool:
    """True when files can be written in a folder, or in its nearest existing parent."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _environment() -> dict[str, Variable]:
    """The relevant environment variables that are set, including all of dsf's."""
    names = [n for n in VARIABLES if n in os.environ]
    names += sorted(n for n in os.environ if n.startswith("DSF_") and n not in VARIABLES)
    return {n: Variable(value=os.environ[n], meaning=VARIABLES.get(n, "nothing that dsf knows")) for n in names}


def _import_triton() -> str:
    """The reason why triton cannot be imported, or ""."""
    if _version("triton") is None and importlib.util.find_spec("triton") is None:
        return "not installed"
    try:
        importlib.import_module("triton")
    except Exception as error:
        return words_of(error)
    return ""


def _warnings(gpus: list[Gpu], caches: list[Cache], triton: str) -> list[str]:
    """Warnings: settings that could work better, and untested versions."""
    on = {name for name in VARIABLES if guard.asked_for(os.environ.get(name))}
    said: list[tuple[object, str]] = [
        (triton and triton != "not installed", f"triton does not import: {triton}"),
        (triton == "not installed" and gpus, "there is a GPU but no triton: pip install triton; the torch forms run"),
        (not gpus and shutil.which("nvidia-smi") and not torch.version.cuda,
         f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA"),
        (gpus and not choose.interpreted() and not _compiler(),
         "no C compiler (cc, gcc, clang or $CC): Triton cannot build its launchers"),
        (gpus and choose.interpreted(), "TRITON_INTERPRET=1: kernels run in the interpreter though there is a GPU"),
        ("CUDA_LAUNCH_BLOCKING" in on, "CUDA_LAUNCH_BLOCKING: every launch waits, timings mean nothing"),
        ("DSF_VALIDATE" in on, "DSF_VALIDATE: every call reads its tensors twice and waits for the GPU"),
        ("NVIDIA_TF32_OVERRIDE" in on, "NVIDIA_TF32_OVERRIDE: float32 products have 10 bits"),
        (torch.backends.cuda.matmul.allow_tf32 and gpus,
         "torch.backends.cuda.matmul.allow_tf32: torch's float32 products have 10 bits; kernels' are not affected"),
        (_version("hypothesis") is None, "without hypothesis there is no dsf.check: pip install 'dsf-zoo[test]'"),
    ]  # fmt: skip
    said += [(not c.writable, f"the cache of {c.of}, {c.path}, cannot be written") for c in caches]
    said += [(True, text) for text in _untried()]
    return [text for condition, text in said if condition]


def _compiler() -> bool:
    chosen = os.environ.get("CC")
    return any(shutil.which(name) for name in ([chosen] if chosen else ["cc", "gcc", "clang"]))


def _untried() -> list[str]:
    """Installed releases outside the distribution's requirements; empty where it is not installed."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(line) for line in importlib.metadata.requires(CORE[0]) or []]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []
    found = []
    for want in wanted:
        have = _version(want.name)
        applies = want.marker is None or want.marker.evaluate({"extra": ""})
        if have is not None and applies and not want.specifier.contains(have.partition("+")[0], prereleases=True):
            found.append(f"{want.name} {have} was not tried; dsf asks for {want.specifier}")
    return found
