"""Augmentation against a slow loop over images and pixels."""

import pytest
import torch

from equipoise.core import InputError
from equipoise.data import random_crop, random_flip


def keyed(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(20, 3, 6, 5), (7, 1, 4, 9), (1, 2, 3, 3)])
@pytest.mark.parametrize("padding", [1, 2])
def test_crops_are_cut_out_of_the_padded_image(shape, padding):
    x = torch.randn(shape, generator=keyed(1))
    padded = torch.nn.functional.pad(x, [padding] * 4)
    height, width = shape[-2:]
    for image, whole in zip(random_crop(x, keyed(7), padding), padded, strict=True):
        places = [(i, j) for i in range(2 * padding + 1) for j in range(2 * padding + 1)]
        assert any(torch.equal(image, whole[:, i : i + height, j : j + width]) for i, j in places)


def test_every_place_is_cut_equally_often():
    x = torch.arange(9.0).reshape(1, 1, 3, 3).expand(9000, 1, 3, 3)
    middle = random_crop(x, keyed(), 1)[:, 0, 1, 1].long()
    counts = torch.bincount(middle, minlength=9)
    assert bool(((counts - 1000).abs() < 160).all())  # five standard deviations


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_flip_is_the_slow_loop(p):
    x = torch.randn(3000, 2, 2, 3, generator=keyed(1))
    out = random_flip(x, keyed(3), p)
    flipped = torch.tensor([bool(torch.equal(a, b.flip(-1))) for a, b in zip(out, x, strict=True)])
    kept = torch.tensor([bool(torch.equal(a, b)) for a, b in zip(out, x, strict=True)])
    assert bool((flipped ^ kept).all())
    assert abs(float(flipped.float().mean()) - p) < 0.05


@pytest.mark.parametrize("augment", [random_crop, random_flip])
def test_the_generator_alone_decides_and_every_image_by_its_place(augment):
    x = torch.rand(50, 3, 8, 8, generator=keyed(1))
    torch.manual_seed(0)
    first = augment(x, keyed(5))
    torch.manual_seed(1)
    assert torch.equal(augment(x, keyed(5)), first)
    assert not torch.equal(augment(x, keyed(6)), first)
    other = x.clone()
    other[7] = 0.5
    assert torch.equal(augment(other, keyed(5))[:7], first[:7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8])
def test_numbers_are_moved_not_changed(dtype):
    x = (torch.rand(5, 1, 4, 4, generator=keyed()) * 200).to(dtype)
    out = random_crop(x, keyed(), 1)
    assert out.dtype == dtype
    assert set(out.flatten().tolist()) <= {0, *x.flatten().tolist()}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: random_crop(x, keyed(), -1),
        lambda x: random_crop(x, keyed(), 10**6),
        lambda x: random_crop(x[0], keyed(), 1),
        lambda x: random_flip(x, keyed(), 1.5),
        lambda x: random_flip(x[0], keyed()),
    ],
)
def test_senseless_augmentations_are_refused(call):
    with pytest.raises(InputError):
        call(torch.zeros(2, 3, 4, 4))
