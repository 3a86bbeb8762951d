"""Networks of every operation, a reference that shares no code with the checker, and random changes of bundles."""

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as read_tensors
from safetensors.numpy import save as write_tensors
from torch import Tensor, nn
from torch.nn import functional

import equipoise as eq

CONV = nn.Conv2d

Tensors = Mapping[str, np.ndarray]
Document = dict[str, Any]


class Branches(nn.Sequential):
    """Sums of branches and constants, concatenation and mean, then the layers."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        first, *others = self
        y = first((x - 0.5) / 0.3)
        y = torch.cat([y.abs() + y.relu(), (y + y.tanh()) / 2, y.flip(3)], 1).mean((2, 3))
        for layer in others:
            y = layer(y)
        return y


def dense(*sizes: int, bias: bool = True) -> nn.Module:
    """A dense ReLU network."""
    layers = [
        module for n, m in pairwise(sizes) for module in (nn.ReLU(), nn.Linear(n, m, bias=bias))
    ]
    return nn.Sequential(nn.Flatten(), *layers[1:])


def behind(features: int, *layers: nn.Module) -> nn.Module:
    """Layers, and a dense one behind them."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 5))


#: every operation that the writer knows, in networks small enough for a dense reference; inputs have the shape (2, 4, 4)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: dense(32, 12, 5),
    "stride": lambda: behind(16, CONV(2, 4, 3, stride=2, padding=1), nn.ReLU()),
    "groups": lambda: behind(64, CONV(2, 4, 3, groups=2, padding=1), nn.ReLU()),
    "dilation": lambda: behind(12, CONV(2, 3, 2, dilation=2), nn.LeakyReLU(0.1)),
    "circular": lambda: behind(
        12, CONV(2, 3, 3, padding=1, padding_mode="circular", stride=2), nn.Softplus(2.0)
    ),
    "conv1d": lambda: behind(
        21, nn.Flatten(2), nn.Conv1d(2, 3, 3, dilation=2, padding=1), nn.AvgPool1d(2), nn.Sigmoid()
    ),
    "conv3d": lambda: behind(
        24, nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 3, (2, 3, 1), stride=(1, 1, 1)), nn.Tanh()
    ),
    "transposed": lambda: behind(
        243, nn.ConvTranspose2d(2, 3, 3, 2, output_padding=0), nn.Hardtanh()
    ),
    "pooling": lambda: behind(16, CONV(2, 4, 3, padding=1), eq.nn.MaxMin(), nn.AvgPool2d(2)),
    "max pooling": lambda: behind(16, nn.ZeroPad2d(1), CONV(2, 4, 3), nn.MaxPool2d(2)),
    "own layers": lambda: nn.Sequential(
        eq.nn.BCOPConv2d(2, 4, 3, padding=1),
        eq.nn.BetaAbs(0.5),
        nn.Flatten(),
        eq.nn.SRLinear(64, 5),
    ),
    "resampling": lambda: behind(
        64,
        nn.Upsample(scale_factor=1.5, mode="bilinear"),
        CONV(2, 1, 3),
        nn.SiLU(),
        nn.Upsample(8, mode="nearest"),
    ),
    "sorting": lambda: behind(
        64, CONV(2, 4, 1), eq.nn.GroupSort(2), eq.nn.HouseholderActivation(4)
    ),
    "batch norm": lambda: behind(
        36, nn.PixelUnshuffle(2), CONV(8, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    ),
    "branches": lambda: Branches(CONV(2, 4, 1), nn.ReLU6(), nn.Linear(12, 5)),
    "residual": lambda: nn.Sequential(
        eq.nn.SLLConv2d(2, kernel_size=3, hidden=4),
        nn.Flatten(),
        eq.nn.CPLLinear(32),
        eq.nn.SRLinear(32, 5),
    ),
}


def make(name: str, folder: Path, **keys: Any) -> tuple[nn.Module, Document]:
    """Write a bundle of one of the networks."""
    torch.manual_seed(sum(map(ord, name)))
    model = NETWORKS[name]().eval()
    x = torch.rand(6, 2, 4, 4)
    with torch.no_grad():
        labels = model(x).argmax(1)
    return model, eq.certificates.write(model, x, labels, folder, epsilons=(0.01,), **keys)


