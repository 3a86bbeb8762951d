"""Two processes on the loopback address: the same weights on both, also where one rank alone sees an excess."""

import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

from equipoise.optim import SpectralGuard


def work(rank, port, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    guard = SpectralGuard(model, radius=1.0)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    guard.attach(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        (parallel(x) - 5).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        if rank == 1:
            model[0].weight.mul_(3.0)  # a fault of one rank
    guard.step()
    bounds = {name: bracket.upper for name, bracket in guard.bounds().items()}
    torch.save([p.detach() for p in model.parameters()] + [bounds], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_all_ranks_hold_the_same_weights(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        # fresh processes: what a fork inherits (threads of pools, a tracer, a progress bar) may never wake up
        subprocess.Popen([sys.executable, __file__, str(rank), str(port), str(tmp_path)], stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=240)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
    (*first, bounds), (*second, others) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert len(first) == 4
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert max(*bounds.values(), *others.values()) <= 1.001


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
