"""The board: cells one after the other or on Ray, means over seeds with intervals, a page, a table and JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write, read_json, sealed, unsealed
from equipoise.train.build import build_data
from equipoise_lab.experiments.figures import (
    COLOURS,
    DASHES,
    MARKERS,
    as_svg,
    canvas,
    legend,
)
from equipoise_lab.experiments.intervals import Mean, mean_of
from equipoise_lab.scoreboard.autoattack import require_autoattack
from equipoise_lab.scoreboard.cell import LOSSES, Budget, Cell, play_cell, recipe, tested

Tell = Callable[[Cell, dict[str, Any]], None]


@dataclass(frozen=True)
class Board:
    """The results of all cells, and the budget they had."""

    budget: dict[str, Any]
    cells: list[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """One row per family and loss, best certified accuracy first: means over seeds."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for cell in self.cells:
            played = cell["asked"]["cell"]
            groups.setdefault((played["family"], played["loss"]), []).append(cell)
        rows = []
        for (family, loss), cells in groups.items():
            good = [c for c in cells if "refused" not in c]
            row: dict[str, Any] = {"family": family, "loss": loss, "seeds": len(good)}
            if not good:
                rows.append({**row, "refused": cells[0]["refused"]})
                continue
            row["accuracy"] = mean_of([100 * c["accuracy"] for c in good])
            row["certified"] = _means([c["certified"] for c in good])
            # cells that were played before the curve was kept have the radii of the table
            row["curve"] = _means([c.get("curve", c["certified"]) for c in good])
            row["attacked"] = mean_of([100 * c["attacked"] for c in good])
            if all("autoattack" in c for c in good):
                row["autoattack"] = mean_of([100 * c["autoattack"] for c in good])
            row |= {
                k: sum(c[k] for c in good) / len(good)
                for k in ("step_seconds", "steps", "processor_seconds")
            }
            row |= {
                "parameters": good[0]["parameters"],
                "samples": good[0]["samples"],
                "bound": max(c["bound"] for c in good),
            }
            rows.append(row)
        first = next((next(iter(r["certified"])) for r in rows if "certified" in r), "")
        return sorted(
            rows, key=lambda r: -r["certified"][first].value if "certified" in r else math.inf
        )

    def markdown(self) -> str:
        """The table."""
        rows = self.rows()
        radii = sorted({e for r in rows for e in r.get("certified", ())}, key=float)
        auto = any("autoattack" in r for r in rows)
        head = ["family", "loss", "clean", *(f"ε = {float(e):.3f}" for e in radii), "attacked"]
        head += [*(["AutoAttack"] if auto else []), "s/step", "steps", "parameters"]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for r in rows:
            if "refused" in r:
                lines.append(
                    f"| {r['family']} | {r['loss']} | refused: {r['refused']} |"
                    + " |" * (len(head) - 3)
                )
                continue
            cells = [
                r["family"],
                r["loss"],
                _show(r["accuracy"]),
                *(_show(r["certified"][e]) if e in r["certified"] else "–" for e in radii),
            ]
            cells += [
                _show(r["attacked"]),
                *([_show(r["autoattack"]) if "autoattack" in r else "–"] if auto else []),
            ]
            cells += [f"{r['step_seconds']:.3f}", f"{r['steps']:.0f}", f"{r['parameters']:,}"]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join([f"# {self.title}", "", *self.about(), "", *lines, ""])

    @property
    def title(self) -> str:
        """What was played."""
        return f"Scoreboard: {Path(self.budget['data']).stem}, {self.budget['minutes']:g} processor minutes a cell"

    def about(self) -> list[str]:
        """What the figures are."""
        good = [c for c in self.cells if "refused" not in c]
        samples = good[0]["samples"] if good else 0
        sentences = [
            "Per cent of test inputs, mean over seeds (± 95 % interval where there are several). Certified: proved Lipschitz "
            f"bounds, by pairs of classes, on {samples:,} inputs. Attacked: right under PGD within {self.budget['epsilon']:.4g} "
            "(ℓ2) on the first 500, at least the certified share of them. The same network, data, optimizer and budget of "
            "processor time for every row; a cheaper layer takes more steps. Rows named bcop-muon and bcop-desk train the "
            "network of bcop in another way, and lipnext is a network of its own.",
        ]
        counts = [c["autoattack_samples"] for c in good if "autoattack" in c]
        if counts:
            sentences.append(
                f"AutoAttack: right under PGD and its four attacks, on the first {min(counts)} inputs or more."
            )
        return sentences

    def page(self) -> str:
        """A self-contained HTML page with the table, the curves, and certified accuracy against the cost of a step."""
        table = _html_table(self.markdown().splitlines())
        text = "".join(f"<p>{html.escape(line)}</p>" for line in self.about())
        return _PAGE.format(
            title=html.escape(self.title),
            text=text,
            curves=_inline(self.curves()),
            plot=_plot(self.rows()),
            table=table,
        )

    def curves(self) -> str:
        """Certified accuracy against the radius as SVG, for the best loss of every family."""
        best: dict[str, dict[str, Any]] = {}
        for row in self.rows():  # best first
            if "curve" in row:
                best.setdefault(row["family"], row)
        figure, (axes,) = canvas(width=7.2, height=4.4)
        for k, (family, row) in enumerate(best.items()):
            radii = [0.0, *map(float, row["curve"])]
            shares = [row["accuracy"].value, *(m.value for m in row["curve"].values())]
            marker = MARKERS[k % len(MARKERS)] if len(radii) < 10 else ""
            style: Any = {
                "color": COLOURS[k % len(COLOURS)],
                "linestyle": DASHES[k // len(COLOURS)],
            }
            axes.plot(
                radii,
                shares,
                marker=marker,
                markersize=4,
                label=f"{family} · {row['loss']}",
                **style,
            )
        axes.set(xlabel="radius ε (ℓ2)", ylabel="certified accuracy (%)", ylim=(0, None))
        axes.set_xlim(left=0)
        if best:
            legend(axes, shared=True)
        return as_svg(figure)


def plan(
    families: Sequence[str], losses: Sequence[str], seeds: int, all_losses: Sequence[str] = ()
) -> list[Cell]:
    """Every family with the given losses, those in `all_losses` with every loss, for seeds 0 … seeds − 1.

    >>> [c.name for c in plan(["aol"], ["lmt"], 2)]
    ['aol.lmt.0', 'aol.lmt.1']
    """
    if seeds < 1:
        raise InputError(f"at least one seed is needed, got {seeds}")
    if not families or not losses:
        raise InputError("the scoreboard needs at least one family and one loss")
    pairs = [(f, k) for f in families for k in (LOSSES if f in all_losses else losses)]
    return [Cell(f, k, s).check() for s in range(seeds) for f, k in dict.fromkeys(pairs)]


def play(
    cells: Iterable[Cell],
    budget: Budget,
    folder: str | Path,
    *,
    workers: int = 0,
    tell: Tell | None = None,
    autoattack: int = 0,
) -> Board:
    """Play what is not played yet and write `scoreboard.json`, `README.md`, `curves.svg` and `index.html`.

    Stopped anywhere, the same call goes on.

    `workers = 0` plays one after the other in this process; otherwise Ray plays so many at once, on a core each. What the
    folder's `scoreboard.json` holds of the same budget was played and stays on the board, so a board grows by further calls,
    and one that came from elsewhere can be gone on with. `autoattack` inputs are attacked by AutoAttack too.
    """
    if autoattack > 0:
        require_autoattack()
    cells, folder = list(cells), Path(folder)
    request = json.loads(json.dumps(asdict(budget)))
    stored = _before(folder, request)
    left = [
        cell
        for cell in cells
        if cell not in stored or (autoattack and (folder / "cells" / cell.name).exists())
    ]
    if left:
        # data that cannot be read are refused once, not in every cell
        tested(build_data(recipe(left[0], budget).data))
    for cell, figures in (_in_turn if workers == 0 else _on_ray)(
        left, budget, folder, workers, autoattack
    ):
        stored[cell] = figures
        if tell is not None:
            tell(cell, figures)
    board = Board(request, [stored[cell] for cell in sorted(stored)])
    atomic_write(
        folder / "scoreboard.json",
        json.dumps(sealed(asdict(board)), indent=1, allow_nan=False) + "\n",
    )
    atomic_write(folder / "README.md", board.markdown())
    atomic_write(folder / "curves.svg", board.curves())
    atomic_write(folder / "index.html", board.page())
    return board


def _before(folder: Path, budget: dict[str, Any]) -> dict[Cell, dict[str, Any]]:
    """The cells on the folder's board, refused ones apart; a board of another budget is not gone on with."""
    if not (folder / "scoreboard.json").exists():
        return {}
    board = read_board(folder)
    if board.budget != budget:
        raise InputError(
            f"{folder} was played with another budget: choose another folder, or remove this one"
        )
    return {Cell(**c["asked"]["cell"]): c for c in board.cells if "refused" not in c}


def _in_turn(
    cells: list[Cell], budget: Budget, folder: Path, workers: int, auto: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    for cell in cells:
        yield cell, play_cell(cell, budget, folder / "cells" / cell.name, auto)


def _on_ray(
    cells: list[Cell], budget: Budget, folder: Path, workers: int, auto: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    try:
        import ray
    except ImportError as error:
        raise InputError("--workers needs ray: pip install 'equipoise[ray]'") from error
    ray.init(num_cpus=workers, include_dashboard=False, ignore_reinit_error=True)
    try:
        remote = ray.remote(num_cpus=1)(play_cell)
        homes = {cell: (folder / "cells" / cell.name).resolve() for cell in cells}
        pending = {remote.remote(cell, budget, home, auto): cell for cell, home in homes.items()}
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            yield pending.pop(done), ray.get(done)
    finally:
        ray.shutdown()


def read_board(path: str | Path) -> Board:
    """A board from its folder or `scoreboard.json`."""
    path = Path(path)
    file = path / "scoreboard.json" if path.is_dir() else path
    document = unsealed(read_json(file, 10**8), str(file), needed=True)
    if not isinstance(document, dict) or not {"budget", "cells"} <= document.keys():
        raise InputError(f"{file} is no scoreboard")
    return Board(document["budget"], document["cells"])


def _means(shares: Sequence[dict[str, float]]) -> dict[str, Mean]:
    """Means over seeds in per cent at the radii that all seeds have."""
    radii = [e for e in shares[0] if all(e in some for some in shares)]
    return {e: mean_of([100 * some[e] for some in shares]) for e in radii}


def _inline(svg: str) -> str:
    """An SVG file as an element of a page."""
    return svg[svg.index("<svg") :]


def _show(value: Mean) -> str:
    return f"{value.value:.1f}" if value.seeds < 2 else f"{value.value:.1f} ± {value.half:.1f}"


def _html_table(lines: list[str]) -> str:
    rows = [
        [c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")
    ]
    head, body = rows[0], rows[2:]
    cells = ["".join(f"<td>{html.escape(c)}</td>" for c in row) for row in body]
    top = "".join(f"<th>{html.escape(c)}</th>" for c in head)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(f'<tr>{c}</tr>' for c in cells)}</tbody></table>"


def _plot(rows: list[dict[str, Any]]) -> str:
    """Certified accuracy at the first ε against the seconds of a step, on a logarithmic axis, as SVG."""
    points = [(r["step_seconds"], next(iter(r["certified"].values())).value, f"{r['family']} · {r['loss']}")
              for r in rows if "certified" in r]  # fmt: skip
    if not points:
        return ""
    xs, ys = [math.log10(p[0]) for p in points], [p[1] for p in points]
    wide, high = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    dots, labels = [], list[tuple[float, float]]()
    for x, y, (seconds, value, name) in sorted(
        zip(xs, ys, points, strict=True), key=lambda p: -p[1]
    ):
        left, top = 60 + 480 * (x - min(xs)) / wide, 280 - 240 * (y - min(ys)) / high
        height = top + 4
        for at, other in labels:  # labels above that it would cover push it down
            if abs(at - left) < 150 and height < other + 11:
                height = other + 11
        labels.append((left, height))
        title = html.escape(f"{name}: {value:.1f} %, {seconds:.3f} s a step")
        dots.append(
            f'<g><circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="#0b5fa5"><title>{title}</title></circle>'
            f'<text x="{left + 7:.1f}" y="{height:.1f}" font-size="11">{html.escape(name)}</text></g>'
        )
    axes = (
        '<path d="M50 20V290H700" fill="none" stroke="#57606a"/>'
        '<text x="55" y="315" font-size="12">seconds of a training step, '
        f"{10 ** min(xs):.3f} to {10 ** max(xs):.3f} (logarithmic)</text>"
        f'<text x="55" y="14" font-size="12">certified accuracy, {min(ys):.1f} to {max(ys):.1f} %</text>'
    )
    return f'<svg viewBox="0 0 720 325" role="img">{axes}{"".join(dots)}</svg>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1b1f24 }}
table {{ border-collapse: collapse; width: 100% }} th, td {{ text-align: left; padding: .25em .6em; white-space: nowrap }}
th {{ border-bottom: 2px solid #1b1f24 }} tbody tr:nth-child(even) {{ background: #f4f6f8 }} svg {{ max-width: 46em }}
.wide {{ overflow-x: auto }}
</style></head><body><h1>{title}</h1>{text}{curves}{plot}<div class="wide">{table}</div></body></html>
"""
