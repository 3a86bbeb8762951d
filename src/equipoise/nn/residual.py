"""Residual blocks with a proof: CPL and SLL, dense and convolutional.

    CPL   x − (2/σ²)·W·act(Wᵀx + b)           σ ≥ ‖W‖
    SLL   x − 2·W·R²·act(Wᵀx + b)             R diagonal over the hidden index, ‖WR‖ ≤ 1  (AOL or spectral rescaling)

Both are computed as `x − 2U·R·act(R⁻¹Uᵀx + b)` with `U = WR` (R = 1/σ for CPL). The Jacobian is `I − 2U·D·Uᵀ` with D the slopes
of act: for slopes in [0, 1] and ‖U‖ ≤ 1 its eigenvalues lie in [1 − 2‖U‖², 1], so the block is max(1, 2‖U‖² − 1)-Lipschitz.

References: Meunier et al. 2022 (CPL); Araujo et al. 2023, theorem 1 (SLL); Delattre et al. 2024 (SLL with spectral rescaling).
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import by_construction, hooked
from equipoise.core.precision import inflate
from equipoise.maps.geometry import Geometry
from equipoise.maps.reading import geometry_of
from equipoise.nn.activations import homogeneous, unit_slopes
from equipoise.nn.parametrize import (
    Computed,
    Tensors,
    cast_input,
    check_padding,
    is_plain_call,
    plain_geometry,
    without_autocast,
)
from equipoise.nn.rescaling import SN, check_steps, normalised_pair, rescaling_pair
from equipoise.norms.spectral import spectral_norm

Size = int | tuple[int, int]


class Residual(Computed):
    """`x − 2U·R·act(R⁻¹Uᵀx + b)` with `Uᵀ` the linear map of `plain` (its raw weight rescaled over its outputs).

    Guarantee: ‖U‖ ≤ 1 in floating point for any raw weight and input size, slopes of `act` in [0, 1]: 1-Lipschitz.

    Args:
        plain: the inner map, from inputs to hidden units; a convolution keeps the image size.
        activation: slopes in [0, 1]; None is ReLU.
        options: of the subclass that rescales, `CPL` or `SLL`.

    >>> block = SLLConv2d(4, kernel_size=3, rescaling="sr")
    >>> block(torch.zeros(2, 4, 6, 6)).shape, block.lipschitz_upper((4, 6, 6)).value
    (torch.Size([2, 4, 6, 6]), 1.0)
    """

    bias: nn.Parameter | None
    log_q: nn.Parameter | None

    #: how the raw weight is rescaled: by the bound `norm` ("sn"), or by t steps
    rescaling: str = "sn"
    t: int = 1
    norm: SN | None

    def __init__(self, plain: nn.Linear | nn.Conv2d, activation: nn.Module | None, **options: Any) -> None:
        super().__init__(**options)
        self.activation = unit_slopes(nn.ReLU() if activation is None else activation)
        self.kernel = plain_geometry(plain)
        _require_same(self.kernel)
        check_padding(self.kernel)
        sizes = ("in_features", "out_features") if isinstance(plain, nn.Linear) else ("in_channels", "out_channels")
        for name in sizes:
            setattr(self, name, self.kernel.channels)
        weight = plain.weight.detach()
        self.norm = None
        self.raw = nn.Parameter(_nearly_orthogonal(weight.clone(), self.kernel.groups))
        self.register_parameter("bias", cast("nn.Parameter | None", plain.bias))
        self.register_parameter("log_q", None)

    def compute(self) -> Tensors:
        """`(Uᵀ, 2U, offset, scale)`: both maps in the layout of the plain layer, `R·b` and R (each empty where not used)."""
        K = self.kernel.grouped(self.raw).transpose(1, 2)  # the hidden index is the one that is rescaled
        if self.norm is not None:
            U, R = normalised_pair(K, *self.norm.bound(self.raw))
        else:
            U, R = rescaling_pair(K, self.t if self.rescaling == "sr" else 1, self.log_q)
        inner, outer = U.transpose(1, 2).reshape(self.raw.shape), 2 * U.flatten(0, 1)
        if self.kernel.dims:
            outer = outer.flip(list(range(2, 2 + self.kernel.dims)))
        R = R.expand(self.kernel.groups, U.shape[2]).reshape(-1)
        none = self.raw.new_empty(0)
        if homogeneous(self.activation):  # R·act(z/R + b) = act(z + R·b)
            return inner, outer, none if self.bias is None else R * self.bias, none
        offset = none if self.bias is None else self.bias
        # any positive scale keeps the bound: this range keeps z/R and its gradient finite
        return inner, outer, offset, torch.where(R > 0, R, torch.ones_like(R)).clamp(2.0**-60, 2.0**60)

    def forward(self, x: Tensor) -> Tensor:
        """The block on `x`."""
        unit_slopes(self.activation)
        inner, outer, offset, scale = self.effective()
        x = cast_input(x, inner)
        with without_autocast(x.device.type):
            fused = offset.numel() > 0 and scale.numel() == 0  # the offset is the bias of the inner map
            z = self._linear(x, inner, offset if fused else None)
            if fused and self.training and _plain_relu(self.activation) and is_plain_call(z):
                bent = functional.relu_(z)
            else:
                bent = _bent(self.activation, z, offset[:0] if fused else offset, scale, self.kernel.dims)
            return self._linear(bent, -outer).add_(x)  # the sign on the weight: nothing of x's size is turned

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        kernel = self.kernel
        if not kernel.dims:
            return functional.linear(x, weight, bias)
        padding: Any = [axis.left for axis in kernel.axes]
        if kernel.padding == "circular":
            x = functional.pad(x, [p for p in reversed(padding) for _ in range(2)], mode="circular")
            padding = 0
        return functional.conv2d(x, weight, bias, 1, padding, kernel.dilation, kernel.groups)

    def _constant(self) -> float | None:
        """1, as long as σ is bounded as it was built to be."""
        return 1.0 if self.norm is None or type(self.norm) is SN else None

    @by_construction(_constant)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """`max(1, 2‖U‖² − 1)` with ‖U‖ bounded for this input, from the weights the forward pass uses."""
        return self.export().lipschitz_upper(input_shape)

    def export(self) -> ExportedResidual:
        """The block on plain layers with the effective weights: nothing is recomputed."""
        unit_slopes(self.activation)
        with torch.no_grad():
            inner, outer, offset, scale = (value.detach() for value in self.effective())
        block = ExportedResidual(self._plain(inner), self._plain(outer), self.activation, offset, scale)
        return block.train(self.training)

    def _plain(self, weight: Tensor) -> nn.Linear | nn.Conv2d:
        kernel = self.kernel
        if not kernel.dims:
            plain: nn.Linear | nn.Conv2d = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        else:
            pads, taps = tuple(axis.left for axis in kernel.axes), tuple(weight.shape[2:])
            options: Any = (taps, 1, pads, kernel.dilation, kernel.groups, False, kernel.padding, "meta")
            plain = nn.Conv2d(weight.shape[1] * kernel.groups, weight.shape[0], *options)
        plain.weight = nn.Parameter(weight)
        return plain

    def extra_repr(self) -> str:
        """Shape and rescaling."""
        hidden, features = self.raw.shape[0], self.raw.shape[1] * self.kernel.groups
        steps = f", t={self.t}" if self.rescaling == "sr" else ""
        return f"{features}, hidden={hidden}, rescaling={self.rescaling!r}{steps}"


class ExportedResidual(nn.Module):
    """`x − outer(R·act(R⁻¹·inner(x) + b))` on plain layers; `outer` is twice the adjoint of `inner`, else no bound is claimed."""

    def __init__(
        self, inner: nn.Module, outer: nn.Module, activation: nn.Module, offset: Tensor, scale: Tensor
    ) -> None:
        super().__init__()
        self.inner, self.outer, self.activation = inner, outer, activation
        self.register_buffer("offset", offset)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """The block on `x`."""
        z = self.inner(x)
        dims = 2 * isinstance(self.inner, nn.Conv2d)
        bent = _bent(self.activation, z, self.get_buffer("offset"), self.get_buffer("scale"), dims)
        return x - self.outer(bent)

    @by_construction(None)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """`max(1, 2‖U‖² − 1)`, as long as the two maps belong together and the activation has slopes in [0, 1]."""
        unit_slopes(self.activation)
        inner, outer = self.inner, self.outer
        if type(inner) is not type(outer) or not isinstance(inner, nn.Linear | nn.Conv2d):
            raise Refused("the maps of this block are no longer those it was exported with: no bound of its own")
        assert isinstance(outer, nn.Linear | nn.Conv2d)
        _require_adjoint(inner, outer)
        scale = self.get_buffer("scale")
        if not bool((scale > 0).all()):
            raise Refused("the scale of this block is not positive: no bound of its own")
        s = upper_near_one(inner, input_shape)
        value = 1.0 if s <= 1 else inflate(inflate(2 * s * s) - 1)
        return Bound(value, Kind.UPPER, "residual, max(1, 2‖U‖² − 1)")


def _nearly_orthogonal(weight: Tensor, groups: int) -> Tensor:
    """An orthogonal matrix (at the central tap, with a tenth of the default noise around): the block starts nearly isometric.

    With independent entries U has small singular values, each block contracts, and deep towers lose their signal.
    """
    taps = weight.dim() > 2
    Q = weight.new_empty(groups, weight.shape[0] // groups, weight.shape[1])
    for block in Q:
        nn.init.orthogonal_(block)
    if not taps:
        return Q.reshape(weight.shape)
    weight = 0.1 * weight
    weight[..., weight.shape[2] // 2, weight.shape[3] // 2] = Q.flatten(0, 1)
    return weight


def _plain_relu(activation: nn.Module) -> bool:
    return type(activation) is nn.ReLU and not hooked(activation)


def _bent(activation: nn.Module, z: Tensor, offset: Tensor, scale: Tensor, dims: int) -> Tensor:
    shape = (-1, *[1] * dims)
    if scale.numel():
        z = z / scale.reshape(shape)
    if offset.numel():
        z = z + offset.reshape(shape)
    z = activation(z)
    return z * scale.reshape(shape) if scale.numel() else z


def _require_adjoint(inner: nn.Linear | nn.Conv2d, outer: nn.Linear | nn.Conv2d) -> None:
    a, b = inner.weight.detach(), outer.weight.detach()
    same = inner.bias is None and outer.bias is None
    if isinstance(inner, nn.Conv2d) and isinstance(outer, nn.Conv2d):
        one, two = geometry_of(inner), geometry_of(outer)
        a = one.grouped(a).transpose(1, 2).flatten(0, 1).flip((2, 3))
        same = same and (one.axes, one.groups, one.padding) == (two.axes, two.groups, two.padding)
        same = same and all(axis.stride == 1 and 2 * axis.left == 2 * axis.right == axis.reach for axis in one.axes)
    else:
        a = a.mT
    if not same or a.shape != b.shape or not torch.equal(2 * a, b):
        raise Refused("the outer map of this block is not twice the adjoint of the inner one: no bound of its own")


def _require_same(kernel: Geometry) -> None:
    """A block adds its input to its output: as many pixels, of the same places."""
    if any(stride != 1 for stride in kernel.stride):
        raise Refused(f"a residual block adds its input to its output, so its stride is 1, got {kernel.stride}")
    if any(axis.reach % 2 for axis in kernel.axes):
        raise Refused(
            f"a residual block needs padding that is equal on both sides: kernel size {kernel.shape[2:]} is even"
        )
    wanted = tuple(axis.reach // 2 for axis in kernel.axes)
    if kernel.amount != tuple((p, p) for p in wanted):
        raise Refused(f"a residual block keeps the image size: padding must be {wanted} or 'same', got {kernel.amount}")


def upper_near_one(plain: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Upper end of the norm's bracket, sharp where it matters: refined until it is at most 1, or within 1e-6 of the norm."""
    size = None if isinstance(plain, nn.Linear) else tuple(input_shape[1:])
    upper = float("inf")
    for rtol in (1e-2, 1e-3, 1e-4, 1e-6):
        bracket = spectral_norm(plain, input_size=size, rtol=rtol)
        upper = min(upper, float(bracket.upper))
        if upper <= 1 or float(bracket.lower) > 1 + rtol:
            break
    return upper


