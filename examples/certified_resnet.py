"""Turn a ResNet into a network with a proved Lipschitz constant, train it, certify it and export it.

Run: python examples/certified_resnet.py
"""

import torch
from torch import Tensor, nn

import equipoise as eq

torch.manual_seed(0)
train, test = eq.data.load_dataset("digits#train"), eq.data.load_dataset("digits#test")
images, labels = train.batch(range(len(train)))
x, y = test.batch(range(len(test)))


# 1. Any network will do. This is a small ResNet (residual blocks with batch norm) for one-channel pictures.
class Block(nn.Module):
    """Two convolutions beside the identity, or beside a projection where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.skip = (
            nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        return torch.relu(self.skip(x) + self.second(self.first(x)))


resnet = nn.Sequential(
    nn.Conv2d(1, 8, 3, 1, 1),
    Block(8, 8, 1),
    Block(8, 16, 2),
    Block(16, 32, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
print("bound of the plain ResNet:", f"{eq.lipschitz_bound(resnet.eval(), x[:1]).upper:.3g}")

# 2. Convolutions and dense layers get spectral rescaling, batch norm loses its scale. What cannot be converted, such as
#    the sum of a residual block, is measured, and one factor at the end brings the proved bound of the whole to 1.
model = eq.make_lipschitz(resnet.train(), constant=1.0, method="sr", example_input=x[:1])
print(model.conversion)

# 3. It computes another function now, so train it: for margin, since the margin is what certifies.
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(0)
for _step in range(70):
    batch = torch.randint(len(images), (128,), generator=generator)
    # the logits of a 1-Lipschitz network are small: scaled up, for the loss only
    loss = eq.nn.losses.offset_cross_entropy(8 * model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# 4. The weights changed, so the factor is measured again; `report.upper` is proved to be at most 1.
report = model.eval().rescale(x[:1])
print(f"after training: bound {report.upper:.6f}")

# 5. Certified accuracy: right, and right for everything closer than ε.
with torch.no_grad():
    logits = model(x)
metric = eq.nn.CertifiedAccuracy((0.0, 0.05, 0.1))
metric.update(logits, y, lipschitz=report.upper)
for epsilon, share in metric.compute()["certified"].items():
    print(f"certified accuracy at {epsilon:g}: {share:.1%}")

# 6. For deployment: plain convolutions, same outputs, with what was proved attached.
plain = eq.export(model, x[:1])
print("exported, certificate:", plain.certificate.upper, "-", plain.certificate.source)
assert report.upper <= 1.0
assert plain.certificate.upper <= 1.0
