"""Check a certificate bundle: `python check.py DIR` prints ACCEPTED, or REJECTED and the first claim that fails.

This file needs Python 3.10 and NumPy, and nothing of equipoise or PyTorch. A bundle is a folder with

    certificate.json       the network as a list of plain operations, and the claims
    weights.safetensors    its weights
    inputs.safetensors     inputs, labels, claimed radii (if any input is certified)

The claims are about the real function of the stored weights. They are checked in float64, and every rounding error made here is
bounded and counted against the claim: `U` is half a unit in the last place, `gamma(n)` the error of a sum of n products in any
order, relative to the sum of their sizes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).

`check_layers.py` knows more operations; `check_dense.py` and `check_smoothing.py` know more claims.
"""

import hashlib
import importlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

U = 2.0**-53
FLOAT32 = 2.0**-24

#: covers underflow here: far below every number that matters, since norms below 1e-100 are not accepted
TINY = 1e-250

#: covers the few roundings of a short scalar formula
SLACK = 1 + 2.0**-45

#: what an operation may lose by underflow, and the largest norm of its terms: in float64, in float32
UNDERFLOW = np.array([[TINY], [2.0**-90]])
OVERFLOW = np.array([[1e290], [1e30]])

MAX_BYTES = 2**31
MAX_NODES = 10_000
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
    require(type(value) in (int, float), f"expected a number, got {str(value)[:40]!r}")
    require(low <= value <= high, f"expected a number from {low} to {high}, got {value}")
    return value


def integer(value, low=1, high=MAX_ENTRIES):
    """A whole number of a JSON document in a range."""
    require(type(value) is int, f"expected a whole number, got {str(value)[:40]!r}")
    return number(value, low, high)


def integers(values, count, low=1, high=4096):
    """A list of whole numbers."""
    require(type(values) is list, "expected a list")
    require(len(values) == count, f"expected a list of {count} whole numbers")
    return [integer(value, low, high) for value in values]


# --- the files -------------------------------------------------------------------------------------------------------


