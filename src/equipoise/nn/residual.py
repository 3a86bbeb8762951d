"""Residual blocks with a proof: CPL and SLL, dense and convolutional.

    CPL   x − (2/σ²)·W·act(Wᵀx + b)           σ ≥ ‖W‖
    SLL   x − 2·W·R²·act(Wᵀx + b)             R diagonal over the hidden index, ‖WR‖ ≤ 1  (AOL or spectral rescaling)

Both are computed as `x − 2U·R·act(R⁻¹Uᵀx + b)` with `U = WR` (R = 1/σ for CPL). The Jacobian is `I − 2U·D·Uᵀ` with D the slopes
of act: for slopes in [0, 1] and ‖U‖ ≤ 1 its eigenvalues lie in [1 − 2‖U‖², 1], so the block is max(1, 2‖U‖² − 1)-Lipschitz.

References: Meunier et al. 2022 (CPL); Araujo et al. 2023, theorem 1 (SLL); Delattre et al. 2024 (SLL with spectral rescaling).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast, get_args

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
from equipoise.nn.diagonal import check_steps, normalised_pair, rescaling_pair
from equipoise.nn.effective import Effective, Tensors, as_weight, plainly_called, uncast
from equipoise.nn.layers import arguments, build_plain, kernel_of, upper_near_one
from equipoise.nn.method import Method
from equipoise.nn.rescaling import SN

Rescaling = Literal["aol", "sr", "sn"]


class Residual(Effective):
    """`x − 2U·R·act(R⁻¹Uᵀx + b)` with `Uᵀ` the linear map of `plain` (its raw weight rescaled over its outputs).

    Guarantee: ‖U‖ ≤ 1 in floating point for any raw weight and input size, slopes of `act` in [0, 1]: 1-Lipschitz.

    >>> block = SLLConv2d(4, kernel_size=3, rescaling="sr")
    >>> block(torch.zeros(2, 4, 6, 6)).shape, block.lipschitz_upper((4, 6, 6)).value
    (torch.Size([2, 4, 6, 6]), 1.0)
    """

    bias: nn.Parameter | None
    log_q: nn.Parameter | None

    plain_type: ClassVar[type[nn.Linear] | type[nn.Conv2d]]
    fixed: ClassVar[dict[str, Any]]

    def __init__(
        self,
        *args: Any,
        hidden: int | None = None,
        activation: nn.Module | None = None,
        rescaling: Rescaling | None = None,
        t: int = 2,
        learn_q: bool = True,
        iterations: int = 8,
        grid: int = 16,
        **options: Any,
    ) -> None:
        super().__init__()
        if rescaling is not None and "rescaling" in self.fixed:
            raise TypeError(f"the rescaling of {type(self).__name__} is {self.fixed['rescaling']!r}")
        rescaling = self.fixed.get("rescaling", rescaling or "aol")
        if rescaling not in get_args(Rescaling):
            raise InputError(f"rescaling must be one of {', '.join(get_args(Rescaling))}, got {rescaling!r}")
        check_steps(t)
        self.activation = unit_slopes(nn.ReLU() if activation is None else activation)
        self.rescaling, self.t = rescaling, t
        plain = _plain_of(self.plain_type, args, hidden, options)
        self.kernel = kernel_of(plain)
        _require_same(self.kernel)
        Method.check(self.kernel)
        for name in (
            ("in_features", "out_features") if self.plain_type is nn.Linear else ("in_channels", "out_channels")
        ):
            setattr(self, name, self.kernel.channels)
        weight = plain.weight.detach()
        self.norm = SN(self.kernel, iterations, grid=grid) if rescaling == "sn" else None
        self.raw = nn.Parameter(_nearly_orthogonal(weight.clone(), self.kernel.groups))
        self.register_parameter("bias", None if plain.bias is None else nn.Parameter(plain.bias.detach().clone()))
        zeros = weight.new_zeros(self.kernel.groups, weight.shape[0] // self.kernel.groups)
        self.register_parameter("log_q", nn.Parameter(zeros) if rescaling == "sr" and learn_q else None)

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
        inner, outer, offset, scale = self._current()
        x = as_weight(x, inner)
        with uncast(x.device.type):
            fused = offset.numel() > 0 and scale.numel() == 0  # the offset is the bias of the inner map
            z = self._linear(x, inner, offset if fused else None)
            if fused and self.training and _plain_relu(self.activation) and plainly_called(z):
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
        """1, as long as σ is found as it was built to be."""
        sound = self.norm is None if self.rescaling != "sn" else isinstance(self.norm, SN)
        return 1.0 if sound and (self.norm is None or self.norm.proves(SN, self.kernel)) else None

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
        kernel, build = self.kernel, cast(Any, self.plain_type)
        if not kernel.dims:
            plain = build(weight.shape[1], weight.shape[0], bias=False, device="meta")
        else:
            pads, taps = tuple(axis.left for axis in kernel.axes), tuple(weight.shape[2:])
            sizes = weight.shape[1] * kernel.groups, weight.shape[0], taps, 1, pads, kernel.dilation, kernel.groups
            plain = build(*sizes, bias=False, padding_mode=kernel.padding, device="meta")
        plain.weight = nn.Parameter(weight)
        return cast("nn.Linear | nn.Conv2d", plain)

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
        bent = _bent(
            self.activation,
            z,
            self.get_buffer("offset"),
            self.get_buffer("scale"),
            2 * isinstance(self.inner, nn.Conv2d),
        )
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


def _plain_of(kind: type[Any], args: tuple[Any, ...], hidden: int | None, options: dict[str, Any]) -> Any:
    """The inner map: `hidden` outputs, by default as many as inputs; a convolution is 3×3 and keeps the size by default."""
    names = arguments(kind)
    if len(args) > len(names):
        raise TypeError(f"expected at most {len(names)} arguments, got {len(args)}")
    given = {**dict(zip(names, args, strict=False)), **options}
    if kind is nn.Conv2d:
        given = {"kernel_size": 3, "padding": "same", **given}
    ins, out = given.get(names[0]), given.get(names[1])
    if out is not None and ins != out:
        raise Refused(
            f"a residual block adds its input to its output: {names[0]} and {names[1]} must be equal, got {ins} and {out}"
        )
    if given.get("padding") == "same" and given.get("stride", 1) not in (1, (1, 1)):
        raise Refused(f"a residual block adds its input to its output, so its stride is 1, got {given['stride']}")
    given[names[1]] = hidden or ins
    plain = build_plain(kind, (), given)
    if given:
        raise TypeError(f"unexpected argument {', '.join(map(repr, given))}")
    return plain


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


def _blocks(name: str, doc: str, **fixed: Any) -> Any:
    """The dense and the convolutional block of one kind: `fixed` options stand, the others are keyword arguments."""
    made = []
    for plain in (nn.Linear, nn.Conv2d):
        title = f"{name}{plain.__name__}"
        made.append(
            type(title, (Residual,), {"__module__": __name__, "__doc__": doc, "plain_type": plain, "fixed": fixed})
        )
    return tuple(made)


CPLLinear, CPLConv2d = _blocks(
    "CPL",
    """`x − (2/σ²)·W·act(Wᵀx + b)` with σ an upper bound of ‖W‖: 1-Lipschitz for slopes of act in [0, 1].

    The arguments of the plain layer (as many outputs as inputs; a convolution keeps the image size, by default 3×3), then
    `hidden`, `activation`, `iterations` and `grid` of the bound.
    """,
    rescaling="sn",
)
SLLLinear, SLLConv2d = _blocks(
    "SLL",
    """`x − 2·W·R²·act(Wᵀx + b)` with R by AOL or, `rescaling="sr"`, by spectral rescaling in t steps with learnable q.

    The arguments of the plain layer (as many outputs as inputs; a convolution keeps the image size, by default 3×3), then
    `hidden`, `activation`, `rescaling`, `t` and `learn_q`.
    """,
)
