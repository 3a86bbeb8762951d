"""Small networks and data whose certificates are neither trivial nor slow."""

import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

SHAPE = (1, 4, 4)


def data(count=12, classes=4, seed=0):
    """Inputs (count, 1, 4, 4) in [0, 1] with labels."""
    x = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return x, (x.flatten(1) @ _directions(classes).T).argmax(dim=1)


def _directions(classes):
    w = torch.randn(classes, 16, generator=torch.Generator().manual_seed(1))
    return w - w.mean(dim=1, keepdim=True)


class Net(nn.Module):
    """Linear logits along fixed directions: right on its own data, unsure near the boundaries."""

    def __init__(self, classes=4, scale=4.0):
        super().__init__()
        self.linear = nn.Linear(16, classes)
        self.scale = scale
        with torch.no_grad():
            self.linear.weight.copy_(_directions(classes))
            self.linear.bias.zero_()

    def forward(self, x):
        return self.scale * self.linear(x.flatten(1))


class Guest(Net):
    """Misbehaves in workers only: it knows whether it is away from the process that made it."""

    def __init__(self):
        super().__init__()
        self._home = os.getpid()

    @property
    def away(self):
        return os.getpid() != self._home


class Mortal(Guest):
    """Kills its worker after a few passes, as often as asked for; files in a folder count the deaths."""

    def __init__(self, folder, deaths=1, after=6):
        super().__init__()
        self._folder, self._deaths, self._after, self._passes = Path(folder), deaths, after, 0

    def forward(self, x):
        self._passes += 1
        if self.away and self._passes >= self._after:
            for k in range(self._deaths):
                try:
                    (self._folder / f"death-{k}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Poisoned(Guest):
    """Kills every worker that sees an input with a large first pixel."""

    def forward(self, x):
        if self.away and float(x[:, 0, 0, 0].mean()) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Raising(Guest):
    """Raises in workers."""

    def forward(self, x):
        if self.away:
            raise RuntimeError("no kernel image is available\nsecond line")
        return super().forward(x)


class Sometimes(Net):
    """NaN for inputs whose first pixel lies above a threshold, noise included."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        out = super().forward(x)
        return torch.where(x[:, 0, 0, :1] > self.threshold, torch.full_like(out, torch.nan), out)


def net():
    """The factory of the command-line tests."""
    return Net().eval()


class Items:
    """A map-style dataset that knows nothing of itself."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


class Known(Items):
    """The shape of `equipoise.data.Dataset`."""

    def __init__(self, x, y, ids=None, num_classes=4):
        super().__init__(x, y)
        self.ids = np.arange(len(x)) + 100 if ids is None else ids
        self.labels, self.num_classes, self.name = y.numpy(), num_classes, "known"

    def fingerprint(self):
        return f"sha256:{hash(self.x.numpy().tobytes()):x}"


def table(run):
    """What a run certifies, as text: the same bytes for every repetition."""
    with tempfile.TemporaryDirectory() as folder:
        return run.export(Path(folder) / "table.csv").read_text()
