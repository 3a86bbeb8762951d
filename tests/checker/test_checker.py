"""The lone checker: it accepts what the writer writes, rejects what is false, and never crashes."""

import hashlib
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load as read_tensors
from safetensors.numpy import save as write_tensors
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise import certificates
from equipoise.checker import check as checker
from equipoise.checker import check_dense, check_deployed, check_layers, check_smoothing
from equipoise_lab.fuzz.bundles import NETWORKS, dense, is_true, make, mutate, reference

pytestmark = pytest.mark.medium

FOLDER = Path(checker.__file__).parent


def verdict(folder, **keys):
    """True: accepted; False: rejected. Anything else than a rejection in a sentence is a crash."""
    try:
        certificates.check(folder, **keys)
    except eq.Refused:
        return False
    return True


@pytest.fixture(scope="module", params=NETWORKS)
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    make(request.param, folder)
    return folder


def test_the_writer_is_accepted_and_its_claims_are_true(bundle):
    assert verdict(bundle)
    assert is_true(bundle)


@pytest.mark.parametrize("seed", [0, 1, "fresh"])
def test_no_false_claim_is_accepted_and_nothing_crashes(bundle, tmp_path, seed):
    seed = random.SystemRandom().randrange(2**32) if seed == "fresh" else seed
    rng = random.Random(f"{bundle.name} {seed}")
    accepted = 0
    for _ in range(23):
        mutate(bundle, tmp_path / "edited", rng)
        if verdict(tmp_path / "edited"):
            accepted += 1
            assert is_true(tmp_path / "edited"), seed
    assert accepted < 15


def test_residual_blocks_keep_their_constant(tmp_path):
    for deployed in (False, True):
        assert make("residual", tmp_path, deployed=deployed)[1]["lipschitz"] < 1.01
        assert verdict(tmp_path)


# --- norms -------------------------------------------------------------------------------------------------------------


def geometry_of(dims, stride, padding, groups):
    return {"stride": [stride] * dims, "padding": [padding] * dims, "groups": groups}


def test_the_norms_of_the_library_pass_the_checker():
    rng = np.random.default_rng(7)
    for _ in range(40):
        groups, dims = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        keys = {key: int(rng.integers(low, 3)) for key, low in (("stride", 1), ("padding", 0))}
        channels = [groups * int(rng.integers(1, 6)) for _ in range(2)]
        kernel = [int(k) for k in rng.integers(1, 4, dims)]
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        layer = kind(*channels, kernel, groups=groups, bias=False, **keys)
        upper = float(eq.spectral_norm(layer, rtol=1e-3).upper)
        size = tuple(int(n) for n in rng.integers(9, (80, 40, 14)[dims - 1], dims))
        weight = layer.weight.detach().double().numpy()
        checker.Layer(weight, geometry_of(dims, groups=groups, **keys), size).check(upper * (1 + 1e-9))
        matrix = rng.standard_normal(rng.integers(1, 200, 2))
        checker.check_norm(matrix, float(eq.spectral_norm(torch.from_numpy(matrix), rtol=1e-3).upper) * (1 + 1e-9))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("circular", [False, True])
