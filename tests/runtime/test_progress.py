"""Progress of long loops in a log file."""

import pytest

from tessera.runtime import progress


def test_lines_with_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    seen = []
    for item in progress.track(range(10), "epochs", total=10):
        seen.append(item)
        now += 30  # seconds
    assert seen == list(range(10))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "epochs: 1 of 10, about 4.5 min left",
        "epochs: 3 of 10, about 3.5 min left",
        "epochs: 5 of 10, about 2.5 min left",
        "epochs: 7 of 10, about 1.5 min left",
        "epochs: 9 of 10, about 0.5 min left",
    ]


def test_other_processes_show_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    assert list(progress.track("ab", "epochs", total=2, shown=False)) == ["a", "b"]
    assert capsys.readouterr() == ("", "")
