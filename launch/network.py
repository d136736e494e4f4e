"""The speed of the network of a job: all-reduces within each node, between neighbouring nodes, and over all nodes.

One rank per GPU takes part, as in training. The nodes form a ring, and each node is measured with both of its
neighbours. A node that is slow with both is named, and so is a pair of nodes that is slow although its nodes are not.

Speeds are bus bandwidths in GB/s: 2 (n - 1) / n x bytes / seconds for an all-reduce over n ranks. This is the number of
bytes that each rank has to send and to receive per second, so that it does not depend on n and can be compared with
the speed of a link.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

SIZES = {"nccl": 2**28, "gloo": 2**20}
"""Number of bytes of an all-reduce: 256 MB are enough to reach the full speed of any link of a GPU."""
REPEATS = 3
"""Number of timed all-reduces, of which the fastest counts."""
SLOW = 0.5
"""Part of the median speed below which a node or a pair counts as slow."""
Speeds = dict[tuple[int, ...], float]
"""Bus bandwidths in GB/s, by the numbers of the nodes that took part."""


class Least(NamedTuple):
    """Smallest bus bandwidths in GB/s, within nodes and between nodes. None if the user gave none."""

    within: float | None = None
    between: float | None = None


LEAST = {"nccl": Least(within=5.0, between=1.0), "gloo": Least(within=0.0, between=0.0)}
"""Defaults. GPUs on PCIe 3.0 reach about 10 GB/s; with less than half of it, they do not copy to each other directly. A
network of 10 Gbit/s, the slowest with which several nodes of GPUs are of use, carries 1.25 GB/s; with less, NCCL has
probably chosen another network, such as one for management."""


class Job(NamedTuple):
    """The nodes of a job, seen from one of them."""

    host: str
    port: int
    """Host and port of the store."""
    nodes: int
    node: int
    ranks: int
    """Number of ranks on each node."""
    backend: str
    """`nccl` on GPUs, `gloo` elsewhere."""
    seconds: float
    """Longest time for which a rank waits for the others."""


def rounds(nodes: int, ranks: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the groups of nodes that are measured at the same time: single nodes, pairs in a ring, all nodes."""
    if ranks > 1:
        yield [(node,) for node in range(nodes)]
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]
    last = ring[-1:] if nodes % 2 and nodes > 2 else []  # in an odd ring, a third round has the last pair
    ring = ring[: len(ring) - len(last)]
    yield from filter(None, (ring[::2], ring[1::2], last))
    if nodes > 2:
        yield [tuple(range(nodes))]


