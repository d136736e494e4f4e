"""Weights from one form to another: a published checkpoint or ours to an encoder of ours, or to one of timm's.

    python -m encoders.weights SOURCE_CHECKPOINT OUTPUT.safetensors [--to timm] [--set image_size=96]

What the encoder is follows from the checkpoint; `--encoder` and `--set` say it where the checkpoint does not, or change
it: positions, relative tables and windows are resized for another image size.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import encoders
from encoders.base import Encoder
from encoders.formats.checkpoint import format_of, load_weights, read, recognise, unwrap
from encoders.formats.report import Report
from encoders.summary import setting


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m encoders.weights",
        description="Convert a checkpoint, official or ours, to an encoder of ours or of timm's.",
    )
    parser.add_argument("source", metavar="SOURCE_CHECKPOINT", type=Path, help="file of weights or run folder")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help=".safetensors to write; ours has a .json beside it")
    parser.add_argument("--to", choices=("ours", "timm"), default="ours", help="whose names to write (ours)")
    parser.add_argument("--encoder", metavar="VARIANT", help="what to build; without it, found from the checkpoint")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the encoder")
    options = parser.parse_args(argv)
    try:
        if options.output.suffix != ".safetensors":
            raise ValueError(f"{options.output} must end in .safetensors")
        encoder = fitting(options.source, options.encoder, dict(setting(text) for text in options.set))
        (to_timm if options.to == "timm" else to_ours)(encoder, options.output)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def fitting(source: Path, variant: str | None, settings: dict[str, Any]) -> Encoder:
    """An encoder with the weights of `source`; prints what became of them.

    Raises:
        ValueError: what it is cannot be found, or it does not fit.
    """
    source = source / "encoder.safetensors" if source.is_dir() else source  # a run, or a checkpoint in it
    checkpoint = read(source)
    beside = source.with_suffix(".json")
    if variant is None and source.suffix == ".safetensors" and beside.is_file():
        known = json.loads(beside.read_text())
    elif variant is None:
        state = unwrap(checkpoint, "auto", Report())
        known = recognise(state).describe(state)
    else:
        known = {"variant": variant}
    encoder = encoders.build(**(known | settings))
    print(load_weights(encoder, checkpoint))
    return encoder


def to_ours(encoder: Encoder, output: Path) -> None:
    """`output` and its .json."""
    encoders.save(encoder, output)
    print(f'wrote {output}, an encoder of the variant {encoder.settings["variant"]}: encoders.load("{output}")')


def to_timm(encoder: Encoder, output: Path) -> None:
    """`output`, which `timm.create_model` takes as `checkpoint_path`.

    Raises:
        ValueError: timm has no such model.
    """
    name, options, state = format_of(encoder).to_timm(encoder)
    save_file({key: tensor.detach().contiguous() for key, tensor in state.items()}, output)
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    print(f'wrote {output}: timm.create_model("{name}", checkpoint_path="{output}"{given})')


if __name__ == "__main__":
    main()
