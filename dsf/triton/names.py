"""Names of printed programs, from hashes of the declaration and of the printed text: the same in every process.

Saved, exported and cached graphs hold such names. The process that loads one needs the declaration; the programs are
printed again when the graph runs.
"""

from __future__ import annotations

from dsf.kernels.triton.registry import Registry
from dsf.language.derived import by_digest, living
from dsf.language.errors import DsfError
from dsf.language.late import early, late
from dsf.language.reads import apart
from dsf.language.solve import weighted
from dsf.language.spec import Spec
from dsf.triton import across, chunk, convolve, features, given, long, scan, solve, step


def declared(name: str, content: str) -> Spec:
    """The Spec whose digest is `content`. Raises DsfError, with the remedy, where this process has none."""
    spec = by_digest(content)
    if spec is None:
        for known in living(name):
            _derive(known)
        spec = by_digest(content)
    if spec is None:
        raise DsfError(
            f"{name}: a graph runs this recurrence, whose declaration ({content}) this process does not have: import "
            "the module that declares it (the zoo: dsf.mixers) before the graph runs. A declaration that says "
            "something else, under the same name or not, is another recurrence"
        )
    return spec


def _derive(spec: Spec) -> None:
    """Make the systems that the kernels run in place of a declaration, which is all that a new process has."""
    frames = [x.spec for x in (late(spec), early(spec)) if x is not None]
    for part in (spec, spec.inner, *apart(spec), *apart(spec.inner), *frames):
        if features.has_features(part):
            features.featured(part)
        if part.acts_on_values or across.covers(part):
            across.transposed(part)
        if part.system.solve is not None:
            weighted(part, solve.decay_of(part)[0])


def register_operators() -> None:
    """Define dsf's custom operators, for graphs that were saved elsewhere.

    Calls of a recurrence define them, too. A process that loads a graph (torch.export.load) before its first such call
    must call this first.
    """
    from dsf.kernels.triton.chunk import across_ops, operator
    from dsf.kernels.triton.fourier import filters
    from dsf.kernels.triton.fourier import operator as fourier_operator
    from dsf.kernels.triton.pointwise import prologue_ops, step_ops
    from dsf.kernels.triton.scan import operator as scan_operator
    from dsf.kernels.triton.solve import operator as solve_operator

    assert across_ops and operator and filters and fourier_operator
    assert prologue_ops and step_ops and scan_operator and solve_operator


def _print(kind: str, name: str) -> None:
    """Print the programs of one kind for the declaration in `name`. Raises DsfError where none of them has the name."""
    if kind == "tokenwise" or (kind == "convolution" and name in long.names()):
        return  # dsf.call.tokenwise prints these
    title, _, rest = name.rpartition("-")[0].rpartition("-")
    spec = declared(title or name, rest)
    printers = {
        "program": chunk.names, "step": step.names, "prologue": scan.prologue_names, "hole": scan.names,
        "convolution": lambda s: [p[1] for p in (convolve.program_of(s), given.program_of(s)) if isinstance(p, tuple)],
    }  # fmt: skip
    if name not in printers[kind](spec):
        raise DsfError(
            f"{title}: a graph runs a program of this recurrence, {name}, that is printed otherwise here: it is of "
            "another version of dsf; export or compile it again"
        )


Registry.finders.append(_print)
