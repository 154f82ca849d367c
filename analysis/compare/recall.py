"""The recall task (multi-query associative recall), which needs a memory: which value came with this key?

A sequence consists of PAIRS keys, each followed by its value; then noise; then the keys in another order, each followed
by its value. Keys and values are drawn anew for every sequence, so that weights cannot contain them: a right answer
came from the state. Source: Arora et al. (arXiv 2312.04927), Section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = 8  # different keys, and different values; the other bytes are noise
PAIRS, GAP, ROWS = 4, 4, 64
GAPS = (GAP, 4 * GAP, 16 * GAP)  # bytes of noise between the pairs and the questions, in training and in tests
CHANCE = 1 / PAIRS  # share of right answers of a guess among the sequence's values


def sequences(generator: torch.Generator, rows: int = ROWS, gap: int = GAP) -> Tensor:
    """Sequences of bytes [rows, 4 PAIRS + gap]."""
    keys = torch.rand(rows, KINDS, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.randint(KINDS, 2 * KINDS, (rows, PAIRS), generator=generator)
    order = torch.rand(rows, PAIRS, generator=generator).argsort(1)
    told = torch.stack([keys, values], 2).flatten(1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    noise = torch.randint(2 * KINDS, 256, (rows, gap), generator=generator)
    return torch.cat([told, noise, asked], 1)


def answers(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(logits of the answers [rows, PAIRS, 256], the values asked for [rows, PAIRS])."""
    begin = ids.shape[1] - 2 * PAIRS
    return model(ids[:, :-1], slice(begin, None, 2)), ids[:, begin + 1 :: 2]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross entropy of the answers in nats."""
    logits, asked = answers(model, ids)
    return F.cross_entropy(logits.flatten(0, 1), asked.flatten())


@torch.no_grad()
def accuracy(model: nn.Module, device: torch.device, rows: int = 128) -> dict[str, float]:
    """Shares of right answers, by the number of noise bytes."""
    found = {}
    for gap in GAPS:
        ids = sequences(torch.Generator().manual_seed(10_000 + gap), rows, gap).to(device)
        logits, asked = answers(model, ids)
        found[str(gap)] = (logits.argmax(-1) == asked).double().mean().item()
    return found
