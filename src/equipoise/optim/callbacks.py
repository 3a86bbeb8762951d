"""The guard inside other people's loops, and its numbers in their logs.

| loop | how |
|---|---|
| your own | `guard.attach(optimizer)`, and `GuardLogger(guard, writer)` after each step where numbers are wanted |
| Hugging Face `Trainer` | `Trainer(…, callbacks=[trainer_callback(guard)])` |
| Lightning | `Trainer(callbacks=[lightning_callback(guard)])` |

None of the packages is needed unless its callback is asked for.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from equipoise.core.errors import InputError
from equipoise.core.files import make_folder
from equipoise.optim.guard import SpectralGuard

#: takes the scalars of one step
Sink = Callable[[Mapping[str, float], int], None]


def tensorboard_sink(folder: str | Path) -> Sink:
    """A sink that writes event files for TensorBoard into `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("logging to TensorBoard needs the package tensorboard: pip install tensorboard") from error
    writer = SummaryWriter(str(folder))

    def sink(scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return sink


def wandb_sink(folder: str | Path, project: str = "equipoise", **options: Any) -> Sink:
    """A sink that logs to Weights & Biases, offline unless `mode="online"` is said: files in `folder`, no network."""
    try:
        import wandb
    except ImportError as error:
        raise InputError("logging to Weights & Biases needs the package wandb: pip install wandb") from error
    run = wandb.init(project=project, dir=str(folder), **{"mode": "offline", **options})

    def sink(scalars: Mapping[str, float], step: int) -> None:
        run.log(dict(scalars), step=step)

    return sink


class GuardLogger:
    """Hands `guard.scalars()` to a sink every `every` steps of the guard.

    >>> from torch import nn
    >>> seen = []
    >>> log = GuardLogger(SpectralGuard(nn.Linear(2, 2)), lambda scalars, step: seen.append(step), every=2)
    >>> for _ in range(4):
    ...     log.guard.step()
    ...     log()
    >>> seen
    [2, 4]
    """

    def __init__(self, guard: SpectralGuard, sink: Sink, every: int = 1) -> None:
        if every < 1:
            raise InputError(f"every must be at least 1, got {every}")
        self.guard, self.sink, self.every = guard, sink, every

    def __call__(self) -> None:
        """After a step of the loop."""
        if self.guard.steps % self.every == 0:
            self.sink(self.guard.scalars(), self.guard.steps)


def trainer_callback(guard: SpectralGuard, sink: Sink | None = None) -> Any:
    """A `transformers.TrainerCallback`: the guard holds every step of the Trainer's optimizer.

    Brackets, headroom and the product join `trainer.state.log_history` whenever the Trainer logs, and go to the `sink` where one
    is given (the Trainer's own reporters run before its callbacks and do not see them). `spectral_guard.safetensors` lies
    beside the model in every checkpoint and is read on resuming.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise InputError("this callback is for the Hugging Face Trainer: pip install transformers") from error

    class SpectralGuardCallback(TrainerCallback):
        """Attaches at the start, logs with the Trainer, saves and resumes."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            guard.detach()
            guard.attach(kwargs["optimizer"])
            folder = _newest(Path(args.output_dir), state.global_step)
            if folder is not None:
                load_guard(guard, folder)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            scalars = guard.scalars()
            if state.log_history:
                state.log_history[-1].update(scalars)
            if sink is not None:
                sink(scalars, state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                save_guard(guard, Path(args.output_dir) / f"checkpoint-{state.global_step}")

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            guard.detach()

    return SpectralGuardCallback()


def lightning_callback(guard: SpectralGuard) -> Any:
    """A Lightning `Callback`: attaches to all optimizers, logs with the module, and keeps the guard's state in checkpoints."""
    package = next((p for p in ("lightning", "pytorch_lightning") if find_spec(p) is not None), None)
    if package is None:
        raise InputError("this callback is for Lightning, which is not installed: pip install lightning")
    base: Any = import_module("lightning.pytorch" if package == "lightning" else package).Callback

    class SpectralGuardCallback(base):
        """Attaches at the start, logs at the end of a batch."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            guard.detach()
            guard.attach(*trainer.optimizers)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.log_dict(guard.scalars())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            guard.detach()

        def state_dict(self) -> dict[str, Any]:
            return guard.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            guard.load_state_dict(state_dict)

    return SpectralGuardCallback()


FILE = "spectral_guard.safetensors"


def save_guard(guard: SpectralGuard, folder: Path) -> Path:
    """Store the guard's state in a folder (tensors only, no pickle)."""
    from safetensors.torch import save_file

    make_folder(folder)
    save_file({key: value.contiguous() for key, value in guard.state_dict().items()}, folder / FILE)
    return folder / FILE


def load_guard(guard: SpectralGuard, folder: Path) -> None:
    """Continue from `save_guard`; everything stored is proved again."""
    from safetensors.torch import load_file

    if not (folder / FILE).exists():
        raise InputError(f"{folder} holds no {FILE}")
    guard.load_state_dict(load_file(folder / FILE))


def _newest(folder: Path, step: int) -> Path | None:
    """The checkpoint a resumed run starts from, where it has a guard's state."""
    path = folder / f"checkpoint-{step}"
    return path if step and (path / FILE).exists() else None
