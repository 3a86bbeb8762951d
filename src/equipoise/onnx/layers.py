"""ONNX operators with weights or windows: products, convolutions, pooling, normalization."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.operators import Fixed, operator
from equipoise.onnx.reading import Spec


@operator("Gemm")
def _gemm(
    spec: Spec,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    a = a.T if transA else a
    product = F.linear(a, b) if transB else a @ b
    product = product if alpha == 1 else alpha * product
    if c is None:
        return product
    return product + (c if beta == 1 else beta * c)


def _of_rank(spec: Spec, x: Tensor, name: str) -> Callable[..., Any]:
    """torch's function of this name (`conv`) for as many axes as the input has beside samples and channels (`conv2d`)."""
    axes = x.dim() - 2
    if axes not in (1, 2, 3):
        raise spec.refuse(f"inputs of {x.dim()} dimensions are not supported")
    found: Callable[..., Any] = getattr(F, f"{name}{axes}d")
    return found


def _window(
    spec: Spec,
    x: Tensor,
    kernel: list[int],
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and the padding before and after every axis."""
    axes = len(kernel)
    strides, dilations = strides or [1] * axes, dilations or [1] * axes
    if auto_pad in ("NOTSET", "VALID"):
        pads = pads if pads and auto_pad == "NOTSET" else [0] * (2 * axes)
        return strides, dilations, [(pads[i], pads[i + axes]) for i in range(axes)]
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise spec.refuse(f"auto_pad {auto_pad!r} is not supported")
    pairs = []
    for n, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        small, large = total // 2, total - total // 2
        pairs.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return strides, dilations, pairs


def _padded(x: Tensor, pairs: list[tuple[int, int]]) -> tuple[Tensor, list[int]]:
    """The input with what an operator's own, two-sided padding cannot do, and what is left for the operator."""
    if all(a == b for a, b in pairs):
        return x, [a for a, _ in pairs]
    return _filled(x, pairs), [0] * len(pairs)


def _filled(x: Tensor, pairs: list[tuple[int, int]], value: float = 0.0) -> Tensor:
    """The input with so many entries before and after every axis."""
    return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=value)


def _kernel(spec: Spec, weight: Tensor, declared: list[int] | None) -> list[int]:
    kernel = [int(n) for n in weight.shape[2:]]
    if declared is not None and declared != kernel:
        raise spec.refuse(f"kernel_shape {declared} is not the weight's {kernel}")
    return kernel


@operator("Conv")
def _conv(
    spec: Spec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: int = 1,
    kernel_shape: Any = None,
    **window: Any,
) -> Tensor:
    run = _of_rank(spec, x, "conv")
    strides, dilations, pairs = _window(spec, x, _kernel(spec, weight, kernel_shape), **window)
    x, padding = _padded(x, pairs)
    return run(x, weight, bias, strides, padding, dilations, group)


@operator("ConvTranspose")
def _conv_transpose(
    spec: Spec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: int = 1,
    kernel_shape: Any = None,
    output_padding: Any = None,
    **window: Any,
) -> Tensor:
    run = _of_rank(spec, x, "conv_transpose")
    if window.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise spec.refuse("auto_pad is not supported here; export with explicit pads")
    strides, dilations, pairs = _window(spec, x, _kernel(spec, weight, kernel_shape), **window)
    least = [min(p) for p in pairs]
    result = run(x, weight, bias, strides, least, output_padding or 0, group, dilations)
    for i, ((before, after), p) in enumerate(zip(pairs, least, strict=True)):
        result = result.narrow(2 + i, before - p, result.shape[2 + i] - (before - p) - (after - p))
    return result


@operator("MaxPool")
def _max_pool(spec: Spec, x: Tensor, *, kernel_shape: list[int], ceil_mode: int = 0, **window: Any) -> Tensor:
    if spec.further_results:
        raise spec.refuse("the places of the maxima are not given")
    run = _of_rank(spec, x, "max_pool")
    strides, dilations, pairs = _window(spec, x, kernel_shape, **window)
    if ceil_mode:
        pairs = _ceiled(x, kernel_shape, strides, dilations, pairs)
    even = all(a == b and 2 * a <= k for (a, b), k in zip(pairs, kernel_shape, strict=True))
    if even:
        return run(x, kernel_shape, strides, [a for a, _ in pairs], dilations)
    return run(_filled(x, pairs, torch.finfo(x.dtype).min), kernel_shape, strides, 0, dilations)