# --- the reference -----------------------------------------------------------------------------------------------------


def reference(document: Document, tensors: Tensors, x: Tensor) -> tuple[Tensor, float, float]:
    """The network of a bundle by PyTorch in float64; its constant, and that before the last node, by dense SVDs."""
    values = {"input": (x, 1.0)}
    for node in document["nodes"]:
        named = node.get("weights")
        named = named if isinstance(named, dict) else {}
        weights = {
            k: torch.from_numpy(tensors[v].astype(np.float64))
            for k, v in named.items()
            if str(v) in tensors
        }
        inputs = [values[name] for name in node["inputs"]]
        v, before = inputs[0]
        if node["op"] in ("add", "concatenate"):
            parts, constants = zip(*inputs, strict=True)
            joined = node["op"] == "concatenate"
            before = float(np.linalg.norm(constants)) if joined else sum(constants)
            v, factor = torch.cat(parts, 1) if joined else sum(parts), 1.0
        elif node["op"] in ("linear", "convolution", "circular", "transposed", "residual"):
            layer = _layer(node, weights["weight"], v.shape[2:])
            rows = layer(torch.eye(v[0].numel()).double().reshape(-1, *v.shape[1:])).flatten(1)
            factor, bias = float(torch.linalg.matrix_norm(rows, ord=2)), weights["bias"]
            if node["op"] == "residual":
                hidden = (layer(v) + bias).relu().flatten(1) @ rows.T
                v, factor = (
                    v - node["h"] * hidden.reshape(v.shape),
                    max(1.0, node["h"] * factor**2 - 1),
                )
            else:
                v = layer(v) + bias
        else:
            v, factor = _other(node["op"], node, weights, v)
        values[node["name"]] = v, factor * before
    return v, factor * before, before


def _layer(node: Document, weight: Tensor, size: Any) -> Callable[[Tensor], Tensor]:
    dims = weight.dim() - 2
    if not dims:
        return lambda x: functional.conv1d(x[..., None], weight[..., None], groups=node["groups"])[
            ..., 0
        ]
    keys = {key: node[key] for key in ("stride", "padding", "groups")}
    if node["op"] == "transposed":
        reach = zip(size, keys["stride"], keys["padding"], weight.shape[2:], strict=True)
        extra = [
            n - ((m - 1) * s - 2 * p + k)
            for n, (m, s, p, k) in zip(node["size"], reach, strict=True)
        ]
        transpose = (
            functional.conv_transpose1d,
            functional.conv_transpose2d,
            functional.conv_transpose3d,
        )[dims - 1]
        return lambda x: transpose(x, weight, output_padding=extra, **keys)
    conv = (functional.conv1d, functional.conv2d, functional.conv3d)[dims - 1]
    if node["op"] == "circular":
        widths = [p for pad in reversed(keys.pop("padding")) for p in (pad, pad)]
        return lambda x: conv(functional.pad(x, widths, "circular"), weight, **keys)
    return lambda x: conv(x, weight, **keys)


