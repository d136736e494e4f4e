"""Batch norm over processes against torch's batch norm on all images in one process."""

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from tessera.pretrain.methods.batch_norm import BatchNorm, over_all_processes
from tessera.runtime.collectives import alone
from tests.ranks import on_processes

LAYERS = {
    "two dimensions": lambda: nn.BatchNorm2d(4),
    "rows": lambda: nn.BatchNorm1d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "no weights": lambda: nn.BatchNorm2d(4, affine=False),
    "no running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "with activation": lambda: BatchNormAct2d(4),
}


def _images(name: str) -> torch.Tensor:
    shape = (6, 4) if name == "rows" else (6, 4, 3, 2)
    return (
        torch.randn(shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(torch.get_default_device())
        * 3
        + 100
    )


def _layer(name: str) -> nn.Module:
    layer = LAYERS[name]()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(0.5, 2, 4) - i)
    return layer


def _two(rank: int, device: str) -> None:
    """The processes have four and two images."""
    torch.set_default_device(device)
    for name in LAYERS:
        torch.manual_seed(0)
        whole, own = _layer(name), _layer(name)
        over_all_processes(own)
        assert isinstance(own, BatchNorm)
        assert list(own.state_dict()) == list(whole.state_dict())
        for _ in range(2):
            x = _images(name).requires_grad_()
            part = (x[:4] if rank == 0 else x[4:]).detach().requires_grad_()
            expected, out = whole(x), own(part)
            rows = slice(0, 4) if rank == 0 else slice(4, 6)
            torch.testing.assert_close(out, expected[rows], rtol=1e-4, atol=1e-4)
            whole.zero_grad()
            own.zero_grad()
            weights = _images(name).detach() - 100
            (expected * weights).sum().backward()
            (out * weights[rows]).sum().backward()
            torch.testing.assert_close(part.grad, x.grad[rows], rtol=1e-3, atol=1e-4)
            for theirs, parameter in zip(whole.parameters(), own.parameters(), strict=True):
                total = parameter.grad.clone()
                torch.distributed.all_reduce(total)
                torch.testing.assert_close(total, theirs.grad, rtol=1e-3, atol=1e-3)
        for (key, theirs), buffer in zip(whole.named_buffers(), own.buffers(), strict=True):
            torch.testing.assert_close(buffer, theirs, rtol=1e-4, atol=1e-4, msg=f"{name}: {key}")
        torch.testing.assert_close(own.eval()(_images(name)), whole.eval()(_images(name)), rtol=1e-3, atol=1e-3)
        own.train()
        with alone():
            mine = _images(name)[: 3 - rank]
            alike = _layer(name)
            alike.load_state_dict(own.state_dict())
            torch.testing.assert_close(own(mine), alike(mine))


def test_two_processes_equal_one(free_port: int) -> None:
    on_processes(_two, free_port, "cpu", group=True)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_processes_of_one_gpu_equal_one(free_port: int) -> None:
    on_processes(_two, free_port, "cuda", group=True)


@pytest.mark.parametrize("name", LAYERS)
def test_one_process_is_bit_for_bit_as_before(name: str) -> None:
    before = _layer(name)
    after = copy.deepcopy(before)
    over_all_processes(after)
    x = _images(name)
    for module in (before, after):
        assert module(x).shape == x.shape
    assert torch.equal(before(x), after(x))
    assert torch.equal(before.eval()(x), after.eval()(x))
    assert all(torch.equal(a, b) for a, b in zip(before.buffers(), after.buffers(), strict=True))


def test_a_converted_layer_can_be_copied() -> None:
    layer = nn.Sequential(nn.BatchNorm2d(3))
    over_all_processes(layer)
    assert type(copy.deepcopy(layer)[0]) is BatchNorm
    over_all_processes(layer)  # a second call changes nothing
    assert type(layer[0]) is BatchNorm
