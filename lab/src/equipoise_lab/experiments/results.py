"""Result files: JSON and Parquet, written whole, and read back to judge or draw again."""

import contextlib
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write, make_folder
from equipoise_lab.experiments.experiment import Experiment, Label, Row, Verdict


@dataclass(frozen=True)
class Result:
    """The rows of one finished experiment and what they say."""

    experiment: Experiment
    scale: str
    seed: int
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    seconds: float
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the claim, or on its first part."""
        return self.verdicts[0]

    def to_json(self) -> dict[str, Any]:
        """Everything, with the settings and the versions it was measured with."""
        import torch

        from equipoise import __version__

        versions = {
            "equipoise": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        verdicts = [{**asdict(verdict), "label": str(verdict.label)} for verdict in self.verdicts]
        return {
            **self.experiment.describe(self.scale), "title": self.experiment.title, "claim": self.experiment.claim,
            "seed": self.seed, "seconds": round(self.seconds, 1), "versions": versions, "machine": dict(self.machine),
            "verdicts": verdicts, "rows": list(self.rows),
        }  # fmt: skip


def write(result: Result, folder: Path) -> None:
    """`result.json`, `rows.parquet` and the figure; JSON last, so that its presence means that all is there."""
    from equipoise_lab.experiments.figures import save

    make_folder(folder)
    save(result.experiment.draw(result.rows), folder)
    atomic_write(folder / "rows.parquet", parquet(result.rows))
    atomic_write(folder / "result.json", _document(result.to_json()))


def _document(result: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    head = json.dumps(
        {key: value for key, value in result.items() if key != "rows"}, indent=1, ensure_ascii=False
    )
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in result["rows"])
    return f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def read(experiment: Experiment, folder: Path) -> Result | None:
    """A stored result with its verdict judged anew, or None if there is none; a damaged file is an error."""
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        stored: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(stored["rows"])
        labels = [verdict["label"] for verdict in stored["verdicts"]]
        scale, seed, seconds = str(stored["scale"]), int(stored["seed"]), float(stored["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a result of `equipoise reproduce` ({error}); delete it to run again"
        ) from error
    if stored.get("settings") != json.loads(json.dumps(experiment.describe(scale)["settings"])):
        return None
    if str(Label.DRY) in labels:
        return None
    return Result(
        experiment,
        scale,
        seed,
        rows,
        experiment.verdicts(rows, scale),
        seconds,
        stored.get("machine") or {},
    )


def processor() -> str:
    """The processor's name as the system gives it, at least its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """The processor, its cores, the threads in use, and how busy the machine is: what a timing depends on."""
    import torch

    busy = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {
        "processor": processor(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "load before": busy,
    }  # fmt: skip


def parquet(rows: Sequence[Row]) -> bytes:
    """The rows as a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet as writer
    except ImportError as error:
        raise InputError("result files need pyarrow: pip install 'equipoise[data]'") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    content = io.BytesIO()
    writer.write_table(table, content)
    return content.getvalue()
