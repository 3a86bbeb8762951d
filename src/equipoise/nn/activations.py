"""Activations that are 1-Lipschitz, and slopes of PyTorch's own."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from equipoise.core import (
    Bound,
    InputError,
    Kind,
    Refused,
    Shape,
    along,
    by_construction,
    deflate,
    inflate,
    require_counts,
    require_number,
    require_one_of,
    single_down,
)
from equipoise.maps.pointwise import read_activation


class Described(nn.Module):
    """A module that prints the attributes named in `__constants__`."""

    __constants__: tuple[str, ...] = ()

    def extra_repr(self) -> str:
        """The attributes."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.__constants__)


class MaxMin(Described):
    """`(a, b) → (max(a, b), min(a, b))` on pairs of channels, the first half against the second: a reordering.

    Guarantee: 1-Lipschitz and norm preserving, in every dtype (nothing is rounded).

    Reference: Anil, Lucas, Grosse (2019), Sorting out Lipschitz function approximation; there GroupSort of size 2.

    >>> MaxMin()(torch.tensor([[1.0, 5.0, 3.0, 4.0]]))
    tensor([[3., 5., 1., 4.]])
    """

    __constants__ = ("dim",)
    lipschitz_upper = by_construction(1.0)

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """The sorted pairs."""
        _divisible(x, self.dim, 2, "MaxMin")
        a, b = x.chunk(2, self.dim)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], self.dim)


class BetaAbs(Described):
    """`|x|` on the first `⌈β·n⌉` of n channels, x on the others: norm preserving, and a fraction of MaxMin's cost.

    Between orthogonal layers β = 1/2 is MaxMin in other coordinates: `(max, min)(a, b) = Qᵀ(|·|, id)Q(a, b)` up to a sign,
    Q the rotation by 45°, which the layers before and after can hold.

    Guarantee: 1-Lipschitz and norm preserving, in every dtype (nothing is rounded).

    Reference: the β-Abs activation of recent 1-Lipschitz networks; the identity above is elementary.

    >>> BetaAbs(0.5)(torch.tensor([[-1.0, -5.0, -3.0, 4.0]]))
    tensor([[ 1.,  5., -3.,  4.]])
    """

    __constants__ = ("beta", "dim")

    def __init__(self, beta: float = 0.5, dim: int = 1) -> None:
        super().__init__()
        self.beta = require_number(beta, "beta", least=0, most=1)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """The channels, the first ones without their sign."""
        count = math.ceil(self.beta * x.shape[self.dim])
        if count == x.shape[self.dim]:
            return x.abs()
        folded, rest = x.split([count, x.shape[self.dim] - count], self.dim)
        return torch.cat([folded.abs(), rest], self.dim)

    @by_construction(1.0)
    def lipschitz_upper(self, input_shape: Shape) -> Bound:
        """1: every entry keeps its place and its size."""
        return Bound(1.0, Kind.UPPER, "entries keep their size")


