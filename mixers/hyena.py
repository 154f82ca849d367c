"""Hyena: gates and long convolutions, with filters that a small network computes from the lag."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from dsf import Packing, long_convolution
from dsf.call.asked import check_switches
from dsf.call.backwards import flipped_packing
from dsf.call.packing import check_row, tensor_of, values
from dsf.kernels.reversal import reversed_tokens
from dsf.language.errors import FormError, InputError
from dsf.mixers._checks import check_mask
from dsf.mixers._conv import ShortConv
from dsf.mixers._own import Owner, normal
from dsf.mixers._sizes import check_input
from dsf.mixers._typed import called_as

if TYPE_CHECKING:
    from dsf.parallel import Cuts, World

DECAYS = (0.3, 1.5)  # shares of the length after which the fastest and the slowest window have fallen to FLOOR
FLOOR = 1e-2


class Filter(Owner):
    """Filters at all lags: a network with sines, of features of the lag, times an exponentially falling window.

    Source: Poli et al. (arXiv 2302.10866), Section 3.3, with the released code's features (the lag and `bands` waves),
    frequency and window. Returns [channels, T].
    """

    deltas: Tensor

    def __init__(self, channels: int, l_max: int, bands: int = 1, width: int = 64, frequency: float = 1.0):
        super().__init__()
        self.l_max, self.bands, self.frequency = l_max, bands, frequency
        self.inner = nn.ModuleList([nn.Linear(1 + 2 * bands, width), nn.Linear(width, width)])
        self.outer = nn.Linear(width, channels, bias=False)
        self.own("deltas", _windows, channels, kind="constant")

    def forward(self, tokens: int) -> Tensor:
        """The filter at the lags 0 … tokens-1."""
        weight: Any = self.outer.weight  # of a map that torch has quantised a method
        like = weight if isinstance(weight, Tensor) else self.deltas
        lag = torch.arange(tokens, device=like.device, dtype=self.deltas.dtype)
        share = lag / max(self.l_max - 1, 1)
        wave = torch.linspace(1e-4, self.bands - 1, self.bands, device=like.device, dtype=share.dtype)
        angle = 2 * math.pi * lag[:, None] / self.l_max * wave
        found = torch.cat([share[:, None], angle.cos(), -angle.sin()], dim=-1).to(like.dtype)
        for layer in self.inner:
            found = torch.sin(self.frequency * layer(found))
        return (self.outer(found) * torch.exp(-share[:, None] * self.deltas).to(like.dtype)).T


def _windows(channels: int) -> Tensor:
    """Rates of the windows, evenly spaced."""
    slow, fast = (-math.log(FLOOR) / share for share in reversed(DECAYS))
    return torch.linspace(slow, fast, channels)


class Hyena(Owner):
    """The Hyena operator: `order` + 1 projections, short convolutions, `order` - 1 long convolutions, gates, out_proj.

    `order` - 1 times, v is multiplied by a projection and convolved with a long filter. Then the last projection gates
    it. Source: Poli et al. (arXiv 2302.10866), Definition 3.1 and Algorithms 1 to 3.

    l_max: tokens of the longest sequence, for which the filters are defined.
    order: at least 2. d_conv: taps of the short convolution, at least 1. width: of the network that makes the filters.

    A filter with a free value at each lag has no state of fixed size. So the layer has no recurrence, and `step` and
    states raise FormError. The constructor raises InputError for a smaller order or d_conv.
    """

    D: Tensor
    no_state = "its filters have a number of their own for every lag, so there is no state of fixed size"
    needs_all_tokens = "its filters reach over all tokens"  # the reason in the InputError of dsf.parallel.attach

    def __init__(
        self,
        d_model: int,
        l_max: int = 2048,
        order: int = 2,
        d_conv: int = 3,
        width: int = 64,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if order < 2 or d_conv < 1:
            raise InputError(f"Hyena: order is {order} and d_conv {d_conv}; expected at least 2 and 1")
        self.d_model, self.order, self.layer_idx = d_model, order, layer_idx
        self.in_proj = nn.Linear(d_model, (order + 1) * d_model)
        self.conv1d = ShortConv((order + 1) * d_model, d_conv, activation=None)
        self.filter = Filter((order - 1) * d_model, l_max, width=width)
        self.own("D", partial(normal, std=1.0), order - 1, d_model, kind="rate")
        self.out_proj = nn.Linear(d_model, d_model)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    def cut(self, to: Cuts) -> None:
        """Declare a rank's part of this layer where ranks share its channels (`dsf.parallel.HeadShard`)."""
        channels, filters = [self.d_model] * (self.order + 1), [self.d_model] * (self.order - 1)
        to.count(channels=self.d_model)
        to.rows(self.in_proj, *channels)
        to.conv(self.conv1d, *channels)
        to.rows(self.filter.outer, *filters)
        to.own(self.filter, "deltas", sections=filters)
        to.own(self, "D", axis=1)
        to.summed(self.out_proj)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        cu_seqlens: Tensor | Packing | None = None,
        *,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        parallel: World | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, None]:
        """x [B, T, d_model] -> (y [B, T, d_model], None).

        cu_seqlens: boundaries [S + 1] of sequences packed along T (B is 1), or a dsf.Packing.
        attention_mask: [B, T] of ones. reverse: run from every sequence's last token to its first.
        use_cache: ignored, as there is no state.
        Raises FormError for a state, InputError for sequences longer than l_max, a mask with padding, and parallel=, as
        the filters reach over all tokens.
        """
        check_input(self, x)
        if type(reverse) is not bool:
            check_switches("Hyena", reverse=reverse)  # type: ignore[unreachable]
        if state is not None:
            self._refuse("continues no state")
        if attention_mask is not None:
            check_mask("Hyena", attention_mask, cu_seqlens, x)
        if parallel is not None:
            raise InputError(f"Hyena: {self.needs_all_tokens}, so ranks cannot share a sequence (parallel=)")
        if cu_seqlens is not None:
            check_row("Hyena", cu_seqlens, x.shape[0], x.shape[1])
        if reverse:
            bounds = None if cu_seqlens is None else flipped_packing(cu_seqlens)
            return reversed_tokens(self(reversed_tokens(x), None, bounds)[0]), None
        tokens = x.shape[1]
        if tokens > self.filter.l_max:
            cuts = [0, tokens] if cu_seqlens is None else values(cu_seqlens)
            longest = max(end - begin for begin, end in pairwise(cuts))
            if longest > self.filter.l_max:
                raise InputError(
                    f"Hyena: {longest} tokens, but its filters are laid out on l_max = {self.filter.l_max}"
                )
        u, _ = self.conv1d(self.in_proj(x), None, tensor_of(cu_seqlens, x.device))
        *gates, v = u.unsqueeze(2).chunk(self.order + 1, dim=-1)  # [B, T, 1, d_model]
        filters = self.filter(min(tokens, self.filter.l_max)).unflatten(0, (self.order - 1, -1)).mT  # [order-1, L, C]
        for place, gate in enumerate(reversed(gates[1:])):
            last = gates[0] if place == self.order - 2 else None
            v = long_convolution(v * gate, filters[place][None], last, self.D[place][None], cu_seqlens)
        return self.out_proj(v.squeeze(2)), None

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def step(self, x: Tensor, state: Any = None, *, in_place: bool = False) -> NoReturn:
        """Raises FormError."""
        self._refuse("has no step")

    def _refuse(self, what: str) -> NoReturn:
        raise FormError(
            f"Hyena {what}: {self.no_state}; "
            "run the whole sequence, or take a layer whose filters are sums of exponentials (S4D, H3)"
        )
