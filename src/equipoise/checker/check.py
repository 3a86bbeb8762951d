"""Check a certificate bundle: `python check.py DIR` prints ACCEPTED, or REJECTED and the first claim that fails.

This file needs Python 3.10 and NumPy, and nothing of equipoise or PyTorch. A bundle is a folder with

    certificate.json       the network as a list of plain operations, and the claims
    weights.safetensors    its weights
    inputs.safetensors     inputs, labels, claimed radii (if any input is certified)

The claims are about the real function of the stored weights. They are checked in float64, and every rounding error made
here is bounded and counted against the claim: `U` is half a unit in the last place, `gamma(n)` the error of a sum of n
products in any order, relative to the sum of their sizes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).

In the arrays of a network, the first axis counts channels, and the last one the samples of a batch. `check_layers.py`
beside this file knows more operations; `check_dense.py`, `check_deployed.py` and `check_smoothing.py` know more claims.
"""

import hashlib
import importlib
import json
import math
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np

U = 2.0**-53
#: covers the few roundings of a short scalar formula
SLACK = 1 + 2.0**-45
#: what a norm may lose when squares underflow, and what sums of products may lose
TINY = 1e-150
TINIEST = 1e-250
#: limits of memory: bytes of a file, characters of a document, numbers of a value
MAX_BYTES = 2**30
MAX_TEXT = 2**25
MAX_ENTRIES = 2**26
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "I64": "<i8"}


class Rejected(Exception):
    """A claim that does not hold, or a bundle that cannot be read."""


def require(condition, reason):
    """Reject unless the condition holds; comparisons are written so that NaN fails."""
    if not condition:
        raise Rejected(reason)


def number(value, low=1e-100, high=1e100):
    """A number of a JSON document in a range; texts and truth values are not numbers."""
    fits = type(value) in (int, float) and low <= value <= high
    require(fits, f"expected a number from {low} to {high}")
    return value


def integer(value, low=1, high=MAX_ENTRIES):
    """A whole number of a JSON document in a range."""
    require(type(value) is int, "expected a whole number")
    return number(value, low, high)


def integers(values, count, low=1):
    """A list of whole numbers of a JSON document."""
    require(type(values) is list and len(values) == count, f"expected {count} whole numbers")
    return np.array([integer(value, low) for value in values], int)


def unique(pairs):
    """The dictionary of some pairs, in which no key occurs twice."""
    require(len(dict(pairs)) == len(pairs), "a key occurs twice")
    return dict(pairs)


def read_json(text):
    """A JSON document."""
    require(len(text) <= MAX_TEXT, "a JSON document is too long")
    return json.loads(text, object_pairs_hook=unique)


