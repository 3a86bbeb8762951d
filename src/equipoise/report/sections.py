"""The parts of the page: every function turns data into escaped HTML. Norms are rounded up, radii down."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.core.accuracy import percent
from equipoise.core.bounds import format_down, format_up
from equipoise.lipschitz.logs import show_log
from equipoise.report.data import Audit, Picture, ReportData, Series
from equipoise.smoothing.certificates import NOT_COVERED

#: a chart waiting to be drawn: its id and its plotly figure
Charts = dict[str, Mapping[str, Any]]


def esc(value: Any) -> str:
    """Escaped for text and for attributes."""
    return html.escape(str(value), quote=True)


def section(identifier: str, title: str, explanation: str, body: str) -> str:
    """A section with the one sentence that says how to read it; `explanation` and `body` are HTML."""
    return (
        f'<section id="{identifier}"><h2>{esc(title)}</h2><p class="lead">{explanation}</p>\n{body}\n</section>\n'
        if body
        else ""
    )


def chart(identifier: str, caption: str, height: int = 380) -> str:
    """A place for a chart; the script draws the figure of the same id."""
    return (
        f'<figure class="panel"><figcaption>{esc(caption)}</figcaption>'
        f'<div class="chart" id="{esc(identifier)}" style="height:{height}px" role="img" aria-label="{esc(caption)}"></div>'
        "</figure>"
    )


# ---- headline ---------------------------------------------------------------------------------------------------------


def card(title: str, number: str, below: str, tone: str = "") -> str:
    """One headline number."""
    return (
        f'<div class="card {tone}"><div class="what">{esc(title)}</div><div class="number">{esc(number)}</div>'
        f'<div class="below">{esc(below)}</div></div>'
    )


#: cards of bounds and of runs at most; how many are left is said
AUDITS, RUNS = 3, 8


def cards(data: ReportData) -> str:
    """The headline numbers: whether attacks contradicted a certificate, bounds, and for each run the procedure it was made for.

    Other curves of a run are not picked for the headline: choosing the best after looking is not covered by the risk.
    """
    shown = []
    if data.tested is not None:
        t = data.tested
        tone = "good" if t.broken == 0 else "bad"
        shown.append(
            card(
                "inputs whose certificate an attack contradicted",
                str(t.broken),
                f"of {t.tried:,} inputs attacked inside a certified radius",
                tone,
            )
        )
    for audit in data.audits[:AUDITS]:
        log = audit.bound.get("log_upper")
        number = "unknown" if log is None else show_log(float(log))
        shown.append(card("Lipschitz constant at most", number, audit.model))
    own = [s for s in data.series if s.own]
    for s in _headline(own):
        beside = sum(other.run == s.run and other.model == s.model for other in data.series) - 1
        more = f"; {beside} more curve{'s' if beside > 1 else ''} of this run below" if beside else ""
        said = (
            f"{s.model}, {s.procedure}, run {s.run}: mean of {s.inputs} inputs{f' of {s.data}' if s.data else ''}{more}"
        )
        title = "average certified radius" + ("" if s.labelled else ", any answer")
        shown.append(card(title, format_down(s.average_radius, 3), said))
    left = len(own) - len(_headline(own)) + max(0, len(data.audits) - AUDITS)
    if left:
        shown.append(card("more", str(left), "further bounds and runs are in the tables below"))
    return f'<div class="cards">{"".join(shown)}</div>' if shown else ""


def _headline(own: Sequence[Series]) -> list[Series]:
    """The first run of every network and procedure, then the others, in their order, up to the number of cards."""
    first = {(s.model, s.procedure): s for s in reversed(own)}
    ahead = [s for s in own if first[s.model, s.procedure] is s]
    kept = [*ahead, *(s for s in own if first[s.model, s.procedure] is not s)][:RUNS]
    return [s for s in own if any(s is other for other in kept)]


def levels(end: float) -> tuple[float, ...]:
    """0 and four round radii that cover the curves.

    >>> levels(1.3), levels(0.45)
    ((0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.1, 0.2, 0.3, 0.4))
    """
    wanted = max(end, 1e-9) / 4.5
    scale = 10.0 ** math.floor(math.log10(wanted))
    step = max(m * scale for m in (1.0, 2.0, 2.5, 5.0) if m * scale <= wanted * (1 + 1e-9))
    return tuple(float(f"{k * step:.6g}") for k in range(5))


def summary_table(series: Sequence[Series], end: float) -> str:
    """A row per curve: certified accuracy at a few radii, average radius, risk; the run where it tells curves apart."""
    chosen = levels(end)
    several = len({(s.model, s.procedure) for s in series}) < len(series)
    head = [
        "network",
        "procedure",
        *(f"ε = {e:g}" for e in chosen),
        "average radius",
        "inputs",
        "abstained",
        "risk α",
        "σ",
        "data",
        *(["run"] if several else []),
    ]
    rows = []
    for s in series:
        abstained = int((s.prediction < 0).sum())
        shares = [percent(float(s.accuracy(e)), 1) for e in chosen]
        cells: list[tuple[str, float | str]] = [
            (s.model, s.model), (s.procedure + ("" if s.labelled else " (no labels: any answer)"), s.procedure),
            *((f"{v} %", float(v)) for v in shares),
            (format_down(s.average_radius, 4), s.average_radius),
            (s.inputs, float(len(s.ids))),
            (f"{abstained} of {len(s.ids)}" + (f", {s.failed} failed" if s.failed else ""), float(abstained)),
            (_risk(s.alpha), s.alpha), (f"{s.sigma:g}" if s.sigma else "none", s.sigma), (s.data, s.data),
            *([(s.run, s.run)] if several else []),
        ]  # fmt: skip
        rows.append(cells)
    return table(head, rows, "curves", numeric=range(2, 7 + len(chosen)))


def _risk(alpha: float) -> str:
    """The risk in words where it is no number."""
    if math.isnan(alpha):
        return "unknown"
    return f"{alpha:g}" if alpha else "none"


#: inputs of a deterministic run that are listed with rival and method; all of them are in the store
LISTED = 1000


def proofs_table(s: Series, index: int) -> str:
    """Every input of a deterministic run: its radius, the class that limits it, and what proved it."""
    cells: list[list[tuple[str, float | str]]] = [
        [
            (s.ids[i], s.ids[i]), (str(s.labels[i]), float(s.labels[i])),
            (format_down(float(s.radius[i]), 5), float(s.radius[i])),
            (str(s.rivals[i]) if s.rivals[i] >= 0 else "", float(s.rivals[i])), (s.methods[i], s.methods[i]),
        ]
        for i in range(min(len(s.ids), LISTED))
    ]  # fmt: skip
    counts = {
        m: sum(1 for n, r in zip(s.methods, s.radius, strict=True) if n == m and r > 0)
        for m in dict.fromkeys(s.methods)
    }
    by = ", ".join(f"{m}: {n}" for m, n in counts.items() if n) or "nothing"
    head = ("input", "label", "proved radius, at least", "limiting rival", "proved by")
    return f"<h3>{esc(s.model)}, {esc(s.run)}</h3><p>Proved by {esc(by)}.</p>" + table(
        head, cells, f"proofs-{index}", numeric=(1, 2, 3)
    )


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[tuple[str, float | str]]],
    identifier: str,
    numeric: Iterable[int] = (),
) -> str:
    """A table that sorts when a header is clicked; cells are (text, value to sort by)."""
    right = set(numeric)
    top = "".join(
        f'<th scope="col" aria-sort="none"{" class=num" if i in right else ""}><button type="button">{esc(h)}</button></th>'
        for i, h in enumerate(head)
    )
    body = "\n".join("<tr>" + "".join(_cell(c, i in right) for i, c in enumerate(row)) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="sortable" id="{esc(identifier)}"><thead><tr>{top}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cell(cell: tuple[str, float | str], right: bool) -> str:
    text, key = cell
    if isinstance(key, float) and math.isnan(key):
        key = ""
    return f'<td{" class=num" if right else ""} data-key="{esc(key)}">{esc(text)}</td>'


# ---- audits -----------------------------------------------------------------------------------------------------------


def audit_block(audit: Audit, index: int) -> str:
    """The layers of one network with norms and shares, and its totals."""
    bound = audit.bound
    rows = [_layer(i, row) for i, row in enumerate(bound.get("layers", ()))]
    head = ("#", "layer", "kind", "shape", "norm at least", "constant at most", "share of log L", "method")
    totals = [("product, layer by layer", "log_product"), ("fused", "log_fused"), ("chain", "log_chain")]
    parts = [f"{name} ≤ {show_log(float(bound[key]))}" for name, key in totals if bound.get(key) is not None]
    domain = "for all inputs" if bound.get("ball") is None else f"for inputs of norm at most {bound['ball']:g}"
    best = bound.get("log_upper")
    line = f"L ≤ {show_log(float(best))} in ℓ2 {domain}" if best is not None else "no bound"
    notes = "".join(f'<p class="note">{esc(n)}</p>' for n in bound.get("notes", ()))
    return (
        f"<h3>{esc(audit.model)}</h3><p><strong>{esc(line)}</strong> — {esc('; '.join(parts))}.</p>{notes}"
        + table(head, rows, f"layers-{index}", numeric=(0, 4, 5, 6))
        + _local(audit, index)
    )


def _layer(i: int, row: Mapping[str, Any]) -> list[tuple[str, float | str]]:
    lower, upper, share = (_number(row.get(k)) for k in ("lower", "upper", "share"))
    return [
        (str(i + 1), float(i)), (str(row.get("name", "")), str(row.get("name", ""))),
        (str(row.get("kind", "")), str(row.get("kind", ""))), (str(row.get("shape", "")), str(row.get("shape", ""))),
        ("" if math.isnan(lower) else format_down(lower, 5), lower),
        ("∞" if math.isinf(upper) or math.isnan(upper) else format_up(upper, 5), upper),
        ("" if math.isnan(share) else f"{100 * share:.1f} %", share),
        (str(row.get("method") or row.get("note") or ""), str(row.get("method") or "")),
    ]  # fmt: skip


def _local(audit: Audit, index: int) -> str:
    if not audit.local or audit.local_radius is None:
        return ""
    head = ("input", "reached by an attack, at least", "proved, at most")
    rows = [
        [(str(p["id"]), str(p["id"])), (format_down(p["lower"], 4), p["lower"]), (format_up(p["upper"], 4), p["upper"])]
        for p in audit.local
    ]
    text = f"The constant on the ball of radius {audit.local_radius:g} around single inputs: the truth lies between."
    return f'<p class="note">{text}</p>' + table(head, rows, f"local-{index}", numeric=(1, 2))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


# ---- gallery ----------------------------------------------------------------------------------------------------------


def gallery(pictures: Sequence[Picture]) -> str:
    """Inputs, what is certified around them, and the closest adversarial example found."""
    models = list(dict.fromkeys(p.model for p in pictures))
    blocks = []
    for model in models:
        own = [p for p in pictures if p.model == model]
        scale = max([p.distance or 0.0 for p in own] + [p.radius for p in own]) or 1.0
        used = ", ".join(dict.fromkeys(p.procedure for p in own))
        shots = "".join(_picture(p, 1.05 * scale) for p in own)
        blocks.append(f'<h3>{esc(model)} <small>certified: {esc(used)}</small></h3><div class="gallery">{shots}</div>')
    return "".join(blocks)


def _picture(p: Picture, scale: float) -> str:
    wrong = " wrong" if p.predicted != p.label else ""
    images = f'<img src="{esc(p.image)}" alt="input {esc(p.id)}, label {esc(p.label)}" width="96" height="96">'
    if p.adversarial is not None:
        images += (
            f'<img src="{esc(p.adversarial)}" alt="adversarial example read as {esc(p.answer)}" width="96" height="96">'
        )
    certified = min(100.0, 100 * p.radius / scale)
    marks = f'<span class="sure" style="width:{certified:.2f}%"></span>'
    if p.distance is not None:
        marks += f'<span class="hit" style="left:{min(100.0, 100 * p.distance / scale):.2f}%"></span>'
    found = (
        "no adversarial example found"
        if p.distance is None
        else f"attacked: <b>{esc(p.answer)}</b> at {esc(format_up(p.distance, 3))}"
    )
    return (
        f'<figure class="shot{wrong}"><div class="pair">{images}</div><figcaption>'
        f"<div>label <b>{esc(p.label)}</b>, answer <b>{esc(p.predicted)}</b></div>"
        f'<div class="ruler" aria-hidden="true">{marks}</div>'
        f"<div>certified {esc(format_down(p.radius, 3))}</div><div>{found}</div>"
        "</figcaption></figure>"
    )


# ---- what it rests on ---------------------------------------------------------------------------------------------------


def limits(data: ReportData) -> str:
    """What is not guaranteed, plainly."""
    said = list(dict.fromkeys(rest for s in data.series if (rest := s.about.partition(". ")[2]))) or [NOT_COVERED]
    risks = sorted({s.alpha for s in data.series if s.alpha > 0})
    for alpha in risks:
        count = max(len(s.ids) for s in data.series if s.alpha == alpha)
        said.append(
            f"Certificates by sampling hold with probability at least 1 − {alpha:g} for each input and each curve on its own: of "
            f"{count:,} certificates up to {alpha * count:g} may be wrong on average. Choosing the best of several curves after "
            "looking at them is not covered."
        )
    if any(not s.alpha for s in data.series):
        said.append(
            "Deterministic certificates hold always, for the network with the stored weights in real arithmetic."
        )
    said += [f"{s.model}, {s.procedure}: Lipschitz constant {s.assumption}." for s in data.series if s.assumption]
    if data.series:
        said.append("Accuracy is that of the inputs listed here; it says nothing about other data.")
    if data.attacks:
        said.append(
            "Accuracy under attack is no guarantee: a stronger attack may find more. It shows how far the certificates could "
            "still grow."
        )
    if any(a.spectra for a in data.audits):
        said.append(
            "Singular values are computed in floating point and not proved, those of convolutions with a periodic boundary; only "
            "the norms in the tables are bounds."
        )
    said += list(data.notes)
    return "<ul>" + "".join(f"<li>{esc(t)}</li>" for t in said) + "</ul>"


def provenance(data: ReportData) -> str:
    """Parameters, seeds, versions and fingerprints of every run."""
    blocks = []
    for run in data.runs:
        rows = "".join(
            f"<tr><th scope=row>{esc(k)}</th><td>{esc(v)}</td></tr>" for k, v in run.items() if v not in (None, "")
        )
        blocks.append(
            f"<details><summary>{esc(run.get('run', 'run'))} <small>{esc(run.get('model', ''))}</small></summary>"
            f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div></details>'
        )
    about = dict.fromkeys(f"{s.model}, {s.procedure}: {s.about.partition('. ')[0]}." for s in data.series if s.about)
    said = "".join(f"<li>{esc(t)}</li>" for t in about)
    made = ", ".join(f"{k} {v}" for k, v in data.versions.items())
    attacks = dict.fromkeys(
        f"Attack on {a.model} ({a.kind}, {len(a.ids)} inputs): {a.settings}." for a in data.attacks if a.settings
    )
    said += "".join(f"<li>{esc(t)}</li>" for t in attacks)
    return (
        (f"<ul>{said}</ul>" if said else "")
        + "".join(blocks)
        + f'<p class="note">Made {esc(data.created)} with {esc(made)}.</p>'
    )
