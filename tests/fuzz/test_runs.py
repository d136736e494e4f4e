"""Fuzz test of everything that a run of a stranger consists of: settings, descriptions, weights and checkpoints.

The cases replace values of any depth in valid files, and damage bytes. The reader must return a value or raise a
`UserError`, without running anything.
"""

import contextlib
import csv
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tessera import encoders
from tessera.encoders.weight_files import load_weights, read
from tessera.extras.exports.command import export
from tessera.extras.report.page import render, run_pictures
from tessera.extras.report.run_folders import read_runs
from tessera.extras.report.table import make_table, to_csv, to_markdown
from tessera.pretrain.checkpoints import manifest, resume
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.command_line import load
from tessera.pretrain.engines.metadata import read_metadata
from tessera.pretrain.monitoring import verdict
from tessera.pretrain.monitoring.collapse import CollapseAlarm, HealthConfig
from tessera.pretrain.monitoring.sinks import CSV, keep_lines
from tessera.pretrain.resolve import resolve
from tessera.runtime.user_error import UserError
from tests.extras.report.made import add_result, make_run, record
from tests.fuzz.cases import MOST_BYTES, bounded, damage, damaged, limited_addresses, run, seeds, status
from tests.pretrain.small import make, saver, walk

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3

large = [10**9, 2**31, 2**53, 2**63 - 1, 2**70, -(2**70), 10**400, 1e300]
numbers = st.sampled_from([0, -1, 1, 2, 3, 16, 0.5, -0.0, 1e-30, float("nan"), float("inf"), float("-inf"), *large])
special = st.sampled_from([None, True, False, "", "auto", "nan", "1e9", "\0"])
names = st.sampled_from(["variant", "dim", "depth", "heads", "vit_micro", "../x", "a" * 300, "\x1b[31m\nx"])
scalars = numbers | special | names | st.text(max_size=8) | st.integers()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)
kinds_of_change = st.sampled_from(["set", "delete", "rename", "add"])
ways = st.lists(st.integers(0, 10**6), min_size=1, max_size=4)
"""Ways to a value in nested lists and dictionaries: one number for each level."""
changes = st.lists(st.tuples(ways, kinds_of_change, values), max_size=3)
some_damage = st.lists(damage, max_size=3)
refused = contextlib.suppress(UserError)


def changed(value: Any, edits: list[tuple[list[int], str, Any]]) -> Any:
    """Return a copy of nested lists and dictionaries in which some values are replaced, removed, renamed or added."""
    value = json.loads(json.dumps(value))
    for way, kind, new in edits:
        spot = _spot(value, way)
        if spot is None:
            return new
        holder, key = spot
        if kind == "delete":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[str(new)[:300]] = holder.pop(key)
        elif kind == "add" and isinstance(holder, dict):
            holder["unknown"] = new
        else:
            holder[key] = new
    return value


def _spot(value: Any, way: list[int]) -> tuple[Any, Any] | None:
    """Return the list or dictionary to which a way leads, and the key in it; None if `value` is neither or empty."""
    spot = None
    for number in way:
        if not isinstance(value, list | dict) or not value:
            break
        key = sorted(value)[number % len(value)] if isinstance(value, dict) else number % len(value)
        spot, value = (value, key), value[key]
    return spot


