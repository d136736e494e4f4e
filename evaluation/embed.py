"""Write the features of all images of some shards to one .npz file.

    python evaluation/embed.py --checkpoint OUTPUT --data SHARDS --output FILE.npz

`numpy.load(FILE)` has `features` (N, D) float32 and `keys` (N,), the names `shard.tar/key` of the samples. It also has
`labels` (N,) int64 if all samples have labels.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.shards import open_shards
from evaluation.features import EvaluationError, FeatureSettings, extract, load_encoder
from runtime.files import atomic_write
from runtime.processes import exit_on_user_error, make_accelerator
from runtime.settings import parse


class EmbedSettings(FeatureSettings):
    """Write an encoder's features of all images to a file."""

    data: str | list[str]
    """SHARDS of the images to encode"""
    output: str
    """file to write, .npz"""


def run(settings: EmbedSettings) -> None:
    """Run the command."""
    output = Path(settings.output)
    if output.suffix != ".npz":
        raise EvaluationError(f"--output {output} does not end in .npz. Choose a file name that does.")
    with ExitStack() as stack:
        # open the output file first: a wrong path must fail before the features are computed, which may take hours
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(atomic_write(output))
        except OSError as error:
            raise EvaluationError(f"Cannot write --output {output}: {error.strerror}. Choose another file.") from error
        accelerate = make_accelerator()
        if accelerate.num_processes > 1:
            raise EvaluationError(
                "embed.py was started with several processes, but it writes one file from one process. "
                "Start it with `python evaluation/embed.py`."
            )
        encoder, _ = load_encoder(settings)
        shards = open_shards(settings.data, source=settings.source)
        labelled = shards.all_labelled()
        extraction = replace(settings.extraction(), labels=labelled)
        found = extract(encoder.to(accelerate.device), shards, accelerate, extraction)
        arrays = {"features": found.features.numpy(), "keys": np.array(found.keys)}
        if labelled:
            arrays["labels"] = found.labels.numpy()
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    images, dim = found.features.shape
    with_labels = "with labels" if labelled else "without labels"
    print(f"{images:,} x {dim} features {with_labels} written to {output}")


if __name__ == "__main__":
    with exit_on_user_error():
        run(parse(EmbedSettings))
