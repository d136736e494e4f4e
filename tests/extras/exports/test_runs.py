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

NAMES = [*METHODS.names(), "ijepa"]
PAIRS = {f"{method} of {family}": (i, j) for j, family in enumerate(exports.RUNS) for i, method in enumerate(NAMES)}
TRIED = [name for name, (i, j) in PAIRS.items() if (i + j) % 8 == 4]
"""Pairs that are tested. They cover all methods and families; the table has the other pairs, too."""
OFTEN = "dinov3 of RoPE-ViT"
"""Pair that is tested without `--slow`, and without a graph."""
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


def cases(pair: str) -> list[tuple[str, int]]:
    """Return the formats and image sizes that a pair is tried in: files of weights and one graph, which is slow."""
    i, j = PAIRS[pair]
    graphs = () if pair == OFTEN else ("onnx",) if i < 4 else ("torch",)
    return [case for case in exports.cases(i, j) if case[0] in ("timm", "transformers", *graphs)]


@pytest.mark.parametrize(
    "pair", [pytest.param(name, marks=pytest.mark.medium if name == OFTEN else pytest.mark.slow) for name in TRIED]
)
def test_the_library_sees_what_embed_sees(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "ijepa", IJEPA)
    method, _, family = pair.partition(" of ")
    more = {"teacher": small_teacher()} if method == "distill" else {}
    exports.small_run(method, family, tmp_path / "run", **more)
    refused = {}
    for form, size in cases(pair):
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


def test_every_format_of_every_family_has_all_sizes() -> None:
    for j in range(len(exports.RUNS)):
        seen = [case for i in range(len(NAMES)) for case in exports.cases(i, j)]
        assert sorted(seen) == sorted((form, size) for form in exports.PEERS for size in exports.SIZES)
    assert {(form, pair.partition(" of ")[2]) for pair in TRIED for form, _ in cases(pair)} >= {
        (form, family) for family in exports.RUNS for form in ("timm", "transformers")
    }
