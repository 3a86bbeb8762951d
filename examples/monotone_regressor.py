"""A regressor that is monotone by construction: a price never falls when the area grows.

If g is 1-Lipschitz, every |∂g/∂xᵢ| ≤ 1, so f(x) = g(x) + Σ xᵢ (over the monotone features) increases in each of them. The
constant must be a proved one: with 1.05 instead of 1 the regressor would fall somewhere.

Run: python examples/monotone_regressor.py   (needs matplotlib: pip install 'equipoise[figures]')
"""

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

import equipoise as eq

torch.manual_seed(0)
SCALE = 3.0  # how steep the function may be


class Monotone(nn.Module):
    """`scale·(0.999·g(x) + Σ_{i in increasing} xᵢ)` with a 1-Lipschitz g."""

    def __init__(self, features: int, increasing: list[int]) -> None:
        super().__init__()
        self.increasing = increasing
        self.g = nn.Sequential(
            eq.nn.SRLinear(features, 32),
            eq.nn.MaxMin(),
            eq.nn.SRLinear(32, 32),
            eq.nn.MaxMin(),
            eq.nn.SRLinear(32, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return SCALE * (0.999 * self.g(x)[:, 0] + x[:, self.increasing].sum(1))


# 1. Data: price against area (increasing), rooms (increasing) and distance to the centre (free), with noise that is not monotone.
x = torch.rand(600, 3) * 2 - 1
y = 2 * x[:, 0] + (3 * x[:, 1]).tanh() - x[:, 2].square() + 0.3 * torch.randn(600)

model = Monotone(3, [0, 1])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(250):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()

# 2. The proof: g's constant, from its graph. Everything else is arithmetic.
constant = 0.999 * eq.lipschitz_bound(model.g, x[:1]).upper
least = SCALE * (1 - constant)  # of the slope in an increasing feature
print(f"mean square error {loss.item():.3f} (noise alone: 0.090)")
print(f"proved constant of what is added: {constant:.7f}")
print(f"so the price rises with area and rooms everywhere, by at least {least:.2e} per unit")
assert constant < 1

# 3. The other side: 20,000 pairs that differ by more area only; none falls.
a = torch.rand(20_000, 3) * 4 - 2
b = a.clone()
b[:, 0] += torch.rand(20_000)
with torch.no_grad():
    fallen = int((model.double()(b.double()) < model(a.double()) - 1e-9).sum())
print(f"pairs that fall: {fallen} of 20000")
assert fallen == 0

# 4. The picture: price against area for several distances to the centre, the rooms at their mean.
plt.figure(figsize=(5, 3))
plt.scatter(x[:, 0], y, s=4, color="0.8", label="data")
area = torch.linspace(-1, 1, 100).double()
for distance in (0.0, 0.5, 1.0):
    line = torch.stack([area, torch.zeros(100), torch.full((100,), distance)], 1).double()
    plt.plot(area, model(line).detach(), label=f"distance {distance}")
(
    plt.xlabel("area"),
    plt.ylabel("price"),
    plt.legend(),
    plt.tight_layout(),
    plt.savefig("monotone_regressor.png", dpi=150),
)
