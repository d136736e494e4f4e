"""Runs of several tests in one launch, because starting a process takes longer than a small run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.ranks import Script


@pytest.fixture
def fresh_engine() -> Iterator[None]:
    """Begin and end without the settings of accelerate, which keeps them for the whole process."""
    for after in (False, True):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        if not after:
            yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Script]]:
    """Start `script FILE.json` with a list in the file: `start(script, runs, processes=2, engine="zero2")`.

    Whatever still runs at the end of the module is killed.
    """
    started: list[Script] = []

    def launch(
        script: Path, runs: list[Any], processes: int = 1, engine: str | None = None, **environment: str
    ) -> Script:
        folder = tmp_path_factory.mktemp("launch")
        (folder / "runs.json").write_text(json.dumps(runs))
        words = [str(folder / "runs.json")]
        started.append(Script(script, words, processes, engine, folder / "log.txt", environment))
        return started[-1]

    yield launch
    for run in started:
        run.kill()


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Parameters of the tests of the module that pytest was asked to run."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [item.callspec.params for item in items if item.path == request.path and hasattr(item, "callspec")]
