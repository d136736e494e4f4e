"""Numbers of the progress in words."""

import pytest

from tessera.pretrain.monitoring.progress_bar import duration, speed


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(45, "45 s"), (89, "89 s"), (720, "12 min"), (11_100, "3 h 05 min"), (86_399, "1 d 0 h"), (187_200, "2 d 4 h")],
)
def test_durations_are_readable(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_slow_runs_do_not_show_a_speed_of_zero() -> None:
    assert [speed(value) for value in (1234.4, 10.4, 9.84, 0.0382)] == [
        "1234 images/s", "10 images/s", "9.8 images/s", "0.038 images/s"
    ]  # fmt: skip
