"""`convert`: change a model in place so that dsf runs its mixers; `Converted`: the result, its report and its undo."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from dsf.analysis.convert import softmax
from dsf.analysis.convert.cores import Core
from dsf.analysis.convert.find import Found, LeftAlone, find, names_used
from dsf.analysis.convert.fir import causal_conv, causal_conv_step, fir
from dsf.analysis.convert.forwards import FORWARDS, METHODS, Forward
from dsf.analysis.convert.layer import ConversionError, Layer, ModelCall, cache_in
from dsf.analysis.convert.patch import Patches, named
from dsf.analysis.measures.state import StateSize, state_size
from dsf.call.recurrence import Recurrence
from dsf.language.errors import InputError
from dsf.mixers import Mixer, softmax_attention

CONVOLUTION: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": causal_conv, "causal_conv1d_update": causal_conv_step}

OLDEST = (5, 17)  # of transformers
NOTES = {
    "S6": ("a cached call of several tokens starts from the cached state; the original starts from zeros",),
    "WKV-4": ("calls of one token keep the sequences of a batch apart; the original mixes them up",),
}
POSITIONS = "a cached call without position_ids goes on after the cache; the original starts at position 0 again"
MASKS = "a boolean mask with an axis of heads says what is seen; the original, eager attention, adds it to its scores"
FORGETFUL = ("BambaAttention", "MiniMaxAttention")  # in models that forget positions
LIMITED = "one-token steps limit the step size to time_step_limit as whole sequences do; the original does not"
CONVOLVED = "packed sequences and padding at the end are kept out of convolution and state on every device"


class _Mark:
    """On every module of a converted model. A copy is refused: its hooks would be those of the original's layers, whose
    calls its own mixers would not see.
    """

    def __deepcopy__(self, memo: Any) -> _Mark:
        raise ConversionError("a converted model cannot be copied: undo() the conversion, copy, and convert each")


_MARK = _Mark()


class Converted:
    """A model whose mixers dsf runs. print(converted) shows a report.

    model: the object that was given, changed in place; of a model compiled by torch.compile, the model inside.
    layers: the converted mixers. left_alone: modules that may be mixers and were not converted, with reasons.
    undo() restores the model, as does the end of a `with` block.
    """

    def __init__(self, model: nn.Module, layers: list[Layer], left_alone: list[LeftAlone], patches: Patches) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.left_alone = tuple(left_alone)
        self._patches = patches

    def undo(self) -> nn.Module:
        """Restore the model's own mixers, and return the model."""
        self._patches.undo()
        return self.model

    def __enter__(self) -> Converted:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __getitem__(self, name: str) -> Layer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no converted layer is called {name!r}; they are {', '.join(x.name for x in self.layers)}")

    def state_size(self, context: int, width: int = 4) -> dict[str, StateSize]:
        """The size of the states of one sequence after `context` tokens, by the names of the layers that have run.

        width: bytes of a number. Raises ConversionError before the model's first call, which tells the sizes, and
        InputError for a context below 0.
        """
        if context < 0:
            raise InputError(f"state_size: context is {context}, expected at least 0")
        found = {}
        for layer in self.layers:
            if layer.state is None:
                continue
            heads, n, p = layer.state
            module: Any = layer.module
            if isinstance(module, Mixer):
                found[layer.name] = StateSize(module.state_size(context, conv=False), layer.conv, width)
                continue
            key_heads, latent = layer.key_heads, getattr(module, "kv_lora_rank", None)
            if layer.kind == "softmax" and latent is not None:  # keys and values are made of a latent for all heads
                key_heads, n, p = 1, latent, module.qk_rope_head_dim
            # A model's cache holds no biases: ALiBi's are made of positions.
            kept = softmax_attention if layer.kind == "softmax" else layer.recurrence
            found[layer.name] = state_size(
                kept, context, heads=heads * layer.parts, N=n, P=p, key_heads=key_heads,
                conv=layer.conv, window=layer.window, width=width,
            )  # fmt: skip
        if not found:
            raise ConversionError(
                "no converted layer has run yet: call the model once to learn the sizes of its states"
            )
        return found

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}: {len(self.layers)} mixers run as dsf recurrences"]
        lines += [f"  {x.name}: {x.kind} -> {x.recurrence.name} ({x.recurrence.spec.structure})" for x in self.layers]
        notes = dict.fromkeys((layer.kind, note) for layer in self.layers for note in layer.notes)
        lines += [f"  note, {kind}: {note}" for kind, note in notes]
        lines += [f"  left alone: {x.name} ({x.type}), because {x.why}" for x in self.left_alone]
        return "\n".join(lines)


