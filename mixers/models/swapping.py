"""`swap`: mixers in place of the attention of an existing Llama-like model."""

from __future__ import annotations

import functools
import importlib
import json
import operator
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsf.language.errors import InputError
from dsf.mixers import Mixer
from dsf.mixers._beside import hooked
from dsf.mixers.models.naming import check_causal, constructor_of, layer_in_model, mixer_name, takes
from dsf.mixers.models.padding import unpadded
from dsf.mixers.models.states import check_fit

RECORD = "dsf_swap"  # the entry of a configuration that says what was swapped


class SwappedAttention(nn.Module):
    """A mixer as the self_attn of a Llama-like layer, with the arguments and results of such a module.

    Padding is removed before the mixer and restored after it. Sequences that are packed, by cu_seq_lens_q or by
    positions that begin again at 0, stay separate. The state is in the model's cache, also for beam search.
    """

    def __init__(self, mixer: Mixer, index: int):
        super().__init__()
        self.mixer = mixer
        self.index = index

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cache: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [B, T, d_model] -> (the mixer's output [B, T, d_model], None in place of attention weights).

        cache, past_key_values: two names of one argument, the model's cache (transformers before 5.24: the latter).
        """
        batch, tokens = hidden_states.shape[:2]
        cache = past_key_values if cache is None else cache
        layer = None if cache is None else _hf().state_layer(cache, self.index)
        state = None if layer is None else layer.state
        if layer is not None and layer.is_initialized and state is None:
            check_fit(state, self.mixer, self.index)
        bounds, padding = cu_seq_lens_q, None
        if bounds is None:
            seen = 0 if layer is None else layer.seen
            padding = unpadded(_real(attention_mask, seen, tokens), batch, tokens, layer, position_ids)
        if padding is not None and padding.empty:
            y = torch.zeros_like(hidden_states)
        elif padding is not None:
            y, state = self.mixer(padding.pack(hidden_states), state, padding.cu_seqlens)
            y = padding.unpack(y, hidden_states.shape)
        elif tokens == 1 and state is not None and not torch.is_grad_enabled() and not hooked(self.mixer):
            now: dict[str, Any] = {"in_place": True} if layer is not None and layer.static else {}
            y, state = self.mixer.step(hidden_states[:, 0], state, **now)
            y = y.unsqueeze(1)
        else:
            y, state = self.mixer(hidden_states, state, bounds)
        if layer is not None:
            layer.store(state, tokens, padding)
        return y, None


def _real(mask: Any, seen: int, tokens: int) -> Tensor | None:
    """The 2-D mask of a call's tokens from a layer's mask: those that may read themselves. Earlier ones a window hides,
    and later ones the order, but of a token that is no padding neither hides itself."""
    if mask is None or len(mask.shape) == 2:
        return mask
    first = min(seen, mask.shape[-1] - tokens)  # static caches have places behind the call's, windows drop those before
    if hasattr(mask, "mask_mod"):  # flex attention's, which has a rule in place of numbers
        row, query = (torch.arange(n, device=mask.kv_indices.device) for n in (mask.shape[0], tokens))
        return mask.mask_mod(row[:, None], row[:1], query, query + first).expand(len(row), -1)
    own = mask[:, 0].diagonal(first, dim1=-2, dim2=-1)
    return own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2


def _hf() -> Any:
    return importlib.import_module("dsf.mixers.models.hf")


class Swapped:
    """The change made by `swap`. As a context manager it calls undo() at its end.

    model: the object that was given to swap. mixers: {index of a layer: its mixer}, to train or to load weights into.
    """

    def __init__(self, model: Any, mixer: str | None, options: dict[str, Any], names: str) -> None:
        self.model = model
        self.mixers: dict[int, Mixer] = {}
        self.record: dict[str, Any] = {"mixer": mixer, "layers": [], "options": options}
        self._name = names
        self._before: dict[int, nn.Module] = {}
        self._kinds: dict[int, tuple[torch.device, torch.dtype]] = {}

    def undo(self) -> Any:
        """Restore the model's own attention, on the device, in the dtype and mode that the model has by now, and return
        the model. Raises InputError if one of the layers was swapped again."""
        layers = decoder_layers(self.model)
        for i, mixer in self.mixers.items():
            if getattr(layers[i].self_attn, "mixer", None) is not mixer:
                raise InputError(f"layer {i} was swapped again since: undo that swap first")
        for i, attention in self._before.items():
            now = _kind(self.mixers[i])
            if now != self._kinds[i] and now[0].type != "meta":  # the model was moved or cast since
                attention.to(device=now[0], dtype=now[1])
            layers[i].self_attn = attention.train(layers[i].self_attn.training)
        self.mixers, self._before = {}, {}
        records = [r for r in getattr(self.model.config, RECORD, []) if r is not self.record]
        if records:
            setattr(self.model.config, RECORD, records)
        elif hasattr(self.model.config, RECORD):
            delattr(self.model.config, RECORD)
            self.model.__dict__.pop("save_pretrained", None)
        return self.model

    def __enter__(self) -> Swapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return f"{type(self.model).__name__}: {self._name} in layers {', '.join(map(str, self.mixers))}"


def swap(model: Any, mixer: Any, layers: Iterable[int] | None = None, **options: Any) -> Swapped:
    """Replace the attention of a Llama-like model by a mixer, in place. The mixer's weights are new, to be trained.

        handle = dsf.models.swap(model, dsf.mixers.GatedDeltaNet, layers=[0, 1, 3])
        model.generate(...)
        handle.undo()

    model: of transformers, with decoder layers that call self_attn(hidden_states, ...) (Llama, Mistral, Qwen, ...).
    mixer: a class of layers, a name of the zoo, file.py:function or a Recurrence.
    layers: the indices of the layers, from 0; None: all.
    options: constructor arguments of the mixer; n_heads is the model's unless given.

    generate works with a cache and without, with beams, and with padding on either side. save_pretrained also records
    the swap, for `load_swapped`. Raises InputError for a model without such layers, a layer that it does not have, and
    a mixer that cannot be found or reads in both directions.
    """
    found = decoder_layers(model)
    if isinstance(layers, (int, str)):
        raise InputError(f"layers is {layers!r}, expected several numbers, such as [0, 1]; None for all of them")
    chosen = list(range(len(found))) if layers is None else list(layers)
    wrong = [i for i in chosen if type(i) is bool or not hasattr(i, "__index__") or not 0 <= i < len(found)]
    if wrong or len(set(chosen)) < len(chosen):
        raise InputError(f"layers {chosen}: expected different ones of 0 to {len(found) - 1}")
    width = model.config.hidden_size
    make = constructor_of(mixer)
    check_causal(mixer)
    if takes(make, "n_heads"):
        options.setdefault("n_heads", model.config.num_attention_heads)
    new = [layer_in_model(mixer, width, **options) for _ in chosen]  # all, before anything is changed
    handle = Swapped(model, *_written(mixer, options), getattr(mixer, "__name__", str(mixer)))
    for i, layer in zip(chosen, new, strict=True):
        attention = found[i].self_attn
        like = next(attention.parameters())
        layer.to(device=like.device, dtype=like.dtype)  # rates stay float32
        handle._before[i], handle.mixers[i], handle._kinds[i] = attention, layer, _kind(layer)
        found[i].self_attn = SwappedAttention(layer, i).train(attention.training)
    handle.record["layers"] = chosen
    setattr(model.config, RECORD, [*getattr(model.config, RECORD, []), handle.record])
    model.save_pretrained = functools.partial(_save, model)
    return handle


def load_swapped(folder: str | Path, **options: Any) -> Any:
    """The model that save_pretrained wrote to `folder` after `swap`, with its mixers and all weights, in eval mode.

    options: of transformers' from_config (dtype, attn_implementation). Raises InputError for a folder without such a
    model, for mixers without a name to find them by, and for weights that do not fit.
    """
    hf, folder = _hf(), Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json; expected a folder that save_pretrained has written")
    config = hf.AutoConfig.from_pretrained(folder, local_files_only=True)
    records = getattr(config, RECORD, None)
    if not records:
        raise InputError(f"{folder} holds no swapped model: load it by AutoModelForCausalLM.from_pretrained")
    delattr(config, RECORD)
    model = hf.AutoModelForCausalLM.from_config(config, **options)
    for record in records:
        if record["mixer"] is None:
            raise InputError(
                f"{folder}: its mixer has no name to find it by, or options that JSON does not have; swap it in "
                "yourself, then load_state_dict"
            )
        swap(model, record["mixer"], record["layers"], **record["options"])
    load_file = importlib.import_module("safetensors.torch").load_file
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} has no weights (*.safetensors)")
    missing: set[str] | None = None
    for file in files:
        try:
            result = model.load_state_dict(load_file(file), strict=False)
        except RuntimeError as error:
            raise InputError(f"{folder}: its weights do not fit: {str(error).splitlines()[-1].strip()}") from error
        if result.unexpected_keys:
            raise InputError(f"{folder}: {result.unexpected_keys[0]} is no weight of this model")
        missing = set(result.missing_keys) if missing is None else missing & set(result.missing_keys)
    left = (missing or set()) - set(getattr(model, "all_tied_weights_keys", None) or ())
    if left:
        raise InputError(f"{folder}: {len(left)} weights are not in its files, {sorted(left)[0]} first")
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(folder, local_files_only=True)
    return model.eval()


def decoder_layers(model: Any) -> Any:
    """The list of layers that have a self_attn. Raises InputError if there is none."""
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) and all(hasattr(x, "self_attn") for x in module):
                return module
    raise InputError(
        f"swap takes a Llama-like model of transformers, whose layers have a self_attn; got {type(model).__name__}"
    )


def _written(mixer: Any, options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The mixer's name and options for a configuration, which is printed and saved as JSON; None where there is no name
    or JSON does not have the options. (Device and type are the model's.)"""
    kept = {name: value for name, value in options.items() if name not in ("device", "dtype")}
    try:
        return mixer_name(mixer), json.loads(json.dumps(kept, default=operator.index))
    except (InputError, TypeError, ValueError):
        return None, {}


def _kind(mixer: Mixer) -> tuple[torch.device, torch.dtype]:
    """The device and the type to which a mixer was moved; rates stay float32."""
    like = next((p for p in mixer.parameters() if not getattr(p, "_no_weight_decay", False)), next(mixer.parameters()))
    return like.device, like.dtype


def _save(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    result = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    records = getattr(model.config, RECORD, [])
    where = "; ".join(f"{r['mixer'] or 'a mixer without a name'} in layers {r['layers']}" for r in records)
    warnings.warn(
        f"{save_directory} holds {where}. from_pretrained makes {type(model).__name__}'s own attention there, with "
        "random weights; dsf.models.load_swapped makes this model",
        stacklevel=2,
    )
    return result
