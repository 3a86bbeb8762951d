"""`run_recipe`: a recipe from start (or from where it stopped) to the finished network and its figures.

One loop for one CPU, many GPUs or many machines, on Hugging Face Accelerate. Every process takes its share of the same global
batch, equally many examples, so the average of the local gradients is the gradient of the whole batch's mean.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equipoise.certificates import write as write_bundle
from equipoise.checkpoints import registered, save_checkpoint, tensor_bytes
from equipoise.core import EquipoiseError, InputError, Refused, explained, fresh_strides, optional
from equipoise.core.files import atomic_write
from equipoise.models import save_certificate
from equipoise.regularizers.noise import frozen_statistics
from equipoise.train.build import Parts, build_data, build_model, build_optimizer, require_fit
from equipoise.train.config import Plain, Recipe, Schedule, from_table, read_recipe
from equipoise.train.journal import Position, State, claim, save_state, write_metrics
from equipoise.train.losses import LOSSES, OBJECTIVES, Batch, Objective, Task, plain
from equipoise.train.metrics import Certified, Totals, certified_bound, evaluate
from equipoise.train.processes import from_first, key, rank, world
from equipoise.train.terms import AUGMENTATIONS, PROJECTIONS, REGULARIZERS, Context

#: inputs in the bundle of a trained network
_BUNDLED = 500


class Diverged(EquipoiseError):
    """The loss or the weights stopped being finite."""


@dataclass(frozen=True)
class Progress:
    """An event for a progress display: after every step, and with `row` after every epoch."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float | None = None
    row: Mapping[str, Any] | None = None


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Result:
    """A run: the network (in evaluation mode, its moving average if there is one), a row per epoch, the last figures.

    `finished` is False if the time was over before all epochs were done.
    """

    recipe: Recipe
    model: nn.Module = field(repr=False)
    history: list[Plain] = field(repr=False)
    final: Plain
    seconds: float
    folder: Path | None = None
    finished: bool = True

    def to_dict(self) -> Plain:
        """Plain data: the last figures and where the network is."""
        folder = None if self.folder is None else str(self.folder)
        times = {"seconds": round(self.seconds, 3), "finished": self.finished}
        return {"name": self.recipe.name, "folder": folder, **times, **self.final}


def run_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    run_dir: str | Path | None = None,
    *,
    overrides: Iterable[str] = (),
    model: nn.Module | None = None,
    minutes: float | None = None,
    cpu: bool = False,
    progress: Report | None = None,
    allow_code: bool = False,
) -> Result:
    """Train what the recipe describes; in `run_dir`, go on from the last checkpoint if there is one.

    Args:
        recipe: a `Recipe`, plain data, a YAML file or the name of a bundled recipe.
        run_dir: the folder of the run; it belongs to one recipe. Without it nothing is written.
        overrides: `"optimizer.lr=0.1"` and the like, on top of the recipe.
        model: train this network in place; by default the recipe's factory makes one.
        minutes: stop after this time, with a checkpoint, and measure and write the network as it is; the same call goes on.
        cpu: do not use a GPU.
        progress: called after every step and every epoch.
        allow_code: let a YAML file name code of your own, which is run.

    Guarantee: equal recipes and data give equal networks on one machine (bit by bit on a CPU, with the same number of
    processes), also if the run was killed at any moment and started again. `bound` and `certified_accuracy` come from the
    proved bound of `equipoise.lipschitz_bound`, or are None with the reason. The caller's random generators are left alone.

    >>> small = ["epochs=1", "data.limit=128", "metrics.bound=false"]
    >>> result = run_recipe("sll-sr-digits", overrides=small)
    >>> result.final["epoch"], 0 <= result.final["accuracy"] <= 1
    (1, True)
    """
    checked = read_recipe(recipe, overrides, allow_code=allow_code)
    folder = None if run_dir is None else Path(run_dir)
    began = time.monotonic()
    deadline = math.inf if minutes is None else began + 60 * minutes
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(checked.seed)
        run = Training(checked, build_data(checked.data), cpu, model, progress)
        for penalty in run.penalties:
            stack.callback(penalty.remove)
        final = _train(run, folder, deadline, stack)
    seconds = time.monotonic() - began
    finished = run.epoch == checked.epochs
    return Result(checked, run.measured.eval(), run.history, final, seconds, folder, finished)


def step_seconds(
    recipe: Recipe, parts: Parts, steps: int = 1, model: nn.Module | None = None
) -> float:
    """Processor seconds of a training step: the smallest of `steps`, after one to warm up.

    Args:
        recipe: what would be trained.
        parts: its data.
        steps: how many are timed.
        model: the network, where it is not the recipe's factory that makes it.
    """
    seconds = []
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        run = Training(recipe, parts, True, model)
        for _ in range(steps + 1):
            run.batch = 0
            began = time.process_time()
            run.take_step(parts.train.order(recipe.seed, 0))
            seconds.append(time.process_time() - began)
    return min(seconds[1:])


