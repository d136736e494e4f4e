"""A thousand damaged shards, images and indices; benchmarks/fuzz.py does a hundred thousand."""

import logging

import pytest

from benchmarks import fuzz
from tessera.data.shards import Source


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_a_thousand_cases():
    assert fuzz.fuzz(1000, first_seed=7) == 1000


@pytest.mark.parametrize(
    ("name", "broken", "error"),
    [
        ("decode", lambda *_, **__: {}["damaged"], KeyError),  # an error that is not named
        ("open_shards", lambda path, **_: (_ for _ in ()).throw(fuzz.ShardError("some shard")), fuzz.ShardError),
        ("evaluation_batches", lambda *_, **__: [], AttributeError),
    ],
)
def test_what_is_broken_is_found(monkeypatch, name, broken, error):
    monkeypatch.setattr(fuzz, name, broken)
    with pytest.raises(error):
        fuzz.fuzz(20, first_seed=0)


def test_bytes_of_another_member_are_found(monkeypatch):
    image = Source.image
    monkeypatch.setattr(Source, "image", lambda self, number: image(self, number)[:-1])
    with pytest.raises(AssertionError, match="the bytes of another member"):
        fuzz.fuzz(20, first_seed=0)
