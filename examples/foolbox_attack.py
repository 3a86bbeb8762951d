"""Foolbox attacks a smoothed classifier: no certificate may break.

Run: python examples/foolbox_attack.py   (needs foolbox)
"""

import foolbox
import torch

import equipoise as eq


class Smoothed(torch.nn.Module):
    """Mean probabilities under fixed draws of noise: a differentiable stand-in for the smoothed classifier."""

    def __init__(self, model, sigma, draws=32):
        super().__init__()
        self.model, self.sigma, self.draws = model, sigma, draws

    def forward(self, x):
        generator = torch.Generator().manual_seed(0)
        noise = self.sigma * torch.randn(self.draws, *x.shape[1:], generator=generator)
        noisy = (x[:, None] + noise).flatten(0, 1)
        votes = self.model(noisy).softmax(1).unflatten(0, (len(x), self.draws)).mean(1)
        return votes.clamp_min(1e-12).log()


if __name__ == "__main__":
    sigma = 0.12
    model = eq.models.load("digits").model
    x, y = eq.data.load_dataset("digits", "test").batch(range(8))
    smoothed = eq.smoothing.SmoothedClassifier(model, sigma, 10, noise="float", seed=0)
    certificates = smoothed.certify(x, n=500)

    stand_in = foolbox.PyTorchModel(Smoothed(model, sigma).eval(), bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.L2PGD(steps=20)
    _, attacked, _ = attack(stand_in, x, y, epsilons=1.0)
    distance = (attacked - x).flatten(1).norm(dim=1).numpy()
    answers = smoothed.predict(attacked, n=500)  # judged by the smoothed classifier itself
    fooled = (answers != certificates.prediction) & (answers >= 0)
    broken = fooled & (distance < certificates.radius)
    print(f"fooled {fooled.sum()} of 8 at distance 1; certificates broken: {broken.sum()}")
