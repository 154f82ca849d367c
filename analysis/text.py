"""Real text as bytes: the default corpus or a user's file, its held-out part, a sentence for pictures."""

from __future__ import annotations

import bz2
import importlib
import lzma
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsf.language.errors import InputError

HELD_OUT = 0.1  # share of the text that is held out, at its end
SHORTEST = 4096  # bytes; a shorter text leaves too little held out
DEFAULT_NAME = "the documentation prose of Python's pydoc_data.topics"


@dataclass(frozen=True)
class Text:
    """A text, split into a training part and a held-out part.

    name: its source, for reports. train, held_out: byte values, int64 [length].
    """

    name: str
    train: Tensor
    held_out: Tensor

    @property
    def held_out_bytes(self) -> bytes:
        """The held-out part as bytes."""
        return bytes(self.held_out.tolist())

    def sentence(self, shortest: int = 36, longest: int = 56) -> str:
        """The first plain sentence of the held-out part, or its first `longest` characters if there is none."""
        return sentence_of(self.held_out_bytes.decode("utf-8", errors="ignore"), shortest, longest)

    def yardsticks(self) -> dict[str, float]:
        """Bits per byte of the held-out part for common coders.

        order-0: the entropy of single bytes. bzip2: of the held-out part alone. xz: after the whole training part.
        """
        held, train = self.held_out_bytes, bytes(self.train.tolist())
        counts = Counter(held)
        order0 = -sum(c / len(held) * math.log2(c / len(held)) for c in counts.values())
        xz = len(lzma.compress(train + held)) - len(lzma.compress(train))
        return {
            "order-0": order0,
            "bzip2": 8 * len(bz2.compress(held)) / len(held),
            "xz": 8 * xz / len(held),
        }


def sentence_of(text: str, shortest: int, longest: int) -> str:
    """The first plain sentence of shortest to longest bytes, or the first `longest` characters if there is none."""
    fitting = (s for s in sentences(text) if shortest <= len(s.encode()) <= longest)
    return next(fitting, None) or " ".join(text.split())[:longest] or "."


def sentences(text: str) -> Iterator[str]:
    """The plain sentences of a text, with lines joined: words and commas between a capital and a full stop."""
    for match in re.finditer(r"(?<=[.!?:] )[A-Z][a-z]+(?: [a-zA-Z,'’-]+)+\.(?= |$)", " ".join(text.split())):
        yield match[0]


def load_text(path: Path | None = None) -> Text:
    """The Text of a file, or of the default corpus.

    Raises InputError, naming the file, if it is missing, not a file, empty or shorter than 4096 bytes.
    """
    name, data = read_text(path)
    if len(data) < SHORTEST:
        raise InputError(
            f"the text {path} has {len(data):,} bytes, expected at least {SHORTEST:,}: a tenth of it is held out"
        )
    return _split(name, data)


def read_text(path: Path | None = None) -> tuple[str, bytes]:
    """(name, bytes) of a file, or of the default corpus.

    Raises InputError, naming the file, if it is missing, not a file, unreadable or empty.
    """
    if path is None:
        return DEFAULT_NAME, _default_corpus()
    if not path.exists():
        raise InputError(f"the text {path} does not exist")
    if not path.is_file():
        raise InputError(f"the text {path} is not a file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"the text {path} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise InputError(f"the text {path} is empty")
    return path.name, data


def _default_corpus() -> bytes:
    """Python's documentation topics, each paragraph once: a repeated one could be in both parts."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise InputError("this Python has no pydoc_data.topics, the default text; pass --text FILE") from error
    paragraphs = (p.strip("\n") for _, topic in sorted(topics.items()) for p in topic.split("\n\n"))
    return "\n\n".join(dict.fromkeys(p for p in paragraphs if p.strip())).encode()


def _split(name: str, data: bytes) -> Text:
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = len(data) - max(1, int(len(data) * HELD_OUT))
    return Text(name, values[:cut], values[cut:])
