"""What several experiments share: training, comparisons paired by seed, sweeps, networks under noise."""
