"""How unstable is a trained network, and what can be guaranteed? Replace `model`, `x` and `y` by your own.

Run: python examples/audit_your_model.py
"""

import torch
from torch import nn

import equipoise as eq

torch.manual_seed(0)

# 1. A model. Here: a small network trained on the 8×8 digits that come with equipoise, pixels in [0, 1].
train, test = eq.data.load_dataset("digits#train"), eq.data.load_dataset("digits#test")
images, labels = train.batch(range(len(train)))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
model.eval()  # certificates are about the network as it is deployed; training mode is refused

# 2. The global bound: no two inputs are driven apart by more than this factor. Proved, rounding of the bound included.
x, y = test.batch(range(100))
report = eq.lipschitz_bound(model, x[:1])
print(report)
for row in report.fix_first(1):  # empty if no layer stretches
    print("Layer to fix first:", row.name)

# 3. The same question near each input: attacked from below, certified from above.
local = eq.local_lipschitz(model, x[:4], radius=0.1)
print(
    "\nLocal constant at radius 0.1, between",
    local.lower.numpy().round(2),
    "and",
    local.upper.numpy().round(2),
)

# 4. What the bound guarantees: within this distance (ℓ2) the label cannot change.
radius = eq.smoothing.margins.margin_radius(model(x), y, report.upper)
for epsilon in (0.0, 0.05, 0.1, 0.2):
    print(f"certified at {epsilon:.2f}: {float((radius > epsilon).double().mean()):.0%}")

# 5. The other side: an attack that finds a wrong label. Inside the certified radius it must never succeed.
attack = eq.attacks.pgd(model, x, y, epsilon=0.5, steps=20)
print(f"still right under attack at 0.50: {float((~attack.success).double().mean()):.0%}")
inside = eq.attacks.pgd(model, x, y, epsilon=radius * 0.999, steps=20)
broken = int((inside.success & (radius > 0)).sum())
print("certificates broken by the attack:", broken)
assert broken == 0
