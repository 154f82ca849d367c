"""How a layer's heads are cut among ranks: what its `cut` says, written down before anything is changed."""

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
    """A tensor of which every rank holds a part: of each section on `axis`, its 1/ranks.

    sections: sizes side by side on the axis, as those of a fused projection. One tensor of ranks · parts holds rank 0's
    part of every section first, then rank 1's: that is what is sharded evenly.
    """

    axis: int
    sections: tuple[int, ...]

    def order(self, ranks: int) -> Tensor:
        """Which entry of the axis stands at each place of the tensor that is sharded."""
        places = torch.arange(sum(self.sections)).split(list(self.sections))
        return torch.cat([section.chunk(ranks)[rank] for rank in range(ranks) for section in places])

    def arranged(self, whole: Tensor, ranks: int) -> Tensor:
        """A whole tensor with every rank's entries side by side."""
        if len(self.sections) == 1:
            return whole
        return whole.index_select(self.axis, self.order(ranks).to(whole.device))

    def canonical(self, arranged: Tensor, ranks: int) -> Tensor:
        """What `arranged` was made of."""
        if len(self.sections) == 1:
            return arranged
        return arranged.index_select(self.axis, self.order(ranks).argsort().to(arranged.device))


class Cuts:
    """What each of `ranks` ranks holds of one layer, as the layer's `cut(cuts)` says it.

    Sizes that do not divide raise InputError, and nothing is changed until all has been said. What no method names is
    whole on every rank; its gradient is the sum of what every rank finds.

    params: cuts by the place of a parameter or buffer, (module, name). sets: attributes that change, with the sizes of
    one rank. apart: whole parameters behind the sum over ranks, whose gradients every rank finds whole. once: biases
    that only rank 0 adds to a product that is summed. hooks: what wraps a module's call, by name. same:
    nothing is cut, and every rank does the same.
    """

    def __init__(self, layer: nn.Module, ranks: int) -> None:
        self.layer, self.ranks = layer, ranks
        self.params: dict[tuple[nn.Module, str], Cut] = {}
        self.sets: list[tuple[Any, str, Any]] = []
        self.apart: set[tuple[nn.Module, str]] = set()
        self.once: set[tuple[nn.Module, str]] = set()
        self.hooks: list[tuple[nn.Module, str, tuple[int, ...]]] = []
        self.same = False

    def inside(self, layer: nn.Module) -> Cuts:
        """The same cuts, for a layer inside to go on with."""
        found = copy.copy(self)
        found.layer = layer
        return found

    def whole(self) -> None:
        """Every rank runs the layer as it is, on tensors that all have."""
        self.same = True
        self.apart |= {(module, name) for module in self.layer.modules() for name in module._parameters}

    def count(self, **numbers: int) -> None:
        """Say how many there are of what is dealt out whole, by name: heads, groups, blocks, channels."""
        for name, number in numbers.items():
            if number % self.ranks:
                raise InputError(
                    f"HeadShard: {type(self.layer).__name__} has {name}={number}, which {self.ranks} ranks cannot "
                    "share evenly"
                )

    def share(self, number: int) -> int:
        """A rank's part of a number."""
        return number // self.ranks

    def set(self, **attributes: Any) -> None:
        """Attributes of the layer that a rank has other values of."""
        self.sets += [(self.layer, name, value) for name, value in attributes.items()]

    def heads(self, name: str) -> tuple[int, ...]:
        """Cut an attribute H1, D1, H2, D2, ... to a rank's heads. Returns the sections H1·D1, H2·D2, ..."""
        counts, widths = getattr(self.layer, name)[::2], getattr(self.layer, name)[1::2]
        pairs = list(zip(counts, widths, strict=True))
        self.set(**{name: tuple(x for h, d in pairs for x in (self.share(h), d))})
        return tuple(h * d for h, d in pairs)

    def own(self, module: nn.Module, *names: str, axis: int = 0, sections: Sequence[int] = ()) -> None:
        """Parameters and buffers that are cut on an axis; those that the module does not have are left out."""
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
        """A map that makes a rank's part of every section, of all of its input.

        A Sequential: its last map. None: a map that the layer does not have. gathered: each rank has a part of the
        input only, and gets the others'.
        """
        if linear is None:
            return
        last = linear[-1] if isinstance(linear, nn.Sequential) else linear
        self.own(last, "weight", "bias", sections=sections)
        self._sized(last, "out_features")
        if gathered:
            self.hooks.append((last, "gather", ()))

    def summed(self, linear: nn.Module) -> None:
        """The map out of the layer: of a rank's part of its input, summed over the ranks."""
        self._columns(linear, ())
        self.hooks.append((linear, "leave", ()))

    def mixed(self, linear: nn.Module, *sections: int, kept: Sequence[int] = ()) -> None:
        """A map within the layer of a rank's part of every section of its input, summed over the ranks.

        kept: sections of what it makes, of which a rank keeps its part; the whole if none.
        """
        self._columns(linear, sections)
        self.hooks.append((linear, "sum", tuple(kept)))

    def _columns(self, linear: nn.Module, sections: Sequence[int]) -> None:
        self.own(linear, "weight", axis=1, sections=sections)
        self._sized(linear, "in_features")
        if getattr(linear, "bias", None) is not None:
            self.once.add((linear, "bias"))

    def sliced(self, module: nn.Module, size: int) -> None:
        """A module that every rank runs as it is, and of whose output it keeps its part."""
        self.count(**{"its outputs": size})
        self.hooks.append((module, "own", (size,)))

    def conv(self, conv: Any, *sections: int) -> None:
        """A depthwise convolution, or token shift, of a rank's part of every section. None: there is none."""
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
        """A norm over groups of channels: of whole groups a rank, or of one that the ranks share. None: there is none.

        Raises InputError for a number of groups that the ranks cannot share evenly.
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
        """Parameters of the layer, or of its child with this name, that are used behind the sum over ranks."""
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
    """Stands in `Cuts.sets` for the ranks, which are known when the cuts are made."""


SHARES: Shares | _Shares = _Shares()
