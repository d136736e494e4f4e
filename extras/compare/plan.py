"""The plan of a comparison: its settings, and the steps of each method.

The steps are decided once, from the measured compute of a few steps, and written to plan.json before the first cell
starts. The cells are then a function of plan.json and of the settings.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from tessera.encoders import WEIGHTS
from tessera.pretrain.checkpoints.continuing import NOT_COMPARED
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.methods import METHODS
from tessera.runtime.files import atomic_write
from tessera.runtime.settings import Settings, SettingsError, flags, settings_of, validate

FILE = "plan.json"
DECIDED = ("method", "seed", "epochs", "resume", "overwrite", "dry_run", "evaluate_every", "record_every")
"""Settings of a run that the comparison decides."""
RUNGS = (1 / 4, 1 / 2)
"""Shares of the steps after which `halve` stops methods."""
TRIALS = "trials"
"""Folder of the trials, and value of `only`."""
BEFORE, RAW = "before training", "raw pixels"
"""Names of the encoder before training and of the pixels in the result."""
LEAST_POINTS = 4
"""Number of evaluations of which one is at each of `RUNGS`."""


class TrainingSettings(Settings):
    """Settings of trainings that are compared, which `tessera compare` and `tessera adapt` share."""

    fixed: ClassVar[tuple[str, ...]] = ("points",)
    """Settings of this class that a command that goes on must not change, beside minutes or steps."""
    methods: tuple[str, ...] = ("lejepa", "dino", "dinov2", "mae")
    """methods to compare"""
    minutes: float = Field(60.0, gt=0)
    """compute of each training in minutes of processor time, or of GPU time, without start and evaluations"""
    seeds: int = Field(3, ge=1)
    """number of trainings of each method, with the seeds 0, 1, ..."""
    steps: int | None = Field(None, ge=1)
    """steps of each training, in place of minutes: equal steps, not equal compute"""
    size: int | None = Field(None, ge=1)
    """side of the global crops of all methods in pixels, except of those with a flag of their own, such as --mae.size;
    default: that of each method"""
    points: int = Field(8, ge=1)
    """number of evaluations of each training, without the one before the first step"""
    halve: bool = False
    """after a quarter and after half of the steps, stop the half of the methods with the lower scores"""
    output: Path = Path("runs/compare")
    """folder of the cells and of the result; a command that is started again goes on there"""


class CompareSettings(TrainingSettings):
    """Compare methods at equal compute. All other flags are those of `tessera pretrain`; a flag of the section of a
    method, such as --mae.size, goes to the runs of this method."""

    others: dict[str, str] = Field(default_factory=dict)
    """other libraries by name, each as `PYTHON ADAPTER.py`: the Python of its environment, and a file that calls it"""
    beside: tuple[str, ...] = ()
    """encoders to score beside the methods: timm:NAME, a run folder or a weight file"""
    jobs: str | None = None
    """submit the trainings to SLURM, each as a job with these options of sbatch, such as
    --jobs='--gpus-per-node=1 --time=4:00:00'"""
    only: str | None = None
    """train only this cell, such as mae-0, or measure only the steps (trials); several machines may share the output"""


Own = TypeVar("Own", bound=TrainingSettings)


class Plan(NamedTuple):
    """Steps of each method."""

    steps: dict[str, int]
    planned: dict[str, float]
    """Planned compute of a training in seconds by method. Empty if `steps` was given."""
    gpu: bool
    """True if compute is GPU time, False if it is processor time."""


class Cell(NamedTuple):
    """One training."""

    method: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"

    def every(self, points: int) -> int:
        """Return the number of steps between two evaluations."""
        return max(self.steps // points, 1)


def load_settings(
    argv: Sequence[str], program: str, kind: type[Own] = CompareSettings
) -> tuple[Own, dict[str, list[str]]]:
    """Return the settings of a command, and the flags of `tessera pretrain` for each method.

    Args:
        argv: flags of the command.
        program: name of the command, for its help.
        kind: class of its settings.

    Raises:
        SettingsError: a setting is unknown or invalid, or is one that the comparison decides.
    """
    own, rest = list[str](), list[str]()
    names, words = settings_of(kind), rest
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        if word in ("-h", "--help"):
            words = own if following.startswith("-") else rest  # `--help TOPIC` is about the settings of a run
        elif word.startswith("--"):
            words = own if word[2:].partition("=")[0] in names else rest
        words.append(word)
    settings = validate(kind, flags(kind, own, program))
    known = METHODS.names()
    if unknown := [name for name in settings.methods if name not in known]:
        raise SettingsError(f"--methods: there is no method {unknown[0]}. Choose any of {', '.join(known)}.")
    if settings.halve and settings.points < LEAST_POINTS:
        raise SettingsError(f"--halve needs scores on the way. Give --points of at least {LEAST_POINTS}.")
    if len(set(settings.methods)) < len(settings.methods):
        raise SettingsError("--methods names a method twice. Remove one of them.")
    given = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
    if decided := given & {*DECIDED, "metrics.sinks", "checkpoint_every"}:
        raise SettingsError(f"--{min(decided)} is decided by the comparison. Remove it.")
    for method in {name.partition(".")[0] for name in given} & {*known} - {*settings.methods}:
        raise SettingsError(f"--{method}. belongs to a method that is not compared. Add it to --methods, or remove it.")
    return settings, {method: _words(rest, method, settings.size) for method in settings.methods}


def check_own(settings: CompareSettings) -> None:
    """Check the settings of this command alone.

    Raises:
        SettingsError: a name, an adapter or a cell cannot be used.
    """
    for name, command in settings.others.items():
        if not re.fullmatch(r"[\w.]+", name) or name in METHODS.names():
            raise SettingsError(f"--others: {name!r} is not a new name of letters, digits, dots and underscores.")
        if len(words := shlex.split(command)) < 2 or not Path(words[-1]).is_file():
            raise SettingsError(
                f"--others: {command!r} does not end with an adapter that exists. Give `PYTHON ADAPTER.py` for {name}."
            )
    taken = [*settings.methods, *settings.others, BEFORE, RAW]
    for number, name in enumerate(settings.beside):
        if name in (*taken, *settings.beside[:number]):
            raise SettingsError(f"--beside: {name} is given twice, or is the name of a method. Give the path of a run.")
        if ":" not in name and not Path(name).exists():
            raise SettingsError(f"--beside: there is no {name}. Give a run folder, a weight file or timm:NAME.")
    names = [f"{name}-{seed}" for name in (*settings.methods, *settings.others) for seed in range(settings.seeds)]
    if settings.only not in (None, TRIALS, *names):
        raise SettingsError(f"--only: there is no cell {settings.only}. Choose {TRIALS} or any of {', '.join(names)}.")
    if settings.halve and (settings.jobs is not None or settings.only):
        raise SettingsError("--halve compares trainings on their way, which --jobs and --only keep apart. Remove it.")


def _words(rest: Sequence[str], method: str, size: int | None) -> list[str]:
    """Return the flags of the runs of a method."""
    words, kept = ["--method", method], True
    for word in rest:
        if word.startswith("--"):
            section, dot, _ = word[2:].partition(".")
            kept = not (dot and section in METHODS.names() and section != method)
        if kept:
            words.append(word)
    if size is not None:
        fields = METHODS[method].Config.model_fields
        name = next((name for name in ("global_size", "size") if name in fields), None)
        if name is None:
            raise SettingsError(f"--size: {method} has no setting for the size of its crops. Remove --size.")
        if not any(word.partition("=")[0] == f"--{method}.{name}" for word in words):
            words += [f"--{method}.{name}", str(size)]
    return words


def check(words: Mapping[str, Sequence[str]]) -> RunConfig:
    """Check the settings of all methods, and return those of the first one.

    Raises:
        SettingsError: a setting is unknown or invalid, or no data are given.
    """
    found = [load(list(one)) for one in words.values()]
    if found[0].data.shards is None:
        raise SettingsError("--data SHARDS is missing. It names the images to train on.")
    if found[0].evaluation.val is None and not found[0].evaluation.view_images:
        raise SettingsError(
            "Nothing would be scored. Give labelled images as --evaluation.val, or an --evaluation.view_images above 0."
        )
    if found[0].data.exclude is not None and found[0].evaluation.train is None:
        raise SettingsError(
            "--data.exclude leaves images out of the trainings only, and scores would use all images of --data. Give "
            "labelled images without these as --evaluation.train."
        )
    return found[0]


def cells(settings: TrainingSettings, plan: Plan) -> list[Cell]:
    """Return all trainings: all methods with seed 0, then all with seed 1, ..."""
    return [Cell(method, seed, plan.steps[method]) for seed in range(settings.seeds) for method in settings.methods]


def other_cells(settings: CompareSettings) -> list[tuple[str, int]]:
    """Return name and seed of all trainings of other libraries."""
    return [(name, seed) for seed in range(settings.seeds) for name in settings.others]


def read_plan(settings: TrainingSettings, words: Mapping[str, Sequence[str]]) -> Plan | None:
    """Return the plan in the output folder, or None if it has none. It may lack a method.

    Raises:
        SettingsError: the folder holds a comparison with other settings.
    """
    path = settings.output / FILE
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    own, fixed = stored["settings"], _fixed(settings, words)
    if not {*MERGED} <= own.keys():
        raise SettingsError(f"{path} was written by another version of Tessera. Choose another --output.")
    pairs = [("", own, {name: value for name, value in fixed.items() if name not in MERGED})]
    for name in MERGED:
        pairs += [(f"{key}: ", own[name][key], now) for key, now in fixed[name].items() if key in own[name]]
    differing = [
        f"{group}{name} is {before.get(name)} there, and {value} now"
        for group, before, now in pairs
        for name, value in now.items()
        if before.get(name) != value and (name in before or not group)  # only a newer version has the setting
    ]
    if differing:
        more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
        raise SettingsError(
            f"{settings.output} holds a comparison with other settings: {differing[0]}{more}. Give the settings from "
            "there again, or choose another --output."
        )
    return Plan(stored["steps"], stored["planned"], stored["gpu"])


def write_plan(settings: TrainingSettings, words: Mapping[str, Sequence[str]], plan: Plan) -> None:
    """Write plan.json. Steps of methods that it already has stay."""
    path = settings.output / FILE
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    fixed = _fixed(settings, words)
    fixed |= {name: old.get("settings", {}).get(name, {}) | fixed[name] for name in MERGED}
    entries = {
        "settings": fixed,
        "steps": plan.steps | old.get("steps", {}),
        "planned": plan.planned | old.get("planned", {}),
        "gpu": old.get("gpu", plan.gpu),
    }
    with atomic_write(path, sync=True) as part:
        part.write_text(json.dumps(entries, indent=1) + "\n")


MERGED = ("runs", "others")
"""Settings in plan.json that may get more entries: those of the runs of each method, and of other libraries."""


def _fixed(settings: TrainingSettings, words: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the settings that must not change. Methods, seeds and encoders beside them may be added."""
    found: dict[str, Any] = {"minutes": None if settings.steps else settings.minutes, "steps": settings.steps}
    found |= {name: getattr(settings, name) for name in settings.fixed}
    found["runs"] = {method: _of_run(load(list(one)), method) for method, one in words.items()}
    found["others"] = {}
    for name, command in settings.others.items() if isinstance(settings, CompareSettings) else ():
        content = Path(shlex.split(command)[-1]).read_bytes()
        found["others"][name] = {"command": command, "sha256": hashlib.sha256(content).hexdigest()}
    return found


def _of_run(config: RunConfig, method: str) -> dict[str, Any]:
    """Return the settings that decide what a run of a method learns, by dotted name. A settings file that changes is
    seen by its values."""
    left_out = (*DECIDED, *NOT_COMPARED, "steps", "checkpoint_every")

    def flat(model: BaseModel, prefix: str = "") -> dict[str, Any]:
        values, found = model.model_dump(mode="json"), dict[str, Any]()
        for name, value in values.items():
            own = getattr(model, name)
            if isinstance(own, BaseModel):
                if prefix or name not in METHODS.names() or name == method:
                    found |= flat(own, f"{prefix}{name}.")
            elif prefix + name not in left_out:
                found[prefix + name] = value
        return found

    start = {} if config.init_from is None else {"weights of init_from": identity(config.init_from)}
    return flat(config) | start


def identity(name: str) -> str:
    """Return a hash of the name of an encoder and of its weight file, if it has one, so that other weights are scored
    anew."""
    found, path = hashlib.sha256(name.encode()), Path(name)
    file = path / WEIGHTS if path.is_dir() else path
    if file.is_file():
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:16]
