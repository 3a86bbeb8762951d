"""Down- and upsampling of norm at most 1: pooling without overlap, rearrangements of pixels, channels of zeros."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.bounds import Bound, Kind
from equipoise.core.checks import describe
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import by_construction
from equipoise.core.precision import deflate, inflate

Sizes = int | tuple[int, int]


def _pair(value: Sizes, what: str) -> tuple[int, int]:
    found = (value, value) if isinstance(value, int) else tuple(value)
    if len(found) != 2 or not all(isinstance(n, int) and n >= 0 for n in found):
        raise InputError(f"{what} must be a whole number or a pair of them, got {describe(value)}")
    return found[0], found[1]


def _reached(kernel: Sizes, stride: Sizes) -> int:
    """How many windows a pixel reaches, for the attributes as they are now."""
    return math.prod(-(-k // s) for k, s in zip(_pair(kernel, "kernel_size"), _pair(stride, "stride"), strict=True))


class _Windows(nn.Module):
    """Windows that do not overlap."""

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None) -> None:
        super().__init__()
        kernel = _pair(kernel_size, "kernel_size")
        step = kernel if stride is None else _pair(stride, "stride")
        if min(kernel) < 1 or any(s < k for s, k in zip(step, kernel, strict=True)):
            count = math.prod(-(-k // max(s, 1)) for s, k in zip(step, kernel, strict=True))
            raise Refused(
                f"{type(self).__name__} with kernel {kernel} and stride {step} overlaps: one pixel reaches {count} windows, "
                f"which has constant √{count}, not 1; use a stride of at least the kernel size"
            )
        self.kernel_size, self.stride = kernel, step

    def _constant(self) -> float | None:
        """1; for a stride that was changed later, `√` of the number of windows that a pixel reaches."""
        count = _reached(self.kernel_size, self.stride)
        return 1.0 if count == 1 else inflate(math.sqrt(count))

    def extra_repr(self) -> str:
        """Sizes."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}"


class MaxPool2d(_Windows):
    """Max pooling over windows that do not overlap: 1-Lipschitz. Overlap is refused (3×3 with stride 2 has constant 2).

    >>> import torch
    >>> MaxPool2d(2)(torch.arange(16.0).reshape(1, 1, 4, 4)).flatten().tolist()
    [5.0, 7.0, 13.0, 15.0]
    >>> MaxPool2d(3, 2)
    Traceback (most recent call last):
    ...
    equipoise.core.errors.Refused: MaxPool2d with kernel (3, 3) and stride (2, 2) overlaps: one pixel reaches 4
    windows, ...
    """

    lipschitz_upper = by_construction(_Windows._constant)

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False
    ) -> None:
        super().__init__(kernel_size, stride)
        self.padding, self.ceil_mode = _pair(padding, "padding"), ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        """The maxima."""
        return functional.max_pool2d(x, self.kernel_size, self.stride, self.padding, ceil_mode=self.ceil_mode)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{super().extra_repr()}, padding={self.padding}"


