"""Spectral norms against the alternatives: speed and, beside it, tightness, all in one run.

Every section is a function that returns a `Section` of plain rows, so that the command prints them and tests run small ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import svds
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.norms.spectral import spectral_norm
from equipoise_lab.bench import data_file
from equipoise_lab.peers import complex_gram
from equipoise_lab.timing import peak_bytes, take_turns

Row = dict[str, Any]

DATA = "resnet18-imagenet-partial.npz"


@dataclass(frozen=True)
class Goal:
    """A ratio to reach."""

    what: str
    ratio: float
    limit: float

    @property
    def reached(self) -> bool:
        """Whether the ratio is at most the limit."""
        return self.ratio <= self.limit


@dataclass(frozen=True)
class Section:
    """One table: rows with the same keys, the goals they are measured against, and what was measured."""

    title: str
    rows: list[Row]
    goals: list[Goal] = field(default_factory=list)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        goals = [{**vars(goal), "reached": goal.reached} for goal in self.goals]
        return {"title": self.title, "rows": self.rows, "goals": goals, "note": self.note}


@dataclass(frozen=True)
class Layer:
    """Shape of one convolution of a ResNet-18 at 224×224 and the size of its input."""

    name: str
    out: int
    channels: int
    kernel: int
    stride: int
    size: int

    def module(self, weight: Tensor) -> nn.Conv2d:
        """The layer with zero padding and the given weight."""
        conv = nn.Conv2d(
            self.channels, self.out, self.kernel, self.stride, self.kernel // 2, bias=False
        )
        conv.requires_grad_(False).weight.copy_(weight)
        return conv

    def gaussian(self, seed: int) -> Tensor:
        """A Gaussian kernel of this shape, scaled as at initialisation."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.out, self.channels, self.kernel, self.kernel)
        return (
            torch.randn(shape, generator=generator) * (2 / (self.channels * self.kernel**2)) ** 0.5
        )


def resnet18() -> tuple[Layer, ...]:
    """The 20 convolutions of a ResNet-18.

    >>> len(resnet18())
    20
    """
    layers = [Layer("conv1", 64, 3, 7, 2, 224)]
    channels, size = 64, 56
    for stage, out in enumerate((64, 128, 256, 512), start=1):
        stride = 1 if stage == 1 else 2
        layers.append(Layer(f"layer{stage}.0.conv1", out, channels, 3, stride, size))
        small = size // stride
        layers.append(Layer(f"layer{stage}.0.conv2", out, out, 3, 1, small))
        if stage > 1:
            layers.append(Layer(f"layer{stage}.0.downsample.0", out, channels, 1, 2, size))
        layers += [Layer(f"layer{stage}.1.conv{i}", out, out, 3, 1, small) for i in (1, 2)]
        channels, size = out, small
    return tuple(layers)


def svd_of_all_frequencies(K: Tensor, size: int) -> float:
    """Sedghi 2019: singular values of the symbol at every frequency of the size×size grid (half of it, K is real)."""
    symbol = torch.fft.rfft2(K, s=(size, size)).permute(2, 3, 0, 1)
    return float(torch.linalg.svdvals(symbol).max())


def ryu(K: Tensor, size: int, stride: int, steps: int = 100) -> float:
    """Ryu 2019: power iteration on the zero-padded convolution itself; a lower bound."""
    padding = K.shape[-1] // 2
    x = torch.randn(1, K.shape[1], size, size, generator=torch.Generator().manual_seed(0))
    norm = torch.zeros(())
    for _ in range(steps):
        x = x / torch.linalg.vector_norm(x)
        y = torch.conv2d(x, K, None, stride, padding)
        norm = torch.linalg.vector_norm(y)
        extra = size - ((y.shape[-1] - 1) * stride - 2 * padding + K.shape[-1])
        x = torch.conv_transpose2d(y, K, None, stride, padding, extra)
    return float(norm)


