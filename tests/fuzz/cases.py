"""Generated cases of damage, run by Hypothesis with limits of time and memory.

`FUZZ_ROUNDS=50 pytest tests/fuzz --slow` runs fifty times as many cases, with other seeds.
"""

import functools
import io
import os
import resource
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from PIL import Image

MOST_SECONDS = 5.0
"""Processor time of a case. It is not the time on the clock, because other jobs may have the cores."""
MOST_BYTES = 2**28
"""Memory of a case, in addition to the memory before the case."""


def seeds(count: int) -> range:
    """Return the seeds of a test: `count` of them in each round."""
    return range(1000, 1000 + count * int(os.environ.get("FUZZ_ROUNDS", "1")))


def run(case: Callable[..., None], cases: int, seed: int) -> None:
    """Run generated cases of a test made by `hypothesis.given`, which prints the smallest case that fails."""
    phases = [Phase.generate, Phase.shrink]
    options: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    chosen = hypothesis.settings(max_examples=cases, phases=phases, **options)
    hypothesis.seed(seed)(chosen(case))()


def bounded(case: Callable[..., None]) -> Callable[..., None]:
    """Return a test case that also fails if it needs more than `MOST_SECONDS` or `MOST_BYTES`."""

    @functools.wraps(case)
    def limited(*args: Any, **kwargs: Any) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        peak, held, start = status("VmHWM"), status("VmRSS"), time.process_time()
        case(*args, **kwargs)
        spent = time.process_time() - start
        assert spent <= MOST_SECONDS, f"the case took {spent:.1f} s"
        taken = status("VmHWM")
        assert taken <= max(peak, held + MOST_BYTES), f"the case took {(taken - held) / 2**20:.0f} MiB"

    return limited


def status(field: str) -> int:
    """Return a size in bytes from the status of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@contextmanager
def limited_addresses(size: int) -> Iterator[None]:
    """Let the address space of the process grow by at most `size` bytes, so that a request for much more fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


share = st.floats(0, 1)
_extreme = [b"\0", b"\xff", b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xd8\xff"]
damage = st.one_of(
    st.tuples(st.just("set"), share, st.binary(min_size=1, max_size=8) | st.sampled_from(_extreme)),
    st.tuples(st.just("insert"), share, st.binary(min_size=1, max_size=64) | st.sampled_from(_extreme)),
    st.tuples(st.just("cut"), share, st.integers(1, 200)),
    st.tuples(st.just("end"), share, st.none()),
    st.tuples(st.just("repeat"), share, st.integers(1, 600)),
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


def _corpus() -> list[tuple[str, bytes]]:
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


CORPUS = _corpus()
"""Valid images of all supported kinds, as pairs of file extension and file content."""


def members(kinds: list[int]) -> list[tuple[str, bytes]]:
    """Return names and contents for the files of a tar. The content of each file is the image `CORPUS[kind]`."""
    return [(f"sample{number}.{CORPUS[kind][0]}", CORPUS[kind][1]) for number, kind in enumerate(kinds)]


def tar(files: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar of some files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()
