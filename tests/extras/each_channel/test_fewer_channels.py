"""Images with one, two and three channels in one data set: decoding, statistics, and a run that continues."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tessera
from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.collate import Collator, Sample
from tessera.data.colors import BandDrop, of_bands
from tessera.data.crops import CenterCrop
from tessera.data.decode import Picture
from tessera.data.shards import ShardError, open_sources
from tessera.data.statistics import PixelSettings, measure_pixels, pixel_statistics
from tessera.encoders.base import Preprocessing
from tests.launched import records, same_encoder

BANDS = (1, 3, 2)


def pixels(number: int) -> np.ndarray:
    """Return an image of 1, 3 or 2 bands: (H, W, bands) uint8."""
    return np.random.default_rng(number).integers(0, 256, (24, 24, BANDS[number % 3]), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images of one band or of three. Files of two bands would need the extra tiff."""
    root = tmp_path_factory.mktemp("mixed")
    for number in range(24):
        if number % 3 < 2:
            Image.fromarray(np.squeeze(pixels(number))).save(root / f"{number:02}.png")
    return root


@pytest.mark.parametrize("number", range(3))
def test_an_image_keeps_its_bands_and_gets_channels_of_zeros(number: int) -> None:
    picture = Picture(pixels(number), channels=3, fewer=True)
    found = picture.pixels().permute(1, 2, 0).numpy()
    assert picture.bands == BANDS[number]
    assert (found[..., : picture.bands] == pixels(number)).all()
    assert not found[..., picture.bands :].any()


@pytest.mark.parametrize(("mode", "bands"), [("L", 1), ("LA", 1), ("RGB", 3), ("RGBA", 3), ("P", 3)])
def test_gray_is_one_band_and_colour_three(mode: str, bands: int, tmp_path: Path) -> None:
    Image.new(mode, (8, 8)).save(tmp_path / "a.png")
    assert Picture((tmp_path / "a.png").read_bytes(), channels=5, fewer=True).bands == bands


def test_more_bands_than_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be converted"):
        Picture(pixels(1)[..., [0, 1, 2, 0]], channels=2, fewer=True)


def test_channels_that_an_image_does_not_have_are_nan() -> None:
    crop = CenterCrop(24, 24)
    samples = [
        Sample(str(n), (p := Picture(pixels(n), channels=3, fewer=True)).pixels(), crop.draw((24, 24)), bands=p.bands)
        for n in range(3)
    ]
    form = Preprocessing((0.5, 0.25, 0.5), (0.5, 0.25, 1.0), fewer_channels=True)
    (view,) = to_model_input(Collator(crop, 3, form)(samples)).views
    assert isinstance(view.images, torch.Tensor)
    for number, image in enumerate(view.images):
        own = (pixels(number) / 255 - form.mean[: BANDS[number]]) / form.std[: BANDS[number]]
        np.testing.assert_allclose(image[: BANDS[number]].permute(1, 2, 0), own, atol=1e-5)
        assert image[BANDS[number] :].isnan().all()


