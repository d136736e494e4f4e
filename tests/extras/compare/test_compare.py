"""The command `compare` with real trainings: killed and continued, without labels, and wrong settings."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tessera.extras.compare import cells as compare_cells
from tessera.extras.compare.cells import CompareError, check_data, check_device, fitting, rung_score, train_other
from tessera.extras.compare.compare import compare, train_all, train_others, worse_half
from tessera.extras.compare.compute import FILE, spent
from tessera.extras.compare.correct import Outcomes
from tessera.extras.compare.outcomes import check_same_images, store_outcomes
from tessera.extras.compare.plan import Cell, Plan, identity, load_settings, read_plan, write_plan
from tessera.runtime.lock import LockedError, locked
from tessera.runtime.settings import SettingsError
from tests.launched import ROOT, records, wait_until
from tests.pretrain.small import flags, scored_shards

METHODS = ("lejepa", "mae")


def words(output: Path, *more: str) -> list[str]:
    """Return the flags of a comparison of two methods on digits, with an encoder of one narrow block."""
    train, val = scored_shards()
    small = [word for method in METHODS for pair in flags(method).items() for word in pair]
    encoder = ["--encoder", "vit_micro", "--encoder.depth", "1", "--encoder.dim", "24", "--encoder.heads", "2"]
    run = ["--batch_size", "16", "--workers", "0", "--evaluation.pictures", "0", "--data", train]
    own = ["--methods", ",".join(METHODS), "--points", "2", "--output", str(output)]
    return [*own, *small, *encoder, *run, *(more or ("--evaluation.val", val, "--steps", "6", "--seeds", "1"))]


def without(flags: list[str], section: str) -> list[str]:
    """Return flags without those of the section of a method."""
    left = [number for number, word in enumerate(flags) if word.startswith(section)]
    return [word for number, word in enumerate(flags) if number not in left and number - 1 not in left]


def start(flags: list[str], log: Path, *launcher: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tessera", *launcher, "compare", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log.open("ab"), stderr=subprocess.STDOUT, env=environment, cwd=ROOT)


def wait_for(path: Path, process: subprocess.Popen[bytes], lines: int = 1) -> None:
    while process.poll() is None and (not path.exists() or len(path.read_bytes().splitlines()) < lines):
        time.sleep(0.01)
    assert process.poll() is None, "the comparison ended before it could be killed"


def result(output: Path) -> dict[str, Any]:
    found = json.loads((output / "compare.json").read_text())
    del found["cost"]
    return found


@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_result(tmp_path: Path) -> None:
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    assert start(words(whole), log).wait() == 0, log.read_text()
    process = start(words(killed), log)
    wait_for(killed / "mae-0" / "metrics.jsonl", process, lines=4)  # the second training, after its first checkpoint
    process.kill()
    process.wait()
    done = (killed / "lejepa-0" / "encoder.safetensors").stat().st_mtime_ns
    process = start(words(killed), log)
    wait_for(killed / "outcomes" / "lejepa-0.json", process)  # between two encoders that are scored
    process.kill()
    process.wait()
    assert start(words(killed), log).wait() == 0, log.read_text()
    assert (killed / "lejepa-0" / "encoder.safetensors").stat().st_mtime_ns == done
    text = json.dumps(result(killed)).replace(str(killed), str(whole))
    assert json.loads(text) == result(whole)
    for cell in ("lejepa-0", "mae-0"):
        weights = [(folder / cell / "encoder.safetensors").read_bytes() for folder in (whole, killed)]
        assert weights[0] == weights[1]
        of_run = records(whole / cell)[-1]  # the outcomes are those of the evaluation of the run
        assert result(whole)["arms"][cell[:-2]]["of_seeds"][int(cell[-1])] == pytest.approx(of_run["linear_top1"])
    assert "<svg" in (killed / "compare.html").read_text()
    assert spent(killed / "mae-0") is not None
    for file in [*killed.rglob("*.safetensors"), *killed.rglob("*.html")]:  # the outcomes are enough
        file.unlink()
    for folder in killed.glob("*/checkpoints"):
        shutil.rmtree(folder)
    shutil.rmtree(killed / "mae-0")  # is trained again, and its stored outcomes are not used
    stored = killed / "outcomes" / "mae-0.json"
    stored.write_text(stored.read_text().replace("1", "0"))
    assert start(words(killed), log).wait() == 0, log.read_text()
    assert json.loads(json.dumps(result(killed)).replace(str(killed), str(whole))) == result(whole)
    assert not (killed / "lejepa-0" / "encoder.safetensors").exists()


@pytest.mark.slow
def test_a_stopped_comparison_saves_its_training_and_is_not_confused_by_other_settings(tmp_path: Path) -> None:
    output, log = tmp_path / "views", tmp_path / "log"
    own = ("--minutes", "0.02", "--seeds", "1", "--evaluation.view_images", "50")
    process = start(words(output, *own), log)
    wait_for(output / "lejepa-0" / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, log.read_text()
    assert "start the same command again" in log.read_text()
    plan = (output / "plan.json").read_text()
    with pytest.raises(SettingsError, match=r"with other settings: minutes is 0\.02 there, and 1"):
        compare(words(output, "--minutes", "1", *own[2:]))
    assert start(words(output, *own), log).wait() == 0, log.read_text()
    assert (output / "plan.json").read_text() == plan
    found = json.loads((output / "compare.json").read_text())
    assert found["score"] == "view retrieval"
    assert found["command"] is None
    for method in METHODS:
        assert records(output / f"{method}-0")[-1]["view_retrieval"] == pytest.approx(found["arms"][method]["mean"])
        assert found["cost"]["runs"][f"{method}-0"]["planned"] == pytest.approx(1.2, rel=0.5)


ADAPTER = """
import torch

