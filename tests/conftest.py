"""Fixtures for tests of several folders, and the three suites: fast, default and slow."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.launched import ROOT, Launched, find_free_port

if TYPE_CHECKING:
    from tests.ranks import Script

# Before torch is imported: the models of the tests are so small that two threads take twice the CPU time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A command that is started under nohup, or in the background of a script, ignores these signals, as do its children.
# Some tests send them. A hangup does not end the tests, but their children get the default action.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
PRELOADED = [
    "tests.ranks", "tests.pretrain.small", "tessera.launch.accelerate_launch", "tessera.pretrain.job",
    "torch._dynamo", "torch.utils.flop_counter", "torch.utils.tensorboard",  # torch imports them where a run needs them
]  # fmt: skip
"""Modules that are imported once, by the server from which tests fork their processes."""

SUITES = {
    "fast": ("fast_suite", "run only the fast tests: neither those marked `medium` nor those marked `slow`"),
    "slow": ("slow_suite", "run only the tests marked `slow`, which a plain `pytest` leaves out"),
    "all": ("all_suites", "run all tests"),
}
MOST_WORKERS = 8
"""Largest number of pytest-xdist workers. Each needs 1 to 2 GB of memory."""
LEFT_OUT = pytest.StashKey[int]()
"""Number of tests that the chosen suite does not contain."""


@pytest.fixture(autouse=True)
def new_run() -> None:
    """Let each test log what an earlier test of the process has logged."""
    from tessera.data.failures import forget_warnings

    forget_warnings()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suites", "suites (default: all tests that are not marked `slow`)")
    for name, (destination, meaning) in SUITES.items():
        group.addoption(f"--{name}", dest=destination, action="store_true", help=meaning)


def pytest_configure(config: pytest.Config) -> None:
    """Choose what the server of processes imports."""
    slow = config.option.slow_suite or config.option.all_suites
    multiprocessing.set_forkserver_preload([*PRELOADED, "deepspeed"] if slow else PRELOADED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker for each core, and none for single files, as a worker takes about 10 seconds to start.

    The slow tests get one worker more, because some of them wait for minutes: for SLURM, for a lost process.
    """
    whole_folders = all(Path(argument).is_dir() for argument in config.args)
    workers = len(os.sched_getaffinity(0)) + bool(config.option.slow_suite)
    return min(workers, MOST_WORKERS) if whole_folders else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the chosen suite. Tests that are named one by one (FILE::TEST) always run."""
    if config.option.all_suites or config.option.markexpr or any("::" in argument for argument in config.args):
        return
    if config.option.slow_suite:
        unwanted = [item for item in items if not item.get_closest_marker("slow")]
    elif config.option.fast_suite:
        unwanted = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("medium")]
    else:
        unwanted = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=unwanted)
    config.stash[LEFT_OUT] = len(unwanted)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = len(unwanted)  # for `pytest_testnodedown` of the process that reports
    kept = set(items).difference(unwanted)
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over from a worker how many tests were left out."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests were left out, and how to run them."""
    count = config.stash.get(LEFT_OUT, 0)
    if not count or config.option.slow_suite:
        return
    if config.option.fast_suite:
        terminalreporter.write_line(f"{count} medium and slow tests were left out: `pytest --all` runs all tests")
    else:
        terminalreporter.write_line(f"{count} slow tests were left out: `pytest --slow` runs them")


@pytest.fixture
def free_port() -> int:
    """TCP port that no process listens on."""
    return find_free_port()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a run, for example `launch(["--output", ...], processes=2, engine="zero2")`.

    The arguments are those of `Launched`. Processes that still run at the end of the test are killed.
    """
    started: list[Launched] = []

    def start(
        arguments: list[str],
        processes: int = 1,
        script: Path = ROOT / "pretrain" / "run.py",
        engine: str | None = None,
        wrapped: bool = False,
        direct: bool = True,
        **environment: str,
    ) -> Launched:
        log = tmp_path / f"log-{len(started)}.txt"
        started.append(Launched(arguments, processes, engine, log, environment, script, wrapped, direct))
        return started[-1]

    yield start
    for run in started:
        run.kill()


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., "Script"]]:
    """Start a run like `launch`, but without its launcher: `fork(["--output", ...], processes=2, engine="zero2")`.

    Processes that still run at the end of the test are killed.
    """
    from tests.ranks import Script  # imported here, because it imports torch

    started: list[Script] = []

    def start(
        arguments: list[str],
        processes: int = 1,
        script: Path = ROOT / "pretrain" / "run.py",
        engine: str | None = None,
        **environment: str,
    ) -> Script:
        log = tmp_path / f"forked-{len(started)}.txt"
        started.append(Script(script, arguments, processes, engine, log, environment))
        return started[-1]

    yield start
    for run in started:
        run.kill()
