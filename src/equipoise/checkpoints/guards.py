"""Guards of an exported program: conditions on the sizes of its inputs, which PyTorch compiles and runs, and nothing else."""

import ast
from typing import Any

from equipoise.checkpoints.plain_values import INT64, NAME
from equipoise.core.errors import Refused

_COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_COMPUTED = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)


def checked_guard(value: Any, name: str) -> str:
    """A condition on the sizes of the inputs, e.g. `L['x'].size()[0] == 2`, written anew from its syntax tree."""
    try:
        if not isinstance(value, str) or len(value) > 2000:
            raise ValueError
        tree = ast.parse(value, mode="eval")
        if not _is_condition(tree.body):
            raise ValueError
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(
            f"{name} guards its inputs with {str(value)[:80]!r}, which would be run as code and is not a plain "
            "comparison of sizes; export it again"
        ) from error


def _is_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.BoolOp):
        return all(_is_condition(v) for v in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _is_condition(node.operand)
    if isinstance(node, ast.Compare):
        return all(isinstance(op, _COMPARED) for op in node.ops) and all(map(_is_size, [node.left, *node.comparators]))
    return False


def _is_size(node: ast.AST) -> bool:
    """A whole number, arithmetic of sizes, or `INPUT.size()[n]`, `INPUT.stride()[n]`, `INPUT.shape[n]`, `INPUT.ndim`."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int and abs(node.value) <= INT64
    if isinstance(node, ast.BinOp) and isinstance(node.op, _COMPUTED):
        return _is_size(node.left) and _is_size(node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_size(node.operand)
    if isinstance(node, ast.Attribute) and node.attr == "ndim":
        return _is_input(node.value)
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is int):
        return False
    owner = node.value
    if isinstance(owner, ast.Call) and not owner.args and not owner.keywords:
        owner = owner.func
        return isinstance(owner, ast.Attribute) and owner.attr in ("size", "stride") and _is_input(owner.value)
    return isinstance(owner, ast.Attribute) and owner.attr == "shape" and _is_input(owner.value)


def _is_input(node: ast.AST) -> bool:
    """`L['x']`, and places inside it."""
    if isinstance(node, ast.Name):
        return node.id == "L"
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and _is_input(node.value)):
        return False
    key = node.slice.value
    return (isinstance(key, str) and NAME.match(key) is not None) or (type(key) is int and 0 <= key < 10**6)
