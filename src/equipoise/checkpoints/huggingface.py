"""Hugging Face directories: `config.json` and safetensors, read by the installed transformers package and by nothing else.

`config.json` is data. Its model type must be a row of the table here, and of its fields only those count that the config class
of that type has; code in the folder (`auto_map`), quantisation and pickled weights are refused with the reason. The model is
sketched on torch's meta device first: it must not be larger than the file, and every name in the file must have its place in it.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints.builders import Budget, check_arguments
from equipoise.core import InputError, Refused, Shape, guarded, optional, unlogged
from equipoise.core.files import open_weights

#: the image classifiers that are built, by their model type, as transformers begins the names of their classes
_FAMILIES = {
    "resnet": "ResNet",
    "vit": "ViT",
    "deit": "DeiT",
    "swin": "Swin",
    "convnext": "ConvNext",
}
#: fields that would bring other code or other weights than the file in the folder
_FOREIGN = ("auto_map", "quantization_config")
#: fields that only say how the model was trained or is run
_IGNORED = {"architectures", "attn_implementation", "dtype", "id2label", "label2id", "model_type", "problem_type",
            "transformers_version"}  # fmt: skip
#: whole numbers in a config are at most this, or how many numbers the weights file holds
_LARGEST = 10**6
_EXPORT = "torch.export.save(torch.export.export(model.eval(), (x,)), 'model.pt2')"


class Pixels(nn.Module):
    """An image classifier of transformers as a map from pixels to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.model(pixel_values=x, return_dict=True).logits


def is_hugging_face(config: Any) -> bool:
    """Whether a `config.json` is one of transformers' (or timm's), and not one of ours."""
    return (
        isinstance(config, dict)
        and "factory" not in config
        and ("model_type" in config or "architecture" in config)
    )


def load_hugging_face(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, Shape | None]:
    """The image classifier of a directory in evaluation mode, and the shape of one input if the config says it.

    Args:
        folder: the directory, as `save_pretrained` writes it.
        config: its `config.json`, as JSON gives it.
    """
    where = str(folder / "config.json")
    transformers = optional("transformers", "text")
    family = _FAMILIES.get(str(config.get("model_type")))
    name = f"{family}ForImageClassification"
    if family is None or (config.get("architectures") or [name]) != [name]:
        raise Refused(
            f"{where} describes a {str(config.get('model_type'))[:60]!r} of class {str(config.get('architectures'))[:60]}; built "
            f"are image classifiers of the types {', '.join(_FAMILIES)}: export it ({_EXPORT}), or bound its weights one by one "
            "with `equipoise norm FOLDER`"
        )
    if any(config.get(key) for key in _FOREIGN):
        raise Refused(
            f"{where} asks for code in the folder or quantised weights ({', '.join(_FOREIGN)}): export it: {_EXPORT}"
        )

    numbers, tensors = _count(folder)
    settings_class = getattr(transformers, f"{family}Config")
    builder = getattr(transformers, name)
    fields = {
        key for key in settings_class().to_dict() if key not in _IGNORED and not key.startswith("_")
    }
    arguments = {key: value for key, value in config.items() if key in fields | {"num_labels"}}
    labels = config.get("id2label")
    if isinstance(labels, dict):
        arguments["num_labels"] = len(labels)
    arguments = check_arguments(arguments, where, max(numbers, _LARGEST))
    settings = guarded(
        lambda: settings_class(**arguments, attn_implementation="eager"), f"{where}: this config"
    )

    # without memory, to count its numbers, tables included
    with torch.device("meta"), Budget(math.inf, where, tensors):
        sketch = guarded(lambda: builder(settings), f"{where}: this model")
    needed = sum(value.numel() for value in (*sketch.parameters(), *sketch.buffers()))
    if needed > 1.5 * numbers + 10_000_000:
        raise Refused(
            f"{where} describes a network of {needed:,} numbers, far larger than its weights file, which holds {numbers:,}"
        )

    size = config.get("image_size")
    shape = [config.get("num_channels", 3), *(size if isinstance(size, list) else [size, size])]
    stated = len(shape) == 3 and all(type(n) is int and 0 < n < 2**16 for n in shape)
    return Pixels(_load(builder, settings, folder)), tuple(shape) if stated else None


def _count(folder: Path) -> tuple[int, int]:
    """How many numbers the weights file holds, and in how many tensors; its header is checked."""
    for pattern in ("*.bin", "*.index.json", "adapter_config.json"):
        if any(folder.glob(pattern)):
            raise Refused(
                f"{folder} holds {pattern}: pickled weights, several weight files and adapters are not read; save the model with "
                "safe_serialization=True and a larger max_shard_size"
            )
    with open_weights(folder / "model.safetensors") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        for name, tensor in tensors.items():
            if tensor.get_dtype().startswith(("I8", "U8", "F8")):
                raise Refused(
                    f"{folder} stores {name[:80]} in 8 bits: quantised weights are not read"
                )
        return sum(math.prod(tensor.get_shape()) for tensor in tensors.values()), len(tensors)


def _load(builder: Any, settings: Any, folder: Path) -> nn.Module:
    """The model with the weights of the folder, by transformers' reader, which knows how names were called earlier."""
    from transformers.utils import logging as transformers_logging

    load = functools.partial(
        builder.from_pretrained,
        folder,
        config=settings,
        local_files_only=True,
        use_safetensors=True,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # they are reported, and refused below
        output_loading_info=True,
    )
    transformers_logging.disable_progress_bar()
    with unlogged():
        model, info = guarded(load, f"{folder}: loading the weights")
    wrong = [
        key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]
    ]
    if wrong:
        raise InputError(
            f"the weights of {folder} do not fit the model: {len(wrong)} names or shapes (first: {wrong[0]})"
        )
    return model
