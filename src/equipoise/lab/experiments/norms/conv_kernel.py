"""Convolutions: kernel size: five methods against power iteration on the zero-padded operator."""

from equipoise.lab.experiments.shared.conv_sweep import Settings, sweep

EXPERIMENT = sweep(
    identifier="conv-kernel",
    place="Figure 3.7",
    title="Convolutions: kernel size",
    claim="Gram iteration gives Sedghi's exact circular value at a fraction of the time of the other methods.",
    published="Gram iteration = Sedghi's value, fastest",
    label="kernel size k",
    laptop=Settings("kernel", (3, 5, 7, 9, 11), size=64),
    paper=Settings("kernel", (3, 5, 7, 9, 11, 13), size=252, draws=50),
)
