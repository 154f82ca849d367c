"""Calls of a recurrence: checks and plans, kept for later calls of the same shapes, and calls under torch.compile.

Checks and plan depend on shapes, dtypes and devices alone, so they are made once for each combination. Under
torch.compile a whole call is one node of the graph (torch.compiler.allow_in_graph): dynamo does not look into it, and
its torch operations and kernels are traced by the later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from dsf.call.bind import Bound, bind
from dsf.call.cost import CONVOLUTION
from dsf.call.guard import looks_swapped
from dsf.call.plan import Plan, make_plan
from dsf.kernels.recent import Recent
from dsf.language.derived import derived, digest
from dsf.language.invariant import is_invariant
from dsf.language.spec import Spec
from dsf.triton.choose import interpreted, packs_hidden
from dsf.triton.names import declared

LARGEST = 2048  # combinations that a recurrence keeps


def is_transformed(tensors: Iterable[Any]) -> bool:
    """True inside a transformation of torch.func, and where a tensor has a forward-mode tangent."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors if isinstance(x, Tensor))


class Calls:
    """Sizes and plans of a recurrence's calls so far, by shapes, dtypes, devices and options.

    recurrence: the class Recurrence, which dsf.call.recurrence sets here.
    """

    recurrence: ClassVar[Callable[[Spec], Any]]

    def __init__(self, spec: Spec) -> None:
        self.names, self.timed = tuple(i.name for i in spec.inputs), tuple(i.kind.time for i in spec.inputs)
        self.kept: Recent[tuple[Any, ...]] = Recent(LARGEST)
        self.warned = False

    def prepare(
        self, spec: Spec, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any, form: str, backend: str,
        one_token: bool = False,
    ) -> tuple[Bound, Plan]:  # fmt: skip
        """The checked inputs and the plan. Raises InputError and FormError."""
        names = self.names
        tensors = self._ordered(names, args, kwargs)
        transformed = is_transformed((*args, *kwargs.values(), state))
        key = None
        if tensors is not None:
            grad = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, state) if isinstance(x, Tensor))
            how = (form, backend, one_token, grad, transformed, interpreted())
            key = (*how, *((x.shape, x.dtype, x.device, x.layout) for x in tensors))
            try:
                found = self.kept.get(key)
            except TypeError:  # symbolic sizes under torch.compile
                key = found = None
            if found is not None:
                sizes, dtype, compute, device, plan = found
                if one_token:
                    tensors = tuple(x.unsqueeze(1) if t else x for x, t in zip(tensors, self.timed, strict=True))
                return Bound(dict(zip(names, tensors, strict=True)), sizes, dtype, compute, device), plan
        bound = bind(spec, tuple(args), kwargs, one_token)
        given = (*bound.tensors.values(), state)
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in given if isinstance(x, Tensor))
        plan = make_plan(spec, bound.sizes, bound.dtype, form, backend, bound.device, grad, transformed)
        if key is not None:
            if not (self.warned or one_token or state is not None or torch.compiler.is_compiling()):
                self.warned = looks_swapped(spec, bound.sizes)
            self.kept.put(key, (bound.sizes, bound.dtype, bound.compute, bound.device, plan))
        return bound, plan

    @staticmethod
    def _ordered(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The inputs in the declaration's order, or None where they do not fit."""
        if len(args) + len(kwargs) != len(names):
            return None
        try:
            found = (*args, *[kwargs[name] for name in names[len(args) :]])
        except KeyError:
            return None
        return found if all(isinstance(x, Tensor) for x in found) else None


@derived
def calls_of(spec: Spec) -> Calls:
    """The Calls of a declaration, shared by all copies of its recurrence."""
    return Calls(spec)


def key_of(spec: Spec) -> str:
    """A name of a recurrence for graphs, the same in every process with the same declaration."""
    return f"{spec.name}-{digest(spec)}"


def _declared(key: str) -> Spec:
    name, _, content = key.rpartition("-")
    return declared(name, content)


def call_in_graph(
    name: str, method: str, options: tuple[Any, ...], names: tuple[str, ...], state: Tensor | None,
    cu_seqlens: Tensor | None, *tensors: Tensor,
) -> Any:  # fmt: skip
    """A call or step of the recurrence of that name, as one node of a compiled graph."""
    found: tuple[Any, ...] = tensors
    proxy = next((x for x in found if isinstance(x, torch.fx.Proxy)), None)
    if proxy is not None:  # torch.fx traces a saved graph: keep the call as one node
        given = (name, method, options, names, state, cu_seqlens, *tensors)
        return proxy.tracer.create_proxy("call_function", call_in_graph, given, {})
    count = len(tensors) - len(names)
    kwargs = dict(zip(names, tensors[count:], strict=True))
    packing = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    run = getattr(Calls.recurrence(_declared(name)), method)
    with _compiling_where_traced(tensors):
        return run(tensors[:count], kwargs, state, *options, **packing)


@contextmanager
def _compiling_where_traced(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within it torch says that it compiles where it does, so that tensors without values are not kept for later calls:
    before torch 2.13 it does not say so inside a node."""
    if torch.compiler.is_compiling() or all(type(x) in (Tensor, nn.Parameter) for x in tensors):
        yield
        return
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = False


def packs_in_graph(name: str, form: str, backend: str, on_gpu: bool, wide: bool) -> bool:
    """True where a packed call can be one node: its kernels need no lengths on the host. wide: inputs are float64."""
    if form == CONVOLUTION or (form == "auto" and backend == "auto" and is_invariant(_declared(name))):
        return False  # the FFT needs sequences as batches, so lengths on the host
    runs = on_gpu or (interpreted() and backend == "triton")
    return runs and backend != "torch" and not wide and packs_hidden(_declared(name).inner, form)


packs_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as below


def allowing(function: Callable[..., Any]) -> Callable[[], bool]:
    """What lets dynamo take the function as one node of a graph, to be called in the code that it traces.

    Dynamo calls it while it traces, so that importing dsf does not import dynamo.
    """

    def allow() -> bool:
        torch.compiler.allow_in_graph(function)
        return True

    allow._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does
    return allow


allow = allowing(call_in_graph)
