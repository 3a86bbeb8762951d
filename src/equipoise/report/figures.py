"""The charts as plotly figures in plain data: no plotly is needed to make them, only to draw them."""

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from equipoise.core.accuracy import percent
from equipoise.core.bounds import format_down, format_up
from equipoise.lipschitz.logs import exp_up
from equipoise.report.audits import Audit
from equipoise.report.collect import Attacks, Floats, Series

Figure = dict[str, Any]

#: Okabe & Ito's colours, told apart by everyone; each procedure keeps its own in every chart
COLOURS = {
    "deterministic": "#D55E00",
    "cohen": "#0072B2",
    "rivals": "#009E73",
    "cpm": "#44AA99",
    "lvm": "#CC79A7",
    "lvm + Lipschitz": "#E69F00",
    "bonferroni": "#56B4E9",
    "direct": "#8C6BB1",
    "adaptive": "#7A7A7A",
}
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6BB1", "#7A7A7A")
STYLES = [(colour, dash) for dash in ("solid", "dash", "dot", "dashdot") for colour in PALETTE]
#: points of one drawn curve at most
POINTS = 240


def plot_text(text: str) -> str:
    """Text for plotly, which reads tags and entities in names."""
    return html.escape(text, quote=False)


def lines(series: Sequence[Series]) -> list[Figure]:
    """Colour and dash of each curve of one panel: those of its procedure, the next free ones where these are taken."""
    styles: list[tuple[str, str]] = []
    for s in series:
        choices = [(COLOURS.get(s.procedure, PALETTE[0]), "solid"), *STYLES]
        styles.append(next((style for style in choices if style not in styles), choices[0]))
    return [{"color": colour, "dash": dash} for colour, dash in styles]


