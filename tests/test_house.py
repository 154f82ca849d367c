"""The house: lengths of files and functions, counts of parameters, and that no modules import each other in circles."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("dsf", "mixers", "analysis", "benchmarks", "kernels")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 120, 20


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_file_is_longer_than_its_limit() -> None:
    long = {short(path) for path in FILES if len(path.read_text().splitlines()) > FILE_LINES}
    assert not long


def test_no_function_is_longer_or_takes_more_than_its_limit() -> None:
    above = set()
    for path in FILES:
        for f in functions(ast.parse(path.read_text())):
            taken = len([*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs])
            lines = (f.end_lineno or f.lineno) - f.lineno + 1
            if lines > FUNCTION_LINES or taken > PARAMETERS:
                above.add(f"{short(path)}:{f.name}")
    assert not above


# Circles


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "dsf" else ("dsf", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES if path.relative_to(ROOT).parts[0] != "benchmarks"}


def imported(node: ast.AST) -> Iterator[str]:
    """Modules that are imported below a node, within functions too; not those for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield inner if inner in MODULES else str(child.module)
        else:
            yield from imported(child)


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = arrows[left.pop()] - seen
            seen |= new
            left += new
        return seen

    below = {name: reached(name) for name in arrows}
    found = {frozenset(x for x in below[name] if name in below[x]) for name in arrows if name in below[name]}
    return [set(x) for x in found]


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    tree = ast.parse("def f():\n    from dsf.call import plan\nif TYPE_CHECKING:\n    import dsf.call.run")
    assert list(imported(tree)) == ["dsf.call.plan"]


def test_no_modules_import_each_other() -> None:
    """Within functions neither."""
    arrows = {
        name: {x for x in imported(ast.parse(path.read_text())) if x in MODULES and x != name}
        for name, path in MODULES.items()
    }
    assert not circles(arrows)


# Tests


def test_private_parts_of_triton_stand_in_one_file_of_the_tests() -> None:
    found = {
        path.name
        for path in (ROOT / "tests").glob("*.py")
        for name in imported(ast.parse(path.read_text()))
        if name.startswith(("triton.runtime", "triton.language.core", "triton.language.semantic", "triton.compiler"))
    }
    assert found == {"triton_private.py"}
