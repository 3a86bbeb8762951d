"""Denoised smoothing: a denoiser in front of a classifier that never saw noise."""

from __future__ import annotations

from torch import Tensor, nn

from equipoise.core import InputError


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
