"""The count of a training step on a fake GPU (benchmarks/roofline.py)."""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fake_device
import pytest
import roofline
import torch
from torch import nn

from tessera import encoders
from tessera.pretrain.activations import activations
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.cross_entropy import crop_loss
from tessera.pretrain.methods.heads import FactoredLogits
from tests.benchmarks.streams import StreamChecks

GPU = roofline.GPUS["h200"]


@functools.cache
def counted(encoder: str, **settings: Any) -> fake_device.Counter:
    """Return the counts of a step of DINO with 512 images."""
    return roofline.count_step(roofline.RooflineBenchmark(encoder=encoder, encoder_settings=settings))


def test_kernels_bytes_and_flop_of_a_linear_layer() -> None:
    layer = nn.Linear(64, 32, bias=False)
    with fake_device.counting(GPU) as counter:
        fake_device.fake_copy(layer)
        x = torch.empty(10, 64, device="cuda", dtype=torch.float32)
        layer(x).add_(1)
    product, added = counter.rows["", "mm"], counter.rows["", "add_"]
    assert (product.kernels, product.flop) == (1, 2 * 10 * 64 * 32)
    assert product.bytes == 4 * (10 * 64 + 64 * 32 + 10 * 32)
    assert (added.kernels, added.flop, added.bytes) == (1, 0, 4 * 2 * 10 * 32)
    assert product.seconds == GPU.launch  # so small that only the launch counts
    assert counter.total().host_reads == 0


def test_a_read_of_the_device_is_counted() -> None:
    with fake_device.counting(GPU) as counter:
        values = torch.empty(3, device="cuda")
        assert values.tolist() == [1, 1, 1]
        float(values.sum())
    assert counter.total().host_reads == 2


@pytest.mark.parametrize("missing", ["", "wait_stream", "record_stream"])
def test_a_race_between_streams_is_found(missing: str) -> None:
    with fake_device.counting(GPU) as counter, StreamChecks(counter) as checks:
        computing, copying = torch.cuda.current_stream(None), torch.cuda.Stream()
        with torch.cuda.stream(copying):
            copied = torch.empty(8).to("cuda", non_blocking=True)
        if missing != "wait_stream":
            computing.wait_stream(copying)
        if missing != "record_stream":
            copied.record_stream(computing)
        copied.add(1)
    assert bool(checks.races) == (missing == "wait_stream")
    assert checks.reused_too_early() == (missing == "record_stream")


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_of_a_copy_that_is_not_done_is_found(waits: bool) -> None:
    with fake_device.counting(GPU) as counter, StreamChecks(counter) as checks:
        copied = torch.ones(2, device="cuda").add(1).to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if waits:
            event.synchronize()
        assert copied.tolist() == [1, 1]
    assert bool(checks.early) == (not waits)


def test_its_backward_pass_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    x = torch.randn(5, 6)

    def loss() -> torch.Tensor:
        first, second = model(x), model(2 * x)  # weights that are used twice
        return (first.softmax(-1) * second[:, :1]).square().mean()

    loss().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    fake_device.backward(loss())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dino", "mae"])