def _other(op: str, a: Document, weights: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, float]:
    if op in ("scale", "divide"):
        value = 1 / weights["value"] if op == "divide" else weights["value"]
        return x * value, float(value.abs().max())
    if op == "shift":
        return x + weights["value"], 1.0
    if op == "gather":
        index = weights["index"].long()
        return x.flatten(1)[:, index], float(index.flatten().bincount().max()) ** 0.5
    if op == "pad":
        pairs = list(zip(a["widths"][::2], a["widths"][1::2], strict=True))
        return functional.pad(x, [width for pair in reversed(pairs) for width in pair]), 1.0
    if op in ("average_pool", "max_pool"):
        pooling = f"{'avg' if op == 'average_pool' else 'max'}_pool{x.dim() - 2}d"
        fill = 0.0 if op == "average_pool" else -torch.inf
        padded = functional.pad(
            x, [p for pad in reversed(a["padding"]) for p in (pad, pad)], value=fill
        )
        overlap = np.prod([-(-k // s) for k, s in zip(a["kernel"], a["stride"], strict=True)])
        share = overlap / np.prod(a["kernel"]) if op == "average_pool" else overlap
        return getattr(functional, pooling)(padded, a["kernel"], a["stride"]), float(share) ** 0.5
    if op == "householder":
        z, v = torch.stack(x.chunk(2, 1)), functional.normalize(weights["value"], dim=0)
        v = v.reshape(2, 1, -1, *[1] * (x.dim() - 2))
        return torch.cat(list(z - 2 * (z * v).sum(0).clamp(max=0) * v), 1), 1.0
    if op == "sort":
        return x.sort(a["dim"], descending=bool(a["descending"])).values, 1.0
    if op == "abs":
        return torch.cat(
            [x[:, : a.get("count", x.shape[1])].abs(), x[:, a.get("count", x.shape[1]) :]], 1
        ), 1.0
    if op == "leaky_relu":
        return torch.where(x > 0, x, a["negative_slope"] * x), max(1.0, abs(a["negative_slope"]))
    functions = {
        "relu": lambda: x.relu(),
        "reshape": lambda: x.reshape(len(x), *a["shape"]),
        "clamp": lambda: x.clamp(a["min"], a["max"]),
        "tanh": lambda: x.tanh(),
        "sigmoid": lambda: x.sigmoid(),
        "silu": lambda: functional.silu(x),
        "softplus": lambda: functional.softplus(x, a["beta"], 1e9),
    }
    return functions[op](), {"sigmoid": 0.25, "silu": 1.1}.get(op, 1.0)


def is_true(folder: Path) -> bool:
    """Whether the claims of a bundle hold, up to the rounding of the reference."""
    document = json.loads((folder / "certificate.json").read_text())
    tensors = read_tensors((folder / "weights.safetensors").read_bytes())
    inputs = read_tensors((folder / "inputs.safetensors").read_bytes())
    claims = document["claims"]
    claim = claims.get("radii") or claims.get("deployed") or {}
    x = torch.zeros(1, *document["input_shape"], dtype=torch.float64)
    if claim:
        x = torch.from_numpy(inputs["x"].astype(np.float64)) / claim["divisor"]
    logits, constant, trunk = reference(document, tensors, x)
    if constant > claims.get("lipschitz", np.inf) * (1 + 1e-9):
        return False
    if not claim:
        return True
    labels, radii = inputs["labels"], inputs[claim["radii"]]
    last = document["nodes"][-1]
    for z, label, radius in zip(logits, labels, radii, strict=True):
        for rival in range(len(z)) if radius else ():
            pair = 2**0.5 * constant
            if last["op"] == "linear":
                weight = tensors[last["weights"]["weight"]].astype(np.float64)
                pair = float(np.linalg.norm(weight[label] - weight[rival])) * trunk
            if rival != label and not float(z[label] - z[rival]) >= radius * pair * (1 - 1e-9):
                return False
    counts = claim["certified"].items()
    return all(float(e) > 0 and 0 <= count <= int((radii >= float(e)).sum()) for e, count in counts)


# --- changes -----------------------------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def _edit(value: Any, rng: random.Random) -> Any:
    """Another value in the place of one."""
    strange: list[Any] = [
        None,
        True,
        "x",
        [],
        {},
        [[]],
        10**400,
        -1,
        0,
        2**40,
        float("nan"),
        float("inf"),
        1e-320,
    ]
    if rng.random() < 0.2:
        return rng.choice(strange)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            [value + 1, value - 1, -value, 0, 2 * value, value + 0.5, str(value), [value]]
        )
    if isinstance(value, float):
        return rng.choice(
            [value * 0.999, value * (1 - 1e-6), -value, 0.0, 1e300, 1e-300, value * 2]
        )
    if isinstance(value, str):
        return rng.choice(
            [
                "",
                "input",
                "linear",
                "divide",
                "scale",
                "relu",
                "sort",
                "concatenate",
                value + "0",
                "add",
                "gather",
            ]
        )
    changed = copy.deepcopy(value)
    if isinstance(value, list) and value:
        index, other = rng.randrange(len(value)), rng.randrange(len(value))
        action = rng.randrange(5)
        if action == 0:
            del changed[index]
        elif action == 1:
            changed.append(changed[index])
        elif action == 2:
            changed[index], changed[other] = changed[other], changed[index]
        elif action == 3:
            changed[index] = changed[other]
        else:
            changed.insert(index, {})
    elif isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        changed[rng.choice(["deployed", "h", "mode", "size", *value])] = changed.pop(key)
    return changed


def _rewire(document: Document, rng: random.Random) -> None:
    """Another source, operation or weight for a node, or its attributes from another node."""
    nodes = document["nodes"]
    node, other = rng.choice(nodes), rng.choice(nodes)
    action = rng.randrange(5)
    if action == 0:
        node["inputs"][rng.randrange(len(node["inputs"]))] = rng.choice(["input", other["name"]])
    elif action == 1:
        node["op"] = other["op"]
    elif action == 2:
        node["weights"] = {**node["weights"], **other["weights"]}
    elif action == 3:
        nodes[nodes.index(node)] = {
            **node,
            **{k: v for k, v in other.items() if k not in ("name", "inputs")},
        }
    else:
        nodes.remove(node)


def _damage(tensors: dict[str, np.ndarray], rng: random.Random) -> None:
    """One entry, the dtype, the shape or the name of a tensor."""
    key = rng.choice(sorted(tensors))
    tensor = tensors[key]
    flat = tensor.reshape(-1)
    index = rng.randrange(flat.size)
    action = rng.randrange(9)
    if action < 5 and flat.dtype == np.int64:
        flat[index] = rng.choice([flat[index] + 1, -1, 7, -(2**62), 2**40])
    elif action < 5:
        flat[index] = rng.choice(
            [
                flat[index] * 1.001,
                flat[index] + 0.05,
                -flat[index],
                3.0,
                np.nan,
                np.inf,
                1e30,
                1e-42,
            ]
        )
    elif action == 5:
        tensors[key] = (tensor * rng.choice([1, 1.0005, 2, -1])).astype(
            rng.choice(["f2", "f4", "f8", "i8", "u1"])
        )
    elif action == 6:
        tensors[key] = np.ascontiguousarray(
            rng.choice([tensor.T, flat, tensor[None], tensor[:1], tensor[..., :0]])
        )
    elif action == 7:
        del tensors[key]
    else:
        tensors[key] = tensors[rng.choice(sorted(tensors))]


def mutate(source: Path, folder: Path, rng: random.Random) -> None:
    """A copy of a bundle with one or two random changes, its digests made right again."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    document = json.loads((folder / "certificate.json").read_text())
    for _ in range(rng.choice([1, 1, 1, 2])):
        which = rng.choice(["document", "graph", "claims", "weights", "inputs", "bytes"])
        if (
            which == "graph"
            and document["nodes"]
            and all(isinstance(node, dict) for node in document["nodes"])
        ):
            try:
                _rewire(document, rng)
            except (KeyError, TypeError, ValueError):
                continue
        elif which in ("document", "claims", "graph"):
            part = document["claims"] if which == "claims" else document
            paths = [path for path in _places(part) if path and path[0] != "digests"]
            for key in (path := rng.choice(paths or [("claims",)]))[:-1]:
                part = part[key]
            part[path[-1]] = _edit(
                part.get(path[-1]) if isinstance(part, dict) else part[path[-1]], rng
            )
            if not isinstance(document.get("nodes"), list) or not isinstance(
                document.get("claims"), dict
            ):
                break
        else:
            name = f"{rng.choice(['weights', 'inputs']) if which == 'bytes' else which}.safetensors"
            content = (folder / name).read_bytes()
            if which == "bytes":
                place = rng.randrange(len(content))
                content = rng.choice(
                    [
                        content[:place],
                        content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
                    ]
                )
            else:
                try:
                    tensors = {key: value.copy() for key, value in read_tensors(content).items()}
                    with np.errstate(all="ignore"):
                        _damage(tensors, rng)
                except Exception:  # noqa: BLE001 (damaged before)
                    continue
                content = write_tensors(tensors)
            (folder / name).write_bytes(content)
            document["digests"][name] = hashlib.sha256(content).hexdigest()
    text = json.dumps(document)
    if rng.random() < 0.05:
        text = text.replace('"op":', '"op": "relu", "op":', 1)
    (folder / "certificate.json").write_text(text)
