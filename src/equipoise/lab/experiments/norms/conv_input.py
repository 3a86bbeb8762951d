"""Convolutions: input size: five methods against power iteration on the zero-padded operator."""

from equipoise.lab.experiments.shared.conv_sweep import Settings, sweep

EXPERIMENT = sweep(
    identifier="conv-input",
    place="Figure 3.9",
    title="Convolutions: input size",
    claim="Gram iteration gives Sedghi's exact circular value at a fraction of the time of the other methods.",
    published="Gram iteration = Sedghi's value, fastest",
    label="input size n",
    laptop=Settings("size", (16, 32, 64, 96)),
    paper=Settings("size", (16, 32, 64, 128, 256, 512), draws=50),
)
