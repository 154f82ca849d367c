"""Rotary positions and softmax attention with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsf import KVCache, Packing
from dsf.call.calls import is_transformed
from dsf.call.packing import sequence_of, tensor_of
from dsf.kernels.rotary import angles, rotary
from dsf.language.errors import InputError
from dsf.mixers import MixerState, SoftmaxAttention
from dsf.mixers._module import Side, Span

if TYPE_CHECKING:
    from dsf.parallel import World


def positions_of(
    tokens: int,
    device: torch.device,
    past: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
) -> Tensor:
    """The position of every token in its sequence, int64 [B, tokens], or [1, tokens] if equal in all rows.

    past: [S], the number of each sequence's tokens before this call, or None. cu_seqlens: boundaries [S + 1] of
    sequences packed along the tokens, or a dsf.Packing.
    """
    places = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        return places[None] if past is None else places[None] + past[:, None]
    placed = cu_seqlens.on(device) if isinstance(cu_seqlens, Packing) else cu_seqlens
    bounds = placed.to(device, torch.long)
    sequence = sequence_of(bounds, places)
    own = places - bounds[sequence]
    return (own if past is None else own + past[sequence])[None]


def rotation(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, width], float32, of the angles position · base^(-2i / width) for both entries of pair i. The
    first entry's sin is negated, as `rotate` takes it. Source: Su et al. (arXiv 2104.09864)."""
    cos, sin = angles(positions, width, base)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, N] with entries i and i + N/2 turned by the cos and sin [B, T, N] of `rotation`, in x's dtype."""
    c, s = cos.unsqueeze(2).to(x.dtype), sin.unsqueeze(2).to(x.dtype)
    return torch.addcmul(x * c, x.roll(x.shape[-1] // 2, dims=-1), s)


def _together(q: Tensor, k: Tensor) -> Tensor:
    """The heads of q and k, [B, 1, H, N] and [B, 1, Hk, N], without a copy where one product made them side by side."""
    if is_transformed((q, k)):  # of which there are samples or tangents elsewhere
        return torch.cat([q, k], dim=2)
    (batch, _, heads, width), more = q.shape, k.shape[2]
    behind = q.data_ptr() + heads * width * q.element_size() == k.data_ptr()
    alike = all((x.stride(0), x.stride(2), x.stride(3)) == (q.stride(0), width, 1) for x in (q, k))
    if behind and alike and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
        return q.as_strided((batch, 1, heads + more, width), (q.stride(0), q.stride(0), width, 1))
    return torch.cat([q, k], dim=2)


def _past(state: MixerState | None) -> Tensor | None:
    """The tokens that each sequence has seen, [S]."""
    return state.recurrent.lengths if state is not None and isinstance(state.recurrent, KVCache) else None


class RotaryAttention(SoftmaxAttention):
    """`SoftmaxAttention` with rotary positions, which turn entry i of a head's query and key with entry i + N/2.

    rope_base: base of the angles' geometric series. options: arguments of `SoftmaxAttention`. The state counts tokens,
    so positions go on after it. Every packed sequence begins at 0. Source: Su et al. (arXiv 2104.09864). Raises
    InputError for heads of odd width.
    """

    even = ("headdim",)

    def __init__(self, d_model: int, n_heads: int | None = None, *, rope_base: float = 10000.0, **options: Any):
        super().__init__(d_model, n_heads, **options)
        self.rope_base = rope_base
        if self.dims[1] % 2:
            raise InputError(f"rotary positions need an even width of a head, got {self.dims[1]}")

    def turns(
        self,
        x: Tensor,
        state: MixerState | None,
        cu_seqlens: Tensor | Packing | None = None,
        parallel: World | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotation of x [B, T, d_model], whose tokens come after `state`, in the dtype of q and k.

        The layers of a model can share it. cu_seqlens: as in a call. parallel: the ranks that share the tokens; None:
        the attached ones.
        """
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        cos, sin = rotation(self._positions(x, state, cu_seqlens, parallel), self.dims[1], self.rope_base)
        return cos.to(dtype), sin.to(dtype)

    def _positions(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | Packing | None, parallel: World | None
    ) -> Tensor:
        past = _past(state)
        world = self.parallel if parallel is None else parallel
        if world is not None:
            from dsf.parallel.agree import agree_layer
            from dsf.parallel.places import places_of

            agree_layer(world, self, x, state, cu_seqlens)
            places = places_of(world, x, cu_seqlens, True)
            if places is not None:
                return places.positions(past)
        return positions_of(x.shape[1], x.device, past, tensor_of(cu_seqlens, x.device))

    def arguments(
        self, u: Tensor, side: Side, span: Span, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> dict[str, Tensor]:
        inputs = super().arguments(u, side, span)
        q, k = inputs["q"], inputs["k"]
        if cos is None or sin is None:
            return inputs
        if u.shape[1] == 1 and not (u.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling()):
            q, k = rotate(_together(q, k), cos, sin).split([q.shape[2], k.shape[2]], dim=2)
            return inputs | {"q": q, "k": k}
        n = cos.shape[-1] // 2
        q, k = rotary(q, k, cos[..., :n], sin[..., n:])
        return inputs | {"q": q, "k": k}

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        *,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        parallel: World | None = None,
        reverse: bool = False,
        **tokens: Tensor,
    ) -> tuple[Tensor, MixerState | None]:
        """As `Mixer.forward`. cos, sin, among tokens: the rotation, if it is known already (`turns`).

        With reverse=True positions count from the end.
        """
        known = tokens
        if not reverse:
            turned = self._turned(x, state, cu_seqlens, tokens, parallel)
            known = {"cos": turned["cos"], "sin": turned["sin"]}
        return super().forward(
            x,
            state,
            cu_seqlens,
            attention_mask=attention_mask,
            use_cache=use_cache,
            parallel=parallel,
            reverse=reverse,
            **known,
        )

    def step(
        self, x: Tensor, state: MixerState | None = None, *, in_place: bool = False, **tokens: Tensor
    ) -> tuple[Tensor, MixerState]:
        """As `Mixer.step`. cos, sin [B, N], among tokens: the rotation, if it is known already (`turns`)."""
        if "cos" not in tokens:
            cos, sin = self.turns(x.unsqueeze(1), state)
            tokens = {**tokens, "cos": cos.squeeze(1), "sin": sin.squeeze(1)}
        return super().step(x, state, in_place=in_place, **tokens)

    def inputs(
        self, x: Tensor, state: MixerState | None = None, cu_seqlens: Tensor | Packing | None = None, **tokens: Tensor
    ) -> dict[str, Tensor]:
        """As `Mixer.inputs`, with q and k turned."""
        return super().inputs(x, state, cu_seqlens, **self._turned(x, state, cu_seqlens, tokens))

    def _turned(
        self,
        x: Tensor,
        state: MixerState | None,
        cu_seqlens: Tensor | Packing | None,
        tokens: dict[str, Tensor],
        parallel: World | None = None,
    ) -> dict[str, Tensor]:
        if "cos" in tokens:
            return tokens
        cos, sin = self.turns(x, state, cu_seqlens, parallel)
        return {**tokens, "cos": cos, "sin": sin}
