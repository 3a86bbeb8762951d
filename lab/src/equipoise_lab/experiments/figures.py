"""Figures as one would put them in a paper: one style, colours that colour-blind readers tell apart, SVG and PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

    from equipoise_lab.experiments.intervals import Mean
else:  # matplotlib is loaded when something is drawn
    Axes = Figure = Any

#: Okabe & Ito (2008)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (3, 1)), (0, (6, 2)))

STYLE: Any = {
    "figure.dpi": 100,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "equipoise",
    "svg.fonttype": "path",
    "axes.axisbelow": True,
}


def canvas(
    columns: int = 1, rows: int = 1, width: float = 4.6, height: float = 3.3
) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure with `rows × columns` axes, never shown on a screen."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("figures need matplotlib: pip install 'equipoise[figures]'") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = [figure.add_subplot(rows, columns, k + 1) for k in range(rows * columns)]
    return figure, axes


def line(
    axes: Axes, x: Sequence[float], y: Sequence[float], name: str, k: int, **options: Any
) -> None:
    """A line with the k-th colour, marker and dash: still told apart when printed in grey."""
    options = {"linewidth": 1.6, "markersize": 4, **options}
    style = {"color": COLOURS[k % 8], "marker": MARKERS[k % 8], "linestyle": DASHES[k % 8]}
    axes.plot(x, y, label=name, **{**style, **options})


def intervals(axes: Axes, x: Sequence[float], means: Sequence[Mean], **options: Any) -> None:
    """Means over seeds with their intervals; a single seed has none."""
    halves = [m.half if m.seeds > 1 else 0.0 for m in means]
    axes.errorbar(x, [m.value for m in means], yerr=halves, **options)


def published(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    name: str = "published",
    k: int = 6,
    **options: Any,
) -> None:
    """What the thesis printed: hollow marks without a line, in the k-th colour."""
    style: dict[str, Any] = {
        "color": COLOURS[k % 8],
        "marker": "o" if k == 6 else MARKERS[k % 8],
        "linestyle": "",
        "markerfacecolor": "white",
    }
    axes.plot(x, y, label=name, **{**style, "markersize": 6, "markeredgewidth": 1.3, **options})
    if not axes.get_autoscaley_on():  # limits that were fixed before make room for it
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.05 * max(y)))


def legend(axes: Axes, *, shared: bool = False) -> None:
    """A legend above the axes, where it hides nothing; `shared`: above the whole figure, for all panels."""
    figure = axes.get_figure(root=True)
    if figure is None:
        return
    handles, labels = axes.get_legend_handles_labels()
    inches = figure.get_figwidth() if shared else figure.get_figwidth() * axes.get_position().width
    columns = max(1, min(len(labels), int(17 * inches / (6 + max(map(len, labels))))))
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": columns}
    if shared:
        figure.legend(handles, labels, loc="outside upper center", **style)
    else:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, **style
        )


def as_svg(figure: Figure) -> str:
    """The figure as the text of an SVG file; the same figure gives the same text."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue().decode("utf-8")


def save(figure: Figure, folder: Path) -> tuple[Path, Path]:
    """Write `figure.svg` and `figure.png`; the same rows give the same bytes."""
    import matplotlib

    paths = folder / "figure.svg", folder / "figure.png"
    with matplotlib.rc_context(STYLE):
        for path, options in zip(paths, ({"metadata": {"Date": None}}, {"dpi": 160}), strict=True):
            content = io.BytesIO()
            figure.savefig(content, format=path.suffix[1:], **options)  # type: ignore[arg-type]
            atomic_write(path, content.getvalue())
    return paths
