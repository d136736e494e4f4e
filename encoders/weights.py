"""Convert weights to the format of this project, of timm or of transformers.

    tessera weights SOURCE_CHECKPOINT OUTPUT.safetensors [--to timm|transformers] [--set image_size=96]

The source is a published checkpoint or an encoder of this project. It determines the settings of the encoder.
`--encoder` and `--set` override these settings, or add settings that the source does not determine. Position tables and
bias tables are resized to the new settings.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tessera import encoders
from tessera.encoders import published
from tessera.encoders.base import IMAGENET, Encoder
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.formats import transformers_export
from tessera.encoders.formats.checkpoint import format_of, load_weights, read, recognise, unwrap
from tessera.encoders.formats.loading import Report
from tessera.encoders.summary import setting
from tessera.runtime import stdio
from tessera.runtime.files import atomic_write


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tessera weights",
        description="Convert a published checkpoint, or an encoder of this project, to an encoder of this project or "
        "of timm or transformers.",
    )
    parser.add_argument(
        "source", metavar="SOURCE_CHECKPOINT", type=Path, help="weight file, folder of a run, or timm:NAME"
    )
    parser.add_argument("output", metavar="OUTPUT", type=Path, help=".safetensors file to write")
    parser.add_argument("--to", choices=tuple(WRITERS), default="ours", help="format of OUTPUT (default: ours)")
    parser.add_argument("--encoder", metavar="VARIANT", help="variant to build (default: that of the checkpoint)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="changed settings of the encoder")
    options = parser.parse_args(argv)
    try:
        if options.output.suffix != ".safetensors":
            raise WeightsError(f"{options.output} must end in .safetensors.")
        encoder, report = fitting(options.source, options.encoder, dict(setting(text) for text in options.set))
        print(report)
        WRITERS[options.to](encoder, options.output)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def fitting(source: Path, variant: str | None, settings: dict[str, Any]) -> tuple[Encoder, Report]:
    """Build an encoder that fits the weights in `source`, and load the weights. Return the encoder and a report.

    Args:
        source: weight file, or folder of a run.
        variant: name of the encoder variant. None means the variant that fits the weights.
        settings: settings of the encoder, which override those of the weights.

    Raises:
        EncoderError: a setting is unknown or has an invalid value.
        WeightsError: the format is not recognised, or the weights do not fit.
    """
    source = source / "encoder.safetensors" if source.is_dir() else source
    description = source.with_suffix(".json")
    known: dict[str, Any] = {"variant": variant}
    preprocessing = IMAGENET
    if published.is_name(source):
        checkpoint, preprocessing = published.fetch(source)
        known = encoders.published_settings(source, checkpoint) if variant is None else known
    else:
        checkpoint = read(source)
    if source.suffix == ".safetensors" and description.is_file():
        described, preprocessing = encoders.read_description(description)
        known = described if variant is None else known
    elif variant is None and not published.is_name(source):
        state = unwrap(checkpoint, "auto", Report())
        known = recognise(state).describe(state)
    encoder = encoders.build(**(known | settings))
    encoder.preprocessing = preprocessing
    return encoder, load_weights(encoder, checkpoint)


def to_ours(encoder: Encoder, output: Path) -> None:
    """Save the encoder to `output`, a .safetensors file, and to a .json file of the same name."""
    encoders.save(encoder, output)
    print(f'wrote {output}, an encoder of the variant {encoder.settings["variant"]}: encoders.load("{output}")')


def to_timm(encoder: Encoder, output: Path) -> None:
    """Write the weights to `output` in timm's format, and print the `timm.create_model` call that loads `output`.

    Raises:
        WeightsError: timm has no equivalent model.
        EncoderError: the number of channels differs between the preprocessing and the encoder.
    """
    name, options, state = format_of(encoder).to_timm(encoder)
    options["pretrained_cfg_overlay"] = pretrained_cfg(encoder)
    with atomic_write(output) as file:
        save_file({key: tensor.detach().contiguous() for key, tensor in state.items()}, file)
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    print(f'wrote {output}: timm.create_model("{name}", checkpoint_path="{output}"{arguments})')


def to_transformers(encoder: Encoder, output: Path) -> None:
    """Write the weights to `output`, model.safetensors, and the configuration to config.json in the same folder.

    Raises:
        WeightsError: transformers has no equivalent model, or `output` has another name.
    """
    if output.name != "model.safetensors":
        raise WeightsError(
            f"{output} has the wrong name, because transformers reads the weights of a folder from model.safetensors. "
            f"Write {output.parent}/model.safetensors."
        )
    config, state = transformers_export.to_transformers(encoder)
    with atomic_write(output) as file:
        save_file({key: tensor.detach().contiguous() for key, tensor in state.items()}, file, metadata={"format": "pt"})
    with atomic_write(output.with_name("config.json")) as file:
        file.write_text(json.dumps(config, indent=2) + "\n")
    print(f'wrote {output} and config.json: transformers.AutoModel.from_pretrained("{output.parent}")')


WRITERS: dict[str, Callable[[Encoder, Path], None]] = {
    "ours": to_ours,
    "timm": to_timm,
    "transformers": to_transformers,
}
"""Map from each value of `--to` to the function that writes this format."""


def pretrained_cfg(encoder: Encoder) -> dict[str, Any]:
    """Return the values that `timm.data.resolve_data_config` reads from a model's `pretrained_cfg`.

    Raises:
        EncoderError: the number of channels differs between the preprocessing and the encoder.
    """
    preprocessing, size = encoder.preprocessing, encoder.settings["image_size"]
    if preprocessing.channels != encoder.channels:
        raise EncoderError(
            f"The preprocessing has {preprocessing.channels} channels, but the encoder has {encoder.channels}. "
            'Write the mean and std of each channel into "preprocessing" of the .json file of the encoder.'
        )
    height, width = (size, size) if isinstance(size, int) else size
    return {
        "input_size": (encoder.channels, height, width),
        "interpolation": "bicubic",
        # timm resizes the short side to size / crop_pct. The evaluations use no margin for small images.
        "crop_pct": 224 / 256 if min(height, width) >= 128 else 1.0,
        "mean": preprocessing.mean,
        "std": preprocessing.std,
    }


if __name__ == "__main__":
    stdio.protect()
    main()