def test_counts_of_a_step(method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, fake_run = list[StreamChecks](), roofline.fake_run

    @contextmanager
    def checked_run(*arguments: Any) -> Iterator[Any]:
        with fake_run(*arguments) as (counter, run), StreamChecks(counter) as checks:
            made.append(checks)
            yield counter, run

    monkeypatch.setattr(roofline, "fake_run", checked_run)
    settings = roofline.RooflineBenchmark(method=method, encoder="vit_tiny", batch_size=4)
    counter = roofline.count_step(settings)
    parts, total = counter.parts(), counter.total()
    assert total.host_reads == 0  # `finish_step` reads loss, norm and flags when the device is done
    (checks,) = made
    assert checks.races == []
    assert checks.reused_too_early() == 0
    copied = parts["copy to the device"].seconds
    assert 0 < copied < counter.seconds() == pytest.approx(total.seconds - copied)  # on a stream of its own
    values = 4 * 3 * (2 * 224**2 + 8 * 96**2 if method == "dino" else 224**2)
    assert parts["colours"].kernels <= (336 if method == "dino" else 7)
    statistics = 2 * 2 * 3 * 4  # the kernels that normalise read a mean and a standard deviation of each channel
    assert parts["colours"].bytes <= (217 if method == "dino" else 21) * values + statistics
    assert parts["AdamW"].kernels <= 10
    assert parts["clip"].kernels <= (60 if method == "dino" else 4)  # one for each large tensor
    assert parts["EMA and centre" if method == "dino" else "backward"].flop >= 0
    if method == "dino":  # multiply-adds of an image, by hand; the last block projects only the class token
        width, tokens = 192, 197
        block = 12 * tokens * width**2 + 2 * tokens**2 * width
        products = 12 * block - 9 * (tokens - 1) * width**2 + (tokens - 1) * 768 * width
        assert parts["teacher.encoder 224"].flop / (4 * 2) / 2 == products
    if method == "dino":
        assert parts["EMA and centre"].kernels <= 60
    assert total.kernels <= (1750 if method == "dino" else 1223)
    roofline.show(counter, settings)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["kernels"] == total.kernels
    assert result["images_per_second_bound"] == pytest.approx(4 / counter.seconds(), rel=1e-3)
    assert result["tflop"] == pytest.approx(sum(part.flop for part in parts.values()) / 1e12, abs=1e-3)


@pytest.mark.slow
def test_tokens_between_blocks_in_bf16_move_fewer_bytes() -> None:
    """Bytes per channel of a token and block of the teacher: sums, norms, linear layers, GELU and attention."""
    moved = {}
    for given in (False, True):
        counter = counted("vit_tiny", bf16_residuals=given)
        moved[given] = counter.parts()["teacher.encoder 224"].bytes / (2 * 512 * 197 * 192 * 12)
        assert counter.total().host_reads == 0
    assert moved[True] <= 83
    assert moved[True] <= moved[False] - 26


@pytest.mark.slow
def test_activations_of_a_large_batch_stay_below_40_gb() -> None:
    """DINO, ViT-S/16, 512 images, without a matrix product more."""
    counter = counted("vit_small", bf16_residuals=True, checkpoint_activations="selective")
    assert 30e9 < sum(size for _, size in counter.saved.values()) < 40e9
    assert counter.total().flop < 58.7e12  # as many as without recomputation


def made(count: int, **how: Any) -> list[torch.Tensor]:
    return [torch.empty(4, 8, device="cuda", **how) for _ in range(count)]


@pytest.mark.parametrize(
    ("second", "kernels"),
    [
        (lambda: made(5), 1),
        (lambda: torch.empty((), device="cuda"), 1),  # one factor for all
        (lambda: list(torch.empty(5, device="cuda").unbind()), 5),  # a factor for each: other shapes
        (lambda: made(5, dtype=torch.bfloat16), 5),
        (lambda: [t.T.contiguous().T for t in made(5)], 5),  # other strides
        (lambda: [torch.empty(8, device="cuda").expand(4, 8) for _ in range(5)], 5),
        (lambda: [*made(4), *made(1, dtype=torch.float64)], 5),
    ],
)
def test_lists_of_tensors_are_one_kernel_only_if_torch_can(second: Any, kernels: int) -> None:
    with fake_device.counting(GPU) as counter:
        first, other = made(5), second()
        counter.clear()
        torch._foreach_mul_(first, other)
    count = counter.rows["", "_foreach_mul_"]
    assert count.kernels == kernels
    assert count.seconds == pytest.approx(kernels * GPU.launch)
    factors = other if isinstance(other, list) else [other]
    distinct = sum(min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) * t.element_size() for t in factors)
    if not isinstance(other, list) or other[0].ndim:
        assert count.bytes == 5 * 2 * 4 * 8 * 4 + distinct


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "given"),
    [("dino", {}), ("dino", {"checkpoint_activations": "selective"}), ("dino", {"checkpoint_activations": True}),
     ("mae", {}), ("dinov2", {})],
    ids=str,
)  # fmt: skip
def test_the_estimate_of_activations_is_that_of_a_counted_step(method: str, given: dict[str, Any]) -> None:
    """From passes of two and four images, the activations of 512 images: within 1 %."""
    asked = roofline.RooflineBenchmark(method=method, encoder="vit_small", encoder_settings=given or None)
    saved = sum(size for _, size in roofline.count_step(asked).saved.values())
    chosen = roofline.gpu_defaults("vit_small", "bf16") | given
    config = roofline.make_config(method, "vit_small", 512, own=None, encoder=chosen, precision="bf16")
    options = config.encoder_settings
    with torch.device("meta"):
        encoder = encoders.build(options.pop("variant"), **options)
        built = METHODS[method](encoder, config.method_config, config.steps)
    assert activations(built, "bf16", 512).kept == pytest.approx(saved, rel=0.01)


def test_bytes_of_a_loss_in_chunks() -> None:
    """Bytes per logit of the student: 22 in bfloat16, with the three products of the last layer and its gradients.

    The product writes 2, the softmax moves 4, its entropy 6, the difference to the targets 4, and two products for the
    gradients read 4. The targets are a fifth of the logits.
    """
    crops, images, prototypes, width = 10, 512, 65_536, 256
    logits = crops * images * prototypes
    with fake_device.counting(GPU) as counter:
        rows = torch.empty(crops, images, width, device="cuda", requires_grad=True)
        weight = torch.empty(prototypes, width, device="cuda", requires_grad=True)
        teacher = torch.empty(2, images, prototypes, device="cuda")
        with counter.named("forward"), torch.autocast("cuda", torch.bfloat16):
            loss = crop_loss(FactoredLogits(rows, weight), teacher, 0.1)
        with counter.named("backward"):
            fake_device.backward(loss)
    parts, weights = counter.parts(), 4 * prototypes * width
    # in each of three chunks, the weight is read three times in bfloat16, and its gradient is added in float32
    assert parts["forward"].bytes <= 24 * logits + 3 * 6 * weights
    assert parts["backward"].bytes <= 4 * weights
    assert sum(size for _, size in counter.saved.values()) <= 0.11 * 2 * logits  # gradients of rows and weight
    assert counter.total().host_reads == 0
