"""The subjects of commands: a mixer of the zoo by NAME, or a user's recurrence by file.py:function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from dsf import Recurrence
from dsf.analysis.measures import state_size
from dsf.call.bind import Sizes, angle_width, cached_heads, key_width, state_keys
from dsf.language.errors import InputError
from dsf.language.expr import KEY, VALUE
from dsf.language.spec import Spec
from dsf.mixers import ZOO, Entry, Mixer, get
from dsf.mixers._files import is_file, recurrence_in
from dsf.mixers.layer import Layer

# The mixers of `dsf compare` without names, which takes minutes: all tokens, a decay, corrections, both; of --thorough:
# one or two of each family.
FEW = ("softmax_attention", "ssd", "deltanet", "gated_deltanet")
FAMILIES = (
    "softmax_attention", "linear_attention", "normalized_attention_exp", "s6", "ssd", "longhorn", "qlstm", "rg_lru",
    "mingru", "hgrn2", "retnet", "gla", "mlstm", "rwkv7", "deltanet", "gated_deltanet", "kda", "delta_product",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A recurrence and the layer around it.

    given: the user's text, as `find` takes it. entry: its entry in the zoo, None for a user's recurrence.
    """

    given: str
    recurrence: Recurrence
    entry: Entry | None = None

    @property
    def name(self) -> str:
        """The recurrence's name."""
        return self.recurrence.name

    @property
    def has_module(self) -> bool:
        """True for the paper's layer, False for a `Layer` made of the declaration."""
        return self.entry is not None and self.entry.module is not None

    @property
    def make(self) -> Callable[..., Mixer]:
        """The constructor of the layer."""
        if self.entry is not None and self.entry.module is not None:
            return self.entry.module
        return partial(Layer, self.recurrence)

    @property
    def summary(self) -> str:
        """The first line of the recurrence's docstring."""
        return Entry(self.recurrence).summary

    @property
    def source(self) -> str:
        """The paper, or the user's file."""
        return self.entry.source if self.entry is not None else self.given

    def state_formula(self) -> str:
        """The size of one sequence's state as a formula in H heads, N, P (and T tokens for a KV cache)."""
        spec = self.recurrence.spec
        if spec.is_attention:
            return _of_cache(spec)
        if spec.frame is not None and spec.frame.leaves:
            columns = {frozenset({VALUE}): "⌈P/N⌉" if spec.has_key else "P", frozenset({KEY, VALUE}): "P"}
            kinds = [columns.get(leaf.source.axes, "1") for leaf in spec.frame.leaves for _ in leaf.nodes]
            counts = Counter(kinds)
            each = [str(n) if kind == "1" else f"{n}·{kind}".removeprefix("1·") for kind, n in counts.items()]
            own = Subject(self.name, Recurrence(spec.inner), None).state_formula().removeprefix("H·").removeprefix("N·")
            return f"{'H·N·' if spec.has_key else 'H·'}({'+'.join([own.strip('()'), *each])})"
        (_, few), (rows, more) = (self.recurrence.state_shape(N=spec.keys_of(1), P=p) for p in (1, 2))
        slope, extra = more - few, 2 * few - more
        wide = ("P" if slope == 1 else f"{slope}P") + (f"+{extra}" if extra else "")
        wide = f"({wide})" if extra else wide
        if not spec.has_key:
            return f"H·{wide}"
        if spec.system.solve is not None:
            return "H·N·(P+N)"
        # Taylor features have more rows than N: the number of rows, without a formula.
        n = spec.keys_of(7)
        return f"H·N·{wide}" if self.recurrence.state_shape(N=n, P=1)[0] == n else f"H·{rows}·{wide}"

    def state_numbers(self, context: int, *, heads: int, N: int, P: int) -> int:
        """The value of the formula after `context` tokens, without a convolution's numbers."""
        return state_size(
            self.recurrence, context, heads=heads, N=N if self.recurrence.spec.has_key else 1, P=P
        ).recurrent


def _of_cache(spec: Spec) -> str:
    """The size of attention's cache as a formula: keys, values and biases of every token, and sums of angles."""
    n = spec.keys_of(7)
    sizes = Sizes(1, 1, 2, n, state_keys(spec, n), 1)  # of two heads, to tell H from 1
    (keys, values), (biases, angles) = cached_heads(spec, sizes)
    width = "N" if spec.has_key and key_width(spec, sizes) == n else str(key_width(spec, sizes))
    parts = [(width, keys), ("P", values), ("1", biases)]
    of_heads, alike = ("+".join(each for each, heads in parts if heads == h) for h in (2, 1))
    tokens = "T" if spec.system.window is None else f"min(T, {spec.system.window})"
    cache = f"H·({of_heads})" if not alike else f"(H·({of_heads})+{alike})"
    if not angles:
        return f"{tokens}·{cache}"
    pairs = "N/2" if angle_width(spec, sizes) > 1 else "1"
    return f"{tokens}·{cache}+{'H·' * (angles == 2)}{pairs}".replace("H·1", "H")


def find(given: str) -> Subject:
    """The Subject of NAME or file.py:function.

    Raises InputError, in one line, for an unknown name, a missing file, and a function that is no recurrence.
    """
    if is_file(given):
        return Subject(given, recurrence_in(given))
    try:
        entry = get(given)
    except KeyError as error:
        raise InputError(str(error.args[0])) from error
    return Subject(given, entry.recurrence, entry)


def find_all(given: Iterable[str]) -> list[Subject]:
    """`find` for each, in order. Raises InputError also where two have the same name."""
    subjects = [find(g) for g in given]
    names = [s.name for s in subjects]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name} is named twice; give one of the two another name: @dsf.recurrence(name=...)")
    return subjects


def with_modules() -> list[str]:
    """The names of the zoo's mixers that have their paper's layer."""
    return [entry.name for entry in ZOO if entry.module is not None]


def paper_sizes(subject: Subject, d_model: int = 2048, heads: int = 16) -> Mixer | None:
    """The paper's layer at a real model's width, on the meta device; None for a subject without one."""
    if not subject.has_module:
        return None
    from dsf.analysis.training import accepted

    known = accepted(subject.make)
    options = {"n_heads": heads} if "n_heads" in known else {}
    with torch.device("meta"):
        return subject.make(d_model=d_model, **options)
