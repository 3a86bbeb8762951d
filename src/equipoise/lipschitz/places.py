"""Where a node of a captured graph comes from: its module and its line, for messages and reports."""

from __future__ import annotations

from torch import fx

from equipoise.onnx.network import OnnxNode


def where(node: fx.Node) -> str:
    """`node 'relu' (module features.1, file.py line 3)`: what every refusal starts with."""
    path, line = module_path(node), source_line(node)
    place = f"module {path}" if path else "the model's own forward"
    if path and _from_onnx(node):
        place, line = f"ONNX node {path!r}", ""  # the line would be one of the importer
    return f"node {node.name!r} ({place}{', ' + line if line else ''})"


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that runs this node; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [str(entry[0]) for entry in stack.values()]
    return entries[-1].split("@")[0] if entries else ""


def _from_onnx(node: fx.Node) -> bool:
    """Whether the innermost module is a node of an ONNX file."""
    kind = [entry[1] for entry in (node.meta.get("nn_module_stack") or {}).values()][-1]
    return kind is OnnxNode or kind == f"{OnnxNode.__module__}.{OnnxNode.__qualname__}"


def source_line(node: fx.Node) -> str:
    """`file line N: code` of the innermost frame that is not PyTorch's own."""
    frames = [f.strip() for f in str(node.meta.get("stack_trace") or "").split("File ") if f.strip()]
    own = [f for f in frames if "site-packages/torch/" not in f] or frames
    if not own:
        return ""
    head, _, code = own[-1].partition("\n")
    name, _, rest = head.partition(", line ")
    text = code.strip().splitlines()[0].strip() if code.strip() else ""
    number = rest.split(",")[0]
    return f"{name.strip(chr(34)).rsplit('/', 1)[-1]} line {number}" + (f": {text}" if text else "")
