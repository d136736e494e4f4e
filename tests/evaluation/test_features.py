import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import encoders
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.evaluation.features import (
    EvaluationError,
    FeatureSettings,
    Pixels,
    extract,
    input_size,
    load_encoder,
    resize_size,
    resolve_checkpoint,
)
from tessera.runtime.processes import make_accelerator


def read(path):
    """Images and labels of a shard by Pillow."""
    with tarfile.open(path) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}
    images = [np.asarray(Image.open(io.BytesIO(v))) for k, v in members.items() if k.endswith("png")]
    return np.stack(images), [int(v) for k, v in members.items() if k.endswith("cls")]


@pytest.mark.parametrize("preprocessing", [IMAGENET, Preprocessing((0.1, 0.2, 0.3), (0.5, 2.0, 0.1))])
@pytest.mark.parametrize("batch_size", [7, 64])
def test_features_are_those_of_normalised_images_in_order(shards, batch_size, preprocessing):
    train, encoder = str(shards / "train-{0..1}.tar"), Pixels(16, preprocessing)
    features, labels, keys = extract(encoder, train, make_accelerator(), batch_size=batch_size)
    parts = [read(shards / f"train-{i}.tar") for i in range(2)]
    pixels = (np.concatenate([images for images, _ in parts]) / 255 - preprocessing.mean) / preprocessing.std
    expected = pixels.transpose(0, 3, 1, 2).reshape(31, -1)
    np.testing.assert_allclose(features.numpy(), expected, rtol=0 if preprocessing is IMAGENET else 1e-5, atol=2e-6)
    assert labels.tolist() == parts[0][1] + parts[1][1]
    assert [keys[0], keys[-1]] == ["train-0.tar/train-0-0000", "train-1.tar/train-1-0010"]


def test_features_in_any_batch_and_in_bf16(shards):
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", depth=2).eval()
    pixels = extract(Pixels(16), str(shards / "val-0.tar"), make_accelerator()).features
    with torch.no_grad():
        expected = encoder(pixels.view(13, 3, 16, 16)).pooled
    exact = extract(encoder, str(shards / "val-0.tar"), make_accelerator(), batch_size=5).features
    torch.testing.assert_close(exact, expected, atol=1e-5, rtol=1e-5)
    rough = extract(encoder, str(shards / "val-0.tar"), make_accelerator(), precision="bf16").features
    assert rough.dtype == torch.float32
    assert 1e-4 < (rough - expected).abs().max() < 0.2


def test_pixels_have_any_number_of_channels():
    for channels in (1, 3, 5):
        encoder, file = load_encoder(FeatureSettings(checkpoint="pixels", image_size=4, channels=channels))
        assert file is None
        assert encoder(torch.zeros(2, channels, 4, 4)).pooled.shape == (2, encoder.dim) == (2, channels * 16)
        assert encoder.preprocessing.channels == channels


def test_a_folder_without_a_readable_image_is_refused_with_the_first_reason(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(b"text")
    for part in (None, (0, 1)):
        with pytest.raises(EvaluationError, match=r"None of the images can be read. Replace these files.*0.jpg: "):
            extract(Pixels(4), str(tmp_path), make_accelerator(), part=part, labels=False)


def test_labels_are_wanted_only_when_asked_for(shards):
    features, labels, _ = extract(Pixels(16), str(shards / "bare-0.tar"), make_accelerator(), labels=False)
    assert features.shape == (4, 768)
    assert labels.tolist() == [-1] * 4


def test_an_encoder_that_refuses_images_is_named(shards):
    def feature(encoder, images):
        raise ValueError("sides must be multiples of 32")

    with pytest.raises(EvaluationError, match=r"Pixels cannot encode images of 16 x 16 pixels\. sides must"):
        extract(Pixels(16), str(shards / "val-0.tar"), make_accelerator(), feature=feature)


def test_checkpoints_are_found_in_every_place(tmp_path):
    encoder = encoders.build("vit_micro", depth=1)
    step = tmp_path / "run" / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    with pytest.raises(EvaluationError, match=r"run/encoder\.safetensors.*latest/encoder\.safetensors"):
        resolve_checkpoint(tmp_path / "run")
    encoders.save(encoder, step / "encoder.safetensors")
    (step.parent / "latest").symlink_to(step.name)
    assert resolve_checkpoint(step) == step / "encoder.safetensors"
    assert resolve_checkpoint(tmp_path / "run").resolve() == step / "encoder.safetensors"
    encoders.save(encoder, tmp_path / "run" / "encoder.safetensors")
    for path in (tmp_path / "run", tmp_path / "run" / "encoder.safetensors"):
        assert resolve_checkpoint(path) == tmp_path / "run" / "encoder.safetensors"
    (tmp_path / "model.pth").write_bytes(b"")
    with pytest.raises(EvaluationError, match=r"encoders\.load_weights"):
        resolve_checkpoint(tmp_path / "model.pth")


def test_a_broken_encoder_is_a_message(tmp_path):
    (tmp_path / "vit.safetensors").write_bytes(b"not weights")
    with pytest.raises(EvaluationError, match=r"vit\.json is missing"):
        load_encoder(FeatureSettings(checkpoint=str(tmp_path / "vit.safetensors")))
    encoders.save(encoders.build("vit_micro", depth=1), tmp_path / "vit.safetensors")
    (tmp_path / "vit.safetensors").write_bytes(b"not weights")
    with pytest.raises(EvaluationError, match="Cannot load"):
        load_encoder(FeatureSettings(checkpoint=str(tmp_path / "vit.safetensors")))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_emulated_bf16_is_told_to_be_slow(
    precision: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    load_encoder(FeatureSettings.model_validate({"checkpoint": "pixels", "image_size": 4, "precision": precision}))
    assert ("emulates bf16, which is much slower than fp32. Use --precision fp32" in caplog.text) == (
        precision == "bf16"
    )


def test_sizes_follow_the_encoder_and_dinos_ratio():
    encoder = Pixels(16)
    assert (input_size(encoder, None), input_size(encoder, 32)) == (16, 32)
    encoder.settings["image_size"] = [24, 24]
    assert input_size(encoder, None) == 24
    encoder.settings["image_size"] = [24, 32]
    with pytest.raises(EvaluationError, match="--image_size"):
        input_size(encoder, None)
    assert [resize_size(s, None) for s in (32, 224, 384)] == [32, 256, 439]
    assert resize_size(32, 40) == 40
    with pytest.raises(EvaluationError, match="--resize"):
        resize_size(224, 200)


def test_a_newer_checkpoint_than_the_exported_encoder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoders.save(encoders.build("vit_micro", image_size=32), tmp_path / "encoder.safetensors", step=20)
    (tmp_path / "checkpoints" / "step-00000030-old2").mkdir(parents=True)  # a copy that the user made
    for step, warned in ((20, False), (22, True)):
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
        load_encoder(FeatureSettings(checkpoint=str(tmp_path)))
        assert ("is of step 20. Newer: --checkpoint" in caplog.text) is warned
