"""The states of a model's layers as a transformers cache: `StateLayer` for one layer, `DsfCache` for a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dsf.language.errors import InputError
from dsf.mixers.models.states import Kept, ModelState, rows_of


class StateLayer(Kept, CacheLayerMixin):
    """A mixer's state as a layer of a transformers cache. It counts tokens, since generate() asks for their number."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    record_past = False

    def __init__(self, static: bool = False) -> None:
        CacheLayerMixin.__init__(self)
        Kept.__init__(self, static)
        self.width: int | None = None  # of masks, beside static layers of keys and values

    @property
    def batch_size(self) -> int:
        """The number of sequences. Raises AttributeError before the first call, as transformers' layers do."""
        rows = rows_of(self.state)
        if rows is None:
            raise AttributeError("no state yet")
        return rows

    max_batch_size = batch_size  # before 5.13

    @property
    def max_cache_len(self) -> int:
        """The number of places that masks have; -1 for any number."""
        return -1 if self.width is None else self.width

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Does nothing: the first state that is stored initialises this layer."""

    def update(self, *_: Any, **__: Any) -> Any:
        """Refuses keys and values, as this layer has none."""
        raise NotImplementedError("this layer keeps a recurrent state, no keys and values")

    def get_seq_length(self, *_: Any) -> int:
        """The number of tokens seen."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit, as releases before 5.13 ask for it."""
        return -1

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(the number of tokens seen, with those of the call; 0)."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return max(self.seen + new, self.width or 0), 0

    def reset(self) -> None:
        """Forget the state. (Zeros would be wrong: a running maximum starts at minus infinity.)"""
        self.state, self.seen, self.is_initialized, self.begun = None, 0, False, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the states of the beams that go on. beam_idx: int64, their rows."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the states of some sequences. indices: int64, their rows."""
        self.each(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence's state `repeats` times."""
        self.each(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, *_: Any) -> None:
        """Refuses, as a recurrent state cannot forget single tokens."""
        raise InputError("a recurrent state cannot be cropped; keep a copy of the cache (copy.deepcopy) to go back to")

    def offload(self) -> None:
        """Does nothing, as a state is small."""

    def prefetch(self) -> None:
        """Stay: a state is small."""


class DsfCache(Cache):
    """The states of a model's layers, as transformers' generate() carries them."""

    def __init__(self, config: Any = None, *, layers: int | None = None, static: bool = False) -> None:
        count = config.n_layers if layers is None else layers
        super().__init__(layers=[StateLayer(static) for _ in range(count)])

    def load(self) -> ModelState | None:
        """The model's state before the next call; None at the start."""
        states = tuple(state_layer(self, i).state for i in range(len(self.layers)))
        return None if all(s is None for s in states) else ModelState(states)

    def store(self, state: ModelState, tokens: int) -> None:
        """Keep the model's state after `tokens` more tokens."""
        for i, s in enumerate(state.layers):
            state_layer(self, i).store(s, tokens)


def states_of(cache: Any, layers: int) -> ModelState | None:
    """The model's state before the next call; None at the start. Raises InputError for another model's cache."""
    kept = [state_layer(cache, i) for i in range(layers)]
    if len(cache.layers) != layers:
        raise InputError(f"the cache is of a model of {len(cache.layers)} layers, this one has {layers}")
    begins = all(x.state is None and not x.is_initialized for x in kept)
    return None if begins else ModelState(tuple(x.state for x in kept))


def state_layer(cache: Any, index: int) -> StateLayer:
    """The cache's layer for the state of mixer `index`. It takes the place of an unused layer of another kind.

    Raises InputError where such a layer holds keys and values already.
    """
    while len(cache.layers) <= index:
        cache.layers.append(StateLayer())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        return layer
    used = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    begun = getattr(layer, "has_previous_state", False)
    if used or (any(begun.values()) if isinstance(begun, dict) else begun):  # one number in early releases
        raise InputError(f"the cache's layer {index} was filled by another model: start from an empty one")
    fresh = StateLayer()
    if getattr(layer, "max_cache_len", None) is not None:
        # masks of a static cache are as wide as its layers, whichever is asked, but for those with windows
        fresh.width, fresh.static = max(getattr(x, "max_cache_len", -1) for x in cache.layers), True
        fresh.is_compileable = True  # else transformers leaves masks away, and attention reads empty places
    cache.layers[index] = fresh
    return fresh
