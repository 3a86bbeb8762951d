"""The lone checker: it accepts what the writer writes, rejects what is false, and never crashes."""

import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from decimal import Decimal, getcontext
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
from equipoise.checker import check_dense, check_layers, check_smoothing

pytestmark = pytest.mark.medium

torch.manual_seed(0)


CONV = nn.Conv2d

#: every operation that the writer knows, in networks small enough for a dense reference
NETWORKS = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 5)),
    "stride": lambda: nn.Sequential(CONV(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)),
    "groups": lambda: nn.Sequential(CONV(2, 4, 3, groups=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)),
    "dilation": lambda: nn.Sequential(CONV(2, 3, 2, dilation=2), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(12, 5)),
    "pooling": lambda: nn.Sequential(
        CONV(2, 4, 3, padding=1), eq.nn.MaxMin(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    ),
    "max pooling": lambda: nn.Sequential(
        nn.ZeroPad2d(1), CONV(2, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    ),
    "own layers": lambda: nn.Sequential(
        eq.nn.BCOPConv2d(2, 4, 3, padding=1), eq.nn.BetaAbs(0.5), nn.Flatten(), eq.nn.SRLinear(64, 5)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.PixelUnshuffle(2), CONV(8, 4, 2, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 5)
    ),
    "sum": lambda: Sum(CONV(2, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)),
}


class Sum(nn.Sequential):
    """A sum of branches, and a constant."""

    def forward(self, x):
        first, *others = self
        y = first((x - 0.5) / 0.3)
        y = y.abs() + y.relu()
        for layer in others:
            y = layer(y)
        return y


@pytest.mark.parametrize("deployed", [False, True])
def test_residual_blocks_keep_their_constant(tmp_path, deployed):
    torch.manual_seed(1)
    images = [getattr(eq.nn, name)(2, kernel_size=3, hidden=4) for name in ("SLLConv2d", "CPLConv2d", "SLLConv2d")]
    vectors = [getattr(eq.nn, name)(32) for name in ("SLLLinear", "CPLLinear")]
    model = nn.Sequential(*images, nn.Flatten(), *vectors, eq.nn.SRLinear(32, 5)).eval()
    x = torch.rand(6, 2, 4, 4)
    with torch.no_grad():
        labels = model(x).argmax(1)
    claims = certificates.write(model, x, labels, tmp_path, epsilons=(0.01,), deployed=deployed)
    assert claims["lipschitz"] < 1.01
    assert certificates.check(tmp_path)


def test_the_norms_of_the_library_pass_the_checker():
    rng = np.random.default_rng(7)
    for _ in range(40):
        groups, dims = int(rng.integers(1, 3)), int(rng.integers(1, 3))
        keys = {key: int(rng.integers(low, 3)) for key, low in (("stride", 1), ("padding", 0), ("dilation", 1))}
        channels = [groups * int(rng.integers(1, 9)) for _ in range(2)]
        kernel = [int(k) for k in rng.integers(1, 5, dims)]
        layer = (nn.Conv1d, nn.Conv2d)[dims - 1](*channels, kernel, groups=groups, bias=False, **keys)
        upper = float(eq.spectral_norm(layer, rtol=1e-3).upper)
        geometry = {**{key: [value] * dims for key, value in keys.items()}, "groups": groups}
        size = [int(n) for n in rng.integers(12, 40, dims)]
        check_layers.Layer(layer.weight.detach().double().numpy(), geometry, size).check(upper * (1 + 1e-9))
        matrix = torch.from_numpy(rng.standard_normal(rng.integers(1, 200, 2)))
        checker.check_matrix(matrix.numpy(), float(eq.spectral_norm(matrix, rtol=1e-3).upper) * (1 + 1e-9))


@pytest.fixture(scope="module", params=NETWORKS)
def bundle(request, tmp_path_factory):
    torch.manual_seed(sum(map(ord, request.param)))
    model = NETWORKS[request.param]().eval()
    x = torch.rand(6, 2, 4, 4)
    with torch.no_grad():
        labels = model(x).argmax(1)
    folder = tmp_path_factory.mktemp("bundle")
    certificates.write(model, x, labels, folder, epsilons=(0.01,))
    return folder


def reference(document, tensors, x):
    """The network of a bundle by PyTorch in float64, without the checker's code; and its constant by dense SVDs."""
    values = {"input": (x, 1.0)}
    for node in document["nodes"]:
        weights = {key: torch.from_numpy(tensors[name].astype(np.float64)) for key, name in node["weights"].items()}
        inputs = [values[name] for name in node["inputs"]]
        v, constant = inputs[0]
        if node["op"] == "add":
            v, factor = sum(v for v, _ in inputs), 1.0
            constant = sum(constant for _, constant in inputs)
        elif "weight" in weights:
            layer = _layer(node, weights)
            rows = layer(torch.eye(v[0].numel()).double().reshape(-1, *v.shape[1:])) - layer(torch.zeros_like(v[:1]))
            factor = float(torch.linalg.matrix_norm(rows.flatten(1), ord=2))
            v = layer(v)
        else:
            v, factor = _other(node["op"], node, weights, v)
        values[node["name"]] = v, factor * constant
    return values[document["nodes"][-1]["name"]]


def _layer(node, weights):
    weight, bias = weights["weight"], weights.get("bias", torch.zeros(1).double())
    if node["op"] == "linear":
        return lambda x: x @ weight.T + bias
    keys = {key: node[key] for key in ("stride", "padding", "dilation", "groups")}
    return lambda x: functional.conv2d(x, weight, **keys) + bias


def _other(op, a, weights, x):
    if op in ("scale", "divide"):
        value = 1 / weights["value"] if op == "divide" else weights["value"]
        return x * value, float(value.abs().max())
    if op == "shift":
        return x + weights["value"], 1.0
    if op == "leaky_relu":
        return torch.where(x > 0, x, a["slope"] * x), max(1.0, abs(a["slope"]))
    if op == "gather":
        index = weights["index"].long()
        repeated = float((index.flatten() + 1).bincount()[1:].max()) ** 0.5
        return functional.pad(x.flatten(1), (0, 1))[:, index], repeated
    if op == "average_pool":
        assert a["kernel"] == a["stride"], "the reference knows windows that do not overlap"
        return functional.avg_pool2d(x, a["kernel"], a["stride"], a["padding"]), float(np.prod(a["kernel"])) ** -0.5
    if op == "max_pool":
        overlap = np.prod([-(-k // s) for k, s in zip(a["kernel"], a["stride"], strict=True)])
        padded = functional.pad(x, [p for pad in reversed(a["padding"]) for p in (pad, pad)], value=-torch.inf)
        return functional.max_pool2d(padded, a["kernel"], a["stride"]), float(overlap) ** 0.5
    if op == "relu":
        return x.relu(), 1.0
    if op == "abs":
        return torch.cat([x[:, : a["count"]].abs(), x[:, a["count"] :]], 1), 1.0
    if op == "maxmin":
        first, second = x.chunk(2, 1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1), 1.0
    if op == "reshape":
        return x.reshape(len(x), *a["shape"]), 1.0
    raise AssertionError(op)


def is_true(folder):
    """Whether the claims of a bundle hold, up to the rounding of the reference."""
    document = json.loads((folder / "certificate.json").read_text())
    tensors = read_tensors((folder / "weights.safetensors").read_bytes())
    inputs = read_tensors((folder / "inputs.safetensors").read_bytes())
    claim = document["claims"]["radii"]
    x = torch.from_numpy(inputs["x"].astype(np.float64)) / claim["divisor"]
    labels, radii = inputs["labels"], inputs[claim["radii"]]
    logits, constant = reference(document, tensors, x)
    if constant > document["claims"]["lipschitz"] * (1 + 1e-9):
        return False
    last = document["nodes"][-1]
    for z, label, radius in zip(logits, labels, radii, strict=True):
        if radius == 0:
            continue
        for rival in range(len(z)):
            pair = 2**0.5 * constant
            if last["op"] == "linear":
                weight = tensors[last["weights"]["weight"]].astype(np.float64)
                pair = min(pair, np.linalg.norm(weight[label] - weight[rival]) * constant / np.linalg.norm(weight, 2))
            if rival != label and float(z[label] - z[rival]) < radius * pair * (1 - 1e-9):
                return False
    return all(
        count <= int((radii >= float(epsilon)).sum()) and float(epsilon) > 0
        for epsilon, count in claim.get("certified", {}).items()
    )


def verdict(folder):
    """True: accepted; False: rejected. Anything else than a rejection in a sentence is a crash."""
    try:
        certificates.check(folder)
    except eq.Refused:
        return False
    return True


def test_the_writer_is_accepted_and_its_claims_are_true(bundle):
    assert verdict(bundle)
    assert is_true(bundle)


def _leaves(value, path=()):
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from _leaves(value[index], (*path, index))
        yield path
    else:
        yield path


def _edit(value, rng):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -value, 0, 2 * value, value + 0.5, None, "1", [value]])
    if isinstance(value, float):
        return rng.choice([value * 0.999, value * (1 - 1e-6), -value, 0.0, 1e300, 1e-300, None, "x", value * 2])
    if isinstance(value, str):
        return rng.choice(["", "input", "linear", "divide", "scale", "relu", "maxmin", value + "0", None, 3])
    if isinstance(value, list) and value:
        changed = copy.copy(value)
        index = rng.randrange(len(changed))
        action = rng.randrange(4)
        if action == 0:
            del changed[index]
        elif action == 1:
            changed.append(changed[index])
        elif action == 2:
            changed[index], changed[0] = changed[0], changed[index]
        else:
            changed[index] = {}
        return changed
    return {}


def mutate(source, folder, rng):
    """A copy of a bundle with one random change, its digests made right again."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    document = json.loads((folder / "certificate.json").read_text())
    which = rng.choice(["certificate", "certificate", "weights", "inputs", "claims"])
    if which in ("certificate", "claims"):
        part = document["claims"] if which == "claims" else document
        path = rng.choice([path for path in _leaves(part) if path and path[0] != "digests"])
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = _edit(part[path[-1]], rng)
    else:
        name = f"{which}.safetensors"
        tensors = {key: value.copy() for key, value in read_tensors((folder / name).read_bytes()).items()}
        key = rng.choice(sorted(tensors))
        flat = tensors[key].reshape(-1)
        index = rng.randrange(flat.size)
        if flat.dtype == np.int64:
            flat[index] = rng.choice([flat[index] + 1, -1, 7])
        else:
            flat[index] = rng.choice([flat[index] * 1.001, flat[index] + 0.05, -flat[index], 3.0])
        content = write_tensors(tensors)
        (folder / name).write_bytes(content)
        document["digests"][name] = hashlib.sha256(content).hexdigest()
    (folder / "certificate.json").write_text(json.dumps(document))


@pytest.mark.parametrize("seed", [0, 1, "fresh"])
def test_no_false_claim_is_accepted_and_nothing_crashes(bundle, tmp_path, seed):
    seed = random.SystemRandom().randrange(2**32) if seed == "fresh" else seed
    rng = random.Random(f"{bundle.name} {seed}")
    accepted = 0
    for _ in range(31):
        mutate(bundle, tmp_path / "edited", rng)
        if verdict(tmp_path / "edited"):
            accepted += 1
            assert is_true(tmp_path / "edited"), seed
    assert accepted < 25


BYTES = (b"", b"\0", b"{}", b"[" * 100_000, b'{"a": NaN}', b"\xff" * 64, b"\xff" * 7 + b"\x7f" + b"{}")


@pytest.mark.parametrize("name", ["certificate.json", "weights.safetensors", "inputs.safetensors"])
@pytest.mark.parametrize("content", BYTES, ids=range(len(BYTES)))
def test_malformed_files_are_rejected_in_a_sentence(tmp_path, name, content):
    model = NETWORKS["dense"]()
    certificates.write(model, torch.rand(2, 2, 4, 4), torch.tensor([0, 1]), tmp_path)
    (tmp_path / name).write_bytes(content)
    document = json.loads((tmp_path / "certificate.json").read_text()) if name != "certificate.json" else None
    if document is not None:
        document["digests"][name] = hashlib.sha256(content).hexdigest()
        (tmp_path / "certificate.json").write_text(json.dumps(document))
    assert not verdict(tmp_path)


def test_an_unknown_operation_is_refused_by_name():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Softmax(dim=1))
    with pytest.raises(eq.Refused, match="softmax"):
        certificates.describe(model, torch.zeros(1, 4))


@pytest.mark.parametrize("change", [-1e-3, -1e-6, -1e-8])
def test_norms_are_proved_to_the_last_digits(change):
    weight = np.linalg.qr(np.random.default_rng(0).standard_normal((20, 20)))[0]
    checker.check_matrix(weight, 1 + 1e-8)
    with pytest.raises(checker.Rejected):
        checker.check_matrix(weight, 1 + change)


@pytest.mark.parametrize("dims", [1, 2])
def test_convolutions_against_the_materialised_operator(dims):
    rng = np.random.default_rng(dims)
    conv = (functional.conv1d, functional.conv2d)[dims - 1]
    for _ in range(30):
        stride, dilation, padding = (rng.integers(1, 3), rng.integers(1, 3), rng.integers(0, 3))
        groups, size = rng.integers(1, 3), [int(n) for n in rng.integers(5, 8, dims)]
        kernel = rng.standard_normal((2 * groups, rng.integers(1, 3), *rng.integers(1, 3, dims)))
        keys = {"stride": int(stride), "padding": int(padding), "dilation": int(dilation), "groups": int(groups)}
        image = (kernel.shape[1] * groups, *size)
        basis = torch.eye(int(np.prod(image))).double().reshape(-1, *image)
        columns = conv(basis, torch.from_numpy(kernel), **keys).flatten(1)
        truth = float(torch.linalg.matrix_norm(columns, ord=2))
        geometry = {k: v if k == "groups" else [v] * dims for k, v in keys.items()}
        layer = check_layers.Layer(kernel, geometry, size)
        with pytest.raises(checker.Rejected):
            layer.check(truth * (1 - 1e-9))
        layer.check(truth * 3 + 1e-9)
        x = rng.standard_normal((2, *image))
        expected = conv(torch.from_numpy(x), torch.from_numpy(kernel), **keys).numpy()
        np.testing.assert_allclose(layer.apply(x, layer.weight), expected, rtol=1e-10, atol=1e-12)
        y = rng.standard_normal(expected.shape)
        np.testing.assert_allclose(np.vdot(layer.adjoint(y), x), np.vdot(y, expected), rtol=1e-9)


def smoothing_claim(**changes):
    from scipy.stats import beta

    n, k, alpha, sigma = 1000, 990, 0.001, 0.5
    p = float(beta.ppf(alpha, k, n - k + 1)) * (1 - 1e-9)
    row = {
        "procedure": "bounds",
        "share": 1.0,
        "k": k,
        "rival": 4,
        "p": p,
        "q": (1 - p) * (1 + 1e-15),
        "radius": sigma * statistics.NormalDist().inv_cdf(p) - 1e-8,
    }
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
        {"radius": row["radius"] * (1 + 1e-6)}, {"radius": -1.0}, {"radius": float("nan")}, {"k": True},
    ):  # fmt: skip
        with pytest.raises(checker.Rejected):
            check_smoothing.check_smoothing(None, None, smoothing_claim(**changes))


def test_binomial_tails_and_quantiles_against_many_digits():
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = getcontext().prec = 60
    for n, k, p in ((50, 3, 0.5), (50, 49, 0.1), (2000, 1500, 0.7), (2000, 10, 0.9), (100, 100, 1e-5)):
        low, high = check_smoothing.binomial_tail(n, k, Decimal(p))
        truth = mpmath.betainc(k, n - k + 1, 0, mpmath.mpf(p), regularized=True)
        assert mpmath.mpf(str(low)) <= truth <= mpmath.mpf(str(high)) * (1 + mpmath.mpf(10) ** -50)
        assert high <= low * (1 + Decimal("1e-25"))
    for x in (0, 0.1, 3, 9.9, 10.1, 38):
        low, high = check_smoothing.normal_tail(Decimal(x))
        assert mpmath.mpf(str(low)) <= mpmath.ncdf(-mpmath.mpf(x)) <= mpmath.mpf(str(high))
        for p in (low, 1 - high):
            bound = check_smoothing.quantile(p, 1 - p) if p > 0.001 else check_smoothing.quantile(p, Decimal(1))
            assert mpmath.ncdf(mpmath.mpf(str(bound))) <= mpmath.mpf(str(p))


def test_smoothing_certificates_of_the_library_are_accepted_and_no_larger_ones(tmp_path):
    rng = np.random.default_rng(0)
    claim = {"sigma": 2.0, "alpha": 1e-3, "n": 2000}
    shares = rng.dirichlet([3, 1, 1, 0.3], 12)
    shares[0] = [1, 0, 0, 0]
    selection, estimation = rng.multinomial(100, shares), rng.multinomial(2000, shares)
    kinds = set()
    for procedure in ("rivals", "cohen", "bonferroni"):
        setting = {"sigma": 2.0, "alpha": 1e-3, "procedure": procedure}
        rows = certificates.write_smoothing(selection, estimation, [2000] * 12, tmp_path, **setting)["smoothing"][
            "rows"
        ]
        assert certificates.check(tmp_path)
        kinds |= {row["procedure"] for row in rows}
        for row in rows:
            key = "gap" if row["procedure"] == "joint" else "radius"
            with pytest.raises(checker.Rejected):
                check_smoothing.check_smoothing(None, None, {**claim, "rows": [{**row, key: 1.02 * row[key]}]})
    assert kinds == {"bounds", "joint"}


def test_the_lone_files_run_without_the_library(tmp_path):
    folder = Path(checker.__file__).parent
    for path in folder.glob("check*.py"):
        shutil.copy(path, tmp_path)
    certificates.write(NETWORKS["dense"](), torch.rand(2, 2, 4, 4), torch.tensor([0, 1]), tmp_path / "dense")
    certificates.write(NETWORKS["stride"](), torch.rand(2, 2, 4, 4), torch.tensor([0, 1]), tmp_path / "stride")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for name, bundle in (("check.py", "dense"), ("check.py", "stride"), ("check_dense.py", "dense")):
        command = [sys.executable, str(tmp_path / name), str(tmp_path / bundle)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.stdout.startswith("ACCEPTED"), result.stdout + result.stderr
        assert result.returncode == 0
    (tmp_path / "stride" / "inputs.safetensors").write_bytes(b"")
    command = [sys.executable, str(tmp_path / "check.py"), str(tmp_path / "stride")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert "digest" in result.stdout


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
    assert ("local" in claims) == (kind == "local")
    assert certificates.check(source, exact=kind == "exact")
    plain = read_tensors((source / "inputs.safetensors").read_bytes())
    if kind == "local":
        assert plain["local"].mean() > 1.2 * plain["radii"].mean()
        assert (plain["local"] <= radii.numpy()).all()
    rng = random.Random(0)
    for _ in range(100):
        mutate(source, edited, rng)
        try:
            certificates.check(edited, exact=kind == "exact")
        except eq.Refused:
            continue
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


def test_ranges_and_maps_of_local_certificates_hold_on_random_points():
    rng = np.random.default_rng(0)
    sizes = [6, 8, 8, 4]
    layers = [(rng.standard_normal((m, n)), rng.standard_normal(m)) for n, m in itertools.pairwise(sizes)]
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
    network = checker.Network(document, tensors)
    network.units[1] = checker.FLOAT32
    radii = np.full(len(x), 0.5)
    value = network.evaluate(x.double().numpy(), radii)
    for _ in range(5):
        noise = torch.randn_like(x)
        near = x + 0.49 * noise / noise.flatten(1).norm(dim=1)[:, None, None, None]
        with torch.no_grad():
            real = reference(document, tensors, near.double())[0]
            distance = (model(near).double() - real).norm(dim=1).numpy()
        assert (distance <= value.error[1]).all()
        assert (distance > 1e-6 * value.error[1]).any()


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
    assert list(claims["radii"]["certified"].values()) == [0]


def test_a_network_of_the_shape_of_the_verified_certifier_is_checked_exactly_and_fifty_times_faster(tmp_path):
    """784-128⁸-10 without biases: 1,005 s for the norms by the certifier verified in Dafny (Tobler et al., CAV 2025)."""
    torch.manual_seed(0)
    sizes = [784, *[128] * 8, 10]
    layers = [module for n, m in itertools.pairwise(sizes) for module in (nn.Linear(n, m, bias=False), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images = torch.randn(10, 784).repeat(20, 1) + 0.1 * torch.randn(200, 784)
    labels = torch.arange(10).repeat(20)
    for _ in range(30):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    certificates.write(model, images[:3], labels[:3], tmp_path, epsilons=(1e-3,))
    start = time.process_time()
    assert certificates.check(tmp_path, exact=True)
    assert time.process_time() - start < 1005 / 50


def test_exact_norms_are_proved_without_slack():
    weight = np.diag([1.0, 0.5, 0.25])
    check_dense.check_norm(weight, 1 + 2.0**-20)
    with pytest.raises(checker.Rejected):
        check_dense.check_norm(weight, 1 - 2.0**-52)


@pytest.mark.parametrize("kind", ["folder", "pt2"])
def test_prove_writes_a_bundle_that_is_accepted(equipoise, tmp_path, kind):
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
    assert (tmp_path / "bundle" / "inputs.safetensors").is_file()


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
