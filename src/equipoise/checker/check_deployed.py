"""Networks that are executed in float32, for `check.py`: sums in any order, at every float32 input within the radius.

This file belongs beside `check.py` and follows its rules; `python check.py DIR` finds it there. A forward pass in float32
computes, at an input within the largest claimed radius, values whose distance e to the exact ones there obeys

    e' = factor·e + γ·size',   size' = size + reach·(constant·radius + e)

with `γ = gamma(terms)` for the unit `2⁻²⁴`, and `size` the size of the terms at the certified input itself. Numbers below
2⁻¹²⁶ may be replaced by 0. Not covered: products in reduced precision, and functions like tanh that are wrong by more than
some units in the last place.
"""

import numpy as np

if __package__:
    from equipoise.checker.check import *
else:
    from check import *

FLOAT32 = 2.0**-24

#: what an operation may lose by underflow, and the part of a value that is lost when tiny weights become 0
UNDERFLOW = 2.0**-70


class Deployed(Network):
    """A network whose norms are proved, executed in float32 at inputs within a radius; `error` includes its rounding."""

    underflow = UNDERFLOW

    def __init__(self, network, radius):
        self.__dict__.update(network.__dict__)
        self.radius = radius
        for tensor in self.tensors.values():
            require(tensor.dtype != np.float64, "a network in float32 has weights in float32")

    def size(self, layer, x):
        """The norm of `|W||x|`, entry by entry: sharper, at the price of a second convolution."""
        return norm(layer.apply(np.abs(x), np.abs(layer.weight)))

    def bound(self, step, inputs):
        """The bounds of the real network, and what float32 adds."""
        # how far the values of a deployed network may be from those that were computed here
        drift = sum(value.constant * self.radius + value.error for value in inputs)
        size = step.size + step.reach * drift
        # the factor of a division by a tiny number is large
        require((size < 1e30).all() and step.factor < 1e30, "float32 may overflow")
        lost = UNDERFLOW * (1 + drift + sum(norm(value.x) for value in inputs))
        rounding = gamma(step.terms, FLOAT32) * size * SLACK + lost
        value = super().bound(step, inputs)
        return value._replace(error=value.error + rounding)


def check_deployed(network, inputs, claim):
    """Prove the claimed radii of the network as it is executed in float32."""
    radius = read_inputs(network, inputs, claim)[2].max()
    sentences = check_radii(Deployed(network, radius), inputs, claim)
    return [f"{sentence}, executed in float32" for sentence in sentences]


CLAIMS["deployed"] = check_deployed
