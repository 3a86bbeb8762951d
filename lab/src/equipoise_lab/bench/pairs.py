"""`equipoise bench all` and `compare`: ratios of ours over a baseline, with their spread over rounds in which both take turns.

A measurement is a row of `PAIRS`. The document of a run names the processor and the threads; two documents are compared by the
ratios' quartiles, so that a change is only called one where it stands out of the noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.lipschitz import lipschitz_bound
from equipoise.norms.differentiable import conv_norm
from equipoise.norms.spectral import spectral_norm
from equipoise.optim import SpectralGuard
from equipoise_lab.bench import layers, lipschitz, norms, smoothing, training
from equipoise_lab.bench.smoothing import Work
from equipoise_lab.experiments.results import machine
from equipoise_lab.timing import take_turns

#: makes `(ours, baseline)` on a device, at full size or at one that only shows that it runs; None where data is missing
Maker = Callable[[torch.device, bool], tuple[Work, Work] | None]

VERSION = 1


@dataclass(frozen=True)
class Measured:
    """Ratio of ours over the baseline: median and quartiles over the rounds, and the seconds."""

    name: str
    ratio: float
    low: float
    high: float
    ours: float
    baseline: float
    goal: float | None

    @staticmethod
    def of(
        name: str,
        works: tuple[Work, Work],
        rounds: int,
        clock: Callable[[], float],
        goal: float | None,
    ) -> Measured:
        """Both in turns, after one round that does not count."""
        contestants = {"ours": works[0], "baseline": works[1]}
        take_turns(contestants, 1)
        contest = take_turns(contestants, rounds, clock)
        ratios = contest.ratios("ours", "baseline")
        low, _, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        )
        return Measured(
            name,
            statistics.median(ratios),
            low,
            high,
            contest.seconds["ours"],
            contest.seconds["baseline"],
            goal,
        )


def dense(m: int, n: int, dtype: torch.dtype) -> Maker:
    """A Gaussian matrix at rtol 1e-4 against `matrix_norm(ord=2)`."""

    def make(device: torch.device, quick: bool) -> tuple[Work, Work]:
        shape = (m // 16, n // 16) if quick else (m, n)
        W = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype).to(device)
        return partial(spectral_norm, W, rtol=1e-4), partial(torch.linalg.matrix_norm, W, ord=2)

    return make


def kernels(family: str) -> Maker:
    """The larger than 1×1 kernels of a ResNet-18 at rtol 1e-2 against the SVD of all frequencies."""

    def make(device: torch.device, quick: bool) -> tuple[Work, Work] | None:
        layers = [layer for layer in norms.resnet18() if layer.kernel > 1]
        real = norms.real_kernels() if family == "real" else None
        if family == "real" and real is None:
            return None
        if quick:
            layers = [norms.Layer("tiny", 8, 8, 3, 1, 8)]
            real = None
        weights = [
            (layer, layer.gaussian(i) if real is None else real[layer.name])
            for i, layer in enumerate(layers)
            if real is None or layer.name in real
        ]
        modules = [(layer, layer.module(K).to(device)) for layer, K in weights]

        def ours() -> None:
            for layer, module in modules:
                spectral_norm(module, rtol=1e-2, input_size=(layer.size, layer.size))

        def svd() -> None:
            for layer, K in weights:
                norms.svd_of_all_frequencies(K.to(device), layer.size)

        return ours, svd

    return make


def norm_gradient(channels: int) -> Maker:
    """`conv_norm` with its gradient against a training step of the convolution itself, batch 32 at 32×32."""

    def make(device: torch.device, quick: bool) -> tuple[Work, Work]:
        c = 8 if quick else channels
        layer = layers.plain(c).to(device)
        x = torch.randn(2 if quick else 32, c, 32, 32, device=device)
        K = torch.randn(c, c, 3, 3, device=device).requires_grad_()
        return lambda: conv_norm(K, input_size=32).backward(), partial(
            layers.train_step, layer, x, layer(x).detach()
        )

    return make


def layer(name: str) -> Maker:
    """A training step of one of our layers against that of `nn.Conv2d`."""

    def make(device: torch.device, quick: bool) -> tuple[Work, Work]:
        c, size, batch = (4, 8, 2) if quick else (64, 32, 32)
        x = torch.randn(batch, c, size, size, device=device, requires_grad=True)
        gradient: Tensor = torch.randn(batch, c, size, size, device=device)
        ours, base = layers.LAYERS[name][0](c).to(device), layers.plain(c).to(device)
        return partial(layers.train_step, ours, x, gradient), partial(
            layers.train_step, base, x, gradient
        )

    return make


def whole(name: str) -> Maker:
    """A training step of a network of four convolutions and two dense layers against the plain one."""

    def make(device: torch.device, quick: bool) -> tuple[Work, Work]:
        return layers.whole_step(name.lower(), device, quick), layers.whole_step(
            None, device, quick
        )

    return make


def certify(device: torch.device, quick: bool) -> tuple[Work, Work]:
    """`certify` against the plain loop as published, on a CIFAR ResNet."""
    return smoothing.against_loop(smoothing.resnet().to(device), 100 if quick else 900)


def certify_compiled(device: torch.device, quick: bool) -> tuple[Work, Work] | None:
    """`certify` of a network that went through `torch.compile` against the plain loop; None where nothing can be compiled."""
    if quick:  # compiling takes longer than all the rest
        return None
    model = smoothing.resnet().to(device)
    compiled: Any = torch.compile(model)
    try:
        with torch.inference_mode():
            compiled(torch.rand(smoothing.CHUNK, 3, 32, 32, device=device))
    except torch._dynamo.exc.TorchDynamoException:  # no compiler on this machine
        return None
    return smoothing.against_loop(model, 900, compiled)


def soft(device: torch.device, quick: bool) -> tuple[Work, Work]:
    """LVM-RS against Cohen on a small network, where the passes are cheap."""
    return smoothing.against_votes(smoothing.small_cnn().to(device), 200 if quick else 10_000)


def audit(depth: int) -> Maker:
    """`lipschitz_bound` of a ResNet at 3×224×224 and rtol 0.05 against one forward pass of batch 8."""

    def make(device: torch.device, quick: bool) -> tuple[Work, Work]:
        size, batch = (32, 1) if quick else (224, 8)
        torch.manual_seed(0)
        net = (
            layers.plain(4).eval() if quick else lipschitz.imagenet_resnet(depth)
        ).requires_grad_(False)
        net, x = net.to(device), torch.randn(batch, 4 if quick else 3, size, size).to(device)
        # what the exporter imports is not part of the audit
        lipschitz_bound(nn.Linear(2, 2), torch.zeros(1, 2))
        return partial(lipschitz_bound, net, x[:1], rtol=0.05), partial(_forward, net, x)

    return make


def _forward(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def guarded(device: torch.device, quick: bool) -> tuple[Work, Work]:
    """A step of a small GPT under guard, every layer at its radius, against the same step without."""
    works = []
    for hold in (True, False):
        model, x, y = training.gpt(32, 1, 16, 2) if quick else training.gpt(256, 4, 128, 16)
        model, x, y = model.to(device), x.to(device), y.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        if hold:
            SpectralGuard(model, radius=1.0, only=nn.Linear, optimizer=optimizer)

        def step(
            model: nn.Module = model, x: Tensor = x, y: Tensor = y, optimizer: Any = optimizer
        ) -> None:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()

        works.append(step)
    return works[0], works[1]


#: measurement → (how it is made, the ratio to reach)
PAIRS: dict[str, tuple[Maker, float | None]] = {
    "dense 2000×1000 float32 / matrix_norm": (dense(2000, 1000, torch.float32), 0.25),
    "dense 4096×1024 float32 / matrix_norm": (dense(4096, 1024, torch.float32), 0.25),
    "dense 2000×1000 float64 / matrix_norm": (dense(2000, 1000, torch.float64), 0.2),
    "dense 4096×1024 float64 / matrix_norm": (dense(4096, 1024, torch.float64), 0.25),
    "ResNet-18, Gaussian kernels / SVD of all frequencies": (kernels("Gaussian"), 0.25),
    "ResNet-18, real kernels / SVD of all frequencies": (kernels("real"), 0.1),
    "conv_norm 64 channels, with gradient / training step": (norm_gradient(64), None),
    **{
        f"{name}, training step / nn.Conv2d": (layer(name), goal)
        for name, (_, goal) in layers.LAYERS.items()
    },
    **{
        f"network of {name}, training step / plain network": (whole(name), goal)
        for name, goal in layers.NETWORKS.items()
    },
    "certify, seconds / plain loop": (certify, 1.0),
    "certify of a compiled network, seconds / plain loop": (certify_compiled, 1 / 1.3),
    "LVM-RS, seconds / Cohen": (soft, 1.05),
    "audit of ResNet-18, seconds / forward pass of batch 8": (audit(18), 10),
    "small GPT under guard / plain step": (guarded, 1.05),
}


def measure(
    rounds: int = 5,
    device: str = "cpu",
    only: Iterable[str] = (),
    quick: bool = False,
    cpu_time: bool = False,
) -> Iterator[Measured]:
    """Every measurement whose name contains one of `only` (all, if there are none), one after the other."""
    where = _available(device)
    wanted = tuple(only)
    tasks = {
        name: pair
        for name, pair in PAIRS.items()
        if not wanted or any(part in name for part in wanted)
    }
    if not tasks:
        raise InputError(
            f"no measurement has a name with {', '.join(map(repr, wanted))}; there are {', '.join(PAIRS)}"
        )
    for name, (make, goal) in tasks.items():
        works = make(where, quick)
        if works is not None:
            waiting = (_finished(works[0], where), _finished(works[1], where))
            clock = time.process_time if cpu_time else time.perf_counter
            yield Measured.of(name, waiting, rounds, clock, None if quick else goal)


def _available(name: str) -> torch.device:
    """The device of this name, refused where there is none."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"device {name!r} cannot be used here: {first}; take cpu, or a machine that has it"
        ) from error
    return device


