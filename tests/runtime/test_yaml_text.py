"""Settings files of strangers: every content is read in bounded time and memory, or refused by name."""

import os
import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.runtime.settings import SettingsError, read_yaml
from tessera.runtime.yaml_text import MAX_BYTES, YAMLError, parse_yaml

BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 20))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "more than 20000 values"),
        (MERGES, "more than 20000 values"),
        ("a: &a [*a]", "contains itself"),
        ("a: &a {b: *a}", "contains itself"),
        ("[" * 50_000, "nested too deeply"),
        ("a: 2001-12-14", "a is a date. Settings cannot have this type. Put text in quotes"),
        ("a: 2001-99-99", "does not fit its type"),
        ("a: {b: !!binary aGk=}", r"a\.b is a bytes"),
        ("3: x", "the name 3 below '' is not text"),
        ('a: "x\\0y"', "a has a NUL character"),
        ('"x\\0y": 1', r"x\\x00y has a NUL character"),
        ('a: ["x\\ud800"]', "a has half of a surrogate pair"),
        ("a: {b: 1, c: 2, b: 3}", "the name b is given twice"),
        ("a: " + "9" * 10_000, "a number has more than 1000 characters"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: [", "expected the node content"),
    ],
)
def test_wrong_contents_are_named(text: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(YAMLError, match=said):
        parse_yaml(text)
    assert time.process_time() - began < 5


def test_aliases_of_ordinary_size_are_allowed() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    assert parse_yaml("") is None
    assert parse_yaml('a: "\\udcff.tar"') == {"a": "\udcff.tar"}, "a byte of a file name that is no UTF-8"


def test_slow_numbers_take_bounded_time() -> None:
    for end in (":5" * ((MAX_BYTES - 10) // 2), ":5" * (MAX_BYTES // 2 - 10) + ".0", "0" * 200_000):
        began = time.process_time()
        with pytest.raises(YAMLError, match="a number has more than 1000 characters"):
            parse_yaml(f"a: 1{end}")  # a number with base 60, for example
        assert time.process_time() - began < 5


@pytest.mark.parametrize("kind", ["large", "fifo", "folder", "device", "bytes"])
def test_large_files_and_devices_are_refused(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "x.yaml"
    if kind == "large":
        path.write_bytes(b" " * (MAX_BYTES + 1))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(b"a: \xff")
    with pytest.raises(SettingsError, match=f"cannot read the settings file {re.escape(str(path))}: "):
        read_yaml(path)


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from([*"&*!{}[]:,-?|>'\"%@` \n#<", "a", "a: ", "!!int ", "<<: "])).map("".join)
)
@settings(max_examples=500, deadline=None)
def test_any_text_is_plain_yaml_or_refused(text: str) -> None:
    try:
        value = parse_yaml(text)
    except YAMLError:
        return
    assert value == yaml.safe_load(text) or value != value or "nan" in repr(value)
