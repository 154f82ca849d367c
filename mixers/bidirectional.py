"""Layers that read a sequence in both directions in one call: their base, and the sum of any two layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsf import Packing
from dsf.call.backwards import flipped_packing
from dsf.call.packing import tensor_of
from dsf.kernels.reversal import reversed_tokens
from dsf.language.errors import InputError
from dsf.mixers._checks import check_call
from dsf.mixers._module import Mixer, Span
from dsf.mixers._own import Owner
from dsf.mixers._sizes import Divided
from dsf.mixers._typed import called_as

if TYPE_CHECKING:
    from dsf.parallel import World
    from dsf.parallel.shares import Shares


class BothWays(Owner, Divided):
    """Base of layers that read in both directions: [B, T, d_model] in, the same shape out. A subclass defines `mix`.

    Every output depends on every token of its sequence. So there is no state and no step, and a causal language model
    cannot use these layers. The attribute `parallel`: the ranks that share the tokens (dsf.parallel.attach), or None.
    """

    parallel: World | None
    shares: Shares | None = None  # the ranks that share the heads (dsf.parallel.HeadShard), or None

    def __init__(self, layer_idx: int | None = None) -> None:
        super().__init__()
        self.parallel = None
        self.layer_idx = layer_idx

    def mix(self, x: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None) -> Tensor:
        """x [B, T, d_model] -> the same shape."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        state: None = None,
        cu_seqlens: Tensor | Packing | None = None,
        *,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        parallel: World | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, None]:
        """x [B, T, d_model] -> (y [B, T, d_model], None). cu_seqlens, attention_mask, parallel: as in `Mixer.forward`.

        use_cache: ignored, as there is no state. Raises InputError for a state, a mask with padding, and reverse=True.
        """
        world = self.parallel if parallel is None else parallel
        check_call(self, x, None, cu_seqlens, attention_mask, world, False, reverse)
        if reverse:
            raise InputError(
                f"{type(self).__name__}: it reads its sequences in both directions, so reverse=True would only "
                "exchange the two; leave it out, or flip x and y yourself"
            )
        if state is not None:
            raise InputError(
                f"{type(self).__name__}: it reads its sequences in both directions, so none goes on from a state; give "
                "it whole sequences"
            )
        return self.mix(x, cu_seqlens, world), None

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def step(self, x: Tensor, state: None = None, *, in_place: bool = False) -> tuple[Tensor, None]:
        """Raises InputError: the first output depends on the last token."""
        raise InputError(
            f"{type(self).__name__}: it reads its sequences in both directions, so there is no step; call it on the "
            "whole sequence"
        )


class Bidirectional(BothWays):
    """The sum of two layers, one of which runs backwards: ahead(x) + back(x, reverse=True).

    ahead, back: any layers of this package or of yours: `Bidirectional(mixers.GLA(64), mixers.GLA(64))`. One layer
    given twice shares its parameters; two layers share none.
    """

    def __init__(
        self,
        ahead: Mixer,
        back: Mixer,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        self.ahead, self.back = ahead, back
        self.to(device=device, dtype=dtype)

    def mix(self, x: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None) -> Tensor:
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "use_cache": False, "parallel": world}
        return self.ahead(x, **options)[0] + self.back(x, **options, reverse=True)[0]


def run_ahead(way: Mixer, u: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None) -> Tensor:
    """y [B, T, H, P] of a layer's convolution and recurrence, from the u of its `project` on whole sequences."""
    inputs = inputs_ahead(way, u, cu_seqlens, world)
    return way.recurrence(**inputs, cu_seqlens=cu_seqlens, parallel=world)


def inputs_ahead(
    way: Mixer, u: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None = None
) -> dict[str, Any]:
    """The inputs of a layer's recurrence, from the u of its `project` on whole sequences."""
    u, _ = way.convolve(u, None, cu_seqlens, world, keep=False)
    return way.arguments(u, (), Span(True, tensor_of(cu_seqlens, u.device)))


def run_back(way: Mixer, u: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None) -> Tensor:
    """`run_ahead` of reversed tokens; y is in their order, from the last to the first."""
    if cu_seqlens is not None:
        cu_seqlens = flipped_packing(cu_seqlens)
    return run_ahead(way, reversed_tokens(u), cu_seqlens, None if world is None else world.backwards())