def _finished(work: Work, device: torch.device) -> Work:
    """The work, and on a GPU the wait for its end."""
    if device.type != "cuda":
        return work

    def both() -> None:
        work()
        torch.cuda.synchronize(device)

    return both


def document(
    measured: Iterable[Measured], rounds: int, device: str, cpu_time: bool
) -> dict[str, Any]:
    """What is stored: the measurements, and what they depend on."""
    where = machine()
    if device.startswith("cuda"):
        where["device"] = torch.cuda.get_device_name(torch.device(device))
    settings = {"rounds": rounds, "device": device, "clock": "processor" if cpu_time else "wall"}
    rows = [asdict(one) for one in measured]
    return {
        "bench": VERSION,
        "torch": torch.__version__,
        "machine": where,
        **settings,
        "measured": rows,
    }


def read(stored: Any, what: str) -> tuple[str, dict[str, Measured]]:
    """What a document says of its machine, and its measurements by name; refused where it is none."""
    if (
        not isinstance(stored, Mapping)
        or stored.get("bench") != VERSION
        or not isinstance(stored.get("measured"), list)
    ):
        raise InputError(f"{what} is no document of `equipoise bench all --json`")
    measured: dict[str, Measured] = {}
    for row in stored["measured"]:
        try:
            goal = row["goal"]
            numbers = {key: float(row[key]) for key in ("ratio", "low", "high", "ours", "baseline")}
            measured[str(row["name"])] = Measured(
                str(row["name"]), goal=None if goal is None else float(goal), **numbers
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{what}: a measurement lacks {error}") from error
    here = stored.get("machine")
    here = here if isinstance(here, Mapping) else {}
    where = f"{here.get('device') or here.get('processor')}, {here.get('threads')} thread(s), torch {stored.get('torch')}"
    return f"{where}, {stored.get('rounds')} rounds, {stored.get('clock')} time", measured


def merged(documents: Mapping[str, Any]) -> dict[str, Any]:
    """One document of several runs of one machine, by file name; later measurements of the same name replace earlier ones."""
    whole: dict[str, Any] | None = None
    for name, document in documents.items():
        where, _ = read(document, name)
        if whole is None:
            whole, first = {**document, "measured": []}, (name, where)
        elif where != first[1]:
            raise InputError(
                f"{name} was measured elsewhere or otherwise than {first[0]}: {where}, not {first[1]}"
            )
        names = {row["name"] for row in document["measured"]}
        kept = [row for row in whole["measured"] if row["name"] not in names]
        whole["measured"] = sorted(
            [*kept, *document["measured"]], key=lambda row: [*PAIRS, row["name"]].index(row["name"])
        )
    if whole is None:
        raise InputError(
            "there is nothing to merge: name two documents of `equipoise bench all --json`"
        )
    return whole


def compare(before: Mapping[str, Measured], after: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """Rows of what both hold: the ratios with their quartiles, and a word where the quartiles do not meet."""
    rows = []
    for name, old in before.items():
        if name not in after:
            continue
        new = after[name]
        word = (
            "faster"
            if new.high < old.low
            else "slower"
            if new.low > old.high
            else "no difference seen"
        )
        rows.append(
            {
                "measurement": name,
                "A": _spread(old),
                "B": _spread(new),
                "B/A": new.ratio / old.ratio,
                "verdict": word,
            }
        )
    return rows


def markdown(where: str, measured: Mapping[str, Measured]) -> str:
    """The table of the documentation."""
    lines = [f"{where}.", "", "| measurement | ratio (quartiles) | goal |", "|---|---|---|"]
    for one in measured.values():
        goal = "" if one.goal is None else f"≤ {one.goal:.3g}"
        lines.append(f"| {one.name} | {_spread(one)} | {goal} |")
    return "\n".join(lines) + "\n"


def _spread(one: Measured) -> str:
    return f"{one.ratio:.3g} ({one.low:.3g} – {one.high:.3g})"
