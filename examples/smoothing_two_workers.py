"""Certify a network by randomized smoothing on two Ray workers; kill it and run it again: it goes on where it was.

Run: python examples/smoothing_two_workers.py      (needs Ray: pip install 'equipoise[ray]')
"""

import importlib.util

import torch
from torch import nn

import equipoise as eq

SIGMA = (
    0.25  # noise level, in the units of the pixels (0 … 1): larger certifies further and blurs more
)


def train() -> nn.Module:
    """A small network trained under the noise it will be certified with."""
    torch.manual_seed(0)
    data = eq.data.load_dataset("digits#train")
    x, y = data.batch(range(len(data)))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(eq.regularizers.add_noise(x, SIGMA)), y).backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Sample on two workers if Ray is there, in this process if not: the numbers are the same."""
    workers = None if importlib.util.find_spec("ray") is None else 2
    if workers is None:
        print(
            "Ray is not installed (pip install 'equipoise[ray]'): certifying in this process instead."
        )
    run = eq.certify(
        train(), eq.data.load_dataset("digits#test"), run_dir="runs/two-workers", sigma=SIGMA, n=2000, limit=40,
        workers=workers, progress=lambda row, done, total: print(f"\r{done}/{total}", end=""),
    )  # fmt: skip
    print()
    # The directory holds votes; certificates are derived from them, so α and the procedure may change afterwards.
    for procedure in ("cohen", "cpm"):
        summary = run.summary(
            [0.0, 0.25, 0.5], results=run.results(alpha=1e-3, procedure=procedure)
        )
        print(procedure, {f"{k:g}": f"{v:.0%}" for k, v in summary.accuracy.items()})
    print("stored in", run.folder, "- see: equipoise derive", run.folder)


# workers are processes: they must be able to import this file without running it
if __name__ == "__main__":
    main()