def read_json(text):
    """JSON in which no key occurs twice."""

    def unique(pairs):
        require(len(dict(pairs)) == len(pairs), "a key occurs twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def read_tensors(content):
    """The tensors of a safetensors file: eight bytes with the length of a JSON header, the header, raw numbers."""
    begin = 8 + int.from_bytes(content[:8], "little")
    require(begin <= len(content), "the header of a tensor file is longer than the file")
    header = read_json(content[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = integers(entry["data_offsets"], 2, 0, len(content) - begin)
        require(start <= stop, f"tensor {name} ends before it starts")
        tensor = np.frombuffer(content[begin + start : begin + stop], DTYPES[entry["dtype"]])
        require(np.isfinite(tensor).all(), f"tensor {name} is not finite")
        tensors[name] = tensor.reshape(entry["shape"])
    return tensors


def read_bundle(folder):
    """The document of a bundle, and the tensors of its files by name."""
    contents = {}
    for path in Path(folder).iterdir():
        if path.name in ("certificate.json", "weights.safetensors", "inputs.safetensors"):
            require(
                path.is_file() and path.stat().st_size <= MAX_BYTES,
                f"{path.name} is no regular file, or too large",
            )
            contents[path.name] = path.read_bytes()
    require("certificate.json" in contents, "certificate.json is missing")
    document = read_json(contents["certificate.json"])
    require(
        document["format"] == "equipoise-bundle" and document["version"] == 1,
        "not a bundle of version 1",
    )
    files = {}
    for name, digest in document["digests"].items():
        require(name in contents, f"{name} is missing")
        require(
            hashlib.sha256(contents[name]).hexdigest() == digest,
            f"{name} has another digest than the certificate",
        )
        files[name] = read_tensors(contents[name])
    return document, files


# --- norms -----------------------------------------------------------------------------------------------------------


def gamma(n, unit=U):
    """`n·u/(1 − n·u)`, rounded up; u may be an array."""
    require(np.all(n * unit < 0.01), "a sum is too long for its rounding to be bounded")
    return n * unit / (1 - n * unit) * SLACK


def norm(x):
    """The l2 norm of every sample, rounded up."""
    flat = x.reshape(len(x), -1)
    return np.sqrt(np.sum(flat * flat, axis=1)) * (1 + gamma(flat.shape[1] + 8)) + TINY


def check_gram(gram, error, s):
    """Prove `‖A‖ ≤ s` for a batch of Gram matrices `AA*`, computed with an error of at most `error` in the spectral norm.

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


# --- operations ------------------------------------------------------------------------------------------------------


@dataclass
class Value:
    """A batch of values of a node.

    `error` has two rows. The first bounds the l2 distance of x to the exact values. The second bounds the distance of what a
    forward pass in float32 computes to the exact values, both at any input within the claimed radius.
    """

    x: np.ndarray
    error: np.ndarray
    constant: float


@dataclass
class Step:
    """What an operation does: values, Lipschitz constant, and its rounding error, at most `gamma(terms)·size`.

    `size` is a norm for every sample; it grows at most by `reach` times the distance of the input.
    """

    y: np.ndarray
    factor: float
    terms: int = 0
    size: np.ndarray | float = 0.0
    reach: float = 0.0


def linear(network, node, x):
    """A dense layer, `Wx + b`; its claimed norm is proved the first time."""
    weight = network.tensor(node, "weight")
    require(weight.ndim == x.ndim == 2, f"{node['name']}: expected a matrix and a vector")
    if node["name"] not in network.proved:
        check_matrix(weight, number(node["upper"]))
        network.proved[node["name"]] = weight
    frobenius = float(norm(weight.reshape(1, -1))[0])
    size = norm(np.abs(x) @ np.abs(weight.T))
    step = Step(x @ weight.T, node["upper"], weight.shape[1] + 2, size, frobenius)
    return add_bias(network, node, step)


def add_bias(network, node, step):
    """The bias of a layer, with its share of the rounding."""
    if "bias" in node["weights"]:
        shape = step.y[:1].shape
        bias = np.broadcast_to(network.tensor(node, "bias"), shape)
        step.y = step.y + bias
        step.size = step.size + norm(bias)
    return step


def add(network, node, *parts):
    """A sum of values."""
    require(len({part.shape for part in parts}) == 1, "a sum of different shapes")
    require(len(parts) <= 64, "a sum of too many values")
    return Step(sum(parts), 1.0, len(parts), sum(norm(part) for part in parts), len(parts))


def relu(network, node, x):
    """Negative entries become 0: nothing is rounded, and no distance grows."""
    return Step(np.maximum(x, 0), 1.0)


def reshape(network, node, x):
    """The entries of every sample in another shape."""
    shape = [integer(n) for n in node["shape"]]
    return Step(x.reshape(len(x), *shape), 1.0)


OPERATIONS = {"linear": linear, "add": add, "relu": relu, "reshape": reshape}


# --- networks --------------------------------------------------------------------------------------------------------


class Network:
    """The nodes of a bundle; norms are proved when a node is evaluated for the first time."""

    def __init__(self, document, tensors):
        self.nodes = document["nodes"]
        require(
            type(self.nodes) is list and 0 < len(self.nodes) <= MAX_NODES, "no nodes, or too many"
        )
        names = {"input", *[node["name"] for node in self.nodes]}
        require(len(names) == len(self.nodes) + 1, "a node's name occurs twice")
        self.shape = integers(document["input_shape"], len(document["input_shape"]), 1, MAX_ENTRIES)
        self.tensors = tensors
        self.proved = {}
        #: unit roundoff of this program, and of the deployed network (0: not claimed)
        self.units = np.array([[U], [0.0]])
        self.largest = math.prod(self.shape)
        require(0 < self.largest <= MAX_ENTRIES, "impossible input shape")
        self.constant = self.evaluate(np.zeros((1, *self.shape)), np.zeros(1)).constant

    def tensor(self, node, name):
        """A weight of a node in float64."""
        return self.tensors[node["weights"][name]].astype(np.float64)

    def evaluate(self, x, radii):
        """The value of the last node for a batch of inputs; deployed, for all inputs within these radii.

        Errors and constants behind an operation are those before it times its factor; errors also have its own rounding.
        """
        values = {"input": Value(x, np.stack([U * norm(x), np.zeros(len(x))]), 1.0)}
        for node in self.nodes:
            require(
                node["op"] in OPERATIONS,
                f"unknown operation {node['op']!r}; check_layers.py knows more",
            )
            inputs = [values[name] for name in node["inputs"]]
            step = OPERATIONS[node["op"]](self, node, *[value.x for value in inputs])
            require(
                len(step.y) == len(x) and 0 < step.y.size <= MAX_ENTRIES,
                f"{node['name']}: impossible size",
            )
            error = sum(value.error for value in inputs)
            constant = sum(value.constant for value in inputs)

            # how far the values of a deployed network may be from x
            drift = constant * radii + error.sum(axis=0)
            sizes = np.stack([step.size + 0 * drift, step.size + step.reach * drift])
            require((sizes < OVERFLOW)[self.units[:, 0] > 0].all(), f"{node['name']}: overflow")
            rounding = gamma(step.terms, self.units) * sizes
            error = (step.factor * error + rounding) * SLACK + UNDERFLOW
            value = Value(step.y, error, step.factor * constant * SLACK)
            require(
                np.isfinite(step.y).all() and value.constant < 1e200, f"{node['name']}: overflow"
            )
            self.largest = max(self.largest, step.y[0].size)
            values[node["name"]] = value
        return value

    def pairs(self, classes):
        """Lipschitz constants of `z_i − z_j` for all pairs of classes; sharper behind a last dense layer."""
        pairs = np.full((classes, classes), math.sqrt(2) * self.constant * SLACK)
        last = self.nodes[-1]
        if last["op"] == "linear":
            weight = self.tensor(last, "weight")
            trunk = self.constant / last["upper"] * SLACK
            for row, target in zip(weight, pairs):
                np.minimum(target, norm(row - weight) * trunk * SLACK, out=target)
        return pairs


# --- claims ----------------------------------------------------------------------------------------------------------


def provable_radii(network, batch, labels, radii):
    """The largest radius that is proved for each input, 0 where its label does not win; deployed, if it is at most `radii`.

    With z the logits and e their error, `z_y − z_j − 2e ≥ r·K_yj` for every other class j, K_yj the constant of `z_y − z_j`.
    """
    value = network.evaluate(batch, radii)
    z = value.x
    rows = np.arange(len(batch))
    require(z.ndim == 2, "the network does not end in a vector of logits")
    require(((labels >= 0) & (labels < z.shape[1])).all(), "a label is not one of the classes")
    used = value.error if network.units[1, 0] else value.error[:1]
    error = 2 * used.sum(axis=0) + 4 * U * norm(z)
    margins = z[rows, labels][:, None] - z - error[:, None]
    constants = np.maximum(network.pairs(z.shape[1])[labels], TINY)
    ratios = np.maximum(margins, 0) / (constants * SLACK)
    ratios[rows, labels] = np.inf
    return ratios.min(axis=1) / SLACK


def read_inputs(network, inputs, claim):
    """Inputs, labels and radii of a claim, and the counts of inputs that it states, in words."""
    x = inputs["x"]
    labels = inputs["labels"]
    radii = inputs[claim["radii"]]
    require(
        labels.dtype == np.int64 and labels.shape == (len(x),),
        "expected a whole number as label of every input",
    )
    require(
        radii.dtype == np.float64 and radii.shape == (len(x),),
        "expected a radius in float64 for every input",
    )
    require((radii >= 0).all() and (radii < 1e100).all(), "a radius is negative or too large")
    require(
        list(x.shape[1:]) == network.shape, "the inputs have another shape than the network takes"
    )
    sentences = []
    for epsilon, count in claim["certified"].items():
        distance = number(float(epsilon))
        require(
            integer(count, 0) <= (radii >= distance).sum(),
            f"fewer inputs are certified at {distance}",
        )
        sentences.append(f"{count} inputs keep their label within l2 distance {distance}")
    return x, labels, radii, sentences


def check_radii(network, inputs, claim):
    """Prove that no perturbation of an input within its claimed radius changes its label; radius 0 claims nothing."""
    x, labels, radii, sentences = read_inputs(network, inputs, claim)
    divisor = integer(claim["divisor"])
    if "deployed" in claim:
        require(claim["deployed"] == "float32", "only float32 can be claimed of a deployed network")
        exact = all(tensor.dtype != np.float64 for tensor in network.tensors.values())
        require(exact, "a network in float32 has weights in float32")
        network.units = np.array([[U], [FLOAT32]])
        sentences = [f"{sentence}, executed in float32" for sentence in sentences]
    claimed = np.flatnonzero(radii)
    size = max(1, min(500, 2**25 // network.largest))
    for start in range(0, len(claimed), size):
        chosen = claimed[start : start + size]
        batch = x[chosen].astype(np.float64) / divisor
        proved = provable_radii(network, batch, labels[chosen], radii[chosen])
        for index in chosen[~(radii[chosen] <= proved)]:
            raise Rejected(f"input {index}: the radius {radii[index]} is not proved")
    return sentences


def check_lipschitz(network, inputs, claim):
    """Prove a Lipschitz constant of the whole network."""
    require(
        network.constant <= number(claim),
        f"the network is proved {network.constant!r}-Lipschitz only",
    )
    return [f"Lipschitz constant at most {claim} in the l2 norm"]


CLAIMS = {"lipschitz": check_lipschitz, "radii": check_radii}


def check(folder):
    """Check every claim of a bundle; returns the claims that were proved, in words."""
    document, files = read_bundle(folder)
    network = None
    if "weights.safetensors" in files:
        network = Network(document, files["weights.safetensors"])
    require(document["claims"], "nothing is claimed")
    proved = []
    for name, claim in document["claims"].items():
        require(name in CLAIMS, f"this program does not check claims of the kind {name!r}")
        proved += CLAIMS[name](network, files.get("inputs.safetensors"), claim)
    return proved


def run(check):
    """Check the bundle that is named on the command line, and print the verdict; exit code 0 if it is accepted."""
    try:
        with np.errstate(all="ignore"):
            proved = check(sys.argv[1])
    except Exception as error:  # a malformed bundle is rejected, whatever it breaks
        kind = "" if isinstance(error, Rejected) else f"malformed bundle ({type(error).__name__}): "
        print(f"REJECTED: {kind}{str(error)[:300]}")
        sys.exit(1)
    print("\n  ".join(["ACCEPTED", *proved]))


if __name__ == "__main__":
    # the files beside this one know more operations and claims
    sys.modules["check"] = sys.modules["__main__"]
    for path in Path(__file__).parent.glob("check_*.py"):
        importlib.import_module(path.stem)
    run(check)
