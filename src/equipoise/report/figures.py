"""The charts as plotly figures in plain data: no plotly is needed to make them, only to draw them."""

import html
import re
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from equipoise.core import Floats, format_down, format_up, percent
from equipoise.report.collect import Attacks, Series

Figure = dict[str, Any]

#: Okabe & Ito's colours, told apart by everyone
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6BB1", "#7A7A7A")
DASHES = ("solid", "dash", "dot", "dashdot")
#: neighbours differ in colour and dash, so that curves which coincide are both seen
STYLES: list[Figure] = [
    {"color": colour, "dash": DASHES[(turn + i) % len(DASHES)]}
    for turn in range(len(DASHES))
    for i, colour in enumerate(PALETTE)
]
#: bars of one chart at most
BARS = 24
#: points of one drawn curve at most
POINTS = 240


def labels(series: Sequence[Series]) -> list[str]:
    """Legend texts: the procedure, with the run's name where there are several runs."""
    several = len({s.run for s in series}) > 1
    return [f"{s.procedure} ({s.run})" if several else s.procedure for s in series]


def thinned(points: Floats) -> Floats:
    """At most `POINTS` of the sorted distinct finite values, the first and the last included."""
    values = np.unique(points[np.isfinite(points)])
    places = np.linspace(0, len(values) - 1, min(POINTS, len(values))).round().astype(int)
    return values[np.unique(places)]


def certified_curve(s: Series, end: float) -> tuple[list[float], list[float]]:
    """Points of the certified-accuracy curve for steps "vertical first": between two of them the lower one is drawn.

    So a thinned curve never shows more than was certified.

    Args:
        s: the curve.
        end: of the ε-axis.
    """
    radii = s.results.radius[s.results.correct]
    levels = np.unique(np.concatenate([[0.0], thinned(radii[radii > 0]), [end]]))
    return (np.floor(levels * 1e6) / 1e6).tolist(), s.results.accuracy(levels).tolist()


def attack_curve(a: Attacks, end: float) -> tuple[list[float], list[float]]:
    """Points of the accuracy under attack for steps "horizontal first": between two of them the higher one is drawn.

    Args:
        a: the attacks.
        end: of the ε-axis.
    """
    levels = np.unique(np.concatenate([[0.0], thinned(a.distance[a.distance <= end]), [end]]))
    return (np.ceil(levels * 1e6) / 1e6).tolist(), a.accuracy(levels).tolist()


def reach(series: Sequence[Series]) -> float:
    """Where the ε-axis ends: a little beyond the largest finite certified radius."""
    radii = [s.results.radius[s.results.correct] for s in series]
    tops = [float(r[np.isfinite(r)].max(initial=0.0)) for r in radii]
    return 1.08 * max([*tops, 0.0]) or 1.0


def curves(
    series: Sequence[Series], attacks: Sequence[Attacks], end: float, norm: str = "ℓ2"
) -> Figure:
    """Certified accuracy of every procedure, and the accuracy under attack that no sound certificate can exceed.

    Hover texts round towards safety: certified shares and their ε down, shares under attack and their ε up.

    Args:
        series: curves of one network.
        attacks: on it.
        end: of the ε-axis.
        norm: of the balls.
    """
    traces: list[Figure] = []
    for s, name, line in zip(series, labels(series), cycle(STYLES), strict=False):
        x, y = certified_curve(s, end)
        texts = [
            f"ε = {format_down(e, 4)}<br>at least {percent(v, 1)} % certified"
            for e, v in zip(x, y, strict=True)
        ]
        traces.append(_trace(name, x, y, texts, line=line | {"width": 2.4, "shape": "vh"}))
    for a, dash in zip(attacks, cycle(DASHES[1:]), strict=False):
        x, y = attack_curve(a, end)
        texts = [
            f"ε = {format_up(e, 4)}<br>at most {format_up(100 * v, 4)} % withstand"
            for e, v in zip(x, y, strict=True)
        ]
        name = f"attacked: {'network' if a.kind == 'base' else a.kind} ({a.run})"
        line = {"color": "#7A7A7A", "width": 1.6, "dash": dash, "shape": "hv"}
        traces.append(_trace(name, x, y, texts, line=line, meta="attack"))
    answer = "right" if any(s.results.labelled for s in series) else "any"
    return _figure(
        traces,
        {"title": {"text": f"perturbation ε ({norm})"}, "range": [0, end]},
        {
            "title": {"text": f"share of inputs, {answer} answer"},
            "range": [0, 1.02],
            "tickformat": ".0%",
        },
    )


def layer_shares(model: str, layers: Sequence[Figure]) -> Figure:
    """The largest shares of layers in the logarithm of the product bound, in their order; negative: it shrinks distances.

    Args:
        model: name of the network.
        layers: rows of its bound, as plain data.
    """
    rows = list(enumerate(layers, 1))
    largest = sorted(rows, key=lambda row: -abs(row[1]["share"] or 0.0))[:BARS]
    names, shares, texts = [], [], []
    for number, layer in sorted(largest, key=lambda row: row[0]):
        # as in the table: its row number, and the end of a long name, which says most
        label = re.sub(r"^.+(?=.{19}$)", "…", layer["name"])
        names.append(html.escape(f"{number} · {label} {layer['kind'][:16]}", quote=False))
        shares.append(layer["share"])
        texts.append(html.escape(f"{layer['name']}, {layer['kind']}", quote=False))
    style = {"type": "bar", "orientation": "h", "marker": {"color": PALETTE[0]}}
    return _figure(
        [_trace(model, shares, names, texts, **style)],
        {"title": {"text": "share of log L"}, "tickformat": ".0%"},
        {"type": "category", "autorange": "reversed", "dtick": 1},
    )


def _trace(name: str, x: list[Any], y: list[Any], texts: list[str], **style: Any) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": html.escape(name, quote=False),  # plotly reads tags and entities in names
        "x": x,
        "y": y,
        "customdata": texts,
        "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
        **style,
    }


def _figure(traces: list[Figure], x: Figure, y: Figure) -> Figure:
    """The traces with their axes; what all charts have in common is in the page's script."""
    return {"data": traces, "layout": {"xaxis": x, "yaxis": y}}
