"""The slow, obviously right reference: materialise the operator by feeding it every unit vector, then take its SVD."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError


def operator_matrix(module: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Dense matrix `(outputs, inputs)` of an affine module in float64: `module(e_i) − module(0)` for every unit vector.

    `input_shape` is the shape of one input without the batch, e.g. `(3, 8, 8)`. The module itself is run, so padding
    mode, stride, groups, hooks and parametrisations are those really used. Memory is inputs × outputs: small cases only.

    >>> operator_matrix(nn.Linear(2, 1, bias=False).requires_grad_(False), (2,)).shape
    torch.Size([1, 2])
    """
    size = math.prod(input_shape)
    if size > 20_000:
        raise InputError(f"the reference materialises the operator; {size} inputs are too many (at most 20000)")
    module = copy.deepcopy(module).eval()
    is_complex = any(p.is_complex() for p in module.parameters())
    dtype = torch.complex128 if is_complex else torch.float64
    module = module.to(dtype) if is_complex else module.double()
    with torch.no_grad():
        zero = module(torch.zeros(1, *input_shape, dtype=dtype)).flatten(1)
        rows = [
            module(part.reshape(-1, *input_shape)).flatten(1) - zero
            for part in torch.eye(size, dtype=dtype).split(1024)
        ]
    return torch.cat(rows).mT


def reference_norm(module: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Spectral norm of a small affine module by SVD of its dense float64 matrix.

    >>> conv = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect", bias=False).requires_grad_(False)
    >>> _ = conv.weight.fill_(1 / 9)
    >>> reference_norm(conv, (1, 6, 6)) > 1
    True
    """
    return float(torch.linalg.matrix_norm(operator_matrix(module, input_shape), ord=2))
