"""Networks and rivals of `local-tightness`: random ReLU networks, a trained MNIST network, a plain CNN, ECLipsE-Gen-Local."""

import contextlib
import importlib
import importlib.util
import io
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.core.precision import full_precision
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.enclose import Box, enclose
from equipoise.lipschitz.local.measure import LocalBound
from equipoise.lipschitz.propagate import propagate
from equipoise.norms.spectral import Cache
from equipoise_lab.experiments.experiment import Context, Row
from equipoise_lab.peers_zonotope import zonotope_bound

Layers = list[tuple[Tensor, Tensor]]


def random_layers(name: str, context: Context) -> tuple[Layers, Tensor]:
    """Weights and biases of a random ReLU network of the ECLipsE-Gen-Local paper, and the centre of its balls."""
    with np.load(context.file("random-relu-nets.npz")) as stored:
        keys = sorted(
            (k for k in stored.files if k.startswith(f"{name}/W")),
            key=lambda k: int(k.split("/W")[1]),
        )
        pairs = [
            (torch.from_numpy(stored[k]), torch.from_numpy(stored[k.replace("/W", "/b")]))
            for k in keys
        ]
        centre = torch.from_numpy(stored["center"]).double().reshape(1, -1)
    return [(W.double(), b.double().flatten()) for W, b in pairs], centre


def dense(layers: Layers) -> nn.Sequential:
    """ReLU between dense layers."""
    parts: list[nn.Module] = []
    for W, b in layers:
        layer = nn.Linear(W.shape[1], W.shape[0], dtype=W.dtype)
        layer.weight.data, layer.bias.data = W, b
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1]).eval().requires_grad_(False)


def mnist(context: Context) -> tuple[nn.Module, Tensor, Tensor]:
    """The trained network 784-100⁵-10 of the α,β-CROWN repository and its 50 images."""
    from safetensors.torch import load_file

    stored = load_file(context.file("mnist-6x100.safetensors"))
    numbers = sorted({int(k.split(".")[0]) for k in stored})
    with np.load(context.file("mnist-50.npz")) as images:
        names = images.files
        x = torch.from_numpy(images[next(n for n in names if images[n].ndim > 1)])
        y = torch.from_numpy(images[next(n for n in names if images[n].ndim == 1)]).long()
    net = dense([(stored[f"{k}.weight"], stored[f"{k}.bias"]) for k in numbers])
    return net, x.float().reshape(len(x), -1) / 255, y


def strided_cnn(
    *, num_classes: int = 10, in_channels: int = 1, input_size: int = 28, **_: Any
) -> nn.Sequential:
    """Two strided convolutions and two dense layers: no pooling, so that every method of the house applies.

    >>> strided_cnn()(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 10])
    """
    side = input_size // 4
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * side * side, 100), nn.ReLU(), nn.Linear(100, num_classes),
    )  # fmt: skip


