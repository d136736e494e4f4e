"""Compute the features of all images in the given shards, and write them to a file, or to several files.

    python evaluation/embed.py --checkpoint OUTPUT --data SHARDS --output FILE.npz [--tokens true] [--blocks 4]

The ending of the file selects its format: .npz (NumPy), .safetensors or .parquet. N images have these features:

    features   (N, D)         pooled features
    tokens     (N, h, w, D)   features of the h x w tokens, with --tokens true
    registers  (N, R, D)      features of the R register tokens, with --registers true
    keys       (N,)           names `shard.tar/key` of the samples; in .safetensors, a JSON list in the metadata
    labels     (N,)           class indices, -1 for a sample without a label; left out if no sample has one
    classes    (K,)           class names, if there are any; in .safetensors and .parquet, a JSON list in the metadata

Each command numbers the classes of its own shards. Compare the labels of two files by their names, `classes[labels]`.
Images that cannot be decoded are left out, and counted at the end.

With `--blocks n`, `features`, `tokens` and `registers` have another axis of length n after N, with the features after
each of the last n blocks. A row of a .parquet file holds the values of one image as flat lists, and the metadata of a
column holds the shape of a list.

With `--images_per_file`, the files are FILE-00000.npz, FILE-00001.npz and so on. At most the features of one file are
in memory. A command that was stopped goes on where it ended, and the processes of `tessera --num_processes N embed`
share the files.
"""

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data import failures
from tessera.data.shards import Source, open_shards
from tessera.encoders.base import Encoder, Features
from tessera.encoders.vit import ViT
from tessera.evaluation.command import run_command
from tessera.evaluation.features import EvaluationError, FeatureSettings, extract, load_encoder
from tessera.runtime.collectives import broadcast_object
from tessera.runtime.files import atomic_write
from tessera.runtime.processes import make_accelerator

Arrays = dict[str, np.ndarray]

UNRELATED = {"workers", "batch_size", "data", "source", "checkpoint"}
"""Settings that do not change the features, apart from the data and the encoder, which are described by content."""


class EmbedSettings(FeatureSettings):
    """Encode all images, and write the features to a file."""

    data: str | list[str]
    """SHARDS of the images to encode"""
    output: str
    """path of the file to write: .npz, .safetensors or .parquet"""
    tokens: bool = False
    """also write the features of all tokens"""
    registers: bool = False
    """also write the features of the register tokens, which must exist"""
    blocks: int | None = Field(None, ge=1)
    """write the features after each of this number of last blocks; default: only those of the whole encoder"""
    dtype: Literal["float32", "float16"] = "float32"
    """type of the written features"""
    images_per_file: int | None = Field(None, ge=1)
    """largest number of images in a file; default: all images are written to one file"""


def run(settings: EmbedSettings) -> None:
    """Compute the features and write them to `settings.output`.

    Raises:
        EvaluationError: the output cannot be written, or is that of a command with other settings.
    """
    output = Path(settings.output)
    if output.suffix not in WRITERS:
        raise EvaluationError(
            f"--output {output} does not end in {', '.join(WRITERS)}. Choose a file name that ends in one of them."
        )
    if output.suffix == ".parquet":
        pyarrow()
    if settings.images_per_file is None and output.exists():
        raise EvaluationError(f"--output {output} exists. Choose another file, or delete it.")
    accelerator = make_accelerator()
    rank, processes = accelerator.process_index, accelerator.num_processes
    if processes > 1 and settings.images_per_file is None:
        raise EvaluationError(
            "The command was started with several processes, but it writes one file. Give --images_per_file N, so that "
            "the processes share the files, or start one process."
        )
    encoder, _ = load_encoder(settings)
    shards = open_shards(settings.data, source=settings.access)
    files = max(1, ceil(shards.images / (settings.images_per_file or max(shards.images, 1))))
    names = [output] if settings.images_per_file is None else [_numbered(output, number) for number in range(files)]
    _prepare(output, settings, encoder, shards, main=rank == 0)
    labelled = shards.count_labels() > 0
    shards = replace(shards, optional_labels=True, classes=shards.class_names() if labelled else None)
    encoder.to(accelerator.device)
    for number in range(rank, files, processes):
        if settings.images_per_file is not None and names[number].exists():
            continue
        arrays = _arrays(settings, encoder, shards, accelerator, (number, files), labelled)
        try:
            with atomic_write(names[number]) as temporary:
                WRITERS[output.suffix](temporary, arrays)
        except OSError as error:
            message = f"Cannot write {names[number]}: {error.strerror}. Free space, and start again."
            raise EvaluationError(message) from error
        print(f"{len(arrays['keys']):,} images written to {names[number]}", flush=True)
    if failures.skipped:
        print(f"images that cannot be decoded, and are left out: {len(failures.skipped):,}", flush=True)


