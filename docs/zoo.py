"""Write the zoo's tables: families into README.md, equations into docs/zoo.md, layers into docs/layers.md.

`python docs/zoo.py`; tests/test_docs.py compares.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from dsf import elu1, relu
from dsf.analysis.subjects import Subject
from dsf.call.plan import FORMS
from dsf.language.expr import COMPARISONS, Expr, children_first, const, show, substitute
from dsf.language.invariant import is_invariant
from dsf.language.operator import Operator
from dsf.language.spec import Spec
from dsf.language.system import System
from dsf.mixers import LAYERS as ALONE
from dsf.mixers import ZOO, Entry

README = Path(__file__).parents[1] / "README.md"
LAYERS = Path(__file__).parent / "layers.md"
PAGE = Path(__file__).parent / "zoo.md"
COMMON = ("d_model", "layer_idx", "device", "dtype")  # arguments of every layer
D_MODEL, HEADS, CONTEXT = 1024, 8, 4096  # of the numbers in the layers' table
BEGIN, END = "<!-- zoo: made by docs/zoo.py -->", "<!-- end of zoo -->"
COLUMNS = ("mixer", "A_t", "B_t", "C_t", "D_t, after", "structure", "forms", "state", "source")
LETTERS = ("δ", "ε", "ζ")
# A and B of those that are discretised, by the functions that make them, as their equations fill lines
COMPLEX = "<br>`Λ` = `-exp(A_log) + i A_imag`<br>`δ` = `exp(dt)`"
DISCRETISED = {
    "s4": (f"`bilinear(Λ, B, δ, minus=(p, p)).A`{COMPLEX}", "`bilinear(…).B * x`"),
    "s4d": (f"`zoh(Λ, 1, δ).A`{COMPLEX}", "`zoh(…).B * x`"),
    "dss": (f"`zoh(Λ, 1, δ).A`{COMPLEX}", "`zoh(…).B * x`"),
    "h3": (f"`zoh(Λ, 1, δ).A`{COMPLEX}", "`zoh(…).B * (k * v)`"),
    "s5": (
        "`zoh(Λ, u, δ).A`<br>`Λ` = `Lambda_re + i Lambda_im`<br>`δ` = `exp(log_step)`",
        "`zoh(…).B`",
    ),
}
# Families by what A is, the first that fits; a test of the recurrence's Spec, and how A reads.
FAMILIES: tuple[tuple[str, str, Callable[[Spec], bool]], ...] = (
    ("softmax attention, and what bounds or decays it", "`I` or a decay, on infinitely many features",
     lambda spec: spec.is_softmax),
    ("least squares over all tokens", "a decay, and a solve at every read-out",
     lambda spec: spec.system.solve is not None),
    ("time-invariant state-space systems", "the same for every token", is_invariant),
    ("delta rules and other corrections", "a decay times `I - beta * outer(k, k)`", lambda spec: spec.rank > 0),
    ("one decay for every number of the state", "`exp(-delta * a)` a channel and entry",
     lambda spec: spec.has_key and spec.is_elementwise),
    ("a state of one number a channel", "`sigmoid(f)` a channel", lambda spec: not spec.has_key),
    ("a decay for every key entry", "`diag(g)`", lambda spec: "key" in spec.decay_axes),
    ("linear attention", "`I`", lambda spec: spec.decay_kind == "identity"),
    ("one decay a head", "`alpha * I`, turned in Mamba-3", lambda spec: True),
)  # fmt: skip
CALLED = {"s6": "Mamba", "ssd": "Mamba-2", "rg_lru": "Griffin", "mlstm": "xLSTM", "fox": "Forgetting Transformer"}
SHORT = 8  # characters up to which a repeated expression is not worth a letter of its own


def table() -> str:
    """The zoo as a Markdown table, one row a mixer."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, ZOO)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def families() -> str:
    """The zoo in short: what A is, and which recurrences have such a one."""
    found: dict[str, list[str]] = {name: [] for name, _, _ in FAMILIES}
    for entry in ZOO:
        spec = entry.recurrence.spec
        found[next(name for name, _, fits in FAMILIES if fits(spec))].append(_named(entry))
    shape = {name: a for name, a, _ in FAMILIES}
    rows = [(name, shape[name], ", ".join(members)) for name, members in found.items() if members]
    rows.append(("layers without a recurrence of their own", "", ", ".join(f"`{name}`" for name in ALONE)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [("family", "A_t", "`dsf.mixers.`"), ("---",) * 3, *rows])


def _named(entry: Entry) -> str:
    called = CALLED.get(entry.name)
    return f"`{entry.name}`" + (f" ({called})" if called else "")


def row(entry: Entry) -> tuple[str, ...]:
    """One mixer's cells. A layer in dsf.mixers is said by its class's name under the recurrence's."""
    spec = entry.recurrence.spec
    words = Words(spec)
    steps = spec.system.micro_steps
    layer = f"<br>{entry.module.__name__}" if entry.module is not None else ""
    forms = entry.recurrence.forms
    missing = [form for form in FORMS if form not in forms]
    more = "".join(f", {form}" for form in forms if form not in FORMS)
    a = "<br>".join(
        [code(words.operator(s.A)) for s in steps]
        + [f"`{letter}` = {code(show(x))}" for letter, x in zip(LETTERS, words.defined, strict=False)]
    )
    b = "<br>".join(code(words(s.B)) for s in steps)
    return (
        f"`{entry.name}`{layer}",
        *DISCRETISED.get(entry.name, (a, b)),
        read(spec, words),
        "<br>".join(after(spec, words)),
        spec.structure,
        f"all but {', '.join(missing)}" if missing else f"all{more}",
        Subject(entry.name, entry.recurrence, entry).state_formula(),
        re.split(r"; |(?<!al)[.] ", entry.source)[0].rstrip("."),
    )


def read(spec: Spec, words: Words) -> str:
    """C, with what it is solved with."""
    solve = spec.system.solve
    if solve is None:
        return code(words(spec.readout))
    squares = " + ".join(f"{words(weight)} * outer({words(key)}, {words(key)})" for key, weight in solve.squares)
    return (
        f"{code(f'(H + diag({words(solve.ridge)}))^-1 {words(spec.readout)}')}<br>`H` decays as S, plus {code(squares)}"
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


def layers() -> str:
    """The layers as a Markdown table, one row a class."""
    entries: dict[str, list[Entry]] = {}
    for entry in ZOO:
        assert entry.module is not None
        entries.setdefault(entry.module.__name__, []).append(entry)
    rows = [("layer", "of", "arguments", "state", "parameters"), ("---",) * 5, *map(layer, entries.values())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def layer(entries: list[Entry]) -> tuple[str, ...]:
    """One layer's cells; entries: the recurrences it runs."""
    make = entries[0].module
    assert make is not None
    given = inspect.signature(make).parameters
    arguments = ", ".join(f"{name}={p.default!r}" for name, p in given.items() if name not in COMMON)
    with torch.device("meta"):
        made = make(D_MODEL, **({"n_heads": HEADS} if "n_heads" in given else {}))
    whole, recurrent = (made.state_size(CONTEXT, conv=conv) for conv in (True, False))
    window = f" + {whole - recurrent:,}" if whole > recurrent else ""
    return (
        f"`{make.__name__}`",
        "<br>".join(f"`{entry.name}`" for entry in entries),
        f"`{arguments}`",
        f"{recurrent:,}{window}",
        f"{sum(p.numel() for p in made.parameters()):,}",
    )


def with_table(text: str, made: str) -> str:
    """A page with the table between its marks renewed."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{made}\n{END}{tail}"


PAGES: tuple[tuple[Path, Callable[[], str]], ...] = ((README, families), (PAGE, table), (LAYERS, layers))

if __name__ == "__main__":
    for page, made in PAGES:
        page.write_text(with_table(page.read_text(), made()))
