"""Cayley transforms: dense matrices, and convolutions at every frequency of the image at hand.

For `Z = X − X* + Y*Y` the matrix I + Z is invertible (its Hermitian part is at least I), and the block column

    C(X, Y) = [ 2(I + Z)⁻¹ − I ;  −2Y(I + Z)⁻¹ ]

has orthonormal columns. A convolution on a circle is a matrix per frequency, so C of each gives an orthogonal
convolution. It is one on the grid of that image size only: the layer's weight depends on the size, and the same kernel
with zero padding would be no contraction (errata 7). With `padding_mode="zeros"` the image is therefore put among zeros
on a larger circle and the result cut out, a part of an orthogonal operator.

Rounding. The inverse is computed in the parameters' dtype; then an upper bound of its norm, from `W*W − μI` in float64,
is taken at every frequency, and W divided by it.

References: Trockman & Kolter 2021; Helfrich et al. 2018; Wang & Manchester 2023, §4.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError
from equipoise.core.modules import by_construction
from equipoise.core.precision import gamma, unit_roundoff
from equipoise.nn.effective import Tensors, plainly_called, uncast
from equipoise.nn.layers import enter, layers_of
from equipoise.nn.method import Method
from equipoise.nn.orthogonal.frame import Frame, Size, SizedConv2d, batched, frame_of
from equipoise.nn.orthogonal.frequency import filtered, inverse, multiplied, symbol, times
from equipoise.nn.orthogonal.polar import settled

#: entries of the matrices whose residual is taken at once: they stay in the cache
AT_ONCE = 2**17


def cayley(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """The two blocks of `C(X, Y)`, `X (..., n, n)` and `Y (..., m, n)`, real or complex: `A*A + B*B = I` up to rounding.

    >>> A, B = cayley(torch.randn(3, 3), torch.randn(2, 3))
    >>> bool((A.mT @ A + B.mT @ B - torch.eye(3)).abs().max() < 1e-5)
    True
    """
    return blocks(torch.eye(X.shape[-1], dtype=X.dtype, device=X.device) + X - X.mH, Y)


def blocks(Z: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """`C(X, Y)` from `Z = I + X − X*`, which a convolution makes of its taps."""
    identity = torch.eye(Z.shape[-1], dtype=Z.dtype, device=Z.device)
    inverse = torch.linalg.inv_ex(Z + Y.mH @ Y if Y.shape[-2] else Z)[0]
    return torch.add(-identity, inverse, alpha=2), (Y if not Y.shape[-2] else (-2 * Y) @ inverse)


def skew_and_identity(X: Tensor) -> Tensor:
    """The kernel of `I + X − X*` for `X (g, n, n, *k)`: odd taps (a zero is added to an even axis), centred as `symbol` does."""
    for axis in (3, 4):
        if X.shape[axis] % 2 == 0:  # the centre of k taps is (k − 1)//2, so the zero comes last
            X = torch.cat([X, torch.zeros_like(X.narrow(axis, 0, 1))], axis)
    identity = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)[..., None, None]
    pads = (X.shape[4] // 2,) * 2 + (X.shape[3] // 2,) * 2
    return X - X.transpose(1, 2).flip(3, 4) + torch.nn.functional.pad(identity, pads)


def capped(*kernels: Tensor, taps: int, channels: int) -> list[Tensor]:
    """Raw kernels, shrunk where `√taps·‖·‖_F`, a bound of their symbols, exceeds 16·√(channels/64) (at least 16).

    Beyond it `C` hardly moves, and the inverse would lose its digits.
    """
    cap = 16.0 * max(1.0, math.sqrt(channels / 64))
    parts = [k for k in kernels if k.numel()]
    largest = torch.stack([k.detach().abs().amax() for k in parts]).amax()
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    unit = [k / largest for k in kernels]
    total = torch.stack([k.square().sum() for k in unit]).sum().clamp_min(1.0)
    return [k * (cap / torch.maximum(total.sqrt() * math.sqrt(taps), cap / largest)) for k in unit]


def isometry_bound(*blocks: Tensor) -> Tensor:
    """Upper bound of the norm of the block column of `blocks (..., m_i, n)`, tight where it is nearly a multiple of an isometry.

    `σ² ≤ μ + ‖G − μI‖_F` with `G = Σ W_i*W_i` and μ the mean of its diagonal, in float64, rounded up.
    """
    columns = [W.detach() for W in blocks]
    if len(columns) == 1 and columns[0].shape[-2] < columns[0].shape[-1]:
        columns = [columns[0].mH]
    n, length = columns[0].shape[-1], sum(W.shape[-2] for W in columns)
    flat = [W.reshape(-1, *W.shape[-2:]) for W in columns]
    per = max(1, AT_ONCE // (n * length))
    parts = [_mean_and_rest(some) for some in zip(*[W.split(per) for W in flat], strict=True)]
    mu, rest = (torch.cat(part).reshape(columns[0].shape[:-2]) for part in zip(*parts, strict=True))
    found = mu + rest * (1 + 1e-9) + gamma(4 * length + 64, torch.float64) * n * mu
    return found.sqrt() * (1 + 1e-12)


def _mean_and_rest(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`(μ, ‖G − μI‖_F)` of `G = Σ W_i*W_i` in float64, μ the mean of its diagonal."""
    lengths, (count, _, n) = [W.shape[-2] for W in columns], columns[0].shape
    length = sum(lengths)
    parts = 1 + columns[0].is_complex()  # real and imaginary ones: real products are the faster ones
    S = torch.empty(count, parts * length, n, dtype=torch.float64, device=columns[0].device)
    for k, place in enumerate(S.split(lengths * parts, 1)):
        W = columns[k % len(columns)]
        place.copy_(W.real if k < len(columns) else W.imag)
    X = S.mT @ S
    diagonal = torch.diagonal(X, dim1=-2, dim2=-1)
    mu = diagonal.mean(-1)
    diagonal.sub_(mu[:, None])
    rest = torch.linalg.vector_norm(X.flatten(1), dim=1)
    if parts == 1:
        return mu, rest
    Y = S[:, :length].mT @ S[:, length:]  # the imaginary part is Y − Yᵀ
    return mu, torch.hypot(rest, torch.linalg.vector_norm((Y - Y.mT).flatten(1), dim=1))


