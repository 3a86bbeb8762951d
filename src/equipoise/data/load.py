"""`load_dataset`: NumPy archives, pictures (pillow), Parquet tables (pyarrow), and datasets made by your code.

Nothing in a file is executed: no pickles, no paths inside of cells, no extension types. Sizes that a file declares are checked
against a limit before memory is allocated.
"""

import functools
import inspect
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import InputError, Ints, did_you_mean, explained, guarded, optional
from equipoise.core.files import SPEC, open_regular, resolve
from equipoise.data.dataset import (
    IMAGES,
    LABELS,
    Array,
    Dataset,
    Layout,
    Names,
    Source,
    arrange,
    as_dataset,
    check_labels,
    find_columns,
)

#: data that declares more is not read unless the caller says so
MAX_BYTES = 8 * 2**30
#: a picture that declares more pixels is not decoded
MAX_PIXELS = 50_000_000
#: the only decoders of pillow that are used
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
Size = tuple[int, int]


def load_dataset(
    spec: str | Path,
    split: str | None = None,
    *,
    layout: Layout | None = None,
    size: int | Size | None = None,
    columns: Names | None = None,
    max_bytes: int | None = None,
    labelled: bool = True,
) -> Dataset:
    """Load a dataset; nothing in a file is executed, every failure is an `InputError` of one sentence.

    Args:
        spec: `digits`; a .npz or .parquet file; a folder of .parquet files, or of pictures in
            class folders; or `package.module:factory`. `spec#split` names the split too.
        split: e.g. "train"; by default "test" if there is one, otherwise the only one.
        layout: of arrays, "NHWC", "NCHW", "NHW" (gray) or "as-is"; by default bytes are images with channels last, and
            floats have channels first.
        size: (height, width) to which pictures are resized and cropped; by default they must agree.
        columns: names of the columns of inputs and labels, for tables and rows that are dictionaries; an empty second name:
            there are no labels (tables).
        max_bytes: an array or Parquet file that declares more is refused, by default 8 GiB.
        labelled: refuse data without labels.

    >>> load_dataset("digits#train")
    Dataset('digits', 1437 inputs of 1×8×8, 10 classes)
    """
    if size is not None:
        size = size if isinstance(size, tuple) else (size, size)
        if len(size) != 2 or not all(isinstance(s, int) and 1 <= s <= 4096 for s in size):
            raise InputError(
                f"size must be one or two whole numbers between 1 and 4096, got {size!r}"
            )
    with explained(f"cannot read {str(spec)[:200]}"):
        spec, split = _split_in(str(spec), split)
        reader, source = _reader_of(spec)
        options = {"layout": layout, "size": size, "columns": columns, "max_bytes": max_bytes}
        options = {name: value for name, value in options.items() if value is not None}
        unused = set(options) - set(inspect.signature(reader).parameters)
        if unused:
            raise InputError(f"{unused.pop()}= has no meaning for {spec}: leave it out")
        dataset = reader(source, split, **options)
    if labelled and not dataset.labelled:
        raise InputError(f"{spec[:200]} has no labels, which are needed here")
    return dataset


def _split_in(spec: str, split: str | None) -> tuple[str, str | None]:
    """`path#split` as the path and its split, unless a file of that very name exists."""
    stem, mark, named = spec.rpartition("#")
    if not mark or not re.fullmatch(r"\w+", named) or Path(spec).exists():
        return spec, split
    if split not in (None, named):
        raise InputError(f"{spec!r} names the split {named!r}, but split={split!r} was given too")
    return stem, named


def _reader_of(spec: str) -> tuple[Callable[..., Dataset], Any]:
    path = Path(spec)
    if spec == "digits":
        return load_digits, spec
    if spec and path.is_dir():
        return (_read_tables, path) if _tables_in(path) else (_read_pictures, path)
    if path.is_file() and path.suffix in (".npz", ".parquet"):
        return (_read_archive if path.suffix == ".npz" else _read_tables), path
    if SPEC.match(spec):
        return _read_factory, spec
    raise InputError(
        f"there is no {spec[:200]!r}{did_you_mean(spec[:200], ['digits'])}; expected digits, a .npz or .parquet file, "
        "a folder of data, or package.module:factory"
    )


def load_digits(name: str = "digits", split: str | None = None) -> Dataset:
    """The bundled 1,797 handwritten digits, inputs (1, 8, 8) in [0, 1], so that the demo needs no download.

    Optical Recognition of Handwritten Digits, E. Alpaydin & C. Kaynak, UCI Machine Learning Repository (1998),
    https://doi.org/10.24432/C50P49, licensed CC BY 4.0. Here: the images of its test part (as shipped with scikit-learn),
    gray values 0 … 16 as bytes, shuffled once and split 1,437 / 360, stratified by class.

    Args:
        name: of the dataset.
        split: "train" or "test".

    >>> load_digits(split="test")
    Dataset('digits', 360 inputs of 1×8×8, 10 classes)
    """
    path = Path(__file__).with_name("digits.npz")
    return _read_archive(path, split, name=name, scale=16.0)


