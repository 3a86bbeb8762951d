"""Augmentation against a slow loop over images and pixels."""

import pytest
import torch

from equipoise.data import random_crop, random_flip


def keyed(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_crops_are_cut_out_of_the_padded_image_at_every_place_equally_often(padding):
    places = (2 * padding + 1) ** 2
    x = torch.arange(15.0).reshape(1, 1, 5, 3).expand(400 * places, 1, 5, 3)
    whole = torch.nn.functional.pad(x[:1], [padding] * 4)
    windows = whole.unfold(2, 5, 1).unfold(3, 3, 1).reshape(places, 1, 5, 3)
    same = (random_crop(x, keyed(), padding)[:, None] == windows[None]).flatten(2).all(2)
    assert bool((same.sum(1) == 1).all())
    assert bool(((same.sum(0) - 400).abs() < 100).all())  # five standard deviations


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
