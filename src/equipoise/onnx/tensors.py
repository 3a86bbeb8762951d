"""The constants of an ONNX file: inside it, or in a file of weights beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused, one_line
from equipoise.core.files import open_regular

#: a larger file is not read, nor more than this from the files beside it
LARGEST_FILE = 2_000_000_000
#: no value of a network may have more entries than this
LARGEST_VALUE = 2**28
#: torch's floating-point formats of ONNX's element types
FLOATS: Mapping[int, torch.dtype] = {1: torch.float32, 11: torch.float64}
_OTHERS = {2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool}
#: torch's number format of ONNX's element types
DTYPES: Mapping[int, torch.dtype] = {**FLOATS, **_OTHERS}


class Beside:
    """Files of weights in the folder of an ONNX file, where PyTorch's exporter puts them: read in parts, within a budget.

    A file is named by its bare name: a path, a link or a device is refused.
    """

    def __init__(self, folder: Path | None, budget: int = LARGEST_FILE) -> None:
        self.folder, self.left = folder, budget

    def read(self, proto: Any, length: int, what: str) -> bytes:
        """The `length` bytes of a tensor."""
        said = {entry.key: entry.value for entry in proto.external_data}
        name, start, size = said.get("location", ""), said.get("offset", "0"), said.get("length", str(length))
        if self.folder is None:
            raise Refused(f"{what} is stored outside the file; save the model as one file, or load it from its folder")
        if not name or name in (".", "..") or any(c in name for c in "/\\:\0") or len(name.encode()) > 255:
            raise Refused(f"{what} is stored in {name[:80]!r}; only files in the folder of the model itself are read")
        if not (start.isascii() and start.isdigit() and len(start) < 19) or size != str(length):
            raise InputError(f"{what} needs {length} bytes, and the file says {size!r} from {start!r} in {name!r}")
        if (self.folder / name).is_symlink():
            raise Refused(f"{what} is stored in {name!r}, which is a link; put the file itself beside the model")
        self.left -= length
        if self.left < 0:
            raise InputError(f"up to {what} more than {LARGEST_FILE:,} bytes of weights are stored outside the file")
        with open_regular(self.folder / name) as file:
            file.seek(int(start))
            found = file.read(length)
        if len(found) != length:
            raise InputError(f"{what}: {name} ends after {len(found)} of its {length} bytes; copy the file again")
        return found


def element(kind: int) -> str:
    """ONNX's name of an element type."""
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(kind)) if kind in TensorProto.DataType.values() else str(kind)


def constant(proto: Any, what: str, beside: Beside) -> Tensor:
    """A tensor of the file; its size is checked before it is made."""
    from onnx import numpy_helper

    if proto.data_type not in DTYPES:
        raise Refused(
            f"{what} has element type {element(proto.data_type)}; float32, float64, integers and booleans are read: "
            "convert the network to float32"
        )
    shape, kind = tuple(proto.dims), DTYPES[proto.data_type]
    if any(d < 0 for d in shape) or math.prod(float(d) for d in shape) > LARGEST_VALUE:
        raise InputError(f"{what} declares the shape {shape[:8]}")
    try:
        if proto.data_location == 1 or proto.external_data:
            stored = "u1" if kind == torch.bool else np.dtype(str(kind).removeprefix("torch.")).newbyteorder("<")
            data = beside.read(proto, math.prod(shape) * np.dtype(stored).itemsize, what)
            array = np.frombuffer(data, stored).astype(np.dtype(stored).newbyteorder("="))
        else:
            array = np.ascontiguousarray(numpy_helper.to_array(proto)).copy()
        return torch.from_numpy(array).reshape(shape).to(kind)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read ({one_line(error)})") from error
