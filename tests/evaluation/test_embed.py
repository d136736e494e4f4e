import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors import safe_open

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.crops import CenterCrop
from tessera.data.loader import evaluation_batches
from tessera.evaluation.embed import EmbedSettings, run
from tessera.evaluation.features import EvaluationError, extract
from tessera.interface import embed
from tessera.runtime.processes import make_accelerator
from tests.launched import ROOT


@pytest.mark.medium
def test_the_command_writes_features_keys_and_labels(shards, tmp_path):
    encoder = encoders.build("vit_micro", depth=1).eval()
    encoders.save(encoder, tmp_path / "vit.safetensors")
    command = [sys.executable, "evaluation/embed.py", "--checkpoint", tmp_path / "vit.safetensors", "--workers", "1"]
    command += ["--data", shards / "val-0.tar", "--output", tmp_path / "new" / "val.npz", "--batch_size", "4"]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["val.npz"]
    found = np.load(tmp_path / "new" / "val.npz")
    features, labels, _ = extract(encoder, str(shards / "val-0.tar"), make_accelerator())
    np.testing.assert_allclose(found["features"], features.numpy(), atol=1e-5)
    np.testing.assert_array_equal(found["labels"], labels.numpy())
    assert found["keys"].tolist() == [f"val-0.tar/val-0-{i:04d}" for i in range(13)]


def test_images_without_labels_are_embedded(shards, tmp_path):
    settings = {"checkpoint": "pixels", "image_size": 16, "data": str(shards / "bare-0.tar"), "workers": 0}
    run(EmbedSettings(output=str(tmp_path / "bare.npz"), **settings))
    found = np.load(tmp_path / "bare.npz")
    assert set(found) == {"features", "keys"}
    with pytest.raises(EvaluationError, match=r"does not end in \.npz, \.safetensors, \.parquet"):
        run(EmbedSettings(output=str(tmp_path / "bare.csv"), **settings))
    with pytest.raises(EvaluationError, match=r"bare\.npz exists\. Choose another file"):
        run(EmbedSettings(output=str(tmp_path / "bare.npz"), **settings))
    with pytest.raises(EvaluationError, match="Cannot write --output"):
        run(EmbedSettings(output=str(tmp_path / "bare.npz" / "in a file.npz"), **settings))
    with pytest.raises(EvaluationError, match=r"no register tokens\. Leave out --registers"):
        run(EmbedSettings(output=str(tmp_path / "more.npz"), registers=True, **settings))


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, read by the library of its format."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            texts = {name: np.array(json.loads(text)) for name, text in file.metadata().items()}
            return {name: file.get_tensor(name) for name in file.keys()} | texts  # noqa: SIM118
    table = parquet.read_table(path)
    found = {name.decode(): np.array(json.loads(text)) for name, text in (table.schema.metadata or {}).items()}
    for field in table.schema:
        shape = json.loads(field.metadata[b"shape"])
        found[field.name] = np.array(table[field.name].to_pylist()).reshape(-1, *shape)
    return found


@pytest.fixture
def settings(shards, tmp_path):
    """Settings of a command, and the encoder and the images that it reads."""
    encoder = encoders.build("vit_micro", depth=3, registers=2).eval()
    encoders.save(encoder, tmp_path / "vit.safetensors")
    given = {"checkpoint": str(tmp_path / "vit.safetensors"), "data": str(shards / "val-0.tar"), "workers": 0}
    batches = evaluation_batches(str(shards / "val-0.tar"), CenterCrop(16, resize=16), 13)
    return given, encoder, to_model_input(next(iter(batches))).views[0].images


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".parquet"])
def test_tokens_and_blocks_are_those_of_the_encoder(ending, settings, tmp_path):
    given, encoder, images = settings
    with torch.inference_mode():
        last, outputs, registers = encoder(images), encoder.intermediate(images, 2), encoder.register_tokens(images, 2)
    run(EmbedSettings(output=str(tmp_path / f"one{ending}"), tokens=True, registers=True, **given))
    found = read(tmp_path / f"one{ending}")
    np.testing.assert_allclose(found["features"], last.pooled.numpy(), atol=1e-5)
    np.testing.assert_allclose(found["tokens"], last.tokens.view(13, 4, 4, -1).numpy(), atol=1e-5)
    np.testing.assert_allclose(found["registers"], registers[-1].numpy(), atol=1e-5)
    assert found["registers"].shape == (13, 2, encoder.dim)
    assert found["keys"].tolist() == [f"val-0.tar/val-0-{i:04d}" for i in range(13)]
    assert len(found["labels"]) == 13
    run(
        EmbedSettings(
            output=str(tmp_path / f"two{ending}"), blocks=2, tokens=True, registers=True, dtype="float16", **given
        )
    )
    found = read(tmp_path / f"two{ending}")
    for n, output in enumerate(outputs):
        np.testing.assert_allclose(found["features"][:, n], output.pooled.numpy(), atol=4e-3)
        np.testing.assert_allclose(found["tokens"][:, n], output.tokens.view(13, 4, 4, -1).numpy(), atol=4e-3)
        np.testing.assert_allclose(found["registers"][:, n], registers[n].numpy(), atol=4e-3)


