"""The page: one file of HTML with its style, its script, plotly and every number inside; nothing is loaded from anywhere.

Norms are shown rounded up, radii and certified shares rounded down. The templates escape every text.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import ArrayLike

from equipoise.core.accuracy import percent
from equipoise.core.bounds import format_down, format_up
from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write
from equipoise.lipschitz.logs import show_log
from equipoise.report import figures
from equipoise.report.audits import Layer, Local
from equipoise.report.collect import Attacks, ReportData, Series, as_document
from equipoise.smoothing.certificates import NOT_COVERED

#: panels of one chart, cards of bounds and of runs, and listed inputs of a proved run at most
PANELS, AUDITS, RUNS, LISTED = 6, 3, 8, 1000

#: cells (text, value to sort by)
Cell = tuple[str, float | str]


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
        raise InputError(f"a report is an HTML file: give a name that ends in .html, got {path.name!r}")
    if path.parent != Path() and not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
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
        loader=PackageLoader("equipoise.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip
    environment.filters |= {"up": format_up, "down": format_down, "log": show_log}
    source = _plotly_source() if plotly is None else plotly
    charts = _charts(data) if source else {}
    assets = resources.files("equipoise.report").joinpath("assets")
    return environment.get_template("report.html.j2").render(
        data=data,
        refresh=refresh,
        charts=charts,
        models=list(enumerate(data.models[:PANELS])),
        cards=list(_cards(data)),
        curves=_summary(data.series),
        audits=[
            (n, a, [_layer(i, row) for i, row in enumerate(a.bound.layers)], [_local(p) for p in a.local])
            for n, a in enumerate(data.audits)
        ],
        proofs=[(s, _proofs(s)) for s in data.series if s.methods],
        limits=limits(data),
        scales={m: _scale(data, m) for m in dict.fromkeys(p.model for p in data.gallery)},
        payload=in_script({"charts": charts, **numbers(data)}),
        plotly=source.replace("</script", "<\\/script"),
        style=assets.joinpath("report.css").read_text(encoding="utf-8"),
        script=assets.joinpath("report.js").read_text(encoding="utf-8"),
    )


def _charts(data: ReportData) -> dict[str, figures.Figure]:
    """Every plotly figure by the id of its place on the page."""
    charts: dict[str, figures.Figure] = {}
    end = figures.reach(data.series)
    for i, model in enumerate(data.models[:PANELS]):
        own = [s for s in data.series if s.model == model]
        if own:
            charts[f"curves-{i}"] = figures.curves(own, _strongest(data.attacks, model), end)
            charts[f"radii-{i}"] = figures.histogram(own, end)
    if data.audits:
        charts["bounds"] = figures.bounds(data.audits)
    for i, audit in enumerate(data.audits[:PANELS]):
        if audit.spectra:
            charts[f"spectra-{i}"] = figures.spectrum(audit)
    return charts


def _strongest(attacks: Sequence[Attacks], model: str) -> list[Attacks]:
    """One curve per kind of attack on a network: the strongest, on the most inputs."""
    best: dict[str, Attacks] = {}
    for a in sorted(attacks, key=lambda a: (len(a.ids), -float(np.minimum(a.distance, 1e9).sum()))):
        if a.model == model:
            best[a.kind] = a
    return list(best.values())


def _cards(data: ReportData) -> Iterator[tuple[str, str, str, str]]:
    """Headline numbers (title, number, below, tone): contradictions, bounds, and for each run its own procedure.

    Other curves of a run are not picked for the headline: choosing the best after looking is not covered by the risk.
    """
    if data.tested is not None:
        below = f"of {data.tested.tried:,} certificates attacked inside their radius"
        yield "contradicted by an attack", str(data.tested.broken), below, "bad" if data.tested.broken else "good"
    for audit in data.audits[:AUDITS]:
        log = audit.bound.log_upper
        yield "Lipschitz constant at most", "unknown" if log is None else show_log(log), audit.model, ""
    own = [s for s in data.series if s.own]
    for s in own[:RUNS]:
        title = "average certified radius" + ("" if s.results.labelled else ", any answer")
        below = f"{s.model}, {s.procedure}, run {s.run}: mean of {s.inputs} inputs" + (
            f" of {s.data}" if s.data else ""
        )
        yield title, format_down(s.results.average_radius, 3), below, ""
    left = max(0, len(own) - RUNS) + max(0, len(data.audits) - AUDITS)
    if left:
        yield "more", str(left), "further bounds and runs are in the tables below", ""


def levels(end: float) -> tuple[float, ...]:
    """0 and four round radii that cover the curves.

    >>> levels(1.3), levels(0.45)
    ((0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.1, 0.2, 0.3, 0.4))
    """
    wanted = max(end, 1e-9) / 4.5
    scale = 10.0 ** math.floor(math.log10(wanted))
    step = max(m * scale for m in (1.0, 2.0, 2.5, 5.0) if m * scale <= wanted * (1 + 1e-9))
    return tuple(float(f"{k * step:.6g}") for k in range(5))


def _summary(series: Sequence[Series]) -> tuple[list[str], list[list[Cell]]]:
    """A row per curve: certified accuracy at a few radii, average radius, inputs by status, risk."""
    chosen = levels(figures.reach(series))
    head = ["network", "procedure", *(f"ε = {e}" for e in chosen)]
    head += ["average radius", "inputs", "by status", "risk α", "σ", "data", "run"]
    rows: list[list[Cell]] = []
    for s in series:
        results = s.results
        shares = [percent(float(results.accuracy(e)), 1) for e in chosen]
        statuses = ", ".join(f"{count} {status}" for status, count in s.statuses.items())
        risk = "unknown" if math.isnan(results.alpha) else f"{results.alpha:g}" if results.alpha else "none"
        rows.append([
            (s.model, s.model), (s.procedure + ("" if results.labelled else " (no labels: any answer)"), s.procedure),
            *((f"{share} %", float(share)) for share in shares),
            (format_down(results.average_radius, 4), results.average_radius), (s.inputs, float(len(s.ids))),
            (statuses, statuses), (risk, "" if math.isnan(results.alpha) else results.alpha),
            (f"{results.sigma:g}" if results.sigma else "none", results.sigma), (s.data, s.data), (s.run, s.run),
        ])  # fmt: skip
    return head, rows


def _proofs(s: Series) -> list[list[Cell]]:
    """Every input of a proved run: its status, its radius, the class that limits it, and what proved it."""
    results = s.results
    columns = (s.ids, results.labels.tolist(), results.status, results.radius.tolist(), s.rivals, s.methods)
    return [
        [
            (name, name), (str(label), float(label)), (status, status), (format_down(radius, 5), radius),
            (str(rival) if rival >= 0 else "", float(rival)), (method, method),
        ]
        for name, label, status, radius, rival, method in list(zip(*columns, strict=True))[:LISTED]
    ]  # fmt: skip


def _layer(i: int, row: Layer) -> list[Cell]:
    unbounded = row.upper is None or math.isinf(row.upper)
    return [
        (str(i + 1), float(i)), (row.name, row.name), (row.kind, row.kind), (row.shape, row.shape),
        ("", "") if row.lower is None else (format_down(row.lower, 5), row.lower),
        ("∞", math.inf) if unbounded else (format_up(row.upper or 0.0, 5), row.upper or 0.0),
        ("", "") if row.share is None else (f"{100 * row.share:z.1f} %", row.share),
        (row.method or row.note or "", row.method or ""),
    ]  # fmt: skip


def _local(p: Local) -> list[Cell]:
    return [(p.id, p.id), (format_down(p.lower, 4), p.lower), (format_up(p.upper, 4), p.upper)]


def _scale(data: ReportData, model: str) -> float:
    """The length of the rulers of a network's pictures."""
    lengths = [max(p.radius, p.distance or 0.0) for p in data.gallery if p.model == model]
    return 1.05 * max(lengths) or 1.0


