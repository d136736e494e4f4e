"""Running statistics of batch norm: a skipped step leaves no trace, and processes hold equal ones."""

import torch
from torch import Tensor, nn

from tessera.pretrain.methods.dino import DINO
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.optim.running_statistics import StepStatistics, running_statistics
from tests.pretrain.small import on_processes
from tests.pretrain.toy import ToyConv
from tests.views import batch_of


class Normalised(nn.Module):
    """A linear layer with batch norm, a frozen copy of it, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.teacher = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
        self.register_buffer("constant", torch.full((2,), -torch.inf))


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_they_are_the_buffers_of_batch_norm() -> None:
    module = Normalised()
    assert [tuple(one.shape) for one in running_statistics(module)] == 2 * [(4,), (4,), ()]
    assert len(running_statistics(module, training=True)) == 3


def test_a_skipped_step_is_undone() -> None:
    module = Normalised()
    module.student(torch.randn(5, 3))
    before = state(module)
    statistics = StepStatistics(module)
    for _ in range(2):  # forward passes of one step
        module.student(torch.randn(5, 3))
    assert module.student[1].num_batches_tracked == 3
    statistics.settle(torch.tensor(0.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(module).items())


def _two(rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    images = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    modules = []
    for seen in (rank, 0, 1):
        torch.manual_seed(0)
        module = Normalised()
        statistics = StepStatistics(module)
        module.student(images[seen])
        modules.append(module)
        if seen == rank and len(modules) == 1:
            statistics.settle(torch.tensor(1.0), weight=(1.2, 0.8)[rank])
    own, *each = (state(module) for module in modules)
    for name, tensor in own.items():
        expected = 0.6 * each[0][name].double() + 0.4 * each[1][name].double()  # of 6 and 4 images
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
    assert own["student.1.num_batches_tracked"] == 1
    assert not torch.equal(own["student.1.running_mean"], each[0]["student.1.running_mean"])
    torch.distributed.destroy_process_group()


def test_processes_average_them(free_port: int) -> None:
    on_processes(_two, free_port)


def test_a_teacher_averages_those_of_the_student_and_uses_them() -> None:
    torch.manual_seed(0)
    small = {"global_size": 16, "local_size": 8, "local_crops": 2, "prototypes": 32, "hidden_dim": 16}
    config, _ = DINO.resolve(DINO.Config(**small, bottleneck_dim=8, momentum=0.5), OptimConfig(), RunSize(1000, 4, 10))
    method = DINO(ToyConv(batch_norm=True), config, 10)
    batch = batch_of([torch.randn(8, 3, 16, 16) + 2, torch.randn(8, 3, 8, 8) + 2], (2, 2))
    expected = [tensor.double() for tensor in running_statistics(method.teacher)]
    assert len(expected) == 6
    for step in range(2):
        method(batch, step)[0].backward()
        assert method.teacher["encoder"].blocks[0][1].num_batches_tracked == 2 * step  # not changed by its own passes
        momentum = method.momentum(step)
        method.after_step(step)
        expected = [
            momentum * old + (1 - momentum) * new.double() if new.is_floating_point() else new.double()
            for old, new in zip(expected, running_statistics(method.student), strict=True)
        ]
    for tensor, wanted in zip(running_statistics(method.teacher), expected, strict=True):
        torch.testing.assert_close(tensor.double(), wanted, rtol=1e-5, atol=1e-6)
    images = batch.views[0].images
    with torch.no_grad():
        before = method.teacher["encoder"](images).pooled
        method.teacher["encoder"].blocks[0][1].running_mean += 1
        assert not torch.allclose(method.teacher["encoder"](images).pooled, before)
