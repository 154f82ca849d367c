"""The zoo: every mixer as a recurrence, and most as a layer. A new mixer is one file and one line of `ZOO`."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

from dsf import Recurrence
from dsf.language.errors import InputError
from dsf.mixers._files import is_file, recurrence_in
from dsf.mixers._module import Mixer, MixerState, shard_rates
from dsf.mixers._own import parameter_groups
from dsf.mixers._sizes import misfit
from dsf.mixers._state_space import hippo_legs, legs_in_pairs
from dsf.mixers.bidirectional import Bidirectional, BothWays
from dsf.mixers.comba import Comba, comba
from dsf.mixers.delta_product import (
    DeltaProduct,
    GatedDeltaProduct,
    delta_product,
    delta_product_of,
    gated_delta_product,
)
from dsf.mixers.deltanet import DeltaNet, deltanet
from dsf.mixers.dss import DSS, dss
from dsf.mixers.efla import EFLA, efla
from dsf.mixers.fox import ForgettingAttention, fox
from dsf.mixers.gated_deltanet import GatedDeltaNet, gated_deltanet, gated_deltanet_log
from dsf.mixers.gated_deltanet2 import GatedDeltaNet2, gated_deltanet2
from dsf.mixers.gla import GLA, gla
from dsf.mixers.h3 import H3, h3
from dsf.mixers.hgrn import HGRN, hgrn
from dsf.mixers.hgrn2 import HGRN2, hgrn2
from dsf.mixers.hydra import Hydra, semiseparable
from dsf.mixers.hyena import Hyena
from dsf.mixers.kda import KDA, kda
from dsf.mixers.layer import Layer
from dsf.mixers.linear_attention import LinearAttention, linear_attention, unnormalized_linear_attention
from dsf.mixers.longhorn import Longhorn, longhorn, longhorn_exact
from dsf.mixers.lru import LRU, lru
from dsf.mixers.mamba3 import Mamba3, mamba3, mamba3_mimo, mamba3_mimo_of
from dsf.mixers.mesanet import MesaNet, mesanet
from dsf.mixers.mingru import MinGRU, mingru
from dsf.mixers.mlstm import MLSTM, mlstm
from dsf.mixers.normalized_attention import (
    GeneralizedLinearAttention,
    NormalizedAttention,
    generalized_linear_attention,
    normalized_attention_exp,
    normalized_attention_sigmoid,
    normalized_attention_softplus,
)
from dsf.mixers.qlstm import QLSTM, modified_qlstm, qlstm
from dsf.mixers.retnet import RetNet, retnet
from dsf.mixers.rg_lru import RGLRU, rg_lru
from dsf.mixers.rwkv4 import RWKV4, rwkv4
from dsf.mixers.rwkv6 import RWKV6, rwkv6
from dsf.mixers.rwkv7 import RWKV7, rwkv7
from dsf.mixers.s4 import S4, s4
from dsf.mixers.s4d import S4D, s4d, s4d_real
from dsf.mixers.s5 import S5, s5
from dsf.mixers.s6 import S6, s6, s6_complex, s6_negative
from dsf.mixers.softmax_attention import (
    SoftmaxAttention,
    alibi,
    attention_with,
    sink_attention,
    sliding_window_attention,
    softmax_attention,
    softmax_one,
)
from dsf.mixers.ssd import SSD, ssd, ssd_with
from dsf.mixers.vision_lstm import VisionLSTM
from dsf.mixers.vision_mamba import VisionMamba


@dataclass(frozen=True)
class Entry:
    """One line of the zoo. Name, summary, source and objective are read from the recurrence.

    recurrence: the paper's system. module: a constructor of its layer (`module(d_model=..., ...)`), or None.
    """

    recurrence: Recurrence
    module: Callable[..., Mixer] | None = None

    @property
    def name(self) -> str:
        """The recurrence's name, the key of `get`."""
        return self.recurrence.name

    @property
    def summary(self) -> str:
        """First line of the recurrence's docstring."""
        return (self.recurrence.__doc__ or "").strip().partition("\n")[0]

    @property
    def source(self) -> str:
        """The source in the recurrence's docstring."""
        _, _, rest = " ".join((self.recurrence.__doc__ or "").split()).partition("Source: ")
        return rest.partition(" Symbols:")[0].partition(" Objective:")[0]

    @property
    def objective(self) -> str | None:
        """The online-learning problem that one step solves, where the docstring states one."""
        _, _, rest = " ".join((self.recurrence.__doc__ or "").split()).partition("Objective: ")
        return rest.partition(" Symbols:")[0] or None


