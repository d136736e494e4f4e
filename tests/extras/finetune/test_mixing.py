"""Mixup, CutMix and random erasing against loops in float64, and their statistics against timm."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from timm.data.random_erasing import RandomErasing

from tessera.extras.finetune.mixing import (
    MixParameters,
    draw_erased,
    draw_mix,
    erase,
    generators,
    mix_images,
    normal_noise,
    partners,
)

SIZE = (24, 32)
MANY = 3000
SAME = 1e-3
"""Smallest p-value of two samples that count as drawn from one distribution."""


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2**32, (count,), generator=torch.Generator().manual_seed(seed))


def pictures(count: int) -> torch.Tensor:
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 1.0), (0.8, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_images_are_mixed_as_by_a_loop(mixup: float, cutmix: float) -> None:
    images, parameters = pictures(10), draw_mix(generators(keys(10)), SIZE, mixup, cutmix)
    mixed = mix_images(images, parameters)
    x = images.double()
    for i in range(10):
        j = i + 1 if i % 2 == 0 else i - 1
        top, bottom, left, right = parameters.boxes[i].tolist()
        share, inside = float(parameters.share[i]), 0
        if top == bottom or left == right:  # mixup, or a box without area
            share = float(parameters.weight[i])
        expected = share * x[i] + (1 - share) * x[j]
        if bottom > top and right > left:
            expected = x[i].clone()
            for row in range(top, bottom):
                for column in range(left, right):
                    expected[:, row, column] = x[j, :, row, column]
                    inside += 1
            assert float(parameters.share[i]) == pytest.approx(1 - inside / (SIZE[0] * SIZE[1]))
        torch.testing.assert_close(mixed[i].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(parameters.boxes[::2], parameters.boxes[1::2])
    assert torch.equal(parameters.share[::2], parameters.share[1::2])
    if not mixup and not cutmix:
        assert torch.equal(mixed, images)


def test_shares_are_distributed_as_in_timm() -> None:
    ours = draw_mix(generators(keys(2 * MANY)), SIZE, 0.8, 1.0)
    np.random.seed(0)
    timm = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="pair")
    shares, cut = timm._params_per_elem(MANY)
    areas = [cutmix_bbox_and_lam((1, 3, *SIZE), share)[1] for share in shares[cut]]
    is_cut = ours.weight[::2] == 1
    assert float(is_cut.double().mean()) == pytest.approx(0.5, abs=0.04)
    found = ours.share[::2].double()
    assert ks_2samp(found[~is_cut], shares[~cut]).pvalue > SAME  # pyright: ignore
    whole = SIZE[0] * SIZE[1]  # areas are whole numbers of pixels
    assert ks_2samp((found[is_cut] * whole).round(), np.round(np.array(areas) * whole)).pvalue > SAME  # pyright: ignore


def test_erased_areas_are_distributed_as_in_timm() -> None:
    boxes = draw_erased(generators(keys(MANY)), SIZE, 0.25)
    ours = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
    eraser = RandomErasing(probability=0.25, mode="pixel", max_count=1, device="cpu")
    theirs = []
    for _ in range(MANY):
        image = torch.zeros(1, *SIZE)
        theirs.append(int((eraser(image) != 0).sum()))
    assert float((ours > 0).double().mean()) == pytest.approx(0.25, abs=0.02)
    assert ks_2samp(ours[ours > 0], [area for area in theirs if area]).pvalue > SAME  # pyright: ignore
    edges = boxes[ours > 0]
    assert int(edges.min()) == 0
    assert (int(edges[:, 1].max()), int(edges[:, 3].max())) == SIZE


def test_erased_boxes_hold_the_noise_of_their_image() -> None:
    images, own = pictures(6), keys(6)
    boxes = torch.tensor([[0, 0, 0, 0], [2, 5, 3, 9], [0, 24, 0, 32], [0, 0, 0, 0], [23, 24, 31, 32], [1, 4, 0, 6]])
    erased = erase(images.clone(), boxes, own)
    for i, (top, bottom, left, right) in enumerate(boxes.tolist()):
        noise = normal_noise(own[i : i + 1], 3 * SIZE[0] * SIZE[1]).view(3, *SIZE).float()
        expected = images[i].clone()
        expected[:, top:bottom, left:right] = noise[:, top:bottom, left:right]
        assert torch.equal(erased[i], expected)
    assert erase(images, torch.zeros(6, 4, dtype=torch.int64), own) is images


def test_noise_is_normal_and_differs_between_images() -> None:
    noise = normal_noise(keys(4), 20_000)
    for row in noise:
        assert kstest(row, "norm").pvalue > SAME  # pyright: ignore
    correlations = torch.corrcoef(noise) - torch.eye(4)
    assert float(correlations.abs().max()) < 0.03
    assert torch.isfinite(noise).all()


def test_parameters_do_not_depend_on_the_split() -> None:
    own = keys(12)
    whole = draw_mix(generators(own), SIZE, 0.8, 1.0)
    boxes = draw_erased(generators(own), SIZE, 0.5)
    for parts in (2, 3, 6):
        split = [draw_mix(generators(part), SIZE, 0.8, 1.0) for part in own.chunk(parts)]
        for name in MixParameters.__dataclass_fields__:
            assert torch.equal(torch.cat([getattr(part, name) for part in split]), getattr(whole, name))
        assert torch.equal(torch.cat([draw_erased(generators(part), SIZE, 0.5) for part in own.chunk(parts)]), boxes)


def test_an_image_without_partner_stays_whole() -> None:
    assert partners(5, torch.device("cpu")).tolist() == [1, 0, 3, 2, 4]
    images = pictures(5)
    mixed = mix_images(images, draw_mix(generators(keys(5)), SIZE, 0.8, 0.0))
    torch.testing.assert_close(mixed[4], images[4])
