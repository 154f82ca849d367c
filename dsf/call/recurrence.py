"""`@recurrence`, and the Recurrence that it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from dsf.call import asked, backwards, decode, guard, packing
from dsf.call.attention import run_attention
from dsf.call.bind import Bound, bind, check_cache, check_state, state_keys
from dsf.call.calls import Calls, allow, call_in_graph, calls_of, key_of, packs_in_graph
from dsf.call.convolution import run_convolution
from dsf.call.cost import CONVOLUTION
from dsf.call.digits import of_enough_digits
from dsf.call.framed import run_framed
from dsf.call.launches import Planned
from dsf.call.packing import Packing
from dsf.call.plan import Plan, forms_of, make_plan
from dsf.call.record import record
from dsf.call.run import run
from dsf.call.solve import run_solved
from dsf.kernels.attention import KVCache
from dsf.kernels.operators import is_cast
from dsf.language.attention import truncated
from dsf.language.derived import interned
from dsf.language.errors import FormError, InputError, TraceError
from dsf.language.spec import Spec
from dsf.language.trace import trace
from dsf.torch.columns import columns, state_columns
from dsf.torch.lower import true_state
from dsf.trajectory import Trajectory
from dsf.triton import choose as gpu
from dsf.triton import step as gpu_step

if TYPE_CHECKING:
    from dsf.parallel.world import World

State = Tensor | KVCache
FinalState = Tensor | Any  # a State; whether it is a KVCache is known from the declaration only, and most are tensors


class Recurrence:
    """A sequence mixer declared as S_t = A_t S_{t-1} + B_t, y_t = C_tᵀ S_t + D_t, as @dsf.recurrence makes it."""

    ranks: ClassVar[Any] = asked.NoRanks  # the module dsf.parallel.call, set when dsf.parallel is imported

    def __init__(self, spec: Spec) -> None:
        self.spec = interned(spec)
        self.name = spec.name
        self.__name__ = spec.name
        self.__doc__ = spec.doc
        self._calls = calls_of(self.spec)
        self._key = key_of(self.spec)
        _ = self.spec.inner  # derived now, so that saved graphs find its programs by its digest

    def __reduce__(self) -> tuple[Any, ...]:
        return Recurrence, (self.spec,)

    def __copy__(self) -> Recurrence:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Recurrence:
        """Itself: it is immutable, so copies of a model share its plans and its printed kernels."""
        return self

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that this recurrence has, among naive, recurrent, scan, chunk, kernel and convolution."""
        return forms_of(self.spec)

    @overload
    def __call__(
        self, /, *args: Tensor, initial_state: State | None = None, cu_seqlens: Tensor | Packing | None = None,
        return_state: Literal[False] = False, form: str = "auto", backend: str = "auto",
        parallel: World | None = None, reverse: bool = False, **kwargs: Tensor,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, /, *args: Tensor, initial_state: State | None = None, cu_seqlens: Tensor | Packing | None = None,
        return_state: Literal[True], form: str = "auto", backend: str = "auto",
        parallel: World | None = None, reverse: bool = False, **kwargs: Tensor,
    ) -> tuple[Tensor, FinalState]: ...  # fmt: skip
    @overload
    def __call__(
        self, /, *args: Tensor, initial_state: State | None = None, cu_seqlens: Tensor | Packing | None = None,
        return_state: bool, form: str = "auto", backend: str = "auto",
        parallel: World | None = None, reverse: bool = False, **kwargs: Tensor,
    ) -> Tensor | tuple[Tensor, FinalState]: ...  # fmt: skip
    def __call__(
        self, /, *args: Tensor, initial_state: State | None = None, cu_seqlens: Tensor | Packing | None = None,
        return_state: bool = False, form: str = "auto", backend: str = "auto", parallel: World | None = None,
        reverse: bool = False, **kwargs: Tensor,
    ) -> Any:  # fmt: skip
        """Run the recurrence over T tokens.

        Inputs are given by position or name: of tokens [B, T, H, ·], Steps [B, T, n, H, ·], Params [H, ·]. An input of
        tokens may have fewer heads, a divisor of H; groups of consecutive heads then share them. All inputs have one
        floating dtype, except that Params may be float32 beside inputs of tokens in half precision.
        initial_state: before the first token; None where sequences begin. [B, H, N, columns] (`state_shape`) in float32
          (float64 for float64 inputs), or a KVCache for softmax attention and systems with a window.
        cu_seqlens: boundaries of S sequences packed along T (B is 1): a dsf.Packing, or an integer tensor [S + 1] from
          0 to T. States then have S rows. A sequence may be empty: it has no outputs, and its state does not change.
        form: naive, recurrent, scan, chunk, kernel, convolution or auto. backend: torch, triton or auto.
        parallel: a dsf.parallel.Sequence whose ranks share the tokens. T is then the number of this rank's tokens, but
          states and cu_seqlens are those of the whole sequences (docs/parallel.md).
        reverse: run from every sequence's last token to its first, S_t = A_t S_{t+1} + B_t. The initial state is then
          the one after the last token, the final state the one before the first.

        Returns y [B, T, H, P] in the dtype of the inputs of tokens; (y, final state) with return_state=True.
        Raises InputError for inputs that do not fit, FormError for a form or backend that cannot run them. The naive,
        recurrent and kernel forms on torch have second derivatives; others may raise RuntimeError for these.
        """
        if type(return_state) is not bool or type(reverse) is not bool:
            asked.check_switches(self.name, return_state=return_state, reverse=reverse)  # type: ignore[unreachable]
        initial_state = decode.in_order(self.spec, initial_state)
        if any(type(x) is not Tensor and hasattr(x, "device_mesh") for x in (*args, *kwargs.values())):
            how: dict[str, Any] = {"cu_seqlens": cu_seqlens, "return_state": return_state, "form": form}
            how |= {"backend": backend, "parallel": parallel, "reverse": reverse}
            return self._call_placed(args, kwargs, initial_state, how)
        if parallel is not None:
            return self._call_parallel(
                args, kwargs, initial_state, return_state, form, backend, cu_seqlens, parallel, reverse
            )
        if torch.compiler.is_dynamo_compiling() and not isinstance(initial_state, KVCache):
            options = (return_state, form, backend, reverse)
            tensors = (*args, *kwargs.values())
            x = tensors[0]
            cu_seqlens = packing.tensor_of(cu_seqlens, x.device)
            if cu_seqlens is None or packs_in_graph(self._key, form, backend, x.is_cuda, x.dtype == torch.float64):
                allow()
                return call_in_graph(self._key, "_call", options, tuple(kwargs), initial_state, cu_seqlens, *tensors)
        return self._call(args, kwargs, initial_state, return_state, form, backend, reverse, cu_seqlens)

    def _call_placed(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any, options: dict[str, Any]) -> Any:
        """A call on DTensors: the call on every rank's local part of them."""
        from dsf.parallel import placements

        given = dict(zip([i.name for i in self.spec.inputs], args, strict=False)) | kwargs
        if len(given) < len(args) + len(kwargs) or set(given) != {i.name for i in self.spec.inputs}:
            bind(self.spec, args, kwargs)  # says what is wrong
        return placements.call(self.spec, lambda **x: self(**x, **options), given, state, options["parallel"])

    def _call_parallel(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any, return_state: bool, form: str, backend: str,
        cu_seqlens: Tensor | Packing | None, parallel: World, reverse: bool,
    ) -> Any:  # fmt: skip
        bounds = cu_seqlens.bounds if isinstance(cu_seqlens, Packing) else cu_seqlens
        if torch.compiler.is_dynamo_compiling() and not isinstance(bounds, Tensor) and not isinstance(state, KVCache):
            allow()
            options, names = (return_state, form, backend, parallel.key, reverse, bounds), tuple(kwargs)
            return call_in_graph(self._key, "_call_shard", options, names, state, None, *args, *kwargs.values())
        return self.ranks.call(self, parallel, args, kwargs, state, return_state, form, backend, cu_seqlens, reverse)

    def _call_shard(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any, return_state: bool, form: str, backend: str,
        world: str, reverse: bool, bounds: tuple[int, ...] | None,
    ) -> Any:  # fmt: skip
        """A call over ranks as one node of a compiled graph. world: the key of the ranks."""
        found, packed = self.ranks.world_of(world), None if bounds is None else Packing(bounds)
        return self.ranks.call(self, found, args, kwargs, state, return_state, form, backend, packed, reverse)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any, return_state: bool, form: str, backend: str,
        reverse: bool = False, cu_seqlens: Tensor | Packing | None = None,
    ) -> Any:  # fmt: skip
        bound, plan = self._calls.prepare(self.spec, args, kwargs, state, form, backend)
        bounds = None if cu_seqlens is None else self._bounds(cu_seqlens, bound, plan)
        watch = guard.current() if guard.ON else None
        if watch is not None:
            watch.inputs(self.spec, bound, bounds, state)
        wanted = return_state or watch is not None
        y, final = (self._run_backwards if reverse else self._run)(bound, bounds, state, plan, wanted)
        y = y.to(bound.dtype)
        if watch is not None:
            watch.outputs(self.spec, bound, bounds, y, final)
        return (y, final) if return_state else y

    def _run_backwards(
        self, bound: Bound, bounds: list[int] | Tensor | None, state: Any, plan: Plan, wanted: bool
    ) -> tuple[Tensor, FinalState]:
        """`_run` from the last token to the first."""
        packed = bounds is not None
        if bounds is not None:
            bounds = backwards.flipped_bounds(bounds)
        bound = replace(bound, tensors=backwards.flipped(self.spec, bound.tensors))
        y, final = self._run(bound, bounds, backwards.flipped_rows(state, packed), plan, wanted)
        return backwards.reversed_tokens(y), backwards.flipped_rows(final, packed) if wanted else final

    def _bounds(self, cu_seqlens: Tensor | Packing, bound: Bound, plan: Plan) -> list[int] | Tensor:
        """Checked boundaries: a tensor on the inputs' device for kernels that read them there, else numbers."""
        packing.check_row(self.name, cu_seqlens, bound.sizes.batch)
        inner, tokens = self.spec.inner, bound.sizes.tokens
        on_device = plan.backend == "triton" and gpu.packs_on_device(inner, bound.sizes, bound.dtype, plan.scan)
        if on_device or (plan.scan and gpu.packs(inner)):
            if isinstance(cu_seqlens, Tensor) and (cu_seqlens.is_cuda or packing.is_hidden(cu_seqlens)):
                packing.check_once(self.name, cu_seqlens, tokens)
                return cu_seqlens.to(bound.device)
            if isinstance(cu_seqlens, Packing) and packing.is_captured(bound.device):
                packing.check_bounds(self.name, cu_seqlens.bounds, tokens)
                return cu_seqlens.on(bound.device)
        bounds = packing.values(cu_seqlens)
        packing.check_bounds(self.name, bounds, tokens)
        return packing.on_device(cu_seqlens, bounds, bound.device) if on_device else bounds

    def _run(
        self, bound: Bound, bounds: list[int] | Tensor | None, state: Any, plan: Plan, wanted: bool = True
    ) -> tuple[Tensor, FinalState]:
        """Check the state and run the plan, with autocast switched off. wanted: whether the final state is wanted."""
        device = bound.device.type
        if is_cast(device):
            with torch.autocast(device, enabled=False):
                return self._run(bound, bounds, state, plan, wanted)
        rows = bound.sizes.batch if bounds is None else len(bounds) - 1
        if self.spec.is_attention:
            assert not isinstance(bounds, Tensor)
            if state is not None:
                check_cache(self.spec, state, rows, bound)
            return run_attention(self.spec, bound, bounds, state, plan, wanted)
        self._check_state(state, rows, bound)
        if plan.form == CONVOLUTION:
            return run_convolution(self.spec, bound, bounds, state, plan, wanted)
        if self.spec.is_framed:
            return run_framed(self.spec, bound, bounds, state, plan, wanted)
        if self.spec.has_still_keys:
            bound = of_enough_digits(self.spec, bound, plan)
        if self.spec.system.solve is not None:
            return run_solved(self.spec, bound, bounds, state, plan, wanted)
        return run(self.spec, bound, bounds, state, plan, wanted)

    def _check_state(self, state: Any, rows: int, bound: Bound) -> None:
        if state is not None:
            sizes = bound.sizes
            expected = (rows, sizes.heads, sizes.n, state_columns(self.spec, sizes.n, sizes.keys, sizes.p))
            check_state(self.spec, state, expected, bound)

    def step(
        self, state: State | None, /, *args: Tensor, in_place: bool = False, backend: str = "auto",
        reverse: bool = False, **kwargs: Tensor,
    ) -> tuple[Tensor, FinalState]:  # fmt: skip
        """One token, for decoding. state: as initial_state of a call, None for the first token.

        Inputs are those of a call without the token axis: [B, H, ·], Steps [B, n, H, ·], Params [H, ·].
        in_place: overwrite `state` and return it. A tensor must be contiguous, and nothing may need a gradient. A
          KVCache without room for the token moves to memory of twice its size, which later steps overwrite.
        Returns y_t [B, H, P] and the new state. Raises InputError and FormError as a call does; InputError also for
        reverse=True, and for in_place=True where the state cannot be overwritten.
        """
        if type(in_place) is not bool:
            asked.check_switches(self.name, in_place=in_place)  # type: ignore[unreachable]  # callers without types
        if reverse:
            backwards.refuse(
                self.name, "step", "backwards the last token comes first, and step knows of one token; call "
                f"{self.name}(..., reverse=True) on the whole sequence, or step from its last token to its first"
            )  # fmt: skip
        if torch.compiler.is_dynamo_compiling() and not isinstance(state, KVCache):
            allow()
            tensors = (*args, *kwargs.values())
            return call_in_graph(self._key, "_step", (in_place, backend), tuple(kwargs), state, None, *tensors)
        return self._step(args, kwargs, state, in_place, backend)

    def _step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any, in_place: bool, backend: str
    ) -> tuple[Tensor, FinalState]:
        bound, plan = self._calls.prepare(self.spec, args, kwargs, state, "recurrent", backend, True)
        watch = guard.current() if guard.ON else None
        if watch is not None:
            watch.inputs(self.spec, bound, None, state)
        over = in_place and state is not None
        if over and not self.spec.is_attention:
            y, final = self._overwrite(bound, state, plan), state
        elif over and not torch.compiler.is_compiling():
            y, final = decode.overwrite(self.spec, bound, state)
        else:
            y, final = self._run(bound, None, decode.in_order(self.spec, state), plan)
        y = y.to(bound.dtype)
        if watch is not None:
            watch.outputs(self.spec, bound, None, y, final)
        return y[:, 0], final

    def _overwrite(self, bound: Bound, state: Any, plan: Plan) -> Tensor:
        """One step that overwrites the state."""
        if not isinstance(state, Tensor):
            raise InputError(f"{self.name}: in_place overwrites a state tensor, got {type(state).__name__}")
        self._check_state(state, bound.sizes.batch, bound)
        if not state.is_contiguous():
            raise InputError(f"{self.name}: in_place needs a contiguous state, got strides {list(state.stride())}")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*bound.tensors.values(), state)):
            raise InputError(f"{self.name}: in_place overwrites what a gradient would need; use torch.no_grad()")
        if plan.one_step and gpu_step.takes(self.spec, bound.sizes, bound.dtype):
            return gpu_step.run(self.spec, bound, state, in_place=True)[0]
        y, final = self._run(bound, None, state, plan)
        state.copy_(final)
        return y

    def state_shape(self, N: int = 1, P: int = 1) -> tuple[int, int]:
        """(rows, columns) of one head's state. rows: N, or the number of features; 1 without a Key axis.

        columns: P of S, then those of the normaliser and of the running maximum (each none, 1 or P), N for a readout
        that is a solve, and for `prev` as many as hold the values of earlier tokens.
        Raises FormError for softmax attention and systems with a window, which keep a cache, InputError for bad sizes.
        """
        if self.spec.is_attention:
            raise FormError(f"{self.name}: its state is a KV cache, N + P numbers a token and head")
        asked.check_sizes(self.spec, "the state", N=N, P=P)
        rows = state_keys(self.spec, N)
        return rows, state_columns(self.spec, rows, N if self.spec.has_key else 1, P)

    def true_state(self, state: Tensor, P: int) -> Tensor:
        """The columns of S and of the normaliser in a state [B, H, rows, columns], multiplied by e^m where a running
        maximum m scales them. P: the number of channels. Raises InputError where the columns do not fit P."""
        expected = columns(self.spec.inner, P).total
        exact = self.spec.frame is None and self.spec.system.solve is None
        if state.shape[-1] != expected if exact else state.shape[-1] < expected:
            raise InputError(f"{self.name}: a state of P = {P} has {expected} columns, got shape {list(state.shape)}")
        return true_state(self.spec, state, P)

    def plan(
        self, /, *args: Tensor, B: Any = 1, T: Any = 2048, H: Any = 1, N: Any = 64, P: Any = 64,
        dtype: torch.dtype = torch.float32, form: str = "auto", backend: str = "auto",
        device: torch.device | str = "cpu", parallel: World | None = None, reverse: bool = False, **kwargs: Tensor,
    ) -> Plan:  # fmt: skip
        """What a call on these tensors, or on inputs of these sizes, would run, and why. form, backend: as in a call.

        B, T, H, N, P, dtype, device: of the inputs, where no tensors are given. A tensor named B, T, H, N or P is the
          input of that name. The machine need not have the device.
        parallel, reverse: as in a call. Tensors and T are one rank's; the plan says what ranks exchange.
        Raises InputError and FormError as a call does.
        """
        numbers = {"B": B, "T": T, "H": H, "N": N, "P": P}
        names = {i.name for i in self.spec.inputs}
        kwargs |= {name: x for name, x in numbers.items() if isinstance(x, Tensor) and name in names}
        if args or kwargs:
            bound = bind(self.spec, args, kwargs)
            sizes, dtype, device, tensors = bound.sizes, bound.dtype, bound.device, bound.tensors
        else:
            sizes, device, tensors = asked.planned(self.spec, numbers, dtype, device)
        plan = make_plan(self.spec, sizes, dtype, form, backend, device)
        if plan.backend == "triton" and not (plan.one_step or reverse or parallel):
            plan = replace(plan, call=Planned.of(self, tensors, form, device))
        if reverse:
            plan = backwards.planned(self.spec, plan, sizes, dtype)
        return plan if parallel is None else self.ranks.planned(self.spec, plan, sizes, dtype, parallel)

    def trajectory(self, /, *args: Tensor, initial_state: Tensor | None = None, **kwargs: Tensor) -> Trajectory:
        """The time-varying linear system on these inputs: A_t, B_t, C_t and D_t of every token.

        initial_state: as in a call. States, the first `prev` and a readout that is a solve depend on it, denominators
          do not. Raises InputError as a call does, for reverse=True and for an initial_state of attention; FormError
          where A acts on the Value axis, and for a D of attention that is no multiple of the values.
        """
        if kwargs.pop("reverse", False):
            backwards.refuse(
                self.name, "trajectory", "its tokens stand in the order of the system's steps; give it the inputs from "
                "the last token to the first, x.flip(1)"
            )  # fmt: skip
        bound = bind(self.spec, args, kwargs)
        if self.spec.is_attention and initial_state is not None:
            raise InputError(
                f"{self.name}: the trajectory of softmax attention has no states, so no initial_state either"
            )
        self._check_state(initial_state, bound.sizes.batch, bound)
        return record(self.spec, bound, initial_state)

    def taylor(self, order: int) -> Recurrence:
        """Softmax attention with exponential features up to degree `order`, so that the state is finite.

        Raises TraceError for a recurrence without exponential features or with turns (Taylor features have no pairs to
        turn), and for an order that is not an integer of at least 0.
        """
        return Recurrence(truncated(self.spec, order))

    def __repr__(self) -> str:
        return str(self.spec)


Calls.recurrence = Recurrence


@overload
def recurrence(function: Callable[..., Any]) -> Recurrence: ...
@overload
def recurrence(*, name: str) -> Callable[[Callable[..., Any]], Recurrence]: ...
def recurrence(function: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Declare a recurrence by a function of annotated inputs that returns a System. The function runs once, on symbols.

    name: the recurrence's, if it is not the function's. Raises TraceError, which names the function's line.
    """

    if not isinstance(name, str | None):
        raise TraceError(f"recurrence(name=...) is the name of the recurrence, a string, got {name!r}")

    def wrap(f: Callable[..., Any]) -> Recurrence:
        spec = trace(f)
        return Recurrence(replace(spec, name=name) if name else spec)

    return wrap if function is None else wrap(function)
