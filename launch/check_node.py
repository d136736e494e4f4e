"""Before a job starts on a node: are its GPUs there, can it read the shards, can it write to the run folder?

    python launch/check_node.py [--sees FILE] [--writes FOLDER] -- FLAGS OF THE JOB

The scripts in launch/ run it on every node. It prints what is wrong, naming the node, and exits with 2.
"""

import argparse
import glob
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from webdataset.shardlists import expand_urls

SHARDS = ("data", "train", "val", "evaluation.train", "evaluation.val")
"""settings that name shards, of pretraining and of evaluation"""
MOST_READ = 64
"""shards that are opened, spread over the list: N nodes that open all of 10,000 would only wait for the disk"""
LEAST_FREE = 1e9
"""bytes that a run needs at the very least for its records and a checkpoint"""
PACKAGES = ("torch", "accelerate", "encoders", "data", "evaluation", "pretrain")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all is well, 2 the user has something to change."""
    parser = argparse.ArgumentParser(description="Check this node before a job starts on it.", allow_abbrev=False)
    parser.add_argument("--sees", type=Path, metavar="FILE", help="written by the first node: is the disk shared?")
    parser.add_argument("--writes", type=Path, metavar="FOLDER", help="where the job will write")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the job, which name its shards")
    arguments = sys.argv[1:] if argv is None else argv
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    problems = list(software())
    problems += gpus(int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)) if not problems else []
    problems += folder(options.sees, options.writes)
    problems += shards(arguments[split + 1 :])
    for problem in problems:
        print(f"{node()}: {problem}", file=sys.stderr)
    return 2 if problems else 0


def node() -> str:
    """What SLURM calls this node."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def software() -> Iterator[str]:
    """Packages that this node's Python does not find."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{sys.executable} has no {', '.join(missing)}: is the environment on a disk that this node sees?"


def gpus(count: int) -> Iterator[str]:
    """What is wrong with the `count` GPUs that were allocated here; each computes something."""
    if not count:
        return
    import torch  # takes seconds, which a node without GPUs can save

    seen = torch.cuda.device_count()
    if seen < count:
        yield (
            f"{count} GPU(s) were allocated and torch sees {seen}: see nvidia-smi on this node, or leave it out "
            f"with sbatch --exclude={node()}"
        )
    for number in range(min(seen, count)):
        try:
            ones = torch.ones(256, 256, device=f"cuda:{number}")
            total = float((ones @ ones).sum())
            if total != 256**3:
                raise RuntimeError(f"256 x 256 ones times themselves sum to {total}, not {256**3}")
        except RuntimeError as error:
            yield f"GPU {number} does not compute: {str(error).splitlines()[0]}; sbatch --exclude={node()} avoids it"


def folder(sees: Path | None, writes: Path | None) -> Iterator[str]:
    """What is wrong with the run folder, seen from here."""
    if sees and not appears(sees):
        yield f"does not see {sees}, which another node wrote: --output must lie on a disk that all nodes share"
        return
    if writes is None:
        return
    try:
        with tempfile.TemporaryFile(dir=writes) as file:
            file.write(b"written")
            file.flush()
        free = shutil.disk_usage(writes).free
    except OSError as error:
        yield f"cannot write to {writes}: {error.strerror}; choose another --output"
        return
    needed = max(LEAST_FREE, newest_checkpoint_bytes(writes))
    if free < needed:
        yield f"the disk of {writes} has {free / 1e9:.2f} GB free, and a checkpoint needs {needed / 1e9:.2f} GB"


def appears(file: Path, seconds: float = 10) -> bool:
    """Whether a file is there, or comes: a network disk may show it some seconds late."""
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def newest_checkpoint_bytes(run: Path) -> int:
    """Size of the newest checkpoint of a run, which the next will have too; 0 without one."""
    newest = run / "checkpoints" / "latest"
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) if newest.exists() else 0


def shards(flags: list[str]) -> Iterator[str]:
    """Shards of the job that this node cannot read."""
    try:
        named = list(shard_patterns(flags))
    except (OSError, ValueError, yaml.YAMLError) as error:
        yield f"cannot tell which shards to read: {error}"
        return
    for pattern in dict.fromkeys(named):
        paths = expand(pattern)
        if not paths:
            yield f"no shard matches {pattern}"
        bad = [(path, problem) for path in spread(paths) if (problem := unreadable(path))]
        if bad:
            many = f" (and {len(bad) - 1} more of {len(paths)})" if len(bad) > 1 else ""
            yield f"cannot read {bad[0][0]}: {bad[0][1]}{many}"


def shard_patterns(flags: list[str]) -> Iterator[str]:
    """Paths, globs and brace ranges that the flags name, or else the settings file.

    Raises:
        OSError, yaml.YAMLError: the settings file cannot be read.
        ValueError: it holds no settings, or JSON among the flags is none.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in SHARDS:
        parser.add_argument(f"--{name}", action="append")
    for name in ("config", "output"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--resume", action="store_true")
    given = vars(parser.parse_known_args(flags)[0])
    file = given.get("config")
    if file is None and "resume" in given and "output" in given:
        file = Path(given["output"]) / "config.yaml"
        file = file if file.exists() else None
    settings = yaml.safe_load(Path(file).read_text()) if file else {}
    if not isinstance(settings or {}, dict):
        raise ValueError(f"{file} holds no settings")
    settings = settings or {}
    for name in SHARDS:
        yield from several(given.get(name) or looked_up(settings, name))


def looked_up(settings: dict[str, Any], name: str) -> Any:
    """`settings["a"]["b"]` for `a.b`; None where there is none."""
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def several(value: Any) -> list[str]:
    """Patterns in any of the forms that a setting of shards takes: one, a list, a mapping to weights, JSON of these."""
    if value is None:
        return []
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, list):
        return [pattern for one in value for pattern in several(one)]
    value = str(value)
    return several(json.loads(value)) if value.startswith(('["', '{"')) else [value]


def expand(pattern: str) -> list[str]:
    """Paths of a pattern; a URL is none that a node could look at, and passes."""
    pattern = os.path.expanduser(pattern)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", pattern) or os.path.exists(pattern):
        return [pattern]
    return [
        path
        for braced in expand_urls(pattern)
        for path in (sorted(glob.glob(braced)) if glob.has_magic(braced) else [braced])
    ]


def spread(paths: list[str]) -> list[str]:
    """At most `MOST_READ` of them, evenly spread, the first and the last among them."""
    if len(paths) <= MOST_READ:
        return paths
    return [paths[place * (len(paths) - 1) // (MOST_READ - 1)] for place in range(MOST_READ)]


def unreadable(path: str) -> str | None:
    """Why the beginning of a file cannot be read, or None."""
    if "://" in path or path.startswith("pipe:"):
        return None
    try:
        with open(path, "rb") as file:
            return None if file.read(512) else "it is empty"
    except OSError as error:
        return error.strerror


if __name__ == "__main__":
    sys.exit(main())
