"""ONNX operators of signals: Fourier transforms, which are linear, and the windows they are used with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from equipoise.onnx.operators import Fixed, bounded, number, operator
from equipoise.onnx.reading import Spec
from equipoise.onnx.tensors import DTYPES


def _whole(spec: Spec, value: Fixed, what: str) -> int | None:
    """An input that holds one whole number."""
    found = number(spec, value, what)
    if found is not None and found != int(found):
        raise spec.refuse(f"{what} must be a whole number, it is {found}")
    return None if found is None else int(found)


def _complex(spec: Spec, x: Tensor) -> Tensor:
    """Numbers whose last dimension holds real and imaginary parts, or real parts alone."""
    if x.dim() < 2 or x.shape[-1] not in (1, 2):
        raise spec.refuse(f"the last dimension of its input must hold 1 or 2 parts, the shape is {tuple(x.shape)}")
    return x.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())


@operator("DFT", fixed=(1, 2))
def _dft(spec: Spec, x: Tensor, length: Fixed = None, axis: Fixed = None) -> Tensor:
    spec.only("axis", "inverse", "onesided")
    chosen = _whole(spec, axis, "the axis")
    chosen = spec.get("axis", 1 if spec.opset < 20 else -2) if chosen is None else chosen
    if not -x.dim() <= chosen < x.dim() or chosen % x.dim() == x.dim() - 1:
        raise spec.refuse(f"axis {chosen} of an input of shape {tuple(x.shape)} is not one of the signal's")
    dim, z, n = chosen % x.dim(), _complex(spec, x), _whole(spec, length, "the length")
    bounded(spec, [*x.shape[:-1], n or 1])
    if spec.get("inverse", 0):
        if spec.get("onesided", 0):
            return torch.fft.irfft(z, n, dim).unsqueeze(-1)
        return torch.view_as_real(torch.fft.ifft(z, n, dim))
    if spec.get("onesided", 0):
        if z.is_complex():
            raise spec.refuse("one half of a spectrum is that of a real signal, and its input is complex")
        return torch.view_as_real(torch.fft.rfft(z, n, dim))
    return torch.view_as_real(torch.fft.fft(z, n, dim))


@operator("STFT", fixed=(1, 3))
def _stft(spec: Spec, x: Tensor, step: Fixed = None, window: Tensor | None = None, length: Fixed = None) -> Tensor:
    spec.only("onesided")
    by, size = _whole(spec, step, "the step"), _whole(spec, length, "the length of a frame")
    size = int(window.shape[0]) if size is None and window is not None else size
    z = x if x.dim() == 2 else _complex(spec, x)
    if z.dim() != 2 or not by or not size or by < 0 or not 0 < size <= z.shape[1]:
        raise spec.refuse(f"frames of {size} entries every {by} of an input of shape {tuple(x.shape)}")
    frames = z.unfold(1, size, by)
    frames = frames if window is None else frames * window
    if spec.get("onesided", 1) and not z.is_complex():
        return torch.view_as_real(torch.fft.rfft(frames))
    if spec.get("onesided", 1):
        raise spec.refuse("one half of a spectrum is that of a real signal, and its input is complex")
    return torch.view_as_real(torch.fft.fft(frames))


_WINDOWS = {"HannWindow": (0.5, -0.5), "HammingWindow": (25 / 46, -21 / 46), "BlackmanWindow": (0.42, -0.5, 0.08)}


@operator(*_WINDOWS, fixed=(0,))
def _window(spec: Spec, length: np.ndarray) -> Tensor:
    spec.only("output_datatype", "periodic")
    n = bounded(spec, [_whole(spec, length, "the length") or 0])[0]
    period = max(1, n if spec.get("periodic", 1) else n - 1)
    angle = 2 * math.pi / period * torch.arange(n, dtype=torch.float64)
    found = sum(c * torch.cos(k * angle) for k, c in enumerate(_WINDOWS[spec.kind]))
    assert isinstance(found, Tensor)
    return found.to(DTYPES.get(spec.get("output_datatype", 1), torch.float32))
