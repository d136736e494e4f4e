"""launch/network.py: slow nodes and slow pairs of nodes are named."""

import json
import os
import time
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tessera.launch import check_node, network
from tests.ranks import on_processes

NAMES = [f"node{number}" for number in range(9)]


@pytest.mark.parametrize("nodes", range(1, 9))
def test_each_node_is_measured_with_both_neighbours_at_different_times(nodes: int) -> None:
    found = list(network.rounds(nodes, 8))
    assert found[0] == [(node,) for node in range(nodes)]
    pairs = [pair for groups in found for pair in groups if len(pair) == 2]
    ring = pairwise([*range(nodes), 0] if nodes > 2 else range(nodes))
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, ring))
    for groups in found:
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members))
    assert found[-1] == [tuple(range(nodes))]
    assert not [group for groups in network.rounds(nodes, 1) for group in groups if len(group) == 1]


def said(speeds: network.Speeds, nodes: int, given: network.Least | None = None, backend: str = "nccl") -> list[str]:
    return list(network.problems(speeds, NAMES[:nodes], given, backend))


def ring(*speeds: float) -> network.Speeds:
    """Return the speeds of the pairs (0, 1), (1, 2), ..."""
    count = len(speeds)
    return {(node, (node + 1) % count): speed for node, speed in enumerate(speeds)}


def test_a_slow_node_is_named() -> None:
    (one,) = said({(0,): 400.0, (1,): 400.0, (2,): 180.0} | ring(40, 40, 40), 3)
    assert one.startswith("the GPUs of node2 exchange 180 GB/s, and 200 are expected. ")
    assert "--exclude=node2" in one
    (one,) = said(ring(40, 4, 4, 40, 40), 5)
    assert one.startswith("node2 exchanges 4 GB/s with its neighbours, and 20 are expected. ")
    assert "--exclude=node2" in one
    (one,) = said(ring(40, 0.1, 0.1), 3)  # too few pairs for a median
    assert one.startswith("node2 exchanges 0.1 GB/s with its neighbours, and 1 are expected")
    assert said(ring(40, 39, 30, 41) | {(0,): 390, (1,): 380, (2,): 200, (3,): 400}, 4) == []


def test_a_slow_pair_and_a_slow_network_are_named() -> None:
    (one,) = said(ring(40, 4, 40, 40, 40), 5)
    assert one.startswith("node1 and node2 exchange 4 GB/s, and 20 are expected. With other nodes, they are faster.")
    (one,) = said({(0, 1): 0.12}, 2)
    assert one.startswith("node0 to node1 exchange at most 0.12 GB/s, and 1 are expected. ")
    assert "NCCL_SOCKET_IFNAME" in one
    (one,) = said({(0, 1): 0.12}, 2, network.Least(between=1.0), "gloo")
    assert "GLOO_SOCKET_IFNAME" in one
    assert len(said(ring(0.1, 0.1, 0.12, 0.1), 4)) == 1


def test_given_speeds_take_the_place_of_the_defaults() -> None:
    slow = ring(40, 4, 4, 40, 0.1)
    assert said(slow, 5, network.Least(between=0.05)) == []
    assert said(slow, 5, backend="gloo") == []
    assert said(slow, 5, network.Least(between=0.0), "gloo") == []
    (one,) = said({(0,): 3.0}, 1)
    assert "exchange 3 GB/s, and 5 are expected" in one
    assert said({(0,): 3.0}, 1, network.Least(within=2.0)) == []


def test_bus_bandwidth_is_what_each_rank_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 (n - 1) / n x 1 MB in the 2 s of the fastest call, which is not the first."""
    clock = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0, 30.0, 39.0])
    monkeypatch.setattr(network.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda data: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert network.bus_bandwidth(torch.empty(250_000)) == pytest.approx(2 * 7 / 8 * 1e-3 / 2)


def _check(rank: int, port: int, nodes: int, folder: str, slow: int) -> None:
    os.environ |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NODEID": str(rank), "SLURMD_NODENAME": NAMES[rank]}
    real = dist.all_reduce
    if rank == slow:
        dist.all_reduce = lambda *given, **options: (time.sleep(0.3), real(*given, **options))
    with redirect_stdout(StringIO()) as printed:
        found = list(check_node.check_network(f"127.0.0.1:{port}", 0, network.Least(between=0.006)))
    Path(folder, f"{rank}.txt").write_text(json.dumps([printed.getvalue(), found]))


@pytest.mark.medium
@pytest.mark.skipif(torch.cuda.is_available(), reason="the check would use the GPU")
@pytest.mark.parametrize(("nodes", "slow"), [(3, 1), (4, None)])
def test_a_planted_slow_node_is_found(nodes: int, slow: int | None, tmp_path: Path, free_port: int) -> None:
    """The all-reduce of 1 MB takes 0.3 s on node1, which is 0.0035 GB/s."""
    on_processes(_check, free_port, free_port, nodes, str(tmp_path), slow, count=nodes)
    (printed, found), *others = [json.loads((tmp_path / f"{rank}.txt").read_text()) for rank in range(nodes)]
    assert others == [["", []]] * (nodes - 1)
    assert len(found) == (slow is not None)
    assert all(problem.startswith("node1 exchanges 0.00") for problem in found)
    assert printed.startswith("all-reduce of 1 MB over gloo, bus bandwidth in GB/s: between two nodes ")


@pytest.mark.slow
def test_each_node_starts_a_rank_per_gpu(free_port: int) -> None:
    """Two ranks of one node, started as on GPUs; and ranks that find no store."""
    store = dist.TCPStore("127.0.0.1", free_port, 1, True, timedelta(seconds=60))
    job = network.Job("127.0.0.1", free_port, 1, 0, 2, "gloo", 60)
    speeds = network.measured(job, store)
    assert list(speeds) == [(0,)]
    assert speeds[0,] > 0
    with pytest.raises(RuntimeError, match=r"(?i)time|refused"):
        network.measured(job._replace(port=1, seconds=1), store)
