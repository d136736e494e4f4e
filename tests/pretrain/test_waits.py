"""A run that is asked to stop while one of its processes waits for data saves the last complete step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tessera.data.batch import Batch
from tessera.pretrain.checkpoints import resume
from tessera.pretrain.loop import train
from tessera.runtime import preemption
from tests.pretrain.small import on_processes
from tests.pretrain.test_loop import Faulty, make, raw, settings

pytestmark = pytest.mark.usefixtures("fresh_engine")


def batches(rank: int, interrupted: int | None, last: int) -> Iterator[Batch]:
    """Batches of a process: an interrupted wait in place of the batch of one step."""
    for step in range(last):
        if step == interrupted:
            raise preemption.WaitInterruptedError("stopped by SIGTERM while waiting for data")
        yield raw(step, rank, 8)


def saved(folder: Path) -> tuple[int, bytes]:
    """The first checkpoint: its step, and its encoder."""
    path = min(resume.list_checkpoints(folder / "checkpoints"), key=lambda path: path.name)
    return int(path.name[5:]), (path / "encoder.safetensors").read_bytes()


def _stopped(rank: int, folder: str, waiting: int | None) -> None:
    config = settings(
        "--batch_size", "16", "--checkpoint_every", "3" if waiting is None else "100", "--checkpoint.keep", "9"
    )
    run = make(Faulty(config), config, Path(folder))
    if waiting is None:
        train(run, batches(rank, None, 8))
    else:
        with pytest.raises(preemption.Preempted, match="Step 3 is done and saved"):
            train(run, batches(rank, 3 if rank == waiting else None, 8))
        assert run.state.step == 3
        assert run.state.images == 48
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_one_process_that_waits_stops_both_at_the_last_complete_step(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "stopped").mkdir()
    (tmp_path / "whole").mkdir()
    on_processes(_stopped, free_port, str(tmp_path / "stopped"), 1)
    on_processes(_stopped, free_port + 1, str(tmp_path / "whole"), None)
    assert saved(tmp_path / "stopped")[0] == 3
    assert saved(tmp_path / "stopped") == saved(tmp_path / "whole")


def test_one_process_saves_and_without_a_first_batch_it_only_ends(tmp_path: Path) -> None:
    config = settings("--checkpoint_every", "100")
    run = make(Faulty(config), config, tmp_path)
    with pytest.raises(preemption.WaitInterruptedError):
        train(run, batches(0, 0, 8))
    with pytest.raises(preemption.Preempted, match="Step 2 is done and saved"):
        train(run, batches(0, 2, 8))
    assert saved(tmp_path)[0] == 2
