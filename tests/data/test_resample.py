"""Crops cut on a device, for a batch at once, against those that are cut one by one on the CPU, and against Pillow."""

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, CropParameters, largest_shrink
from tessera.data.collate import RawBuilder
from tessera.data.crops import CenterCrop, MultiCrop, MultiCropConfig, NativeCrop, RandomCrop, RandomCropConfig
from tessera.data.dataset import decode_sample
from tessera.data.decode import Picture
from tessera.data.loader import LoaderConfig
from tessera.data.masking import MaskedCrop
from tessera.data.resample import cut, cut_views, resample, weights
from tests.data.batches import build, collated, pixels, training_batches

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "imagenet-sample"
SIZES = [(1, 1), (1, 50), (70, 1), (9, 300), (300, 9), (64, 64), (120, 90), (411, 333), (500, 375), (2, 3), (700, 40)]
SMALL = MultiCrop(MultiCropConfig(global_size=32, local_size=16, local_crops=3))

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """(H, W, 3) uint8: noise with sharp edges, black and white among it."""
    coarse = rng(seed).integers(-80, 336, (height // 4 + 1, width // 4 + 1, 3)).clip(0, 255).astype(np.uint8)
    fine = coarse.repeat(4, 0).repeat(4, 1)[:height, :width]
    fine[::5] = rng(seed + 1).integers(0, 256, fine[::5].shape, dtype=np.uint8)
    return fine


def memory(images: list[np.ndarray]) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Their pixels, starts and sizes."""
    lengths = np.array([image.size for image in images])
    pixels = torch.from_numpy(np.concatenate([image.ravel() for image in images]))
    return pixels, np.cumsum(lengths) - lengths, np.array([image.shape[:2] for image in images])


def random_boxes(sizes: np.ndarray, n: int, source: np.random.Generator) -> np.ndarray:
    """(n * B, 4), of one pixel up to the whole image."""
    whole = np.tile(sizes, (n, 1))
    sides = np.clip(np.rint(whole * source.random(whole.shape) ** 2), 1, whole).astype(np.int64)
    sides[: len(sizes)] = whole[: len(sizes)]
    corners = np.floor(source.random(whole.shape) * (whole - sides + 1)).astype(np.int64)
    return np.concatenate([corners, sides], axis=1)


def one_by_one(images: list[np.ndarray], crops: CropParameters) -> torch.Tensor:
    """(N, 3, S, T)."""
    out = torch.empty((len(crops.boxes), *crops.size, 3), dtype=torch.uint8)
    for number, (box, flip) in enumerate(zip(crops.boxes, crops.flips, strict=True)):
        turn = None if crops.degrees is None else crops.degrees[number : number + 1]
        image = torch.from_numpy(images[number % len(images)]).permute(2, 0, 1)
        cut(image, CropParameters(box[None], crops.size, flip[None], turn), out[number : number + 1])
    return out.permute(0, 3, 1, 2)


@pytest.mark.medium
@pytest.mark.parametrize("size", [(224, 224), (96, 96), (16, 16), (1, 1), (8, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_crops_of_a_batch_are_those_that_are_cut_one_by_one(size, seed):
    images = [picture(*shape, seed) for shape in SIZES]
    pixels, starts, sizes = memory(images)
    boxes = random_boxes(sizes, 12, rng(seed))
    crops = CropParameters(boxes, size, rng(seed).random(len(boxes)) < 0.5)
    found = resample(pixels, starts, sizes, crops)
    difference = (found.int() - one_by_one(images, crops).int()).abs()
    assert found.dtype == torch.uint8
    assert difference.max() <= 1
    assert difference.float().mean() < 1e-4


def test_crops_have_pillows_pixels():
    """Oracle: rows first, then columns, which Pillow itself does in either order."""
    images = [picture(*shape) for shape in SIZES]
    pixels, starts, sizes = memory(images)
    crops = CropParameters(random_boxes(sizes, 6, rng(7)), (48, 40), np.zeros(6 * len(SIZES), bool))
    found = resample(pixels, starts, sizes, crops)
    for number, (crop, (top, left, h, w)) in enumerate(zip(found, crops.boxes, strict=True)):
        box = Image.fromarray(images[number % len(images)][top : top + h, left : left + w])
        expected = box.resize((40, int(h)), Image.Resampling.BICUBIC).resize((40, 48), Image.Resampling.BICUBIC)
        difference = (crop.int() - torch.from_numpy(np.array(expected)).permute(2, 0, 1).int()).abs()
        assert difference.max() <= 2
        assert difference.float().mean() < 0.02


def test_a_weight_is_that_of_the_cubic_in_float64():
    for length, size in ((7, 7), (50, 20), (3, 20), (1, 4), (1000, 3)):
        scale = length / size
        expected = np.zeros((size, length))
        for i in range(size):
            t = np.abs(np.arange(length) + 0.5 - (i + 0.5) * scale) / max(scale, 1)
            near, far = 1.5 * t**3 - 2.5 * t**2 + 1, -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2
            expected[i] = np.where(t < 1, near, np.where(t < 2, far, 0))
        expected /= expected.sum(1, keepdims=True)
        found = weights(torch.tensor([[length]]), size, length + 5)[0]
        np.testing.assert_allclose(found[:, :length].numpy(), expected, atol=2**-14)
        assert (found[:, length:] == 0).all()
        mirrored = weights(torch.tensor([[length]]), size, length, torch.tensor([[True]]))[0]
        assert torch.equal(mirrored, found[:, :length].flip(0))


@pytest.mark.parametrize("chunk", [1, 5_000, 200_000])
def test_the_size_of_a_chunk_changes_nothing_and_bounds_what_is_gathered(chunk, monkeypatch):
    images = [picture(*shape) for shape in SIZES]
    pixels, starts, sizes = memory(images)
    crops = CropParameters(random_boxes(sizes, 4, rng(1)), (16, 24), rng(1).random(4 * len(SIZES)) < 0.5)
    expected = resample(pixels, starts, sizes, crops)
    gathered = []
    plain = torch.Tensor.float

    def float_(self):
        gathered.append(self.numel() // 3)
        return plain(self)

    monkeypatch.setattr(torch.Tensor, "float", lambda self: float_(self) if self.dtype == torch.uint8 else plain(self))
    assert torch.equal(resample(pixels, starts, sizes, crops, chunk=chunk), expected)
    assert max(gathered) <= max(chunk, 375)  # or one row of one crop


def test_crops_are_turned_as_on_the_cpu():
    images = [picture(*shape) for shape in SIZES]
    pixels, starts, sizes = memory(images)
    n = 3 * len(SIZES)
    crops = CropParameters(random_boxes(sizes, 3, rng(2)), (32, 32), rng(2).random(n) < 0.5, rng(3).uniform(-30, 30, n))
    difference = (resample(pixels, starts, sizes, crops).int() - one_by_one(images, crops).int()).abs()
    assert difference.max() <= 2  # of one level before the turn
    assert difference.float().mean() < 1e-3


def encoded(image: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = BytesIO()
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()


def whole(files: list[bytes], transform) -> Batch:
    together = RawBuilder()
    for number, file in enumerate(files):
        picture = Picture(file)
        sample = decode_sample("", picture, transform.draw(picture.size, rng(number)))
        together.add(sample.image, sample.views)
    return build(together, [f"a.tar/{number}" for number in range(len(files))])


def test_the_device_is_never_waited_for():
    """The meta device has no values: reading one raises."""
    transform = MultiCrop(MultiCropConfig(global_size=32, local_size=16, local_crops=3, rotation=10.0))
    batch = whole([encoded(picture(*shape)) for shape in SIZES], transform).to("meta")
    done = cut_views(batch)
    assert [view.shape for view in pixels(done)] == [(22, 3, 32, 32), (33, 3, 16, 16)]
    assert done.raw is None
    assert all(view.device.type == "meta" for view in pixels(to_model_input(batch)))


@pytest.mark.parametrize(
    "transform",
    [SMALL, MaskedCrop(RandomCrop(RandomCropConfig(size=32)), 8, "block", 0.5)],
    ids=["dino", "mae"],
)
def test_a_method_sees_the_same_batch_whoever_cuts(transform):
    images = [picture(*shape) for shape in SIZES]
    files = [encoded(image) for image in images]
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    rngs = [rng(number) for number in range(len(files))]
    expected = to_model_input(collated(transform, tensors, rngs, [f"a.tar/{number}" for number in range(len(files))]))
    done = to_model_input(whole(files, transform))
    assert done.keys == expected.keys
    assert [view.crops for view in done.views] == [view.crops for view in expected.views]
    assert all(view.color is None and view.boxes is None for view in done.views)
    assert len(done) == len(files)
    for view, other in zip(pixels(done), pixels(expected), strict=True):
        assert view.dtype == torch.float32
        assert view.is_contiguous()
        difference = (view - other).abs() * 0.225 * 255  # in grey levels, of which colours can make some of one
        assert difference.mean() < 1e-2
        assert difference.max() < 8
    for view, other in zip(done.views, expected.views, strict=True):
        assert len(view.masks) == len(other.masks) == isinstance(transform, MaskedCrop)
        assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(view.masks, other.masks, strict=True))


@pytest.mark.skipif(not SHARED.exists(), reason="the shared real images are not on this machine")
def test_real_images_through_the_loader():
    transform = MultiCrop(MultiCropConfig(jitter=0, grayscale=0, blur_global1=0, blur_global2=0, blur_local=0))
    found = []
    for crops in ("workers", "device"):
        loader = training_batches(
            str(SHARED / "imagenet-sample-000000.tar"), transform, batch_size=16, seed=0, steps=3, workers=1,
            config=LoaderConfig(crops=crops),
        )  # fmt: skip
        found.append([to_model_input(batch) for batch in loader])
    for one, other in zip(*found, strict=True):
        assert one.keys == other.keys
        for view, expected in zip(pixels(one), pixels(other), strict=True):
            assert ((view - expected).abs() * 0.229 * 255).max() < 1.05


def test_who_can_cut_what():
    native = NativeCrop(RandomCropConfig(size=32), 8, 16, 64)
    assert LoaderConfig(crops="device").resolved(SMALL).crops == "device"
    for transform in (native, MaskedCrop(native, 8, "random", 0.5), CenterCrop(32)):
        assert LoaderConfig().resolved(transform).crops == "workers"
        with pytest.raises(ValueError, match=r"cannot cut the crops of this transform\. Set loader\.crops to auto"):
            LoaderConfig(crops="device").resolved(transform)
    if not torch.cuda.is_available():
        assert LoaderConfig().resolved(SMALL).crops == "workers"


@pytest.mark.parametrize(("cores", "expected"), [(7, "device"), (8, "workers")])
def test_a_gpu_cuts_where_cores_are_few(monkeypatch, cores, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("tessera.data.loader.free_cores", lambda _: cores)
    assert LoaderConfig().resolved(SMALL).crops == expected
    assert LoaderConfig().resolved(CenterCrop(32)).crops == "workers"


def test_images_are_decoded_by_workers_only():
    """config.yaml of older runs holds `decode: cpu`."""
    assert LoaderConfig.model_validate({"decode": "cpu", "crops": "workers"}) == LoaderConfig(crops="workers")
    with pytest.raises(ValueError, match=r"Remove the setting loader\.decode"):
        LoaderConfig.model_validate({"decode": "device"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_cuts_what_a_cpu_does():
    images = [picture(*shape) for shape in SIZES]
    for kind in ("PNG", "JPEG"):
        files = [encoded(image, kind) for image in images]
        on_gpu = cut_views(whole(files, SMALL).pin_memory().to("cuda", non_blocking=True))
        for view, other in zip(pixels(on_gpu), pixels(cut_views(whole(files, SMALL))), strict=True):
            assert (view.cpu().int() - other.int()).abs().max() <= 1


@pytest.mark.skipif(not SHARED.exists(), reason="the shared real images are not on this machine")
def test_real_images_at_a_fraction_of_their_size():
    """Made as large as a camera's: what is left of their noise differs a little."""
    with tarfile.open(SHARED / "imagenet-sample-000000.tar") as shard:
        names = [name for name in shard.getnames() if name.endswith(".jpg")][:4]
        files = [shard.extractfile(name).read() for name in names]
    for number, file in enumerate(files):
        large = Image.open(BytesIO(file)).convert("RGB").resize((2000, 1500), Image.Resampling.BICUBIC)
        picture = Picture(encoded(np.asarray(large), "JPEG", quality=90))
        transform = RandomCrop(RandomCropConfig(size=96, scale=(0.4, 1.0)))
        drawn = transform.draw(picture.size, rng(number))
        assert picture.fraction(largest_shrink(drawn, picture.size)) == 8
        together = RawBuilder()
        sample = decode_sample("", picture, drawn)
        together.add(sample.image, sample.views)
        (small,) = pixels(cut_views(build(together, [""])))
        (full,) = pixels(collated(transform, [picture.pixels()], [rng(number)]))
        assert (small.int() - full.int()).abs().float().mean() < 8
