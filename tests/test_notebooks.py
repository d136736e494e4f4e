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

SHORTER = {"STEPS // 6": "STEPS // 2", "batch_norm=True)": "batch_norm=True, epochs=2)"}
"""Fewer evaluations, and a shorter linear probe."""


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = "".join(str(cell.get("outputs", "")) for cell in notebook.cells)
    assert "image/png" in stored or path.stem == "own_method"
    assert not re.search(r"/(work|home|root)/", stored)  # no path of the machine on which it was executed
    for cell in notebook.cells:
        cell.source = re.sub(r"^STEPS = \d+", "STEPS = 6", cell.source, flags=re.MULTILINE)
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert re.search(PRINTED[path.stem], printed)


SETTINGS = "encoder='vit_micro', batch_size=8, workers=0, evaluation={'pictures': 0, 'linear_iterations': 0}"
CELLS = (
    "import os, signal, threading, time, tessera",
    "tessera.pretrain(stps=3)",
    """def press():
    while not (os.path.exists("run/metrics.jsonl") and len(open("run/metrics.jsonl").readlines()) > 2):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()"""
    f"\nrun = tessera.pretrain(output='run', steps=5000, record_every=1, {SETTINGS})\nrun.finished",
)


@pytest.mark.slow
def test_a_notebook_shows_a_bar_an_error_of_one_line_and_how_to_continue(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": tmp_path}}).execute()
    _, wrong, stopped = (cell.outputs for cell in notebook.cells)
    assert [output.get("traceback") for output in wrong] == [
        ["SettingsError: unknown setting 'stps'; did you mean 'steps'?"]
    ]
    text = "".join(output.get("text", "") for output in stopped)
    assert text.startswith("Opening the training data.\n")
    assert re.search(r"\r +0%\|.*\| [1-9]\d*/5000 \[", text)
    assert "To continue: tessera.pretrain(resume=True, output='run')" in text
    assert stopped[-1]["data"]["text/plain"] == "False"
