"""A bound is a type, not a float: every number knows on which side of the truth it lies."""

import decimal
import enum
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused, explained
from equipoise.core.precision import float64

Number = float | Tensor
#: of a tensor, or spatial size of an image
Shape = tuple[int, ...]


class Kind(enum.StrEnum):
    """On which side of the truth a number lies."""

    UPPER = "upper"
    LOWER = "lower"
    ESTIMATE = "estimate"
    EXACT = "exact"


@dataclass(frozen=True)
class Bound:
    """One number with its side of the truth.

    `exact` means: equal to the truth up to the rounding of the method that computed it. It is *not* accepted
    where a guarantee is needed (an SVD in floating point may round down); `upper` is.

    >>> Bound(2.0, Kind.UPPER, "gram")
    Bound(2, upper, method='gram')
    """

    value: Number
    kind: Kind
    method: str = ""
    note: str = ""

    def __repr__(self) -> str:
        rounding = {Kind.UPPER: decimal.ROUND_CEILING, Kind.LOWER: decimal.ROUND_FLOOR}
        shown = _format(self.value, 6, rounding.get(self.kind, decimal.ROUND_HALF_EVEN))
        return f"Bound({shown}, {self.kind}, method={self.method!r})"

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Bracket:
    """`lower ≤ truth ≤ upper`, both ends proved, also in floating point.

    Both ends are floats, or float64 tensors of the batch shape for batched input. `rtol` is what was asked for;
    `reached` says whether `upper ≤ (1 + rtol)·lower`, and `note` why not where it is not.

    >>> b = Bracket(1.0, 1.0005, rtol=1e-3)
    >>> b.reached, 1.0002 in b
    (True, True)
    """

    lower: Number
    upper: Number
    rtol: float = math.nan
    method: str = ""
    note: str = ""
    vectors: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        lower = float64(self.lower)
        upper = float64(self.upper)
        if (lower > upper).any() or lower.isnan().any() or upper.isnan().any():
            raise InputError(f"a bracket needs lower ≤ upper, got [{self.lower!r}, {self.upper!r}]")

    @property
    def gap(self) -> Number:
        """`upper/lower − 1`; 0 where both ends are 0, infinite where only the lower one is."""
        low = float64(self.lower)
        up = float64(self.upper)
        gap = torch.where(up == low, 0.0, up / low - 1)
        return gap if gap.dim() else float(gap)

    @property
    def reached(self) -> bool:
        """Whether the gap asked for was reached (everywhere, for a batch)."""
        return bool((float64(self.gap) <= self.rtol).all())

    def __contains__(self, value: float) -> bool:
        return bool((float64(self.lower) <= value).all() and (float64(self.upper) >= value).all())

    def __repr__(self) -> str:
        extra = "".join(
            f", {k}={v!r}" for k, v in (("method", self.method), ("note", self.note)) if v
        )
        return f"Bracket({format_down(self.lower)}, {format_up(self.upper)}{extra})"


def as_upper(value: Any, what: str = "Lipschitz constant") -> float:
    """Read a number that will feed a certificate: only an upper bound is let through.

    A `Bracket` gives its upper end, a `Bound` must be of kind `upper`; a plain number is the caller's own claim
    and is taken as one. Estimates and lower bounds are refused.

    Args:
        value: the number.
        what: its name, for the message.

    >>> as_upper(Bracket(0.9, 1.0))
    1.0
    >>> as_upper(Bound(0.9, Kind.ESTIMATE))
    Traceback (most recent call last):
    ...
    equipoise.core.errors.Refused: a certificate needs an upper bound of the Lipschitz constant, got one that is only estimate
    """
    if isinstance(value, Bracket):
        value = value.upper
    elif isinstance(value, Bound):
        if value.kind is not Kind.UPPER:
            raise Refused(
                f"a certificate needs an upper bound of the {what}, got one that is only {value.kind}"
            )
        value = value.value
    with explained(f"the {what} must be a non-negative number, got {type(value).__name__}"):
        number = float(value.max()) if isinstance(value, Tensor) else float(value)
    if math.isnan(number) or number < 0:
        raise InputError(f"the {what} must be a non-negative number, got {number}")
    return number


def format_up(x: Number, digits: int = 6) -> str:
    """Print a number with `digits` significant digits, never below its value: for every upper bound that is shown.

    Args:
        x: a number, or a tensor, of which the least and the largest entry are shown.
        digits: significant decimal digits.

    >>> format_up(1.0000001, 4), format_up(2.5, 4), format_up(0.0, 4)
    ('1.001', '2.5', '0')
    """
    return _format(x, digits, decimal.ROUND_CEILING)


def format_down(x: Number, digits: int = 6) -> str:
    """Print a number with `digits` significant digits, never above its value: for lower bounds, radii and certified ε.

    Args:
        x: a number, or a tensor, of which the least and the largest entry are shown.
        digits: significant decimal digits.

    >>> format_down(0.99999, 4), format_down(20.0, 4)
    ('0.9999', '20')
    """
    return _format(x, digits, decimal.ROUND_FLOOR)


def _format(x: Number, digits: int, rounding: str) -> str:
    if isinstance(x, Tensor):
        if x.numel() == 0:
            return f"nothing of shape {tuple(x.shape)}"
        if x.numel() > 1:
            least, largest = (_format(float(end), digits, rounding) for end in (x.min(), x.max()))
            return f"{least} … {largest} of shape {tuple(x.shape)}"
        x = float(x)

    if x == 0 or not math.isfinite(x):
        return f"{x:g}"

    # Decimal(x) is exact, so the only rounding is the one in the direction asked for
    value = (
        decimal.Context(prec=digits, rounding=rounding)
        .create_decimal(decimal.Decimal(x))
        .normalize()
    )
    return f"{value:f}" if -6 < value.adjusted() < 16 else f"{value:e}"
