"""Answers of a run's classifier as it is deployed: the majority vote, or none where the draws do not tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from equipoise.core.errors import EquipoiseError, InputError, Refused
from equipoise.runs.inputs import InputId, Inputs, Selection
from equipoise.runs.jobs import usable_device
from equipoise.runs.models import portable
from equipoise.runs.run import Run
from equipoise.runs.workers import TaskSpec


@dataclass(frozen=True)
class Answer:
    """The answer to one input: a class, or −1 where it abstains; `failure` says why an input got none."""

    id: InputId
    label: int
    answer: int
    failure: str | None = None


def predict_run(
    run: Run,
    model: Any,
    dataset: Any,
    *,
    n: int = 1000,
    alpha: float = 1e-3,
    limit: int | None = None,
    device: str = "cpu",
) -> Iterator[Answer]:
    """The answers of a run's classifier to other inputs, one by one.

    Args:
        run: whose noise is used; a proved run answers with the network itself.
        model: the model of the run; another one is refused.
        dataset: the inputs.
        n: draws per input.
        alpha: risk per input of an answer that is not the majority class under the noise.
        limit: at most this many inputs.
        device: where the network runs.

    Guarantee: an answer other than the majority class is given with probability at most alpha per input, over the draws;
    otherwise it abstains. Certificates of the run are about these answers. Reference: Cohen et al. 2019, PREDICT.
    """
    if not 1 <= n <= 10**10 or not 0 < alpha < 1:
        raise InputError(f"the number of draws must be positive and alpha between 0 and 1, got {n} and {alpha}")
    settings, network = run.settings, portable(model)
    if network.hash != run.manifest.model.hash:
        raise InputError(f"{run.folder} certifies another model than {network.source}: nothing of it holds for it")
    if run.kind == "sampled" and settings.soft:
        raise Refused("answers are majority votes, but this run certifies soft scores: certify the inputs instead")

    inputs = Inputs.of(dataset)
    classifier, module = None, network.network(usable_device(device))
    if run.kind == "sampled":
        # fresh noise: the draws of the certificates are not used again
        fresh = settings.model_copy(update={"seed": None})
        classifier = TaskSpec(network, fresh, device=device).classifier()
    for position in Selection(limit=limit).positions(len(inputs)):
        try:
            item = inputs.item(int(position))
            if settings.noise == "grid" and item.x.numel() != settings.dimension:
                raise Refused(f"the input has {item.x.numel()} numbers, those of the run have {settings.dimension}")
            x = item.x[None].to(device)
            if classifier is not None:
                answer = int(classifier.predict(x, n, alpha, ids=[item.id])[0])
            else:
                with torch.inference_mode():
                    answer = int(module(x).argmax())
        except (EquipoiseError, OSError) as error:
            yield Answer(inputs.ids[position], -1, -1, str(error))
            continue
        yield Answer(item.id, item.label, answer)
