"""Collectives with one process and with two."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tessera.pretrain.checkpoints.resume import CheckpointError
from tessera.runtime import collectives
from tessera.runtime.collectives import (
    RankError,
    Share,
    all_gather,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    average,
    broadcast_object,
    first_rank,
    gather_on_main,
    rank,
    run_on_all_ranks,
    sharing,
    wait_for_path,
    world_size,
)
from tests.ranks import on_processes


def fail(error: BaseException) -> None:
    raise error


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert (world_size(), rank()) == (1, 0)
    assert all_reduce_sum(x) is x
    assert all_reduce_max(x) is x
    assert all_gather(x)[0] is x
    assert all_gather_rows(x) is x
    assert gather_on_main("a") == ["a"]
    assert (first_rank(True), first_rank(False)) == (0, None)
    assert broadcast_object("a") == "a"
    assert run_on_all_ranks(lambda: 7) == 7
    wait_for_path(tmp_path)
    with pytest.raises(RankError, match=r"no is missing on .*--output must be on a disk that all nodes share"):
        wait_for_path(tmp_path / "no")
    with pytest.raises(KeyboardInterrupt):
        run_on_all_ranks(lambda: fail(KeyboardInterrupt()))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a bad value\nin two lines"), "in two lines"),
        (RuntimeError("broken"), "RuntimeError: broken"),
        (OSError(28, "No space left on device", "a file"), "No space left on device: a file"),
        (CheckpointError("damaged"), "damaged"),
    ],
)
def test_failures_are_described_in_one_line(error: Exception, message: str) -> None:
    with pytest.raises(RankError) as caught:
        run_on_all_ranks(lambda: fail(error))
    assert str(caught.value) == message
    assert isinstance(caught.value, CheckpointError) == isinstance(error, CheckpointError)


def _three_images_and_one(own: int) -> None:
    """Process 0 has two of three images, then the only one. Process 1 then computes with an image that is no one's."""
    images = torch.tensor([[1.0, 5.0], [2.0, 7.0], [6.0, 0.0]])
    part = images[2 * own : 2 + own]
    with sharing(Share(len(part), 2 * own, 3, len(part) * 2 / 3, complete=True)):
        assert torch.equal(all_gather_rows(part), images)
        torch.testing.assert_close(average(part.mean(0)), images.mean(0))
        # the mean over processes of the weighted losses is that over images
        torch.testing.assert_close(all_reduce_sum(part.mean() * collectives.loss_weight()) / 2, images.mean())
    leaf = torch.tensor([[1.0, -5.0], [100.0, 100.0]])[own : own + 1].requires_grad_()
    with sharing(Share(1 - own, own, 1, 2.0 * (1 - own), complete=False)):
        assert (collectives.is_absent(), collectives.all_have_images()) == (own == 1, False)
        found = [all_reduce_sum(leaf), all_reduce_max(leaf), all_gather_rows(leaf), average(leaf)]
        assert [one.tolist() for one in found] == [[[1, -5]]] * 4
        (found[0].square() * collectives.loss_weight()).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == ([[0, 0]] if own else [[4, -20]])  # twice, because engines average over processes
    assert not collectives.is_absent()


def _two_processes(own: int, folder: str) -> None:
    collectives.VISIBILITY_TIMEOUT = 0.5
    assert (world_size(), rank()) == (2, own)
    x = torch.tensor([1.0, 10.0 * own], requires_grad=True)
    total = all_reduce_sum(x)
    assert total.tolist() == [2, 10]
    (total * torch.tensor([1.0, 3.0]) * (own + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 9], "the loss of both processes depends on the sum"
    assert all_reduce_sum(torch.tensor([[1, 2], [3, 4]]).T).tolist() == [[2, 6], [4, 8]], "not contiguous"
    assert all_reduce_max(x).tolist() == [1, 10]
    assert [part.tolist() for part in all_gather(torch.full((own, 2), 5))] == [[], [[5, 5]]]
    assert broadcast_object(f"from {own}") == "from 0"
    assert broadcast_object(f"from {own}", source=1) == "from 1"
    assert gather_on_main({"rank": own}) == (None if own else [{"rank": 0}, {"rank": 1}])
    assert [first_rank(own in ranks) for ranks in ([0, 1], [1], [])] == [0, 1, None]
    assert collectives.broadcast(torch.tensor([own + 5])).tolist() == [5]
    _three_images_and_one(own)
    if own == 0:
        with collectives.alone():
            assert [all_reduce_sum(x).tolist(), all_reduce_max(x).tolist(), len(all_gather(x))] == [[1, 0], [1, 0], 1]
    assert run_on_all_ranks(lambda: own) == own
    with pytest.raises(CheckpointError, match=r"^process 1: damaged$"):
        run_on_all_ranks(lambda: fail(CheckpointError("damaged")) if own else None)
    with pytest.raises(RankError, match=r"^process 0: RuntimeError: a$"):
        run_on_all_ranks(lambda: fail(RuntimeError("ab"[own])))
    with pytest.raises(RankError, match=r"^process 0: .*nothing is missing on "):
        run_on_all_ranks(lambda: wait_for_path(Path(folder, "nothing")) if own == 0 else None)


def _one_prepares_for_longer_than_collectives_wait(own: int, folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    file = Path(folder, "prepared")
    with collectives.first_of_node_first():
        if own == 0:
            time.sleep(3.5)
            file.touch()
        assert file.exists()
    assert torch.cat(all_gather(torch.tensor([own]))).tolist() == [0, 1]
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_first_process_may_outlast_a_collective(tmp_path: Path, free_port: int) -> None:
    with collectives.first_of_node_first():
        pass
    on_processes(_one_prepares_for_longer_than_collectives_wait, free_port, str(tmp_path))


def test_collectives_of_two_processes(tmp_path: Path, free_port: int) -> None:
    on_processes(_two_processes, free_port, str(tmp_path), group=True)
