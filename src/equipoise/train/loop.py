"""`run_recipe`: a recipe from start (or from where it stopped) to the finished network and its figures.

One loop for one CPU, many GPUs or many machines, on Hugging Face Accelerate. Every process takes its share of the same global
batch, equally many examples, so the average of the local gradients is the gradient of the whole batch's mean.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equipoise.checkpoints import registered, save_checkpoint
from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line, out_of_memory
from equipoise.core.files import atomic_write
from equipoise.core.modules import fresh_strides
from equipoise.regularizers.flatness import frozen_statistics
from equipoise.train.build import Part, Parts, build_data, build_model, build_optimizer, random_parts
from equipoise.train.config import Choice, Recipe, Schedule, from_table, read_recipe
from equipoise.train.journal import Journal, Position, State
from equipoise.train.losses import LOSSES, OBJECTIVES, Batch, Objective, Task, plain
from equipoise.train.metrics import Certified, Totals, certified_bound, evaluate
from equipoise.train.randomness import in_blocks, key
from equipoise.train.terms import AUGMENTATIONS, PROJECTIONS, REGULARIZERS, Context, Term

#: inputs in the bundle of a trained network
_BUNDLED = 500

#: the loss is looked at every so many steps and before every checkpoint, so that a device need not wait
LOOK = 50


class Diverged(EquipoiseError):
    """The loss or the weights stopped being finite."""


@dataclass(frozen=True)
class Progress:
    """What a progress display is told: after every step, and with `row` after every epoch."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float | None = None
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Result:
    """A finished run: the network (in evaluation mode, its moving average if there is one), a row per epoch, the last figures."""

    recipe: Recipe
    model: nn.Module = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)
    final: dict[str, Any]
    seconds: float
    folder: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the last figures and where the network is."""
        folder = None if self.folder is None else str(self.folder)
        return {"name": self.recipe.name, "folder": folder, "seconds": round(self.seconds, 3), **self.final}


def run_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    run_dir: str | Path | None = None,
    *,
    overrides: Iterable[str] = (),
    cpu: bool = False,
    progress: Callable[[Progress], None] | None = None,
    allow_code: bool = False,
) -> Result:
    """Train what the recipe describes; in `run_dir`, go on from the last checkpoint if there is one.

    Args:
        recipe: a `Recipe`, plain data, a YAML file or the name of a bundled recipe.
        run_dir: the folder that remembers; it belongs to one recipe. Without it nothing is written.
        overrides: `"optimizer.lr=0.1"` and the like, on top of the recipe.
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
    began = time.monotonic()
    with torch.random.fork_rng():
        torch.manual_seed(checked.seed)
        run = None
        try:
            run = Training(checked, build_data(checked.data), _accelerator(cpu), run_dir, progress)
            run.train()
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):
                raise InputError(f"{checked.name} does not fit into memory: {one_line(error)}") from error
            raise
        finally:
            if run is not None:
                run.close()
    folder = Path(run_dir) if run_dir is not None else None
    seconds = time.monotonic() - began
    return Result(checked, run.measured.eval(), run.history, run.history[-1], seconds, folder)


def step_seconds(recipe: Recipe, parts: Parts, sizes: Iterable[int], steps: int = 1) -> list[float]:
    """Processor seconds of a training step for every number of examples: the smallest of `steps`, after one to warm up.

    Args:
        recipe: what would be trained.
        parts: its data.
        sizes: numbers of examples, at most the batch size.
        steps: how many are timed.
    """

    def timed(examples: int) -> float:
        began = time.process_time()
        run.take_step(torch.arange(examples))
        return time.process_time() - began

    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        run = Training(recipe, parts, _accelerator(cpu=True))
        timed(2)
        seconds = [min(timed(size) for _ in range(steps)) for size in sizes]
        run.close()
    return seconds


