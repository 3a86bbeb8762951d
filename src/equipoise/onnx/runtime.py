"""An ONNX network held against onnxruntime, where it is installed: two readings of one file must give the same numbers."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core.errors import Refused

#: networks with more entries in all their values are not compared: it would take minutes
LARGEST_COMPARED = 2**26
#: differences relative to the largest result that rounding explains
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-8}


def require_same_results(network: nn.Module, source: bytes | Path, inputs: dict[str, Tensor]) -> None:
    """Compare a network with onnxruntime on three random points; nothing is compared where it is missing or cannot run it.

    Args:
        network: the network as it was read.
        source: the bytes of its file, or the path where weights lie beside it.
        inputs: tensors of the inputs' shapes and types, by name.

    Raises:
        Refused: where results differ by more than rounding, so that a bound would say nothing of the network in the file.
    """
    session = _session(source)
    if session is None:
        return

    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 0.1, 10.0):
        points = [scale * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs.values()]
        arrays = {name: point.numpy() for name, point in zip(inputs, points, strict=True)}
        try:
            expected = session.run(None, arrays)
        except Exception:  # noqa: BLE001 - operators it lacks, types it has no kernel for
            return
        _require_equal(network, points, expected)


def _session(source: bytes | Path) -> Any:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        file = source if isinstance(source, bytes) else str(source)
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - a newer format, an operator it lacks
        return None


def _require_equal(network: nn.Module, points: list[Tensor], expected: list[np.ndarray]) -> None:
    dtype = points[0].dtype
    ours = _results(network, points)
    theirs = [torch.from_numpy(np.asarray(value)).double() for value in expected]

    if [t.shape for t in ours] != [t.shape for t in theirs]:
        shapes = [[list(t.shape) for t in values] for values in (ours, theirs)]
        raise Refused(
            f"the ONNX network gives results of shapes {shapes[0]}, onnxruntime of {shapes[1]}: it is not bounded"
        )

    rounding = _ROUNDING.get(dtype, 1e-3)
    if all(_differ(a, b) <= rounding * _scale(b) for a, b in zip(ours, theirs, strict=True)):
        return

    # a network that amplifies rounding: how much it does is seen in float64
    exact = _results(copy.deepcopy(network).double(), [point.double() for point in points])
    for a, b, c in zip(ours, theirs, exact, strict=True):
        if _differ(a, b) > rounding * _scale(b) + 20 * _differ(a, c):
            raise Refused(
                f"the ONNX network gives other results than onnxruntime (they differ by {_differ(a, b):.3g} where the largest is "
                f"{_scale(b):.3g}), so a bound would say nothing of the network in the file; please report the file"
            )


def _results(network: nn.Module, points: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found = network(*points)
    return [t.double() for t in (found if isinstance(found, tuple) else (found,))]


def _differ(a: Tensor, b: Tensor) -> float:
    """The largest difference; entries that are NaN or infinite in the same way in both do not differ."""
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs().nan_to_num(float("inf"))).max()) if a.numel() else 0.0


def _scale(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