class _Dense(Residual):
    """The arguments of a dense block."""

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        hidden: int | None = None,
        activation: nn.Module | None = None,
        **options: Any,
    ) -> None:
        _require_equal(in_features, out_features)
        plain = nn.Linear(in_features, hidden or in_features, bias, device, dtype)
        super().__init__(plain, activation, **options)


class _Convolutional(Residual):
    """The arguments of a convolutional block."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        kernel_size: Size = 3,
        stride: Size = 1,
        padding: Size | str = "same",
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        hidden: int | None = None,
        activation: nn.Module | None = None,
        **options: Any,
    ) -> None:
        _require_equal(in_channels, out_channels)
        if stride not in (1, (1, 1)):
            raise Refused(f"a residual block adds its input to its output, so its stride is 1, got {stride}")
        sizes: Any = (kernel_size, 1, padding, dilation, groups, bias, padding_mode, device, dtype)
        super().__init__(nn.Conv2d(in_channels, hidden or in_channels, *sizes), activation, **options)


def _require_equal(ins: int, out: int | None) -> None:
    if out is not None and ins != out:
        raise Refused(f"a residual block adds its input to its output: as many outputs as inputs, got {ins} and {out}")


class CPL(Residual):
    """`x − (2/σ²)·W·act(Wᵀx + b)` with σ an upper bound of ‖W‖: 1-Lipschitz for slopes of act in [0, 1].

    Args:
        plain: the inner map.
        activation: slopes in [0, 1]; None is ReLU.
        iterations: of the bound σ.
        grid: frequencies of the bound σ, see `SN`.
    """

    def __init__(
        self, plain: nn.Linear | nn.Conv2d, activation: nn.Module | None, iterations: int = 8, grid: int = 16
    ) -> None:
        super().__init__(plain, activation)
        self.norm = SN(self.kernel, iterations, grid)


class SLL(Residual):
    """`x − 2·W·R²·act(Wᵀx + b)` with R by AOL or spectral rescaling: 1-Lipschitz for slopes of act in [0, 1].

    Args:
        plain: the inner map.
        activation: slopes in [0, 1]; None is ReLU.
        rescaling: "aol", or "sr" for spectral rescaling.
        t: steps of spectral rescaling.
        learn_q: whether its q is a parameter.
    """

    def __init__(
        self,
        plain: nn.Linear | nn.Conv2d,
        activation: nn.Module | None,
        rescaling: Literal["aol", "sr"] = "aol",
        t: int = 2,
        learn_q: bool = True,
    ) -> None:
        super().__init__(plain, activation)
        if rescaling not in ("aol", "sr"):
            raise InputError(f"rescaling must be aol or sr, got {rescaling!r}")
        check_steps(t)
        self.rescaling, self.t = rescaling, t
        if rescaling == "sr" and learn_q:
            self.log_q = nn.Parameter(self.raw.new_zeros(self.kernel.groups, len(self.raw) // self.kernel.groups))


class CPLLinear(_Dense, CPL):
    """A dense block `x − (2/σ²)·W·act(Wᵀx + b)`, see `CPL`.

    Args:
        in_features: size of input and output.
        out_features: the same, if given.
        bias: whether b is learned.
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
        iterations: of the bound σ.
        grid: frequencies of the bound σ, see `SN`.
    """


class CPLConv2d(_Convolutional, CPL):
    """A convolutional block `x − (2/σ²)·W·act(Wᵀx + b)`, see `CPL`.

    Args:
        in_channels: channels of input and output.
        out_channels: the same, if given.
        kernel_size: odd.
        stride: 1.
        padding: "same", or what keeps the image size.
        dilation: of the kernel.
        groups: of the channels.
        bias: whether b is learned.
        padding_mode: "zeros" or "circular".
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
        iterations: of the bound σ.
        grid: frequencies of the bound σ, see `SN`.
    """


class SLLLinear(_Dense, SLL):
    """A dense block `x − 2·W·R²·act(Wᵀx + b)`, see `SLL`.

    Args:
        in_features: size of input and output.
        out_features: the same, if given.
        bias: whether b is learned.
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
        rescaling: "aol", or "sr" for spectral rescaling.
        t: steps of spectral rescaling.
        learn_q: whether its q is a parameter.
    """


class SLLConv2d(_Convolutional, SLL):
    """A convolutional block `x − 2·W·R²·act(Wᵀx + b)`, see `SLL`.

    Args:
        in_channels: channels of input and output.
        out_channels: the same, if given.
        kernel_size: odd.
        stride: 1.
        padding: "same", or what keeps the image size.
        dilation: of the kernel.
        groups: of the channels.
        bias: whether b is learned.
        padding_mode: "zeros" or "circular".
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
        rescaling: "aol", or "sr" for spectral rescaling.
        t: steps of spectral rescaling.
        learn_q: whether its q is a parameter.
    """
