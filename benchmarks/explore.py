"""Findings of `tessera explore` against what was planted: copies, wrong labels, and perceptual hashes as a baseline.

    python benchmarks/explore.py copies SHARDS FOLDER      # FOLDER/copies.tar: 2,000 images and 200 copies of them
    python benchmarks/explore.py labels SHARDS FOLDER      # FOLDER/labels.tar: 2 % of the labels are wrong
    tessera explore ENCODER --data FOLDER/copies.tar --output FOUND
    python benchmarks/explore.py score FOLDER FOUND        # found and precision, from FOUND/findings.parquet
    python benchmarks/explore.py hashes FOLDER             # the same for hashes of imagehash
    python benchmarks/explore.py listed LISTS FOUND        # CIFAR-10's own copies, from FOUND/pairs.parquet
    python benchmarks/explore.py hashed LISTS DATA VAL     # the same for phash of imagehash, DATA and VAL are SHARDS
    python benchmarks/explore.py scale N FOLDER            # neighbours of N random features: CPU time, memory, recall

LISTS holds duplicates_cifar10.csv and duplicates_cifar10_test.csv of github.com/cvjena/cifair (folder `meta`), and
train.npy and test.npy: the labels of CIFAR-10 in its original order. The keys of the images are `test-deer-0921` for
the deer 921 of the test set in this order, counted from 0.

The copies are made with Pillow, independently of the copies that `tessera explore` plants to measure its recall.
"""

import io
import json
import resource
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
from accelerate import Accelerator
from PIL import Image, ImageEnhance, ImageOps

from tessera.data.shards import Source, open_shards
from tessera.extras.explore import neighbours

IMAGES, COPIES, WRONG = 2000, 200, 0.02
KINDS = ("re-encoded", "mirrored", "cropped", "recoloured")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
JUDGMENTS = ("exact", "near-duplicate", "very similar")
"""Kinds of listed pairs, in the order of the list's numbers."""
BITS = (4, 6, 8, 10)
Row = tuple[str, bytes, int]


