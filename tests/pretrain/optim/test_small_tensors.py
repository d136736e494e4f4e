"""Operations on many small tensors against loops. A fake GPU, whose tensors are real, takes the way of a GPU."""

import pytest
import torch
from torch import Tensor

from tessera.pretrain.optim import small_tensors
from tessera.pretrain.optim.small_tensors import move_each, scale_each

SHAPES = [(3,), (2, 5), (0, 4), (), (7, 3), (40,)]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_tensors, "_is_small", lambda tensor: tensor.numel() <= 21)


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_each_tensor_is_multiplied_by_its_own_factor(as_on_a_gpu: None) -> None:
    found, scales = tensors(0), torch.rand(len(SHAPES))
    found[4] = found[4].T.contiguous().T  # not contiguous, as a gradient may be
    expected = [t * s for t, s in zip(found, scales, strict=True)]
    scale_each(found, scales)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("weight", [0.0, 0.004, 1.0])
def test_targets_move_towards_their_sources(weight: float, as_on_a_gpu: None) -> None:
    found, sources = tensors(0), tensors(1)
    found[0], found[2] = found[0].double(), found[2].double()
    sources[1].copy_(found[1])
    before = [t.clone() for t in found]
    move_each(found, sources, torch.tensor(weight))
    for t, old, s in zip(found, before, sources, strict=True):
        torch.testing.assert_close(t.double(), old.double() + weight * (s.double() - old.double()))
    unchanged = range(len(found)) if weight == 0 else [1]
    assert all(torch.equal(found[i], before[i]) for i in unchanged)
