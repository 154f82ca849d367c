"""The zoo: every mixer as one recurrence, many as a layer. A new mixer is one file and one line of `ZOO`."""

from __future__ import annotations

import difflib
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
from dsf.mixers.mamba3 import Mamba3, mamba3, mamba3_mimo_of
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
    Entry(mamba3, Mamba3),
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


def get(name: str) -> Entry:
    """The entry called `name`. Raises KeyError, with the nearest names, if there is none."""
    by_name = {entry.name: entry for entry in ZOO}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), by_name, n=4, cutoff=0.5)
    hint = f"near names: {', '.join(near)}" if near else f"the zoo has: {', '.join(by_name)}"
    raise KeyError(f"no mixer is called {name!r}; {hint}")


__all__ = [
    "DeltaNet",
    "Entry",
    "GatedDeltaNet",
    "GeneralizedLinearAttention",
    "LinearAttention",
    "Longhorn",
    "Mamba3",
    "Mixer",
    "MixerState",
    "NormalizedAttention",
    "QLSTM",
    "RGLRU",
    "S6",
    "SSD",
    "SoftmaxAttention",
    "ZOO",
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
    "mamba3",
    "mamba3_mimo_of",
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