class ScaledAvgPool2d(_Windows):
    """`y = (1/√k)·Σ x` over windows of k pixels that do not overlap: norm exactly 1.

    The mean over k pixels is `x → (1/k)·1ᵀx`, of norm `‖1‖/k = 1/√k`: plain average pooling loses a factor √k, and √k
    times it has orthonormal rows (the windows are disjoint). Rounding of √k is downward.

    >>> import torch
    >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 4, 4)).flatten().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """

    def _constant(self) -> float | None:
        """1; not known once its attributes were changed."""
        kernel = _pair(self.kernel_size, "kernel_size")
        built = _reached(kernel, self.stride) == 1 and self.scale == _root(math.prod(kernel))
        return 1.0 if built else None

    lipschitz_upper = by_construction(_constant)

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None) -> None:
        super().__init__(kernel_size, stride)
        self.scale = _root(math.prod(self.kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        """The scaled means."""
        return functional.avg_pool2d(x, self.kernel_size, self.stride) * self.scale


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
        (kh, kw), (sh, sw) = _pair(self.kernel_size, "kernel_size"), _pair(self.stride, "stride")
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
        return x.mean((2, 3)) * _root(x.shape[2] * x.shape[3])


def _root(n: int) -> float:
    whole = math.isqrt(n)
    return float(whole) if whole * whole == n else deflate(math.sqrt(n))


class _Blocks(nn.Module):
    def __init__(self, block: int = 2) -> None:
        super().__init__()
        if block < 1:
            raise InputError(f"the block must be at least 1 pixel wide, got {block}")
        self.block = block

    def extra_repr(self) -> str:
        """The block."""
        return f"block={self.block}"


class SpaceToDepth(_Blocks):
    """Every r×r block of pixels becomes r² channels: an isometry, the invertible downsampling.

    >>> import torch
    >>> SpaceToDepth(2)(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 12, 4, 4])
    """

    lipschitz_upper = by_construction(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The rearranged image."""
        return functional.pixel_unshuffle(x, self.block)


class DepthToSpace(_Blocks):
    """The inverse of `SpaceToDepth`: r² channels become r×r pixels; an isometry.

    >>> import torch
    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.equal(DepthToSpace(2)(SpaceToDepth(2)(x)), x)
    True
    """

    lipschitz_upper = by_construction(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The rearranged image."""
        return functional.pixel_shuffle(x, self.block)


class PadChannels(nn.Module):
    """Appends channels of zeros up to `channels`: an isometry onto its image, where a residual network starts.

    >>> import torch
    >>> PadChannels(8)(torch.ones(1, 3, 2, 2)).sum()
    tensor(12.)
    """

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

    def extra_repr(self) -> str:
        """The number of channels."""
        return str(self.channels)


class SpatialShift(nn.Module):
    """Moves groups of channels by one pixel each in their own direction: neighbours meet without a product.

    The channels are cut into `directions` groups (1, 5 or 9: none, the four neighbours, the eight); on a circle
    (`padding_mode="circular"`) the map is a permutation of the entries, with zeros it forgets what leaves the image.

    Guarantee: 1-Lipschitz, and with circular padding norm preserving, in every dtype (nothing is rounded).

    Reference: Wu et al. (2018), Shift: a zero FLOP, zero parameter alternative to spatial convolutions.

    >>> import torch
    >>> SpatialShift(5)(torch.arange(45.0).reshape(1, 5, 3, 3))[0, 1].tolist()
    [[15.0, 16.0, 17.0], [9.0, 10.0, 11.0], [12.0, 13.0, 14.0]]
    """

    def __init__(self, directions: int = 5, padding_mode: str = "circular") -> None:
        super().__init__()
        if directions not in (1, 5, 9) or padding_mode not in ("circular", "zeros"):
            raise InputError(
                f"directions are 1, 5 or 9 and padding_mode circular or zeros, got {directions}, {padding_mode!r}"
            )
        self.directions, self.padding_mode = directions, padding_mode

    def forward(self, x: Tensor) -> Tensor:
        """The moved channels of (batch, channels, height, width)."""
        if x.dim() != 4 or x.shape[1] < self.directions:
            raise InputError(f"expected (batch, channels ≥ {self.directions}, h, w), got {tuple(x.shape)}")
        groups = x.tensor_split(self.directions, 1)
        return torch.cat([self._moved(g, *to) for g, to in zip(groups, _DIRECTIONS, strict=False)], 1)

    def _moved(self, x: Tensor, down: int, right: int) -> Tensor:
        if self.padding_mode == "circular":
            return x.roll((down, right), (2, 3))
        h, w = x.shape[-2:]
        padded = functional.pad(x, [1, 1, 1, 1])
        return padded[..., 1 - down : 1 - down + h, 1 - right : 1 - right + w]

    @by_construction(1.0)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """1: every entry is moved to a place of its own, or forgotten."""
        return Bound(1.0, Kind.UPPER, "entries are moved")

    def extra_repr(self) -> str:
        """Directions and padding."""
        return f"directions={self.directions}, padding_mode={self.padding_mode!r}"


#: where the groups of channels go: down, right
_DIRECTIONS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))


class FirstFeatures(nn.Module):
    """The first `features` entries of (batch, n): a contraction, the plainest way from wide features to logits.

    >>> import torch
    >>> FirstFeatures(2)(torch.arange(4.0)[None])
    tensor([[0., 1.]])
    """

    lipschitz_upper = by_construction(1.0)

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """The first features."""
        if x.shape[-1] < self.features:
            raise InputError(f"{x.shape[-1]} features are fewer than the {self.features} asked for")
        return x[..., : self.features]

    def extra_repr(self) -> str:
        """The number of features."""
        return str(self.features)