def test_statistics_of_a_channel_are_those_of_the_images_that_have_it(folder: Path) -> None:
    found = pixel_statistics(open_sources(str(folder)), 3, fewer=True)
    for channel in range(3):
        own = [pixels(n)[..., channel].ravel() for n in range(24) if n % 3 < 2 and BANDS[n % 3] > channel]
        values = np.concatenate(own) / 255
        assert found.mean[channel] == pytest.approx(values.mean(), abs=1e-9)
        assert found.std[channel] == pytest.approx(values.std(), abs=1e-9)


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_a_mixture_may_have_a_source_without_some_channels(kind: str, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed (pip install tessera-ssl[tiff])")
    values = {bands: np.random.default_rng(bands).integers(0, 200, (6, 16, 16, bands)).astype(kind) for bands in (2, 5)}
    for bands, images in values.items():
        (tmp_path / str(bands)).mkdir()
        for number, image in enumerate(images):
            file = tmp_path / str(bands) / f"{number}.tif"
            tifffile.imwrite(file, image, photometric="minisblack", planarconfig="contig")
    given, both = PixelSettings(5, fewer_channels=True, moments=True), str(tmp_path)
    mixture = measure_pixels(open_sources({f"{both}/2": 0.5, f"{both}/5": 0.5}), given)
    one_list = measure_pixels(open_sources([f"{both}/2", f"{both}/5"]), given)
    assert mixture is not None
    assert one_list is not None
    np.testing.assert_allclose(mixture.preprocessing.mean, one_list.preprocessing.mean, atol=1e-9)
    np.testing.assert_allclose(mixture.preprocessing.std, one_list.preprocessing.std, atol=1e-9)
    with pytest.raises(ShardError, match=r"largest number of channels|no data"):
        measure_pixels(open_sources({f"{both}/2": 0.5}), given)


def test_an_image_keeps_one_of_its_own_bands() -> None:
    bands = torch.tensor([1, 2, 5] * 400)
    crops = (torch.arange(5) < bands[:, None]).float()[..., None, None].expand(-1, 5, 2, 2)
    drop = BandDrop(0.9)
    drawn = [(drop, drop.draw(np.random.default_rng(0).random((len(bands), 1))))]
    own = np.concatenate(
        [of_bands([(drop, drawn[0][1][number, None])], int(b))[0][1] for number, b in enumerate(bands)]
    )
    kept = drop.apply(crops.clone(), *drop.prepare(torch.from_numpy(own))).flatten(1).sum(1)
    assert kept.min() > 0
    assert drop.apply(crops.clone(), *drop.prepare(torch.from_numpy(drawn[0][1]))).flatten(1).sum(1).min() == 0


def run(data: Path, output: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "method": "lejepa",
        "encoder": {"variant": "each:vit_micro", "depth": 1, "dim": 24, "heads": 2},
        "lejepa": {"global_size": 24, "local_size": 16, "local_crops": 1},
        "data": {"shards": str(data), "channels": 3, "fewer_channels": True},
        "evaluation": {"view_images": 8, "pictures": 1},
        "steps": 4,
        "batch_size": 4,
        "checkpoint_every": 2,
        "record_every": 1,
        "workers": 0,
        "seed": 1,
    }
    return tessera.pretrain(output=str(output), **(settings | options))


@pytest.mark.medium
def test_a_run_continues_bit_for_bit_and_its_encoder_is_loaded(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (newest,) = (tmp_path / "part/checkpoints").glob("step-*4")
    shutil.rmtree(newest)
    (tmp_path / "part/encoder.safetensors").unlink()
    run(folder, tmp_path / "part", resume=True)
    losses = [[one["loss"] for one in records(tmp_path / name) if "loss" in one] for name in ("whole", "part")]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    assert same_encoder(tmp_path / "whole", tmp_path / "part")
    encoder = tessera.load(tmp_path / "whole")
    assert encoder.preprocessing.fewer_channels
    features = tessera.embed(encoder, str(folder), labels=False, workers=0)
    assert features.features.isfinite().all()


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        ({"variant": "vit_micro"}, "Set encoder each:vit_micro"),
        ({"variant": "each:vit_micro", "join": "concat"}, "with encoder.join mean"),
    ],
)
def test_encoders_that_need_all_channels_are_refused(
    encoder: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        run(folder, tmp_path / "run", encoder=encoder)


@pytest.mark.parametrize("method", ["mae", "distill", "finetune"])
def test_methods_that_need_all_channels_refuse_fewer(method: str, folder: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.safetensors"
    encoders.save(encoders.build("vit_micro", image_size=24), teacher)
    own = {"size": 24} | {"mae": {}, "distill": {"teacher": str(teacher)}, "finetune": {"classes": 2}}[method]
    with pytest.raises(ValueError, match=f"{method} needs all channels of all images"):
        run(folder, tmp_path / "run", method=method, lejepa={}, **{method: own})
