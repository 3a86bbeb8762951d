"""Networks that misbehave in workers only: the process that starts the run sees them behave."""

import os
import signal
from pathlib import Path

import runs_nets


class Guest(runs_nets.Net):
    """Knows whether it is away from the process that made it."""

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