def _read_factory(
    spec: str, split: str | None, layout: Layout = "auto", columns: Names | None = None
) -> Dataset:
    """What `package.module:factory` returns, called with `split=` if there is one."""
    data = resolve(spec)
    if callable(data):
        arguments = {} if split is None else {"split": split}
        data = guarded(lambda: data(**arguments), repr(spec))
    elif split is not None:
        raise InputError(f"{spec} is not a factory, so it has no splits: leave the split out")
    return as_dataset(data, spec, layout, columns)


def _choose_split(split: str | None, available: Sequence[str], name: str) -> str:
    if split is None:
        split = "test" if "test" in available or len(available) != 1 else available[0]
    if split not in available:
        raise InputError(f"{name} has no split {split!r}: choose one of {', '.join(available)}")
    return split


# ---- NumPy archives ---------------------------------------------------------------------------------------------------


def _read_archive(
    path: Path,
    split: str | None,
    layout: Layout = "auto",
    max_bytes: int = MAX_BYTES,
    name: str | None = None,
    scale: float | None = None,
) -> Dataset:
    """Arrays `x_SPLIT`, `y_SPLIT` (or `x`, `y`; `image`, `label`) of a .npz; the classes are those of all its splits."""
    name = name or path.name

    def read(key: str) -> Array:
        size = archive.zip.getinfo(f"{key}.npy").file_size  # no more than this is ever unpacked
        if size > max_bytes:
            raise InputError(
                f"{name}: {key} declares {size:,} bytes, the limit is {max_bytes:,} (max_bytes=)"
            )
        return np.atleast_1d(archive[key])  # bytes where the entry is no array

    with (
        explained(f"cannot read {name} as .npz"),
        np.load(open_regular(path), allow_pickle=False) as archive,
    ):
        pairs = _pairs(archive.files)
        if not pairs:
            raise InputError(
                f"{name} has no arrays x_train and y_train, x_test and y_test, x and y, or x alone"
            )
        split = _choose_split(split, list(pairs), name)
        labels = {part: read(y) for part, (_, y) in pairs.items() if y is not None}
        inputs = read(pairs[split][0])
    dataset = Dataset.from_arrays(inputs, labels.get(split), name=name, layout=layout, scale=scale)
    # a single split may lack the last class
    tops = [int(check_labels(y, len(y), name).max()) for y in labels.values()]
    return replace(dataset, num_classes=1 + max(tops)) if tops else dataset


def _pairs(keys: list[str]) -> dict[str, tuple[str, str | None]]:
    """Split → (key of the inputs, key of the labels); arrays without a split's name are the split "all"."""

    inputs, labels = (
        {key.partition("_")[2] or "all": key for key in keys if key.partition("_")[0] in usual}
        for usual in (IMAGES, LABELS)
    )
    return {
        part: (key, labels.get(part))
        for part, key in inputs.items()
        if part in labels or not labels
    }


# ---- pictures ---------------------------------------------------------------------------------------------------------


def decode_picture(
    data: bytes | Path, where: str, size: Size | None = None, channels: int | None = None
) -> Array:
    """One picture as bytes (C, H, W); a rotation noted in EXIF is not applied.

    Args:
        data: its bytes, or its file.
        where: what messages call it.
        size: (height, width) to resize and crop to; None: as the picture is.
        channels: of the first picture: gray pictures join color ones, not the other way round.
    """
    image = optional("PIL.Image", "data")
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    with (
        explained(f"cannot read {where} as {', '.join(FORMATS)}"),
        image.open(file, formats=FORMATS) as picture,
    ):
        width, height = picture.size
        gray = picture.mode in ("1", "L")
        if width * height > MAX_PIXELS:
            raise InputError(
                f"{where} declares {width}×{height} pixels, the limit is {MAX_PIXELS:,}"
            )
        if picture.has_transparency_data or picture.mode[0] in "IF":
            raise InputError(
                f"{where} has the mode {picture.mode}: convert it to 8-bit gray or RGB, without alpha"
            )
        if channels == 1 and not gray:
            raise InputError(
                f"{where} is in color, but the first picture is gray: convert all to one of the two"
            )
        picture = picture.convert("L" if gray and channels != 3 else "RGB")
        if size is not None:
            fit = optional("PIL.ImageOps", "data").fit
            picture = fit(picture, size[::-1], image.Resampling.BILINEAR)
        pixels = np.asarray(picture, dtype=np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1)


def _decode_files(
    files: list[Path], size: Size | None, channels: int | None, rows: Ints
) -> list[Array]:
    return [decode_picture(files[row], str(files[row]), size, channels) for row in rows]


def _source(count: int, read: Callable[..., Any], *options: Any) -> Source:
    """Inputs read by `read(*options, channels, rows)`, whose shape, type and channels are those of the first one."""
    first = read(*options, None, np.zeros(1, np.int64))[0]
    return Source(count, first.shape, first.dtype, functools.partial(read, *options, len(first)))


