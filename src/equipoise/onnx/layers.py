"""ONNX operators with weights or windows: products, convolutions, pooling, normalization."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.operators import Fixed, operator
from equipoise.onnx.reading import Spec

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMUM: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@operator("Gemm")
def _gemm(spec: Spec, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    spec.only("alpha", "beta", "transA", "transB")
    alpha, beta = spec.get("alpha", 1.0), spec.get("beta", 1.0)
    a = a.T if spec.get("transA", 0) else a
    product = F.linear(a, b) if spec.get("transB", 0) else a @ b
    product = product if alpha == 1 else alpha * product
    if c is None:
        return product
    return product + (c if beta == 1 else beta * c)


def _axes(spec: Spec, x: Tensor, table: dict[int, Any]) -> int:
    axes = x.dim() - 2
    if axes not in table:
        raise spec.refuse(f"inputs of {x.dim()} dimensions are not supported")
    return axes


def _window(spec: Spec, x: Tensor, kernel: list[int]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and the padding before and after every axis."""
    axes = len(kernel)
    strides, dilations = spec.get("strides", [1] * axes), spec.get("dilations", [1] * axes)
    automatic = spec.get("auto_pad", "NOTSET")
    if automatic in ("NOTSET", "VALID"):
        pads = spec.get("pads", [0] * (2 * axes)) if automatic == "NOTSET" else [0] * (2 * axes)
        return strides, dilations, [(pads[i], pads[i + axes]) for i in range(axes)]
    if automatic not in ("SAME_UPPER", "SAME_LOWER"):
        raise spec.refuse(f"auto_pad {automatic!r} is not supported")
    pairs = []
    for n, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        small, large = total // 2, total - total // 2
        pairs.append((small, large) if automatic == "SAME_UPPER" else (large, small))
    return strides, dilations, pairs


def _padded(x: Tensor, pairs: list[tuple[int, int]]) -> tuple[Tensor, list[int]]:
    """The input with what an operator's own, two-sided padding cannot do, and what is left for the operator."""
    if all(a == b for a, b in pairs):
        return x, [a for a, _ in pairs]
    return _filled(x, pairs), [0] * len(pairs)


def _filled(x: Tensor, pairs: list[tuple[int, int]], value: float = 0.0) -> Tensor:
    """The input with so many entries before and after every axis."""
    return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=value)


def _kernel(spec: Spec, weight: Tensor) -> list[int]:
    kernel = [int(n) for n in weight.shape[2:]]
    if spec.get("kernel_shape", kernel) != kernel:
        raise spec.refuse(f"kernel_shape {spec.get('kernel_shape')} is not the weight's {kernel}")
    return kernel


