"""Batches laid out as torch itself would lay them out: what a network is handed before a backward pass.

One channel leaves a tensor's layout open: a grey image (N, 1, H, W) read from (N, H, W, 1) has the strides of
channels-last, `is_contiguous()` is true of it and `contiguous()` hands it back unchanged; but torch chooses the kernels
of a convolution by the strides, and every layer after it follows. In torch 2.13 the oneDNN kernels for channels-last
write past their buffers in the backward pass of a convolution with few channels on processors with AVX2 and one thread.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fresh_strides(x: Tensor) -> Tensor:
    """The same numbers with the strides of a freshly allocated tensor: x itself if it has them, else a copy.

    Differentiable. Every part of the package that differentiates a network gives it what comes out of here.

    >>> grey = torch.rand(4, 8, 8, 1).permute(0, 3, 1, 2)
    >>> grey.is_contiguous(), grey.contiguous().stride(), fresh_strides(grey).stride()
    (True, (64, 1, 8, 1), (64, 64, 8, 1))
    """
    return x if x.stride() == _plain(x.shape) else x.clone(memory_format=torch.contiguous_format)


def _plain(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
