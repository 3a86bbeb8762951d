"""Hugging Face directories: `config.json` and safetensors, read by the installed transformers package and by nothing else.

`config.json` is data. The model type and the class must be rows of transformers' own tables of image models; code in the folder
(`auto_map`), quantisation, adapters and pickled weights are refused with the reason. The model is sketched on torch's meta
device first: it must not be larger than the files, and afterwards every name in the files must have had its place in it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints.builders import check_arguments
from equipoise.core.errors import InputError, Refused
from equipoise.core.files import open_weights, read_json
from equipoise.core.imports import guarded

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
        named = str(config.get("architecture"))[:60]
        raise Refused(f"{where} names the timm architecture {named!r}: build it with timm and export it. {_EXPORT}")

    stored = _stored_numbers(folder)
    plain = _without_foreign(config, where)
    made, builder = _described(config, plain, where, stored)
    _require_fit(lambda: builder(made), where, stored)
    return Pixels(_filled(builder, made, folder, where)), _shape(config)


def _stored_numbers(folder: Path) -> int:
    """How many numbers the weight files hold; their headers are checked, and what lies elsewhere is refused."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index)
        names = listed.get("weight_map") if isinstance(listed, dict) else None
        parts = sorted(set(map(str, names.values()))) if isinstance(names, dict) else []
        if not parts or any("/" in name or not name.endswith(".safetensors") for name in parts):
            raise InputError(f"{index} does not name the weight files of its folder")
    else:
        parts = [path.name for path in folder.glob("*.safetensors")]
        if not parts and any(folder.glob("*.bin")):
            raise Refused(
                f"{folder} holds pickled weights (.bin), which are never opened: save it with safe_serialization=True"
            )
        if parts != ["model.safetensors"]:
            raise InputError(f"{folder} must hold model.safetensors or an index of its parts, it holds {parts[:3]}")

    total = 0
    for part in parts:
        with open_weights(folder / part) as file:
            total += sum(math.prod(file.shape(name)) for name in file.names)
            small = [
                name for name in file.names if file.dtype(name) in ("I8", "U8") or file.dtype(name).startswith("F8")
            ]
            if small:
                raise Refused(f"{part} stores {small[0][:80]} in 8 bits: quantised weights are not read")
    return total


def _without_foreign(value: Any, where: str) -> Any:
    """The config without the fields that are ignored, at any depth: models inside of a model have configs of their own."""
    if isinstance(value, list):
        return [_without_foreign(v, where) for v in value]
    if not isinstance(value, dict):
        return value
    for key, what in _FOREIGN.items():
        if value.get(key):
            raise Refused(
                f"{where} asks for {what} ({key}), which is not loaded: build the model with its own package, check it, and "
                f"export it: {_EXPORT}"
            )
    return {k: _without_foreign(v, where) for k, v in value.items() if k not in _IGNORED}


def _described(config: Mapping[str, Any], plain: Any, where: str, stored: int) -> tuple[Any, Any]:
    """The config as transformers reads it, and the class of the model."""
    try:
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise InputError(
            f"{where} is a Hugging Face model, which needs transformers: pip install transformers"
        ) from error

    kind = config["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise Refused(f"{where} has the model type {str(kind)[:60]!r}, which the installed transformers does not know")
    arguments = check_arguments({k: v for k, v in plain.items() if k != "model_type"}, where, max(stored, _COUNTED))
    _require_moderate(arguments, kind, where)

    made = guarded(lambda: CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(arguments))), f"{where}: this config")
    labels = config.get("id2label")
    if isinstance(labels, dict) and 0 < len(labels) <= _COUNTED:
        made.num_labels = len(labels)
    made._attn_implementation = "eager"
    return made, _builder(config, made, modeling_auto, where)


def _require_moderate(arguments: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuse what makes Python count for minutes: layers without end, and tables of pairs of places of a large image."""
    for key, value in arguments.items():
        numbers = value if isinstance(value, list) else [value]
        if key in ("depths", "num_hidden_layers", "num_layers", "num_stages", "num_blocks"):
            whole = [n for n in numbers if isinstance(n, int)]
            if sum(map(abs, whole)) > _MOST_LAYERS:
                raise Refused(f"{where} asks for {sum(whole):,} layers ({key}), at most {_MOST_LAYERS:,} are built")
        if key == "image_size" and kind == "levit" and any(isinstance(n, int) and n > _LARGEST_IMAGE for n in numbers):
            raise Refused(f"{where} asks for images of {value} pixels, a {kind} takes at most {_LARGEST_IMAGE} here")


def _require_fit(build: Any, where: str, stored: int) -> None:
    """Build the model without memory and count its numbers, those of its tables included."""
    with torch.device("meta"):
        sketch = guarded(build, f"{where}: this model")
    needed = sum(value.numel() for value in (*sketch.parameters(), *sketch.buffers()))
    if needed > 1.5 * stored + 10_000_000:
        raise Refused(
            f"{where} describes a network of {needed:,} numbers, far larger than its weights file, which holds {stored:,}"
        )


def _builder(config: Mapping[str, Any], made: Any, tables: Any, where: str) -> Any:
    """The class that the config names, if it is transformers' own image model for this type."""
    names = config.get("architectures")
    wanted = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    classes = []
    for table in (tables.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, tables.MODEL_FOR_IMAGE_MAPPING):
        if type(made) in table:
            found = table[type(made)]
            classes += list(found) if isinstance(found, tuple | list) else [found]
    if not classes:
        raise Refused(
            f"{where} describes a {str(config['model_type'])[:60]!r}, which does not take images: tokens have no distance to be "
            "Lipschitz in; `equipoise norm FOLDER` bounds its weights one by one"
        )
    chosen = [kind for kind in classes if wanted is None or kind.__name__ == wanted]
    if not chosen:
        listed = ", ".join(kind.__name__ for kind in classes)
        raise Refused(f"{where} names the class {str(wanted)[:60]!r}; for this type there are {listed}")
    return chosen[0]


def _filled(builder: Any, made: Any, folder: Path, where: str) -> nn.Module:
    """The model with the weights of the folder, by transformers' reader, which knows how names were called earlier."""

    def load() -> Any:
        return builder.from_pretrained(
            folder,
            config=made,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            output_loading_info=True,
        )

    noisy = logging.getLogger("transformers")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL)
    try:
        model, info = guarded(load, f"{where}: loading the weights")
    finally:
        noisy.setLevel(level)

    wrong = {"missing": info["missing_keys"], "unknown": info["unexpected_keys"], "misshapen": info["mismatched_keys"]}
    said = [f"{len(keys)} {what} (first: {sorted(map(str, keys))[0]})" for what, keys in wrong.items() if keys]
    if said:
        raise InputError(f"the weights of {folder} do not fit the model: {' and '.join(said)}")
    return model.eval()


def _shape(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    size, channels = config.get("image_size"), config.get("num_channels", 3)
    sides = size if isinstance(size, list) else [size, size]
    fine = len(sides) == 2 and all(type(n) is int and 0 < n < 2**16 for n in (*sides, channels))
    return (channels, *sides) if fine else None
