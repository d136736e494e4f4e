import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import nn

from tessera import encoders
from tessera.data.collate import collate
from tessera.evaluation.features import EvaluationError, LabelledFeatures, normaliser
from tessera.evaluation.linear_probe import (
    EpochCrop,
    Heads,
    LastBlocks,
    ProbeSettings,
    epoch_order,
    evaluate,
    head_inputs,
    held_out,
    probe,
    run,
    train_heads,
)
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.settings import validate
from tests.evaluation.conftest import made_up, results_of_one_and_two_processes, save_encoder

CPU = torch.device("cpu")


def settings(**changed: Any) -> ProbeSettings:
    return validate(ProbeSettings, {"checkpoint": "x", "train": "x", "val": "x"} | changed)


def test_accuracy_of_digits_is_that_of_logistic_regression(digits):
    train, val = digits
    found = probe(train, val, settings(epochs=40, rates=[0.001, 0.1, 1.0], augment=False), 64)
    with threadpool_limits(1):  # its threads wait for each other on busy cores
        oracle = LogisticRegression(max_iter=500).fit(train.features.numpy(), train.labels.numpy())
    expected = oracle.score(val.features.numpy(), val.labels.numpy())
    assert abs(found["top1"] - expected) < 0.02
    assert found["chosen"]["rate"] > 0.001
    assert found["top1"] > found["all"][0]["top1"] + 0.05
    assert 90 < found["holdout_images"] < 150


def test_the_scored_set_chooses_nothing(digits):
    train, val = digits
    options = settings(epochs=2, rates=[1e-4, 0.05, 0.5], augment=False)
    honest = probe(train, val, options, 64)
    wrong = LabelledFeatures(val.features, (val.labels + 1) % 10)
    shuffled = probe(train, wrong, options, 64)
    assert shuffled["chosen"]["rate"] == honest["chosen"]["rate"]
    assert [row["holdout_top1"] for row in shuffled["all"]] == [row["holdout_top1"] for row in honest["all"]]
    assert max(row["holdout_top1"] for row in honest["all"]) == honest["chosen"]["holdout_top1"]
    assert shuffled["top1"] < 0.1 < 0.8 < honest["top1"]


def test_a_choice_needs_images_to_choose_by(digits):
    train, val = digits
    with pytest.raises(EvaluationError, match="holds out 0 of 1200"):
        probe(train, val, settings(holdout=0.0), 64)
    single = settings(holdout=0.0, rates=[0.1], epochs=1)
    assert probe(train, val, single, 64)["holdout_images"] == 0


def test_held_out_samples_depend_on_their_names_alone():
    keys = [f"train-{i // 100}.tar/{i}" for i in range(5000)]
    held = held_out(keys, 0.1)
    assert held.float().mean().item() == pytest.approx(0.1, abs=0.015)
    assert torch.equal(held_out(keys[::-1], 0.1), held.flip(0))
    assert held_out(keys, 0.3)[held].all()
    assert not held_out(keys, 0.0).any()


