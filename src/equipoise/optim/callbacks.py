"""The guard in the loops of Hugging Face's `Trainer` and of Lightning, and its state in their checkpoints.

In a loop of your own, `guard.attach(optimizer)` is enough, and `guard.scalars()` gives the numbers to log.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from equipoise.core.errors import InputError
from equipoise.core.files import make_folder
from equipoise.optim.guard import SpectralGuard

#: takes the scalars of one step, as a TensorBoard or Weights & Biases writer does
Sink = Callable[[Mapping[str, float], int], None]
FILE = "spectral_guard.safetensors"


def trainer_callback(guard: SpectralGuard, sink: Sink | None = None) -> Any:
    """A `transformers.TrainerCallback`: the guard holds every step of the Trainer's optimizer.

    Brackets, headroom and the product join `trainer.state.log_history` whenever the Trainer logs. `spectral_guard.safetensors`
    is stored beside the model in every checkpoint and is read on resuming.

    Args:
        guard: of the model that is trained.
        sink: also called with the scalars and the step (the Trainer's own reporters run before its callbacks and do not see
            the scalars).
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
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if (folder / FILE).exists():
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


def save_guard(guard: SpectralGuard, folder: Path) -> Path:
    """Store the guard's state in a folder (tensors only, no pickle).

    Args:
        guard: the guard.
        folder: made if missing.
    """
    from safetensors.torch import save_file

    make_folder(folder)
    save_file({key: value.contiguous() for key, value in guard.state_dict().items()}, folder / FILE)
    return folder / FILE


def load_guard(guard: SpectralGuard, folder: Path) -> None:
    """Continue from `save_guard`; everything stored is proved again.

    Args:
        guard: of the same model, whose weights have been loaded.
        folder: that `save_guard` wrote to.
    """
    from safetensors.torch import load_file

    if not (folder / FILE).exists():
        raise InputError(f"{folder} holds no {FILE}")
    guard.load_state_dict(load_file(folder / FILE))
