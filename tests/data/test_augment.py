"""Augmentation against a slow loop over images and pixels."""

import pytest
import torch

from equipoise.core import InputError
from equipoise.data import Augmentation, random_crop, random_flip
from equipoise.data.augment import OPERATIONS, cutout, randaugment


def keyed(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("border", ["zeros", "reflect"])
@pytest.mark.parametrize("shape", [(20, 3, 6, 5), (7, 1, 4, 9), (1, 2, 3, 3)])
@pytest.mark.parametrize("padding", [1, 2])
def test_crops_are_cut_out_of_the_padded_image(border, shape, padding):
    x = torch.randn(shape, generator=keyed(1))
    padded = torch.nn.functional.pad(x, [padding] * 4, mode="constant" if border == "zeros" else "reflect")
    height, width = shape[-2:]
    for image, whole in zip(random_crop(x, padding, keyed(7), border), padded, strict=True):
        places = [(i, j) for i in range(2 * padding + 1) for j in range(2 * padding + 1)]
        assert any(torch.equal(image, whole[:, i : i + height, j : j + width]) for i, j in places)


def test_every_place_is_cut_equally_often():
    x = torch.arange(9.0).reshape(1, 1, 3, 3).expand(9000, 1, 3, 3)
    middle = random_crop(x, 1, keyed())[:, 0, 1, 1].long()
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


def test_the_generator_alone_decides():
    x = torch.rand(16, 3, 8, 8, generator=keyed(1))
    augment = Augmentation(flip=True, padding=2, border="reflect")
    torch.manual_seed(0)
    first = augment(x, keyed(5))
    torch.manual_seed(1)
    assert torch.equal(augment(x, keyed(5)), first)
    assert not torch.equal(augment(x, keyed(6)), first)
    assert torch.equal(Augmentation(flip=False)(x, keyed()), x)
    g = keyed(5)
    assert torch.equal(random_flip(random_crop(x, 2, g, "reflect"), g), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8])
def test_numbers_are_moved_not_changed(dtype):
    x = (torch.rand(5, 1, 4, 4, generator=keyed()) * 200).to(dtype)
    out = random_crop(x, 1, keyed(), "zeros")
    assert out.dtype == dtype
    assert set(out.flatten().tolist()) <= {0, *x.flatten().tolist()}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: random_crop(x, -1, keyed()),
        lambda x: random_crop(x, 4, keyed(), "reflect"),
        lambda x: random_crop(x, 10**6, keyed()),
        lambda x: random_crop(x, 1, keyed(), "wrap"),
        lambda x: random_crop(x[0], 1, keyed()),
        lambda x: random_flip(x, keyed(), 1.5),
        lambda x: random_flip(x[0], keyed()),
    ],
)
def test_senseless_augmentations_are_refused(call):
    with pytest.raises(InputError):
        call(torch.zeros(2, 3, 4, 4))


@pytest.mark.parametrize("size", [1, 4, 5, 20])
def test_cutout_covers_one_square_cut_at_the_border(size):
    x = torch.rand(40, 2, 9, 7, generator=keyed(1)) + 0.1
    covered = cutout(x, size, keyed(2)) == 0
    assert torch.equal(covered[:, 0], covered[:, 1])
    for image in covered[:, 0]:
        rows, columns = image.any(1), image.any(0)
        assert 1 <= int(rows.sum()) <= size
        assert 1 <= int(columns.sum()) <= size
        assert torch.equal(image, rows[:, None] & columns[None])
    assert torch.equal(cutout(x, size, keyed(2), p=0.0), x)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_operations_stay_in_the_image_and_do_little_at_strength_zero(name, channels):
    x = torch.rand(6, channels, 9, 7, generator=keyed(1))
    for strength in (-1.0, 0.0, 1.0):
        y = OPERATIONS[name](x, torch.full((6,), strength))
        assert y.shape == x.shape
        assert -1e-5 <= float(y.min()) <= float(y.max()) <= 1 + 1e-5
        if strength == 0 and name not in ("autocontrast", "equalize", "posterize"):
            assert torch.allclose(y, x, atol=1e-5)


def test_randaugment_treats_every_image_by_its_place():
    x = torch.rand(50, 3, 8, 8, generator=keyed(1))
    y = randaugment(x, keyed(3))
    assert torch.equal(y, randaugment(x, keyed(3)))
    assert not torch.equal(y, randaugment(x, keyed(4)))
    other = x.clone()
    other[7] = 0.5
    assert torch.equal(randaugment(other, keyed(3))[:7], y[:7])
    assert torch.equal(randaugment(x, keyed(3), operations=0), x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: cutout(x, 0, keyed()),
        lambda x: cutout(x, 2, keyed(), p=2.0),
        lambda x: randaugment(x * 2, keyed()),
        lambda x: randaugment(x, keyed(), strength=2.0),
        lambda x: randaugment(x, keyed(), operations=10**9),
        lambda x: randaugment(x[0], keyed()),
    ],
)
def test_bad_arguments_of_cutout_and_randaugment(call):
    with pytest.raises(InputError):
        call(torch.ones(2, 1, 4, 4))
