"""The command `adapt`: it goes on after a kill, its scores are those of other commands, and bad input is refused."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tessera.data.demo import demo_shards
from tessera.evaluation import knn
from tessera.extras.adapt.adapt import adapt
from tessera.extras.exports import command as export
from tessera.runtime.user_error import UserError
from tests.evaluation.conftest import save_encoder
from tests.launched import ROOT
from tests.pretrain.small import few_digits
from tests.pretrain.small import flags as small_flags

SIZES = {"depth": 2, "dim": 24, "heads": 2, "init": "xavier", "position_init": "sincos"}
RUN = ["--batch_size", "16", "--workers", "0", "--evaluation.pictures", "0", "--steps", "4", "--points", "1"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_encoder(tmp_path_factory.mktemp("start") / "given.safetensors", **SIZES)


def flags(start: str, output: Path, *more: str) -> list[str]:
    """Return the flags of a command that continues a narrow encoder by LeJEPA with two seeds."""
    train, val = few_digits()
    small = [word for pair in small_flags("lejepa").items() for word in pair]
    encoder = [word for name in ("depth", "dim", "heads") for word in (f"--encoder.{name}", str(SIZES[name]))]
    own = ["--data", train, "--evaluation.val", val, "--init_from", start, "--seeds", "2", "--output", str(output)]
    return [*RUN, *small, *encoder, *own, *more]


def by_hand(checkpoint: str | Path, train: str, val: str, output: Path) -> float:
    """Return the accuracy that `tessera knn` finds."""
    settings: dict[str, Any] = {"checkpoint": str(checkpoint), "train": train, "val": val, "workers": 0}
    return knn.run(knn.KNNSettings(**settings, k=[20], output=str(output)))["top1"]


@pytest.mark.slow
def test_a_killed_command_goes_on_with_two_processes_and_its_scores_are_those_of_knn(
    start: str, tmp_path: Path
) -> None:
    other = tuple(f"{shards.partition('{')[0]}000001.tar" for shards in demo_shards())
    output, log = tmp_path / "adapted", tmp_path / "log"
    given = flags(start, output, "--forget_train", other[0], "--forget_val", other[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tessera", "adapt", *given]
    process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    while process.poll() is None and not (output / "lejepa-1" / "metrics.jsonl").exists():
        time.sleep(0.01)
    assert process.poll() is None, log.read_text()
    process.kill()
    process.wait()
    done = (output / "lejepa-0" / "encoder.safetensors").stat().st_mtime_ns
    command = [*command[:3], "--num_processes", "2", *command[3:]]
    again = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 process(es)" in again.stdout + again.stderr
    assert (output / "lejepa-0" / "encoder.safetensors").stat().st_mtime_ns == done
    result = json.loads((output / "adapt.json").read_text())
    for name, (train, val) in {"gains": few_digits(), "forgetting": other}.items():
        found = next(one for one in result[name] if one["score"] == "20-NN")
        paths = (start, output / "lejepa-0", output / "lejepa-1")
        hand = [by_hand(one, train, val, tmp_path / f"{name}-{i}.json") for i, one in enumerate(paths)]
        assert found["before"] == pytest.approx(hand[0], abs=1e-12)
        assert found["gain"] == pytest.approx(sum(hand[1:]) / 2 - hand[0], abs=1e-12)
    assert again.stdout.count(result["advice"]) == 1
    export.main([str(output / "lejepa-0"), str(tmp_path / "encoder.safetensors")])
    card = (tmp_path / "encoder.md").read_text()
    advice = json.loads((output / "lejepa-0" / "adapt.json").read_text())["advice"]
    assert f"`tessera adapt`, 2 seeds: {advice}" in card
    with pytest.raises(UserError, match="with other settings: forget_train"):
        adapt(flags(start, output))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--init_from": None}, "--init_from WEIGHTS is missing"),
        ({"--evaluation.val": None}, "--evaluation.val SHARDS is missing"),
        ({"--forget_val": "x.tar"}, "--forget_train and --forget_val belong together"),
        ({"--forget_vall": "x.tar"}, "unknown flag --forget_vall"),
        ({"--seed": "1"}, "--seed is decided by the comparison"),
        ({"--evaluation.val": "DATA"}, "is in both --data and --evaluation.val"),
        ({"--data": "UNLABELLED"}, "no label"),
    ],
)
def test_bad_input_is_named_before_the_training(
    changed: dict[str, str | None], message: str, start: str, tmp_path: Path
) -> None:
    words = flags(start, tmp_path / "out")
    named = dict(zip(words[::2], words[1::2], strict=True))
    unlabelled = tmp_path / "images"
    unlabelled.mkdir()
    for number in range(20):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(unlabelled / f"{number}.png")
    stands_for = {"DATA": named["--data"], "UNLABELLED": str(unlabelled)}
    named |= {name: stands_for.get(str(value), value) for name, value in changed.items()}
    words = [word for name, value in named.items() if value is not None for word in (name, value)]
    with pytest.raises(UserError, match=message):
        adapt(words)
    assert not (tmp_path / "out" / "plan.json").exists()


def test_help_explains_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        adapt(["--help"])
    shown = capsys.readouterr().out
    assert "--init_from WEIGHTS" in shown
    assert "--forget_val" in shown