def test_files_of_other_labels_are_not_kept(settings, tmp_path):
    given, folder = settings[0], tmp_path / "images"
    for number in range(6):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), number, np.uint8)).save(path)
    given = given | {"data": str(folder), "images_per_file": 5, "output": str(tmp_path / "part.npz")}
    run(EmbedSettings(**given))
    (folder / "a" / "0.png").rename(folder / "b" / "0.png")  # as many images of the same sizes
    with pytest.raises(EvaluationError, match=r"does not belong to these"):
        run(EmbedSettings(**given))


def test_several_files_hold_the_same_and_a_stopped_command_goes_on(settings, tmp_path):
    given, encoder, _ = settings
    run(EmbedSettings(output=str(tmp_path / "one.npz"), **given))
    whole, output = read(tmp_path / "one.npz"), tmp_path / "many" / "part.npz"
    run(EmbedSettings(output=str(output), images_per_file=5, **given))
    files = sorted(output.parent.glob("part-*.npz"))
    assert [path.name for path in files] == ["part-00000.npz", "part-00001.npz", "part-00002.npz"]
    assert max(len(read(path)["keys"]) for path in files) <= 5
    for name, array in whole.items():
        parts = np.concatenate([read(path)[name] for path in files])
        np.testing.assert_array_equal(parts, array) if array.dtype.kind != "f" else np.testing.assert_allclose(
            parts, array, atol=1e-5
        )
    files[1].unlink()
    kept = files[0].stat().st_mtime_ns
    run(EmbedSettings(output=str(output), images_per_file=5, **given))
    assert files[1].exists()
    assert files[0].stat().st_mtime_ns == kept
    with pytest.raises(EvaluationError, match=r"does not belong to these settings and images\. Choose another"):
        run(EmbedSettings(output=str(output), images_per_file=5, tokens=True, **given))
    others = [given["data"].replace("val-0", name) for name in ("train-1", "train-0")]
    for data in (others[:1], [given["data"], others[1]]):
        with pytest.raises(EvaluationError, match=r"does not belong to these"):
            run(EmbedSettings(output=str(output), images_per_file=5, **given | {"data": data}))
    preprocessing = encoder.preprocessing
    encoder.preprocessing = replace(preprocessing, mean=(0.1,) * 3)
    encoders.save(encoder, given["checkpoint"])
    with pytest.raises(EvaluationError, match=r"does not belong to these"):
        run(EmbedSettings(output=str(output), images_per_file=5, **given))
    encoder.preprocessing = preprocessing
    output.with_suffix(".json").rename(tmp_path / "kept.json")
    shutil.copy(files[0], tmp_path / "new-val.npz")  # no file of the command
    run(EmbedSettings(output=str(tmp_path / "new.npz"), images_per_file=5, **given))
    with pytest.raises(EvaluationError, match=r"part-00000.npz exists, but part.json, which says"):
        run(EmbedSettings(output=str(output), images_per_file=5, **given))
    (tmp_path / "kept.json").rename(output.with_suffix(".json"))
    (tmp_path / "foreign.json").write_text("not JSON")
    with pytest.raises(EvaluationError, match=r"foreign\.json does not belong to these"):
        run(EmbedSettings(output=str(tmp_path / "foreign.npz"), images_per_file=5, **given))
    with torch.no_grad():
        encoder.cls_token += 1
    encoders.save(encoder, given["checkpoint"])
    with pytest.raises(EvaluationError, match=r"does not belong to these"):
        run(EmbedSettings(output=str(output), images_per_file=5, **given))


