"""The geometry of a convolution: which pixels every output reads, and which circulant operator contains it.

One axis of a convolution reads, for output j and tap a, the padded position `y = s·j + d·a`; the pixel is `y − left`.
Everything the norm depends on follows from these integers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused

Padding = Literal["zeros", "circular", "reflect", "replicate"]
PADDINGS: tuple[Padding, ...] = get_args(Padding)


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

    def pixels(self, padding: Padding) -> list[int | None]:
        """For each padded position the pixel that lies there, None for a zero."""
        assert self.size is not None
        return [_pixel(y - self.left, self.size, padding) for y in range(self.size + self.left + self.right)]


def _pixel(i: int, n: int, padding: Padding) -> int | None:
    if 0 <= i < n:
        return i
    if padding == "zeros":
        return None
    if padding == "circular":
        return i % n
    if padding == "replicate":
        return min(max(i, 0), n - 1)
    return -i if i < 0 else 2 * (n - 1) - i


def padding_norm(axis: Axis, padding: Padding) -> float:
    """Exact norm of the padding map along one axis: √ of the largest number of copies of one pixel (rounded up).

    The map copies pixels, so `PᵀP` is diagonal and holds the numbers of copies. With an unknown size the worst size counts.

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
    return math.nextafter(math.sqrt(copies), math.inf)


def smallest_size(axis: Axis, padding: Padding) -> int:
    """Smallest input the padding mode accepts along this axis (as PyTorch does)."""
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


