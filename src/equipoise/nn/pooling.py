"""Down- and upsampling of norm at most 1: pooling without overlap, rearrangements of pixels, channels of zeros."""

from math import prod, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.utils import _pair

from equipoise.core import InputError, Refused, by_construction, root, single_down
from equipoise.maps.geometry import integers
from equipoise.nn.activations import Described

Sizes = int | tuple[int, int]


class _Windows(Described):
    """Windows that do not overlap."""

    __constants__: tuple[str, ...] = ("kernel_size", "stride")

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None) -> None:
        super().__init__()
        self.kernel_size = integers(kernel_size, 2, "kernel_size")
        self.stride = self.kernel_size if stride is None else integers(stride, 2, "stride")
        count = self._reached()
        if count != 1:
            raise Refused(
                f"{type(self).__name__} with kernel {self.kernel_size} and stride {self.stride} overlaps: one pixel reaches "
                f"{count} windows, which has constant √{count}, not 1; use a stride of at least the kernel size"
            )

    def _reached(self) -> int:
        """How many windows a pixel reaches."""
        pairs = zip(_pair(self.kernel_size), _pair(self.stride), strict=True)
        return prod(-(-k // max(s, 1)) for k, s in pairs)

    def _constant(self) -> float:
        """`√` of the number of windows that a pixel reaches."""
        return root(self._reached())


class MaxPool2d(_Windows):
    """Max pooling over windows that do not overlap: 1-Lipschitz. Overlap is refused (3×3 with stride 2 has constant 2).

    >>> import torch
    >>> MaxPool2d(2)(torch.arange(16.0).reshape(1, 1, 4, 4)).flatten().tolist()
    [5.0, 7.0, 13.0, 15.0]
    >>> MaxPool2d(3, 2)
    Traceback (most recent call last):
    ...
    equipoise.core.errors.Refused: MaxPool2d with kernel (3, 3) and stride (2, 2) overlaps: one pixel reaches ...
    """

    __constants__ = ("kernel_size", "stride", "padding")
    lipschitz_upper = by_construction(_Windows._constant)

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride)
        self.padding = padding
        self.ceil_mode = ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        """The maxima."""
        return functional.max_pool2d(
            x, self.kernel_size, self.stride, self.padding, ceil_mode=self.ceil_mode
        )


class ScaledAvgPool2d(_Windows):
    """`y = (1/√k)·Σ x` over windows of k pixels that do not overlap: norm exactly 1.

    The mean over k pixels is `x → (1/k)·1ᵀx`, of norm `‖1‖/k = 1/√k`: plain average pooling loses a factor √k, and √k
    times it has orthonormal rows (the windows are disjoint). Rounding of √k is downward.

    >>> import torch
    >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 4, 4)).flatten().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """

    lipschitz_upper = by_construction(_Windows._constant)

    def forward(self, x: Tensor) -> Tensor:
        """The scaled means."""
        pooled = functional.avg_pool2d(x, self.kernel_size, self.stride)
        return pooled * single_down(sqrt(prod(_pair(self.kernel_size))))


class L2NormPool2d(_Windows):
    """`y = ‖x‖₂` over windows that do not overlap: 1-Lipschitz, since a norm is, and it keeps the norm of the image.

    The gradient at a window of zeros is 0.

    >>> import torch
    >>> L2NormPool2d(2)(torch.ones(1, 1, 4, 4)).flatten().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """

    lipschitz_upper = by_construction(_Windows._constant)

    def forward(self, x: Tensor) -> Tensor:
        """The norms."""
        (kh, kw), (sh, sw) = _pair(self.kernel_size), _pair(self.stride)
        return torch.linalg.vector_norm(x.unfold(-2, kh, sh).unfold(-2, kw, sw), dim=(-2, -1))


class ScaledGlobalAvgPool2d(nn.Module):
    """`(1/√(h·w))·Σ x` over all pixels, flattened to (batch, channels): norm exactly 1.

    >>> import torch
    >>> ScaledGlobalAvgPool2d()(torch.ones(1, 2, 3, 3)).tolist()
    [[3.0, 3.0]]
    """

    lipschitz_upper = by_construction(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The scaled means."""
        return x.mean((2, 3)) * single_down(sqrt(x.shape[2] * x.shape[3]))


class SpaceToDepth(nn.PixelUnshuffle):
    """Every r×r block of pixels becomes r² channels: an isometry, the invertible downsampling.

    >>> import torch
    >>> SpaceToDepth(2)(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 12, 4, 4])
    """

    lipschitz_upper = by_construction(1.0)

    def __init__(self, block: int = 2) -> None:
        super().__init__(block)


class DepthToSpace(nn.PixelShuffle):
    """The inverse of `SpaceToDepth`: r² channels become r×r pixels; an isometry.

    >>> import torch
    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.equal(DepthToSpace(2)(SpaceToDepth(2)(x)), x)
    True
    """

    lipschitz_upper = by_construction(1.0)

    def __init__(self, block: int = 2) -> None:
        super().__init__(block)


class PadChannels(Described):
    """Appends channels of zeros up to `channels`: an isometry onto its image, where a residual network starts.

    >>> import torch
    >>> PadChannels(8)(torch.ones(1, 3, 2, 2)).sum()
    tensor(12.)
    """

    __constants__ = ("channels",)
    lipschitz_upper = by_construction(1.0)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """The image with more channels."""
        extra = self.channels - x.shape[1]
        if extra < 0:
            raise InputError(f"{x.shape[1]} channels do not fit into {self.channels}")
        return functional.pad(x, (0, 0) * (x.dim() - 2) + (0, extra))
