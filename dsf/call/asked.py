"""What is asked for beside tensors, checked: sizes, dtype and device of a plan, switches and ranks of a call."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

from dsf.call.bind import FLOATS, Sizes, check_even, state_keys
from dsf.language.errors import InputError
from dsf.language.spec import Spec


class NoRanks:
    """What stands for dsf.parallel until it is imported: before that nothing is a Sequence."""

    @staticmethod
    def call(recurrence: Any, world: Any, *_: Any) -> NoReturn:
        """Refuses `parallel=` of a call."""
        raise InputError(f"{recurrence.name}: parallel must be a dsf.parallel.Sequence, got {type(world).__name__}")

    @staticmethod
    def planned(spec: Spec, plan: Any, sizes: Sizes, dtype: torch.dtype, world: Any) -> NoReturn:
        """Refuses `parallel=` of a plan."""
        NoRanks.call(spec, world)


def check_switches(name: str, **switches: Any) -> None:
    """Raise InputError unless each is true or false: any word, "no" also, would be taken for True."""
    for switch, given in switches.items():
        if isinstance(given, Tensor) or given not in (False, True, None):
            raise InputError(f"{name}: {switch} is True or False, got {given!r}")


def check_sizes(spec: Spec, whose: str, **sizes: Any) -> None:
    """Raise InputError unless each is an integer of at least 1, and N even where key entries are taken in pairs."""
    for name, size in sizes.items():
        whole = isinstance(size, Integral | torch.SymInt) and not isinstance(size, bool)
        if not whole or size < 1:
            given = size if whole else type(size).__name__
            raise InputError(f"{spec.name}: {name} is a size of {whose}, expected at least 1, got {given}")
    if spec.has_key:
        check_even(spec, sizes["N"])


def planned(
    spec: Spec, numbers: dict[str, Any], dtype: Any, device: Any
) -> tuple[Sizes, torch.device, dict[str, Tensor]]:
    """Sizes of a plan by numbers B, T, H, N, P, its device, and inputs of these sizes. Raises InputError."""
    check_sizes(spec, "the plan", **numbers)
    if dtype not in FLOATS:
        raise InputError(f"{spec.name}: dtype must be one of {', '.join(map(str, FLOATS))}, got {dtype!r}")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{spec.name}: device must be a torch.device or the name of one, got {device!r}") from error
    keys = numbers["N"] if spec.has_key else 1
    sizes = Sizes(numbers["B"], numbers["T"], numbers["H"], keys, state_keys(spec, keys), numbers["P"])
    lengths = numbers | {"N/2": numbers["N"] // 2}
    shapes = {i.name: [lengths.get(a, i.kind.steps or 1) for a in i.kind.layout()] for i in spec.inputs}
    try:
        return sizes, where, {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    except (OverflowError, RuntimeError, TypeError) as error:  # torch's words for numbers beyond 64 bits differ
        given = ", ".join(f"{name} = {size}" for name, size in numbers.items())
        raise InputError(f"{spec.name}: inputs of {given} have more numbers than torch can count") from error
