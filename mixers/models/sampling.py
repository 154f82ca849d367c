"""Drawing tokens from a model, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsf.language.errors import InputError
from dsf.mixers._states import is_cache
from dsf.mixers.models.states import ModelState, tensors_of

if TYPE_CHECKING:
    from dsf.mixers.models.causal_lm import CausalLM


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """A token for each row of logits [B, V]: the likeliest at temperature 0, else drawn from the top_k likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


class CapturedStep:
    """A model's decode step as a CUDA graph, one launch for the host: it reads a token of each sequence and overwrites
    the states.

    token: [B, 1]. state: a `ModelState`, which the graph overwrites from its first call on. Raises InputError on a CPU,
    and for keys and values, whose memory grows.
    """

    def __init__(self, model: CausalLM, token: Tensor, state: ModelState):
        if not token.is_cuda:
            raise InputError("graph=True captures a CUDA graph, and the ids are not on a GPU")
        if any(map(is_cache, pytree.tree_leaves(list(state.layers), is_leaf=is_cache))):
            raise InputError(
                "graph=True needs states of fixed size; keys and values of attention grow with every token"
            )
        parts = tensors_of(list(state.layers))
        self.token, kept = token.clone(), [x.clone() for x in parts]
        with torch.cuda.device(token.device):
            self._capture(model, state, parts)
        for x, y in zip(parts, kept, strict=True):
            x.copy_(y)

    def _capture(self, model: CausalLM, state: ModelState, parts: list[Tensor]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and remembers what it made
            after = [model(self.token, state=state, in_place=True).state for _ in range(2)][-1]
        torch.cuda.current_stream().wait_stream(side)
        assert after is not None
        assert all(x is y for x, y in zip(parts, tensors_of(list(after.layers)), strict=True))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            logits = model(self.token, state=state, in_place=True).logits
        assert logits is not None
        self.logits = logits[:, -1]

    def __call__(self, token: Tensor) -> Tensor:
        """Logits [B, V] after token [B, 1], in memory that the next call overwrites."""
        self.token.copy_(token)
        self.graph.replay()
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
    """`n` more tokens after each of ids [B, T]: int64 [B, T + n], in eval mode, whatever mode the model is in.

    temperature: divides the logits; 0 takes the likeliest. top_k: only so many of the likeliest can be drawn. graph:
    all tokens but the first come from a CUDA graph of one step, captured in this call.
    Raises InputError for a negative n or temperature, for top_k below 1, and for graph=True on a CPU or beside
    attention, whose cache grows.
    """
    if n < 0:
        raise InputError(f"n = {n}: expected a number of tokens")
    if temperature < 0:
        raise InputError(f"temperature = {temperature}: expected 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k = {top_k}: expected at least 1")
    training = model.training
    model.eval()
    try:
        found, state, last, step = [ids], None, ids, None
        for _ in range(n):
            if graph and state is not None:
                step = step or CapturedStep(model, last, state)
                logits = step(last)
            else:
                out = model(last, state=state, in_place=state is not None)  # nobody else holds these states
                assert out.logits is not None
                logits, state = out.logits[:, -1], out.state
            last = choose(logits, temperature, top_k, generator).unsqueeze(1).to(ids.dtype)
            found.append(last)
        return torch.cat(found, dim=1)
    finally:
        model.train(training)