class Margin(nn.Module):
    """`f_y − f_k` of a network."""

    def __init__(self, net: nn.Module, y: int, k: int, classes: int = 10) -> None:
        super().__init__()
        self.net, self.last = net, nn.Linear(classes, 1, bias=False)
        self.last.weight.data.zero_()
        self.last.weight.data[0, y], self.last.weight.data[0, k] = 1, -1
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The margin, (batch, 1)."""
        logits: Tensor = self.last(self.net(x))
        return logits


def zonotope_radius(net: nn.Module, x: Tensor, largest: float, steps: int = 7) -> float:
    """The largest R with `L(R)·R ≤ margin` against the runner-up, L the least of boxes, gradient and zonotope."""
    first, second = (int(k) for k in net(x)[0].topk(2).indices)
    margin = Margin(net, first, second)
    m, cache = float(margin(x)), Cache()
    with torch.no_grad(), full_precision():
        run = propagate(capture(margin, x), float(x.norm()) + largest, 1e-3, cache)
        fast, low, high = LocalBound(run, cache, "fast"), 0.0, largest
        for _ in range(steps):
            middle = (low + high) / 2
            enclosed = zonotope_bound(run, enclose(run, x, middle, cache), x, middle, cache)[0]
            if min(fast.upper(x, middle), enclosed) * middle <= m:
                low = middle
            else:
                high = middle
    return low


def switching_layers(
    net: nn.Module, x: Tensor, radius: float, samples: int, rtol: float, zonotope: bool = True
) -> tuple[float, list[Row]]:
    """The zonotope's bound, and for every activation the neurons that may switch by boxes, by the zonotope, and as sampled.

    `moved` is the largest movement of what enters the activation, per unit of the input's, that was met on `2·samples` points;
    `bound` is that of the product of the layers.
    """
    cache, program = Cache(rtol), capture(net, x)
    with torch.no_grad(), full_precision():
        run = propagate(program, float(x.norm()) + radius, rtol, cache)
        boxes = enclose(run, x, radius, cache)
        upper, state = (
            zonotope_bound(run, boxes, x, radius, cache) if zonotope else (math.inf, None)
        )
    before = {
        n: run.steps[n].gains[0][0].node for n in program.nodes if run.steps[n].curve is not None
    }
    directions = _directions(net, x, radius, samples)
    with torch.no_grad(), Entering() as centre:
        net(x)
    with torch.no_grad(), Entering() as around:
        net(x + directions)
    rows: list[Row] = []
    for i, ((n, s), at, there) in enumerate(
        zip(before.items(), centre.inputs, around.inputs, strict=True)
    ):
        signs = None if state is None else state.unstable.get(n)
        rows.append({
            "part": "resnet layers", "radius": radius, "layer": i + 1, "neurons": at.numel(), "boxes": _open(boxes[s]),
            "zonotope": None if signs is None else signs[0], "seen": int(((there > 0) != (at > 0)).any(0).sum()),
            "moved": float((there - at).flatten(1).norm(dim=1).max()) / radius, "bound": math.exp(boxes[s].log),
        })  # fmt: skip
    return upper, rows


class Entering(TorchFunctionMode):
    """Keeps what enters every ReLU of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; note what a ReLU is given."""
        if func in (nn.functional.relu, torch.relu):
            self.inputs.append(args[0])
        return func(*args, **(kwargs or {}))


def _open(box: Box) -> int | None:
    """Entries of either sign on the box."""
    return None if box.mid is None or box.half is None else int((box.mid.abs() < box.half).sum())


def _directions(net: nn.Module, x: Tensor, radius: float, samples: int) -> Tensor:
    """Displacements of length `radius`: at random, and along gradients of random combinations of the outputs."""
    g = torch.Generator().manual_seed(0)
    d = torch.randn(samples, *x.shape[1:], generator=g)
    d = radius * d / d.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))
    at = (x + d).requires_grad_()
    out = net(at)
    (steepest,) = torch.autograd.grad((out * torch.randn(out.shape, generator=g)).sum(), at)
    steepest = (
        radius
        * steepest
        / steepest.flatten(1).norm(dim=1).clamp_min(1e-30).reshape(-1, *[1] * (x.dim() - 1))
    )
    return torch.cat([d, steepest])


def eclipse(name: str, r: float, context: Context) -> Iterator[Row]:
    """What eclipse-nn says, as installed and with its test of the solver's status read as meant; nothing where it is missing.

    Its Fast and Acc programs compare the status of CVXPY, "optimal", with the word of MATLAB's CVX, "Solved", so that they always
    fall back to the closed form; the second row of each corrects this. `least eigenvalue` is the smallest one it looked at.
    """
    if importlib.util.find_spec("eclipse_nn") is None or importlib.util.find_spec("cvxpy") is None:
        return
    layers, centre = random_layers(name, context)
    search: Any = importlib.import_module("eclipse_nn.utils.find_good_lambdas")
    estimator: Any = importlib.import_module("eclipse_nn.LipConstEstimator").LipConstEstimator

    class Meant(search.cp.Problem):
        @property
        def status(self) -> str:
            own = super().status
            return "Solved" if own in ("optimal", "optimal_inaccurate") else str(own)

    plain, look, values = search.cp.Problem, search._min_eig_sym, list[float]()

    def noted(matrix: Any) -> float:
        values.append(float(look(matrix)))
        return values[-1]

    search._min_eig_sym = noted
    try:
        for meant in (False, True):
            search.cp.Problem = Meant if meant else plain
            for algorithm in ("Fast", "Acc"):
                values.clear()
                started, error, value = time.process_time(), "", math.nan
                with contextlib.redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        own = estimator(
                            weights=[W.numpy() for W, _ in layers],
                            biases=[b.numpy()[:, None] for _, b in layers],
                        )
                        value = float(
                            own.estimate_gen_local(
                                centre.numpy(), r * math.sqrt(5), "relu", algorithm
                            )[0]
                        )
                    except Exception as problem:  # noqa: BLE001, a crash is a finding of this comparison
                        error = f"{type(problem).__name__}: {problem}"[:200]
                yield {
                    "part": "eclipse-nn", "network": name, "radius": r, "method": f"{algorithm}{', status as meant' * meant}",
                    "upper": value if math.isfinite(value) else None, "fell back": output.getvalue().count("Failed in initial"),
                    "least eigenvalue": min(values, default=None), "crash": error,
                    "cpu seconds": round(time.process_time() - started, 2),
                }  # fmt: skip
    finally:
        search.cp.Problem, search._min_eig_sym = plain, look
