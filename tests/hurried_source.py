"""The source of kernels in Triton's interpreter, which is read and changed once for all functions of a file.

The interpreter looks for each function's lines by cutting its file into tokens, twice, and walks through all that it
has parsed three times.
"""

import __future__

import ast
import linecache
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import triton_private as private

Place = tuple[str, int]  # a file, and the line where a function or its first decorator stands


def at_once(rewrite: Callable[..., Any]) -> Callable[..., Any]:
    """`rewrite_ast` of a function; what is not found in its file it rewrites itself."""
    read: dict[str, list[str]] = {}  # files and their lines, for lines that have changed since
    parsed: dict[Place, ast.FunctionDef] = {}
    compiled: dict[Place, CodeType] = {}

    def rewritten(self: Any) -> Any:
        code = self.fn.__code__
        file, place = code.co_filename, (code.co_filename, code.co_firstlineno)
        linecache.checkcache(file)
        lines = linecache.getlines(file, self.fn.__globals__)
        if read.get(file) is not lines:
            for known in (parsed, compiled):
                for old in [p for p in known if p[0] == file]:
                    del known[old]
            read[file] = lines
            parsed.update({(file, line): node for line, node in _functions("".join(lines))})
        if place not in compiled:
            node = parsed.get(place)
            if node is None or node.name != code.co_name or not _convert(node.body):
                return rewrite(self)
            node.decorator_list = []
            compiled[place] = compile(ast.Module([node], []), file, "exec", __future__.annotations.compiler_flag)
        names, found = self.fn.__globals__, dict(self.kwargs)
        for name, value in private.GLOBALS.items():
            names.setdefault(name, value)
        exec(compiled[place], names, found)
        return found[code.co_name]

    return rewritten


def _functions(text: str) -> Iterator[tuple[int, ast.FunctionDef]]:
    """The functions and methods of a file that stand in no other, with their first lines."""
    bodies = [ast.parse(text).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.FunctionDef):
                yield min(x.lineno for x in (node, *node.decorator_list)), node
            elif isinstance(node, ast.ClassDef | ast.If):
                bodies.append(node.body)


def _convert(body: list[ast.stmt]) -> bool:
    """Have what is assigned become tensors, as the interpreter does; whether that is all it does there."""
    for node in body:
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.Assign) and len(node.targets) > 1):
            return False
        if isinstance(node, ast.Assign):
            semantic = ast.Name("interpreter_semantic", ast.Load())
            convert = ast.Attribute(semantic, "to_tensor", ast.Load())
            checked = ast.Constant(False)
            call = ast.Call(convert, [node.value, checked], [])
            for new in (semantic, convert, checked, call):
                ast.copy_location(new, node)
            node.value = call
        for inner in ("body", "orelse"):
            if not _convert(getattr(node, inner, [])):
                return False
    return True
