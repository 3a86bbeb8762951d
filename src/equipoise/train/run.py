"""`run_recipe`: a recipe from start (or from where it stopped) to the finished network and its figures."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.checkpoints import registered, save_checkpoint
from equipoise.core.errors import EquipoiseError, InputError
from equipoise.core.files import atomic_write
from equipoise.train.build import Parts, build_data, build_model, build_optimizer, from_table, real_shape
from equipoise.train.loop import Diverged, Ingredients, Trainer
from equipoise.train.losses import LOSSES
from equipoise.train.metrics import Certified, certified_bound, evaluate
from equipoise.train.objective import OBJECTIVES, plain
from equipoise.train.reading import read_recipe
from equipoise.train.recipe import Recipe, key, own_randomness, seed_all
from equipoise.train.state import MetricsFile, RunDirectory, State
from equipoise.train.task import fitted
from equipoise.train.terms import AUGMENTATIONS, PROJECTIONS, REGULARIZERS, Context


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
        return {
            "name": self.recipe.name,
            "folder": None if self.folder is None else str(self.folder),
            "seconds": round(self.seconds, 3),
            **self.final,
        }


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

    Guarantees: equal recipes and data give equal networks on one machine (bit by bit on a CPU, with the same number of
    processes), also if the run was killed at any moment and started again. `bound` and `certified_accuracy` come from the proved
    bound of `equipoise.lipschitz_bound`, or are None with the reason. The caller's random generators are left alone. Without
    `run_dir` nothing is written.

    Args:
        recipe: a `Recipe`, plain data, a YAML file or the name of a bundled recipe.
        run_dir: the folder that remembers; it belongs to one recipe.
        overrides: `"optimizer.lr=0.1"` and the like, on top of the recipe.
        cpu: do not use a GPU.
        progress: called after every step and every epoch.
        allow_code: let a YAML file name code of your own, which is run.

    >>> small = ["epochs=1", "data.limit=128", "metrics.bound=false"]
    >>> result = run_recipe("sll-sr-digits", overrides=small)
    >>> result.final["epoch"], 0 <= result.final["accuracy"] <= 1
    (1, True)
    """
    chosen = read_recipe(recipe, overrides, allow_code=allow_code)
    accelerator = _accelerator(cpu)
    began = time.monotonic()
    with own_randomness(chosen.seed):
        parts = build_data(chosen.data)
        ingredients, arguments = prepare(chosen, parts)
        ingredients.model.to(accelerator.device)
        trainer = Trainer(ingredients, accelerator)
        _add_terms(ingredients)  # after the moving average was copied: penalties may hang hooks on the network
        seed_all(key(chosen.seed, "network", trainer.rank))
        run = _Run(trainer, arguments, RunDirectory(run_dir) if run_dir is not None else None, progress)
        try:
            history = run.go()
        finally:
            run.close()
    return Result(
        chosen, trainer.measured_model.eval(), history, history[-1], time.monotonic() - began,
        Path(run_dir) if run_dir is not None else None,
    )  # fmt: skip


def _accelerator(cpu: bool) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedType
    except ImportError as error:
        raise InputError("training needs accelerate: pip install 'equipoise[train]'") from error
    accelerator = Accelerator(cpu=cpu)
    plain_kinds = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU")
    if accelerator.distributed_type not in [
        getattr(DistributedType, k) for k in plain_kinds if hasattr(DistributedType, k)
    ]:
        raise InputError(
            f"data parallelism only: accelerate is set to {accelerator.distributed_type}, expected MULTI_GPU or MULTI_CPU"
        )
    return accelerator


def prepare(recipe: Recipe, parts: Parts) -> tuple[Ingredients, dict[str, Any]]:
    """Build what the recipe names (the terms that follow the network's device come later), and the network's arguments."""
    model, arguments = build_model(recipe.model, parts.train.source)
    task = from_table(LOSSES, recipe.loss, "loss")
    task = task.fitted(parts.train.source) if hasattr(task, "fitted") else task
    task = fitted(task, model)
    objective = plain(task) if recipe.noise is None else from_table(OBJECTIVES, recipe.noise, "noise", task)
    augment = [from_table(AUGMENTATIONS, a, f"data.augment.{i}") for i, a in enumerate(recipe.data.augment)]
    made = Ingredients(recipe, parts, model, task, objective, [], [], augment, build_optimizer(recipe.optimizer, model))
    return made, arguments


