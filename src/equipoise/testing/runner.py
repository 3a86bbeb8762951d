"""Running checks for a given time on a given device, reproducibly; how close brackets came to the truth, how often they fail."""

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import EquipoiseError, InputError

#: the reference is an SVD in float64, which rounds too: a bracket end counts as wrong only beyond this relative distance.
#: LAPACK's error is a modest multiple of n·2⁻⁵³, about 1e-14 for the sizes used here.
REFERENCE_ROUNDING = 1e-12


@dataclass
class Tally:
    """What one check has seen.

    `closest_upper` is the smallest `upper/truth − 1` and `closest_lower` the largest `lower/truth`: the nearer to 0 and 1,
    the harder the test was. `comparisons` counts brackets: one operator may be bounded in several ways (size known and unknown,
    two arithmetics). `refused` counts batches in which the library declined to give a bound, which is not a violation.
    `scripts` are programs that show a violation by themselves.
    """

    name: str
    operators: int = 0
    comparisons: int = 0
    violations: int = 0
    refused: int = 0
    closest_upper: float = math.inf
    closest_lower: float = 0.0
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)

    def record(self, lower: Any, upper: Any, truth: Any, what: str, *, again: bool = False) -> None:
        """Compare brackets with the truth (numbers or tensors of one shape); `what` describes the batch and its seed.

        `lower` may be None, and `upper` infinite, where that end says nothing about this operator. `again`: the same operators
        were recorded before, bounded in another way; they are compared but not counted twice.
        """
        truth, upper = _flat(truth), _flat(upper)
        lower = torch.zeros_like(truth) if lower is None else _flat(lower)
        self.comparisons += truth.numel()
        self.operators += 0 if again else truth.numel()
        too_low = ~(upper >= truth * (1 - REFERENCE_ROUNDING))  # NaN counts as wrong
        too_high = ~(lower <= truth * (1 + REFERENCE_ROUNDING))
        for side, wrong, value in (("upper", too_low, upper), ("lower", too_high, lower)):
            for i in wrong.nonzero().flatten().tolist():
                self.violations += 1
                if len(self.examples) < 5:
                    self.examples.append(f"{what}: {side} {float(value[i])!r}, truth {float(truth[i])!r} (number {i})")
        positive = truth > 0
        if bool(positive.any()):
            above, below = upper[positive] / truth[positive] - 1, lower[positive] / truth[positive]
            self.closest_upper = min(self.closest_upper, float(above.min()))
            self.closest_lower = max(self.closest_lower, float(below.max()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(vars(self))


def _flat(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).flatten()
    return torch.tensor([float(value)], dtype=torch.float64)  # as_tensor would round a Python float to float32


@dataclass(frozen=True)
class Batch:
    """What one call of a check gets: its device, its own generator (on the CPU), and where to count."""

    device: torch.device
    generator: torch.Generator
    tally: Tally
    label: str

    def integer(self, low: int, high: int) -> int:
        """A random whole number, both ends included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choose(self, *options: Any) -> Any:
        """One of the options at random."""
        return options[self.integer(0, len(options) - 1)]


@dataclass(frozen=True)
class Check:
    """One guarantee: `run(batch)` tests some operators and counts them; it is called again until its time is up."""

    name: str
    share: float
    run: Callable[[Batch], None]


@dataclass(frozen=True)
class Report:
    """Results of a run."""

    tallies: tuple[Tally, ...]
    device: str
    seed: int

    @property
    def operators(self) -> int:
        """How many operators were tested."""
        return sum(t.operators for t in self.tallies)

    @property
    def violations(self) -> int:
        """How many bounds were wrong; must be 0."""
        return sum(t.violations for t in self.tallies)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "operators": self.operators,
            "violations": self.violations,
            "device": self.device,
            "seed": self.seed,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "checks": [t.to_dict() for t in self.tallies],
        }


def run(
    checks: tuple[Check, ...],
    seconds: float,
    device: str = "cpu",
    seed: int = 0,
    tick: Callable[[Tally, float], None] = lambda tally, done: None,
) -> Report:
    """Run every check for its share of `seconds`, at least one batch each.

    Batch number b of a check draws from a generator seeded by (seed, name, b), so a violation can be repeated whatever
    the speed of the machine. `tick(tally, done)` is called after each batch with the share of the time spent.

    >>> from equipoise.testing import CHECKS
    >>> run(CHECKS[:1], seconds=0.1).violations
    0
    """
    if not 0 < seconds < float("inf"):
        raise InputError(f"the time must be positive, got {seconds / 60:g} minutes")
    where = require_device(device)
    total = sum(check.share for check in checks)
    tallies = []
    for check in checks:
        tally = Tally(check.name)
        tallies.append(tally)
        begin = time.perf_counter()
        number = 0
        while number == 0 or time.perf_counter() - begin < seconds * check.share / total:
            _run_batch(check, where, seed, number, tally)
            number += 1
            tally.seconds = time.perf_counter() - begin
            spent = sum(t.seconds for t in tallies)
            tick(tally, min(1.0, spent / seconds))
    return Report(tuple(tallies), str(where), seed)


def _run_batch(check: Check, where: torch.device, seed: int, number: int, tally: Tally) -> None:
    own = zlib.crc32(f"{seed}/{check.name}/{number}".encode())
    generator = torch.Generator().manual_seed(own)
    try:
        check.run(Batch(where, generator, tally, f"{check.name}, seed {seed}, batch {number}"))
    except EquipoiseError as error:
        tally.refused += 1
        if len(tally.examples) < 5:
            tally.examples.append(f"refused, {check.name} batch {number}: {error}")


def require_device(name: str) -> torch.device:
    """The device, or one sentence why it cannot be used."""
    kind = name.split(":")[0]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in available:
        raise InputError(f"device must be cpu, cuda or mps, got {name!r}")
    if not available[kind]:
        raise InputError(f"this installation of PyTorch ({torch.__version__}) sees no {kind} device; use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{name!r} is no device") from error
