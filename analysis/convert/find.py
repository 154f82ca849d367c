"""Search for the sequence mixers of a model, known and unknown."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType

from torch import nn

from dsf.analysis.convert.cores import CORES, Core
from dsf.analysis.convert.forwards import FORWARDS, Forward, both_ways, declared
from dsf.call.record import no_trajectory
from dsf.mixers import Hydra, Hyena, Mixer, VisionMamba

LOOKS_LIKE_A_MIXER = re.compile(r"(Attention|Mixer|SSM|Mamba|DeltaNet|Rwkv|Retention|Recurrent|LSTM|GRU|RNN)\d*$")
NONLINEAR = (nn.LSTM, nn.GRU, nn.RNN)
# What an attention function of transformers may be given besides queries, keys, values and mask.
ATTENTION_TAKES = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "position_bias"}
ATTENTION_TAKES |= {"sliding_window", "softcap"}


@dataclass(frozen=True)
class Found:
    """A mixer, and what is replaced to convert it: core functions, its forward, attention, or a convolution."""

    name: str
    module: nn.Module
    how: Core | Forward | str


@dataclass(frozen=True)
class LeftAlone:
    """A module that may mix tokens and was not converted, and why."""

    name: str
    type: str
    why: str


def names_used(cls: type[nn.Module]) -> dict[str, ModuleType]:
    """{global name that a module class's methods use: the file in which it is looked up}."""
    found: dict[str, ModuleType] = {}
    for klass in cls.__mro__:
        if klass is nn.Module or klass.__module__ == "transformers.modeling_utils":
            break
        file = sys.modules.get(klass.__module__)
        for member in vars(klass).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and file is not None:
                found.update(dict.fromkeys((n for n in _names(code) if hasattr(file, n)), file))
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def find(model: nn.Module) -> tuple[list[Found], list[LeftAlone]]:
    """(known mixers in the order of the model's modules, modules that look like mixers but are unknown)."""
    found: list[Found] = []
    left: list[LeftAlone] = []
    inside: set[int] = set()
    parts = {id(part) for m in model.modules() if isinstance(m, VisionMamba) for part in m.children()}
    for name, module in model.named_modules():
        how = None if id(module) in parts else _how(module)  # those run in the whole, not by their own forward
        if how is not None:
            found.append(Found(name, module, how))
            inside.update(id(m) for m in module.modules())
    left += _quantised(model)
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        why = _unlike_softmax(module)  # also where a convolution within is converted
        if why is None and not any(id(m) in inside for m in module.modules()):
            why = _why_not(module)
        if why is not None:
            left.append(LeftAlone(name, type(module).__name__, why))
            inside.update(id(m) for m in module.modules())
    return found, left


def _quantised(model: nn.Module) -> list[LeftAlone]:
    """One LeftAlone for each class of quantised layers: they keep running, also inside converted mixers."""
    classes: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if "quant" in type(module).__module__ or re.search(r"\dbit|Quant(?!izable)", type(module).__name__):
            classes.setdefault(type(module).__name__, []).append(name)
    why = "quantised projections are used as they are; only what is between them runs in dsf"
    return [LeftAlone(f"{names[0]} and {len(names) - 1} more", cls, why) for cls, names in classes.items()]


def _how(module: nn.Module) -> Core | Forward | str | None:
    cls = type(module)
    own = FORWARDS.get(cls) or FORWARDS.get(cls.__name__)
    if own is not None:
        return own
    if isinstance(module, Mixer):  # a layer of dsf.mixers: its declaration is known
        if no_trajectory(module.recurrence.spec) is not None:
            return None
        return Forward(cls.__name__, module.recurrence, declared)
    if isinstance(module, Hydra | VisionMamba):
        return Forward(cls.__name__, module.recurrence, both_ways)
    names = names_used(cls)
    for core in CORES:
        if any(f in names for f in core.functions):
            return core
    if "causal_conv1d_fn" in names:
        return "FIR"
    return "softmax" if "ALL_ATTENTION_FUNCTIONS" in names and _unlike_softmax(module) is None else None


def _unlike_softmax(module: nn.Module) -> str | None:
    """Why an attention of transformers is another than softmax of inner products; None for all other modules."""
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "its scores are capped (softcap), so they are no inner product and its features not exponential"
    if "ALL_ATTENTION_FUNCTIONS" not in names_used(type(module)):
        return None
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    takes = [] if own is None else inspect.signature(own).parameters.values()
    more = [p.name for p in takes if p.kind is not p.VAR_KEYWORD and p.name not in ATTENTION_TAKES]
    return f"its attention also takes {', '.join(more)}, which is unknown here" if more else None


def _why_not(module: nn.Module) -> str | None:
    if isinstance(module, Hyena):
        return f"{module.no_state}, and no recurrence"
    if isinstance(module, Mixer):
        return no_trajectory(module.recurrence.spec)
    if isinstance(module, NONLINEAR):
        return "its recurrence is nonlinear in its state"
    if isinstance(module, nn.MultiheadAttention):
        return "torch's fused attention: its core cannot be reached; register a forward for it"
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        return "a convolution whose padding and state are not known; register a forward for it"
    if LOOKS_LIKE_A_MIXER.search(type(module).__name__) and any(True for _ in module.parameters()):
        return "an unknown mixer; register(…) a forward that runs its recurrence"
    return None
