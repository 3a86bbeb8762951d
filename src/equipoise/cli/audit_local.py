"""`equipoise audit --at DATA --radius r`: what is proved around single inputs, one row each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise.cli.consoles import messages
from equipoise.core.bounds import round_down, round_up
from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.checkpoints import Loaded


def local_rows(loaded: Loaded, data: str, radius: float, limit: int, seconds: float | None) -> list[dict[str, Any]]:
    """Bracket of the local constant, certified radius, rival and method of the first inputs of the data."""
    import numpy as np
    import torch

    from equipoise.data.load import load_dataset
    from equipoise.lipschitz import certified_radius, local_lipschitz
    from equipoise.runs.models import portable

    if limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}")
    network = portable(loaded)
    if network.batch is not None and network.batch != 1:
        raise InputError(
            f"{loaded.source} was exported with a batch of {network.batch} inputs, and --at looks at one; export it with a "
            "batch of one or with a dynamic batch dimension"
        )
    net = network.build()
    dataset = load_dataset(data)
    x, labels = dataset.batch(np.arange(min(limit, len(dataset))))
    x = x.to(next(net.parameters(), torch.zeros(())).dtype)
    rows = []
    for i in range(len(x)):
        messages().print(f"input {i + 1} of {len(x)} …", style="dim")
        one: Tensor = x[i : i + 1]
        bracket = local_lipschitz(net, one, radius, seconds=seconds)
        radii = certified_radius(net, one, labels[i : i + 1], seconds=seconds)
        rows.append(
            {
                "input": int(dataset.ids[i]),
                "label": int(labels[i]),
                "lower": float(bracket.lower[0]),  # type: ignore[index]
                "upper": float(bracket.upper[0]),  # type: ignore[index]
                "radius": float(radii.radius[0]),
                "rival": int(radii.rivals[0]),
                "method": radii.methods[0],
                "note": bracket.note or radii.note,
            }
        )
    return rows


def local_table(rows: list[dict[str, Any]], radius: float, upper: float) -> str:
    """The rows as text; `upper` is the bound of the whole network."""
    lines = [f"on balls of radius {radius:g} (ℓ2), the whole network's bound being {round_up(upper, 5)}:"]
    lines.append(f"{'input':>7} {'label':>5} {'attack':>11} {'proved':>11} {'certified':>11} {'rival':>5}  method")
    for row in rows:
        low, high, safe = round_down(row["lower"], 5), round_up(row["upper"], 5), round_down(row["radius"], 5)
        lines.append(
            f"{row['input']:>7} {row['label']:>5} {low:>11} {high:>11} {safe:>11} {row['rival']:>5}  {row['method']}"
        )
    return "\n".join(lines)
