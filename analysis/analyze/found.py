"""One sentence about a layer: how long it remembers, how far it looks, how much of its state it uses."""

from __future__ import annotations

import math

from dsf.analysis.analyze.records import Run
from dsf.analysis.records import Eigenvalues
from dsf.analysis.report import duration

EVEN, NEAR = 0.85, 2.0  # of the distance of looking at everything alike; tokens
APART = 4.0  # heads whose distances differ by this factor are unlike


def in_a_sentence(run: Run, tokens: int) -> str:
    """One sentence about a run of a layer, from its record.

    tokens: the length on which distances were measured. Looking at all tokens alike gives a mean distance of a quarter
    of it, or a third where later tokens are read too.
    """
    parts = [_memory(run), _distance(run, tokens), _used(run)]
    parts = [part for part in parts if part]
    said = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"{run.name} {said}{_heads(run)}{_signs(run)}."


def map_words(run: Run) -> str:
    """A few words about a run's map of a sentence."""
    parts = []
    if run.distance is not None:
        parts.append(f"looks {run.distance:.3g} tokens back on the text")
    if run.half_life is not None and run.half_life.share_never < 1:
        parts.append(f"half-life {duration(run.half_life.percentiles.median)}")
    rows = run.shares[1:]
    first = sum(row[0] for row in rows) / len(rows)
    if first > 0.25:
        parts.append(f"{first:.0%} of it at the first token")
    return "; ".join(parts)


def spectrum_words(found: Eigenvalues) -> str:
    """A few words about the distribution of eigenvalues."""
    parts = found.percentiles
    real = "real parts: " * (found.plane is not None)
    return f"{real}median {parts.median:.2f}, 80 % between {parts.low:.2f} and {parts.high:.2f}"


def _memory(run: Run) -> str:
    if run.window is not None:
        return f"keeps the last {run.window:,} tokens as they were"
    life = run.half_life
    if run.keeps_keys and (life is None or life.share_never == 1):
        return "keeps every key and value"
    if life is None:
        return "keeps a state that nothing was measured of"
    middle, slow = life.percentiles.median, life.percentiles.high
    if life.share_never == 1:
        return "forgets nothing"
    if math.isinf(middle):
        return f"keeps most of its state for ever ({life.share_never:.0%})"
    if slow < 1:
        return "forgets within a token"
    short = "has forgotten half after a token" if middle < 1 else f"has forgotten half after {_tokens(middle)}"
    if slow <= 2 * middle:
        return short
    return f"{short} (a tenth of its state {'keeps it for ever' if math.isinf(slow) else 'lasts ' + _tokens(slow)})"


def _distance(run: Run, tokens: int) -> str:
    far = run.distance
    if far is None:
        return ""
    even = tokens / (4 if run.causal else 3)
    if far < NEAR:
        return "looks at the newest tokens only" if run.causal else "looks at its neighbours only"
    alike = ", at all of them nearly alike," if far > EVEN * even else ""
    return f"looks {far:.0f} tokens back on average{alike}".rstrip(",")


def _used(run: Run) -> str:
    size = run.effective_state_size
    if size is None or not run.N or run.keeps_keys:
        return ""
    return f"uses about {size.entropy:.2g} of {run.N} state entries a channel"


def _heads(run: Run) -> str:
    far = sorted(head.distance for head in run.heads if head.distance is not None)
    if len(far) < 2 or far[-1] < NEAR or far[-1] < APART * max(far[0], 0.5):
        return ""
    return f"; its heads differ, from {far[0]:.2g} to {far[-1]:.3g} tokens back"


def _signs(run: Run) -> str:
    found = run.eigenvalues
    if found is None or found.share_negative <= 0.01:
        return ""
    if found.plane is not None:  # complex ones
        return f"; {found.share_negative:.0%} of its eigenvalues turn what is stored by more than a right angle"
    return f"; {found.share_negative:.0%} of its eigenvalues are negative, which flips what is stored"


def _tokens(number: float) -> str:
    return f"{duration(number)} token{'' if duration(number) == '1' else 's'}"
