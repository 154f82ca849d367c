"""A Spec as text: its row of the compiler's table, its declaration and its derived properties."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsf.language.expr import show

if TYPE_CHECKING:
    from dsf.language.spec import Spec


def structure(spec: Spec) -> str:
    """The name of the recurrence's row of the compiler's table."""
    window = "" if spec.system.window is None else f" in a window of {spec.system.window}"
    if spec.is_attention:
        plain = "exponential features (N = ∞)" if spec.is_softmax else plain_structure(spec)
        decayed = f", {spec.decay_kind} decay" * (spec.is_softmax and spec.decay_kind != "identity")
        return "turned " * spec.turns + plain + decayed + window
    if spec.turns:
        mixed = spec.inner.mixes_pairs
        return f"turned {plain_structure(spec) if mixed else structure(spec.inner)}" + " (2 x 2 blocks)" * mixed
    return plain_structure(spec)


def plain_structure(spec: Spec) -> str:
    """The structure without turns, features and window."""
    if not spec.has_key and not spec.rank:
        return "vector (N = 1)"
    names = {
        "key": "key-diagonal decay",
        "value": "value-diagonal decay",
        "hadamard": "Hadamard",
        "identity": "identity",
    }
    decay = names.get(spec.decay_kind, f"{spec.decay_kind} decay")
    where = " on the Value axis" * spec.acts_on_values + ", read by a solve" * (spec.system.solve is not None)
    return (decay if spec.correction_kind == "none" else f"{decay} + {spec.correction_kind}") + where


def text(spec: Spec) -> str:
    """The declaration, line by line, and its structure."""
    lines = [f"{spec.name}({', '.join(f'{i.name}: {i.kind}' for i in spec.inputs)})"]
    for number, step in enumerate(spec.system.micro_steps, 1):
        mark = f" [{number}]" if len(spec.system.micro_steps) > 1 else ""
        lines += [f"  A{mark} = {step.A}", f"  B{mark} = {show(step.B)}"]
    lines += [f"  C = {spec.readout}", f"  D = {spec.system.D}", f"  read {spec.system.read} the update"]
    lines += [] if spec.system.solve is None else [f"  solved with {spec.system.solve}"]
    lines += [] if spec.system.window is None else [f"  window of {spec.system.window} tokens"]
    if spec.rule is not None:
        lines.append(f"  y = {spec.rule}, den driven by {', '.join(map(str, spec.drives))} = 1")
    lines.append(f"  structure: {structure(spec)}")
    if spec.log_decays and spec.decay_kind not in ("identity",):
        lines.append("  log decay = " + ", ".join(map(str, spec.log_decays)))
    return "\n".join(lines)
