"""One run that is stopped by signals and resumed until it is done, all in one process.

The first signal of a turn comes at a random moment, or as soon as the run does what the turn aims at.

python stops_in_turn.py FILE.json

FILE.json holds `arguments` without --resume, `output`, and the number of `stops`. OUTPUT/stops.json is the list of
turns: exit code, signals sent and the activity at that moment, last reported step, message, step of the newest
checkpoint, and step of the last line of metrics.jsonl.
"""

import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

from tessera.pretrain.run import main
from tessera.runtime import preemption

AIMS = [None, "step", "save", "evaluation"]
"""What the run does when the first signal of a turn comes, in turn. None: anything."""


class Signals(threading.Thread):
    """Sends the signals of a turn to this process, or to this one and its loader workers."""

    def __init__(self, rng: random.Random, output: Path, aim: str | None) -> None:
        super().__init__(daemon=True)
        self.output, self.before, self.aim = output, len(lines(output)), aim
        self.after = rng.choice([0, 0, 1, 2])  # records, so that a fast machine is stopped as often as a slow one
        first = 0.0 if aim else rng.uniform(0, 0.3 if self.after else 1.0)
        delays = [first] + [rng.uniform(0, 0.4) for _ in range(rng.choice([0, 0, 1, 9]))]
        self.group = rng.random() < 0.5
        self.plan = [(delay, rng.choice(preemption.SIGNALS)) for delay in delays]
        self.over, self.sent = threading.Event(), []

    def run(self) -> None:
        while self.plan and len(lines(self.output)) < self.before + self.after and not self.over.wait(0.01):
            pass
        while self.plan and self.aim and self.aim not in doing() and not self.over.wait(0.001):
            pass
        for delay, number in self.plan:
            if self.over.wait(delay):
                return
            self.sent.append([number.name, *doing()])
            # sent by another process, as a scheduler does: loader workers exit on a SIGTERM of this process
            target = -os.getpgrp() if self.group else os.getpid()
            subprocess.run(["/bin/kill", f"-{number:d}", "--", str(target)], start_new_session=True, check=True)


def lines(output: Path) -> list[str]:
    path = output / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def doing() -> list[str]:
    """Return the activities of this process's threads."""
    found = set()
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            found.add(Path(frame.f_code.co_filename).name + ":" + frame.f_code.co_name)
            frame = frame.f_back
    known = {"step.py:start_step": "step", "save.py:save": "save", "online.py:evaluate": "evaluation"}
    return [name for place, name in known.items() if place in found] or ["other"]


class Tee(io.StringIO):
    def write(self, text: str) -> int:
        sys.__stderr__.write(text)
        return super().write(text)


def turn(arguments: list[str], output: Path, rng: random.Random | None, aim: str | None) -> dict:
    said = Tee()
    signals = Signals(rng or random.Random(0), output, aim)
    if rng is None:
        signals.plan = []
        preemption.forget()  # a signal that came after the end of the turn before
    signals.start()
    with contextlib.redirect_stderr(said):
        code = main(arguments)
    signals.over.set()
    signals.join()
    latest = output / "checkpoints" / "latest"
    return {
        "code": code,
        "sent": signals.sent,
        "reported": max(map(int, re.findall(r"^step (\d+)/", said.getvalue(), re.M)), default=None),
        "message": re.findall(r"^stops_in_turn\.py: .*", said.getvalue(), re.M)[-1:],
        "latest": int(latest.resolve().name[5:]) if latest.exists() else None,
        "recorded": json.loads(lines(output)[-1])["step"],
    }


def run_turns(plan: dict) -> None:
    output, turns = Path(plan["output"]), []
    for number in range(plan["stops"] + 1):
        arguments = [*plan["arguments"], "--output", str(output), *["--resume"] * (number > 0)]
        rng = random.Random(f"0 {number}") if number < plan["stops"] else None
        turns.append(turn(arguments, output, rng, AIMS[number % len(AIMS)]))
        (output / "stops.json").write_text(json.dumps(turns, indent=1))
        if turns[-1]["code"] != preemption.EXIT_CODE:
            sys.exit(turns[-1]["code"])
    sys.exit("the run did not finish")


if __name__ == "__main__":
    preemption.listen()  # as in run.py, and between the turns
    run_turns(json.loads(Path(sys.argv[1]).read_text()))
