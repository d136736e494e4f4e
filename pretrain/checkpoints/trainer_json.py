"""The content of trainer.json, which each checkpoint has: the train state, the settings and the versions."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema, InstanceOf, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads the keys of `typing.TypedDict` only from Python 3.12 on

from tessera.data.batch_sampler import batch_ranges
from tessera.runtime.files import read_bounded

NAME = "trainer.json"
MAX_BYTES = 2**26
"""Largest size of trainer.json in bytes."""
LARGEST_COUNT = 2**53
"""Largest number of steps or images in trainer.json. JSON readers represent larger numbers inexactly."""

Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST_COUNT)]
Number = Annotated[int, Field(strict=True, ge=-LARGEST_COUNT, le=LARGEST_COUNT)] | InstanceOf[float]
Numbers = dict[str, Number]
History = list[Annotated[list[Number], Field(min_length=2, max_length=2)]]
"""Steps and accuracies."""


def _checked(kind: Any) -> GetPydanticSchema:
    """Check a dictionary as a value of the type `kind`."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


def _numbers_but_the_rank(record: dict[str, Any]) -> dict[str, Any]:
    TypeAdapter(Numbers).validate_python({name: value for name, value in record.items() if name != "slowest_rank"})
    return record


def _valid_ranges(text: str | None) -> str | None:
    batch_ranges(text)
    return text


def _begins_with_a_count(row: list[Any]) -> list[Any]:
    TypeAdapter(Count).validate_python(row[0])
    return row


class Alarm(TypedDict, total=False):
    """State of the collapse alarm."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    in_a_row: Numbers
    largest_rank: Number
    rung: list[str]


class _SlowestRank(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    slowest_rank: str


Metrics = Annotated[_SlowestRank, AfterValidator(_numbers_but_the_rank)]
"""Metrics of a step: numbers, and the name of the slowest rank."""


class SavedScores(TypedDict, total=False):
    """Scores so far (`monitoring.verdict.Scores`)."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    history: History
    linear: History
    newest: Numbers
    last: Numbers
    pixels: Number


class SavedStream(TypedDict, total=False):
    """The settings of the section `stream` that a resumed run reads."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    growth: list[Annotated[list[Count], Field(min_length=3, max_length=3)]] | None


class SavedSettings(TypedDict):
    """The resolved settings of a run, and what determines the order of its samples. Older versions lack some."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    method: str
    encoder: dict[str, Any]
    stream: NotRequired[SavedStream]
    skip_batches: NotRequired[Annotated[str | None, AfterValidator(_valid_ranges)]]
    mixture: NotRequired[
        list[Annotated[list[Any], Field(min_length=1), AfterValidator(_begins_with_a_count)]]
    ]  # the weights of the sources from a step on
    shard_counts: NotRequired[list[Count]]


@dataclass
class TrainState:
    """Progress of a run, and other state that a resumed run needs."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count
    """Number of steps done, including skipped steps."""
    images: Count = 0
    """Number of images seen, over all processes."""
    skipped_steps: Count = 0
    """Number of steps whose loss or gradient was not finite."""
    skipped_in_a_row: Count = 0
    """Number of skipped steps since the last step that was not skipped. Steps that were skipped because of a float16
    overflow do not count."""
    corrupt_images: Count = 0
    """Number of times that a corrupt image was replaced by another image, over all processes."""
    alarm: Annotated[dict[str, Any], _checked(Alarm)] = field(default_factory=dict)
    """State of the collapse alarm."""
    scores: Annotated[dict[str, Any], _checked(SavedScores)] = field(default_factory=dict)
    """Accuracies so far (`monitoring.verdict.Scores`) of k-NN, or of the classifier if the method is supervised."""
    unscored: Annotated[dict[str, Any], _checked(Metrics)] = field(default_factory=dict)
    """Metrics of the last step if the run was stopped before it evaluated this step, else empty. The resumed run
    evaluates the step, and then writes its metrics."""


@dataclass(frozen=True)
class Trainer:
    """Content of trainer.json."""

    position: TrainState
    processes: Count
    engine: str
    optimizer_steps: Count
    loss_scale: dict[str, Any] | None
    """State of the gradient scaler of float16; None for other precisions."""
    settings: Annotated[dict[str, Any], _checked(SavedSettings)]
    versions: dict[str, Any]
    """Versions of the libraries of the run."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


_READER = TypeAdapter(Trainer)


class OtherVersionError(ValueError):
    """A trainer.json of another version of this program: an entry is missing, or unknown."""


def read(file: Path) -> Trainer:
    """Return the content of trainer.json.

    Raises:
        OtherVersionError: it was written by another version of this program.
        ValueError: it is not JSON, or a value is invalid.
        OSError: it cannot be read, or is larger than `MAX_BYTES`.
    """
    try:
        content = json.loads(read_bounded(file, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from error
    try:
        return _READER.validate_python(content)
    except ValidationError as error:
        problems = [([*problem["loc"]], problem["type"]) for problem in error.errors(include_input=False)]
    entries = (["position"], [])
    for place, kind in problems:
        other = kind in ("missing", "unexpected_keyword_argument") and place[:-1] in entries
        if other or (kind == "dataclass_type" and place in entries):
            raise OtherVersionError from None
    place = [str(part) for part in problems[0][0] if part != "position"]
    nested = place[0] in ("alarm", "scores", "settings")
    raise ValueError(f"has an invalid value of {'.'.join(place[: 2 if nested else 1])}")
