"""The frame of every mixer module: project, short convolution, recurrence, read out; all state is carried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dsf import Packing, Recurrence
from dsf.call.backwards import flipped_packing, flipped_rows, refuse
from dsf.call.packing import tensor_of
from dsf.language.errors import InputError
from dsf.mixers._conv import ShortConv
from dsf.mixers._own import Owner
from dsf.mixers._shard import shard_own
from dsf.mixers._shift import TokenShift

if TYPE_CHECKING:
    from dsf.parallel import World
    from dsf.parallel.places import Places
    from dsf.parallel.shares import Shares

Side = tuple[Tensor, ...]


class MixerState(NamedTuple):
    """What a mixer remembers of the past; immutable, one row a sequence.

    conv: the last K-1 inputs of the short convolution, [B, C, K-1], or None without one.
    recurrent: the state of the recurrence, [B, H, N, P'] (a `KVCache` for softmax attention).
    position: int64 [B], tokens seen, where the mixer needs to know (`positional`), else None.
    """

    conv: Tensor | None
    recurrent: Any
    position: Tensor | None = None


class Span(NamedTuple):
    """Where sequences begin in one call. fresh: no state was given, so every sequence begins here.

    before: int64 [rows], the tokens that each sequence had before, for mixers that count them.
    places: where this rank's tokens are, in calls whose tokens are spread over ranks.
    """

    fresh: bool
    cu_seqlens: Tensor | None
    before: Tensor | None = None
    places: Places | None = None

    def starts(self, like: Tensor) -> Tensor:
        """Mask [B, T] of the first tokens of fresh sequences, in the dtype of like [B, T, ...]."""
        batch, tokens = like.shape[:2]
        mask = like.new_zeros(batch, tokens + 1)  # one spare column: an empty last sequence begins at T
        if not self.fresh:
            return mask[:, :tokens]
        if self.places is not None and self.places.place is not None:  # whatever ranks before this one hold
            return (self.places.place == 0).to(like.dtype).expand(batch, -1)
        if self.places is not None:
            first = self.places.begins
        else:
            first = mask.new_zeros(1, dtype=torch.long) if self.cu_seqlens is None else self.cu_seqlens[:-1]
        return mask.index_fill(1, first.to(like.device, torch.long), 1.0)[:, :tokens]

    def positions(self, like: Tensor) -> Tensor:
        """int64 [B, T]: how many tokens of its sequence lie before each token of like [B, T, ...]."""
        if self.places is not None:
            return self.places.positions(self.before).expand(like.shape[0], -1)
        column = torch.arange(like.shape[1], device=like.device)
        if self.cu_seqlens is None:
            return (
                column + (0 if self.before is None else self.before.unsqueeze(1)) + column.new_zeros(like.shape[0], 1)
            )
        begin = self.cu_seqlens.to(like.device, torch.long)
        row = torch.searchsorted(begin[1:], column, right=True)
        moved = -begin[:-1] if self.before is None else self.before - begin[:-1]
        return (column + moved[row]).unsqueeze(0)

    def after(self, like: Tensor) -> Tensor:
        """int64 [rows]: the tokens of each sequence up to the end of this call."""
        if self.cu_seqlens is None:
            lengths = torch.full((like.shape[0],), like.shape[1], device=like.device)
            if self.places is not None and self.places.total is not None:
                lengths = self.places.total.expand(like.shape[0])
        else:
            lengths = self.cu_seqlens.to(like.device, torch.long).diff()
        return lengths if self.before is None else lengths + self.before


class Mixer(Owner):
    """Base of the zoo's modules. A subclass sets `recurrence` and `dims` and states three maps.

    project(x) -> (u, side): u [B, T, C] passes the short convolution, the tensors of `side` go around it.
    arguments(u, side, span) -> dict: the tensors of the recurrence, by input name.
    readout(y, side) -> [B, T, d_model]: norm, gate and output projection, from y [B, T, H, P].

    Law: running a sequence whole, in pieces, token by token (`step`), or packed with others gives the same
    outputs.

    All constructors end in layer_idx (the layer's place in a model, kept as an attribute), device and dtype. Weights
    are drawn on torch's default device, so that a seed gives the same ones everywhere, then moved.
    """

    recurrence: Recurrence
    dims: tuple[int, int, int]  # heads H, key axis N, value axis P of the recurrence
    conv1d: ShortConv | TokenShift | None
    positional = False  # True: `Span.positions` goes on where the state left off
    resets = False  # True: `arguments` asks for `Span.starts`
    parallel: World | None  # the ranks that share the tokens (dsf.parallel.attach), or None
    shares: Shares | None = None  # the ranks that share the heads (dsf.parallel.HeadShard), or None

    def __init__(self, layer_idx: int | None = None) -> None:
        super().__init__()
        self.conv1d = None
        self.parallel = None
        self.layer_idx = layer_idx

    def place(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Move to a device, cast to a dtype (rates stay float32): the last line of a constructor."""
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    def own_more(self, d_model: int, bare: bool) -> None:
        """What a subclass that takes its base's arguments has besides; bases with such subclasses call it last."""

    def shared(self, name: str, given: int | None, n_heads: int) -> int:
        """How many heads groups of n_heads share: as given, or all. Raises InputError where that does not divide."""
        found = n_heads if given is None else given
        if found < 1 or n_heads % found:
            raise InputError(f"{type(self).__name__}: {name} ({found}) must divide n_heads ({n_heads})")
        return found

    def inner(self, d_model: int, expand: float) -> int:
        """expand · d_model channels. Raises InputError unless that is a whole number."""
        found = int(expand * d_model)
        if found < 1 or found != expand * d_model:
            raise InputError(
                f"{type(self).__name__}: expand ({expand}) times d_model ({d_model}) must be a whole number"
            )
        return found

    def inner_heads(self, d_inner: int, headdim: int, n_groups: int) -> int:
        """Heads of headdim channels, in groups that share keys. Raises InputError where either does not divide."""
        heads = d_inner // headdim
        if heads * headdim != d_inner or heads % n_groups:
            raise InputError(
                f"{type(self).__name__}: headdim {headdim} must divide {d_inner}, and n_groups {n_groups} the heads"
            )
        return heads

    def width(self, channels: int, n_heads: int, given: int | None, name: str) -> int:
        """The width of a head: as given, or channels / n_heads. Raises InputError where that does not divide."""
        if n_heads < 1 or (given is not None and given < 1):
            raise InputError(f"{type(self).__name__}: n_heads is {n_heads} and {name} {given}; both must be positive")
        if given is None and channels % n_heads:
            raise InputError(
                f"{type(self).__name__}: n_heads ({n_heads}) must divide its {channels} channels, or give {name}="
            )
        return given if given is not None else channels // n_heads

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        """x [B, T, d_model] -> (u [B, T, C], side)."""
        return x, ()

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        """Inputs of `recurrence` by name."""
        raise NotImplementedError

    def seen(self, u: Tensor, side: Side, inputs: dict[str, Tensor]) -> Side:
        """What `readout` gets as side: that of `project`, unless it needs more.

        u: after the convolution. inputs: what `arguments` returned; what is no input of the recurrence and only
        `readout` reads is to be taken out of it here.
        """
        return side

    def readout(self, y: Tensor, side: Side) -> Tensor:
        """y [B, T, H, P] -> [B, T, d_model]."""
        raise NotImplementedError

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
        """Mix a sequence.

        x: [B, T, d_model]. state: what an earlier call returned, or None at the start of the sequences.
        cu_seqlens: int [S+1] or a dsf.Packing, boundaries of sequences packed along T, which may be empty; then B is 1
        and the state has S rows.
        attention_mask: [B, T] of ones, as models pass it where nothing is padded. use_cache: False returns no state.
        parallel: a dsf.parallel.Sequence whose ranks hold the tokens between them (the attached one unless given): x
        are this rank's, states and cu_seqlens those of the global sequences.
        reverse: the whole layer, its convolution too, runs from every sequence's last token to its first; a state is
        then that behind the tokens. tokens: further per-token tensors, where the mixer's `arguments` names any.
        Returns (y [B, T, d_model], state). Raises InputError for a mask with padding, or one beside cu_seqlens.
        """
        world = self.parallel if parallel is None else parallel
        check_call(self, x, state, cu_seqlens, attention_mask, world)
        if reverse:
            return self._backwards(x, state, cu_seqlens, use_cache, world, tokens)
        inputs, side, state = self._prepare(x, state, cu_seqlens, tokens, world)
        options = {"initial_state": state.recurrent, "cu_seqlens": cu_seqlens, "parallel": world}
        if not use_cache:
            return self.readout(self.recurrence(**inputs, **options), side), None
        y, after = self.recurrence(**inputs, **options, return_state=True)
        return self.readout(y, side), state._replace(recurrent=after)

    def _backwards(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | Packing | None, use_cache: bool,
        world: World | None, tokens: dict[str, Tensor],
    ) -> tuple[Tensor, MixerState | None]:  # fmt: skip
        """`forward` of the tokens in the other order, which costs a copy of x and of y."""
        packed = cu_seqlens is not None
        if cu_seqlens is not None:
            cu_seqlens = flipped_packing(type(self).__name__, cu_seqlens, x.shape[1] if world is None else None)
        if state is not None:
            state = MixerState(*(flipped_rows(part, packed) for part in state))
        tokens = {name: part.flip(1) for name, part in tokens.items()}
        world = None if world is None else world.backwards()
        options: dict[str, Any] = {"use_cache": use_cache, "parallel": world, **tokens}
        y, after = self.forward(x.flip(1), state, cu_seqlens, **options)
        if after is not None:
            after = MixerState(*(flipped_rows(part, packed) for part in after))
        return y.flip(1), after

    def shard_rates(self, **options: Any) -> nn.Module | None:
        """Shard this layer's own rates by FSDP2 in float32, apart from its block (`dsf.mixers.shard_rates`).

        Returns the module that holds them now, None for a layer without rates.
        """
        return shard_own(self, **options)

    def step(self, x: Tensor, state: MixerState | None = None, **tokens: Tensor) -> tuple[Tensor, MixerState]:
        """Decode one token. x: [B, d_model] -> (y [B, d_model], state). Raises InputError for reverse=True."""
        if tokens.pop("reverse", False):
            refuse(type(self).__name__, "step", "call the layer with reverse=True on the whole sequence")
        tokens = {name: value.unsqueeze(1) for name, value in tokens.items()}
        inputs, side, state = self._prepare(x.unsqueeze(1), state, None, tokens)
        inputs = {
            i.name: inputs[i.name].squeeze(1) if i.kind.time else inputs[i.name] for i in self.recurrence.spec.inputs
        }
        y, after = self.recurrence.step(state.recurrent, **inputs)
        return self.readout(y.unsqueeze(1), side).squeeze(1), state._replace(recurrent=after)

    def inputs(
        self, x: Tensor, state: MixerState | None = None, cu_seqlens: Tensor | Packing | None = None, **tokens: Tensor
    ) -> dict[str, Tensor]:
        """The very tensors `forward` feeds to `recurrence`: `m.recurrence.trajectory(**m.inputs(x))`."""
        return self._prepare(x, state, cu_seqlens, tokens, self.parallel)[0]

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """Numbers one sequence keeps after `context` tokens; those of its convolution too, unless conv=False.

        Only the cache of softmax attention depends on `context`.
        """
        heads, n, p = self.dims
        rows, columns = self.recurrence.state_shape(N=n, P=p)
        window = self.conv1d.state_size if conv and self.conv1d is not None else 0
        return heads * rows * columns + window

    def _prepare(
        self,
        x: Tensor,
        state: MixerState | None,
        cu_seqlens: Tensor | Packing | None,
        tokens: dict[str, Tensor],
        world: World | None = None,
    ) -> tuple[dict[str, Any], Side, MixerState]:
        """(inputs of the recurrence, side, the state with all of it renewed but `recurrent`)."""
        u, side = self.project(x)
        bounds = tensor_of(cu_seqlens, x.device)
        span = Span(state is None, bounds, None if state is None else state.position)
        if world is not None:
            from dsf.parallel.places import places_of

            span = span._replace(places=places_of(world, x, cu_seqlens, self.positional or self.resets))
            if torch.compiler.is_compiling() and span.places is not None and span.places.place is not None:
                u = torch.ops.dsf.after(u, [span.places.place])  # ranks' graphs keep collectives in one order
        u, window = self.convolve(u, None if state is None else state.conv, cu_seqlens, world)
        inputs = self.arguments(u, side, span, **tokens)
        position = span.after(x) if self.positional else None
        return (
            inputs,
            self.seen(u, side, inputs),
            MixerState(window, None if state is None else state.recurrent, position),
        )

    def convolve(
        self, u: Tensor, past: Tensor | None, cu_seqlens: Tensor | Packing | None, world: World | None
    ) -> tuple[Any, Tensor | None]:
        """u [B, T, C] after the short convolution, where there is one, and the state of that."""
        if self.conv1d is None:
            return u, None
        if world is None:
            return self.conv1d(u, past, tensor_of(cu_seqlens, u.device))
        from dsf.parallel.halo import convolve

        return convolve(self.conv1d, self.conv1d.kernel_size[0] - 1, u, past, cu_seqlens, world)


def check_call(
    layer: nn.Module, x: Tensor, state: Any, cu_seqlens: Tensor | Packing | None, mask: Tensor | None,
    world: World | None,
) -> None:  # fmt: skip
    """What a layer checks of a call, together with the ranks that share the tokens. Raises InputError."""

    def look() -> None:
        if mask is not None:
            check_mask(type(layer).__name__, mask, cu_seqlens)

    if world is not None:
        from dsf.parallel.agree import agree_layer

        agree_layer(world, layer, x, state, cu_seqlens, look)
    look()  # also of calls of a kind that ranks have compared already


def check_mask(name: str, mask: Tensor, cu_seqlens: Tensor | Packing | None) -> None:
    """Raise InputError, in the words of the layer of that name, unless the mask says that every token counts."""
    if cu_seqlens is not None:
        raise InputError(f"{name}: attention_mask and cu_seqlens are both given; cu_seqlens alone says it all")
    if mask.dim() != 2:
        raise InputError(f"{name}: attention_mask has shape {list(mask.shape)}, expected [B, T] of ones")
    if torch.compiler.is_compiling():
        torch._assert_async(mask.all(), f"{name}: attention_mask has padding; pack the tokens, give cu_seqlens")
    elif not bool(mask.all()):
        padded = int((mask == 0).sum())
        raise InputError(
            f"{name}: attention_mask has {padded} padded tokens, and a recurrence would take them into its state. "
            "Leave them out: x[mask.bool()].unsqueeze(0) packs the rest of all sequences into one row, and "
            "cu_seqlens=[0, and the running sum of mask.sum(1)] says where each begins and ends"
        )


def shard_rates(model: nn.Module, **options: Any) -> list[nn.Module]:
    """Shard the rates of every layer in a model in float32, before its blocks are sharded with another policy.

    FSDP2 casts all parameters of a group to its policy's param_dtype, decays' rates too, and a group ends where a
    module inside is sharded already. This moves each layer's rates into a child module and calls
    `torch.distributed.fsdp.fully_shard` on it: one small group a layer, gathered once a forward pass. State dicts keep
    their names; named_parameters() says `rates.A_log` for `A_log`. options: of fully_shard (mesh=...), but mp_policy.
    Returns the modules that were sharded. Raises TypeError for a policy among the options.
    """
    found = [module.shard_rates(**options) for module in list(model.modules()) if isinstance(module, Mixer)]
    return [child for child in found if child is not None]
