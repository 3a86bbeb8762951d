"""Norms held at a radius while training: power iteration, which is a lower bound, beside the guard, which proves."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.data import load_dataset
from equipoise.optim import SpectralGuard
from equipoise_lab.experiments.experiment import Context, Label, Row, Verdict, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Settings:
    """Width and number of the hidden layers, steps, batch, radius, and the power iterations compared."""

    width: int = 96
    depth: int = 3
    steps: int = 400
    batch: int = 64
    radius: float = 1.5
    iterations: tuple[int, ...] = (1, 4, 16)


def _muon(matrices: list[Tensor], vectors: list[Tensor]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon(matrices, lr=0.05, weight_decay=0.01),
        torch.optim.Adam(vectors, lr=0.01),
    ]


#: optimizers at large learning rates
OPTIMIZERS: dict[str, Callable[[list[Tensor], list[Tensor]], list[torch.optim.Optimizer]]] = {
    "SGD": lambda matrices, vectors: [
        torch.optim.SGD([*matrices, *vectors], lr=0.05, momentum=0.9)
    ],
    "Adam": lambda matrices, vectors: [torch.optim.Adam([*matrices, *vectors], lr=0.01)],
    "Muon": _muon,
}


class PowerCap:
    """`W ← W·R/s` where the estimate s of k warm-started power iterations exceeds R: what is usually done."""

    def __init__(self, model: nn.Module, radius: float, iterations: int) -> None:
        self.weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        self.radius, self.iterations = radius, iterations
        self.vectors = [torch.randn(W.shape[1]) for W in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        """After the optimizer's step."""
        for i, W in enumerate(self.weights):
            v = self.vectors[i]
            for _ in range(self.iterations):
                u = W @ v
                v = W.mT @ (u / u.norm().clamp_min(1e-12))
                v = v / v.norm().clamp_min(1e-12)
            self.vectors[i] = v
            sigma = float((W @ v).norm())
            if sigma > self.radius:
                W.mul_(self.radius / sigma)


def network(settings: Settings, inputs: int, classes: int) -> nn.Sequential:
    """A plain multilayer perceptron."""
    widths = [inputs, *[settings.width] * settings.depth]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per optimizer and way of control: violations against float64 SVD over all steps and layers."""
    train, test = (load_dataset("digits", split=split) for split in ("train", "test"))
    x, y = train.batch(range(len(train)))
    unseen = test.batch(range(len(test)))
    for optimizer in context.steps(OPTIMIZERS):
        for iterations in (*settings.iterations, 0):
            row = _trained(settings, context, optimizer, iterations, x, y, unseen)
            context.tell(
                f"{optimizer}, {row['control']}: {row['violations']} violations, worst {row['worst']:.2%}"
            )
            yield row


def _trained(
    settings: Settings,
    context: Context,
    name: str,
    iterations: int,
    x: Tensor,
    y: Tensor,
    test: tuple[Tensor, Tensor],
) -> Row:
    torch.manual_seed(context.seed)
    model = network(settings, x[0].numel(), int(y.max()) + 1)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    optimizers = OPTIMIZERS[name](list(weights), [p for p in model.parameters() if p.dim() < 2])
    control: Any = (
        PowerCap(model, settings.radius, iterations)
        if iterations
        else SpectralGuard(model, settings.radius)
    )
    generator = torch.Generator().manual_seed(context.seed)
    violations, worst, steps = 0, 0.0, context.steps_of(settings.steps)
    proved = 0.0
    for _ in range(steps):
        indices = torch.randint(len(x), (settings.batch,), generator=generator)
        model.zero_grad()
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        for optimizer in optimizers:
            optimizer.step()
        control.step()
        for W in weights:
            excess = float(torch.linalg.svdvals(W.detach().double())[0]) / settings.radius - 1
            violations += excess > TOLERANCE
            worst = max(worst, excess)
        if not iterations:
            proved = max(
                proved, *(float(b.upper) / settings.radius - 1 for b in control.bounds().values())
            )
    with torch.no_grad():
        accuracy = float((model(test[0]).argmax(1) == test[1]).double().mean())
    return {
        "optimizer": name,
        "control": f"{iterations} power iterations" if iterations else "guard",
        "checks": steps * len(weights),
        "violations": violations,
        "worst": worst,
        "proved": proved if not iterations else None,
        "new proofs": sum(control.used[k] for k in ("renewed", "direct"))
        if not iterations
        else None,
        "accuracy": accuracy,
    }


def judge(rows: Sequence[Row]) -> Verdict:
    """The guard never exceeds the radius by more than the tolerance; power iteration does."""
    guard = [r for r in rows if r["control"] == "guard"]
    others = [r for r in rows if r["control"] != "guard"]
    broken = sum(r["violations"] for r in guard)
    single = [r for r in others if r["control"].startswith("1 ")]
    label = (
        Label.REFUTED
        if broken
        else Label.REPRODUCED
        if any(r["violations"] for r in single)
        else Label.DIRECTION
    )
    text = "; ".join(
        f"{name}: {sum(r['violations'] for r in part)} of {sum(r['checks'] for r in part)} norms above R(1 + 10⁻³), "
        f"worst {max(r['worst'] for r in part):.2%}"
        for name in dict.fromkeys(r["control"] for r in rows)
        if (part := [r for r in rows if r["control"] == name])
    )
    return Verdict(label, text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Share of norms above the radius, and by how much, for every way of control."""
    figure, (left, right) = canvas(2)
    controls = list(dict.fromkeys(r["control"] for r in rows))
    names = list(dict.fromkeys(r["optimizer"] for r in rows))
    for k, control in enumerate(controls):
        matching = [r for r in rows if r["control"] == control]
        places = [names.index(r["optimizer"]) + 0.2 * k for r in matching]
        left.bar(
            places, [100 * r["violations"] / r["checks"] for r in matching], 0.2, label=control
        )
        right.bar(places, [100 * max(r["worst"], 0) for r in matching], 0.2)
    for axes in (left, right):
        axes.set_xticks([i + 0.3 for i in range(len(names))], names)
    left.set(ylabel="norms above R(1 + 10⁻³) (%)")
    right.set(ylabel="largest excess over R (%)")
    legend(left, shared=True)
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="Spectral norms held while training",
    claim="Power iteration lets norms exceed the radius during training; a carried proof does not, after any step.",
    published="no figure: norms are capped by 1 to 16 power iterations and the excess is not measured",
    laptop=Settings(),
    paper=Settings(width=512, depth=4, steps=2000, batch=128),
)
