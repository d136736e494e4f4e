"""The limit on the memory of an evaluation: bytes counted by hand, and equal features in smaller batches."""

import pytest
import torch
from torch import Tensor

from tessera import encoders
from tessera.evaluation import memory, tokens
from tessera.evaluation.features import extract
from tessera.evaluation.memory import COPIES, images_at_once
from tessera.evaluation.tokens import patch_tokens
from tessera.runtime.processes import make_accelerator
from tests.evaluation.conftest import FAMILIES


@pytest.mark.parametrize("crops", [1, 2])
def test_the_bytes_of_an_image_are_those_of_the_tensors_that_live_at_a_time(
    crops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, seen = torch.randn(192, 1000), list[int]()

    def encode(images: Tensor) -> Tensor:
        seen.append(len(images))
        product = weight @ weight.T  # the same bytes for any number of images
        wide = images.flatten(1) @ product @ weight
        gate = wide.sigmoid()
        wide = wide * gate  # both factors and the result live here: three tensors (n, 1000)
        return wide.mul_(2)[:, :5].clone()

    each, blank = crops * (3 * 4000 + 4 * COPIES * 192), torch.zeros(crops, 3, 8, 8)
    for images in (1, 7, 30):
        monkeypatch.setitem(memory.LIMITS, "cpu", images * each)
        assert images_at_once(encode, blank) == images
        monkeypatch.setitem(memory.LIMITS, "cpu", images * each - 1)
        assert images_at_once(encode, blank) == max(images - 1, 1)
    monkeypatch.setitem(memory.LIMITS, "cpu", 10**9)
    assert images_at_once(encode, blank, 12) == 12
    assert set(seen) == {crops, 2 * crops}


@pytest.mark.parametrize("variant", FAMILIES)
def test_features_do_not_depend_on_the_limit(variant: str, shards, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    encoder, train, seen = encoders.build(variant).eval(), str(shards / "train-0.tar"), list[int]()
    encoder.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])) if given[0].any() else None)
    whole = extract(encoder, train, make_accelerator(), workers=0).features
    images = torch.rand(5, 3, 16, 16)
    expected = patch_tokens(encoder, images, "fp32")
    assert seen == [len(whole), 5]
    seen.clear()
    tokens._at_once.clear()
    blank = torch.zeros(1, 3, 16, 16)
    each = memory.LIMITS["cpu"] // images_at_once(encoder, blank)
    monkeypatch.setitem(memory.LIMITS, "cpu", 2 * each + each // 2)
    torch.testing.assert_close(extract(encoder, train, make_accelerator(), workers=0).features, whole)
    torch.testing.assert_close(patch_tokens(encoder, images, "fp32"), expected)
    assert seen == [2] * (len(whole) // 2) + [1] * (len(whole) % 2) + [2, 2, 1]
