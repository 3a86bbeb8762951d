"""More operations for `check.py`: residual blocks, transposed convolutions, pooling, other activations.

This file belongs beside `check.py` and follows its rules; `python check.py DIR` finds it there.
"""

import math

import numpy as np

if __package__:
    from equipoise.checker.check import *
else:
    from check import *


# --- linear layers -----------------------------------------------------------------------------------------------------


class Circular(Layer):
    """A convolution with circular padding: its period is the image."""

    mode = "wrap"

    def __init__(self, weight, geometry, size):
        super().__init__(weight, geometry, size)
        self.period = self.positions * self.stride
        same = (self.period == size).all() and (self.padding <= size).all()
        require(same, "a circular convolution that changes the size, or winds around it twice")


def circular(network, node, x):
    """A convolution with circular padding, `Wx + b`."""
    return linear(network, node, x, Circular)


def adjoint(layer, y):
    """The adjoint of a layer: every tap adds to the entries that it reads."""
    groups, outputs, inputs = layer.weight.shape[:3]
    require(y.shape[:-1] == (groups * outputs, *layer.positions), "an adjoint of another size")

    columns = y.reshape(groups, outputs, -1)
    image = np.zeros((groups * inputs, *layer.padded, y.shape[-1]))
    for tap in np.ndindex(*layer.taps):
        part = layer.part(image, tap)
        weight = layer.weight[(..., *tap)].transpose(0, 2, 1)
        part += (weight @ columns).reshape(part.shape)

    inside = [slice(p, n - p) for p, n in zip(layer.padding, layer.padded)]
    return image[(slice(None), *inside)]


def backward_fan(layer):
    """The number of terms of a sum of the adjoint."""
    return layer.weight[0, :, 0].size + 2


def transposed(network, node, x):
    """A transposed convolution, `Wᵀx + b`, with W a convolution of images of the size of the result."""
    layer = network.layer(node, tuple(integers(node["size"])))
    y = adjoint(layer, x)
    bias = network.repeated(node, "bias", y)
    size = layer.scale * norm(x) + norm(bias)
    return Step(y + bias, node["upper"], backward_fan(layer), size, layer.scale)


def residual(network, node, x):
    """The block `x − h·Wᵀrelu(Wx + b)`.

    Its Jacobian is `I − h·WᵀDW` with D diagonal, entries in [0, 1]: its norm is at most `max(1, h‖W‖² − 1)`.
    """
    layer = network.layer(node, x.shape[1:-1])
    s = node["upper"]
    h = number(node["h"], 1e-6, 1e6)
    require(h * s < 1e6, "the norm of a residual block is too large")

    y = layer.apply(x, layer.weight)
    bias = network.repeated(node, "bias", y)
    hidden = np.maximum(y + bias, 0)
    back = adjoint(layer, hidden)

    # rounding of Wx + b is below 1 % of its terms, and carried by h·Wᵀ; that of Wᵀ and of the difference is added
    inner = layer.scale * norm(x) + norm(bias)
    returned = layer.scale * (norm(hidden) + 0.01 * inner) + norm(back)
    size = norm(x) + (1 + h * s) * inner + h * returned
    reach = 1 + layer.scale + 4 * h * max(layer.scale, s) ** 2
    factor = max(1.0, h * s * s * SLACK - 1)
    terms = layer.fan + backward_fan(layer) + 8
    return Step(x - h * back, factor, terms, size * SLACK, reach * SLACK)


