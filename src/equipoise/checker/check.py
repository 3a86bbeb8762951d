"""Check a certificate bundle: `python check.py DIR` prints ACCEPTED, or REJECTED and the first claim that fails.

This file needs Python 3.10 and NumPy, and nothing of equipoise or PyTorch. A bundle is a folder with

    certificate.json       the network as a list of plain operations, and the claims
    weights.safetensors    its weights
    inputs.safetensors     inputs, labels, claimed radii (if any input is certified)

The claims are about the real function of the stored weights. They are checked in float64, and every rounding error made here is
bounded and counted against the claim: `U` is half a unit in the last place, `gamma(n)` the error of a sum of n products in any
order, relative to the sum of their sizes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
"""

import argparse
import hashlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

U = 2.0**-53
#: covers underflow: far below every number that matters, since norms below 1e-100 are not accepted
TINY = 1e-250
#: covers the few roundings of a short scalar formula
SLACK = 1 + 2.0**-45
#: largest file, number of nodes, entries of an intermediate result
MAX_BYTES, MAX_NODES, MAX_ENTRIES = 2**32, 10_000, 2**28
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "I64": "<i8"}


class Rejected(Exception):
    """A claim that does not hold, or a bundle that cannot be read."""


def require(condition, reason):
    """Reject unless the condition holds; comparisons are written so that NaN fails."""
    if not condition:
        raise Rejected(reason)


def number(value, whole=False):
    """A finite number of a JSON document; texts and truth values are none."""
    require(type(value) in ((int,) if whole else (int, float)), f"expected a number, got {str(value)[:40]!r}")
    require(abs(value) < math.inf, "expected a finite number")
    return value


def gamma(n, unit=U):
    """`n·u/(1 − n·u)`, rounded up."""
    require(n * unit < 0.01, "a sum is too long for its rounding to be bounded")
    return n * unit / (1 - n * unit) * SLACK


def read_bytes(path):
    """The content of a regular file of bounded size."""
    require(path.is_file(), f"{path.name} is missing or not a regular file")
    require(path.stat().st_size <= MAX_BYTES, f"{path.name} is too large")
    return path.read_bytes()


