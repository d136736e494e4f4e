"""Images that are left out by name: the order of the others is that of shards without these images."""

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.data.exclude import read_names, without
from tessera.data.shards import Access, ShardError, Sources, open_shards, open_sources
from tessera.data.shards.samples import SampleKeys
from tessera.evaluation.features import EvaluationError
from tessera.evaluation.splits import check_training_images
from tessera.pretrain.command_line import load
from tessera.pretrain.job import evaluations, prepare
from tessera.runtime.processes import make_accelerator
from tests.data.batches import training_batches
from tests.data.made import make, rows, samples
from tests.data.test_elastic import samples as drawn
from tests.data.test_elastic import transform

SIZES = [7, 40, 5, 33]
LEFT_OUT = [(0, 0), (0, 6), (1, 3), (1, 4), (1, 39), *((2, sample) for sample in range(5)), (3, 17)]
"""Shard and index in the shard: the ends of a shard, neighbours, and a whole shard."""


def listed(path: Path, names: list[str]) -> str:
    path.write_text("\n".join(["key", *names]) + "\n")
    return str(path)


@pytest.fixture
def folders(tmp_path, write_shards):
    """Shards, the same shards without some images, and a list of the names of these images."""
    whole, clean = tmp_path / "whole", tmp_path / "clean"
    clean.mkdir()
    whole.mkdir()
    paths = [Path(shutil.move(path, whole)) for path in write_shards(SIZES)]
    names = []
    for number, path in enumerate(paths):
        keys = [key for key, _, _ in samples_of(path)]
        gone = {keys[sample] for shard, sample in LEFT_OUT if shard == number}
        names += [f"{path.name}/{key}" for key in sorted(gone)]
        with tarfile.open(path) as old, tarfile.open(clean / path.name, "w") as new:
            stay = [member for member in old if member.name.partition(".")[0] not in gone]
            for member in stay:
                new.addfile(member, old.extractfile(member))
        if not stay:
            (clean / path.name).unlink()
    return str(whole), str(clean), listed(tmp_path / "list.csv", names)


def samples_of(path):
    opened = open_shards(str(path))
    return [(opened.name(number).partition("/")[2], opened.image(number), number) for number in range(opened.images)]


def test_batches_are_those_of_shards_without_the_images(folders):
    """Keys, crops and all that is drawn, over three epochs, by two processes from the middle on."""
    whole, clean, given = folders
    sources, said = without(open_sources(whole), given)
    assert said == f"{len(LEFT_OUT)} of {sum(SIZES)}, by {given}"
    kept = sum(SIZES) - len(LEFT_OUT)
    runs = []
    for shards in (sources, clean):
        found = []
        for rank, first in ((0, 0), (0, 7), (1, 7)):
            split = {"first_step": first, "rank": rank, "world_size": 2 if first else 1}
            batches = training_batches(
                shards, transform(), batch_size=10, seed=3, steps=3 * kept // 10, streams=8, window=7, **split
            )
            found += [drawn(batch) for batch in batches]
        runs.append(found)
    assert runs[0] == runs[1]
    assert len({key for batch in runs[0] for key, _ in batch}) == kept


def test_sources_agree_with_shards_without_the_images(folders):
    whole, clean, given = folders
    (source,), _ = without(open_sources(whole), given)[0]
    expected = open_shards(clean)
    assert source.images == expected.images
    for number in range(source.images):
        assert source.name(number) == expected.name(number)
        assert source.image(number) == expected.image(number)
    assert source.identity == expected.identity
    assert source.content() == expected.content()
    assert source.count_labels() == expected.count_labels()
    assert source.first(2).identity == expected.first(2).identity
    source.require_labels()


def test_the_hash_of_the_samples_tells_lists_apart(folders, tmp_path):
    """Two lists that leave out as many images of a shard have equal counts."""
    whole, _, _ = folders
    (opened,) = open_sources(whole).lists
    hashes = [opened.samples_hash()]
    for number in (8, 9):
        given = listed(tmp_path / "other.csv", [opened.name(number)])
        hashes.append(without(Sources([opened], [1.0]), given)[0].lists[0].samples_hash())
    assert len({*hashes}) == 3


