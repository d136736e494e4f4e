"""Training and validation sets that share items of a data set in Python."""

import numpy as np
import torch
import torchvision

from tests.evaluation.test_splits import opened, refuses


def test_items_of_one_data_set_in_python_are_refused():
    pairs = [(np.full((8, 8, 3), number, np.uint8), number % 2) for number in range(12)]
    objects = [pairs, torchvision.datasets.FakeData(12, (3, 8, 8), 2)]
    for dataset in objects:
        first, second = (torch.utils.data.Subset(dataset, numbers) for numbers in (range(6), range(5, 12)))
        for train, val, count in ((first, second, 1), (dataset, second, 7), (second, first, 1)):
            both = torch.utils.data.ConcatDataset([train, torch.utils.data.Subset(pairs, [])])
            assert f"{count} items of {type(dataset).__name__} are in both --train and --val" in refuses(both, val)
        opened(first, torch.utils.data.Subset(dataset, range(6, 12)))
    assert "3 items of list are in both" in refuses(pairs[:6], pairs[3:])
    opened(pairs[:6], pairs[6:])