def _add_terms(made: Ingredients) -> None:
    example = torch.zeros_like(made.parts.train.batch(torch.tensor([0]))[0])
    parameter = next(made.model.parameters())
    context = Context(made.model, made.task, example.to(parameter.device))
    for i, choice in enumerate(made.recipe.regularizers):
        made.penalties.append(from_table(REGULARIZERS, choice, f"regularizers.{i}", context))
    for i, choice in enumerate(made.recipe.projections):
        made.projections.append(from_table(PROJECTIONS, choice, f"projections.{i}", context))


class _Run:
    """One run in its folder (or in none): open, train epoch by epoch, measure, remember, finish."""

    def __init__(
        self, trainer: Trainer, arguments: dict[str, Any], folder: RunDirectory | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self.trainer, self.arguments, self.progress = trainer, arguments, progress
        self.recipe, self.parts = trainer.recipe, trainer.made.parts
        self.remembers = folder is not None
        self.folder = folder if trainer.rank == 0 else None  # one process reads and writes
        self.metrics = MetricsFile(self.folder.folder / "metrics.jsonl") if self.folder else None
        self.history: list[dict[str, Any]] = []
        self.writer: Any = None
        self.saved = -1
        self.certified: Certified | None = None

    def go(self) -> list[dict[str, Any]]:
        """The history of the whole run, old epochs included."""
        trainer = self.trainer
        self._open()
        while trainer.epoch < self.recipe.epochs:
            began = time.monotonic()
            try:
                trainer.run_epoch(self._on_step)
                row = {**trainer.finish_epoch(), **self._measure(), "seconds": round(time.monotonic() - began, 3)}
                self._remember(row)
            except Diverged as error:
                raise Diverged(f"{error}{self._last_good()}") from None
        if not self.history:  # the metrics of a finished run were removed: measure it again
            self._remember({**self._measure(), "seconds": 0.0})
        self._finish()
        return self.history

    def _open(self) -> None:
        """Claim the folder and go back to its last state; what stops one process stops all, with the same sentence."""
        answer: list[Any] = [None]
        if self.folder is not None and self.metrics is not None:
            try:
                document = {"recipe": self.recipe.to_dict(), "data": self.parts.fingerprint()}
                state = self.folder.open(document)
                answer = [(state, self.metrics.rewind(state.position["epoch"] if state else 0))]
            except EquipoiseError as error:
                answer = [error]
        if self.trainer.world > 1 and self.remembers:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(answer)
        if isinstance(answer[0], EquipoiseError):
            raise answer[0]
        if answer[0] is not None:
            state, self.history = answer[0]
            if isinstance(state, State):
                self.trainer.restore(state)
                self.saved = self.trainer.step
        if self.recipe.tensorboard and self.folder is not None:
            self.writer = _writer(self.folder.folder / "tensorboard", self.trainer.step)

    def _on_step(self, trainer: Trainer) -> None:
        every = self.recipe.checkpoint_steps
        if every is not None and trainer.step % every == 0 and trainer.batch < trainer.batches:
            trainer.look()
            self._save()
        if self.progress is not None and trainer.rank == 0:
            loss = trainer.last_loss() if trainer.device.type == "cpu" else None
            self.progress(Progress(trainer.step, trainer.steps, trainer.epoch + 1, self.recipe.epochs, loss))

    def _measure(self) -> dict[str, Any]:
        """The figures of the epoch that has just ended (`trainer.epoch` counts the finished ones)."""
        trainer, asked = self.trainer, self.recipe.metrics
        done, last = trainer.epoch, trainer.epoch == self.recipe.epochs
        row: dict[str, Any] = {"epoch": done, "step": trainer.step, "lr": trainer.lr}
        found: Certified | None = None
        if asked.bound and (last or (asked.bound_every and done % asked.bound_every == 0)):
            found = self.certified = self._bound()
            row["bound"] = found.upper
            row["layer_norms"] = found.layers
            if found.reason:
                row["bound_reason"] = found.reason
        if self.parts.measured is not None and (last or done % asked.every == 0):
            split, part = self.parts.measured
            row["split"] = split
            row |= self._evaluate(part, found)
            if last and split == "validation" and self.parts.test is not None:
                row["test"] = self._evaluate(self.parts.test, found)
        return row

    def _bound(self) -> Certified:
        model = self.trainer.measured_model
        model.eval()
        found = [certified_bound(model, real_shape(self.parts.train.source), self.recipe.metrics.rtol)]
        if self.trainer.world > 1:  # machines may round differently: one bound for all
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(found)
        return found[0]

    def _evaluate(self, part: Any, found: Certified | None) -> dict[str, Any]:
        trainer, asked = self.trainer, self.recipe.metrics
        return evaluate(
            trainer.measured_model, part, trainer.made.task, trainer.device, asked.batch_size, asked.epsilons,
            found, trainer.rank, trainer.world, trainer.reduce if trainer.world > 1 else None,
        )  # fmt: skip

    def _remember(self, row: dict[str, Any]) -> None:
        trainer = self.trainer
        self.history.append(row)
        last = trainer.epoch == self.recipe.epochs
        due = self.remembers and (last or trainer.epoch % self.recipe.checkpoint_every == 0)
        state = trainer.state() if due else None  # refuses weights that are no numbers before the row is written
        if self.metrics is not None:
            self.metrics.append(row)
        if state is not None:
            self._save(state)
        if self.writer is not None:
            _log(self.writer, row)
        if self.progress is not None and trainer.rank == 0:
            self.progress(Progress(trainer.step, trainer.steps, trainer.epoch, self.recipe.epochs, row=row))

    def _save(self, state: State | None = None) -> None:
        if self.remembers:
            state = state or self.trainer.state()
            if self.folder is not None:
                self.folder.save(state)
                self.saved = self.trainer.step

    def _last_good(self) -> str:
        if not self.remembers or self.saved < 0:
            return ""
        return f"; the last good checkpoint is that of step {self.saved}"

    def _finish(self) -> None:
        """Write the finished network where `equipoise audit` finds it, and a summary."""
        if self.folder is None:
            return
        folder, model = self.folder.folder, self.trainer.measured_model.eval()
        shape = real_shape(self.parts.train.source)
        final = {k: v for k, v in self.history[-1].items() if k != "layer_norms"}
        trained = {"training": {"recipe": self.recipe.name, "seed": self.recipe.seed, "figures": final}}
        factory = self.recipe.model.factory
        if registered(factory):
            save_checkpoint(folder, model, factory, self.arguments, shape, trained)
            self._certify(folder)
        else:  # a checkpoint directory never names foreign code; these weights go with `module:factory --weights`
            from safetensors.torch import save

            state = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
            atomic_write(folder / "model.safetensors", save(state))
        atomic_write(folder / "summary.json", json.dumps(self.history[-1], indent=2) + "\n")

    def _certify(self, folder: Path) -> None:
        """The certificate and the model card of the finished network, as `equipoise.models.load` reads them."""
        from equipoise.models import save_certificate

        last = self.history[-1]
        about = last.get("test", last)
        measured = self.parts.test if "test" in last or last.get("split") == "test" else self.parts.validation
        figures = {k: about.get(k) for k in ("accuracy", "certified_accuracy")}
        figures |= {"split": "test" if measured is self.parts.test else "validation"}
        figures |= {"samples": None if measured is None else len(measured)}
        made = {
            "recipe": self.recipe.name, "description": self.recipe.description, "seed": self.recipe.seed,
            "epochs": self.recipe.epochs, "data": self.parts.fingerprint(),
        }  # fmt: skip
        if self.certified is None and last.get("bound") is not None:  # a finished run, opened again
            self.certified = certified_bound(
                self.trainer.measured_model, real_shape(self.parts.train.source), self.recipe.metrics.rtol
            )
        pairs = None if self.certified is None else self.certified.pairs
        save_certificate(folder, self.recipe.name, last.get("bound"), pairs, figures, made)

    def close(self) -> None:
        """Let go of files, and take the penalties' hooks off the network."""
        for penalty in self.trainer.made.penalties:
            penalty.remove()
        if self.writer is not None:
            self.writer.close()
        if self.folder is not None:
            self.folder.close()


def _writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("tensorboard: true needs tensorboard: pip install 'equipoise[train]'") from error
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def _log(writer: Any, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                if isinstance(number, int | float):
                    writer.add_scalar(f"{name}/{inner}", number, row["step"])
        elif isinstance(value, int | float) and name not in ("step", "epoch"):
            writer.add_scalar(name, value, row["step"])
    writer.flush()