@pytest.mark.slow
def test_two_processes_share_the_files(settings, tmp_path):
    given, _, _ = settings
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--main_process_port", "0", "evaluation/embed.py", "--images_per_file", "4"]
    command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([*command, "--output", tmp_path / "two.npz"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run(EmbedSettings(output=str(tmp_path / "one.npz"), images_per_file=4, **given))
    for number in range(4):
        ours, one = (read(tmp_path / f"{name}-{number:05d}.npz") for name in ("two", "one"))
        assert ours["keys"].tolist() == one["keys"].tolist()
        np.testing.assert_allclose(ours["features"], one["features"], atol=1e-5)


def test_labels_of_a_csv_are_written_if_an_image_has_none(tmp_path):
    for number, name in enumerate("abcd"):
        (tmp_path / "scans").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (60 * number, 0, 0)).save(tmp_path / "scans" / f"{name}.png")
    (tmp_path / "all.csv").write_text("path,label\nscans/a.png,oak\nscans/b.png,ash\nscans/d.png,\n")
    given: dict[str, Any] = {"checkpoint": "pixels", "image_size": 16, "workers": 0}
    data = {"data": str(tmp_path / "scans"), "labels": str(tmp_path / "all.csv")}
    for ending in (".npz", ".safetensors", ".parquet"):
        run(EmbedSettings(output=str(tmp_path / f"f{ending}"), **data, **given))
        found = read(tmp_path / f"f{ending}")
        assert found["labels"].tolist() == [1, 0, -1, -1]
        assert found["classes"].tolist() == ["ash", "oak"]
    run(EmbedSettings(output=str(tmp_path / "csv.npz"), data=str(tmp_path / "all.csv"), **given))
    assert read(tmp_path / "csv.npz")["labels"].tolist() == [1, 0, -1]
    encoder = encoders.build("vit_micro", depth=1)
    found = embed(encoder, data["data"], labels=Path(data["labels"]), workers=0)
    assert found.labels.tolist() == [1, 0, -1, -1]
    assert list(found.keys) == [f"scans/{name}.png" for name in "abcd"]
    assert embed(encoder, str(tmp_path / "all.csv"), labels=False, workers=0).labels.tolist() == [-1, -1, -1]


def test_results_of_two_csvs_are_joined_by_name(tmp_path, caplog, capsys):
    for number, name in enumerate("abcd"):
        (tmp_path / "scans").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (60 * number, 0, 0)).save(tmp_path / "scans" / f"{name}.png")
    (tmp_path / "scans" / "e.png").write_text("no image")
    (tmp_path / "train.csv").write_text("path,label\nscans/a.png,ash\nscans/b.png,elm\nscans/c.png,oak\n")
    (tmp_path / "val.csv").write_text("path,label,height\nscans/e.png,oak,2\nscans/d.png,oak,7\nscans/c.png,elm,3\n")
    encoder = encoders.build("vit_micro", depth=1)
    train, alone = (embed(encoder, tmp_path / f"{name}.csv", workers=0) for name in ("train", "val"))
    assert (train.classes, alone.classes) == (("ash", "elm", "oak"), ("elm", "oak"))
    caplog.clear()
    val = embed(encoder, tmp_path / "val.csv", classes=train.classes, workers=0)
    found = {key: val.classes[label] for key, label in zip(val.keys, val.labels, strict=True)}
    assert found == {"val.csv/scans/d.png": "oak", "val.csv/scans/c.png": "elm"}
    assert (val.classes, sorted(val.labels.tolist())) == (train.classes, [1, 2])
    assert "2 of 3 images; 1 skipped" in caplog.text
    frame = pandas.read_csv(tmp_path / "val.csv").set_index("path").loc[[key.split("/", 1)[1] for key in val.keys]]
    assert frame["label"].tolist() == [val.classes[label] for label in val.labels]
    features, labels, _ = pickle.loads(pickle.dumps(val))
    assert torch.equal(features, val.features)
    assert torch.equal(labels, val.labels)
    with pytest.raises(EvaluationError, match=r"The class 'ash' is not in classes \(1 of 3"):
        embed(encoder, tmp_path / "train.csv", classes=alone.classes, workers=0)
    (tmp_path / "numbers.csv").write_text("path,label\nscans/a.png,0\nscans/b.png,1\n")
    assert embed(encoder, tmp_path / "numbers.csv", workers=0).classes is None
    with pytest.raises(EvaluationError, match="numbers without names"):
        embed(encoder, tmp_path / "numbers.csv", classes=train.classes, workers=0)
    data = {"data": str(tmp_path / "val.csv"), "output": str(tmp_path / "val.npz")}
    run(EmbedSettings(checkpoint="pixels", image_size=16, workers=0, **data))
    assert capsys.readouterr().out.endswith("images that cannot be decoded, and are left out: 1\n")