def _arrays(
    settings: EmbedSettings,
    encoder: Encoder,
    shards: Source,
    accelerator: Accelerator,
    part: tuple[int, int],
    labelled: bool,
) -> Arrays:
    """Return the arrays of one file. `part` is the index of the file, and the number of files."""
    shapes: dict[str, tuple[int, ...]] = {}

    def flat(encoder: Encoder, images: Tensor) -> Tensor:
        """Return all features of each image in one row: (B, C, S, S) -> (B, K)."""
        one = settings.blocks is None
        outputs = [encoder(images)] if settings.blocks is None else encoder.intermediate(images, settings.blocks)
        parts = {"features": torch.stack([output.pooled for output in outputs], 1)}  # (B, n, D)
        if settings.tokens:
            parts["tokens"] = torch.stack([_grid(output) for output in outputs], 1)  # (B, n, h, w, D)
        if settings.registers:
            parts["registers"] = torch.stack(_registers(encoder, images, settings.blocks or 1), 1)  # (B, n, R, D)
        shapes.update({name: tuple(part.shape[2 if one else 1 :]) for name, part in parts.items()})
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    options = settings.options() | {"part": part, "labels": labelled, "feature": flat}
    found = extract(encoder, shards, accelerator, **options)
    widths = [prod(shape) for shape in shapes.values()]
    arrays = {
        # safetensors writes wrong values for an array that is not contiguous
        name: np.ascontiguousarray(values.numpy().reshape(-1, *shape), settings.dtype)
        for (name, shape), values in zip(shapes.items(), found.features.split(widths, 1), strict=True)
    }
    arrays["keys"] = np.array(found.keys, dtype=str)
    arrays |= {"labels": found.labels.numpy()} if labelled else {}
    return arrays if shards.classes is None else arrays | {"classes": np.array(shards.classes, dtype=str)}


def _grid(output: Features) -> Tensor:
    """Return the tokens of images of one size as a grid: (B, h, w, D)."""
    height, width = (int(side) for side in output.grids[0])
    return output.tokens.view(len(output.grids), height, width, -1)


def _registers(encoder: Encoder, images: Tensor, blocks: int) -> list[Tensor]:
    """Return the features of the register tokens after each of the last `blocks` blocks: (B, R, D) each.

    This is a second forward pass, because the register tokens are not part of `Features`.
    """
    if not isinstance(encoder, ViT) or encoder.reg_token is None:
        raise EvaluationError("The encoder has no register tokens. Leave out --registers.")
    return encoder.register_tokens(images, blocks)


def _numbered(output: Path, number: int) -> Path:
    return output.with_name(f"{output.stem}-{number:05d}{output.suffix}")


