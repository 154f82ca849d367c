"""`Declaration`: a recurrence as source text in parts, which can be pasted into a file and shrunk."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsf.call.recurrence import Recurrence

# The kinds of inputs by name. A name has the same meaning in every declaration.
KINDS = {
    "q": "Key", "k": "Key", "l": "Key", "m": "Key", "v": "Value", "x": "Value",
    "s": "Scalar", "sk": "Key", "sv": "Value",  # pre-activations of decays
    "b": "Scalar", "bk": "Key", "bv": "Value",  # and of writing strengths
    "i": "Scalar", "ik": "Key", "iv": "Value",  # exponents of input gates
    "o": "Value",
    "ps": "Param[Scalar]", "pk": "Param[Key]", "pv": "Param[Value]", "pkv": "Param[Key, Value]",
    "ks": "Steps[Key, 2]", "vs": "Steps[Value, 2]", "bs": "Steps[Scalar, 2]", "gs": "Steps[Scalar, 2]",
    "gk": "Steps[Key, 2]", "gv": "Steps[Value, 2]",
    "th": "Pair", "pth": "Param[Pair]",  # angles
}  # fmt: skip
FUNCTIONS = (
    "I", "N", "System", "abs", "bilinear", "compose", "diag", "dot", "elu1", "exp", "exp_features", "expm1", "l2norm",
    "log1p", "logsigmoid", "maximum", "minimum", "outer", "pair", "phi1", "prev", "quarter_turn", "ratio", "relu",
    "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "sum_key", "tanh", "turn", "where", "zoh",
)  # fmt: skip
NAME = "fuzzed"


@dataclass(frozen=True)
class Declaration:
    """One @dsf.recurrence function in parts, each a Python expression of the inputs in KINDS.

    family: the part of the grammar that produced it. steps: (A, B) of every micro-step. C, D, read: as System has
    them. rule, drive: of normalize, "" where there is none. lets: names for shared expressions, in order.
    """

    family: str
    steps: tuple[tuple[str, str], ...]
    C: str
    D: str = "0"
    read: str = "after"
    rule: str = ""
    drive: str = ""
    lets: tuple[tuple[str, str], ...] = ()
    window: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """Every used expression, including the named ones."""
        parts = [*(x for step in self.steps for x in step), self.C, self.D, self.drive]
        used = [self.lets[i][1] for i in self._used()]
        return tuple(x for x in (*used, *parts) if x)

    def _used(self) -> list[int]:
        """The indices of the used lets."""
        needed = _names(*(x for step in self.steps for x in step), self.C, self.D)
        kept = []
        for place in reversed(range(len(self.lets))):
            name, text = self.lets[place]
            if name in needed:
                kept.append(place)
                needed |= _names(text)
        return kept[::-1]

    @property
    def inputs(self) -> dict[str, str]:
        """Annotations of the inputs that are used, by name."""
        used = _names(*self.parts, self.rule)
        return {name: kind for name, kind in KINDS.items() if name in used}

    @functools.cached_property
    def text(self) -> str:
        """The decorated function and what it imports."""
        *earlier, (a, b) = self.steps
        used = _names(*self.parts, self.rule) | {"System"} | ({"compose"} if earlier else set())
        marks = {word for kind in self.inputs.values() for word in _names(kind)}
        imported = sorted(marks | {f for f in FUNCTIONS if f in used}, key=str.lower)
        given = ", ".join(f"{name}: {kind}" for name, kind in self.inputs.items())
        lines = ["import dsf", f"from dsf import {', '.join(imported)}", "", "", "@dsf.recurrence"]
        lines += [f"def {NAME}({given}):", *(f"    {self.lets[i][0]} = {self.lets[i][1]}" for i in self._used())]
        systems = [f"System(A={x}, B={y})" for x, y in earlier]
        more = [("D", self.D, "0"), ("read", repr(self.read), repr("after")), ("normalize", self.rule, "")]
        more += [("drive", self.drive, ""), ("window", str(self.window), "0")]
        last = "".join(f", {name}={value}" for name, value, plain in more if value != plain)
        systems.append(f"System(A={a}, B={b}, C={self.C}{last})")
        if len(systems) == 1:
            lines.append(f"    return {systems[0]}")
        else:
            lines += ["    return compose(", *(f"        {s}," for s in systems), "    )"]
        return "\n".join(lines) + "\n"

    def build(self) -> Recurrence:
        """The recurrence; the same object for the same text. Raises TraceError for invalid declarations."""
        return built(self.text)


def _names(*texts: str) -> set[str]:
    """All names in these expressions."""
    return {n.id for text in texts if text for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name)}


@functools.lru_cache(maxsize=64)
def built(text: str) -> Recurrence:
    """The recurrence named NAME in the source text."""
    scope: dict[str, object] = {}
    exec(compile(text, "<fuzz>", "exec"), scope)
    found = scope[NAME]
    assert isinstance(found, Recurrence)
    return found


def smaller(declaration: Declaration) -> Iterator[Declaration]:
    """Declarations with something removed, the largest removals first; some may be invalid."""
    d = declaration
    if d.rule:
        yield replace(d, rule="", drive="")
        if d.rule != "dsf.ratio":
            yield replace(d, rule="dsf.ratio")
    for window in sorted({0, 1, d.window // 2} - {d.window}):
        if window < d.window:
            yield replace(d, window=window)
    if len(d.steps) > 1:
        for place in range(len(d.steps)):
            yield replace(d, steps=(*d.steps[:place], *d.steps[place + 1 :]))
    if d.D != "0":
        yield replace(d, D="0")
    if d.read != "after":
        yield replace(d, read="after")
    for place, (a, b) in enumerate(d.steps):
        for text in ("1", "I", *_pruned(a)):
            if text != a:
                yield replace(d, steps=(*d.steps[:place], (text, b), *d.steps[place + 1 :]))
        for text in _pruned(b):
            yield replace(d, steps=(*d.steps[:place], (a, text), *d.steps[place + 1 :]))
    for text in _pruned(d.C):
        yield replace(d, C=text)
    for text in _pruned(d.D):
        yield replace(d, D=text)
    for place, (name, value) in enumerate(d.lets):
        for text in _pruned(value):
            yield replace(d, lets=(*d.lets[:place], (name, text), *d.lets[place + 1 :]))


def _pruned(text: str) -> list[str]:
    """The expression with one node replaced by one of its operands, for every node and operand; the shortest first."""
    tree = ast.parse(text, mode="eval")
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        for operand in _operands(node):
            short = ast.unparse(_replaced(tree.body, node, operand))
            if short != text:
                found[short] = None
    return sorted(found, key=len)


def _operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Call):
        return [x for x in node.args if not isinstance(x, ast.Compare)]
    return []


def _replaced(tree: ast.AST, old: ast.AST, new: ast.AST) -> ast.AST:
    """A copy of the tree in which `new` stands for one node."""
    if tree is old:
        return new

    def copied(value: object) -> object:
        if isinstance(value, list):
            return [copied(x) for x in value]
        return _replaced(value, old, new) if isinstance(value, ast.AST) else value

    return type(tree)(**{name: copied(value) for name, value in ast.iter_fields(tree)})
