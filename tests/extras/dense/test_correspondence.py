import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tessera import encoders
from tessera.data.batch import ViewParameters
from tessera.data.crops import RandomCropConfig, random_boxes
from tessera.data.shards import open_shards
from tessera.evaluation.command import Subject
from tessera.extras.dense.correspondence import (
    CorrespondenceSettings,
    cut,
    found_tokens,
    places,
    score,
)

ROWS, COLUMNS = 6, 8


def drawn(seed: int, size: int = 96) -> ViewParameters:
    """Two boxes of an image of 200 x 200 pixels."""
    return random_boxes((200, 200), np.random.default_rng(seed), 2, RandomCropConfig(size=size, scale=(0.4, 1.0)))


def coordinates(view: ViewParameters) -> torch.Tensor:
    """Row and column in the image of the centre of each token of both crops, as an image of its coordinates shows."""
    ramp = torch.arange(200.0) + 0.5
    image = torch.stack([ramp[:, None].expand(200, 200), ramp.expand(200, 200)])
    crops = cut(torch.stack([image, image]), view)
    return torch.nn.functional.adaptive_avg_pool2d(crops, (ROWS, COLUMNS))  # (2, 2, ROWS, COLUMNS)


@pytest.mark.parametrize("seed", range(8))
def test_places_show_the_same_coordinates(seed):
    view = drawn(seed)
    first, second = coordinates(view)
    rows, columns = places(view, ROWS, COLUMNS)
    compared = 0
    for i, row in enumerate(rows.tolist()):
        for j, column in enumerate(columns.tolist()):
            if 0 <= row <= ROWS - 1 and 0 <= column <= COLUMNS - 1:
                y, x = 2 * row / (ROWS - 1) - 1, 2 * column / (COLUMNS - 1) - 1
                grid = torch.tensor([[[[x, y]]]])
                there = torch.nn.functional.grid_sample(second[None], grid, align_corners=True)[0, :, 0, 0]
                assert (there - first[:, i, j]).abs().max() < 0.6  # pixels of the image; a token has at least 15
                compared += 1
    assert compared > 5


def test_mirrored_crops_are_drawn():
    assert {tuple(drawn(seed).flips.tolist()) for seed in range(8)} == {(a, b) for a in (0, 1) for b in (0, 1)}


@pytest.mark.parametrize("seed", range(8))
def test_tokens_that_tell_their_place_find_it(seed):
    view = drawn(seed)
    angles = coordinates(view) / 200
    tokens = torch.cat([angles.cos(), angles.sin()], 1)  # similarity falls with the distance
    found, chance = found_tokens(tokens, places(view, ROWS, COLUMNS))
    assert len(found) > 5
    assert found.all()
    assert ((chance >= 1 / 48) & (chance <= 9 / 48)).all()
    tokens[1] = torch.nan
    assert not found_tokens(tokens, places(view, ROWS, COLUMNS))[0].any()


def test_random_tokens_find_as_many_as_by_chance():
    torch.manual_seed(0)
    found, chance = zip(*(
        (one.double().mean(), other.mean())
        for seed in range(400)
        for one, other in [found_tokens(torch.randn(2, 16, ROWS, COLUMNS), places(drawn(seed), ROWS, COLUMNS))]
    ), strict=True)  # fmt: skip
    share, expected = torch.stack(found).mean(), torch.stack(chance).mean()
    assert abs(share - expected) < 0.01  # 400 crops of about 25 tokens: the standard error is 0.003
    assert 0.06 < expected < 0.1


def test_the_crops_do_not_depend_on_batches(shards):
    torch.manual_seed(0)
    encoder, data = encoders.build("vit_micro").eval(), str(shards / "train-{0..1}.tar")
    source, given = open_shards(data), {"checkpoint": "", "data": data, "workers": 0}
    found = [
        score(
            CorrespondenceSettings(**given, images=images, batch_size=size),
            Subject(source, source, encoder, None),
            Accelerator(),
        )
        for images, size in ((12, 12), (12, 5), (8, 8))
    ]
    assert found[0] == found[1] != found[2]
    assert found[0].entries["val_images"] == 12
