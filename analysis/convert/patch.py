"""Changes of a model that can be undone: hooks, attributes, and functions of modelling files."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from dsf.analysis.convert.layer import ACTIVE, Layer, current

_INSTALLED: dict[tuple[str, str], tuple[int, Any]] = {}  # (file, name) -> (conversions using it, the original)


class Patches:
    """The changes of one conversion, newest last."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run `action` when the changes are undone."""
        self._undo.append(action)

    def undo(self) -> None:
        """Undo all changes, newest first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute on this module alone, in place of its class's."""
        before = module.__dict__.get(name)
        object.__setattr__(module, name, value)

        def undo() -> None:
            object.__delattr__(module, name) if before is None else object.__setattr__(module, name, before)

        self.on_undo(undo)

    def function(self, file: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
        """Replace a function of a modelling file while a converted layer runs; other models keep the original."""
        key = (file.__name__, name)
        users, original = _INSTALLED.get(key, (0, getattr(file, name)))
        if not users:

            @functools.wraps(original)
            def dispatch(*args: Any, **kwargs: Any) -> Any:
                layer = current()
                return original(*args, **kwargs) if layer is None else replacement(layer, *args, **kwargs)

            setattr(file, name, dispatch)
        _INSTALLED[key] = (users + 1, original)

        def undo() -> None:
            users, original = _INSTALLED.pop(key)
            if users > 1:
                _INSTALLED[key] = (users - 1, original)
            else:
                setattr(file, name, original)

        self.on_undo(undo)

    def watch(self, layer: Layer) -> None:
        """Make `layer` the current one while its module runs."""
        signature = inspect.signature(type(layer.module).forward)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            layer.enter(named(signature, module, args, kwargs))
            ACTIVE.stack.append(layer)

        def after(*_: Any) -> None:
            if ACTIVE.stack and ACTIVE.stack[-1] is layer:  # a call that was refused did not begin
                ACTIVE.stack.pop()

        self.on_undo(layer.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self.on_undo(layer.module.register_forward_hook(after, always_call=True).remove)


def named(
    signature: inspect.Signature, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name, with those of **kwargs among them."""
    bound = signature.bind_partial(module, *args, **kwargs).arguments
    extra = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return {**{k: v for k, v in bound.items() if k not in extra}, **(bound.get(extra[0], {}) if extra else {})}
