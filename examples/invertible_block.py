"""An invertible residual block: y = x + g(x) with Lip(g) ≤ q < 1 proved, so that x is found again from y to any accuracy.

Banach: x ← y − g(x) converges, and after n rounds the error is at most qⁿ/(1 − q)·‖x₁ − x₀‖. That is worth as much as
the constant: with a power iteration's estimate of q there is no promise.

Run: python examples/invertible_block.py   (needs matplotlib: pip install 'equipoise[figures]')
"""

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

import equipoise as eq

torch.manual_seed(0)


class Block(nn.Module):
    """`x + q·g(x)`, g 1-Lipschitz."""

    def __init__(self, q: float = 0.8) -> None:
        super().__init__()
        self.q = q
        self.g = nn.Sequential(
            eq.nn.SRConv2d(1, 16, 3, padding=1), nn.ELU(), eq.nn.SRConv2d(16, 16, 3, padding=1), nn.ELU(),
            eq.nn.SRConv2d(16, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.q * self.g(x)


# 1. Train the block to brighten strokes: any task will do.
images, _ = eq.data.load_dataset("digits#train").batch(range(256))
block = Block()
optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.mse_loss(block(images), images.sqrt()).backward()
    optimizer.step()

# 2. The proof of invertibility.
block = block.double().eval()
x, _ = eq.data.load_dataset("digits#test").batch(range(16))
x = x.double()
q = block.q * eq.lipschitz_bound(block.g, x[:1]).upper  # of the part that is added
print(
    f"proved Lip(g) ≤ {q:.5f} < 1: the block is invertible, its inverse has constant at most {1 / (1 - q):.2f}"
)
assert q < 1

# 3. The inverse, with its error bound beside the error.
with torch.no_grad():
    y = block(x)
    errors, bounds = [], []
    guess, first = y, float((block.q * block.g(y)).flatten(1).norm(dim=1).max())
    for n in range(1, 31):
        guess = y - block.q * block.g(guess)
        errors.append(float((guess - x).flatten(1).norm(dim=1).max()))
        bounds.append(q**n / (1 - q) * first)
        if n % 10 == 0:
            print(f"after {n} rounds: error {errors[-1]:.1e}, proved at most {bounds[-1]:.1e}")
            assert errors[-1] <= bounds[-1]

# 4. The picture.
plt.figure(figsize=(5, 3))
plt.semilogy(bounds, "k--", label="proved"), plt.semilogy(errors, label="error of the inverse")
plt.xlabel("rounds"), plt.legend(), plt.tight_layout(), plt.savefig("invertible_block.png", dpi=150)
