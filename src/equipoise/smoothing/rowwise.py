"""Networks that can be smoothed: whether each row of a batch is answered by itself, and denoisers in front of classifiers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core import InputError
from equipoise.core.errors import Refused


class Rowwise:
    """One more call of the model beside its first: same generator, rows of the second half, and one must get the same answer.

    Batch norm without running statistics, a mean over the batch or a forward pass that changes buffers make all draws of a
    batch agree, and a binomial bound of such votes means nothing. A check on one batch, not a proof.
    """

    def __init__(self) -> None:
        self.done = False
        self.batch, self.states = torch.empty(0), _generators(torch.device("cpu"))

    def look(self, batch: Tensor) -> None:
        """Keep the first batch and the generator's state before it is answered."""
        if not self.done:
            self.batch, self.states = batch.clone(), _generators(batch.device)

    def require(self, model: nn.Module, answers: Tensor) -> None:
        """Refuse a model whose answer to the middle row of the batch changes with the other rows, or that changes itself."""
        if not self.done:
            self._compare(model, answers)
            self.done, self.batch = True, torch.empty(0)

    def _compare(self, model: nn.Module, answers: Tensor) -> None:
        held = {name: buffer.clone() for name, buffer in model.named_buffers()}
        row, kept = len(self.batch) // 2, answers.clone()
        last = len(self.batch) - 1
        others = last - torch.arange(len(self.batch), device=self.batch.device) % (len(self.batch) - row)
        others[row] = row
        changed = self.batch[others]  # draws like the first ones, so that whoever watches the model sees the same noise
        after = _generators(self.batch.device)
        try:
            _restore(self.batch.device, self.states)
            again = model(changed)
        finally:
            _restore(self.batch.device, after)
        for name, buffer in model.named_buffers():
            if name in held and not torch.equal(buffer.nan_to_num(), held[name].nan_to_num()):
                raise Refused(
                    f"the forward pass changes the buffer {name!r} in evaluation mode, so that no two draws see the same "
                    "network; fix its state before certifying"
                )
        one, other = kept[row].double(), again[row].double()
        size = float(one.nan_to_num(posinf=0, neginf=0).abs().max())
        room = 100 * torch.finfo(kept.dtype).eps * size
        if bool(((one - other).abs() > room).any()):
            raise Refused(
                "the model's answer to one row depends on the other rows of its batch (batch norm without running statistics, "
                "or a mean over dimension 0?), so its votes are not independent draws and certify nothing"
            )


def _generators(device: torch.device) -> Sequence[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def _restore(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class Denoised(nn.Module):
    """`x → classifier(denoiser(x))`: to smoothing just another network, so every certificate holds for the pair.

    The denoiser maps a noisy batch to a batch of the same shape. Its time is part of every forward pass, its weights part
    of the model's hash. Reference: Salman et al. (2020); Carlini et al. (2023).

    >>> import torch
    >>> pair = Denoised(nn.Identity(), nn.Linear(3, 2)).eval()
    >>> pair(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(self, denoiser: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        for name, part in (("denoiser", denoiser), ("classifier", classifier)):
            if not isinstance(part, nn.Module):
                raise InputError(
                    f"the {name} must be an nn.Module (a checkpoint or a factory), got {type(part).__name__}"
                )
        self.denoiser, self.classifier = denoiser, classifier
        self.training = denoiser.training or classifier.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the denoised batch."""
        clean = self.denoiser(x)
        if not isinstance(clean, Tensor) or clean.shape != x.shape:
            got = tuple(clean.shape) if isinstance(clean, Tensor) else type(clean).__name__
            raise InputError(f"the denoiser must return images of the shape it was given, {tuple(x.shape)}, got {got}")
        logits: Tensor = self.classifier(clean)
        return logits