def measure(local: int, job: Job) -> None:
    """Take part in all rounds as rank `local` of a node. The first rank of a group writes the speed to the store.

    Raises:
        RuntimeError: the ranks do not reach each other.
    """
    import torch  # imported here, because the other checks of a node need no torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    device = torch.device("cuda", local) if job.backend == "nccl" else torch.device("cpu")
    if job.backend == "nccl":
        torch.cuda.set_device(device)
    wait = timedelta(seconds=job.seconds)
    store = TCPStore(job.host, job.port, is_master=False, wait_for_workers=False, timeout=wait)
    for groups in rounds(job.nodes, job.ranks):
        for nodes in groups:
            if job.node in nodes:
                # a process group of its own, so that other nodes do not wait
                own = PrefixStore(f"{job.backend} group {nodes}", store)
                rank, size = nodes.index(job.node) * job.ranks + local, len(nodes) * job.ranks
                dist.init_process_group(job.backend, store=own, rank=rank, world_size=size, timeout=wait)
                speed = bus_bandwidth(torch.zeros(SIZES[job.backend] // 4, device=device))
                dist.destroy_process_group()
                if rank == 0:
                    store.set(f"{job.backend} {nodes}", str(speed))


def bus_bandwidth(data: "torch.Tensor") -> float:
    """Return the bus bandwidth in GB/s of an all-reduce of `data`. Collective."""
    import torch.distributed as dist

    seconds, ranks = [], dist.get_world_size()
    for _ in range(1 + REPEATS):  # the first one connects the ranks
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(data)
        data[:1].tolist()  # wait for the device
        seconds.append(time.perf_counter() - started)
    return 2 * (ranks - 1) / ranks * data.nbytes / min(seconds[1:]) / 1e9


def run_ranks(job: Job) -> None:
    """Run all ranks of this node. A single one on a CPU runs in this process.

    Raises:
        RuntimeError: a rank failed.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    if job.backend == "gloo" and job.ranks == 1:
        measure(0, job)
        return
    try:
        spawn(measure, (job,), job.ranks)
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise RuntimeError(str(error).strip().splitlines()[-1]) from error


def measured(job: Job, store: "Store") -> Speeds:
    """Measure the network, and return all speeds on the first node. On the other nodes, return nothing. Collective.

    Args:
        store: store of the job, with one client on each node.

    Raises:
        RuntimeError: the ranks do not reach each other.
    """
    if job.nodes * job.ranks == 1:
        return {}
    run_ranks(job)
    store.set(f"{job.backend} is done on {job.node}", "")
    if job.node > 0:
        return {}
    store.wait([f"{job.backend} is done on {node}" for node in range(job.nodes)])
    groups = [nodes for groups in rounds(job.nodes, job.ranks) for nodes in groups]
    return {nodes: float(store.get(f"{job.backend} {nodes}")) for nodes in groups}


def problems(speeds: Speeds, names: Sequence[str], given: Least | None, backend: str) -> Iterator[str]:
    """Yield a problem per slow node and per slow pair of nodes, or one if all nodes are slow.

    Args:
        speeds: result of `measured`.
        names: names of the nodes.
        given: smallest speeds that the user gave. None is as if there were none.
    """
    given, default = given or Least(), LEAST[backend]
    single = {nodes[0]: speed for nodes, speed in speeds.items() if len(nodes) == 1}
    least = smallest(single.values(), given.within, default.within)
    for node, speed in single.items():
        if speed < least:
            yield (
                f"the GPUs of {names[node]} exchange {speed:.3g} GB/s, and {least:.3g} are expected. Look at "
                f"`nvidia-smi topo -m` on this node, or avoid it with sbatch --exclude={names[node]}"
            )
    pairs = {nodes: speed for nodes, speed in speeds.items() if len(nodes) == 2}
    least = smallest(pairs.values(), given.between, default.between)
    slow = {nodes for nodes, speed in pairs.items() if speed < least}
    if pairs and len(slow) == len(pairs):
        yield (
            f"{names[0]} to {names[-1]} exchange at most {max(pairs.values()):.3g} GB/s, and {least:.3g} are expected. "
            f"Call export {backend.upper()}_SOCKET_IFNAME=NAME before sbatch, with the fastest interface, or avoid a "
            "node with sbatch --exclude=NODE"
        )
        return
    own = {node: [nodes for nodes in pairs if node in nodes] for node in range(len(names))}
    bad = [node for node, around in own.items() if around and slow.issuperset(around)]
    for node in bad:
        yield (
            f"{names[node]} exchanges {max(pairs[nodes] for nodes in own[node]):.3g} GB/s with its neighbours, and "
            f"{least:.3g} are expected. Avoid the node with sbatch --exclude={names[node]}"
        )
    for nodes in sorted(slow):
        if not set(bad) & set(nodes):
            yield (
                f"{names[nodes[0]]} and {names[nodes[1]]} exchange {pairs[nodes]:.3g} GB/s, and {least:.3g} are "
                "expected. With other nodes, they are faster. Report the link between them, or avoid one of them"
            )


def smallest(speeds: Iterable[float], given: float | None, default: float | None) -> float:
    """Return the smallest speed that is not a problem: as given, or the default and the part `SLOW` of the median."""
    if given is not None or not default:
        return given or 0.0
    known = list(speeds)
    return max(default, SLOW * statistics.median_high(known)) if known else default


def summary(speeds: Speeds, backend: str) -> str:
    """Return a line with all speeds."""
    kinds = {"within a node": 1, "between two nodes": 2, "over all nodes": 3}
    found = {kind: [v for nodes, v in speeds.items() if min(len(nodes), 3) == size] for kind, size in kinds.items()}
    shown = [f"{kind} {min(some):.3g} to {max(some):.3g}" for kind, some in found.items() if some]
    return f"all-reduce of {SIZES[backend] / 1e6:.0f} MB over {backend}, bus bandwidth in GB/s: {', '.join(shown)}"