def test_inputs_are_columns_of_what_is_kept():
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", depth=4).eval()
    images = torch.randn(5, 3, 16, 16)
    tried = head_inputs([1, 3], "both", encoder.dim)
    with torch.no_grad():
        kept = LastBlocks(3, average=True)(encoder, images)
        layers = encoder.intermediate(images, 3)
        last = encoder(images)
    mean = torch.stack([tokens.mean(0) for tokens in last.tokens.split(16)])
    expected = {
        (1, False): [last.pooled],
        (1, True): [last.pooled, mean],
        (3, False): [f.pooled for f in layers],
        (3, True): [f.pooled for f in layers] + [mean],
    }
    assert [(one.blocks, one.average_pool) for one in tried] == list(expected)
    for one in tried:
        wanted = torch.cat(expected[one.blocks, one.average_pool], 1)
        torch.testing.assert_close(kept[:, one.columns], wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(EvaluationError, match="at least 1"):
        head_inputs([0], "no", 8)


def test_crops_change_with_the_epoch_and_nothing_else():
    image = torch.randint(256, (3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def crop(seed, epoch, place):
        return collate(EpochCrop(16, seed, epoch), [image], [np.random.default_rng(place)]).views[0].images

    assert crop(0, 0, 0).shape == (1, 3, 16, 16)
    assert torch.equal(crop(0, 3, 8), crop(0, 3, 8))
    for other in ((1, 3, 8), (0, 4, 8), (0, 3, 9)):
        assert not torch.equal(crop(0, 3, 8), crop(*other))


def train(heads, part, mask=None, epochs=3, batch_size=32):
    mask = torch.ones(len(part.labels), dtype=torch.bool) if mask is None else mask
    groups = [(heads, mask)]
    train_heads(lambda _: part, [len(mask)], groups, settings(epochs=epochs, head_batch_size=batch_size, seed=5))


@pytest.mark.parametrize("masked", [False, True])
def test_each_rate_is_trained_as_alone_by_torch(masked):
    part, rates, columns, epochs = made_up(90, classes=4), [0.01, 1.0, 5.0], slice(2, 9), 3
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
def test_scores_count_for_each_rate(chunk):
    part = made_up(90, classes=8)
    heads = Heads(slice(0, 10), 8, [0.01, 2.0, math.inf], seed=0, device=CPU)
    train([heads], part)
    found = evaluate(heads, part, chunk)
    logits = part.features @ heads.weight[:2, :-1] + heads.weight[:2, -1:]
    for row, expected in zip(found[:2], logits, strict=True):
        ranked = expected.argsort(dim=1, descending=True)
        assert row[0] == (ranked[:, 0] == part.labels).double().mean()
        assert row[1] == (ranked[:, :5] == part.labels[:, None]).any(1).double().mean()
        assert row[2].item() == pytest.approx(nn.functional.cross_entropy(expected, part.labels).item(), rel=1e-5)
    assert found[1, 0] > found[0, 0]
    assert found[2].tolist() == [0, 0, math.inf]  # diverged


def test_of_equal_accuracies_the_lowest_loss_wins():
    """On few images, all rates but the smallest classify all held-out images; the first of these is hardly trained."""
    part = made_up(60, classes=2)._replace(keys=[str(number) for number in range(60)])
    found = probe(part, made_up(400, classes=2), settings(rates=[1e-5, 1e-3, 1e-2, 0.1], epochs=20, augment=False), 10)
    best = max(row["holdout_top1"] for row in found["all"])
    equal = [row["rate"] for row in found["all"] if row["holdout_top1"] == best]
    assert len(equal) > 1
    assert found["chosen"]["rate"] > min(equal)


def test_normaliser_is_batch_norm_over_the_whole_set():
    features = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)) * 7 + torch.arange(6) * 30
    features[:, 2] = 4.0  # constant
    layer = nn.BatchNorm1d(6, affine=False, eps=1e-6)
    expected = layer(features)
    torch.testing.assert_close(normaliser(features)(features.clone()), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder") / "vit.safetensors", depth=2)


@pytest.mark.slow
def test_two_processes_give_the_same(shards, encoder, tmp_path, free_port):
    options = {"checkpoint": encoder, "train": str(shards / "train-{0..1}.tar"), "val": str(shards / "val-0.tar")}
    options |= {"average_pool": "both", "epochs": 4, "head_batch_size": 8, "holdout": 0.3, "workers": 0}
    options |= {"blocks": [1, 2], "rates": [0.01, 1.0], "batch_norm": True}
    one, two = results_of_one_and_two_processes(tmp_path, free_port, run, ProbeSettings, options)
    assert one["settings"]["augment"]
    assert (one["train_images"], one["val_images"], one["classes"]) == (31, 13, 3)
    same = ("top1", "top5", "chosen", "all", "train_images", "holdout_images", "val_images", "classes")
    assert {key: two[key] for key in same} == {key: one[key] for key in same}
    assert len(one["all"]) == 8
    assert len({row["top1"] for row in one["all"]}) > 1


def test_mistakes_end_with_a_message(shards, encoder, capsys):
    given = {"checkpoint": str(encoder), "train": str(shards / "train-0.tar"), "val": str(shards / "val-0.tar")}
    given |= {"workers": 0, "epochs": 1}
    cases = [({"blocks": [5]}, "ViT cannot encode images of 16 x 16"), ({"train": str(shards / "bare-0.tar")}, "label")]
    cases += [({"checkpoint": "pixels", "image_size": 16, "average_pool": "yes"}, "--average_pool no")]
    for changed, message in cases:
        with pytest.raises(SystemExit) as stopped, exit_on_user_error():
            run(ProbeSettings(**given | changed))
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert make_accelerator().num_processes == 1
