"""How a layer's heads are cut among ranks: a record that its `cut` fills before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsf.language.errors import InputError

if TYPE_CHECKING:
    from dsf.parallel.shares import Shares


@dataclass(frozen=True)
class Cut:
    """A cut of a tensor: every rank holds an equal part of each section of `axis`.

    sections: the sizes of the sections, which lie side by side on the axis, as in a fused projection. The arranged
    tensor has rank 0's part of every section first, then rank 1's, and so on, so that even shards of it are the parts.
    """

    axis: int
    sections: tuple[int, ...]

    def order(self, ranks: int) -> Tensor:
        """The index on the whole tensor's axis of every entry of the arranged tensor."""
        places = torch.arange(sum(self.sections)).split(list(self.sections))
        return torch.cat([section.chunk(ranks)[rank] for rank in range(ranks) for section in places])

    def arranged(self, whole: Tensor, ranks: int) -> Tensor:
        """The whole tensor, rearranged so that every rank's entries are neighbours."""
        if len(self.sections) == 1:
            return whole
        return whole.index_select(self.axis, self.order(ranks).to(whole.device))

    def canonical(self, arranged: Tensor, ranks: int) -> Tensor:
        """The inverse of `arranged`."""
        if len(self.sections) == 1:
            return arranged
        return arranged.index_select(self.axis, self.order(ranks).argsort().to(arranged.device))


