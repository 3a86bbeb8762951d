"""What turns a raw weight into one of norm at most 1: a module that also works with `torch.nn.utils.parametrize`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.core.errors import Refused


@dataclass(frozen=True)
class Kernel:
    """What a method has to know of its layer: `shape` is (out, in/groups, *taps); a dense layer has no taps.

    A transposed convolution is described as the convolution it is the adjoint of: the norm is the same.
    `whole_circles`: on a circle the layer is applied only where the stride divides the size, and refuses the others.
    """

    shape: tuple[int, ...]
    groups: int = 1
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding_mode: str = "zeros"
    whole_circles: bool = False

    @property
    def dims(self) -> int:
        """Number of spatial dimensions."""
        return len(self.shape) - 2

    @property
    def apart(self) -> tuple[int, ...]:
        """Along each axis how many taps patches may have that do not meet: `s/gcd(s, d)`, for patches of taps at distance d.

        `i·s + a·d = j·s + b·d` means that `s/gcd(s, d)` divides a − b, on the line and on circles that s divides. On
        another circle patches meet at odd distances: 1.
        """
        if self.padding_mode == "circular" and not self.whole_circles:
            return (1,) * self.dims
        return tuple(s // math.gcd(s, d) for s, d in zip(self.stride, self.dilation, strict=True))

    def grouped(self, weight: Tensor) -> Tensor:
        """(out, in/g, *taps) → (g, out/g, in/g, *taps): one block of the block-diagonal operator per group."""
        return weight.reshape(self.groups, self.shape[0] // self.groups, *self.shape[1:])


class Method(nn.Module):
    """A map `raw → weight` such that the layer with that weight is 1-Lipschitz for every input size.

    Guarantee, for subclasses: `sup_ω ‖E(ω)‖₂ ≤ 1` for the symbol E of every group, which bounds the operator with zero
    padding of any amount, and with circular padding that does not enlarge the image; stride and dilation do not enlarge it.
    Traceable: no data-dependent branches.
    """

    #: as it is written in `make_lipschitz(method=…)`
    name: ClassVar[str] = ""
    #: whether its layers refuse circles that the stride does not divide, for the sake of orthogonality on the others
    whole_circles: ClassVar[bool] = False

    def __init__(self, kernel: Kernel, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.check(kernel)

    @classmethod
    def check(cls, kernel: Kernel) -> None:
        """Refuse the layers this construction is not sound for, with the reason."""
        if kernel.padding_mode not in ("zeros", "circular"):
            raise Refused(
                f"padding_mode {kernel.padding_mode!r} copies border pixels, so that a kernel of norm 1 can reach 2; "
                "use 'zeros' or 'circular'"
            )

    @property
    def certified(self) -> bool:
        """Whether the norm is at most 1 by proof; a baseline that only estimates it says False."""
        return True

    def initial(self, raw: Tensor) -> Tensor:
        """Raw weight to start from, given PyTorch's default initialisation; the default keeps it."""
        return raw

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        raise TypeError(f"{type(self).__name__} must say how the weight is computed")
