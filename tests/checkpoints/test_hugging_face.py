"""Hugging Face directories: image models of transformers are built and audited, everything else is refused with the reason."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.checkpoints import load_model
from equipoise.core import EquipoiseError

transformers = pytest.importorskip("transformers")

CANARY = "canary-was-here"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small ResNet of transformers with statistics that are not the initial ones."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    model.train()(pixel_values=torch.rand(4, 1, 32, 32))
    folder = tmp_path_factory.mktemp("hf") / "resnet"
    model.eval().save_pretrained(folder)
    return folder, model


def test_an_image_model_gives_the_same_logits_and_a_bound(saved):
    folder, model = saved
    loaded = load_model(folder)
    x = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.allclose(loaded.module()(x), model(pixel_values=x).logits, atol=1e-6)
        upper = eq.lipschitz_bound(loaded.model, x[:1], rtol=0.1).upper
        a, b = torch.rand(2, 20, 1, 32, 32)
        stretch = (loaded.module()(a) - loaded.module()(b)).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
    assert float(stretch.max()) <= upper


T = transformers
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
CONVNEXT = {"image_size": 32, "hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "num_labels": 3}
#: families whose weights are stored under other names than the modules have
RENAMED = {
    "convnext": lambda: T.ConvNextForImageClassification(T.ConvNextConfig(**CONVNEXT)),
    "vit": lambda: T.ViTForImageClassification(T.ViTConfig(**SMALL, image_size=8, patch_size=4)),
    "deit": lambda: T.DeiTForImageClassification(T.DeiTConfig(**SMALL, image_size=8, patch_size=4)),
    "swin": lambda: T.SwinForImageClassification(T.SwinConfig(**SWIN, num_labels=3)),
}


@pytest.mark.parametrize("name", [*RENAMED, "half precision"])
def test_models_are_read_as_they_are_saved(saved, name, tmp_path):
    torch.manual_seed(0)
    model = RENAMED[name]().eval() if name in RENAMED else copy.deepcopy(saved[1])
    stored = copy.deepcopy(model).half() if name == "half precision" else model
    stored.save_pretrained(tmp_path / "net")
    loaded = load_model(tmp_path / "net")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    x = torch.rand(2, *(loaded.input_shape or (1, 32, 32)))
    with torch.no_grad():
        tolerance = 1e-2 if name == "half precision" else 1e-6
        assert torch.allclose(loaded.module()(x), model(pixel_values=x).logits, atol=tolerance)


def changed(**entries):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        config |= entries
        (folder / "config.json").write_text(json.dumps(config))

    return change


def code(folder):
    (folder / "modeling.py").write_text(f"import pathlib; pathlib.Path({CANARY!r}).touch()\n")
    changed(auto_map={"AutoModel": "modeling.Net", "AutoConfig": "modeling.Config"})(folder)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def sharded(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}')


TYPES, LARGER = "image classifiers of the types", "far larger than its weights"
KERNELS, WINDOW = ("_attn_implementation", "attn_implementation"), {"window_size": 10**3, "image_size": 2**12}
CASES = {
    "code in the folder": (code, "asks for code in the folder"),
    "quantised": (changed(quantization_config={"quant_method": "bitsandbytes"}), "quantised weights"),
    "a type it does not know": (changed(model_type="no-such-model"), TYPES),
    "a text model": (changed(model_type="bert", architectures=["BertModel"]), TYPES),
    "another class": (changed(architectures=["os.system"]), TYPES),
    "a huge model": (changed(hidden_sizes=[4, 2**15]), LARGER),
    "more layers than can be built": (changed(depths=[1, 10**5]), LARGER),
    "timm inside transformers": (changed(model_type="timm_wrapper", architecture="hf-hub:a/b"), TYPES),
    "other shapes": (changed(hidden_sizes=[4, 16]), "do not fit the model"),
    "kernels from the network": (changed(**dict.fromkeys(KERNELS, "someone/kernel")), None),
    "weights elsewhere": (changed(transformers_weights="../x.safetensors", _name_or_path="someone/else"), None),
    "pickled weights": (pickled, "pickled weights"),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "adapters are not read"),
    "weights in several files": (sharded, "several weight files"),
    "deep": (changed(hidden_sizes=[[[[[[4]]]]]]), "config.json"),
    "more classes than can be named": (changed(num_labels=10**9, id2label=None), "a number within"),
    "layers that Python counts": (changed(depths=[2 * 10**9, 1]), "a number within"),
    "a window as large as a table": (changed(model_type="swin", architectures=None, **WINDOW), LARGER),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_built_is_refused_with_the_reason(saved, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: pytest.fail("asked the network"))
    change, message = CASES[case]
    folder = Path(shutil.copytree(saved[0], tmp_path / "copy"))
    change(folder)
    if message is None:
        assert load_model(folder).module()(torch.rand(1, 1, 32, 32)).shape == (1, 3)
        return
    with pytest.raises(EquipoiseError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / CANARY).exists()
