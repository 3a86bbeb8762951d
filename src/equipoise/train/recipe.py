"""A training run as data: the recipe, checked field by field before anything is built.

Every part is a small model with defaults; unknown keys are refused (`reading.py` turns the refusal into a sentence with the
nearest known key). Parts that choose from a table (`loss`, `regularizers`, `projections`, `augment`, `noise`) take a `kind` and
the arguments of that kind beside it, or just the name of the kind.

Randomness that is a function of (seed, what for, where in the run): nothing of it needs to be stored to repeat it.

The order of the data is keyed by the epoch, augmentation and noise by the step and the example's place in the global batch, so
they do not depend on how many processes share the batch. What the network itself draws (dropout) comes from the global
generators, whose states are part of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from torch import Tensor

#: examples that share one draw of noise; fixed, so that a batch may be cut anywhere
BLOCK = 64


def key(seed: int, purpose: str, *position: int) -> int:
    """A 32-bit generator seed (torch's CPU generator uses no more).

    >>> key(0, "order", 1) == key(0, "order", 1), key(0, "order", 1) == key(0, "order", 2)
    (True, False)
    """
    name = f"{seed}/{purpose}/{'/'.join(map(str, position))}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")


def generator(seed: int, purpose: str, *position: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator with that key."""
    return torch.Generator(device=device).manual_seed(key(seed, purpose, *position))


def data_order(seed: int, epoch: int, count: int) -> Tensor:
    """A permutation of 0 … count−1, the same for this seed and epoch on every process and after every restart."""
    return torch.randperm(count, generator=generator(seed, "order", epoch))


def in_blocks(
    function: Callable[[Tensor, torch.Generator], Tensor],
    x: Tensor,
    first: int,
    seed: int,
    purpose: str,
    *position: int,
) -> Tensor:
    """Apply a random function to the rows of `x`, the places first, first+1, … of the global batch, block by block.

    What happens to row i depends only on (seed, purpose, position, first + i), not on where the batch was cut, provided that
    `function` treats the rows of its batch by their place in it.

    >>> noise = lambda x, generator: x + torch.randn(x.shape, generator=generator)
    >>> whole = in_blocks(noise, torch.zeros(100, 3), 0, 0, "noise", 7)
    >>> torch.equal(whole[20:95], in_blocks(noise, torch.zeros(75, 3), 20, 0, "noise", 7))
    True
    """
    start, end = first // BLOCK * BLOCK, -(-(first + len(x)) // BLOCK) * BLOCK
    before, after = first - start, end - first - len(x)
    if before or after:
        x = torch.cat([x.new_zeros(before, *x.shape[1:]), x, x.new_zeros(after, *x.shape[1:])])
    source = torch.Generator(device=x.device)
    done = []
    for block, rows in enumerate(x.split(BLOCK), start // BLOCK):
        done.append(function(rows, source.manual_seed(key(seed, purpose, *position, block))))
    result = done[0] if len(done) == 1 else torch.cat(done)
    return result[before : len(result) - after]


def random_states() -> dict[str, Tensor]:
    """The states of the global generators of torch, CUDA, NumPy and Python, as byte tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": _bytes([name, np.asarray(keys).tolist(), *rest]),
        "python": _bytes(random.getstate()),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Put the global generators where `random_states` found them."""
    torch.set_rng_state(states["torch"].cpu())
    name, keys, *rest = json.loads(states["numpy"].numpy().tobytes())
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    version, words, gauss = json.loads(states["python"].numpy().tobytes())
    random.setstate((version, tuple(words), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Inside, the global generators are seeded; afterwards they are where the caller left them."""
    before = random_states()
    try:
        seed_all(seed)
        yield
    finally:
        set_random_states(before)


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """A part of a recipe: unknown keys are errors, values cannot change afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(BaseModel):
    """A row of a table by its `kind`; every other key is an argument of that row."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments beside `kind`."""
        return dict(self.model_extra or {})


def _named(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Named = Annotated[Choice, BeforeValidator(_named)]


class Model(Part):
    """`factory(**arguments)` makes the network; `weights` (safetensors) start it."""

    factory: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    arguments: dict[str, Any] = {}
    weights: str | None = None


class Extra(Part):
    """More examples to learn from (generated ones, say): `ratio` of them to every one of the training split, in every epoch."""

    path: str
    train: str = "train"
    ratio: Positive = 1.0


class Data(Part):
    """What is learnt from: `path` is a bundled name (`digits`) or a file or folder, `${EQUIPOISE_DATA}` is filled in.

    `validation` is the part of the training split held out and measured every epoch (0: the test split is measured instead);
    `limit` keeps the first so many examples of a seeded shuffle. `extra` mixes a second source in.
    `examples` is how many there are to learn from, for `--plan` where the data are not at hand.
    """

    path: str
    train: str = "train"
    test: str | None = "test"
    validation: Fraction = 0.0
    limit: AtLeastOne | None = None
    test_limit: AtLeastOne | None = None
    augment: list[Named] = []
    extra: Extra | None = None
    examples: AtLeastOne | None = None


class Optimizer(Part):
    """`sgd`, `adam`, `adamw`, `nadam`, `muon`, or `sam`/`asam` around a `base` with radius `rho`.

    `muon` takes orthogonalised updates for matrices and kernels, and Adam at a tenth of the rate for the rest. `lookahead: k`
    takes the weights half of the way back after every k steps of any of them.
    """

    kind: Literal["sgd", "adam", "adamw", "nadam", "muon", "sam", "asam"] = "sgd"
    lr: Positive = 0.1
    weight_decay: NonNegative = 0.0
    momentum: Fraction = 0.9
    nesterov: bool = False
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    base: Literal["sgd", "adam", "adamw"] = "sgd"
    rho: Positive = 0.05
    decay: Literal["all", "matrices"] = "all"
    clip: Positive | None = None
    lookahead: AtLeastOne | None = None

    @model_validator(mode="after")
    def _momentum(self) -> Optimizer:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if self.lookahead is not None and self.kind in ("sam", "asam"):
            raise ValueError(f"lookahead does not go with {self.kind}, which takes two steps in one")
        return self


class Schedule(Part):
    """The factor of the learning rate over the run; `warmup` and `milestones` are fractions of all steps.

    `one-cycle` rises to 1 at `warmup` (default 0.3) and falls to `final` on a cosine; `piecewise` is linear between
    `points` of (fraction, factor); `step` multiplies by `gamma` at each milestone.
    """

    kind: Literal["constant", "cosine", "linear", "one-cycle", "piecewise", "step"] = "constant"
    warmup: Fraction = 0.0
    final: NonNegative = 0.0
    points: list[tuple[Annotated[float, Field(ge=0, le=1)], NonNegative]] = []
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = []
    gamma: Positive = 0.1

    @model_validator(mode="after")
    def _complete(self) -> Schedule:
        if self.kind == "piecewise" and len(self.points) < 2:
            raise ValueError("a piecewise schedule needs at least two points (fraction, factor)")
        if [p for p, _ in self.points] != sorted({p for p, _ in self.points}):
            raise ValueError("the fractions of a piecewise schedule must increase")
        if self.kind == "step" and not self.milestones:
            raise ValueError("a step schedule needs milestones, fractions of the run like [0.5, 0.75]")
        return self


class Metrics(Part):
    """What is measured: certified accuracy at each ε (ℓ2, inputs in [0, 1]) and the network's bound every `bound_every` epochs.

    The last epoch is always measured in full; `bound_every: 0` means only then. `bound: false` leaves the bound out.
    """

    epsilons: list[NonNegative] = [0.1, 0.2]
    every: AtLeastOne = 1
    bound: bool = True
    bound_every: Count = 0
    rtol: Positive = 1e-3
    batch_size: AtLeastOne = 500


def _jsonable(value: Any) -> Any:
    """Plain data that JSON can hold; `reading.numbers` is the inverse for infinite numbers."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, list | tuple) else value


class Recipe(Part):
    """A whole training run. Two runs with equal recipes and data on one machine give equal networks, bit by bit on a CPU.

    >>> recipe = Recipe(model={"factory": "torch.nn:Flatten"}, data={"path": "digits"}, epochs=1)
    >>> recipe.optimizer.kind, recipe.batch_size
    ('sgd', 128)
    """

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "run"
    description: str = ""
    published: str = ""
    model: Model
    data: Data
    loss: Named = Choice(kind="ce")
    regularizers: list[Named] = []
    projections: list[Named] = []
    noise: Named | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    epochs: AtLeastOne
    batch_size: AtLeastOne = 128
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    metrics: Metrics = Metrics()
    checkpoint_every: AtLeastOne = 1
    checkpoint_steps: AtLeastOne | None = None
    tensorboard: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, defaults included: what a run directory remembers and compares; JSON has no ∞, so it is ".inf" there."""
        plain: dict[str, Any] = _jsonable(self.model_dump())
        return plain