def pool(network, node, x):
    """Average or max pooling: every entry lies in at most `∏ ⌈k/q⌉` windows of `∏ k` entries, q the stride."""
    kernel = integers(node["kernel"])
    count = math.prod(kernel.tolist())
    require(count * len(x) <= 2**24, "a window is too large")
    largest = node["op"] == "max_pool"

    # a window of ones for each channel: its geometry is used
    layer = Layer(np.ones((len(x), 1, *kernel)), {**node, "groups": len(x)}, x.shape[1:-1])
    if network.constant is None:
        network.pay(layer.entries, layer.cost, count)
    require((2 * layer.padding <= kernel).all(), "a window that holds nothing but padding")
    widths = [(0, 0), *zip(layer.padding, layer.padding), (0, 0)]
    image = np.pad(x, widths, constant_values=-np.inf if largest else 0)
    y = -np.inf if largest else 0.0
    for tap in np.ndindex(*kernel):
        part = layer.part(image, tap)
        y = np.maximum(y, part) if largest else y + part

    overlap = np.prod(-(-kernel // layer.stride))
    if largest:
        return Step(y, math.sqrt(overlap) * SLACK)
    factor = math.sqrt(overlap / count) * SLACK
    return Step(y / count, factor, count + 2, factor * norm(x), factor)


def concatenate(network, node, *parts):
    """The channels of several values, one after the other: squares of distances add up."""
    require(0 < len(parts) <= 64, "expected some values, not too many")
    return Step(np.concatenate(parts), 1.0, total=np.linalg.norm)


def pad(network, node, x):
    """Zeros are added around an image; `widths` counts them, first and last of every axis but that of the samples."""
    widths = integers(node["widths"], 0).reshape(x.ndim - 1, 2)
    sizes = widths.sum(axis=1) + x.shape[:-1]
    require(math.prod(sizes.tolist()) <= MAX_ENTRIES, "a padded value is too large")
    return Step(np.pad(x, [*widths, (0, 0)]), 1.0)


# --- activations -------------------------------------------------------------------------------------------------------


def leaky_relu(network, node, x):
    """Negative numbers are multiplied by a slope."""
    slope = number(node["negative_slope"], -1e100)
    y = np.where(x > 0, x, slope * x)
    factor = max(1.0, abs(slope))
    return Step(y, factor, 2, norm(y), factor)


def clamp(network, node, x):
    """Numbers outside of an interval become its ends."""
    low = number(node["min"], -1e100)
    y = np.clip(x, low, number(node["max"], low))
    return Step(y, 1.0, 2, norm(y), 1.0)


def smooth(network, node, x):
    """Tanh, the sigmoid function, SiLU, `x/(1 + exp(−x))`, whose slope is below 1.0999, and softplus, `log(1 + exp(βx))/β`."""
    factor = 1.0
    if node["op"] == "tanh":
        y = np.tanh(x)
    elif node["op"] == "sigmoid":
        y = 1 / (1 + np.exp(-x))
        factor = 0.25
    elif node["op"] == "silu":
        y = x / (1 + np.exp(-x))
        factor = 1.1
    else:
        # above a threshold, PyTorch takes x itself: less than 1e-8/β away from 20 on
        number(node.get("threshold", 20), 20)
        beta = number(node["beta"], 1e-6, 1e6)
        y = np.logaddexp(0, beta * x) / beta
    return Step(y, factor, 64, norm(x) + norm(y), 1 + factor)


def sort(network, node, x):
    """Entries are sorted along a dimension, counted from the batch: no distance grows."""
    axis = integer(node["dim"], 1, x.ndim - 1) - 1
    y = np.sort(x, axis)
    return Step(np.flip(y, axis) if number(node["descending"], 0, 1, (bool,)) else y, 1.0)


def householder(network, node, x):
    """Pairs z of channels, first half and second half, become `z − 2·min(v·z, 0)·v/(v·v)`: they stay or are reflected."""
    v = network.tensor(node, "value")[..., None]
    require(v.shape == (2, len(x) / 2, 1), "expected a vector for each pair of channels")
    z = x.reshape(2, len(x) // 2, -1)
    square = (v * v).sum(axis=0)
    require(((square > 0.5) & (square < 2)).all(), "expected unit vectors")
    y = z - 2 * np.minimum((v * z).sum(axis=0), 0) * v / square
    return Step(y.reshape(x.shape), 1.0, 32, norm(x), 1.0)


WINDOW = "kernel stride padding", ""

OPERATIONS |= {
    "circular": (circular, *LAYER),
    "transposed": (transposed, "size " + LAYER[0], LAYER[1]),
    "residual": (residual, "h " + LAYER[0], LAYER[1]),
    "average_pool": (pool, *WINDOW),
    "max_pool": (pool, *WINDOW),
    "concatenate": (concatenate, "", ""),
    "pad": (pad, "widths", ""),
    "leaky_relu": (leaky_relu, "negative_slope", ""),
    "clamp": (clamp, "min max", ""),
    "tanh": (smooth, "", ""),
    "sigmoid": (smooth, "", ""),
    "silu": (smooth, "", ""),
    "softplus": (smooth, "beta threshold", ""),
    "sort": (sort, "dim descending", ""),
    "householder": (householder, "", "value"),
}