def convolutions(
    kernels: dict[str, Tensor], layers: tuple[Layer, ...], family: str, repeats: int
) -> Section:
    """Ours at rtol 1e-2 against three alternatives, layer by layer, with the values they give."""
    rows: list[Row] = []
    for layer in layers:
        K = kernels[layer.name]
        conv = layer.module(K)
        contest = take_turns(
            {
                "ours": partial(
                    spectral_norm, conv, rtol=1e-2, input_size=(layer.size, layer.size)
                ),
                "svd": partial(svd_of_all_frequencies, K, layer.size),
                "gram": partial(complex_gram, K, layer.size),
                "ryu": partial(ryu, K, layer.size, layer.stride),
            },
            repeats,
        )
        bracket, seconds, values = contest.results["ours"], contest.seconds, contest.results
        rows.append(
            {
                "layer": layer.name,
                "ours s": seconds["ours"],
                "svd s": seconds["svd"],
                "gram s": seconds["gram"],
                "ryu s": seconds["ryu"],
                "lower": bracket.lower,
                "upper": bracket.upper,
                "gap": bracket.gap,
                "svd value": values["svd"],
                "gram value": float(values["gram"]),
                "ryu value": values["ryu"],
            }
        )
    total = _total("all", rows)
    larger = [row for row, layer in zip(rows, layers, strict=True) if layer.kernel > 1]
    rows = [*rows, total] + (
        [_total("all but 1×1", larger)] if 0 < len(larger) < len(layers) else []
    )
    limit = 0.2 if family == "real" else 0.5
    goals = [
        Goal(
            f"{family} kernels, ours / SVD of all frequencies",
            total["ours s"] / total["svd s"],
            limit,
        ),
        Goal(
            f"{family} kernels, ours / plain complex Gram, t = 6",
            total["ours s"] / total["gram s"],
            0.1,
        ),
    ]
    note = (
        "ours: bracket of the zero-padded, strided operator at rtol 1e-2; svd and gram: circular, stride 1, on the n×n "
        "grid (no bound of the zero-padded operator, and far above it where the stride is ignored); "
        "ryu: 100 steps, a lower bound; a 1×1 kernel has the same symbol at every frequency, which svd and gram do not use, "
        "so the second sum leaves those layers out"
    )
    return Section(f"convolutions of a ResNet-18, {family} kernels", rows, goals, note)


def _total(name: str, rows: list[Row]) -> Row:
    seconds = {key: sum(row[key] for row in rows) for key in ("ours s", "svd s", "gram s", "ryu s")}
    return {"layer": name, **seconds, "gap": max(row["gap"] for row in rows)}


def real_kernels() -> dict[str, Tensor] | None:
    """Kernels of a trained ResNet-18 by layer name, None where the file is absent (four of layer 4 are never there)."""
    try:
        path = data_file(DATA)
    except InputError:
        return None
    with np.load(path) as archive:
        names = [name for name in archive.files if name.endswith(".weight")]
        return {name.removesuffix(".weight"): torch.from_numpy(archive[name]) for name in names}


def dense(shapes: tuple[tuple[int, int], ...], repeats: int) -> Section:
    """Ours at rtol 1e-4 against the SVD, eight plain Gram products and ARPACK, in float32 and float64."""
    rows: list[Row] = []
    goals: list[Goal] = []
    for m, n in shapes:
        for dtype in (torch.float32, torch.float64):
            W = torch.randn(m, n, generator=torch.Generator().manual_seed(0), dtype=dtype)
            contest = take_turns(
                {
                    "ours": partial(spectral_norm, W, rtol=1e-4),
                    "svd": partial(torch.linalg.matrix_norm, W, ord=2),
                    "eight gram": partial(_eight_products, W),
                    "arpack": partial(svds, W.numpy(), k=1, return_singular_vectors=False),
                },
                repeats,
            )
            name = f"{m}×{n} {str(dtype).removeprefix('torch.')}"
            bracket, values = contest.results["ours"], contest.results
            row: Row = {"matrix": name} | {
                f"{key} s": value for key, value in contest.seconds.items()
            }
            row |= {"lower": bracket.lower, "upper": bracket.upper, "gap": bracket.gap}
            rows.append(
                row
                | {
                    f"{key} value": float(np.asarray(values[key]).max())
                    for key in ("svd", "eight gram", "arpack")
                }
            )
            goals.append(
                Goal(f"{name}, ours / matrix_norm(ord=2)", contest.ratio("ours", "svd"), 0.2)
            )
            goals.append(
                Goal(
                    f"{name}, ours / eight Gram products", contest.ratio("ours", "eight gram"), 0.4
                )
            )
    note = (
        "ours: bracket at rtol 1e-4, both ends proved in floating point; arpack gives a lower bound, "
        "eight Gram products an upper one before rounding"
    )
    return Section("dense Gaussian matrices", rows, goals, note)


