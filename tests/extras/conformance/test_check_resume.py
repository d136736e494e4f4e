"""`tessera check_resume` on a small trainer that may forget a part of its state."""

import shlex
import sys
from pathlib import Path

import pytest

from tessera.extras.conformance.check_resume import ResumeError, ResumeSettings, run

TRAINER = """
import json, os, pickle, random, sys, time
folder, forget = sys.argv[1], "forget" in sys.argv
os.makedirs(folder, exist_ok=True)
step, weight, state = 0, 1.0, random.Random(0).getstate()
if "resume" in sys.argv:
    with open(folder + "/checkpoint", "rb") as file:
        step, weight, state = pickle.load(file)
draws = random.Random(1)
if not (forget and "resume" in sys.argv):
    draws.setstate(state)
with open(folder + "/log.jsonl", "a") as log:
    while step < 60:
        step, weight = step + 1, 0.9 * weight + draws.random()
        log.write(json.dumps({"step": step, "loss": weight, "seconds": time.time()}) + "\\n")
        log.flush()
        if step % 5 == 0:
            with open(folder + "/new", "wb") as file:
                pickle.dump((step, weight, draws.getstate()), file)
            os.replace(folder + "/new", folder + "/checkpoint")
        waits = folder.endswith("/resumed") and "resume" not in sys.argv and "ends" not in sys.argv
        time.sleep(60 if waits and step == 30 else 0.005)  # until it is killed
"""


def settings(folder: Path, *words: str, **others) -> ResumeSettings:
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    ends = ["ends"] if others.get("kill_at", 20) > 60 else []
    train = shlex.join([sys.executable, str(script), "{folder}", *ends])
    given = {"train": train, "resume": shlex.join([*shlex.split(train), "resume", *words]), "kill_at": 20}
    return ResumeSettings(**(given | {"metrics": "{folder}/log.jsonl"} | others))


def test_an_exact_resume_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(settings(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step: uninterrupted 60, resumed 60"
    assert lines[1].startswith("loss: uninterrupted ")
    assert len(lines) == 2


def test_a_forgotten_state_is_found(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"differs from the uninterrupted run in loss\."):
        run(settings(tmp_path, "forget"))
    with pytest.raises(ResumeError, match=r"in seconds\."):
        run(settings(tmp_path, values=["loss", "seconds"]))


def test_a_run_that_was_not_resumed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="ended before it was killed at step 61"):
        run(settings(tmp_path, kill_at=61))
    with pytest.raises(ResumeError, match="differs from the uninterrupted run in step, loss"):
        run(settings(tmp_path, resume="true"))
    with pytest.raises(ResumeError, match="ended with exit code 1"):
        run(settings(tmp_path, resume="false"))
    with pytest.raises(ResumeError, match="has no accuracy"):
        run(settings(tmp_path, values=["accuracy"]))