def copy_of(image: Image.Image, kind: str, rng: np.random.Generator) -> bytes:
    """Return a changed copy of an image as a JPEG."""
    quality = 75
    if kind == "re-encoded":
        quality = int(rng.integers(25, 60))
        image = image.resize((image.width * 3 // 4, image.height * 3 // 4), Image.Resampling.LANCZOS)
    elif kind == "mirrored":
        image = ImageOps.mirror(image)
    elif kind == "cropped":
        part = rng.uniform(0.7, 0.9) ** 0.5
        width, height = int(image.width * part), int(image.height * part)
        left, top = (int(rng.integers(0, most + 1)) for most in (image.width - width, image.height - height))
        image = image.crop((left, top, left + width, top + height))
    else:
        for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            image = enhance(image).enhance(float(rng.uniform(0.6, 1.4)))
        balance = np.asarray(image) * rng.uniform(0.8, 1.2, 3)
        image = Image.fromarray(balance.clip(0, 255).astype(np.uint8))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def read(shards: str, images: int | None, rng: np.random.Generator) -> list[Row]:
    """Return name, encoded image and label of some images, or of all."""
    opened = open_shards(shards)
    chosen = np.arange(opened.images) if images is None else rng.choice(opened.images, images, replace=False)
    return [(f"image{n:05d}", stored(opened, int(n)), opened.label(int(n))) for n in chosen]


def stored(opened: Source, number: int) -> bytes:
    """Return an encoded image."""
    image = opened.image(number)
    assert isinstance(image, bytes)
    return image


def write(path: Path, rows: list[Row], truth: dict[str, tuple[str, str]]) -> None:
    """Write a shard, and what was planted in it: name of an image -> name of its original or its label, and kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, image, label in rows:
            for ending, content in (("jpg", image), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    path.with_suffix(".json").write_text(json.dumps(truth))


def copies(shards: str, folder: Path) -> None:
    """Plant `COPIES` copies in `IMAGES` images."""
    rng = np.random.default_rng(0)
    rows, truth = read(shards, IMAGES, rng), {}
    for number, original in enumerate(rng.choice(IMAGES, COPIES, replace=False)):
        kind, (name, image, label) = KINDS[number * len(KINDS) // COPIES], rows[original]
        changed = copy_of(Image.open(io.BytesIO(image)).convert("RGB"), kind, rng)
        rows.append((f"copy{number:03d}", changed, label))
        truth[rows[-1][0]] = (name, kind)
    write(folder / "copies.tar", [rows[n] for n in rng.permutation(len(rows))], truth)


def labels(shards: str, folder: Path) -> None:
    """Give `WRONG` of all images the label of another class."""
    rng = np.random.default_rng(0)
    rows, truth = read(shards, None, rng), {}
    classes = 1 + max(label for *_, label in rows)
    for n in rng.choice(len(rows), round(WRONG * len(rows)), replace=False):
        name, image, label = rows[n]
        rows[n] = (name, image, int(label + rng.integers(1, classes)) % classes)
        truth[name] = (str(label), "wrong label")
    write(folder / "labels.tar", rows, truth)


def stem(key: str) -> str:
    return key.rpartition("/")[2]


def score(folder: Path, found: Path) -> None:
    """Print how much of what was planted is found, and the precision."""
    images = pandas.read_parquet(found / "findings.parquet")
    if "copy" in "".join(images["key"].map(stem)):
        pairs = pandas.read_parquet(found / "pairs.parquet")
        score_pairs([*zip(pairs["key"].map(stem), pairs["other_key"].map(stem), strict=True)], folder)
        print("recall by the command:", json.loads((found / "findings.json").read_text())["recall"])
        return
    truth = json.loads((folder / "labels.json").read_text())
    wrong = np.array([stem(key) in truth for key in images["key"]])
    flagged, doubt = images["label_doubt"].to_numpy(bool), images["label_doubt_score"].to_numpy(float)
    hits = (flagged & wrong).sum()
    print(f"wrong labels: {hits} of {wrong.sum()} found, {hits / max(flagged.sum(), 1):.1%} of {flagged.sum()} flagged")
    print(f"among the {wrong.sum()} largest scores: {wrong[np.argsort(-doubt, kind='stable')[: wrong.sum()]].sum()}")


def score_pairs(pairs: list[tuple[str, str]], folder: Path) -> None:
    """Print how many planted copies are among the pairs, the most similar pairs first."""
    truth = json.loads((folder / "copies.json").read_text())
    planted = {frozenset((copy, original)): kind for copy, (original, kind) in truth.items()}
    for name, some in ((f"the first {COPIES}", pairs[:COPIES]), ("all", pairs)):
        kinds = Counter(planted[frozenset(pair)] for pair in some if frozenset(pair) in planted)
        hits = sum(kinds.values())
        of_kinds = ", ".join(f"{kind} {kinds[kind]}" for kind in KINDS)
        print(f"{name} of {len(pairs)} pairs: {hits} found ({of_kinds}), precision {hits / max(len(some), 1):.1%}")


def hashes(folder: Path) -> None:
    """Print the same for hashes of imagehash: all pairs of at most the usual number of different bits."""
    import imagehash  # pyright: ignore[reportMissingImports] - only this benchmark needs it

    opened = open_shards(str(folder / "copies.tar"))
    read = [Image.open(io.BytesIO(stored(opened, n))) for n in range(opened.images)]
    names = [stem(opened.name(n)) for n in range(opened.images)]
    for name, most in (("phash", 10), ("dhash", 10), ("whash", 10)):
        bits = np.stack([getattr(imagehash, name)(image).hash.flatten() for image in read]).astype(np.int32)
        different = bits @ (1 - bits).T + (1 - bits) @ bits.T
        row, column = np.nonzero(np.triu(different <= most, 1))
        order = np.argsort(different[row, column], kind="stable")
        print(name, f"at most {most} bits:")
        score_pairs([(names[row[n]], names[column[n]]) for n in order], folder)


def listed_pairs(lists: Path) -> dict[frozenset[str], str]:
    """Return the listed pairs of keys, and their kind."""
    names = {}
    for split in ("train", "test"):
        labels = np.load(lists / f"{split}.npy")
        rank = np.zeros(len(labels), int)
        for one in range(len(CLASSES)):
            rank[labels == one] = np.arange((labels == one).sum())
        names[split] = [f"{split}-{CLASSES[label]}-{n:04d}" for label, n in zip(labels, rank, strict=True)]
    found = {}
    for split, file in (("train", "duplicates_cifar10.csv"), ("test", "duplicates_cifar10_test.csv")):
        table = pandas.read_csv(lists / file)
        for test, other, judgment in zip(table["TestID"], table["TrainID"], table["Judgment"], strict=True):
            found[frozenset((names["test"][test], names[split][other]))] = f"{split}, {JUDGMENTS[judgment]}"
    return found


def score_listed(lists: Path, pairs: list[tuple[str, str]]) -> None:
    """Print how many listed pairs are found, and how many of the found pairs are listed. The best pairs come first."""
    listed, found = listed_pairs(lists), [frozenset(pair) for pair in pairs]
    for split in ("train", "test"):
        of_split = [pair for pair in found if {key.partition("-")[0] for key in pair} == {"test", split}]
        for kind in JUDGMENTS:
            truth = {pair for pair, of in listed.items() if of == f"{split}, {kind}"}
            if truth:
                print(
                    f"test and {split}, {kind}: {len(truth.intersection(of_split))} of {len(truth)} listed pairs found"
                )
        count = sum(name.startswith(split) for name in listed.values())
        for name, some in (("all", of_split), (f"the first {count}", of_split[:count])):
            right = sum(pair in listed for pair in some)
            print(
                f"{name} of {len(of_split)} pairs of test and {split}: {right} listed, {right / max(len(some), 1):.1%}"
            )


def listed(lists: Path, found: Path) -> None:
    """Print the score of the pairs of the command, and its k-NN accuracies."""
    pairs = pandas.read_parquet(found / "pairs.parquet")
    score_listed(lists, [*zip(pairs["key"].map(stem), pairs["other_key"].map(stem), strict=True)])
    notes = json.loads((found / "findings.json").read_text())
    print({name: notes[name] for name in ("knn", "recall", "expected_false_images", "pairs")})


def hashed(lists: Path, data: Path, val: Path) -> None:
    """Print the score of phash: all pairs with a test image of at most the given number of different bits."""
    import imagehash  # pyright: ignore[reportMissingImports] - only this benchmark needs it

    names, hashes = [], []
    for shards in (val, data):
        opened = open_shards(str(shards))
        names += [stem(opened.name(n)) for n in range(opened.images)]
        read = (Image.open(io.BytesIO(stored(opened, n))) for n in range(opened.images))
        hashes += [imagehash.phash(image).hash.flatten() for image in read]
    bits = np.stack(hashes).astype(np.float32)
    test = sum(name.startswith("test") for name in names)
    different = np.concatenate([one @ (1 - bits).T + (1 - one) @ bits.T for one in np.array_split(bits[:test], 50)])
    row, column = np.nonzero((different <= max(BITS)) & (np.arange(len(bits)) > np.arange(test)[:, None]))
    order = np.argsort(different[row, column], kind="stable")
    for most in BITS:
        chosen = [n for n in order if different[row[n], column[n]] <= most]
        print(f"phash, at most {most} bits:")
        score_listed(lists, [(names[row[n]], names[column[n]]) for n in chosen])


def scale(count: str, folder: Path) -> None:
    """Print the cost of the search among random features of width 384 in clusters of 50 (cosine 0.5 in a cluster)."""
    images, rng = int(count), np.random.default_rng(0)
    folder.mkdir(parents=True)  # in an old folder, the search would take over blocks and cost less
    features = np.lib.format.open_memmap(folder / "features.npy", "w+", np.float32, (images, 384))
    for start in range(0, images, 50_000):
        part = min(50_000, images - start)
        centres = rng.standard_normal((-(-part // 50), 384), np.float32).repeat(50, 0)[:part]
        both = centres + rng.standard_normal((part, 384), np.float32)
        features[start : start + part] = both / np.linalg.norm(both, axis=1, keepdims=True)
    features.flush()
    before = time.process_time()
    _, number = neighbours.search(features, 10, folder, Accelerator(cpu=True))
    seconds, peak = time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    recall = neighbours.recall(features, number)
    print(f"{images:,} features: {seconds:.0f} s of CPU time, {peak:.1f} GiB at the peak, recall {recall:.1%}")


STEPS: dict[str, Callable[..., None]] = {
    step.__name__: step for step in (copies, labels, score, hashes, listed, hashed, scale)
}
TEXTS = ("copies", "labels", "scale")
"""Steps whose first argument is no path."""

if __name__ == "__main__":
    step, *given = sys.argv[1:]
    STEPS[step](*[value if step in TEXTS and n == 0 else Path(value) for n, value in enumerate(given)])
