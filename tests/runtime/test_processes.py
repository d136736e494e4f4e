import pytest
import torch

from runtime.processes import EvaluationError, accelerator, all_gather, all_sum


def test_one_process_without_a_gpu_runs_on_the_cpu():
    made = accelerator()
    assert made.num_processes == 1
    assert made.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.tensor([1, 2])
    assert all_gather(x, made) == [x]
    assert all_sum(x, None) is x


def test_processes_that_do_not_know_of_each_other_are_stopped(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EvaluationError, match="--multi_gpu --num_processes 2"):
        accelerator()
