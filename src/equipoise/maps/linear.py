"""Linear maps as values: a matrix, a scaling of channels, a convolution, a padding, an adjoint.

Each can be applied, turned round (`adjoint`) and made non-negative (`magnitude`); `algebra` composes and adds them. A map
that came out of arithmetic carries `error`, a bound on the ℓ2 operator norm of what rounding did to it, to be added to
every norm. `apply` acts on batches: the first dimension is the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core.errors import InputError
from equipoise.core.modules import along
from equipoise.maps.geometry import Axis, Geometry, PaddingMode

Amount = tuple[tuple[int, int], ...]
_CONVOLVE = (torch.conv1d, torch.conv2d, torch.conv3d)
_SPREAD = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


@dataclass(frozen=True)
class Matrix:
    """Multiplication of the last dimension by `matrix (out, in)`.

    >>> Matrix(torch.tensor([[1.0, -2.0]])).magnitude().apply(torch.ones(1, 2))
    tensor([[3.]])
    """

    matrix: Tensor
    error: float = 0.0

    def apply(self, x: Tensor) -> Tensor:
        """`x Wᵀ`."""
        return x @ self.matrix.mT

    def adjoint(self) -> Matrix:
        """`W*`."""
        return Matrix(self.matrix.mH if self.matrix.is_complex() else self.matrix.mT, self.error)

    def magnitude(self) -> Matrix:
        """`|W|`, entry by entry."""
        return Matrix(self.matrix.abs(), self.error)


@dataclass(frozen=True)
class Diagonal:
    """Multiplication of the entries along dimension `dim` by `factor` (one number: of everything)."""

    factor: Tensor
    dim: int
    error: float = 0.0

    def apply(self, x: Tensor) -> Tensor:
        """`f·x`."""
        if self.factor.numel() == 1:
            return x * self.factor.reshape(())
        return x * along(self.factor, x, self.dim)

    def adjoint(self) -> Diagonal:
        """The conjugate factors; the same map for real ones."""
        return (
            replace(self, factor=self.factor.conj_physical()) if self.factor.is_complex() else self
        )

    def magnitude(self) -> Diagonal:
        """`|f|`."""
        return replace(self, factor=self.factor.abs())


@dataclass(frozen=True)
class Padding:
    """Padding of the trailing axes by `amount` (negative: cropping), on inputs of `size`."""

    amount: Amount
    size: tuple[int, ...]
    padding: PaddingMode

    def apply(self, x: Tensor) -> Tensor:
        """The padded image."""
        return _padded(x, self.amount, self.padding)

    def adjoint(self) -> Adjoint:
        """Every pixel collects its copies."""
        return Adjoint(self)

    def magnitude(self) -> Padding:
        """The map itself: copies are non-negative."""
        return self

    def collect(self, y: Tensor) -> Tensor:
        """The adjoint: what lies at the copies of a pixel is added up there."""
        for i, ((left, right), n) in enumerate(zip(self.amount, self.size, strict=True)):
            dim = y.dim() - len(self.amount) + i
            if self.padding == "zeros":
                sides = [0] * (2 * (y.dim() - dim))
                sides[-2:] = [-left, -right]
                y = functional.pad(y, sides)
            elif left or right:
                pixels = Axis(1, left=left, right=right, size=n).pixels(self.padding)
                shape = list(y.shape)
                shape[dim] = n
                places = torch.tensor([p for p in pixels if p is not None], device=y.device)
                y = y.new_zeros(shape).index_add(dim, places, y)
        return y


@dataclass(frozen=True)
class Convolution:
    """A convolution with `weight (out, in/groups, *k)` and everything else in its `geometry`.

    >>> conv = convolution(torch.ones(1, 1, 3), amount=[(1, 1)], input_size=4)
    >>> conv.apply(torch.ones(1, 1, 4)), conv.adjoint().apply(torch.ones(1, 1, 4))
    (tensor([[[2., 3., 3., 2.]]]), tensor([[[2., 3., 3., 2.]]]))
    """

    weight: Tensor
    geometry: Geometry
    error: float = 0.0

    def __post_init__(self) -> None:
        if tuple(self.weight.shape) != self.geometry.shape:
            raise InputError(
                f"a weight of shape {tuple(self.weight.shape)} does not fit a geometry of {self.geometry.shape}"
            )

    @property
    def kernel(self) -> Tensor:
        """The weight as `(groups, out/groups, in/groups, *k)`."""
        return self.geometry.grouped(self.weight)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """One per spatial dimension."""
        return self.geometry.axes

    @property
    def groups(self) -> int:
        """Number of independent blocks of channels."""
        return self.geometry.groups

    @property
    def stride(self) -> tuple[int, ...]:
        """Per axis."""
        return self.geometry.stride

    @property
    def dilation(self) -> tuple[int, ...]:
        """Per axis."""
        return self.geometry.dilation

    @property
    def amount(self) -> Amount:
        """Padding (left, right) per axis."""
        return self.geometry.amount

    @property
    def size(self) -> tuple[int, ...]:
        """Spatial size of the input, 0 where unknown."""
        return self.geometry.size

    @property
    def padding(self) -> PaddingMode:
        """Padding mode."""
        return self.geometry.padding

    @property
    def known(self) -> bool:
        """Whether the input size is known."""
        return self.geometry.known

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Channels and sizes of one input."""
        return (self.geometry.channels, *self.geometry.size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Channels and sizes of one output."""
        return (self.geometry.shape[0], *self.geometry.out)

    def with_weight(self, weight: Tensor, error: float | None = None) -> Convolution:
        """Another weight in the same place, with its channels; the error is kept unless given.

        Args:
            weight: the new weight.
            error: its error.
        """
        geometry = replace(self.geometry, shape=tuple(weight.shape))
        return Convolution(weight, geometry, self.error if error is None else error)

    def real_form(self) -> Convolution:
        """For a complex weight `A + iB` the real `[[A, −B], [B, A]]`, which has the same singular values, each twice."""
        if not self.weight.is_complex():
            return self
        A = self.kernel.real
        B = self.kernel.imag
        blocks = torch.cat([torch.cat([A, -B], 2), torch.cat([B, A], 2)], 1)
        return self.with_weight(blocks.flatten(0, 1))

    def on(self, axes: Sequence[Axis]) -> Convolution:
        """The same kernel on other axes."""
        return replace(self, geometry=replace(self.geometry, axes=tuple(axes)))

    def unpadded(self) -> Convolution:
        """The convolution without padding, on the already padded input."""
        return replace(self, geometry=self.geometry.unpadded())

    def apply(self, x: Tensor) -> Tensor:
        """The operator on a batch `(b, in, *sizes)`, through torch's own padding and convolution; no bias."""
        convolve = _CONVOLVE[len(self.axes) - 1]
        y = convolve(
            _padded(x, self.amount, self.padding),
            self.weight,
            None,
            self.stride,
            0,
            self.dilation,
            self.groups,
        )
        for dim, axis in enumerate(self.axes, start=2):
            if axis.out is not None and axis.out < y.shape[dim]:
                y = y.narrow(dim, 0, axis.out)
        return y

    def adjoint(self) -> Adjoint:
        """The transposed convolution."""
        return Adjoint(self)

    def magnitude(self) -> Convolution:
        """`|K|`, entry by entry: at least the absolute value of the operator, equal to it where no taps meet (zero padding)."""
        return replace(self, weight=self.weight.abs())

    def collect(self, y: Tensor) -> Tensor:
        """The adjoint on a batch `(b, out, *outputs)`; the input size must be known."""
        assert self.known, "the adjoint writes an image: its size must be known"
        spread = _SPREAD[len(self.axes) - 1]
        weight = self.weight.conj_physical() if self.weight.is_complex() else self.weight
        y = spread(y, weight, None, self.stride, 0, 0, self.groups, self.dilation)
        short = [
            side
            for dim, axis in reversed(list(enumerate(self.axes, start=2)))
            for side in (0, (axis.size or 0) + axis.left + axis.right - y.shape[dim])
        ]
        return Padding(self.amount, self.size, self.padding).collect(
            functional.pad(y, short) if any(short) else y
        )


@dataclass(frozen=True)
class Adjoint:
    """A transposed convolution, or the adjoint of a padding: the input of `conv` is this one's output."""

    conv: Convolution | Padding

    def apply(self, x: Tensor) -> Tensor:
        """`A*x`."""
        return self.conv.collect(x)

    def adjoint(self) -> Convolution | Padding:
        """The map itself."""
        return self.conv

    def magnitude(self) -> Adjoint:
        """The adjoint of the magnitude."""
        return Adjoint(self.conv.magnitude())

    @property
    def error(self) -> float:
        """That of the map."""
        return self.conv.error if isinstance(self.conv, Convolution) else 0.0


Linear = Matrix | Diagonal | Convolution | Padding | Adjoint


def convolution(weight: Tensor, *arguments: Any, **options: Any) -> Convolution:
    """A convolution from its weight.

    Args:
        weight: `(out, in/groups, *k)`.
        *arguments: of `Geometry.of` after the shape: padding mode, stride, dilation, groups, amount of padding, input size.
        **options: the same by name.
    """
    return Convolution(weight, Geometry.of(weight.shape, *arguments, **options))


def _padded(x: Tensor, amount: Amount, padding: PaddingMode) -> Tensor:
    sides = [side for pair in reversed(amount) for side in pair]
    if not any(sides):
        return x
    return functional.pad(x, sides, mode="constant" if padding == "zeros" else padding)
