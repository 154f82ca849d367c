"""Drawing tokens from a model, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsf.language.errors import InputError
from dsf.mixers._beside import hooked
from dsf.mixers._states import caches_of, most_of, overwritten, room_of
from dsf.mixers.models.graphed import capturing
from dsf.mixers.models.spread import refuse_decoding
from dsf.mixers.models.states import ModelState, tensors_of

if TYPE_CHECKING:
    from dsf.mixers.models.causal_lm import CausalLM

RUNS = 3  # runs of a step for a capture, the captured one included
READ = 1024  # places of keys and values that a captured step reads at least, where so many tokens are to come


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """A token for each row of logits [B, V], int64 [B]: the likeliest at temperature 0, else one drawn from the top_k
    likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def captured(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], object], Tensor]:
    """(a function that replays what `step` launches, the tensor that it writes). `step` runs twice before the capture,
    which compiles its kernels and fills its caches. Raises InputError on a CPU."""
    if device.type != "cuda":
        raise InputError("graph=True captures a CUDA graph, and the ids are not on a GPU")
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(RUNS - 1):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with capturing(device) as graph:
            found = step()
    return graph.replay, found


class CapturedStep:
    """A model's decode step as a CUDA graph, which is one launch for the host.

    token: [B, 1], a token of each sequence. state: a `ModelState`; every call overwrites it. Only attention's keys and
    values are copied first, to memory for `tokens` tokens of a sequence, all of whose places a step reads. Where this
    is full, they move to memory of twice the size, and the graph is captured again. Raises InputError on a CPU, for
    mixers with hooks, and for states whose memory grows in another way.
    """

    def __init__(self, model: CausalLM, token: Tensor, state: ModelState, tokens: int = 0):
        self.model, self.token = model, token.clone()
        self._capture(state, tokens)

    def _capture(self, state: ModelState, tokens: int) -> None:
        mixers = [block.mixer for block in self.model.model._blocks()]
        if any(hooked(mixer) for mixer in mixers):
            raise InputError("graph=True: a graph calls no hooks, and a layer's mixer has some; remove them")
        self.state = self.model.reserve(state, max(tokens, *(most_of(s) + RUNS for s in state.layers)))
        self.counts = [c.filled for s in self.state.layers for c in caches_of(s) if c.filled is not None]
        if len(self.counts) < sum(len(caches_of(s)) for s in self.state.layers):
            raise InputError("graph=True needs states of fixed size; a layer keeps keys and values that grow otherwise")
        before = [(count, count.most) for count in self.counts]
        kept = [(x, x.clone()) for s in self.state.layers for x in overwritten(s, RUNS)]
        self.replay, self.logits = captured(self._step, self.token.device)
        for x, y in kept:
            x.copy_(y)
        for count, most in before:
            count.most = most
        self.left = min(room_of(m, s) for m, s in zip(mixers, self.state.layers, strict=True))

    def _step(self) -> Tensor:
        out = self.model(self.token, state=self.state, in_place=True)
        assert out.logits is not None and out.state is not None
        pairs = zip(tensors_of(list(self.state.layers)), tensors_of(list(out.state.layers)), strict=True)
        assert all(x is y for x, y in pairs)
        return out.logits[:, -1]

    def __call__(self, token: Tensor) -> Tensor:
        """The logits [B, V] after token [B, 1]. The next call overwrites their memory."""
        if self.left < 1:
            self._capture(self.state, 2 * max(most_of(s) for s in self.state.layers))
        self.token.copy_(token)
        self.replay()
        self.left -= 1
        for count in self.counts:
            count.most += 1
        return self.logits


@torch.no_grad()
def sample(
    model: CausalLM,
    ids: Tensor,
    n: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    graph: bool = False,
) -> Tensor:
    """ids [B, T] with `n` more tokens each: [B, T + n], in ids' dtype. The model runs in eval mode, then as before.

    temperature: divides the logits; 0 takes the likeliest token.
    top_k: only the so many likeliest tokens, and those as likely as the last of them, can be drawn; None: all.
    generator: of the random numbers; None: torch's.
    graph: all tokens but the first come from a CUDA graph of one step. It is captured in this call, and again whenever
      the memory of attention's keys and values has doubled.
    Raises InputError for a negative n or temperature, for top_k below 1, for graph=True on a CPU, and while ranks share
    the sequence.
    """
    refuse_decoding("generate", model.model)
    if not _whole(n) or n < 0:
        raise InputError(f"n = {n}: expected a number of tokens")
    if not temperature >= 0:
        raise InputError(f"temperature = {temperature}: expected 0 (the likeliest token) or more")
    if top_k is not None and (not _whole(top_k) or top_k < 1):
        raise InputError(f"top_k = {top_k}: expected a whole number of at least 1")
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        found, state, last, step = [ids], None, ids, None
        for _ in range(n):
            if graph and state is not None:
                step = step or CapturedStep(model, last, state, min(ids.shape[1] + n, max(READ, 2 * ids.shape[1])))
                logits = step(last)
            else:
                out = model(last, state=state, in_place=state is not None)  # nobody else holds these states
                assert out.logits is not None
                assert out.state is not None
                logits, first = out.logits[:, -1], state is None
                state = model.reserve(out.state, ids.shape[1] + n) if first and not graph else out.state
            last = choose(logits, temperature, top_k, generator).unsqueeze(1).to(ids.dtype)
            found.append(last)
        return torch.cat(found, dim=1)
    finally:
        for module, training in modes.items():
            module.training = training


def _whole(number: Any) -> bool:
    return hasattr(number, "__index__")