class Cuts:
    """Which part of a layer each of `ranks` ranks holds. The layer's method `cut(cuts)` declares it by calls of this.

    The methods only record; the layer changes after `cut` has run. They raise InputError for sizes that do not divide.
    A parameter that no method names is whole on every rank, and its gradient is summed over ranks.

    params: a Cut for each (module, name) of a parameter or buffer that is cut.
    sets: (object, name, value) of attributes that get a rank's value, such as sizes.
    apart: uncut parameters used after the sum over ranks, so that every rank already has their whole gradient.
    once: biases that only rank 0 adds to a product that is summed.
    hooks: (module, kind, sections) of hooks on modules' calls.
    same: True where nothing is cut, and every rank computes the whole layer.
    """

    def __init__(self, layer: nn.Module, ranks: int) -> None:
        self.layer: Any = layer
        self.ranks = ranks
        self.params: dict[tuple[nn.Module, str], Cut] = {}
        self.sets: list[tuple[Any, str, Any]] = []
        self.apart: set[tuple[nn.Module, str]] = set()
        self.once: set[tuple[nn.Module, str]] = set()
        self.hooks: list[tuple[nn.Module, str, tuple[int, ...]]] = []
        self.same = False

    def inside(self, layer: nn.Module) -> Cuts:
        """The same record for a layer inside this one, whose `cut` then adds to it."""
        found = copy.copy(self)
        found.layer = layer
        return found

    def whole(self) -> None:
        """Declare that every rank runs the whole layer, on the same tensors."""
        self.same = True
        self.apart |= {(module, name) for module in self.layer.modules() for name in module._parameters}

    def count(self, **numbers: int) -> None:
        """Check that ranks can share so many heads, groups, blocks or channels, by name. Raises InputError."""
        for name, number in numbers.items():
            if number % self.ranks:
                raise InputError(
                    f"HeadShard: {type(self.layer).__name__} has {name}={number}, which {self.ranks} ranks cannot "
                    "share evenly"
                )

    def share(self, number: int) -> int:
        """A rank's share of a number: number / ranks."""
        return number // self.ranks

    def set(self, **attributes: Any) -> None:
        """Declare the values that attributes of the layer have on a rank, by name."""
        self.sets += [(self.layer, name, value) for name, value in attributes.items()]

    def over_heads(self, **numbers: int) -> int:
        """Cut the layer's `dims`, (heads, N, P), by heads, and `count` more numbers. Returns the heads of all ranks."""
        heads, n, p = self.layer.dims
        self.count(n_heads=heads, **numbers)
        self.set(dims=(self.share(heads), n, p))
        return heads

    def over_channels(self) -> int:
        """Cut the layer's `dims` by channels, which are those of one head, or heads. Returns those of all ranks."""
        heads, n, p = self.layer.dims
        self.count(channels=heads * p)
        self.set(dims=(heads, n, self.share(p)) if heads == 1 else (self.share(heads), n, p))
        return heads * p

    def heads(self, name: str) -> tuple[int, ...]:
        """Cut the attribute `name`, (H1, D1, H2, D2, ...), by heads. Returns the sections H1·D1, H2·D2, ..."""
        counts, widths = getattr(self.layer, name)[::2], getattr(self.layer, name)[1::2]
        pairs = list(zip(counts, widths, strict=True))
        self.set(**{name: tuple(x for h, d in pairs for x in (self.share(h), d))})
        return tuple(h * d for h, d in pairs)

    def own(self, module: nn.Module, *names: str, axis: int = 0, sections: Sequence[int] = ()) -> None:
        """Cut parameters and buffers on an axis; names that the module does not have are ignored. Raises InputError."""
        for name in names:
            tensor = getattr(module, name, None)
            if tensor is None:
                continue
            cut = Cut(axis % tensor.dim(), tuple(sections) or (tensor.shape[axis],))
            if sum(cut.sections) != tensor.shape[axis]:
                raise InputError(f"HeadShard: {name} has {tensor.shape[axis]} entries, its sections {cut.sections}")
            for size in cut.sections:
                if size % self.ranks:
                    raise InputError(
                        f"HeadShard: {type(self.layer).__name__} has {size} channels in a section of `{name}`, which "
                        f"{self.ranks} ranks cannot share evenly"
                    )
            self.params[module, name] = cut

    def rows(self, linear: Any, *sections: int, gathered: bool = False) -> None:
        """Cut a linear map by outputs: a rank computes its part of every output section from the whole input.

        linear: the map; of a Sequential the last map is cut; None is ignored. sections: sizes of the output's sections.
        gathered: whether a rank has only its part of the input and gathers the other ranks'.
        """
        if linear is None:
            return
        last = linear[-1] if isinstance(linear, nn.Sequential) else linear
        self.own(last, "weight", "bias", sections=sections)
        self._sized(last, "out_features")
        if gathered:
            self.hooks.append((last, "gather", ()))

    def summed(self, linear: nn.Module) -> None:
        """Cut the layer's output map by inputs: a rank applies it to its part, and the results are summed."""
        self._columns(linear, ())
        self.hooks.append((linear, "leave", ()))

    def mixed(self, linear: nn.Module, *sections: int, kept: Sequence[int] = ()) -> None:
        """Cut a map inside the layer by inputs, section by section; the results are summed over the ranks.

        sections: of the input. kept: of the output, of which a rank keeps its part; empty: it keeps the whole output.
        """
        self._columns(linear, sections)
        self.hooks.append((linear, "sum", tuple(kept)))

    def _columns(self, linear: nn.Module, sections: Sequence[int]) -> None:
        self.own(linear, "weight", axis=1, sections=sections)
        self._sized(linear, "in_features")
        if getattr(linear, "bias", None) is not None:
            self.once.add((linear, "bias"))

    def sliced(self, module: nn.Module, size: int) -> None:
        """Declare a module that every rank runs whole; a rank keeps its part of the output, which has this size."""
        self.count(**{"its outputs": size})
        self.hooks.append((module, "own", (size,)))

    def conv(self, conv: Any, *sections: int) -> None:
        """Cut a depthwise convolution or token shift by channels, section by section. None is ignored."""
        if conv is None:
            return
        self.own(conv, "weight", "bias", sections=sections)
        for name in ("in_channels", "out_channels", "groups"):
            self._sized(conv, name)
        pieces = getattr(conv, "pieces", None)
        if pieces is not None:
            cut = tuple(replace(piece, width=self.share(piece.width)) for piece in pieces)
            self.sets.append((conv, "pieces", cut))

    def norm(self, norm: Any, groups: int = 1) -> None:
        """Cut a norm of groups of channels: a rank has whole groups, or the ranks share the only group.

        None is ignored. Raises InputError for a number of groups that the ranks cannot share evenly.
        """
        if norm is None:
            return
        self.own(norm, "weight")
        if groups > 1:
            self.count(**{"groups of its norm": groups})
            self._sized(norm, "groups")
        else:
            self.sets.append((norm, "shares", SHARES))

    def behind(self, *names: str) -> None:
        """Name parameters, or children with parameters, that are used after the sum over ranks and stay whole."""
        for name in names:
            found = getattr(self.layer, name, None)
            if isinstance(found, nn.Module):
                self.apart |= {(module, own) for module in found.modules() for own in module._parameters}
            elif found is not None:
                self.apart.add((self.layer, name))

    def _sized(self, module: nn.Module, name: str) -> None:
        if hasattr(module, name):
            self.sets.append((module, name, self.share(getattr(module, name))))


class _Shares:
    """A placeholder in `Cuts.sets` for the `Shares`, which exist only when the layer is changed."""


SHARES: Shares | _Shares = _Shares()
