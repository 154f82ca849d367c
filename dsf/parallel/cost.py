"""The choice of the exchange: a cost model of latency plus bytes over bandwidth, with settable constants."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from dsf.kernels.affine import Frame
from dsf.language.errors import FormError
from dsf.parallel.layout import Layout


class Link(NamedTuple):
    """A connection between ranks. latency: seconds that a small collective takes. bandwidth: bytes a second that a rank
    can receive."""

    latency: float
    bandwidth: float


def default_links(device: str) -> tuple[Link, Link]:
    """(Within a node, between nodes). Assumed, not measured: for "cuda" NVLink, and a 400 Gb/s NIC for each GPU."""
    if device == "cuda":
        return Link(20e-6, 300e9), Link(30e-6, 45e9)
    return Link(200e-6, 1e9), Link(400e-6, 1e9)


@dataclass(frozen=True)
class Choice:
    """An exchange for one call. name: its name. bytes: that a rank receives in the forward pass. back: in the backward
    pass. rounds: collectives one after the other. seconds: of the forward pass, by the cost model. reason: why it."""

    name: str
    bytes: int
    back: int
    rounds: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        times = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        return f"{self.name}: {self.bytes:,} bytes into a rank in {times}, {self.back:,} backward; {self.reason}"


def candidates(
    frame: Frame, layout: Layout, rows: int, width: int, nodes: int, links: tuple[Link, Link]
) -> dict[str, Choice]:
    """The cost of every possible exchange, by name. rows: B · H. width: bytes of a number of the state."""
    near, far = links
    ranks, slots = layout.ranks, layout.slots
    inner = ranks // nodes
    state = frame.state_numbers * rows * width
    f = state * slots
    m = frame.move_numbers * rows * width * slots if layout.fragments > 2 else 0
    c = frame.n * frame.plain * rows * width * slots
    slow = far if nodes > 1 else near
    hops = sum(layout.owner(j)[0] != layout.owner(j + 1)[0] for j in range(layout.fragments - 1))

    def made(name: str, bytes: int, back: int, rounds: int, seconds: float) -> Choice:
        return Choice(name, bytes, back, rounds, seconds, f"{1e6 * seconds:.0f} us by the model")

    relay = made("relay", state, c // slots, hops, hops * (slow.latency + state / slow.bandwidth))
    if frame.kind == "channel":
        return {"walk": Choice("walk", relay.bytes, relay.back, hops, relay.seconds, "")}
    outside = (ranks - inner) * (f + m)
    every = (inner - 1) * (f + m)
    gather_seconds = near.latency + every / near.bandwidth + (far.latency + outside / far.bandwidth) * (nodes > 1)
    found = {
        "gather": made("gather", every + outside, (ranks - 1) * c, 1 + (nodes > 1), gather_seconds),
        "relay": relay,
    }
    share = (2 * f + m) * (ranks - 1) // ranks
    back = 2 * c * (ranks - 1) // ranks
    found["transpose"] = made("transpose", share, back, 2, 2 * slow.latency + share / slow.bandwidth)
    if nodes > 1:
        near_bytes = (2 * f + m) * (inner - 1) // inner
        far_bytes = (nodes - 1) * (f + m) // inner
        seconds = 2 * near.latency + near_bytes / near.bandwidth + far.latency + far_bytes / far.bandwidth
        back = 2 * c * (inner - 1) // inner + (nodes - 1) * c // inner
        found["two-level"] = made("two-level", near_bytes + far_bytes, back, 3, seconds)
    return found


@functools.lru_cache(maxsize=1024)
def choose(
    frame: Frame, layout: Layout, rows: int, width: int, wanted: str, nodes: int, links: tuple[Link, Link]
) -> Choice:
    """The cheapest exchange, or the wanted one. Raises FormError where that is impossible.

    An A that differs by channel would need a map [N, N] for every channel; these are neither computed nor sent.
    """
    found = candidates(frame, layout, rows, width, nodes, links)
    if "walk" in found:
        if wanted not in ("auto", "relay"):
            raise FormError(f"exchange={wanted!r}: A differs by channel, so that only states are relayed")
        reason = "A differs by channel, so its maps are never made: rank after rank takes the state on"
        return _because(found["walk"], reason)
    if wanted != "auto":
        return _because(found[wanted], f"exchange={wanted!r} was asked for")
    best = min(found.values(), key=lambda c: c.seconds)
    rest = ", ".join(f"{c.name} {1e6 * c.seconds:.0f}" for c in found.values() if c is not best)
    return _because(best, f"{1e6 * best.seconds:.0f} us by the model, against {rest}")


def _because(choice: Choice, reason: str) -> Choice:
    return Choice(choice.name, choice.bytes, choice.back, choice.rounds, choice.seconds, reason)
