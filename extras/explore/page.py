"""The page of `tessera explore`: a map of all images, in files that a browser opens without a server or a network."""

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.extras.explore.findings import Findings
from tessera.extras.explore.thumbnails import Thumbnails

PACK = 256
"""Thumbnails in one script. The browser loads a script at the first pointer over one of its images."""
NEIGHBOURS = 15
"""Neighbours of an image that UMAP keeps close (its default)."""
SEED = 0


def write_page(findings: Findings, thumbnails: Sequence[bytes] | Thumbnails, output: Path) -> Path:
    """Write the page into a folder. Return the path of the HTML file.

    A browser loads no modules and no other data from a file, but it loads scripts. So all data is in scripts:
    `page/data.js` has the findings, and `page/thumbnails/` has the thumbnails, 256 in each file. Neighbours on the map
    are in the same file.

    Args:
        findings: what is known of the images.
        thumbnails: JPEG of each image, in the order of `findings.keys`. Without a picture, the entry is empty.
        output: folder of the page. Files of an older page are replaced.
    """
    assets = output / "page"
    if assets.exists():
        shutil.rmtree(assets)
    (assets / "thumbnails").mkdir(parents=True)
    here = Path(__file__).parent
    for name in ("page.js", "page.css", "scatterplot.min.js"):
        shutil.copyfile(here / name, assets / name)
    points = project(findings.features)
    order = along_map(points)
    (assets / "data.js").write_text(f"window.EXPLORE = {json.dumps(page_data(findings, points, order))};\n")
    for pack, start in enumerate(range(0, len(order), PACK)):
        pictures = [base64.b64encode(thumbnails[image]).decode() for image in order[start : start + PACK].tolist()]
        (assets / "thumbnails" / f"{pack}.js").write_text(f"thumbnails_loaded({pack}, {json.dumps(pictures)});\n")
    shutil.copyfile(here / "page.html", output / "index.html")
    return output / "index.html"


def page_data(findings: Findings, points: NDArray[np.float32], order: NDArray[np.int64]) -> dict[str, Any]:
    """Return the content of `data.js`. Arrays are little-endian and in base64.

    Args:
        findings: what is known of the images.
        points: (N, 2) places on the map, from -1 to 1.
        order: (N,) images in the order of the thumbnails.
    """
    slots = np.empty(len(order), np.int64)
    slots[order] = np.arange(len(order))
    classes = int(findings.labels.max(initial=-1)) + 1
    return {
        "title": "Map of the images",
        "keys": findings.keys,
        "x": _base64(points[:, 0], "<f4"),
        "y": _base64(points[:, 1], "<f4"),
        "slots": _base64(slots, "<u4"),
        "pack": PACK,
        "sets": _base64(findings.sets, "u1"),
        "labels": _base64(findings.labels, "<i4"),
        "class_names": findings.class_names or [f"class {number}" for number in range(classes)],
        "cluster": _base64(findings.cluster, "<i4"),
        "medoids": findings.medoids.tolist(),
        "scores": {name: _base64(score, "<f4") for name, score in findings.scores.items()},
        "flags": {name: _base64(np.flatnonzero(flag), "<u4") for name, flag in findings.flags.items()},
        "pairs": {
            "i": _base64(findings.pairs[:, 0], "<u4"),
            "j": _base64(findings.pairs[:, 1], "<u4"),
            "similarity": _base64(findings.pair_similarity, "<f4"),
            "margin": _base64(findings.pair_margin, "<f4"),
            "kind": _base64(findings.pair_kind, "u1"),
        },
        "notes": list(_flat(findings.notes)),
    }


def project(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return places on the map, shape (N, 2), from -1 to 1. UMAP makes them.

    The same features give the same map. Up to 16 images are placed by their principal components, because UMAP needs
    more images than neighbours.

    Args:
        features: (N, D), normalised to length 1.
    """
    features = np.ascontiguousarray(features, np.float32)
    if len(features) <= NEIGHBOURS + 1:
        points = _principal(features)
    else:
        import umap  # numba compiles parts of it at import

        points = umap.UMAP(
            n_neighbors=NEIGHBOURS, init=_principal(features) * 10, random_state=SEED, n_jobs=1
        ).fit_transform(features)
    low, high = points.min(0), points.max(0)
    scale = max(float((high - low).max()) / 2, np.finfo(np.float32).tiny)
    return ((points - (low + high) / 2) / scale).astype(np.float32)


def along_map(points: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the images along a Z-order curve over the map, so that images with close numbers are close on the map."""
    cells = np.clip((points + 1) * 2**15, 0, 2**16 - 1).astype(np.uint32)
    code = np.zeros(len(points), np.uint64)
    for bit in range(16):
        for axis in range(2):
            code |= ((cells[:, axis] >> bit) & 1).astype(np.uint64) << np.uint64(2 * bit + axis)
    return np.argsort(code, kind="stable")


def _principal(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the two first principal components, shape (N, 2), with a largest absolute value of 1."""
    centred = features - features.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    points = centred @ vectors[:, :-3:-1]
    points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    return (points / max(np.abs(points).max(), np.finfo(np.float32).tiny)).astype(np.float32)


def _base64(values: Any, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def _flat(notes: Mapping[str, Any], before: str = "") -> Any:
    """Yield (name, value) of a nested dictionary. A value is a number or a text."""
    for name, value in notes.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name} ")
        else:
            number = value.item() if isinstance(value, np.generic) else value
            yield f"{before}{name}", number if isinstance(number, int | float) and np.isfinite(number) else str(number)