def settings_files(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged settings files."""
    file = folder / "settings.yaml"
    config = load(["--data", "a.tar", "--encoder", "vit_micro", "--evaluation.val", "b.tar"])
    valid = json.loads(config.model_dump_json(exclude={"config"}))

    @given(changes, some_damage)
    @bounded
    def case(edits: list, bytes_: list) -> None:
        text = yaml.safe_dump(changed(valid, edits), sort_keys=False, allow_unicode=True)
        file.write_bytes(damaged(text.encode(errors="replace"), bytes_))
        with refused:
            loaded = load(["--config", str(file)])
            assert loaded.source.commands is not True
            resolve(loaded, 1000, classes=10)

    return case


def descriptions(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged encoder.json files."""
    path = folder / "encoder.safetensors"
    micro = sorted(name for name in encoders.VARIANTS if name.endswith("_micro"))
    valid = {}
    for name in micro:
        encoders.save(encoders.build(name), folder / f"{name}.safetensors", step=STEPS)
        valid[name] = json.loads((folder / f"{name}.json").read_text())

    @given(st.sampled_from(micro), changes, some_damage)
    @bounded
    def case(name: str, edits: list, bytes_: list) -> None:
        shutil.copy(folder / f"{name}.safetensors", path)
        text = json.dumps(changed(valid[name], edits))
        path.with_suffix(".json").write_bytes(damaged(text.encode(errors="replace"), bytes_))
        with refused:
            encoders.load(path)

    return case


def weight_files(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged .safetensors and torch files."""
    encoder = encoders.build("vit_micro", depth=1)
    encoders.save(encoder, folder / "w.safetensors")
    torch.save({"teacher": encoder.state_dict(), "epoch": 3}, folder / "w.pth")
    valid = {kind: (folder / f"w.{kind}").read_bytes() for kind in ("safetensors", "pth")}
    torch.save(encoder.state_dict(), folder / "old.pth", _use_new_zipfile_serialization=False)
    valid["old.pth"] = (folder / "old.pth").read_bytes()

    @given(st.sampled_from(sorted(valid)), some_damage, st.floats(-0.05, 0.05), st.none() | values)
    @bounded
    def case(kind: str, bytes_: list, part: float, other: Any) -> None:
        path = folder / f"damaged.{kind}"
        # the first and the last bytes hold the structure, and the others numbers
        places = [(how, where * part if part >= 0 else 1 + where * part, what) for how, where, what in bytes_]
        content = valid[kind]
        if other is not None and kind != "safetensors":  # a file of something else than weights
            torch.save(other, path)
            content = path.read_bytes()
        path.write_bytes(damaged(content, places))
        with refused:
            read(path)
        with refused:
            load_weights(encoders.build("vit_micro", depth=1), path)

    return case


def checkpoints(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged files of a checkpoint with a valid manifest, as a stranger would write it."""
    accelerator, engine = make()
    found = {"history": [[0, 0.1]], "linear": [[0, 0.1]], "pixels": 0.2, "newest": {"step": 0, "knn_top1": 0.1}}
    alarm = {"in_a_row": {"rank": 1}, "largest_rank": 1.0, "rung": ["rank"]}
    state = TrainState(STEPS, 12, alarm=alarm, scores=found, unscored={"loss": 1.0, "slowest_rank": "node-1 rank 3"})
    saver(folder / "run", accelerator, engine).save(state, engine.method.trained_encoder())
    good = folder / "run" / "checkpoints" / f"step-{STEPS:08d}"
    trainer = json.loads((good / "trainer.json").read_text())
    names = sorted(path.name for path in good.iterdir())
    copy = folder / "copy" / "step-00000003"

    @given(st.sampled_from(names), changes, some_damage, st.booleans())
    @bounded
    def case(name: str, edits: list, bytes_: list, signed: bool) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        if name == "trainer.json":
            (copy / name).write_text(json.dumps(changed(trainer, edits)))
        (copy / name).write_bytes(damaged((copy / name).read_bytes(), bytes_))
        if signed and name != manifest.NAME:
            manifest.write(copy, manifest.describe([path for path in copy.iterdir() if path.name != manifest.NAME]))
        with refused:
            export(copy, folder / "out.safetensors", "student")
        with refused:
            read_metadata(copy / ".metadata")
        with refused:
            checkpoint = resume.open_checkpoint(copy)
            resume.restore(checkpoint, accelerator, engine)
            go_on(checkpoint.trainer.position)

    return case


def train_states(folder: Path) -> Callable[..., None]:
    """Return a test case for trainer.json files with wrong values, which are restored, trained on and evaluated."""
    accelerator, engine = make()
    found = {"history": [[0, 0.1]], "linear": [[0, 0.1]], "pixels": 0.2, "newest": {"step": 0, "knn_top1": 0.1}}
    alarm = {"in_a_row": {"rank": 1}, "largest_rank": 1.0, "rung": ["rank"]}
    state = TrainState(STEPS, 12, alarm=alarm, scores=found, unscored={"loss": 1.0, "slowest_rank": "node-1 rank 3"})
    saver(folder / "run", accelerator, engine).save(state, engine.method.trained_encoder())
    (step,) = (folder / "run" / "checkpoints").glob("step-*")
    content = (step / "trainer.json").read_text()
    others = manifest.describe([path for path in step.iterdir() if path.name not in (manifest.NAME, "trainer.json")])
    places = st.sampled_from([(), (), ("position",), ("position", "scores"), ("position", "alarm"), ("settings",)])

    @given(places, st.lists(st.tuples(ways, kinds_of_change, values), min_size=1, max_size=2))
    @bounded
    def case(place: tuple[str, ...], edits: list) -> None:
        trainer = holder = {"all": json.loads(content)}
        for name in (within := ("all", *place))[:-1]:
            holder = holder[name]
        holder[within[-1]] = changed(holder[within[-1]], edits)
        (step / "trainer.json").write_text(json.dumps(trainer["all"]))
        manifest.write(step, others | manifest.describe([step / "trainer.json"]))
        with refused:
            checkpoint = resume.open_checkpoint(step)
            resume.restore(checkpoint, accelerator, engine)
            walk(engine)
            go_on(checkpoint.trainer.position)

    return case


def go_on(state: TrainState) -> None:
    """Use a restored train state as the next evaluation does."""
    scores = verdict.Scores(state.scores)
    scores.add(state.step + 1, {"knn_top1": 0.5, "linear_top1": 0.5} | state.unscored)
    check = CollapseAlarm(HealthConfig(), 100, memory=state.alarm).check
    signs = check({"step": state.step + 1, "feature_rank": 0.5}, {"uniform": "a sign"})
    outcome = verdict.outcome(scores.history, 100, 0, signs, scores.linear)
    assert verdict.line(scores, 20, 100, outcome, ["advice"])


def reports(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged records of a run, which `tessera report` reads."""
    lines = [record(step, 1.0 / step, knn_top1=0.1 * step) for step in (1, 2, 3)]
    good = make_run(folder / "good", lines)
    other = make_run(folder / "other", lines, method="mae")
    add_result(good, "knn.json", protocol="20-NN", data="val", top1=0.5, step=3, time="2026-11-22T10:00:00+00:00")
    names = ["config.yaml", "metrics.jsonl", "metrics.jsonl", "machine.jsonl", "evaluation/knn.json"]
    copy = folder / "copy"
    edit = st.tuples(ways, kinds_of_change, st.sampled_from([10**400, 1e308, float("nan"), -1]) | values)
    draws = st.sampled_from([True, *[False] * 7])  # charts take most of the time

    @given(st.sampled_from(names), st.lists(edit, max_size=3), some_damage | st.just([]), draws)
    @bounded
    def case(name: str, edits: list, bytes_: list, draw: bool) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        text = (copy / name).read_text()
        if name.endswith("jsonl"):
            text = changed_lines(text, edits)
        elif name.endswith("json"):
            text = json.dumps(changed(json.loads(text), edits))
        else:
            text = yaml.safe_dump(changed(yaml.safe_load(text), edits))
        (copy / name).write_bytes(damaged(text.encode(errors="replace"), bytes_))
        runs, _ = read_runs([copy, other])
        table = make_table(runs)
        assert "other" in to_csv(table)
        assert "other" in to_markdown(table)
        if draw:
            assert "other" in render("title", table, *run_pictures(runs))

    return case


def logs(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged logs, to which a resumed run appends."""
    rows = [{"step": step, "loss": 1.0 / step, "reason": "nan", "samples": ["a"]} for step in (1, 2, 3)]
    good = {"metrics.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows), "metrics.csv": "step,loss\n1,1.0\n2,\n"}

    @given(changes, some_damage)
    @bounded
    def case(edits: list, bytes_: list) -> None:
        texts = good | {"metrics.jsonl": changed_lines(good["metrics.jsonl"], edits)}
        for name, text in texts.items():
            (folder / name).write_bytes(damaged(text.encode(errors="replace"), bytes_))
        keep_lines(folder / "metrics.jsonl", 2)
        assert all(json.loads(line)["step"] <= 2 for line in (folder / "metrics.jsonl").read_bytes().splitlines())
        CSV(folder, 2, {}).write(3, {"loss": 1.0})
        with (folder / "metrics.csv").open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file)][-1] == "3"

    return case


def changed_lines(text: str, edits: list) -> str:
    """Return a copy of a JSON lines file with changed values."""
    lines = changed([*map(json.loads, text.splitlines())], edits)
    return "".join(f"{json.dumps(line)}\n" for line in (lines if isinstance(lines, list) else [lines]))


def pickles(folder: Path) -> Callable[..., None]:
    """Return a test case for .metadata files that name functions."""
    trap = folder / "trap"
    calls = st.sampled_from(
        ["os.mkdir", "posix.system", "builtins.eval", "subprocess.Popen", "torch.load", "torch.Size"]
    )

    @given(calls, st.sampled_from([0, 2, 4]), st.booleans())
    @bounded
    def case(function: str, protocol: int, legacy: bool) -> None:
        module, _, name = function.rpartition(".")
        word = str(trap) if name in ("mkdir", "load", "Size") else f"mkdir {trap}"
        if legacy:
            content = f"c{module}\n{name}\n(V{word}\ntR.".encode()
        else:
            content = pickle.dumps((word,), protocol)[:-1] + f"c{module}\n{name}\n".encode() + b"\x8c\x01x\x85R."
        (folder / "pickled").write_bytes(content)
        with refused:
            read_metadata(folder / "pickled")
        assert not trap.exists(), f"{function} ran"

    return case


KINDS = [
    (settings_files, 100),
    (descriptions, 150),
    (weight_files, 300),
    (checkpoints, 40),
    (train_states, 150),
    (reports, 50),
    (logs, 100),
    (pickles, 100),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(("kind", "cases"), KINDS)
def test_damaged_files_of_a_run_are_refused_or_read(
    kind: Callable[[Path], Callable[..., None]], cases: int, seed: int, tmp_path: Path
) -> None:
    for name in ("first", "cases"):
        (tmp_path / name).mkdir()
    run(kind(tmp_path / "first"), 20, seed=0)  # to load everything that the cases need
    with limited_addresses(2**32):
        before = status("VmRSS")
        run(kind(tmp_path / "cases"), cases, seed)
        grown = status("VmRSS") - before
    assert grown < MOST_BYTES, f"the memory grew by {grown / 2**20:,.0f} MiB"


def test_errors_without_a_name_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "read_metadata", lambda path: path.read_text())
    with pytest.raises(UnicodeDecodeError):
        run(pickles(tmp_path), 20, seed=0)
    case = descriptions(tmp_path)
    monkeypatch.setattr(encoders, "load", lambda _: {}["damaged"])
    with pytest.raises(KeyError):
        run(case, 20, seed=0)
