"""Build the encoder that fits given weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera import encoders
from tessera.encoders.base import IMAGENET, Encoder
from tessera.encoders.loading import Report
from tessera.encoders.weight_files import load_weights, read, recognise, unwrap


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
    origin = encoders.backbone(source)
    if origin is not None:
        checkpoint, preprocessing = origin.fetch(source)
        known = origin.settings(source, checkpoint) if variant is None else known
    else:
        checkpoint = read(source)
    if source.suffix == ".safetensors" and description.is_file():
        described, preprocessing = encoders.read_description(description)
        known = described if variant is None else known
    elif variant is None and origin is None:
        state = unwrap(checkpoint, "auto", Report())
        known = recognise(state).describe(state)
    encoder = encoders.build(**(known | settings))
    encoder.preprocessing = preprocessing
    return encoder, load_weights(encoder, checkpoint)


def rebuilt(encoder: Encoder, variant: str | None, settings: Mapping[str, Any]) -> tuple[Encoder, Report]:
    """Build an encoder with other settings, and load the weights of `encoder`. Return the new encoder and a report.

    Raises:
        EncoderError: a setting is unknown or has an invalid value.
        WeightsError: the weights do not fit.
    """
    known = encoder.settings if variant is None else {"variant": variant}
    new = encoders.build(**(known | settings))
    new.preprocessing = encoder.preprocessing
    return new, load_weights(new, encoder.state_dict())
