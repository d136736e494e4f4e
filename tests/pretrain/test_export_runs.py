"""Run folders of all methods and families, opened by the libraries of the formats, from a photograph.

The harness is that of the table in benchmarks/results/exports.md.
"""

import re
from pathlib import Path

import exports
import pytest
from tessera_ijepa import IJEPA

from tessera.encoders.errors import EncoderError, WeightsError
from tessera.pretrain.methods import METHODS
from tests.teachers import small_teacher

NAMES = [*METHODS, "ijepa"]
PAIRS = {f"{method} of {family}": (i, j) for j, family in enumerate(exports.RUNS) for i, method in enumerate(NAMES)}
TRIED = [name for name, indices in PAIRS.items() if len(exports.cases(*indices)) > 2]
"""Pairs that also export a graph. They cover all methods and families; the table has the other pairs, too."""
OFTEN = ("dinov3 of RoPE-ViT",)
"""Pairs that are tested without `--slow`."""
CLOSE = 1e-2
"""Largest difference of features, as a fraction of the largest. Pillow and torch round 0.4 % of the pixels apart."""
REFUSALS = {
    ("timm", "Swin"): r"need padding to fill windows",
    ("timm", "Twins-SVT"): r"need padding",
    ("timm", "NaViT"): r"timm has no NaViT",
    ("transformers", "ViT"): r"no layer scale",
    ("transformers", "ViT of DINOv2"): r"pool is not the class token",
    ("transformers", "RoPE-ViT"): r"pool is not the class token",
    ("transformers", ""): r"transformers has no equivalent of",
}
"""Refusals that docs/encoders.md lists, by format and family. The empty name stands for all other families."""


@pytest.mark.parametrize(
    "pair", [pytest.param(name, marks=pytest.mark.medium if name in OFTEN else pytest.mark.slow) for name in TRIED]
)
def test_the_library_sees_what_embed_sees(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "ijepa", IJEPA)
    method, _, family = pair.partition(" of ")
    more = {"teacher": small_teacher()} if method == "distill" else {}
    exports.small_run(method, family, tmp_path / "run", **more)
    refused = {}
    for form, size in exports.cases(*PAIRS[pair]):
        try:
            assert exports.photograph_difference(tmp_path / "run", form, size, tmp_path / form) < CLOSE, form
        except (EncoderError, WeightsError) as error:
            refused[form] = str(error)
    for form, message in refused.items():
        expected = REFUSALS.get((form, family), REFUSALS.get((form, ""), "never"))
        assert re.search(expected, message), message
    if family in ("ViT of DINOv2", "RoPE-ViT") and method in ("dino", "dinov2", "dinov3", "distill", "lejepa"):
        assert refused == {}
    if family in ("ViT", "ViT of DINOv2", "RoPE-ViT", "SAM-ViT", "model of timm"):
        assert "timm" not in refused


def test_every_format_of_every_family_has_a_run_and_sizes_vary() -> None:
    seen = {(form, j): set() for j in range(len(exports.RUNS)) for form in exports.PEERS}
    for i, j in PAIRS.values():
        for form, size in exports.cases(i, j):
            seen[form, j].add(size)
    assert all(sizes for sizes in seen.values())
    assert all(sizes == set(exports.SIZES) for (form, _), sizes in seen.items() if form in ("timm", "transformers"))
