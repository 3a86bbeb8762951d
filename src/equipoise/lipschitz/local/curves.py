"""Pointwise activations on an interval: lines below and above, and the range of their secant slopes.

Everything here is entrywise on flat float64 vectors and rounded outward. A hinge (ReLU, leaky ReLU, PReLU, |z|) is
handled exactly: a line bounds a convex function if it does so at both ends, and its secant slopes grow with either end.
Any other curve is sampled: between two sample points h apart `g = φ − αz` lies above its smaller end less
`min(κh²/8, h/2·max|slope of g|)`, with κ a bound of |φ''| where one is known.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: sample points per interval
POINTS = 49
_U = 2.0**-53
#: relative error granted to PyTorch's float64 activations
_EVALUATION = 2.0**-44


@dataclass(frozen=True)
class Lines:
    """`lower·z + below ≤ φ(z) ≤ upper·z + above` on the interval, entry by entry, as real numbers."""

    lower: Tensor
    below: Tensor
    upper: Tensor
    above: Tensor

    def range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of φ on `[low, high]` that the lines imply, rounded outward.

        Args:
            low: left end of every interval, within the one that the lines were made for.
            high: right end of every interval.
        """
        size = torch.maximum(low.abs(), high.abs())
        least = torch.minimum(self.lower * low, self.lower * high) + self.below
        most = torch.maximum(self.upper * low, self.upper * high) + self.above
        return (
            least - 8 * _U * (self.lower.abs() * size + self.below.abs()),
            most + 8 * _U * (self.upper.abs() * size + self.above.abs()),
        )


