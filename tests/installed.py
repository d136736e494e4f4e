"""Packages that look installed: a folder for `sys.path` with the metadata of a package, as pip writes it."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launched import ROOT

IJEPA = ROOT / "examples" / "ijepa"


def needs_extra(name: str) -> pytest.MarkDecorator:
    """Return the mark of a test of the core that uses an extra. Without extras/NAME, the test is skipped."""
    absent = not (ROOT / "extras" / name / "__init__.py").exists()
    return pytest.mark.skipif(absent, reason=f"needs extras/{name}")


def write_metadata(folder: Path, package: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of a package with entry points, given as group -> name -> value, to `folder`."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = []
    for group, values in points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in values.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))


def install_ijepa(folder: Path) -> list[str]:
    """Write the metadata of examples/ijepa to `folder`. Return the folders to add to `sys.path`."""
    project = tomllib.loads((IJEPA / "pyproject.toml").read_text())["project"]
    write_metadata(folder, project["name"], project["entry-points"])
    return [str(folder), str(IJEPA)]
