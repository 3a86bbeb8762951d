"""A `.pt2` with a dynamic batch dimension, written anew for one batch size.

PyTorch evaluates the expressions of symbolic shapes as code, so it never sees them: here they are read as a small grammar
(one symbol, whole numbers, sums, products, quotients), evaluated at the batch size, and replaced by their values. What is left
is a description with static shapes, which is held against `equipoise.checkpoints.description` as every other one.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from equipoise.core.errors import InputError, Refused

#: the functions in which PyTorch writes sizes, in sympy's notation
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "Add": lambda *v: sum(v),
    "Mul": lambda *v: _product(v),
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Max": max,
    "Min": min,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "LessThan": operator.le,
    "StrictLessThan": operator.lt,
    "GreaterThan": operator.ge,
    "StrictGreaterThan": operator.gt,
}
_LARGEST = 2**40


def is_dynamic(document: Any) -> bool:
    """Whether the description of a program has symbols."""
    return isinstance(document, dict) and bool(document.get("range_constraints"))


def fix_batch(document: dict[str, Any], batch: int, name: str) -> tuple[dict[str, Any], int]:
    """The description with its batch dimension fixed, at `batch` or the nearest size the program allows, and that size.

    Refused: more than one symbol, a symbol in another place than the first dimension of an input, conditions that fail.
    """
    return _Fixing(document, batch, name).document()


class _Fixing:
    """One description, its symbol and the value it gets."""

    def __init__(self, document: dict[str, Any], batch: int, name: str) -> None:
        self.whole, self.name = document, name
        ranges = document["range_constraints"]
        if not isinstance(ranges, dict) or len(ranges) != 1:
            raise self.refused("several dynamic dimensions")
        ((self.symbol, limits),) = ranges.items()
        low, high = ((limits or {}).get(k) for k in ("min_val", "max_val")) if isinstance(limits, dict) else (0, 0)
        low, high = (v if type(v) is int else None for v in (low, high))
        self.batch = max(1, low or 0, batch if high is None else min(batch, high))
        if high is not None and self.batch > high:
            raise self.refused(f"a batch dimension between {low} and {high}")
        graph = self.graph = self.part(self.part(document, "graph_module"), "graph")
        self.values = {
            key: self.value(item)
            for kind in ("sym_int_values", "sym_bool_values")
            for key, item in self.part(graph, kind).items()
        }

    def refused(self, what: str) -> Refused:
        return Refused(
            f"{self.name} has {what}; only the first dimension of its inputs, the batch, may be dynamic: export it with "
            "dynamic_shapes=({0: torch.export.Dim('batch')},), or with static shapes"
        )

    def part(self, owner: Any, key: str) -> dict[str, Any]:
        found = owner.get(key) if isinstance(owner, dict) else None
        if not isinstance(found, dict):
            raise InputError(f"{self.name} has no {key!r} in its description; export it again")
        return found

    def document(self) -> tuple[dict[str, Any], int]:
        self.check_inputs()
        fixed = self.plain(self.whole, 60)
        graph = fixed["graph_module"]["graph"]
        graph["nodes"] = [n for n in graph["nodes"] if not self.is_size(n)]
        return {**fixed, "range_constraints": {}}, self.batch

    def check_inputs(self) -> None:
        """The symbol stands in the first dimension of inputs only, and alone."""
        tensors = self.part(self.graph, "tensor_values")
        for item in self.graph.get("inputs") or []:
            name = self.name_of(item)
            meta = tensors.get(name)
            for place, size in enumerate(meta.get("sizes") or [] if isinstance(meta, dict) else []):
                dynamic = isinstance(size, dict) and "as_int" not in size
                if dynamic and (place > 0 or self.value(size) != self.batch):
                    raise self.refused(f"a dynamic dimension {place} of its input {name[:80]!r}")

    def name_of(self, item: Any) -> str:
        given = item.get("as_tensor") if isinstance(item, dict) else None
        return str(given.get("name")) if isinstance(given, dict) else ""

    def is_size(self, node: Any) -> bool:
        """Whether a node only computes or asserts sizes, which are known now."""
        if not isinstance(node, dict):
            return False
        asserts = node.get("target") == "torch.ops.aten._assert_scalar.default"
        looked: Any = node.get("inputs" if asserts else "outputs")
        if asserts and isinstance(looked, list):
            looked = [i.get("arg") for i in looked[:1] if isinstance(i, dict)]
        return (
            isinstance(looked, list)
            and bool(looked)
            and all(isinstance(o, dict) and set(o) <= {"as_sym_int", "as_sym_bool"} for o in looked)
        )

    def plain(self, value: Any, depth: int) -> Any:
        """The document without symbols."""
        if depth == 0:
            raise InputError(f"{self.name} has a description nested too deeply; export it again")
        if isinstance(value, list):
            return [self.plain(v, depth - 1) for v in value]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("as_expr"), dict):
            return {"as_int": self.value(value)}
        if set(value) == {"as_name"} and value["as_name"] in self.values:
            return {"as_int": self.values[value["as_name"]]}
        emptied = ("sym_int_values", "sym_bool_values")
        return {k: {} if k in emptied else self.plain(v, depth - 1) for k, v in value.items()}

    def value(self, item: Any) -> int:
        """What an expression is at this batch size; a condition that does not hold is refused."""
        if isinstance(item, Mapping) and type(item.get("as_int")) is int:
            return int(item["as_int"])
        text = item.get("as_expr", {}) if isinstance(item, Mapping) else {}
        text = text.get("expr_str") if isinstance(text, Mapping) else None
        try:
            if not isinstance(text, str) or len(text) > 2000:
                raise ValueError
            found = self.evaluate(ast.parse(text, mode="eval").body)
            if abs(found) > _LARGEST:
                raise ValueError
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, ArithmeticError) as error:
            raise self.refused(f"the size {str(text)[:80]!r}") from error
        if found is False:
            raise self.refused(f"the condition {str(text)[:80]!r}, which a batch of {self.batch} does not meet,")
        return found

    def evaluate(self, node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.evaluate(node.operand)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise ValueError
        if node.func.id == "Symbol":
            if not (isinstance(node.args[0], ast.Constant) and node.args[0].value == self.symbol):
                raise ValueError
            return self.batch
        values = [self.evaluate(argument) for argument in node.args]
        if node.func.id == "Integer" and len(values) == 1:
            return values[0]
        if node.func.id not in _FUNCTIONS or any(abs(v) > _LARGEST for v in values):
            raise ValueError
        return _FUNCTIONS[node.func.id](*values)


def _product(values: tuple[int, ...]) -> int:
    result = 1
    for value in values:
        result *= value
        if abs(result) > _LARGEST:
            raise ValueError
    return result