def test_convolutions_against_the_materialised_operator(dims, circular):
    rng = np.random.default_rng(dims)
    conv = (functional.conv1d, functional.conv2d, functional.conv3d)[dims - 1]
    for _ in range(12):
        stride, padding, groups = (int(rng.integers(low, 3)) for low in (1, 0, 1))
        size = tuple(int(n) for n in rng.integers(5, 8, dims))
        taps = rng.integers(1, 4, dims)
        if circular:
            size, taps, padding = (6,) * dims, np.full(dims, 3), 1
        kernel = rng.standard_normal((int(rng.integers(1, 4)) * groups, rng.integers(1, 4), *taps))
        keys = {"stride": stride, "groups": groups}

        def apply(x, kernel=kernel, keys=keys, padding=padding):
            x = functional.pad(x, [padding] * 2 * dims, "circular" if circular else "constant")
            return conv(x, torch.from_numpy(kernel), **keys)

        image = (kernel.shape[1] * groups, *size)
        columns = apply(torch.eye(int(np.prod(image))).double().reshape(-1, *image)).flatten(1)
        truth = float(torch.linalg.matrix_norm(columns, ord=2))
        kind = check_layers.Circular if circular else checker.Layer
        layer = kind(kernel, geometry_of(dims, padding=padding, **keys), size)
        with pytest.raises(checker.Rejected):
            layer.check(truth * (1 - 1e-9))
        layer.check(truth * (1 + 1e-9) if circular else truth * 3)
        x = rng.standard_normal((2, *image))
        y = layer.apply(np.moveaxis(x, 0, -1), layer.weight)
        np.testing.assert_allclose(np.moveaxis(y, -1, 0), apply(torch.from_numpy(x)).numpy(), rtol=1e-10, atol=1e-12)
        if not circular:
            other = rng.standard_normal(y.shape)
            back = check_layers.adjoint(layer, other)
            np.testing.assert_allclose(np.vdot(back, np.moveaxis(x, 0, -1)), np.vdot(other, y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("change", [-1e-3, -1e-6, -1e-8])
def test_norms_are_proved_to_the_last_digits(change):
    weight = np.linalg.qr(np.random.default_rng(0).standard_normal((20, 20)))[0]
    checker.check_norm(weight, 1 + 1e-8)
    for s in (1 + change, -2.0, float("nan")):
        with pytest.raises(checker.Rejected):
            checker.check_norm(weight, s)
    check_dense.check_norm_exactly(np.diag([1.0, 0.5, 0.25]), 2**1074, 1 + 2.0**-20)
    with pytest.raises(checker.Rejected):
        check_dense.check_norm_exactly(np.diag([1.0, 0.5, 0.25]), 2**1074, 1 - 2.0**-52)


# --- hostile bundles ---------------------------------------------------------------------------------------------------


def write_bundle(folder, nodes, weights, claims, inputs=None, shape=(2,)):
    """A bundle by hand, with the right digests."""
    folder.mkdir(exist_ok=True)
    files = {"weights.safetensors": weights, "inputs.safetensors": inputs or {"x": np.zeros((1, *shape))}}
    document = {"version": "equipoise-bundle 1", "input_shape": list(shape), "nodes": nodes, "claims": claims}
    document["digests"] = {}
    for name, tensors in files.items():
        content = write_tensors({key: np.asarray(value) for key, value in tensors.items()})
        (folder / name).write_bytes(content)
        document["digests"][name] = hashlib.sha256(content).hexdigest()
    (folder / "certificate.json").write_text(json.dumps(document))


def chain(*steps):
    """Nodes one behind the other: (op, weights, attributes)."""
    names = ["input", *(f"n{i}" for i in range(len(steps)))]
    return [
        {"name": names[i + 1], "op": op, "inputs": [names[i]], "weights": weights, **rest}
        for i, (op, weights, rest) in enumerate(steps)
    ]


def layer(weight, upper, bias="zero"):
    return "linear", {"weight": weight, "bias": bias}, {"stride": [], "padding": [], "groups": 1, "upper": upper}


def test_products_that_underflow_and_labels_outside_prove_nothing(tmp_path):
    """1e-99⁴·1e99⁴ = 1, but the first half of the product is 0 in float64."""
    tiny, huge = layer("tiny", 1.001e-99), layer("huge", 1.001e99)
    weights = {"tiny": np.eye(2) * 1e-99, "huge": np.eye(2) * 1e99, "one": np.eye(2), "zero": np.zeros(2)}
    write_bundle(tmp_path, chain(*[tiny] * 4, *[huge] * 4), weights, {"lipschitz": 1e-90})
    assert not verdict(tmp_path)
    for label, kind in ((-1, "radii"), (-1, "local"), (2, "radii"), (2, "local")):
        claim = {"radii": "radii", "divisor": 1, "certified": {"0.1": 1}}
        inputs = {"x": [[0.0, 1.0]], "labels": [label], "radii": [0.1], "multipliers": np.ones((1, 0))}
        write_bundle(tmp_path, chain(layer("one", 1.001)), weights, {kind: claim}, inputs)
        assert not verdict(tmp_path)
        write_bundle(tmp_path, chain(layer("one", 1.001)), weights, {kind: claim}, {**inputs, "labels": [1]})
        assert verdict(tmp_path)


def test_groups_bytes_and_samples_without_channels_prove_nothing(tmp_path):
    """`z = (x₀, x₁)` from equal rows of two groups; a place that wraps as a byte; entries that are samples."""
    inputs = {"x": [[1.0, 0.0]], "labels": [0], "radii": [100.0]}
    claims = {"radii": {"radii": "radii", "divisor": 1, "certified": {"100": 1}}}
    weights = {"ones": np.ones((2, 1)), "zero": np.zeros(2), "places": np.full(9, 255, np.uint8)}
    op, names, rest = layer("ones", 1.001)
    write_bundle(tmp_path, chain((op, names, {**rest, "groups": 2})), weights, claims, inputs)
    assert not verdict(tmp_path)
    write_bundle(tmp_path, chain(("gather", {"index": "places"}, {})), weights, {"lipschitz": 1.001}, inputs, (256,))
    assert not verdict(tmp_path)
    write_bundle(tmp_path, chain(("abs", {}, {"count": 1})), weights, {"lipschitz": 1.001}, {"x": np.zeros(2)}, ())
    assert not verdict(tmp_path)


def test_the_rounding_of_a_local_certificate_cannot_exceed_its_norm(tmp_path):
    """A neuron that cancels, with a tiny multiplier: its rounding, divided by it, once made `1 − error` negative."""
    weights = {
        "w1": np.ones((3, 1)), "b1": [10.0, 10, 10], "w2": [[1.0, -1, 0], [0, 0, 1]], "b2": [0.0, 0],
        "w3": [[0.0, 1], [0, 0]], "b3": [0.0, 9.5],
    }  # fmt: skip
    relu = ("relu", {}, {})
    nodes = chain(layer("w1", 2.0, "b1"), relu, layer("w2", 2.0, "b2"), relu, layer("w3", 2.0, "b3"))
    inputs = {"x": [[0.0]], "labels": [0], "radii": [1000.0]}
    inputs["multipliers"] = [[1e-40, 1e-40, 1e-40, 1e-120, 1e-40]]
    claims = {"local": {"radii": "radii", "divisor": 1, "certified": {"1000": 1}}}
    write_bundle(tmp_path, nodes, weights, claims, inputs, (1,))
    assert not verdict(tmp_path)


def test_radii_of_half_precision_are_compared_and_inverted_in_float64(tmp_path):
    """0.09997 ≥ 0.1 if both are rounded to float16; 1/r was rounded up, so that a label flipped within r."""
    weights = {"one": np.eye(2), "zero": np.zeros(2), "w1": [[1.0]], "b1": [0.3], "w2": [[-1.0], [0.0]]}
    nodes = chain(layer("one", 1 + 1e-12))
    for kind, margin, accepted in ((np.float16, 0.1414, False), (np.float64, 0.1415, True)):
        inputs = {"x": [[0.0, margin]], "labels": [1], "radii": np.array([0.1], kind)}
        claims = {"radii": {"radii": "radii", "divisor": 1, "certified": {"0.1": 1}}}
        write_bundle(tmp_path, nodes, weights, claims, inputs)
        assert verdict(tmp_path) == accepted
    radius = np.array([0.027], np.float16)
    weights["b2"] = [0.3 + float(radius[0]) * (1 - 1e-4), 0]
    inputs = {"x": [[0.0]], "labels": [0], "radii": radius, "multipliers": np.ones((1, 1))}
    nodes = chain(layer("w1", 1.1, "b1"), ("relu", {}, {}), layer("w2", 1.1, "b2"))
    write_bundle(tmp_path, nodes, weights, {"local": {**claims["radii"], "certified": {}}}, inputs, (1,))
    with pytest.raises(eq.Refused, match="not proved"):
        certificates.check(tmp_path)


STRANGE = {
    "dilation": ((*layer("one", 1.01)[:2], {**layer("one", 1.01)[2], "dilation": [2]}), {}),
    "weight": (("relu", {"mask": "zero"}, {}), {}),
    "slope": (("relu", {}, {"negative_slope": 0.5}), {}),
    "geometry": (("sort", {}, {"dim": 1, "descending": True, "stride": [2]}), {}),
    "bias": (("scale", {"value": "zero", "bias": "one"}, {}), {}),
    "norm": (("relu", {}, {}), {"norm": "linf"}),
    "text": (("sort", {}, {"dim": 1, "descending": "false"}), {}),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_words_that_the_checker_does_not_read_are_rejected(tmp_path, kind):
    node, rest = STRANGE[kind]
    claims = {"radii": {"radii": "radii", "divisor": 1, "certified": {"0.2": 1}, **rest}}
    inputs = {"x": [[0.0, 1.0]], "labels": [1], "radii": [0.2]}
    write_bundle(tmp_path, chain(node), {"one": np.eye(2), "zero": np.zeros(2)}, claims, inputs)
    with pytest.raises(eq.Refused, match=r"not in the format|number from"):
        certificates.check(tmp_path)


@pytest.mark.parametrize(("value", "x"), [(1e-39, 1e25), (1e29, 1e-40)])
def test_deployed_networks_may_lose_tiny_weights_and_inputs(tmp_path, value, x):
    """A number below 2^-126 may be replaced by 0, and nothing is left of the margin."""
    inputs = {"x": np.array([[x, 0]], np.float32), "labels": [0], "radii": [x / 2]}
    for kind in ("radii", "deployed"):
        claims = {kind: {"radii": "radii", "divisor": 1, "certified": {repr(x / 2): 1}}}
        weights = {"value": np.array([value], np.float32)}
        write_bundle(tmp_path, chain(("scale", {"value": "value"}, {})), weights, claims, inputs)
        assert verdict(tmp_path) == (kind == "radii")


BIG = 2**26
GEOMETRY = {"stride": [1, 1], "padding": [0, 0], "groups": 1, "upper": 9.0}
BOMBS = {
    "stride": ("convolution", {"weight": "k", "bias": "zero"}, {**GEOMETRY, "stride": [BIG, BIG]}),
    "padding": ("convolution", {"weight": "k", "bias": "zero"}, {**GEOMETRY, "padding": [BIG, BIG]}),
    "wrap": ("circular", {"weight": "k", "bias": "zero"}, {**GEOMETRY, "padding": [BIG, BIG]}),
    "pad": ("pad", {}, {"widths": [0, 0, BIG, 0, BIG, 0]}),
    "places": ("gather", {"index": "far"}, {}),
    "window": ("max_pool", {}, {"kernel": [BIG, BIG], "stride": [1, 1], "padding": [BIG, BIG]}),
    "shape": ("reshape", {}, {"shape": [1] * 100_000}),
    "bytes": ("gather", {"index": "long"}, {}),
    "loop": ("average_pool", {}, {"kernel": [2**10] * 2, "stride": [1, 1], "padding": [0, 0]}),
    "long": ("convolution", {"weight": "tail", "bias": "zero"}, {**GEOMETRY, "stride": [1], "padding": [2**16]}),
    "taps": (
        "convolution",
        {"weight": "line", "bias": "zero"},
        {"stride": [1], "padding": [2**18], "groups": 1, "upper": 1e6},
    ),
}


@pytest.mark.parametrize("kind", [*BOMBS, "nodes", "input", "nested", "numbers", "device", "header"])
def test_memory_and_time_are_bounded(tmp_path, kind):
    """In a process that may use three gigabytes and twenty seconds, and without crashing."""
    step = BOMBS.get(kind, ("relu", {}, {}))
    weights = {"k": np.ones((1, 1, 2, 2)), "zero": np.zeros(1), "far": np.array([2**33])}
    weights["line"], weights["tail"] = np.ones((1, 1, 2**18)), np.full((1, 1, 2**11), 1e-4)
    if kind == "bytes":
        weights["long"] = np.zeros(2**27, np.uint8)
    nodes = chain(*[step] * (200_000 if kind == "nodes" else 1))
    shape = {
        "nodes": (1, 700, 700),
        "input": (1, BIG, BIG),
        "taps": (1, 2**18),
        "long": (1, 8),
        "loop": (1, 2**11, 2**11),
    }.get(kind, (1, 4, 4))
    write_bundle(tmp_path, nodes, weights, {"lipschitz": 1.0}, {"x": np.zeros(1)}, shape)
    path = tmp_path / "certificate.json"
    if kind == "device":
        path.unlink()
        path.symlink_to("/dev/zero")
    elif kind in ("nested", "numbers"):
        path.write_text("[" * 10**6 if kind == "nested" else f"[{'[],' * 2 * 10**7}[]]")
    elif kind == "header":
        header = ",".join(
            f'"{i}":{{"dtype":"F64","shape":[{10**5}],"data_offsets":[0,{8 * 10**5}]}}' for i in range(9999)
        )
        content = (len(header) + 2).to_bytes(8, "little") + f"{{{header}}}".encode() + bytes(8 * 10**5)
        (tmp_path / "weights.safetensors").write_bytes(content)
        document = json.loads(path.read_text())
        document["digests"]["weights.safetensors"] = hashlib.sha256(content).hexdigest()
        document["claims"] = {"lipschitz": 0.5}
        path.write_text(json.dumps(document))

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    command = [sys.executable, str(FOLDER / "check.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert result.returncode == 1
    assert result.stderr.startswith("REJECTED"), result.stderr[-300:]
    assert "MemoryError" not in result.stderr


def tensor_file(data, *entries):
    """A safetensors file by hand: names, shapes and offsets."""
    header = {name: {"dtype": "F64", "shape": shape, "data_offsets": place} for name, shape, place in entries}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


BYTES = (
    b"", b"\0", b"{}", b'{"a": NaN}', b"\xff" * 64, b"\xff" * 7 + b"\x7f" + b"{}",
    tensor_file(bytes(16), ("a", [2], [0, 16]), ("b", [1], [8, 16])),  # they overlap
    tensor_file(bytes(24), ("a", [1], [0, 8]), ("b", [1], [16, 24])),  # a gap
    tensor_file(bytes(16), ("a", [1], [0, 8])), tensor_file(bytes(8), ("a", [-1], [0, 8])),
    tensor_file(bytes(8), ("a", [2], [0, 16])), tensor_file(bytes(8), ("a", [1], [-8, 8])),
    tensor_file(bytes(8), ("a", [1], [False, 8])), tensor_file(bytes(8), ("a", [1], [0, 8.0])),
)  # fmt: skip


def test_images_whose_channels_lie_last_in_memory_are_stored_in_the_order_of_their_shape(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 3)).eval()
    x = torch.rand(6, 5, 5, 3).permute(0, 3, 1, 2)
    certificates.write(net, x, net(x).argmax(1), tmp_path)
    assert certificates.check(tmp_path)


def test_tensors_are_stored_without_gaps():
    assert checker.read_tensors(tensor_file(bytes(16), ("a", [1], [0, 8]), ("b", [1, 1], [8, 16])))["b"].shape == (1, 1)
    for content in BYTES[6:]:
        with pytest.raises((checker.Rejected, ValueError)):
            checker.read_tensors(content)


@pytest.mark.parametrize("name", ["certificate.json", "weights.safetensors", "inputs.safetensors"])
def test_malformed_files_are_rejected_in_a_sentence(tmp_path, name):
    make("dense", tmp_path)
    original = json.loads((tmp_path / "certificate.json").read_text())
    for content in BYTES:
        (tmp_path / name).write_bytes(content)
        if name != "certificate.json":
            original["digests"][name] = hashlib.sha256(content).hexdigest()
            (tmp_path / "certificate.json").write_text(json.dumps(original))
        assert not verdict(tmp_path)


class Between(nn.Module):
    """A function between two layers, with offsets behind it beside which a rounding is not seen."""

    def __init__(self, function):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
        self.function = function

    def forward(self, x):
        flatten, first, last = self.layers
        return last(self.function(first(flatten(x)))) + 1e6


DOUBLED = eq.nn.HouseholderActivation(4)
DOUBLED.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (nn.Softmax(dim=1), "softmax"), (nn.GELU(), "gelu"), (nn.LayerNorm(4), "layer_norm"), (torch.round, "round"),
        (lambda x: x.half().float(), "float16"), (lambda x: x.int().float(), "int32"),
        (lambda x: x.sort(1).indices.float(), "int64"), (lambda x: x.view(torch.int32).float(), "int32"),
        (lambda x: torch.div(x, 1, rounding_mode="floor"), "rounds"),
        (lambda x: x[..., None].mean(2, dtype=torch.half).float(), "16"), (DOUBLED, "two values"),
        (lambda x: functional.dropout(x, 0.5, training=True), "dropout"), (lambda x: x.flip(0), "other samples"),
    ],
)  # fmt: skip
def test_unknown_operations_and_those_that_round_are_refused_by_name(function, reason):
    with pytest.raises(eq.Refused, match=reason):
        certificates.describe(Between(function), torch.zeros(1, 4))


@pytest.mark.parametrize(
    "join", [lambda x: torch.maximum(x, x - 1e-9), lambda x: (x, 2 * x), lambda x: (x, torch.ones(1))]
)
def test_outputs_that_are_no_vector_of_an_operation_are_refused(tmp_path, join):
    model = Between(nn.ReLU())
    model.register_forward_hook(lambda module, inputs, output: join(output))
    with pytest.raises(eq.Refused, match="output"):
        certificates.write(model, torch.rand(2, 4), torch.zeros(2).long(), tmp_path)


class Twice(nn.Sequential):
    def forward(self, x):
        return self[0](self[0](x))


def test_a_block_that_is_called_twice_is_there_twice():
    nodes = certificates.describe(Twice(eq.nn.SLLLinear(4)), torch.zeros(1, 4))[0]["nodes"]
    assert [node["op"] for node in nodes] == ["residual", "residual"]


# --- smoothing ---------------------------------------------------------------------------------------------------------


def smoothing_claim(**changes):
    from scipy.stats import beta

    n, k, alpha, sigma = 1000, 990, 0.001, 0.5
    p = float(beta.ppf(alpha, k, n - k + 1)) * (1 - 1e-9)
    row = {"input": 0, "procedure": "bounds", "share": 1.0, "k": k, "rival": 4, "p": p, "q": (1 - p) * (1 + 1e-15)}
    row["radius"] = sigma * statistics.NormalDist().inv_cdf(p) - 1e-8
    claim = {"sigma": sigma, "alpha": alpha, "n": n, "rows": [row]}
    for key, value in changes.items():
        (row if key in row else claim)[key] = value
    return claim


def test_smoothing_radii_follow_from_their_counts():
    check_smoothing.check_smoothing(None, None, smoothing_claim())
    row = smoothing_claim()["rows"][0]
    for changes in (
        {"k": 989}, {"n": 1001}, {"alpha": 0.00099}, {"share": 0.99}, {"p": row["p"] * (1 + 1e-6)}, {"q": row["q"] * 0.999},
        {"sigma": 0.4999}, {"rival": 11},
        {"radius": row["radius"] * (1 + 1e-6)}, {"radius": -1.0}, {"radius": float("nan")}, {"k": True}, {"noise": "uniform"},
        {"input": -1}, {"rows": [row, row]},
        {"n": 10**6, "k": 10**6, "rival": 0, "share": 0.0, "p": 0.0999, "q": 1e-5, "radius": 0.0},
    ):  # fmt: skip
        with pytest.raises(checker.Rejected):
            check_smoothing.check_smoothing(None, None, smoothing_claim(**changes))


def test_binomial_tails_and_quantiles_against_many_digits():
    mpmath = pytest.importorskip("mpmath")
    with localcontext() as context:
        mpmath.mp.dps = context.prec = 60
        for n, k, p in ((50, 3, 0.5), (50, 49, 0.1), (2000, 1500, 0.7), (2000, 10, 0.9), (100, 100, 1e-5)):
            low, high = check_smoothing.binomial_tail(n, k, Decimal(p), 1 - Decimal(p))
            truth = mpmath.betainc(k, n - k + 1, 0, mpmath.mpf(p), regularized=True)
            assert mpmath.mpf(str(low)) <= truth <= mpmath.mpf(str(high)) * (1 + mpmath.mpf(10) ** -50)
            assert high <= low * (1 + Decimal("1e-25"))
        for x in (0, 0.1, 3, 9.9, 10.1, 38):
            low, high = check_smoothing.normal_tail(Decimal(x))
            assert mpmath.mpf(str(low)) <= mpmath.ncdf(-mpmath.mpf(x)) <= mpmath.mpf(str(high))
            for p in (low, 1 - high):
                bound = check_smoothing.quantile(p, 1 - p if p > 0.001 else Decimal(1))
                assert mpmath.ncdf(mpmath.mpf(str(bound))) <= mpmath.mpf(str(p))
        rare = Decimal("3.6e-60")  # as a difference from 1 it would be 4e-60
        bound = check_smoothing.score(100, 99, 1 - rare, rare)
        assert mpmath.ncdf(mpmath.mpf(str(bound))) <= 4950 * mpmath.mpf(str(rare)) ** 2


def test_smoothing_certificates_of_the_library_are_accepted_and_no_larger_ones(tmp_path):
    rng = np.random.default_rng(0)
    claim = {"sigma": 2.0, "alpha": 1e-3, "n": 2000}
    shares = rng.dirichlet([3, 1, 1, 0.3], 12)
    shares[0] = [1, 0, 0, 0]
    selection, estimation = rng.multinomial(100, shares), rng.multinomial(2000, shares)
    kinds = set()
    for procedure in ("rivals", "cohen", "bonferroni"):
        setting = {"sigma": 2.0, "alpha": 1e-3, "procedure": procedure}
        claims = certificates.write_smoothing(selection, estimation, [2000] * 12, tmp_path, **setting)
        assert verdict(tmp_path)
        for row in claims["smoothing"]["rows"]:
            kinds.add(row["procedure"])
            key = "gap" if row["procedure"] == "joint" else "radius"
            with pytest.raises(checker.Rejected):
                check_smoothing.check_smoothing(None, None, {**claim, "rows": [{**row, key: 1.02 * row[key]}]})
    assert kinds == {"bounds", "joint"}


# --- programs, other claims --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "program", "network"),
    [
        (["check.py"], "check.py", "cifar10"),
        (["check.py", "check_layers.py"], "check.py", "sorting"),
        (["check.py", "check_dense.py"], "check_dense.py", "dense"),
    ],
)
def test_the_lone_files_run_without_the_library(tmp_path, files, program, network):
    for name in files:
        shutil.copy(FOLDER / name, tmp_path)
    if network == "cifar10":
        model = eq.models.load("cifar10").model
        x = torch.rand(2, 3, 32, 32)
        certificates.write(model, x, model(x).argmax(1), tmp_path / "bundle")
    else:
        make(network, tmp_path / "bundle")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(tmp_path / program), str(tmp_path / "bundle")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.stdout.startswith("ACCEPTED"), result.stdout + result.stderr
    (tmp_path / "bundle" / "inputs.safetensors").write_bytes(b"")
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert "digest" in result.stderr


@pytest.mark.parametrize("kind", ["exact", "deployed", "local"])
def test_other_kinds_of_claims_hold_and_edited_ones_are_rejected(tmp_path, kind):
    torch.manual_seed(3)
    model = NETWORKS["pooling" if kind == "deployed" else "dense"]()
    model = model.double() if kind == "exact" else model
    x = torch.rand(5, 2, 4, 4)
    with torch.no_grad():
        labels = model(x.to(next(model.parameters()))).argmax(1)
    radii = eq.certified_radius(model, x, labels).radius if kind == "local" else None
    source, edited = tmp_path / "bundle", tmp_path / "edited"
    claims = certificates.write(model, x, labels, source, epsilons=(0.01,), radii=radii, deployed=kind == "deployed")
    assert ("local" in claims, "deployed" in claims) == (kind == "local", kind == "deployed")
    assert verdict(source, exact=kind == "exact")
    plain = read_tensors((source / "inputs.safetensors").read_bytes())
    if kind == "local":
        assert plain["local"].mean() > 1.2 * plain["radii"].mean()
        assert (plain["local"] <= radii.numpy()).all()
    rng = random.Random(0)
    for _ in range(100):
        mutate(source, edited, rng)
        if verdict(edited, exact=kind == "exact"):
            assert is_true(edited)
            if kind == "local":
                assert_no_attack_succeeds(edited)


def assert_no_attack_succeeds(folder):
    """Local radii of an accepted bundle, attacked from many starts."""
    inputs = read_tensors((folder / "inputs.safetensors").read_bytes())
    tensors = read_tensors((folder / "weights.safetensors").read_bytes())
    document = json.loads((folder / "certificate.json").read_text())
    claim = document["claims"].get("local")
    if claim is None:
        return
    x = torch.from_numpy(inputs["x"].astype(np.float64)) / claim["divisor"]
    radii, labels = torch.from_numpy(inputs[claim["radii"]]), torch.from_numpy(inputs["labels"])

    class Bundle(nn.Module):
        def forward(self, v):
            return reference(document, tensors, v)[0]

    rows = radii > 0
    assert not eq.attacks.pgd(Bundle(), x[rows], labels[rows], radii[rows], steps=20, restarts=3).success.any()


def test_ranges_of_local_certificates_hold_on_random_points():
    rng = np.random.default_rng(0)
    layers = [(rng.standard_normal((m, n)), rng.standard_normal(m)) for n, m in ((6, 8), (8, 8), (8, 4))]
    x = rng.standard_normal(6)
    ball = check_dense.Ball(layers, x, 0.3)
    steps = rng.standard_normal((500, 6))
    points = x + 0.3 * steps / np.linalg.norm(steps, axis=1)[:, None]
    for k, (weight, bias) in enumerate(layers):
        points = points @ weight.T + bias
        assert (points >= ball.low[k]).all()
        assert (points <= ball.high[k]).all()
        points = np.maximum(points, 0)


@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"batch norm"}))
def test_float32_stays_within_the_bound_of_its_rounding(name):
    """At inputs within the radius, against the real function in float64."""
    torch.manual_seed(len(name))
    model = NETWORKS[name]().eval()
    x = torch.rand(4, 2, 4, 4)
    document, tensors = certificates.describe(model, x)
    network = check_deployed.Deployed(checker.Network(document, tensors), 0.5)
    error = network.evaluate(np.moveaxis(x.double().numpy(), 0, -1)).error
    for _ in range(5):
        noise = torch.randn_like(x)
        near = x + 0.49 * noise / noise.flatten(1).norm(dim=1)[:, None, None, None]
        with torch.no_grad():
            real = reference(document, tensors, near.double())[0]
            distance = (model(near).double() - real).norm(dim=1).numpy()
        assert (distance <= error).all()
        assert (distance > 1e-6 * error).any()


