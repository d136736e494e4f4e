"""The losses in chunks of rows against those in one chunk, against float64, and over two processes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tessera.pretrain.methods import cross_entropy
from tessera.pretrain.methods.cross_entropy import CHUNK_BYTES, crop_loss, sinkhorn_offset, token_loss
from tessera.pretrain.methods.losses import dino_loss, sinkhorn
from tests.pretrain.methods import test_dino, test_dinov2
from tests.pretrain.small import on_processes

S, B, K = 5, 6, 40
TEMPERATURES = {"student_temperature": 0.1, "teacher_temperature": 0.04}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * K * 4)  # four rows


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of half the loss, as under accumulation over two batches."""
    return torch.autograd.grad(loss / 2, inputs)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("views", [1, 2, 3, S])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_crops_in_chunks_equal_the_formula_in_float64(views: int, dtype: torch.dtype, small_chunks: None) -> None:
    logits = random(S, B, K, dtype=dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    teacher = (4 * random(views, B, K, dtype=wide, seed=1)).softmax(-1)
    loss = crop_loss(logits * 1, teacher, 0.1, local_weight=0.7)  # the product, because its values are lost
    expected = dino_loss((logits.double() / 0.1).log_softmax(-1), teacher.double(), local_weight=0.7)
    assert loss.dtype == wide
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(loss.double(), expected, rtol=exact, atol=0)
    (found,), (wanted,) = gradient(loss, logits), gradient(expected, logits)
    # a gradient is rounded twice to the precision of the logits
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, exact)
    assert (found - wanted).abs().max() <= rounding * wanted.abs().max()


@pytest.mark.parametrize("centering", ["mean", "sinkhorn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_in_chunks_equal_those_in_one(centering: Any, dtype: torch.dtype, monkeypatch) -> None:
    student, teacher = random(21, K, dtype=dtype).requires_grad_(), random(21, K, dtype=dtype, seed=1)
    weights = random(21, seed=2).exp()
    center, given = random(K, seed=3), TEMPERATURES | {"centering": centering}
    whole = token_loss(student * 1, teacher, weights, center, **given)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * K * 4)
    chunked = token_loss(student * 1, teacher, weights, center, **given)
    torch.testing.assert_close(chunked[0], whole[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked[1], whole[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(chunked[2], whole[2])
    (found,), (wanted,) = gradient(chunked[0], student), gradient(whole[0], student)
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
    assert (found - wanted).abs().max() <= rounding * wanted.abs().max()


def test_sinkhorn_in_chunks(small_chunks: None) -> None:
    logits = random(21, K)
    chunked = (logits / 0.1 + sinkhorn_offset(logits, 0.1)).softmax(1)
    torch.testing.assert_close(chunked, sinkhorn(logits, 0.1), rtol=1e-5, atol=1e-7)
    assert (2000 * logits + sinkhorn_offset(logits, 1 / 2000)).softmax(1).isfinite().all()


@pytest.mark.parametrize("make", [test_dino.make, test_dinov2.make])
def test_a_method_gives_the_same_in_chunks(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, batch = make()
    twin = copy.deepcopy(method)
    loss, metrics = method(batch, 3)
    loss.backward()
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * 32 * 4)
    chunked, others = twin(batch, 3)
    chunked.backward()
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
    for name, metric in metrics.items():
        torch.testing.assert_close(others[name], metric, rtol=1e-5, atol=1e-6, msg=name)
    for (name, p), q in zip(method.student.named_parameters(), twin.student.parameters(), strict=True):
        if p.grad is not None:
            assert q.grad is not None, name
            assert (q.grad - p.grad).norm() <= 1e-5 * p.grad.norm() + 1e-8, name
    assert twin.health() == pytest.approx(method.health(), rel=1e-5)


class Largest(TorchDispatchMode):
    """Finds the largest float32 tensor that an operation returns, in values."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.dtype == torch.float32]
        self.values = max([self.values, *made])
        return out


@pytest.mark.parametrize("centering", ["mean", "sinkhorn"])
def test_only_a_chunk_is_in_float32(centering: Any, small_chunks: None) -> None:
    crops, tokens = (random(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((S, B, K), (30, K)))
    teacher, weights = random(2, B, K, seed=1).softmax(-1), torch.ones(30)
    given = random(30, K, dtype=torch.bfloat16, seed=2)
    saved: list[Tensor] = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = crop_loss(crops * 1, teacher, 0.1)
        loss = loss + token_loss(tokens * 1, given, weights, torch.zeros(K), **TEMPERATURES, centering=centering)[0]
        torch.autograd.grad(loss, (crops, tokens))
    assert largest.values <= 4 * K
    assert all(t.numel() < 4 * K for t in saved if t.dtype == torch.float32)
    assert sum(t.numel() for t in saved) >= (S * B + 30) * K  # the gradients, in bfloat16


def _in_chunks_on_one_of_two(rank: int) -> None:
    """Gradients under DDP with uneven masks; the first process computes in chunks, then none."""
    torch.distributed.init_process_group("gloo")
    method, given = test_dinov2.make(images=6, centering="sinkhorn")
    half = slice(rank * 3, rank * 3 + 3)
    views = [(view.images, view.crops) for view in given.views]
    own = [x.unflatten(0, (n, -1))[:, half].flatten(0, 1) for x, n in views if isinstance(x, Tensor)]
    hidden = given.views[0].masks[0].hidden.view(2, 6, -1)[:, half].flatten(0, 1)
    results = []
    for size in (4 * 32 * 4 if rank == 0 else CHUNK_BYTES, CHUNK_BYTES):
        cross_entropy.CHUNK_BYTES = size
        twin = copy.deepcopy(method)
        loss, metrics = DistributedDataParallel(twin)(test_dinov2.batch(own, hidden, twin), 0)
        loss.backward()
        twin.after_step(0)
        gradients = [p.grad for p in twin.student.parameters() if p.grad is not None]
        results.append([loss.detach(), *metrics.values(), twin.ibot_center, *gradients])
    whole = torch.cat([one.flatten() for one in results[1]]).norm()
    for chunked, expected in zip(*results, strict=True):
        assert (chunked - expected).norm() <= 1e-5 * expected.norm() + 1e-7 * whole
    torch.distributed.destroy_process_group()


def test_one_of_two_processes_may_compute_in_chunks(free_port: int) -> None:
    on_processes(_in_chunks_on_one_of_two, free_port)
