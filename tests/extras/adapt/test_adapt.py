"""The command `adapt`: its scores are those of other commands, and its advice follows from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ttest_rel

from tessera.data.demo import demo_shards
from tessera.evaluation import knn
from tessera.extras.adapt.adapt import Change, adapt, advice, change
from tessera.pretrain.run import main
from tests.evaluation.conftest import save_encoder
from tests.launched import TINY, records
from tests.pretrain.small import scored_shards

SIZES = {"depth": 2, "dim": 24, "heads": 2, "init": "xavier", "position_init": "sincos"}
RUN = [*TINY, "--dino.global_size", "16", "--dino.local_size", "8", "--evaluation.pictures", "0", "--workers", "0"]


@pytest.fixture(scope="module")
def others() -> tuple[str, str]:
    """Digits that are in none of the shards of `scored_shards`."""
    train, val = (shards.partition("{")[0] for shards in demo_shards())
    return f"{train}000001.tar", f"{val}000001.tar"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_encoder(tmp_path_factory.mktemp("start") / "given.safetensors", **SIZES)


def flags(start: str, output: Path, *more: str) -> list[str]:
    train, val = scored_shards()
    scored = ["--data", train, "--evaluation.val", val]
    return [*RUN, *scored, "--init_from", start, "--output", str(output), *more]


def by_hand(checkpoint: str | Path, train: str, val: str, output: Path) -> float:
    """Return the accuracy that `tessera knn` finds."""
    settings: dict[str, Any] = {"checkpoint": str(checkpoint), "train": train, "val": val, "workers": 0}
    return knn.run(knn.KNNSettings(**settings, k=[20], output=str(output)))["top1"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_engine")
def test_scores_are_those_of_knn_and_of_the_run(
    start: str, others: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", ["--forget_train", others[0], "--forget_val", others[1]]
    assert main(flags(start, run, *other, "--optim.encoder_lr_factor", "1"), adapt) == 0
    printed = capsys.readouterr().out
    result = json.loads((run / "evaluation" / "adapt.json").read_text())
    for name, (train, val) in {"scores": scored_shards(), "forgetting": others}.items():
        found = result[name]["20-NN"]
        hand = [by_hand(one, train, val, tmp_path / f"{name}-{i}.json") for i, one in enumerate((start, run))]
        assert [found["before"], found["after"]] == pytest.approx(hand, abs=1e-12)
        assert found["gain"] == pytest.approx(hand[1] - hand[0], abs=1e-12)
    own = [line for line in records(run) if "linear_top1" in line]  # the evaluation of the run itself
    for name, metric in (("20-NN", "knn_top1"), ("linear probe", "linear_top1")):
        found = result["scores"][name]
        assert [found["before"], found["after"]] == pytest.approx([line[metric] for line in own], abs=1e-6)
    assert result["scores"]["linear probe"]["gain"] != 0, "the training changed nothing"
    assert result["top1"] == result["scores"]["20-NN"]["after"]
    assert (result["settings"]["init_from"], result["step"]) == (start, 12)
    assert printed.splitlines()[-1] == result["advice"]
    assert ("Use the new" in result["advice"]) == result["use"]


def test_the_error_is_that_of_paired_differences() -> None:
    rng = np.random.default_rng(0)
    before = (rng.random(200) < 0.7).astype(float)
    after = np.where(rng.random(200) < 0.9, before, 1 - before)
    found = change(torch.from_numpy(before), torch.from_numpy(after))
    assert (found.before, found.after) == pytest.approx((before.mean(), after.mean()))
    assert 2 * found.gain / found.error == pytest.approx(ttest_rel(after, before).statistic)
    # far less than the error of two independent sets of images
    assert found.error < 2 * np.sqrt(2 * 0.7 * 0.3 / 200) / 1.3


@pytest.mark.parametrize(
    ("knn_gain", "probe_gain", "lost", "use", "reason"),
    [
        (5.0, 4.0, None, True, "gains 5.0 ± 2.0 points of 20-NN and 4.0 ± 2.0 points of linear probe."),
        (5.0, 4.0, 3.0, True, "Use the new encoder"),
        (5.0, 4.0, -9.0, True, "Use the new encoder"),
        (5.0, 4.0, 4.5, False, "gains 4.0 ± 2.0 points of linear probe, but loses 4.5 ± 2.0 points on old."),
        (1.5, 4.0, None, False, "a gain of 1.5 ± 2.0 points of 20-NN can be chance."),
        (5.0, -1.0, None, False, "a loss of 1.0 ± 2.0 points of linear probe can be chance."),
        (5.0, -3.0, 0.0, False, "the new one loses 3.0 ± 2.0 points of linear probe."),
        (2.0, 4.0, None, False, "can be chance"),
    ],
)
def test_the_advice_follows_the_figures(
    knn_gain: float, probe_gain: float, lost: float | None, use: bool, reason: str
) -> None:
    def gained(points: float) -> Change:
        return Change(0.0, points / 100, 0.02)

    own = {"20-NN": gained(knn_gain), "linear probe": gained(probe_gain)}
    other = {} if lost is None else {"20-NN": gained(0), "linear probe": gained(-lost)}
    found, sentence = advice(own, other, "old")
    assert found == use
    assert reason in sentence
    assert sentence.startswith("Use the new encoder: " if use else "Keep the given encoder: ")


@pytest.mark.usefixtures("fresh_engine")
@pytest.mark.parametrize(
    ("change_flags", "message"),
    [
        ({"--init_from": None}, "--init_from WEIGHTS is missing"),
        ({"--evaluation.val": None}, "--evaluation.val SHARDS is missing"),
        ({"--forget_val": "x.tar"}, "--forget_train and --forget_val belong together"),
        ({"--forget_vall": "x.tar"}, "unknown flag --forget_vall; did you mean '--forget_val'?"),
        ({"--evaluation.val": "DATA"}, "is in both --data and --evaluation.val"),
        ({"--data": "UNLABELLED"}, "no label"),
    ],
)
def test_bad_input_is_named_before_the_training(
    change_flags: dict[str, str | None], message: str, start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(start, tmp_path / "run")
    named = dict(zip(words[::2], words[1::2], strict=True))
    unlabelled = tmp_path / "images"
    unlabelled.mkdir()
    for number in range(20):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(unlabelled / f"{number}.png")
    stands_for = {"DATA": named["--data"], "UNLABELLED": str(unlabelled)}
    named |= {name: stands_for.get(str(value), value) for name, value in change_flags.items()}
    words = [word for name, value in named.items() if value is not None for word in (name, value)]
    assert main(words, adapt) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_help_explains_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"], adapt)
    shown = capsys.readouterr().out
    assert "--forget_val SHARDS" in shown
    assert "--batch_size" in shown
