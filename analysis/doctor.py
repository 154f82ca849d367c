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
from pathlib import Path
from typing import Any

import torch

import dsf
from dsf.call import guard
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
WORKS, BROKEN, REFUSED = "works", "broken", "cannot run"
Step = Callable[[str], None]


def examine(calls: bool = True, step: Step = lambda _: None) -> dict[str, Any]:
    """All results of `dsf doctor`, as plain data.

    calls: False omits the tests of backends (`backends` is then empty). step: called with each step's name.

    Keys: versions; gpus; backends, a line for each backend, device and probe with its status "works", "broken" or
    "cannot run", the worst error of outputs and gradients in float32 against the float64 oracle and its tolerance;
    caches; environment; runs, the plan for each structure of the zoo on each device; warnings; ok, False when
    something that should work is broken.
    """
    environment, gpus = _environment(), _gpus()
    places = ["cpu", *(f"cuda:{i}" for i in range(len(gpus)))]
    backends = [x for place in places for x in _backends(place, step)] if calls else []
    step("what runs where")
    runs, caches, triton = _runs(places), _caches(), _import_triton()
    warnings = [*_warnings(gpus, caches, triton), *_refusals(runs)]
    return {
        "schema": "dsf.doctor/1",
        "ok": triton in ("", "not installed") and not any(x["status"] == BROKEN for x in backends),
        "versions": _versions(),
        "gpus": gpus,
        "backends": backends,
        "caches": caches,
        "environment": environment,
        "runs": runs,
        "warnings": warnings,
    }


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "dsf": f"{dsf.__version__} ({Path(dsf.__file__).parent})",
        "torch build": f"CUDA {torch.version.cuda}" if torch.version.cuda else _rocm() or "CPU alone",
    }
    for name in [*CORE[1:], *(x for names in EXTRAS.values() for x in names)]:
        found[name] = _version(name)
    return found


def _rocm() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append({
            "device": f"cuda:{index}",
            "name": about.name,
            "capability": f"sm_{about.major}{about.minor}",
            "memory_gib": round(total / GIB, 1),
            "free_gib": round(free / GIB, 1),
        })  # fmt: skip
    return found


def _backends(place: str, step: Step) -> list[dict[str, Any]]:
    """A line for each probe on each backend of a device; one line for a backend that cannot run there at all."""
    lines: list[dict[str, Any]] = []
    for backend in ("torch", "triton"):
        found = []
        for name in INTERPRETED if backend == "triton" and place == "cpu" else PROBES:
            step(f"{name} on {backend}, {place}")
            found.append({"backend": backend, "device": place, "probe": name, **_probe(name, backend, place)})
        whys = {x["why"] for x in found if x["status"] == REFUSED}
        same = len(whys) == 1 and all(x["status"] == REFUSED for x in found)
        lines += [found[0] | {"probe": "all"}] if same else found
    return lines


def _probe(name: str, backend: str, place: str) -> dict[str, Any]:
    """The test of a few calls' outputs, final states and gradients, unless the planner raises FormError."""
    begin = time.perf_counter()
    try:
        worst, at = _worst(name, backend, place)
    except FormError as error:  # the planner's message
        return {"status": REFUSED, "why": str(error).partition("but ")[2] or str(error)}
    except Exception as error:  # of compiler, driver or launcher: any exception means a broken backend
        return {"status": BROKEN, "why": _words(error), "seconds": round(time.perf_counter() - begin, 2)}
    allowed = TOLERANCE["float32"]
    return {
        "status": WORKS if worst <= allowed else BROKEN,
        "error": worst,
        "allowed": allowed,
        "seconds": round(time.perf_counter() - begin, 2),
        **({} if worst <= allowed else {"why": f"{at} is off by {worst:.1e}, allowed {allowed:g}"}),
    }


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


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _runs(places: list[str]) -> list[dict[str, Any]]:
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
                chosen[place] = {"form": "nothing", "backend": "none", "kernel": "none", "refused": _words(error)}
                continue
            chosen[place] = {
                "form": plan.form, "backend": plan.backend, "kernel": plan.kernel,
                "refused": plan.reason.partition("not on triton: ")[2],
            }  # fmt: skip
        rows.append({"structure": structure, "mixers": names, "on": chosen})
    return rows


def _refusals(runs: list[dict[str, Any]]) -> list[str]:
    """Devices on which no structure at all reaches the kernels, and why."""
    found = []
    for place in runs[0]["on"]:
        reasons = {row["on"][place]["refused"] for row in runs if row["on"][place]["backend"] != "triton"}
        if place != "cpu" and not any(row["on"][place]["backend"] == "triton" for row in runs):
            found.append(f"{place}: nothing runs on triton ({'; '.join(sorted(reasons))}); the torch forms run there")
    return found


def _caches() -> list[dict[str, Any]]:
    found = {"generated source": _source_folder(), "Triton": _triton_cache()}
    with contextlib.suppress(Exception):  # torch's internals, which change between releases
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        found["torch.compile"] = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    return [{"of": name, "path": str(path), "writable": is_writable(path)} for name, path in found.items()]


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


def _environment() -> dict[str, dict[str, str]]:
    """The relevant environment variables that are set, including all of dsf's."""
    names = [n for n in VARIABLES if n in os.environ]
    names += sorted(n for n in os.environ if n.startswith("DSF_") and n not in VARIABLES)
    return {n: {"value": os.environ[n], "meaning": VARIABLES.get(n, "nothing that dsf knows")} for n in names}


def _import_triton() -> str:
    """The reason why triton cannot be imported, or ""."""
    if _version("triton") is None and importlib.util.find_spec("triton") is None:
        return "not installed"
    try:
        importlib.import_module("triton")
    except Exception as error:
        return _words(error)
    return ""


def _warnings(gpus: list[dict[str, Any]], caches: list[dict[str, Any]], triton: str) -> list[str]:
    """Warnings: settings that could work better, and untested versions."""
    on = {name for name in VARIABLES if guard.asked_for(os.environ.get(name))}
    cached = [c for c in caches if not c["writable"]]
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
    said += [(True, f"the cache of {c['of']}, {c['path']}, cannot be written") for c in cached]
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
