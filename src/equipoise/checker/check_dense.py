"""Dense ReLU networks for `check.py`: local certificates, and exact arithmetic.

This file belongs beside `check.py` and follows its rules; `python check.py DIR` finds it there. A local certificate bounds the
network on the ball around an input alone.

*Ranges.* A row A of `z = Wv + b` is pushed back to the input, each ReLU between its chord above and the line 0 or z below
(CROWN, Zhang et al. 2018); it ends as `A'x + c ± r‖A'‖`. So every neuron has a range on the ball.

*Differences.* Between the input and any point of the ball, a neuron that cannot switch has a constant slope. For the others,
`δy = m·δz + w·v` with `|v| ≤ |δz|`, m and w the middle and half-width of the slopes. Pushing rows back gives `δz = Cδx + Dv`
for these neurons and, below them, for the margins divided by their values at the input. If `diag(σ, L)⁻¹ [C, D·diag(σ)]` has
norm at most 1 for some σ > 0, the margins' part changes at most by `L‖δx‖` (Fazlyab et al. 2019). With `L·r < 1` no margin
vanishes. σ² is the witness.

*Exact.* `python check_dense.py DIR` checks the claims of `check.py` with nothing rounded. Weights, inputs and radii are floats,
so they are integers over powers of two; sums and products are done with Python's integers. Only the witness of a norm, a Cholesky
factor, is found in floating point; it is rounded to integers, and then checked exactly.
"""

from fractions import Fraction

import numpy as np

if __package__:
    from equipoise.checker.check import *
else:
    from check import *

#: covers the rounding of sums of up to a million positive numbers
WIDER = 1 + 1e-9

#: the exact witness is rounded to multiples of 2^-40 of the norm
BITS = 40


def dense_layers(network):
    """Weights and biases of a chain of dense layers with ReLU between them."""
    layers = []
    previous = "input"
    expected = "linear"
    for node in network.nodes:
        require(node["inputs"] == [previous], "expected a chain of dense layers")
        previous = node["name"]
        op = node["op"]
        if op == "reshape":
            require(not layers, "expected no reshape behind a dense layer")
            continue
        require(op == expected, f"{previous}: expected {expected}, got {op}")
        expected = "relu" if op == "linear" else "linear"
        if op == "linear":
            weight = network.tensor(node, "weight")
            bias = network.tensor(node, "bias")
            require(bias.shape == (len(weight),), f"{previous}: a bias of another size")
            layers.append((weight, bias))
    require(expected == "relu", "expected a dense layer at the end")
    return layers