def convert(model: nn.Module) -> Converted:
    """Replace every sequence mixer of a PyTorch model by a dsf recurrence, in place.

    The model's outputs do not change: for whole sequences, in pieces with a cache, token by token and with padding.
    Where the original is wrong, a layer's notes say how the two differ. Caches keep the model's layout, so a cache
    that was filled before the conversion stays valid. It works for transformers' models (with SSM, delta, linear and
    softmax mixers, and hybrids), for layers of dsf.mixers, and for classes given to `register`.

    Warns if transformers is older than OLDEST, the oldest release that was tried. Raises ConversionError for an object
    that is no torch module, for a model on the meta device, for a model of which a part is already converted, and for a
    model without a known mixer; it then names the unknown ones.
    """
    _check(model)
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper calls it, hooks and all
    patches = Patches()
    try:
        return _converted(model, patches)
    except BaseException:
        patches.undo()
        raise


def _converted(model: nn.Module, patches: Patches) -> Converted:
    found, left = find(model)
    layers, shared = [], ModelCall(getattr(model, "config", None))
    attention = [f for f in found if f.how == "softmax"]
    before = _set_attention(model, patches) if attention else None
    if attention and before is None:
        left += [
            LeftAlone(f.name, type(f.module).__name__, "its attention cannot be set from outside") for f in attention
        ]
        found = [f for f in found if f not in attention]
    if not found:
        alike: dict[str, list[str]] = {}
        for x in left:
            alike.setdefault(f"({x.type}): {x.why}", []).append(x.name or "the model")
        more = (f" and {len(names) - 1} more" if len(names) > 1 else "" for names in alike.values())
        named_left = "; ".join(f"{names[0]}{m} {what}" for (what, names), m in zip(alike.items(), more, strict=True))
        named_left = named_left or "nothing mixes tokens"
        raise ConversionError(f"{type(model).__name__}: no mixer to convert: {named_left}")
    _warn_of_age(found)
    attends = {_attends(f.how) for f in found} | {True for x in left if "Attention" in x.type}
    _watch_model(model, shared, patches, attends)
    apart = {id(part) for f in found if f.how == "FIR" for part in f.module.modules()}
    for entry in found:
        layer = _convert(entry, patches, apart)
        if entry.how == "softmax" and before == "eager":
            layer.notes += (MASKS,)
        layer.shared = shared
        layers.append(layer)
    _mend_methods(model, shared, patches)
    for module in model.modules():  # so that a part of it is refused, too
        patches.attribute(module, "_dsf_converted", _MARK)
    return Converted(model, layers, left, patches)


