"""Settings from flags and files: what is typed, what is refused, and what a shell must not change."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from tessera.runtime.settings import (
    Derived,
    Layer,
    Layers,
    Positional,
    Section,
    Settings,
    SettingsError,
    derived,
    flags,
    help_text,
    merge,
    parse,
    read_yaml,
    settings_of,
    suggestion,
    validate,
)


class Inner(Section):
    """A section."""

    rate: float = Field(default=0.1, gt=0, le=1)
    """a rate"""
    pair: tuple[float, float] = (0.0, 1.0)
    """two numbers"""
    shards: str | list[str] | None = None
    """SHARDS"""
    fast: bool = False
    """a switch"""
    slow: bool | None = None
    """a switch that may be left open"""
    size: int | tuple[int, int] = 3
    """one number or two"""


class Job(Settings):
    """A job."""

    steps: int = Field(default=3, ge=1)
    """steps"""
    data: str | list[str] | dict[str, float] | None = None
    """SHARDS"""
    on: bool = True
    """a switch that is on"""
    careful: bool | Literal["half"] = False
    """a switch that also takes a word"""
    inner: Inner = Inner()


def load(*argv: str) -> Job:
    return validate(Job, flags(Job, argv, "job"))


def test_flags_are_typed() -> None:
    job = load("--steps", "7", "--inner.rate=0.5", "--inner.pair", "0.2,0.7")
    assert (job.steps, job.inner.rate, job.inner.pair, job.data, job.on) == (7, 0.5, (0.2, 0.7), None, True)
    assert load() == Job()
    with pytest.raises(ValidationError):
        job.inner.rate = 0.3


def test_values_of_several_types() -> None:
    assert load("--inner.size", "8").inner.size == 8
    assert load("--inner.size=[8, 9]").inner.size == (8, 9)
    assert load("--inner.size", "8,9").inner.size == (8, 9)
    assert [load("--inner.slow", word).inner.slow for word in ("true", "false")] == [True, False]
    assert load("--inner.slow").inner.slow is True
    assert load("--no-inner.slow").inner.slow is False
    assert load().inner.slow is None


def test_nothing_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": "7", "data": "x.tar", "INNER": '{"rate": 0.9}', "ON": "false"}.items():
        monkeypatch.setenv(name, value)
    assert load().model_dump() == {
        "steps": 3, "data": None, "on": True, "careful": False,
        "inner": {"rate": 0.1, "pair": (0.0, 1.0), "shards": None, "fast": False, "slow": None, "size": 3},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["data", "inner.shards"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a-{000000..000003}.tar"], "a-{000000..000003}.tar"),
        (["{a,b}/x-{0..3}.tar"], "{a,b}/x-{0..3}.tar"),
        (["x-{1,2}.tar"], "x-{1,2}.tar"),
        (["[0-3].tar"], "[0-3].tar"),
        (["17"], "17"),
        (["a.tar", "b-{1,2}.tar"], ["a.tar", "b-{1,2}.tar"]),
        (['["a.tar", "b.tar"]'], ["a.tar", "b.tar"]),
    ],
)
def test_shards_arrive_as_they_were_written(name: str, values: list[str], expected: object) -> None:
    for argv in ([part for v in values for part in (f"--{name}", v)], [f"--{name}={v}" for v in values]):
        job = load("--inner.rate", "0.5", *argv)
        assert (job.data if name == "data" else job.inner.shards) == expected
        assert job.inner.rate == 0.5  # a sibling in the section stays


@pytest.mark.parametrize("name", ["data", "inner.shards"])
def test_a_shell_may_expand_a_glob(name: str) -> None:
    job = load("--steps", "7", f"--{name}", "a.tar", "b.tar", "c.tar", "--inner.rate", "0.5")
    assert (job.data if name == "data" else job.inner.shards) == ["a.tar", "b.tar", "c.tar"]
    assert (job.steps, job.inner.rate) == (7, 0.5)
    again = load(f"--{name}", "a.tar", "b.tar", f"--{name}=c.tar", "d.tar")
    assert (again.data if name == "data" else again.inner.shards) == ["a.tar", "b.tar", "c.tar", "d.tar"]
    for other in (["--steps", "7", "b.tar"], ["--inner.fast", "b.tar"], ["--data", "a.tar", "--on", "b.tar"]):
        with pytest.raises(SettingsError, match=r"unexpected argument 'b\.tar'\. Give settings as --name VALUE"):
            load(*other)


def test_shards_with_weights() -> None:
    assert load("--data", '{"a.tar": 1, "b.tar": 0.5}').data == {"a.tar": 1.0, "b.tar": 0.5}
    with pytest.raises(SettingsError, match=r"the value of --data is neither JSON nor YAML"):
        load("--data", '{"a.tar": 1')


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        ([], {}),
        (["--inner.fast"], {"fast": True}),
        (["--inner.fast", "true", "--on", "false"], {"fast": True, "on": False}),
        (["--inner.fast=True", "--on=False"], {"fast": True, "on": False}),
        (["--no-on", "--steps", "2"], {"on": False}),
        (["--careful"], {"careful": True}),
        (["--careful", "--steps", "2"], {"careful": True}),
        (["--careful", "false"], {}),
        (["--careful", "half"], {"careful": "half"}),
        (["--careful=half"], {"careful": "half"}),
        (["--no-careful"], {}),
    ],
)
def test_switches_in_every_form(argv: list[str], changed: dict[str, object]) -> None:
    job = load(*argv)
    found = {"on": job.on, "fast": job.inner.fast, "careful": job.careful}
    assert found == {"on": True, "fast": False, "careful": False} | changed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stesp", "1"], "unknown flag --stesp; did you mean '--steps'?"),
        (["--inner.rat", "1"], "did you mean '--inner.rate'?"),
        (["--rate", "1"], "did you mean '--inner.rate'?"),
        (["--step", "1"], "did you mean '--steps'?"),  # no abbreviations
        (["--steps", "many"], "steps: Input should be a valid integer"),
        (["--inner.rate", "2"], "inner.rate: Input should be less than or equal to 1 (got '2')"),
        (["--on", "maybe"], "maybe"),
        (["--on=maybe"], "on: Input should be a valid boolean"),
        (["stray"], "stray"),
    ],
)
def test_refused_with_what_would_work(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["steps", "data"])
def test_a_missing_value_brings_no_suggestion(name: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(f"--{name}")
    assert str(error.value) == f"--{name} expects a value"


def test_every_wrong_value_has_a_line() -> None:
    with pytest.raises(SettingsError) as error:
        validate(Job, {"steps": 0, "inner": {"rate": -1, "fats": True}, "zzz": 1})
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert any("'inner.fats'; did you mean 'inner.fast'?" in line for line in lines)
    assert "unknown setting 'zzz'" in lines
    for words, given in ((["1"], "1"), (["1,2,3"], "1,2,3"), (["a,2,3"], "a,2,3")):
        with pytest.raises(SettingsError, match=rf"^inner\.pair takes float,float \(got {given}\)$"):
            load("--inner.pair", *words)


def test_a_key_with_a_dot_is_answered_with_the_nested_form() -> None:
    with pytest.raises(SettingsError, match=r"give inner=\{'rate': \.\.\.\}"):
        validate(Job, {"inner.rate": 1.0})


def test_suggestions_ignore_capitals_and_are_close() -> None:
    inner = ["inner.rate", "inner.pair", "inner.shards", "inner.fast", "inner.slow", "inner.size"]
    assert list(settings_of(Job)) == ["steps", "data", "on", "careful", *inner]
    assert suggestion("LeJEPA", ["dino", "lejepa"]) == "; did you mean 'lejepa'?"
    assert suggestion("qqqqqq", settings_of(Job)) == ""
    flags = ["--optim.lr", "--optim.min_lr", "--mae.size", "--lejepa.global_size"]
    assert suggestion("--optim.learning_rate", flags) == "; did you mean '--optim.lr'?"
    assert suggestion("--mae.global_size", flags) == "; did you mean '--mae.size'?"
    assert suggestion("--learning_rate", flags) == "; did you mean '--optim.lr'?"
    assert suggestion("--lr", flags) == "; did you mean '--optim.lr'?"


def test_later_layers_win_and_siblings_stay() -> None:
    first = {"steps": 1, "data": {"a.tar": 1}, "inner": {"rate": 0.5, "fast": True}}
    assert merge(Job, first, {"inner": {"rate": 0.7}, "unknown": 3}, {"data": {"b.tar": 2}}) == {
        "steps": 1,
        "data": {"b.tar": 2},  # a setting that is a mapping is replaced, not merged
        "inner": {"rate": 0.7, "fast": True},
        "unknown": 3,
    }
    assert first == {"steps": 1, "data": {"a.tar": 1}, "inner": {"rate": 0.5, "fast": True}}


class Images(Section):
    """Images."""

    short_form = "shards"
    shards: str | list[str] | dict[str, float] | None = None
    """SHARDS"""
    channels: int = 3
    """channels"""


class Copy(Settings):
    """Copy images."""

    source: Positional[Path]
    """folder"""
    others: Positional[list[str]] = Field(default=[])
    """more folders"""
    images: Images = Images()
    move: bool = False
    """move"""


class Timed(Job):
    """A job with a length in steps or hours."""

    alternatives = ("steps", "hours")

    hours: float | None = None
    """length in hours"""
    batch: Derived[int] = derived(ge=1)
    """batch size"""


def test_layers_know_where_each_value_comes_from() -> None:
    file = Layer("file", {"steps": 7, "on": False, "batch": 8, "data": "a.tar", "inner": {"rate": 0.2, "fast": True}})
    own = Layer("flags", {"hours": 2.0, "batch": None, "data": None, "inner": {"rate": 0.3}}, own=True)
    layers = Layers(Timed, file, own)
    job = layers.validated()
    assert (job.steps, job.hours) == (3, 2.0)  # hours hide the steps of the file
    assert (job.batch, job.data, job.inner.rate, job.inner.fast) == (8, None, 0.3, True)
    origins = {"hours": "flags", "on": "file", "batch": "file", "data": "flags", "inner.rate": "flags"}
    assert job.origins == origins | {"inner.fast": "file"}
    assert [layers.of_others(name) for name in ("on", "inner.fast", "data", "slow")] == [False, True, None, None]


def test_derived_values_have_a_reason_and_leave_the_given_ones() -> None:
    job = Layers(Timed, Layer("flags", {"on": False}, own=True)).validated()
    inner = Inner(rate=0.5)
    found = job.derive({"batch": 4, "inner": inner}, {"batch": "a guess"}, otherwise="a default").derive({}, {})
    assert (found.batch, found.inner, found.on) == (4, inner, False)
    assert found.origins == {"on": "flags", "batch": "derived: a guess", "inner.rate": "derived: a default"}
    assert found.given is job
    assert job.batch is None
    with pytest.raises(SettingsError, match="batch: Input should be greater"):
        job.derive({"batch": 0}, {})


@pytest.mark.parametrize("value", ["a.tar", ["a.tar", "b.tar"], {"a.tar": 1.0, "b.tar": 0.5}, None])
def test_a_section_has_a_short_form(value: object, tmp_path: Path) -> None:
    assert validate(Copy, {"source": "x", "images": value}).images == Images.model_validate({"shards": value})
    file = merge(Copy, {"images": value}, flags(Copy, ["x", "--images.channels", "1"], "copy"))
    images = validate(Copy, file).images
    assert (images.shards, images.channels) == (value, 1)
    replaced = merge(Copy, file, flags(Copy, ["x", "--images", "c.tar"], "copy"))
    assert validate(Copy, replaced).images.shards == "c.tar"
    assert validate(Copy, {"source": "x", "images": {}}).images == Images()


def test_arguments_by_position() -> None:
    copy = validate(Copy, flags(Copy, ["--move", "a", "b-{1,2}.tar", "--images.channels=1", "c"], "copy"))
    assert (copy.source, copy.others, copy.move) == (Path("a"), ["b-{1,2}.tar", "c"], True)
    with pytest.raises(SettingsError, match="source is required"):
        validate(Copy, flags(Copy, [], "copy"))
    with pytest.raises(SettingsError, match="unknown flag --source"):
        flags(Copy, ["--source", "a"], "copy")


def test_none_is_a_value_of_open_settings() -> None:
    assert load("--inner.slow", "true", "--inner.slow=None").inner.slow is None
    with pytest.raises(SettingsError, match="steps: Input should be a valid integer"):
        load("--steps", "None")


def test_help_has_one_line_per_setting() -> None:
    text = help_text(Copy, "copy")
    assert text.startswith("usage: copy SOURCE OTHERS [--SETTING VALUE ...]\n\nCopy images.\n")
    lines = [" ".join(line.split()) for line in help_text(Job, "job").splitlines()]
    assert "--inner.rate float a rate (default: 0.1)" in lines
    assert "--inner.size int|int,int one number or two (default: 3)" in lines
    assert "--inner.pair float,float two numbers (default: 0.0,1.0)" in lines
    assert "--on a switch that is on (default: true)" in lines
    assert "--data str|str,...|{str: float} SHARDS" in lines
    assert any(line.startswith("--careful bool|half ") for line in lines)


def test_help_of_a_section_and_short_help() -> None:
    class Long(Job):
        """A job with a short help."""

        first_settings = ("steps", "inner.pair")

    assert help_text(Job, "job", "all") == help_text(Job, "job")
    assert help_text(Long, "job", "all").splitlines()[4:] == help_text(Job, "job").splitlines()[4:]
    of_inner = help_text(Long, "job", "inner")
    assert [line.split()[0] for line in of_inner.splitlines()[5:]] == [f"--inner.{name}" for name in Inner.model_fields]
    assert help_text(Long, "job", "steps").splitlines()[4:] == [
        "settings:", "  --steps int                                  steps (default: 3)"
    ]  # fmt: skip
    assert help_text(Long, "job").splitlines()[4:] == [
        "  --steps int                    steps (default: 3)",
        "  --inner.pair float,float       two numbers (default: 0.0,1.0)",
        "",
        "--help all lists all 10 settings, and --help SECTION lists a section: inner.",
    ]
    with pytest.raises(SettingsError, match="no topic 'iner'; did you mean 'inner'"):
        flags(Job, ["--help", "iner"], "job")


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("steps: 5\ninner: {rate: 0.5}\n")
    assert validate(Job, merge(Job, read_yaml(file), flags(Job, ["--inner.fast"], "job"))).model_dump(
        include={"steps": True, "inner": {"rate", "fast"}}
    ) == {"steps": 5, "inner": {"rate": 0.5, "fast": True}}
    file.write_text("")
    assert read_yaml(file) == {}
    for content, message in (("- 1\n- 2\n", "not a list"), ("a: [", "cannot read")):
        file.write_text(content)
        with pytest.raises(SettingsError, match=message):
            read_yaml(file)
    with pytest.raises(SettingsError, match=r"missing\.yaml"):
        read_yaml(tmp_path / "missing.yaml")


def test_a_wrong_value_ends_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(Job, ["--steps", "4"]).steps == 4
    with pytest.raises(SystemExit) as stop:
        parse(Job, ["--steps", "0"])
    assert stop.value.code == 2
    assert "steps: Input should be greater than or equal to 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        parse(Job, ["--help"])
    assert stop.value.code == 0
    assert "--inner.shards" in capsys.readouterr().out