def _eight_products(W: Tensor) -> Tensor:
    log = torch.zeros((), dtype=torch.float64)
    for _ in range(8):
        scale = torch.linalg.matrix_norm(W)
        log = 2 * (log + scale.double().log())
        W = W / scale
        W = W.mT @ W
    return ((torch.linalg.matrix_norm(W).double().log() + log) / 2**8).exp()


def input_sizes(sizes: tuple[int, ...], repeats: int, channels: int = 64) -> Section:
    """The cost of one 3×3 layer as the input grows."""
    layer = Layer("64→64 3×3", channels, channels, 3, 1, 32)
    conv = layer.module(layer.gaussian(0))
    contest = take_turns(
        {str(n): partial(spectral_norm, conv, rtol=1e-2, input_size=(n, n)) for n in sizes}, repeats
    )
    rows = []
    for name, bracket in sorted(contest.results.items(), key=lambda item: int(item[0])):
        ends = {"lower": bracket.lower, "upper": bracket.upper, "gap": bracket.gap}
        rows.append({"n": name, "seconds": contest.seconds[name], **ends})
    title = f"one {channels}→{channels} 3×3 convolution, input n×n, zero padding, rtol 1e-2"
    return Section(title, rows, note="beyond a few dozen pixels the cost should not depend on n")


def gradient_memory(layers: tuple[Layer, ...]) -> Section:
    """Peak memory of a forward and backward pass: the explicit gradient against autodiff through the iterations."""
    from equipoise.functional import conv_norm

    rows = []
    for layer in layers:
        n = layer.size // layer.stride
        symbol = layer.out * layer.channels * n * (n // 2 + 1) * 8
        ours = _peak(layer, partial(conv_norm, padding="circular", input_size=n, iterations=6))
        auto = _peak(layer, partial(complex_gram, size=n))
        rows.append(
            {
                "layer": f"{layer.name} {layer.out}×{layer.channels}×{layer.kernel}² n={n}",
                "explicit MB": ours / 1e6,
                "autodiff MB": auto / 1e6,
                "ratio": ours / auto,
                "symbol MB": symbol / 1e6,
                "explicit/symbol": ours / symbol,
            }
        )
    note = (
        "peak bytes of torch's CPU allocator above the start, forward and backward, circular padding, t = 6 "
        "(from the profiler's allocation events; buffers of MKL are not seen); symbol: one complex64 copy on half the grid"
    )
    return Section("memory of the gradient", rows, note=note)


def _peak(layer: Layer, bound: Callable[[Tensor], Tensor]) -> int:
    K = layer.gaussian(0).requires_grad_()
    return peak_bytes(lambda: bound(K).backward())


def sections(quick: bool = False, repeats: int = 3) -> Iterator[Section]:
    """All sections, one after the other; `quick` is a tiny subset that only shows that everything runs."""
    layers = resnet18()
    tiny = (Layer("tiny.conv1", 8, 4, 3, 2, 16), Layer("tiny.conv2", 8, 8, 3, 1, 8))
    warm = convolutions({x.name: x.gaussian(i) for i, x in enumerate(tiny)}, tiny, "Gaussian", 3)
    if quick:  # the goals speak of real sizes
        yield replace(warm, goals=[], title="two tiny convolutions")
        yield replace(dense(((200, 100),), 1), goals=[])
        yield input_sizes((16, 32), 1, channels=8)
        yield gradient_memory(tiny[1:])
        return
    kernels = real_kernels()
    if kernels is None:
        note = f"skipped: there is no {DATA}; set EQUIPOISE_DATA to the folder that holds it"
        yield Section("convolutions of a ResNet-18, real kernels", [], note=note)
    else:
        yield convolutions(kernels, tuple(x for x in layers if x.name in kernels), "real", repeats)
    yield convolutions(
        {x.name: x.gaussian(i) for i, x in enumerate(layers)}, layers, "Gaussian", repeats
    )
    yield dense(((2000, 1000), (4096, 1024)), repeats)
    yield input_sizes((32, 64, 128, 256, 512, 1024), repeats)
    names = ("layer1.0.conv1", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2")
    yield gradient_memory(tuple(x for x in layers if x.name in names))
