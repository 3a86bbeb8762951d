"""Fine-tuning a small transformer on intents and slots: activation decay against dropout and SAM."""

from __future__ import annotations

from equipoise.lab.experiments.shared.comparison import Claim, Settings, Variants, compared


def decay(sigma: float) -> list[dict[str, object]]:
    """Activation decay at σ on both heads."""
    return [{"kind": "activation-decay", "layer": layer, "sigma": sigma} for layer in ("intent", "slots")]


KEEP = ("accuracy", "slot_f1")
VARIANTS: Variants = {
    "baseline": {},
    "AD": {"regularizers": decay(0.05)},
    "dropout": {"model": {"arguments": {"dropout": 0.1}}},
    "SAM": {"optimizer": {"kind": "sam", "rho": 0.01}},
}
#: the thesis picks σ from 0.01, 0.05 and 0.1 and ρ from 0.01, 0.05 and 0.1
SWEEP: Variants = {
    **VARIANTS,
    **{f"AD {sigma:g}": {"regularizers": decay(sigma)} for sigma in (0.01, 0.1)},
    **{f"SAM {rho:g}": {"optimizer": {"kind": "sam", "rho": rho}} for rho in (0.05, 0.1)},
}
CLAIMS = (
    Claim("intents", "AD", 0.45, "98.04 → 98.49 (BERT)", rival="dropout"),
    Claim("slots, F1", "AD", 2.57, "78.33 → 80.90 (BERT, Snips)", rival="dropout", key="slot_f1"),
)


def tagger(limit: int | None, epochs: int, test: int | None, lr: float = 2e-4, batch: int = 32) -> dict[str, object]:
    """MiniLM with two linear heads."""
    return {
        "model": {"factory": "equipoise.train.text:minilm_tagger", "arguments": {"dropout": 0.0}},
        "data": {"path": "snips:/snips", "limit": limit, "test_limit": test},
        "loss": "intent-slots",
        "optimizer": {
            "kind": "adamw",
            "base": "adamw",
            "lr": lr,
            "weight_decay": 0.01,
            "decay": "matrices",
            "clip": 1.0,
        },
        "schedule": {"kind": "linear", "warmup": 0.1},
        "epochs": epochs,
        "batch_size": batch,
        "metrics": {"bound": False, "epsilons": [], "batch_size": 100, "every": epochs},
    }


EXPERIMENT = compared(
    __name__,
    place="Tables 7.4, 7.5, D.3 and D.4",
    title="Activation decay in a transformer",
    claim="Activation decay improves fine-tuning on text, at least as much as dropout and SAM.",
    published="BERT intents 98.04 → 98.49, Snips slots F1 78.33 → 80.90; T5-small on MMMLU 32.21 → 33.49",
    claims=CLAIMS,
    main=1,
    laptop=Settings(tagger(400, 2, 200), VARIANTS, seeds=2, keep=KEEP),
    desk=Settings(tagger(300, 3, 300, 5e-4, 8), {k: VARIANTS[k] for k in ("dropout", "AD")}, seeds=5, keep=KEEP),
    paper=Settings(tagger(None, 10, None), SWEEP, seeds=10, keep=KEEP),
    notes=(
        "MiniLM for BERT, and Snips only: the thesis trains seven tasks at once, and T5 on MMMLU besides",
        "the published gains are over the run with dropout, whose 98.04 and 78.33 are",
        "at desk scale rate and batch were chosen by the F1 of dropout alone, and the five seeds by the time at hand; the "
        "interval of the intents ends 0.04 points below the published gain, which one more seed could change",
    ),
    needs=("snips",),
)
