"""The geometry around layers that are square operators: `nn.Conv2d`'s arguments as what happens before and after one.

SOC, Cayley and BRO convolutions map an image to one of the same size. Before it: space-to-depth for a stride,
zeros around the image. After it: the pixels that `nn.Conv2d` would return. Both are isometries or selections, so they
do not enlarge distances. A transposed layer is the adjoint of such a thing: the steps in reverse, each transposed.
"""

from math import gcd
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import InputError, Refused
from equipoise.maps.geometry import Geometry
from equipoise.nn.parametrize import (
    Computed,
    ComputedLayer,
    check_padding,
    check_plain,
    plain_geometry,
)

Size = tuple[int, int]


class Frame:
    """The steps before and after a square operator on `channels` channels per group, with `taps` taps around the centre.

    `stride` is that of space-to-depth, and `taps` then count coarse pixels. The tap a = s'b + r of a convolution with stride s
    and dilation d, `s' = s/gcd(s, d)`, lies `b·d/gcd(s, d)` coarse pixels and r·d fine ones away: the operator has `⌈k/s'⌉` taps
    (or one more) at that coarse distance, and the fine ones are its channels.
    """

    def __init__(self, plain: Geometry, taps: Size, embed: bool) -> None:
        self.plain = plain
        self.taps = taps
        self.embed = embed
        (s, t), (d, e) = plain.stride, plain.dilation
        self.stride = s, t
        #: distance of the operator's taps, in coarse pixels
        self.dilation = d // gcd(s, d), e // gcd(t, e)
        #: position of the tap at distance zero
        self.centre = self.dilation[0] * (taps[0] - 1) // 2, self.dilation[1] * (taps[1] - 1) // 2
        self.groups = plain.groups
        #: channels per group that enter the operator, and that leave it
        self.ins = plain.shape[1] * s * t
        self.out = plain.shape[0] // plain.groups

    def zeros(self, axis: int) -> Size:
        """Zeros put around the image along an axis: all of the padding where the operator is a circle, else what it lacks."""
        if self.plain.padding == "circular":
            return 0, 0
        if self.stride != (1, 1):
            reach = self.dilation[axis] * (self.taps[axis] - 1)
            centre = self.centre[axis]
            return (centre, reach - centre) if self.embed else (0, 0)
        (left, right), reach = self.plain.amount[axis], self.plain.axes[axis].reach
        if self.embed:
            return left, right
        return max(0, left - reach // 2), max(0, right - reach + reach // 2)

    def size(self, size: Size) -> Size:
        """Size of the operator's image for an input of `size`."""
        sizes = []
        for axis, n in enumerate(size):
            s = self.stride[axis]
            if n % s and self.plain.padding == "circular":
                raise InputError(
                    f"a stride of {s} on a circle of {n} pixels has no space-to-depth; use a multiple of {s}"
                )
            left, right = self.zeros(axis)
            sizes.append(-(-n // s) + left + right)
        return sizes[0], sizes[1]

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
        """The pixels that `nn.Conv2d` returns for an input of `size`.

        Args:
            y: the operator's image.
            size: height and width of the input.
        """
        for axis, (first, count) in enumerate(self.window(size)):
            if first or count != y.shape[2 + axis]:
                y = y.narrow(2 + axis, first, count)
        return y

    def window(self, size: Size) -> list[Size]:
        """Along each axis the first of the operator's pixels that `nn.Conv2d` returns for an input of `size`, and how many."""
        sizes = []
        for axis, n in enumerate(size):
            s = self.stride[axis]
            reach = self.plain.axes[axis].reach
            pads = self.plain.amount[axis]
            count, (before, _) = (n + sum(pads) - reach - 1) // s + 1, self.zeros(axis)
            if count < 1:
                k = self.plain.shape[2 + axis]
                raise InputError(
                    f"an input of {n} pixel(s) with padding {pads} is smaller than the kernel of {k} taps"
                )
            first = before + reach // 2 - pads[0]
            if self.stride != (1, 1):
                first = before + (-(-n // s) - count) // 2
            sizes.append((first, count))
        return sizes


class Adjoint(Frame):
    """The adjoint of a frame, for `nn.ConvTranspose2d`: `enter` puts pixels where `leave` took them, `leave` undoes `enter`.

    `plain` is the geometry of the convolution that the layer is the adjoint of; `extra` is `output_padding`.
    """

    def __init__(self, plain: Geometry, taps: Size, embed: bool, extra: Size) -> None:
        super().__init__(plain, taps, embed)
        self.ins, self.out = self.out, self.ins
        self.extra = extra

    def outputs(self, size: Size) -> Size:
        """Size of the image that `nn.ConvTranspose2d` returns for an input of `size`."""
        sizes = []
        for n, axis, extra in zip(size, self.plain.axes, self.extra, strict=True):
            sizes.append((n - 1) * axis.stride - axis.left - axis.right + axis.reach + 1 + extra)
            if sizes[-1] < 1:
                raise InputError(
                    f"a transposed convolution of {n} pixel(s) with padding {axis.left} has no output"
                )
        return sizes[0], sizes[1]

    def size(self, size: Size) -> Size:
        """Size of the operator's image for an input of `size`."""
        return Frame.size(self, self.outputs(size))

    def enter(self, x: Tensor) -> Tensor:
        """The input among zeros, as the operator's image."""
        size = x.shape[-2], x.shape[-1]
        pads = [
            n - first - count if last else first
            for n, (first, count) in reversed(
                list(zip(self.size(size), self.window(self.outputs(size)), strict=True))
            )
            for last in (False, True)
        ]
        return functional.pad(x, pads) if any(pads) else x

    def leave(self, y: Tensor, size: Size) -> Tensor:
        """The pixels of the image, without the zeros that were put around it.

        Args:
            y: the operator's image.
            size: height and width of the input.
        """
        (height, width), (sh, sw) = self.outputs(size), self.stride
        y = y.narrow(2, self.zeros(0)[0], -(-height // sh)).narrow(
            3, self.zeros(1)[0], -(-width // sw)
        )
        return depth_to_space(y, self.stride)[..., :height, :width] if sh * sw > 1 else y


def frame_of(plain: nn.Module, *, embed: bool) -> Frame:
    """The frame of a convolution, or the adjoint one of a transposed convolution.

    Args:
        plain: the convolution.
        embed: the operator lives on a circle, so that zero padding means zeros around the image; otherwise it has a centre, so
            that an even number of taps becomes one more.
    """
    kernel = plain_geometry(plain)
    check_padding(kernel)
    taps = [kernel.shape[2], kernel.shape[3]]
    strided = any(s > 1 for s in kernel.stride)
    if strided:
        for axis in kernel.axes:
            if axis.left + axis.right > axis.reach:
                raise Refused(
                    f"padding {(axis.left, axis.right)} is wider than the kernel's reach of {axis.reach}: with a stride there is "
                    f"no pixel to return there; use padding ≤ {axis.reach // 2}"
                )
        taps = [
            -(-k * gcd(a.stride, a.dilation) // a.stride)
            for k, a in zip(taps, kernel.axes, strict=True)
        ]
    if strided or not embed:
        taps = [k + (k + 1) % 2 for k in taps]
    if not isinstance(plain, nn.ConvTranspose2d):
        return Frame(kernel, (taps[0], taps[1]), embed)
    extra = plain.output_padding[0], plain.output_padding[-1]
    for axis, more in zip(kernel.axes, extra, strict=True):
        if more >= axis.stride:
            raise Refused(
                f"output_padding {extra} of a transposed convolution with stride {kernel.stride} adds pixels that no input "
                "belongs to; use one smaller than the stride"
            )
    return Adjoint(kernel, (taps[0], taps[1]), embed, extra)


def space_to_depth(x: Tensor, block: Size) -> Tensor:
    """`(b, c, h, w) → (b, c·bh·bw, h/bh, w/bw)`: every pixel of a block becomes a channel.

    Args:
        x: images.
        block: height and width of a block.
    """
    x = x.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0]))
    return x.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def depth_to_space(x: Tensor, block: Size) -> Tensor:
    """The inverse of `space_to_depth`.

    Args:
        x: images.
        block: height and width of a block.
    """
    x = x.unflatten(1, (-1, *block)).permute(0, 1, 4, 2, 5, 3)
    return x.flatten(4).flatten(2, 3)


class FramedConv2d(ComputedLayer):
    """A square operator inside a frame; subclasses write `build`, `compute`, `operator` and `bound`."""

    plain_type: ClassVar[Any] = nn.Conv2d
    #: whether the operator lives on a circle, see `frame_of`
    embed: ClassVar[bool] = True

    @classmethod
    def from_plain(cls, plain: nn.Module, **options: Any) -> Self:
        """This layer with the hyper-parameters of a plain one.

        Args:
            plain: a layer of the plain class; it is not changed.
            options: those of `build`.
        """
        check_plain(cls, plain)
        layer = cls.__new__(cls)
        Computed.__init__(layer)
        layer._start(plain, options)
        return layer.train(plain.training)

    def _start(self, plain: Any, options: dict[str, Any]) -> None:
        self.frame = frame_of(plain, embed=self.embed)
        super()._start(plain, options)

    def operator(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The operator on an image."""
        raise NotImplementedError

    def framed(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The operator inside its frame, on a batch of images or on one."""
        if x.dim() == 3:
            return self.framed(x[None], *tensors)[0]
        y = self.operator(self.frame.enter(x), *tensors)
        return self.frame.leave(y, (x.shape[-2], x.shape[-1]))

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The operator inside its frame, plus the bias."""
        return self.biased(self.framed(x, *tensors))

    def biased(self, y: Tensor) -> Tensor:
        """`y + bias`."""
        return y if self.bias is None else y + self.bias[:, None, None]
