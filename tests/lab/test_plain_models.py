"""The plain networks of the experiments: shapes, published sizes, trained weights on real images, refusals."""

import numpy as np
import pytest
import torch

from equipoise.checkpoints import load_weights
from equipoise_lab.models import MODELS, build

SMALL = {
    "mlp_mixer": {"in_channels": 1, "input_size": [8, 12], "width": 8, "depth": 2, "token_hidden": 4},
    "vgg16": {"width": 2, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
    "vgg19": {"width": 2, "hidden": 4},
    "resnet18": {"width": 4, "input_size": 16},
    "resnet34": {"width": 4, "input_size": 16, "in_channels": 1},
    "resnet50": {"width": 4, "stem": "imagenet", "input_size": 64},
    "resnet101": {"width": 4, "input_size": 16},
    "resnet152": {"width": 4, "input_size": 16},
    "cifar_resnet": {"depth": 8, "input_size": 16, "width": 4},
    "cifar_resnet20": {"input_size": 8},
    "cifar_resnet56": {"input_size": 8},
    "cifar_resnet110": {"input_size": 8},
    "wide_resnet": {"depth": 10, "widen": 1, "input_size": 8, "width": 4, "dropout": 0.1},
}


#: builders of networks with a constant, tested in test_sandwich.py and test_characters.py
ELSEWHERE = {"sandwich_cnn", "sandwich_mlp", "lipschitz_gpt"}


def test_every_builder_has_a_case():
    assert set(MODELS) == set(SMALL) | ELSEWHERE


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward(name):
    torch.manual_seed(0)
    arguments = {"in_channels": 3, "input_size": 32, **SMALL[name], "num_classes": 7}
    net = build(name, **arguments).train()
    size = arguments["input_size"]
    z = net(torch.rand(2, arguments["in_channels"], *([size, size] if isinstance(size, int) else size)))
    z.sum().backward()
    assert z.shape == (2, 7)
    assert all(p.grad is not None for p in net.parameters())


def test_plain_networks_have_the_published_sizes():
    for name, size in {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}.items():
        assert sum(p.numel() for p in build(name, stem="imagenet", num_classes=1000).parameters()) == size
    assert sum(p.numel() for p in build("vgg16", hidden=4096, num_classes=1000).parameters()) == 138_365_992
    assert sum(p.numel() for p in build("wide_resnet", depth=16, widen=4).parameters()) == 2_748_890
    assert "layer4.0.downsample.1.running_var" in build("resnet18", stem="imagenet").state_dict()


@pytest.mark.parametrize(("depth", "accuracy"), [(20, 0.917), pytest.param(56, 0.934, marks=pytest.mark.slow)])
def test_trained_cifar_networks_on_real_images(data_dir, depth, accuracy):
    net = load_weights(build(f"cifar_resnet{depth}"), data_dir / f"cifar10-resnet{depth}.safetensors")
    archive = np.load(data_dir / "cifar10.npz")
    x = torch.from_numpy(archive["x_test"][:300]).permute(0, 3, 1, 2).float() / 255
    y = torch.from_numpy(archive["y_test"][:300]).long().flatten()
    with torch.no_grad():
        found = float((net(x).argmax(1) == y).float().mean())
    assert abs(found - accuracy) < 0.05
