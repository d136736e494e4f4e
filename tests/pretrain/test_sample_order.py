"""The order of samples of a run that changes on the way: other weights, added shards, skipped batches."""

import shutil
import tarfile
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from tessera.data.demo import demo_shards
from tessera.pretrain.checkpoints import trainer_json
from tessera.pretrain.run import main
from tests.launched import TINY, records, same_encoder, timeless

pytestmark = pytest.mark.slow


def losses(output: Path) -> dict[int, float]:
    """Return the loss of each step. The records must belong to consecutive steps."""
    found = {record["step"]: record["loss"] for record in records(output) if "loss" in record}
    assert list(found) == list(range(1, len(found) + 1))
    return found


def interrupted_copy(run: Path, name: str) -> Path:
    """Return a copy of a finished run of 12 steps, as it was after the checkpoint of step 4."""
    copy = run.parent / name
    shutil.copytree(run, copy, symlinks=True)
    for step in (8, 12):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    for file in copy.glob("encoder*"):
        file.unlink()
    return copy


def shards(folder: Path, sizes: list[int]) -> list[str]:
    """Make shards of the embedded digits with these numbers of images."""
    source = demo_shards()[0].partition("{")[0] + "000000.tar"
    paths = [folder / f"part-{number}.tar" for number in range(len(sizes))]
    with tarfile.open(source) as tar:
        images = iter([member for member in tar if member.name.endswith(".png")])
        for path, size in zip(paths, sizes, strict=True):
            with tarfile.open(path, "w") as part:
                for _ in range(size):
                    member = next(images)
                    part.addfile(member, tar.extractfile(member))
    return [str(path) for path in paths]


def digits(output: Path, *data: str) -> list[str]:
    """Return the command line of a run on digits."""
    small = ["--dino.global_size", "8", "--dino.local_size", "4", "--encoder.patch_size", "4", "--checkpoint.keep", "9"]
    small += ["--evaluation.view_images", "0"]
    return [*TINY, *small, "--output", str(output), "--data", *data]