def _read_pictures(root: Path, split: str | None, size: Size | None = None) -> Dataset:
    """`root/class/…` or `root/split/class/…`, labels in the order of the sorted class names; `root/…` has no labels."""
    files: list[Path] = []
    for pattern in ("*/*", "*/*/*", "*"):
        visible = [
            p
            for p in root.glob(pattern)
            if not re.search(r"(^|/)[._]", p.relative_to(root).as_posix())
        ]
        files = files or sorted(p for p in visible if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise InputError(
            f"{root}: expected .parquet files, or class folders of pictures ({', '.join(SUFFIXES)})"
        )
    depth = len(files[0].relative_to(root).parts)
    if depth == 3:
        splits = sorted({file.parts[-3] for file in files})
        split = _choose_split(split, splits, str(root))
        files = [file for file in files if file.parts[-3] == split]
    elif split is not None:
        _choose_split(split, ["all"], str(root))

    source = _source(len(files), _decode_files, files, size)
    name = root.resolve().name
    if depth == 1:
        return Dataset.from_source(source, None, name=name)
    # the classes of all splits, empty folders included, so that labels agree
    classes = sorted(
        {folder.name for folder in root.glob("*/" * (depth - 1)) if folder.name[0] not in "._"}
    )
    labels = np.array([classes.index(file.parent.name) for file in files])
    return Dataset.from_source(source, labels, name=name, classes=classes)


# ---- Parquet ----------------------------------------------------------------------------------------------------------

_SHARD = re.compile(r"-\d+-of-(\d+).*")


def _tables_in(folder: Path) -> dict[str, list[Path]]:
    """Split → files: `test.parquet` or `test-00000-of-00002.parquet` in the folder or in `data/`, or any in `test/`."""
    parts: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")]):
        nested = path.parent != folder and path.parent.name != "data"
        parts.setdefault(path.parent.name if nested else _SHARD.sub("", path.stem), []).append(path)
    return parts


def _read_tables(
    path: Path,
    split: str | None,
    layout: Layout = "auto",
    size: Size | None = None,
    columns: Names | None = None,
    max_bytes: int = MAX_BYTES,
) -> Dataset:
    """A table or a folder of them: a column of pictures (bytes, or Hugging Face's struct) or lists, and one of labels."""
    parts = _tables_in(path) if path.is_dir() else {path.stem: [path]}
    files = parts[_choose_split(split, list(parts), str(path))]
    name = path.resolve().name
    for count in _SHARD.findall(files[0].stem) if path.is_dir() else ():
        if int(count) != len(files):
            raise InputError(f"{name}: {int(count)} files belong together, there are {len(files)}")
    pa = optional("pyarrow", "data")
    with explained(f"cannot read the files of {name} as one table"):
        whole = pa.concat_tables([_read_table(file, max_bytes) for file in files])
    if whole.num_rows == 0:
        raise InputError(f"{name} holds no data")
    image, label = find_columns(whole.column_names, columns, name)
    labels = None
    if label is not None:
        column = whole.column(label)
        if column.null_count or not pa.types.is_integer(column.type):
            raise InputError(
                f"{name}: {label} is {column.type} with {column.null_count} gaps, expected integer labels"
            )
        labels = column.to_numpy()
    source = _source(whole.num_rows, _cells, whole.column(image), name, layout, size)
    return Dataset.from_source(source, labels, name=name)


def _read_table(path: Path, max_bytes: int) -> Any:
    """A Parquet file; offsets and lengths are verified, since a file may lie about them."""
    parquet = optional("pyarrow.parquet", "data")
    with explained(f"cannot read {path.name} as Parquet"), open_regular(path) as plain:
        file = parquet.ParquetFile(plain)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        declared = sum(max(group.total_byte_size, 8 * group.num_rows) for group in groups)
        if declared > max_bytes:
            raise InputError(
                f"{path.name} declares {declared:,} bytes, the limit is {max_bytes:,} (max_bytes=)"
            )
        table = file.read()
        table.validate(full=True)
    return table


def _cells(
    column: Any, name: str, layout: Layout, size: Size | None, channels: int | None, rows: Ints
) -> Any:
    """The inputs in some cells: pictures are decoded, lists of numbers must have equal lengths."""
    values = [column[int(row)].as_py() for row in rows]
    # Hugging Face's {bytes, path}; the path is never opened
    if all(isinstance(value, dict) for value in values):
        values = [value.get("bytes") for value in values]
    if all(isinstance(value, bytes) for value in values):
        return [
            decode_picture(v, f"{name}: row {row}", size, channels)
            for row, v in zip(rows, values, strict=True)
        ]

    inner = column.type
    while hasattr(inner, "value_type"):
        inner = inner.value_type
    where = f"{name}: rows {rows[0]} … {rows[-1]}"
    wanted = "expected embedded pictures, or lists of numbers of equal length without gaps"
    with explained(f"{where}: {wanted}"):
        array = np.array(values, dtype=inner.to_pandas_dtype())
    return arrange(array, name, layout)