def _variant(module: type[Mixer], **options: Any) -> Callable[..., Mixer]:
    """`module` with some constructor arguments set, keeping its name and docstring."""
    return update_wrapper(partial(module, **options), module, updated=())


ZOO: tuple[Entry, ...] = (
    Entry(softmax_attention, SoftmaxAttention),
    Entry(sliding_window_attention, _variant(SoftmaxAttention, window=128)),
    Entry(alibi, _variant(SoftmaxAttention, alibi=True)),
    Entry(sink_attention, _variant(SoftmaxAttention, sink="learnt")),
    Entry(softmax_one, _variant(SoftmaxAttention, sink="one")),
    Entry(fox, ForgettingAttention),
    Entry(linear_attention, LinearAttention),
    Entry(unnormalized_linear_attention, _variant(LinearAttention, normalized=False)),
    Entry(generalized_linear_attention, GeneralizedLinearAttention),
    Entry(normalized_attention_exp, NormalizedAttention),
    Entry(normalized_attention_softplus, _variant(NormalizedAttention, eta="softplus")),
    Entry(normalized_attention_sigmoid, _variant(NormalizedAttention, eta="sigmoid")),
    Entry(s4, S4),
    Entry(s4d, S4D),
    Entry(s4d_real, _variant(S4D, init="real")),
    Entry(dss, DSS),
    Entry(s5, S5),
    Entry(lru, LRU),
    Entry(h3, H3),
    Entry(s6, S6),
    Entry(s6_negative, _variant(S6, negative=True)),
    Entry(s6_complex, _variant(S6, complex=True)),
    Entry(ssd, SSD),
    Entry(mamba3, Mamba3),
    Entry(mamba3_mimo, _variant(Mamba3, is_mimo=True)),
    Entry(qlstm, QLSTM),
    Entry(modified_qlstm, _variant(QLSTM, modified=True)),
    Entry(rg_lru, RGLRU),
    Entry(deltanet, DeltaNet),
    Entry(gated_deltanet, GatedDeltaNet),
    Entry(gated_deltanet2, GatedDeltaNet2),
    Entry(comba, Comba),
    Entry(efla, EFLA),
    Entry(longhorn, Longhorn),
    Entry(longhorn_exact, _variant(Longhorn, exact=True)),
    Entry(mesanet, MesaNet),
    Entry(retnet, RetNet),
    Entry(gla, GLA),
    Entry(hgrn, HGRN),
    Entry(hgrn2, HGRN2),
    Entry(mingru, MinGRU),
    Entry(rwkv4, RWKV4),
    Entry(rwkv6, RWKV6),
    Entry(rwkv7, RWKV7),
    Entry(kda, KDA),
    Entry(mlstm, MLSTM),
    Entry(delta_product, DeltaProduct),
    Entry(gated_delta_product, GatedDeltaProduct),
)