class Adapter:
    batch_size = 8

    def __init__(self, encoder, task):
        assert task.size == 16
        self.encoder = encoder
        self.optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)

    def views(self, image):
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return [pixels.view(image.height, image.width, 3)[:8, :8].permute(2, 0, 1) / 255]

    def step(self, views, done):
        assert 0 <= done < 1 and views[0].shape == (8, 3, 8, 8)
        print("step at", done)
        self.optimizer.zero_grad()
        self.encoder(views[0]).pooled.square().mean().backward()
        self.optimizer.step()
"""
"""An adapter of a small library."""


@pytest.mark.slow
def test_halving_stops_one_method_and_another_library_is_scored_beside(tmp_path: Path) -> None:
    output, log, adapter = tmp_path / "halved", tmp_path / "log", tmp_path / "my adapter.py"
    adapter.write_text(ADAPTER)
    own = ["--evaluation.val", scored_shards()[1], "--steps", "24", "--seeds", "1", "--points", "4", "--halve"]
    mine = shlex.join([sys.executable, str(adapter)])
    assert start(words(output, *own, "--others", json.dumps({"mine": mine})), log).wait() == 0, log.read_text()
    found = json.loads((output / "compare.json").read_text())
    scores = {method: rung_score(output / f"{method}-0", 6) for method in METHODS}
    (worse,) = found["stopped"]
    assert worse == min(scores, key=lambda name: scores[name] or 0)
    assert found["stopped"][worse] == {"share": 0.25, "score": scores[worse]}
    (left,) = {*METHODS} - {worse}
    assert list(found["arms"]) == [left, "mine", "before training", "raw pixels"]
    assert records(output / f"{worse}-0")[-1]["step"] < 24 == records(output / f"{left}-0")[-1]["step"]
    assert f"{worse} was stopped after 25 % of its steps" in found["limits"][0]
    assert log.read_text().count("step at") == 24
    row = found["arms"]["mine"]
    assert (row["steps"], row["images"], row["method"], row["trained"]) == (24, 192, False, True)
    assert 0 < found["cost"]["arms"]["mine"] < found["cost"]["runs"]["mine-0"]["total"]
    trained, before = (load_file(output / path) for path in ("mine-0/encoder.safetensors", "before/seed-0.safetensors"))
    assert all(trained[name].shape == value.shape for name, value in before.items())
    assert any(not trained[name].equal(value) for name, value in before.items())


MEASURED = """
import resource, sys
from pathlib import Path
from tessera.__main__ import main

used = Path(sys.argv.pop(1))
try:
    main()
