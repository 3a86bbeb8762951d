"""What a program states of itself, held against what it does: rules read shapes and types off the nodes of its graph.

A program that was exported in this process states what the exporter saw. One from a file states what its writer wrote, and
PyTorch runs it all the same: a mean over four numbers whose node states ten thousand would be bounded by 1/100.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from equipoise.core.errors import EquipoiseError, Refused, one_line, unlogged
from equipoise.core.modules import LARGEST, flat_tensors


def require_stated_shapes(program: ExportedProgram) -> None:
    """Go through the program once with the shapes it states for its inputs, and refuse it where a node has another shape or type.

    Tensors without numbers do: shapes and types are those that the operators really give, and a file that asks for terabytes
    or hours gets neither. Shapes that depend on the numbers cannot be stated: `torch.export` writes them as symbols, which are
    refused elsewhere.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    constants = lifted(program)
    inputs = []
    for node in (n for n in program.graph_module.graph.nodes if n.op == "placeholder"):
        value = constants.get(node, node.meta.get("val"))
        if isinstance(value, Tensor):
            if not all(isinstance(n, int) for n in value.shape):
                return  # refused by name where inputs are looked at
            with mode:
                value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        inputs.append(value)
    try:
        with mode, torch.no_grad(), unlogged():
            run = _Compared(program.graph_module)
            run.extra_traceback = False  # errors keep their own words
            run.run(*inputs, enable_io_processing=False)
    except EquipoiseError:
        raise
    except Exception as error:  # whatever operations raise that do not fit together
        said = f"{type(error).__name__}: {one_line(error)[:160]}"
        raise Refused(
            f"the program does not run on inputs of the shapes it states ({said}); export it again"
        ) from error


def lifted(program: ExportedProgram) -> dict[fx.Node, Any]:
    """Parameters, buffers and constants by placeholder."""
    values: dict[fx.Node, Any] = {}
    by_name = {n.name: n for n in program.graph_module.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = by_name[spec.arg.name]
        if spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent):
            values[node] = _plain(program.state_dict[str(spec.target)])
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            constant = program.constants[str(spec.target)]
            values[node] = _plain(constant) if isinstance(constant, Tensor) else constant
        elif spec.kind is not InputKind.USER_INPUT:
            raise Refused(
                f"the program takes an input of kind {spec.kind.name} ({spec.arg.name}), which is not bounded"
            )
    return values


def _plain(tensor: Tensor) -> Tensor:
    """Without gradients, and without a conjugation or sign that is still to be carried out."""
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise Refused(
            f"a tensor of shape {tuple(tensor.shape)} is stored as {kind}, which no rule reads: use its to_dense()"
        )
    return tensor.detach().resolve_conj().resolve_neg()


class _Compared(fx.Interpreter):
    """Goes through a graph and compares every value with what its node states."""

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, refused where it is not of the kind that is stated."""
        value = super().run_node(n)
        size = sum(t.numel() * t.element_size() for t in flat_tensors(value))
        if size > LARGEST and n.op == "call_function":
            raise Refused(
                f"node {n.name!r} makes {size / 2**30:.3g} GiB at once, more than the {LARGEST / 2**30:g} GiB that a program "
                "may: bound its parts, or the module it was exported from"
            )
        if n.op in ("placeholder", "call_function") and _kinds(value) != _kinds(n.meta.get("val")):
            raise Refused(
                f"node {n.name!r} states {_kinds(n.meta.get('val'))} and gives {_kinds(value)}: the file was changed after it "
                "was written, or by other means than torch.export; export the model again"
            )
        return value


def _kinds(value: Any) -> str:
    kinds = [f"{list(t.shape)} in {str(t.dtype)[6:]}" for t in flat_tensors(value)]
    return ", ".join(kinds) or "no tensor"
