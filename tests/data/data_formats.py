"""Every way to store the same labelled images: one row writes them, and all rows run the same checks."""

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

N, H, W = 12, 32, 32
CLASSES = ["aeroplane", "bird", "cat"]


def pixels(channels: int = 3, seed: int = 0) -> np.ndarray:
    """(N, H, W, C) bytes."""
    return np.random.default_rng(seed).integers(0, 256, (N, H, W, channels), dtype=np.uint8)


def labels() -> np.ndarray:
    return np.sort(np.arange(N) % len(CLASSES))  # sorted: the order in which class folders are read


def png(image: np.ndarray, kind: str = "PNG") -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(out, kind)
    return out.getvalue()


def write_npz(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    parts = {"x_train": x[:2], "y_train": y[:2]}
    np.savez_compressed(folder / "a.npz", image_test=np.asfortranarray(x), label_test=y[:, None], **parts)
    return str(folder / "a.npz")


def write_folder(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / "test" / CLASSES[label]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:03d}.png").write_bytes(png(image))
    return f"{folder}#test"


FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}, "y": {"dtype": "int64"}}


def table(x: np.ndarray, y: np.ndarray):
    """As Hugging Face writes it: a struct of bytes and path, a decoy label, the features in the metadata."""
    import pyarrow as pa

    cells = [{"bytes": png(image), "path": "../../etc/passwd"} for image in x]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    found = pa.table({"y": pa.array([7] * len(y)), "image": pa.array(cells, kind), "label": pa.array(y, pa.int64())})
    return found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})


def write_parquet(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    import pyarrow.parquet as pq

    pq.write_table(table(x, y), folder / "rows.parquet", row_group_size=5)
    return str(folder / "rows.parquet")


def write_parquet_shards(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "data").mkdir()
    for part, rows in enumerate((slice(0, 5), slice(5, None))):
        cells = pa.array([png(image) for image in x[rows]], pa.binary())
        rows_table = pa.table({"label": pa.array(y[rows], pa.int32()), "image": cells})
        pq.write_table(rows_table, folder / "data" / f"test-{part:05d}-of-00002.parquet", row_group_size=4)
        pq.write_table(rows_table, folder / "data" / f"train-{part:05d}-of-00002.parquet")
    return str(folder)


def write_parquet_lists(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.list_(pa.list_(pa.uint8(), x.shape[-1]), W))
    pq.write_table(pa.table({"x": pa.array(x.tolist(), kind), "y": y}), folder / "test.parquet", row_group_size=7)
    return str(folder / "test.parquet")


def _write_module(folder: Path, x: np.ndarray, y: np.ndarray, code: str) -> str:
    name = f"factory_{abs(hash(str(folder)))}"
    np.savez(folder / "source.npz", x=x, y=y)
    head = f"import numpy as np\nz = np.load({str(folder / 'source.npz')!r})\nx, y = z['x'], z['y']\n"
    (folder / f"{name}.py").write_text(head + code)
    sys.path.insert(0, str(folder))  # undone by the fixture in conftest
    return f"{name}:make"


def write_map_factory(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    code = (
        "class make:\n  def __init__(self, split='test'):\n    if split != 'test': raise KeyError('no such split')\n"
        "  def __len__(self): return len(y)\n  def __getitem__(self, i): return x[i], int(y[i])\n"
    )
    return _write_module(folder, x, y, code) + "#test"


def write_picture_factory(folder: Path, x: np.ndarray, y: np.ndarray) -> str:
    code = (
        "from PIL import Image\n"
        "class Items:\n  targets = y.tolist()\n"
        "  def __len__(self): return len(y)\n"
        "  def __getitem__(self, i): return Image.fromarray(x[i].squeeze()), y[i]\n"
        "make = Items()\n"
    )
    return _write_module(folder, x, y, code)


@dataclass(frozen=True)
class Format:
    """`write(folder, x, y)` returns the spec; `files` says whether damage to its files must be noticed."""

    id: str
    write: Callable[[Path, np.ndarray, np.ndarray], str]
    files: bool = True
    needs: tuple[str, ...] = ()
    classes: bool = False


ARROW = ("pyarrow", "PIL")
FORMATS = [
    Format("npz", write_npz),
    Format("folder", write_folder, needs=("PIL",), classes=True),
    Format("parquet", write_parquet, needs=ARROW),
    Format("parquet-shards", write_parquet_shards, needs=ARROW),
    Format("parquet-lists", write_parquet_lists, needs=("pyarrow",)),
    Format("factory-map", write_map_factory, files=False),
    Format("factory-pictures", write_picture_factory, files=False, needs=("PIL",)),
]
CASES = [(row, channels) for row in FORMATS for channels in (1, 3)]


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
