"""What 1-Lipschitz layers cost beside `nn.Conv2d`, and how evenly they use their norm; all in one run.

A training step is forward and backward, the effective weight included; evaluation is the exported layer without
gradients. Ratios are medians of rounds in which all contestants take turns. Other libraries' layers run beside ours
where they are installed. Cayley runs with zero padding (a larger circle) and on the circle of the image, which is
what its authors' layer does.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.maps.geometry import Geometry
from equipoise.nn import convert
from equipoise.nn.convert import methods
from equipoise.nn.orthogonal.frequency import FrequencyConv2d
from equipoise.nn.rescaling import AOL, SN, SR
from equipoise.nn.residual import CPLConv2d, SLLConv2d
from equipoise_lab.bench.norms import Goal, Row, Section, real_kernels
from equipoise_lab.timing import take_turns

Maker = Callable[[int], nn.Module]


def conv(kind: str, **options: Any) -> Maker:
    """`channels → channels`, 3×3, «same» zero padding, by the name of its method."""
    return lambda channels: methods()[kind][nn.Conv2d](channels, channels, 3, padding=1, **options)


def plain(channels: int) -> nn.Module:
    """What everything is compared with."""
    return nn.Conv2d(channels, channels, 3, padding=1)


#: contestant → (how it is made, the ratio of a training step to reach)
LAYERS: dict[str, tuple[Maker, float | None]] = {
    "SN": (conv("sn"), 1.3),
    "AOL": (conv("aol"), 1.15),
    "SR t=2": (conv("sr", t=2), 1.15),
    "SR t=3": (conv("sr", t=3), None),
    "RKO": (conv("rko"), 1.35),
    "Björck": (conv("bjorck"), None),
    "BCOP": (conv("bcop"), 1.35),
    "CPL": (lambda c: CPLConv2d(c, kernel_size=3), 2.2),
    "SLL AOL": (lambda c: SLLConv2d(c, kernel_size=3), 2.2),
    "SLL SR": (lambda c: SLLConv2d(c, kernel_size=3, rescaling="sr"), 2.2),
    "Cayley": (conv("cayley"), 4.0),
    "Cayley, circular": (conv("cayley", padding_mode="circular"), 4.0),
    "SOC": (conv("soc"), 4.5),
}

#: contestant → (module, class, arguments) of other libraries, tried where they are installed
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "orthogonium AOC": (
        "orthogonium.layers.conv.AOC",
        "AdaptiveOrthoConv2d",
        {"kernel_size": 3, "padding": 1},
    ),
    # its kernel is the exponential of a 3×3 one, 7×7, and «same» is counted from the 3×3 one
    "orthogonium SOC": (
        "orthogonium.layers.conv.adaptiveSOC",
        "AdaptiveSOCConv2d",
        {"kernel_size": 3, "padding": 3},
    ),
    "orthogonium AOL": (
        "orthogonium.layers.conv.AOL",
        "AOLConv2D",
        {"kernel_size": 3, "padding": 1},
    ),
    "deel-torchlip spectral": ("deel.torchlip", "SpectralConv2d", {"kernel_size": 3, "padding": 1}),
}


def peers(channels: int) -> tuple[dict[str, nn.Module], list[str]]:
    """The other libraries' layers that can be built here, and why the rest cannot."""
    built: dict[str, nn.Module] = {}
    missing: list[str] = []
    for name, (module, attribute, arguments) in PEERS.items():
        try:
            make = getattr(importlib.import_module(module), attribute)
            layer = make(in_channels=channels, out_channels=channels, **arguments)
            shape = tuple(layer(torch.zeros(1, channels, 16, 16)).shape)
            if shape == (1, channels, 16, 16):
                built[name] = layer
            else:
                missing.append(
                    f"{name}: 16×16 pixels become {shape[2]}×{shape[3]}, no layer to compare with"
                )
        except ImportError:
            missing.append(f"{name}: not installed")
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            missing.append(
                f"{name}: {type(error).__name__} ({str(error).splitlines()[0][:80] if str(error) else ''})"
            )
    return built, missing


