"""What turns a raw weight into one of norm at most 1: a module that also works with `torch.nn.utils.parametrize`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import changed
from equipoise.maps.geometry import Geometry, PaddingMode

#: the plain layers that a method may have a layer for
PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)

FIXED = (
    "{} is fixed when the layer is built: the weight is made for it; build another layer (from_plain keeps the weight)"
)


class SetOnce(nn.Module):
    """A module whose hyper-parameters cannot be changed once they are set: weights were made, and may be kept, for them.

    That is every public attribute that is neither a tensor nor a module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        known = name in self.__dict__ and not isinstance(self.__dict__[name], Tensor)
        if known and name != "training" and not name.startswith("_"):
            raise InputError(FIXED.format(name))
        super().__setattr__(name, value)


class Method(SetOnce):
    """A map `raw → weight` such that the layer with that weight is 1-Lipschitz for every input size.

    Guarantee, for subclasses: `sup_ω ‖E(ω)‖₂ ≤ 1` for the symbol E of every group, which bounds the operator with zero
    padding of any amount, and with circular padding that does not enlarge the image; stride and dilation do not enlarge it.
    Traceable: no data-dependent branches. `nn.layers.layers_of` makes the layers of a method.
    """

    #: as it is written in `make_lipschitz(method=…)`
    name: ClassVar[str] = ""
    #: the plain layers it has a form for
    plain: ClassVar[tuple[type[nn.Module], ...]] = PLAIN
    #: for a method of dense layers only: what to use for convolutions
    instead: ClassVar[str] = "use RKO or BCOP"
    #: whether its layers refuse circles that the stride does not divide, for the sake of orthogonality on the others
    whole_circles: ClassVar[bool] = False
    #: whether its layer is a drop-in for the plain one, so that `make_lipschitz` can take it
    replaces: ClassVar[bool] = True

    def __init__(
        self,
        kernel: Geometry,
        *args: Any,
        whole: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.check(kernel)
        self.kernel, self.whole = kernel, whole
        self.factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.setup(*args, **options)

    def setup(self, *args: Any, **options: Any) -> None:
        """Take the options of the method and make what `forward` needs: parameters, buffers, numbers.

        `self.kernel` is the layer's geometry, `self.factory` its device and dtype; `self.whole` says that on a circle the layer
        is applied only where the stride divides the size.
        """
        if args or options:
            raise TypeError(f"{type(self).__name__} takes no options, got {[*args, *options]}")

    @classmethod
    def check(cls, kernel: Geometry) -> None:
        """Refuse the layers this construction is not sound for, with the reason.

        Circular padding wider than the kernel's reach writes pixels twice: norm above 1 for any kernel.
        """
        if kernel.dims and cls.plain == (nn.Linear,):
            raise Refused(f"{cls.__name__} makes one weight for a dense layer, not for a convolution: {cls.instead}")
        if kernel.padding not in ("zeros", "circular"):
            raise Refused(
                f"padding_mode {kernel.padding!r} copies border pixels, so that a kernel of norm 1 can reach 2; "
                "use 'zeros' or 'circular'"
            )
        for axis in kernel.axes:
            if kernel.padding == "circular" and axis.left + axis.right > axis.reach:
                raise Refused(
                    f"circular padding of {axis.left} on both sides of a kernel that reaches {axis.reach} pixels repeats "
                    f"outputs, so that no kernel has norm 1; use padding ≤ {axis.reach // 2}"
                )

    def proves(self, kind: type[Method], kernel: Geometry) -> bool:
        """Whether it is that method as its class describes it, made for layers of this kernel, and certified."""
        return type(self) is kind and not changed(self, kind) and self.kernel == kernel and self.certified

    @property
    def certified(self) -> bool:
        """Whether the norm is at most 1 by proof; a baseline that only estimates it says False."""
        return True

    def initial(self, raw: Tensor) -> Tensor:
        """Raw weight to start from, given PyTorch's default initialisation; the default keeps it."""
        return raw

    def opening(self, state: Mapping[str, Tensor], prefix: str) -> None:
        """Called before tensors of a file are loaded into a layer, with the prefix of the method's own names in it."""

    def applied(self, x: Tensor, raw: Tensor) -> Tensor | None:
        """A dense layer's `x·Wᵀ` without forming its weight W, where that is cheaper (`nn.factored`); None elsewhere.

        Guarantee: the linear map that is applied has norm at most 1, and is that of the weight up to rounding. Only asked where
        `forward` is not overridden below the class that defines it.
        """
        return None

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        raise TypeError(f"{type(self).__name__} must say how the weight is computed")


def apart(kernel: Geometry, whole_circles: bool) -> tuple[int, ...]:
    """Along each axis how many taps patches may have that do not meet: `s/gcd(s, d)`, for patches of taps at distance d.

    `i·s + a·d = j·s + b·d` means that `s/gcd(s, d)` divides a − b, on the line and on circles that s divides
    (`whole_circles`: the layer refuses the others). On another circle patches meet at odd distances: 1.
    """
    if kernel.padding == "circular" and not whole_circles:
        return (1,) * kernel.dims
    return tuple(axis.stride // math.gcd(axis.stride, axis.dilation) for axis in kernel.axes)


def kernel(
    shape: tuple[int, ...],
    groups: int = 1,
    stride: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    padding_mode: PaddingMode = "zeros",
) -> Geometry:
    """A `Geometry` from what `Kernel` took in earlier releases.

    >>> kernel((8, 4, 3, 3), 1, (2, 2), (1, 1)).stride
    (2, 2)
    """
    if len(shape) == 2:
        return Geometry(shape)
    return Geometry.of(shape, padding_mode, stride or 1, dilation or 1, groups)
