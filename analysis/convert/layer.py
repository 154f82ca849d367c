"""`Layer`: a converted mixer of a model, and the runs of its recurrence."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsf.call.recurrence import Recurrence
from dsf.kernels.attention import KVCache
from dsf.language.errors import DsfError
from dsf.trajectory import Attention, Trajectory

HALF = (torch.bfloat16, torch.float16)


class ConversionError(DsfError):
    """A model cannot be converted, or cannot run converted. The text says why."""


@dataclass(frozen=True)
class Run:
    """One run of a layer's recurrence, as a recorder receives it.

    inputs: of the recurrence, by name; empty for softmax attention. state: the initial state. attention: the operands
    of softmax attention, else None. part: the run's number within one call of the layer (Zamba runs one for each head).
    backward: whether the tokens are in reversed order. packed: whether a row holds several sequences, which a
    trajectory would take for one. padding: bool [B, T], True where the recurrence read padding, or None.
    """

    recurrence: Recurrence
    inputs: Mapping[str, Tensor]
    state: Tensor | KVCache | None
    part: int
    attention: Attention | None = None
    backward: bool = False
    packed: bool = False
    padding: Tensor | None = None

    def trajectory(self) -> Trajectory:
        """The Trajectory of this run, without gradients, in float32, or float64 if the run was."""
        with torch.no_grad():
            if self.attention is not None:
                operands = vars(self.attention).items()
                wide: Any = {k: x.float() for k, x in operands if isinstance(x, Tensor) and x.dtype in HALF}
                return Trajectory(self.recurrence.spec, None, None, replace(self.attention, **wide))
            given: dict[str, Any] = {n: x.detach() for n, x in self.inputs.items()}
            # A clone: the model writes the next state into the same memory.
            start = self.state.detach().clone() if isinstance(self.state, Tensor) else None
            return self.recurrence.trajectory(**given, initial_state=start)


Listener = Callable[["Layer", Run], None]


@dataclass
class Call:
    """One call of a module.

    arguments: of the module, by name, also those that its core does not get. cu_seqlens: boundaries of packed
    sequences, or None. cached: the recurrent state in the model's cache at the start of the call, in the model's
    layout. runs: the number of runs of the recurrence so far. backward: whether the module runs from the last token to
    the first.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    cu_seqlens: Tensor | None = None
    cached: Tensor | None = None
    runs: int = 0
    backward: bool = False

    @property
    def cache(self) -> Any:
        """The model's cache, by whichever of its names it was passed; None without one."""
        return cache_in(self.arguments)


@dataclass(eq=False)
class Layer:
    """A mixer that dsf runs.

    name: its path in the model. module: the original module, whose projections still run. kind: the core's name.
    recurrence: what runs in place of the core. notes: how the original differs from this system.
    conv: how many numbers a short convolution keeps for a sequence. state: (heads, N, P); None before the first run.
    parts: runs of the recurrence in a call. key_heads: heads of a KV cache. window: tokens that it keeps.
    shared: the current call of the model. call: the current call of the module.
    """

    name: str
    module: nn.Module
    kind: str
    recurrence: Recurrence
    notes: tuple[str, ...] = ()
    conv: int = 0
    state: tuple[int, int, int] | None = None
    parts: int = 1
    key_heads: int | None = None
    window: int | None = None
    shared: ModelCall = field(default_factory=lambda: ModelCall(), repr=False)
    listeners: list[Listener] = field(default_factory=list, repr=False)
    call: Call = field(default_factory=Call, repr=False)

    def enter(self, arguments: Mapping[str, Any]) -> None:
        """Begin one call of the module. Raises ConversionError where it runs again in a backward pass, and what the
        model's call said of padding or packed sequences is not among its own arguments.
        """
        self.call = Call(arguments, boundaries({**arguments, **self.shared.arguments}))
        self.shared.check_again(self)
        # Read now: the model updates its cache before the core runs.
        self.call.cached = recurrent_state_of(self.call.cache, getattr(self.module, "layer_idx", None))

    def padding(self, tokens: int) -> Tensor | None:
        """bool [B, tokens], True where the call's tokens are padding; None when none is."""
        return self.shared.padding(tokens)

    def run(
        self, recurrence: Recurrence, state: Tensor | None = None, *, backward: bool = False, **inputs: Tensor
    ) -> tuple[Tensor, Any]:
        """Run `recurrence` on inputs [B, T, H, ·] and a state [B, H, N, columns]. Returns (y, final state).

        backward: whether the caller has reversed the tokens, which recorders are told. Packed sequences of the call
        stay apart. Inputs are converted to float32, or to float64 if one of them is float64. y has the widest dtype of
        the inputs of tokens.
        """
        y, final = self.run_wide(recurrence, state, backward=backward, **inputs)
        timed = [inputs[i.name].dtype for i in recurrence.spec.inputs if i.kind.time]
        return y.to(functools.reduce(torch.promote_types, timed)), final

    def run_wide(
        self, recurrence: Recurrence, state: Tensor | None = None, *, backward: bool = False, **inputs: Tensor
    ) -> tuple[Tensor, Any]:
        """As `run`, but y stays float32 or float64, whatever the inputs' dtype."""
        wide = any(inputs[i.name].dtype == torch.float64 for i in recurrence.spec.inputs if i.kind.time)
        dtype = torch.float64 if wide else torch.float32
        given: dict[str, Any] = {name: x.to(dtype) for name, x in inputs.items()}
        state = None if state is None else state.to(dtype)
        bounds = self.call.cu_seqlens if state is None else None
        y, final = recurrence(**given, initial_state=state, cu_seqlens=bounds, return_state=True)
        self.state = (y.shape[2], final.shape[-2], y.shape[-1])
        pads = self.padding(y.shape[1])
        self.show(Run(recurrence, given, state, self.call.runs, None, backward, bounds is not None, pads))
        if bounds is not None:
            final = final[-1:]  # a cache continues the last packed sequence
        return y, final

    def show(self, run: Run) -> None:
        """Pass a run to the recorders."""
        self.call.runs = self.parts = run.part + 1
        for listener in self.listeners:
            listener(self, run)