# Names in papers, models and libraries; case, hyphens, underscores and a final Layer, Mixer or Attention do not matter.
ALIASES = {
    "mamba": "s6", "mamba1": "s6", "selective_ssm": "s6", "complex_mamba": "s6_complex", "mamba2": "ssd",
    "state_space_duality": "ssd",
    "attention": "softmax_attention", "softmax": "softmax_attention", "self_attention": "softmax_attention",
    "sliding_window": "sliding_window_attention", "swa": "sliding_window_attention",
    "local_attention": "sliding_window_attention", "attention_sinks": "sink_attention", "sinks": "sink_attention",
    "softmax1": "softmax_one", "quiet_attention": "softmax_one", "off_by_one": "softmax_one",
    "gdn": "gated_deltanet", "gated_delta_rule": "gated_deltanet", "delta_rule": "deltanet", "gdn2": "gated_deltanet2",
    "gated_linear_attention": "gla", "kimi_delta_attention": "kda", "kimi_linear": "kda", "retention": "retnet",
    "griffin": "rg_lru", "hawk": "rg_lru", "real_gated_lru": "rg_lru", "xlstm": "mlstm", "goose": "rwkv7",
    "finch": "rwkv6", "mesa": "mesanet", "linear_recurrent_unit": "lru", "hungry_hungry_hippos": "h3",
    "fast_weights": "unnormalized_linear_attention", "multi_scale_retention": "retnet", "forgetting_transformer": "fox",
}  # fmt: skip


# Layers of papers that are no recurrence, or several: they are found by name, but have a layer only.
LAYERS: dict[str, Callable[..., Any]] = {
    "hyena": Hyena, "hydra": Hydra, "vision_mamba": VisionMamba, "vision_lstm": VisionLSTM,
}  # fmt: skip


def canonical(name: str) -> str:
    """The zoo's name for an alias, for the name of a layer's class or for another spelling; other names unchanged."""
    known = _known()
    plain = _plain(name)
    for end in ("", "layer", "mixer", "attention"):
        if plain.removesuffix(end) in known:
            return known[plain.removesuffix(end)]
    return name


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _known() -> dict[str, str]:
    """The zoo's names by normalised spelling; a class shared by several entries stands for the first."""
    classes = {_plain(getattr(e.module, "__name__", "")): e.name for e in reversed(ZOO) if e.module is not None}
    aliases = {_plain(alias): name for alias, name in ALIASES.items()}
    return classes | aliases | {_plain(e.name): e.name for e in ZOO}


def get(name: str) -> Entry:
    """The entry with this name or its `canonical` one. Raises KeyError for layers without a recurrence (LAYERS), and,
    with the nearest names, for unknown ones."""
    by_name = {entry.name: entry for entry in ZOO}
    found = by_name.get(name) or by_name.get(canonical(name))
    if found is not None:
        return found
    layer = _layer_alone(name)
    if layer is not None:
        raise KeyError(
            f"{name!r} is a layer without a recurrence of its own, dsf.mixers.{layer.__name__}: "
            f"dsf.mixers.layer_for({name!r}, d_model) makes it"
        )
    asked = name.lower().replace("-", "_")
    near = difflib.get_close_matches(asked, by_name, n=4, cutoff=0.5)
    near = near or [f"{x} ({ALIASES[x]})" for x in difflib.get_close_matches(asked, ALIASES, n=4, cutoff=0.5)]
    hint = f"near names: {', '.join(near)}" if near else f"`dsf zoo` lists all {len(ZOO)}, dsf.mixers.ZOO holds them"
    raise KeyError(f"no mixer is called {name!r}; {hint}")


def _layer_alone(name: str) -> Callable[..., Any] | None:
    """The layer in LAYERS for any spelling of the name, or None."""
    return {_plain(known): layer for known, layer in LAYERS.items()}.get(_plain(name))


def layer_for(mixer: str | type[Any] | Recurrence, d_model: int, **options: Any) -> Mixer:
    """A layer [B, T, d_model] -> [B, T, d_model] for a mixer.

    mixer: a name of the zoo ("gated_deltanet"), file.py:function, a class of layers, or a recurrence. A recurrence, and
      one in a file, gets a `Layer`.
    options: of the layer's constructor: n_heads, d_state, headdim, expand, d_conv, bare, layer_idx, device, dtype, ...
    Raises InputError for an unknown mixer, and for an option that its layer does not have or does not allow.
    """
    make = constructor_of(mixer)
    try:
        inspect.signature(make).bind(d_model, **options)
    except TypeError as error:
        raise InputError(misfit(_class_name(make), error, inspect.signature(make).parameters, options)) from error
    return make(d_model, **options)


