"""Photographs that timm, transformers and the description of an export prepare equal those of the evaluations."""

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tessera import encoders
from tessera.encoders.base import Preprocessing
from tessera.encoders.errors import WeightsError
from tessera.evaluation.features import resize_size
from tessera.evaluation.transform import preparation
from tessera.extras.exports import preparation as preprocessing
from tessera.extras.exports.export import METADATA, export
from tessera.extras.exports.photograph import made_photograph, photograph

SIZES = (16, 96, 128, 144, 160, 192, 384, 518)
"""Sides of crops. With 160, 192 and 384 pixels, half the margin ends in .5, which torchvision rounds to the even number
and transformers down."""
PHOTOGRAPHS = [(640, 427), (427, 640), (333, 500), (200, 200), (301, 75), (31, 490)]


def levels(one: Tensor, other: Tensor, encoder: encoders.Encoder) -> float:
    """Return the largest difference between two prepared images in 255ths of white."""
    assert one.shape == other.shape
    return 255 * float(((one - other).abs() * torch.tensor(encoder.preprocessing.std).view(3, 1, 1)).max())


def taken(width: int, height: int) -> Image.Image:
    """Return a photograph of this size."""
    return made_photograph().resize((width, height), Image.Resampling.BILINEAR)


def built(size: int) -> encoders.Encoder:
    patch = 14 if size % 14 == 0 else 16
    encoder = encoders.build("vit_micro", image_size=size, patch_size=patch, depth=1, layer_scale=1.0, dim=12, heads=3)
    encoder.preprocessing = Preprocessing((0.1, 0.2, 0.3), (0.5, 0.4, 0.3))
    return encoder


def test_timm_resizes_to_the_short_side_of_the_evaluations_at_every_size() -> None:
    for size in range(1, 1100):
        assert math.floor(size / preprocessing._crop_pct(size)) == resize_size(size, None), size
    assert preprocessing._crop_pct(224) == 0.875


@pytest.mark.parametrize("size", SIZES)
def test_timm_prepares_as_the_evaluations(size: int) -> None:
    data = pytest.importorskip("timm").data
    encoder = built(size)
    theirs = data.create_transform(**preprocessing.pretrained_cfg(encoder), is_training=False)
    stated = json.loads(json.dumps(preprocessing.description(encoder)))
    for shape in PHOTOGRAPHS:
        image = taken(*shape)
        ours = preparation(encoder)(image)
        assert levels(theirs(image), ours, encoder) < 2.5, shape
        assert levels(preprocessing.prepare(image, stated), ours, encoder) < 2.5, shape
        assert float((theirs(image) - ours).abs().mean()) < 2e-3


def test_a_range_that_clamps_no_byte_is_a_part_of_mean_and_std() -> None:
    data, encoder, image = pytest.importorskip("timm").data, built(96), taken(500, 333)
    moments = encoder.preprocessing.mean, encoder.preprocessing.std
    encoder.preprocessing = Preprocessing(*moments, "uint8", (-10.0, 0.0, -3.0), (255.0, 400.0, 256.0))
    theirs = data.create_transform(**preprocessing.pretrained_cfg(encoder), is_training=False)
    assert levels(theirs(image), preparation(encoder)(image), encoder) < 2.5
    stated = json.loads(json.dumps(preprocessing.description(encoder)))
    assert levels(preprocessing.prepare(image, stated), preparation(encoder)(image), encoder) < 2.5


