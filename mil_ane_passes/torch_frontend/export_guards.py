"""Guards of exported programs: conditions on sizes without which their results are wrong."""

from __future__ import annotations

import ast
import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..utils.text_format import escape_text

__all__ = ["warn_about_guards"]

_log = logging.getLogger("mil_ane_passes")
_PINNING_GUARD = re.compile(r" == -?\d+$")
_GUARD_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod}
_MOST_SIZES, _SIZE_DRAWS = 1000, 100
"Sizes beyond the smallest that are drawn, and how often, to find guards that are true of all."


def warn_about_guards(model: Any) -> None:
    """Log the conditions under which an exported program holds that give what is computed from a size one value.

    torch.export records them where Python code makes a number of a size, such as `int(h * 7)`. Those that are true of
    all sizes that are tried, such as `h // (h // 2) == 2` of even ones, are not conditions.
    """
    guards = [guard for guard in getattr(model, "_guards_code", None) or () if _PINNING_GUARD.search(guard)]
    draws = _draw_sizes(model) if guards else []
    for guard in guards:
        if not draws or not all(_compute_guard(guard, sizes) for sizes in draws):
            _log.warning("the exported program holds only where %s; if the model accepts other sizes, its results for "
                         "them are wrong: make no number of a size by int() or float()", escape_text(guard))


def _draw_sizes(model: Any) -> list[dict[str, list[int]]]:
    """Draw sizes of the inputs of an exported program, by input, from the ranges of its symbols and their ends.

    None are drawn of a program with a symbol whose range is not known.
    """
    random, draws = np.random.default_rng(0), []
    lowest = {symbol: max(each.lower, 0) for symbol, each in model.range_constraints.items() if symbol.is_Symbol}
    ranges = {symbol: (int(low), int(min(model.range_constraints[symbol].upper, low + _MOST_SIZES)))
              for symbol, low in lowest.items()}
    inputs = {node.name: node.meta["val"].shape for node in model.graph.nodes
              if node.op == "placeholder" and node.name in model.graph_signature.user_inputs
              and hasattr(node.meta.get("val"), "shape")}
    for number in range(_SIZE_DRAWS):
        values = {symbol: (low, high)[number] if number < 2 else int(random.integers(low, high + 1))
                  for symbol, (low, high) in ranges.items()}
        sizes = {name: [size if isinstance(size, int) else size.node.expr.subs(values) for size in shape]
                 for name, shape in inputs.items()}
        if any(not getattr(size, "is_Integer", True) for shape in sizes.values() for size in shape):
            return []  # a symbol without a range
        draws.append({name: [int(size) for size in shape] for name, shape in sizes.items()})
    return draws


def _compute_guard(guard: str, sizes: Mapping[str, Sequence[int]]) -> bool:
    """Compute a guard of sizes: integer arithmetic, comparisons and `L['x'].size()[0]`; False for any other one."""
    def compute(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return compute(body)
            case ast.Constant(value=int() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -compute(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _GUARD_OPERATORS:
                return _GUARD_OPERATORS[type(op)](compute(left), compute(right))
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return compute(left) == compute(right)
            case ast.Subscript(value=ast.Call(func=ast.Attribute(value=ast.Subscript(
                    value=ast.Name(id="L"), slice=ast.Constant(value=str() as name)), attr="size"), args=[]),
                    slice=ast.Constant(value=int() as axis)):
                return sizes[name][axis]
        raise ValueError(f"unknown part of a guard: {ast.dump(node)}")

    try:
        return bool(compute(ast.parse(guard, mode="eval")))
    except (ArithmeticError, LookupError, SyntaxError, ValueError):
        return False
