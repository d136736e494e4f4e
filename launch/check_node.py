"""Check a node before a job starts there: the GPUs, the run folder, the shards and the network.

    python -m tessera.launch.check_node [--sees FILE] [--writes FOLDER] [--meets HOST:PORT] [--within GB/S]
                                        [--between GB/S] -- FLAGS OF THE JOB

The scripts in launch/ run this check on every node. Each problem is printed with the node's name. The exit code is 2 if
there is a problem, else 0.
"""

import argparse
import glob
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from webdataset.shardlists import expand_urls

from tessera.launch import network
from tessera.launch.jobs import LaunchError, preset_file, read_settings_of_run

SHARD_SETTINGS = ("data", "train", "val", "evaluation.train", "evaluation.val")
"""Names of the settings that hold shards, in pretraining and in evaluations."""
MEET_SECONDS = 90
"""Longest time for which a node waits for the other nodes of the job."""
MIN_FREE_BYTES = 10**9
"""Smallest free disk space in bytes with which a run may start, even if its checkpoints are smaller."""


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 if the node is fine, 2 if there is a problem."""
    parser = argparse.ArgumentParser(description="Check this node before a job starts.", allow_abbrev=False)
    parser.add_argument("--sees", type=Path, metavar="FILE", help="file from the first node; this node must see it")
    parser.add_argument("--writes", type=Path, metavar="FOLDER", help="run folder of the job, which must be writable")
    parser.add_argument("--meets", metavar="HOST:PORT", help="where the nodes of the job meet, on the first node")
    for name, least in network.LEAST["nccl"]._asdict().items():
        least = f"default: {least:g} and half of the median on GPUs, none on CPUs"
        parser.add_argument(
            f"--{name}", type=float, metavar="GB/S", help=f"smallest bus bandwidth {name} nodes; {least}"
        )
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the job, which name its shards")
    arguments = sys.argv[1:] if argv is None else argv
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    problems = [
        *check_gpus(gpus),
        *check_folder(options.sees, options.writes),
        *check_shards(arguments[split + 1 :]),
        *check_network(options.meets, gpus, network.Least(options.within, options.between)),
    ]
    for problem in problems:
        print(f"{node()}: {problem}", file=sys.stderr)
    return 2 if problems else 0


def node() -> str:
    """Return the name that this node has in SLURM, or the host name outside of SLURM."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def check_gpus(count: int) -> Iterator[str]:
    """Yield a problem per GPU that fails a matrix product, and a problem if torch finds fewer than `count` GPUs."""
    try:
        import torch  # imported here, because other checks need no torch
    except ImportError as error:
        yield f"{sys.executable} cannot import torch ({error}). Put the environment on a disk that this node sees."
        return
    seen = torch.cuda.device_count()
    if seen < count:
        yield (
            f"{count} GPU(s) were allocated and torch sees {seen}. Run nvidia-smi on this node, or avoid the node with "
            f"sbatch --exclude={node()}"
        )
    for number in range(min(seen, count)):
        try:
            ones = torch.ones(256, 256, device=f"cuda:{number}")
            total = float((ones @ ones).sum())
            if total != 256**3:
                raise RuntimeError(f"a product of two 256 x 256 matrices of ones sums to {total}, not {256**3}")
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            yield f"GPU {number} does not compute: {reason}. Avoid the node with sbatch --exclude={node()}"


def check_network(meets: str | None, gpus: int, given: network.Least | None = None) -> Iterator[str]:
    """Yield a problem if the nodes of the job do not reach each other. On the first node, also yield one per slow node.

    Training uses gloo for numbers on the CPU, and NCCL for those on GPUs. Both choose a network interface by
    themselves. A node whose name stands for its loopback address offers gloo an address that no other node reaches.

    Args:
        meets: HOST:PORT on the first node, a free port. None skips this check.
        gpus: GPUs that the job has on this node. If there are none, or torch sees fewer, NCCL is not checked.
        given: smallest speeds that the user gave.
    """
    nodes, number = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1), int(os.environ.get("SLURM_NODEID") or 0)
    if meets is None or max(nodes, gpus) == 1:
        return
    import torch  # imported here, because other checks need no torch
    import torch.distributed as dist

    host, port = meets.rsplit(":", 1)
    cuda = gpus > 0 and torch.cuda.device_count() >= gpus
    ranks, backend = {"gloo": 1} | ({"nccl": gpus} if cuda else {}), "TCP"
    try:
        store = dist.TCPStore(host, int(port), nodes, number == 0, timedelta(seconds=MEET_SECONDS))
        store.set(f"name of {number}", node())
        for backend in ranks:
            job = network.Job(host, int(port), nodes, number, ranks[backend], backend, MEET_SECONDS)
            speeds = network.measured(job, store)
            if speeds:
                print(network.summary(speeds, backend), flush=True)
                names = [store.get(f"name of {one}").decode() for one in range(nodes)]
                yield from network.problems(speeds, names, given if backend == [*ranks][-1] else None, backend)
    except RuntimeError as error:
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        yield (
            f"no sum with the other node(s) over {backend}, met at {meets}: {str(error).splitlines()[0]}. This node's "
            f"name stands for {own_address()}. Call export GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME before "
            f"sbatch, with the interface that reaches the other nodes. This node has: {interfaces}"
        )