def contracted(*blocks: Tensor) -> list[Tensor]:
    """Blocks over their `isometry_bound`, so that the column has norm at most 1 also after rounding to its dtype."""
    scale = _scale(*blocks)
    return [times(W, scale) for W in blocks]


class SquareCayley(torch.autograd.Function):
    """`contracted(2Z⁻¹ − I)` of square matrices: the same numbers and derivatives, with fewer passes over them.

    With s the scale, which has no gradient, and `V = Z⁻¹`: the gradient g for the result is `−2s·V*gV*` for Z.
    """

    @staticmethod
    def forward(ctx: Any, Z: Tensor) -> Tensor:
        """The contraction."""
        V = inverse(Z)
        W = 2 * V
        W.diagonal(dim1=-2, dim2=-1).sub_(1)
        scale = _scale(W)
        ctx.save_for_backward(Z, V, scale)
        return multiplied(W, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient for Z."""
        (Z, V, scale), g = ctx.saved_tensors, gradients[0]
        if torch.is_grad_enabled():  # somebody will differentiate again
            found: Tensor = torch.autograd.grad(contracted(blocks(Z, Z[..., :0, :])[0])[0], Z, g, create_graph=True)[0]
            return found
        return multiplied(V.mH @ g @ V.mH, -2 * scale)


def _scale(*blocks: Tensor) -> Tensor:
    """What `contracted` multiplies by, (..., 1, 1) in float64."""
    columns = min(blocks[0].shape[-1], sum(W.shape[-2] for W in blocks))
    margin = 1 + 4 * unit_roundoff(blocks[0].dtype) * math.sqrt(columns)
    bound = isometry_bound(*blocks).clamp_min(1e-30)  # a matrix of zeros stays one
    return (1 / (bound * margin))[..., None, None]


class Cayley(Method):
    """`W = C(X, Y)`, X the square part of the raw matrix and Y the rest (transposed where it is wide).

    Guarantee: norm at most 1 for every raw weight; orthonormal rows or columns.

    >>> W = CayleyLinear(6, 4).weight
    >>> bool((W @ W.mT - torch.eye(4)).abs().max() < 1e-5)
    True
    """

    name = "cayley"
    plain = (nn.Linear,)
    instead = "use CayleyConv2d"

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        tall = raw if raw.shape[0] >= raw.shape[1] else raw.mT
        n = tall.shape[1]
        X, Y = capped(tall[:n], tall[n:], taps=1, channels=n)
        W = settled(torch.cat(cayley(X, Y)).mT).to(raw.dtype)
        return W.mT if raw.shape[0] >= raw.shape[1] else W


(CayleyLinear,) = layers_of(Cayley)


class SpectralConv2d(nn.Module):
    """What `CayleyConv2d` exports: one matrix per frequency of one image size, kept as real and imaginary parts."""

    bias: nn.Parameter | None

    def __init__(self, frame: Frame, size: Size, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.frame, self.size = frame, size
        self.weight = nn.Parameter(torch.view_as_real(weight.detach().resolve_conj()).clone())
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        return _apply(self.frame, x, torch.view_as_complex(self.weight), self.bias, self.size)

    @by_construction(None)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies, from the stored matrices."""
        return _bound(torch.view_as_complex(self.weight))


class CayleyConv2d(SizedConv2d):
    """`nn.Conv2d` that is orthogonal on the circle of the image at hand: Cayley transform at every frequency.

    Guarantee: 1-Lipschitz on every input size, for every raw weight. With circular padding and stride 1 all singular
    values are 1; zero padding embeds the image in zeros on a larger circle (a part of an orthogonal operator); stride
    is space-to-depth before. The operator depends on the image size, so `export(input_size)` is for one size.

    >>> layer = CayleyConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-4)
    True
    """

    def build(self, plain: Any, **options: Any) -> None:
        """One raw kernel, as in `nn.Conv2d` (on the coarse grid of a stride)."""
        self.frame = frame_of(plain, embed=True)
        frame = self.frame
        if frame.stride == (1, 1) and not isinstance(plain, nn.ConvTranspose2d):
            raw = plain.weight.detach().clone()
        else:
            coarse = nn.Conv2d(frame.ins, frame.groups * frame.out, frame.taps)
            raw = coarse.weight.detach().to(plain.weight)
        self.raw = nn.Parameter(raw)

    def compute_at(self, size: Size) -> Tensors:
        """(weight,), the matrices of the half grid: (groups, frequencies, out, in)."""
        K = self.raw.reshape(self.frame.groups, self.frame.out, *self.raw.shape[1:])
        n = min(K.shape[1:3])
        (K,) = capped(K, taps=K.shape[3] * K.shape[4], channels=n)
        wide = K.shape[1] < K.shape[2]
        K = K.transpose(1, 2) if wide else K  # Wᵀ is as orthogonal as W
        Z = symbol(skew_and_identity(K[:, :n]), size, self.frame.dilation)
        Y = symbol(K[:, n:], size, self.frame.dilation) if K.shape[1] > n else Z[..., :0, :]
        if K.shape[1] == n and plainly_called(Z):
            W = SquareCayley.apply(Z)
        else:
            (W,) = contracted(torch.cat(blocks(Z, Y), -2) if K.shape[1] > n else blocks(Z, Y)[0])
        return (W.mT if wide else W,)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        return evaluated(self, x)

    @by_construction(1.0)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies of this image size, from the effective weights."""
        return frequency_bound(self, input_shape)

    def export(self, input_size: int | Size | None = None) -> nn.Module:
        """The plain module for one image size (by default the one this layer was evaluated at)."""
        return exported(self, input_size)


class CayleyConvTranspose2d(CayleyConv2d):
    """`nn.ConvTranspose2d` as the adjoint of a `CayleyConv2d` from its outputs to its inputs: Cayley at every frequency.

    Guarantee: 1-Lipschitz on every input size, for every raw weight: torch pads transposed convolutions with zeros, so the
    layer is a part of an orthogonal operator on a larger circle; stride is depth-to-space after. Where k ≤ s nothing
    is cut off: with in ≤ out·s² lengths are kept.

    >>> layer = CayleyConvTranspose2d(4, 2, 2, stride=2, bias=False)
    >>> x = torch.randn(1, 4, 3, 3)
    >>> y = layer(x)
    >>> tuple(y.shape), bool((y.norm() / x.norm() - 1).abs() < 1e-4)
    ((1, 2, 6, 6), True)
    """

    plain_type = nn.ConvTranspose2d
    # all named here: a claim stands only beside the forward that it speaks of
    forward = CayleyConv2d.forward
    lipschitz_upper = CayleyConv2d.lipschitz_upper
    export = CayleyConv2d.export


enter("cayley", nn.Conv2d, CayleyConv2d)
enter("cayley", nn.ConvTranspose2d, CayleyConvTranspose2d)


def evaluated(layer: SizedConv2d, x: Tensor) -> Tensor:
    """A layer with one matrix per frequency, on an image; each has a forward of its own, since a claim stands only beside one."""
    dtype = next(layer.parameters()).dtype
    x = x.to(dtype) if torch.is_autocast_enabled(x.device.type) else x
    size = layer.frame.size((x.shape[-2], x.shape[-1]))
    (weight,) = layer._current_at(size)
    with uncast(x.device.type):
        return _apply(layer.frame, x, weight, layer.bias, size)


def frequency_bound(layer: SizedConv2d, input_shape: tuple[int, ...]) -> Bound:
    """The largest norm over the frequencies of this image size, from the effective weights."""
    return _bound(layer.effective_at(layer.frame.size((input_shape[-2], input_shape[-1])))[0])


def exported(layer: SizedConv2d, input_size: int | Size | None) -> nn.Module:
    """The plain module of a layer with one matrix per frequency, for one image size."""
    size = layer.known_size(input_size)
    with torch.no_grad():
        (weight,) = layer.effective_at(size)
    return SpectralConv2d(layer.frame, size, weight, layer.bias).train(layer.training)


def _apply(frame: Frame, x: Tensor, weight: Tensor, bias: Tensor | None, size: Size) -> Tensor:
    x, single = batched(x)
    image = frame.enter(x)
    if tuple(image.shape[-2:]) != size:
        raise_size(size, image)
    y = filtered(image, weight)
    y = frame.leave(y, (x.shape[-2], x.shape[-1]))
    y = y if bias is None else y + bias[:, None, None]
    return y[0] if single else y


def raise_size(size: Size, image: Tensor) -> None:
    """An exported layer is for one size."""

    raise InputError(
        f"this layer was exported for images of {size[0]}×{size[1]} (padding included), got {tuple(image.shape[-2:])}; "
        "export it for that size"
    )


def _bound(weight: Tensor) -> Bound:
    return Bound(float(isometry_bound(weight).amax()), Kind.UPPER, "residual at every frequency")
