"""Fuzz test of the shard reader with a hundred thousand damaged and hostile shards, images, indices and web servers.

    pip install -e ".[test]" && python benchmarks/fuzz.py

The library Hypothesis generates the test cases. In each case, the reader must return samples, or raise a ShardError or
an ImageError that names the file. If some images of a tar are damaged, the reader must return the other images
unchanged, and the counts must be correct. A case may take 5 s, and 256 MiB of memory in addition to the memory before
the case. Any other result of a case stops the run. Hypothesis then prints the smallest
case that it finds for this failure.
"""

import io
import logging
import os
import resource
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import Field
from rich.console import Console
from rich.progress import track

from tessera.data.crops import CenterCrop
from tessera.data.decode import ImageError, decode
from tessera.data.loader import LoaderConfig, Reading, evaluation_batches
from tessera.data.shards import ShardError, open_shards
from tessera.data.shards.index import FolderIndex, ShardEntry, parse_folder, parse_table
from tessera.data.shards.tar import scan_tar
from tessera.runtime.settings import Settings, parse

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmarks/fuzz.py` finds only modules of its own folder

from benchmarks.fuzz_hostile import answers, bounded, hostile_images, hostile_names

MOST_PIXELS = 2**20
CASES_PER_CHUNK = 1000  # number of cases between two updates of the progress bar
MEMORY = 2**31  # memory limit in bytes, in addition to the memory of the imported libraries
FIELDS = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "type": (156, 1), "link": (157, 100)}
"""Offset and size in bytes of some fields of a tar header."""


class FuzzBenchmark(Settings):
    """Fuzz test of the shard reader with damaged shards, images and indices."""

    cases: int = Field(default=100_000, ge=1)
    """total number of cases"""
    seed: int = Field(default=0, ge=0)
    """seed of the first thousand cases; every further thousand cases use the next larger seed"""
    output: Path | None = None
    """Markdown file for the result"""


def corpus() -> list[tuple[str, bytes]]:
    """Return valid images of all supported kinds, as pairs of file extension and file content."""
    colors = np.random.default_rng(0).integers(0, 256, (12, 20, 4), dtype=np.uint8)
    picture = Image.fromarray(colors).resize((40, 24), Image.Resampling.BICUBIC)
    turned = Image.Exif()
    turned[0x0112] = 6
    kinds: list[tuple[str, Image.Image, dict[str, Any]]] = [
        ("jpg", picture.convert("RGB"), {}),
        ("jpg", picture.convert("RGB"), {"progressive": True, "optimize": True}),
        ("jpg", picture.convert("RGB"), {"exif": turned}),
        ("jpg", picture.convert("L"), {}),
        ("jpg", picture.convert("CMYK"), {}),
        ("png", picture, {}),
        ("png", picture.convert("RGB").quantize(16), {"transparency": 3}),
        ("png", Image.fromarray(colors[..., 0].astype(np.uint16) * 257), {}),
        ("webp", picture, {"lossless": True}),
        ("webp", picture.convert("RGB"), {"save_all": True, "append_images": [picture.convert("RGB")]}),
    ]
    files = []
    for ending, image, options in kinds:
        file = io.BytesIO()
        image.save(file, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[ending], **options)
        files.append((ending, file.getvalue()))
    return files


CORPUS = corpus()
PIXELS = [decode(content) for _, content in CORPUS]

share = st.floats(0, 1)
extreme = st.sampled_from([b"\0", b"\xff", b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xd8\xff"])
damage = st.one_of(
    st.tuples(st.just("set"), share, st.binary(min_size=1, max_size=8) | extreme),
    st.tuples(st.just("insert"), share, st.binary(min_size=1, max_size=64) | extreme),
    st.tuples(st.just("cut"), share, st.integers(1, 200)),
    st.tuples(st.just("end"), share, st.none()),
    st.tuples(st.just("repeat"), share, st.integers(1, 600)),
)
sizes = st.sampled_from([b"77777777777", b"\x80" + b"\xff" * 11, b"00000000000", b"00000001000"])
types = st.sampled_from(
    [b"x", b"g", b"L", b"K", b"S", b"2", b"5", b"3"]
)  # type bytes of extended headers, sparse files, links and devices
names = st.sampled_from([b"../../a.jpg\0", b"/a.png\0", b"\0", b"sample0.jpg\0"])
header = st.one_of(
    st.tuples(st.integers(0, 9), st.sampled_from(sorted(FIELDS)), st.binary(min_size=1, max_size=12)),
    st.tuples(st.integers(0, 9), st.just("size"), sizes),
    st.tuples(st.integers(0, 9), st.just("type"), types),
    st.tuples(st.integers(0, 9), st.just("name"), names),
)


def damaged(content: bytes, changes: list[tuple[str, float, Any]]) -> bytes:
    """Return a damaged copy of a file. Each change overwrites, inserts, removes, repeats or cuts off bytes."""
    for kind, where, what in changes:
        place = int(where * len(content))
        if kind == "set":
            content = content[:place] + what + content[place + len(what) :]
        elif kind == "insert":
            content = content[:place] + what + content[place:]
        elif kind == "cut":
            content = content[:place] + content[place + what :]
        elif kind == "end":
            content = content[:place]
        else:
            content = content[: place + what] + content[place:]
    return content


def with_false_headers(tar: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    """Return a copy of a tar in which some header fields are overwritten and the header checksums are valid."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        headers = [member.offset for member in archive]
    raw = bytearray(tar)
    for number, field, value in changes:
        start = headers[number % len(headers)]
        place, size = FIELDS[field]
        raw[start + place : start + place + min(size, len(value))] = value[:size]
        raw[start + 148 : start + 156] = b" " * 8
        raw[start + 148 : start + 156] = b"%06o\0 " % sum(raw[start : start + 512])
    return bytes(raw)


def tar(files: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def members(kinds: list[int]) -> list[tuple[str, bytes]]:
    """Return names and contents for the files of a tar. The content of each file is the image `CORPUS[kind]`."""
    return [(f"sample{number}.{CORPUS[kind][0]}", CORPUS[kind][1]) for number, kind in enumerate(kinds)]


def images(folder: Path) -> Callable[..., None]:
    """Return a test case for valid tars in which some images are damaged."""

    @given(
        st.lists(st.tuples(st.integers(0, len(CORPUS) - 1), st.none() | st.lists(damage, min_size=1, max_size=3)),
                 min_size=1, max_size=6),
    )  # fmt: skip
    @bounded
    def case(samples: list[tuple[int, list | None]]) -> None:
        files = members([kind for kind, _ in samples])
        files = [
            (name, damaged(content, changes) if changes else content)
            for (name, content), (_, changes) in zip(files, samples, strict=True)
        ]
        path = folder / "images.tar"
        path.write_bytes(tar(files))
        keys = [f"images.tar/sample{number}" for number in range(len(samples))]
        delivered, skipped = [], []
        loader = evaluation_batches(
            str(path), CenterCrop(8), 4, labels=False, reading=Reading(loader=LoaderConfig(max_pixels=MOST_PIXELS))
        )
        assert loader.total == len(samples)
        for batch in loader:
            delivered += batch.keys
        reader = open_shards(str(path))
        for number, (kind, changes) in enumerate(samples):
            content = reader.image(number)
            assert content == files[number][1], "the bytes of another member"
            try:
                pixels = decode(content, max_pixels=MOST_PIXELS)
                assert changes or torch.equal(pixels, PIXELS[kind]), "a good image was changed"
            except ImageError:
                assert changes, "a good image was refused"
                skipped.append(keys[number])
        assert delivered == [key for key in keys if key not in skipped], "not exactly the good images were delivered"

    return case


def tars(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged tars and for tars with overwritten header fields."""

    @given(
        st.lists(st.integers(0, len(CORPUS) - 1), min_size=1, max_size=5),
        st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
        st.lists(header, max_size=2),
        st.lists(damage, max_size=2),
        st.booleans(),
    )
    @bounded
    def case(kinds: list[int], format: int, lies: list, changes: list, long: bool) -> None:
        files = [(("l" * 120 if long else "") + name, content) for name, content in members(kinds)]
        raw = damaged(with_false_headers(tar(files, format), lies), changes)
        path = folder / "tar.tar"
        path.write_bytes(raw)
        if not raw:
            return
        try:
            opened = open_shards(str(path), progress=False)
        except ShardError as error:
            refusal = str(error)
            opened = None
        else:
            refusal = ""
        if opened is None:
            assert str(path) in refusal, "the message does not name the shard"
            return
        for number in range(opened.images):
            try:
                decode(opened.image(number), max_pixels=MOST_PIXELS)
            except (ImageError, ShardError):
                continue
        if not lies and not changes:
            assert opened.images == len(kinds)

    return case


def indices(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged index files."""
    path = folder / "good.tar"
    path.write_bytes(tar(members([0, 5, 8])))
    buffer = io.BytesIO()
    np.savez(buffer, **scan_tar(str(path), "good.tar")._asdict())
    table = buffer.getvalue()
    entry = ShardEntry(url="good.tar", nsamples=3, filesize=path.stat().st_size, labelled=0)
    listing = FolderIndex(shardlist=[entry]).model_dump_json(by_alias=True).encode()

    @given(st.booleans(), st.lists(damage, max_size=3))
    @bounded
    def case(folder_index: bool, changes: list) -> None:
        try:
            if folder_index:
                parse_folder(damaged(listing, changes), "index.json")
            else:
                parse_table(damaged(table, changes), "good.tar.index")
        except ShardError:
            refused = True
        else:
            refused = False
        assert changes or not refused, "a good index was refused"

    return case


def answers_of_servers(folder: Path) -> Callable[..., None]:
    """Return a test case for wrong answers of a web server that holds a good shard with its index files."""
    path = folder / "a.tar"
    path.write_bytes(tar(members([0, 5, 8])))
    buffer = io.BytesIO()
    np.savez(buffer, **scan_tar(str(path), "a.tar")._asdict())
    entry = ShardEntry(url="a.tar", nsamples=3, filesize=path.stat().st_size, labelled=0)
    files = {
        "a.tar": path.read_bytes(),
        "a.tar.index": buffer.getvalue(),
        "index.json": FolderIndex(shardlist=[entry]).model_dump_json(by_alias=True, exclude_none=True).encode(),
    }
    return answers(files, [content for _, content in members([0, 5, 8])])(folder)


def fuzz(cases: int, first_seed: int, *, progress: bool = False) -> int:
    """Run about `cases` cases and return the exact number of cases.

    40 % of the cases have damaged images, 30 % damaged tars, 10 % damaged indices, 8 % hostile images, 8 % hostile
    names and numbers, and 4 % a web server with wrong answers.
    """
    hostile = {hostile_images(CORPUS[0][1]): 4, hostile_names: 4, answers_of_servers: 2}
    kinds = {images: 20, tars: 15, indices: 5} | hostile
    chunks = range(first_seed, first_seed + max(1, cases // CASES_PER_CHUNK))
    size = min(cases, CASES_PER_CHUNK)
    done = 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for chunk in track(chunks, "cases, in thousands", console=Console(stderr=True)) if progress else chunks:
            for kind, parts in kinds.items():
                run = settings(
                    max_examples=max(1, size * parts // sum(kinds.values())),
                    deadline=None,
                    database=None,
                    phases=[Phase.generate, Phase.shrink],
                    suppress_health_check=[*HealthCheck.__members__.values()],
                )
                seed(chunk)(run(kind(Path(folder))))()
                done += max(1, size * parts // sum(kinds.values()))
            for kept in (Path(folder) / "cache").rglob("*.npz"):
                kept.unlink()
    return done


def main(options: FuzzBenchmark) -> None:
    logging.disable(logging.WARNING)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TESSERA_CACHE"] = cache
        done = fuzz(options.cases, options.seed, progress=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    line = (
        f"{done:,} cases: only named errors, right counts, every good image beside a bad one delivered; "
        f"{time.monotonic() - start:,.0f} s, at most {peak:,.0f} MiB in memory"
    )
    print(line)
    if options.output:
        options.output.write_text(f"# Fuzzing\n\n`python benchmarks/fuzz.py --cases {options.cases}`\n\n{line}.\n")


if __name__ == "__main__":
    main(parse(FuzzBenchmark))
