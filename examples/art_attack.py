"""An attack of the Adversarial Robustness Toolbox on a network with proved radii: no certificate may break.

Run: python examples/art_attack.py   (needs adversarial-robustness-toolbox)
"""

import torch
from art.attacks.evasion import ProjectedGradientDescent
from art.estimators.classification import PyTorchClassifier

import equipoise as eq

if __name__ == "__main__":
    model = eq.export(eq.models.load("digits").model)  # plain layers
    x, y = eq.data.load_dataset("digits", "test").batch(range(16))
    radii = eq.certified_radius(model, x, y, effort="fast").radius.numpy()

    target = PyTorchClassifier(
        model,
        loss=torch.nn.CrossEntropyLoss(),
        input_shape=tuple(x.shape[1:]),
        nb_classes=10,
        clip_values=(0.0, 1.0),
        device_type="cpu",
    )
    attack = ProjectedGradientDescent(
        target, norm=2, eps=0.5, eps_step=0.05, max_iter=20, verbose=False
    )
    attacked = attack.generate(x.numpy(), y.numpy())
    distance = abs(attacked - x.numpy()).reshape(len(x), -1)
    distance = (distance**2).sum(axis=1) ** 0.5
    answers = target.predict(attacked).argmax(axis=1)
    fooled = answers != y.numpy()
    broken = fooled & (distance < radii)
    print(f"fooled {fooled.sum()} of {len(x)} within 0.5; certificates broken: {broken.sum()}")
