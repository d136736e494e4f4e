"""The profile of a few steps, read back from its files."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tessera.data.batch import Batch
from tessera.pretrain.command_line import load
from tessera.pretrain.loop import train
from tessera.pretrain.monitoring.profile import Profiler, check_profile, profiled_steps
from tessera.pretrain.monitoring.recorder import Recorder
from tessera.runtime import preemption
from tessera.runtime.settings import SettingsError
from tests.pretrain.test_loop import Faulty, make, raw, settings


@pytest.mark.medium
@pytest.mark.usefixtures("fresh_engine")
@pytest.mark.parametrize(("text", "done", "stopped"), [("3:5", 0, None), ("3:6", 2, 4)])
def test_the_steps_that_the_log_counts_are_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, done: int, stopped: int | None
) -> None:
    """A new run, and one that continues after step 2. It is asked to stop in step 4, and ends after step 5."""
    written = (3, 4, 5)
    config = settings("--profile", text, "--record_every", "100")
    run = make(Faulty(config), config, tmp_path)
    run.state.step, run.recorder = done, Recorder(tmp_path, done)

    def batches() -> Iterator[Batch]:
        for step in range(done, 8):
            monkeypatch.setattr(preemption, "stop_requested", lambda step=step: step + 1 >= (stopped or 9))
            yield raw(step, 0, 8)

    if stopped:
        with pytest.raises(preemption.Preempted, match="Step 5 is done"):
            train(run, batches())
    else:
        train(run, batches())
    stem = tmp_path / "profile" / f"steps-{written[0]}-{written[-1]}"
    events = json.loads(gzip.decompress(Path(f"{stem}.trace.json.gz").read_bytes()))["traceEvents"]
    labels = [event["name"] for event in events if event["name"].startswith("step ")]
    assert labels == [f"step {step}" for step in written]
    assert sum(event["name"] == "wait for the loader" for event in events) == len(written)
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if "dur" in event}
    products = [event["ts"] for event in events if event["name"] == "aten::addmm"]
    for step in written:
        begin, end = spans[f"step {step}"]
        assert sum(begin <= at <= end for at in products) == len(products) / len(written) > 0
    text = Path(f"{stem}.operations.txt").read_text()
    first, _, header, *rows = text.splitlines()
    assert first.startswith(f"Steps {written[0]} to {written[-1]}, process 0, the CPU: ")
    assert header.startswith("operation")
    assert len([row for row in rows if row.startswith("aten::")]) > 5
    assert "no snapshot of the memory" in rows[-1]
    assert len(list((tmp_path / "profile").iterdir())) == 2


@pytest.mark.parametrize("text", ["20", "5:4", "0:3", "a:b", "-1:3", ":"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not FIRST:LAST, such as 20:25"):
        load(["--profile", text])


@pytest.mark.parametrize("text", ["20:25", "10:12", "29:31"])
def test_steps_that_the_run_does_not_take_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=f"--profile {text}: this run only takes the steps 22 to 30"):
        check_profile(text, 21, 30)
    with pytest.raises(SettingsError, match="this run has no steps left"):
        check_profile(text, 30, 30)
    check_profile("22:30", 21, 30)
    check_profile(None, 21, 30)
    assert profiled_steps("22:30") == range(22, 31)


def test_all_processes_finish_the_last_step_together_but_one_is_profiled(tmp_path: Path) -> None:
    other = Profiler("3:4", tmp_path, torch.device("cpu"), main=False)
    with other:
        assert [step for step in range(1, 9) if (other.begin(step), other.ends(step))[1]] == [4]
    assert not (tmp_path / "profile").exists()
