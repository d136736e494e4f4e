"""Pages of files as samples (`data.pages`), in folders and in tars."""

import numpy as np
import pytest

from tessera.data.check_shards import main as check
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.data.decode import decode
from tessera.data.shards import Access, ShardError, open_shards
from tessera.data.shards.samples import SampleKeys
from tests.data.batches import saved, tiff, training_batches
from tests.data.made import make

RNG = np.random.default_rng(0)
STACKS = [RNG.integers(0, 255, (pages, 12, 16), dtype=np.uint8) for pages in (3, 1, 2, 4)]


@pytest.fixture
def folder(photos):
    """Two classes with files of 3 and 2, and of 1 and 4 pages."""
    stacks = [tiff(stack, photometric="minisblack", metadata=None) for stack in STACKS]
    return photos({f"{'ab'[number % 2]}/{number}.tif": stack for number, stack in enumerate(stacks)})


@pytest.fixture
def tar(folder, write_tar):
    files = sorted(folder.rglob("*.tif"))
    members = [(f"{path.stem}.tif", path.read_bytes()) for path in files]
    labels = [(f"{path.stem}.cls", b"%d" % (path.parent.name == "b")) for path in files]
    return write_tar("a.tar", sorted([*members, *labels]))


def opened(path, pages):
    return open_shards(str(path), source=Access(keys=SampleKeys(pages=pages)))


def pixels(source) -> list[list]:
    return [decode(source.image(number), channels=1)[0].tolist() for number in range(source.images)]


def test_every_page_is_a_sample(folder, tar):
    for path, order in ((folder, (0, 2, 1, 3)), (tar, (0, 1, 2, 3))):
        source = opened(path, "each")
        names = [f"{number}#{page}" for number in order for page in range(len(STACKS[number]))]
        assert [source.name(n).rpartition("/")[2].replace(".tif", "") for n in range(10)] == names
        assert pixels(source) == [page.tolist() for number in order for page in STACKS[number]]
        assert [source.label(n) for n in range(10)] == [number % 2 for number in order for _ in STACKS[number]]
        assert pixels(opened(path, "each")) == pixels(source)  # the index comes from the cache now


def test_the_first_page_or_the_maximum(folder, tar):
    for path, order in ((folder, (0, 2, 1, 3)), (tar, (0, 1, 2, 3))):
        assert pixels(opened(path, "first")) == [STACKS[number][0].tolist() for number in order]
        assert pixels(opened(path, "max")) == [STACKS[number].max(0).tolist() for number in order]


def test_a_run_of_pages_goes_on_where_it_stopped(folder):
    transform = RandomCrop(RandomCropConfig(size=8))
    source = Access(keys=SampleKeys(pages="each"))
    options = {"batch_size": 4, "seed": 0, "source": source, "classes": 2}
    whole = [*training_batches(str(folder), transform, steps=5, **options)]
    rest = training_batches(str(folder), transform, steps=5, first_step=3, **options)
    for one, other in zip(whole[3:], rest, strict=True):
        assert one.views[0].images.equal(other.views[0].images)
        assert one.labels.equal(other.labels)


def test_shards_of_stacks_are_made_and_checked(folder, tmp_path, capsys):
    make(folder, tmp_path / "out", "--shuffle", "false")
    shard = str(tmp_path / "out")
    assert opened(shard, "each").images == 10
    assert check([shard, "--workers", "1"]) == 1
    assert "with 3 pages" in capsys.readouterr().out
    assert check([shard, "--workers", "1", "--pages", "each"]) == 0
    assert "10" in capsys.readouterr().out


def test_files_of_one_image_have_one_page(photos):
    image = saved(np.zeros((9, 8, 3), np.uint8), "PNG")
    source = opened(photos({"a.png": image, "b.png": image[:50]}), "each")
    assert [source.name(number).rpartition("/")[2] for number in range(2)] == ["a.png#0", "b.png#0"]
    assert source.image(0) == image


def test_pages_are_refused_where_they_cannot_be_counted(folder):
    access = Access(keys=SampleKeys(pages="max"), stages=lambda sample, name: sample)
    with pytest.raises(ShardError, match="stages get complete files"):
        open_shards(str(folder), source=access)