def zero_lattice(axis: Axis) -> Lattice | None:
    """The lattice of an axis with zero padding (any amount); None where every output is zero.

    With `g = gcd(s, d)` only every g-th padded position is ever read, so s and d shrink by g. If then s = 1, the
    residues modulo d do not mix: a circulant of size d·N' with a dilated kernel has the spectrum of the plain kernel on N'.
    Otherwise position `y = s·(j + q) + r` splits into phase r and coarse offset q.

    A circulant of size N contains the operator if differences `m − j` of coarse input and output positions alias to no
    other tap: with m in [m0, m1], j in [j0, j1] and taps 0 … Q that means `N ≥ max(m1 − j0 + 1, Q + 1 + j1 − m0)`.
    """
    g = math.gcd(axis.stride, axis.dilation)
    s, d = axis.stride // g, axis.dilation // g
    taps, phases, length = _phase_taps(axis.kernel, s, d)
    if axis.size is None:
        return Lattice(taps, phases, length, None)
    assert axis.out is not None
    first, last = -(-axis.left // g), (axis.left + axis.size - 1) // g  # positions y/g that hold a pixel
    if first > last:
        return None
    spread = d if s == 1 else 1  # with s = 1 the coarse offsets are d·a, written as a on a grid of N/d
    top = (length - 1) * spread
    m0, m1 = first // s, last // s
    j0, j1 = max(0, m0 - top), min(axis.out - 1, m1)
    if j0 > j1:
        return None
    size = max(m1 - j0 + 1, top + 1 + j1 - m0)
    full0, full1 = -(-first // s), (last - s + 1) // s  # coarse positions all of whose phases are pixels
    window = min(full1, axis.out - 1) - max(full0, top) + 1
    window_out = min(full1 - top, axis.out - 1) - full0 + 1
    return Lattice(taps, phases, length, -(-size // spread), max(0, window // spread), max(0, window_out // spread))


def circular_lattice(axis: Axis) -> tuple[Lattice, float] | None:
    """The lattice of an axis with circular padding and the factor by which repeated outputs raise the norm.

    Exact when the stride divides the size; None where it does not (outputs then meet at odd distances).
    """
    s, d, n = axis.stride, axis.dilation, axis.size
    if n is None or axis.out is None:
        taps, phases, length = _phase_taps(axis.kernel, 1, 1)
        return (Lattice(taps, phases, length, None), _repeats_any_size(axis)) if s == 1 else None
    if n % s:
        return None
    g = math.gcd(s, d)
    n, s, d = n // g, s // g, d // g
    copies = -(-axis.out // (n // s))
    taps, phases, length = _phase_taps(axis.kernel, s, d)
    size = n // math.gcd(n, d) if s == 1 else n // s
    return Lattice(taps, phases, length, size), math.sqrt(copies) * (1 + 2.0**-52 if copies > 1 else 1)


def is_whole_circle(axis: Axis) -> bool:
    """Whether the outputs visit every coarse position of the circle exactly once: then the n-grid is exact."""
    return axis.size is not None and axis.out is not None and axis.out * axis.stride == axis.size


def _repeats_any_size(axis: Axis) -> float:
    worst = 1
    for n in range(max(1, axis.left, axis.right), axis.left + axis.right + 2):
        out = (n + axis.left + axis.right - axis.reach - 1) // axis.stride + 1
        worst = max(worst, -(-out // n))
    return math.sqrt(worst) * (1 + 2.0**-52 if worst > 1 else 1)


def _phase_taps(kernel: int, s: int, d: int) -> tuple[tuple[tuple[int, int], ...], int, int]:
    if s == 1:
        return tuple((0, a) for a in range(kernel)), 1, kernel
    taps = tuple((d * a % s, d * a // s) for a in range(kernel))
    used = sorted({r for r, _ in taps})
    return tuple((used.index(r), q) for r, q in taps), len(used), taps[-1][1] + 1


def polyphase(kernel: Tensor, lattices: list[Lattice]) -> Tensor:
    """Spread `kernel (g, co, ci, *k)` over the lattice: `(g, co, ci·phases, *lengths)`, only zeros added.

    A strided convolution is a stride-1 convolution of the space-to-depth input with this kernel (Senderovich 2022).
    """
    for i, lattice in enumerate(lattices):
        if lattice.phases == 1 and lattice.length == kernel.shape[3 + i]:
            continue
        dim = 3 + i
        shape = list(kernel.shape)
        shape[dim] = lattice.length
        spread = kernel.new_zeros(lattice.phases, *shape)
        for a, (r, q) in enumerate(lattice.taps):
            spread[r].select(dim, q).copy_(kernel.select(dim, a))
        kernel = spread.movedim(0, 3).flatten(2, 3)
    return kernel


@dataclass(frozen=True)
class Convolution:
    """A convolution as a linear operator: `kernel (groups, co, ci, *k)`, one `Axis` per spatial dimension, padding mode."""

    kernel: Tensor
    axes: tuple[Axis, ...]
    padding: Padding = "zeros"

    @property
    def known(self) -> bool:
        """Whether the input size is known."""
        return all(axis.size is not None for axis in self.axes)


def unpadded(conv: Convolution) -> Convolution:
    """The convolution without padding, on the already padded input."""
    axes = []
    for axis in conv.axes:
        size = None if axis.size is None else axis.size + axis.left + axis.right
        axes.append(replace(axis, size=size, left=0, right=0))
    return replace(conv, axes=tuple(axes), padding="zeros")


def _as_tuple(value: int | tuple[int, ...], dims: int, what: str) -> tuple[int, ...]:
    values = (value,) * dims if isinstance(value, int) else tuple(int(v) for v in value)
    if len(values) != dims or any(v < 1 for v in values):
        raise InputError(f"{what} must be {dims} positive number(s), got {value}")
    return values


def from_kernel(
    weight: Tensor,
    padding: Padding = "zeros",
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    amount: list[tuple[int, int]] | None = None,
    input_size: int | tuple[int, ...] | None = None,
) -> Convolution:
    """A convolution from its weight `(out, in/groups, *k)`; `amount` of padding per axis, by default «same»."""
    dims = weight.dim() - 2
    if not 1 <= dims <= 3:
        raise InputError(f"a convolution weight has 3, 4 or 5 dimensions, got shape {tuple(weight.shape)}")
    if padding not in PADDINGS:
        raise InputError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}")
    if groups < 1 or weight.shape[0] % groups:
        raise InputError(f"{weight.shape[0]} output channels cannot be split into {groups} groups")
    strides, dilations = _as_tuple(stride, dims, "stride"), _as_tuple(dilation, dims, "dilation")
    axes = []
    for i, k in enumerate(weight.shape[2:]):
        reach = dilations[i] * (k - 1)
        left, right = amount[i] if amount is not None else (reach // 2, reach - reach // 2)
        axes.append(Axis(k, strides[i], dilations[i], left, right))
    if input_size is not None:
        sizes = _as_tuple(input_size, dims, "input_size")
        axes = [axis.with_size(n) for axis, n in zip(axes, sizes, strict=True)]
        for i, axis in enumerate(axes):
            if sizes[i] < smallest_size(axis, padding):
                raise InputError(
                    f"{padding} padding of {max(axis.left, axis.right)} needs at least "
                    f"{smallest_size(axis, padding)} pixels along axis {i}, got {sizes[i]}"
                )
    kernel = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return Convolution(kernel, tuple(axes), padding)


_CONV: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_TRANSPOSED: dict[type[nn.Module], int] = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}


def module_kind(module: nn.Module) -> type[nn.Module]:
    """The plain class whose arithmetic this module really does; refused for hooks and overridden forwards.

    Parametrised modules pass: their forward is that of the plain class and `module.weight` is the effective weight.
    """
    name = type(module).__name__
    kinds: list[type[nn.Module]] = [nn.Linear, *_CONV, *_TRANSPOSED]
    kind = next((k for k in kinds if isinstance(module, k)), None)
    if kind is None:
        raise Refused(
            f"spectral_norm knows nn.Linear, nn.Conv1d/2d/3d and nn.ConvTranspose1d/2d/3d, not {name}; "
            "for a whole network use equipoise.lipschitz_bound"
        )
    methods = [m for m in ("forward", "_conv_forward") if hasattr(kind, m)]
    if any(m in vars(module) or getattr(type(module), m) is not getattr(kind, m) for m in methods):
        raise Refused(f"{name} overrides the forward of {kind.__name__}: its weight says nothing about its norm")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or torch.nn.parameter.is_lazy(weight):
        raise InputError(f"{name} has no weight yet: run a forward pass of the lazy module first")
    if module._forward_hooks or module._forward_pre_hooks:
        raise Refused(
            f"{name} has forward hooks, which may change its output or weight; remove them, or use "
            "torch.nn.utils.parametrizations instead of the old weight_norm/spectral_norm"
        )
    if weight.is_meta:
        raise InputError(f"the weight of {name} is on the meta device: it has no values")
    return kind


def effective_weight(module: nn.Module) -> Tensor:
    """The weight the forward pass uses, parametrisations applied."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def from_module(module: nn.Module, input_size: int | tuple[int, ...] | None = None) -> Convolution:
    """The linear part of a convolution module, read through its effective weight (transposed: its adjoint)."""
    kind = module_kind(module)
    layer: Any = module  # the attributes read below are those of the plain class
    weight = effective_weight(module)
    if kind in _CONV:
        mode = layer.padding_mode
        twice = layer._reversed_padding_repeated_twice
        amount = [(twice[2 * i], twice[2 * i + 1]) for i in range(_CONV[kind])][::-1]
        return from_kernel(weight, mode, layer.stride, layer.dilation, layer.groups, amount, input_size)
    return _adjoint_of(layer, weight, _TRANSPOSED[kind], input_size)


def _adjoint_of(module: Any, weight: Tensor, dims: int, input_size: int | tuple[int, ...] | None) -> Convolution:
    """A transposed convolution of input size n is the adjoint of the convolution with n outputs and the same weight."""
    amount = [(p, p) for p in module.padding]
    plain = from_kernel(weight, "zeros", module.stride, module.dilation, module.groups, amount)
    if input_size is None:
        return plain
    axes = []
    for axis, n, extra in zip(
        plain.axes, _as_tuple(input_size, dims, "input_size"), module.output_padding, strict=True
    ):
        size = (n - 1) * axis.stride - axis.left - axis.right + axis.reach + extra + 1
        if size < 1:
            raise InputError(f"a transposed convolution of {n} pixel(s) with padding {axis.left} has no output")
        axes.append(replace(axis, size=size, out=n))
    return Convolution(plain.kernel, tuple(axes), "zeros")


def apply(conv: Convolution, x: Tensor) -> Tensor:
    """The operator itself on a batch `x (b, groups·ci, *sizes)`, through torch's own padding and convolution."""
    dims = len(conv.axes)
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    amounts = [p for axis in reversed(conv.axes) for p in (axis.left, axis.right)]
    mode = "constant" if conv.padding == "zeros" else conv.padding
    x = nn.functional.pad(x, amounts, mode=mode) if any(amounts) else x
    weight = conv.kernel.flatten(0, 1)
    strides, dilations = [a.stride for a in conv.axes], [a.dilation for a in conv.axes]
    y = function(x, weight, None, strides, 0, dilations, conv.kernel.shape[0])
    for i, axis in enumerate(conv.axes):
        if axis.out is not None and axis.out < y.shape[2 + i]:
            y = y.narrow(2 + i, 0, axis.out)
    return y


def input_shape(conv: Convolution) -> tuple[int, ...]:
    """Channels and sizes of one input of the operator."""
    groups, _, ci = conv.kernel.shape[:3]
    return (groups * ci, *(axis.size or 0 for axis in conv.axes))
