"""A step of every method and of every family of encoders on the fake GPU: nothing waits, streams keep their order."""

from typing import Any

import pytest
import training
from fake_device import GPUS, fake_run

from tessera.pretrain.build import build_method
from tessera.pretrain.methods import METHODS, pretraining_methods
from tessera.pretrain.resolve import gpu_defaults
from tessera.pretrain.step import finish_step, start_step, to_device
from tessera.runtime.processes import make_accelerator
from tests.benchmarks.streams import StreamChecks

ENCODERS = [
    *(f"{family}_micro" for family in ("vit", "rope_vit", "swin", "twins_svt", "navit", "sam_vit")),
    "timm:resnet18",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "drop path": {"drop_path": 0.2},
    "recomputed": {"checkpoint_activations": True},
    "selective": {"checkpoint_activations": "selective", "drop_path": 0.2},
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_engine")]


def assert_nothing_waits(method: str, encoder: str, accumulate: int = 1, **options: Any) -> None:
    own = dict(METHODS[method].small_settings)
    if encoder == "timm:resnet18":  # its stride is 32
        own |= {name: 64 for name in ("global_size", "size") if name in own}
    chosen = gpu_defaults(encoder, "bf16") | options
    config = training.make_config(
        method, encoder, 4, own=own, encoder=chosen, precision="bf16", steps=10, accumulate=accumulate
    )
    built = build_method(config, fresh=False)
    batch = training.loader_batch(built.transform(), 4 // accumulate, size=(64, 64))
    accelerator = make_accelerator(mixed_precision="bf16", cpu=True)
    with fake_run(config, accelerator, built, GPUS["h100"]) as (counter, run), StreamChecks(counter) as checks:
        for step in range(2 if method == "distill" else 1):
            counter.clear()
            checks.clear()  # the first step of `distill` moves its teacher to the device
            with counter.named("step"):
                batches = [to_device(run, batch.pin_memory()) for _ in range(accumulate)]
                finish_step(run, start_step(run, step, batches))
    assert counter.total().kernels > 100
    assert counter.total().host_reads == 0
    assert (checks.unpinned, checks.races, checks.early, checks.reused_too_early()) == ([], [], [], 0)


@pytest.mark.parametrize(
    ("method", "encoder"),
    [
        (method, encoder)
        for method in pretraining_methods()
        for encoder in ENCODERS
        # every method, every family, and the encoder that leaves out hidden tokens of packed images
        if encoder == "vit_micro" or method == "dino" or (method, encoder) == ("mae", "navit_micro")
    ],
)
def test_no_pair_waits_for_the_device(method: str, encoder: str) -> None:
    assert_nothing_waits(method, encoder)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("method", ["dino", "mae"])
def test_no_option_waits_for_the_device(method: str, name: str) -> None:
    assert_nothing_waits(method, "vit_micro", **OPTIONS[name])


def test_accumulation_does_not_wait_for_the_device() -> None:
    assert_nothing_waits("dino", "vit_micro", accumulate=2)
