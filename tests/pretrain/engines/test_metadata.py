"""Nothing in a checkpoint of a stranger is executed, and nothing outside of it is read."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from tessera.pretrain.checkpoints import manifest, resume
from tessera.pretrain.checkpoints.resume import CheckpointError
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.engines.metadata import MetadataError, read_metadata
from tessera.pretrain.method_state import load_run
from tessera.pretrain.methods import METHODS
from tests.pretrain.small import make, saver, tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    accelerator, engine = make()
    saver(tmp_path, accelerator, engine).save(TrainState(3, 12), engine.method.trained_encoder())
    return tmp_path / "checkpoints" / "step-00000003"


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def signed(checkpoint: Path) -> None:
    """Write the manifest anew, as a stranger can, too."""
    files = [path for path in checkpoint.iterdir() if path.name != manifest.NAME]
    manifest.write(checkpoint, manifest.describe(files))


@pytest.mark.parametrize("file", [".metadata", "random-00000.pt", "__0_0.distcp"])
@pytest.mark.parametrize("function", [os.system, eval])
def test_a_hostile_pickle_is_named_and_not_run(checkpoint: Path, tmp_path: Path, file: str, function: Any) -> None:
    trap = tmp_path / "ran"
    word = {os.system: f"mkdir {trap}", eval: f"__import__('os').mkdir({str(trap)!r})"}[function]
    hostile = Call(function, word)
    if file == ".metadata":
        (checkpoint / file).write_bytes(pickle.dumps(hostile))
    else:
        length = (checkpoint / file).stat().st_size
        torch.save({"python": hostile}, checkpoint / file)
        os.truncate(checkpoint / file, max(length, (checkpoint / file).stat().st_size))
    signed(checkpoint)
    accelerator, engine = make(1)
    with pytest.raises(CheckpointError) as caught:
        resume.restore(resume.open_checkpoint(checkpoint), accelerator, engine)
    if file == ".metadata":
        assert f"{function.__module__}.{function.__name__}, which no checkpoint needs" in str(caught.value)
    if file != "random-00000.pt":  # another run does not read it
        with pytest.raises(CheckpointError):
            load_run(checkpoint, METHODS.names())
    assert not trap.exists()


def _change(checkpoint: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    signed(checkpoint)


def test_members_of_an_enumeration_may_be_written_as_by_an_early_python_3_11(checkpoint: Path) -> None:
    class EarlyPickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented

    expected, file = read_metadata(checkpoint / ".metadata"), io.BytesIO()
    EarlyPickler(file).dump(pickle.loads((checkpoint / ".metadata").read_bytes()))
    assert b"getattr" in file.getvalue()
    (checkpoint / ".metadata").write_bytes(file.getvalue())
    assert read_metadata(checkpoint / ".metadata").state_dict_metadata == expected.state_dict_metadata


@pytest.mark.parametrize(
    "arguments",
    [("os", "system"), (_MEM_FORMAT_ENCODING, "__init__"), (_MEM_FORMAT_ENCODING, "__members__"), ("a", [])],
)
def test_no_other_attribute_is_read(tmp_path: Path, arguments: tuple[Any, Any]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(getattr, *arguments)))
    with pytest.raises(MetadataError, match=r"it calls builtins\.getattr, which could run code"):
        read_metadata(tmp_path / ".metadata")


def _first(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def _tensor(metadata: Any) -> Any:
    return next(iter(metadata.state_dict_metadata.values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(_first(m), "relative_path", "../../secret"), "outside of the checkpoint"),
        (lambda m: setattr(_first(m), "relative_path", "/etc/passwd"), "outside of the checkpoint"),
        (lambda m: setattr(_first(m), "offset", -1), "negative position"),
        (lambda m: setattr(_first(m), "length", "9"), "negative position"),
        (lambda m: setattr(_first(m), "transform_descriptors", ["zstd"]), "compressed"),
        (lambda m: setattr(_tensor(m), "size", torch.Size([2, 3])), "not flattened"),
        (lambda m: setattr(_tensor(m), "size", torch.Size([-5])), "negative size"),
        (lambda m: m.state_dict_metadata.update(x=3), "not a tensor"),
        (lambda m: setattr(m, "storage_data", None), "damaged"),
    ],
)
def test_wrong_contents_are_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], object], said: str
) -> None:
    _change(checkpoint, change)
    accelerator, engine = make(1)
    with pytest.raises(CheckpointError, match=said):
        resume.restore(resume.open_checkpoint(checkpoint), accelerator, engine)
    assert "Traceback" not in caplog.text


def test_sizes_that_do_not_fit_are_refused_before_memory_is_taken(checkpoint: Path) -> None:
    _change(checkpoint, lambda m: setattr(_tensor(m), "size", torch.Size([2**50])))
    before = tensors(make(1)[1])
    accelerator, engine = make(1)
    with pytest.raises(CheckpointError, match="1125899906842624 elements instead of"):
        resume.restore(resume.open_checkpoint(checkpoint), accelerator, engine)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(engine).items())


def test_a_pipe_is_not_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        read_metadata(pipe)
    (checkpoint / "trainer.json").unlink()
    os.mkfifo(checkpoint / "trainer.json")
    with pytest.raises(CheckpointError, match=r"trainer\.json cannot be read \(not a regular file\)"):
        resume.open_checkpoint(checkpoint)


@pytest.mark.parametrize("content", [b"", b"\x80\x05.", b"cos\nsystem\n.", b"\x80\x05]\x94h\x00h\x00.", b"P1\n."])
def test_any_bytes_raise_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(MetadataError):
        read_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize(
    "change",
    [
        {"position": 3},
        {"position": {"step": "x"}},
        {"position": {"step": 2**70}},
        {"position": {"step": 1, "alarm": {"rung": 3}}},
        {"position": {"step": 1, "alarm": {"rung": [{}]}}},
        {"position": {"step": 1, "scores": {"history": [[0, "x"]]}}},
        {"position": {"step": 1, "scores": {"linear": [[0, 0.5, 1]]}}},
        {"position": {"step": 1, "unscored": {"loss": 10**400}}},
        {"processes": None},
        {"settings": []},
        {"settings": {"method": 3, "encoder": {}}},
        {"settings": {"method": "dino", "encoder": "vit_small"}},
    ],
)
def test_wrong_values_of_trainer_json_are_named(checkpoint: Path, change: dict) -> None:
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    (checkpoint / "trainer.json").write_text(json.dumps(trainer | change))
    signed(checkpoint)
    said = r"trainer\.json has an invalid value of" if change != {"position": 3} else "written by another version"
    with pytest.raises(CheckpointError, match=said):
        resume.open_checkpoint(checkpoint)
    with pytest.raises(CheckpointError):
        load_run(checkpoint, METHODS.names())


def test_compressed_random_states_are_refused_before_they_expand(checkpoint: Path) -> None:
    states = checkpoint / "random-00000.pt"
    with zipfile.ZipFile(states) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(states, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr("archive/data/9", bytes(2**27))
    signed(checkpoint)
    with pytest.raises(CheckpointError, match=r"random-00000\.pt contains no random states"):
        resume.restore(resume.open_checkpoint(checkpoint), *make(1))


def test_deep_json_is_named(checkpoint: Path) -> None:
    (checkpoint / "trainer.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        resume.open_checkpoint(checkpoint)
    (checkpoint / manifest.NAME).write_text("[" * 100_000)
    assert manifest.wrong_sizes(checkpoint) == ["manifest.json does not contain a list of files"]