def own_address() -> str:
    """Return the address of this node's host name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"no address ({error.strerror})"


def check_folder(sees: Path | None, writes: Path | None) -> Iterator[str]:
    """Yield a problem if the run folder is not on a shared disk, is not writable, or has too little free space.

    Args:
        sees: file that the first node wrote and that this node must see.
        writes: run folder.
    """
    if sees and not appears(sees):
        yield f"{sees}, written by the first node, is not visible. --output must be on a disk that all nodes share."
        return
    if writes is None:
        return
    try:
        with tempfile.TemporaryFile(dir=writes) as file:
            file.write(b"written")
            file.flush()
        free = shutil.disk_usage(writes).free
    except OSError as error:
        yield f"cannot write to {writes}: {error.strerror}. Choose another --output."
        return
    needed = max(MIN_FREE_BYTES, newest_checkpoint_bytes(writes))
    if free < needed:
        yield (
            f"the disk of {writes} has {decimal(free)} free, and a checkpoint needs {decimal(needed)}. "
            "Free some space, or choose another --output."
        )


def appears(file: Path, seconds: float = 10) -> bool:
    """Return True as soon as a file exists, or False if the file does not exist after `seconds`.

    The function waits, because a network disk may show new files late.
    """
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def newest_checkpoint_bytes(run: Path) -> int:
    """Return the size of a run's newest checkpoint, or 0 if the run has no checkpoint."""
    steps = sorted((run / "checkpoints").glob("step-*"), key=lambda path: (len(path.name), path.name))
    return sum(file.stat().st_size for file in steps[-1].rglob("*") if file.is_file()) if steps else 0


def check_shards(flags: list[str]) -> Iterator[str]:
    """Yield a problem for each pattern of shards whose first or last shard this node cannot read."""
    try:
        patterns = list(shard_patterns(flags))
    except (LaunchError, RecursionError, ValueError) as error:
        yield f"cannot tell which shards the job reads: {error}. Check --config, --data and the evaluation's shards."
        return
    for pattern in dict.fromkeys(patterns):
        paths = expand(pattern)
        if not paths:
            yield f"no shard matches {pattern}. Check the pattern, and that this node sees its disk."
        for path in dict.fromkeys(paths[:1] + paths[-1:]):
            if reason := why_unreadable(path):
                yield f"cannot read {path}: {reason}. Check that this node sees its disk."
                break


def shard_patterns(flags: list[str]) -> Iterator[str]:
    """Yield the paths, globs and brace ranges of the shards that the job reads.

    Flags take precedence over the settings file.

    Raises:
        LaunchError: the settings file cannot be read.
        ValueError: the value of a setting is not a pattern, a list, a mapping or JSON text.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--data", "--data.shards", action="append")
    for name in SHARD_SETTINGS[1:]:
        parser.add_argument(f"--{name}", action="append")
    for name in ("config", "output"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--resume", nargs="?", const="true")
    given = vars(parser.parse_known_args(flags)[0])
    if given.get("resume", "true").lower() not in ("true", "false"):
        given["output"] = given["resume"]
    files = [preset_file(given["config"])] if "config" in given else []
    if "resume" in given and "output" in given and (own := Path(given["output"]) / "config.yaml").exists():
        files.append(own)  # a run keeps the settings that its flags and its settings file do not give
    settings = [read_settings_of_run(file) for file in files]
    if isinstance(section := look_up(settings[-1], "data") if settings else None, dict):
        for one in settings[:-1]:  # a file that changes another setting of this section keeps the shards
            if isinstance(one.get("data"), dict) and one["data"].keys() & section.keys():
                one["data"] = section | one["data"]
    for name in SHARD_SETTINGS:
        yield from as_patterns(given.get(name) or next(filter(None, (look_up(one, name) for one in settings)), None))


def look_up(settings: dict[str, Any], name: str) -> Any:
    """Return `settings["a"]["b"]` for the name `a.b`, or None if there is no such setting."""
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def as_patterns(value: Any) -> list[str]:
    """Return the shard patterns in the value of a setting.

    The value is one pattern, a list of patterns, a mapping from patterns to weights, one of these as JSON text, or a
    section with the setting `shards`.
    """
    if value is None:
        return []
    if isinstance(value, dict):
        return as_patterns(value["shards"]) if "shards" in value else list(value)
    if isinstance(value, list):
        # Lists inside the list are ignored, because a YAML list can contain itself through an alias.
        return [pattern for one in value if isinstance(one, str) for pattern in as_patterns(one)]
    if not isinstance(value, str):
        raise ValueError(f"SHARDS must be text, not a {type(value).__name__}")
    return as_patterns(json.loads(value)) if value.startswith(('["', '{"')) else [value]


def expand(pattern: str) -> list[str]:
    """Return the paths that a pattern matches. URLs are returned unchanged, because servers do not list files."""
    pattern = os.path.expanduser(pattern)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", pattern) or os.path.exists(pattern):
        return [pattern]
    return [
        path
        for braced in expand_urls(pattern)
        for path in (sorted(glob.glob(braced)) if glob.has_magic(braced) else [braced])
    ]


def why_unreadable(path: str) -> str | None:
    """Return the reason why a file or folder cannot be read, or None if it can be read or is a URL."""
    if "://" in path or path.startswith("pipe:"):
        return None
    try:
        if os.path.isdir(path):
            return None if os.listdir(path) else "the folder is empty"
        with open(path, "rb") as file:
            return None if file.read(512) else "the file is empty"
    except OSError as error:
        return error.strerror


if __name__ == "__main__":
    sys.exit(main())
