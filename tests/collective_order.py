"""Collective operations of a process, which must be the same, in the same order, on all ranks.

On GPUs, a rank that calls another collective waits forever. Under gloo, two collectives that differ only in their place
in the code go on, with each other's values. torch's flight recorder notes every collective with its call stack, also
those of DDP, FSDP2 and DeepSpeed.
"""

import json
import pickle
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from tests.launched import ROOT

RECORDING = {"TORCH_FR_BUFFER_SIZE": "50000"}
"""Environment variable that turns the recorder on. It keeps this number of collectives."""


def write(folder: Path, rank: int) -> None:
    """Write the collectives of this process to `folder`: for each process group, a list in the order of the calls.

    Messages from one rank to another are left out, because the other ranks take no part.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in pickle.loads(_distributed_c10d._dump_fr_trace())["entries"]:
        if not entry["is_p2p"]:
            groups[entry["process_group"][0]].append(_describe(entry))
    (folder / f"collectives-{rank}.json").write_text(json.dumps(groups))


def assert_equal(folder: Path) -> None:
    """Assert that all processes that wrote to `folder` called the same collectives.

    A process without a collective in a group is no member of the group, as under HSDP: if it were, the others would
    still wait for it. All processes are members of group 0.
    """
    paths = sorted(folder.glob("collectives-*.json"))
    of_ranks = {path.name: json.loads(path.read_text()) for path in paths}
    for group in {"0"}.union(*of_ranks.values()):
        members = {name: own.get(group, []) for name, own in of_ranks.items() if group in own or group == "0"}
        (first, wanted), *others = members.items()
        for name, calls in others:
            for number, (expected, found) in enumerate(zip_longest(wanted, calls, fillvalue="nothing")):
                assert expected == found, f"{number} of group {group}:\n{expected} in {first}\n{found} in {name}"


def _describe(entry: dict[str, Any]) -> str:
    """Return the operation, shapes, data types, and the line of this project that calls it.

    The callers of this line may differ, because one rank may gather to keep and another to take part.
    """
    calls = [f"{frame['filename'].removeprefix(f'{ROOT}/')}:{frame['line']}" for frame in entry["frames"]]
    own = [call for call in calls if not call.startswith(("/", "runtime/collectives.py"))]
    operation = entry["profiling_name"]
    side = "output" if operation.endswith(":scatter") else "input"  # only one rank has both
    shapes = f"{entry[f'{side}_sizes']} {entry[f'{side}_dtypes']}"
    if operation.endswith(":all_to_all"):
        shapes = str(entry["input_dtypes"])  # each rank sends as much as it holds
    return f"{operation} {shapes} at {own[0] if own else 'no line of this project'}"
