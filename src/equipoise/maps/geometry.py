"""The geometry of a convolution: which pixels every output reads, and which circulant operator contains it.

One axis of a convolution reads, for output j and tap a, the padded position `y = s·j + d·a`; the pixel is `y − left`.
Everything the norm depends on follows from these integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, inf, nextafter, sqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from equipoise.core.errors import InputError

PaddingMode = Literal["zeros", "circular", "reflect", "replicate"]
PADDINGS: tuple[PaddingMode, ...] = get_args(PaddingMode)
Integers = int | tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """One axis: kernel size, stride, dilation, padding on both sides, and the sizes in and out where known."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    left: int = 0
    right: int = 0
    size: int | None = None
    out: int | None = None

    @property
    def reach(self) -> int:
        """Distance between the first and the last tap, `d·(k − 1)`."""
        return self.dilation * (self.kernel - 1)

    def with_size(self, size: int) -> Axis:
        """The same axis on an input of `size` pixels; refused where no output fits."""
        out = (size + self.left + self.right - self.reach - 1) // self.stride + 1
        if size < 1 or out < 1:
            raise InputError(
                f"an input of {size} pixel(s) with padding {self.left}+{self.right} is smaller than the kernel "
                f"({self.kernel} taps, dilation {self.dilation}): the convolution has no output"
            )
        return replace(self, size=size, out=out)

    def pixels(self, padding: PaddingMode) -> list[int | None]:
        """For each padded position the pixel that lies there, None for a zero."""
        assert self.size is not None
        return [
            _pixel(y - self.left, self.size, padding)
            for y in range(self.size + self.left + self.right)
        ]


def _pixel(i: int, n: int, padding: PaddingMode) -> int | None:
    if 0 <= i < n:
        return i
    if padding == "zeros":
        return None
    if padding == "circular":
        return i % n
    if padding == "replicate":
        return min(max(i, 0), n - 1)
    return -i if i < 0 else 2 * (n - 1) - i


def padding_norm(axis: Axis, padding: PaddingMode) -> float:
    """Exact norm of the padding map along one axis: √ of the largest number of copies of one pixel (rounded up).

    The map copies pixels, so `PᵀP` is diagonal and holds the numbers of copies. With an unknown size the worst size counts.

    Args:
        axis: the axis.
        padding: the padding mode.

    >>> round(padding_norm(Axis(3, left=1, right=1, size=8), "replicate") ** 2, 12)
    2.0
    """
    if padding == "zeros" or (axis.left == 0 and axis.right == 0):
        return 1.0
    if axis.size is not None:
        sizes: range | list[int] = [axis.size]
    else:
        most = max(axis.left, axis.right)
        sizes = range(max(1, smallest_size(axis, padding)), 2 * most + 4)
    copies = max(max(Counter(replace(axis, size=n).pixels(padding)).values()) for n in sizes)
    return nextafter(sqrt(copies), inf)


def smallest_size(axis: Axis, padding: PaddingMode) -> int:
    """Smallest input the padding mode accepts along this axis (as PyTorch does).

    Args:
        axis: the axis.
        padding: the padding mode.
    """
    most = max(axis.left, axis.right)
    return {"reflect": most + 1, "circular": most}.get(padding, 1) or 1


@dataclass(frozen=True)
class Lattice:
    """A convolution seen as a stride-1 convolution of the space-to-depth input, along one axis.

    `taps[a] = (r, q)`: tap a of the kernel reads phase r at coarse offset q. `size` is the size N of a circulant operator
    that contains the convolution as a submatrix (None: any size, so the supremum over all frequencies counts).
    `window` counts the coarse positions at which an input meets no border, `window_out` those at which an output reads no border:
    a plane wave under a window there sees the convolution as if it were infinite, which gives lower ends.
    """

    taps: tuple[tuple[int, int], ...]
    phases: int
    length: int
    size: int | None
    window: int = 0
    window_out: int = 0

    @property
    def places(self) -> list[int]:
        """Where every tap stands, phases first and offsets fastest."""
        return [r * self.length + q for r, q in self.taps]


