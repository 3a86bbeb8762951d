"""`equipoise demo`: what the library does, on generated data, in half a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, results, table

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from equipoise.selfcheck import Report


def demo(
    seconds: Annotated[float, typer.Option(help="How long the self-check at the end takes.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """The main job on generated data, in half a minute: no download, no GPU.

    Trains a small network to tell horizontal from vertical stripes, brackets the norm
    of each layer, shows where the usual shortcuts are wrong, and checks the guarantees.

    Examples:

      equipoise demo
      equipoise demo --seconds 20
    """
    import torch

    from equipoise.selfcheck import CHECKS, run

    console = results()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, accuracy = train()
        layers = layer_norms(model)
        wrong = shortcuts()
    if not as_json:
        _show_layers(layers, accuracy, console)
        _show_shortcuts(wrong, console)
    report = run(CHECKS, seconds)
    if as_json:
        emit_json({"accuracy": accuracy, "layers": layers, "shortcuts": wrong, "selfcheck": report.to_dict()})
    else:
        _show_end(report, console)
    if report.violations:
        raise typer.Exit(1)


def train(steps: int = 150, size: int = 16) -> tuple[nn.Sequential, float]:
    """A small CNN that tells horizontal from vertical noisy stripes, and its accuracy on fresh ones."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (size // 2) ** 2, 2),
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        x, y = stripes(64, size)
        loss = nn.functional.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.requires_grad_(False)
    x, y = stripes(1000, size)
    return model, float((model(x).argmax(1) == y).float().mean())


def stripes(count: int, size: int) -> tuple[Any, Any]:
    """Images `(count, 1, size, size)` of noisy stripes of random width and phase; label 1 where they are vertical."""
    import torch

    position = torch.arange(size, dtype=torch.float32)
    frequency = 0.5 + torch.rand(count, 1)
    wave = torch.sin(frequency * position + 6.28 * torch.rand(count, 1))
    label = torch.randint(0, 2, (count,))
    image = wave[:, :, None].expand(-1, -1, size)
    image = torch.where(label[:, None, None] == 1, image.mT, image)
    return (image + 0.7 * torch.randn(count, size, size))[:, None], label


def layer_norms(model: nn.Sequential, size: int = 16) -> list[dict[str, Any]]:
    """Bracket of every linear layer at the input size it really sees."""
    import torch

    from equipoise.norms import spectral_norm

    rows = []
    x = torch.zeros(1, 1, size, size)
    for name, layer in model.named_children():
        if hasattr(layer, "weight"):
            b = spectral_norm(layer, rtol=1e-3, input_size=tuple(x.shape[2:]) or None)
            rows.append({"name": name, "layer": str(layer), "lower": b.lower, "upper": b.upper, "note": b.note})
        x = layer(x)
    return rows


def shortcuts() -> list[dict[str, Any]]:
    """Three usual shortcuts, each with an operator on which it is wrong, and what is true (from the reference and us)."""
    import torch
    from torch import nn

    from equipoise.norms import reference_norm, spectral_norm

    def row(name: str, value: float, layer: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        b = spectral_norm(layer, rtol=1e-3, input_size=shape[1:] or None)
        truth = reference_norm(layer, shape)
        return {"shortcut": name, "value": value, "truth": truth, "lower": b.lower, "upper": b.upper}

    grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False).requires_grad_(False)
    grouped.weight.mul_(0.6)  # every group below 1: the product is far below
    symbols = torch.fft.fft2(grouped.weight.reshape(4, 2, 2, 3, 3), s=(8, 8)).permute(0, 3, 4, 1, 2)
    product = float(torch.linalg.matrix_norm(symbols, ord=2).amax((1, 2)).prod())

    reflect = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect", bias=False).requires_grad_(False)
    reflect.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0]]))  # shifts by one pixel: looks like norm 1
    as_zeros = float(torch.fft.fft2(reflect.weight, s=(8, 8)).abs().max())

    dense = nn.Linear(200, 200, bias=False).requires_grad_(False)
    v = torch.randn(200)
    for _ in range(10):
        v = dense.weight.mT @ (dense.weight @ (v / v.norm()))
    power = float((dense.weight @ v).norm() / v.norm())
    return [
        row("grouped convolution: product of the groups' norms", product, grouped, (8, 8, 8)),
        row("reflect padding treated as zero padding", as_zeros, reflect, (1, 8, 8)),
        row("10 steps of power iteration", power, dense, (200,)),
    ]


def _show_layers(rows: list[dict[str, Any]], accuracy: float, console: Console) -> None:
    from equipoise.core.bounds import round_down, round_up

    console.print(f"A small network, trained on generated stripes: accuracy {accuracy:.1%}")
    shown = table("how much each layer can amplify", "", "layer", "lower", "upper", "note", right=("lower", "upper"))
    for row in rows:
        shown.add_row(row["name"], row["layer"], round_down(row["lower"], 5), round_up(row["upper"], 5), row["note"])
    console.print(shown, markup=False)


def _show_shortcuts(rows: list[dict[str, Any]], console: Console) -> None:
    from equipoise.core.bounds import round_down, round_up

    numbers = ("it says", "truth", "our bracket")
    shown = table("shortcuts that fall below the truth", "shortcut", *numbers, right=numbers)
    for row in rows:
        bracket = f"[{round_down(row['lower'], 5)}, {round_up(row['upper'], 5)}]"
        shown.add_row(row["shortcut"], f"{row['value']:.5g}", f"{row['truth']:.5g}", bracket)
    console.print(shown, markup=False)


def _show_end(report: Report, console: Console) -> None:
    from equipoise.cli.selfcheck import show

    show(report, console)
    console.print("Next: `equipoise norm FILE.safetensors` on your own weights, `equipoise --help` for the rest.")
