"""The slowest rank: the rule with made numbers, and runs of three processes of which one is slowed."""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera.data.batch import Batch
from tessera.pretrain.loop import train
from tessera.pretrain.monitoring import slowest_rank
from tessera.pretrain.monitoring.progress_bar import Progress
from tessera.pretrain.monitoring.recorder import Recorder
from tessera.pretrain.monitoring.slowest_rank import SlowestRank
from tests.pretrain.test_loop import Faulty, make, raw, settings
from tests.ranks import on_processes

NAMES = [f"node{number // 2} rank {number}" for number in range(5)]


def test_a_rank_slow_for_a_minute_is_named_once_and_another_one_again(caplog: pytest.LogCaptureFixture) -> None:
    slowest = SlowestRank(NAMES)
    for _ in range(5):
        found = slowest.judge([10.0, 11.0, 10.0, 16.6, 12.0], 25.0, 50)
        assert found == {"slowest_rank": "node1 rank 3", "slowest_rank_lag": pytest.approx(16.6 / 11)}
    (line,) = caplog.messages
    assert line.startswith("node1 rank 3 is slow: ")
    assert "1.5 times as long as those of the median rank for 75 s (0.332 s a step, median 0.22 s)" in line
    slowest.judge([10.0, 11.0, 10.0, 11.0, 12.0], 25.0, 50)  # not slow any more
    slowest.judge([10.0, 11.0, 10.0, 16.6, 12.0], 59.0, 50)  # slow, but not for a minute
    assert len(caplog.messages) == 1
    slowest.judge([30.0, 11.0, 10.0, 16.6, 12.0], 60.0, 50)
    assert caplog.messages[1].startswith("node0 rank 0 is slow")


@pytest.mark.parametrize(
    ("own", "seconds"),
    [
        ([10.0, 14.9], 100.0),  # less than 1.5 times
        ([10.0, 10.0, 16.0, 16.0], 1000.0),  # 1.6 times, but not even 2 % of a step
        ([30.0], 100.0),  # alone
    ],
)
def test_a_rank_that_costs_little_is_not_named(
    own: list[float], seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    slowest = SlowestRank(NAMES)
    for _ in range(3):
        slowest.judge(own, seconds, 10)
    assert not caplog.messages


def test_the_log_names_the_slow_rank_and_a_sink_of_numbers_gets_no_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = {"step": 5, "epoch": 1.0, "loss": 2.0, "lr": 0.1, "images_per_second": 9.0, "data_wait": 0.25}
    record |= {"slowest_rank": "node1 rank 3 (GPU 1)", "slowest_rank_lag": 1.76}
    with Progress(10, 0, enabled=True) as progress:
        progress.scored(record)
        progress.line(record)
        progress.line(record | {"slowest_rank_lag": 1.4})
    first, second = capsys.readouterr().err.splitlines()
    assert "data wait 25 %  slowest node1 rank 3 (GPU 1) (1.8 x the median)  " in first
    assert "slowest" not in second
    recorder = Recorder(tmp_path, 0)  # TensorBoard refuses texts
    recorder.scalars(record)
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["slowest_rank"] == "node1 rank 3 (GPU 1)"


class Slow(Faulty):
    """A method whose forward pass takes longer by `extra` seconds."""

    extra = 0.0

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        time.sleep(self.extra)
        return super().forward(batch, step)


def _slowed(rank: int, folder: str) -> None:
    """Train twice on each process: rank 1 has a slow forward pass, and then rank 2 a slow loader."""
    slowest_rank.PATIENCE = 0.0
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    slowest_rank.log.addHandler(handler)
    for part in ("forward", "loader"):
        output = Path(folder, part)
        output.mkdir(exist_ok=True)
        config = settings("--batch_size", "24", "--record_every", "4")
        run = make(Slow(config), config, output)
        assert isinstance(run.method, Slow)
        run.method.extra = 0.3 if (part, rank) == ("forward", 1) else 0.0
        if rank == 0:
            run.recorder = Recorder(output, 0)

        def batches(slow: bool) -> Iterator[Batch]:
            for step in range(8):
                time.sleep(0.3 * slow)
                yield raw(step, rank, 8)

        train(run, batches((part, rank) == ("loader", 2)))
    if rank == 0:
        Path(folder, "log.txt").write_text("\n".join(lines))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_slow_forward_pass_and_a_slow_loader_are_found(tmp_path: Path, free_port: int) -> None:
    on_processes(_slowed, free_port, str(tmp_path), count=3)
    for part, rank in (("forward", 1), ("loader", 2)):
        lines = [json.loads(line) for line in (tmp_path / part / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == 2
        for line in lines:
            assert f"rank {rank}" in line["slowest_rank"]
            assert line["slowest_rank_lag"] > slowest_rank.LAG
            waited = line["data_wait"] * 4 * 24 / line["images_per_second"]
            assert (waited > 4 * 0.3) == (part == "loader")  # the wait of rank 2, recorded by rank 0
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert "rank 1 is slow" in first
    assert "rank 2 is slow" in second
