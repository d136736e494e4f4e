import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from tessera.pretrain.methods.dino import DINO
from tessera.pretrain.methods.teacher_student import output_signs
from tessera.pretrain.monitoring.collapse import CollapseAlarm, HealthConfig, column_sums, effective_rank, variance_of
from tessera.pretrain.run import main


def test_effective_rank_counts_directions() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(64, 64)).Q
    flat = basis[:, :8] * 3.0  # 64 rows in 8 directions of equal strength, but for the mean
    flat = flat - flat.mean(0)
    q = torch.linalg.qr(flat).Q
    assert effective_rank(q + 5.0) == pytest.approx(8.0, rel=1e-4)
    assert effective_rank(torch.ones(10, 4)) == 0.0
    assert effective_rank(torch.outer(torch.arange(10.0), torch.ones(4))) == pytest.approx(1.0, rel=1e-3)


def record(step: int, loss: float, entropy: float, rank: float = 20.0) -> dict[str, float]:
    return {"step": step, "loss": loss, "teacher_entropy": entropy, "feature_rank": rank}


LN_K = math.log(256)


def check(alarm: CollapseAlarm, line: dict[str, float]) -> dict[str, str]:
    return alarm.check(line, output_signs("dino", "dino", line["loss"], line["teacher_entropy"], LN_K))


@pytest.mark.parametrize(
    ("sick", "kind"),
    [
        (record(0, LN_K, LN_K), "dino uniform"),
        (record(0, 0.001, 0.0), "dino one prototype"),
        (record(0, 3.0, 2.0, rank=1.0), "rank"),
    ],
)
def test_alarm_rings_once_after_patience_and_grace(sick: dict, kind: str) -> None:
    alarm = CollapseAlarm(HealthConfig(patience=3, grace=0.1), 100, DINO.rank_hint)
    assert check(alarm, record(1, 3.0, 2.0)) == {}
    rung = {step: check(alarm, sick | {"step": step}) for step in range(2, 30)}
    assert {step: list(kinds) for step, kinds in rung.items() if kinds} == {10: [kind]}  # silent within the grace
    assert "Try" in rung[10][kind]
    alarm = CollapseAlarm(HealthConfig(patience=3, grace=0.0), steps=100)
    check(alarm, record(1, 3.0, 2.0))
    interrupted = [sick, sick, record(0, 3.0, 2.0), sick, sick, sick]
    rung = [list(check(alarm, line | {"step": 40 + i})) for i, line in enumerate(interrupted)]
    assert rung == [[], [], [], [], [], [kind]]


def test_alarm_goes_on_where_a_stopped_run_left_it() -> None:
    memory: dict = {}
    alarm = CollapseAlarm(HealthConfig(patience=3, grace=0.0), 100, memory=memory)
    assert [list(check(alarm, record(s, 3.0, 2.0, rank=r))) for s, r in enumerate([20.0, 1.0, 1.0])] == [[]] * 3
    resumed = CollapseAlarm(HealthConfig(patience=3, grace=0.0), 100, memory=json.loads(json.dumps(memory)))
    assert list(check(resumed, record(3, 3.0, 2.0, rank=1.0))) == ["rank"]


def test_alarm_is_silent_when_the_loss_alone_is_near_ln_k() -> None:
    alarm = CollapseAlarm(HealthConfig(patience=1, grace=0.0), steps=100)
    assert all(check(alarm, record(step, 0.99 * LN_K, 0.8 * LN_K)) == {} for step in range(50))


def test_signs_and_hints_belong_to_the_method() -> None:
    alarm = CollapseAlarm(HealthConfig(patience=1, grace=0.0), 100, "Try another method.")
    assert alarm.check({"step": 1, "loss": 0.0}, {}) == {}
    assert alarm.check({"step": 2, "loss": 0.0}, {"odd": "all outputs are odd."}) == {
        "odd": "collapse (odd) at step 2: all outputs are odd."
    }
    alarm.check({"step": 3, "feature_rank": 20.0}, {})
    assert alarm.check({"step": 4, "feature_rank": 1.0}, {})["rank"].endswith("to 1.0. Try another method.")


def test_equal_features_from_the_first_step_ring() -> None:
    alarm = CollapseAlarm(HealthConfig(patience=2, grace=0.0), 100, DINO.rank_hint)
    assert check(alarm, record(1, 3.0, 2.0, rank=0.0)) == {}
    said = check(alarm, record(2, 3.0, 2.0, rank=0.0))
    assert list(said) == ["identical"]
    assert "all images may be black" in said["identical"]
    assert check(alarm, record(3, 3.0, 2.0, rank=math.nan)) == {}
    torch.manual_seed(0)
    same = torch.randn(1, 384).expand(512, 384)
    noise = torch.randn(512, 384) * 1e-7 * same.norm() / 384**0.5  # rounding errors, which have a high rank
    assert effective_rank(same + noise) == 0.0
    assert effective_rank(same + 1e4 * noise) > 100


@pytest.mark.medium
@pytest.mark.parametrize("method", ["dino", "mae"])
def test_black_images_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    for number in range(32):
        Image.new("RGB", (20 + number, 24)).save(tmp_path / f"{number}.png")
    words = [
        *("--method", method, "--data", str(tmp_path), "--output", str(tmp_path / "run"), "--steps", "12"),
        *("--batch_size", "16", "--record_every", "1", "--workers", "0", "--encoder", "vit_micro"),
        *("--encoder.depth", "1", "--encoder.dim", "24", "--encoder.heads", "2", "--health.on_collapse", "stop"),
        *(["--dino.global_size", "16", "--dino.local_size", "8"] if method == "dino" else ["--mae.size", "16"]),
    ]
    assert main([*words, "--optim.warmup_steps", "1"]) == 2
    assert "all images may be black" in capsys.readouterr().err


def test_the_variance_of_the_rows_of_several_processes_is_that_of_all_rows() -> None:
    rows = 1 + 0.1 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    sums = column_sums(rows[:20]) + column_sums(rows[20:]) + column_sums(rows[:0])
    for correction in (0, 1):
        torch.testing.assert_close(variance_of(sums, correction).double(), rows.double().var(0, correction=correction),
                                   rtol=1e-5, atol=0)  # fmt: skip
