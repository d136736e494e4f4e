"""Export every family of encoders, and run folders of every method, to every format, and write tables of differences.

    python benchmarks/exports.py --output benchmarks/results/exports.md

The encoders are small variants with random weights. Each export is loaded by the library of its format, and its pooled
features and tokens are compared with those of the encoder (`extras.exports.certificate`). A cell holds the
largest difference at all sizes as a fraction of the largest feature, or the number of the message with which `tessera
export` refuses.

The second table compares run folders. Each library opens the export as its users do, and prepares and encodes a
photograph, whose pooled features are compared with those of `tessera.embed`.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from tables import machine, publish, table, typed_command
from torch import Tensor

import tessera
from tessera import encoders
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.extras.exports.command import export as export_run
from tessera.extras.exports.export import ENDINGS, METADATA, export
from tessera.extras.exports.photograph import made_photograph
from tessera.extras.exports.preparation import prepare
from tessera.pretrain.checkpoints.save import Saver
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.config import CheckpointConfig
from tessera.pretrain.engines.ddp import DDP
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig
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
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_micro", {"patch_size": 16, "depth": 2}),
    "ViT of DINOv2": ("vit_micro", {"patch_size": 16, "depth": 2, "layer_scale": 1.0, "registers": 4}),
    "RoPE-ViT": ("rope_vit_micro", {"patch_size": 16, "depth": 2, "layer_scale": 1.0}),
    "Swin": ("swin_micro", {"patch_size": 8}),
    "Twins-SVT": ("twins_svt_micro", {"patch_size": 8}),
    "NaViT": ("navit_micro", {"patch_size": 16, "depth": 2}),
    "SAM-ViT": ("sam_vit_micro", {"patch_size": 16, "depth": 2, "global_blocks": (1,)}),
    "model of timm": ("timm:test_resnet", {}),
}
"""Variant and settings of the encoder of a run, for each family."""
SIZES = (64, 96, 128, 160, 192, 224, 256, 320)
"""Image sizes at which runs are exported. Exports of each family and format have all of them."""
STEPS, SIDE = 10, 64
"""Length of the runs in steps, and image size of their encoders."""


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


def cases(method: int, family: int) -> list[tuple[str, int]]:
    """Return the formats and image sizes of the exports of a run, by the indices of its method and family."""
    return [(form, SIZES[(method + 3 * family + 2 * index) % len(SIZES)]) for index, form in enumerate(PEERS)]


def small_run(method: str, family: str, folder: Path, **more: Any) -> None:
    """Write the folder of a run of a method with its small settings and crops of `SIDE` pixels.

    `more` are further settings of the method.
    """
    fields = METHODS[method].Config.model_fields
    sides = {"global_size": SIDE, "local_size": SIDE // 2} if "global_size" in fields else {"size": SIDE}
    run_folder(method, family, folder, METHODS[method].small_settings | sides | more)


def run_folder(method: str, family: str, folder: Path, given: dict[str, Any]) -> None:
    """Write the folder of a run with random weights, as a run of a few steps leaves it.

    `given` are the settings of the method.
    """
    variant, settings = RUNS[family]
    size = RunSize(1000, 4, STEPS)
    config, optim = METHODS[method].resolve(METHODS[method].Config(**given), OptimConfig(), size)
    settings = METHODS[method].encoder_defaults(config, variant, size) | settings | {"image_size": SIDE}
    PartialState(cpu=True)
    torch.manual_seed(0)
    encoder = encoders.build(variant, **settings)
    engine = DDP(Accelerator(), METHODS[method](encoder, config, STEPS), optim)
    with torch.no_grad():
        for parameter in engine.method.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    described = {"method": method, "encoder": encoder.settings, method: config.model_dump(mode="json"), "steps": STEPS}
    described |= {"seed": 0, "batch_size": 4, "stream": {}, "shards": "photographs"}
    folder.mkdir(parents=True)
    saver = Saver(folder / "checkpoints", engine.accelerator, engine, described, CheckpointConfig())
    saver.save(TrainState(STEPS, 4), engine.method.trained_encoder())
    (folder / "config.yaml").write_text(f"method: {method}\n")


def run_cells(methods: list[str], messages: list[str], **given: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table of run folders: family, format, and a cell for each method.

    New messages of refusals are added to `messages`. `given` maps methods to settings that they need.
    """
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for j, family in enumerate(RUNS):
            cells = {form: ["-"] * len(methods) for form in PEERS}
            for i, method in enumerate(methods):
                run = Path(temporary) / f"{method}-{j}"
                small_run(method, family, run, **given.get(method, {}))
                for form, size in cases(i, j):
                    try:
                        found = f"{photograph_difference(run, form, size, run.with_name(f'{run.name}-{form}')):.1e}"
                    except (EncoderError, WeightsError) as error:
                        message = f"`{family}`: {error}"
                        messages += [] if message in messages else [message]
                        found = f"({messages.index(message) + 1})"
                    cells[form][i] = found
            rows += [[family, form, *row] for form, row in cells.items()]
            print(*rows[-len(PEERS) :], sep="\n", flush=True)
    return rows