def limits(data: ReportData) -> list[str]:
    """What is not guaranteed, plainly."""
    results = [s.results for s in data.series]
    said = list(dict.fromkeys(rest for r in results if (rest := r.about.partition(". ")[2]))) or [NOT_COVERED]
    for alpha in sorted({r.alpha for r in results if r.alpha > 0}):
        count = max(len(r) for r in results if r.alpha == alpha)
        said.append(
            f"Certificates by sampling hold with probability at least 1 − {alpha:g} for each input and each curve on its own: of "
            f"{count:,} certificates up to {alpha * count:g} may be wrong on average. Choosing the best of several curves after "
            "looking at them is not covered."
        )
    if any(not r.alpha for r in results):
        said.append(
            "Deterministic certificates hold always, for the network with the stored weights in real arithmetic."
        )
    said += [f"{s.model}, {s.procedure}: Lipschitz constant {s.assumption}." for s in data.series if s.assumption]
    if data.series:
        said.append("Accuracy is that of the inputs listed here; it says nothing about other data.")
    if data.attacks:
        said.append("Accuracy under attack is no guarantee: a stronger attack may find more.")
    if any(a.spectra for a in data.audits):
        said.append(
            "Singular values are estimates, those of convolutions with a periodic boundary; the norms are bounds."
        )
    return [*said, *data.notes]


def numbers(data: ReportData) -> dict[str, Any]:
    """Every number behind the page, with every digit; names of inputs that several curves share are stored once."""
    document = as_document(data)
    ids: dict[tuple[str, ...], int] = {}
    for entry, s in zip(document["series"], data.series, strict=True):
        columns = {"label": s.results.labels, "prediction": s.results.prediction, "radius": s.results.radius}
        entry |= {"ids": ids.setdefault(s.ids, len(ids)), "status": s.results.status}
        entry |= {name: column.tolist() for name, column in columns.items()}
    for entry, a in zip(document["attacks"], data.attacks, strict=True):
        entry |= {"ids": ids.setdefault(a.ids, len(ids)), "distance": a.distance.tolist()}
    return {**document, "ids": list(ids)}


def in_script(value: Any) -> str:
    """JSON that cannot leave a `<script>`: no `<`, `>`, `&` and no line separators; numbers JSON lacks become null.

    >>> in_script({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    text = json.dumps(finite, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def data_uri(image: ArrayLike) -> str:
    """An image (H, W), (1, H, W) or (3, H, W) with values in [0, 1], clipped, as a PNG `data:` address.

    >>> data_uri([[0.0, 1.0]])[:27]
    'data:image/png;base64,iVBOR'
    """
    pixels = np.asarray(image, dtype=np.float64)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or len(pixels) not in (1, 3) or pixels.size == 0:
        raise InputError(f"expected an image (H, W), (1, H, W) or (3, H, W), got shape {np.shape(image)}")
    rows = np.nan_to_num(pixels.clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
    height, width, channels = rows.shape
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return "data:image/png;base64," + base64.b64encode(content).decode()
