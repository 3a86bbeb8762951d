"""Answers of a smoothed classifier as it is deployed: the majority vote, or none where the draws do not tell."""

from collections.abc import Iterator
from dataclasses import dataclass

from equipoise.core.errors import EquipoiseError, InputError, Refused
from equipoise.runs.jobs import Job
from equipoise.runs.rows import InputId
from equipoise.runs.tasks import classifier_of


@dataclass(frozen=True)
class Answer:
    """The answer to one input: a class, or −1 where it abstains; `failure` says why an input got none."""

    id: InputId
    label: int
    answer: int
    failure: str | None = None


def predict(job: Job, n: int = 1000, alpha: float = 1e-3) -> Iterator[Answer]:
    """The smoothed answers to the inputs of a job, one by one.

    Guarantee: an answer other than the majority class under the noise is given with probability at most alpha per input,
    over the draws; otherwise it abstains. A certificate of the same classifier (model, noise level, law of the noise, batch
    shape) holds for these answers. Reference: Cohen et al. 2019, PREDICT.
    """
    if n < 1 or not 0 < alpha < 1:
        raise InputError(f"the number of draws must be positive and alpha between 0 and 1, got {n} and {alpha}")
    if job.parameters.soft:
        raise Refused("answers are majority votes, but this run certifies soft scores: certify the inputs instead")
    classifier = classifier_of(job.model, job.parameters, job.batch_size, job.device)
    for position in job.positions:
        try:
            item = job.inputs.item(int(position))
            found = classifier.predict(item.x[None].to(job.device), n, alpha, ids=[item.id])
        except (EquipoiseError, OSError) as error:
            yield Answer(job.inputs.ids[position], -1, -1, str(error))
            continue
        yield Answer(item.id, item.label, int(found[0]))