def labels(series: Sequence[Series]) -> list[str]:
    """Legend texts: the procedure, with σ and the run's name where they tell curves apart; how many inputs so far."""
    names = [s.procedure for s in series]
    if len(set(names)) < len(names):
        names = [f"{n}, σ = {s.results.sigma:g}" if s.results.sigma else n for n, s in zip(names, series, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{n} ({s.run})" for n, s in zip(names, series, strict=True)]
    return [f"{n}, {s.inputs}" if "of" in s.inputs else n for n, s in zip(names, series, strict=True)]


def thinned(points: Floats, limit: int = POINTS) -> Floats:
    """At most `limit` of the sorted distinct values, the first and the last included.

    Args:
        points: values; infinite ones are left out.
        limit: how many are kept.
    """
    values = np.unique(points[np.isfinite(points)])
    if len(values) <= limit:
        return values
    return values[np.unique(np.linspace(0, len(values) - 1, limit).round().astype(int))]


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


def curves(series: Sequence[Series], attacks: Sequence[Attacks], end: float) -> Figure:
    """Certified accuracy of every procedure, and the accuracy under attack that no sound certificate can exceed.

    Hover texts round towards safety: certified shares and their ε down, shares under attack and their ε up.

    Args:
        series: curves of one network.
        attacks: on it.
        end: of the ε-axis.
    """
    traces: list[Figure] = []
    for s, name, line in zip(series, labels(series), lines(series), strict=True):
        x, y = certified_curve(s, end)
        texts = [f"ε = {format_down(e, 4)}<br>at least {percent(v, 1)} % certified" for e, v in zip(x, y, strict=True)]
        traces.append(_trace(name, x, y, texts, line=line | {"width": 2.4, "shape": "vh"}))
    for a in attacks:
        x, y = attack_curve(a, end)
        texts = [
            f"ε = {format_up(e, 4)}<br>at most {format_up(100 * v, 4)} % withstand" for e, v in zip(x, y, strict=True)
        ]
        name = f"attacked: {'network' if a.kind == 'base' else a.kind}"
        line = {"color": "#7A7A7A", "width": 1.6, "dash": "dot" if a.kind == "base" else "dash", "shape": "hv"}
        traces.append(_trace(name, x, y, texts, line=line, meta="attack"))
    answer = "right" if any(s.results.labelled for s in series) else "any"
    return _figure(
        traces,
        {"title": {"text": "perturbation ε (ℓ2)"}, "range": [0, end]},
        {"title": {"text": f"share of inputs, {answer} answer"}, "range": [0, 1.02], "tickformat": ".0%"},
    )


def histogram(series: Sequence[Series], end: float, bins: int = 28) -> Figure:
    """How many inputs have which certified radius; wrong and uncertified answers are counted at 0.

    Args:
        series: curves of one network.
        end: of the axis.
        bins: of the histogram.
    """
    edges = np.linspace(0, end, bins + 1)
    x = np.repeat(edges, 2)[1:-1].tolist()
    traces = []
    for s, name, line in zip(series, labels(series), lines(series), strict=True):
        radius = np.where(s.results.correct, np.minimum(s.results.radius, end), 0.0)
        shares = np.repeat(np.histogram(radius, edges)[0] / len(radius), 2).tolist()
        texts = [f"radius {format_down(e, 4)}<br>{100 * v:.1f} % of the inputs" for e, v in zip(x, shares, strict=True)]
        traces.append(_trace(name, x, shares, texts, line=line))
    return _figure(
        traces,
        {"title": {"text": "certified radius (ℓ2)"}, "range": [0, end]},
        {"title": {"text": "share of inputs"}, "tickformat": ".0%", "rangemode": "tozero"},
    )


_BOUNDS = {
    "product, layer by layer": "log_product",
    "fused": "log_fused",
    "chain": "log_chain",
    "best proved": "log_upper",
}


def bounds(audits: Sequence[Audit]) -> Figure:
    """Upper bounds of each network (pointing left: the truth is to the left) and what an attack really reached."""
    traces = []
    for i, audit in enumerate(audits):
        logs = {name: getattr(audit.bound, key) for name, key in _BOUNDS.items()}
        uppers = {name: exp_up(log) for name, log in logs.items() if log is not None}
        values = dict(uppers)
        if audit.local:
            uppers["near some inputs, proved"] = max(p.upper for p in audit.local)
            values = uppers | {"near some inputs, reached": max(p.lower for p in audit.local)}
        texts = [
            f"{name}<br>" + (f"at most {format_up(v, 5)}" if name in uppers else f"at least {format_down(v, 5)}")
            for name, v in values.items()
        ]
        symbols = ["triangle-left" if name in uppers else "triangle-right" for name in values]
        marker = {"color": PALETTE[i % len(PALETTE)], "size": 13, "symbol": symbols}
        x = [v if 0 < v < math.inf else None for v in values.values()]
        traces.append(_trace(audit.model, x, list(values), texts, mode="markers", marker=marker))
    order = list(dict.fromkeys(name for t in traces for name in t["y"]))
    return _figure(
        traces,
        {
            "title": {"text": "Lipschitz constant (ℓ2), logarithmic"},
            **_log_axis([v for t in traces for v in t["x"] if v]),
        },
        {"type": "category", "categoryorder": "array", "categoryarray": order[::-1]},
    )


def spectrum(audit: Audit) -> Figure:
    """Singular values of every layer against their rank, on a logarithmic axis."""
    traces = []
    for i, s in enumerate(audit.spectra):
        smallest = max(s.values, default=1.0) * 1e-6
        x = np.linspace(0, 100, len(s.values)).tolist()
        y = [v if v > smallest else None for v in s.values]
        texts = [f"σ ≈ {v:.4g}<br>{p:.0f} % of {s.count}" for p, v in zip(x, s.values, strict=True)]
        colour, dash = STYLES[i % len(STYLES)]
        traces.append(_trace(s.layer, x, y, texts, line={"color": colour, "dash": dash}))
    return _figure(
        traces,
        {"title": {"text": "rank, in percent of all singular values"}},
        {"title": {"text": "singular value"}, **_log_axis([v for t in traces for v in t["y"] if v])},
    )


def _trace(name: str, x: list[Any], y: list[Any], texts: list[str], **style: Any) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plot_text(name),
        "x": x,
        "y": y,
        "customdata": texts,
        "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
        **style,
    }


def _figure(traces: list[Figure], x: Figure, y: Figure) -> Figure:
    """The traces with their axes; what all charts have in common is in the page's script."""
    return {"data": traces, "layout": {"xaxis": x, "yaxis": y}}


def _log_axis(values: Sequence[float]) -> Figure:
    """A logarithmic axis whose ticks are powers of ten, or 1, 2, 5 where there are few of those."""
    if not values:
        return {"type": "log"}
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    if max(values) > 50 * min(values):
        return {"type": "log", "dtick": math.ceil((high - low) / 8), "exponentformat": "power"}
    # plotly writes 0.2 as "2" on such an axis
    ticks = [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in (1, 2, 5)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
