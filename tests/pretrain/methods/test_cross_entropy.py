"""The losses in chunks of rows against those in one chunk, against float64, and over two processes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tessera.pretrain.methods import cross_entropy
from tessera.pretrain.methods.cross_entropy import CHUNK_BYTES, crop_loss, sinkhorn_offset, token_loss
from tessera.pretrain.methods.heads import FactoredLogits
from tessera.pretrain.methods.losses import dino_loss, sinkhorn, teacher_distribution
from tests.pretrain.methods import test_dino, test_dinov2
from tests.pretrain.small import on_processes

S, B, K, D = 5, 6, 40, 7
TEMPERATURES = {"student_temperature": 0.1, "teacher_temperature": 0.04}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * K * 4)  # four rows


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of half the loss, as under accumulation over two batches."""
    return torch.autograd.grad(loss / 2, inputs)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def factors(*shape: int, seed: int = 0) -> FactoredLogits:
    """Return float64 factors of logits of this shape. The values are those of bfloat16, so no cast rounds them."""
    rows, weight = random(*shape[:-1], D, dtype=torch.bfloat16, seed=seed), random(K, D, dtype=torch.bfloat16, seed=9)
    return FactoredLogits(F.normalize(rows.double(), dim=-1).bfloat16().double(), weight.double() / 2)


def trained(logits: FactoredLogits, dtype: torch.dtype) -> FactoredLogits:
    """Convert factors to the precision of parameters: float32 for half precision, as under autocast."""
    wide = torch.promote_types(dtype, torch.float32)
    return FactoredLogits(*(one.to(wide, copy=True).requires_grad_() for one in logits))


def under(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype, enabled=dtype in (torch.bfloat16, torch.float16))


EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# a logit of 10 is rounded by up to 2**-9 of its value in bfloat16, and a probability by as much as its logit
ROUNDING = EXACT | {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("views", [1, 2, 3, S])
@pytest.mark.parametrize("dtype", DTYPES)
def test_crops_in_chunks_equal_the_formula_in_float64(views: int, dtype: torch.dtype, small_chunks: None) -> None:
    given = factors(S, B, K)
    student, exact = trained(given, dtype), trained(given, torch.float64)
    teacher = (4 * random(views, B, K, dtype=student.rows.dtype, seed=1)).softmax(-1)
    with under(dtype):
        loss = crop_loss(student, teacher, 0.1, local_weight=0.7)
    expected = dino_loss((exact.product() / 0.1).log_softmax(-1), teacher.double(), local_weight=0.7)
    assert loss.dtype == student.rows.dtype
    torch.testing.assert_close(loss.double(), expected, rtol=ROUNDING[dtype], atol=0)
    for found, wanted in zip(gradient(loss, *student), gradient(expected, *exact), strict=True):
        assert found.dtype == student.rows.dtype
        assert (found - wanted).norm() <= ROUNDING[dtype] * wanted.norm()


@pytest.mark.parametrize("centering", ["mean", "sinkhorn"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_in_chunks_equal_the_formula_in_float64(centering: Any, dtype: torch.dtype, small_chunks: None) -> None:
    given, seen = factors(21, K), factors(21, K, seed=1)
    student, exact = trained(given, dtype), trained(given, torch.float64)
    wide = student.rows.dtype
    weights, center = random(21, dtype=wide, seed=2).exp(), random(K, dtype=wide, seed=3)
    weights[3] = 0
    with under(dtype):
        wanted = trained(seen, dtype)
        wanted = FactoredLogits(wanted.rows.detach(), wanted.weight.detach())
        loss, entropies, best = token_loss(student, wanted, weights, center, **TEMPERATURES, centering=centering)
    target = teacher_distribution(seen.product(), center.double(), 0.04, centering)
    losses = -(target * (exact.product() / 0.1).log_softmax(-1)).sum(-1)
    # the temperature of 0.04 multiplies the rounding errors of the teacher's logits
    rounding = ROUNDING[dtype] * (1 if dtype in EXACT else 3)
    torch.testing.assert_close(loss.double(), (losses * weights).sum(), rtol=rounding, atol=0)
    entropy = -torch.special.xlogy(target, target).sum(-1)
    assert (entropies - entropy).norm() <= max(rounding, 1e-5 * (dtype == torch.float32)) * entropy.norm()
    if dtype in EXACT:
        assert torch.equal(best, target.argmax(-1))
    expected = gradient((losses * weights).sum(), *exact)
    for found, wanted in zip(gradient(loss, *student), expected, strict=True):
        assert (found - wanted).norm() <= max(rounding, 1e-5 * (dtype == torch.float32)) * wanted.norm()


def test_a_frozen_last_layer_gets_no_gradient(small_chunks: None) -> None:
    rows, weight = trained(factors(21, K), torch.float32)
    teacher = factors(21, K, seed=1)
    teacher = FactoredLogits(teacher.rows.float(), teacher.weight.float())
    given: Any = (teacher, torch.ones(21), torch.zeros(K))
    both = torch.autograd.grad(
        token_loss(FactoredLogits(rows, weight), *given, **TEMPERATURES, centering="mean")[0], rows
    )
    loss = token_loss(FactoredLogits(rows, weight.detach()), *given, **TEMPERATURES, centering="mean")[0]
    assert torch.equal(*both, *torch.autograd.grad(loss, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinkhorn_in_chunks(dtype: torch.dtype, small_chunks: None) -> None:
    logits = factors(21, K)
    scaled = FactoredLogits(logits.rows.float() / 0.1, logits.weight.float())
    chunked = (scaled.product() + sinkhorn_offset(scaled, dtype)).softmax(1)
    exact = {torch.float32: 1e-5, torch.float16: 2e-2}[dtype]
    torch.testing.assert_close(chunked, sinkhorn(scaled.product(), 1.0), rtol=exact, atol=exact / 100)
    steep = FactoredLogits(2000 * logits.rows.float(), logits.weight.float())
    assert (steep.product() + sinkhorn_offset(steep, torch.float32)).softmax(1).isfinite().all()


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
    """Finds the largest tensor that an operation returns, except views, in values."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t._base is None]
        self.values = max([self.values, *made])
        return out


@pytest.mark.parametrize("centering", ["mean", "sinkhorn"])
def test_only_a_chunk_of_logits_is_in_memory(centering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, prototypes = 100, 10 * K
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * prototypes * 2)  # four rows in bfloat16
    weight = random(prototypes, D)
    crops, tokens, given = (
        FactoredLogits(random(*shape, D, seed=seed).requires_grad_(seed < 2), weight)
        for seed, shape in enumerate([(2, rows // 2), (rows,), (rows,)])
    )
    teacher, weights = random(2, rows // 2, prototypes, seed=1).softmax(-1), torch.ones(rows)
    saved: list[Tensor] = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.autocast("cpu", torch.bfloat16):
            loss = crop_loss(crops, teacher, 0.1)
            center = torch.zeros(prototypes)
            loss = loss + token_loss(tokens, given, weights, center, **TEMPERATURES, centering=centering)[0]
        torch.autograd.grad(loss, (crops.rows, tokens.rows))
    assert largest.values <= max(4 * prototypes, prototypes * (D + 8), rows * (D + 8)) < rows * prototypes / 2
    assert all(t.numel() <= rows * D for t in saved)


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