def test_changing_weights_and_skipped_batches_are_those_of_one_process_on_two_and_after_a_resume(
    fork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = shards(tmp_path, [150, 90])
    mixture = f'{{"{first}": {{"0": 1, "6": 0.25}}, "{second}": {{"0": 0, "6": 0.75}}}}'
    order = ["--skip_batches", "3,9-10"]
    whole = tmp_path / "whole"
    assert main([*digits(whole, mixture), *order]) == 0
    assert len(losses(whole)) == 12
    resumed = interrupted_copy(whole, "resumed")
    with patch.object(trainer_json, "read", wraps=trainer_json.read) as read:
        assert main(["--resume", str(resumed), "--workers", "2"]) == 0
    assert read.call_count == 1
    assert timeless(resumed) == timeless(whole)
    assert same_encoder(resumed, whole)
    both = interrupted_copy(whole, "both")
    fork(["--resume", str(both)], processes=2).wait()
    assert losses(both) == pytest.approx(losses(whole), rel=1e-4)
    plain = tmp_path / "plain"
    assert main(digits(plain, mixture)) == 0
    assert [losses(plain)[step] == losses(whole)[step] for step in (1, 2, 3)] == [True, True, False]
    assert main(["--resume", str(interrupted_copy(whole, "changed")), "--skip_batches", "2,3,9-10"]) == 2
    assert "has used or skipped other batches up to step 4" in capsys.readouterr().err
    later = interrupted_copy(whole, "later")
    assert main(["--resume", str(later), "--skip_batches", "3,11"]) == 0  # batches that were not yet used may change
    assert len(losses(later)) == 12


def test_shards_that_are_added_join_with_the_next_epoch_and_the_run_can_be_repeated(
    fork, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    old, new, other = shards(tmp_path, [80, 70, 30])  # an epoch of the old shard has five steps
    begun = tmp_path / "begun"
    assert main(digits(begun, old)) == 0
    run = interrupted_copy(begun, "run")
    assert main(["--resume", str(run), "--data", old, new]) == 0
    said = "has 2 shards, 1 more than at the checkpoint. The new shards are used from pass 2 over this data on"
    assert said in caplog.text
    assert "the order of the samples changes" not in caplog.text
    assert yaml.safe_load((run / "config.yaml").read_text())["stream"]["growth"] == [[0, 1, 1]]
    same = [losses(run)[step] == losses(begun)[step] for step in range(1, 13)]
    assert same == [True] * 5 + [False] * 7

    again = interrupted_copy(run, "again")  # as if the first resumed run had been killed before its next checkpoint
    assert main(["--resume", str(again)]) == 0
    assert timeless(again) == timeless(run)
    later = interrupted_copy(run, "later")
    shutil.copytree(run / "checkpoints" / "step-00000008", later / "checkpoints" / "step-00000008")
    assert main(["--resume", str(later)]) == 0
    assert timeless(later) == timeless(run)
    repeated = tmp_path / "repeated"
    fork(["--config", str(run / "config.yaml"), "--output", str(repeated)], processes=2).wait()
    assert losses(repeated) == pytest.approx(losses(run), rel=1e-4)

    refused = interrupted_copy(run, "refused")
    shutil.copytree(run / "checkpoints" / "step-00000008", refused / "checkpoints" / "step-00000008")
    for data in ([old], [new, old], [other, new], [old, other]):
        assert main(["--resume", str(refused), "--data", *data]) == 2
        assert "Shards or stream settings were changed since" in capsys.readouterr().err
    assert main(["--resume", str(refused), "--data", old, new, other]) == 0
    assert "has 3 shards, 1 more than at the checkpoint" in caplog.text
    assert yaml.safe_load((refused / "config.yaml").read_text())["stream"]["growth"] == [[0, 1, 1], [0, 2, 2]]


def test_new_weights_an_added_shard_and_skipped_batches_at_a_resume_are_those_of_one_process_without_a_stop(
    fork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first, second, new = shards(tmp_path, [60, 90, 40])
    glob = tmp_path / "first" / "*.tar"  # a source to which a shard is added
    glob.parent.mkdir()
    Path(first).rename(glob.parent / "part-0.tar")
    begun = tmp_path / "begun"
    assert main(digits(begun, f'{{"{glob}": 0.7, "{second}": 0.3}}')) == 0
    Path(new).rename(glob.parent / "part-1.tar")
    changed = f'{{"{glob}": {{"0": 0.7, "7": 0.2}}, "{second}": {{"0": 0.3, "7": 0.8}}}}'
    order = ["--skip_batches", "5,9-10"]

    run = interrupted_copy(begun, "run")
    fork(["--resume", str(run), "--data", changed, *order, "--workers", "2"], processes=2).wait()
    growth = yaml.safe_load((run / "config.yaml").read_text())["stream"]["growth"]
    assert growth == [[0, 1, 2]]
    whole = tmp_path / "whole"
    assert main([*digits(whole, changed), *order, "--stream.growth", "[[0,1,2]]"]) == 0
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)
    assert [losses(begun)[step] == losses(whole)[step] for step in (4, 5)] == [True, False]
    alone = interrupted_copy(begun, "alone")
    assert main(["--resume", str(alone), "--data", changed, *order]) == 0
    after = [[record for record in timeless(one) if record["step"] > 4] for one in (alone, whole)]
    assert after[0] == after[1]
    assert losses(alone) == losses(whole)
    assert same_encoder(alone, whole)
    assert "the order of the samples changes" not in caplog.text
    earlier = f'{{"{glob}": {{"0": 0.7, "2": 0.2}}, "{second}": 0.3}}'
    assert main(["--resume", str(interrupted_copy(begun, "earlier")), "--data", earlier, *order]) == 0
    assert "give each pattern the weights {0: OLD, 5: NEW}" in caplog.text


def test_a_run_without_named_images_is_that_of_shards_without_them_also_after_a_resume(
    fork,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards of equal names without these images give the same losses. A list of other images is said at a resume."""
    caplog.set_level("INFO")
    (whole,) = shards(tmp_path, [90])
    names = [f"part-0.tar/{name}" for name in named(whole)]
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join([*names[:5], names[40], "val.tar/0"]))
    (tmp_path / "clean").mkdir()
    clean = tmp_path / "clean" / "part-0.tar"
    with tarfile.open(whole) as old, tarfile.open(clean, "w") as new:
        for number, member in enumerate(member for member in old if member.name.endswith(".png")):
            if number not in (*range(5), 40):
                new.addfile(member, old.extractfile(member))
    assert main(digits(tmp_path / "expected", str(clean))) == 0
    run = tmp_path / "run"
    flags = ["--data.exclude", str(listed)]
    assert main([*digits(run, whole), *flags, "--dry_run"]) == 0
    said = f"6 of 90, by {listed}; 1 other names of the file are those of no training image"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main([*digits(run, whole), *flags]) == 0
    assert f"images left out: {said}" in caplog.text
    assert losses(run) == losses(tmp_path / "expected")
    resumed = interrupted_copy(run, "resumed")
    fork(["--resume", str(resumed)], processes=2).wait()
    assert losses(resumed) == pytest.approx(losses(run), rel=1e-4)
    assert "changed since" not in caplog.text
    other = tmp_path / "other.txt"
    other.write_text("\n".join(names[10:16]))
    assert main(["--resume", str(interrupted_copy(run, "changed")), "--data.exclude", str(other)]) == 0
    assert f"settings changed since step-00000004: data.exclude {listed} -> {other}" in caplog.text
    assert "images have other names, labels or sizes" in caplog.text
    monkeypatch.chdir(tmp_path)
    assert main([*digits(tmp_path / "relative", whole), "--data.exclude", "list.txt"]) == 0
    monkeypatch.chdir(tmp_path / "clean")
    assert main(["--resume", str(interrupted_copy(tmp_path / "relative", "moved"))]) == 0
    assert losses(tmp_path / "moved") == losses(run)


def named(shard: str) -> list[str]:
    """Return the keys of the images of a tar, in their order."""
    with tarfile.open(shard) as tar:
        return [member.name.partition(".")[0] for member in tar if member.name.endswith(".png")]
