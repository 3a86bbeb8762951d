"""Weights of another library by their state dict: torchvision, timm or your own `.pth` file.

Run: python examples/state_dict.py   (torchvision and timm are not needed: any module with a state dict will do)

With the command line: save the state dict as `w.safetensors`, then
`equipoise audit torchvision.models:resnet18 --weights w.safetensors --input-shape 3,224,224`.
"""

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import equipoise as eq


def network() -> nn.Module:
    """Stands for `timm.create_model(name)` or `torchvision.models.resnet18()`."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(network().state_dict(), "w.pth")  # what a library hands out

    weights = torch.load("w.pth", weights_only=True)  # tensors alone: no code is run
    save_file(weights, "w.safetensors")

    model = network()
    model.load_state_dict(load_file("w.safetensors"))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normalize = nn.BatchNorm2d(3, affine=False, eps=0.0)  # inside the model: bounds are in pixels
    normalize.running_mean, normalize.running_var = mean, std.square()
    report = eq.lipschitz_bound(nn.Sequential(normalize, model).eval(), torch.zeros(1, 3, 32, 32))
    print("in pixels:", report.summary()[0])
