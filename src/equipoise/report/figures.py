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
DASHES = ("solid", "dash", "dot", "dashdot")
ATTACK_DASH = {"base": "dot", "smoothed": "dash"}
#: points of one drawn curve at most
POINTS = 240


def plot_text(text: str) -> str:
    """Text for plotly, which reads tags and entities in names."""
    return html.escape(text, quote=False)


def colours(series: Sequence[Series]) -> list[tuple[str, str]]:
    """(colour, dash) of each curve of one panel: that of its procedure, the next free one where that is taken."""
    styles: list[tuple[str, str]] = []
    for s in series:
        wanted = COLOURS.get(s.procedure, PALETTE[0])
        choices = [(c, d) for d in DASHES for c in (wanted, *PALETTE)]
        styles.append(next((style for style in choices if style not in styles), choices[0]))
    return styles


def labels(series: Sequence[Series]) -> list[str]:
    """Legend texts: the procedure, with σ and the run's name where they tell curves apart; how many inputs so far."""
    names = [s.procedure for s in series]
    if len(set(names)) < len(names):
        names = [f"{n}, σ = {s.results.sigma:g}" if s.results.sigma else n for n, s in zip(names, series, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{n} ({s.run})" for n, s in zip(names, series, strict=True)]
    return [f"{n}, {s.inputs}" if "of" in s.inputs else n for n, s in zip(names, series, strict=True)]


def thinned(points: Floats, limit: int = POINTS) -> Floats:
    """At most `limit` of the sorted distinct values, the first and the last included."""
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
    for s, name, (colour, dash) in zip(series, labels(series), colours(series), strict=True):
        x, y = certified_curve(s, end)
        texts = [f"ε = {format_down(e, 4)}<br>at least {percent(v, 1)} % certified" for e, v in zip(x, y, strict=True)]
        traces.append(_line(name, x, y, {"color": colour, "width": 2.4, "dash": dash, "shape": "vh"}, texts))
    for a in attacks:
        x, y = attack_curve(a, end)
        texts = [
            f"ε = {format_up(e, 4)}<br>at most {format_up(100 * v, 4)} % withstand" for e, v in zip(x, y, strict=True)
        ]
        name = f"attacked: {'network' if a.kind == 'base' else a.kind}"
        name += f" ({a.run})" if [other.kind for other in attacks].count(a.kind) > 1 else ""
        line = {"color": "#7A7A7A", "width": 1.6, "dash": ATTACK_DASH[a.kind], "shape": "hv"}
        traces.append({**_line(name, x, y, line, texts), "meta": "attack"})
    unknown = bool(series) and not any(s.results.labelled for s in series)
    layout = _layout("perturbation ε (ℓ2)", f"share of inputs, {'any' if unknown else 'right'} answer")
    layout["xaxis"] |= {"range": [0, end]}
    layout["yaxis"] |= {"range": [0, 1.02], "tickformat": ".0%"}
    return {"data": traces, "layout": layout}


def histogram(series: Sequence[Series], end: float, bins: int = 28) -> Figure:
    """How many inputs have which certified radius; wrong and uncertified answers are counted at 0.

    Args:
        series: curves of one network.
        end: of the axis.
        bins: of the histogram.
    """
    edges = np.linspace(0, end, bins + 1)
    traces: list[Figure] = []
    for s, name, (colour, dash) in zip(series, labels(series), colours(series), strict=True):
        radius = np.where(s.results.correct, np.minimum(s.results.radius, end), 0.0)
        counts = np.repeat(np.histogram(radius, edges)[0] / len(radius), 2).tolist()
        x = np.repeat(edges, 2)[1:-1].tolist()
        texts = [f"radius {format_down(e, 4)}<br>{100 * v:.1f} % of the inputs" for e, v in zip(x, counts, strict=True)]
        traces.append(_line(name, x, counts, {"color": colour, "width": 1.8, "dash": dash}, texts))
    layout = _layout("certified radius (ℓ2)", "share of inputs")
    layout["xaxis"] |= {"range": [0, end]}
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    return {"data": traces, "layout": layout}


_BOUNDS = (
    ("product, layer by layer", "log_product"),
    ("fused", "log_fused"),
    ("chain", "log_chain"),
    ("best proved", "log_upper"),
)


def bounds(audits: Sequence[Audit]) -> Figure:
    """Upper bounds of each network (pointing left: the truth is to the left) and what an attack really reached."""
    traces: list[Figure] = []
    for audit, colour in zip(audits, _cycle(len(audits)), strict=True):
        logs = {name: getattr(audit.bound, key) for name, key in _BOUNDS}
        rows = [(name, exp_up(log), True) for name, log in logs.items() if log is not None]
        if audit.local:
            rows.append(("near some inputs, proved", max(p.upper for p in audit.local), True))
            rows.append(("near some inputs, reached", max(p.lower for p in audit.local), False))
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": plot_text(audit.model),
                "x": [v if 0 < v < math.inf else None for _, v, _ in rows], "y": [name for name, _, _ in rows],
                "marker": {
                    "color": colour, "size": 13, "symbol": ["triangle-left" if up else "triangle-right" for _, _, up in rows]
                },
                "customdata": [f"at most {format_up(v, 5)}" if up else f"at least {format_down(v, 5)}" for _, v, up in rows],
                "hovertemplate": "%{y}<br>%{customdata}<extra>%{fullData.name}</extra>",
            }
        )  # fmt: skip
    layout = _layout("Lipschitz constant (ℓ2), logarithmic", "")
    layout["xaxis"] |= _log_axis([v for t in traces for v in t["x"] if v])
    order = list(dict.fromkeys(name for t in traces for name in t["y"]))
    layout["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": order[::-1]}
    return {"data": traces, "layout": layout}


def spectrum(audit: Audit) -> Figure:
    """Singular values of every layer against their rank, on a logarithmic axis."""
    traces: list[Figure] = []
    for i, (s, colour) in enumerate(zip(audit.spectra, _cycle(len(audit.spectra)), strict=True)):
        smallest = max(s.values, default=1.0) * 1e-6
        x = [100.0 * place / max(len(s.values) - 1, 1) for place in range(len(s.values))]
        y = [v if v > smallest else None for v in s.values]
        texts = [f"σ ≈ {v:.4g}<br>{p:.0f} % of {s.count}" for p, v in zip(x, s.values, strict=True)]
        dash = DASHES[(i // len(PALETTE)) % len(DASHES)]
        traces.append(_line(s.layer, x, y, {"color": colour, "width": 1.8, "dash": dash}, texts))
    layout = _layout("rank, in percent of all singular values", "singular value")
    layout["yaxis"] |= _log_axis([v for t in traces for v in t["y"] if v])
    return {"data": traces, "layout": layout}


def _line(name: str, x: list[Any], y: list[Any], line: Figure, texts: list[str]) -> Figure:
    return {
        "type": "scatter", "mode": "lines", "name": plot_text(name), "x": x, "y": y, "line": line, "customdata": texts,
        "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
    }  # fmt: skip


def _layout(x: str, y: str) -> Figure:
    axis = {"zeroline": False, "automargin": True, "fixedrange": True, "ticks": "", "title": {"standoff": 8}}
    return {
        "xaxis": {**axis, "title": {"text": x, "standoff": 8}}, "yaxis": {**axis, "title": {"text": y, "standoff": 6}},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "hovermode": "closest", "dragmode": False,
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0, "xanchor": "left"},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
    }  # fmt: skip


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


def _cycle(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]
