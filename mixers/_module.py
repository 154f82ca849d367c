"""The base of every mixer module: projection, short convolution, recurrence, readout, and their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from dsf import Packing, Recurrence
from dsf.call.asked import check_switches
from dsf.call.backwards import flipped_packing, flipped_rows, refuse
from dsf.call.packing import sequence_of, tensor_of
from dsf.kernels.operators import is_cast
from dsf.kernels.reversal import reversed_tokens
from dsf.language.errors import InputError
from dsf.mixers._beside import lay
from dsf.mixers._checks import check_call, check_in_place, check_tokens, named_tokens
from dsf.mixers._conv import ShortConv, TokenShift
from dsf.mixers._own import Owner
from dsf.mixers._shard import shard_own
from dsf.mixers._sizes import Divided, check_input
from dsf.mixers._states import is_cache, put

if TYPE_CHECKING:
    from dsf.parallel import World
    from dsf.parallel.places import Places
    from dsf.parallel.shares import Shares

Side = tuple[Tensor, ...]


class MixerState(NamedTuple):
    """The state of a mixer, with one row for every sequence.

    conv: [B, C, K-1], the last K-1 inputs of the short convolution; None without one.
    recurrent: the state of the recurrence, [B, H, N, columns], or a `KVCache` for softmax attention.
    position: int64 [B], the number of each sequence's tokens so far, or None. Mixers with `positional` always count
      them. Mixers with `resets` count them from a call on packed sequences on, since one of these may be empty and so
      not have begun.
    """

    conv: Tensor | None
    recurrent: Any
    position: Tensor | None = None


torch.serialization.add_safe_globals([MixerState])  # tensors alone: torch.load takes it by its defaults


class Span(NamedTuple):
    """The sequences of one call. fresh: no state was given, so every sequence begins in the call.

    before: int64 [rows], the number of each sequence's earlier tokens; None for mixers that do not count them.
    places: the places of this rank's tokens in their sequences, where ranks share the tokens; else None.
    """

    fresh: bool
    cu_seqlens: Tensor | None
    before: Tensor | None = None
    places: Places | None = None

    def starts(self, like: Tensor) -> Tensor:
        """Mask [B, T], 1 at every token that begins a sequence, else 0, in the dtype of like [B, T, ...]."""
        batch, tokens = like.shape[:2]
        if self.before is not None:  # a sequence without tokens so far begins here, too
            return (self.positions(like) == 0).to(like.dtype)
        mask = like.new_zeros(batch, tokens + 1)  # one spare column: an empty last sequence begins at T
        if not self.fresh:
            return mask[:, :tokens]
        if self.places is not None and self.places.place is not None:  # whatever earlier ranks hold
            return (self.places.place == 0).to(like.dtype).expand(batch, -1)
        if self.places is not None:
            first = torch.tensor(self.places.begins, dtype=torch.long)
        else:
            first = mask.new_zeros(1, dtype=torch.long) if self.cu_seqlens is None else self.cu_seqlens[:-1]
        return mask.index_fill(1, first.to(like.device, torch.long), 1.0)[:, :tokens]

    def positions(self, like: Tensor) -> Tensor:
        """int64 [B, T]: the position in its sequence of each token of like [B, T, ...]."""
        if self.places is not None:
            return self.places.positions(self.before).expand(like.shape[0], -1)
        column = torch.arange(like.shape[1], device=like.device)
        if self.cu_seqlens is None:
            return (
                column + (0 if self.before is None else self.before.unsqueeze(1)) + column.new_zeros(like.shape[0], 1)
            )
        begin = self.cu_seqlens.to(like.device, torch.long)
        row = sequence_of(begin, column)
        moved = -begin[:-1] if self.before is None else self.before - begin[:-1]
        return (column + moved[row]).unsqueeze(0)

    def after(self, like: Tensor) -> Tensor:
        """int64 [rows]: the number of each sequence's tokens up to the end of this call."""
        if self.cu_seqlens is None:
            lengths = torch.full((like.shape[0],), like.shape[1], device=like.device)
            if self.places is not None and self.places.total is not None:
                lengths = self.places.total.expand(like.shape[0])
        else:
            lengths = self.cu_seqlens.to(like.device, torch.long).diff()
        return lengths if self.before is None else lengths + self.before


