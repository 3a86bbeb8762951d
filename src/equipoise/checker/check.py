"""Check a certificate bundle: `python check.py DIR` prints ACCEPTED, or REJECTED and the first claim that fails.

This file needs Python 3.10 and NumPy, and nothing of equipoise or PyTorch. A bundle is a folder with

    certificate.json       the network as a list of plain operations, and the claims
    weights.safetensors    its weights
    inputs.safetensors     inputs, labels, claimed radii (if any input is certified)

The claims are about the real function of the stored weights. `check_norm` proves the norm of every linear layer, `Network`
carries a Lipschitz constant and a rounding error from operation to operation, and `provable_radius` compares the margins of
an input with them. All is computed in float64, and every rounding error made here is counted against the claim: a sum of n
products, in any order, is wrong by at most `gamma(n)` times the sum of their sizes (Higham 2002, 3.1).

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

U = 2.0**-53  # half a unit in the last place of a float64
SLACK = 1 + 2.0**-45  # covers the few roundings of a short scalar formula
TINY = 1e-150  # covers what sums of products lose by underflow

#: limits: bytes of a file, numbers of all values of a sample
MAX_BYTES = 2**30
MAX_ENTRIES = 2**26
STEP = 2**18  # a step of a loop takes as long as so many multiplications

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "I64": "<i8"}
FLAT = np.zeros(0, int)  # stride and period of a matrix, which is a convolution without dimensions

#: the words of a document, of every node, and of a claim of radii
DOCUMENT = "version input_shape nodes claims digests"
NODE = "name op inputs weights "
RADII = "radii divisor certified lowered"


class Rejected(Exception):
    """A claim that does not hold, or a bundle that cannot be read."""


def require(condition, reason):
    """Reject unless the condition holds; comparisons are written so that NaN fails."""
    if not condition:
        raise Rejected(reason)


def known(entry, words):
    """Reject words that are not read here: to another reader they may mean another claim."""
    require(set(entry) <= set(words.split()), "a word that is not in the format")


def number(value, low=1e-100, high=1e100, kinds=(int, float)):
    """A number of a JSON document in a range; texts and truth values are not numbers."""
    require(type(value) in kinds and low <= value <= high, f"not a number from {low} to {high}")
    return value


def integer(value, low=1, high=MAX_BYTES):
    """A whole number of a JSON document in a range."""
    return number(value, low, high, (int,))


def integers(values, low=1):
    """A list of whole numbers of a JSON document."""
    return np.array([integer(value, low) for value in values], int)


def unique(pairs):
    """The dictionary of some pairs, in which no key occurs twice."""
    require(len(dict(pairs)) == len(pairs), "a key occurs twice")
    return dict(pairs)


def read_json(text):
    """A JSON document."""
    require(len(text) <= 2**25, "a JSON document is too long")
    return json.loads(text, object_pairs_hook=unique)


def read_tensors(content):
    """The tensors of a safetensors file: the length of a header in eight bytes, the header, raw numbers without gaps."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = read_json(content[8:start])
    header.pop("__metadata__", None)
    data = memoryview(content)[start:]
    tensors = {}
    end = 0
    for name, entry in header.items():
        start, stop = integers(entry["data_offsets"], 0)
        require(start == end <= stop, "tensors overlap, or leave a gap")
        end = stop
        tensor = np.frombuffer(data[start:stop], DTYPES[entry["dtype"]])
        require((np.abs(tensor) < 1e100).all(), f"{name!r:.99} is not finite, or too large")
        tensors[name] = tensor.reshape(integers(entry["shape"], 0))
    require(end == len(data), "a file is longer or shorter than its tensors")
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
    known(document, DOCUMENT)
    files = {}
    for name, digest in document["digests"].items():
        require(name in ("weights.safetensors", "inputs.safetensors"), "an unknown file")
        content = read_file(folder, name)
        require(hashlib.sha256(content).hexdigest() == digest, f"{name} has another digest")
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