@pytest.mark.parametrize("scale", [1e30, 1e-42, 2.0**25])
def test_networks_that_float32_executes_differently_are_not_certified_as_deployed(tmp_path, scale):
    """Huge and tiny weights, and cancellation: the real function is constant in its label, float32 is not (Murray 2026)."""
    first = torch.eye(2) * scale
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        for index, weight in ((0, first), (2, first), (4, torch.eye(2))):
            model[index].weight.copy_(weight)
            model[index].bias.zero_()
        if scale == 2.0**25:
            # 2^50·(x₀ + 1 − 1): the margin is lost when 1 is added in float32
            model[2].weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
            model[0].bias.fill_(2.0**60)
    x, y = torch.tensor([[0.75, 0.25]]), torch.tensor([0])
    try:
        claims = certificates.write(model, x, y, tmp_path, epsilons=(1e-6,), deployed=True)
    except eq.Refused:
        return
    assert list(claims["deployed"]["certified"].values()) == [0]


def test_a_counterexample_in_float32_is_certified_in_real_arithmetic_only(tmp_path):
    """`(2²⁴ + x) − 2²⁴` is x in real arithmetic, and a multiple of 2 in float32."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [0.0]]))
        model[0].bias.copy_(torch.tensor([2.0**24, 0.0]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        model[2].bias.copy_(torch.tensor([-(2.0**24), 0.5]))
    x, y = torch.tensor([[2.0]]), torch.tensor([0])
    real = certificates.write(model, x, y, tmp_path, epsilons=(1.2,))
    assert list(real["radii"]["certified"].values()) == [1]
    assert verdict(tmp_path)
    assert verdict(tmp_path, exact=True)
    # an input within the certified radius, at which float32 answers otherwise
    assert model(torch.tensor([[0.9]])).argmax() == 1
    executed = certificates.write(model, x, y, tmp_path, epsilons=(1.2,), deployed=True)
    assert list(executed["deployed"]["certified"].values()) == [0]


def test_a_network_of_the_shape_of_the_verified_certifier_is_checked_exactly_and_fifty_times_faster(tmp_path):
    """784-128⁸-10 without biases: 1,005 s for the norms by the certifier verified in Dafny (Tobler et al., CAV 2025)."""
    torch.manual_seed(0)
    model = dense(784, *[128] * 8, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images = torch.randn(10, 784).repeat(20, 1) + 0.1 * torch.randn(200, 784)
    labels = torch.arange(10).repeat(20)
    for _ in range(30):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    certificates.write(model, images[:3], labels[:3], tmp_path, epsilons=(1e-3,))
    start = time.process_time()
    assert verdict(tmp_path, exact=True)
    assert time.process_time() - start < 1005 / 50


# --- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "pt2"])
def test_prove_writes_a_bundle_that_claims_the_radii_of_the_run(equipoise, tmp_path, kind):
    digits = eq.models.load("digits")
    source = tmp_path / "model.pt2"
    if kind == "folder":
        source = certificates.__file__.replace("certificates.py", "models/digits")
    else:
        plain = eq.export(digits.model, torch.zeros(1, *digits.input_shape))
        torch.export.save(torch.export.export(plain, (torch.zeros(1, *digits.input_shape),)), source)
    arguments = ("--data", "digits", "--limit", 10, "--effort", "fast", "--epsilon", "0.1,0.3")
    ran = equipoise("prove", source, *arguments, "--run", tmp_path / "run", "--bundle", tmp_path / "bundle")
    assert ran.code == 0, ran.err
    checked = equipoise("check", tmp_path / "bundle", "--json")
    assert checked.json["accepted"] is True
    claimed = read_tensors((tmp_path / "bundle" / "inputs.safetensors").read_bytes())["radii"]
    results = eq.runs.open_run(tmp_path / "run").results()
    right = np.asarray(results.answer) == np.asarray(results.labels)
    # norms on tiny images are proved on circles, which are a little larger
    np.testing.assert_allclose(claimed, np.where(right, results.radius, 0), rtol=1e-4)


def test_packaged_networks_are_checked_by_name(equipoise):
    checked = equipoise("check", "digits", "--json")
    assert "Lipschitz constant at most 1." in checked.json["proved"][0]


def test_certify_writes_a_bundle_of_votes_that_is_accepted(equipoise, tmp_path):
    source = certificates.__file__.replace("certificates.py", "models/digits")
    arguments = ("--data", "digits", "--limit", 5, "--sigma", 0.25, "--n", 200, "--run", tmp_path / "run")
    ran = equipoise("certify", source, *arguments, "--bundle", tmp_path / "bundle")
    assert ran.code == 0, ran.err
    checked = equipoise("check", tmp_path / "bundle", "--json")
    assert checked.json["proved"] == ["5 radii of randomized smoothing follow from their counts"]


def test_trained_networks_come_with_a_bundle(tmp_path):
    overrides = ["epochs=1", "data.limit=200"]
    eq.train.run_recipe("sll-sr-digits", tmp_path, overrides=overrides, cpu=True)
    assert len(certificates.check(tmp_path / "bundle")) == 1 + len(certificates.EPSILONS)
