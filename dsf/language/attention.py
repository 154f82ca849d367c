"""Declarations that run as attention: exponential features, whose state is infinite, and systems with a window.

Their state is the keys and values of tokens; decays and turns act on scores and keys. With c_t the sum of log A up to
t and Θ_t that of the angles, token j weighs exp(⟨R(-Θ_t) q_t, R(-Θ_j) k_j⟩ + c_t - c_j) in output t, or, without
exponential features, ⟨·, ·⟩ e^(c_t - c_j): a bias of scores and a turn of keys. A turn R takes φ(x) to φ(R x).
"""

from __future__ import annotations

from dataclasses import replace

from dsf.language.errors import TraceError
from dsf.language.expr import VALUE, Expr, children_first, const, substitute
from dsf.language.functions import taylor_features
from dsf.language.spec import Spec
from dsf.language.system import DEN, ONE
from dsf.language.words import plain_structure

TRICK = (
    "exponential features have the kernel trick only as softmax attention, "
    "System(A=decay, B=exp_features(k) * v, C=exp_features(q), normalize=ratio)"
)


def check_attention(spec: Spec, roots: list[Expr]) -> None:
    """Raises TraceError where exponential features or a window are combined with what attention cannot compute.

    roots: every expression of the System as written.
    """
    featured = any(node.op == "exp_features" for node in children_first(*roots))
    if featured and not _is_bare(spec):
        raise TraceError(f"{TRICK}; cut them with taylor_features for anything else")
    if not spec.is_attention:
        return
    _check_transition(spec)
    _check_write(spec)
    if any(node.op == "prev" for node in children_first(*roots)):
        raise TraceError(f"{_name(spec)} keeps keys and values alone: prev has no place beside them")
    if spec.is_softmax and spec.rule is not None and DEN not in children_first(spec.rule):
        raise TraceError(
            f"{TRICK}; normalize = {spec.rule} does not use den, the sum of the weights, which gives them their scale"
        )


def truncated(spec: Spec, order: int) -> Spec:
    """Softmax attention with its exponential features truncated after degree `order`. Raises TraceError."""
    if not spec.is_softmax:
        raise TraceError(f"{spec.name}: only exponential features have a Taylor truncation")
    if spec.turns:
        raise TraceError(f"{spec.name}: turns act on the argument of exponential features, not on their truncation")
    swap = {x: taylor_features(x.args[0], order) for x in (spec.readout, spec.rows[0].terms[0].key)}
    system = replace(spec.system, B=substitute(spec.system.B, swap), C=substitute(spec.readout, swap))
    return replace(spec, name=f"{spec.name}_taylor{order}", system=system)


def divides_by_one(spec: Spec) -> bool:
    """True where the rule uses its argument `one` (1 in the scale of num and den), as sinks and softmax-one do."""
    return spec.rule is not None and ONE in children_first(spec.rule)


def _name(spec: Spec) -> str:
    return "softmax attention" if spec.is_softmax else f"a window of {spec.system.window}"


def _is_bare(spec: Spec) -> bool:
    """True for exponential features of one key and one query, divided by their sum, and nothing else."""
    terms = spec.rows[0].terms
    bare = [spec.readout, *(t.key for t in terms)]
    inside = [x for node in bare for x in node.args] + [t.value for t in terms]
    return (
        all(node.op == "exp_features" for node in bare)
        and not any(node.op == "exp_features" for node in children_first(*inside))
        and (len(terms), spec.micro, spec.system.read) == (1, 1, "after")
        and spec.rule is not None
        and spec.system.D is const(0)
    )


def _check_transition(spec: Spec) -> None:
    name, a = _name(spec), spec.system.A
    if spec.micro > 1:
        raise TraceError(f"{name} takes one micro-step a token, this recurrence has {spec.micro}; write one System")
    if spec.system.read != "after":
        raise TraceError(f'{name} reads after it has written; leave read="{spec.system.read}" out')
    if spec.rank or spec.decay_axes:
        raise TraceError(
            f"A = {a}: beside {name} A is a decay of one number a head, a turn, or both, because its state is the keys "
            f"and values of tokens; this is {plain_structure(spec)}"
        )
    if spec.log_decays is None:
        raise TraceError(
            f"A = {a}: beside {name} a decay is a bias of scores, the sum of its logarithms, so it must be positive by "
            "the way it is written: exp(g), sigmoid(g), a positive number, or products and powers of these"
        )


def _check_write(spec: Spec) -> None:
    (row,) = spec.rows
    name, b = _name(spec), spec.system.B
    if row.dense is not None or len(row.terms) != 1:
        raise TraceError(f"B = {b}: {name} keeps one key and one value a token, so B is one product of the two")
    (term,) = row.terms
    if term.gain is not None and term.gain.axes:
        raise TraceError(
            f"B = {b}: beside {name} an exponential factor of B is one number a head, {term.gain} varies over "
            f"{set(term.gain.axes)}"
        )
    if VALUE in spec.gated_read[1].axes:
        raise TraceError(
            f"C = {spec.readout}: beside {name} what C reads with a Key axis has no Value axis, because keys are kept "
            "once for all channels"
        )
    if spec.ones is None:
        return
    if spec.system.D is not const(0):
        raise TraceError(f"D = {spec.system.D}: {name} with normalize has no skip; add it to y")
    (ones,) = spec.ones_rows[0].terms
    if ones.value is not const(1):
        raise TraceError(
            f"{name} divides by the sum of its weights, but with {spec.drives[0]} = 1 there remains {ones.value} in B, "
            "which would be in that sum too; give values that are scaled already as the input"
        )
