"""How far apart are two clouds of points? A 1-Lipschitz critic gives a lower bound of their Wasserstein distance.

W₁(P, Q) = max over 1-Lipschitz f of E_P f − E_Q f. Every f with a *proved* constant gives a lower bound that holds for these
samples; a critic whose constant is only penalised may report more than the distance.

Run: python examples/wasserstein_critic.py   (needs matplotlib: pip install 'equipoise[figures]')
"""

import torch
from matplotlib import pyplot as plt
from torch import nn

import equipoise as eq

torch.manual_seed(0)

# 1. Two rings of the same shape, the second moved by (1.2, 0.5): the distance is exactly the length of the move, 1.3.
angle = torch.rand(512) * 2 * torch.pi
p = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(512, 2)
q = p + torch.tensor([1.2, 0.5])

# 2. The critic: orthogonal layers and GroupSort keep every gradient at length 1, so the bound can be reached.
critic = nn.Sequential(
    eq.nn.BjorckLinear(2, 32),
    eq.nn.MaxMin(),
    eq.nn.BjorckLinear(32, 32),
    eq.nn.MaxMin(),
    eq.nn.BjorckLinear(32, 1),
)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
for _ in range(150):
    optimizer.zero_grad()
    (critic(p).mean() - critic(q).mean()).backward()
    optimizer.step()
critic.eval()

# 3. The proof: the constant comes from the graph, after training, whatever the optimizer did.
constant = eq.lipschitz_bound(critic, p[:1]).upper
with torch.no_grad():
    reached = float(critic(q).mean() - critic(p).mean())
lower = reached / constant
print(f"proved constant of the critic: {constant:.6f}")
print(f"Wasserstein distance: at least {lower:.4f}, in truth 1.3000")
assert 1.1 < lower <= 1.3001

# 4. The same with a critic held by a gradient penalty, as it is usually done: its constant is larger than 1.
plain = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
for _ in range(150):
    optimizer.zero_grad()
    between = torch.lerp(p, q, torch.rand(512, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(plain(between).sum(), between, create_graph=True)
    penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
    (plain(p).mean() - plain(q).mean() + penalty).backward()
    optimizer.step()
with torch.no_grad():
    claimed = float(plain(q).mean() - plain(p).mean())
proved = eq.lipschitz_bound(plain.eval(), p[:1]).upper
print(
    f"gradient penalty: claims {claimed:.4f}; its constant is only proved to be at most {proved:.2f}"
)

# 5. The picture: level lines of the critic, which climbs from the one cloud to the other at slope 1.
with torch.no_grad():
    side = torch.linspace(-2, 3.2, 60)
    grid = torch.cartesian_prod(side, side)
    plt.figure(figsize=(4.5, 4))
    plt.contourf(side, side, critic(grid).reshape(60, 60).T, levels=20, cmap="cividis")
(
    plt.scatter(*p.T, s=3, color="crimson", label="P"),
    plt.scatter(*q.T, s=3, color="orange", label="Q"),
    plt.legend(),
)
plt.tight_layout(), plt.savefig("wasserstein_critic.png", dpi=150)
