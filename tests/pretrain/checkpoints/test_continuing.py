"""A run that continues is compared with its checkpoint: encoder, order of samples and settings."""

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tessera import encoders
from tessera.data.shards import open_sources
from tessera.pretrain.checkpoints.continuing import (
    _only_renamed,
    check_fits,
    notice_other_samples,
)
from tessera.pretrain.checkpoints.resume import Checkpoint, CheckpointError
from tessera.pretrain.checkpoints.trainer_json import Trainer, TrainState
from tessera.pretrain.resolve import fingerprint
from tests.pretrain.small import method, settings


def checkpoint_of(saved: Any) -> Checkpoint:
    """Return a checkpoint of a run with these settings."""
    return Checkpoint(Path("run/step-00000001"), Trainer(TrainState(1), 1, "ddp", 1, None, saved, {}))


def test_another_encoder_is_refused_and_another_sample_order_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = checkpoint_of(settings())
    check_fits(checkpoint, settings())
    assert "the order of the samples changes" not in caplog.text
    check_fits(checkpoint, settings() | {"shards": "abd", "seed": 1})
    assert "changed since step-00000001: seed 0 -> 1\n" in caplog.text
    assert (
        "the order of the samples changes, because seed is 1 and the shards have other names or sizes, but "
        "step-00000001 was written with" in caplog.text
    )
    assert "To keep the order, resume with --seed 0 and restore the data, or list the old shards first" in caplog.text
    with pytest.raises(CheckpointError, match=r"encoder\.depth is 1 in the checkpoint and 2 in this run"):
        check_fits(checkpoint, settings() | {"encoder": settings()["encoder"] | {"depth": 2}})


def test_other_pixels_are_refused() -> None:
    old = settings()
    new = {**old, "data": {"pixel_type": "uint8", "range": None, "nodata": None, "fewer_channels": False}}
    check_fits(checkpoint_of({**old, "data": {"nodata": None}}), new)  # older versions read all images as uint8
    for name, value in (("pixel_type", "uint16"), ("range", [0.0, 9.0]), ("nodata", 0.0)):
        with pytest.raises(CheckpointError, match=rf"data\.{name} is .* in the checkpoint and .* in this run"):
            check_fits(checkpoint_of(new), {**new, "data": {**new["data"], name: value}})


def test_the_section_of_a_method_that_only_one_start_knew_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    other = {"unknown": {"size": 64}}  # not a name that an installed package may provide
    check_fits(checkpoint_of(settings() | other), settings())
    check_fits(checkpoint_of(settings()), settings() | other)
    assert not caplog.messages
    check_fits(checkpoint_of(settings() | other), settings() | {"unknown": {"size": 32}})
    assert "unknown.size 64 -> 32" in caplog.text


def test_the_same_data_at_another_path_are_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = settings() | {"data": {"shards": "wds/train"}, "evaluation": {"val": ["wds/val"]}}
    for shards, val, changed in (
        (f"{tmp_path}/wds/train", f"{tmp_path}/wds/val", False),
        ("/moved/wds/train", ["wds/val"], False),  # the fingerprint is that of the same shards
        ("wds/train", "/moved/wds/val", True),
    ):
        caplog.clear()
        check_fits(
            checkpoint_of(before),
            settings()
            | {"data": {"shards": shards, "pixel_type": "uint8", "fewer_channels": False}, "evaluation": {"val": val}},
        )
        assert ("evaluation.val ['wds/val'] -> /moved/wds/val" in caplog.text) == changed
        assert bool(caplog.messages) == changed


def test_an_encoder_setting_newer_than_the_checkpoint_counts_as_its_default(caplog: pytest.LogCaptureFixture) -> None:
    full = method("dino", 0).trained_encoder().settings

    def stored(**encoder: object) -> Checkpoint:
        kept = {k: v for k, v in (full | encoder).items() if k not in ("drop_path", "patch_size")}
        return checkpoint_of(settings() | {"encoder": kept})

    check_fits(stored(), settings() | {"encoder": full})
    check_fits(stored(), settings())  # here the new run lacks settings
    assert "changed since" not in caplog.text
    assert full["patch_size"] == encoders.VARIANTS["vit_micro"]["patch_size"], "the variant's, not the constructor's"
    with pytest.raises(
        CheckpointError, match=r"another run: encoder\.patch_size is 4 in the checkpoint and 8 in this run\. Resume"
    ):
        check_fits(stored(), settings() | {"encoder": full | {"patch_size": 8}})
    with pytest.raises(CheckpointError, match=r"encoder\.depth is 3 in the checkpoint and 1 in this run"):
        check_fits(stored(depth=3), settings() | {"encoder": full})
    with pytest.raises(CheckpointError, match=r"encoder\.gone is 1 in the checkpoint and None in this run"):
        check_fits(stored(gone=1), settings() | {"encoder": full})
    with pytest.raises(
        CheckpointError, match=r"encoder\.variant is vit_gone in the checkpoint and vit_micro in this run"
    ):
        check_fits(stored(variant="vit_gone"), settings() | {"encoder": full})


def test_other_samples_of_equal_names_and_counts_are_noticed(tmp_path, caplog):
    """A shard that is replaced by one of equal size and count is said at a resume. A copy of the data is not."""

    def shard(names, pixels, folder="data"):
        path = tmp_path / folder / "a.tar"
        path.parent.mkdir(exist_ok=True)
        with tarfile.open(path, "w") as file:
            for number, name in enumerate(names):
                member = tarfile.TarInfo(f"{name}.tif")
                content = bytes([pixels, number]) * 1000
                member.size = len(content)
                file.addfile(member, BytesIO(content))
        return open_sources(str(path))

    def saved(hashes):
        return checkpoint_of({"samples": hashes, "shard_counts": [1], "shards": "order"})

    names = [f"{number:02d}" for number in range(40)]
    before = notice_other_samples(shard(names, 0), None, "order")
    assert caplog.messages == []
    for written, noticed in (
        ((names, 0), False),
        ((names, 0, "copy"), False),
        (([*names[:20], "xx", *names[21:]], 0), True),
    ):
        sources = shard(*written)
        caplog.clear()
        notice_other_samples(sources, saved(before), "order")
        assert ("images have other names, labels or sizes" in caplog.text) == noticed
        caplog.clear()
        notice_other_samples(sources, saved(before), "another order")  # another message says so
        assert caplog.messages == []
        caplog.clear()
        for older in (None, [], ["index:0"]):  # runs of older versions, and data that now have another index
            notice_other_samples(sources, saved(older), "order")
        assert caplog.messages == []


def test_a_folder_of_another_name_keeps_the_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = []
    for name, count in (("one", 5), ("two", 5), ("six", 6)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("L", (4, 4)).save(tmp_path / name / f"{number}.png")
        opened.append(open_sources(str(tmp_path / name)).lists)
    buffers = [16]
    saved = {"data": {"shards": "elsewhere/one"}, "shards": fingerprint(opened[0], buffers)}
    assert _only_renamed(saved, opened[0], buffers)
    assert _only_renamed(saved, opened[1], buffers)
    assert not _only_renamed(saved, opened[2], buffers)
    assert not _only_renamed(saved, opened[1], [17])
    assert not _only_renamed({"shards": saved["shards"], "data": {"shards": {"elsewhere/two": 1}}}, opened[1], buffers)