def plan_recipe(recipe: Recipe, model: nn.Module | None = None) -> Plain:
    """What training would cost on this machine: the number of steps, and the processor time of one.

    Args:
        recipe: what would be trained.
        model: the network, where it is not the recipe's factory that makes it.

    >>> plan_recipe(read_recipe("sll-sr-digits"))["steps"]
    660
    """
    parts = build_data(recipe.data)
    seconds = step_seconds(recipe, parts, model=model)
    steps = recipe.epochs * (len(parts.train) // min(recipe.batch_size, len(parts.train)))
    hours = steps * seconds / 3600
    return {"name": recipe.name, "steps": steps, "step_seconds": seconds, "hours": hours}


def _on_device(model: nn.Module, cpu: bool) -> tuple[nn.Module, torch.device]:
    """The network as every process calls it, and the device of this one; one process does without accelerate."""
    try:
        accelerator = optional("accelerate", "train").Accelerator(cpu=cpu)
    except InputError:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise
        device = torch.device("cpu")
        if not cpu:
            device = torch.accelerator.current_accelerator() or device
        return model.to(device), device
    return accelerator.prepare_model(model.to(accelerator.device)), accelerator.device


class Training:
    """What a recipe trains, and how far it came; `take_step` is one step of the optimizer."""

    def __init__(
        self,
        recipe: Recipe,
        parts: Parts,
        cpu: bool,
        model: nn.Module | None = None,
        progress: Report | None = None,
    ) -> None:
        self.recipe = recipe
        self.parts = parts
        self.progress = progress
        source = parts.train.source
        self.shape = tuple(getattr(source, "real_shape", source.input_shape))
        self.arguments = recipe.model.arguments
        if model is None:
            model, self.arguments = build_model(recipe.model, source)
        require_fit(model, source, recipe.model.factory)
        self.model = model.train()
        self.task: Task = from_table(LOSSES, recipe.loss, "loss").fit(model, source)
        self.objective: Objective = plain(self.task)
        if recipe.noise is not None:
            self.objective = from_table(OBJECTIVES, recipe.noise, "noise", self.task)
        self.augmentations = [
            from_table(AUGMENTATIONS, choice, "data.augment") for choice in recipe.data.augment
        ]
        self.optimizer = build_optimizer(recipe.optimizer, model)
        self.network, self.device = _on_device(model, cpu)
        size = min(recipe.batch_size, len(parts.train))
        if size % world():
            raise InputError(
                f"batches of {size} examples cannot be shared equally by {world()} processes"
            )
        # the rest of an epoch is left out, and every epoch leaves out another one
        self.batches = len(parts.train) // size
        self.steps = recipe.epochs * self.batches
        self.average: AveragedModel | None = None
        if recipe.ema is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
        # after the average was copied: penalties may put hooks on the network
        example = torch.zeros_like(parts.train.batch(torch.tensor([0]))[0]).to(self.device)
        context = Context(model, self.task, example)
        self.penalties = [
            from_table(REGULARIZERS, choice, "regularizers", context)
            for choice in recipe.regularizers
        ]
        self.projections = [
            from_table(PROJECTIONS, choice, "projections", context) for choice in recipe.projections
        ]

        self.epoch = self.batch = self.step = 0
        self.totals = Totals()
        self.history: list[Plain] = []

    @property
    def measured(self) -> nn.Module:
        """The network that is measured and kept: the moving average where there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def stateful(self) -> Plain:
        """What has a `state_dict` of tensors, by its name in a checkpoint."""
        items = {"model": self.model, "average": self.average}
        terms = [*self.penalties, *self.projections]
        items |= {f"term/{i}": term.keeper for i, term in enumerate(terms)}
        return {name: item for name, item in items.items() if hasattr(item, "state_dict")}

    def take_step(self, order: Tensor) -> Tensor:
        """One step of the optimizer; the loss of this process's share of the batch.

        Args:
            order: the positions of the epoch.
        """
        recipe = self.recipe
        # what the network itself draws (dropout)
        torch.manual_seed(key(recipe.seed, "network", self.step, rank()))
        positions = order[self.batch * recipe.batch_size : (self.batch + 1) * recipe.batch_size]
        share = len(positions) // world()
        first = rank() * share
        x, y = self.parts.train.batch(positions[first : first + share])
        x = x.to(self.device, non_blocking=True)
        y = y.to(self.device, non_blocking=True)
        batch = Batch(self.network, x, y, recipe.seed, self.step, first, self.step / self.steps)
        source = batch.generator("augment")
        for augment in self.augmentations:
            x = augment(x, source)
        x = fresh_strides(x)
        if recipe.precision == "bf16" and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)  # a fifth faster in bfloat16
        batch = replace(batch, x=x)

        for group in self.optimizer.param_groups:
            group["lr"] = recipe.optimizer.lr * factor(recipe.schedule, self.step, self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        losses, output = self._backward(batch)
        if recipe.optimizer.two_steps:
            with frozen_statistics(self.model):
                self.optimizer.step(lambda: self._backward(batch)[0]["loss"].item())
        else:
            self.optimizer.step()
        for project in self.projections:
            project()
        if self.average is not None:
            self.average.update_parameters(self.model)

        for name, value in losses.items():
            self.totals.add(name, value, 1)
        with torch.no_grad():
            for name, (hits, tried) in self.task.counts(output, y, quick=True).items():
                self.totals.add(name, hits, tried)
        self.batch += 1
        self.step += 1
        return losses["loss"]

    def _backward(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        """Gradients of loss and penalties, clipped; both, and the output."""
        recipe = self.recipe
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss, output = self.objective(batch)
        losses = {"loss": loss.detach()}
        penalties = [penalty(batch.x, batch.y).to(loss.dtype) for penalty in self.penalties]
        if penalties:
            penalty = torch.stack(penalties).sum()
            losses["penalty"] = penalty.detach()
            loss = loss + penalty
        loss.backward()
        if recipe.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.optimizer.clip)
        return losses, output

    def report(self, epoch: int, **figures: Any) -> None:
        """Tell the caller's progress display.

        Args:
            epoch: counted from 1.
            figures: the loss of a step, or the row of an epoch.
        """
        if self.progress is not None and rank() == 0:
            self.progress(Progress(self.step, self.steps, epoch, self.recipe.epochs, **figures))


def _train(
    run: Training, folder: Path | None, deadline: float, stack: contextlib.ExitStack
) -> Plain:
    """All epochs that are left, or until the deadline, then the finished network; the last figures."""
    if folder is not None:
        _resume(run, folder, stack)
    certified = None
    while run.epoch < run.recipe.epochs:
        began = time.monotonic()
        if not _run_epoch(run, folder, deadline):
            _save(run, folder)
            row, certified = _measure(run, last=True)
            break
        means = run.totals.means()
        run.totals = Totals()
        run.epoch += 1
        run.batch = 0
        row = {name if name == "penalty" else f"train_{name}": v for name, v in means.items()}
        figures, certified = _measure(run, last=run.epoch == run.recipe.epochs)
        row |= {**figures, "seconds": round(time.monotonic() - began, 3)}
        run.history.append(row)
        _save(run, folder)
        run.report(run.epoch, row=row)
    else:
        row = run.history[-1]
    if folder is not None and rank() == 0:  # one process writes
        _write_network(run, folder, row, certified)
    return row


def _run_epoch(run: Training, folder: Path | None, deadline: float) -> bool:
    """Whether the rest of the epoch was done before the deadline."""
    run.model.train()
    order = run.parts.train.order(run.recipe.seed, run.epoch)
    every = run.recipe.checkpoint_steps
    while run.batch < run.batches:
        if deadline < math.inf and from_first(time.monotonic() > deadline):
            return False
        loss = run.take_step(order)
        if every is not None and run.step % every == 0 and run.batch < run.batches:
            _save(run, folder)
        run.report(run.epoch + 1, loss=loss.item() if run.device.type == "cpu" else None)
    _require_finite(run)
    return True


def _require_finite(run: Training) -> None:
    means = run.totals.means()
    broken = [name for name in ("loss", "penalty") if means.get(name, 0.0) is None]
    broken += [name for name, v in run.model.state_dict().items() if not v.isfinite().all()]
    if broken:
        raise Diverged(
            f"training diverged: {broken[0]!r} is not finite after step {run.step} of {run.steps} "
            f"(epoch {run.epoch + 1}); try a smaller optimizer.lr or optimizer.clip; checkpoints hold finite weights only"
        )


def _measure(run: Training, last: bool) -> tuple[Plain, Certified | None]:
    """The figures of the network as it is, all of them if they are the last; and its bound."""
    metrics = run.recipe.metrics
    model = run.measured
    if world() > 1:  # all processes measure one network: batch statistics are those of the first
        for buffer in model.buffers():
            distributed.broadcast(buffer, 0)
    model.eval()
    lr = run.optimizer.param_groups[0]["lr"]
    row = {"epoch": run.epoch, "step": run.step, "lr": lr}
    certified = None
    due = last or (metrics.bound_every and run.epoch % metrics.bound_every == 0)
    if metrics.bound and due:
        # machines may round differently: one bound for all
        certified = from_first(certified_bound(model, run.shape, metrics.rtol))
        row["bound"] = certified.upper
        if certified.reason:
            row["bound_reason"] = certified.reason
    if run.parts.measured is not None and (last or run.epoch % metrics.every == 0):
        row["split"], part = run.parts.measured
        options = (run.task, run.device, metrics, certified)
        row |= evaluate(model, part, *options)
        if last and row["split"] == "validation" and run.parts.test is not None:
            row["test"] = evaluate(model, run.parts.test, *options)
    return row, certified


def _save(run: Training, folder: Path | None) -> None:
    """Replace the checkpoint by everything that the rest of the run depends on, and the table of figures."""
    _require_finite(run)
    if folder is None:
        return
    state = {name: item.state_dict() for name, item in run.stateful.items()}
    for index, entries in run.optimizer.state_dict()["state"].items():
        state[f"optimizer/{index}"] = entries
    state["totals"] = run.totals.reduced()
    if rank() == 0:
        position = Position(epoch=run.epoch, batch=run.batch, step=run.step, history=run.history)
        save_state(folder, state, position)
        write_metrics(folder, run.history)


def _resume(run: Training, folder: Path, stack: contextlib.ExitStack) -> None:
    """Claim the folder and restore its last state; what stops one process stops all, with the same sentence."""
    outcome: Any = None
    if rank() == 0:
        document = {**run.recipe.to_dict(), "fingerprint": run.parts.fingerprint()}
        try:
            outcome = claim(folder, document, stack)
        except EquipoiseError as error:
            outcome = error
    outcome = from_first(outcome)  # what stops one process stops all
    if isinstance(outcome, EquipoiseError):
        raise outcome
    if outcome is not None:
        failure = "the stored state does not fit the recipe's network"
        with explained(failure, "; remove it and the run starts over"):
            _restore(run, *outcome)
        if rank() == 0:
            write_metrics(folder, run.history)


def _restore(run: Training, state: State, position: Position) -> None:
    run.epoch = position.epoch
    run.batch = position.batch
    run.step = position.step
    run.history = position.history
    if run.step != run.epoch * run.batches + run.batch or len(run.history) != run.epoch:
        raise ValueError(f"it has {len(run.history)} figures at step {run.step}")
    for name, item in run.stateful.items():
        item.load_state_dict(state.get(name, {}))
    groups = run.optimizer.state_dict()["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    moments = {i: state[f"optimizer/{i}"] for i in range(count) if f"optimizer/{i}" in state}
    run.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    # the sums are those of all processes: the first one carries them on
    for name, pair in state.get("totals", {}).items():
        run.totals.pairs[name] = pair.to(run.device) * (rank() == 0)


def _write_network(run: Training, folder: Path, row: Plain, certified: Certified | None) -> None:
    """Write the network where `equipoise audit` finds it, with certificate and model card."""
    recipe = run.recipe
    model = run.measured.eval()
    if not registered(recipe.model.factory):
        # a checkpoint directory never names foreign code; these weights go with `module:factory --weights`
        atomic_write(folder / "model.safetensors", tensor_bytes(model.state_dict()))
        return
    save_checkpoint(folder, model, recipe.model.factory, run.arguments, run.shape)
    upper = row.get("bound")
    if certified is None and upper is not None:  # a finished run, opened again
        certified = certified_bound(model, run.shape, recipe.metrics.rtol)
    split = "test" if "test" in row else row.get("split")
    part = getattr(run.parts, str(split), None)
    measured = row.get("test", row)
    figures = {name: measured.get(name) for name in ("accuracy", "certified_accuracy")}
    figures |= {"split": split, "samples": part and len(part)}
    made = {"recipe": recipe.name, "seed": recipe.seed, "epochs": run.epoch}
    made["data"] = run.parts.fingerprint()
    pairs = None if certified is None else certified.pairs
    save_certificate(folder, recipe.name, upper, pairs, figures, made)
    if part is not None and upper is not None:
        x, y = part.batch(torch.arange(min(len(part), _BUNDLED)))
        # networks with operations that bundles do not have, and taggers of sequences, go without one
        if y.dim() == 1:
            with contextlib.suppress(Refused):
                write_bundle(model, x.cpu(), y, folder / "bundle")


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of the learning rate.

    Args:
        schedule: the recipe's part.
        step: counted from 0.
        steps: of the whole run.

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
        fractions, factors = zip(*schedule.points, strict=True)
        return float(np.interp(step / steps, fractions, factors))
    return 1.0
