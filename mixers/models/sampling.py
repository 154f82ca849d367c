"""Drawing tokens from a model, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsf.language.errors import InputError

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


@torch.no_grad()
def sample(
    model: CausalLM,
    ids: Tensor,
    n: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`n` more tokens after each of ids [B, T]: int64 [B, T + n], in eval mode, whatever mode the model is in.

    temperature: divides the logits; 0 takes the likeliest. top_k: only so many of the likeliest can be drawn.
    Raises InputError for a negative n or temperature, and for top_k below 1.
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
        found, state, last = [ids], None, ids
        for _ in range(n):
            out = model(last, state=state, in_place=state is not None)  # nobody else holds these states
            assert out.logits is not None
            last = choose(out.logits[:, -1], temperature, top_k, generator).unsqueeze(1).to(ids.dtype)
            state = out.state
            found.append(last)
        return torch.cat(found, dim=1)
    finally:
        model.train(training)
