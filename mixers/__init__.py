"""The zoo: every mixer as one recurrence, many as a layer. A new mixer is one file and one line of `ZOO`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper

from dsf import Recurrence
from dsf.mixers._module import Mixer, MixerState
from dsf.mixers.delta_product import delta_product, delta_product_of, gated_delta_product
from dsf.mixers.deltanet import DeltaNet, deltanet
from dsf.mixers.gated_deltanet import GatedDeltaNet, gated_deltanet, gated_deltanet_log
from dsf.mixers.gla import gla
from dsf.mixers.hgrn import hgrn, hgrn2
from dsf.mixers.kda import kda
from dsf.mixers.linear_attention import LinearAttention, linear_attention, unnormalized_linear_attention
from dsf.mixers.longhorn import Longhorn, longhorn, longhorn_exact
from dsf.mixers.mingru import mingru
from dsf.mixers.mlstm import mlstm
from dsf.mixers.normalized_attention import (
    GeneralizedLinearAttention,
    NormalizedAttention,
    generalized_linear_attention,
    normalized_attention_exp,
    normalized_attention_sigmoid,
    normalized_attention_softplus,
)
from dsf.mixers.qlstm import QLSTM, modified_qlstm, qlstm
from dsf.mixers.retnet import retnet
from dsf.mixers.rg_lru import RGLRU, rg_lru
from dsf.mixers.rwkv4 import rwkv4
from dsf.mixers.rwkv6 import rwkv6
from dsf.mixers.rwkv7 import rwkv7
from dsf.mixers.s6 import S6, s6, s6_negative
from dsf.mixers.softmax_attention import SoftmaxAttention, softmax_attention
from dsf.mixers.ssd import SSD, ssd, ssd_with


@dataclass(frozen=True)
class Entry:
    """One line of the zoo; what is not stated is read off the recurrence.

    recurrence: the paper's system. module: makes its layer (`module(d_model=..., ...)`), or None.
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
        """Where the recurrence's docstring says that it comes from."""
        _, _, rest = " ".join((self.recurrence.__doc__ or "").split()).partition("Source: ")
        return rest.partition(" Symbols:")[0].partition(" Objective:")[0]

    @property
    def objective(self) -> str | None:
        """The online-learning problem that one step solves, where the docstring states one."""
        _, _, rest = " ".join((self.recurrence.__doc__ or "").split()).partition("Objective: ")
        return rest.partition(" Symbols:")[0] or None


def _variant(module: type[Mixer], **options: object) -> Callable[..., Mixer]:
    """`module` with some constructor arguments set, keeping its name and docstring."""
    return update_wrapper(partial(module, **options), module, updated=())


ZOO: tuple[Entry, ...] = (
    Entry(softmax_attention, SoftmaxAttention),
    Entry(linear_attention, LinearAttention),
    Entry(unnormalized_linear_attention, _variant(LinearAttention, normalized=False)),
    Entry(generalized_linear_attention, GeneralizedLinearAttention),
    Entry(normalized_attention_exp, NormalizedAttention),
    Entry(normalized_attention_softplus, _variant(NormalizedAttention, eta="softplus")),
    Entry(normalized_attention_sigmoid, _variant(NormalizedAttention, eta="sigmoid")),
    Entry(s6, S6),
    Entry(s6_negative, _variant(S6, negative=True)),
    Entry(ssd, SSD),
    Entry(qlstm, QLSTM),
    Entry(modified_qlstm, _variant(QLSTM, modified=True)),
    Entry(rg_lru, RGLRU),
    Entry(deltanet, DeltaNet),
    Entry(gated_deltanet, GatedDeltaNet),
    Entry(longhorn, Longhorn),
    Entry(longhorn_exact),
    Entry(retnet),
    Entry(gla),
    Entry(hgrn),
    Entry(hgrn2),
    Entry(mingru),
    Entry(rwkv4),
    Entry(rwkv6),
    Entry(rwkv7),
    Entry(kda),
    Entry(mlstm),
    Entry(delta_product),
    Entry(gated_delta_product),
)


# What papers, models and libraries call them; case, hyphens, underscores and a final "Layer" or "Mixer" do not matter.
ALIASES = {
    "mamba": "s6", "mamba1": "s6", "selective_ssm": "s6", "mamba2": "ssd", "state_space_duality": "ssd",
    "attention": "softmax_attention", "softmax": "softmax_attention", "self_attention": "softmax_attention",
    "gdn": "gated_deltanet", "gated_delta_rule": "gated_deltanet", "delta_rule": "deltanet",
    "gated_linear_attention": "gla", "kimi_delta_attention": "kda", "kimi_linear": "kda", "retention": "retnet",
    "griffin": "rg_lru", "hawk": "rg_lru", "real_gated_lru": "rg_lru", "xlstm": "mlstm", "goose": "rwkv7",
    "finch": "rwkv6", "fast_weights": "unnormalized_linear_attention",
}  # fmt: skip


def canonical(name: str) -> str:
    """The zoo's name for what people call a mixer: an alias, its layer's class, any spelling; else the name itself."""
    known = _known()
    plain = _plain(name)
    for end in ("", "layer", "mixer"):
        if plain.removesuffix(end) in known:
            return known[plain.removesuffix(end)]
    return name


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _known() -> dict[str, str]:
    """The zoo's names by names without case and punctuation; of several with one class, the first has its name."""
    classes = {_plain(getattr(e.module, "__name__", "")): e.name for e in reversed(ZOO) if e.module is not None}
    aliases = {_plain(alias): name for alias, name in ALIASES.items()}
    return classes | aliases | {_plain(e.name): e.name for e in ZOO}


def get(name: str) -> Entry:
    """The entry called `name`, or what `canonical` makes of it. Raises KeyError, with the nearest names, if none is."""
    by_name = {entry.name: entry for entry in ZOO}
    found = by_name.get(name) or by_name.get(canonical(name))
    if found is not None:
        return found
    asked = name.lower().replace("-", "_")
    near = difflib.get_close_matches(asked, by_name, n=4, cutoff=0.5)
    near = near or [f"{x} ({ALIASES[x]})" for x in difflib.get_close_matches(asked, ALIASES, n=4, cutoff=0.5)]
    hint = f"near names: {', '.join(near)}" if near else f"`dsf zoo` lists all {len(ZOO)}, dsf.mixers.ZOO holds them"
    raise KeyError(f"no mixer is called {name!r}; {hint}")


__all__ = [
    "DeltaNet",
    "Entry",
    "GatedDeltaNet",
    "GeneralizedLinearAttention",
    "LinearAttention",
    "Longhorn",
    "Mixer",
    "MixerState",
    "NormalizedAttention",
    "QLSTM",
    "RGLRU",
    "S6",
    "SSD",
    "SoftmaxAttention",
    "ZOO",
    "canonical",
    "delta_product",
    "delta_product_of",
    "deltanet",
    "gated_delta_product",
    "gated_deltanet",
    "gated_deltanet_log",
    "generalized_linear_attention",
    "get",
    "gla",
    "hgrn",
    "hgrn2",
    "kda",
    "linear_attention",
    "longhorn",
    "longhorn_exact",
    "mingru",
    "mlstm",
    "modified_qlstm",
    "normalized_attention_exp",
    "normalized_attention_sigmoid",
    "normalized_attention_softplus",
    "qlstm",
    "retnet",
    "rg_lru",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "s6",
    "s6_negative",
    "softmax_attention",
    "ssd",
    "ssd_with",
    "unnormalized_linear_attention",
]
