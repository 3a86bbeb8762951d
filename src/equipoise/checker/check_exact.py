"""Check a bundle of a dense ReLU network in exact arithmetic: `python check_exact.py DIR` prints ACCEPTED or REJECTED.

The claims are those of `check.py`, which must be beside this file with `check_local.py`: they read the bundle. Here nothing
is rounded. Weights, inputs and radii are floats, so they are integers over powers of two; sums and products are done with
Python's integers. Only the witness of a norm, a Cholesky factor, is found in floating point; it is rounded to integers, and
then checked exactly.
"""

from fractions import Fraction

import numpy as np

if __package__:
    from equipoise.checker.check import Network, Rejected, integer, number, read_bundle, read_inputs, require, run
    from equipoise.checker.check_local import dense_layers
else:
    from check import Network, Rejected, integer, number, read_bundle, read_inputs, require, run
    from check_local import dense_layers

#: the witness is rounded to multiples of 2^-40 of the norm
BITS = 40


def integers_of(array):
    """Integers n and an exponent e with `array = n/2^e`, exactly."""
    mantissa, exponent = np.frexp(np.asarray(array, dtype=np.float64))
    whole = (mantissa * 2.0**53).astype(np.int64).astype(object)
    exponent = np.where(whole == 0, 0, exponent.astype(object) - 53)
    lowest = int(exponent.min())
    require(lowest > -1200, "a number is too small")
    lowest = min(0, lowest)
    return whole * 2 ** (exponent - lowest), -lowest


def check_norm(weight, s):
    """Prove `‖W‖ ≤ s`: `s²I − WWᵀ − LLᵀ` is diagonally dominant, so `WWᵀ ⪯ s²I`; L is a rounded Cholesky factor."""
    if weight.shape[0] > weight.shape[1]:
        weight = weight.T
    n = len(weight)
    reason = f"a spectral norm is not proved to be at most {s!r}"
    try:
        factor = np.linalg.cholesky(np.eye(n) * (s * s * (1 - 2.0**-30)) - weight @ weight.T)
    except np.linalg.LinAlgError:
        raise Rejected(reason) from None
    whole, e = integers_of(weight)
    unit = 2 ** max(0, BITS - int(np.ceil(np.log2(s))))
    witness = np.rint(factor * unit).astype(np.int64).astype(object)

    # everything times the common denominator of s², W and L
    square = Fraction(s) ** 2
    rest = -whole.dot(whole.T) * (square.denominator * unit**2) - witness.dot(witness.T) * (square.denominator * 4**e)
    rest[np.diag_indices(n)] += square.numerator * unit**2 * 4**e
    diagonal = rest.diagonal()
    others = np.abs(rest).sum(axis=1) - np.abs(diagonal)
    require((diagonal >= others).all(), reason)


def logits(layers, x, divisor):
    """Integers n and a denominator d: the logits are `n/d`."""
    value, e = integers_of(x.ravel())
    denominator = 2**e * divisor
    for index, (weight, power, bias, bias_power) in enumerate(layers):
        if index:
            value = np.maximum(value, 0)
        value = weight.dot(value) * 2**bias_power + bias * (denominator * 2**power)
        denominator *= 2 ** (power + bias_power)
    return value, denominator


def check(folder):
    """Check every claim of a bundle; returns the claims that were proved, in words."""
    document, files = read_bundle(folder)
    network = Network(document, files["weights.safetensors"])
    claims = document["claims"]
    require(set(claims) == {"lipschitz", "radii"}, "exact checks are for bundles with a constant and radii")
    require("deployed" not in claims["radii"], "exact checks are not for deployed networks")
    layers = []
    constant = Fraction(1)
    norms = [node["upper"] for node in network.nodes if node["op"] == "linear"]
    for (weight, bias), s in zip(dense_layers(network), norms):
        check_norm(weight, float(s))
        trunk = constant
        constant *= Fraction(s)
        layers.append((*integers_of(weight), *integers_of(bias)))
    require(constant <= Fraction(number(claims["lipschitz"])), "the Lipschitz constant is not proved")

    x, labels, radii, sentences = read_inputs(network, files["inputs.safetensors"], claims["radii"])
    divisor = integer(claims["radii"]["divisor"])
    rows, e = layers[-1][:2]
    require(((labels >= 0) & (labels < len(rows))).all(), "a label is not one of the classes")
    for index in np.flatnonzero(radii):
        value, denominator = logits(layers, x[index], divisor)
        label = labels[index]
        scaled = (Fraction(radii[index]) * trunk) ** 2 / 4**e
        for rival in range(len(rows)):
            margin = Fraction(value[label] - value[rival], denominator)
            square = scaled * sum((rows[label] - rows[rival]) ** 2)
            proved = rival == label or (margin > 0 and margin**2 >= square)
            require(proved, f"input {index}: the radius {radii[index]} is not proved")
    constant_proved = f"Lipschitz constant at most {claims['lipschitz']} in the l2 norm"
    return [f"{sentence}, exactly" for sentence in [constant_proved, *sentences]]


if __name__ == "__main__":
    run(check)
