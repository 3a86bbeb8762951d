"""AutoAttack on a network with proved radii: accuracy lies between certificate and attack, no certificate may break.

Run: python examples/autoattack_attack.py   (needs torchattacks; ten seconds)
"""

import torch
import torchattacks

import equipoise as eq

if __name__ == "__main__":
    epsilon = 0.25
    model = eq.models.load("digits").model
    x, y = eq.data.load_dataset("digits", "test").batch(range(40))
    proved = eq.certified_radius(model, x, y, effort="fast").radius >= epsilon

    attack = torchattacks.AutoAttack(model, norm="L2", eps=epsilon, n_classes=10, seed=0)
    step = attack(x, y) - x
    length = step.flatten(1).norm(dim=1).clamp_min(1e-12)
    shrink = (epsilon * (1 - 1e-6) / length).clamp_max(1)  # rounding may leave the ball
    with torch.no_grad():
        right = model(x + step * shrink[:, None, None, None]).argmax(1) == y

    print(f"certified at {epsilon}: {proved.sum()} of 40; right under AutoAttack: {right.sum()}")
    print(f"certificates broken: {(proved & ~right).sum()}")
