"""Compute the features of all images in the given shards, and write them to one .npz file.

    python evaluation/embed.py --checkpoint OUTPUT --data SHARDS --output FILE.npz

The file contains the array `features` (N, D) of float32 and the array `keys` (N,) with the names `shard.tar/key` of the
samples. If all samples have labels, the file also contains the array `labels` (N,) of int64.
"""

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tessera.data.shards import open_shards
from tessera.evaluation.command import main
from tessera.evaluation.features import EvaluationError, FeatureSettings, extract, load_encoder
from tessera.runtime.files import atomic_write
from tessera.runtime.processes import make_accelerator


class EmbedSettings(FeatureSettings):
    """Encode all images, and write the features to a file."""

    data: str | list[str]
    """SHARDS of the images to encode"""
    output: str
    """path of the .npz file to write"""


def run(settings: EmbedSettings) -> None:
    """Compute the features and write them to `settings.output`."""
    output = Path(settings.output)
    if output.suffix != ".npz":
        raise EvaluationError(f"--output {output} does not end in .npz. Choose a file name that does.")
    with ExitStack() as stack:
        # Open the output file first. A wrong path then fails at once, and not after hours of computing features.
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(atomic_write(output))
        except OSError as error:
            raise EvaluationError(f"Cannot write --output {output}: {error.strerror}. Choose another file.") from error
        accelerator = make_accelerator()
        if accelerator.num_processes > 1:
            raise EvaluationError(
                "embed.py was started with several processes, but it writes one file from one process. "
                "Start it with `python evaluation/embed.py`."
            )
        encoder, _ = load_encoder(settings)
        shards = open_shards(settings.data, source=settings.access)
        labelled = shards.all_labelled()
        encoder.to(accelerator.device)
        found = extract(encoder, shards, accelerator, **settings.options(), labels=labelled)
        arrays = {"features": found.features.numpy(), "keys": np.array(found.keys)}
        if labelled:
            arrays["labels"] = found.labels.numpy()
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    images, dim = found.features.shape
    with_labels = "with labels" if labelled else "without labels"
    print(f"{images:,} x {dim} features {with_labels} written to {output}")


if __name__ == "__main__":
    main(EmbedSettings, run)
