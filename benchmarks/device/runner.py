"""Run each stage in a process of its own with a time limit, and collect the rows that the stages report.

A row is a JSON object on a line of its own in results.jsonl. A stage appends each row at once, so the rows before a
failure are kept. The output of a stage is written to a log, and is never read as a result.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tessera.runtime.user_error import printable

RESULTS, LOG, TABLE = "results.jsonl", "log.txt", "results.md"
"""Names of the files in the output folder."""
LAST_LINES = 6
"""Number of last lines of output that the result of a failed stage contains."""
LINE = 300
"""Number of characters to which each of the last lines is shortened."""
SHORTEST = 2.0
"""A stage starts only if more than this number of seconds is left."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A command that appends rows to the results."""

    name: str
    command: Sequence[str]
    seconds: float
    """Time limit in seconds. A stage may run for up to twice this time if earlier stages have left time unused."""


def attempt(row: Row, work: Callable[[], Row]) -> Row:
    """Return `row` with the entries that `work` returns. If `work` raises an error, print it and return `ok` False."""
    try:
        return {**row, **work()}
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        return {**row, "ok": False, "error": f"{type(error).__name__}: {first}"}


def append(output: Path, row: Mapping[str, Any]) -> None:
    """Append a row to the results in the folder `output`."""
    with (output / RESULTS).open("a") as file:
        # The first line break ends a line that a killed process left incomplete.
        file.write("\n" + json.dumps(row, default=str) + "\n")


def rows(output: Path, start: int = 0) -> list[Row]:
    """Return the rows of the results file from byte `start` on. Lines that are not rows are left out."""
    path = output / RESULTS
    found = []
    for line in path.read_bytes()[start:].splitlines() if path.exists() else []:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("stage"), str):
                found.append(row)
    return found


def run_stages(stages: Sequence[Stage], output: Path, minutes: float, title: str) -> bool:
    """Run stages one after another, and write the table after each. Return True if all of them passed.

    Args:
        output: folder for the results, the log and the table.
        minutes: time for all stages. Stages that have not started by then are not run, and count as not passed.
        title: first line of the table.
    """
    output.mkdir(parents=True, exist_ok=True)
    start = (output / RESULTS).stat().st_size if (output / RESULTS).exists() else 0
    end = time.monotonic() + 60 * minutes
    passed = True
    for number, stage in enumerate(stages):
        left = end - time.monotonic()
        spare = left - sum(later.seconds for later in stages[number:])
        limit = min(left, stage.seconds + min(max(spare, 0), stage.seconds))
        result = run_stage(stage, output, limit) if left > SHORTEST else {"result": "not started: no time is left"}
        passed &= result["result"] == "passed"
        append(output, {"stage": stage.name} | result)
        print(f"{stage.name}: {', '.join(str(value) for value in result.values())}", flush=True)
        (output / TABLE).write_text(f"{title}\n\n{markdown(rows(output, start))}")
    return passed


def run_stage(stage: Stage, output: Path, limit: float) -> Row:
    """Run one stage for at most `limit` seconds. Return its result, its duration and, if it failed, its last output."""
    started, log = time.monotonic(), output / LOG
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, log.open("ab") as file:
        file.write(f"\n== {stage.name}\n".encode())
        file.flush()
        start = file.tell()
        # start a session of its own, so that all processes of the stage can be ended together
        process = subprocess.Popen(
            stage.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": scratch},
            start_new_session=True,
        )
        why = ""
        try:
            code = process.wait(limit)
            if code:
                why = f"exit code {code}" if code > 0 else f"ended by {_signal_name(-code)}"
        except subprocess.TimeoutExpired:
            why = f"ran longer than {limit:.0f} s"
        finally:
            end(process)
    seconds = round(time.monotonic() - started, 1)
    if not why:
        return {"result": "passed", "seconds": seconds}
    return {"result": f"failed: {why}", "seconds": seconds, "last lines": last_lines(log, start)}


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants, and wait for the process."""
    for pid in descendants(process.pid):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with suppress(OSError):  # the group has no process left
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken device cannot be killed
        process.wait(10)


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process. On systems other than Linux, nothing is yielded."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield from descendants(child)
                yield child


def last_lines(log: Path, start: int) -> str:
    """Return the last lines of a log as one printable line. The log is read from byte `start` on."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    lines = [printable(line.strip())[:LINE] for line in lines if line.strip()]
    return " / ".join(lines[-LAST_LINES:])


def markdown(found: Sequence[Row]) -> str:
    """Return all rows as Markdown. Each stage has its result, and one table for consecutive rows with the same keys."""
    lines = []
    for name in dict.fromkeys(row["stage"] for row in found):
        own = [{key: value for key, value in row.items() if key != "stage"} for row in found if row["stage"] == name]
        results = [row for row in own if "result" in row]
        lines += [f"## {name}", "", *(", ".join(f"{key} {_cell(row[key])}" for key in row) for row in results), ""]
        for keys, group in groupby((row for row in own if "result" not in row), key=tuple):
            lines += [f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
            lines += [f"| {' | '.join(_cell(value) for value in row.values())} |" for row in group]
            lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Return a value as the text of a cell. Floats are rounded to four digits, and the separator `|` is escaped."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return printable(str(value)).replace("|", "\\|")