def read_tensors(content):
    """The tensors of a safetensors file: the length of a header in eight bytes, the header, raw numbers."""
    begin = 8 + int.from_bytes(content[:8], "little")
    require(begin <= len(content), "a header is longer than its file")
    header = read_json(content[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    # views, not copies: tensors that overlap need no memory
    data = memoryview(content)[begin:]
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        tensor = np.frombuffer(data[start:stop], DTYPES[entry["dtype"]])
        require((np.abs(tensor) < 1e100).all(), f"{name} is not finite, or too large")
        tensors[name] = tensor.reshape(entry["shape"])
    return tensors


def read_file(folder, name):
    """The bytes of a regular file."""
    path = Path(folder, name)
    require(path.is_file() and path.stat().st_size <= MAX_BYTES, f"{name} is missing, or too large")
    return path.read_bytes()


def read_bundle(folder):
    """The document of a bundle, and the tensors of its files by name."""
    document = read_json(read_file(folder, "certificate.json"))
    require(document["version"] == "equipoise-bundle 1", "not a bundle of this version")
    files = {}
    for name, digest in document["digests"].items():
        require(name in ("weights.safetensors", "inputs.safetensors"), "an unknown file")
        content = read_file(folder, name)
        same = hashlib.sha256(content).hexdigest() == digest
        require(same, f"{name} has another digest than the certificate")
        files[name] = read_tensors(content)
    return document, files


def gamma(n, unit=U):
    """`n·u/(1 − n·u)`, rounded up."""
    require(n * unit < 0.01, "a sum is too long for its rounding to be bounded")
    return n * unit / (1 - n * unit) * SLACK


def norm(x):
    """The l2 norm of every sample, rounded up."""
    flat = x.reshape(-1, x.shape[-1])
    return np.sqrt(np.sum(flat * flat, axis=0)) * (1 + gamma(len(flat) + 8)) + TINY


def check_norms(A, size, terms, s):
    """Prove `‖A‖ ≤ s` for a batch of matrices with `‖A‖_F ≤ size`, computed with an error of `gamma(terms)·size`.

    G is the Gram matrix `AA*` of the shorter side. If Cholesky's algorithm runs to its end on `tI − G`, then
    `tI − G + E ⪰ 0` with `‖E‖ ≤ γ·trace ≤ γ·n·t` (Rump 2006). So λ_max of the true Gram matrix is at most
    `t + γ·n·t + error`, and t is chosen such that this is at most s².
    """
    if A.shape[-2] > A.shape[-1]:
        A = A.swapaxes(-1, -2)
    n, m = A.shape[-2:]
    require(n <= 8192, "a matrix is too large")
    error = 4 * gamma(8 * m + terms + 64) * size * size + TINIEST
    t = s * s * (1 - n * gamma(8 * n + 64)) - error
    require(s > 0 and t > 0, "a norm is too small to be proved")
    gram = A @ A.conj().swapaxes(-1, -2)
    try:
        factor = np.linalg.cholesky(t * np.eye(n) - gram)
    except np.linalg.LinAlgError:
        raise Rejected(f"a spectral norm is not proved to be at most {s!r}") from None
    require(np.isfinite(factor).all(), "a Cholesky factor is not finite")


def check_matrix(weight, s):
    """Prove that the spectral norm of a matrix is at most s."""
    check_norms(weight, norm(weight.reshape(-1, 1))[0], 0, s)


def check_convolution(layer, kernel, s):
    """Prove that a convolution has a spectral norm of at most s.

    With zero padding p on n pixels it is a part of the circular convolution on N ≥ n + 2p pixels, in which no window
    wraps. That one is block diagonal in the Fourier basis, with the blocks `M(ω) = Σ_t K_t exp(iω·t)`; those of ω and −ω
    are conjugates. With a stride q, taps t with different rests t mod q read different pixels: each rest has a block of
    its own, in `t div q`, and the blocks stand side by side.

    Large images are covered by a coarser grid: `u*M(ω)M(ω)*u` is a trigonometric polynomial of degree d, and exceeds its
    maximum over n > 2d points at most by the factor `1/cos(πd/n)` in each dimension (Ehlich and Zeller 1964).
    """
    points = -(-layer.period // layer.stride)
    degree = layer.reach // layer.stride
    coarse = 32 * degree + 1
    large = points > np.maximum(coarse, 64)
    grid = np.where(large, coarse, points)
    s = s * math.sqrt(np.cos(np.pi * degree / coarse)[large].prod()) / SLACK
    require(np.prod(1.0 * grid) <= 2**20, "a convolution has too many frequencies")

    taps = np.array(list(np.ndindex(*layer.kernel))) * layer.dilation
    rests = taps % layer.stride
    flat = kernel.reshape(*kernel.shape[:2], -1)
    frequencies = np.array(list(np.ndindex(*grid[:-1], grid[-1] // 2 + 1))) / grid
    # errors of the angles, of the exponentials, and of the sums over the taps
    terms = 40 * int(layer.reach.sum()) + 8 * len(taps) + 400
    for some in np.array_split(frequencies, 1 + len(frequencies) * flat.size // 2**22):
        waves = np.exp(2j * np.pi * some @ (taps // layer.stride).T)
        blocks = []
        for rest in np.unique(rests, axis=0):
            mine = (rests == rest).all(axis=1)
            blocks.append(np.tensordot(waves[:, mine], flat[..., mine], (1, 2)))
        check_norms(np.concatenate(blocks, axis=2), layer.scale, terms, s)


#: What an operation does: values, Lipschitz constant, and its rounding error, at most `gamma(terms)·size`. `size` is a
#: norm for every sample; it grows at most by `reach` times the distance of the input. The constants of several inputs
#: are added, or, if `apart`, the root of their squares is taken: each changes other entries.
Step = namedtuple("Step", "y factor terms size reach apart", defaults=(0, 0.0, 0.0, False))


class Layer:
    """A linear map of images of a given size: a convolution, or a dense layer, which is one without dimensions.

    `scale` bounds its norm, also with absolute values of all weights, by the sum of the Frobenius norms of the taps;
    `fan` is the largest number of terms of a sum; `entries` bounds memory.
    """

    def __init__(self, weight, geometry, size):
        dims = len(size)
        require(weight.ndim == dims + 2, "weight and image have different dimensions")
        self.stride = integers(geometry["stride"], dims)
        self.padding = integers(geometry["padding"], dims, 0)
        self.dilation = integers(geometry["dilation"], dims)
        self.circular = geometry["circular"]
        # (groups, outputs, inputs, taps…)
        self.weight = weight.reshape(integer(geometry["groups"]), -1, *weight.shape[1:])
        self.kernel = weight.shape[2:]
        taps = math.prod(self.kernel)
        require(taps <= 2**16, "a kernel is too large")
        self.scale = norm(weight.reshape(-1, taps)).sum() * SLACK
        self.fan = max(self.weight.shape[1:3]) * taps + 2

        self.reach = self.dilation * (np.array(self.kernel, int) - 1)
        self.padded = np.array(size, int) + 2 * self.padding
        self.positions = (self.padded - self.reach - 1) // self.stride + 1
        require((self.positions > 0).all(), "a kernel is larger than its image")
        channels = len(self.weight) * max(self.weight.shape[1:3])
        self.entries = np.prod(1.0 * self.padded) * channels
        require(self.entries <= MAX_ENTRIES, "a layer is too large")
        self.period = self.padded
        if self.circular:
            self.period = self.positions * self.stride
            require((self.period == size).all(), "a circular convolution that changes the size")

    def part(self, image, tap):
        """The entries of padded images that meet a tap of the kernel, one for every output."""
        start = self.dilation * tap
        stop = start + self.stride * (self.positions - 1) + 1
        window = [slice(*ends) for ends in zip(start, stop, self.stride)]
        return image[(slice(None), *window)]

    def apply(self, x, weight):
        """The layer with this weight, its own or that in absolute values."""
        widths = [(0, 0), *zip(self.padding, self.padding), (0, 0)]
        image = np.pad(x, widths, "wrap" if self.circular else "constant")
        groups, outputs, inputs = weight.shape[:3]
        require(len(x) == groups * inputs, "a layer takes another number of channels")
        y = 0.0
        for tap in np.ndindex(*self.kernel):
            columns = self.part(image, tap).reshape(groups, inputs, -1)
            y = y + weight[(..., *tap)] @ columns
        return y.reshape(groups * outputs, *self.positions, x.shape[-1])

    def check(self, s):
        """Prove that the spectral norm is at most s, group by group."""
        for weight in self.weight:
            if self.kernel:
                check_convolution(self, weight, s)
            else:
                check_matrix(weight, s)


def linear(network, node, x):
    """A dense layer or a convolution, `Wx + b`."""
    layer = network.layer(node, x.shape[1:-1])
    y = layer.apply(x, layer.weight)
    bias = network.repeated(node, "bias", y)
    size = network.size(layer, x) + norm(bias)
    return Step(y + bias, node["upper"], layer.fan, size, layer.scale)


def shift(network, node, x):
    """A constant is added."""
    y = x + network.repeated(node, "value", x)
    return Step(y, 1.0, 2, norm(y), 1.0)


def scale(network, node, x):
    """Multiplication or division by a constant."""
    value = network.repeated(node, "value", x)
    if node["op"] == "divide":
        value = 1 / value
    factor = np.abs(value).max() * SLACK
    return Step(x * value, factor, 4, norm(x * value), factor)


def add(network, node, *parts):
    """A sum of values."""
    same = len({part.shape for part in parts}) == 1
    require(same and len(parts) <= 64, "a sum of different shapes, or of too many values")
    return Step(sum(parts), 1.0, len(parts), sum(norm(part) for part in parts), len(parts))


def absolute(network, node, x):
    """Absolute values of the first channels, or of all."""
    count = integer(node.get("count", len(x)))
    return Step(np.concatenate([np.abs(x[:count]), x[count:]]), 1.0)


def relu(network, node, x):
    """Negative entries become 0: nothing is rounded, and no distance grows."""
    return Step(np.maximum(x, 0), 1.0)


def reshape(network, node, x):
    """The entries of every sample in another shape."""
    shape = integers(node["shape"], len(node["shape"]))
    return Step(x.reshape(*shape, x.shape[-1]), 1.0)


def gather(network, node, x):
    """Entries are moved, left out or repeated: y[i] = x[index[i]], or 0 where the index is −1."""
    index = network.tensors[node["weights"]["index"]]
    entries = np.pad(x.reshape(-1, x.shape[-1]), ((0, 1), (0, 0)))
    require(index.dtype == np.int64 and index.min() >= -1, "expected places, or −1")
    require(index.max() < len(entries), "a place outside of the value")
    repeated = np.bincount(index.ravel() + 1)[1:].max()
    return Step(entries[index], math.sqrt(repeated) * SLACK)


OPERATIONS = {"linear": linear, "convolution": linear, "reshape": reshape, "gather": gather}
OPERATIONS |= {"shift": shift, "scale": scale, "divide": scale}
OPERATIONS |= {"add": add, "abs": absolute, "relu": relu}

#: The values of a node for a batch; `error` bounds the l2 distance of every sample to the exact values, `constant` the
#: Lipschitz constant from the input, `deployed` the distance of values computed in float32 (see `check_deployed.py`).
Value = namedtuple("Value", "x error constant deployed", defaults=(0.0,))


class Network:
    """The nodes of a bundle. A first evaluation proves their norms, and gives the Lipschitz constant."""

    def __init__(self, document, tensors):
        self.nodes = document["nodes"]
        self.tensors = tensors
        shape = document["input_shape"]
        self.shape = tuple(integers(shape, len(shape)))
        self.entries = np.prod(1.0 * np.array(self.shape))
        require(self.entries <= MAX_ENTRIES, "the inputs are too large")
        self.proved = False
        self.constant = self.evaluate(np.zeros((*self.shape, 1)), np.zeros(1)).constant
        self.proved = True

    def tensor(self, node, name):
        """A weight of a node in float64."""
        stored = self.tensors[node["weights"][name]]
        require(stored.dtype.kind == "f", "weights are floating-point numbers")
        return stored.astype(np.float64)

    def repeated(self, node, name, x):
        """A weight of a node, repeated to the shape of x for all samples."""
        return np.broadcast_to(self.tensor(node, name)[..., None], x.shape)

    def layer(self, node, size):
        """The linear layer of a node on images of this size; its claimed norm is proved the first time."""
        layer = Layer(self.tensor(node, "weight"), node, size)
        if not self.proved:
            layer.check(number(node["upper"]))
            self.entries += layer.entries
        return layer

    def size(self, layer, x):
        """A bound of the norm of `|W||x|`, for every sample."""
        return layer.scale * norm(x)

    def evaluate(self, x, radii):
        """The value of the last node for a batch of inputs; `radii` matter for deployed networks."""
        values = {"input": Value(x, U * norm(x), 1.0)}
        for node in self.nodes:
            name, op = node["name"], node["op"]
            known = op in OPERATIONS
            require(known and name not in values, f"{name}: unknown operation, or not a new name")
            inputs = [values[source] for source in node["inputs"]]
            try:
                step = OPERATIONS[op](self, node, *[value.x for value in inputs])
                values[name] = self.bound(step, inputs, radii)
            except Rejected as reason:
                raise Rejected(f"{name}: {reason}") from None
        return values[name]

    def bound(self, step, inputs, radii):
        """Errors and constants of the inputs, times the factor of a step; errors also have its own rounding."""
        total = np.linalg.norm if step.apart else np.sum
        error = step.factor * total([value.error for value in inputs], axis=0)
        error = (error + gamma(step.terms) * step.size) * SLACK + TINIEST
        constant = step.factor * total([value.constant for value in inputs]) * SLACK
        # no product of constants underflows; numbers that overflow are not finite any more
        require(1e-150 < constant < 1e150, "a Lipschitz constant out of range")
        require(np.isfinite(step.y).all() and np.isfinite(error).all(), "overflow")
        require(step.y.ndim > 1 and step.y.shape[-1] == len(radii), "samples without channels")
        if not self.proved:
            self.entries += step.y.size
            require(self.entries <= MAX_ENTRIES, "the network is too large")
        return Value(step.y, error, constant)

    def pairs(self, labels):
        """Lipschitz constants of `z_y − z_j` for labels y (columns) and all classes j (rows)."""
        last = self.nodes[-1]
        if last["op"] != "linear" or last["groups"] != 1:
            return math.sqrt(2) * self.constant * SLACK
        weight = self.tensor(last, "weight").T
        trunk = self.constant / last["upper"] * SLACK
        pairs = {y: norm(weight - weight[:, [y]]) * trunk for y in set(labels.tolist())}
        return np.stack([pairs[y] for y in labels.tolist()], axis=1)


def provable_radii(network, batch, labels, radii):
    """The largest radius that is proved for each input, 0 where its label does not win.

    With z the logits and e their error: `z_y − z_j − 2e ≥ r·K_yj` for every other class j, K_yj the constant of
    `z_y − z_j`. Radii of deployed networks are proved if they are at most `radii`.
    """
    value = network.evaluate(batch, radii)
    z = value.x
    require(z.ndim == 2, "the network does not end in a vector of logits")
    require(((labels >= 0) & (labels < len(z))).all(), "a label is not one of the classes")
    columns = np.arange(len(labels))
    error = 2 * (value.error + value.deployed) + 4 * U * norm(z)
    margins = z[labels, columns] - z - error
    ratios = np.maximum(margins, 0) / (network.pairs(labels) * SLACK + TINIEST)
    ratios[labels, columns] = np.inf
    return ratios.min(axis=0) / SLACK


def read_inputs(network, inputs, claim):
    """Inputs, labels and radii of a claim, and the counts of inputs that it states, in words."""
    x, labels, radii = [inputs[name] for name in ("x", "labels", claim["radii"])]
    require(x.shape[1:] == network.shape, "the network takes inputs of another shape")
    require(x.dtype != np.int64, "inputs are bytes or floating-point numbers")
    require(labels.dtype == np.int64 and radii.dtype == np.float64, "expected labels and radii")
    require(labels.shape == radii.shape == x.shape[:1], "every input has a label and a radius")
    require(((radii >= 0) & (radii < 1e100)).all(), "a radius is negative or too large")
    sentences = []
    for epsilon, count in claim["certified"].items():
        distance = number(float(epsilon))
        enough = integer(count, 0) <= (radii >= distance).sum()
        require(enough, f"fewer than {count} inputs are certified at {distance}")
        sentences.append(f"{count} inputs keep their label within l2 distance {distance}")
    return x, labels, radii, sentences


def batches(network, x, chosen):
    """Batches of the chosen inputs, with their places, in float64; few enough for the memory."""
    size = max(1, min(500, int(2**25 / network.entries)))
    for start in range(0, len(chosen), size):
        some = chosen[start : start + size]
        yield some, np.moveaxis(x[some], 0, -1).astype(np.float64)


def check_radii(network, inputs, claim):
    """Prove that no perturbation of an input within its claimed radius changes its label; radius 0 claims nothing."""
    x, labels, radii, sentences = read_inputs(network, inputs, claim)
    divisor = integer(claim["divisor"])
    for some, batch in batches(network, x, np.flatnonzero(radii)):
        proved = provable_radii(network, batch / divisor, labels[some], radii[some])
        for index in some[~(radii[some] <= proved)]:
            raise Rejected(f"input {index}: the radius {radii[index]} is not proved")
    return sentences


def check_lipschitz(network, inputs, claim):
    """Prove a Lipschitz constant of the whole network."""
    require(network.constant <= number(claim), f"proved is the constant {network.constant} only")
    return [f"Lipschitz constant at most {claim} in the l2 norm"]


CLAIMS = {"lipschitz": check_lipschitz, "radii": check_radii}


def check(folder):
    """Check every claim of a bundle; returns the claims that were proved, in words."""
    document, files = read_bundle(folder)
    network = None
    if "weights.safetensors" in files:
        network = Network(document, files["weights.safetensors"])
    proved = []
    for name, claim in document["claims"].items():
        require(name in CLAIMS, f"this program does not check claims of the kind {name}")
        proved += CLAIMS[name](network, files.get("inputs.safetensors"), claim)
    require(proved, "nothing is claimed")
    return proved


def run(check):
    """Check the bundle that is named on the command line, and print the verdict."""
    np.seterr(all="ignore")
    try:
        proved = check(sys.argv[1])
    except Exception as error:  # a malformed bundle is rejected, whatever it breaks
        kind = "" if isinstance(error, Rejected) else f"malformed bundle, {type(error).__name__}: "
        sys.exit(f"REJECTED: {kind}{str(error)[:300]}")
    print("\n  ".join(["ACCEPTED", *proved]))


if __name__ == "__main__":
    # the files beside this one know more operations and claims
    sys.modules["check"] = sys.modules["__main__"]
    for path in Path(__file__).parent.glob("check_*.py"):
        importlib.import_module(path.stem)
    run(check)
