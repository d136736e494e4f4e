"""Features of all images of some shards as one .npz file, for use elsewhere.

    python evaluation/embed.py --checkpoint OUTPUT --data SHARDS --output FILE.npz

`numpy.load(FILE)` then has `features` (N, D) float32, `keys` (N,) the names `shard.tar/key` of the samples and, when
all samples have one, `labels` (N,) int64.
"""

from pathlib import Path

import numpy as np

from data.shards import open_shards
from evaluation.features import EvaluationError, FeatureSettings, extract, load_encoder
from evaluation.results import part_of
from runtime.processes import exit_on_user_error, make_accelerator
from runtime.settings import parse


class EmbedSettings(FeatureSettings):
    """Write an encoder's features of all images to a file."""

    data: str | list[str]
    """SHARDS"""
    output: str
    """file to write, .npz"""


def run(settings: EmbedSettings) -> None:
    """The command."""
    output = Path(settings.output)
    if output.suffix != ".npz":
        raise EvaluationError(f"--output {output} must end in .npz")
    part = part_of(output)
    try:  # now, not after hours
        output.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
    except OSError as error:
        raise EvaluationError(f"cannot write --output {output}: {error.strerror}") from error
    accelerate = make_accelerator()
    if accelerate.num_processes > 1:
        raise EvaluationError(
            "embed.py writes one file in one process: start it with python, not with several processes"
        )
    encoder, _ = load_encoder(settings.checkpoint, settings.image_size)
    shards = open_shards(settings.data, source=settings.source)
    labelled = shards.all_labelled()
    keys: list[str] = []
    features, labels = extract(
        encoder.to(accelerate.device),
        shards,
        accelerator=accelerate,
        keys=keys,
        labels=labelled,
        **settings.extraction_options(),
    )
    arrays = {"features": features.numpy(), "keys": np.array(keys)}
    if labelled:
        arrays["labels"] = labels.numpy()
    with part.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    part.replace(output)
    print(
        f"{len(features):,} x {features.shape[1]} features, {'with' if labelled else 'no'} labels, written to {output}"
    )


if __name__ == "__main__":
    with exit_on_user_error():
        run(parse(EmbedSettings))
