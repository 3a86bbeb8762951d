"""More operations for `check.py`: convolutions, residual blocks, constants, pooling, other activations.

This file belongs beside `check.py` and follows its rules; `python check.py DIR` finds it there.
"""

import math

import numpy as np

if __package__:
    from equipoise.checker.check import (
        MAX_ENTRIES,
        OPERATIONS,
        SLACK,
        TINY,
        Step,
        add_bias,
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
        SLACK,
        TINY,
        Step,
        add_bias,
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
        self.size = list(size)
        self.groups = integer(geometry.get("groups", 1), 1, 4096)
        self.stride = integers(geometry.get("stride", [1] * dims), dims)
        self.dilation = integers(geometry.get("dilation", [1] * dims), dims)
        self.padding = integers(geometry.get("padding", [0] * dims), dims, 0)

        self.kernel = weight.shape[2:]
        self.reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel)]
        self.padded = [n + 2 * p for n, p in zip(size, self.padding)]
        self.positions = []
        for n, reach, stride in zip(self.padded, self.reach, self.stride):
            require(n > reach, "a kernel is larger than its image")
            self.positions.append((n - reach - 1) // stride + 1)

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

    def pad(self, x, value):
        """Padded images, the batch as the last axis."""
        require(x.shape[1] == self.channels, "a layer takes another number of channels")
        require(
            math.prod(self.padded) * self.channels * len(x) <= MAX_ENTRIES,
            "a padded image is too large",
        )
        widths = [(0, 0), *[(p, p) for p in self.padding], (0, 0)]
        return np.pad(np.moveaxis(x, 0, -1), widths, constant_values=value)

    def apply(self, x, weight):
        """The layer with this weight, its own or that in absolute values, without bias."""
        outputs = self.groups * weight.shape[1]
        require(
            math.prod(self.positions) * outputs * len(x) <= MAX_ENTRIES,
            "the outputs of a layer are too large",
        )
        image = self.pad(x, 0)
        result = 0.0
        for tap in np.ndindex(*self.kernel):
            columns = self.parts(image, tap).reshape(self.groups, weight.shape[2], -1)
            result = result + weight[(..., *tap)] @ columns
        return np.moveaxis(result.reshape(-1, *self.positions, len(x)), -1, 0)

    def adjoint(self, y):
        """The adjoint of the layer: every tap adds to the entries that it read."""
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
    for padded, stride, reach in zip(layer.padded, layer.stride, layer.reach):
        points = -(-padded // stride)
        degree = reach // stride
        coarse = 32 * degree + 1
        if points > max(coarse, 64):
            points = coarse
            s = s * math.sqrt(math.cos(math.pi * degree / coarse)) / SLACK
        grid.append(points)
    aliases = math.prod(layer.stride)
    require(
        math.prod(grid) * aliases <= 2**22 and aliases <= 2**12,
        "a convolution needs too many frequencies",
    )

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
        layer = Layer(network.tensor(node, "weight"), node, size)
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


def residual(network, node, x):
    """The block `x − h·Wᵀrelu(Wx + b)`.

    Its Jacobian is `I − h·WᵀDW` with D diagonal, entries in [0, 1]: its norm is at most `max(1, h‖W‖² − 1)`.
    """
    layer = layer_of(network, node, x.shape[2:])
    s = node["upper"]
    h = number(node["h"], 1e-6, 1e6)
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
    return Step(
        x - h * back,
        max(1.0, h * s * s * SLACK - 1),
        2 * layer.fan + 8,
        size * SLACK,
        reach * SLACK,
    )


def shift(network, node, x):
    """A constant is added."""
    y = x + np.broadcast_to(network.tensor(node, "value"), x.shape)
    return Step(y, 1.0, 2, norm(y), 1.0)


def scale(network, node, x):
    """Multiplication by a constant."""
    value = np.broadcast_to(network.tensor(node, "value"), x.shape)
    factor = float(np.abs(value).max()) * SLACK
    y = x * value
    return Step(y, factor, 2, norm(y), factor)


def divide(network, node, x):
    """Division by a constant."""
    value = np.broadcast_to(network.tensor(node, "value"), x.shape)
    smallest = float(np.abs(value).min())
    require(smallest > 1e-30, "a divisor is too small")
    y = x / value
    return Step(y, SLACK / smallest, 2, norm(y), SLACK / smallest)


def leaky_relu(network, node, x):
    """Negative numbers are multiplied by a slope."""
    slope = number(node["slope"], -1e100)
    y = np.where(x > 0, x, slope * x)
    factor = max(1.0, abs(slope))
    return Step(y, factor, 2, norm(y), factor)


def absolute(network, node, x):
    """Absolute values of the first channels."""
    count = integer(node["count"])
    return Step(np.concatenate([np.abs(x[:, :count]), x[:, count:]], axis=1), 1.0)


def maxmin(network, node, x):
    """Maxima and minima of the two halves of the channels."""
    first, second = np.split(x, 2, axis=1)
    return Step(np.concatenate([np.maximum(first, second), np.minimum(first, second)], axis=1), 1.0)


def pool(network, node, x):
    """Average or max pooling: every entry lies in at most `∏ ⌈k/s⌉` windows of `∏ k` entries."""
    kernel = integers(node["kernel"], x.ndim - 2)
    require(math.prod(kernel) <= 2**16, "a window is too large")
    # one channel of ones in each group: only its geometry is used
    geometry = {"groups": x.shape[1], "stride": node["stride"], "padding": node["padding"]}
    layer = Layer(np.ones((x.shape[1], 1, *kernel)), geometry, x.shape[2:])
    largest = node["op"] == "max_pool"
    image = layer.pad(x, -np.inf if largest else 0)
    parts = [layer.parts(image, tap) for tap in np.ndindex(*kernel)]
    overlap = math.prod(-(-k // s) for k, s in zip(kernel, layer.stride))
    if largest:
        return Step(np.moveaxis(np.maximum.reduce(parts), -1, 0), math.sqrt(overlap) * SLACK)
    count = len(parts)
    factor = math.sqrt(overlap / count) * SLACK
    return Step(np.moveaxis(sum(parts) / count, -1, 0), factor, count + 2, factor * norm(x), factor)


def gather(network, node, x):
    """Entries are moved, left out or repeated: y[i] = x[index[i]], or 0 where the index is −1."""
    index = network.tensors[node["weights"]["index"]]
    require(
        index.dtype == np.int64 and index.size <= MAX_ENTRIES // len(x),
        "expected places, as whole numbers",
    )
    repeated = np.bincount(index.ravel() + 1)[1:].max()
    flat = np.concatenate([x.reshape(len(x), -1), np.zeros((len(x), 1))], axis=1)
    return Step(flat[:, index], math.sqrt(repeated) * SLACK)


OPERATIONS |= {
    "convolution": convolution,
    "residual": residual,
    "shift": shift,
    "scale": scale,
    "divide": divide,
    "leaky_relu": leaky_relu,
    "abs": absolute,
    "maxmin": maxmin,
    "average_pool": pool,
    "max_pool": pool,
    "gather": gather,
}