@dataclass(frozen=True)
class Hinge:
    """`φ(z) = left·z` below 0 and `right·z` above, `left ≤ right` (numbers, or tensors of the size of z): convex.

    >>> relu = Hinge(torch.zeros(1), torch.ones(1))
    >>> relu.lines(torch.tensor([-1.0]), torch.tensor([3.0])).upper.tolist()
    [0.75]
    """

    left: Tensor
    right: Tensor

    @property
    def slopes(self) -> tuple[float, float]:
        """The least and the largest slope."""
        return float(self.left.min()), float(self.right.max())

    def value(self, z: Tensor) -> Tensor:
        """φ(z)."""
        return torch.where(z > 0, self.right * z, self.left * z)

    def noise(self, z: Tensor) -> Tensor:
        """One rounding."""
        return 2 * _U * self.value(z).abs() + 1e-300

    def lines(self, low: Tensor, high: Tensor) -> Lines:
        """The chord above; below, the steeper side where it reaches further, else the flatter one (both pass 0).

        Args:
            low: left end of every interval.
            high: right end of every interval.
        """
        left, right = self.left.expand_as(low), self.right.expand_as(low)
        open_ = (low < 0) & (high > 0)
        side = torch.where(high > -low, right, left)
        upper = torch.where(
            open_, (right * high - left * low) / (high - low).clamp_min(1e-300), side
        )
        upper = torch.minimum(torch.maximum(upper, left), right)
        above = (
            torch.maximum((left - upper) * low, (right - upper) * high).clamp_min(0) * (1 + 8 * _U)
            + 1e-300
        )
        zero = torch.zeros_like(low)
        return Lines(side, zero, upper, torch.where(open_, above, zero))

    def secants(
        self, near: tuple[Tensor, Tensor], low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Convexity: the least slope is that between the left ends, the largest that between the right ends.

        Args:
            near: both ends of an interval that one of the two points lies in.
            low: left end of the interval that the other point lies in.
            high: right end of that interval.
        """
        left, right = self.left.expand_as(low), self.right.expand_as(low)
        first, last = torch.maximum(near[0], low), torch.minimum(near[1], high)
        ratio = (first / (first - low).clamp_min(1e-300)).clamp(0, 1)
        share = torch.where(low >= 0, 1.0, torch.where(first > 0, ratio, 0.0))
        least = left + share * (right - left)
        ratio = (-last / (high - last).clamp_min(1e-300)).clamp(0, 1)
        share = torch.where(high <= 0, 1.0, torch.where(last < 0, ratio, 0.0))
        most = right - share * (right - left)
        slack = 8 * _U * (left.abs() + right.abs())
        least, most = torch.maximum(least - slack, left), torch.minimum(most + slack, right)
        least, most = torch.where(low >= 0, right, least), torch.where(low >= 0, right, most)
        return torch.where(high <= 0, left, least), torch.where(high <= 0, left, most)


@dataclass(frozen=True)
class Sampled:
    """Any activation with slopes in `slopes` everywhere and `|φ''| ≤ curvature` (infinite where there are kinks)."""

    function: Callable[[Tensor], Tensor]
    slopes: tuple[float, float]
    curvature: float

    def value(self, z: Tensor) -> Tensor:
        """φ(z)."""
        return self.function(z)

    def noise(self, z: Tensor) -> Tensor:
        """Rounding of the implementation."""
        return _EVALUATION * (self.function(z).abs() + z.abs()) + 1e-300

    def _grid(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Sample points from `low` to `high`, and an upper bound of the distance of neighbours."""
        share = torch.linspace(0, 1, POINTS, dtype=torch.float64)[:, None]
        points = low + share * (high - low)
        points[-1] = high
        return points, (high - low) / (POINTS - 1) * (1 + 1e-9) + 4 * _U * (low.abs() + high.abs())

    def _slopes(self, z: Tensor) -> Tensor:
        at = z.detach().clone().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self.function(at).sum(), at)
        return found

    def lines(self, low: Tensor, high: Tensor) -> Lines:
        """Of a few slopes (the chord, the tangents at both ends and the middle) the one that is best in the middle.

        Args:
            low: left end of every interval.
            high: right end of every interval.
        """
        points, h = self._grid(low, high)
        values, tangents = self.function(points), self._slopes(points[:: POINTS // 2])
        chord = (values[-1] - values[0]) / (high - low).clamp_min(1e-300)
        chord = torch.where(high > low, chord, tangents[1])
        slopes = torch.stack([chord, *tangents]).clamp(*self.slopes)
        least, most = self._derivatives(points, h)
        bend = torch.maximum((least - slopes).abs(), (most - slopes).abs()) * h / 2
        if self.curvature < torch.inf:
            bend = torch.minimum(bend, self.curvature * h.square() / 8)
        noise = _EVALUATION * (values.abs() + points.abs()).amax(0) + 1e-300
        slack = bend * (1 + 1e-9) + noise + 8 * _U * slopes.abs() * points.abs().amax(0)

        rest = values - slopes[:, None] * points
        below, above = rest.amin(1) - slack, rest.amax(1) + slack
        middle = slopes * (low + high) / 2
        lower = (middle + below).argmax(0, keepdim=True)
        upper = (middle + above).argmin(0, keepdim=True)
        chosen = ((slopes, lower), (below, lower), (slopes, upper), (above, upper))
        return Lines(*(values.gather(0, index)[0] for values, index in chosen))

    def _derivatives(self, points: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Range of φ' between the first and the last point."""
        low, high = (torch.full_like(h, s) for s in self.slopes)
        if self.curvature == torch.inf:
            return low, high
        tangents = self._slopes(points)
        slack = self.curvature * h / 2 * (1 + 1e-9) + 1e-9
        return torch.maximum(low, tangents.amin(0) - slack), torch.minimum(
            high, tangents.amax(0) + slack
        )

    def secants(
        self, near: tuple[Tensor, Tensor], low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The range of the derivative: a secant slope is a mean of derivatives.

        Args:
            near: not used: both points may lie anywhere in `[low, high]`.
            low: left end of every interval.
            high: right end of every interval.
        """
        points, h = self._grid(low, high)
        return self._derivatives(points, h)


#: a pointwise activation: bounds of its slopes everywhere, its value with the rounding, lines on an interval, and least and
#: largest `(φ(a) − φ(b))/(a − b)` over a in an inner interval and b in an outer one
Curve = Hinge | Sampled