finally:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used.write_text(str(children.ru_utime + children.ru_stime))
"""
"""Runs the command `tessera`, and writes the processor seconds of the processes that it starts: of the training."""


@pytest.mark.slow
def test_a_training_on_two_processes_counts_the_compute_of_both(tmp_path: Path) -> None:
    output, log = tmp_path / "two", tmp_path / "log"
    flags = words(output, "--evaluation.val", scored_shards()[1], "--steps", "8", "--seeds", "1")
    flags[flags.index("--methods") + 1] = "mae"
    flags = without(flags, "--lejepa")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "used"), "--num_processes", "2", "compare", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, log.read_text()
    assert "2 process(es)" in log.read_text()
    found = json.loads((output / "compare.json").read_text())
    assert found["cost"]["processes"] == 2
    total, used = found["cost"]["runs"]["mae-0"]["total"], float((tmp_path / "used").read_text())
    # What follows the last record is not counted: the export, and the end of two trainers and of their launcher.
    assert 0.6 * used < total < used


def test_the_worse_half_is_stopped() -> None:
    scores = {"a": 0.5, "b": 0.7, "c": 0.4, "d": 0.6, "e": 0.8}
    assert worse_half(scores) == {"c": 0.4, "a": 0.5}
    assert worse_half({"a": 0.5}) == {}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "lejepa,simclr"], "there is no method simclr"),
        (["--methods", "mae,mae"], "names a method twice"),
        (["--seed", "3"], "--seed is decided by the comparison"),
        (["--dino.momentum", "0.9"], "--dino. belongs to a method that is not compared"),
        (["--mae.mask_ration", "0.5"], "did you mean '--mae.mask_ratio'"),
        (["--steps", "0"], "steps"),
        (["--halve"], "--points of at least 4"),
        (["--others", '{"a-b": "python a.py"}'], "'a-b' is not a new name"),
        (["--others", '{"mae": "python a.py"}'], "'mae' is not a new name"),
        (["--others", '{"mine": "python missing.py"}'], "does not end with an adapter that exists"),
        (["--only", "mae-9"], "there is no cell mae-9. Choose trials or any of lejepa-0"),
        (["--beside", "mae"], "mae is given twice, or is the name of a method"),
        (["--beside", "timm:a,timm:a"], "timm:a is given twice"),
        (["--beside", "runs/missing"], "there is no runs/missing"),
        (["--jobs=", "--halve", "--points", "4"], "which --jobs and --only keep apart"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(more: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        compare([*words(tmp_path / "out"), *more])
    assert not (tmp_path / "out").exists()


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--data SHARDS is missing"):
        compare(["--methods", "mae", "--output", str(tmp_path / "out")])


def test_without_a_score_nothing_is_trained(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Nothing would be scored"):
        compare(words(tmp_path / "out", "--steps", "6", "--evaluation.view_images", "0"))


def test_each_method_gets_its_own_flags() -> None:
    given = ["--size", "64", "--mae.mask_ratio", "0.5", "--data", "a.tar", "b.tar", "--lejepa.output_dim", "16"]
    settings, found = load_settings(["--methods", "lejepa,mae", "--minutes", "5", *given], "tessera compare")
    assert settings.minutes == 5
    data = ["--data", "a.tar", "b.tar"]
    assert found["mae"] == ["--method", "mae", "--mae.mask_ratio", "0.5", *data, "--mae.size", "64"]
    lejepa = ["--method", "lejepa", *data, "--lejepa.output_dim", "16", "--lejepa.global_size", "64"]
    assert found["lejepa"] == lejepa
    _, found = load_settings(["--methods", "lejepa,mae", "--size", "64", "--mae.size", "96"], "tessera compare")
    assert found["mae"] == ["--method", "mae", "--mae.size", "96"]


def test_methods_and_seeds_can_be_added_to_a_plan(tmp_path: Path) -> None:
    def loaded(methods: str, seeds: int) -> Any:
        given = ["--methods", methods, "--seeds", str(seeds), "--data", "a.tar", "--output", str(tmp_path)]
        return load_settings(given, "tessera compare")

    first, more = loaded("mae", 1), loaded("mae,dino", 3)
    assert read_plan(*first) is None
    write_plan(*first, Plan({"mae": 100}, {"mae": 3600.0}, gpu=False))
    assert read_plan(*first) == read_plan(*loaded("mae", 2)) == Plan({"mae": 100}, {"mae": 3600.0}, gpu=False)
    assert read_plan(*more) == read_plan(*first)  # dino has to be measured
    write_plan(*more, Plan({"mae": 90, "dino": 50}, {"mae": 3500.0, "dino": 3600.0}, gpu=False))
    found = read_plan(*more)
    assert found is not None
    assert found.steps == {"mae": 100, "dino": 50}
    assert read_plan(*first) is not None


def test_a_plan_sees_other_values_of_a_settings_file_and_another_adapter(tmp_path: Path) -> None:
    file, adapter = tmp_path / "mine.yaml", tmp_path / "adapter.py"
    file.write_text("optim: {lr: 1e-3}\nworkers: 1\n")
    adapter.write_text("1")

    def loaded(*more: str) -> Any:
        given = ["--config", str(file), "--others", json.dumps({"own": f"python {adapter}"}), *more]
        given += ["--methods", "mae", "--minutes", "5", "--output", str(tmp_path)]
        return load_settings(given, "tessera compare")

    one = loaded("--data", "a.tar", "--batch_size", "64")
    write_plan(*one, Plan({"mae": 100}, {"mae": 300.0}, gpu=False))
    file.write_text("optim: {lr: 1e-3}\nworkers: 2\n")  # decides nothing
    assert read_plan(*one) == read_plan(*loaded("--batch_size=64", "--data=a.tar"))
    with pytest.raises(SettingsError, match=r"mae: batch_size is 64 there, and 32 now\. Give"):
        read_plan(*loaded("--data", "a.tar", "--batch_size", "32"))
    adapter.write_text("2")
    with pytest.raises(SettingsError, match="own: sha256 is "):
        read_plan(*one)
    adapter.write_text("1")
    file.write_text("optim: {lr: 2e-3}\n")
    with pytest.raises(SettingsError, match=r"mae: optim\.lr is 0\.001 there, and 0\.002 now"):
        read_plan(*one)


def test_a_plan_sees_other_weights_of_the_start(tmp_path: Path) -> None:
    weights = tmp_path / "given.safetensors"
    weights.write_text("1")
    given = ["--methods", "mae", "--data", "a.tar", "--init_from", str(weights), "--output", str(tmp_path)]
    one = load_settings(given, "tessera compare")
    write_plan(*one, Plan({"mae": 100}, {"mae": 300.0}, gpu=False))
    assert read_plan(*one) is not None
    weights.write_text("2")
    with pytest.raises(SettingsError, match="mae: weights of init_from is "):
        read_plan(*one)


def test_minutes_of_a_gpu_are_not_mixed_with_those_of_processors(tmp_path: Path) -> None:
    given = ["--methods", "mae", "--minutes", "5", "--data", "a.tar", "--output", str(tmp_path)]
    settings, found = load_settings(given, "tessera compare")
    other = Plan({"mae": 100}, {"mae": 300.0}, gpu=not torch.cuda.is_available())
    with pytest.raises(CompareError, match=r"was planned in minutes of .* time, and this machine has "):
        train_all(settings, found, other)
    with_other = settings.model_copy(update={"others": {"mine": "python a.py"}})
    with pytest.raises(CompareError, match="was planned in minutes of"):
        train_others(with_other, found, other)
    check_device(other._replace(gpu=not other.gpu), tmp_path)
    check_device(other._replace(planned={}), tmp_path)  # equal steps


def test_a_method_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "--methods",
        "dino,lejepa,mae",
        "--seeds",
        "2",
        "--steps",
        "4",
        "--data",
        "a.tar",
        "--output",
        str(tmp_path),
    ]
    settings, found = load_settings(given, "tessera compare")
    trained = []

    def train(cell: Cell, *more: Any) -> None:
        trained.append(cell.name)
        if cell.method == "lejepa":
            raise CompareError("it ended with exit code 1")

    monkeypatch.setattr("tessera.extras.compare.compare.train", train)
    message = r"lejepa failed.*The other methods went on.*start it without lejepa"
    with pytest.raises(CompareError, match=message):
        train_all(settings, found, Plan({"dino": 4, "lejepa": 4, "mae": 4}, {}, gpu=False))
    assert trained == ["dino-0", "lejepa-0", "mae-0", "dino-1", "mae-1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_end_of_a_training_stops_the_comparison(number: int, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    training = f"""
