"""The byte-level language model of comparisons, and its training, the same for every mixer."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf.analysis.text import Text
from dsf.language.errors import DsfError, InputError
from dsf.mixers import Mixer, parameter_groups
from dsf.mixers.models.graphed import Graphed

BYTES = 256
EVERYWHERE = slice(None)
Progress = Callable[[int, float], None]  # (steps done, loss in nats)


@dataclass(frozen=True)
class Setup:
    """Model and training of a comparison, the same for all mixers.

    d_model, layers, n_heads, d_state, headdim: of the model; a mixer gets those that its constructor takes. bare:
    mixers without their short convolutions and gates. batch: sequences a step; seq: bytes a sequence. steps, lr, seed:
    of AdamW, whose rate warms up, then falls to a tenth along a cosine. hidden: channels of the MLP, None for 2 ·
    d_model. device: of the training; weights and batches are drawn on the CPU, the same for all devices. Raises
    InputError for values out of range.
    """

    d_model: int = 64
    layers: int = 2
    n_heads: int = 4
    d_state: int = 16
    headdim: int = 16
    bare: bool = False
    batch: int = 8
    seq: int = 128
    steps: int = 300
    lr: float = 6e-3
    seed: int = 0
    hidden: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("d_model", "layers", "n_heads", "d_state", "headdim", "batch", "seq", "steps", "hidden"):
            at_least(name, getattr(self, name), 1)
        check_seed("seed", self.seed)
        check_rates("lr", (self.lr,))

    @property
    def sizes(self) -> dict[str, int]:
        """The constructor arguments that set a mixer's sizes."""
        return {"n_heads": self.n_heads, "d_state": self.d_state, "headdim": self.headdim}


def at_least(name: str, given: int | None, least: int) -> None:
    """Raise InputError for a number below `least`."""
    if given is not None and given < least:
        raise InputError(f"{name} is {given}, expected at least {least}")


def check_seed(name: str, seed: int) -> None:
    """Raise InputError for a seed that one of the generators does not take: numpy's takes 32 bits."""
    at_least(name, seed, 0)
    if seed >= 2**32:
        raise InputError(f"{name} is {seed}, expected at most {2**32 - 1}")


def check_rates(name: str, rates: Sequence[float]) -> None:
    """Raise InputError unless these are one or more different positive learning rates."""
    if not rates or not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
        given = ", ".join(map(str, rates)) or "nothing"
        expected = "a positive one" if name == "lr" else "different positive ones, such as 2e-3 and 6e-3"
        raise InputError(f"{name} is {given}, expected {expected}")


