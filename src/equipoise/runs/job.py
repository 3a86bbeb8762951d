"""A run before it is started, and what is settled before its first input: device, logits, Lipschitz constant, simplex map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.runs.inputs import Inputs
from equipoise.runs.manifest import Constant, Manifest
from equipoise.runs.models import Batched, Portable
from equipoise.runs.parameters import Parameters, parse_map
from equipoise.runs.rows import Item
from equipoise.runs.tasks import classifier_of
from equipoise.smoothing import SimplexMap, Stream, choose_map
from equipoise.smoothing.grid import is_image, power_of_two
from equipoise.smoothing.noise import NoiseName
from equipoise.smoothing.partitions import Ints


@dataclass(frozen=True, eq=False)
class Job:
    """A run that is described but not started: what `--plan` estimates and `start` executes."""

    model: Portable
    inputs: Inputs
    positions: Ints
    manifest: Manifest
    batch_size: int | None
    device: str

    @property
    def parameters(self) -> Parameters:
        """What was asked for."""
        return self.manifest.parameters

    def default_folder(self) -> Path:
        """`runs/certify-<digest>`: the same command finds its run again."""
        return Path("runs") / f"certify-{self.manifest.digest(asked=True)[:12]}"


def fixed_constant(job: Job) -> Constant | None:
    """The Lipschitz constant of the network: none, the user's claim, or a computed bound."""
    asked = job.parameters.lipschitz
    if asked is None or asked != "auto":
        return None if asked is None else Constant(float(asked), "given")
    from equipoise.lipschitz import lipschitz_bound

    payload = job.model.payload
    if isinstance(payload, bytes):
        upper = lipschitz_bound(job.model.program()).upper
    else:
        upper = lipschitz_bound(payload, first_input(job.inputs, job.positions).x[None].to(job.device)).upper
    if not upper < float("inf"):
        raise Refused("the Lipschitz bound of this network exceeds the floats: leave --lipschitz out")
    return Constant(upper, "computed")


def fixed_map(job: Job, constant: Constant | None) -> SimplexMap | None:
    """The map of a soft run: fixed by the user, chosen per input (None), or the best on a calibration sample.

    Calibration inputs are spread over the whole data, whatever part this run certifies, so that shards agree; their noise
    is a stream of its own, independent of every selection and estimation sample.
    """
    p = job.parameters
    if not p.soft:
        return None
    if p.map != "global":
        return parse_map(p.map)
    classifier = classifier_of(job.model, p, job.batch_size, job.device)
    network = job.manifest.stretched(constant)
    samples = []
    for position in np.unique(np.linspace(0, len(job.inputs) - 1, p.calibration or 1).astype(int)):
        try:
            item = job.inputs.item(int(position))
            x = item.x.to(job.device)
            samples.append(classifier.selection(x[None], p.n0, [item.id], Stream.CALIBRATION)[0])
        except (Refused, OSError):
            continue  # such an input will be a failed row of its own
    if not samples:
        raise InputError(
            "no input could be sampled to calibrate the map: the model returns NaN or the data is unreadable"
        )
    return choose_map(np.stack(samples), p.n, p.sigma, p.alpha, procedure=p.procedure, lipschitz=network)[0]


def first_input(inputs: Inputs, positions: Ints) -> Item:
    """The first input that can be read."""
    problem: Exception | None = None
    for position in positions:
        try:
            return inputs.item(int(position))
        except (EquipoiseError, OSError) as error:
            problem = problem or error
    raise InputError(f"no input of the data can be read: {problem}") from problem


def count_logits(model: Portable, inputs: Inputs, positions: Ints, device: str) -> int:
    """The number of logits, from one forward pass."""
    item, module = first_input(inputs, positions), model.build(device)
    if model.batch is not None:
        module = Batched(module, model.batch, exact=True)
    try:
        with torch.inference_mode():
            out = module(item.x[None].to(device))
    except EquipoiseError:
        raise
    except Exception as error:  # whatever the user's own code, or the guards of an exported program, raise
        raise InputError(f"the model does not take inputs of shape {tuple(item.x.shape)}: {one_line(error)}") from error
    if not isinstance(out, torch.Tensor) or out.ndim != 2 or len(out) != 1:
        shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise InputError(f"the model must return logits (batch, classes), it returned {shape} for one input")
    return int(out.shape[1])


def noise_of(
    asked: NoiseName | None, inputs: Inputs, positions: Ints, sigma: float, lipschitz: Any
) -> tuple[NoiseName, float | None]:
    """The law of the noise and the points per unit of its grid: exact for 8-bit data unless a constant is used.

    Whether the data is 8-bit is judged by a few inputs; should another one lie beside the grid, it will be a failed row.
    """
    if asked == "float":
        return asked, None
    image = all(is_image(x.detach().cpu().double().numpy()) for x in _some(inputs, positions))
    kind: NoiseName = asked or ("grid" if image and lipschitz is None else "float")
    if kind != "grid":
        return kind, None
    return kind, 255.0 if image else power_of_two(sigma)


def _some(inputs: Inputs, positions: Ints, count: int = 8) -> Iterator[torch.Tensor]:
    """A few inputs spread over the selected ones; those that cannot be read are left out."""
    for place in np.unique(np.linspace(0, len(positions) - 1, count).astype(int)):
        try:
            yield inputs.item(int(positions[place])).x
        except (EquipoiseError, OSError):
            continue  # such an input will be a failed row of its own


def usable_device(name: str) -> str:
    """The name of a device, if there is such a device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"the device {name!r} cannot be used here: {one_line(error)}") from error
    return name
