import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from tessera import encoders
from tessera.data.collate import collate
from tessera.evaluation.features import EvaluationError, LabelledFeatures
from tessera.evaluation.linear_probe import EpochCrop, LastBlocks, ProbeSettings, head_inputs, held_out, probe, run
from tessera.runtime.processes import exit_on_user_error, make_accelerator

ROOT = Path(__file__).parents[2]


def settings(**changed):
    return ProbeSettings(**{"checkpoint": "x", "train": "x", "val": "x"} | changed)


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float() / 16
    labels = torch.from_numpy(labels)
    keys = [f"digits.tar/{i}" for i in range(1200)]
    return LabelledFeatures(images[:1200], labels[:1200], keys), LabelledFeatures(images[1200:], labels[1200:])


def test_accuracy_of_digits_is_that_of_logistic_regression(digits):
    train, val = digits
    found = probe(train, val, settings(epochs=40, rates=[0.001, 0.1, 1.0], augment=False), 64, None)
    with threadpool_limits(1):  # its threads wait for each other on busy cores
        oracle = LogisticRegression(max_iter=500).fit(train.features.numpy(), train.labels.numpy())
    expected = oracle.score(val.features.numpy(), val.labels.numpy())
    assert abs(found["top1"] - expected) < 0.02
    assert found["chosen"]["rate"] > 0.001
    assert found["top1"] > found["all"][0]["top1"] + 0.05
    assert (found["train_images"], found["val_images"], found["classes"]) == (1200, 597, 10)
    assert 90 < found["holdout_images"] < 150


def test_the_scored_set_chooses_nothing(digits):
    train, val = digits
    options = settings(epochs=2, rates=[1e-4, 0.05, 0.5], augment=False)
    honest = probe(train, val, options, 64, None)
    wrong = LabelledFeatures(val.features, (val.labels + 1) % 10)
    shuffled = probe(train, wrong, options, 64, None)
    assert shuffled["chosen"]["rate"] == honest["chosen"]["rate"]
    assert [row["holdout_top1"] for row in shuffled["all"]] == [row["holdout_top1"] for row in honest["all"]]
    assert max(row["holdout_top1"] for row in honest["all"]) == honest["chosen"]["holdout_top1"]
    assert shuffled["top1"] < 0.1 < 0.8 < honest["top1"]


def test_a_choice_needs_images_to_choose_by(digits):
    train, val = digits
    with pytest.raises(EvaluationError, match="holds out 0 of 1200"):
        probe(train, val, settings(holdout=0.0), 64, None)
    single = settings(holdout=0.0, rates=[0.1], epochs=1)
    assert probe(train, val, single, 64, None)["holdout_images"] == 0


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


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder") / "vit.safetensors"
    torch.manual_seed(0)
    encoders.save(encoders.build("vit_micro", depth=2), path)
    return path


@pytest.mark.slow
def test_the_command_is_the_same_with_two_processes(shards, encoder, tmp_path):
    options = {"checkpoint": encoder, "train": shards / "train-{0..1}.tar", "val": shards / "val-0.tar"}
    options |= {"blocks": "1,2", "average_pool": "both", "rates": "0.01,1.0", "epochs": 4, "head_batch_size": 8}
    options |= {"holdout": 0.3, "workers": 0, "batch_size": 6}
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, "evaluation/linear_probe.py", "--batch_norm", "--output", str(tmp_path / "two.json")]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    strings = {"checkpoint": str(encoder), "train": str(options["train"]), "val": str(options["val"])}
    lists = {"blocks": [1, 2], "rates": [0.01, 1.0], "batch_norm": True, "output": str(tmp_path / "one.json")}
    run(ProbeSettings(**options | strings | lists))
    two, one = (json.loads((tmp_path / name).read_text()) for name in ("two.json", "one.json"))
    assert two["settings"]["processes"] == 2
    assert one["settings"]["augment"]
    same = ("top1", "top5", "chosen", "all", "train_images", "holdout_images", "val_images")
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
