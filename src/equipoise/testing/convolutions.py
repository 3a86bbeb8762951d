"""Random convolution layers, all paddings, strides, dilations, groups and sizes, against their dense float64 matrix."""

import copy
import math
import warnings
from typing import Any

import torch
from torch import nn

from equipoise.norms.reference import reference_norm
from equipoise.norms.spectral import spectral_norm
from equipoise.testing.matrices import hostile_settings
from equipoise.testing.runner import Batch

CONV: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: the reference materialises the operator: at most this many inputs
MOST_INPUTS = 260
SCALES = (1.0, 1e-30, 1e30)


def random_layers(batch: Batch, count: int = 4) -> None:
    """A few random layers, each with its input size known and unknown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Complex modules")  # converting one warns that they are new
        for _ in range(count):
            layer, shape = random_layer(batch)
            _compare(batch, layer, shape)


def random_layer(batch: Batch) -> tuple[Any, tuple[int, ...]]:
    """A random layer on the CPU and the shape of one input it accepts."""
    dims = batch.choose(1, 2, 2, 2, 3)
    groups = batch.choose(1, 1, 1, 2, 3)
    channels = [groups * batch.integer(1, 3 if dims < 3 else 2) for _ in range(2)]
    kernel = [batch.integer(1, 5 if dims < 3 else 3) for _ in range(dims)]
    stride = [batch.choose(1, 1, 2, 3) for _ in range(dims)]
    dilation = [batch.choose(1, 1, 1, 2) for _ in range(dims)]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    most = max(2, int((MOST_INPUTS / channels[0]) ** (1 / dims)))
    if batch.integer(0, 4) == 0:
        padding = [batch.integer(0, min(r, 2)) for r in reach]
        extra = [batch.integer(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        sizes = [batch.integer(2 + 2 * p, max(2 + 2 * p, most // 2)) for p in padding]
        layer = TRANSPOSED[dims - 1](*channels, kernel, stride, padding, extra, groups, False, dilation)
        return _filled(batch, layer), (channels[0], *sizes)
    mode = batch.choose("zeros", "zeros", "circular", "reflect", "replicate")
    padding = [batch.integer(0, min(r + 1, 3)) for r in reach]
    smallest = [
        max(1, r + 1 - 2 * p, p + 1 if mode == "reflect" else p if mode == "circular" else 1)
        for r, p in zip(reach, padding, strict=True)
    ]
    sizes = [batch.integer(s, max(s, most)) for s in smallest]
    layer = CONV[dims - 1](*channels, kernel, stride, padding, dilation, groups, padding_mode=mode, bias=False)
    return _filled(batch, layer), (channels[0], *sizes)


def _filled(batch: Batch, layer: Any) -> Any:
    layer.requires_grad_(False)
    kind, scale = batch.choose("gaussian", "positive", "one tap"), batch.choose(*SCALES)
    weight = torch.randn(layer.weight.shape, generator=batch.generator, dtype=torch.float64)
    if kind == "positive":
        weight = weight.abs()
    elif kind == "one tap":
        mask = torch.zeros_like(weight).flatten(2)
        mask[..., batch.integer(0, mask.shape[-1] - 1)] = 1
        weight = weight * mask.reshape(weight.shape)
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64, torch.complex64, torch.complex128)
    dtype = torch.float32 if batch.device.type == "mps" else batch.choose(*dtypes)
    if dtype.is_complex:
        weight = torch.complex(weight, torch.randn(weight.shape, generator=batch.generator, dtype=torch.float64))
    layer = layer.to(dtype)
    layer.weight.copy_(weight * scale)
    return layer


def _compare(batch: Batch, layer: Any, shape: tuple[int, ...]) -> None:
    exponent = math.frexp(float(layer.weight.abs().max()) or 1.0)[1]
    scaled = copy.deepcopy(layer).to(torch.complex128 if layer.weight.is_complex() else torch.float64)
    scaled.weight.mul_(2.0**-exponent)  # an exact power of two keeps the SVD in range
    truth = math.ldexp(reference_norm(scaled, shape), exponent)
    moved = layer.to(batch.device)
    rtol = batch.choose(1e-1, 1e-2, 1e-3)
    what = f"{batch.label}: {layer} on {shape}, {layer.weight.dtype}"
    with hostile_settings(batch.integer(0, 3) == 0):
        known = spectral_norm(moved, rtol=rtol, input_size=shape[1:])
        batch.tally.record(known.lower, known.upper, truth, what)
        unknown = spectral_norm(moved, rtol=rtol)
    batch.tally.record(None, unknown.upper, truth, f"{what}, size unknown", again=True)


def any_size(batch: Batch) -> None:
    """Both ends for an unknown input size, against a fine grid of the symbol and the factor from there to the supremum.

    `max_grid ‖E‖ ≤ sup ‖E‖ ≤ max_grid ‖E‖·Π 1/cos(π(k_j − 1)/(2·n_j))`: the upper end must not lie below the first, nor the
    lower end above the last. Stride 1 and zero padding, where the supremum is that of the symbol whatever the dilation.
    """
    dims = batch.choose(1, 2)
    co, ci, kernel = batch.integer(1, 6), batch.integer(1, 6), [batch.integer(1, 5) for _ in range(dims)]
    layer = CONV[dims - 1](ci, co, kernel, padding=batch.integer(0, 2), dilation=batch.integer(1, 2), bias=False)
    K = torch.randn(co, ci, *kernel, generator=batch.generator, dtype=torch.float64)
    layer.requires_grad_(False).weight.copy_(K)
    sizes = [16 * max(1, k - 1) for k in kernel]
    symbol = torch.fft.fftn(layer.weight.double(), s=sizes, dim=tuple(range(2, 2 + dims))).flatten(2).movedim(2, 0)
    grid = float(torch.linalg.matrix_norm(symbol, ord=2).max())
    factor = math.prod(1 / math.cos(math.pi * (k - 1) / (2 * n)) for k, n in zip(kernel, sizes, strict=True))
    bracket = spectral_norm(layer.to(batch.device), rtol=batch.choose(1e-1, 1e-2, 1e-3))
    what = f"{batch.label}: {layer}, any size"
    batch.tally.record(None, bracket.upper, grid, what)
    batch.tally.record(bracket.lower, math.inf, grid * factor, what, again=True)
