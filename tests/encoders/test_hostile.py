"""Descriptions and weights of strangers load as they are, or are refused by name, in bounded time and memory."""

import json
import os
import pickle
import re
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tessera import encoders
from tessera.encoders import EncoderError, WeightsError
from tessera.encoders.weight_files import read


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "e.safetensors"
    encoders.save(encoders.build("vit_micro", depth=1), path, step=3)
    return path


def change(saved: Path, **entries: Any) -> None:
    beside = saved.with_suffix(".json")
    beside.write_text(json.dumps(json.loads(beside.read_text()) | entries))


HOSTILE: list[dict[str, Any]] = [
    *({"variant": value} for value in (None, 3, [], {}, ["vit_micro"], "nope", "vit\x1b[31m\nforged")),
    *({"depth": value} for value in (None, "4", 1.5, True, -1, 0, 10**9, 2**70, [4], {"a": 1}, float("nan"))),
    *({"dim": value} for value in (None, "x", 0, -96, 10**12, 2**70, 97, float("inf"))),
    *({"heads": value} for value in (0, -3, 10**9, 7, "3")),
    *({"image_size": value} for value in (0, -1, 10**9, [16], [16, 16, 16], [1, 10**9], "16", [[16, 16]])),
    *({"patch_size": value} for value in (0, 10**9, -4, None)),
    *({"mlp_ratio": value} for value in (float("nan"), float("inf"), -1, 10**20, "4")),
    *({"norm_eps": value} for value in (float("nan"), "x", None)),
    *({"pool": value} for value in (3, ["class"], "nope", None)),
    *({"channels": value} for value in (0, -3, 10**9, 2.5)),
    *({"registers": value} for value in (-1, 10**9)),
    *({"step": value} for value in (-1, "x", 2**70, 1.5, [])),
    *({"preprocessing": value} for value in (3, [], {}, "x", {"mean": 3, "std": 3})),
    *(
        {"preprocessing": {"mean": [0.5] * 3, "std": value}}
        for value in ([0.0] * 3, [-1] * 3, ["1"] * 3, [1, 1], [True])
    ),
    *(
        {"preprocessing": {"mean": value, "std": [1.0] * 3}}
        for value in ([float("nan")] * 3, "123", [[1]] * 3, [1e40] * 3)
    ),
    {"self": 1},
    {"unknown": 1},
    {"unkn\nown" * 1000: 1},
    *(
        {"preprocessing": {"mean": [0.5] * 3, "std": [1.0] * 3, "low": [0] * 3, "high": [9] * 3} | wrong}
        for wrong in ({"high": None}, {"low": [9] * 3}, {"high": [9]}, {"pixel_type": ["int8"]}, {"nodata": [1]})
    ),
    {"preprocessing": {"mean": [0.5] * 10**5, "std": [1.0] * 10**5}},
]


@pytest.mark.parametrize("entries", HOSTILE, ids=lambda entries: str(entries)[:40])
def test_a_hostile_description_is_named(saved: Path, entries: dict[str, Any]) -> None:
    change(saved, **entries)
    began = time.process_time()
    with pytest.raises((EncoderError, WeightsError)) as caught:
        encoders.load(saved)
    assert time.process_time() - began < 5
    assert len(str(caught.value)) < 4000
    assert "\x1b" not in str(caught.value)
    assert "\nforged" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "3", "null", '{"variant"', "\xff", '{"a": ' * 5000, " " * 2**21]
)
def test_other_files_are_named(saved: Path, text: str) -> None:
    saved.with_suffix(".json").write_text(text, encoding="latin-1")
    with pytest.raises(EncoderError, match=re.escape(str(saved.with_suffix(".json")))):
        encoders.load(saved)


@pytest.mark.parametrize("entries", [{"dim": 49152, "heads": 1}, {"image_size": 65532}])
def test_memory_is_taken_only_for_settings_that_fit_the_weights(saved: Path, entries: dict[str, Any]) -> None:
    change(saved, **entries)
    with pytest.raises(WeightsError, match="do not fit the settings"):
        encoders.load(saved)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda t: t * float("nan"), "NaN or infinite"),
        (lambda t: t.to(torch.int8), "must be floating point"),
        (lambda t: t > 0, "must be floating point"),
        (lambda t: t * 1e-9, "near zero"),
        (lambda t: torch.zeros_like(t), "near zero"),
        (lambda t: t[None], "do not fit the settings"),
    ],
)
def test_weights_that_are_none_are_named(saved: Path, harm: Any, said: str) -> None:
    state = {name: harm(tensor) for name, tensor in encoders.load(saved).state_dict().items()}
    save_file(state, saved)
    for load in (encoders.load, lambda path: encoders.load_weights(encoders.build("vit_micro", depth=1), path)):
        with pytest.raises(WeightsError, match=f"{said}|is not recognised|Shapes of these tensors differ"):
            load(saved)


def test_floats_of_other_precisions_load(saved: Path) -> None:
    state = encoders.load(saved).state_dict()
    for kind in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        save_file({name: tensor.to(kind) for name, tensor in state.items()}, saved)
        assert encoders.load(saved).state_dict()["norm.weight"].dtype == torch.float32


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_an_archive_of_several_disks_is_refused(tmp_path: Path) -> None:
    """`zipfile.is_zipfile` raises an error for such a file before Python 3.13. Then torch refuses it."""
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.zeros(2)}, path)
    content = bytearray(path.read_bytes())
    locator = content.rindex(b"PK\x06\x07")
    content[locator + 16 : locator + 20] = (2).to_bytes(4, "little")
    path.write_bytes(content)
    said_by_zipfile = sys.version_info < (3, 13)
    message = (
        "a damaged archive: zipfiles that span multiple disks" if said_by_zipfile else "unsupported multidisk archive"
    )
    with pytest.raises(WeightsError, match=message):
        read(path)


def test_hostile_torch_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.pth"
    torch.save({"a": Command()}, path)
    with pytest.raises(WeightsError, match=r"w\.pth was not loaded, .* object posix\.mkdir, which could run code"):
        read(path)
    for name in ("text.pth", "text.safetensors"):
        (tmp_path / name).write_text("not weights")
        with pytest.raises(WeightsError, match=rf"{name} is neither a .safetensors file nor a torch file of weights"):
            read(tmp_path / name)
    path.write_bytes(pickle.dumps(Command()))
    with pytest.raises(WeightsError):
        read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * 2**24)
    with pytest.raises(WeightsError, match="a compressed archive, which could expand to 16777216 bytes"):
        read(path)
    torch.save({"a": torch.ones(1).expand(2**40)}, path)  # a few bytes
    with pytest.raises(WeightsError, match="a is sparse, quantised"):
        encoders.load_weights(encoders.build("vit_micro"), path)
    torch.save({"a": torch.eye(3).to_sparse()}, path)
    with pytest.raises(WeightsError):
        encoders.load_weights(encoders.build("vit_micro"), path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(WeightsError, match=r"There is no file .*none\.pth"):
        read(tmp_path / "none.pth")
    with pytest.raises(WeightsError, match="is not a file"):
        read(tmp_path / "pipe.safetensors")
    assert not (tmp_path / "ran").exists()