def register(
    target: type[nn.Module] | str, recurrence: Recurrence, kind: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that teaches `convert` a mixer class (or its name): the function replaces the class's forward.

        @register(MyMixer, unnormalized_linear_attention)
        def my_mixer(layer, module, x):
            q, k, v = module.qkv(x).unflatten(-1, (3, heads, -1)).unbind(-3)
            y, state = layer.run(unnormalized_linear_attention, q=q, k=k, v=v)
            return module.out(y.flatten(2))

    target: the class, or its name. recurrence: the one that reports show. kind: the mixer's name in reports; None: the
    class's. The function gets the Layer, the module and the arguments of the original forward, and returns what that
    forward returns.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = target if isinstance(target, str) else target.__name__
        FORWARDS[target] = Forward(kind or name, recurrence, function)
        return function

    return decorate


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConversionError(f"convert takes a torch module, got {type(model).__name__}")
    meta = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if meta is not None:
        raise ConversionError(f"{type(model).__name__} is on the meta device ({meta}): load its weights first")
    done = next((name for name, part in model.named_modules() if getattr(part, "_dsf_converted", False)), None)
    if done is not None:
        part = f"{done} of " if done else ""
        raise ConversionError(f"{part}{type(model).__name__} is converted already; undo() that conversion first")


def _warn_of_age(found: list[Found]) -> None:
    """Mixers of an early transformers hand their caches to other functions than those that are replaced."""
    if not any(type(f.module).__module__.startswith("transformers.") for f in found):
        return
    given = metadata.version("transformers")
    if tuple(int(x) for x in given.split(".")[:2]) < OLDEST:
        warnings.warn(
            f"dsf.convert was tried with transformers {OLDEST[0]}.{OLDEST[1]} and later, this is {given}: compare its "
            "outputs with the original's, above all of cached calls of several tokens",
            stacklevel=3,
        )


def _convert(entry: Found, patches: Patches, apart: set[int]) -> Layer:
    """Change one mixer. apart: the parts of convolutions that are mixers of their own."""
    module: Any = entry.module
    how = entry.how
    if isinstance(how, Forward):
        layer = Layer(entry.name, module, how.kind, how.recurrence, how.notes)
        patches.watch(layer)
        patches.attribute(module, "forward", partial(how.forward, layer, module))
    elif isinstance(how, Core):
        layer = Layer(entry.name, module, how.kind, how.recurrence, NOTES.get(how.kind, ()))
        _functions(layer, {**how.functions, **CONVOLUTION}, patches)
        if getattr(module, "time_step_limit", (0.0, float("inf"))) != (0.0, float("inf")):
            layer.notes += (LIMITED,)
    elif how == "FIR":
        weight = next(m.weight for m in module.modules() if isinstance(m, nn.Conv1d))
        layer = Layer(entry.name, module, "FIR", fir(weight.shape[-1]))
        _functions(layer, CONVOLUTION, patches)
    else:
        notes = (POSITIONS,) if type(module).__name__ in FORGETFUL else ()
        layer = Layer(entry.name, module, "softmax", softmax_attention, notes)
        layer.window = getattr(module, "sliding_window", None)
        softmax.LAYERS[module] = layer
        patches.on_undo(partial(_forget, module))
        patches.watch(layer)
    if isinstance(module, Mixer):
        layer.conv = module.state_size(0) - module.state_size(0, conv=False)
        layer.key_heads = getattr(module, "n_kv_heads", None)
        layer.window = module.recurrence.spec.system.window
    elif layer.kind != "FIR":
        convolutions = (m for m in module.modules() if isinstance(m, nn.Conv1d) and id(m) not in apart)
        layer.conv = sum(m.in_channels * (m.kernel_size[0] - 1) for m in convolutions)
        if layer.kind == "WKV-4":  # its token shift
            layer.conv = module.time_mix_key.shape[-1]
    return layer


def _functions(layer: Layer, functions: dict[str, Callable[..., Any]], patches: Patches) -> None:
    patches.watch(layer)
    names = names_used(type(layer.module))
    for name, replacement in functions.items():
        if name in names:
            patches.function(names[name], name, replacement)
    if "causal_conv1d_fn" in names:
        layer.notes += (CONVOLVED,)


def _mend_methods(model: nn.Module, shared: ModelCall, patches: Patches) -> None:
    for module in model.modules():
        for (cls, method), replacement in METHODS.items():
            if type(module).__name__ == cls:
                patches.attribute(module, method, partial(replacement, shared, module))


def _attends(how: Core | Forward | str) -> bool:
    return how == "softmax" or (isinstance(how, Forward) and how.recurrence.spec.is_attention)


def _forget(module: nn.Module) -> None:
    softmax.LAYERS.pop(module, None)


def _set_attention(model: Any, patches: Patches) -> str | None:
    """Route softmax attention through dsf's function; returns what computed it before, None where the model does not
    let its attention be set.
    """
    if not hasattr(model, "set_attn_implementation"):
        return None
    softmax.register()
    before: str = model.config._attn_implementation
    model.set_attn_implementation(softmax.NAME)
    if model.config._attn_implementation != softmax.NAME:
        return None
    patches.on_undo(lambda: model.set_attn_implementation(before))
    return before


def _watch_model(model: nn.Module, shared: ModelCall, patches: Patches, attends: set[bool]) -> None:
    """Keep the arguments of the model's calls, and correct those of cached calls (see _repaired).

    attends: whether its mixers are attention, of each.
    """
    for module in {id(m): m for m in (model, getattr(model, "base_model", model))}.values():
        signature = inspect.signature(type(module).forward)

        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: inspect.Signature = signature
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments = named(signature, module, args, kwargs)
            given = {k: v for k, v in arguments.items() if v is not None}
            # The inner model does not get all arguments of the outer one.
            shared.arguments = given if module is model else {**shared.arguments, **given}
            # Models of attention alone count by themselves: with masks (OPT), or from another number (RoBERTa).
            counted = "position_ids" in signature.parameters and False in attends
            return args, {**kwargs, **_repaired(arguments, counted, True not in attends)}

        def after(module: nn.Module, *_: Any) -> None:
            if module is model:
                shared.end()

        patches.on_undo(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        patches.on_undo(module.register_forward_hook(after, always_call=True).remove)


def _repaired(arguments: dict[str, Any], counted: bool, recurrent_only: bool) -> dict[str, Any]:
    """Corrected arguments of a cached call.

    counted: positions continue after the cache's tokens (some hybrids start again at 0, or count a layer without keys).
    recurrent_only: a mask longer than the call is cut to the call's tokens for models without attention, which multiply
    by it.
    """
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        return {}
    cache: Any = cache_in(arguments)
    new, mask = tokens.shape[1], arguments.get("attention_mask")
    repaired: dict[str, Any] = {}
    if counted and arguments.get("position_ids") is None and hasattr(cache, "layers"):
        past = max((_length(x) for x in cache.layers), default=0)
        if past:
            positions = torch.arange(past, past + new, device=tokens.device)
            repaired["position_ids"] = positions.expand(tokens.shape[0], -1)
    if recurrent_only and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] > new:
        repaired["attention_mask"] = mask[:, -new:]
    return repaired


def _length(layer: Any) -> int:
    try:
        return int(layer.get_seq_length())
    except (ValueError, NotImplementedError, AttributeError, TypeError):
        return 0