def tap_norms(kernel):
    """The sum of the Frobenius norms of the taps `K_t`: a bound of the spectral norm, also with absolute values."""
    taps = math.prod(kernel.shape[2:])
    return norm(kernel.reshape(-1, taps)).sum() * SLACK


def check_norm(kernel, s, stride=FLAT, period=FLAT, spend=None):
    """Prove that a convolution W has a norm of at most s. The kernel has the axes outputs, inputs, taps.

    *Circle.* With zero padding p on n pixels, W is a part of the circular convolution on a period of N ≥ n + 2p pixels, in
    which no window wraps. So it is enough to bound that one: below, W is circular.
    *Gram matrix.* With stride q, `WWᵀ` is a circular convolution on N/q points. Outputs that are d points apart, read with
    taps that are q·d apart, have the product `C_d = Σ_t K_(t+qd) K_tᵀ`.
    *Fourier.* In the Fourier basis it is block diagonal, with the blocks `G(ω) = Σ_d C_d exp(iω·d)`. Those of ω and −ω are
    conjugates, so half of the frequencies are enough.
    *Cholesky.* If Cholesky's algorithm runs to its end on `tI − G`, then `tI − G + E ⪰ 0` with `‖E‖ ≤ γ·n·t` (Rump 2006).
    So all eigenvalues of the true G are at most `t + γ·n·t + error`, and t is chosen such that this is at most s².
    *Rounding.* The products, their sum over t, exp, and the sum over d cost at most `γ·(Σ_t ‖K_t‖_F)²`.
    """
    if len(kernel) > kernel.shape[1] and (stride == 1).all():
        # without a stride, transposed taps have transposed blocks: the norm is the same
        kernel = kernel.swapaxes(0, 1)
    n = len(kernel)
    taps = np.array(kernel.shape[2:], int)
    degree = (taps - 1) // stride
    points = -(-period // stride)
    half = [*points[:1] // 2 + 1, *points[1:]]
    count = math.prod(2 * degree + 1)
    require(n <= 4096 and count * n**2 <= 2**25, "a linear layer has too many channels")
    if spend:
        spend(count * (kernel.size * (n + 32) + STEP))
        spend(math.prod(map(int, half)) * (count * 16 * (n**2 + 16) + n**3 + STEP))

    # the kernel is moved over itself
    reach = degree * stride
    wide = np.pad(kernel, [(0, 0), (0, 0), *zip(reach, reach)])
    distances = np.array(list(np.ndindex(*2 * degree + 1))) - degree
    moved = (wide[(..., *map(slice, a, a + taps))] for a in distances * stride + reach)
    products = np.array([m.reshape(n, -1) @ kernel.reshape(n, -1).T for m in moved], complex)
    terms = 8 * (kernel.size // n + count) + 40 * degree.sum() + 400
    error = 4 * gamma(terms) * tap_norms(kernel) ** 2 + TINY
    t = s * s * (1 - n * gamma(8 * n + 64)) - error
    require(s > 0 and t > 0, "a norm is too small to be proved")
    for frequency in np.ndindex(*half):
        waves = np.exp(2j * np.pi * distances @ (frequency / points))
        block = np.tensordot(waves, products, 1)
        try:
            factor = np.linalg.cholesky(t * np.eye(n) - block)
        except np.linalg.LinAlgError:
            raise Rejected(f"a spectral norm is not proved to be at most {s!r}") from None
        require(np.isfinite(factor).all(), "a Cholesky factor is not finite")


class Layer:
    """A convolution of images of a given size, or a dense layer, which is one without dimensions.

    `scale` bounds its norm, also with absolute values of all weights; `fan` is the number of terms of its sums; `entries`
    bounds the memory of its images, and `cost` the multiplications.
    """

    mode = "constant"

    def __init__(self, weight, geometry, size):
        self.stride = integers(geometry["stride"])
        self.padding = integers(geometry["padding"], 0)
        self.taps = weight.shape[2:]
        same = len(size) == len(self.taps) == len(self.stride) == len(self.padding)
        require(same, "weight, image and geometry have different dimensions")
        # (groups, outputs, inputs, taps…)
        self.weight = weight.reshape(integer(geometry["groups"]), -1, *weight.shape[1:])
        self.scale = tap_norms(weight)
        self.fan = weight[0].size + 2
        self.padded = size + 2 * self.padding
        self.positions = (self.padded - self.taps) // self.stride + 1
        require((self.positions > 0).all(), "a kernel is larger than its image")
        channels = len(self.weight) * max(self.weight.shape[1:3])
        self.entries = math.prod(self.padded.tolist()) * channels
        moves = weight.size + 32 * channels * math.prod(self.taps)
        self.cost = moves * math.prod(self.positions.tolist())
        self.period = self.padded

    def part(self, image, tap):
        """The entries of padded images that meet a tap of the kernel, one for every output."""
        window = map(slice, tap, tap + self.stride * self.positions, self.stride)
        return image[(slice(None), *window)]

    def apply(self, x, weight):
        """The layer with this weight, its own or that in absolute values."""
        groups, outputs, inputs = weight.shape[:3]
        require(len(x) == groups * inputs, "a layer takes another number of channels")
        image = np.pad(x, [(0, 0), *zip(self.padding, self.padding), (0, 0)], self.mode)
        y = 0.0
        for tap in np.ndindex(*self.taps):
            y = y + weight[(..., *tap)] @ self.part(image, tap).reshape(groups, inputs, -1)
        return y.reshape(groups * outputs, *self.positions, x.shape[-1])

    def check(self, s, spend=None):
        """Prove that the spectral norm is at most s, group by group."""
        for kernel in self.weight:
            check_norm(kernel, s, self.stride, self.period, spend)


#: What an operation does: values, Lipschitz constant, and its rounding error, at most `gamma(terms)·size`. `size` is a
#: norm for every sample; it grows at most by `reach` times the distance of the input. The constants of several inputs
#: are added, unless another `total` is named.
Step = namedtuple("Step", "y factor terms size reach total", defaults=(0, 0.0, 0.0, np.sum))


def linear(network, node, x, kind=Layer):
    """A dense layer or a convolution, `Wx + b`."""
    layer = network.layer(node, x.shape[1:-1], kind)
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
    value = 1 / value if node["op"] == "divide" else value
    y = x * value
    factor = np.abs(value).max() * SLACK
    return Step(y, factor, 4, norm(y), factor)


def add(network, node, *parts):
    """A sum of values."""
    require(len({part.shape for part in parts}) == 1 and len(parts) <= 64, "a sum of other values")
    return Step(sum(parts), 1.0, len(parts), sum(map(norm, parts)), len(parts))


def absolute(network, node, x):
    """Absolute values of the first channels, or of all; no distance grows, and nothing is rounded."""
    count = integer(node.get("count", len(x)))
    return Step(np.concatenate([np.abs(x[:count]), x[count:]]), 1.0)


def relu(network, node, x):
    """Negative entries become 0."""
    return Step(np.maximum(x, 0), 1.0)


def reshape(network, node, x):
    """The entries of every sample in another shape."""
    return Step(x.reshape(*integers(node["shape"]), x.shape[-1]), 1.0)


def gather(network, node, x):
    """Entries are moved, left out or repeated: y[i] = x[index[i]]."""
    index = network.tensors[node["weights"]["index"]]
    entries = x.reshape(-1, x.shape[-1])
    require(index.size <= MAX_ENTRIES and index.max() < len(entries), "a place outside")
    repeated = np.bincount(index.ravel()).max()  # refuses negative places and fractions
    return Step(entries[index], math.sqrt(repeated) * SLACK)


#: the function of every operation, its attributes, and its weights
LAYER = "upper stride padding groups", "weight bias"
OPERATIONS = {"linear": (linear, *LAYER), "convolution": (linear, *LAYER)}
OPERATIONS |= {"shift": (shift, "", "value"), "add": (add, "", "")}
OPERATIONS |= {"scale": (scale, "", "value"), "divide": (scale, "", "value")}
OPERATIONS |= {"reshape": (reshape, "shape", ""), "gather": (gather, "", "index")}
OPERATIONS |= {"abs": (absolute, "count", ""), "relu": (relu, "", "")}


#: The values of a node for a batch; `error` bounds the l2 distance of every sample to the exact values, and `constant` is
#: a Lipschitz constant from the input.
Value = namedtuple("Value", "x error constant")


class Network:
    """The nodes of a bundle. A first evaluation proves their norms, and gives the Lipschitz constant."""

    underflow = 0.0  # what is lost of an input because small numbers become 0

    def __init__(self, document, tensors):
        self.nodes = document["nodes"]
        self.tensors = tensors
        self.shape = tuple(integers(document["input_shape"]))
        self.entries = self.cost = 0
        self.left = 2**36
        self.spend(0, sum(tensor.nbytes for tensor in tensors.values()))
        self.pay(math.prod(map(int, self.shape)), 0, 0)
        self.constant = None
        self.constant = self.evaluate(np.zeros((*self.shape, 1))).constant

    def tensor(self, node, name):
        """A weight of a node in float64."""
        stored = self.tensors[node["weights"][name]]
        require(stored.dtype.kind == "f", "weights are floating-point numbers")
        require(stored.size <= MAX_ENTRIES, "too many weights")
        return stored.astype(np.float64)

    def repeated(self, node, name, x):
        """A weight of a node, repeated to the shape of x for all samples."""
        return np.broadcast_to(self.tensor(node, name)[..., None], x.shape)

    def layer(self, node, size, kind=Layer):
        """The linear layer of a node on images of this size; its claimed norm is proved the first time."""
        layer = kind(self.tensor(node, "weight"), node, size)
        if self.constant is None:
            self.pay(layer.entries, layer.cost, math.prod(layer.taps))
            layer.check(number(node["upper"]), self.spend)
        return layer

    def pay(self, entries, cost, steps):
        """Count the memory and the time of a sample; many samples share the steps of a loop."""
        self.entries += entries
        require(self.entries <= MAX_ENTRIES, "the network is too large")
        self.cost += cost + 2**12 * steps
        self.spend(cost + STEP * steps)

    def spend(self, work, size=0):
        """Count multiplications; more bytes may take longer, so that a small file takes seconds."""
        self.left += 2**20 * size - work
        require(self.left >= 0, "this takes too long, for a bundle of this size")

    def size(self, layer, x):
        """A bound of the norm of `|W||x|`, for every sample."""
        return layer.scale * norm(x)

    def evaluate(self, x):
        """The value of the last node for a batch of inputs."""
        # an input was rounded when it was read, and when it was divided
        values = {"input": Value(x, gamma(2) * norm(x) + self.underflow, 1.0)}
        for node in self.nodes:
            name = node["name"]
            require(type(name) is str and name not in values, f"not a new name: {name!r:.100}")
            inputs = [values[source] for source in node["inputs"]]
            try:
                operation, attributes, weights = OPERATIONS[node["op"]]
                known(node, NODE + attributes)
                known(node["weights"], weights)
                step = operation(self, node, *[value.x for value in inputs])
                values[name] = self.bound(step, inputs)
            except Rejected as reason:
                raise Rejected(f"{name!r:.100}: {reason}") from None
        return values[name]

    def bound(self, step, inputs):
        """Errors and constants of the inputs, times the factor of a step; errors also have its own rounding."""
        error = step.factor * step.total([value.error for value in inputs], axis=0)
        error = (error + gamma(step.terms) * step.size) * SLACK + TINY
        constant = step.factor * step.total([value.constant for value in inputs]) * SLACK
        # no product of constants underflows
        require(1e-150 < constant < 1e150, "a Lipschitz constant out of range")
        require(np.isfinite(error).all(), "overflow")
        require(step.y.ndim > 1, "samples without channels")
        if self.constant is None:
            self.pay(step.y.size, 2**8 * step.y.size, 1)
        return Value(step.y, error, constant)


def provable_radius(network, z, error, label):
    """The largest radius that is proved for an input with the logits z, wrong by at most `error`; 0 if its label does not win.

    A perturbation of size r changes `z_y − z_j` by at most `r·K_yj`. So y wins if `z_y − z_j − 2·error ≥ r·K_yj` for all j.
    If the last layer is dense, with rows w, then `K_yj = ‖w_y − w_j‖·trunk`, the trunk being all layers below.
    """
    require(0 <= label < len(z), "a label is not one of the classes")
    constants = math.sqrt(2) * network.constant
    last = network.nodes[-1]
    if last["op"] == "linear" and last["groups"] == 1:
        weight = network.tensor(last, "weight")
        constants = norm((weight[label] - weight).T) * network.constant / last["upper"]
    margins = z[label] - z - 2 * error
    ratios = np.delete(margins / (constants * SLACK + TINY), label)
    return max(0.0, ratios.min() / SLACK)


def provable_radii(network, x, divisor, labels):
    """The largest radius that is proved for each input; inputs are divided by the divisor first."""
    network.spend(len(x) * network.cost, x.nbytes)
    proved = []
    size = max(1, 2**25 // network.entries)
    for start in range(0, len(x), size):
        some = slice(start, start + size)
        batch = np.moveaxis(x[some], 0, -1).astype(np.float64) / divisor
        value = network.evaluate(batch)
        require(value.x.ndim == 2, "the network does not end in a vector of logits")
        errors = value.error + 4 * U * norm(value.x)
        for z, error, label in zip(value.x.T, errors, labels[some]):
            proved.append(provable_radius(network, z, error, label))
    return np.array(proved)


def read_inputs(network, inputs, claim):
    """Inputs, labels and radii of a claim, and the counts of inputs that it states, in words."""
    known(claim, RADII)
    x, labels, radii = [inputs[name] for name in ("x", "labels", claim["radii"])]
    require(radii.dtype.kind == "f", "radii are floating-point numbers")
    radii = radii.astype(np.float64)  # others would be compared in their own precision
    require(x.shape[1:] == network.shape, "the network takes inputs of another shape")
    require(labels.shape == radii.shape == x.shape[:1], "every input has a label and a radius")
    sentences = []
    for epsilon, count in claim["certified"].items():
        distance = number(float(epsilon))
        enough = integer(count, 0) <= (radii >= distance).sum()
        require(enough, f"fewer than {count} inputs are certified at {distance}")
        sentences.append(f"{count} inputs keep their label within l2 distance {distance}")
    return x, labels, radii, sentences


def check_radii(network, inputs, claim):
    """Prove that no perturbation of an input within its claimed radius changes its label; radius 0 claims nothing."""
    x, labels, radii, sentences = read_inputs(network, inputs, claim)
    chosen = np.flatnonzero(radii)
    proved = provable_radii(network, x[chosen], integer(claim["divisor"]), labels[chosen])
    for index in chosen[~(radii[chosen] <= proved)]:
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
    weights = files.get("weights.safetensors")
    network = weights and Network(document, weights)
    proved = []
    for name, claim in document["claims"].items():
        require(name in CLAIMS, f"this program does not check claims of the kind {name!r:.99}")
        proved += CLAIMS[name](network, files.get("inputs.safetensors"), claim)
    require(proved, "nothing is claimed")
    return proved


def run(check):
    """Check the bundle that is named on the command line, and print the verdict."""
    np.seterr(all="ignore")
    try:
        proved = check(sys.argv[1])
    except Exception as error:  # a malformed bundle is rejected, whatever it breaks
        reason = error if type(error) is Rejected else f"malformed bundle, {error!r:.300}"
        # control characters of a name could hide this
        sys.exit("REJECTED: " + "".join(filter(str.isprintable, str(reason))))
    print("\n  ".join(["ACCEPTED", *proved]))


if __name__ == "__main__":
    # the files beside this one know more operations and claims
    sys.modules["check"] = sys.modules["__main__"]
    for path in Path(__file__).parent.glob("check_*.py"):
        importlib.import_module(path.stem)
    run(check)
