"""Convolutions: channels: five methods against power iteration on the zero-padded operator."""

from equipoise.lab.experiments.shared.conv_sweep import Settings, sweep

EXPERIMENT = sweep(
    identifier="conv-channels",
    place="Figure 3.8",
    title="Convolutions: channels",
    claim="Gram iteration gives Sedghi's exact circular value at a fraction of the time of the other methods.",
    published="Gram iteration = Sedghi's value, fastest",
    label="input and output channels",
    laptop=Settings("channels", (4, 8, 16, 32, 64)),
    paper=Settings("channels", (4, 8, 16, 32, 64, 128, 256, 512), draws=50),
)
