"""The page: one file of HTML with its style, its script, plotly and every number inside; nothing is loaded from anywhere."""

import base64
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write
from equipoise.report import figures
from equipoise.report import sections as parts
from equipoise.report.data import ReportData
from equipoise.report.sections import Charts, esc

#: panels of one chart at most: more networks than this are better compared in several reports
PANELS = 6


def plotly_source() -> str:
    """plotly.js, from the installed package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise InputError("the charts of a report need plotly: pip install 'equipoise[report]'") from error
    return str(get_plotlyjs())


def write_report(data: ReportData, path: str | Path) -> Path:
    """Render and write the page, whole or not at all."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"a report is an HTML file: give a name that ends in .html, got {path.name!r}")
    if path.parent != Path() and not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    atomic_write(path, render(data))
    return path


def render(data: ReportData, plotly: str | None = None, refresh: int | None = None) -> str:
    """The whole page as text; `plotly` is the source of plotly.js, by default that of the installed package.

    `refresh` makes the page load itself again after so many seconds.

    >>> page = render(ReportData("<Nothing> yet"), plotly="")
    >>> "&lt;Nothing&gt; yet" in page and "<Nothing>" not in page
    True
    """
    charts: Charts = {}
    body = "".join(
        [
            _curves(data, charts), _bounds(data, charts), _layers(data), _spectra(data, charts), _histograms(data, charts),
            _gallery(data), _proofs(data), _inputs(data),
            parts.section("limits", "What is not guaranteed", "Read this before quoting a number.", parts.limits(data)),
            parts.section(
                "provenance", "Parameters, seeds and versions", "What was run; the same settings give the same numbers.",
                parts.provenance(data),
            ),
        ]
    )  # fmt: skip
    source = plotly_source() if plotly is None else plotly
    payload = {"charts": charts, **numbers(data)}
    assets = resources.files("equipoise.report").joinpath("assets")
    style, script = (assets.joinpath(n).read_text(encoding="utf-8") for n in ("report.css", "report.js"))
    pieces = {
        "REFRESH": refreshing(refresh), "TITLE": esc(data.title), "STYLE": style, "INTRO": esc(data.intro),
        "CARDS": parts.cards(data),
        "ALARM": _alarm(data), "NAVIGATION": _navigation(body), "BODY": body, "DATA": in_script(payload),
        "PLOTLY": source.replace("</script", "<\\/script"), "SCRIPT": script,
    }  # fmt: skip
    head, *rest = _PAGE.split("@@")  # one pass: text that happens to look like a mark is never filled in
    return head + "".join(pieces[mark] if i % 2 == 0 else mark for i, mark in enumerate(rest))


def refreshing(seconds: int | None) -> str:
    """The mark that lets a browser load the page again."""
    return "" if seconds is None else f'<meta http-equiv="refresh" content="{int(seconds)}">'


def numbers(data: ReportData) -> dict[str, Any]:
    """Every number behind the page, compact: columns of doubles and integers as base64, little-endian."""
    ids: dict[tuple[str, ...], int] = {}
    series = [
        {
            "model": s.model, "run": s.run, "procedure": s.procedure, "sigma": s.sigma, "alpha": s.alpha, "about": s.about,
            "ids": ids.setdefault(s.ids, len(ids)), "label": packed(s.labels), "prediction": packed(s.prediction),
            "radius": packed(s.radius),
        }
        for s in data.series
    ]  # fmt: skip
    attacks = [
        {
            "model": a.model, "run": a.run, "kind": a.kind, "settings": a.settings, "ids": ids.setdefault(a.ids, len(ids)),
            "distance": packed(a.distance),
        }
        for a in data.attacks
    ]  # fmt: skip
    audits = [
        {"model": a.model, **a.bound, "local": list(a.local), "local_radius": a.local_radius} for a in data.audits
    ]
    spectra = [
        {"model": a.model, "layer": s.layer, "count": s.count, "note": s.note, "values": list(s.values)}
        for a in data.audits for s in a.spectra
    ]  # fmt: skip
    return {
        "title": data.title, "created": data.created, "versions": dict(data.versions), "runs": [dict(r) for r in data.runs],
        "ids": [list(i) for i in ids], "series": series, "attacks": attacks, "audits": audits, "spectra": spectra,
    }  # fmt: skip


