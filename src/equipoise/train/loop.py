"""The trainer: one loop for one CPU, many GPUs or many machines, on Hugging Face Accelerate.

Every process takes its share of the same global batch. With n of B examples on this process and w processes, the local loss
`(mean loss + penalties)·n·w/B` has gradients whose average over processes is the gradient of the whole batch's mean.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equipoise.core.errors import EquipoiseError, InputError
from equipoise.core.modules import fresh_strides
from equipoise.regularizers.flatness import frozen_statistics
from equipoise.train.build import Parts
from equipoise.train.objective import Objective, Place
from equipoise.train.recipe import Recipe, Schedule, in_blocks, random_states, set_random_states
from equipoise.train.state import State, optimizer_state, prefixed, restore_optimizer
from equipoise.train.task import Task
from equipoise.train.terms import Augment, Guarding, Penalty

#: the losses are looked at every so many steps and before every checkpoint, so that a device need not wait
LOOK = 50


class Diverged(EquipoiseError):
    """The loss or the weights stopped being numbers."""


@dataclass(frozen=True)
class Ingredients:
    """Everything a recipe names, built."""

    recipe: Recipe
    parts: Parts
    model: nn.Module
    task: Task
    objective: Objective
    penalties: list[Penalty]
    projections: list[Callable[[], Any]]
    augment: list[Augment]
    optimizer: torch.optim.Optimizer


class Trainer:
    """The state of a run and one method per thing that happens to it."""

    def __init__(self, ingredients: Ingredients, accelerator: Any) -> None:
        self.made, self.accelerator = ingredients, accelerator
        self.recipe, self.model = ingredients.recipe, ingredients.model
        self.network = accelerator.prepare_model(self.model)
        self.device: torch.device = accelerator.device
        self.rank, self.world = int(accelerator.process_index), int(accelerator.num_processes)
        count, batch = len(ingredients.parts.train), self.recipe.batch_size
        if batch % self.world:
            raise InputError(f"batch_size {batch} cannot be shared equally by {self.world} processes")
        self.batches = max(1, count // batch)  # the rest of an epoch is left out; every epoch leaves out another one
        if count < batch and count % self.world:
            raise InputError(f"{count} training examples cannot be shared equally by {self.world} processes")
        self.steps = self.recipe.epochs * self.batches
        self.average = self._average()
        self.epoch, self.batch, self.step = 0, 0, 0
        self.losses = torch.zeros(self.batches, dtype=torch.float64, device=self.device)
        self.terms = torch.zeros_like(self.losses)
        self.hits: dict[str, tuple[Any, Any]] = {}
        self._looked = 0

    def _average(self) -> AveragedModel | None:
        if self.recipe.ema is None:
            return None
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(self.recipe.ema))

    @property
    def measured_model(self) -> nn.Module:
        """The network that is measured and kept: the moving average where there is one."""
        return self.model if self.average is None else self.average.module

    def share(self, order: Tensor) -> tuple[Tensor, int, int]:
        """This process's part of the current global batch, its first place in it, and the size of the global batch."""
        whole = order[self.batch * self.recipe.batch_size : (self.batch + 1) * self.recipe.batch_size]
        each = len(whole) // self.world
        return whole[self.rank * each : (self.rank + 1) * each], self.rank * each, len(whole)

    def run_epoch(self, on_step: Callable[[Trainer], None] | None = None) -> None:
        """The steps of the current epoch that are still to be done."""
        self.model.train()
        order = self.made.parts.train.order(self.recipe.seed, self.epoch)
        while self.batch < self.batches:
            indices, first, size = self.share(order)
            x, y = self.made.parts.train.batch(indices)
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            place = Place(self.recipe.seed, self.step, first, self.step / self.steps)
            for number, augment in enumerate(self.made.augment):
                x = in_blocks(augment, x, first, place.seed, f"augment{number}", place.step)
            self._step(fresh_strides(x), y, place, len(x) * self.world / size)
            self.batch += 1
            self.step += 1
            if self.batch - self._looked >= LOOK:
                self.look()
            if on_step is not None:
                on_step(self)
        self.look()

    def _step(self, x: Tensor, y: Tensor, place: Place, share: float) -> None:
        recipe, optimizer = self.recipe, self.made.optimizer
        lr = recipe.optimizer.lr * factor(recipe.schedule, self.step, self.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        self._backward(x, y, place, share, record=True)
        if recipe.optimizer.kind in ("sam", "asam"):
            optimizer.first_step(zero_grad=True)  # type: ignore[attr-defined]
            with frozen_statistics(self.model):
                self._backward(x, y, place, share, record=False)
            self._clip()
            optimizer.second_step()  # type: ignore[attr-defined]
        else:
            self._clip()
            optimizer.step()
        for project in self.made.projections:
            project()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def _backward(self, x: Tensor, y: Tensor, place: Place, share: float, record: bool) -> None:
        half = self.recipe.precision == "bf16"
        context = torch.autocast(self.device.type, torch.bfloat16) if half else contextlib.nullcontext()
        with context:
            loss, output = self.made.objective(self.network, x, y, place)
        terms = [penalty(x, y) for penalty in self.made.penalties]
        added = sum(terms[1:], terms[0]).to(loss.dtype) if terms else None
        total = loss if added is None else loss + added
        self.accelerator.backward(total if share == 1 else total * share)
        if record:
            self._record(loss, added, output, y, share)

    @torch.no_grad()
    def _record(self, loss: Tensor, added: Tensor | None, output: Any, y: Tensor, share: float) -> None:
        whole = share == self.world == 1
        self.losses[self.batch] = loss if whole else loss.double() * (share / self.world)
        if added is not None:
            self.terms[self.batch] = added if whole else added.double() * (share / self.world)
        for name, (good, tried) in self.made.task.counts(output, y, quick=True).items():
            before = self.hits.get(name, (0, 0))
            self.hits[name] = (before[0] + good, before[1] + tried)

    def _clip(self) -> None:
        if self.recipe.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip)

    def reduce(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        return values if self.world == 1 else self.accelerator.reduce(values, reduction="sum")

    def _counted(self, name: str) -> Tensor:
        """Hits and tries so far, over all processes."""
        return self.reduce(torch.tensor([float(v) for v in self.hits[name]], dtype=torch.float64, device=self.device))

    def look(self) -> None:
        """Stop at the first step whose loss is no number."""
        start = self._looked
        seen = self.losses[start : self.batch] + self.terms[start : self.batch]
        bad = ~torch.isfinite(self.reduce(seen) if self.world > 1 else seen)
        self._looked = self.batch
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            step = self.step - (self.batch - start) + place
            raise Diverged(
                f"training diverged: the loss is {float(seen[place]):g} at step {step + 1} of {self.steps} "
                f"(epoch {self.epoch + 1}); try a smaller optimizer.lr or optimizer.clip"
            )

    def agree(self) -> None:
        """All processes measure one network: buffers (batch statistics) are those of the first process."""
        if self.world > 1:
            for buffer in self.measured_model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def finish_epoch(self) -> dict[str, Any]:
        """The epoch's training figures; the counters start anew."""
        self.agree()
        losses, terms = self.reduce(self.losses), self.reduce(self.terms)
        row: dict[str, Any] = {"train_loss": losses.mean().item()}
        if self.made.penalties:
            row["penalty"] = terms.mean().item()
        for name in sorted(self.hits):
            good, tried = self._counted(name).tolist()
            row[f"train_{name}"] = good / tried if tried else None
        self.epoch, self.batch, self._looked = self.epoch + 1, 0, 0
        self.losses, self.terms, self.hits = torch.zeros_like(losses), torch.zeros_like(losses), {}
        return row

    def state(self) -> State:
        """Everything the rest of the run depends on; refused where the weights are no numbers any more."""
        model = self.model.state_dict()
        broken = [k for k, v in model.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
        if broken:
            raise Diverged(
                f"training diverged: {broken[0]!r} is not finite after step {self.step} of {self.steps} "
                f"(epoch {self.epoch + 1}); try a smaller optimizer.lr or optimizer.clip"
            )
        moments, plain = optimizer_state(self.made.optimizer)
        tensors = {**prefixed("model", model), **prefixed("optimiser", moments)}
        if self.average is not None:
            tensors |= prefixed("ema", self.average.state_dict())
        for number, penalty in enumerate(self.made.penalties):
            tensors |= prefixed(f"penalty/{number}", penalty.state())
        for number, one in self._guards():
            tensors |= prefixed(f"guard/{number}", one.guard.state_dict())
        for rank, states in enumerate(self._gather(random_states())):
            tensors |= prefixed(f"random/{rank}", states)
        losses, terms = self.reduce(self.losses), self.reduce(self.terms)
        tensors |= {"epoch/losses": losses, "epoch/terms": terms}
        tensors |= {f"epoch/hits/{name}": self._counted(name) for name in sorted(self.hits)}
        return State(tensors, {"epoch": self.epoch, "batch": self.batch, "step": self.step, "optimiser": plain})

    def _guards(self) -> list[tuple[int, Guarding]]:
        return [(number, one) for number, one in enumerate(self.made.projections) if isinstance(one, Guarding)]

    def _gather(self, states: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        if self.world == 1:
            return [states]
        from accelerate.utils import gather_object

        return list(gather_object([states]))

    def restore(self, state: State) -> None:
        """Go back to where `state` was taken."""
        try:
            self.model.load_state_dict(state.part("model"))
            restore_optimizer(self.made.optimizer, state.part("optimiser"), state.position["optimiser"])
            if self.average is not None:
                self.average.load_state_dict(state.part("ema"))
        except (RuntimeError, KeyError, ValueError) as error:
            raise InputError(
                f"the checkpoint does not fit the recipe's network: {str(error).splitlines()[0]}"
            ) from error
        for number, penalty in enumerate(self.made.penalties):
            penalty.restore(state.part(f"penalty/{number}"))
        for number, one in self._guards():
            one.guard.load_state_dict(state.part(f"guard/{number}"))
        own = state.part(f"random/{self.rank}")
        if own:
            set_random_states(own)
        self.epoch, self.batch, self.step = (int(state.position[k]) for k in ("epoch", "batch", "step"))
        self._looked = self.batch
        first = 1.0 if self.rank == 0 else 0.0  # the sums so far are the whole job's: one process carries them on
        self.losses = state.tensors["epoch/losses"].to(self.device) * first
        self.terms = state.tensors["epoch/terms"].to(self.device) * first
        hits = {name: (value * first).tolist() for name, value in state.part("epoch/hits").items()}
        self.hits = {name: (good, tried) for name, (good, tried) in hits.items()}

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.recipe.optimizer.lr * factor(self.recipe.schedule, max(0, self.step - 1), self.steps)

    def last_loss(self) -> float:
        """The loss of the last step on this process (for a progress line)."""
        value = self.losses[self.batch - 1].item() if self.batch else math.nan
        return value * self.world


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of the learning rate at `step` of `steps` (the first step is 0).

    >>> [round(factor(Schedule(kind="cosine", warmup=0.2), s, 10), 3) for s in (0, 1, 2, 5, 9)]
    [0.5, 1.0, 1.0, 0.691, 0.038]
    """
    warm = 0.3 if schedule.kind == "one-cycle" and schedule.warmup == 0 else schedule.warmup
    rising = round(warm * steps)
    if step < rising:
        return (step + 1) / rising
    t = (step - rising) / max(1, steps - rising)
    if schedule.kind in ("cosine", "one-cycle"):
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * t)) / 2
    if schedule.kind == "linear":
        return schedule.final + (1 - schedule.final) * (1 - t)
    if schedule.kind == "piecewise":
        return _between(schedule.points, step / steps)
    if schedule.kind == "step":
        return schedule.gamma ** sum(step >= round(m * steps) for m in schedule.milestones)
    return 1.0


def _between(points: list[tuple[float, float]], t: float) -> float:
    """Linear interpolation, constant outside the points."""
    if t <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in itertools.pairwise(points):
        if t <= b:
            return low + (high - low) * (t - a) / (b - a)
    return points[-1][1]
