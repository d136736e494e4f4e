"""FLOP and tokens of a step, counted by hand, and the peak of a device."""

import pytest
import torch
from torch import Tensor, nn

from tessera.data.batch import Batch
from tessera.data.crops import MixedCrops, NativeCrop, RandomCrop, RandomCropConfig
from tessera.encoders import build
from tessera.encoders.base import Encoder
from tessera.pretrain import flop
from tessera.pretrain.flop import Work, count_work, peak
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method
from tests.pretrain import small

CPU = torch.device("cpu")
ENCODER = {"variant": "vit_micro", "depth": 2, "dim": 24, "heads": 2, "patch_size": 4, "drop_path": 0.5}


class Mean(Method):
    """The mean of an encoder's tokens of crops of one size, or of several."""

    def __init__(self, *sizes: int, **settings: object) -> None:
        super().__init__()
        self.encoder, self.sizes, self.scale = build(**ENCODER | settings), sizes, nn.Parameter(torch.ones(()))
        self.reads_values = False

    def transform(self) -> RandomCrop | MixedCrops:
        crops = [RandomCrop(RandomCropConfig(size=size)) for size in self.sizes]
        return MixedCrops(crops, [3, 1]) if len(crops) > 1 else crops[0]

    def trained_parts(self) -> list[nn.Module]:
        return [self.encoder]

    def trained_encoder(self) -> Encoder:
        return self.encoder

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.encoder(batch.views[0].images).tokens.mean() * self.scale
        return loss * loss.item() if self.reads_values else loss, {}


def by_hand(size: int, dim: int = 24, depth: int = 2) -> int:
    """FLOP of a ViT's forward and backward pass of one image, with one class token."""
    patches, tokens = (size // 4) ** 2, (size // 4) ** 2 + 1
    embedding = 2 * patches * 3 * 16 * dim
    block = 2 * tokens * dim * 12 * dim + 2 * 2 * tokens * tokens * dim
    return 2 * embedding + 3 * depth * block  # the gradient of the image is not computed


@pytest.mark.parametrize("settings", [{}, {"checkpoint_activations": True}, {"skip_dropped": True}])
def test_the_flop_of_useful_work_are_those_counted_by_hand(settings: dict[str, object]) -> None:
    """Also those of a run that computes blocks twice, or only for the images that drop path keeps."""
    method, state = Mean(16, **settings), torch.get_rng_state()
    found = count_work(method, CPU, "fp32")
    assert found is not None
    assert found.flop == by_hand(16)
    assert found.tokens == 16
    assert torch.equal(state, torch.get_rng_state())
    assert method.encoder.checkpoint_activations == settings.get("checkpoint_activations", False)
    assert all(p.device == CPU and p.grad is None for p in method.parameters())


def test_sizes_that_change_from_step_to_step_count_by_their_shares() -> None:
    found = count_work(Mean(16, 32), CPU, "fp32")
    assert found is not None
    assert found.flop == (3 * by_hand(16) + by_hand(32)) / 4
    assert found.tokens == (3 * 16 + 64) / 4


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_is_counted(name: str) -> None:
    found = count_work(small.method(name, seed=0), CPU, "fp32")
    assert found is not None
    assert found.flop > 0


def test_the_log_says_once_why_there_is_no_count(caplog: pytest.LogCaptureFixture) -> None:
    reading, native = Mean(16), Mean(16)
    reading.reads_values = True
    native.transform = lambda: NativeCrop(RandomCropConfig(size=16), 4, 8, 64)  # pyright: ignore
    with caplog.at_level("INFO"):
        assert count_work(reading, CPU, "fp32") is None
        assert count_work(native, CPU, "fp32") is None
    first, second = caplog.messages
    assert first.startswith("Mean has no metrics mfu and tokens_per_second, because its FLOP cannot be counted: ")
    assert "crops have the sizes of the images" in second


def test_two_processes_have_twice_the_peak() -> None:
    assert Work(flop=2e9, tokens=196, peak=1e12).metrics(100, 2) == {"tokens_per_second": 19600, "mfu": 0.1}


def test_a_known_gpu_has_the_peak_of_its_data_sheet_and_any_other_device_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flop, "_fastest_product", lambda device, kind: (device.type, kind))
    found, gpu = {}, torch.device("cuda")
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA H200"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found[name] = peak(gpu, "bf16")
        assert peak(gpu, "fp32") == ("cuda", torch.float32)
    assert list(found.values()) == [989e12, ("cuda", torch.bfloat16), 312e12, 989e12]
    assert peak(CPU, "bf16") == ("cpu", torch.bfloat16)


def test_the_fastest_product_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product takes 9 s. The others take 0.02 s, and one of them 0.01 s."""
    times = iter([0.0, 9.0, 9.0, 9.02, 9.02, 9.03, 9.03, 9.05])
    monkeypatch.setattr(flop.time, "perf_counter", lambda: next(times))
    assert flop._fastest_product.__wrapped__(CPU, torch.float32) == pytest.approx(2 * 512**3 / 0.01)