def _mask_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The mask of padding [B, T] among a call's arguments; None without, and for a mask of another kind."""
    mask = arguments.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


class ModelCall:
    """The arguments of the model's forward; its mixers get only some of them. config: the model's, or None.

    last_mask: the mask of the last call that may have a backward pass. packed: whether that call had several sequences
    in a row.
    """

    def __init__(self, config: Any = None) -> None:
        self.arguments: dict[str, Any] = {}
        self.config = config
        self.last_mask: Tensor | None = None
        self.packed = False

    def end(self) -> None:
        """Forget the call's arguments."""
        if torch.is_grad_enabled():
            self.last_mask = _mask_of(self.arguments)
            self.packed = boundaries(self.arguments) is not None
        self.arguments = {}

    def check_again(self, layer: Layer) -> None:
        """Raise ConversionError for a run in a backward pass (gradient checkpointing) that lacks the mask of padding or
        the boundaries that the model was given."""
        if self.arguments or torch._C._current_graph_task_id() == -1:
            return
        here = layer.recurrence.spec.is_attention or _mask_of(layer.call.arguments) is not None
        lost = self.last_mask is not None and not here and not bool((self.last_mask != 0).all())
        if lost or (self.packed and layer.call.cu_seqlens is None):
            raise ConversionError(
                f"{layer.name}: gradient checkpointing runs it again in the backward pass, without the "
                f"{'mask of padding' if lost else 'boundaries of packed sequences'} that the model was given; train "
                "without checkpointing, or without padding and packing"
            )

    def asks(self, switch: str) -> bool:
        """Whether the call asks for it, or the model's configuration where the call leaves it open."""
        return bool(self.arguments.get(switch, getattr(self.config, switch, False)))

    def mask(self, tokens: int) -> Tensor | None:
        """bool [B, tokens], False where the newest tokens are padding, from the 2-D attention mask; None without."""
        layer = current()
        # Without a call of the model, as where gradient checkpointing runs a mixer again, its own mask counts.
        given = layer.call.arguments if layer is not None and not self.arguments else self.arguments
        mask = _mask_of(given)
        if mask is None or mask.shape[1] < tokens:
            return None
        return mask[:, mask.shape[1] - tokens :] != 0

    def padding(self, tokens: int) -> Tensor | None:
        """bool [B, tokens], True where the newest tokens are padding; None when none is."""
        mask = self.mask(tokens)
        return None if mask is None or bool(mask.all()) else ~mask


def trailing_padding(pads: Tensor) -> Tensor:
    """The number of padding tokens at the end of each row of pads [B, T]: [B]."""
    return pads.flip(-1).long().cumprod(-1).sum(-1)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, or None; transformers calls it `cache` from 5.24 on."""
    names = ("cache", "cache_params", "past_key_values", "layer_past")
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def recurrent_state_of(cache: Any, index: int | None) -> Tensor | None:
    """The recurrent state of layer `index` in a transformers cache; None before its first call."""
    if index is None or cache is None:
        return None
    try:
        if hasattr(cache, "get_recurrent_state"):
            return cache.get_recurrent_state(index)
        layer = cache.layers[index]  # before transformers 5.22
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None
    except (ValueError, IndexError, AttributeError, TypeError):  # the layer has no recurrent state in this cache
        return None


def boundaries(arguments: Mapping[str, Any]) -> Tensor | None:
    """cu_seqlens from a call's cu_seq_lens_q or seq_idx [1, T]; None where nothing is packed."""
    given = arguments.get("cu_seq_lens_q")
    if given is None and arguments.get("seq_idx") is not None:
        index = arguments["seq_idx"][0]
        starts = torch.nonzero(index[1:] != index[:-1]).flatten() + 1
        ends = torch.tensor([0, len(index)], device=index.device)
        given = torch.cat([ends[:1], starts, ends[1:]])
    return given if given is None or len(given) > 2 else None


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Layer] = []


ACTIVE = _Active()


def current() -> Layer | None:
    """The converted layer whose forward is running in this thread, if any."""
    return ACTIVE.stack[-1] if ACTIVE.stack else None