def zero_lattice(axis: Axis) -> Lattice | None:
    """The lattice of an axis with zero padding (any amount); None where every output is zero.

    With `g = gcd(s, d)` only every g-th padded position is ever read, so s and d shrink by g. If then s = 1, the
    residues modulo d do not mix: a circulant of size d·N' with a dilated kernel has the spectrum of the plain kernel on N'.
    Otherwise position `y = s·(j + q) + r` splits into phase r and coarse offset q.

    A circulant of size N contains the operator if differences `m − j` of coarse input and output positions alias to no
    other tap: with m in [m0, m1], j in [j0, j1] and taps 0 … Q that means `N ≥ max(m1 − j0 + 1, Q + 1 + j1 − m0)`.
    """
    g = gcd(axis.stride, axis.dilation)
    s = axis.stride // g
    d = axis.dilation // g
    taps, phases, length = _phase_taps(axis.kernel, s, d)
    if axis.size is None:
        return Lattice(taps, phases, length, None)
    assert axis.out is not None
    # positions y/g that hold a pixel
    first = -(-axis.left // g)
    last = (axis.left + axis.size - 1) // g
    if first > last:
        return None
    # with s = 1 the coarse offsets are d·a, written as a on a grid of N/d
    spread = d if s == 1 else 1
    top = (length - 1) * spread
    m0 = first // s
    m1 = last // s
    j0 = max(0, m0 - top)
    j1 = min(axis.out - 1, m1)
    if j0 > j1:
        return None
    size = max(m1 - j0 + 1, top + 1 + j1 - m0)
    # coarse positions all of whose phases are pixels
    full0 = -(-first // s)
    full1 = (last - s + 1) // s
    window = min(full1, axis.out - 1) - max(full0, top) + 1
    window_out = min(full1 - top, axis.out - 1) - full0 + 1
    return Lattice(
        taps,
        phases,
        length,
        -(-size // spread),
        max(0, window // spread),
        max(0, window_out // spread),
    )


def circular_lattice(axis: Axis) -> tuple[Lattice, float] | None:
    """The lattice of an axis with circular padding and the factor by which repeated outputs raise the norm.

    Exact when the stride divides the size; None where it does not (outputs then meet at odd distances).
    """
    s = axis.stride
    d = axis.dilation
    n = axis.size
    if n is None or axis.out is None:
        taps, phases, length = _phase_taps(axis.kernel, 1, 1)
        return (Lattice(taps, phases, length, None), _repeats_any_size(axis)) if s == 1 else None
    if n % s:
        return None
    g = gcd(s, d)
    n = n // g
    s = s // g
    d = d // g
    copies = -(-axis.out // (n // s))
    taps, phases, length = _phase_taps(axis.kernel, s, d)
    size = n // gcd(n, d) if s == 1 else n // s
    return Lattice(taps, phases, length, size), sqrt(copies) * (1 + 2.0**-52 if copies > 1 else 1)


def is_whole_circle(axis: Axis) -> bool:
    """Whether the outputs visit every coarse position of the circle exactly once: then the n-grid is exact."""
    return axis.size is not None and axis.out is not None and axis.out * axis.stride == axis.size


def _repeats_any_size(axis: Axis) -> float:
    worst = 1
    for n in range(max(1, axis.left, axis.right), axis.left + axis.right + 2):
        out = (n + axis.left + axis.right - axis.reach - 1) // axis.stride + 1
        worst = max(worst, -(-out // n))
    return sqrt(worst) * (1 + 2.0**-52 if worst > 1 else 1)


def _phase_taps(kernel: int, s: int, d: int) -> tuple[tuple[tuple[int, int], ...], int, int]:
    if s == 1:
        return tuple((0, a) for a in range(kernel)), 1, kernel
    taps = tuple((d * a % s, d * a // s) for a in range(kernel))
    used = sorted({r for r, _ in taps})
    return tuple((used.index(r), q) for r, q in taps), len(used), taps[-1][1] + 1


def polyphase(kernel: Tensor, lattices: Sequence[Lattice]) -> Tensor:
    """Spread a kernel over the lattice: `(g, co, ci·phases, *lengths)`, only zeros added; differentiable.

    A strided convolution is a stride-1 convolution of the space-to-depth input with this kernel (Senderovich 2022).

    Args:
        kernel: `(g, co, ci, *k)`.
        lattices: one per axis.
    """
    for dim, lattice in enumerate(lattices, start=3):
        if lattice.phases == 1 and lattice.length == kernel.shape[dim]:
            continue
        shape = list(kernel.shape)
        shape[dim] = lattice.phases * lattice.length
        spread = kernel.new_zeros(shape).index_copy(
            dim, torch.tensor(lattice.places, device=kernel.device), kernel
        )
        kernel = (
            spread.unflatten(dim, (lattice.phases, lattice.length)).movedim(dim, 3).flatten(2, 3)
        )
    return kernel


def rejoined(kernel: Tensor, lattices: Sequence[Lattice]) -> Tensor:
    """The inverse of `polyphase`: the kernel back from its phases.

    Args:
        kernel: `(g, co, ci·phases, *lengths)`.
        lattices: one per axis.
    """
    for dim, lattice in reversed(list(enumerate(lattices, start=3))):
        if lattice.phases == 1 and lattice.length == len(lattice.taps):
            continue
        spread = kernel.unflatten(2, (-1, lattice.phases)).movedim(3, dim).flatten(dim, dim + 1)
        kernel = spread.index_select(dim, torch.tensor(lattice.places, device=kernel.device))
    return kernel


def integers(value: Integers, dims: int, what: str, least: int = 1) -> tuple[int, ...]:
    """One whole number per axis; a single one counts for all.

    Args:
        value: what the caller gave.
        dims: the number of axes.
        what: the name of the argument, for the message.
        least: the smallest number allowed.
    """
    values = (value,) * dims if isinstance(value, int) else tuple(int(v) for v in value)
    if len(values) != dims or any(v < least for v in values):
        wanted = "positive" if least == 1 else "non-negative"
        raise InputError(f"{what} must be {dims} {wanted} number(s), got {value}")
    return values


@dataclass(frozen=True)
class Geometry:
    """All of a matrix or convolution but the values of its weight: hashable, comparable, nothing about tensors.

    `shape` is that of the weight, (out, in/groups, *taps); a matrix has no taps and no axes. A transposed convolution is
    described as the convolution it is the adjoint of.

    >>> Geometry.of((8, 4, 3, 3), stride=2, groups=2, input_size=9).axes[0].out
    5
    """

    shape: tuple[int, ...]
    groups: int = 1
    axes: tuple[Axis, ...] = ()
    padding: PaddingMode = "zeros"

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        padding: PaddingMode = "zeros",
        stride: Integers = 1,
        dilation: Integers = 1,
        groups: int = 1,
        amount: Sequence[tuple[int, int]] | None = None,
        input_size: Integers | None = None,
    ) -> Geometry:
        """From the arguments of a convolution; `amount` of padding per axis, by default «same».

        Args:
            shape: of the weight `(out, in/groups, *taps)`.
            padding: the padding mode.
            stride: per axis, or one for all.
            dilation: per axis, or one for all.
            groups: blocks of channels.
            amount: padding (left, right) per axis; None: «same».
            input_size: spatial size of the input, where it is known.
        """
        dims = len(shape) - 2
        if not 1 <= dims <= 3:
            raise InputError(
                f"a convolution weight has 3, 4 or 5 dimensions, got shape {tuple(shape)}"
            )
        if padding not in PADDINGS:
            raise InputError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}")
        if groups < 1 or shape[0] % groups:
            raise InputError(f"{shape[0]} output channels cannot be split into {groups} groups")
        strides = integers(stride, dims, "stride")
        dilations = integers(dilation, dims, "dilation")
        axes = []
        for i, k in enumerate(shape[2:]):
            reach = dilations[i] * (k - 1)
            left, right = amount[i] if amount is not None else (reach // 2, reach - reach // 2)
            axes.append(Axis(k, strides[i], dilations[i], left, right))
        geometry = cls(tuple(shape), groups, tuple(axes), padding)
        return geometry if input_size is None else geometry.with_size(input_size)

    def with_size(self, input_size: Integers) -> Geometry:
        """The same on inputs of this spatial size; refused where the padding mode or the kernel does not fit."""
        sizes = integers(input_size, self.dims, "input_size")
        axes = tuple(axis.with_size(n) for axis, n in zip(self.axes, sizes, strict=True))
        for i, axis in enumerate(axes):
            least = smallest_size(axis, self.padding)
            if sizes[i] < least:
                raise InputError(
                    f"{self.padding} padding of {max(axis.left, axis.right)} needs at least {least} pixels along axis {i}, "
                    f"got {sizes[i]}"
                )
        return replace(self, axes=axes)

    def giving(self, output_size: Integers, extra: Sequence[int]) -> Geometry:
        """The same with so many outputs, on the inputs a transposed convolution with this `output_padding` writes.

        Args:
            output_size: spatial size of the outputs.
            extra: the `output_padding` per axis.
        """
        axes = []
        for axis, n, more in zip(
            self.axes, integers(output_size, self.dims, "input_size"), extra, strict=True
        ):
            size = (n - 1) * axis.stride - axis.left - axis.right + axis.reach + more + 1
            if size < 1:
                raise InputError(
                    f"a transposed convolution of {n} pixel(s) with padding {axis.left} has no output"
                )
            axes.append(replace(axis, size=size, out=n))
        return replace(self, axes=tuple(axes))

    @property
    def dims(self) -> int:
        """Number of spatial dimensions."""
        return len(self.shape) - 2

    @property
    def known(self) -> bool:
        """Whether the input size is known."""
        return all(axis.size is not None for axis in self.axes)

    @property
    def stride(self) -> tuple[int, ...]:
        """Per axis."""
        return tuple(axis.stride for axis in self.axes)

    @property
    def dilation(self) -> tuple[int, ...]:
        """Per axis."""
        return tuple(axis.dilation for axis in self.axes)

    @property
    def amount(self) -> tuple[tuple[int, int], ...]:
        """Padding (left, right) per axis."""
        return tuple((axis.left, axis.right) for axis in self.axes)

    @property
    def size(self) -> tuple[int, ...]:
        """Spatial size of the input, where known."""
        return tuple(axis.size or 0 for axis in self.axes)

    @property
    def out(self) -> tuple[int, ...]:
        """Spatial size of the output, where known."""
        return tuple(axis.out or 0 for axis in self.axes)

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return self.shape[1] * self.groups

    def grouped(self, weight: Tensor) -> Tensor:
        """(out, in/g, *taps) → (g, out/g, in/g, *taps): one block of the block-diagonal operator per group."""
        return weight.reshape(self.groups, self.shape[0] // self.groups, *self.shape[1:])

    def unpadded(self) -> Geometry:
        """Without padding, on the already padded input."""
        axes = []
        for axis in self.axes:
            size = None if axis.size is None else axis.size + axis.left + axis.right
            axes.append(replace(axis, size=size, left=0, right=0))
        return replace(self, axes=tuple(axes), padding="zeros")
