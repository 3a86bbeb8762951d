"""Check a bundle of a dense ReLU network in exact arithmetic: `python check_exact.py DIR` prints ACCEPTED or REJECTED.

The claims are those of `check.py`, which must be beside this file: it reads the bundle. Here nothing is rounded. Weights, inputs
and radii are floats, so they are integers over powers of two; sums and products are done with Python's integers. Only the
witness of a norm, a Cholesky factor, is found in floating point: it is rounded to integers, and then checked exactly.
"""

import argparse
import hashlib
import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

try:
    from equipoise.checker.check import Rejected, number, read_bytes, read_json, read_tensors, require
except ImportError:  # as a lone file, beside check.py
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from check import Rejected, number, read_bytes, read_json, read_tensors, require

#: the witness is rounded to multiples of 2^-40 of the norm
BITS = 40


def integers(array):
    """Integers n and an exponent e with `array = n/2^e`, exactly."""
    array = np.asarray(array, dtype=np.float64)
    mantissa, exponent = np.frexp(array)
    whole = (mantissa * 2.0**53).astype(np.int64).astype(object)
    exponent = np.where(whole == 0, 1024, exponent.astype(object) - 53)
    lowest = min(0, int(exponent.min()))
    require(lowest > -1200, "a number is too small")
    shift = np.where(whole == 0, 0, exponent - lowest)
    return whole * 2**shift, -lowest


def check_norm(weight, s):
    """Prove `‖W‖ ≤ s`: `s²I − WWᵀ − LLᵀ` is diagonally dominant, so `WWᵀ ⪯ s²I`; L is a rounded Cholesky factor."""
    if weight.shape[0] > weight.shape[1]:
        weight = weight.T
    n = len(weight)
    try:
        factor = np.linalg.cholesky(np.eye(n) * (s * s * (1 - 2.0**-30)) - weight @ weight.T)
    except np.linalg.LinAlgError:
        raise Rejected(f"a spectral norm is not proved to be at most {s!r}") from None
    whole, e = integers(weight)
    unit = 2 ** max(0, BITS - int(np.ceil(np.log2(s))))
    witness = np.rint(factor * unit).astype(np.int64).astype(object)
    square = Fraction(s) ** 2
    denominator = square.denominator * unit**2 * 4**e
    rest = -whole.dot(whole.T) * (square.denominator * unit**2) - witness.dot(witness.T) * (square.denominator * 4**e)
    rest[np.diag_indices(n)] += square.numerator * (denominator // square.denominator)
    for i in range(n):
        off = sum(abs(value) for j, value in enumerate(rest[i]) if j != i)
        require(rest[i][i] >= off, f"a spectral norm is not proved to be at most {s!r}")


class Network:
    """Dense layers and ReLU, with proved norms."""

    def __init__(self, document, tensors):
        self.layers, self.constant, previous = [], Fraction(1), "input"
        shape = [number(n, whole=True) for n in document["input_shape"]]
        for node in document["nodes"]:
            require(node["inputs"] == [previous], "exact checks are for chains of dense layers")
            previous, kind = node["name"], node.get("attributes", {}).get("kind")
            if node["op"] == "rearrange" and kind in ("relu", "reshape"):
                if kind == "relu":
                    self.layers.append(None)
                else:
                    require(node["attributes"]["shape"] == [math.prod(shape)], f"{previous}: not a flattening")
                    shape = [math.prod(shape)]
                continue
            require(node["op"] == "linear", f"{previous}: exact checks are for dense layers and ReLU")
            weight = tensors[node["weights"]["weight"]].astype(np.float64)
            require(weight.ndim == 2 and list(weight.shape[1:]) == shape, f"{previous}: not a dense layer of this size")
            shape = [len(weight)]
            bias = np.zeros(len(weight))
            if "bias" in node["weights"]:
                bias = tensors[node["weights"]["bias"]].astype(np.float64)
            require(bias.shape == (len(weight),), f"{previous}: bias of another size")
            s = number(node["upper"])
            require(1e-100 < s < 1e100, f"{previous}: the norm is out of range")
            check_norm(weight, float(s))
            self.trunk = self.constant
            self.constant *= Fraction(s)
            self.layers.append((*integers(weight), *integers(bias)))
            self.last = weight
        require(previous == document["nodes"][-1]["name"] and self.layers and self.layers[-1], "no last dense layer")

    def logits(self, x, divisor):
        """Integers n and a denominator d: the logits are `n/d`."""
        value, e = integers(x.reshape(-1))
        denominator = 2**e * divisor
        for layer in self.layers:
            if layer is None:
                value = np.maximum(value, 0)
                continue
            weight, power, bias, bias_power = layer
            value = weight.dot(value) * 2**bias_power + bias * (denominator * 2**power)
            denominator *= 2 ** (power + bias_power)
        return value, denominator


def check(folder):
    """Check every claim of a bundle; returns the claims that were proved, in words."""
    folder, files, proved = Path(folder), {}, []
    document = read_json(read_bytes(folder / "certificate.json"))
    require(document["format"] == "equipoise-bundle" and document["version"] == 1, "not a bundle of version 1")
    for name in ("weights.safetensors", "inputs.safetensors"):
        content = read_bytes(folder / name)
        require(hashlib.sha256(content).hexdigest() == document["digests"][name], f"{name} has another digest")
        files[name] = read_tensors(content)
    claims = document["claims"]
    require(set(claims) == {"lipschitz", "radii"}, "exact checks are for bundles with a constant and radii")
    network = Network(document, files["weights.safetensors"])
    require(network.constant <= Fraction(number(claims["lipschitz"])), "the Lipschitz constant is not proved")
    proved.append(f"Lipschitz constant at most {claims['lipschitz']} in the l2 norm, exactly")

    claim, inputs = claims["radii"], files["inputs.safetensors"]
    x, labels, radii = inputs[claim["x"]], inputs[claim["labels"]], inputs[claim["radii"]].astype(np.float64)
    require(len(x) == len(labels) == len(radii) and labels.dtype == np.int64, "inputs, labels, radii differ")
    require((radii >= 0).all() and list(x.shape[1:]) == document["input_shape"], "impossible radii or inputs")
    divisor = number(claim.get("divisor", 1), whole=True)
    require(divisor > 0, "impossible scale of the inputs")
    classes = len(network.last)
    require(((labels >= 0) & (labels < classes)).all(), "a label is not one of the classes")
    rows, e = integers(network.last)
    for index in np.flatnonzero(radii):
        value, denominator = network.logits(x[index], divisor)
        label, square = int(labels[index]), (Fraction(float(radii[index])) * network.trunk) ** 2
        for rival in range(classes):
            if rival == label:
                continue
            apart = Fraction(int(sum(d * d for d in rows[label] - rows[rival])), 4**e)
            margin = Fraction(int(value[label] - value[rival]), denominator)
            require(margin > 0 and margin**2 >= square * apart, f"input {index}: the radius is not proved")
    for epsilon, count in claim.get("certified", {}).items():
        require(0 < float(epsilon) < float("inf"), "a certified distance must be positive")
        require(number(count, whole=True) <= int((radii >= float(epsilon)).sum()), f"fewer inputs at {float(epsilon)}")
        proved.append(f"{count} inputs keep their label within l2 distance {float(epsilon)}, exactly")
    return proved


def main():
    """Print the verdict; exit code 0 if the bundle is accepted."""
    parser = argparse.ArgumentParser(description="Check a bundle of a dense ReLU network in exact arithmetic.")
    parser.add_argument("folder", help="the folder of the bundle")
    try:
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
