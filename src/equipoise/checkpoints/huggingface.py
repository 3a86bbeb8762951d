"""Hugging Face directories: `config.json` and safetensors, read by the installed transformers package and by nothing else.

`config.json` is data. The model type and the class must be rows of transformers' own tables of image models; code in the folder
(`auto_map`), quantisation, adapters and pickled weights are refused with the reason. The model is sketched on torch's meta
device first: it must not be larger than the files, and afterwards every name in the files must have had its place in it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints.builders import check_arguments
from equipoise.core.errors import InputError, Refused, unlogged
from equipoise.core.files import guarded, open_weights, read_json

#: fields of a config that would bring other code or other weights than the files of the folder
_FOREIGN = {
    "auto_map": "code in the folder",
    "custom_pipelines": "code in the folder",
    "trust_remote_code": "code in the folder",
    "quantization_config": "quantised weights",
    "adapter_config": "an adapter",
    "base_model_name_or_path": "a model from elsewhere",
    "backbone": "a model from elsewhere",
    "backbone_kwargs": "a model from elsewhere",
    "use_pretrained_backbone": "weights from elsewhere",
    "architecture": "a model of timm",
}
#: fields that only say how the model was trained or is run, and may name things to load
_IGNORED = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal", "_experts_implementation",
            "experts_implementation", "_experts_implementation_internal", "use_kernels", "_name_or_path", "name_or_path",
            "torch_dtype", "dtype", "architectures",
            "transformers_version", "id2label", "label2id", "task_specific_params", "problem_type")  # fmt: skip
#: numbers that say how often something is built, or how large a table of pairs of places is
_COUNTED, _MOST_LAYERS, _LARGEST_IMAGE = 10**6, 1_000, 512
_EXPORT = "torch.export.save(torch.export.export(model.eval(), (x,)), 'model.pt2')"


class Pixels(nn.Module):
    """An image model of transformers as a map from pixels to logits, or to its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits where the model has them."""
        out = self.model(pixel_values=x, return_dict=True)
        return out.logits if "logits" in out else out.last_hidden_state


def is_hugging_face(config: Any) -> bool:
    """Whether a `config.json` is one of transformers' (or timm's), and not one of ours."""
    return isinstance(config, dict) and "factory" not in config and ("model_type" in config or "architecture" in config)


def load_hugging_face(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[int, ...] | None]:
    """The image model of a directory in evaluation mode, and the shape of one input if the config says it.

    Args:
        folder: the directory, as `save_pretrained` writes it.
        config: its `config.json`, as JSON gives it.
    """
    where = str(folder / "config.json")
    if "architecture" in config:
        name = str(config["architecture"])[:60]
        raise Refused(f"{where} names the timm architecture {name!r}: build it with timm and export it. {_EXPORT}")

    numbers = _count_numbers(folder)
    settings = _read_config(config, where, numbers)
    builder = _model_class(config, settings, where)
    with torch.device("meta"):  # without memory, to count its numbers, those of its tables included
        sketch = guarded(lambda: builder(settings), f"{where}: this model")
    needed = sum(value.numel() for value in (*sketch.parameters(), *sketch.buffers()))
    if needed > 1.5 * numbers + 10_000_000:
        raise Refused(
            f"{where} describes a network of {needed:,} numbers, far larger than its weights file, which holds {numbers:,}"
        )

    size = config.get("image_size")
    shape = [config.get("num_channels", 3), *(size if isinstance(size, list) else [size, size])]
    stated = len(shape) == 3 and all(type(n) is int and 0 < n < 2**16 for n in shape)
    return Pixels(_load(builder, settings, folder, where)), tuple(shape) if stated else None


def _count_numbers(folder: Path) -> int:
    """How many numbers the weight files hold; their headers are checked, and what lies elsewhere is refused."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        document = read_json(index)
        names = document.get("weight_map") if isinstance(document, dict) else None
        parts = set(map(str, names.values())) if isinstance(names, dict) else set()
        if not parts or any("/" in name or not name.endswith(".safetensors") for name in parts):
            raise InputError(f"{index} does not name the weight files of its folder")
    else:
        parts = {path.name for path in folder.glob("*.safetensors")}
        if not parts and any(folder.glob("*.bin")):
            raise Refused(
                f"{folder} holds pickled weights (.bin), which are never opened: save it with safe_serialization=True"
            )
        if parts != {"model.safetensors"}:
            raise InputError(
                f"{folder} must hold model.safetensors or an index of its parts, it holds {sorted(parts)[:3]}"
            )

    total = 0
    for part in sorted(parts):
        with open_weights(folder / part) as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                part_of = file.get_slice(name)
                total += math.prod(part_of.get_shape())
                if part_of.get_dtype().startswith(("I8", "U8", "F8")):
                    raise Refused(f"{part} stores {name[:80]} in 8 bits: quantised weights are not read")
    return total