def constructor_of(mixer: str | type[Any] | Recurrence) -> Callable[..., Mixer]:
    """The constructor that `layer_for` calls with d_model and options. Raises InputError for an unknown mixer."""
    if isinstance(mixer, type) and (issubclass(mixer, Mixer) or mixer in LAYERS.values()):
        return mixer
    if isinstance(mixer, str) and is_file(mixer):
        mixer = recurrence_in(mixer)
    if isinstance(mixer, Recurrence):
        return _around(mixer)
    if not isinstance(mixer, str):
        given = f"the class {mixer.__name__}" if isinstance(mixer, type) else type(mixer).__name__
        raise InputError(f"a mixer is a name, file.py:function, a class of layers or a recurrence, not {given}")
    alone = _layer_alone(mixer)
    if alone is not None:
        return alone
    try:
        entry = get(mixer)
    except KeyError as error:
        raise InputError(str(error.args[0])) from error
    return entry.module if entry.module is not None else _around(entry.recurrence)


def _class_name(make: Callable[..., Mixer]) -> str:
    return str(getattr(make, "__name__", None) or make.func.__name__)  # type: ignore[attr-defined]


def _around(recurrence: Recurrence) -> Callable[..., Mixer]:
    return partial(Layer, recurrence)


__all__ = [
    "LAYERS",
    "Bidirectional",
    "BothWays",
    "Comba",
    "DSS",
    "DeltaNet",
    "DeltaProduct",
    "EFLA",
    "Entry",
    "ForgettingAttention",
    "GLA",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GeneralizedLinearAttention",
    "H3",
    "HGRN",
    "HGRN2",
    "Hydra",
    "Hyena",
    "KDA",
    "LRU",
    "Layer",
    "LinearAttention",
    "Longhorn",
    "MLSTM",
    "Mamba3",
    "MesaNet",
    "MinGRU",
    "Mixer",
    "MixerState",
    "NormalizedAttention",
    "QLSTM",
    "RGLRU",
    "RWKV4",
    "RWKV6",
    "RWKV7",
    "RetNet",
    "S4",
    "S4D",
    "S5",
    "S6",
    "SSD",
    "SoftmaxAttention",
    "VisionLSTM",
    "VisionMamba",
    "ZOO",
    "alibi",
    "attention_with",
    "canonical",
    "comba",
    "delta_product",
    "delta_product_of",
    "deltanet",
    "dss",
    "efla",
    "fox",
    "gated_delta_product",
    "gated_deltanet",
    "gated_deltanet2",
    "gated_deltanet_log",
    "generalized_linear_attention",
    "get",
    "gla",
    "h3",
    "hgrn",
    "hgrn2",
    "hippo_legs",
    "kda",
    "layer_for",
    "legs_in_pairs",
    "linear_attention",
    "longhorn",
    "longhorn_exact",
    "lru",
    "mamba3",
    "mamba3_mimo",
    "mamba3_mimo_of",
    "mesanet",
    "mingru",
    "mlstm",
    "modified_qlstm",
    "normalized_attention_exp",
    "normalized_attention_sigmoid",
    "normalized_attention_softplus",
    "parameter_groups",
    "qlstm",
    "retnet",
    "rg_lru",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "s4",
    "s4d",
    "s4d_real",
    "s5",
    "s6",
    "s6_complex",
    "s6_negative",
    "semiseparable",
    "shard_rates",
    "sink_attention",
    "sliding_window_attention",
    "softmax_attention",
    "softmax_one",
    "ssd",
    "ssd_with",
    "unnormalized_linear_attention",
]