def packed(column: Any) -> str:
    """A column as base64: doubles with every digit, integers as 32 bits.

    >>> packed(np.array([1, 2]))
    'AQAAAAIAAAA='
    """
    kind = "<f8" if np.asarray(column).dtype.kind == "f" else "<i4"
    return base64.b64encode(np.ascontiguousarray(column, dtype=kind).tobytes()).decode()


def in_script(value: Any) -> str:
    """JSON that cannot leave a `<script>`: no `<`, `>`, `&` and no line separators; numbers JSON lacks become null.

    >>> in_script({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


# ---- sections with charts -----------------------------------------------------------------------------------------------


def _curves(data: ReportData, charts: Charts) -> str:
    if not data.series:
        return ""
    end, panels = figures.reach(data.series), []
    for i, model in enumerate(data.models[:PANELS]):
        own = [s for s in data.series if s.model == model]
        if own:
            attacks = [a for a in data.attacks if a.model == model]
            charts[f"curves-{i}"] = figures.curves(own, _distinct(attacks), end)
            panels.append(parts.chart(f"curves-{i}", model, 430))
    switch = ""
    if data.attacks:
        switch = (
            '<label class="switch"><input type="checkbox" id="show-attacks" checked> show accuracy under attack</label>'
        )
    text = (
        "The share of inputs that are answered right and keep that answer under every perturbation of ℓ2 size up to ε. Higher is "
        "better. Grey lines are what attacks left standing: the truth lies between a curve and the attack on the same classifier."
    )
    body = f'{switch}<div class="panels">{"".join(panels)}</div>{parts.summary_table(data.series, end)}'
    return parts.section("curves-section", "Certified accuracy", text, body)


def _distinct(attacks: list[Any]) -> list[Any]:
    """One curve per kind of attack where runs of one network share it: the strongest, on the most inputs."""
    best: dict[str, Any] = {}
    for a in attacks:
        old = best.get(a.kind)
        rank = (len(a.ids), -float(np.minimum(a.distance, 1e9).sum()))
        if old is None or rank > (len(old.ids), -float(np.minimum(old.distance, 1e9).sum())):
            best[a.kind] = a
    return list(best.values())


def _bounds(data: ReportData, charts: Charts) -> str:
    if not data.audits:
        return ""
    charts["bounds"] = figures.bounds(data.audits)
    text = (
        "How much the whole network can stretch a distance, on a logarithmic scale. A mark pointing left is a proved upper "
        "bound: the truth lies to its left; a mark pointing right was reached by an attack."
    )
    return parts.section("bounds-section", "Network bounds", text, parts.chart("bounds", "Lipschitz constant", 340))


def _layers(data: ReportData) -> str:
    text = (
        "What each operation can add: its norm lies between the two numbers, and its share says how much of the logarithm of the "
        "product bound it is responsible for (negative: it shrinks distances). Click a header to sort."
    )
    body = "".join(parts.audit_block(a, i) for i, a in enumerate(data.audits))
    return parts.section("layers-section", "Layers", text, body)


def _spectra(data: ReportData, charts: Charts) -> str:
    panels = []
    for i, audit in enumerate(data.audits[:PANELS]):
        if audit.spectra:
            charts[f"spectra-{i}"] = figures.spectrum(audit)
            panels.append(parts.chart(f"spectra-{i}", audit.model, 420))
    text = (
        "Singular values of the linear layers, largest first. A flat line is a layer that treats all directions alike; the "
        "height at the left is the norm."
    )
    return parts.section(
        "spectra-section", "Spectra", text, f'<div class="panels">{"".join(panels)}</div>' if panels else ""
    )


def _histograms(data: ReportData, charts: Charts) -> str:
    end, panels = figures.reach(data.series), []
    for i, model in enumerate(data.models[:PANELS]):
        own = [s for s in data.series if s.model == model]
        if own:
            charts[f"radii-{i}"] = figures.histogram(own, end)
            panels.append(parts.chart(f"radii-{i}", model, 380))
    text = "How the certified radii are spread over the inputs; wrong answers and abstentions count as radius 0."
    return parts.section(
        "radii-section", "Certified radii", text, f'<div class="panels">{"".join(panels)}</div>' if panels else ""
    )


def _gallery(data: ReportData) -> str:
    text = (
        "Inputs beside the closest adversarial example found. The ruler shows the certified distance (filled) and where the "
        "attack got through (line); between the two nobody knows."
    )
    return parts.section("gallery-section", "Gallery", text, parts.gallery(data.gallery) if data.gallery else "")


def _inputs(data: ReportData) -> str:
    if not data.series:
        return ""
    options = "".join(
        f'<option value="{i}">{esc(f"{s.model} · {s.procedure} · {s.run}")}</option>' for i, s in enumerate(data.series)
    )
    body = (
        f'<div class="tools"><label>certificates <select id="which">{options}</select></label>'
        '<button type="button" id="back">‹ previous</button><span id="place"></span><button type="button" id="on">next ›</button>'
        '</div><div class="scroll"><table id="inputs"><thead></thead><tbody></tbody></table></div>'
    )
    text = "Every input with its certificate and the closest attack; radii are rounded down. Click a header to sort."
    return parts.section("inputs-section", "Inputs", text, body)


def _proofs(data: ReportData) -> str:
    text = (
        "Deterministic radii: which class is the first that the proof cannot exclude, and which method proved the most. "
        "Click a header to sort."
    )
    found = [s for s in data.series if s.methods]
    body = "".join(parts.proofs_table(s, i) for i, s in enumerate(found))
    return parts.section("proofs-section", "Rivals and methods", text, body)


def _alarm(data: ReportData) -> str:
    if data.tested is None or not data.tested.broken:
        return ""
    found = "".join(f"<li>{esc(w)}</li>" for w in data.tested.where[:20])
    said = f"{data.tested.broken} certificates were contradicted by an attack inside their radius."
    why = "Either the attacked classifier was another one, the risk α struck, or this is a bug of equipoise."
    return f'<div class="alarm" role="alert"><strong>{said}</strong> {why}<ul>{found}</ul></div>'


_LINKS = (
    ("curves-section", "Curves"), ("bounds-section", "Bounds"), ("layers-section", "Layers"), ("spectra-section", "Spectra"),
    ("radii-section", "Radii"), ("gallery-section", "Gallery"), ("proofs-section", "Rivals"), ("inputs-section", "Inputs"),
    ("limits", "Not guaranteed"), ("provenance", "Parameters"),
)  # fmt: skip


def _navigation(body: str) -> str:
    return "".join(f'<a href="#{i}">{name}</a>' for i, name in _LINKS if f'<section id="{i}"' in body)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; font-src data:">
@@REFRESH@@<title>@@TITLE@@</title>
<style>@@STYLE@@</style></head>
<body>
<header><div class="bar"><span class="mark" aria-hidden="true"></span><span class="brand">equipoise</span>
<nav>@@NAVIGATION@@</nav>
<button type="button" id="theme" aria-label="light or dark">◐</button></div>
<h1>@@TITLE@@</h1><p class="intro">@@INTRO@@</p>
@@CARDS@@
@@ALARM@@
<div class="tools"><button type="button" id="save-json">all numbers, JSON</button>
<button type="button" id="save-csv">inputs, CSV</button><button type="button" id="save-layers">layers, CSV</button></div>
</header>
<main>
<noscript><p class="alarm">The charts need JavaScript; the tables and the statements below do not.</p></noscript>
@@BODY@@</main>
<script type="application/json" id="data">@@DATA@@</script>
<script>@@PLOTLY@@</script>
<script>@@SCRIPT@@</script>
</body></html>
"""
