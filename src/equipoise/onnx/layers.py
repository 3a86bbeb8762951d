"""ONNX operators with weights or windows: products, convolutions, pooling, normalization."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.operators import operator
from equipoise.onnx.reading import Spec

Pairs = list[tuple[int, int]]


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
    return getattr(F, f"{name}{axes}d")


def _window(
    spec: Spec,
    x: Tensor,
    kernel: list[int],
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> tuple[list[int], list[int], Pairs]:
    """Strides, dilations and the padding before and after every axis."""
    axes = len(kernel)
    strides = strides or [1] * axes
    dilations = dilations or [1] * axes
    if kernel_shape not in (None, kernel):
        raise spec.refuse(f"kernel_shape {kernel_shape} is not the weight's {kernel}")
    if auto_pad == "VALID" or not pads:
        pads = [0] * (2 * axes)
    if auto_pad in ("NOTSET", "VALID"):
        return strides, dilations, list(zip(pads[:axes], pads[axes:], strict=True))
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise spec.refuse(f"auto_pad {auto_pad!r} is not supported")

    pairs = []
    for size, k, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        count = -(-size // stride)
        total = max(0, (count - 1) * stride + (k - 1) * dilation + 1 - size)
        small = total // 2
        large = total - total // 2
        pairs.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return strides, dilations, pairs


def _pad(x: Tensor, pairs: Pairs, value: float = 0.0) -> Tensor:
    """The input with so many entries before and after every axis."""
    return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=value)


def _is_even(pairs: Pairs) -> bool:
    return all(before == after for before, after in pairs)


def _fits_pooling(pairs: Pairs, kernel: list[int]) -> bool:
    """Whether torch's pooling can do the padding itself."""
    return _is_even(pairs) and all(
        2 * before <= k for (before, _), k in zip(pairs, kernel, strict=True)
    )


@operator("Conv")
def _conv(
    spec: Spec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: int = 1,
    **window: Any,
) -> Tensor:
    run = _of_rank(spec, x, "conv")
    strides, dilations, pairs = _window(spec, x, list(weight.shape[2:]), **window)
    if not _is_even(pairs):
        x = _pad(x, pairs)
        pairs = [(0, 0)] * len(pairs)
    return run(x, weight, bias, strides, [before for before, _ in pairs], dilations, group)


@operator("ConvTranspose")
def _conv_transpose(
    spec: Spec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: int = 1,
    output_padding: list[int] | None = None,
    **window: Any,
) -> Tensor:
    run = _of_rank(spec, x, "conv_transpose")
    if window.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise spec.refuse("auto_pad is not supported here; export with explicit pads")
    strides, dilations, pairs = _window(spec, x, list(weight.shape[2:]), **window)
    if not _is_even(pairs):
        raise spec.refuse("uneven padding is not supported here")
    padding = [before for before, _ in pairs]
    return run(x, weight, bias, strides, padding, output_padding or 0, group, dilations)


@operator("MaxPool")
def _max_pool(
    spec: Spec, x: Tensor, *, kernel_shape: list[int], ceil_mode: int = 0, **window: Any
) -> Tensor:
    run = _of_rank(spec, x, "max_pool")
    strides, dilations, pairs = _window(spec, x, kernel_shape, **window)
    if _fits_pooling(pairs, kernel_shape):
        return run(
            x, kernel_shape, strides, [before for before, _ in pairs], dilations, bool(ceil_mode)
        )
    if ceil_mode:
        raise spec.refuse("ceil_mode beside uneven padding is not supported")
    return run(_pad(x, pairs, torch.finfo(x.dtype).min), kernel_shape, strides, 0, dilations)


@operator("AveragePool")
def _average_pool(
    spec: Spec,
    x: Tensor,
    *,
    kernel_shape: list[int],
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    **window: Any,
) -> Tensor:
    run = _of_rank(spec, x, "avg_pool")
    strides, dilations, pairs = _window(spec, x, kernel_shape, **window)
    if any(d != 1 for d in dilations):
        raise spec.refuse("dilated average pooling is not supported")
    if _fits_pooling(pairs, kernel_shape):
        padding = [before for before, _ in pairs]
        return run(
            x,
            kernel_shape,
            strides,
            padding,
            bool(ceil_mode),
            bool(count_include_pad) or not any(padding),
        )
    if not count_include_pad or ceil_mode:
        raise spec.refuse("uneven padding that is not counted is not supported")
    return run(_pad(x, pairs), kernel_shape, strides)


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
) -> Tensor:
    if training_mode or spatial != 1:
        raise spec.refuse("it is in training mode or not per channel")
    return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, epsilon)


@operator("LayerNormalization")
def _layer_norm(
    spec: Spec,
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
) -> Tensor:
    shape = list(x.shape[axis % x.dim() :])
    return F.layer_norm(
        x, shape, scale.expand(shape), None if shift is None else shift.expand(shape), epsilon
    )


@operator("Dropout")
def _dropout(
    spec: Spec, x: Tensor, ratio: float | None = None, training_mode: float | None = None
) -> Tensor:
    if training_mode:
        raise spec.refuse("it is in training mode")
    return x
