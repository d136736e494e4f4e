"""The profile of a few steps: `--profile 20:25` writes it to OUTPUT/profile/.

- `steps-20-25.trace.json.gz`: a trace of torch's profiler, for https://ui.perfetto.dev.
- `steps-20-25.operations.txt`: the ten costliest operations.
- `steps-20-25.memory.pickle`: a snapshot of the GPU's memory and its history, for https://pytorch.org/memory_viz. Torch
  makes none on a CPU.

Steps are counted as in the log: step 20 is the one after which the log says `step 20`. Only the main process is
profiled. The other processes wait for it in collectives, so its trace also shows for how long it waits for them. The
profiler slows down the steps, mostly those of small models.
"""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tessera.runtime.settings import SettingsError

log = logging.getLogger(__name__)
WAIT = "wait for the loader"
"""Label of the time in which the process waits for the loader."""
SHOWN = 10
"""Number of operations in the table."""
MEMORY_EVENTS = 100_000
"""Largest number of allocations in the history of a memory snapshot."""


def profiled_steps(text: str | None) -> range | None:
    """Return the steps that a text such as `20:25` names, here 20 to 25. Return None if the text is None.

    Raises:
        ValueError: the text has another form.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise ValueError(f"{text} is not FIRST:LAST, such as 20:25. The first step is 1.")
    return range(int(first), int(last) + 1)


def check_profile(text: str | None, done: int, steps: int) -> None:
    """Check that a run of `steps` steps, of which `done` are done, still takes all steps that `--profile` names.

    Raises:
        SettingsError: the run does not take one of the steps.
    """
    profiled = profiled_steps(text)
    if profiled and not done < profiled[0] <= profiled[-1] <= steps:
        left = f"only takes the steps {done + 1} to {steps}" if done < steps else "has no steps left"
        raise SettingsError(f"--profile {text}: this run {left}. Choose other steps, or give more --steps.")


class Profiler:
    """Profiles the steps that `text` names. Without a text, all methods do nothing.

    As a context, it writes the profile of fewer steps if the run ends before the last one.

    Args:
        text: value of `--profile`.
        output: run folder.
        device: device of this process.
        main: True on the process that is profiled.
    """

    def __init__(self, text: str | None, output: Path, device: torch.device, *, main: bool) -> None:
        self.steps, self.folder, self.device, self.main = profiled_steps(text), output / "profile", device, main
        self.running = ExitStack()
        self.label = ExitStack()
        self.profile: profile | None = None
        self.done = 0

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def begin(self, step: int) -> None:
        """Begin the profile before its first step, and label the step in the trace."""
        if not self.main or self.steps is None or step not in self.steps:
            return
        if self.profile is None:
            activities, cuda = [ProfilerActivity.CPU], self.device.type == "cuda"
            if cuda:
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.synchronize(self.device)
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self.profile = self.running.enter_context(profile(activities=activities, profile_memory=True))
        self.label.close()
        self.label.enter_context(record_function(f"step {step}"))
        self.done += 1

    def ends(self, step: int) -> bool:
        """Return True if `step` is the last step of the profile. The result is equal on all processes."""
        return self.steps is not None and step == self.steps[-1]

    def end(self, step: int) -> None:
        """Write the profile after its last step."""
        if self.ends(step):
            self._write()

    def _write(self) -> None:
        """Write the files of the profile, if it has begun. Without a disk to write to, log a warning."""
        if self.profile is None or self.steps is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.label.close()
        self.running.close()
        found, steps, self.profile, self.steps = self.profile, self.steps[: self.done], None, None
        path = self.folder / f"steps-{steps[0]}-{steps[-1]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(f"{path}.trace.json.gz")
            Path(f"{path}.operations.txt").write_text(operations(found, steps, self.device))
            if self.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
        except OSError as error:
            log.warning("%s. The run continues without its profile.", error)
        else:
            log.info("The profile of the steps %d to %d is in %s.", steps[0], steps[-1], self.folder)


def operations(found: profile, steps: range, device: torch.device) -> str:
    """Return a table of the operations that take most of the time of a step, as text.

    The time of an operation is its own time on the device, without the operations that it calls.
    """
    cuda = device.type == "cuda"

    def own_time(event: Any) -> float:
        return event.self_device_time_total if cuda else event.self_cpu_time_total  # microseconds

    averages = found.key_averages()
    labels = {
        event.key: event.cpu_time_total for event in averages if event.key == WAIT or event.key.startswith("step ")
    }
    waited = labels.pop(WAIT, 0.0)
    whole = sum(labels.values())
    events = sorted((e for e in averages if e.key != WAIT and e.key not in labels), key=own_time, reverse=True)
    count, name = len(steps), torch.cuda.get_device_name(device) if cuda else "the CPU"
    memory = "self_device_memory_usage" if cuda else "self_cpu_memory_usage"
    rows = [("operation", "ms a step", "share", "calls a step", "MB allocated a step")]
    for event in events[:SHOWN]:
        share, size = own_time(event) / max(whole, 1), getattr(event, memory) / 1e6 / count
        cells = (f"{own_time(event) / 1e3 / count:.1f}", f"{100 * share:.1f} %", f"{event.count / count:.0f}")
        rows.append((event.key, *cells, f"{size:.1f}".replace("-0.0", "0.0")))
    shown, total = (100 * sum(map(own_time, part)) / max(whole, 1) for part in (events[:SHOWN], events))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [f"{row[0]:<{widths[0]}}  {'  '.join(map(str.rjust, row[1:], widths[1:]))}" for row in rows]
    lines = [
        f"Steps {steps[0]} to {steps[-1]}, process 0, {name}: {whole / 1e3 / count:.1f} ms a step under the profiler, "
        f"of which {waited / 1e3 / count:.1f} ms are the wait for the loader.",
        "",
        *table,
        "",
        f"These operations take {shown:.1f} %, all operations {total:.1f} %.",
        "The rest of a step is Python, or the wait for the loader.",
    ]
    if not cuda:
        lines.append("There is no snapshot of the memory, because torch makes one on a GPU only.")
    return "\n".join(lines) + "\n"
