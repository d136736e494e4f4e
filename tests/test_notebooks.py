"""The notebooks of examples/, executed with a few steps."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.launched import ROOT

PRINTED = {
    "first_encoder": r"20-NN: \d+\.\d%, linear probe: \d+\.\d%",
    "own_method": r"runs/barlow_twins: 20-NN \d+\.\d% -> \d+\.\d%",
    "compare_runs": r"best: \w+",
}
"""Maps each notebook to a pattern of its last printed results."""


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = "".join(str(cell.get("outputs", "")) for cell in notebook.cells)
    assert "image/png" in stored or path.stem == "own_method"
    assert not re.search(r"/(work|home|root)/", stored)  # no path of the machine on which it was executed
    for cell in notebook.cells:
        cell.source = re.sub(r"^STEPS = \d+", "STEPS = 6", cell.source, flags=re.MULTILINE)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert re.search(PRINTED[path.stem], printed)
