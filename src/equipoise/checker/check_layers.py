"""More operations for `check.py`: convolutions and their adjoints, residual blocks, constants, activations, pooling.

This file belongs beside `check.py` and follows its rules; `python check.py DIR` finds it there.
"""

import math

import numpy as np

if __package__:
    from equipoise.checker.check import (
        MAX_ENTRIES,
        OPERATIONS,
        REARRANGEMENTS,
        SLACK,
        TINY,
        Step,
        add_bias,
        broadcast,
        check_gram,
        check_matrix,
        gamma,
        integer,
        integers,
        norm,
        number,
        require,
    )
else:
    from check import (
        MAX_ENTRIES,
        OPERATIONS,
        REARRANGEMENTS,
        SLACK,
        TINY,
        Step,
        add_bias,
        broadcast,
        check_gram,
        check_matrix,
        gamma,
        integer,
        integers,
        norm,
        number,
        require,
    )


class Layer:
    """A dense layer, or a convolution of images of a given size; a dense layer is one without spatial dimensions.

    `scale` bounds the norm of the layer with all weights made positive, by the sum of the Frobenius norms of its taps.
    """

    def __init__(self, weight, geometry, size):
        dims = len(size)
        require(weight.ndim == dims + 2, "weight and image have different dimensions")
        self.size = integers(list(size), dims, 1, MAX_ENTRIES)
        self.groups = integer(geometry.get("groups", 1), 1, 4096)
        self.stride = integers(geometry.get("stride", [1] * dims), dims)
        self.dilation = integers(geometry.get("dilation", [1] * dims), dims)
        self.padding = integers(geometry.get("padding", [0] * dims), dims, 0)
        self.circular = geometry.get("mode", "zeros") == "circular"

        self.kernel = weight.shape[2:]
        self.reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel)]
        self.padded = [n + 2 * p for n, p in zip(size, self.padding)]
        self.positions = []
        for n, reach, stride in zip(self.padded, self.reach, self.stride):
            require(n > reach, "a kernel is larger than its image")
            self.positions.append((n - reach - 1) // stride + 1)
        if self.circular:
            # otherwise outputs would be repeated, or the convolution would not be circulant
            require(all(2 * p <= r for p, r in zip(self.padding, self.reach)), "circular padding is too wide")
            require(all(n % s == 0 for n, s in zip(size, self.stride)), "a circular stride does not divide the image")

        # groups first: (groups, outputs, inputs, taps…)
        self.weight = weight.reshape(self.groups, -1, *weight.shape[1:])
        outputs, inputs = self.weight.shape[1:3]
        self.channels = self.groups * inputs
        flat = weight.reshape(*weight.shape[:2], -1)
        self.taps = np.sqrt(np.sum(flat * flat, axis=(0, 1)))
        self.scale = float(self.taps.sum()) * SLACK
        self.fan = max(outputs, inputs) * len(self.taps) + 2

    def parts(self, image, tap):
        """The entries of a padded image that meet a tap, one for every output; the batch is the last axis."""
        slices = [slice(None)]
        for t, d, s, n in zip(tap, self.dilation, self.stride, self.positions):
            slices.append(slice(t * d, t * d + s * (n - 1) + 1, s))
        return image[tuple(slices)]

    def pad(self, x, **mode):
        """Padded images, the batch as the last axis."""
        require(x.shape[1] == self.channels, "a layer takes another number of channels")
        require(math.prod(self.padded) * self.channels * len(x) <= MAX_ENTRIES, "a padded image is too large")
        widths = [(0, 0), *[(p, p) for p in self.padding], (0, 0)]
        return np.pad(np.moveaxis(x, 0, -1), widths, **mode)

    def apply(self, x, weight):
        """The layer with this weight, its own or that in absolute values, without bias."""
        outputs = self.groups * weight.shape[1]
        require(math.prod(self.positions) * outputs * len(x) <= MAX_ENTRIES, "the outputs of a layer are too large")
        image = self.pad(x, mode="wrap" if self.circular else "constant")
        result = 0.0
        for tap in np.ndindex(*self.kernel):
            columns = self.parts(image, tap).reshape(self.groups, weight.shape[2], -1)
            result = result + weight[(..., *tap)] @ columns
        return np.moveaxis(result.reshape(-1, *self.positions, len(x)), -1, 0)

    def adjoint(self, y):
        """The adjoint of the layer: every tap adds to the entries that it read."""
        require(not self.circular, "the adjoint of a circular convolution is not supported")
        require(math.prod(self.padded) * self.channels * len(y) <= MAX_ENTRIES, "an image is too large")
        require(y.shape[1] == len(self.weight) * self.weight.shape[1], "a layer takes another number of channels")
        columns = np.moveaxis(y, 0, -1).reshape(self.groups, self.weight.shape[1], -1)
        image = np.zeros((self.channels, *self.padded, len(y)))
        for tap in np.ndindex(*self.kernel):
            part = self.parts(image, tap)
            part += (self.weight[(..., *tap)].transpose(0, 2, 1) @ columns).reshape(part.shape)
        inside = [slice(p, p + n) for p, n in zip(self.padding, self.size)]
        return np.moveaxis(image[(slice(None), *inside)], -1, 0)

    def check(self, s):
        """Prove that the norm is at most s, group by group."""
        for weight in self.weight:
            if self.size:
                check_convolution(self, weight, s)
            else:
                check_matrix(weight, s)


def check_convolution(layer, kernel, s):
    """Prove that a convolution has a spectral norm of at most s.

    With zero padding p on n pixels it is a part of the circular convolution on N ≥ n + 2p pixels, in which no window wraps. That
    one is block diagonal in the Fourier basis, with blocks `M(ω) = Σ_t K_t exp(iω·t)`. A stride q averages `M(ω)M(ω)*` over the
    frequencies `ω + 2πj/q`, which it cannot tell apart; s² must bound all these averages.

    Large images are covered by a coarser grid: `u*M(ω)M(ω)*u` is a trigonometric polynomial of some degree d, and exceeds its
    maximum over n > 2d points at most by the factor `1/cos(πd/n)` in each dimension (Ehlich and Zeller 1964).
    """
    grid = []
    for n, padded, stride, reach in zip(layer.size, layer.padded, layer.stride, layer.reach):
        points = n // stride if layer.circular else -(-padded // stride)
        degree = reach // stride
        coarse = 32 * degree + 1
        if points > max(coarse, 64):
            points = coarse
            s = s * math.sqrt(math.cos(math.pi * degree / coarse)) / SLACK
        grid.append(points)
    aliases = math.prod(layer.stride)
    require(math.prod(grid) * aliases <= 2**22 and aliases <= 2**12, "a convolution needs too many frequencies")

    # without a stride, `MM*` may be replaced by the smaller `M*M`
    flat = kernel.reshape(*kernel.shape[:2], -1)
    if aliases == 1 and flat.shape[0] > flat.shape[1]:
        flat = flat.transpose(1, 0, 2)
    require(len(flat) ** 2 <= MAX_ENTRIES, "a convolution has too many channels")
    total = float(layer.taps.sum())
    error = 2 * gamma(8 * (flat.shape[1] + flat.shape[2]) + aliases + 400) * total * total + TINY

    offsets = np.indices(layer.kernel).reshape(len(grid), -1)
    frequencies = np.indices(grid).reshape(len(grid), -1)
    chunk = min(4096, max(1, 2**22 // (len(flat) * max(flat.shape[:2]))))
    for start in range(0, frequencies.shape[1], chunk):
        gram = 0.0
        for alias in np.ndindex(*layer.stride):
            turns = 0.0
            for axis, stride in enumerate(layer.stride):
                n = grid[axis] * stride
                frequency = frequencies[axis, start : start + chunk] + alias[axis] * grid[axis]
                turns = turns + np.outer(offsets[axis] * layer.dilation[axis], frequency) % n / n
            symbol = np.moveaxis(flat @ np.exp(2j * np.pi * turns), -1, 0)
            gram = gram + symbol @ symbol.conj().transpose(0, 2, 1)
        check_gram(gram / aliases, error, s)


def layer_of(network, node, size):
    """The layer of a node on images of this size; its claimed norm is proved the first time."""
    if node["name"] not in network.proved:
        layer = Layer(network.tensor(node, "weight"), node["attributes"], size)
        layer.check(number(node["upper"]))
        network.largest = max(network.largest, layer.fan * math.prod(layer.padded))
        network.proved[node["name"]] = layer
    layer = network.proved[node["name"]]
    require(layer.size == list(size), f"{node['name']}: images of two sizes")
    return layer


def convolution(network, node, x):
    """A convolution, `Wx + b`."""
    layer = layer_of(network, node, x.shape[2:])
    size = layer.scale * norm(x)
    if network.units[1, 0]:
        # entry by entry: sharper, at the price of a second convolution
        size = norm(layer.apply(np.abs(x), np.abs(layer.weight)))
    step = Step(layer.apply(x, layer.weight), node["upper"], layer.fan, size, layer.scale)
    return add_bias(network, node, step)


def transposed(network, node, x):
    """A transposed convolution: the adjoint of one of images of a given size."""
    layer = layer_of(network, node, node["attributes"]["size"])
    require(list(x.shape[2:]) == layer.positions, "a transposed convolution of images of another size")
    step = Step(layer.adjoint(x), node["upper"], layer.fan, layer.scale * norm(x), layer.scale)
    return add_bias(network, node, step)


def residual(network, node, x):
    """The block `x − h·Wᵀrelu(Wx + b)`.

    Its Jacobian is `I − h·WᵀDW` with D diagonal, entries in [0, 1]: its norm is at most `max(1, h‖W‖² − 1)`.
    """
    layer = layer_of(network, node, x.shape[2:])
    s = node["upper"]
    h = number(node["attributes"]["h"], 1e-6, 1e6)
    require(h * s < 1e9, "the norm of a residual block is too large")
    inner = Step(layer.apply(x, layer.weight), s, layer.fan, layer.scale * norm(x), layer.scale)
    inner = add_bias(network, node, inner)
    hidden = np.maximum(inner.y, 0)
    back = layer.adjoint(hidden)
    require(back.shape == x.shape, "a residual block that changes the shape")

    # rounding of Wx + b is below 1 % of its terms, and carried by h·Wᵀ; that of Wᵀ and of the difference is added
    returned = layer.scale * (norm(hidden) + 0.01 * inner.size) + norm(back)
    size = norm(x) + (1 + h * s) * inner.size + h * returned
    reach = 1 + layer.scale + 4 * h * max(layer.scale, s) ** 2
    return Step(x - h * back, max(1.0, h * s * s * SLACK - 1), 2 * layer.fan + 8, size * SLACK, reach * SLACK)


def shift(network, node, x):
    """A constant is added."""
    y = x + broadcast(network.tensor(node, "value"), x)
    return Step(y, 1.0, 2, norm(y), 1.0)


def scale(network, node, x):
    """Multiplication or division by a constant."""
    value = broadcast(network.tensor(node, "value"), x)
    if node["attributes"].get("inverse"):
        require(np.abs(value).min() > 1e-30, "a divisor is too small")
        y = x / value
        factor = 1 / float(np.abs(value).min())
    else:
        y = x * value
        factor = float(np.abs(value).max())
    return Step(y, factor * SLACK, 2, norm(y), factor * SLACK)


def leaky_relu(network, node, x):
    """Negative numbers are multiplied by a slope."""
    slope = number(node["attributes"]["slope"], -1e100)
    y = np.where(x > 0, x, slope * x)
    factor = max(1.0, abs(slope))
    return Step(y, factor, 2, norm(y), factor)


def householder(network, node, x):
    """`z − 2·min(vᵀz, 0)·v` on pairs of channels: the Jacobian is I or `I − 2vvᵀ`, of norm at most `max(1, 2‖v‖² − 1)`."""
    a, b = np.split(x, 2, axis=integer(node["attributes"]["axis"]))
    v = broadcast(network.tensor(node, "first"), a)
    w = broadcast(network.tensor(node, "second"), a)
    t = 2 * np.minimum(v * a + w * b, 0)
    y = np.concatenate([a - t * v, b - t * w], axis=node["attributes"]["axis"])
    square = float((v * v + w * w).max()) * SLACK
    require(square < 1e6, "the vector of a reflection is too long")
    return Step(y, max(1.0, 2 * square - 1), 8, (1 + 4 * square) * norm(x), 1 + 4 * square)


#: name → function, its Lipschitz constant; computed to within 32 units in the last place
CURVES = {
    "tanh": (np.tanh, 1.0),
    "sigmoid": (lambda x: 0.5 + 0.5 * np.tanh(0.5 * x), 0.25),
    "softplus": (lambda x: np.logaddexp(0, x), 1.0),
}


def curve(network, node, x):
    """A smooth activation."""
    function, factor = CURVES[node["attributes"]["kind"]]
    y = function(x)
    return Step(y, factor, 32, norm(y) + norm(x) + norm(np.ones_like(y)), 2.0)


def pool(network, node, x):
    """Average or max pooling: every entry lies in at most `∏ ⌈k/s⌉` windows of `∏ k` entries."""
    a = node["attributes"]
    kernel = integers(a["kernel"], x.ndim - 2)
    require(math.prod(kernel) <= 2**16, "a window is too large")
    require(set(a) == {"kernel", "stride", "padding"}, "pooling has a kernel, a stride and a padding only")
    # one channel of ones in each group: only its geometry is used
    layer = Layer(np.ones((x.shape[1], 1, *kernel)), {**a, "groups": x.shape[1]}, x.shape[2:])
    largest = node["op"] == "max_pool"
    image = layer.pad(x, constant_values=-np.inf if largest else 0)
    parts = [layer.parts(image, tap) for tap in np.ndindex(*kernel)]
    overlap = math.prod(-(-k // s) for k, s in zip(kernel, layer.stride))
    if largest:
        return Step(np.moveaxis(np.maximum.reduce(parts), -1, 0), math.sqrt(overlap) * SLACK)
    count = len(parts)
    factor = math.sqrt(overlap / count) * SLACK
    return Step(np.moveaxis(sum(parts) / count, -1, 0), factor, count + 2, factor * norm(x), factor)


def clamp(network, node, x):
    """Entries are limited to an interval, whose ends may be rounded."""
    low = number(node["attributes"]["low"], -1e100)
    y = np.clip(x, low, number(node["attributes"]["high"], low))
    return Step(y, 1.0, 2, norm(y), 1.0)


def gather(network, node, x):
    """Entries are moved, left out or repeated: y[i] = x[index[i]], or 0 where the index is −1."""
    index = network.tensors[node["weights"]["index"]]
    require(index.dtype == np.int64 and index.size <= MAX_ENTRIES // len(x), "expected places, as whole numbers")
    repeated = np.bincount(index.ravel() + 1)[1:].max()
    flat = np.concatenate([x.reshape(len(x), -1), np.zeros((len(x), 1))], axis=1)
    return Step(flat[:, index], math.sqrt(repeated) * SLACK)


OPERATIONS |= {
    "convolution": convolution,
    "transposed": transposed,
    "residual": residual,
    "clamp": clamp,
    "gather": gather,
    "shift": shift,
    "scale": scale,
    "leaky_relu": leaky_relu,
    "householder": householder,
    "curve": curve,
    "average_pool": pool,
    "max_pool": pool,
}


def absolute(x, a):
    """Absolute values of the first channels."""
    x = x.copy()
    part = np.moveaxis(x, a["axis"], 0)[: integer(a["count"])]
    np.abs(part, out=part)
    return x


def maxmin(x, a):
    """Maxima and minima of the two halves of the channels."""
    first, second = np.split(x, 2, axis=a["axis"])
    return np.concatenate([np.maximum(first, second), np.minimum(first, second)], axis=a["axis"])


REARRANGEMENTS |= {
    "abs": absolute,
    "maxmin": maxmin,
    "sort": lambda x, a: np.sort(x, axis=a["axis"]),
}
