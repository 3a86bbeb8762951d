"""The page: one file of HTML with its style, its script, plotly and every number inside; nothing is loaded from anywhere.

The templates write the page: they escape every text, and show norms rounded up, radii and certified shares rounded down.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from equipoise.core import InputError, format_down, format_up, percent, round_levels
from equipoise.core.files import atomic_write, plain_json
from equipoise.lipschitz.logs import show_log
from equipoise.report import figures
from equipoise.report.collect import ReportData, as_document

#: panels of one chart at most
PANELS = 6


def _plotly_source() -> str:
    """plotly.js from the installed package, empty where there is none."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return str(get_plotlyjs())


def write_report(data: ReportData, path: str | Path, refresh: int | None = None) -> Path:
    """Render and write the page, whole or not at all.

    Args:
        data: what it shows.
        path: ends in .html.
        refresh: the page reloads itself after so many seconds.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(
            f"a report is an HTML file: give a name that ends in .html, got {path.name!r}"
        )
    atomic_write(path, render(data, refresh=refresh))
    return path


def render(data: ReportData, plotly: str | None = None, refresh: int | None = None) -> str:
    """The whole page as text.

    Args:
        data: what it shows.
        plotly: source of plotly.js, by default that of the installed package; without any the page has tables alone.
        refresh: the page reloads itself after so many seconds.

    >>> page = render(ReportData("<Nothing> yet"), plotly="")
    >>> "&lt;Nothing&gt; yet" in page and "<Nothing>" not in page
    True
    """
    environment = Environment(
        loader=PackageLoader("equipoise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "up": format_up,
        "down": format_down,
        "log": show_log,
        "percent": percent,
        "epsilon": "ε = {}".format,
    }
    source = _plotly_source() if plotly is None else plotly
    norms = dict.fromkeys(s.norm for s in data.series)
    ends = {norm: figures.reach([s for s in data.series if s.norm == norm]) for norm in norms}
    charts = _charts(data, ends) if source else {}
    caveats = dict.fromkeys(s.results.about.partition(". ")[2] for s in data.series)
    assets = resources.files("equipoise.report").joinpath("assets")
    return environment.get_template("report.html.j2").render(
        data=data,
        refresh=refresh,
        charts=charts,
        models=list(enumerate(data.models[:PANELS])),
        levels={norm: round_levels(end) for norm, end in ends.items()},
        caveats=list(filter(None, caveats)),
        payload=in_script({"charts": charts, **as_document(data)}),
        plotly=source.replace("</script", "<\\/script"),
        style=assets.joinpath("report.css").read_text(encoding="utf-8"),
        script=assets.joinpath("report.js").read_text(encoding="utf-8"),
    )


def _charts(data: ReportData, ends: dict[str, float]) -> dict[str, figures.Figure]:
    """Every plotly figure by the id of its place on the page."""
    charts: dict[str, figures.Figure] = {}
    for i, model in enumerate(data.models[:PANELS]):
        own = [s for s in data.series if s.model == model]
        if own:
            norm = own[0].norm
            end = ends[norm]  # networks beside each other share an axis
            attacks = [a for a in data.attacks if a.model == model]
            charts[f"curves-{i}"] = figures.curves(own, attacks, end, norm)
    for i, (model, bound) in enumerate([*data.audits.items()][:PANELS]):
        if not bound["fix_first"]:
            continue  # no layer stretches: nothing to share out
        charts[f"shares-{i}"] = figures.layer_shares(model, bound["layers"])
    return charts


def in_script(value: Any) -> str:
    """JSON that cannot leave a `<script>`: no `<`, `>`, `&` and no line separators; numbers JSON lacks become null.

    >>> in_script({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(plain_json(value), ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