class Ball:
    """What is known of the neurons of every layer for inputs within a radius of x.

    `centre` is the value at x, within `slip`; `low ≤ z ≤ high` on the ball; `moved` bounds `|δz|/‖δx‖`. Rounding while a row
    A is pushed back through a layer costs at most `|A|·spread` for values.
    """

    def __init__(self, layers, x, radius):
        neurons = sum(len(bias) for _, bias in layers)
        require(neurons * (neurons + len(x)) <= 2**25, "too many neurons for local certificates")
        self.layers = layers
        self.x = x
        self.radius = radius
        self.centre = []
        self.slip = []
        self.low = []
        self.high = []
        self.moved = []
        self.spread = []
        value = x
        slip = U * np.abs(x)
        size = (np.abs(x) + radius) * WIDER
        for k, (weight, bias) in enumerate(layers):
            absolute = np.abs(weight)
            moved = absolute @ self.moved[-1] * WIDER if k else norm(weight.T)
            self.moved.append(moved)
            self.spread.append(self.unit(k) * (absolute @ size + np.abs(bias)) + TINY)
            slip = (
                absolute @ slip + self.unit(k) * (absolute @ np.abs(value) + np.abs(bias))
            ) * WIDER + TINY
            value = weight @ value + bias
            self.slip.append(slip)
            self.centre.append(value)
            unit = np.eye(len(bias))
            self.low.append(self.lower(k, unit))
            self.high.append(-self.lower(k, -unit))
            require(
                np.isfinite([self.low[k], self.high[k]]).all(), "the range of a neuron overflows"
            )
            value = np.maximum(value, 0)
            size = np.maximum(self.high[k], 0)

    def unit(self, k):
        """Twice the relative rounding of products with the weight of a layer."""
        return 2 * gamma(max(self.layers[k][0].shape) + 4 * len(self.layers) + 16)

    def lower(self, k, rows):
        """A lower bound of `rows·z` on the ball, z the neurons of layer k."""
        constant = 0.0
        error = 0.0
        for i in range(k, -1, -1):
            weight, bias = self.layers[i]
            error = error + np.abs(rows) @ self.spread[i]
            constant = constant + rows @ bias
            rows = rows @ weight
            if i:
                below, above, offset = self.lines(i - 1)
                negative = np.minimum(rows, 0)
                constant = constant + negative @ offset
                error = error - self.unit(i) * (negative @ offset)
                rows = np.maximum(rows, 0) * below + negative * above
        reach = self.radius * norm(rows.T) * WIDER
        value = rows @ self.x + constant
        error = error + gamma(len(self.x) + 16) * (np.abs(rows) @ np.abs(self.x))
        return (
            value
            - reach
            - error * WIDER
            - 8 * U * (np.abs(constant) + np.abs(value) + reach)
            - TINY
        )

    def lines(self, k):
        """Slopes of the lines below and above a ReLU on its range; the upper line has an offset."""
        low, high = self.low[k], self.high[k]
        switching = (low < 0) & (high > 0)
        fixed = np.where(low >= 0, 1.0, 0.0)
        above = np.where(switching, high / np.where(switching, high - low, 1.0), fixed)
        below = np.where(switching, high > -low, fixed)
        # a line that is above at both ends is above between them
        offset = np.maximum(-above * low, high - above * high) + 4 * U * (high - low)
        return below, above, np.where(switching, offset, 0.0)

    def slopes(self, k):
        """Middle and half-width of the slopes of ReLU between the centre and a point of the ball."""
        low, high = self.low[k], self.high[k]
        right = np.maximum(self.centre[k] - self.slip[k], 0)
        left = np.minimum(self.centre[k] + self.slip[k], 0)
        least = np.where(low >= 0, 1.0, right / np.where(low < 0, right - low, 1.0))
        most = np.where(high <= 0, 0.0, high / np.where(high > 0, high - left, 1.0))
        middle = (least + most) / 2
        return middle, np.where(most > least, (most - least) / 2 + 4 * U, 0.0)

    def differences(self, k, rows):
        """`rows·δz = Cδx + Dv`: the parts C and D of the rows, and what rounding adds, per unit of `‖δx‖`."""
        parts = []
        error = 0.0
        for i in range(k, -1, -1):
            error = error + self.unit(i) * (np.abs(rows) @ self.moved[i])
            rows = rows @ self.layers[i][0]
            if i:
                middle, width = self.slopes(i - 1)
                error = error + 8 * U * (np.abs(rows) @ self.moved[i - 1])
                parts.insert(0, rows * width)
                rows = rows * middle
        later = [np.zeros((len(rows), len(bias))) for _, bias in self.layers[k:-1]]
        return rows, np.concatenate([*parts, *later], axis=1), error * WIDER

    def open_margins(self, label):
        """The margins that the ranges do not prove positive on the ball, as rows, divided by their values at the centre."""
        logits = self.centre[-1]
        unit = np.eye(len(logits))
        require(0 <= label < len(logits), "the label is not one of the classes")
        margins = np.delete(unit[label] - unit, label, axis=0)
        lost = np.abs(margins) @ (self.slip[-1] * WIDER + 4 * U * np.abs(logits))
        values = margins @ logits - lost
        require((values > 0).all(), "the label does not win at the input")
        unproved = ~(self.lower(len(self.layers) - 1, margins) > 0)
        return (margins / values[:, None])[unproved]

    def maps(self, margins):
        """C, D and rounding of the neurons that may switch and of the margins below them, and which neurons may switch."""
        last = len(self.layers) - 1
        stacks = [self.differences(k, np.eye(len(self.centre[k]))) for k in range(last)]
        stacks.append(self.differences(last, margins))
        C, D, slack = [np.concatenate(parts) for parts in zip(*stacks)]
        switching = np.concatenate([self.slopes(k)[1] > 0 for k in range(last)])
        kept = np.concatenate([switching, np.full(len(margins), True)])
        return C[kept], D[kept][:, switching], slack[kept], switching

    def check(self, label, multipliers, spend=None):
        """Prove that the label wins on the whole ball."""
        margins = self.open_margins(label)
        if not len(margins):
            return
        C, D, slack, switching = self.maps(margins)
        sigma = np.sqrt(multipliers[switching])
        require(
            (sigma > 1e-100).all() and (sigma < 1e100).all(), "multipliers must be positive numbers"
        )
        L = (1 - 1e-9) / self.radius
        scale = np.concatenate([sigma, np.full(len(margins), L)])
        R = np.concatenate([C, D * sigma], axis=1) / scale[:, None]
        error = norm((slack / scale)[:, None]) + 16 * U * norm(R.reshape(-1, 1))
        check_norm(R, float(1 - error[0] * WIDER), spend=spend)


def ball_cost(layers):
    """Multiplications that push rows of every layer back: twice for their ranges, once for differences."""
    cost = STEP * len(layers) ** 2
    below = 0
    for weight, bias in layers:
        below += weight.size + 128 * weight.shape[1]
        cost += 3 * len(bias) * below
    return cost


