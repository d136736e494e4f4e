import pytest
import torch

from tessera.runtime.processes import LaunchError, make_accelerator


def test_one_process_without_a_gpu_runs_on_the_cpu():
    made = make_accelerator()
    assert made.num_processes == 1
    assert made.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_processes_that_do_not_know_of_each_other_are_stopped(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="--multi_gpu --num_processes 2"):
        make_accelerator()


def test_a_second_run_in_a_process_may_have_another_precision():
    for precision in ("no", "bf16", "no"):
        assert make_accelerator(mixed_precision=precision).mixed_precision == precision
