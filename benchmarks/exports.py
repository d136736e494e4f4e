"""Export every family of encoders to every format at three sizes, and write the differences of the features as a table.

    python benchmarks/exports.py --output benchmarks/results/exports.md

The encoders are small variants with random weights. Each export is loaded by the library of its format, and its pooled
features and tokens are compared with those of the encoder (`encoders.certificate`). A cell holds the largest difference
at all sizes as a fraction of the largest feature, or the number of the message with which `tessera export` refuses.
"""

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tables import machine, publish, table

from tessera import encoders
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.export import ENDINGS, export
from tessera.runtime.settings import Settings, parse

FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "ViT": ("vit_micro", {"depth": 2, "interpolation": "mae"}, (16, 24, 32)),
    "ViT of DINOv2": (
        "vit_micro",
        {"depth": 2, "layer_scale": 1.0, "registers": 4, "interpolation": "antialias"},
        (16, 24, 32),
    ),
    "RoPE-ViT": ("rope_vit_micro", {"depth": 2, "layer_scale": 1.0}, (16, 24, 32)),
    "Swin": ("swin_micro", {}, (32, 64, 96)),
    "Twins-SVT": ("twins_svt_micro", {}, (32, 64, 96)),
    "NaViT": ("navit_micro", {"depth": 2}, (16, 24, 32)),
    "SAM-ViT": ("sam_vit_micro", {"depth": 2, "global_blocks": (1,)}, (16, 24, 32)),
    "model of timm": ("timm:test_resnet", {}, (64, 96, 128)),
}
"""Variant, settings and image sizes of each family."""


class ExportsBenchmark(Settings):
    """Export every family of encoders to every format, and compare the features."""

    output: Path | None = None
    """Markdown file to write"""


def difference(family: str, form: str, size: int, *, dynamic: bool, folder: Path) -> float:
    """Return the largest difference between features of an export and of its encoder, relative to the features.

    Raises:
        EncoderError: the encoder cannot be exported.
        WeightsError: the format has no equivalent of the encoder.
    """
    variant, settings, _ = FAMILIES[family]
    torch.manual_seed(0)
    encoder = encoders.build(variant, **settings, image_size=size).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():  # no part of the encoder is the identity, as some are at the start
            parameter += 0.05 * torch.randn_like(parameter)
        pooled, tokens, *_ = encoder(torch.randn(1, encoder.channels, size, size))
    file = folder / (ENDINGS[form] if form == "transformers" else f"encoder{ENDINGS[form]}")
    outputs = export(encoder, file, form, dynamic_size=dynamic)["outputs"]
    largest = {"pooled": float(pooled.abs().max()), "tokens": float(tokens.abs().max())}
    return max(output[name] / largest[name] for output in outputs for name in largest)


def main() -> None:
    settings = parse(ExportsBenchmark)
    warnings.simplefilter("ignore")  # torch.export warns about its own code
    forms = [(form, False) for form in ENDINGS] + [("onnx", True), ("torch", True)]
    rows, messages = [], list[str]()
    for family, (_, _, sizes) in FAMILIES.items():
        row = [family, ", ".join(map(str, sizes))]
        for form, dynamic in forms:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found = max(
                        difference(family, form, size, dynamic=dynamic, folder=Path(folder))
                        for size in (sizes[1:2] if dynamic else sizes)
                    )
                row.append(f"{found:.1e}")
            except (EncoderError, WeightsError) as error:
                message = f"`{family}`: {error}"
                messages += [] if message in messages else [message]
                row.append(f"({messages.index(message) + 1})")
        rows.append(row)
        print(row, flush=True)
    headings = [f"{form}, dynamic" if dynamic else form for form, dynamic in forms]
    parts = [
        "# Exports",
        f"`python benchmarks/exports.py --output benchmarks/results/exports.md`: {machine()}, float32, "
        f"{time.process_time() / 60:.0f} minutes of CPU time.",
        "Small variants with random weights. The largest difference between a feature of the export and of the "
        "encoder, as a fraction of the largest feature, for 1, 2 and 3 images at each size. A dynamic graph is made "
        "once, at the second size, and compared at that and two more sizes. A number in brackets is a refusal, quoted "
        "below.",
        table(["family", "sizes", *headings], rows, text=2),
        "\n".join(f"{number}. {message}" for number, message in enumerate(messages, 1)),
    ]
    publish(parts, settings.output)


if __name__ == "__main__":
    main()