def check_local(network, inputs, claim):
    """Prove the claimed radii one by one; radius 0 claims nothing."""
    x, labels, radii, sentences = read_inputs(network, inputs, claim)
    layers = dense_layers(network)
    chosen = np.flatnonzero(radii)
    multipliers = inputs["multipliers"]
    network.spend(len(chosen) * ball_cost(layers), x.nbytes + multipliers.nbytes)
    for index in chosen:
        image = x[index].astype(np.float64).ravel() / integer(claim["divisor"])
        try:
            ball = Ball(layers, image, radii[index])
            ball.check(labels[index], multipliers[index], network.spend)
        except Rejected as error:
            raise Rejected(
                f"input {index}: the radius {radii[index]} is not proved: {error}"
            ) from None
    return [f"{sentence}, by local bounds" for sentence in sentences]


CLAIMS["local"] = check_local


# --- exact ---


def integers_of(array, unit):
    """The entries times the unit, as integers: exact, since the unit is a large power of two."""
    entries = [int(Fraction(entry) * unit) for entry in array.ravel().tolist()]
    return np.array(entries, object).reshape(array.shape)


def check_norm_exactly(weight, unit, s):
    """Prove `‖W‖ ≤ s`: `s²I − WWᵀ − LLᵀ` is diagonally dominant, so `WWᵀ ⪯ s²I`; L is a rounded Cholesky factor."""
    if weight.shape[0] > weight.shape[1]:
        weight = weight.T
    n = len(weight)
    reason = f"a spectral norm is not proved to be at most {s!r}"
    try:
        factor = np.linalg.cholesky(np.eye(n) * (s * s * (1 - 2.0**-30)) - weight @ weight.T)
    except np.linalg.LinAlgError:
        raise Rejected(reason) from None

    # W, L and s times a common denominator
    step = 2 ** max(0, BITS - int(np.ceil(np.log2(s))))
    whole = integers_of(weight, unit) * step
    witness = np.rint(factor * step).astype(np.int64).astype(object) * unit
    square = (Fraction(s) * unit * step) ** 2
    rest = (whole.dot(whole.T) + witness.dot(witness.T)) * -square.denominator
    rest[np.diag_indices(n)] += square.numerator

    diagonal = rest.diagonal()
    others = np.abs(rest).sum(axis=1) - np.abs(diagonal)
    require((diagonal >= others).all(), reason)


def check_exact(folder):
    """Check every claim of a bundle; returns the claims that were proved, in words."""
    document, files = read_bundle(folder)
    tensors = files["weights.safetensors"]
    inputs = files["inputs.safetensors"]
    claims = document["claims"]
    require(set(claims) == {"lipschitz", "radii"}, "exact are a constant and radii only")
    network = Network(document, tensors)
    double = any(tensor.dtype == np.float64 for tensor in [inputs["x"], *tensors.values()])
    unit = 2 ** (1074 if double else 149)

    layers = []
    constant = Fraction(1)
    norms = [float(node["upper"]) for node in network.nodes if node["op"] == "linear"]
    for (weight, bias), s in zip(dense_layers(network), norms):
        # products of integers take longer, and the longer the deeper the network
        network.spend(2**10 * min(weight.shape) ** 2 * sum(weight.shape))
        check_norm_exactly(weight, unit, s)
        trunk = constant
        constant *= Fraction(s)
        layers.append((integers_of(weight, unit), integers_of(bias, unit)))
    proved = check_lipschitz(network, inputs, claims["lipschitz"])
    require(constant <= claims["lipschitz"], "the Lipschitz constant is not proved")

    x, labels, radii, sentences = read_inputs(network, inputs, claims["radii"])
    divisor = integer(claims["radii"]["divisor"])
    rows = layers[-1][0]
    size = sum(weight.size for weight, _ in layers)
    network.spend(2**7 * len(x) * len(layers) * size, x.nbytes)
    require(((labels >= 0) & (labels < len(rows))).all(), "a label is not one of the classes")
    for index in np.flatnonzero(radii):
        # the values are integers over a denominator
        value = integers_of(x[index].ravel(), unit)
        denominator = unit * divisor
        for k, (weight, bias) in enumerate(layers):
            if k:
                value = np.maximum(value, 0)
            value = weight.dot(value) + bias * denominator
            denominator *= unit

        label = labels[index]
        distance = Fraction(radii[index]) * trunk / unit
        for rival in range(len(rows)):
            margin = Fraction(value[label] - value[rival], denominator)
            square = distance**2 * sum((rows[label] - rows[rival]) ** 2)
            enough = rival == label or (margin > 0 and margin**2 > square)
            require(enough, f"input {index}: the radius {radii[index]} is not proved")
    return [f"{sentence}, exactly" for sentence in [*proved, *sentences]]


if __name__ == "__main__":
    run(check_exact)