def test_an_unlabelled_image_may_be_left_out(tmp_path, write_shards):
    (path,) = write_shards([6])
    with tarfile.open(path) as old, tarfile.open(tmp_path / "shard.tar", "w") as new:
        for member in old:
            if member.name != next(m.name for m in old.getmembers() if m.name.endswith(".cls")):
                new.addfile(member, old.extractfile(member))
    opened = open_shards(str(tmp_path / "shard.tar"))
    with pytest.raises(ShardError, match="has no label") as error:
        opened.require_labels()
    name = next(opened.name(n) for n in range(6) if opened.name(n) in str(error.value))
    sources, _ = without(Sources([opened], [1.0]), listed(tmp_path / "list.csv", [name]))
    sources.lists[0].require_labels()
    assert sources.lists[0].count_labels() == 5


@pytest.mark.parametrize("form", ["csv", "txt", "parquet"])
def test_files_of_all_forms_name_the_same_images(tmp_path, form):
    names, path = ["a.tar/0", "b, c.tar/ü", "a.tar/1"], tmp_path / f"list.{form}"
    if form == "parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"key": names}), path)
    else:
        quoted = ["key,score", *(f'"{name}",1' for name in names)] if form == "csv" else names
        path.write_text("\n".join(quoted) + "\n", encoding="utf-8")
    assert [*read_names(str(path))] == names


