import pytest
import torch

from tessera.pretrain.optim.ema import update


def test_thousand_steps_at_high_momentum_follow_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    teacher = start.clone()
    exact = teacher.double()
    for _ in range(1000):
        student = torch.randn(1000, generator=generator)
        update([teacher], [student], 0.9999)
        exact = 0.9999 * exact + (1 - 0.9999) * student.double()
    # a thousand roundings of numbers below 4 walk about sqrt(1000) * 2.4e-7 / sqrt(12), which is 2e-6 at one sigma
    torch.testing.assert_close(teacher.double(), exact, rtol=0, atol=1e-5)
    assert (exact - start).abs().mean() > 0.05  # far more than that tolerance


def test_a_teacher_equal_to_its_student_stays_equal() -> None:
    student = torch.randn(1000)
    teacher = student.clone()
    update([teacher], [student], 0.9973)
    assert torch.equal(teacher, student)


def test_a_teacher_in_bfloat16_is_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        update([torch.zeros(2, dtype=torch.bfloat16)], [torch.ones(2)], 0.9)
