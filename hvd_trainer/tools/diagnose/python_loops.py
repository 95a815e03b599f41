"""Find the loop of Python that a line is in, by the source: one over time or samples, and not over the layers."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from typing import Any

WRAPPERS = {"enumerate", "reversed", "zip", "list", "tuple", "range", "len"}
"""Functions around what a loop goes through."""
LOOPS: Any = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)
FUNCTIONS: Any = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def loop_around(file: str, line: int) -> int | None:
    """Return the line of the outermost loop around a line, within its function; None if there is none.

    A loop over the model's own parts, such as `for layer in self.layers`, is none: these are few, and large.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    around = [node for node in ast.walk(tree) if getattr(node, "lineno", line + 1) <= line <= _end(node)]
    function = max((node.lineno for node in around if isinstance(node, FUNCTIONS)), default=0)
    loops = (node for node in around if isinstance(node, LOOPS) and node.lineno > function)
    return min((node.lineno for node in loops if not _is_over_parts(node)), default=None)


def _end(node: Any) -> int:
    end: int = node.end_lineno or node.lineno
    return end


def _is_over_parts(loop: Any) -> bool:
    if isinstance(loop, ast.While):
        return False
    generators = [loop] if isinstance(loop, ast.For) else loop.generators
    return all(_are_parts(generator.iter) for generator in generators)


def _are_parts(iterated: ast.expr) -> bool:
    """Return whether these are parts of an object, such as `self.layers` or `self.blocks.values()`."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id in WRAPPERS:
        # `range(len(self.layers))` is over these, `range(self.steps)` is not.
        is_number = iterated.func.id == "range" and not any(isinstance(part, ast.Call) for part in iterated.args)
        return not is_number and any(map(_are_parts, iterated.args))
    while isinstance(iterated, ast.Call | ast.Attribute | ast.Subscript):
        iterated = iterated.func if isinstance(iterated, ast.Call) else iterated.value
    return isinstance(iterated, ast.Name) and iterated.id in ("self", "model", "module")