class GroupSort(Described):
    """Sorts every group of `size` neighbouring channels in increasing order; all of them where `size` is None.

    Guarantee: 1-Lipschitz (sorting is a contraction) and norm preserving, in every dtype.

    Reference: Anil, Lucas, Grosse (2019), §4.1.

    >>> GroupSort(3)(torch.tensor([[3.0, 1.0, 2.0, 9.0, 8.0, 7.0]]))
    tensor([[1., 2., 3., 7., 8., 9.]])
    """

    __constants__ = ("size", "dim")
    lipschitz_upper = by_construction(1.0)

    def __init__(self, size: int | None = 2, dim: int = 1) -> None:
        super().__init__()
        if size is not None:
            require_counts(size=size)
        self.size = size
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """The sorted groups."""
        if self.size is None:
            return x.sort(self.dim).values
        _divisible(x, self.dim, self.size, "GroupSort")
        dim = self.dim % x.dim()
        shape = (*x.shape[:dim], x.shape[dim] // self.size, self.size, *x.shape[dim + 1 :])
        return x.reshape(shape).sort(dim + 1).values.reshape(x.shape)


class HouseholderActivation(Described):
    """`z → z − 2·min(vᵀz, 0)·v`, `v = (sin θ/2, −cos θ/2)`, on pairs of channels (first half, second half), θ learned.

    Pairs on one side of the line through the origin at angle θ/2 stay, those on the other side are reflected on it:
    the Jacobian is the identity or a Householder reflection. θ = π/2 at the start, which is MaxMin.

    Guarantee: 1-Lipschitz for every θ and norm preserving (`‖σ(z)‖ = ‖z‖`: there is no factor 1/√2 in it), up to the
    rounding of v: v is a unit vector by construction, whatever θ is, and not a learned vector that has to be divided
    by its norm.

    Reference: Singla, Singla, Feizi (2022), Improved deterministic ℓ2 robustness on CIFAR-10 and CIFAR-100, §4.

    >>> HouseholderActivation(4)(torch.tensor([[1.0, 5.0, 3.0, 4.0]])).round(decimals=4)
    tensor([[3., 5., 1., 4.]], grad_fn=<RoundBackward1>)
    """

    __constants__ = ("channels",)

    def __init__(
        self,
        channels: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_number(channels, "channels", whole=True)
        if channels < 2 or channels % 2:
            raise InputError(
                f"Householder works on pairs: the number of channels must be even, got {channels}"
            )
        self.channels = channels
        self.theta = nn.Parameter(
            torch.full((channels // 2,), math.pi / 2, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The reflected pairs."""
        if x.shape[1] != self.channels:
            raise InputError(f"expected {self.channels} channels, got {tuple(x.shape)}")
        half = along(self.theta, x, 1) / 2
        s = half.sin()
        c = -half.cos()
        a, b = x.chunk(2, 1)
        t = 2 * (s * a + c * b).clamp(max=0)
        return torch.cat([a - t * s, b - t * c], 1)

    def _constant(self) -> float:
        """`2‖v‖² − 1` for every θ, with the sine and the cosine off by a unit in the last place."""
        return 1 + 8 * torch.finfo(self.theta.dtype).eps

    @by_construction(_constant)
    def lipschitz_upper(self, input_shape: Shape) -> Bound:
        """`max(1, 2‖v‖² − 1)` with v as it was rounded: 1 up to a few units in the last place."""
        half = self.theta.detach() / 2
        square = half.sin().double().square() + half.cos().double().square()
        return Bound(inflate(max(1.0, 2 * float(square.max()) - 1)), Kind.UPPER, "reflections")


class Contracted(Described):
    """`φ(x)/L` for an activation φ whose slopes go beyond 1 (GELU, SiLU, Mish, …), with L its exact constant, rounded
    up.

    >>> x = torch.linspace(1.3, 1.5, 50, dtype=torch.float64)
    >>> y = Contracted(nn.GELU())(x)
    >>> bool(((y[1:] - y[:-1]) <= (x[1:] - x[:-1])).all())
    True
    """

    __constants__ = ("factor",)

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        steepest = steepness(activation)
        if steepest is None:
            raise Refused(
                f"the slopes of {type(activation).__name__} are not known here, so there is nothing to divide by"
            )
        self.activation = activation
        self.factor = single_down(deflate(1 / max(1.0, steepest)))

    def _constant(self) -> float | None:
        """That of the activation it has now, times the factor; at least 1."""
        steepest = steepness(self)
        return None if steepest is None else max(1.0, steepest)

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The activation, shrunk."""
        return self.activation(x) * self.factor


def _divisible(x: Tensor, dim: int, size: int, name: str) -> None:
    if x.shape[dim] % size:
        raise InputError(
            f"{name} needs a number of channels divisible by {size}, got {x.shape[dim]} in dimension {dim} of {tuple(x.shape)}"
        )


def slopes(activation: nn.Module) -> tuple[float, float] | None:
    """The interval of slopes of a pointwise activation, rounded outward; None where it is not known.

    >>> slopes(nn.ReLU()), slopes(nn.LeakyReLU(0.1)), slopes(nn.GELU())[1] > 1.1289, slopes(nn.Linear(1, 1))
    ((0.0, 1.0), (0.1, 1.0), True, None)
    """
    if type(activation) is Contracted:
        inner = slopes(activation.activation)
        factor = activation.factor
        return None if inner is None else (inner[0] * factor, inner[1] * factor)
    pointwise = read_activation(activation) if isinstance(activation, nn.Module) else None
    return None if pointwise is None else pointwise.slopes


def steepness(activation: nn.Module) -> float | None:
    """The largest absolute slope of a pointwise activation, its parameters read in float32 too; None where it is not known."""
    interval = slopes(activation)
    if interval is None:
        return None
    top = max(map(abs, interval))
    return top if top <= 1 else top * (1 + 2.0**-23)


def unit_slopes(activation: Any, layer: str = "a residual block x − 2U·act(Uᵀx)") -> nn.Module:
    """The activation, refused by name and with the reason unless all its slopes are known to lie in [0, 1].

    With a slope outside, a residual block is not 1-Lipschitz: abs or −x give 3, GELU reaches 1.17.

    Args:
        activation: the module.
        layer: what needs it, for the message.

    >>> unit_slopes(nn.ReLU())
    ReLU()
    >>> unit_slopes(nn.GELU())
    Traceback (most recent call last):
    ...
    equipoise.core.errors.Refused: GELU(approximate='none'): its slopes go from -0.129 to 1.13; a residual block ...
    """
    interval = slopes(activation)
    if interval is not None and interval[0] >= 0 and interval[1] <= 1:
        return cast(nn.Module, activation)
    name = getattr(activation, "__name__", activation)
    why = "its slopes are learned, it jumps, or it is not known here"
    if interval is not None:
        why = f"its slopes go from {interval[0]:.3g} to {interval[1]:.3g}"
    raise Refused(
        f"{name}: {why}; {layer} is 1-Lipschitz only if every slope of act lies in [0, 1]; "
        "use ReLU, LeakyReLU, Tanh, Softplus, ELU or Hardtanh"
    )


def homogeneous(activation: nn.Module) -> bool:
    """Whether `act(c·z) = c·act(z)` for c > 0: a factor can be moved through."""
    pointwise = read_activation(activation)
    return pointwise is not None and pointwise.homogeneous


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "identity": nn.Identity,
    "maxmin": MaxMin,
    "groupsort": GroupSort,
    "abs": BetaAbs,
}


def activation(name: str) -> nn.Module:
    """An activation by the name that recipes use.

    >>> activation("maxmin")
    MaxMin(dim=1)
    """
    require_one_of(ACTIVATIONS, activation=name)
    return ACTIVATIONS[name]()