def _ceiled(
    x: Tensor, kernel: list[int], strides: list[int], dilations: list[int], pairs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Padding after the end so that the last window fits; a window that would start in it is left out."""
    found = []
    for n, k, s, d, (before, after) in zip(x.shape[2:], kernel, strides, dilations, pairs, strict=True):
        span, whole = d * (k - 1) + 1, n + before + after
        count = -(-(whole - span) // s) + 1
        if (count - 1) * s >= n + before:
            count -= 1
        found.append((before, after + max(0, (count - 1) * s + span - whole)))
    return found


@operator("AveragePool")
def _average_pool(
    spec: Spec, x: Tensor, *, kernel_shape: list[int], ceil_mode: int = 0, count_include_pad: int = 0, **window: Any
) -> Tensor:
    run = _of_rank(spec, x, "avg_pool")
    strides, dilations, pairs = _window(spec, x, kernel_shape, **window)
    if any(d != 1 for d in dilations):
        raise spec.refuse("dilated average pooling is not supported")
    plain = all(a == b and 2 * a <= k for (a, b), k in zip(pairs, kernel_shape, strict=True))
    if plain:
        padding = [a for a, _ in pairs]
        return run(x, kernel_shape, strides, padding, bool(ceil_mode), bool(count_include_pad) or not any(padding))
    if not count_include_pad or ceil_mode:
        raise spec.refuse("uneven padding that is not counted is not supported")
    return run(_filled(x, pairs), kernel_shape, strides)


@operator("LpPool")
def _lp_pool(
    spec: Spec, x: Tensor, *, kernel_shape: list[int], ceil_mode: int = 0, p: int = 2, **window: Any
) -> Tensor:
    strides, dilations, pairs = _window(spec, x, kernel_shape, **window)
    if any(d != 1 for d in dilations) or ceil_mode:
        raise spec.refuse("dilations and ceil_mode are not supported")
    windows = _filled(x, pairs)
    for i, (k, s) in enumerate(zip(kernel_shape, strides, strict=True)):
        windows = windows.unfold(2 + i, k, s)
    return torch.linalg.vector_norm(windows, p, list(range(-len(kernel_shape), 0)))


@operator("BatchNormalization")
def _batch_norm(
    spec: Spec,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    training_mode: int = 0,
    spatial: int = 1,
    epsilon: float = 1e-5,
) -> tuple[Tensor, ...]:
    if training_mode or spatial != 1:
        raise spec.refuse("it is in training mode or not per channel")
    return (F.batch_norm(x, mean, variance, scale, shift, False, 0.0, epsilon),)


@operator("GroupNormalization")
def _group_norm(
    spec: Spec, x: Tensor, scale: Tensor, shift: Tensor, *, num_groups: int, epsilon: float = 1e-5
) -> Tensor:
    if scale.numel() != x.shape[1]:  # one number per group before opset 21
        scale, shift = (v.repeat_interleave(x.shape[1] // num_groups) for v in (scale, shift))
    return F.group_norm(x, num_groups, scale, shift, epsilon)


@operator("LayerNormalization")
def _layer_norm(
    spec: Spec, x: Tensor, scale: Tensor, shift: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    if spec.further_results:
        raise spec.refuse("mean and deviation are not given")
    shape = list(x.shape[axis % x.dim() :])
    scale = scale.expand(shape)
    return F.layer_norm(x, shape, scale, None if shift is None else shift.expand(shape), epsilon)


@operator("RMSNormalization")
def _rms_norm(spec: Spec, x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    shape = list(x.shape[axis % x.dim() :])
    return F.rms_norm(x, shape, scale.expand(shape), epsilon)


@operator("MeanVarianceNormalization")
def _standardized(spec: Spec, x: Tensor, *, axes: Any = None) -> Tensor:
    axes = [a % x.dim() for a in axes or (0, 2, 3)]
    centred = x - x.mean(axes, True)
    return centred / torch.sqrt((centred * centred).mean(axes, True) + 1e-9)


@operator("LRN")
def _local_response(
    spec: Spec, x: Tensor, *, size: int, bias: float = 1.0, alpha: float = 1e-4, beta: float = 0.75
) -> Tensor:
    rest = x.dim() - 2
    squares = F.pad(x * x, [0, 0] * rest + [(size - 1) // 2, size // 2])
    near = squares.unfold(1, size, 1).sum(-1)
    return x * (bias + alpha / size * near) ** -beta


@operator("Dropout", fixed=(1, 2))
def _dropout(spec: Spec, x: Tensor, ratio: Fixed = None, training: Fixed = None) -> tuple[Tensor, ...]:
    if training is not None and bool(training.item()):
        raise spec.refuse("it is in training mode")
    if spec.further_results:
        return x, torch.ones(x.shape, dtype=torch.bool)
    return (x,)
