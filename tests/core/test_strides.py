"""Every path that differentiates a network hands it batches with the strides of a fresh tensor, whatever came in.

torch chooses the kernels of a convolution by strides; those for channels-last write out of bounds in the backward pass of
few channels (torch 2.13, AVX2, one thread). One row is one path from a batch to a network.
"""

import tempfile

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.attacks import pgd, smooth_pgd
from equipoise.core import fresh_strides
from equipoise.core.files import Digest
from equipoise.curvature import LossHessian
from equipoise.data import Dataset, random_crop, random_flip
from equipoise.regularizers import consistency_loss, input_gradient_penalty, noisy_copies
from equipoise.runs import certify
from equipoise.smoothing import SmoothedClassifier
from equipoise.train import read_recipe, run_recipe

LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def grey():
    """Six images of one channel that look channels-last to torch, and of which `is_contiguous()` is true."""
    x = torch.rand(6, 8, 8, 1, generator=torch.Generator().manual_seed(0)).permute(0, 3, 1, 2)
    assert x.is_contiguous()
    assert x.stride() != torch.empty(x.shape).stride()
    return x


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 4, 1, stride=2), nn.Flatten(), nn.Linear(64, 4)).eval()


def dataset(kind):
    pixels = (255 * grey()[:, 0].numpy()).astype(np.uint8)
    return Dataset.from_arrays(pixels[..., None] if kind == "NHWC" else pixels, LABELS.numpy())


def train(**parts):
    recipe = {
        "model": {"factory": "equipoise_lab.models:resnet18", "arguments": {"width": 2}},
        "data": {"path": "digits", "limit": 16, "test_limit": 4, **parts.pop("data", {})},
        "epochs": 1, "batch_size": 16, "metrics": {"bound": False}, **parts,
    }  # fmt: skip
    run_recipe(read_recipe(recipe))


PATHS = {
    "batch of bytes": lambda net: net(dataset("NHWC").batch(range(4))[0]),
    "batch of flat images": lambda net: net(dataset("NHW").batch([0, 5])[0]),
    "flip": lambda net: net(random_flip(grey(), torch.Generator())),
    "crop": lambda net: net(random_crop(grey(), torch.Generator(), 2)),
    "certify": lambda net: certify(net, (grey(), LABELS), run_dir=tempfile.mkdtemp(), sigma=0.5, n0=2, n=2, limit=1),
    "pgd": lambda net: pgd(net, grey(), LABELS, 0.5, steps=2),
    "smooth pgd": lambda net: smooth_pgd(
        SmoothedClassifier(net, 0.5, 4), grey(), LABELS, 0.5, steps=1, draws=2, check_draws=2
    ),
    "input gradient": lambda net: input_gradient_penalty(net, grey(), LABELS).backward(),
    "noisy copies": lambda net: net(noisy_copies(grey(), 0.5, 2)),
    "consistency": lambda net: consistency_loss(net, grey(), LABELS, 0.5).backward(),
    "curvature": lambda net: LossHessian(net, "ce", (grey(), LABELS)).gradient(),
    "training with augmentation": lambda net: train(data={"augment": [{"kind": "flip"}, {"kind": "pad-crop"}]}),
    "training under noise": lambda net: train(noise={"kind": "gaussian", "sigma": 0.1}),
    "smoothing": lambda net: SmoothedClassifier(net, 0.5, 4).counts(grey()[0], 100, input_id=0, stream=1),
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_networks_see_fresh_strides(path):
    seen = []

    def note(module, args):
        if isinstance(module, nn.Conv2d):
            x = args[0]
            seen.append((tuple(x.shape), x.stride(), torch.empty(tuple(x.shape)).stride()))

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        path(network())
    finally:
        handle.remove()
    assert seen
    assert all(stride == fresh for _, stride, fresh in seen), seen


@pytest.mark.parametrize(
    "shape", [(4, 1, 8, 8), (4, 3, 8, 8), (2, 1, 1, 5), (1, 1, 1, 1), (3, 0, 2, 2), (5, 7), (5,), (), (2, 1, 3, 4, 4)]
)
def test_the_same_numbers_with_fresh_strides(shape):
    x = torch.rand(shape, dtype=torch.float64)
    for turned in (x, x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x, x[::2] if x.dim() else x):
        fresh = fresh_strides(turned)
        assert torch.equal(fresh, turned)
        assert fresh.stride() == torch.empty(fresh.shape).stride()
        assert fresh_strides(fresh) is fresh
    x = grey().requires_grad_()
    fresh_strides(x).square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize(
    "x", [torch.ones(()).expand(1, 1), torch.ones(1, 5)[:, ::5], torch.ones(()).expand(3, 2)], ids=lambda x: x.stride()
)
def test_the_digest_of_a_tensor_does_not_depend_on_its_strides(x):
    plain = torch.ones(x.shape)
    assert str(Digest("").add("x", x)) == str(Digest("").add("x", plain)) != str(Digest("").add("x", 2 * plain))
