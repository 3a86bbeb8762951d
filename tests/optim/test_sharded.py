"""Two processes: the same weights on both under DDP; row and column shards against the whole matrix, and the guard on them."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

import equipoise as eq


def replicated(rank):
    """Weights and bounds after steps under DDP and a fault of one rank alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    guard = eq.optim.SpectralGuard(model, radius=1.0)
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
            model[0].weight.mul_(3.0)
    guard.step()
    return [[p.tolist() for p in model.parameters()], max(b.upper for b in guard.bounds().values())]


def work(rank, port, folder):
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    equal = replicated(rank)
    mesh = DeviceMesh("cpu", [0, 1])
    generator = torch.Generator().manual_seed(0)
    rows = []
    for case in range(200):
        m, n = (int(torch.randint(1, 40, (), generator=generator)) for _ in range(2))
        W = torch.randn(m, n, generator=generator) * 10.0 ** float(torch.randint(-6, 6, (), generator=generator))
        if case % 5 == 0:
            W = torch.outer(W[:, 0], W[0])  # rank one
        if case % 7 == 0:
            W = W.to([torch.float64, torch.bfloat16][case % 2])
        placement = Replicate() if case % 20 == 19 else Shard(case % 2)
        bracket = eq.spectral_norm(distribute_tensor(W, mesh, [placement]))
        whole = eq.spectral_norm(W)
        sigma = float(torch.linalg.svdvals(W.double())[0])
        rows.append([bracket.lower, bracket.upper, whole.lower, whole.upper, sigma])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 21), nn.Tanh(), nn.Linear(21, 4))
    for layer, side in ((model[0], 0), (model[2], 1)):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(side)]))
    guard = eq.optim.SpectralGuard(model, radius=1.0)
    held = []
    for step in range(6):
        with torch.no_grad():
            for layer in (model[0], model[2]):
                whole = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(step))
                layer.weight.add_(distribute_tensor(0.1 * whole, mesh, layer.weight.placements))
        if step == 3:  # resumed in the middle
            state = guard.state_dict()
            guard = eq.optim.SpectralGuard(model, radius=1.0)
            guard.load_state_dict(state)
        guard.step()
        for name, bracket in guard.bounds().items():
            sigma = float(torch.linalg.svdvals(model.get_submodule(name).weight.full_tensor().double())[0])
            held.append([bracket.lower, bracket.upper, sigma])
    with torch.no_grad():
        if rank == 1:
            model[0].weight.to_local().fill_(torch.nan)
    refused = ""
    try:
        guard.step()
    except eq.InputError as error:
        refused = str(error)
    torch.save([rows, held, refused, equal], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_brackets_on_shards_hold_and_are_the_same_on_every_rank(tmp_path):
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
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    *same, (weights, largest) = first
    *others, (copies, other) = second
    assert same == others
    assert weights == copies
    assert max(largest, other) <= 1.001  # each rank proves its own
    rows, held, refused = same
    assert len(rows) == 200
    for lower, upper, low, high, sigma in rows:
        assert lower <= sigma * (1 + 1e-12)
        assert sigma <= upper * (1 + 1e-12) <= sigma * 1.0011
        assert low <= upper
        assert lower <= high
    for lower, upper, sigma in held:
        assert lower <= sigma * (1 + 1e-12)
        assert sigma <= upper * (1 + 1e-12)
        assert upper <= 1.001
    assert "non-finite" in refused


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    # the results are stored; gloo's threads now and then abort an interpreter that ends while they do
    os._exit(0)
