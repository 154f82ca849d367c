"""Training steps of few tokens: forward and backward of a loss as a CUDA graph, which the host issues at once.

The host needs about as long for a step of few tokens as for one of many. With few tokens the GPU finishes each launch
before the host issues the next, and waits. A graph holds all launches, so the host issues them at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsf.kernels.recent import Recent
from dsf.language.errors import InputError

EAGER = 2  # calls of a kind before it is captured: they compile kernels, and fill what is remembered
MOST = 8  # kinds of calls that are captured; each holds the memory of a step
COUNTED = 64  # kinds whose calls are counted


@dataclass(frozen=True)
class Captured:
    """A graph, the memory that it reads, and the loss and gradients that it writes; None for an unused parameter."""

    replay: Callable[[], Any]
    inputs: Sequence[Tensor]
    loss: Tensor
    gradients: Sequence[Tensor | None]


class Graphed:
    """A loss and its gradients, as `loss_of(*tensors).backward()` gives them, from a CUDA graph.

    model: its parameters' gradients are added to their .grad.
    loss_of: a function of tensors that returns the model's loss, a tensor of one number.
    Call it with the tensors, which are moved to the model's device first. It returns the loss, detached. Raises
    InputError where loss_of returns anything else.
    Source: torch's CUDA graphs, https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.

    The first two calls of a kind run without a graph; the third is captured. Later calls of the kind repeat what was
    launched then, whatever Python in loss_of would do now. Calls are of one kind if they agree in the tensors' shapes
    and dtypes, autocast, the modes of all modules and which parameters want gradients. If parameters have moved,
    everything is captured again.

    These run without a graph: kinds beyond the first eight, calls on a CPU, models on several devices, parameters with
    hooks, DistributedDataParallel, and several processes without NCCL. So does, with a warning, what CUDA refuses to
    capture: a loss_of in which the host waits for a result, and a first capture while a result of another call still
    holds its autograd graph.

    In one of several processes (`dsf.parallel`) collectives are captured as well, and so is what FSDP was told before
    (`set_requires_gradient_sync`). There, what CUDA refuses raises RuntimeError, since other ranks wait for this one's
    collectives. Call `clear` before the process group is destroyed: NCCL waits for its graphs.

    Gradients lie in memory that the next call overwrites, so copy those that are to be kept. A graph keeps the memory
    of a whole step.
    """

    def __init__(self, model: nn.Module, loss_of: Callable[..., Tensor]):
        self.model, self.loss_of = model, loss_of
        self.graphs: dict[Hashable, Captured | None] = {}  # None: CUDA refused
        self._calls: Recent[int] = Recent(COUNTED)
        self._places: Sequence[int] = ()
        self._pool: Any = None
        self._hooked = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The loss, detached. Its gradients are added to the parameters' .grad. tensors: loss_of's arguments."""
        parameters = list(self.model.parameters())
        device = parameters[0].device
        tensors = tuple(x.to(device, non_blocking=True) for x in tensors)
        taken = not self._hooked and capturable(parameters, device)
        captured = self._captured(parameters, tensors) if taken else None
        return self._eager(tensors) if captured is None else self._replay(captured, parameters, tensors)

    def clear(self) -> None:
        """Free the graphs and their memory. The next calls are then the first of their kinds."""
        self.graphs.clear()
        self._calls.clear()

    def _captured(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> Captured | None:
        """The graph of a call, or None where there is none yet."""
        with torch.no_grad():  # of a DTensor's part autograd makes a node otherwise
            places = [local(p).data_ptr() for p in parameters]
        if places != self._places:
            self._places = places
            self.clear()
        kind = (
            tuple((x.shape, x.dtype) for x in tensors),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            tuple(m.training for m in self.model.modules()),
            tuple(p.requires_grad for p in parameters),
        )
        if kind not in self.graphs:
            calls = (self._calls.get(kind) or 0) + 1
            self._calls.put(kind, calls)
            if calls <= EAGER or len(self.graphs) == MOST:
                return None
            self.graphs[kind] = self._capture(parameters, tensors)
        return self.graphs[kind]

    def _eager(self, tensors: Sequence[Tensor]) -> Tensor:
        loss: Any = self.loss_of(*tensors)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"Graphed: loss_of returned {got}, expected a tensor of one number (`model(...).loss`)")
        loss.backward()
        return loss.detach()

    def _capture(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> Captured | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.clear_autocast_cache()  # a weight's copy from an earlier call would stay as it is
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            return capture(self._eager, parameters, tensors, self._pool)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            if ranks() > 1:
                why = f"CUDA refuses a graph of this step ({first}); take it without one (dsf train --no-graph)"
                raise RuntimeError(why) from error
            warnings.warn(f"a training step goes on without a CUDA graph, which refuses it: {first}", stacklevel=4)
            return None
        finally:
            torch.clear_autocast_cache()  # nor may later calls take one from the graph
            for p, g in zip(parameters, before, strict=True):
                p.grad = g

    def _replay(self, captured: Captured, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> Tensor:
        # a graph may overwrite its own gradients and those of another
        lent = {id(g) for c in self.graphs.values() if c is not None for g in c.gradients if g is not None}
        before = [g.clone() if g is not None and id(g) in lent else g for g in (p.grad for p in parameters)]
        for own, given in zip(captured.inputs, tensors, strict=True):
            own.copy_(given)
        captured.replay()
        for p, g, new in zip(parameters, before, captured.gradients, strict=True):
            p.grad = new if g is None else g if new is None else g.add_(new)
        return captured.loss.clone()


def capturable(parameters: Sequence[nn.Parameter], device: torch.device) -> bool:
    """Whether a step with these parameters can be captured. device: the first parameter's."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    if ranks() > 1 and "cuda:nccl" not in str(dist.get_backend_config()):
        return False
    return all(p.device == device and not (p._backward_hooks or p._post_accumulate_grad_hooks) for p in parameters)


def ranks() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local(x: Tensor) -> Tensor:
    """The tensor, or this rank's part of a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def capture(
    step: Callable[[Sequence[Tensor]], Tensor], parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor], pool: Any
) -> Captured:
    """A graph of step(tensors), which returns a loss and fills the parameters' gradients. Nothing is computed yet."""
    inputs = tuple(x.clone() for x in tensors)
    with capturing(parameters[0].device, pool) as graph:
        loss = step(inputs)
    return Captured(graph.replay, inputs, loss, [p.grad for p in parameters])


@contextmanager
def capturing(device: torch.device, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is launched inside as a graph; other threads may go on. Raises RuntimeError where CUDA refuses."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            yield graph
    except RuntimeError:
        recover(device)
        raise


def recover(device: torch.device) -> None:
    """Make random numbers work again after a failed capture, which torch takes for one that still goes on."""
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device=device)