def _without_ignored(value: Any, where: str) -> Any:
    """The config without the fields that are ignored, at any depth: models inside of a model have configs of their own."""
    if isinstance(value, list):
        return [_without_ignored(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    for key, what in _FOREIGN.items():
        if value.get(key):
            raise Refused(
                f"{where} asks for {what} ({key}), which is not loaded: build the model with its own package, check it, and "
                f"export it: {_EXPORT}"
            )
    return {key: _without_ignored(item, where) for key, item in value.items() if key not in _IGNORED}


def _read_config(config: Mapping[str, Any], where: str, numbers: int) -> Any:
    """The config as transformers reads it."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise InputError(
            f"{where} is a Hugging Face model, which needs transformers: pip install transformers"
        ) from error

    kind = config["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise Refused(f"{where} has the model type {str(kind)[:60]!r}, which the installed transformers does not know")
    arguments = check_arguments(_without_ignored(dict(config), where), where, max(numbers, _COUNTED))
    del arguments["model_type"]

    # what would make Python count for minutes: layers without end, and tables of pairs of places of a large image
    for key in ("depths", "num_hidden_layers", "num_layers", "num_stages", "num_blocks"):
        layers = sum(abs(n) for n in _integers(arguments.get(key)))
        if layers > _MOST_LAYERS:
            raise Refused(f"{where} asks for {layers:,} layers ({key}), at most {_MOST_LAYERS:,} are built")
    if kind == "levit" and max(_integers(arguments.get("image_size")), default=0) > _LARGEST_IMAGE:
        size = arguments["image_size"]
        raise Refused(f"{where} asks for images of {size} pixels, a {kind} takes at most {_LARGEST_IMAGE} here")

    settings = guarded(lambda: CONFIG_MAPPING[kind].from_dict(arguments), f"{where}: this config")
    labels = config.get("id2label")
    if isinstance(labels, dict) and 0 < len(labels) <= _COUNTED:
        settings.num_labels = len(labels)
    settings._attn_implementation = "eager"
    return settings


def _integers(value: Any) -> list[int]:
    return [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]


def _model_class(config: Mapping[str, Any], settings: Any, where: str) -> Any:
    """The class that the config names, if it is transformers' own image model for this type."""
    from transformers.models.auto import modeling_auto as tables

    classes: dict[str, Any] = {}
    for table in (tables.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, tables.MODEL_FOR_IMAGE_MAPPING):
        entry: Any = table.get(type(settings), ())
        for kind in entry if isinstance(entry, tuple | list) else [entry]:
            classes.setdefault(kind.__name__, kind)
    if not classes:
        raise Refused(
            f"{where} describes a {settings.model_type!r}, which does not take images: tokens have no distance to be "
            "Lipschitz in; `equipoise norm FOLDER` bounds its weights one by one"
        )
    names = config.get("architectures")
    wanted = str(names[0]) if isinstance(names, list) and names else next(iter(classes))
    if wanted not in classes:
        raise Refused(f"{where} names the class {wanted[:60]!r}; for this type there are {', '.join(classes)}")
    return classes[wanted]


def _load(builder: Any, settings: Any, folder: Path, where: str) -> nn.Module:
    """The model with the weights of the folder, by transformers' reader, which knows how names were called earlier."""
    load = functools.partial(
        builder.from_pretrained,
        folder,
        config=settings,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # they are reported, and refused below
        output_loading_info=True,
    )
    with unlogged():
        model, info = guarded(load, f"{where}: loading the weights")
    wrong = {"missing": info["missing_keys"], "unknown": info["unexpected_keys"], "misshapen": info["mismatched_keys"]}
    reasons = [f"{len(keys)} {what} (first: {sorted(map(str, keys))[0]})" for what, keys in wrong.items() if keys]
    if reasons:
        raise InputError(f"the weights of {folder} do not fit the model: {' and '.join(reasons)}")
    return model.eval()
