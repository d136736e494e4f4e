"""What every method promises, with every encoder, and over two processes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera import encoders
from tessera.data.batch import Batch
from tessera.encoders.randomness import random_keys
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method, RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tests.launched import find_free_port
from tests.pretrain import small
from tests.pretrain.small import MICRO, on_processes
from tests.teachers import small_settings

IMAGES = 8
SIZE = RunSize(1000, IMAGES, small.STEPS)
UNUSED = {"mask_token": True, "classes": 3}
"""Parts of an encoder that a method may not use."""


def make(name: str, variant: str = "vit_micro", encoder: dict[str, Any] | None = None, **settings: Any) -> Method:
    chosen = METHODS[name]
    config, _ = chosen.resolve(chosen.Config(**small_settings(chosen) | settings), OptimConfig(), SIZE)
    given = chosen.encoder_defaults(config, variant, SIZE) | {"drop_path": 0.3} | (encoder or {})
    torch.manual_seed(0)
    return chosen(encoders.build(variant, **given), config, small.STEPS)


def forward(method: Method, images: slice, step: int = 3) -> tuple[Tensor, dict[str, Tensor], Batch]:
    """The loss of some of the images, which are the same in all calls."""
    batch = small.part_of(small.batch_for(method, IMAGES), images)
    with random_keys(0, step, torch.arange(IMAGES)[images]):
        loss, metrics = method(batch, step)
    return loss, metrics, batch


@pytest.mark.parametrize(
    ("name", "variant", "encoder"),
    [
        *((name, "vit_micro", UNUSED) for name in METHODS.names()),
        # tests/pretrain/test_pairs.py has all pairs
        *((name, variant, {}) for name in ("dinov3", "mae") for variant in MICRO),
    ],
)
def test_every_trained_parameter_gets_a_gradient(name: str, variant: str, encoder: dict[str, Any]) -> None:
    method = make(name, variant, encoder).train()
    loss, metrics, _ = forward(method, slice(0, 4))
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(value.isfinite() for value in (loss, *metrics.values()))
    assert [key for key, p in method.named_parameters() if p.requires_grad and p.grad is None] == []
    assert method.health().get("feature_rank", 2) > 1
    for part in ("teacher", "gram_teacher"):
        if hasattr(method, part):  # also not in training mode
            assert not any(p.requires_grad for p in getattr(method, part).parameters())
            assert not getattr(method, part).training


@pytest.mark.parametrize("name", METHODS.names())
def test_a_skipped_step_leaves_no_trace(name: str) -> None:
    """`after_step` is told that the step was skipped."""
    method = make(name)
    other = copy.deepcopy(method)
    before = {key: tensor.clone() for key, tensor in method.state_dict().items()}
    forward(method, slice(4, 8), step=0)
    method.after_step(0, torch.tensor(0.0))
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    changed = {key for key, t in method.state_dict().items() if not torch.equal(t, before[key])}
    assert {key for key in changed if not key.endswith(statistics)} == set()
    for each in (method, other):
        with torch.no_grad():
            for p in each.trained_encoder().parameters():
                p.add_(0.01)
        forward(each, slice(0, 4), step=1)
        each.after_step(1)
    trace = {key for key, t in method.state_dict().items() if not torch.equal(t, other.state_dict()[key])}
    assert {key for key in trace if not key.endswith(statistics)} == set()


WARM = {"teacher_temperature": 0.1, "teacher_temperature_start": 0.1}
"""The default, 0.04, would multiply the rounding of cosines by 25, on some processors to more than the tests allow."""
TWO: list[tuple[str, dict[str, Any]]] = [
    *((name, WARM if "teacher_temperature" in METHODS[name].Config.model_fields else {}) for name in METHODS.names()),
    ("dino", WARM | {"centering": "sinkhorn"}),
    ("dinov2", WARM | {"centering": "sinkhorn"}),
    *([("distill", {"students": ["swin_micro"]})] if "distill" in METHODS else []),
]


def found(method: Method, loss: Tensor, metrics: dict[str, Tensor], batch: Batch) -> dict[str, dict[str, Tensor]]:
    """What a step leaves behind: gradients and means of a process, values of all processes, hidden tokens."""
    loss.backward()
    method.after_step(3)
    means = metrics | {"loss": loss}
    health = {key: torch.tensor(value) for key, value in method.health().items()}
    return {
        "gradients": {key: p.grad for key, p in method.named_parameters() if p.grad is not None},
        "means": {key: value.detach().float() for key, value in means.items()},
        "all": {key: buffer.clone() for key, buffer in method.named_buffers()} | health,
        "hidden": {str(i): mask.hidden.sum() for i, view in enumerate(batch.views) for mask in view.masks},
    }


def _two(rank: int, folder: str) -> None:
    half = IMAGES // 2
    for number, (name, settings) in enumerate(TWO):
        method = make(name, **settings)
        result = found(method, *forward(method, slice(rank * half, rank * half + half)))
        for tensor in (*result["gradients"].values(), *result["means"].values()):
            torch.distributed.all_reduce(tensor)
            tensor /= 2
        torch.save(result, f"{folder}/{number}-{rank}.pt")


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the results of each of two processes, in one launch."""
    folder = tmp_path_factory.mktemp("halves")
    on_processes(_two, find_free_port(), str(folder), group=True, limit=300)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("number", range(len(TWO)), ids=[name for name, _ in TWO])
def test_two_processes_equal_one(number: int, halves: Path) -> None:
    """With drop path, and with another number of hidden tokens on each."""
    name, settings = TWO[number]
    method = make(name, **settings)
    whole = found(method, *forward(method, slice(IMAGES)))
    # batch norm makes the gradient of a bias before it zero: what float32 leaves there is small beside the whole alone
    size = torch.cat([gradient.flatten() for gradient in whole["gradients"].values()]).norm()
    results = [torch.load(halves / f"{number}-{rank}.pt") for rank in range(2)]
    for view, hidden in whole["hidden"].items():
        assert results[0]["hidden"][view] + results[1]["hidden"][view] == hidden
    for result in results:
        for key, value in whole["means"].items():
            torch.testing.assert_close(result["means"][key], value, rtol=1e-6, atol=0, msg=key)
        for key, gradient in whole["gradients"].items():
            assert (result["gradients"][key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * size, key
            if name == "distill":  # no cosine of normed features, whose small gradients float32 rounds
                torch.testing.assert_close(result["gradients"][key], gradient, rtol=1e-4, atol=1e-7, msg=key)
        for key, value in whole["all"].items():
            # logits are cosines, sums of products up to 1 that float32 rounds at 6e-8 each
            torch.testing.assert_close(result["all"][key], value, rtol=1e-5, atol=1e-6, msg=key)
