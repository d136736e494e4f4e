"""Damage to a checkpoint's files is found and named."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.pretrain.checkpoints import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"file-{number}").write_bytes(bytes([number]) * (100 + number))
    manifest.write(tmp_path, manifest.describe(tmp_path.iterdir()))
    return tmp_path


def test_holds_sizes_and_checksums(folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files["file-2"] == {"bytes": 102, "sha256": hashlib.sha256(b"\2" * 102).hexdigest()}
    assert sorted(files) == [f"file-{n}" for n in range(4)]
    assert manifest.wrong_sizes(folder) == manifest.wrong_checksums(folder) == []


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda f: os.truncate(f / "file-1", 50), "file-1 has 50 bytes and should have 101"),
        (lambda f: (f / "file-3").unlink(), "file-3 is missing"),
        (lambda f: (f / "file-9").touch(), "file-9 is not listed in manifest.json"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read (No such file or directory)"),
        (lambda f: os.truncate(f / "manifest.json", 50), "manifest.json does not contain a list of files"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json does not contain a list of files"),
        (
            lambda f: (f / "manifest.json").write_text('{"files": {"file-1": {"bytes": 101}}}'),
            "manifest.json does not contain a list of files",
        ),
    ],
)
def test_damage_is_named(folder: Path, harm: Callable[[Path], object], fault: str) -> None:
    harm(folder)
    assert manifest.wrong_sizes(folder) == [fault]


def test_processes_share_the_checksums(folder: Path) -> None:
    for number in range(4):
        (folder / f"file-{number}").write_bytes(b"x" * (100 + number))  # as long as before
    assert manifest.wrong_sizes(folder) == []
    for processes in (1, 2, 3, 7):
        found = [manifest.wrong_checksums(folder, rank, processes) for rank in range(processes)]
        each = sorted(fault for of_one in found for fault in of_one)
        assert each == [f"the checksum of file-{n} differs from manifest.json" for n in range(4)]
        assert max(map(len, found)) == -(-4 // processes)


def test_unreadable_files_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "_sha256", broken)
    assert manifest.wrong_checksums(folder)[0] == "file-0 cannot be read (Input/output error)"
