import pytest
import torch
from torch import Tensor, nn

from tessera.pretrain.optim import ema


def module(weights: Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(weights)])


def test_thousand_steps_at_high_momentum_follow_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    teacher = start.clone()
    exact = teacher.double()
    for _ in range(1000):
        student = torch.randn(1000, generator=generator)
        ema.update(module(teacher), module(student), 0.9999)
        exact = 0.9999 * exact + (1 - 0.9999) * student.double()
    # a thousand roundings of numbers below 4 walk about sqrt(1000) * 2.4e-7 / sqrt(12), which is 2e-6 at one sigma
    torch.testing.assert_close(teacher.double(), exact, rtol=0, atol=1e-5)
    assert (exact - start).abs().mean() > 0.05  # far more than that tolerance


def test_a_teacher_equal_to_its_student_stays_equal() -> None:
    student = torch.randn(1000)
    teacher = student.clone()
    ema.update(module(teacher), module(student), 0.9973)
    assert torch.equal(teacher, student)


def test_a_teacher_in_bfloat16_is_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        ema.update(module(torch.zeros(2, dtype=torch.bfloat16)), module(torch.ones(2)), 0.9)


def test_running_statistics_of_batch_norm_are_averaged_and_counts_are_copied() -> None:
    torch.manual_seed(0)
    student, teacher = nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()
    expected = {name: value.double() for name, value in teacher.state_dict().items()}
    for step in range(3):
        student(torch.randn(16, 4) * (step + 1) + step)
        ema.update(teacher, student, 0.7)
        for name, value in student.state_dict().items():
            expected[name] = (
                0.7 * expected[name] + 0.3 * value.double() if value.is_floating_point() else value.double()
            )
    assert teacher.num_batches_tracked == student.num_batches_tracked == 3
    assert not torch.equal(teacher.running_var, torch.ones(4))
    for name, value in teacher.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=1e-6)


def test_a_copy_has_the_parameters_and_buffers() -> None:
    student, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    student(torch.randn(16, 4))
    ema.copy(other, student)
    assert all(torch.equal(value, student.state_dict()[name]) for name, value in other.state_dict().items())