import os, pathlib, signal
signal.signal({int(number)}, lambda *_: os._exit(0))  # as if its last step were done
pathlib.Path({str(ready)!r}).write_text(str(os.getpid()))
signal.pause()
"""

    def send() -> None:
        wait_until(lambda: ready.exists() and ready.read_text())
        os.kill(os.getpid(), number)
        if number == signal.SIGINT:  # a terminal sends it to both processes
            os.kill(int(ready.read_text()), number)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(SystemExit):
        compare_cells._call([sys.executable, "-c", training], tmp_path)
    thread.join()


def test_cells_that_were_trained_on_other_images_are_named(tmp_path: Path) -> None:
    def trained(name: str, samples: list[str] | None) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        line = {"step": 1, "start": 1.0, "evaluated": False, "cpu": 1.0, "wall": 1.0, "gpu": False, "samples": samples}
        (tmp_path / name / FILE).write_text(json.dumps(line) + "\n")

    for name, samples in (("mae-0", ["samples:1"]), ("mae-1", None), ("mae-2", ["checksums:2"])):
        trained(name, samples)
    names = ("mae-0", "mae-1", "mae-2", "mae-3")
    check_data(tmp_path, names)  # unknown, or not comparable
    trained("mae-3", ["samples:2"])
    with pytest.raises(CompareError, match=r"mae-3 was trained on other images than .*mae-0, because --data"):
        check_data(tmp_path, names)


def test_scores_on_other_images_are_named(tmp_path: Path) -> None:
    def scored(name: str, count: int, *images: str) -> Path:
        path = tmp_path / f"{name}.json"
        store_outcomes(path, name, {"20-NN": Outcomes(torch.ones(count), [*images])})
        return path

    first = scored("mae-0", 5, "samples:1")
    check_same_images([first, scored("mae-1", 5, "samples:1")])
    for count, images in ((6, "samples:1"), (5, "samples:2")):
        with pytest.raises(CompareError, match="hold scores on different images"):
            check_same_images([first, scored("mae-1", count, images)])
    check_same_images([first, scored("mae-1", 5, "checksums:2")])  # not comparable
    stored = json.loads(first.read_text())
    del stored["images"]  # of an older version
    first.write_text(json.dumps(stored))
    check_same_images([first, scored("mae-1", 5, "samples:2")])


def test_encoders_beside_keep_their_scores_in_another_order(tmp_path: Path) -> None:
    file = tmp_path / "encoder.safetensors"
    file.write_text("1")
    before = identity(str(tmp_path))
    assert before == identity(str(tmp_path))
    assert before != identity("timm:a") != identity("timm:b")
    file.write_text("2")  # the run was trained further
    assert identity(str(tmp_path)) != before


def test_outcomes_of_a_run_that_is_trained_again_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_cells, "_call", lambda *_: None)
    settings, found = load_settings(words(tmp_path, "--steps", "6"), "tessera compare")
    for name in ("mae-1", "mae-1-forget", "mae-10", "given encoder-forget"):
        store_outcomes(tmp_path / "outcomes" / f"{name}.json", name, {})
    compare_cells.train(Cell("mae", 1, 6), found["mae"], settings)
    left = sorted(path.stem for path in (tmp_path / "outcomes").iterdir())
    assert left == ["given encoder-forget", "mae-10"]


def test_an_adapter_that_trains_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text("")
    own = json.dumps({"mine": f"python {adapter}"})
    given = words(tmp_path, "--steps", "6", "--seeds", "1", "--others", own)
    settings, found = load_settings(given, "tessera compare")
    run = tmp_path / "mine-0"
    run.mkdir()
    (run / FILE).write_text("")
    monkeypatch.setattr(compare_cells, "PATIENCE", 0.5)
    with locked(run), pytest.raises(LockedError):
        train_other("mine", 0, found["mae"], settings)
    assert (run / FILE).exists()


@pytest.mark.parametrize(("steps", "points", "whole"), [(1003.9, 8, 1000), (8.2, 8, 8), (7.9, 8, 7), (0.3, 8, 1)])
def test_a_training_ends_with_an_evaluation_at_equal_intervals(steps: float, points: int, whole: int) -> None:
    assert fitting(steps, points) == whole