def test_flags_choose_rows(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "findings.parquet"
    flags = {"near_copy": [True, False, None, False], "blank": [False, False, True, False]}
    parquet.write_table(pa.table({"key": ["0", "1", "2", "3"], "score": [1.0] * 4, **flags}), path)
    assert [*read_names(f"{path}:near_copy")] == ["0"]
    assert [*read_names(f"{path}:near_copy,blank")] == ["0", "2"]
    with pytest.raises(ShardError, match=r"has flags, and lists images that are to stay.*parquet:near_copy,blank"):
        read_names(str(path))
    with pytest.raises(ShardError, match=r"no column `score`. Its flags are: near_copy, blank."):
        read_names(f"{path}:score")


def test_wrong_lists_are_refused(folders, tmp_path):
    whole, _, _ = folders
    sources = open_sources(whole)
    first = sources.lists[0].name(0)
    for content, message in (
        ("key\nother.tar/0\n", rf"No training image.*'other.tar/0'.*'{first}'"),
        ("name\nx\n", "has no column `key`"),
    ):
        (tmp_path / "list.csv").write_text(content)
        with pytest.raises(ShardError, match=message):
            without(sources, str(tmp_path / "list.csv"))
    for given, message in (
        ("missing.csv", "Cannot read missing.csv"),
        ("list.json", "does not end in"),
        ("list.csv:blank", "Only a .parquet has flags"),
    ):
        with pytest.raises(ShardError, match=message):
            without(sources, given)
    every = listed(tmp_path / "every.csv", [sources.lists[0].name(number) for number in range(sum(SIZES))])
    with pytest.raises(ShardError, match="names all images"):
        without(sources, every)


def test_rows_without_a_key_are_no_names(tmp_path):
    (tmp_path / "list.csv").write_text("label,key\n0,q/1.png\n1\n1,\n")
    assert list(read_names(str(tmp_path / "list.csv"))) == ["q/1.png"]


def test_a_list_without_names_leaves_nothing_out(folders, tmp_path):
    """Such a list is that of a search without findings."""
    sources = open_sources(folders[0])
    found, said = without(sources, listed(tmp_path / "list.csv", []))
    assert found.lists[0] is sources.lists[0]
    assert said == f"0 of {sum(SIZES)}, by {tmp_path / 'list.csv'}"


def test_a_name_of_two_images_is_refused_and_other_names_are_counted(folders, tmp_path):
    whole, clean, _ = folders
    both = open_sources({whole: 1, clean: 1})
    name = both.lists[1].name(0)
    with pytest.raises(ShardError, match="Rename one of these shards"):
        without(both, listed(tmp_path / "list.csv", [name]))
    twice = open_sources({whole: 1, f"{whole}/data-000000.tar": 1})
    found, said = without(twice, listed(tmp_path / "list.csv", [name, "val.tar/5"]))
    assert [one.images for one in found.lists] == [sum(SIZES) - 1, SIZES[0] - 1]
    assert said.startswith(f"2 of {sum(SIZES) + SIZES[0]}, by ")
    assert said.endswith("; 1 other names of the file are those of no training image")


def test_leaked_images_that_are_left_out_are_no_overlap(folders, tmp_path):
    """The images of --evaluation.val are compared with those that the run trains on."""
    whole, _, given = folders
    sources = open_sources(whole)
    gone = {*read_names(given)}
    (tmp_path / "val").mkdir()
    with tarfile.open(tmp_path / "val" / "held.tar", "w") as new:
        for path in sorted(Path(whole).glob("*.tar")):
            with tarfile.open(path) as old:
                for member in old:
                    if f"{path.name}/{member.name.partition('.')[0]}" in gone:
                        new.addfile(member, old.extractfile(member))
    val = open_shards(str(tmp_path / "val"))
    with pytest.raises(EvaluationError, match="is also in --data"):
        check_training_images(sources.lists, val, "--evaluation.val")
    check_training_images(without(sources, given)[0].lists, val, "--evaluation.val")
    flags = ["--data", whole, "--evaluation.val", str(tmp_path / "val"), "--encoder", "vit_micro", "--batch_size", "4"]
    form = SimpleNamespace(image_size=8, supervised=False)
    config, accelerator = load([*flags, "--data.exclude", given]), make_accelerator()
    online, _, _ = evaluations(config, form, prepare(config, accelerator), accelerator)
    assert online.train.images == sum(SIZES) - len(gone)  # the images to which k-NN compares
    config = load(flags)
    with pytest.raises(EvaluationError, match="is also in --"):
        evaluations(config, form, prepare(config, accelerator), accelerator)
    fewer = listed(tmp_path / "fewer.csv", sorted(gone)[1:])
    with pytest.raises(EvaluationError, match="is also in --data"):
        check_training_images(without(sources, fewer)[0].lists, val, "--evaluation.val")


def test_files_of_a_folder_are_no_overlap_if_they_are_left_out(animals, tmp_path):
    folder = Path(animals)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    (folder.parent / "val.csv").write_text("\n".join(["path", f"{folder.name}/{files[0]}"]) + "\n")
    val, sources = open_shards(str(folder.parent / "val.csv")), open_sources(str(folder))
    with pytest.raises(EvaluationError, match="is also in --data"):
        check_training_images(sources.lists, val, "--evaluation.val")
    found, _ = without(sources, listed(tmp_path / "list.csv", [f"{folder.name}/{files[0]}"]))
    check_training_images(found.lists, val, "--evaluation.val")


def test_images_stay_left_out_of_a_changed_source(tmp_path, write_shards):
    (path,) = write_shards([5])
    opened = open_shards(path, source=Access(keys=SampleKeys(labelled_only=True)))
    found, _ = without(Sources([opened], [1.0]), listed(tmp_path / "list.csv", [opened.name(2)]))
    changed = replace(found.lists[0], optional_labels=True).in_blocks(1)
    assert [changed.name(number) for number in range(4)] == [opened.name(number) for number in (0, 1, 3, 4)]


def test_make_shards_leaves_out_the_images(animals, tmp_path):
    folder = Path(animals)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    given = listed(tmp_path / "list.csv", [f"{folder.name}/{files[1]}"])
    make(folder, tmp_path / "shards", "--exclude", given)
    assert [files[1], "named by --exclude"] in rows(tmp_path / "shards" / "left_out.csv")
    make(folder, tmp_path / "every")
    assert len(samples(tmp_path / "shards")) == len(samples(tmp_path / "every")) - 1
    make(folder, tmp_path / "shards", status=2)  # these shards lack an image
    make(folder, tmp_path / "none", "--exclude", listed(tmp_path / "none.csv", ["other/0.jpg"]), status=2)