def read_json(text):
    """JSON in which no key occurs twice."""

    def unique(pairs):
        require(len(dict(pairs)) == len(pairs), "a key occurs twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def read_tensors(content):
    """The tensors of a safetensors file: eight bytes with the length of a JSON header, the header, raw numbers."""
    length = int.from_bytes(content[:8], "little")
    require(8 + length <= len(content), "the header of a tensor file is longer than the file")
    header = read_json(content[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = (8 + length + number(offset, True) for offset in entry["data_offsets"])
        require(8 + length <= start <= stop <= len(content), f"tensor {name} lies outside its file")
        tensor = np.frombuffer(content[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        require(np.isfinite(tensor).all(), f"tensor {name} is not finite")
        tensors[name] = tensor
    return tensors


def check_gram(gram, error, s):
    """Prove `‖A‖ ≤ s` for a batch of Gram matrices computed with an error of at most `error` in the spectral norm.

    If Cholesky's algorithm runs to its end on `tI − G`, then `tI − G + E ⪰ 0` with `‖E‖ ≤ γ·trace ≤ γ·n·t` (Rump 2006). So
    λ_max of the true Gram matrix is at most `t + γ·n·t + error`, and t is chosen such that this is at most s².
    """
    n = gram.shape[-1]
    t = s * s * (1 - n * gamma(8 * n + 64)) - error
    require(t > 0, "a norm is too small to be proved")
    try:
        np.linalg.cholesky(t * np.eye(n) - gram)
    except np.linalg.LinAlgError:
        raise Rejected(f"a spectral norm is not proved to be at most {s!r}") from None


def check_matrix(weight, s):
    """Prove that the spectral norm of a matrix is at most s, by the Gram matrix of its shorter side."""
    if weight.shape[0] > weight.shape[1]:
        weight = weight.T
    square = float(np.sum(weight * weight))
    error = 2 * gamma(weight.shape[1] + 8) * square + TINY
    check_gram(weight @ weight.T, error, s)


def polyphase(kernel, stride, dilation):
    """The kernel of stride 1 that reads the input in blocks of `stride` pixels, each block as further channels."""
    for axis, (step, spread) in enumerate(zip(stride, dilation), start=2):
        taps = spread * (kernel.shape[axis] - 1) + 1
        shape = list(kernel.shape)
        shape[axis] = -(-taps // step) * step
        wide = np.zeros(shape)
        np.moveaxis(wide, axis, 0)[:taps:spread] = np.moveaxis(kernel, axis, 0)
        shape[axis : axis + 1] = [shape[axis] // step, step]
        wide = np.moveaxis(wide.reshape(shape), axis + 1, 2)
        kernel = wide.reshape(wide.shape[0], -1, *wide.shape[3:])
    return kernel


def check_convolution(kernel, s, size, padding, stride, dilation, circular):
    """Prove that a convolution of images of this size has a spectral norm of at most s.

    With zero padding p on n pixels it is a part of the circular convolution on n + 2p pixels, in which no window wraps. That one
    is block diagonal in the Fourier basis, with the symbol `M(ω) = Σ_t K_t exp(iω·t)` as blocks: s² must bound all `M(ω)M(ω)*`.
    Large images are covered by a coarser grid: `u*M(ω)M(ω)*u` is a trigonometric polynomial of degree k − 1, and exceeds its
    maximum over N > 2(k − 1) points at most by the factor `1/cos(π(k − 1)/N)` in each dimension (Ehlich and Zeller 1964).
    """
    for k, d, p in zip(kernel.shape[2:], dilation, padding):
        require(not circular or 2 * p <= d * (k - 1), "a circular convolution that repeats its outputs")
    kernel = polyphase(kernel, stride, dilation)
    grid = []
    for n, p, step, taps in zip(size, padding, stride, kernel.shape[2:]):
        exact = n // step if circular else -(-(n + 2 * p) // step)
        require(n % step == 0 or not circular, "a circular convolution whose stride does not divide the image")
        coarse = 32 * (taps - 1) + 1
        if exact > max(coarse, 64):
            s = s * math.sqrt(math.cos(math.pi * (taps - 1) / coarse)) / SLACK
        grid.append(coarse if exact > max(coarse, 64) else exact)

    require(math.prod(grid) <= 2**22, "a convolution needs too many frequencies")
    flat = kernel.reshape(*kernel.shape[:2], -1)
    if flat.shape[0] > flat.shape[1]:
        flat = flat.transpose(1, 0, 2)
    total = float(np.sqrt(np.sum(flat * flat, axis=(0, 1))).sum())
    error = 2 * gamma(8 * (flat.shape[1] + flat.shape[2]) + 400) * total * total + TINY

    taps = np.indices(kernel.shape[2:]).reshape(len(grid), -1)
    # M(−ω) is the conjugate of M(ω): half of the first axis is enough
    frequencies = np.indices((grid[0] // 2 + 1, *grid[1:])).reshape(len(grid), -1)
    chunk = min(4096, max(1, 2**22 // flat[:, :, 0].size))
    for start in range(0, frequencies.shape[1], chunk):
        phase = 1.0
        for n, t, f in zip(grid, taps, frequencies[:, start : start + chunk]):
            phase = phase * np.exp(2j * np.pi * (np.outer(t, f) % n) / n)
        symbol = np.moveaxis(flat @ phase, -1, 0)
        check_gram(symbol @ symbol.conj().transpose(0, 2, 1), error, s)


@dataclass
class Value:
    """A batch of values of a node."""

    x: np.ndarray  # float64, the batch first
    error: np.ndarray  # for every sample, a bound of the l2 distance to the exact values
    constant: float  # a Lipschitz constant of the node as a function of the network's input


def norm(x):
    """ℓ2 norm of every sample, rounded up."""
    flat = x.reshape(len(x), -1)
    return np.sqrt(np.sum(flat * flat, axis=1)) * (1 + gamma(flat.shape[1] + 8)) + TINY


def windows(x, kernel, stride, padding, dilation, mode):
    """All windows of a padded image: (batch, channels, positions…, taps…)."""
    padded = math.prod(n + 2 * p for n, p in zip(x.shape[2:], padding))
    require(math.prod(x.shape[:2]) * padded <= MAX_ENTRIES, "a padded image is too large")
    x = np.pad(x, [(0, 0), (0, 0)] + [(p, p) for p in padding], **mode)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, x.ndim)))
    steps = [slice(None, None, step) for step in [*stride, *dilation]]
    return view[(slice(None), slice(None), *steps)]


class Linear:
    """A dense layer, a convolution, or the adjoint of one; a dense layer is a convolution without spatial dimensions.

    `scale` bounds the norm of the layer with all weights made positive, by the sum of the Frobenius norms of its taps.
    """

    def __init__(self, weight, geometry):
        d = weight.ndim - 2
        require(0 <= d <= 3 and weight.size, "weights of an impossible shape")
        self.weight, self.groups = weight, number(geometry.get("groups", 1), True)
        self.stride, self.dilation = (list(geometry.get(key, [1] * d)) for key in ("stride", "dilation"))
        self.padding = list(geometry.get("padding", [0] * d))
        require(len(self.stride) == len(self.dilation) == len(self.padding) == d, "geometry and kernel differ")
        require(all(1 <= n <= 4096 for n in [self.groups, *self.stride, *self.dilation]), "impossible geometry")
        require(all(0 <= n <= 4096 for n in self.padding), "impossible padding")
        self.circular = geometry.get("mode", "zeros") == "circular"
        taps = weight.reshape(*weight.shape[:2], -1)
        self.scale = float(np.sqrt(np.sum(taps * taps, axis=(0, 1))).sum()) * SLACK
        self.fan = max(weight.shape[:2]) * taps.shape[2] + 2

    def check(self, s, size):
        """Prove that the norm on images of this size is at most s."""
        for part in np.split(self.weight, self.groups):
            if size:
                check_convolution(part, s, size, self.padding, self.stride, self.dilation, self.circular)
            else:
                check_matrix(part, s)

    def apply(self, x):
        """The layer without its bias."""
        weight, d = self.weight, self.weight.ndim - 2
        mode = {"mode": "wrap"} if self.circular else {}
        view = windows(x, weight.shape[2:], self.stride, self.padding, self.dilation, mode)
        axes = [[1, *range(2 + d, 2 + 2 * d)], [1, *range(2, 2 + d)]]
        parts = zip(np.split(view, self.groups, axis=1), np.split(weight, self.groups))
        return np.concatenate([np.moveaxis(np.tensordot(v, w, axes), -1, 1) for v, w in parts], axis=1)

    def adjoint(self, y, size):
        """The adjoint of the layer on images of this size."""
        require(not self.circular, "the adjoint of a circular convolution is not supported")
        parts = []
        for v, w in zip(np.split(y, self.groups, axis=1), np.split(self.weight, self.groups)):
            x = np.zeros((len(y), w.shape[1], *[n + 2 * p for n, p in zip(size, self.padding)]))
            for tap in np.ndindex(*w.shape[2:]):
                ends = zip(tap, self.stride, self.dilation, y.shape[2:])
                place = [slice(t * d, t * d + s * (n - 1) + 1, s) for t, s, d, n in ends]
                x[(..., *place)] += np.moveaxis(np.tensordot(v, w[(..., *tap)], [[1], [0]]), -1, 1)
            parts.append(x[(..., *[slice(p, p + n) for n, p in zip(size, self.padding)])])
        return np.concatenate(parts, axis=1)


def rearranged(x, a):
    """Operations that move entries, or change them without rounding and without increasing a distance."""
    kind, axis = a["kind"], a.get("axis", 1)
    require(axis >= 1, "an operation across the batch")
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "abs":
        x = x.copy()
        part = np.moveaxis(x, axis, 0)[a["start"] : a["stop"]]
        np.abs(part, out=part)
        return x
    if kind == "clamp":
        return np.clip(x, a["low"], a["high"])
    if kind == "maxmin":
        first, second = np.split(x, 2, axis=axis)
        return np.concatenate([np.maximum(first, second), np.minimum(first, second)], axis=axis)
    if kind == "groupsort":
        last = np.moveaxis(x, axis, -1)
        groups = np.sort(last.reshape(*last.shape[:-1], -1, number(a["size"], True)), axis=-1)
        return np.moveaxis(groups.reshape(last.shape), -1, axis)
    if kind == "flip":
        require(min(a["axes"]) >= 1, "a flip of the batch")
        return np.flip(x, tuple(a["axes"]))
    if kind == "reshape":
        require(all(number(n, True) >= 1 for n in a["shape"]), "impossible shape")
        return x.reshape(len(x), *a["shape"])
    if kind == "permute":
        require(a["axes"][0] == 0, "a permutation that moves the batch")
        return x.transpose(a["axes"])
    raise Rejected(f"unknown operation {kind!r}")


#: name → function, its Lipschitz constant; computed by NumPy to within eight units in the last place
CURVES = {
    "tanh": (np.tanh, 1.0),
    "sigmoid": (lambda x: 0.5 + 0.5 * np.tanh(0.5 * x), 0.25),
    "softplus": (lambda x: np.logaddexp(0, x), 1.0),
}


class Network:
    """The nodes of a bundle; norms are proved when a node is evaluated for the first time."""

    def __init__(self, document, tensors):
        nodes = document["nodes"]
        require(isinstance(nodes, list) and 0 < len(nodes) <= MAX_NODES, "the network has no nodes, or too many")
        self.shape = [number(n, True) for n in document["input_shape"]]
        require(self.shape and min(self.shape) > 0 and math.prod(self.shape) <= MAX_ENTRIES, "impossible input shape")
        self.nodes, self.tensors, self.maps = nodes, tensors, {}
        self.largest = 1  # entries of the largest intermediate result of one sample
        names = [node["name"] for node in nodes]
        require(len({"input", *names}) == len(names) + 1, "a node's name occurs twice")

    def tensor(self, node, name):
        """A weight of a node in float64."""
        return self.tensors[node["weights"][name]].astype(np.float64)

    def linear_map(self, node, size):
        """The linear map of a node, its claimed norm proved for images of this size."""
        key = node["name"]
        if key not in self.maps:
            weight, s = self.tensor(node, "weight"), number(node["upper"])
            require(1e-100 < s < 1e100, f"{key}: the norm is not a number in the range of the checker")
            bias = self.tensor(node, "bias") if "bias" in node["weights"] else np.zeros(1)
            require(weight.ndim == 2 + len(size), f"{key}: weight and image differ")
            layer = Linear(weight, node.get("attributes", {}))
            layer.check(s, size)
            self.maps[key] = layer, bias, s
        return self.maps[key]

    def evaluate(self, x, error):
        """The value of the last node for a batch of inputs, each known up to an error."""
        values = {"input": Value(x, error, 1.0)}
        for node in self.nodes:
            inputs = [values[name] for name in node["inputs"]]
            require(inputs, f"{node['name']} has no input")
            values[node["name"]] = value = self.step(node, inputs)
            require(len(value.x) == len(x) and 0 < value.x.size <= MAX_ENTRIES, f"{node['name']}: impossible size")
            self.largest = max(self.largest, value.x.size // len(x))
            require(np.isfinite(value.x).all() and value.constant < math.inf, f"{node['name']}: overflow")
        return value

    def step(self, node, inputs):
        """One node: its values, the error carried through it and added by it, its constant."""
        op, a, first = node["op"], node.get("attributes", {}), inputs[0]
        x = first.x
        if op == "add":
            y = sum(v.x for v in inputs)
            error = sum(v.error + gamma(len(inputs)) * norm(v.x) for v in inputs)
            return Value(y, error, sum(v.constant for v in inputs) * SLACK)
        if op == "concatenate":
            require(a["axis"] >= 1, "a concatenation of batches")
            y = np.concatenate([v.x for v in inputs], axis=a["axis"])
            error = np.sqrt(sum(v.error**2 for v in inputs)) * SLACK
            return Value(y, error, math.sqrt(sum(v.constant**2 for v in inputs)) * SLACK)
        require(len(inputs) == 1, f"{op} takes one input")
        if op in ("linear", "adjoint", "residual"):
            y, factor, local = self.linear_step(node, x)
        elif op == "rearrange":
            y, factor, local = rearranged(x, a), 1.0, 0.0
        elif op == "shift":
            y = x + self.tensor(node, "value")
            factor, local = 1.0, U * norm(y)
        elif op == "scale":
            value = self.tensor(node, "value")
            y = x / value if a.get("inverse") else x * value
            factor = 1 / float(np.abs(value).min()) if a.get("inverse") else float(np.abs(value).max())
            local = U * norm(y)
        elif op == "leaky_relu":
            y = np.where(x > 0, x, number(a["slope"]) * x)
            factor, local = max(1.0, abs(number(a["slope"]))), U * norm(y)
        elif op == "curve":
            function, factor = CURVES[a["kind"]]
            y = function(x)
            local = 8 * U * (norm(y) + norm(np.ones_like(y)))
        elif op in ("average_pool", "max_pool"):
            y, factor, local = self.pool(op, a, x)
        else:
            raise Rejected(f"unknown operation {op!r}")
        require(y.shape[1:] == x.shape[1:] or op not in ("shift", "scale"), f"{op} changes the shape")
        return Value(y, (factor * first.error + local) * SLACK + TINY, factor * first.constant * SLACK)

    def linear_step(self, node, x):
        """A dense or convolutional layer, its adjoint, or the block `x − h·Wᵀσ(Wx + b)` with slopes of σ in [0, 1].

        The Jacobian of the block is `I − h·WᵀDW` with D in [0, 1]: its norm is at most `max(1, h‖W‖² − 1)`.
        """
        op, a = node["op"], node.get("attributes", {})
        size = a["size"] if op == "adjoint" else x.shape[2:]
        require(math.prod(size) <= MAX_ENTRIES, "an image is too large")
        layer, bias, s = self.linear_map(node, size)
        self.largest = max(self.largest, layer.fan * math.prod(size))
        unit = gamma(layer.fan) * layer.scale
        if op == "adjoint":
            y = layer.adjoint(x, size) + bias
            return y, s, unit * norm(x) + U * norm(y)
        y = layer.apply(x) + bias
        local = unit * norm(x) + U * norm(y)
        if op != "residual":
            return y, s, local
        h = number(a["h"])
        require(h > 0 and a["activation"] == "relu", "a residual block needs a positive step and ReLU")
        hidden = np.maximum(y, 0)
        back = layer.adjoint(hidden, size)
        local = h * (s * local + unit * norm(hidden)) + 4 * U * (norm(x) + h * norm(back))
        require(back.shape == x.shape, "a residual block that changes the shape")
        return x - h * back, max(1.0, h * s * s * SLACK - 1), local

    def pool(self, op, a, x):
        """Pooling: every entry lies in at most `∏ ⌈k/s⌉` windows of `∏ k` entries."""
        kernel, stride, padding = a["kernel"], a["stride"], a["padding"]
        require(len(kernel) == len(stride) == len(padding) == x.ndim - 2, "geometry and image differ")
        require(min(*kernel, *stride) >= 1 and min(padding) >= 0 and max(padding) <= 4096, "impossible geometry")
        overlap = math.prod(-(-k // s) for k, s in zip(kernel, stride))
        fill = {"constant_values": -np.inf} if op == "max_pool" else {}
        view = windows(x, kernel, stride, padding, [1] * len(kernel), fill)
        axes = tuple(range(x.ndim, view.ndim))
        if op == "max_pool":
            return view.max(axis=axes), math.sqrt(overlap) * SLACK, 0.0
        count = math.prod(kernel)
        factor = math.sqrt(overlap / count) * SLACK
        return view.sum(axis=axes) / count, factor, gamma(count + 2) * factor * norm(x)

    def pairs(self, constant, classes):
        """Lipschitz constants of `z_i − z_j` for all pairs of classes; sharper behind a last dense layer."""
        pairs = np.full((classes, classes), math.sqrt(2) * constant * SLACK)
        last = self.nodes[-1]
        if last["op"] == "linear":
            weight, trunk = self.tensor(last, "weight"), constant / number(last["upper"]) * SLACK
            for i in range(classes):
                pairs[i] = np.minimum(pairs[i], norm(weight[i] - weight) * trunk * SLACK)
        return pairs


def provable_radii(network, batch, labels):
    """The largest radius that is proved for each input, 0 where its label does not win.

    With z the logits and e their error, `z_y − z_j − 2e ≥ r·K_yj` for every other class j, K_yj the constant of `z_y − z_j`.
    """
    value = network.evaluate(batch, U * norm(batch))
    z, rows = value.x, np.arange(len(batch))
    require(z.ndim == 2 and ((labels >= 0) & (labels < z.shape[1])).all(), "a label is not one of the classes")
    error = 2 * value.error + 4 * U * norm(z)
    margins = z[rows, labels][:, None] - z - error[:, None]
    constants = network.pairs(value.constant, z.shape[1])[labels]
    ratios = np.maximum(margins, 0) / (np.maximum(constants, TINY) * SLACK)
    ratios[rows, labels] = np.inf
    return ratios.min(axis=1) / SLACK


def check_radii(network, inputs, claim):
    """Prove that no perturbation of an input within its claimed radius changes its label; radius 0 claims nothing."""
    x, labels, radii = inputs[claim["x"]], inputs[claim["labels"]], inputs[claim["radii"]].astype(np.float64)
    require(len(x) == len(labels) == len(radii) and labels.ndim == radii.ndim == 1, "inputs, labels, radii differ")
    require(labels.dtype == np.int64 and (radii >= 0).all(), "labels must be integers, radii not negative")
    require(list(x.shape[1:]) == network.shape, "the inputs have another shape than the network takes")
    divisor = number(claim.get("divisor", 1))
    require(0 < divisor < 1e100, "impossible scale of the inputs")
    claimed = np.flatnonzero(radii)
    size = max(1, min(500, 2**25 // network.largest))
    for start in range(0, len(claimed), size):
        chosen = claimed[start : start + size]
        proved = provable_radii(network, x[chosen].astype(np.float64) / divisor, labels[chosen])
        for index in chosen[~(radii[chosen] <= proved)]:
            raise Rejected(f"input {index}: the radius {radii[index]} is not proved")
    for epsilon, count in claim.get("certified", {}).items():
        require(0 < float(epsilon) < math.inf, "a certified distance must be positive")
        require(
            number(count, whole=True) <= int((radii >= float(epsilon)).sum()),
            f"fewer inputs are certified at {float(epsilon)}",
        )


def check(folder):
    """Check every claim of a bundle; returns the claims that were proved, in words."""
    folder, files, proved = Path(folder), {}, []
    document = read_json(read_bytes(folder / "certificate.json"))
    require(document["format"] == "equipoise-bundle" and document["version"] == 1, "not a bundle of version 1")
    for name, digest in document["digests"].items():
        require(name in ("weights.safetensors", "inputs.safetensors"), f"unknown file {name!r}")
        content = read_bytes(folder / name)
        require(hashlib.sha256(content).hexdigest() == digest, f"{name} has another digest than the certificate states")
        files[name] = read_tensors(content)
    claims = document["claims"]
    require(claims and set(claims) <= {"lipschitz", "radii"}, "no claims, or unknown ones")
    network = Network(document, files["weights.safetensors"])
    constant = network.evaluate(np.zeros((1, *network.shape)), np.zeros(1)).constant
    if "lipschitz" in claims:
        require(constant <= number(claims["lipschitz"]), f"the network is proved {constant!r}-Lipschitz only")
        proved.append(f"Lipschitz constant at most {number(claims['lipschitz'])} in the l2 norm")
    if "radii" in claims:
        check_radii(network, files["inputs.safetensors"], claims["radii"])
        for epsilon, count in claims["radii"].get("certified", {}).items():
            proved.append(f"{int(count)} inputs keep their label within l2 distance {float(epsilon)}")
    return proved


def main():
    """Print the verdict; exit code 0 if the bundle is accepted."""
    parser = argparse.ArgumentParser(description="Check a certificate bundle of equipoise.")
    parser.add_argument("folder", help="the folder of the bundle")
    try:
        with np.errstate(all="ignore"):
            proved = check(parser.parse_args().folder)
    except Exception as error:  # a malformed bundle is rejected, whatever it breaks
        kind = "" if isinstance(error, Rejected) else f"malformed bundle ({type(error).__name__}): "
        print(f"REJECTED: {kind}{str(error)[:300]}")
        sys.exit(1)
    print("ACCEPTED")
    for line in proved:
        print(f"  {line}")


if __name__ == "__main__":
    main()
