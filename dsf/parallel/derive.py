"""Declarations derived from a declaration: a shard's map of the state, and the recurrence of the state's gradient."""

from __future__ import annotations

from dataclasses import replace

from dsf.call.recurrence import Recurrence
from dsf.kernels.affine import Frame
from dsf.language.annotations import Input, Kind
from dsf.language.derived import derived
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.language.operator import I, Normal, Operator, diag, inner_product, outer, times
from dsf.language.spec import Spec
from dsf.language.system import System
from dsf.torch.columns import columns

DRIVER = "dy"


@derived
def homogeneous(spec: Spec) -> Recurrence:
    """The recurrence with the same A but B = D = 0, not normalised and not solved: S_out = M S_in."""
    steps = [
        replace(s, B=0, D=0, normalize=None, drive=None, gauge=None, solve=None, earlier=())
        for s in spec.system.micro_steps
    ]
    system = replace(steps[-1], earlier=tuple(steps[:-1]))
    return Recurrence(replace(spec, name=f"{spec.name} (M)", system=system))


@derived
def adjoint(spec: Spec) -> Recurrence | None:
    """The recurrence of the state's gradient, on tokens in reverse order; its input `dy` is the gradient of y.

    lambda_{t-1} = A_tᵀ (lambda_t + C_t dy_tᵀ), or A_tᵀ lambda_t + C_t dy_tᵀ where S_{t-1} is read: an ordinary
    declaration, which every form and backend runs. Its initial state is the gradient of the tokens' final state, its
    final state the gradient of their initial state. None for normalised systems and solved readouts, whose y is not
    linear in the state, and where turns mix pairs of entries.
    """
    if spec.rule is not None or spec.mixes_pairs or spec.system.solve is not None:
        return None
    name = _free(spec)
    dy = Expr("input", (), (name, None), frozenset({VALUE}))
    reading = spec.readout
    rows = [r.normal for r in reversed(spec.rows)]
    transitions = [_transposed(n) for n in rows]
    writes: list[Expr] = [const(0)] * len(rows)
    if spec.system.read == "after":
        if spec.acts_on_values:
            gate, reading = spec.gated_read if spec.has_key else (reading, const(1))
            writes[0] = reading * _applied(rows[0], gate * dy)
        else:
            writes[0] = _applied(rows[0], reading) * dy
    else:
        writes[-1] = reading * dy
    systems = [System(A=a, B=b) for a, b in zip(transitions, writes, strict=True)]
    last = replace(systems[-1], C=spec.readout, earlier=tuple(systems[:-1]))
    inputs = (*spec.inputs, Input(name, Kind(frozenset({VALUE}))))
    return Recurrence(Spec(f"{spec.name} (adjoint)", "", inputs, last))


def _free(spec: Spec) -> str:
    """An unused name for an input."""
    name = DRIVER
    while name in {i.name for i in spec.inputs}:
        name += "_"
    return name


def _decay(decay: Expr) -> Operator:
    return I if decay is const(1) else diag(decay)


def _transposed(normal: Normal) -> Operator:
    """Aᵀ as an operator."""
    a = _decay(normal.decay)
    for c in normal.corrections:
        a = a + c.scale * outer(c.right, c.left)
    return a


def _applied(normal: Normal, x: Expr) -> Expr:
    """Aᵀ x of a readout x."""
    total = times(normal.decay, x)
    for c in normal.corrections:
        total = total + times(c.scale, inner_product(c.left, x, c.axis)) * c.right
    return total


def acting(spec: Spec) -> list[Expr]:
    """The expressions that A consists of."""
    found = []
    for row in spec.rows:
        found.append(row.normal.decay)
        found += [x for c in row.normal.corrections for x in (c.scale, c.left, c.right)]
    return found


@derived
def kind_of_map(spec: Spec) -> str:
    """The kind of M: identity, scale, dense or channel (dsf.kernels.affine)."""
    if spec.rank or spec.mixes_pairs:
        return "channel" if any(VALUE in x.axes for x in acting(spec)) else "dense"
    return "identity" if all(r.normal.decay is const(1) for r in spec.rows) else "scale"


@derived
def reads_values(spec: Spec) -> bool:
    """True where A depends on the entries of an input with a Value axis, a sum over its channels for instance."""
    wide = {i.name for i in spec.inputs if VALUE in i.kind.axes}
    return any(i.attrs[0] in wide for i in inputs_of(*acting(spec)))


@derived
def frame_of(spec: Spec, n: int, p: int) -> Frame:
    """Shapes of the states and maps of a recurrence for N = n state entries and P = p channels."""
    layout, kind = columns(spec, p), kind_of_map(spec)
    rows, cols = (n if KEY in spec.decay_axes else 1, p if VALUE in spec.decay_axes else 1)
    if kind != "scale":
        rows = cols = 1
    signed = kind == "scale" and spec.log_decays is None
    solved = n if spec.system.solve is not None else 0  # the columns of H, which decays like G
    return Frame(n, layout.p + layout.den + solved, layout.gain, kind, rows, cols, signed)
