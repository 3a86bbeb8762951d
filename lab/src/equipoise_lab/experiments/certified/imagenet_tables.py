"""LVM-RS on ImageNet with networks of the user's own: a denoiser with a vision transformer, and Salman's adversarial training.

Needs, none of which can be shipped: the validation images as a folder `imagenet-val` (a subfolder per class, in the
order of the class indices) in the data folder, and a module `imagenet_networks` on the Python path with factories
that take `sigma` and return a network from images in [0, 1] to 1000 logits, such as `equipoise.smoothing.Denoised`
around a denoiser and a classifier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from equipoise.checkpoints import load_factory
from equipoise.data import load_dataset
from equipoise.smoothing import SmoothedClassifier
from equipoise_lab.experiments.certified.lvm_rs import COHEN, HARD, METHODS, SOFT, compare
from equipoise_lab.experiments.certified.lvm_rs import Settings as Votes
from equipoise_lab.experiments.experiment import Context, Row, Verdict, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, published
from equipoise_lab.experiments.intervals import gain_label
from equipoise_lab.experiments.shared import smoothed_networks as smoothed

DENOISED, SALMAN = "denoiser and ViT", "Salman's ResNet"
#: (ε, hard votes, LVM-RS), the best over σ
PUBLISHED_TABLE = {
    DENOISED: ((0.0, 79.88, 80.66), (0.5, 69.57, 69.84), (1.0, 51.55, 53.85), (1.5, 36.04, 36.04), (2.0, 25.53, 27.43),
               (3.0, 14.01, 14.31)),
    SALMAN: ((0.14, 74.49, 76.77), (0.2, 73.08, 74.99), (0.3, 69.84, 71.26), (0.4, 66.41, 67.55), (0.5, 62.42, 63.43),
             (0.6, 57.75, 58.59), (0.7, 51.24, 51.39)),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Factories by network with the noise of each, draws and maps, the number of inputs, and of others to calibrate on."""

    votes: Votes
    networks: dict[str, str] = field(
        default_factory=lambda: {
            DENOISED: "imagenet_networks:denoised_vit",
            SALMAN: "imagenet_networks:smooth_adversarial",
        }
    )
    sigmas: dict[str, tuple[float, ...]] = field(
        default_factory=lambda: {DENOISED: (0.25, 0.5, 1.0), SALMAN: (0.25,)}
    )
    data: str = "imagenet-val"
    inputs: int = 500
    calibration: int = 100


def rows_of(name: str, sigma: float, settings: Settings, context: Context) -> Iterator[Row]:
    """One network at one σ: a row per method and ε."""
    images = load_dataset(str(context.file(settings.data)))
    indices = torch.linspace(0, len(images) - 1, settings.inputs + settings.calibration).long()
    order = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))]
    x, y = images.batch(order.tolist())
    model = load_factory(settings.networks[name], {"sigma": sigma}).to(context.device)
    classifier = SmoothedClassifier(model, sigma, 1000, seed=0)
    sampling, others = settings.votes.sampling, x[settings.inputs :].to(context.device)
    x = x[: settings.inputs].to(context.device)
    fixed = classifier.calibrate(
        others, n0=sampling.n0, n=sampling.n, alpha=sampling.alpha, grid=settings.votes.grid[1:]
    )
    blocks = smoothed.logits(classifier, x, sampling, context)
    labels = y[: settings.inputs].numpy()
    methods = smoothed.joined(
        compare(a, b, labels[part], fixed, sigma, settings.votes) for part, a, b in blocks
    )
    for row in smoothed.curves(methods, (COHEN, HARD), settings.votes.epsilons):
        yield {**row, "network": name, "sigma": sigma, "map": str(fixed)}


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """Every network and σ."""
    context.file(settings.data)
    for name, sigmas in settings.sigmas.items():
        for sigma in sigmas:
            yield from context.cell(
                f"{name}, σ = {sigma:g}", rows_of, name, sigma, settings, context
            )


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """At the smallest radius of each table, at its smallest σ: soft over hard votes with the same intervals."""
    verdicts = []
    for name in dict.fromkeys(r["network"] for r in rows):
        epsilon, hard, soft = PUBLISHED_TABLE[name][0]
        least = min(r["sigma"] for r in rows if r["network"] == name)
        row = smoothed.pick(rows, network=name, method=SOFT, sigma=least, epsilon=epsilon)[0]
        gain, over = smoothed.gain_of(row, HARD), smoothed.gain_of(row, COHEN)
        text = f"{gain.signed} points over hard votes, {over.signed} over Cohen's, at ε = {epsilon:g} ({gain.seeds} inputs)"
        verdicts.append(Verdict(gain_label(gain, soft - hard), text, f"{hard} → {soft}", name))
    return tuple(verdicts)


def draw(rows: Sequence[Row]) -> Figure:
    """Certified accuracy over ε at the smallest σ of each network, and the published values."""
    names = list(dict.fromkeys(r["network"] for r in rows))
    figure, axes = canvas(len(names), width=4.4)
    for panel, name in zip(axes, names, strict=True):
        least = min(r["sigma"] for r in rows if r["network"] == name)
        smoothed.by_method(panel, smoothed.pick(rows, network=name, sigma=least), METHODS, every=6)
        x, hard, soft = zip(*PUBLISHED_TABLE[name], strict=True)
        published(panel, x, hard, "published, best σ: hard votes", 0)
        published(panel, x, soft, "published, best σ: LVM-RS", 2)
        panel.set(title=name, ylabel="certified accuracy (%)")
    legend(axes[0], shared=True)
    return figure


RADII = tuple(sorted({round(0.1 * k, 1) for k in range(31)} | {0.14}))
EXPERIMENT = of_module(
    __name__,
    place="Tables 6.3, C.1 and C.5 to C.7",
    title="LVM-RS on ImageNet",
    claim="Soft votes certify more than hard votes on ImageNet, with a denoiser and with adversarially trained smoothing.",
    published="79.88/69.57/51.55/36.04/25.53/14.01 → 80.66/69.84/53.85/36.04/27.43/14.31 % at ε = 0/0.5/1/1.5/2/3",
    laptop=Settings(
        Votes({}, smoothed.Sampling(1000), temperatures=8, epsilons=RADII),
        inputs=20,
        calibration=10,
    ),
    paper=Settings(Votes({}, smoothed.Sampling(10_000), temperatures=50, epsilons=RADII)),
    notes=("about 6 s an input and σ on a V100 in the thesis: an hour for each σ at 500 inputs",),
    needs=("imagenet-val",),
    lacking=(
        "it needs the ImageNet validation images as a folder `imagenet-val`, and a module `imagenet_networks` with a denoiser "
        "before a vision transformer and with Salman's networks; none of them may be shipped"
    ),
)
