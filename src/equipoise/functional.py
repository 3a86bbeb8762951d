"""Differentiable norms, and the thesis' algorithms under their names.

| thesis | here |
|---|---|
| Gram iteration | `gram_iteration(W, iterations)`, the same as `gram_norm` |
| norm2_circ | `norm2_circ(K, input_size, iterations)`, `conv_norm` with circular padding |
| norm2_toep | `norm2_toep(K, iterations)`, with the kernel size of the current iterate (see the errata) |
"""

from torch import Tensor

from equipoise.norms.differentiable import conv_norm, explicit_gradient, gram_norm
from equipoise.norms.reference import norm2_toep

__all__ = [
    "conv_norm",
    "explicit_gradient",
    "gram_iteration",
    "gram_norm",
    "norm2_circ",
    "norm2_toep",
]

gram_iteration = gram_norm


def norm2_circ(
    K: Tensor,
    input_size: int | tuple[int, ...] | None = None,
    iterations: int = 6,
    stride: int | tuple[int, ...] = 1,
) -> Tensor:
    """Differentiable upper bound on the norm of a convolution with circular padding.

    Args:
        K: the weight `(out, in, *k)`.
        input_size: spatial size of the input; None: the supremum over all sizes.
        iterations: Gram iterations at every frequency.
        stride: stride of the convolution; it must divide the input size.

    Guarantee: an upper bound in real arithmetic; its rounding is not covered (`equipoise.spectral_norm` covers it).

    >>> import torch
    >>> float(norm2_circ(torch.ones(1, 1, 3, 3) / 9, input_size=8)) >= 1 - 1e-6
    True
    """
    return conv_norm(K, "circular", stride, input_size, iterations)