def _prepare(output: Path, settings: EmbedSettings, encoder: Encoder, shards: Source, *, main: bool) -> None:
    """Make the folder of the output. If there are several files, also check or write the settings of the files."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if settings.images_per_file is None:
            return
        own = json.loads(settings.model_dump_json(exclude=UNRELATED))
        claim(output.with_suffix(".json"), own, encoder, shards, output.suffix, main=main)
    except OSError as error:
        raise EvaluationError(f"Cannot write --output {output}: {error.strerror}. Choose another file.") from error


def claim(
    description: Path, settings: dict[str, Any], encoder: Encoder, shards: Source, suffix: str, *, main: bool
) -> None:
    """Check that the files of an earlier command belong to this one, or write the description of new files. Collective.

    Files are kept only if settings, weights, and the names, sizes and labels of the images are equal.

    Args:
        description: JSON file beside the files.
        settings: settings that change the files.
        encoder: encoder whose weights change the files.
        shards: opened images.
        suffix: suffix of the files, whose names are that of the description with a number.
        main: True on the process that writes the description.

    Raises:
        EvaluationError: the files belong to other settings or images, or nothing says to which.
        OSError: the description cannot be written.
    """
    weights = hashlib.sha256()
    for tensor in encoder.state_dict().values():
        weights.update(tensor.contiguous().cpu().numpy().tobytes())
    own = settings | {"weights": weights.hexdigest()[:16]}
    shards_of = zip(shards.shards, shards.counts, shards.sizes, strict=True)
    own["shards"] = [[shard.name, int(count), int(size)] for shard, count, size in shards_of]
    own["images"] = shards.content()
    own["preprocessing"] = str(encoder.preprocessing)
    own["encoder"] = json.loads(json.dumps(encoder.settings, default=str))
    own["samples"] = shards.samples_hash()  # names and labels too, which the files hold
    stem, old = description.stem, list[str]()
    if description.exists() and _read(description) != own:
        raise EvaluationError(
            f"{description} does not belong to these settings and images. Choose another --output, or delete this "
            f"file and the files {stem}-*{suffix}."
        )
    if main and not description.exists():
        numbered = re.compile(rf"{re.escape(stem)}-\d{{5,}}{re.escape(suffix)}")
        old = sorted(path.name for path in description.parent.iterdir() if numbered.fullmatch(path.name))
    if old := broadcast_object(old):
        raise EvaluationError(
            f"{description.parent / old[0]} exists, but {description.name}, which says what it holds, does not. Choose "
            f"another --output, or delete the {len(old)} files of this kind."
        )
    if main and not description.exists():
        with atomic_write(description) as temporary:
            temporary.write_text(json.dumps(own, indent=2) + "\n")


def _read(path: Path) -> Any:
    """Return the content of a JSON file, or None if it has another format."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def _write_npz(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def _write_safetensors(path: Path, arrays: Arrays) -> None:
    from safetensors.numpy import save_file

    texts = {name: json.dumps(array.tolist()) for name, array in arrays.items() if array.dtype.kind == "U"}
    save_file({name: array for name, array in arrays.items() if name not in texts}, path, texts)


def _write_parquet(path: Path, arrays: Arrays) -> None:
    pa, parquet = pyarrow()
    columns: dict[str, Any] = {}
    fields = []
    for name, array in arrays.items():
        if name == "classes":
            continue
        values = pa.array(array.reshape(-1))
        if array.ndim > 1:
            values = pa.FixedSizeListArray.from_arrays(values, prod(array.shape[1:]))
        columns[name] = values
        fields.append(pa.field(name, values.type, metadata={"shape": json.dumps(array.shape[1:])}))
    metadata = {"classes": json.dumps(arrays["classes"].tolist())} if "classes" in arrays else None
    parquet.write_table(pa.table(columns, pa.schema(fields, metadata)), path)


def pyarrow() -> tuple[Any, Any]:
    """Import and return pyarrow and its module for Parquet files.

    Raises:
        EvaluationError: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise EvaluationError('Parquet needs pyarrow. Install it: pip install "tessera-ssl[parquet]"') from None
    return pyarrow, parquet


WRITERS = {".npz": _write_npz, ".safetensors": _write_safetensors, ".parquet": _write_parquet}


main = partial(run_command, EmbedSettings, run)


if __name__ == "__main__":
    main()
