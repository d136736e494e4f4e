import math

import pytest
import torch
from torch import nn

from tessera.evaluation.features import LabelledFeatures
from tessera.evaluation.heads import Heads, HeadTraining, accuracy, epoch_order, normaliser, train_heads

CPU = torch.device("cpu")


def made_up(images=90, dim=10, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    centres = torch.randn(classes, dim, generator=generator)
    return LabelledFeatures(centres[labels] + torch.randn(images, dim, generator=generator), labels)


def train(heads, part, mask=None, epochs=3, batch_size=32):
    mask = torch.ones(len(part.labels), dtype=torch.bool) if mask is None else mask
    groups = [(heads, mask)]
    train_heads(lambda _: part, [len(mask)], groups, HeadTraining(epochs, batch_size, seed=5))


@pytest.mark.parametrize("masked", [False, True])
def test_each_rate_is_trained_as_alone_by_torch(masked):
    part, rates, columns, epochs = made_up(), [0.01, 1.0, 5.0], slice(2, 9), 3
    mask = torch.arange(90) % 4 > 0 if masked else torch.ones(90, dtype=torch.bool)
    heads = Heads(columns, 4, rates, seed=1, device=CPU)
    start = heads.weight.clone()
    train([heads], part, mask, epochs)
    for number, rate in enumerate(rates):
        layer = nn.Linear(7, 4).double()
        with torch.no_grad():
            layer.weight.copy_(start[number, :-1].T)
            layer.bias.zero_()
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate * 32 / 256, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / 9)))
        for epoch in range(epochs):
            places = epoch_order(90, epoch, 5)
            for batch in (places[:32], places[32:64], places[64:]):
                batch = batch[mask[batch]]
                logits = layer(part.features[batch, columns].double())
                nn.functional.cross_entropy(logits, part.labels[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        expected = torch.cat([layer.weight.T, layer.bias[None]]).detach().float()
        torch.testing.assert_close(heads.weight[number], expected, atol=1e-4, rtol=1e-4)
        assert (heads.weight[number] - start[number]).abs().max() > 1e-3


def test_what_the_mask_leaves_out_is_never_seen():
    part = made_up()
    mask = torch.arange(90) % 3 > 0
    weights = []
    for shift in (0.0, 100.0):
        heads = Heads(slice(0, 10), 4, [0.5], seed=0, device=CPU)
        changed = LabelledFeatures(part.features + shift * ~mask[:, None], (part.labels + int(shift) * ~mask) % 4)
        train([heads], changed, mask)
        weights.append(heads.weight)
    assert torch.equal(*weights)


def test_initial_weights_are_small_equal_and_without_bias():
    heads = Heads(slice(0, 400), 50, [0.1, 0.2], seed=3, device=CPU)
    assert torch.equal(heads.weight[0], heads.weight[1])
    assert heads.weight[0, :-1].std().item() == pytest.approx(0.01, rel=0.02)
    assert not heads.weight[:, -1].any()
    assert not torch.equal(heads.weight, Heads(slice(0, 400), 50, [0.1, 0.2], seed=4, device=CPU).weight)


def test_every_epoch_is_another_permutation():
    epochs = [epoch_order(50, epoch, 0) for epoch in range(3)]
    assert all(torch.equal(e.sort().values, torch.arange(50)) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epoch_order(50, 0, 1))
    assert torch.equal(epochs[2], epoch_order(50, 2, 0))


@pytest.mark.parametrize("chunk", [7, 1000])
def test_accuracy_counts_for_each_rate(chunk):
    part = made_up(classes=8)
    heads = Heads(slice(0, 10), 8, [0.01, 2.0, math.inf], seed=0, device=CPU)
    train([heads], part)
    found = accuracy(heads, part, chunk)
    logits = part.features @ heads.weight[:2, :-1] + heads.weight[:2, -1:]
    for row, expected in zip(found[:2], logits, strict=True):
        ranked = expected.argsort(dim=1, descending=True)
        assert row[0] == (ranked[:, 0] == part.labels).double().mean()
        assert row[1] == (ranked[:, :5] == part.labels[:, None]).any(1).double().mean()
    assert found[1, 0] > found[0, 0]
    assert found[2].tolist() == [0, 0]  # diverged


def test_normaliser_is_batch_norm_over_the_whole_set():
    features = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)) * 7 + torch.arange(6) * 30
    features[:, 2] = 4.0  # constant
    layer = nn.BatchNorm1d(6, affine=False, eps=1e-6)
    expected = layer(features)
    torch.testing.assert_close(normaliser(features)(features.clone()), expected, atol=1e-4, rtol=1e-4)
