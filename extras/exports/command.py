"""Export an encoder to the format of another library, with a certificate and a model card.

    tessera export SOURCE [OUTPUT] [--to ours|timm|transformers|onnx|torch] [--dynamic_size] [--set image_size=96]
    tessera export RUN OUTPUT.safetensors --part encoder|encoder-NAME|student|teacher

SOURCE is a run folder, a checkpoint, a weight file of this or another project, or `timm:NAME`. For a run folder, the
newest checkpoint is exported, for any engine and any number of processes. `tessera.load` and `--init_from` read an
encoder that was exported with `--to ours`.
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tessera import encoders
from tessera.encoders.base import Encoder
from tessera.encoders.loading import Report
from tessera.encoders.saving import as_saved, fitting
from tessera.encoders.summary import setting
from tessera.extras.exports.certificate import TOLERANCE
from tessera.extras.exports.export import ENDINGS
from tessera.extras.exports.export import export as export_encoder
from tessera.extras.exports.model_card import model_card
from tessera.extras.exports.photograph import photograph
from tessera.pretrain.checkpoints.resume import CheckpointError, list_checkpoints, open_checkpoint, verify
from tessera.pretrain.method_state import fill, find, on_meta
from tessera.pretrain.methods.method import Method
from tessera.runtime import stdio
from tessera.runtime.files import atomic_write
from tessera.runtime.isolation import own_warnings
from tessera.runtime.user_error import UserError

PARTS = ("encoder", "encoder-NAME", "student", "teacher")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tessera export",
        description="Export the encoder of a run, a checkpoint or a weight file, with a certificate and a model card. "
        "Runs in one process.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", type=Path, help="run folder, a checkpoint in it, a weight file, or timm:NAME"
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        type=Path,
        nargs="?",
        help="file to write (default: in RUN/export, for a run folder)",
    )
    parser.add_argument("--to", choices=tuple(ENDINGS), default="ours", help="format of OUTPUT (default: ours)")
    parser.add_argument(
        "--part",
        metavar="|".join(PARTS),
        default="encoder",
        help="encoder: the encoder that evaluations use (for DINO, the teacher's); encoder-NAME: the encoder NAME of "
        "distill.students; student: the student's encoder; teacher: the teacher's encoder (default: encoder)",
    )
    parser.add_argument("--encoder", metavar="VARIANT", help="variant to build (default: that of the weights)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="changed settings of the encoder")
    parser.add_argument(
        "--dynamic_size", action="store_true", help="onnx, torch: take images of any size (default: the encoder's size)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="largest accepted difference between features of the file and of the encoder, as a fraction of the "
        f"largest feature (default: {TOLERANCE:g})",
    )
    options = vars(parser.parse_args(argv))
    try:
        options["settings"] = dict(setting(text) for text in options.pop("set"))
        with own_warnings():
            print(export(options.pop("source"), options.pop("output"), **options))
    except (ValueError, OSError, UserError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def export(
    source: str | Path,
    output: Path | None,
    part: str = "encoder",
    *,
    to: str = "ours",
    encoder: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dynamic_size: bool = False,
    tolerance: float = TOLERANCE,
) -> str:
    """Export a part of a run, or an encoder, to `output` and files beside it, and return a message for the user.

    Args:
        source: run folder, checkpoint, weight file, or `timm:NAME`.
        output: file to write. None writes to RUN/export/FORMAT, if the source is a run folder.
        part: part of a run, one of `PARTS`.
        to: format of the file, a key of `export.ENDINGS`.
        encoder: variant to build. None means that of the weights.
        settings: changed settings of the encoder.
        dynamic_size: see `export.export`.
        tolerance: see `export.export`.

    Raises:
        CheckpointError: the checkpoint is damaged, or was written by another version of this program.
        ValueError: there is no checkpoint, the method has no such part, `output` is not a valid path, or the encoder
            cannot be exported.
        OSError: `output` cannot be written.
    """
    source = Path(source).expanduser()
    default = output is None
    output = _default_output(source, to) if output is None else output
    if to == "ours" and output.suffix != ".safetensors":
        raise ValueError(f"{output} must end in .safetensors.")
    if not default and not output.parent.is_dir():
        raise ValueError(f"{output.parent} is not a folder. Make it first.")
    run, step, report = None, None, ""
    if source.is_dir() and not _only_encoder(source, part):
        checkpoint = find(source)
        if output.resolve().parent == checkpoint:
            raise ValueError(
                f"{output} is inside the checkpoint. A checkpoint must contain no other files. Choose another folder."
            )
        chosen, method, step = _part(checkpoint, part)
        origin = f"{part} of {method} after {step} steps, from {checkpoint}"
        run = checkpoint.parent.parent
        if encoder is not None or settings:
            chosen, report = _rebuilt(chosen, encoder, settings or {})
    else:
        if part != "encoder":
            raise ValueError(f"--part {part} needs a run folder or a checkpoint, and {source} is neither.")
        chosen, report = fitting(source, encoder, dict(settings or {}))
        file = source / encoders.WEIGHTS if source.is_dir() else source
        described = file.suffix == ".safetensors" and file.with_suffix(".json").is_file()
        step = encoders.read_step(file) if described else None
        origin = f"an encoder of the variant {chosen.settings['variant']}, from {source}"
        run = source if source.is_dir() else None
    options = {"dynamic_size": dynamic_size, "tolerance": tolerance, "step": step}
    card = output.with_suffix(".md")
    with _made(output.parent):
        certificate = export_encoder(chosen, output, to, **options, photograph=photograph(chosen))
        with atomic_write(card) as temporary:
            temporary.write_text(model_card(certificate, run))
    lines = [str(report)] if report else []
    lines += [f"{origin}; checked in {output.with_suffix('.certificate.json').name}, described in {card.name}"]
    return "\n".join([*lines, f"wrote {output}: {certificate['use']}"])


def _rebuilt(encoder: Encoder, variant: str | None, settings: Mapping[str, Any]) -> tuple[Encoder, Report]:
    """Build an encoder with other settings, and load the weights of `encoder`. Return the new encoder and a report.

    Raises:
        EncoderError: a setting is unknown or has an invalid value.
        WeightsError: the weights do not fit.
    """
    known = encoder.settings if variant is None else {"variant": variant}
    new = encoders.build(**{**known, **settings})
    new.preprocessing = encoder.preprocessing
    return new, encoders.load_weights(new, encoder.state_dict())


def _default_output(source: Path, to: str) -> Path:
    """Return the path of the export in a run folder.

    Raises:
        ValueError: `source` is not a run folder.
    """
    if not (source / "config.yaml").is_file():
        command = f"tessera export {shlex.quote(str(source))} OUTPUT"
        raise ValueError(f"{source} is not a run folder. Give the file to write: {command}.")
    folder = source / "export" / to
    return folder / (ENDINGS[to] if to == "transformers" else f"encoder{ENDINGS[to]}")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder for the body. If the body fails, remove the folder and its parent, if they are new and empty."""
    new = [one for one in (folder, folder.parent) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # a folder that is not empty stays
            for one in new:
                one.rmdir()
        raise


def _only_encoder(folder: Path, part: str) -> bool:
    """Return True if a folder holds an encoder, but no checkpoint to take it from."""
    has_checkpoint = (folder / "trainer.json").is_file() or list_checkpoints(folder / "checkpoints")
    return part == "encoder" and not has_checkpoint and (folder / encoders.WEIGHTS).is_file()


def _part(checkpoint: Path, part: str) -> tuple[Encoder, str, int]:
    """Return an encoder of a checkpoint, with its weights, and the name of the method and the step of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or was written by another version of this program.
        ValueError: the method has no such part.
    """
    opened = open_checkpoint(checkpoint)
    verify(checkpoint)
    settings = opened.settings
    try:
        described = {name: settings[name] for name in ("method", "encoder", settings["method"], "steps")}
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint} lacks the setting {error}. Choose a checkpoint of this program."
        ) from error
    method = on_meta(described, checkpoint)
    name = _module_name(method, part)
    module: Any = method.get_submodule(name)
    fill(module, f"method.{name}.", checkpoint)
    _, module.preprocessing = encoders.read_description(checkpoint / "encoder.json")
    return as_saved(module), settings["method"], opened.step


def _module_name(method: Method, part: str) -> str:
    """Return the dotted name of the encoder that `part` selects.

    Raises:
        ValueError: the method has no module for `part`.
    """
    modules = dict(method.named_modules())
    exported = {f"encoder-{name}": encoder for name, encoder in method.other_encoders().items()}
    exported["encoder"] = method.trained_encoder()
    if part in exported:
        return next(name for name, module in modules.items() if module is exported[part])
    if f"{part}.encoder" not in modules or part not in PARTS:
        uses = ", ".join(f"--part {name}" for name in reversed(exported))
        raise ValueError(f"{type(method).__name__} has no {part}. Use {uses}.")
    return f"{part}.encoder"


if __name__ == "__main__":
    stdio.protect()
    main()
