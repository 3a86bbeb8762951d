"""Certified accuracy against the number of parameters and against the proved constant, over the cells of the scoreboard."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from equipoise.core.errors import InputError
from equipoise_lab.experiments.experiment import Context, Label, Row, Verdict, of_module
from equipoise_lab.experiments.figures import COLOURS, MARKERS, Figure, canvas, legend
from equipoise_lab.scoreboard import read_board

#: the scoreboards of this checkout
BOARDS = Path(__file__).parents[4] / "results"


@dataclass(frozen=True)
class Settings:
    """The stored scoreboards."""

    boards: tuple[str, ...] = ("scoreboard-cifar10.json", "scoreboard-cifar10-20.json")


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per cell: family, loss, parameters, the proved constant, certified accuracy at the first radius."""
    for name in settings.boards:
        if not (BOARDS / name).exists():
            raise InputError(
                f"{BOARDS / name} is missing: the stored scoreboards are in the repository"
            )
        board = read_board(BOARDS / name)
        for cell in board.cells:
            if "refused" in cell:
                continue
            epsilon, share = next(iter(cell["certified"].items()))
            yield {
                "minutes": board.budget["minutes"],
                "family": cell["asked"]["cell"]["family"],
                "loss": cell["asked"]["cell"]["loss"],
                "seed": cell["asked"]["cell"]["seed"],
                "parameters": cell["parameters"],
                "bound": cell["bound"],
                "accuracy": 100 * cell["accuracy"],
                "epsilon": float(epsilon),
                "certified": 100 * share,
            }


def correlation(rows: Sequence[Row], key: str) -> tuple[float, float, float]:
    """Spearman's rank correlation of a figure with the certified accuracy, with its 95 % interval (Fisher's z)."""
    rank = float(stats.spearmanr([r[key] for r in rows], [r["certified"] for r in rows]).statistic)
    half = 1.96 * 1.03 / math.sqrt(len(rows) - 3)
    z = math.atanh(max(min(rank, 1 - 1e-9), 1e-9 - 1))
    return rank, math.tanh(z - half), math.tanh(z + half)


def by_family(rows: Sequence[Row]) -> list[Row]:
    """The longest budget with cross-entropy, the one loss that all families have: a mean over seeds for each family."""
    longest = max(r["minutes"] for r in rows)
    board = [r for r in rows if (r["minutes"], r["loss"]) == (longest, "ce")]
    means = []
    for family in dict.fromkeys(r["family"] for r in board):
        seeds = [r for r in board if r["family"] == family]
        keys = ("parameters", "bound", "certified")
        means.append({key: sum(r[key] for r in seeds) / len(seeds) for key in keys})
    return means


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """The rank correlations over families, which are independent of each other; seeds and losses of one are not."""
    board = by_family(rows)
    verdicts = []
    for key, part in (("parameters", "with the parameters"), ("bound", "with the proved constant")):
        rank, low, high = correlation(board, key)
        label = Label.OPEN if low <= 0 <= high else Label.HOLDS if low > 0 else Label.FAILS
        ends = f"{min(r[key] for r in board):.4g} to {max(r[key] for r in board):.4g}"
        text = f"rank correlation {rank:+.2f} [{low:+.2f}, {high:+.2f}] over {len(board)} families, {ends}"
        verdicts.append(Verdict(label, text, "our own claim: it grows", part))
    return tuple(verdicts)


def draw(rows: Sequence[Row]) -> Figure:
    """One mark per network, by family; hollow for the shorter budget."""
    figure, panels = canvas(2, width=5.2, height=3.8)
    families = list(dict.fromkeys(r["family"] for r in rows))
    longest = max(r["minutes"] for r in rows)
    for axes, key in zip(panels, ("parameters", "bound"), strict=True):
        for k, family in enumerate(families):
            for minutes in sorted({r["minutes"] for r in rows}):
                some = [r for r in rows if (r["family"], r["minutes"]) == (family, minutes)]
                colour = COLOURS[k % len(COLOURS)]
                scale = 1e6 if key == "parameters" else 1
                axes.plot(
                    [r[key] / scale for r in some],
                    [r["certified"] for r in some],
                    MARKERS[k // len(COLOURS) % len(MARKERS)],
                    color=colour,
                    markerfacecolor=colour if minutes == longest else "white",
                    label=family if minutes == longest else "_",
                    markersize=5,
                )
        axes.set(ylabel=f"certified at ε = {rows[0]['epsilon']:.3g} (%)", ylim=(0, None))
    panels[0].set(xlabel="parameters (millions)")
    panels[1].set(xlabel="proved Lipschitz constant")
    budgets = sorted({r["minutes"] for r in rows})
    panels[1].set_title(
        f"filled: {longest:g} processor minutes of training; hollow: {', '.join(f'{m:g}' for m in budgets[:-1])}",
        fontsize=9,
    )
    legend(panels[0], shared=True)
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="Certified accuracy by size and constant",
    claim="At one budget of processor time, larger networks and larger proved constants certify more.",
    published="no figure: the author asks how certified accuracy scales",
    laptop=Settings(),
    paper=Settings(),
    notes=(
        "the cells of the stored scoreboards: one network shape for all families, CIFAR-10, 4 (hollow) and 20 processor "
        "minutes of training; families and losses differ from mark to mark",
    ),
)