@operator("Conv")
def _conv(spec: Spec, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    spec.only("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    run = _CONV[_axes(spec, x, _CONV)]
    strides, dilations, pairs = _window(spec, x, _kernel(spec, weight))
    x, padding = _padded(x, pairs)
    return run(x, weight, bias, strides, padding, dilations, spec.get("group", 1))


@operator("ConvTranspose")
def _conv_transpose(spec: Spec, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    spec.only("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides", "output_padding")
    axes = _axes(spec, x, _TRANSPOSED)
    if spec.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise spec.refuse("auto_pad is not supported here; export with explicit pads")
    strides, dilations, pairs = _window(spec, x, _kernel(spec, weight))
    extra = spec.get("output_padding", [0] * axes)
    least = [min(p) for p in pairs]
    result = _TRANSPOSED[axes](x, weight, bias, strides, least, extra, spec.get("group", 1), dilations)
    for i, ((before, after), p) in enumerate(zip(pairs, least, strict=True)):
        result = result.narrow(2 + i, before - p, result.shape[2 + i] - (before - p) - (after - p))
    return result


@operator("MaxPool")
def _max_pool(spec: Spec, x: Tensor) -> Tensor:
    spec.only("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "storage_order", "strides")
    if len([o for o in spec.outputs if o]) > 1:
        raise spec.refuse("the places of the maxima are not given")
    kernel = spec.get("kernel_shape")
    run = _MAXIMUM[_axes(spec, x, _MAXIMUM)]
    strides, dilations, pairs = _window(spec, x, kernel)
    pairs = _ceiled(spec, x, kernel, strides, dilations, pairs)
    even = all(a == b and 2 * a <= k for (a, b), k in zip(pairs, kernel, strict=True))
    if even:
        return run(x, kernel, strides, [a for a, _ in pairs], dilations)
    return run(_filled(x, pairs, torch.finfo(x.dtype).min), kernel, strides, 0, dilations)


def _ceiled(
    spec: Spec, x: Tensor, kernel: list[int], strides: list[int], dilations: list[int], pairs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """With `ceil_mode`, padding after the end so that the last window fits; a window that would start in it is left out."""
    if not spec.get("ceil_mode", 0):
        return pairs
    found = []
    for n, k, s, d, (before, after) in zip(x.shape[2:], kernel, strides, dilations, pairs, strict=True):
        span, whole = d * (k - 1) + 1, n + before + after
        count = -(-(whole - span) // s) + 1
        if (count - 1) * s >= n + before:
            count -= 1
        found.append((before, after + max(0, (count - 1) * s + span - whole)))
    return found


@operator("AveragePool")
def _average_pool(spec: Spec, x: Tensor) -> Tensor:
    spec.only("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides")
    kernel = spec.get("kernel_shape")
    run = _AVERAGE[_axes(spec, x, _AVERAGE)]
    strides, dilations, pairs = _window(spec, x, kernel)
    if any(d != 1 for d in dilations):
        raise spec.refuse("dilated average pooling is not supported")
    plain = all(a == b and 2 * a <= k for (a, b), k in zip(pairs, kernel, strict=True))
    include = bool(spec.get("count_include_pad", 0))
    if plain:
        padding = [a for a, _ in pairs]
        return run(x, kernel, strides, padding, bool(spec.get("ceil_mode", 0)), include or not any(padding))
    if not include or spec.get("ceil_mode", 0):
        raise spec.refuse("uneven padding that is not counted is not supported")
    return run(_filled(x, pairs), kernel, strides)


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(spec: Spec, x: Tensor) -> Tensor:
    spec.only("p")
    axes = list(range(2, x.dim()))
    if spec.kind == "GlobalMaxPool":
        return x.amax(axes, True)
    if spec.kind == "GlobalLpPool":
        return torch.linalg.vector_norm(x, spec.get("p", 2), axes, True)
    return x.mean(axes, True)


@operator("LpPool")
def _lp_pool(spec: Spec, x: Tensor) -> Tensor:
    spec.only("auto_pad", "ceil_mode", "dilations", "kernel_shape", "p", "pads", "strides")
    kernel, order = spec.get("kernel_shape"), spec.get("p", 2)
    strides, dilations, pairs = _window(spec, x, kernel)
    if any(d != 1 for d in dilations) or spec.get("ceil_mode", 0):
        raise spec.refuse("dilations and ceil_mode are not supported")
    windows = _filled(x, pairs)
    for i, (k, s) in enumerate(zip(kernel, strides, strict=True)):
        windows = windows.unfold(2 + i, k, s)
    return torch.linalg.vector_norm(windows, order, list(range(-len(kernel), 0)))


@operator("BatchNormalization")
def _batch_norm(
    spec: Spec, x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, ...]:
    spec.only("epsilon", "momentum", "spatial", "training_mode")
    if spec.get("training_mode", 0) or spec.get("spatial", 1) != 1:
        raise spec.refuse("it is in training mode or not per channel")
    return (F.batch_norm(x, mean, variance, scale, shift, False, 0.0, spec.get("epsilon", 1e-5)),)


@operator("InstanceNormalization")
def _instance_norm(spec: Spec, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    spec.only("epsilon")
    return F.instance_norm(x, None, None, scale, shift, True, 0.0, spec.get("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(spec: Spec, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    spec.only("epsilon", "num_groups", "stash_type")
    groups = spec.get("num_groups")
    if scale.numel() != x.shape[1]:  # one number per group before opset 21
        scale, shift = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, shift))
    return F.group_norm(x, groups, scale, shift, spec.get("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(spec: Spec, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    spec.only("axis", "epsilon", "stash_type")
    if len([o for o in spec.outputs if o]) > 1:
        raise spec.refuse("mean and deviation are not given")
    shape = list(x.shape[spec.get("axis", -1) % x.dim() :])
    scale = scale.expand(shape)
    return F.layer_norm(x, shape, scale, None if shift is None else shift.expand(shape), spec.get("epsilon", 1e-5))


@operator("RMSNormalization")
def _rms_norm(spec: Spec, x: Tensor, scale: Tensor) -> Tensor:
    spec.only("axis", "epsilon", "stash_type")
    shape = list(x.shape[spec.get("axis", -1) % x.dim() :])
    return F.rms_norm(x, shape, scale.expand(shape), spec.get("epsilon", 1e-5))


@operator("MeanVarianceNormalization")
def _standardized(spec: Spec, x: Tensor) -> Tensor:
    spec.only("axes")
    axes = [a % x.dim() for a in spec.get("axes", [0, 2, 3])]
    centred = x - x.mean(axes, True)
    return centred / torch.sqrt((centred * centred).mean(axes, True) + 1e-9)


@operator("LpNormalization")
def _unit(spec: Spec, x: Tensor) -> Tensor:
    spec.only("axis", "p")
    return x / torch.linalg.vector_norm(x, spec.get("p", 2), [spec.get("axis", -1)], True)


@operator("LRN")
def _local_response(spec: Spec, x: Tensor) -> Tensor:
    spec.only("alpha", "beta", "bias", "size")
    size, rest = spec.get("size"), x.dim() - 2
    squares = F.pad(x * x, [0, 0] * rest + [(size - 1) // 2, size // 2])
    near = squares.unfold(1, size, 1).sum(-1)
    return x * (spec.get("bias", 1.0) + spec.get("alpha", 1e-4) / size * near) ** -spec.get("beta", 0.75)


@operator("Dropout", fixed=(1, 2))
def _dropout(spec: Spec, x: Tensor, ratio: Fixed = None, training: Fixed = None) -> tuple[Tensor, ...]:
    spec.only("ratio", "seed")
    if training is not None and bool(training.reshape(()).item()):
        raise spec.refuse("it is in training mode")
    if len([o for o in spec.outputs if o]) > 1:
        return x, torch.ones(x.shape, dtype=torch.bool)
    return (x,)
