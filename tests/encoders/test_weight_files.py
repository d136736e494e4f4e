"""Weight files without weight formats and backbones: those of this project load, and others say what is missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tessera import encoders
from tessera.encoders.registry import BACKBONES, WRAPPERS
from tessera.encoders.saving import fitting
from tessera.encoders.weight_files import FORMATS, format_of
from tessera.evaluation.features import resolve_checkpoint


@pytest.fixture(autouse=True)
def no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the registries that extras fill."""
    monkeypatch.setattr("tessera.runtime.plugins.entry_points", lambda group: [])
    for registry in (FORMATS, BACKBONES, WRAPPERS):
        for name in list(registry):
            monkeypatch.delitem(registry, name)


def test_files_of_this_project_load_by_name_and_shape(tmp_path: Path) -> None:
    encoder, file = encoders.build("vit_micro", depth=1), tmp_path / "encoder.safetensors"
    encoders.save(encoder, file)
    other = encoders.build("vit_micro", depth=1)
    report = encoders.load_weights(other, file)
    assert set(report.used) == set(encoder.state_dict())
    for loaded in (other, encoders.load(file), fitting(file, None, {})[0]):
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in encoder.state_dict().items())
    with pytest.raises(encoders.WeightsError, match="Shapes of these tensors differ"):
        encoders.load_weights(encoders.build("vit_micro", depth=1, image_size=64), file)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda file: fitting(file, None, {}),
            "not recognised. Known formats: none. If another package",
        ),
        (
            lambda file: encoders.load_weights(encoders.build("vit_micro"), file),
            "No weight format converts.* install",
        ),
        (lambda file: format_of(encoders.build("vit_micro")), "no weight format of another library.* install that"),
        (lambda _: encoders.build("timm:resnet18"), r"Unknown encoder.*prefix timm: \(known: none\). If another"),
        (lambda _: encoders.load("timm:x.y"), r"No backbone has the prefix timm: \(known: none\)"),
        (lambda _: encoders.load_weights(encoders.build("vit_micro"), "timm:x.y"), "There is no file.* prefix timm:"),
        (lambda _: resolve_checkpoint("timm:x.y"), "No encoder found.* prefix timm:"),
        (lambda _: encoders.from_module(nn.Identity(), "own"), r"unknown wrapper of modules.*\(known: none\)"),
    ],
)
def test_what_is_missing_is_named(ask: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "published.pth"
    torch.save({"model": {"encoder.layer.0.weight": torch.ones(2, 2)}}, file)
    with pytest.raises(ValueError, match=message):
        ask(file)
