"""The attentive probe: its head against torch's attention, its gradients and its choice against naive formulas."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessera.evaluation.features import EvaluationError, Pixels
from tessera.evaluation.linear_probe import held_out
from tessera.extras.attentive_probe.attentive_probe import AttentiveHead, AttentiveSettings, Probe, run
from tessera.runtime.processes import make_accelerator
from tests.evaluation.conftest import FAMILIES, results_of_one_and_two_processes, save_encoder, write_shard
from tests.pretrain.small import on_processes
from tests.views import batch_of


def settings(**more: Any) -> AttentiveSettings:
    return AttentiveSettings(checkpoint="x", train="x", val="x", image_size=8, **more)


@pytest.mark.parametrize(("dim", "heads"), [(128, 2), (48, 1)])
def test_the_head_is_torchs_attention_with_one_query(dim: int, heads: int) -> None:
    torch.manual_seed(0)
    head, tokens = AttentiveHead(dim, 5, seed=3), torch.randn(3, 7, dim)
    assert len(head.query) == heads
    nn.init.normal_(head.query)
    nn.init.normal_(head.kv.weight)
    attention = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
    attention.in_proj_weight.data = torch.cat([torch.eye(dim), head.kv.weight.data])
    attention.out_proj.load_state_dict({"weight": torch.eye(dim)})
    normed = F.layer_norm(tokens, (dim,))
    query = head.query.flatten().expand(3, 1, -1)
    expected = head.classifier(attention(query, normed, normed)[0][:, 0])
    torch.testing.assert_close(head(tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [40, 7])
def test_gradients_are_those_of_the_mean_loss_over_the_images_of_each_head(at_once: int) -> None:
    torch.manual_seed(0)
    keys, labels, images = [f"a.tar/{i}" for i in range(40)], torch.randint(3, (40,)), torch.randn(40, 3, 8, 8)
    tokens = images.flatten(2).mT  # each pixel is a token
    probe = Probe(Pixels(8), 3, settings(holdout=0.3, rates=[1e-3, 1e-2]), 8, torch.device("cpu"))
    probe.at_once = at_once
    probe._backward(batch_of([images], labels=labels, keys=keys))
    held = held_out(keys, 0.3)
    assert 4 < held.sum() < 20
    for heads, chosen in ((probe.final, torch.ones(40, dtype=torch.bool)), (probe.choosing, ~held)):
        for head in heads:
            twin = AttentiveHead(3, 3, seed=0).double()
            F.cross_entropy(twin(tokens[chosen].double()), labels[chosen]).backward()
            for one, other in zip(head.parameters(), twin.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-7)


def corners(path: Any, images: int, seed: int) -> str:
    """Images whose class is the corner with a bright square: the mean of all pixels says nothing."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, images)
    pixels = rng.integers(0, 60, (images, 16, 16, 3), dtype=np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        top, left = 8 * (label // 2), 8 * (label % 2)
        image[top + 2 : top + 6, left + 2 : left + 6, label % 3] += 150
    return str(write_shard(path, pixels, labels.tolist(), path.stem))


@pytest.mark.slow
@pytest.mark.parametrize("variant", FAMILIES)
def test_it_learns_from_the_tokens_of_every_encoder(variant: str, tmp_path: Any) -> None:
    train, val = corners(tmp_path / "train.tar", 160, 0), corners(tmp_path / "val.tar", 40, 1)
    given = {"checkpoint": save_encoder(tmp_path / "encoder.safetensors", variant), "train": train, "val": val}
    given |= {"batch_size": 32, "epochs": 12, "flip": 0.0, "scale": (0.9, 1.0), "workers": 0, "image_size": 16}
    run(AttentiveSettings(**given, output=str(tmp_path / "result.json")))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["top1"] > 0.6  # chance: 0.25
    assert result["chosen"]["holdout_top1"] == max(row["holdout_top1"] for row in result["all"])
    assert (result["val_images"], result["classes"], result["settings"]["steps"]) == (40, 4, 60)
    assert 0 < result["holdout_images"] < 40


def test_mistakes_end_with_a_message(shards: Any, tmp_path: Any) -> None:
    given = {"checkpoint": "pixels", "image_size": 16, "epochs": 1, "batch_size": 8, "workers": 0}
    given |= {"train": [str(shards / f"train-{i}.tar") for i in (0, 1)], "val": str(shards / "val-0.tar")}
    with pytest.raises(EvaluationError, match=r"holds out 0 of 31 training images\. Some images must"):
        run(AttentiveSettings(**given | {"holdout": 0.0}))
    more = write_shard(tmp_path / "more.tar", np.zeros((5, 16, 16, 3), np.uint8), [0, 1, 2, 3, 4], "more")
    with pytest.raises(EvaluationError, match=r"The largest label is 2 in --train, but 4 in --val"):
        run(AttentiveSettings(**given | {"val": str(more)}))
    fewer = write_shard(tmp_path / "fewer.tar", np.zeros((2, 16, 16, 3), np.uint8), [0, 1], "fewer")
    with pytest.raises(EvaluationError, match=r"The largest label is 2 in --train, but 1 in --val"):
        run(AttentiveSettings(**given | {"val": str(fewer)}))
    train = str(write_shard(tmp_path / "two.tar", np.zeros((8, 16, 16, 3), np.uint8), [0, 1] * 4, "two"))
    with pytest.raises(EvaluationError, match=r"An image has the label 2, but there are 2 classes"):
        run(AttentiveSettings(**given | {"classes": 2, "rates": [1e-3], "train": train}))
    with pytest.raises(EvaluationError, match=r"batch"):
        run(AttentiveSettings(**given | {"batch_size": 64}))


def trained(rank: int, path: str, processes: int) -> None:
    """Train heads on this process's share of the images, and save their weights."""
    assert make_accelerator().num_processes == processes
    probe = Probe(Pixels(8), 3, settings(holdout=0.3, rates=[1e-2, 1e-1]), 8, torch.device("cpu"))
    draws, batches = torch.Generator().manual_seed(0), []
    for head in (*probe.final, *probe.choosing):
        for parameter in head.parameters():  # with the small weights of a new head, some gradients are rounding errors
            nn.init.normal_(parameter, std=0.7, generator=draws)
    for step in range(6):
        images = torch.randint(256, (12, 3, 8, 8), generator=draws, dtype=torch.uint8)
        labels, keys = torch.randint(3, (12,), generator=draws), [f"{step}.tar/{i}" for i in range(12)]
        own = slice(rank, None, processes)
        batches.append(batch_of([images[own]], labels=labels[own], keys=keys[own]))
    probe.train(batches)
    if rank == 0:
        torch.save([head.state_dict() for head in (*probe.final, *probe.choosing)], path)


@pytest.mark.slow
def test_two_processes_train_the_same_weights(tmp_path: Any, free_port: int) -> None:
    trained(0, str(tmp_path / "one.pt"), 1)
    on_processes(trained, free_port, str(tmp_path / "two.pt"), 2)
    for one, two in zip(torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt"), strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_two_processes_give_the_same(shards: Any, tmp_path: Any, free_port: int) -> None:
    options = {"checkpoint": save_encoder(tmp_path / "encoder.safetensors"), "epochs": 4, "batch_size": 8}
    options |= {"train": [str(shards / f"train-{i}.tar") for i in (0, 1)], "val": str(shards / "val-0.tar")}
    options |= {"workers": 0, "holdout": 0.3}
    one, two = results_of_one_and_two_processes(tmp_path, free_port, run, AttentiveSettings, options)
    assert [row["top1"] for row in one["all"]] == pytest.approx([row["top1"] for row in two["all"]], abs=0.08)
    assert (one["holdout_images"], one["val_images"]) == (two["holdout_images"], two["val_images"])