def accepted(make: Callable[..., nn.Module]) -> dict[str, inspect.Parameter]:
    """Constructor parameters of a module class (or a partial of one)."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {name: p for name, p in inspect.signature(make).parameters.items() if p.kind in named}


def build(make: Callable[..., Mixer], setup: Setup) -> Mixer:
    """A mixer of the setup's sizes, those that its constructor takes."""
    wanted = {**setup.sizes, "bare": setup.bare}
    known = accepted(make)
    return make(d_model=setup.d_model, **{name: value for name, value in wanted.items() if name in known})


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, mixer: Mixer, d_model: int, hidden: int | None = None):
        super().__init__()
        hidden = 2 * d_model if hidden is None else hidden
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
        self.mixer = mixer
        self.mlp = nn.Sequential(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, d_model] -> [B, T, d_model]."""
        return self.after(x, self.mixer(self.mixer_norm(x))[0])

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The output of the block from its input x and the mixer's output."""
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """A model of bytes: logits of the next byte. It has no position encoding; only the mixers know the order."""

    def __init__(self, make: Callable[..., Mixer], setup: Setup):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, setup.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(build(make, setup), setup.d_model, setup.hidden) for _ in range(setup.layers))
        self.norm = nn.RMSNorm(setup.d_model)

    def forward(self, ids: Tensor, at: slice = EVERYWHERE) -> Tensor:
        """ids: [B, T] in 0 … 255 -> logits [B, T, 256], or of the tokens `at` alone; the head is the embedding,
        transposed."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, at]) @ self.embedding.weight.T

    @torch.no_grad()
    def mixer_inputs(self, ids: Tensor) -> list[dict[str, Tensor]]:
        """The inputs of every layer's recurrence on ids [B, T], by name."""
        x, found = self.embedding(ids), []
        for block in self.blocks:
            assert isinstance(block, Block)
            found.append(block.mixer.inputs(block.mixer_norm(x)))
            x = block(x)
        return found

    @torch.no_grad()
    def generate(self, prompt: bytes, n: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`n` bytes after the prompt, sampled one by one with carried states. Raises DsfError for logits that are not
        finite."""
        generator, device = torch.Generator().manual_seed(seed), self.embedding.weight.device
        states: list[Any] = [None] * len(self.blocks)
        found, x = bytearray(), self.embedding(torch.tensor([list(prompt)], device=device))
        while True:
            for i, block in enumerate(self.blocks):
                assert isinstance(block, Block)
                mixed, states[i] = block.mixer(block.mixer_norm(x), states[i])
                x = block.after(x, mixed)
            if len(found) == n:
                return bytes(found)
            logits = (self.norm(x[:, -1]) @ self.embedding.weight.T).float().cpu()
            if not bool(logits.isfinite().all()):
                raise DsfError(f"its logits are not finite after {len(prompt) + len(found)} bytes of generated text")
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            found.append(int(drawn))
            x = self.embedding(drawn.to(device))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's random numbers start at `seed` inside the block and continue as before after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def make_model(make: Callable[..., Mixer], setup: Setup) -> ByteLM:
    """The untrained model of a setup, whose seed determines the weights."""
    with seeded(setup.seed):
        model = ByteLM(make, setup)
    return model.to(setup.device)


def loss_on(model: ByteLM, windows: Tensor, last: int | None = None) -> Tensor:
    """Mean cross entropy in nats of bytes 1 … of windows [B, T+1], or of the `last` ones alone, each predicted from
    all before.
    """
    windows = windows.to(model.embedding.weight.device)
    at = EVERYWHERE if last is None else slice(-last, None)
    logits, targets = model(windows[:, :-1], at), windows[:, 1:][:, at]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def bits_per_byte(model: ByteLM, data: Tensor, seq: int, windows: int = 64, last: int | None = None) -> float:
    """Cross entropy in bits per byte on up to `windows` evenly spread windows of `seq` bytes of data [length].

    last: count only so many bytes at the end of each window, which have at least seq - last bytes before them.
    """
    seq = min(seq, len(data) - 1)
    starts = torch.linspace(0, len(data) - seq - 1, windows).long().unique()
    cut = data[starts.unsqueeze(1) + torch.arange(seq + 1)]
    total = sum(loss_on(model, part, last).item() * len(part) for part in cut.split(16))
    return total / len(cut) / math.log(2)


def train(model: ByteLM, text: Text, setup: Setup, progress: Progress | None = None) -> tuple[list[float], float]:
    """Train in place on random windows, the same for every mixer. Returns (bits per byte at every step, seconds).

    Raises DsfError for a loss that is not finite.
    """
    seq = min(setup.seq, len(text.train) - 2)

    def draw(generator: torch.Generator) -> Tensor:
        begin = torch.randint(0, len(text.train) - seq, (setup.batch, 1), generator=generator)
        return text.train[begin + torch.arange(seq + 1)]

    return fit(model, draw, partial(loss_on, model), setup, progress)


def fit(
    model: nn.Module, draw: Callable[[torch.Generator], Tensor], loss_of: Callable[[Tensor], Tensor], setup: Setup,
    progress: Progress | None = None,
) -> tuple[list[float], float]:  # fmt: skip
    """Train in place for setup.steps steps on loss_of(draw(generator)) in nats. Returns (bits at every step, seconds).

    Raises DsfError for a loss that is not finite.
    """
    generator, step_of = torch.Generator().manual_seed(setup.seed), Graphed(model, loss_of)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=setup.lr, betas=(0.9, 0.95))
    warmup = max(1, min(20, setup.steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, warmup, setup.steps))
    losses = []
    start = time.perf_counter()
    for step in range(setup.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = step_of(draw(generator))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item() / math.log(2))
        if not math.isfinite(losses[-1]):
            raise DsfError(f"the loss is not finite after {step} training steps")
        if progress is not None:
            progress(step + 1, losses[-1])
    return losses, time.perf_counter() - start


def _rate(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
