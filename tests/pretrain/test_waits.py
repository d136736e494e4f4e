"""A run that is asked to stop while a process waits for data, or that ends with an error, saves its last step."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from tessera.data.batch import Batch
from tessera.data.shards import ShardError
from tessera.pretrain.checkpoints import resume
from tessera.pretrain.loop import train
from tessera.runtime import preemption
from tests.pretrain.small import on_processes
from tests.pretrain.test_loop import Faulty, make, raw, settings

pytestmark = pytest.mark.usefixtures("fresh_engine")


STOPPED = preemption.WaitInterruptedError("stopped by SIGTERM while waiting for data")
BROKEN = ShardError("the server stopped answering")


class Drawing(Faulty):
    """A method that draws from torch's generator at each step."""

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        torch.rand(3)
        return super().forward(batch, step)


def batches(rank: int, interrupted: int | None, last: int, error: Exception = STOPPED) -> Iterator[Batch]:
    """Batches of a process: an error in place of the batch of one step."""
    for step in range(last):
        if step == interrupted:
            raise error
        yield raw(step, rank, 8)


def saved(folder: Path) -> tuple[int, bytes, list[list[int]]]:
    """The first checkpoint: its step, its encoder, and the states of torch's generator on all processes."""
    path = min(resume.list_checkpoints(folder / "checkpoints"), key=lambda path: path.name)
    files = [torch.load(one) for one in sorted(path.glob("random-*.pt"))]
    random = [states["torch"].tolist() for file in files for states in file.values()]
    return int(path.name[5:]), (path / "encoder.safetensors").read_bytes(), random


def _stopped(rank: int, folder: str) -> None:
    """Train to the end; until one process waits; and until it fails, after which the process group is lost."""
    for name, waiting, broken in (("whole", None, False), ("stopped", 1, False), ("failed", 1, True)):
        _train(rank, Path(folder, name), waiting, broken)
    torch.distributed.destroy_process_group()


def _train(rank: int, folder: Path, waiting: int | None, broken: bool) -> None:
    config = settings(
        "--batch_size", "16", "--checkpoint_every", "3" if waiting is None else "100", "--checkpoint.keep", "9"
    )
    folder.mkdir(exist_ok=True)
    run = make(Drawing(config), config, folder)
    torch.manual_seed(rank)
    if waiting is None:
        train(run, batches(rank, None, 8))
    else:
        kind, message = preemption.Preempted, "Step 3 is done and saved"
        if broken:  # the other process fails in a collective, because the first one leaves
            kind, message = (ShardError, "the server") if rank == waiting else (RuntimeError, "closed|peer|Broken")
        with pytest.raises(kind, match=message):
            train(run, batches(rank, 3 if rank == waiting else None, 8, BROKEN if broken else STOPPED))
        assert run.state.step == 3
        assert run.state.images == 48


@pytest.mark.slow
def test_one_process_that_waits_or_fails_stops_both_at_the_last_complete_step(tmp_path: Path, free_port: int) -> None:
    on_processes(_stopped, free_port, str(tmp_path))
    assert saved(tmp_path / "whole")[0] == 3
    assert saved(tmp_path / "stopped") == saved(tmp_path / "whole")
    assert saved(tmp_path / "failed") == saved(tmp_path / "whole")


def test_one_process_saves_and_without_a_first_batch_it_only_ends(tmp_path: Path) -> None:
    config, found = settings("--checkpoint_every", "100"), {}
    for error, raised in ((STOPPED, preemption.Preempted), (BROKEN, ShardError)):
        folder = tmp_path / raised.__name__
        folder.mkdir()
        run = make(Drawing(config), config, folder)
        torch.manual_seed(0)
        with pytest.raises(type(error)):
            train(run, batches(0, 0, 8, error))
        assert not (folder / "checkpoints").exists()
        with pytest.raises(raised):
            train(run, batches(0, 2, 8, error))
        found[raised] = saved(folder)
    assert found[ShardError][0] == 2
    assert found[ShardError] == found[preemption.Preempted]
    config = settings("--checkpoint_every", "2", "--checkpoint.keep", "9")
    (tmp_path / "whole").mkdir()
    run = make(Drawing(config), config, tmp_path / "whole")
    torch.manual_seed(0)
    train(run, batches(0, None, 8))
    assert saved(tmp_path / "whole") == found[ShardError]


def test_the_last_step_is_saved_once_and_not_with_weights_that_are_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings("--checkpoint_every", "2")
    run = make(Faulty(config), config, tmp_path)
    run.recorder = MagicMock()
    with pytest.raises(ShardError):
        train(run, batches(0, 2, 8, BROKEN))
    assert "Step 2 is done and saved" in caplog.text
    assert [path.name for path in resume.list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]

    def poisoned() -> Iterator[Batch]:
        yield from batches(0, None, 1)
        with torch.no_grad():
            next(run.method.parameters()).view(-1)[0] = torch.nan
        raise BROKEN

    with pytest.raises(ShardError):
        train(run, poisoned())
    assert "Step 3 is not saved, because a weight is not finite" in caplog.text
    assert saved(tmp_path)[0] == 2


def test_a_step_whose_evaluation_fails_is_saved_and_evaluated_again(tmp_path: Path) -> None:
    config = settings("--checkpoint_every", "100", "--evaluate_every", "3")
    run = make(Faulty(config), config, tmp_path)
    run.dense = MagicMock()
    run.dense.evaluate.side_effect = [{"patch_miou": 0.1}, BROKEN]
    with pytest.raises(ShardError):
        train(run, batches(0, None, 8))
    (path,) = resume.list_checkpoints(tmp_path / "checkpoints")
    state = resume.open_checkpoint(path).trainer.position
    assert (state.step, state.unscored["step"]) == (3, 3)
