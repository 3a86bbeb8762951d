"""Hugging Face directories: `config.json` and safetensors, built by the installed transformers package and by nothing else.

`config.json` is data. The model type and the class must be rows of transformers' own tables of image models; code in the folder
(`auto_map`), quantisation, adapters, kernels from the network and pickled weights are refused with the reason. Weights are
counted on torch's meta device before memory is taken, and every name in the files must have its place in the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints.builders import Budget, check_arguments
from equipoise.checkpoints.directory import fill
from equipoise.core.errors import InputError, Refused
from equipoise.core.files import WeightFile, read_json
from equipoise.core.imports import guarded

#: fields of a config that would bring other code or other weights than the files of the folder
_FOREIGN = {
    "auto_map": "code in the folder",
    "custom_pipelines": "code in the folder",
    "quantization_config": "quantised weights",
    "adapter_config": "an adapter",
    "base_model_name_or_path": "a model from elsewhere",
    "backbone": "a model from elsewhere",
    "backbone_kwargs": "a model from elsewhere",
    "use_pretrained_backbone": "weights from elsewhere",
    "architecture": "a model of timm",
    "trust_remote_code": "code in the folder",
}
#: whole numbers up to this may stand in a config whatever the weights: Python counts that far in no time
_COUNTED = 10**6
#: operations that building a model may take per stored tensor, ten times what it does take and more
_CALLS = 50
#: fields that only say how the model was trained or is run, and may name things to load
_IGNORED = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal", "_experts_implementation",
            "experts_implementation", "_experts_implementation_internal", "use_kernels", "_name_or_path", "name_or_path",
            "torch_dtype", "dtype", "architectures",
            "transformers_version", "id2label", "label2id", "task_specific_params", "problem_type")  # fmt: skip


class Pixels(nn.Module):
    """An image model of transformers as a map from pixels to logits, or to its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits where the model has them."""
        out = self.model(pixel_values=x, return_dict=True)
        found = out.logits if "logits" in out else out.last_hidden_state
        return found


def is_hugging_face(config: Any) -> bool:
    """Whether a `config.json` is one of transformers' (or timm's), and not one of ours."""
    return isinstance(config, dict) and "factory" not in config and ("model_type" in config or "architecture" in config)


def load_hugging_face(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[int, ...] | None]:
    """The image model of a directory in evaluation mode, and the shape of one input if the config says it."""
    where = str(folder / "config.json")
    if "architecture" in config:
        named = str(config.get("architecture"))[:60]
        raise Refused(f"{where} names the timm architecture {named!r}: build it with timm and export it. {_EXPORT}")
    plain = _without_foreign(config, where)
    parts = _parts(folder)
    files = [WeightFile(part) for part in parts]
    try:
        shapes = {name: entry.shape for file in files for name, entry in file.entries.items()}
        model = _build(config, plain, where, sum(_count(shape) for shape in shapes.values()), len(shapes))
        state = {name: file.tensor(name) for file in files for name in file.entries}
    finally:
        for file in files:
            file.file.close()
    return Pixels(fill(model, _with_ties(model, state), parts[0])), _shape(config)


def _without_foreign(value: Any, where: str) -> Any:
    """The config without the fields that are ignored, at any depth: models inside of a model have configs of their own."""
    if isinstance(value, list):
        return [_without_foreign(v, where) for v in value]
    if not isinstance(value, dict):
        return value
    for key, what in _FOREIGN.items():
        if value.get(key):
            raise Refused(f"{where} asks for {what} ({key}), which is not loaded: {_INSTEAD}")
    return {k: _without_foreign(v, where) for k, v in value.items() if k not in _IGNORED}


_EXPORT = "torch.export.save(torch.export.export(model.eval(), (x,)), 'model.pt2')"
_INSTEAD = f"build the model with its own package, check it, and export it: {_EXPORT}"


def _build(config: Mapping[str, Any], plain: Mapping[str, Any], where: str, stored: int, tensors: int) -> nn.Module:
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
    made = guarded(lambda: CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(arguments))), f"{where}: this config")
    labels = config.get("id2label")
    if isinstance(labels, dict) and 0 < len(labels) <= _COUNTED:
        made.num_labels = len(labels)
    made._attn_implementation = "eager"
    builder = _builder(config, made, modeling_auto, where)
    with torch.device("meta"), Budget(stored, where, calls=_CALLS * (tensors + 20)):
        sketch = guarded(lambda: builder(made), f"{where}: this model")
    needed = sum(value.numel() for value in sketch.state_dict().values())
    if needed > 1.5 * stored + 10_000_000:
        raise Refused(
            f"{where} describes a model of {needed:,} numbers, but the files hold {stored:,}: it does not fit them"
        )
    found: nn.Module = guarded(lambda: builder(made), f"{where}: this model")
    return found.eval()


def _builder(config: Mapping[str, Any], made: Any, tables: Any, where: str) -> Any:
    """The class that the config names, if it is transformers' own image model for this type."""
    names = config.get("architectures")
    wanted = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    known = []
    for table in (tables.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, tables.MODEL_FOR_IMAGE_MAPPING):
        if type(made) in table:
            found = table[type(made)]
            known += list(found) if isinstance(found, tuple | list) else [found]
    if not known:
        raise Refused(
            f"{where} describes a {str(config['model_type'])[:60]!r}, which does not take images: tokens have no distance to be "
            "Lipschitz in; `equipoise norm FOLDER` bounds its weights one by one"
        )
    chosen = [kind for kind in known if wanted is None or kind.__name__ == wanted]
    if not chosen:
        raise Refused(
            f"{where} names the class {str(wanted)[:60]!r}; known for it: {', '.join(k.__name__ for k in known)}"
        )
    return chosen[0]


def _parts(folder: Path) -> list[Path]:
    """The weight files: those that the index names, or the only one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index).get("weight_map")
        names = sorted(set(listed.values())) if isinstance(listed, dict) and listed else []
        if not names or not all(isinstance(n, str) and n.endswith(".safetensors") and "/" not in n for n in names):
            raise InputError(f"{index} does not name the weight files of its folder")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if not found and any(folder.glob("*.bin")):
        raise Refused(
            f"{folder} holds pickled weights (.bin), which are never opened: save it with safe_serialization=True"
        )
    raise InputError(
        f"{folder} must hold model.safetensors or an index of its parts, it holds {len(found)} weight files"
    )


def _with_ties(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that share memory with another one are stored once: fill the others in."""
    places: dict[int, list[str]] = {}
    for name, value in model.state_dict().items():
        places.setdefault(value.data_ptr() or id(value), []).append(name)
    for names in places.values():
        known = [name for name in names if name in state]
        if known:
            state |= {name: state[known[0]] for name in names if name not in state}
    return state


def _shape(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    size, channels = config.get("image_size"), config.get("num_channels", 3)
    sides = size if isinstance(size, list) else [size, size]
    fine = len(sides) == 2 and all(type(n) is int and 0 < n < 2**16 for n in (*sides, channels))
    return (channels, *sides) if fine else None


def _count(shape: tuple[int, ...]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result
