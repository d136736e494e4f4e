"""Runs with images of 16 bits: one range from training to evaluation, resumed bit-equal."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator

from tessera import encoders
from tessera.evaluation.features import EvaluationError, extract
from tessera.pretrain.run import main
from tests.data.batches import saved, write_tar

ENCODER = {"variant": "vit_micro", "depth": 1, "dim": 24, "heads": 2, "image_size": 16, "patch_size": 8}
METHOD = {"lejepa.global_size": 16, "lejepa.local_crops": 0, "batch_size": 8, "precision": "fp32", "workers": 0}
EVALUATION = {"evaluation.view_images": 0, "evaluation.pictures": 0, "evaluation.linear_iterations": 0}
NAMED = {f"encoder.{name}": value for name, value in ENCODER.items()} | METHOD | EVALUATION | {"data.channels": 1}
SMALL = ["--method", "lejepa", *(word for name, value in NAMED.items() for word in (f"--{name}", str(value)))]


@pytest.fixture
def dark(tmp_path: Path) -> str:
    """A tar of 32 images of 12 bits in two classes, with nodata 0."""
    rng, members = np.random.default_rng(0), []
    for number in range(32):
        values = rng.integers(200, 3000) + rng.normal(0, 100, (20, 24)) + 20 * (number % 2) * np.arange(24)
        values = values.clip(1, 4095).astype(np.uint16)
        values[:4] = 0
        members += [(f"{number:02d}.png", saved(values, "PNG")), (f"{number:02d}.cls", str(number % 2).encode())]
    return write_tar(tmp_path / "dark.tar", members)


@pytest.mark.medium
def test_the_range_is_the_same_in_settings_encoder_resume_and_evaluation(
    dark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    caplog.set_level("INFO", "tessera")
    main(
        [
            *SMALL,
            "--data",
            dark,
            "--data.nodata",
            "0",
            "--steps",
            "4",
            "--checkpoint_every",
            "2",
            "--output",
            str(whole),
        ]
    )
    assert "pixels: uint16, range " in caplog.text
    data = yaml.safe_load((whole / "config.yaml").read_text())["data"]
    described = json.loads((whole / "encoder.json").read_text())["preprocessing"]
    assert data["range"] == [*described["low"], *described["high"]]
    assert (data["pixel_type"], data["nodata"]) == (described["pixel_type"], described["nodata"]) == ("uint16", 0)
    assert (data["mean"], data["std"]) == (described["mean"], described["std"])
    assert 0 < data["range"][0] < data["range"][1] < 5000

    shutil.copytree(whole, broken, symlinks=True)
    shutil.rmtree(broken / "checkpoints" / "step-00000004")
    (broken / "checkpoints" / "latest").unlink()
    (broken / "encoder.safetensors").unlink()
    main(["--resume", str(broken)])
    ours, theirs = (encoders.load(folder).state_dict() for folder in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    encoder = encoders.load(whole)
    features = extract(encoder, dark, Accelerator(), workers=0, progress=False)
    assert features.features.shape == (32, 24)
    assert features.features.isfinite().all()
    bytes_only = write_tar(tmp_path / "b.tar", [("a.png", saved(np.zeros((9, 9), np.uint8), "PNG")), ("a.cls", b"0")])
    with pytest.raises(EvaluationError, match="They are uint8, but the encoder takes uint16"):
        extract(encoder, bytes_only, Accelerator(), workers=0, progress=False)
