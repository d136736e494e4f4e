"""What a run trained, out of a checkpoint of any engine and any number of processes.

    python -m pretrain.export CHECKPOINT OUTPUT.safetensors [--part encoder|student|teacher|method]

CHECKPOINT is a run folder, whose newest checkpoint is taken, or a checkpoint in it. An encoder is what `encoders.load`
and `--init_from` take. The method has all of its tensors under their own names: student, teacher, heads and centre of
DINO, encoder and decoder of MAE; `load` builds it again. Optimizer and gradients stay in the checkpoint.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import encoders
from pretrain.checkpoints.resume import trainer, verify, whole
from pretrain.engines.local_state import read
from pretrain.engines.local_state import whole as whole_piece
from pretrain.methods import METHODS
from pretrain.methods.base import Method
from runtime.agreement import CheckpointError, together

PARTS = ("encoder", "student", "teacher", "method")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.export",
        description="Export the encoder of a checkpoint, or the whole method. One process, whatever wrote it.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="run folder, or a checkpoint in it")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help=".safetensors to write, with a .json beside it")
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="encoder",
        help="the encoder that the method trains for use (of DINO the teacher's), the student's or the teacher's, or "
        "all of the method (encoder)",
    )
    options = parser.parse_args(argv)
    try:
        print(export(options.checkpoint, options.output, options.part))
    except (ValueError, OSError, CheckpointError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def export(checkpoint: Path, output: Path, part: str = "encoder") -> str:
    """Write `output` and its .json; returns what to tell the user.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another version.
        ValueError: there is none, or the method has no such part, or `output` cannot be.
        OSError: `output` cannot be written.
    """
    if output.suffix != ".safetensors":
        raise ValueError(f"{output} must end in .safetensors")
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent} is no folder: make it first")
    checkpoint = find(checkpoint)
    if output.resolve().parent == checkpoint:
        raise ValueError(f"{checkpoint} lists its files and takes no others: write elsewhere")
    known = trainer(checkpoint)
    verify(checkpoint)
    settings = known["settings"]
    described = {name: settings[name] for name in ("method", "encoder", settings["method"], "steps")}
    described["step"] = known["position"]["step"]
    with torch.device("meta"):
        method = build(described)
    name = _name(method, part)
    module = method.get_submodule(name)
    _fill(module, f"method.{name}." if name else "method.", checkpoint)
    if isinstance(module, encoders.Encoder):
        encoders.save(module, output)
        use = f'encoders.load("{output}")'
    else:
        _save(module, described, output)
        use = f'pretrain.export.load("{output}")'
    return f"wrote {output}: {part} of {settings['method']} after {described['step']} steps, from {checkpoint}: {use}"


def find(path: Path) -> Path:
    """The checkpoint that is meant by it, or by its run folder.

    Raises:
        ValueError: there is none.
    """
    path = path.expanduser()
    if path.is_file():
        raise ValueError(f"{path} is a file: name the run folder, or a checkpoint in it")
    if (path / "trainer.json").is_file():
        return path.resolve()
    found = whole(path / "checkpoints")
    if not found:
        raise ValueError(f"no checkpoint at {path}: looked for trainer.json and checkpoints/step-... in it")
    return found[-1].resolve()


def load(path: str | Path) -> Method:
    """The method that `--part method` wrote to `path` (.safetensors), with all of its weights.

    Raises:
        ValueError: `path` is not such a file, or its .json is not beside it or does not fit.
    """
    beside = Path(path).with_suffix(".json")
    try:
        method = build(json.loads(beside.read_text()))
        method.load_state_dict(load_file(path))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} with {beside.name} beside it is no exported method: {error}") from error
    return method


def build(described: dict[str, Any]) -> Method:
    """A method as the .json beside an exported one describes it, freshly initialised."""
    chosen = METHODS[described["method"]]
    config = chosen.Config(**described[described["method"]])
    return chosen(encoders.build(**described["encoder"]), config, described["steps"])


def _name(method: Method, part: str) -> str:
    """Of the module that is `part` of the method, in it; of the method itself empty.

    Raises:
        ValueError: it has none.
    """
    if part == "method":
        return ""
    modules = dict(method.named_modules())
    if part == "encoder":
        return next(name for name, module in modules.items() if module is method.trained_encoder())
    if f"{part}.encoder" not in modules:
        raise ValueError(f"{type(method).__name__} has no {part}: take --part encoder or --part method")
    return f"{part}.encoder"


def _fill(module: nn.Module, prefix: str, checkpoint: Path) -> None:
    """Give a module without memory its tensors, which have the names `prefix` + their own in the checkpoint."""
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in module.state_dict().items()}
    pieces = {prefix + name: whole_piece(tensor) for name, tensor in state.items()}
    try:
        together(lambda: read(pieces, checkpoint, some=True))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} does not hold what its settings say: {error}") from error
    module.load_state_dict(state, assign=True)


def _save(method: nn.Module, described: dict[str, Any], output: Path) -> None:
    """Both files, each in its place at once."""
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        part.touch()
        mode = part.stat().st_mode
        save_file(method.state_dict(), part)
        part.chmod(mode)  # save_file lets nobody else read
        os.replace(part, output)
        part.write_text(json.dumps(described, indent=2) + "\n")
        os.replace(part, output.with_suffix(".json"))
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