def train_step(layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
    """Forward and backward, gradients thrown away."""
    layer.zero_grad(set_to_none=True)
    layer(x).backward(gradient)


def evaluate(layer: nn.Module, x: Tensor) -> Tensor:
    """Forward only."""
    with torch.no_grad():
        return layer(x)


def exported(layer: nn.Module, size: int) -> nn.Module:
    """The plain form, for one image size where the weights depend on it."""
    if isinstance(layer, FrequencyConv2d):
        return layer.export((size, size)).eval()
    return convert.plain(layer)[0].eval()


def costs(
    repeats: int = 5,
    channels: int = 64,
    size: int = 32,
    batch: int = 32,
    only: tuple[str, ...] = (),
) -> Section:
    """Training step and exported evaluation of every layer as ratio to `nn.Conv2d`."""
    torch.manual_seed(0)
    x = torch.randn(batch, channels, size, size, requires_grad=True)
    gradient = torch.randn(batch, channels, size, size)
    timed = {name: make(channels) for name, (make, _) in LAYERS.items() if not only or name in only}
    others, missing = ({}, []) if only else peers(channels)
    base = plain(channels)
    steps = {
        name: partial(train_step, layer.train(), x, gradient)
        for name, layer in {"nn.Conv2d": base, **timed, **others}.items()
    }
    take_turns(steps, 1)  # first calls plan and allocate
    training = take_turns(steps, repeats)
    fixed = {
        "nn.Conv2d": base.eval(),
        **{name: exported(layer.eval(), size) for name, layer in timed.items()},
    }
    passes = {name: partial(evaluate, layer, x.detach()) for name, layer in fixed.items()}
    take_turns(passes, 1)
    evaluation = take_turns(passes, repeats)
    rows: list[Row] = []
    goals: list[Goal] = []
    for name in steps:
        row: Row = {
            "layer": name,
            "train s": training.seconds[name],
            "train ratio": training.ratio(name, "nn.Conv2d"),
        }
        if name in fixed:
            ratio = evaluation.ratio(name, "nn.Conv2d")
            row |= {
                "export": type(fixed[name]).__name__,
                "eval s": evaluation.seconds[name],
                "eval ratio": ratio,
            }
            if name != "nn.Conv2d" and type(fixed[name]) is nn.Conv2d:
                goals.append(Goal(f"{name}, exported, evaluation", ratio, 1.05))
        rows.append(row)
        limit = LAYERS[name][1] if name in LAYERS else None
        if limit is not None:
            goals.append(Goal(f"{name}, training step", row["train ratio"], limit))
    note = f"{channels}→{channels} 3×3 on {size}×{size}, batch {batch}; train: forward and backward with the weight's computation"
    return Section(
        "1-Lipschitz convolutions against nn.Conv2d", rows, goals, "; ".join([note, *missing])
    )


#: methods of whole networks, with the ratio of a training step to reach
NETWORKS = {"AOL": 1.3, "SR": 1.3, "BCOP": 1.3}


def network(
    method: str | None = None, width: int = 32, size: int = 32, hidden: int = 512
) -> nn.Sequential:
    """Four 3×3 convolutions, two of them with stride 2, and two dense layers: plain, or all of one method.

    >>> network("aol", width=4, size=8, hidden=8)(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 10])
    """
    kinds: dict[type[nn.Module], Any] = (
        {k: k for k in (nn.Conv2d, nn.Linear)} if method is None else methods()[method]
    )
    convolve, dense, c = kinds[nn.Conv2d], kinds[nn.Linear], width
    parts: list[nn.Module] = []
    for ins, out, stride in ((3, c, 1), (c, c, 2), (c, 2 * c, 1), (2 * c, 2 * c, 2)):
        parts += [convolve(ins, out, 3, stride=stride, padding=1), nn.ReLU()]
    return nn.Sequential(
        *parts, nn.Flatten(), dense(2 * c * (size // 4) ** 2, hidden), nn.ReLU(), dense(hidden, 10)
    )


def whole_step(
    method: str | None, device: torch.device | str = "cpu", quick: bool = False
) -> Callable[[], None]:
    """A training step of `network`: forward, cross-entropy, backward, SGD with momentum; batch 128 of 32×32 pixels."""
    width, size, hidden, batch = (4, 8, 8, 2) if quick else (32, 32, 512, 128)
    net = network(method, width, size, hidden).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    x, y = torch.randn(batch, 3, size, size, device=device), torch.arange(batch, device=device) % 10

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def networks(repeats: int = 5, quick: bool = False) -> Section:
    """A training step of a whole network of every method as ratio to the plain one."""
    torch.manual_seed(0)
    steps = {"plain": whole_step(None, quick=quick)}
    steps |= {name: whole_step(name.lower(), quick=quick) for name in NETWORKS}
    take_turns(steps, 1)
    training = take_turns(steps, repeats)
    rows: list[Row] = [
        {
            "network": name,
            "train s": training.seconds[name],
            "train ratio": training.ratio(name, "plain"),
        }
        for name in steps
    ]
    goals = [
        Goal(
            f"network of {row['network']}, training step",
            row["train ratio"],
            NETWORKS[row["network"]],
        )
        for row in rows[1:]
    ]
    note = "four 3×3 convolutions on 32×32 pixels, dense layers 4096 → 512 → 10, batch 128; with loss and optimizer"
    return Section("whole networks against the plain one", rows, goals, note)


def dense_weight() -> tuple[Tensor, str]:
    """The last layer (1000×512) of a trained ResNet-18 where its weights lie, else a Gaussian one with unequal channels."""
    kernels = real_kernels()
    if kernels is not None and "fc" in kernels:
        return kernels["fc"], "last layer of a trained ResNet-18"
    W = torch.randn(1000, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return W * torch.logspace(
        0, -1, 512, dtype=torch.float64
    ), "Gaussian matrix with channels of unequal size"


def conditioning(
    weight: Tensor, steps: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
) -> dict[str, Tensor]:
    """Singular values of one matrix after spectral normalisation, AOL, and spectral rescaling in t steps; float64, sorted.

    Two things to see: the profile σ_i/σ_1 (dividing by the norm keeps its shape, one factor per channel flattens it),
    and σ_1 itself, which grows from AOL's towards 1 with t.

    >>> found = conditioning(torch.randn(16, 8), steps=(1, 4))
    >>> list(found), bool(found["SR t=4"][0] <= 1)
    (['SN', 'AOL', 'SR t=1', 'SR t=4'], True)
    """
    W = weight.detach().double()
    kernel = Geometry((W.shape[0], W.shape[1]))
    layers: dict[str, nn.Module] = {
        "SN": SN(kernel, dtype=W.dtype),
        "AOL": AOL(kernel, dtype=W.dtype),
    }
    layers |= {f"SR t={t}": SR(kernel, t=t, learn_q=False, dtype=W.dtype) for t in steps}
    with torch.no_grad():
        return {name: torch.linalg.svdvals(layer(W)) for name, layer in layers.items()}


def profiles(weight: Tensor, what: str) -> Section:
    """The conditioning figure as a table: σ_1, and σ_i/σ_1 at a few places and on average."""
    table: list[Row] = []
    for name, value in conditioning(weight).items():
        ratio = value / value[0]
        places = {
            f"σ_i/σ_1 at {share:.0%}": float(ratio[int(share * (len(ratio) - 1))])
            for share in (0.1, 0.25, 0.5, 0.75)
        }
        table.append(
            {
                "layer": name,
                "σ_1": float(value[0]),
                **places,
                "mean of σ_i/σ_1": float(ratio.mean()),
            }
        )
    means = {row["layer"]: row["mean of σ_i/σ_1"] for row in table}
    goals = [
        Goal(f"flatness, {other} / SR t=2", means[other] / means["SR t=2"], 1.0)
        for other in ("SN", "AOL")
    ]
    note = f"{what}, {weight.shape[0]}×{weight.shape[1]}; a larger σ_i/σ_1 is flatter"
    return Section("conditioning", table, goals, note)


def sections(quick: bool = False, repeats: int = 5) -> Iterator[Section]:
    """All sections; `quick` is a tiny subset that only shows that everything runs."""
    if quick:  # the goals speak of real sizes
        yield replace(costs(1, channels=4, size=8, batch=2), goals=[])
        yield replace(networks(1, quick=True), goals=[])
        yield replace(profiles(torch.randn(32, 16), "Gaussian matrix"), goals=[])
        return
    yield costs(repeats)
    yield networks(repeats)
    yield profiles(*dense_weight())
