"""A Hugging Face Trainer whose weights are held at norm 1, proved after every step, logged, saved and resumed.

Lightning works the same way: attach in `on_train_start`, log `guard.scalars()`, and keep `guard.state_dict()`.

Run: python examples/guarded_trainer.py   (needs transformers: pip install 'equipoise[text,train]')
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from equipoise.optim import SpectralGuard


class GuardCallback(TrainerCallback):
    """Attaches at the start, logs with the Trainer, saves its state with every checkpoint and reads it on resuming."""

    def __init__(self, guard):
        self.guard = guard

    def on_train_begin(self, args, state, control, optimizer=None, **_):
        self.guard.detach()
        self.guard.attach(optimizer)
        file = Path(args.output_dir, f"checkpoint-{state.global_step}", "guard.safetensors")
        if file.exists():
            self.guard.load_state_dict(load_file(file))  # every claim in it is proved again

    def on_log(self, args, state, control, **_):
        state.log_history[-1].update(self.guard.scalars())

    def on_save(self, args, state, control, **_):
        file = Path(args.output_dir, f"checkpoint-{state.global_step}", "guard.safetensors")
        save_file({key: value.contiguous() for key, value in self.guard.state_dict().items()}, file)


class Network(nn.Sequential):
    def forward(self, x, labels=None):
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(5 * logits, labels), "logits": logits}


DATA = [{"x": torch.randn(4), "labels": torch.tensor(i % 2)} for i in range(16)]
with tempfile.TemporaryDirectory() as folder:
    for steps in (4, 6):  # the second run resumes the first
        model = Network(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        guard = SpectralGuard(model, radius=1.0)
        settings = TrainingArguments(
            folder, max_steps=steps, learning_rate=0.3, logging_steps=1, save_steps=2, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=DATA, callbacks=[GuardCallback(guard)])
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=steps > 4)
print(f"{guard.steps} steps, norms at most {max(b.upper for b in guard.bounds().values()):.4f}")