def with_timm(file: Path, use: str) -> Tensor:
    """Return the pooled features (1, D) of the photograph that timm computes."""
    import timm
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    model = eval(use, {"timm": timm}).eval()
    transform: Any = create_transform(**resolve_model_data_config(model))
    return model(transform(made_photograph())[None])


def with_transformers(file: Path, use: str) -> Tensor:
    """Return the pooled features (1, D) of the photograph that transformers computes."""
    import transformers

    processor = transformers.AutoImageProcessor.from_pretrained(file.parent)
    model = eval(use, {"transformers": transformers}).eval()
    return model(**processor(made_photograph(), return_tensors="pt")).pooler_output


def with_onnx(file: Path, use: str) -> Tensor:
    """Return the pooled features (1, D) of the photograph that ONNX Runtime computes."""
    import onnxruntime

    session = eval(use, {"onnxruntime": onnxruntime})
    stated = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
    images = prepare(made_photograph(), stated)[None]
    return torch.from_numpy(session.run(["pooled"], {"images": images.numpy()})[0])


def with_torch(file: Path, use: str) -> Tensor:
    """Return the pooled features (1, D) of the photograph that the program of `torch.export` computes."""
    read = {f"{METADATA}.json": ""}
    torch.export.load(file, extra_files=read)
    pooled, _ = eval(use, {"torch": torch})(prepare(made_photograph(), json.loads(read[f"{METADATA}.json"]))[None])
    assert not pooled.requires_grad
    return pooled


PEERS: dict[str, Callable[[Path, str], Tensor]] = {
    "timm": with_timm,
    "transformers": with_transformers,
    "onnx": with_onnx,
    "torch": with_torch,
}
"""Functions that open an export as users of its library do. Each takes the file and the expression that loads it."""


@torch.no_grad()
def photograph_difference(run: Path, form: str, size: int, folder: Path) -> float:
    """Return the largest difference between pooled features of a photograph, as a fraction of the largest feature.

    One side is `tessera.embed`, the other is the library of the format.

    Raises:
        EncoderError: the encoder cannot be exported.
        WeightsError: the format has no equivalent of the encoder.
    """
    folder.mkdir()
    file = folder / (ENDINGS[form] if form == "transformers" else f"encoder{ENDINGS[form]}")
    export_run(run, file, to=form, settings={"image_size": size})
    certificate = json.loads(file.with_suffix(".certificate.json").read_text())
    export_run(run, folder / "ours.safetensors", settings={"image_size": size})
    images = folder / "photographs" / "made"
    images.mkdir(parents=True)
    made_photograph().save(images / "made.png")
    ours = tessera.embed(tessera.load(folder / "ours.safetensors"), str(images.parent), workers=0).features.cpu()
    theirs = PEERS[form](file, certificate["use"])
    return float((ours - theirs).abs().max() / ours.abs().max())


def run_parts() -> list[str]:
    """Return the parts of the page about run folders. The plug-in of examples/ijepa is one of the methods."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "ijepa"))
    from tessera_ijepa import IJEPA

    METHODS["ijepa"] = IJEPA
    messages, methods, started = list[str](), METHODS.names(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        teacher = Path(folder) / "teacher.safetensors"
        encoders.save(encoders.build("vit_micro", dim=32, depth=1, heads=2, patch_size=16), teacher)
        rows = run_cells(methods, messages, distill={"teacher": str(teacher)})
    return [
        "## Run folders",
        f"{machine()}, float32, {(time.process_time() - started) / 60:.0f} minutes of CPU time, with examples/ijepa.",
        f"The run folder of each method and family is exported at one of the sizes {', '.join(map(str, SIZES))}, of "
        "which each row has all. The library of the format loads the export, and prepares and encodes a photograph of "
        "640 x 427 pixels by its own means (ONNX and `torch.export`: Pillow, as the file states). The largest "
        "difference from the pooled features of `tessera.embed`, as a fraction of the largest feature. Pillow and "
        "torch round some pixels differently by one of 255 levels, which is most of the difference. The random "
        "attention of these NaViTs magnifies it: their own features of the pixels that Pillow rounds differ as much.",
        table(["family", "format", *methods], rows, text=2),
        "\n".join(f"{number}. {message}" for number, message in enumerate(messages, 1)),
    ]


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
        f"{typed_command()}: {machine()}, float32, {time.process_time() / 60:.0f} minutes of CPU time.",
        "Small variants with random weights. The largest difference between a feature of the export and of the "
        "encoder, as a fraction of the largest feature, for 1, 2 and 3 images at each size. A dynamic graph is made "
        "once, at the second size, and compared at that and two more sizes. A number in brackets is a refusal, quoted "
        "below.",
        table(["family", "sizes", *headings], rows, text=2),
        "\n".join(f"{number}. {message}" for number, message in enumerate(messages, 1)),
    ]
    parts += run_parts()
    publish(parts, settings.output)


if __name__ == "__main__":
    main()