@pytest.mark.parametrize(
    "ranged",
    [
        {"pixel_type": "uint16", "low": (3.0,) * 3, "high": (9000.0,) * 3},
        {"pixel_type": "float32", "low": (-1.0,) * 3, "high": (1.0,) * 3, "nodata": -9999.0},
        {"low": (3.0,) * 3, "high": (300.0,) * 3},
        {"nodata": 0.0},
    ],
)
def test_images_that_no_other_library_prepares_are_described(ranged: dict[str, Any]) -> None:
    encoder = built(96)
    encoder.preprocessing = replace(encoder.preprocessing, **ranged)
    assert photograph(encoder) is None
    if "pixel_type" in ranged:
        with pytest.raises(ValueError, match=rf"takes {ranged['pixel_type']} images, but `transform` prepares RGB"):
            preparation(encoder)
    stated = json.loads(json.dumps(preprocessing.description(encoder)))
    assert stated["pixels"] == "clamp((value - low) / (high - low), 0, 1)"
    own = {name: tuple(stated[name]) for name in ("mean", "std", "low", "high")}
    low, high = encoder.preprocessing.range
    assert own == {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.4, 0.3), "low": low, "high": high}
    assert (stated["pixel_type"], stated.get("nodata")) == (ranged.get("pixel_type", "uint8"), ranged.get("nodata"))
    (note,) = preprocessing.pretrained_cfg(encoder)["notes"]
    assert f"takes {stated['pixel_type']} images" in note
    assert f"low is {low[0]:g}, " in note
    assert ("Before an image is resized" in note) == (stated["pixel_type"] == "float32" or "nodata" in stated)


@pytest.mark.medium
@pytest.mark.parametrize("size", [96, 160])
def test_a_transformers_folder_has_an_image_processor(size: int, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    encoder = built(size).eval()
    export(encoder, tmp_path / "model.safetensors", "transformers", photograph=photograph(encoder))
    assert (tmp_path / "preprocessor_config.json").is_file()
    for options in ({}, {"backend": "pil"}, {"backend": "torchvision"}):
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, **options)
        for shape in PHOTOGRAPHS:
            image = taken(*shape)
            pixels = processor(images=[image, image], return_tensors="pt")["pixel_values"]
            assert levels(pixels[1], preparation(encoder)(image), encoder) < 2.5
    pipeline = transformers.pipeline("image-feature-extraction", model=str(tmp_path))
    image = taken(500, 333)
    features = encoder(preparation(encoder)(image)[None])
    found = torch.tensor(pipeline(image))
    torch.testing.assert_close(found[0, 1:], features.tokens.detach(), rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_graphs_state_their_preparation(tmp_path) -> None:
    ort = pytest.importorskip("onnxruntime")
    encoder = built(16)
    stated = preprocessing.description(encoder)
    assert stated["resize"] == stated["crop"] == 16
    export(encoder, tmp_path / "a.onnx", "onnx")
    metadata = ort.InferenceSession(tmp_path / "a.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(metadata[METADATA]) == stated
    export(encoder, tmp_path / "a.pt2", "torch")
    read = {"preprocessing.json": ""}
    program = torch.export.load(tmp_path / "a.pt2", extra_files=read)
    assert json.loads(read["preprocessing.json"]) == stated
    assert not program.module()(torch.randn(2, 3, 16, 16))[0].requires_grad
    assert all(parameter.requires_grad for parameter in encoder.parameters())  # the encoder can still be trained


def test_an_export_that_prepares_in_another_way_is_refused(tmp_path, monkeypatch) -> None:
    pytest.importorskip("timm")
    encoder = built(160).eval()
    shot = photograph(encoder)
    assert shot is not None
    found = export(encoder, tmp_path / "a.safetensors", "timm", photograph=shot)["photograph"]
    assert found["levels"] < 2.5
    assert found["image"] == [427, 640]
    assert found["pooled"] < 0.01
    monkeypatch.setattr(preprocessing, "_crop_pct", lambda size: 0.875)
    with pytest.raises(WeightsError, match=r"preparation of images of the export differs by .* of 255 levels"):
        export(encoder, tmp_path / "b.safetensors", "timm", photograph=shot)
    assert not (tmp_path / "b.safetensors").exists()


def test_images_of_every_mode_are_upright_and_rgb() -> None:
    """Pillow and the file's own orientation decide."""
    encoder = built(16)
    image = taken(40, 30)
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 270 degrees counter-clockwise
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    assert torch.equal(preparation(encoder)(Image.open(file)), preparation(encoder)(image))
    for mode in ("L", "RGBA", "P", "CMYK", "1", "LA"):
        other = image.convert(mode)
        expected = preprocessing.prepare(other.convert("RGB"), preprocessing.description(encoder))
        assert levels(preparation(encoder)(other), expected, encoder) < 2.5, mode
