"""Deblurring with a learned denoiser whose iteration provably converges (plug and play).

x ← D(x − τ·Aᵀ(Ax − y)) with a blur A and a denoiser D. If D is 1-Lipschitz and ‖I − τAᵀA‖ ≤ c < 1, every step is a contraction by
c: one limit, reached from anywhere at a known rate. A denoiser without a proved constant may oscillate or blow up.

Run: python examples/plug_and_play.py   (needs matplotlib: pip install 'equipoise[figures]')
"""

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

import equipoise as eq

torch.manual_seed(0)


class Denoiser(nn.Module):
    """`(3·x + N(x))/4` with a 1-Lipschitz N: averaged, hence 1-Lipschitz."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            eq.nn.SRConv2d(1, 24, 3, padding=1), eq.nn.MaxMin(), eq.nn.SRConv2d(24, 24, 3, padding=1), eq.nn.MaxMin(),
            eq.nn.SRConv2d(24, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return 0.75 * x + 0.25 * self.net(x)


# 1. Train the denoiser on noisy digits.
images, _ = eq.data.load_dataset("digits#train").batch(range(512))
denoiser = Denoiser()
optimizer = torch.optim.Adam(denoiser.parameters(), lr=1e-2)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.mse_loss(denoiser(images + 0.1 * torch.randn_like(images)), images).backward()
    optimizer.step()
denoiser.eval()

# 2. The blur A: a symmetric kernel, so that Aᵀ = A. 0.35 of the picture stays sharp, so AᵀA is invertible.
blur = nn.Conv2d(1, 1, 3, padding=1, bias=False)
blur.weight.data = torch.tensor([[[[0.5, 1, 0.5], [1, 2, 1], [0.5, 1, 0.5]]]]) / 8 * 0.65
blur.weight.data[0, 0, 1, 1] += 0.35

# 3. The proofs: ‖D‖ from its graph, ‖I − τAᵀA‖ from the extremes of A (0.35 ≤ A's symbol ≤ 1 for this kernel).
constant = eq.lipschitz_bound(denoiser, images[:1]).upper
largest = eq.spectral_norm(blur, input_size=(8, 8)).upper
tau = 1.0 / largest**2
contraction = constant * (1 - tau * 0.35**2)
print(
    f"denoiser: at most {constant:.6f}-Lipschitz; blur: norm at most {largest:.4f}; step contracts by {contraction:.4f}"
)
assert contraction < 1

# 4. Run it, with the proved distance to the limit beside.
clean, _ = eq.data.load_dataset("digits#test").batch(range(16))
with torch.no_grad():
    y = blur(clean) + 0.02 * torch.randn_like(clean)
    x = y
    for n in range(1, 101):
        after = denoiser(x - tau * blur(blur(x) - y))
        step = float((after - x).flatten(1).norm(dim=1).max())
        x = after
        if n in (1, 10, 100):
            print(
                f"round {n}: step {step:.1e}, so the limit is within {contraction / (1 - contraction) * step:.1e}"
            )
before, now = (float((v - clean).square().mean()) for v in (y, x))
print(f"mean square error: blurred {before:.4f}, restored {now:.4f}")
assert now < before

# 5. The picture: blurred, restored, true.
_, places = plt.subplots(3, 8, figsize=(6, 2.4))
for row, (name, pictures) in zip(
    places, (("blurred", y), ("restored", x), ("true", clean)), strict=True
):
    row[0].set_ylabel(name)
    for place, picture in zip(row, pictures, strict=False):
        (
            place.imshow(picture[0], cmap="gray", vmin=0, vmax=1),
            place.set_xticks([]),
            place.set_yticks([]),
        )
plt.tight_layout(), plt.savefig("plug_and_play.png", dpi=150)
