"""A run that is killed again and again: `python runs_lives.py FOLDER KILLS SEED` prints how many runs and working lives.

The process imports torch once and forks; each child runs the same command until SIGKILL comes at a random moment.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import runs_nets

from equipoise.runs import certify, open_run

COUNT = 400


def run(folder, count=COUNT):
    return certify(runs_nets.net(), runs_nets.data(count), run_dir=folder, sigma=0.3, n=300, seed=0)


def live(folder, seconds):
    """Fork, let the child work, kill it; whether it was still alive."""
    pid = os.fork()
    if pid == 0:
        try:
            run(folder)
        finally:
            os._exit(0)
    time.sleep(seconds)
    over, _ = os.waitpid(pid, os.WNOHANG)
    if over:
        return False
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main(base, kills, seed):
    """Kill `kills` times; a run that gets finished is followed by a new one, and lives grow or shrink to fit the machine."""
    torch.set_num_threads(1)
    rng, window, hit, worked, number = random.Random(seed), 0.1, 0, 0, 0
    stored = 0
    while hit < kills:
        folder = Path(base) / str(number)
        hit += live(folder, rng.uniform(0.0, window))
        now = len(open_run(folder).rows) if (folder / "run.json").exists() else 0
        assert now >= stored, "a kill lost stored inputs"
        gained, stored = now - stored, now
        worked += gained > 0
        window *= 1.1 if gained == 0 else 0.8 if gained > 3 * COUNT / kills else 1.0
        if stored == COUNT:
            number, stored = number + 1, 0
    sys.stdout.write(f"{number + 1} {worked}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
