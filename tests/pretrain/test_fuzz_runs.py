"""Three hundred damaged settings, descriptions, weights and checkpoints; benchmarks/fuzz_runs.py does 100,000."""

import logging
from collections.abc import Iterator

import pytest

from benchmarks import fuzz_runs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_three_hundred_cases() -> None:
    assert fuzz_runs.fuzz(300, first_seed=7) == 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("read_metadata", lambda path: path.read_text()),  # an error that is not named
        ("load", lambda _: {}["damaged"]),
    ],
)
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, name: str, broken) -> None:
    if name == "load":
        monkeypatch.setattr(fuzz_runs.encoders, name, broken)
    else:
        monkeypatch.setattr(fuzz_runs, name, broken)
    with pytest.raises((KeyError, UnicodeDecodeError)):
        fuzz_runs.fuzz(60, first_seed=0)
