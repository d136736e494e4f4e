"""The sheet of images and class names."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.data.shards import ShardError, open_shards
from tessera.extras.shard_tools.preview import PreviewSettings, read_cells, run
from tessera.extras.shard_tools.sheet import Cell, write_sheet
from tessera.runtime.settings import SettingsError, flags, validate
from tests.data.batches import tiff
from tests.launched import ROOT


def preview(*argv: str) -> None:
    run(validate(PreviewSettings, flags(PreviewSettings, argv, "preview.py")))


def test_cells_hold_the_images_and_their_classes(write_shards):
    paths = write_shards([3, 2])
    cells, _ = read_cells(open_shards(paths), np.array([0, 2, 3, 4]), 3)
    assert [cell.caption for cell in cells] == ["class 0", "class 2", "class 3", "class 4"]
    for cell, number in zip(cells, (0, 2, 3, 4), strict=True):
        np.testing.assert_array_equal(cell.image, np.broadcast_to([0, number, 7], (4, 6, 3)))
    (Path(paths[0]).parent / "classes.json").write_text(json.dumps(["a", "b", "c", "$d$"]))
    opened = open_shards(paths)
    named, _ = read_cells(replace(opened, classes=opened.class_names()), np.array([3, 4]), 3)
    assert [cell.caption for cell in named] == ["$d$", "class 4"]


def test_images_without_label_and_corrupt_images_are_named(write_shards, write_tar):
    (bare,) = write_shards([1], labels=False)
    broken = write_tar("broken.tar", [("x.png", b"\x89PNG\r\n\x1a\n broken"), ("x.cls", b"1")])
    cells, _ = read_cells(open_shards([bare, broken]), np.array([0, 1]), 3)
    assert [cell.caption for cell in cells] == ["s00000", f"corrupt: {Path(broken).name}/x"]


def test_a_sheet_without_an_image_is_refused_with_the_reason(tmp_path, capsys):
    photos, sheet = tmp_path / "photos", tmp_path / "sheet.png"
    photos.mkdir()
    for number in range(3):
        (photos / f"{number}.jpg").write_bytes(b"text")
    with pytest.raises(ShardError, match=r"No sheet is written. 3 of 3 .*0.jpg: .*Replace these files") as caught:
        preview(str(photos), "--output", str(sheet))
    assert "shards" not in str(caught.value)
    assert not sheet.exists()
    Image.new("RGB", (8, 8)).save(photos / "3.png")
    preview(str(photos), "--output", str(sheet))
    assert "3 of 4 images cannot be read. The first is" in capsys.readouterr().err


def test_a_number_of_bands_names_the_flag_that_works(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.tif").write_bytes(tiff(np.zeros((6, 8, 5), np.uint8), planarconfig="contig"))
    with pytest.raises(ShardError, match=r"They have 5 bands, but 3 channels are read. Give --channels 5."):
        preview(str(tmp_path), "--output", str(tmp_path / "sheet.png"))


def test_the_sheet_is_a_picture_with_all_images(write_shards, tmp_path, capsys):
    write_shards([40])
    sheet = tmp_path / "new" / "sheet.png"
    preview(str(tmp_path / "*.tar"), "--output", str(sheet), "--images", "12")
    assert "12 of 40 images" in capsys.readouterr().out
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    shown = {tuple(color) for color in pixels.reshape(-1, 3).tolist()}
    numbers = np.linspace(0, 39, 12).round().astype(int)
    assert {(0, int(number), 7) for number in numbers} <= shown
    assert len([color for color in shown if color[2] == 7 and color[0] == 0]) == 12
    (tmp_path / "file").touch()
    with pytest.raises(ShardError, match="--output"):
        preview(str(tmp_path / "*.tar"), "--output", str(tmp_path / "file" / "sheet.png"))


def test_strange_captions_are_drawn(tmp_path):
    cell = Cell(np.zeros((2, 2, 3), np.uint8), "$x_ a very long name of a class \N{SNOWMAN}$")
    write_sheet(tmp_path / "sheet.png", [[cell, cell], [cell]], "a $title$")
    assert Image.open(tmp_path / "sheet.png").width > 100


def test_bands_of_floats_are_shown_between_quantiles_of_the_sheet(tmp_path):
    """Oracle: NumPy's quantiles over both images; values without data are black."""
    values = np.random.default_rng(0).uniform(-0.1, 1.4, (2, 40, 30, 5)).astype(np.float32)
    values[1, :, :10] = np.nan
    for number, one in enumerate(values):
        (tmp_path / f"{number}.tif").write_bytes(tiff(one, planarconfig="contig", photometric="minisblack"))
    cells, failed = read_cells(open_shards(str(tmp_path)), np.arange(2), 5, (4, 3, 2), labels=False)
    assert not failed
    bands = values[..., [3, 2, 1]].astype(np.float64)
    held = np.concatenate([bands[0].reshape(-1, 3), bands[1, :, 10:].reshape(-1, 3)])
    low, high = np.quantile(held, (0.02, 0.98), axis=0)
    for cell, one in zip(cells, bands, strict=True):
        expected = np.nan_to_num(255 * np.clip((one - low) / (high - low), 0, 1))
        np.testing.assert_allclose(cell.image, expected, atol=0.6)


def test_a_band_beyond_the_channels_is_refused(write_shards):
    (shard,) = write_shards([1])
    with pytest.raises(SettingsError, match=r"--bands names band 9\. Give --channels"):
        preview(shard, "--bands", "9,3,2")


@pytest.mark.slow
def test_settings_of_a_run_preview_its_crops(write_shards, tmp_path):
    write_shards([80])
    sheet = tmp_path / "sheet.png"
    argv = [str(tmp_path / "*.tar"), "--method", "mae", "--encoder", "vit_micro", "--mae.size", "32", "--images", "2"]
    command = [sys.executable, "-m", "data.preview", *argv, "--batch_size", "64", "--output", str(sheet)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "2 images with their crops" in done.stdout
    assert sheet.exists()