class Mixer(Owner, Divided):
    """Base of the zoo's layers. A subclass sets `recurrence` and `dims` and defines three methods:

    project(x) -> (u, side): u [B, T, C] goes through the short convolution, the tensors of `side` do not.
    arguments(u, side, span) -> dict: the inputs of the recurrence, by name.
    readout(y, side) -> [B, T, d_model]: norm, gate and output projection of y [B, T, H, P].

    A sequence has the same outputs whole, in pieces, token by token (`step`) and packed with others.

    The last arguments of every constructor are layer_idx (the layer's place in a model, kept as an attribute), device
    and dtype. Weights are drawn on torch's default device and then moved, so a seed gives the same on every device.
    """

    recurrence: Recurrence
    dims: tuple[int, int, int]  # heads H, key axis N, value axis P of the recurrence
    conv1d: ShortConv | TokenShift | None
    positional = False  # True: `arguments` needs `Span.positions`, so the state counts tokens
    resets = False  # True: `arguments` needs `Span.starts`, which tells a sequence's first token from later ones
    beside_x: tuple[str, ...] | None = ()  # the per-token tensors that `arguments` names; None: any
    needs = ""  # the per-token tensor that every call has to give; models have none, so they refuse such a layer
    parallel: World | None  # the ranks that share the tokens (dsf.parallel.attach), or None
    shares: Shares | None = None  # the ranks that share the heads (dsf.parallel.HeadShard), or None

    if TYPE_CHECKING:  # torch says Any of a module's call

        @overload
        def __call__(
            self, x: Tensor, state: MixerState | None = None, cu_seqlens: Tensor | Packing | None = None, *,
            attention_mask: Tensor | None = None, use_cache: Literal[True] = True, parallel: World | None = None,
            reverse: bool = False, **tokens: Tensor,
        ) -> tuple[Tensor, MixerState]: ...  # fmt: skip
        @overload
        def __call__(
            self, x: Tensor, state: MixerState | None = None, cu_seqlens: Tensor | Packing | None = None, *,
            attention_mask: Tensor | None = None, use_cache: Literal[False], parallel: World | None = None,
            reverse: bool = False, **tokens: Tensor,
        ) -> tuple[Tensor, None]: ...  # fmt: skip
        @overload
        def __call__(
            self, x: Tensor, state: MixerState | None = None, cu_seqlens: Tensor | Packing | None = None, *,
            attention_mask: Tensor | None = None, use_cache: bool, parallel: World | None = None,
            reverse: bool = False, **tokens: Tensor,
        ) -> tuple[Tensor, MixerState | None]: ...  # fmt: skip
        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, MixerState | None]: ...

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "arguments" in cls.__dict__:
            cls.beside_x = named_tokens(cls.arguments)

    def __init__(self, layer_idx: int | None = None) -> None:
        super().__init__()
        self.conv1d = None
        self.parallel = None
        self.layer_idx = layer_idx

    def place(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Move to a device and cast to a dtype, but rates not below float32; the last line of a constructor."""
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)
        lay(self.maps_beside())

    def own_more(self, d_model: int, bare: bool) -> None:
        """Add a subclass's own parameters: the last call in a constructor that subclasses inherit."""

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        """x [B, T, d_model] -> (u [B, T, C], side)."""
        return x, ()

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        """Inputs of `recurrence` by name."""
        raise NotImplementedError(f"{type(self).__name__} defines no arguments(u, side, span), the recurrence's inputs")

    def seen(self, u: Tensor, side: Side, inputs: dict[str, Tensor]) -> Side:
        """The `side` that `readout` gets: that of `project`, unless a subclass adds to it.

        u: [B, T, C] after the convolution. inputs: the result of `arguments`. What `readout` alone reads, and is no
        input of the recurrence, must be taken out of `inputs` here.
        """
        return side

    def readout(self, y: Tensor, side: Side) -> Tensor:
        """y [B, T, H, P] -> [B, T, d_model]."""
        raise NotImplementedError(f"{type(self).__name__} defines no readout(y, side), y as [B, T, d_model]")

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
        """Mix sequences x [B, T, d_model] along T.

        state: the one that an earlier call returned, or None where the sequences begin.
        cu_seqlens: integers [S + 1], or a dsf.Packing: the boundaries of S sequences packed along T. Then B is 1, and
          states have S rows. Sequences may be empty.
        attention_mask: [B, T] of ones, as models pass it where nothing is padded. use_cache: False returns no state.
        parallel: a dsf.parallel.Sequence whose ranks share the tokens, by default the attached one. x then holds this
          rank's tokens; states and cu_seqlens are those of the whole sequences.
        reverse: run the whole layer, convolution included, from every sequence's last token to its first. `state` is
          then the one after the last token.
        tokens: further tensors [B, T, ...], for layers whose `arguments` names some.

        Returns (y [B, T, d_model], state), with use_cache=False (y, None). Raises InputError for arguments that do not
        fit, a mask with padding, and a mask beside cu_seqlens.
        """
        world = self.parallel if parallel is None else parallel
        check_call(self, x, state, cu_seqlens, attention_mask, world, use_cache, reverse, tokens)
        if reverse:
            return self._backwards(x, state, cu_seqlens, use_cache, world, tokens)
        inputs, side, state = self._prepare(x, state, cu_seqlens, tokens, world, keep=use_cache)
        options = {"initial_state": state.recurrent, "cu_seqlens": cu_seqlens, "parallel": world}
        if not use_cache:
            return self.readout(self.recurrence(**inputs, **options), side), None
        y, after = self.recurrence(**inputs, **options, return_state=True)
        return self.readout(y, side), MixerState(state.conv, after, state.position)

    def _backwards(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | Packing | None, use_cache: bool,
        world: World | None, tokens: dict[str, Tensor],
    ) -> tuple[Tensor, MixerState | None]:  # fmt: skip
        """`forward` on reversed copies of the tokens, with y reversed back."""
        packed = cu_seqlens is not None
        if cu_seqlens is not None:
            cu_seqlens = flipped_packing(cu_seqlens)
        if state is not None:
            state = MixerState(*(flipped_rows(part, packed) for part in state))
        tokens = {name: reversed_tokens(part) for name, part in tokens.items()}
        world = None if world is None else world.backwards()
        options: dict[str, Any] = {"use_cache": use_cache, "parallel": world, **tokens}
        y, after = self.forward(reversed_tokens(x), state, cu_seqlens, **options)
        if after is not None:
            after = MixerState(*(flipped_rows(part, packed) for part in after))
        return reversed_tokens(y), after

    def shard_rates(self, **options: Any) -> nn.Module | None:
        """Shard this layer's own rates by FSDP2 in float32, apart from its block (`dsf.mixers.shard_rates`).

        Returns the module that then holds the rates, None for a layer without rates.
        """
        return shard_own(self, **options)

    def step(
        self, x: Tensor, state: MixerState | None = None, *, in_place: bool = False, **tokens: Tensor
    ) -> tuple[Tensor, MixerState]:
        """Decode one token x [B, d_model]: (y [B, d_model], the new state). state: None before the first token.

        in_place: write the new state into the memory of `state`, where a CUDA graph finds it; what `state` held is
        lost. Only a KVCache without room moves to other memory. tokens: as in a call, without the token axis.
        Raises InputError for reverse=True, and for in_place=True where gradients are enabled or sequences share memory.
        """
        if tokens.pop("reverse", False):
            refuse(type(self).__name__, "step", "call the layer with reverse=True on the whole sequence")
        check_input(self, x, step=True)
        check_tokens(self, x, tokens, ("state", "in_place"))
        tokens = {name: value.unsqueeze(1) for name, value in tokens.items()}
        if type(in_place) is not bool:
            check_switches(type(self).__name__, in_place=in_place)  # type: ignore[unreachable]
        if in_place:
            check_in_place(type(self).__name__, state)
        before = state
        early = in_place and not tokens  # what `arguments` may refuse must find the window as it was
        inputs, side, state = self._prepare(x.unsqueeze(1), before, None, tokens, in_place=early)
        inputs = {
            i.name: inputs[i.name].squeeze(1) if i.kind.time else inputs[i.name] for i in self.recurrence.spec.inputs
        }
        held = state.recurrent
        over = in_place and (is_cache(held) or (isinstance(held, Tensor) and held.is_contiguous()))
        y, after = self.recurrence.step(held, **inputs, in_place=over)
        state = MixerState(state.conv, after, state.position)
        if in_place and before is not None:
            state = put(before, state)
        return self.readout(y.unsqueeze(1), side).squeeze(1), state

    def inputs(
        self, x: Tensor, state: MixerState | None = None, cu_seqlens: Tensor | Packing | None = None, **tokens: Tensor
    ) -> dict[str, Tensor]:
        """The recurrence's inputs for x [B, T, d_model], by name: `m.recurrence.trajectory(**m.inputs(x))`."""
        check_input(self, x)
        check_tokens(self, x, tokens, ("state", "cu_seqlens"))
        return self._prepare(x, state, cu_seqlens, tokens, self.parallel)[0]

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """How many numbers one sequence's state has after `context` tokens. conv: also count the convolution's.

        Only the KVCache of attention depends on `context`.
        """
        heads, n, p = self.dims
        rows, columns = self.recurrence.state_shape(N=n, P=p)
        window = self.conv1d.state_size if conv and self.conv1d is not None else 0
        return heads * rows * columns + window

    def check_state(self, state: Any, rows: int | None = None, device: torch.device | None = None) -> None:
        """Raise InputError where `conv` or `position` of a state do not fit: they are of another layer, or on another
        device. The recurrence checks its own part. rows: the number of sequences; device: of x; None: not checked.
        """
        name, conv = type(self).__name__, self.conv1d
        if not isinstance(state, MixerState):
            raise InputError(f"{name}: state is of type {type(state).__name__}, expected what an earlier call returned")
        if (state.position is not None) != self.positional and not self.resets:
            does, counts = ("has no", "counts") if self.positional else ("has", "does not count")
            raise InputError(f"{name}: the state {does} positions, and this layer {counts} its tokens")
        got = None if state.conv is None else tuple(state.conv.shape)
        expected = None if conv is None else (conv.in_channels, conv.kernel_size[0] - 1)
        if (None if got is None else got[1:]) != expected:
            kept = "no window of a convolution" if expected is None else f"a window {['sequences', *expected]}"
            given = "none" if got is None else list(got)
            raise InputError(f"{name}: the state is of another layer: this one keeps {kept}, the state's is {given}")
        for part in (state.conv, state.position):
            if part is not None and rows is not None and part.shape[0] != rows:
                raise InputError(f"{name}: the state holds {part.shape[0]} sequences, the call has {rows}")
            if part is not None and device is not None and part.device != device:
                raise InputError(f"{name}: the state is on {part.device}, but x is on {device}")

    def _prepare(
        self,
        x: Tensor,
        state: MixerState | None,
        cu_seqlens: Tensor | Packing | None,
        tokens: dict[str, Tensor],
        world: World | None = None,
        in_place: bool = False,
        keep: bool = True,
    ) -> tuple[dict[str, Any], Side, MixerState]:
        """(inputs of the recurrence, side, the new state but for `recurrent`). keep: whether the state is wanted."""
        bounds = tensor_of(cu_seqlens, x.device)
        if state is not None:
            self.check_state(state, x.shape[0] if bounds is None else bounds.shape[0] - 1, x.device)
        u, side = self.project(x)
        places = None
        if world is not None:
            from dsf.parallel.places import places_of

            places = places_of(world, x, cu_seqlens, self.positional or self.resets)
            if torch.compiler.is_compiling() and places is not None and places.place is not None:
                u = torch.ops.dsf.after(u, [places.place])  # ranks' graphs keep collectives in one order
        span = Span(state is None, bounds, None if state is None else state.position, places)
        u, window = self.convolve(u, None if state is None else state.conv, cu_seqlens, world, in_place, keep)
        inputs = self.arguments(u, side, span, **tokens)
        device = x.device.type
        if is_cast(device):
            inputs = alike(self.recurrence, inputs, torch.get_autocast_dtype(device))
        counts = self.positional or span.before is not None or (self.resets and span.fresh and bounds is not None)
        position = span.after(x) if counts else None
        return (
            inputs,
            self.seen(u, side, inputs),
            MixerState(window, None if state is None else state.recurrent, position),
        )

    def convolve(
        self, u: Tensor, past: Tensor | None, cu_seqlens: Tensor | Packing | None, world: World | None,
        in_place: bool = False, keep: bool = True,
    ) -> tuple[Any, Tensor | None]:  # fmt: skip
        """u [B, T, C] after the short convolution, if any, and the convolution's new state. in_place: write that into
        the old one's memory if possible. keep: whether the new state is wanted; if not, it may be None."""
        if self.conv1d is None:
            return u, None
        if world is None:
            if in_place and _takes(past, u) and isinstance(self.conv1d, ShortConv):
                return self.conv1d(u, past, in_place=True)
            return self.conv1d(u, past, tensor_of(cu_seqlens, u.device))
        from dsf.parallel.halo import convolve

        return convolve(self.conv1d, self.conv1d.kernel_size[0] - 1, u, past, cu_seqlens, world, keep)


def alike(recurrence: Recurrence, inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs in autocast's type, if autocast left some of them in float32: a recurrence needs one type."""
    timed = [i.name for i in recurrence.spec.inputs if i.kind.time and isinstance(inputs.get(i.name), Tensor)]
    if {inputs[name].dtype for name in timed} != {dtype, torch.float32}:
        return inputs
    return inputs | {name: inputs[name].to(dtype) for name in timed}


def _takes(past: Tensor | None, u: Tensor) -> bool:
    """Whether a convolution of u can write into this state."""
    return past is not None and past.is_contiguous() and past.dtype == u.dtype


def shard_rates(model: nn.Module, **options: Any) -> list[nn.Module]:
    """Shard the rates of every layer in a model in float32. To be called before the model's blocks are sharded.

    FSDP2 casts all parameters of a block to its policy's param_dtype, the rates of decays too, unless a module inside
    is sharded already. This moves each layer's rates into a child module and calls
    `torch.distributed.fsdp.fully_shard` on it: one small group a layer, gathered once a forward pass. State dicts keep
    their names; named_parameters() says `rates.A_log` for `A_log`. options: those of fully_shard (mesh=...).
    Returns the modules that were sharded. Raises TypeError for an option mp_policy.
    """
    found = [module.shard_rates(**options) for module in list(model.modules()) if isinstance(module, Mixer)]
    return [child for child in found if child is not None]