def plan_recipe(recipe: Recipe) -> dict[str, Any]:
    """What training would cost on this machine: steps, and the time of one, extrapolated from 2 and 6 examples.

    Where the data are not on this machine, `data.examples` of the recipe counts and inputs are random.

    >>> plan_recipe(read_recipe("sll-sr-digits"))["steps"]
    660
    """
    where = "the data"
    try:
        parts = build_data(recipe.data)
    except InputError as error:
        if recipe.data.examples is None:
            raise
        parts = random_parts(recipe)
        where = f"the recipe, since the data are not here ({error})"
    few, more = step_seconds(recipe, parts, (2, 6))
    size = min(recipe.batch_size, len(parts.train))
    seconds = few + max(0.0, more - few) / 4 * (size - 2)
    steps = recipe.epochs * (len(parts.train) // size)
    return {
        "name": recipe.name,
        "examples": len(parts.train),
        "steps": steps,
        "step_seconds": seconds,
        "hours": steps * seconds / 3600,
        "where": where,
        "published": recipe.published,
    }


class _SingleProcess:
    """What `Training` needs of an `Accelerator`, for one process, where accelerate is not installed."""

    process_index = 0
    num_processes = 1

    def __init__(self, cpu: bool) -> None:
        found = None if cpu else torch.accelerator.current_accelerator()
        self.device = found or torch.device("cpu")

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def _accelerator(cpu: bool) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise InputError(
                "training on several processes needs accelerate: pip install 'equipoise[train]'"
            ) from error
        return _SingleProcess(cpu)
    accelerator = Accelerator(cpu=cpu)
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU"):
        raise InputError(f"data parallelism only: accelerate is set to {kind}, expected MULTI_GPU or MULTI_CPU")
    return accelerator


def rows_of(table: Mapping[str, Any], choices: list[Choice], where: str, *first: Any) -> list[Any]:
    """The chosen rows of a table.

    Args:
        table: functions by kind.
        choices: of the recipe.
        where: their key.
        first: positional arguments that do not come from the recipe.
    """
    return [from_table(table, choice, f"{where}.{i}", *first) for i, choice in enumerate(choices)]


class Training:
    """The state of a run and one method per thing that happens to it."""

    def __init__(
        self,
        recipe: Recipe,
        parts: Parts,
        accelerator: Any,
        folder: str | Path | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.recipe = recipe
        self.parts = parts
        self.accelerator = accelerator
        self.progress = progress
        self.device: torch.device = accelerator.device
        self.rank = int(accelerator.process_index)
        self.world = int(accelerator.num_processes)
        self.batches = self._batches()
        self.steps = recipe.epochs * self.batches

        source = parts.train.source
        self.shape = tuple(getattr(source, "real_shape", source.input_shape))
        self.model, self.arguments = build_model(recipe.model, source)
        self.task: Task = from_table(LOSSES, recipe.loss, "loss").fit(self.model, source)
        self.objective: Objective = plain(self.task)
        if recipe.noise is not None:
            self.objective = from_table(OBJECTIVES, recipe.noise, "noise", self.task)
        self.augmentations = rows_of(AUGMENTATIONS, recipe.data.augment, "data.augment")
        self.optimizer = build_optimizer(recipe.optimizer, self.model)
        self.model.to(self.device)
        self.network = accelerator.prepare_model(self.model)
        self.average: AveragedModel | None = None
        if recipe.ema is not None:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
        # after the average was copied: penalties may put hooks on the network
        example = torch.zeros_like(parts.train.batch(torch.tensor([0]))[0]).to(self.device)
        context = Context(self.model, self.task, example)
        self.penalties = rows_of(REGULARIZERS, recipe.regularizers, "regularizers", context)
        self.projections = rows_of(PROJECTIONS, recipe.projections, "projections", context)
        torch.manual_seed(key(recipe.seed, "network", self.rank))

        self.epoch = self.batch = self.step = 0
        self.resumed = -1
        self.totals = Totals(self.device)
        self.history: list[dict[str, Any]] = []
        self.certified: Certified | None = None
        self.remembers = folder is not None
        self.journal = Journal(folder) if folder is not None and self.rank == 0 else None  # one process writes
        self.writer: Any = None

    def _batches(self) -> int:
        """Steps of an epoch; the rest of an epoch is left out, and every epoch leaves out another one."""
        count = len(self.parts.train)
        size = min(self.recipe.batch_size, count)
        if size % self.world:
            raise InputError(
                f"batches of {size} examples (batch_size {self.recipe.batch_size}) cannot be shared equally by "
                f"{self.world} processes"
            )
        return count // size

    @property
    def measured(self) -> nn.Module:
        """The network that is measured and kept: the moving average where there is one."""
        return self.model if self.average is None else self.average.module

    def train(self) -> None:
        """All epochs that are left, then the finished network."""
        self._open()
        while self.epoch < self.recipe.epochs:
            began = time.monotonic()
            self._run_epoch()
            row = {**self._finish_epoch(), **self._measure()}
            row["seconds"] = round(time.monotonic() - began, 3)
            self._remember(row)
        self._finish()

    def _run_epoch(self) -> None:
        self.model.train()
        order = self.parts.train.order(self.recipe.seed, self.epoch)
        while self.batch < self.batches:
            try:
                loss = self.take_step(order)
            except (RuntimeError, KeyError, ValueError, IndexError, TypeError) as error:
                if self.step != self.resumed or out_of_memory(error):
                    raise
                raise self._misfit(error) from error  # the first step after a resume: tensors of the state are wrong
            self.batch += 1
            self.step += 1
            checkpoint = self.recipe.checkpoint_steps
            if checkpoint is not None and self.step % checkpoint == 0 and self.batch < self.batches:
                self._save()
            elif self.batch % LOOK == 0:
                self._look()
            shown = loss.item() if self.device.type == "cpu" else None
            self._tell(Progress(self.step, self.steps, self.epoch + 1, self.recipe.epochs, shown))
        self._look()

    def take_step(self, order: Tensor) -> Tensor:
        """One step of the optimizer; the loss of this process's share of the batch.

        Args:
            order: the positions of the epoch.
        """
        recipe = self.recipe
        places = order[self.batch * recipe.batch_size : (self.batch + 1) * recipe.batch_size]
        each = len(places) // self.world
        first = self.rank * each
        x, y = self.parts.train.batch(places[first : first + each])
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        for number, augment in enumerate(self.augmentations):
            x = in_blocks(augment, x, first, recipe.seed, f"augment{number}", self.step)
        batch = Batch(self.network, fresh_strides(x), y, recipe.seed, self.step, first, self.step / self.steps)

        for group in self.optimizer.param_groups:
            group["lr"] = recipe.optimizer.lr * factor(recipe.schedule, self.step, self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        loss, added, output = self._backward(batch)
        if recipe.optimizer.kind in ("sam", "asam"):
            self.optimizer.first_step(zero_grad=True)  # type: ignore[attr-defined]
            with frozen_statistics(self.model):
                self._backward(batch)
            self._clip()
            self.optimizer.second_step()  # type: ignore[attr-defined]
        else:
            self._clip()
            self.optimizer.step()
        for project in self.projections:
            project()
        if self.average is not None:
            self.average.update_parameters(self.model)

        self.totals.add("loss", loss, 1)
        if added is not None:
            self.totals.add("penalty", added, 1)
        with torch.no_grad():
            for name, (hits, tried) in self.task.counts(output, y, quick=True).items():
                self.totals.add(name, hits, tried)
        return loss

    def _backward(self, batch: Batch) -> tuple[Tensor, Tensor | None, Any]:
        """Gradients of loss and penalties; the loss, the penalties and the output."""
        low = self.recipe.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if low else contextlib.nullcontext():
            loss, output = self.objective(batch)
        terms = [penalty(batch.x, batch.y).to(loss.dtype) for penalty in self.penalties]
        added = sum(terms[1:], terms[0]) if terms else None
        self.accelerator.backward(loss if added is None else loss + added)
        return loss.detach(), None if added is None else added.detach(), output

    def _clip(self) -> None:
        if self.recipe.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip)

    def _reduce(self, values: Tensor) -> Tensor:
        return values if self.world == 1 else self.accelerator.reduce(values, reduction="sum")

    def _shared(self, value: Any) -> Any:
        """The first process's value, on all of them."""
        if self.world == 1:
            return value
        from accelerate.utils import broadcast_object_list

        values = [value]
        broadcast_object_list(values)
        return values[0]

    def _look(self) -> None:
        """Stop where the loss or a weight is not finite."""
        means = self.totals.means(self._reduce)
        broken = [f"the {name}" for name in ("loss", "penalty") if name in means and means[name] is None]
        weights = self.model.state_dict().items()
        broken += [repr(k) for k, v in weights if v.is_floating_point() and not bool(torch.isfinite(v).all())]
        if broken:
            saved = f"; the last good checkpoint is that of step {self.resumed}" if self.resumed >= 0 else ""
            raise Diverged(
                f"training diverged: {broken[0]} is not finite after step {self.step} of {self.steps} "
                f"(epoch {self.epoch + 1}); try a smaller optimizer.lr or optimizer.clip{saved}"
            )

    def _finish_epoch(self) -> dict[str, Any]:
        """The epoch's training figures; the counters start anew."""
        if self.world > 1:  # all processes measure one network: batch statistics are those of the first
            for buffer in self.measured.buffers():
                torch.distributed.broadcast(buffer, 0)
        means = self.totals.means(self._reduce)
        self.totals = Totals(self.device)
        self.epoch += 1
        self.batch = 0
        return {name if name == "penalty" else f"train_{name}": value for name, value in means.items()}

    def _measure(self) -> dict[str, Any]:
        """The figures of the epoch that has just ended."""
        asked = self.recipe.metrics
        last = self.epoch == self.recipe.epochs
        lr = self.recipe.optimizer.lr * factor(self.recipe.schedule, self.step - 1, self.steps)
        row: dict[str, Any] = {"epoch": self.epoch, "step": self.step, "lr": lr}
        certified = None
        if asked.bound and (last or (asked.bound_every and self.epoch % asked.bound_every == 0)):
            # machines may round differently: one bound for all
            certified = self._shared(certified_bound(self.measured.eval(), self.shape, asked.rtol))
            self.certified = certified
            row |= {"bound": certified.upper, "layer_norms": certified.layers}
            if certified.reason:
                row["bound_reason"] = certified.reason
        if self.parts.measured is not None and (last or self.epoch % asked.every == 0):
            row["split"], part = self.parts.measured
            row |= self._evaluate(part, certified)
            if last and row["split"] == "validation" and self.parts.test is not None:
                row["test"] = self._evaluate(self.parts.test, certified)
        return row

    def _evaluate(self, part: Part, certified: Certified | None) -> dict[str, Any]:
        asked = self.recipe.metrics
        sharing = (self.rank, self.world, self._reduce if self.world > 1 else None)
        return evaluate(
            self.measured, part, self.task, self.device, asked.batch_size, asked.epsilons, certified, *sharing
        )

    def _remember(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        if self.epoch == self.recipe.epochs or self.epoch % self.recipe.checkpoint_every == 0:
            self._save()
        if self.journal is not None:
            self.journal.write_metrics(self.history)
        if self.writer is not None:
            log_row(self.writer, row)
        self._tell(Progress(self.step, self.steps, self.epoch, self.recipe.epochs, row=row))

    def _tell(self, event: Progress) -> None:
        if self.progress is not None and self.rank == 0:
            self.progress(event)

    def _terms(self) -> dict[str, Term]:
        """Penalties and projections by the name of their part of a state."""
        penalties = {f"penalty/{i}": term for i, term in enumerate(self.penalties)}
        return penalties | {f"projection/{i}": term for i, term in enumerate(self.projections)}

    def _save(self) -> None:
        """Replace the checkpoint by everything that the rest of the run depends on."""
        self._look()
        if not self.remembers:
            return
        state: State = {"model": self.model.state_dict()}
        if self.average is not None:
            state["average"] = self.average.state_dict()
        state |= {name: term.state() for name, term in self._terms().items()}
        state |= {f"optimizer/{index}": entries for index, entries in self.optimizer.state_dict()["state"].items()}
        state["totals"] = dict(self.totals.reduced(self._reduce))
        state |= self._generators()
        if self.journal is not None:
            position = Position(epoch=self.epoch, batch=self.batch, step=self.step, history=self.history)
            self.journal.save(state, position)
        self.resumed = self.step

    def _generators(self) -> State:
        """The states of torch's global generators on every process."""
        own = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state()
        if self.world == 1:
            return {"random/0": own}
        from accelerate.utils import gather_object

        return {f"random/{rank}": states for rank, states in enumerate(gather_object([own]))}

    def _open(self) -> None:
        """Claim the folder and go back to its last state; what stops one process stops all, with the same sentence."""
        state: Any = None
        if self.journal is not None:
            try:
                state = self.journal.open({"recipe": self.recipe.to_dict(), "data": self.parts.fingerprint()})
            except EquipoiseError as error:
                state = error
        if self.remembers:
            state = self._shared(state)
        if isinstance(state, EquipoiseError):
            raise state
        if state is not None:
            try:
                self._restore(*state)
            except (RuntimeError, KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
                raise self._misfit(error) from error
        if self.journal is not None and self.history:
            self.journal.write_metrics(self.history)
        if self.journal is not None and self.recipe.tensorboard:
            self.writer = summary_writer(self.journal.folder / "tensorboard", self.step)

    def _misfit(self, error: Exception) -> InputError:
        return InputError(
            f"the stored state does not fit the recipe's network: {one_line(error)}; remove it and the run starts over"
        )

    def _restore(self, state: State, position: Position) -> None:
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        for name, term in self._terms().items():
            term.restore(state.get(name, {}))

        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = {i: state[f"optimizer/{i}"] for i in range(len(parameters)) if f"optimizer/{i}" in state}
        for index, entries in moments.items():
            shapes = (parameters[index].shape, torch.Size())
            if any(isinstance(value, Tensor) and value.shape not in shapes for value in entries.values()):
                raise ValueError(f"the optimizer's tensors of parameter {index} have other shapes")
        self.optimizer.load_state_dict({"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]})

        own = state.get(f"random/{self.rank}", {})
        if "cpu" in own:  # not where there are more processes than before
            torch.set_rng_state(own["cpu"])
        if "cuda" in own and self.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"].cpu())
        self.epoch, self.batch, self.step = position.epoch, position.batch, position.step
        if self.step != self.epoch * self.batches + self.batch or self.step > self.steps:
            raise ValueError(f"its step is {self.step} in epoch {self.epoch + 1}")
        if [row.get("epoch") for row in position.history] != list(range(1, self.epoch + 1)):
            raise ValueError("its figures are not those of its epochs")
        self.history = position.history
        for name, pair in state.get("totals", {}).items():
            value, count = pair.tolist()  # the sums are the whole job's: one process carries them on
            self.totals.add(name, value if self.rank == 0 else 0.0, count if self.rank == 0 else 0.0)
        self.resumed = self.step

    def _finish(self) -> None:
        """Write the finished network where `equipoise audit` finds it, with certificate and model card."""
        if self.journal is None:
            return
        folder = self.journal.folder
        model = self.measured.eval()
        last = self.history[-1]
        figures = {name: value for name, value in last.items() if name != "layer_norms"}
        trained = {"training": {"recipe": self.recipe.name, "seed": self.recipe.seed, "figures": figures}}
        if registered(self.recipe.model.factory):
            save_checkpoint(folder, model, self.recipe.model.factory, self.arguments, self.shape, trained)
            self._certify(folder, last)
        else:  # a checkpoint directory never names foreign code; these weights go with `module:factory --weights`
            from safetensors.torch import save

            weights = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
            atomic_write(folder / "model.safetensors", save(weights))

    def _certify(self, folder: Path, last: dict[str, Any]) -> None:
        from equipoise.models import save_certificate

        if self.certified is None and last.get("bound") is not None:  # a finished run, opened again
            self.certified = certified_bound(self.measured, self.shape, self.recipe.metrics.rtol)
        on_test = "test" in last or last.get("split") == "test"
        part = self.parts.test if on_test else self.parts.validation
        measured = last.get("test", last)
        figures = {
            "accuracy": measured.get("accuracy"),
            "certified_accuracy": measured.get("certified_accuracy"),
            "split": "test" if on_test else "validation",
            "samples": None if part is None else len(part),
        }
        made = {name: getattr(self.recipe, name) for name in ("description", "seed", "epochs")}
        made |= {"recipe": self.recipe.name, "data": self.parts.fingerprint()}
        pairs = None if self.certified is None else self.certified.pairs
        save_certificate(folder, self.recipe.name, last.get("bound"), pairs, figures, made)
        if part is not None and last.get("bound") is not None:
            from equipoise.certificates import write

            x, y = part.batch(torch.arange(min(len(part), _BUNDLED)))
            # networks with operations that bundles do not have go without one
            with contextlib.suppress(Refused):
                write(self.measured, x.cpu(), y, folder / "bundle")

    def close(self) -> None:
        """Let go of files, and take the penalties' hooks off the network."""
        for penalty in self.penalties:
            penalty.remove()
        if self.writer is not None:
            self.writer.close()
        if self.journal is not None:
            self.journal.close()


def summary_writer(folder: Path, step: int) -> Any:
    """TensorBoard's writer; what was written after `step` is dropped.

    Args:
        folder: of the events.
        step: of the state that the run goes on from.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("tensorboard: true needs tensorboard: pip install 'equipoise[train]'") from error
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def log_row(writer: Any, row: Mapping[str, Any]) -> None:
    """Write the numbers of a row.

    Args:
        writer: of TensorBoard.
        row: figures of an epoch.
    """
    for name, value in row.items():
        numbers = {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        for tag, number in numbers.items():
            if isinstance(number, int | float) and tag not in ("step", "epoch"):
                writer.add_scalar(tag, number, row["step"])
    writer.flush()


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
    if schedule.kind == "step":
        return schedule.gamma ** sum(step >= round(m * steps) for m in schedule.milestones)
    return 1.0
