"""Derived tables as files: Cohen's TSV, CSV, Parquet. Radii and lower bounds are rounded down, upper bounds up."""

import csv
import io
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from equipoise.core import InputError, format_down, format_up
from equipoise.core.files import atomic_write
from equipoise.runs.rows import Row
from equipoise.smoothing import Certificates
from equipoise.smoothing.certificates import ABSTAIN

_DIGITS = 6


def export(rows: Sequence[Row], certificates: Certificates, path: str | Path) -> Path:
    """Write the table in the format that the name's ending asks for, whole or not at all."""
    path = check_path(path)
    if len(rows) != len(certificates):
        raise InputError(f"{len(rows)} rows but {len(certificates)} certificates")
    atomic_write(path, FORMATS[path.suffix](rows, certificates))
    return path


def check_path(path: str | Path) -> Path:
    """Refuse a name that cannot be written later, before a long run begins."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise InputError(f"cannot export to {path.name!r}: expected an ending among {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    if path.suffix == ".parquet":
        _parquet()
    return path


def to_tsv(rows: Sequence[Row], certificates: Certificates) -> str:
    """Cohen's log, readable by `smoothing.read_log`: idx is the position in the data, radii rounded down to four digits."""
    lines = ["idx\tlabel\tpredict\tradius\tcorrect\ttime"]
    for row, k, r in _pairs(rows, certificates):
        right = int(k == row.label and k != ABSTAIN)
        spent = timedelta(seconds=round(row.seconds, 6))
        lines.append(f"{row.position}\t{row.label}\t{k}\t{format_down(r, 4)}\t{right}\t{spent}")
    return "\n".join(lines) + "\n"


def to_csv(rows: Sequence[Row], certificates: Certificates) -> str:
    """One line per input without the time: the same bytes for every repetition of a run."""
    table = columns(rows, certificates)
    table.pop("seconds")
    for name, digits in (("radius", format_down), ("p_lower", format_down), ("p_upper", format_up)):
        table[name] = [digits(float(v), _DIGITS) for v in table[name]]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return buffer.getvalue()


def to_parquet(rows: Sequence[Row], certificates: Certificates) -> bytes:
    """The same columns and the time, all digits kept (they are floats that were already rounded to the safe side)."""
    pyarrow = _parquet()
    table = columns(rows, certificates)
    table["id"] = [str(v) for v in table["id"]]
    about = {"about": certificates.about, "procedure": certificates.procedure}
    about |= {"sigma": repr(certificates.sigma), "alpha": repr(certificates.alpha)}
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(table).replace_schema_metadata(about), sink)
    return bytes(sink.getvalue().to_pybytes())


def _parquet() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("a .parquet export needs pyarrow: pip install 'equipoise[data]'") from error
    return pyarrow


def columns(rows: Sequence[Row], certificates: Certificates) -> dict[str, list[Any]]:
    """The derived table, column by column."""
    c = certificates
    predicted = [int(k) for k in c.prediction]
    return {
        "id": [row.id for row in rows],
        "position": [row.position for row in rows],
        "label": [row.label for row in rows],
        "prediction": predicted,
        "radius": [float(r) for r in c.radius],
        "correct": [int(k == row.label and k != ABSTAIN) for k, row in zip(predicted, rows, strict=True)],
        "selected": [int(k) for k in c.selected],
        "p_lower": [float(v) for v in c.p_lower],
        "p_upper": [float(v) for v in c.p_upper],
        "draws": [int(v) for v in c.draws],
        "failure": [row.failure or "" for row in rows],
        "seconds": [row.seconds for row in rows],
    }


def _pairs(rows: Sequence[Row], certificates: Certificates) -> list[tuple[Row, int, float]]:
    found = zip(rows, certificates.prediction, certificates.radius, strict=True)
    return [(row, int(k), float(r)) for row, k, r in found]


#: name ending → writer; a new format is a new row
FORMATS: dict[str, Callable[[Sequence[Row], Certificates], str | bytes]] = {
    ".tsv": to_tsv,
    ".csv": to_csv,
    ".parquet": to_parquet,
}
