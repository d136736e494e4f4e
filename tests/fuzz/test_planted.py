"""The fuzzers find defects that are planted on purpose, within a few seeds and with the cases of their own tests.

A defect changes the text of one function.
"""

import inspect
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tessera.data import headers
from tessera.data.shards import index, tar_index
from tessera.encoders import weight_files as checkpoint
from tessera.extras.report import run_folders as runs
from tessera.pretrain.checkpoints import trainer_json
from tessera.pretrain.engines import metadata
from tessera.pretrain.monitoring import sinks
from tests.fuzz import test_hostile, test_runs, test_shards
from tests.fuzz.cases import limited_addresses, run, seeds

CASES = dict([*test_hostile.KINDS, *test_runs.KINDS, *test_shards.KINDS])
"""Number of cases of each fuzzer, for one seed."""
ROUNDS = 5
"""Seeds until a defect is missed."""


class Defect(NamedTuple):
    """A defect, and the error by which a fuzzer finds it."""

    function: Any
    right: str
    """Part of the source of the function that occurs once."""
    wrong: str
    """Text that replaces `right`."""
    fuzzer: Callable[[Path], Callable[..., None]]
    error: type[Exception]
    message: str
    """Regular expression for a part of the message. Empty if the message differs between damaged files."""


DEFECTS = {
    "a negative size in a tar header": Defect(
        tar_index.scan_tar, "member.size < 0 or ", "", test_shards.tars, AssertionError, "an image outside of the tar"
    ),
    "a number in a tar header that is none": Defect(
        tar_index._number, 'digits.strip(b"01234567")', "False", test_shards.tars, ValueError, "invalid literal"
    ),
    "a damaged pax record": Defect(
        tar_index._pax, "record is None or ", "", test_hostile.hostile_names, AttributeError, "'NoneType'"
    ),
    "a place in index.json that is a number": Defect(
        index.parse_folder, "map(str, ", "(", test_hostile.hostile_names, TypeError, "expected str instance"
    ),
    "an image that ends after its shard": Defect(
        index._check, " & (sizes <= size - offsets)", "", test_shards.indices, AssertionError, "outside of the shard"
    ),
    "more pixels than the limit": Defect(
        headers.check_sides, "width * height >", "width >", test_hostile.hostile_images, AssertionError, "more pixels"
    ),
    "a scan without components": Defect(
        headers.read_jpeg, " or not body", "", test_hostile.hostile_images, IndexError, "out of range"
    ),
    "a file that ends one byte after a marker": Defect(
        headers._next_marker, "end() + 2", "end() + 1", test_hostile.hostile_images, IndexError, "out of range"
    ),
    "values of trainer.json that are not checked": Defect(
        trainer_json.read,
        "_READER.validate_python(content)",
        "Trainer(**content | {'position': TrainState(**content['position'])})",
        test_runs.train_states,
        Exception,
        "",
    ),
    "a line of metrics.jsonl that is a number": Defect(
        sinks._step_of, ", TypeError", "", test_runs.logs, TypeError, "not subscriptable"
    ),
    "a step in metrics.csv that is none": Defect(
        sinks.CSV._rows, 'int(row["step"])\n', "\n", test_runs.logs, Exception, "step"
    ),
    "a number in a report that is too large": Defect(
        runs.is_number, " and abs(value) <= LARGEST", "", test_runs.reports, Exception, "int|nan"
    ),
    "a line of a report that is no object": Defect(
        runs.read_lines, "isinstance(value, dict)", "value", test_runs.reports, AttributeError, "has no attribute 'get'"
    ),
    "a pickle that names a function": Defect(
        metadata._Unpickler.find_class,
        "except KeyError:\n",
        "except KeyError:\n        return pickle.Unpickler.find_class(self, module, name)\n",
        test_runs.pickles,
        AssertionError,
        "ran",
    ),
    "a damaged archive of weights": Defect(
        checkpoint._check_file, "zipfile.BadZipFile, ", "", test_runs.weight_files, zipfile.BadZipFile, ""
    ),
    "weights that are no dictionary": Defect(
        checkpoint._check_dict,
        "not isinstance(checkpoint, Mapping)",
        "False",
        test_runs.weight_files,
        Exception,
        "has no attribute|not iterable",
    ),
}


def plant(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the code of a function, also for the modules that have imported it by name."""
    source = textwrap.dedent(inspect.getsource(defect.function))
    assert source.count(defect.right) == 1, f"{defect.function.__qualname__} has changed: plant another defect"
    names = dict(defect.function.__globals__)
    exec(source.replace(defect.right, defect.wrong), names)
    monkeypatch.setattr(defect.function, "__code__", names[defect.function.__name__].__code__)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    defect = DEFECTS[name]
    case = defect.fuzzer(tmp_path)
    plant(defect, monkeypatch)
    # Hypothesis draws some values from the source of the modules that are imported, so a seed differs between machines.
    with pytest.raises(defect.error, match=defect.message), limited_addresses(2**32):
        _run_rounds(case, CASES[defect.fuzzer])


def _run_rounds(case: Callable[..., None], cases: int) -> None:
    for seed in seeds(ROUNDS):
        run(case, cases, seed=seed, shrink=False)
