"""Write the zoo's table into README.md from the code: `python docs/zoo.py` (tests/test_docs.py compares the two)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from dsf import elu1, relu
from dsf.analysis.subjects import Subject
from dsf.language.expr import COMPARISONS, Expr, children_first, const, show, substitute
from dsf.language.operator import Operator
from dsf.language.spec import Spec
from dsf.language.system import System
from dsf.mixers import ZOO, Entry

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- zoo: made by docs/zoo.py -->", "<!-- end of zoo -->"
COLUMNS = ("mixer", "A_t", "B_t", "C_t", "D_t, after", "structure", "forms", "state", "source")
LETTERS = ("δ", "ε", "ζ")
SHORT = 8  # characters up to which a repeated expression is not worth a letter of its own


def table() -> str:
    """The zoo as a Markdown table, one row a mixer."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, ZOO)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(entry: Entry) -> tuple[str, ...]:
    """One mixer's cells. A layer in dsf.mixers is said by its class's name under the recurrence's."""
    spec = entry.recurrence.spec
    words = Words(spec)
    steps = spec.system.micro_steps
    layer = f"<br>{entry.module.__name__}" if entry.module is not None else ""
    missing = [form for form in ("naive", "recurrent", "scan", "chunk", "kernel") if form not in entry.recurrence.forms]
    return (
        f"`{entry.name}`{layer}",
        "<br>".join(
            [code(words.operator(s.A)) for s in steps]
            + [f"`{letter}` = {code(show(x))}" for letter, x in zip(LETTERS, words.defined, strict=False)]
        ),
        "<br>".join(code(words(s.B)) for s in steps),
        code(words(spec.readout)),
        "<br>".join(after(spec, words)),
        spec.structure,
        f"all but {', '.join(missing)}" if missing else "all",
        Subject(entry.name, entry.recurrence, entry).state_formula(),
        re.split(r"; |(?<!al)[.] ", entry.source)[0].rstrip("."),
    )


def after(spec: Spec, words: Words) -> list[str]:
    """What comes after C: the skip, when the state is read, the quotient, the paper's gauge."""
    system = spec.system
    found = [] if system.D is const(0) else [code(words(system.D))]
    found += ["reads S_{t-1}"] if system.read == "before" else []
    found += [f"y = {code(show(spec.rule))}"] if spec.rule is not None else []
    found += [f"gauge {code(words(system.gauge))}"] if system.gauge is not None else []
    return found


class Words:
    """Expressions of one recurrence as text, with the names that a reader knows and letters for what repeats."""

    def __init__(self, spec: Spec) -> None:
        roots = expressions(spec.system)
        self.stages = [known(roots)]  # renamed one after another
        self.defined: list[Expr] = []  # what the letters stand for
        roots = [self.rename(r) for r in roots]
        while len(self.defined) < len(LETTERS) and (node := repeated([*roots, *self.defined])) is not None:
            self.stages.append({node: symbol(LETTERS[len(self.defined)], node)})
            roots, self.defined = ([substitute(r, self.stages[-1]) for r in x] for x in (roots, self.defined))
            self.defined.append(node)

    def __call__(self, x: Expr) -> str:
        return show(self.rename(x))

    def rename(self, x: Expr) -> Expr:
        """x with the names and letters in it."""
        for stage in self.stages:
            x = substitute(x, stage)
        return x

    def operator(self, a: Operator) -> str:
        """A as written."""

        def renamed(a: Operator) -> Operator:
            return Operator(a.kind, tuple(map(renamed, a.parts)), tuple(map(self.rename, a.exprs)))

        return repr(renamed(a))


def known(roots: list[Expr]) -> dict[Expr, Expr]:
    """What the trace writes out although it has a name: relu, elu1, dot."""
    names = {}
    for node in children_first(*roots):
        if node.op == "where":
            x = node.args[1].args[0] if node.args[1].args else node.args[1]
            for candidate, f in ((node.args[1], relu), (x, elu1)):
                if node is f(candidate):
                    names[node] = symbol(f"{f.__name__}({show(candidate)})", node)
        elif node.op == "sum_key" and node.args[0].op == "mul":
            names[node] = symbol(f"dot({', '.join(map(show, node.args[0].args))})", node)
    return names


def expressions(system: System) -> list[Expr]:
    """Every expression of a system but its rule and gauge, micro-steps included."""

    def of(a: Operator) -> list[Expr]:
        return [*a.exprs, *(e for part in a.parts for e in of(part))]

    found = [e for step in system.micro_steps for e in (*of(step.A), step.B)]
    return [*found, system.C, system.D]


def repeated(roots: list[Expr]) -> Expr | None:
    """The longest expression that is written more than once, or None."""
    written = Counter(arg for node in children_first(*roots) for arg in node.args) + Counter(roots)
    often = [x for x, count in written.items() if count > 1 and x.args and x.op not in COMPARISONS]
    long = [x for x in often if len(show(x)) > SHORT]
    return max(long, key=lambda node: len(show(node)), default=None)


def symbol(text: str, like: Expr) -> Expr:
    """An input whose name is any text."""
    return Expr("input", (), (text, None), like.axes, like.features)


def code(text: str) -> str:
    """Markdown code, with no more digits than one reads."""
    return f"`{re.sub(r'[0-9]+[.][0-9]{6,}', lambda m: f'{float(m[0]):.4g}', text)}`"


def with_table(text: str) -> str:
    """A page with the table between its marks renewed."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
