"""ONNX networks as modules: read without running anything a file says, every node a submodule that keeps its name.

`load_onnx(path)` gives an `OnnxNetwork`, which `lipschitz_bound`, `certify` and the command line take like any other
module; a refusal names the ONNX node.
"""

from equipoise.onnx.network import OnnxNetwork, load_onnx, read_onnx
from equipoise.onnx.operators import known_operators

__all__ = ["OnnxNetwork", "known_operators", "load_onnx", "read_onnx"]
