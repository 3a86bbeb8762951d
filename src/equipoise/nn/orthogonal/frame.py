"""The geometry around layers that are square operators: `nn.Conv2d`'s arguments as what happens before and after one.

SOC, Cayley and Sandwich convolutions map an image to one of the same size. Before it: space-to-depth for a stride,
zeros around the image. After it: the pixels that `nn.Conv2d` would return. Both are isometries or selections, so they
do not enlarge distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.errors import InputError, Refused
from equipoise.maps.geometry import Geometry
from equipoise.nn.effective import Effective, Tensors, uncast
from equipoise.nn.layers import arguments, build_plain, kernel_of
from equipoise.nn.method import Method

Size = tuple[int, int]


@dataclass(frozen=True)
class Frame:
    """What stands before and after a square operator on `channels` channels per group, with `taps` taps around the centre.

    `before` zeros (left/top) and `after` zeros (right/bottom) per axis; `shift` is the first pixel returned; `stride`
    is that of space-to-depth, and `taps` then count coarse pixels.
    """

    plain: Geometry
    taps: Size
    embed: bool

    @property
    def stride(self) -> Size:
        """Block of the space-to-depth step."""
        return self.plain.stride[0], self.plain.stride[1]

    @property
    def dilation(self) -> Size:
        """Distance of the operator's taps."""
        return self.plain.dilation[0], self.plain.dilation[1]

    @property
    def groups(self) -> int:
        """Number of independent operators side by side."""
        return self.plain.groups

    @property
    def ins(self) -> int:
        """Channels per group that enter the operator."""
        return self.plain.shape[1] * self.stride[0] * self.stride[1]

    @property
    def out(self) -> int:
        """Channels per group that leave it."""
        return self.plain.shape[0] // self.groups

    @property
    def centre(self) -> Size:
        """Position of the tap at distance zero."""
        return self.dilation[0] * (self.taps[0] - 1) // 2, self.dilation[1] * (self.taps[1] - 1) // 2

    def zeros(self, axis: int) -> Size:
        """Zeros put around the image along an axis: all of the padding where the operator is a circle, else what it lacks."""
        if self.plain.padding == "circular":
            return 0, 0
        reach, centre = self.dilation[axis] * (self.taps[axis] - 1), self.centre[axis]
        left, right = self.plain.amount[axis] if self.stride == (1, 1) else (centre, reach - centre)
        return (left, right) if self.embed else (max(0, left - centre), max(0, right - reach + centre))

    def size(self, size: Size) -> Size:
        """Size of the operator's image for an input of `size`."""
        found = []
        for axis, n in enumerate(size):
            s = self.stride[axis]
            if n % s and self.plain.padding == "circular":
                raise InputError(
                    f"a stride of {s} on a circle of {n} pixels has no space-to-depth; use a multiple of {s}"
                )
            left, right = self.zeros(axis)
            found.append(-(-n // s) + left + right)
        return found[0], found[1]

    def enter(self, x: Tensor) -> Tensor:
        """The input as the operator's image `(batch, groups·ins, *size)`."""
        (sh, sw), (h, w) = self.stride, x.shape[-2:]
        if sh * sw > 1:
            if h % sh or w % sw:
                self.size((h, w))  # refuses a circle that the stride does not divide
                x = functional.pad(x, (0, -w % sw, 0, -h % sh))
            x = space_to_depth(x, self.stride)
        (top, bottom), (left, right) = self.zeros(0), self.zeros(1)
        return functional.pad(x, (left, right, top, bottom)) if top + bottom + left + right else x

    def leave(self, y: Tensor, size: Size) -> Tensor:
        """The pixels that `nn.Conv2d` returns for an input of `size`."""
        for axis, n in enumerate(size):
            s, k, d = self.stride[axis], self.plain.shape[2 + axis], self.dilation[axis]
            pads, centre, (before, _) = self.plain.amount[axis], self.centre[axis], self.zeros(axis)
            count = (n + sum(pads) - d * (k - 1) - 1) // s + 1
            if count < 1:
                raise InputError(f"an input of {n} pixel(s) with padding {pads} is smaller than the kernel of {k} taps")
            first = (
                centre - pads[0] + before if s == 1 and self.stride == (1, 1) else before + (-(-n // s) - count) // 2
            )
            if first or count != y.shape[2 + axis]:
                y = y.narrow(2 + axis, first, count)
        return y


def frame_of(plain: nn.Conv2d, *, embed: bool) -> Frame:
    """The frame of a convolution; `embed`: the operator lives on a circle, so that zero padding means zeros around the image."""
    kernel = kernel_of(plain)
    Method.check(kernel)
    taps = kernel.shape[2], kernel.shape[3]
    if any(s > 1 for s in kernel.stride):
        if any(d > 1 for d in kernel.dilation):
            raise Refused(
                "stride goes through space-to-depth here, which leaves no room for a dilation; use one of the two"
            )
        for pad, k in zip(kernel.amount, taps, strict=True):
            if sum(pad) > k - 1:
                raise Refused(
                    f"padding {pad} is wider than the kernel's reach of {k - 1}: with a stride there is no pixel to return "
                    f"there; use padding ≤ {(k - 1) // 2}"
                )
        coarse = [-(-k // s) for k, s in zip(taps, kernel.stride, strict=True)]
        taps = coarse[0] + (coarse[0] + 1) % 2, coarse[1] + (coarse[1] + 1) % 2
    return Frame(kernel, taps, embed)


def space_to_depth(x: Tensor, block: Size) -> Tensor:
    """`(b, c, h, w) → (b, c·bh·bw, h/bh, w/bw)`: every pixel of a block becomes a channel."""
    b, c, h, w = x.shape
    bh, bw = block
    x = x.reshape(b, c, h // bh, bh, w // bw, bw)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(b, c * bh * bw, h // bh, w // bw)


class FramedConv2d(Effective):
    """`nn.Conv2d`'s signature around a square operator; subclasses write `build`, `compute` and `operator`."""

    bias: nn.Parameter | None
    frame: Frame

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self._start(build_plain(nn.Conv2d, args, options), **options)

    @classmethod
    def from_plain(cls, plain: nn.Conv2d, **options: Any) -> FramedConv2d:
        """This layer with the hyper-parameters of an `nn.Conv2d`."""
        layer = cls.__new__(cls)
        Effective.__init__(layer)
        layer._start(plain, **options)
        return layer.train(plain.training)

    def _start(self, plain: Any, **options: Any) -> None:
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(plain, name))
        bias = plain.bias
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
        self.build(plain, **options)

    def build(self, plain: nn.Conv2d) -> None:
        """Set `frame` and make the parameters."""
        raise TypeError(f"{type(self).__name__} must say what its parameters are")

    def extra_repr(self) -> str:
        """`nn.Conv2d`'s arguments."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in _ATTRIBUTES)


_ATTRIBUTES = tuple(name for name in arguments(nn.Conv2d) if name not in ("bias", "device", "dtype"))


class SizedConv2d(FramedConv2d):
    """A framed convolution whose effective tensors depend on the size of the image too: `compute_at(size)`.

    In evaluation mode they are kept for the last few sizes, each with a copy of the parameters to compare with.
    """

    #: how many sizes are kept
    KEPT = 4

    def compute_at(self, size: Size) -> Tensors:
        """The effective tensors for the operator's image size."""
        raise TypeError(f"{type(self).__name__} must say how its effective tensors are computed")

    def effective_at(self, size: Size) -> Tensors:
        """The effective tensors for the parameters as they are now, and the operator's image size: copies, see `Effective`."""
        return tuple(value.clone() for value in self._current_at(size))

    def _current_at(self, size: Size) -> Tensors:
        if torch.compiler.is_compiling():
            with uncast(next(self.parameters()).device.type):
                return self.compute_at(size)
        views: dict[Size, _AtSize] = self.__dict__.setdefault("_views", {})
        view = views.get(size)
        if view is None:
            while len(views) >= self.KEPT:
                views.pop(next(iter(list(views)), size), None)  # another thread may have been here too
            view = views[size] = _AtSize(self, size)
        view.training = self.training
        return view._current()

    def known_size(self, input_size: int | Size | None) -> Size:
        """The operator's image size to export for: that of `input_size`, or the one size this layer was evaluated at."""
        views = self.__dict__.get("_views", {})
        if input_size is not None:
            return self.frame.size((input_size, input_size) if isinstance(input_size, int) else input_size)
        if len(views) != 1:
            raise InputError(
                f"the effective weight of {type(self).__name__} depends on the image size; call export(input_size=(h, w)), or "
                "evaluate the layer at one size first"
            )
        return next(iter(views))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_views": {}}


class _AtSize(Effective):
    """One layer at one size, with a cache of its own; its parameters are the layer's."""

    def __init__(self, layer: SizedConv2d, size: Size) -> None:
        super().__init__()
        self.layer, self.size = layer, size

    def compute(self) -> Tensors:
        """What the layer computes for this size."""
        return self.layer.compute_at(self.size)


def batched(x: Tensor) -> tuple[Tensor, bool]:
    """The image as a batch, and whether it was one image only."""
    return (x[None], True) if x.dim() == 3 else (x, False)
