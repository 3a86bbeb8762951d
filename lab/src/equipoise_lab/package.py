"""A trained network becomes a packaged one: `python -m equipoise_lab.package RUN src/equipoise/models/NAME --data FILE`.

RUN is a folder that `equipoise train` wrote. Its weights are rounded to the digits of half precision, since the wheel is
compressed; bounds and figures are computed again for the rounded weights, all test inputs are certified by the lone checker,
and certificate and model card are written.
"""

import argparse
import tempfile
import zlib
from pathlib import Path

import torch

import equipoise as eq
from equipoise.certificates import EPSILONS
from equipoise.checkpoints import load_checkpoint, save_checkpoint
from equipoise.core.files import read_json
from equipoise.models import proved, save_certificate


def package(source: Path, target: Path, data: str, limit: int | None = None) -> dict[str, float]:
    """Write a packaged network.

    Args:
        source: the folder of a trained network.
        target: the folder in the package; its name is that of the network.
        data: a dataset with a test split.
        limit: use so many test inputs only.

    Returns:
        Certified accuracies by radius, as the lone checker proves them.
    """
    model, shape = load_checkpoint(source)
    if shape is None:
        raise eq.InputError(f"{source} does not say the shape of its inputs")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(tensor.half())
    model.eval()
    test = eq.data.load_dataset(data, split="test")
    count = min(len(test), limit or len(test))
    x, y = test.batch(range(count))
    with torch.no_grad():
        right = sum(
            int((model(some).argmax(1) == labels).sum())
            for some, labels in zip(x.split(200), y.split(200), strict=True)
        )

    with tempfile.TemporaryDirectory() as bundle:
        claims = eq.certificates.write(model, x, y, bundle, epsilons=EPSILONS)
        for sentence in eq.certificates.check(bundle):
            print(sentence)  # noqa: T201 (a program)
    shares = {level: hits / count for level, hits in claims["radii"]["certified"].items()}

    config = read_json(source / "config.json")
    save_checkpoint(target, model, config["factory"], config["arguments"], shape)
    upper, pairs = proved(model, shape)
    figures = {"accuracy": right / count, "certified_accuracy": shares}
    figures |= {"split": "test", "samples": count}
    made = dict(read_json(source / "certificate.json").get("made", {}))
    made["weights"] = "rounded to half precision"
    save_certificate(target, target.name, upper, pairs, figures, made)
    size = len(zlib.compress((target / "model.safetensors").read_bytes()))
    print(f"accuracy {right / count:.4f}, {size / 1e6:.2f} MB compressed")  # noqa: T201 (a program)
    return shares


def main() -> None:
    """Read the arguments, and write the packaged network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    package(arguments.source, arguments.target, arguments.data, arguments.limit)


if __name__ == "__main__":
    main()
