"""What a program states of itself, held against what it does: rules read shapes and types off the nodes of its graph.

A program that was exported in this process states what the exporter saw. One from a file states what its writer wrote, and
PyTorch runs it all the same: a mean over four numbers whose node states ten thousand would be bounded by 1/100.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from equipoise.core.errors import EquipoiseError, Refused, one_line, unlogged
from equipoise.lipschitz.places import where
from equipoise.lipschitz.values import flat_tensors, is_mutable


def require_stated_shapes(program: ExportedProgram, lifted: Mapping[fx.Node, Any]) -> None:
    """Run the program once on inputs of the shapes it states, and refuse it where a node gives another shape or type.

    Shapes that depend on the numbers cannot be stated: `torch.export` writes them as symbols, which are refused elsewhere.

    Args:
        program: as it was read.
        lifted: its parameters, buffers and constants by placeholder.
    """
    graph = program.graph_module.graph
    copied = any(is_mutable(node) for node in graph.nodes)
    given = []
    for node in (n for n in graph.nodes if n.op == "placeholder"):
        value = lifted.get(node, node.meta.get("val"))
        if isinstance(value, Tensor) and (node not in lifted or copied):
            whole = all(isinstance(n, int) for n in value.shape)
            if not whole:
                return  # refused by name where inputs are looked at
            value = (
                value.clone() if node in lifted else torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            )
        given.append(value)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), unlogged():
            run = _Compared(program.graph_module)
            run.extra_traceback = False  # errors keep their own words
            run.run(*given, enable_io_processing=False)
    except EquipoiseError:
        raise
    except Exception as error:  # whatever operations raise that do not fit together
        said = f"{type(error).__name__}: {one_line(error)[:160]}"
        raise Refused(
            f"the program does not run on inputs of the shapes it states ({said}); export it again"
        ) from error


class _Compared(fx.Interpreter):
    """Runs a graph and compares every value with what its node states."""

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, refused where it is not of the kind that is stated."""
        found = super().run_node(n)
        if n.op in ("placeholder", "call_function") and _kinds(found) != _kinds(n.meta.get("val")):
            raise Refused(
                f"{where(n)} states {_shown(n.meta.get('val'))} and gives {_shown(found)}: the file was changed after it was "
                "written, or by other means than torch.export; export the model again"
            )
        return found


def _kinds(value: Any) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    return [(tuple(t.shape), t.dtype) for t in flat_tensors(value)]


def _shown(value: Any) -> str:
    kinds = [f"{list(shape)} in {str(dtype).removeprefix('torch.')}" for shape, dtype in _kinds(value)]
    return ", ".join(kinds) or "no tensor"
