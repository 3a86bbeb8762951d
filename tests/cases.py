"""Case tables: one row adds an operator, or a method, to every check."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise import functional
from equipoise.core import Bound, Kind
from equipoise.norms import norm2_toep, spectral_norm
from equipoise_lab.peers import PEERS


@dataclass(frozen=True)
class Operator:
    """A layer and the input size it is applied to."""

    id: str
    layer: nn.Module
    size: tuple[int, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.layer.in_channels, *self.size)


_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def _conv(id: str, size: tuple[int, ...], cin: int, cout: int, kernel: object, **options: object) -> Operator:
    torch.manual_seed(0)
    return Operator(id, _CONV[len(size)](cin, cout, kernel, bias=False, **options), size)


def _random_operators(count: int) -> list[Operator]:
    """Random combinations of everything a convolution can be; the generator is fixed, so a failure has a name."""
    rng, found = random.Random(7), []
    while len(found) < count:
        dims, transposed = rng.choice([1, 1, 2, 2, 2, 3]), rng.random() < 0.25
        groups = rng.choice([1, 1, 1, 2, 3])
        cin, cout = groups * rng.choice([1, 2, 3]), groups * rng.choice([1, 2, 3])
        options: dict[str, object] = {
            "stride": tuple(rng.choice([1, 1, 2, 3]) for _ in range(dims)),
            "dilation": tuple(rng.choice([1, 1, 1, 2, 3]) for _ in range(dims)),
            "padding": tuple(rng.randint(0, 4) for _ in range(dims)),
            "groups": groups,
        }
        if transposed:
            most = [max(s, d) for s, d in zip(options["stride"], options["dilation"], strict=True)]
            options["output_padding"] = tuple(rng.randint(0, m - 1) for m in most)
        else:
            options["padding_mode"] = rng.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
        kernel = tuple(rng.randint(1, 4 if dims < 3 else 3) for _ in range(dims))
        size = tuple(rng.randint(1, 9 if dims < 3 else 5) for _ in range(dims))
        torch.manual_seed(len(found))
        layer = (_TRANSPOSED if transposed else _CONV)[dims](cin, cout, kernel, bias=False, **options)
        if rng.random() < 0.3:
            layer.weight.data.abs_()
        try:
            usable = layer(torch.zeros(1, cin, *size)).numel() > 0
        except RuntimeError:
            continue
        if usable:
            name = f"{len(found)}-{type(layer).__name__}-{options.get('padding_mode', 'zeros')}-k{kernel}-s{options['stride']}"
            found.append(Operator(name.replace(" ", ""), layer, size))
    return found


OPERATORS: list[Operator] = [
    _conv("same-3x3", (8, 8), 3, 4, 3, padding=1),
    _conv("valid", (7, 6), 3, 2, 3),
    _conv("full-padding", (5, 5), 2, 3, 3, padding=2),
    _conv("over-padding", (4, 4), 2, 3, 3, padding=5),
    _conv("same-string-even", (6, 7), 2, 2, (2, 4), padding="same"),
    _conv("same-string-reflect", (6, 7), 2, 2, (3, 5), padding="same", padding_mode="reflect"),
    _conv("circular", (6, 6), 3, 3, 3, padding=1, padding_mode="circular"),
    _conv("circular-kernel-larger-than-input", (3, 3), 2, 2, 5, padding=2, padding_mode="circular"),
    _conv("circular-stride", (6, 8), 2, 3, 3, padding=1, padding_mode="circular", stride=2),
    _conv("circular-stride-odd", (7, 5), 2, 3, 3, padding=1, padding_mode="circular", stride=2),
    _conv("circular-over-padded", (4, 4), 2, 2, 3, padding=4, padding_mode="circular"),
    _conv("circular-dilated", (9, 6), 2, 2, 3, padding=3, dilation=3, padding_mode="circular"),
    _conv("reflect", (6, 6), 3, 3, 3, padding=1, padding_mode="reflect"),
    _conv("reflect-both-sides-meet", (3, 3), 2, 2, 3, padding=2, padding_mode="reflect"),
    _conv("replicate", (6, 6), 3, 3, 3, padding=2, padding_mode="replicate"),
    _conv("kernel-larger-than-input", (3, 2), 2, 2, (5, 4), padding=3),
    _conv("stride-equals-kernel", (9, 9), 2, 3, 3, stride=3),
    _conv("stride-above-kernel", (9, 9), 2, 3, 2, stride=3, padding=1),
    _conv("stride-dilation-common-factor", (11, 9), 2, 2, 3, stride=2, dilation=2, padding=2),
    _conv("stride-dilation-coprime", (11, 10), 2, 2, 3, stride=2, dilation=3, padding=3),
    _conv("groups", (6, 6), 4, 6, 3, padding=1, groups=2),
    _conv("depthwise", (7, 7), 5, 5, 3, padding=1, groups=5),
    _conv("one-by-one", (5, 5), 4, 3, 1),
    _conv("one-by-one-stride", (5, 1), 4, 3, 1, stride=2),
    _conv("conv1d", (20,), 3, 4, 5, padding=2),
    _conv("long-kernel", (60,), 2, 2, 41, padding=20),
    _conv("long-kernel-strided", (61,), 1, 2, 33, padding=5, stride=3),
    _conv("depthwise-large-kernel", (12, 12), 2, 2, 11, padding=5, groups=2),
    _conv("conv3d", (4, 5, 3), 2, 2, (3, 2, 1), padding=1),
    *_random_operators(90),
]


@dataclass(frozen=True)
class Method:
    """A way to bound the norm of a stride-1 «same» convolution: `run(kernel, size, padding)`."""

    id: str
    run: Callable[[Tensor, tuple[int, int], str], Bound]


def _bracket_end(end: str) -> Callable[[Tensor, tuple[int, int], str], Bound]:
    def run(kernel: Tensor, size: tuple[int, int], padding: str) -> Bound:
        layer = as_layer(kernel, padding)
        bracket = spectral_norm(layer, input_size=size, rtol=1e-2)
        return Bound(getattr(bracket, end), Kind(end), "spectral_norm")

    return run


def as_layer(kernel: Tensor, padding: str) -> nn.Conv2d:
    co, ci, *k = kernel.shape
    layer = nn.Conv2d(ci, co, tuple(k), padding="same", padding_mode=padding, bias=False, dtype=kernel.dtype)
    layer.weight.data = kernel.clone()
    return layer


METHODS: list[Method] = [
    *(Method(name, lambda K, n, p, peer=peer: peer.run(K, n, p, 40)) for name, peer in PEERS.items()),
    Method("spectral_norm-upper", _bracket_end("upper")),
    Method("spectral_norm-lower", _bracket_end("lower")),
    Method("conv_norm",
        lambda K, n, p: Bound(float(functional.conv_norm(K.double(), p, input_size=n)), Kind.UPPER, "conv_norm")),
    *(
        Method(f"norm2_toep-{r}-{t}", lambda K, n, p, r=r, t=t: norm2_toep(K, t, r))
        for r in ("inf", "fro")
        for t in (0, 1, 3)
    ),
]  # fmt: skip


def matrices() -> list[tuple[str, Tensor]]:
    """Matrices that have broken bounds before, or might."""
    g = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731 - a table helper
    rank_one = rand(30, 1) @ rand(1, 20)
    rows = {
        "tall": rand(40, 7),
        "wide": rand(5, 60),
        "square": rand(33, 33),
        "one-by-one": rand(1, 1),
        "row": rand(1, 50),
        "column": rand(50, 1),
        "zero": torch.zeros(4, 6, dtype=torch.float64),
        "rank-one": rank_one,
        "nearly-rank-one": rank_one + 1e-9 * rand(30, 20),
        "identity": torch.eye(25, dtype=torch.float64),
        "ones": torch.ones(64, 64, dtype=torch.float64),
        "two-equal-singular-values": torch.diag(torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)),
        "huge": rand(12, 9) * 1e280,
        "tiny": rand(12, 9) * 1e-280,
        "subnormal": torch.full((3, 3), 5e-324, dtype=torch.float64),
        "wild-scales": rand(20, 20) * torch.logspace(-150, 150, 20, dtype=torch.float64),
        "large": rand(300, 200),
        "large-wide": rand(170, 400),
        "large-and-huge": rand(190, 170) * 1e30,
        "large-and-tiny": rand(190, 170) * 1e-30,
        "large-and-extreme": rand(190, 170) * 1e300,
        "large-zero": torch.zeros(200, 180, dtype=torch.float64),
        "large-rank-one": rand(180, 1) @ rand(1, 170),
        "large-orthogonal": torch.linalg.qr(rand(200, 170))[0],
        "large-nearly-equal-top": torch.linalg.qr(rand(180, 180))[0]
        * torch.linspace(1, 1 - 1e-7, 180, dtype=torch.float64),
        "large-transposed-float32": rand(400, 170).float().mT,
        "large-strided-float32": rand(200, 800).float()[:, ::4],
        "large-float32-extreme": rand(170, 190).float() * 1e37,
        "complex": torch.complex(rand(12, 20), rand(12, 20)),
        "complex-large": torch.complex(rand(200, 180), rand(200, 180)),
    }
    return list(rows.items())
