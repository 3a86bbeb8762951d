"""Operators with one matrix per frequency of the image at hand, and convolutions made of them.

A convolution on a circle is a matrix per frequency: one that is orthogonal at every frequency is an orthogonal convolution.
It is one on the grid of that image size only: the layer's weight depends on the size, and the same kernel with zero padding
would be no contraction (errata 7). With `padding_mode="zeros"` the image is therefore put among zeros on a larger circle and
the result cut out, a part of an orthogonal operator.

Rounding. An upper bound of the norm of what was computed, from `W*W − μI` in float64, is taken at every frequency, and W
divided by it (`contracted`).
"""

from math import pi, sqrt

import torch
from torch import Tensor

from equipoise.core import Bound, Kind, Shape, gamma, or_one, unit_roundoff
from equipoise.nn.orthogonal.frame import FramedConv2d, Size


def symbol(kernel: Tensor, size: Size, dilation: Size) -> Tensor:
    """`E(ω) = Σ_a K_a e^{iω·(d·a − centre)}` of `K (g, m, n, *k)` on the half grid of a real image: (g, frequencies, m, n).

    Args:
        kernel: K.
        size: of the image.
        dilation: of the kernel.
    """
    angles = []
    for axis, (n, count) in enumerate(zip(size, (size[0], size[1] // 2 + 1), strict=True)):
        k = kernel.shape[3 + axis]
        d = dilation[axis]
        place = torch.arange(k, device=kernel.device) * d - d * (k - 1) // 2
        turns = torch.arange(count, device=kernel.device)[:, None] * place % n
        angles.append(turns.double() * (2 * pi / n))
    angle = angles[0][:, None, :, None] + angles[1][None, :, None, :]
    angle = angle.reshape(angle.shape[0] * angle.shape[1], -1)
    flat = kernel.flatten(3).movedim(3, 1)  # (g, taps, m, n)
    g, taps, m, n = flat.shape
    flat = flat.reshape(g, taps, m * n)
    E = torch.complex(angle.cos().to(kernel.dtype) @ flat, angle.sin().to(kernel.dtype) @ flat)
    return E.reshape(g, len(angle), m, n)


def _to_frequencies(x: Tensor, groups: int) -> Tensor:
    """`(b, g·c, h, w)` real → `(g, frequencies, b, c)`: images as rows, one matrix product per frequency."""
    b, channels = x.shape[:2]
    # strided ones are slow
    spectrum = torch.fft.rfft2(x, norm="ortho").reshape(b * channels, -1).mT.contiguous()
    return spectrum.reshape(-1, b, groups, channels // groups).permute(2, 0, 1, 3)


def _to_images(X: Tensor, size: Size) -> Tensor:
    """The inverse of `_to_frequencies`."""
    g, frequencies, b, c = X.shape
    flat = X.permute(1, 2, 0, 3).reshape(frequencies, -1).mT.contiguous()
    spectrum = flat.reshape(b, g * c, size[0], size[1] // 2 + 1)
    return torch.fft.irfft2(spectrum, s=size, norm="ortho")


def filtered(x: Tensor, weight: Tensor) -> Tensor:
    """`(b, g·c, h, w)` → `(b, g·o, h, w)`: a matrix `weight (g, frequencies, o, c)` at every frequency of the half grid.

    Args:
        x: images.
        weight: the matrices.
    """
    return _to_images(_to_frequencies(x, len(weight)) @ weight.mT, (x.shape[-2], x.shape[-1]))


def isometry_bound(W: Tensor) -> Tensor:
    """Upper bound of the norm of matrices `W (..., m, n)`, tight where they are nearly multiples of isometries.

    `σ² ≤ μ + ‖G − μI‖_F` with `G = W*W` and μ the mean of its diagonal, in float64, rounded up.
    """
    W = W.detach()
    W = W.mH if W.shape[-2] < W.shape[-1] else W
    length, n = W.shape[-2:]
    # real and imaginary parts one above the other: real products are three times as fast
    S = (torch.cat([W.real, W.imag], -2) if W.is_complex() else W).double()
    G = S.mT @ S
    mu = torch.diagonal(G, dim1=-2, dim2=-1).mean(-1)
    torch.diagonal(G, dim1=-2, dim2=-1).sub_(mu[..., None])
    rest = torch.linalg.matrix_norm(G)
    if W.is_complex():
        Y = S[..., :length, :].mT @ S[..., length:, :]  # the imaginary part of W*W is Y − Yᵀ
        rest = torch.hypot(rest, torch.linalg.matrix_norm(Y - Y.mT))
    square = mu + rest * (1 + 1e-9) + gamma(4 * length + 64, torch.float64) * n * mu
    return square.sqrt() * (1 + 1e-12)


def contracted(W: Tensor) -> Tensor:
    """Matrices over their `isometry_bound`: norm at most 1, also after rounding to their dtype."""
    margin = 1 + 4 * unit_roundoff(W.dtype) * sqrt(min(W.shape[-2:]))
    bound = isometry_bound(W).clamp_min(1e-30)  # a matrix of zeros stays one
    scale = (1 / (bound * margin)).to(W.real.dtype)
    return W * scale[..., None, None]


def capped(*kernels: Tensor, taps: int, channels: int) -> list[Tensor]:
    """Raw kernels, shrunk where `√taps·‖·‖_F`, a bound of their symbols, exceeds 16·√(channels/64) (at least 16).

    Beyond it orthogonal transforms hardly move, and inverses would lose their digits.

    Args:
        kernels: the raw kernels.
        taps: number of taps.
        channels: of the smaller side.
    """
    cap = 16.0 * max(1.0, sqrt(channels / 64))
    largest = torch.stack([k.detach().abs().amax() for k in kernels if k.numel()]).amax(0)
    largest = or_one(largest)
    unit = [k / largest for k in kernels]
    total = torch.stack([k.square().sum() for k in unit]).sum().clamp_min(1.0)
    return [k * (cap / torch.maximum(total.sqrt() * sqrt(taps), cap / largest)) for k in unit]


class FrequencyConv2d(FramedConv2d):
    """`nn.Conv2d` with one matrix per frequency: `compute(size)` is (weight,), (groups, frequencies, out, in) on the half grid.

    The operator depends on the image size, so `export(input_size)` is for one size.
    """

    sized = True

    def key(self, shape: Shape) -> tuple[Size]:
        """The size of the operator's image."""
        return (self.frame.size((shape[-2], shape[-1])),)

    def operator(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        return filtered(x, tensors[0])

    def bound(self, tensors: tuple[Tensor, ...], input_shape: Shape) -> Bound:
        """The largest norm over the frequencies of this image size.

        Args:
            tensors: the effective tensors.
            input_shape: of one sample.
        """
        return Bound(
            float(isometry_bound(tensors[0]).amax()), Kind.UPPER, "residual at every frequency"
        )
